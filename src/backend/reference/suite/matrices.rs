//! Tests of matrix products, reductions, concatenation, and `tril` and `triu`.

use super::{Side, Suite, VIEWS, View, factors, numbers, specials};
use crate::backend::problem::gemm::Gemm;
use crate::backend::problem::quantized::{Dequantize, PackedRows, QuantizedGemm};
use crate::backend::problem::reduction::{Combination, Element, Reduction, Rescaled, Rule};
use crate::dtype::quant::QuantFormat;
use crate::expr::Expr;
use crate::ops::quantized::QuantizedTensor;
use crate::{DType, Device, Result, Shape, Tensor};

/// Compares `[batch, m, k]` times `[k, n]` or `[batch, k, n]`, each with one of the layouts `views`. `follows` adds an epilogue with a factor and a
/// bias.
fn compare_product(
    suite: &mut Suite,
    (views, dtype): ([View; 2], DType),
    [batch, m, k, n]: [usize; 4],
    shared: bool,
    follows: bool,
) -> Result<()> {
    let a = suite.tensor(views[0], &[batch, m, k], dtype, numbers)?;
    let b = suite.tensor(views[1], &[batch, k, n][usize::from(shared)..], dtype, numbers)?;
    let bias = suite.tensor(View::Odd, &[n], dtype, numbers)?;
    let shape = Shape::from([batch, m, n]);
    let epilogue = match follows {
        true => vec![(Expr::input(0) * Expr::scalar(0) + Expr::input(1)).relu(), Expr::input(0)],
        false => vec![Expr::input(0)],
    };
    let dtypes = vec![dtype; epilogue.len()];
    suite.compare(format!("{batch} x {m} x {k} x {n}, {views:?}, {shared}, {follows}"), dtype, k.max(1), |side| {
        let (a, b, bias) = (side.upload(&a)?, side.upload(&b)?, side.upload(&bias)?);
        let outs = dtypes.iter().map(|&t| side.alloc_output(&shape, t)).collect::<Result<Vec<_>>>()?;
        let extras = if follows { vec![&bias] } else { vec![] };
        let g = Gemm {
            op: "matmul",
            a: &a,
            b: &b,
            epilogue: &epilogue,
            extras: &extras,
            scalars: &[3.into()],
            out: None,
            dtypes: &dtypes,
            sums: None,
        };
        side.backend.gemm(&g, &outs)?;
        Ok(Some(outs))
    })
}

/// Compares products and elements of a weight with `[n, k]` elements, of which two parts are used, in one format after another.
pub(super) fn quantized_gemm(suite: &mut Suite) -> Result<()> {
    let names = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"];
    for name in names.into_iter().chain(["g4_32", "g4_128_zero", "g4_row_min", "g8_64", "g8_128_min", "g8_row_zero"]) {
        let format: QuantFormat = name.parse()?;
        let (n, k) = (13, 256);
        let mut bytes: Vec<u8> = (0..n * format.row_bytes(k)?).map(|_| suite.random.next_below(256) as u8).collect();
        // Numbers of f16 from 2^-7 to 2, or zero points below 256.
        for block in bytes.chunks_exact_mut(format.block_bytes(k)) {
            for plane in format.planes(k).iter().filter(|plane| plane.bytes <= 4) {
                let halves = block[plane.at..][..plane.bytes].chunks_exact_mut(2).enumerate();
                halves.for_each(|(i, half)| {
                    half[1] = if name.ends_with("zero") && i == 1 { 0 } else { 0x20 + half[1] % 32 }
                });
            }
        }
        let whole = |side: &Side| -> Result<PackedRows> {
            let bytes = QuantizedTensor::arrange(&bytes, k, format, side.device)?;
            let bytes = Tensor::from_bytes(&bytes, [n, format.row_bytes(k)?], (DType::U8, side.device))?;
            Ok(PackedRows { bytes, format, columns: k, rows: 0..n })
        };
        let index = Tensor::from_slice(&[10i32, 0, 3, 10], 4, Device::Cpu)?;
        for dtype in [DType::F32, DType::BF16] {
            suite.compare(format!("elements of {name}"), dtype, 0, |side| {
                let (all, index) = (whole(side)?.narrow(2, 11), side.upload(&index)?);
                let outs = [side.alloc_output([11, k], dtype)?, side.alloc_output([4, k], dtype)?];
                for (index, out) in [None, Some(&index)].into_iter().zip(&outs) {
                    side.backend.dequantize(&Dequantize { op: "dequantize", weight: &all, index }, out)?;
                }
                Ok(Some(outs.into()))
            })?;
        }
        // Activations of -1, 0 and 1 have no rounding error in 16 bits.
        let three = |random: &mut super::Random| random.next_below(3) as f64 - 1.0;
        let epilogue = [(Expr::input(0) * Expr::scalar(0) + Expr::input(1)).relu()];
        for (m, dtype) in [(1, DType::F32), (2, DType::F16), (3, DType::F32), (8, DType::BF16)] {
            let (x, bias) =
                (suite.tensor(View::Plain, &[m, k], dtype, three)?, suite.tensor(View::Odd, &[11], dtype, numbers)?);
            suite.compare(format!("{m} rows times {name}"), dtype, k, |side| {
                let (all, x, bias) = (whole(side)?, side.upload(&x)?, side.upload(&bias)?);
                let (parts, out) = ([all.narrow(9, 4), all.narrow(1, 7)], side.alloc_output([m, 11], dtype)?);
                let (extras, scalars) = (&[&bias][..], &[0.5.into()][..]);
                let g = QuantizedGemm { op: "linear", x: &x, parts: &parts, epilogue: &epilogue, extras, scalars };
                let done = side.backend.quantized_gemm(&g, std::slice::from_ref(&out))?;
                Ok(done.then(|| vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn gemm(suite: &mut Suite) -> Result<()> {
    use DType::{BF16, F16, F32, F64, I64};
    let plain = [View::Plain; 2];
    for sizes in
        [[1, 1, 1, 1], [1, 1, 0, 3], [1, 17, 33, 7], [1, 64, 64, 64], [1, 65, 130, 31], [1, 3, 513, 2], [1, 129, 5, 1]]
    {
        compare_product(suite, (plain, F32), sizes, true, false)?;
    }
    for (views, dtype) in [
        ([View::Odd, View::Gapped], F32),
        ([View::Gapped, View::Odd], F16),
        (plain, BF16),
        (plain, F64),
        ([View::Odd; 2], I64),
    ] {
        suite.runs_on_opencl = matches!(dtype, F32 | F16);
        compare_product(suite, (views, dtype), [2, 13, 65, 37], false, false)?;
        compare_product(suite, (views, dtype), [3, 5, 7, 11], true, true)?;
    }
    suite.runs_on_opencl = true;
    // Row sums of the left matrix. A backend whose kernel does not compute row sums counts as declining.
    let (a, b) =
        (suite.tensor(View::Plain, &[37, 61], F32, numbers)?, suite.tensor(View::Plain, &[61, 43], F32, numbers)?);
    suite.compare("sums of rows", F32, 61, |side| {
        // Product and row sums are in one storage, like the gradients of an optimiser.
        let both = side.alloc_output(37 * 43 + 37, F32)?;
        let part = |start, len, shape: Shape| -> Result<Tensor> {
            let layout = both.layout.narrow("matmul", 0, start, len)?;
            Ok(both.with_layout(layout.reshape(&shape).expect("in one piece")))
        };
        let (out, sums) = (part(0, 37 * 43, [37, 43].into())?, part(37 * 43, 37, 37.into())?);
        let (a, b, epilogue) = (side.upload(&a)?, side.upload(&b)?, [Expr::input(0)]);
        let plain = Gemm::plain("matmul", &a, &b, &epilogue, &F32);
        let made = side.backend.gemm(&Gemm { sums: Some(&sums), ..plain }, &[out.detach()])?;
        Ok(made.then(|| vec![out, sums]))
    })
}

pub(super) fn reduce(suite: &mut Suite) -> Result<()> {
    use Combination::{Add, ArgMax, ArgMin, Max, Min, Mul};
    use DType::{F16, F32, F64, I8, I32, I64};
    let of = |combination, element, finish, counts| Rule { combination, element, finish, rescaled: None, counts };
    let square = || Element::Formula(Expr::input(0).square());
    let mean = Some(Expr::input(0) / Expr::scalar(0));
    let rules = [
        (Rule { rescaled: Some(Rescaled::Mean), ..of(Add, Element::Identity, mean, false) }, F32, F32),
        (Rule { rescaled: Some(Rescaled::Norm), ..of(Add, square(), Some(Expr::input(0).sqrt()), false) }, F16, F16),
        (of(Add, Element::Identity, None, false), I32, I64),
        (of(Add, Element::NonZero, None, true), F32, I64),
        (of(Mul, Element::Identity, None, false), F64, F64),
        (of(Max, Element::Identity, None, false), F32, F32),
        (of(Min, Element::Identity, None, false), I8, I8),
        (of(ArgMax, Element::Identity, None, false), F32, I64),
        (of(ArgMin, Element::Identity, None, false), I32, I64),
    ];
    for (id, (rule, dtype, to)) in Box::leak(Box::new(rules)).iter().enumerate() {
        let number = match rule.combination {
            Mul => factors,
            Add if rule.element != Element::NonZero => numbers,
            _ => specials,
        };
        let shapes: [(View, &[usize], &[bool]); 6] = [
            (View::Plain, &[3, 511], &[false, true]),
            (View::Odd, &[5, 7, 64], &[true, false, true]),
            (View::Plain, &[129, 65], &[true, false]),
            (View::Gapped, &[2, 31, 9], &[false, true, false]),
            (View::Odd, &[1, 13], &[true, true]),
            (View::Plain, &[70_001], &[true]),
        ];
        // Most rules are tested on only two shapes, because OpenCL compiles a program for each number of dims.
        let count = if matches!(id, 0 | 7) { shapes.len() } else { 2 };
        suite.runs_on_opencl = matches!(id, 0 | 1 | 3 | 7);
        for (view, dims, mask) in shapes.into_iter().take(count) {
            let x = suite.tensor(view, dims, *dtype, number)?;
            let kept: Vec<usize> = dims.iter().zip(mask).filter(|(_, r)| !**r).map(|(&n, _)| n).collect();
            let n = x.numel() / kept.iter().product::<usize>();
            let exact = matches!(rule.combination, Max | Min | ArgMax | ArgMin) || !to.is_float();
            suite.compare(
                format!("{rule:?} of {view:?} {dims:?}, {mask:?}"),
                *dtype,
                if exact { 0 } else { n },
                |side| {
                    let (x, out) = (side.upload(&x)?, side.alloc_output(&kept[..], *to)?);
                    let number = n as f64;
                    side.backend.reduce(&Reduction { op: "reduce", rule, x: &x, mask, out: &out, number })?;
                    Ok(Some(vec![out]))
                },
            )?;
        }
    }
    Ok(())
}

pub(super) fn join(suite: &mut Suite) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::U8, DType::I64] {
        for view in VIEWS {
            for d in 0..3 {
                let dims =
                    |n: usize| -> Vec<usize> { (0..3).map(|i| if i == d { n } else { [3, 5, 17][i] }).collect() };
                let parts = [7, 0, 1, 64].map(|n| suite.tensor(view, &dims(n), dtype, specials));
                let parts = parts.into_iter().collect::<Result<Vec<Tensor>>>()?;
                suite.compare(format!("dim {d}, {view:?}"), dtype, 0, |side| {
                    let parts = parts.iter().map(|t| side.upload(t)).collect::<Result<Vec<_>>>()?;
                    let out = side.alloc_output(dims(72), dtype)?;
                    let done = side.backend.join(&out, &parts.iter().collect::<Vec<_>>(), d)?;
                    Ok(done.then_some(vec![out]))
                })?;
            }
        }
        // Many tensors of one element each, of which OpenCL copies several in one launch.
        for (count, view) in [(4, VIEWS[0]), (24, VIEWS[1]), (61, VIEWS[1])] {
            let all = suite.tensor(view, &[count], dtype, specials)?;
            suite.compare(format!("{count} numbers, {view:?}"), dtype, 0, |side| {
                let all = side.upload(&all)?;
                let parts = (0..count).map(|i| all.narrow(0, i, 1)).collect::<Result<Vec<_>>>()?;
                let out = side.alloc_output(vec![count], dtype)?;
                let done = side.backend.join(&out, &parts.iter().collect::<Vec<_>>(), 0)?;
                Ok(done.then_some(vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn tril_triu(suite: &mut Suite) -> Result<()> {
    for (dims, dtype) in
        [(&[1, 1][..], DType::F32), (&[2, 7, 31], DType::F16), (&[3, 65, 5], DType::I64), (&[513, 2], DType::U8)]
    {
        for view in VIEWS {
            let x = suite.tensor(view, dims, dtype, specials)?;
            for (from, to) in [(isize::MIN, 0), (1, isize::MAX), (-2, 3), (3, 3), (5, 2), (isize::MIN, isize::MAX)] {
                suite.compare(format!("{view:?} {dims:?}, {from}..{to}"), dtype, 0, |side| {
                    Ok(side.backend.tril_triu(&side.upload(&x)?, from, to)?.map(|out| vec![out]))
                })?;
            }
        }
    }
    Ok(())
}
