//! Compares formulas whose numbers are kernel arguments with the same formulas with the numbers compiled in.

use crate::Device;
use crate::backend;
use crate::backend::problem::map::Formulas;
use crate::device::opencl;
use crate::ops::elementwise::map::*;

/// Returns formulas of two inputs and the two numbers `a` and `b`, to be computed in one launch.
fn formulas(e: &[Expr], a: f64, b: f64) -> Vec<Expr> {
    let (x, y) = (&e[0], &e[1]);
    vec![
        x * a + y * b,
        (x - a) / b,
        x.pow(b) + a * y.pow(2.0),
        x % b,
        x.le(a).select(a, x),
        x.clamp(-a, a) * b,
        (x * a).gelu() - (y * b).silu(),
        (x * b).exp().log1p() * a,
        x.lt(b) * a,
    ]
}

fn bits(t: &Tensor) -> Result<Vec<u64>> {
    Ok(t.to_dtype(DType::F64)?.to_vec::<f64>()?.into_iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect())
}

#[test]
fn constants_as_arguments_give_the_bits_of_literals() -> Result<()> {
    let devices = [Device::Cpu].into_iter().chain((0..opencl::count()).map(Device::OpenCL));
    for device in devices {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            if dtype == DType::F64 && device != Device::Cpu && !device.info()?.fp64 {
                continue;
            }
            let n = 1031;
            let number = |i: usize| match i % 61 {
                3 => f64::NAN,
                7 => f64::INFINITY,
                11 => -0.0,
                _ => ((i * 7919) % 1009) as f64 / 97.0 - 4.0,
            };
            let x = Tensor::from_vec((0..n).map(number).collect::<Vec<f64>>(), n, Device::Cpu)?;
            let x = x.to_dtype(dtype)?.to_device(device)?;
            let y = x.flip(&[0])?;
            let leaves = [Expr::input(0), Expr::input(1)];
            for (a, b) in [(0.1, 7.3), (1.0 / 3.0, -2.5), (1e-3, 10.0), (1e39, 1e-40)] {
                let exprs = formulas(&leaves, a, b);
                let outs = |_| exprs.iter().map(|_| Tensor::empty(n, (dtype, device))).collect::<Result<Vec<_>>>();
                let (literal, lifted) = (outs(())?, outs(())?);
                let refs = |of: &[Tensor]| of.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
                let (to, program) = (refs(&literal), Program::new(&exprs));
                let outputs: Vec<&Tensor> = to.iter().collect();
                let (inputs, params) = (&[&x, &y], Params::default());
                let problem = Formulas { op: "test", inputs, params, program: &program, outputs: &outputs };
                backend::launch(outputs.iter().copied(), |b| b.map(&problem))?;
                Tensor::map_into(&[&x, &y], &[], &lifted.iter().collect::<Vec<_>>(), |e, _| formulas(e, a, b))?;
                for (i, (right, got)) in literal.iter().zip(&lifted).enumerate() {
                    assert_eq!(bits(got)?, bits(right)?, "formula {i} of {a} and {b}, {dtype} on {device}");
                }
                // Each formula is also computed alone, because the CPU then uses specialised functions.
                for i in (0..exprs.len()).filter(|_| device == Device::Cpu) {
                    let one = Tensor::map(&[&x, &y], |e| formulas(e, a, b).remove(i))?;
                    assert_eq!(bits(&one)?, bits(&literal[i])?, "formula {i} of {a} and {b}, {dtype} alone");
                }
            }
        }
    }
    Ok(())
}
