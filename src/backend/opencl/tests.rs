//! Compares the generated OpenCL C and the prelude with the CPU backend, on every OpenCL device that is present.

use crate::backend::cpu::convert::store_tile;
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
use crate::backend::cpu::scalar::Number;
use crate::backend::opencl::kernels::with_prelude;
use crate::device::opencl;
use crate::device::opencl::{Arg, ClBuffer, ClDevice};
use crate::expr::program::Program;
use crate::expr::{Binary, Op, Unary};
use crate::{Compute, DType, Error, Result};
use crate::{Expr, Seed};

fn devices() -> impl Iterator<Item = &'static ClDevice> {
    (0..opencl::count()).map(|i| opencl::open(i).unwrap())
}

fn buffer(device: &ClDevice, bytes: &[u8]) -> ClBuffer {
    let buffer = device.create_buffer(bytes.len()).unwrap();
    device.commit(&buffer).unwrap();
    device.write(bytes, (&buffer, 0)).unwrap();
    buffer
}

fn on_cpu<C: Number>(program: &Program, inputs: &[&[C]], seeds: &[Seed], len: usize) -> Vec<Vec<C>> {
    let mut outs = vec![vec![C::from_i32(0); len]; program.outputs()];
    let mut scratch = Scratch::new();
    for first in (0..len).step_by(TILE) {
        let n = TILE.min(len - first);
        let inputs: Vec<_> = inputs.iter().map(|x| TileIn::Slice(&x[first..])).collect();
        let tile = Tile { inputs: &inputs, scalars: &[], seeds, first: first as u64, len: n };
        let mut slices: Vec<&mut [C]> = outs.iter_mut().map(|o| &mut o[first..first + n]).collect();
        program.eval_tile(&tile, &mut scratch, &mut slices);
    }
    outs
}

/// Calls the program's function once for each element. The outputs follow each other in one buffer.
fn on_device<C: Number>(
    device: &ClDevice,
    program: &Program,
    inputs: &[&[C]],
    seeds: &[Seed],
    len: usize,
) -> Result<Vec<Vec<C>>> {
    let (c, n) = (C::COMPUTE.cl_name(), program.outputs());
    let mut call: Vec<String> = (0..inputs.len()).map(|i| format!("x[{i} * len + i]")).collect();
    call.extend((0..seeds.len()).map(|i| format!("seeds[{}], seeds[{}]", 2 * i, 2 * i + 1)));
    call.extend((!seeds.is_empty()).then(|| "i".into()));
    call.extend(program.can_fault(C::COMPUTE).then(|| "fault".into()));
    call.extend((0..n).map(|j| format!("o + {j}")));
    let source = format!(
        "{}
        __kernel void k(__global const {c}* x, __global const ulong* seeds, __global {c}* out, ulong len, \
                        __global int* fault) {{
            ulong i = get_global_id(0);
            if (i >= len) return;
            {c} o[{n}];
            f({});
            for (int j = 0; j < {n}; j++) out[j * len + i] = o[j];
        }}",
        program.emit(C::COMPUTE, "f"),
        call.join(", ")
    );
    let kernel = device.build("test", &with_prelude(&source), "k")?;
    let seeds: Vec<u64> = seeds.iter().flat_map(|s| [s.key, s.stream]).chain([0]).collect();
    let columns = inputs.concat().into_iter().chain([C::from_i32(0)]).collect::<Vec<_>>();
    let (x, s) = (buffer(device, bytemuck::cast_slice(&columns)), buffer(device, bytemuck::cast_slice(&seeds)));
    let mut out = vec![C::from_i32(0); n * len];
    let y = buffer(device, bytemuck::cast_slice(&out));
    let args = [Arg::Buffer(&x), Arg::Buffer(&s), Arg::Buffer(&y), Arg::U64(len as u64), device.faults()];
    device.launch(&kernel, &args, &[len], &[64])?;
    device.read((&y, 0), bytemuck::cast_slice_mut(&mut out))?;
    Ok(out.chunks(len).map(<[C]>::to_vec).collect())
}

const UNARIES: [Unary; 21] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Floor,
    Unary::Ceil,
    Unary::Round,
    Unary::Trunc,
    Unary::Sqrt,
    Unary::Exp,
    Unary::Log,
    Unary::Log2,
    Unary::Log10,
    Unary::Expm1,
    Unary::Log1p,
    Unary::Sin,
    Unary::Cos,
    Unary::Tanh,
    Unary::Erf,
    Unary::Erfc,
    Unary::Lgamma,
    Unary::Atan,
    Unary::Sigmoid,
];

const BINARIES: [Binary; 12] = [
    Binary::Add,
    Binary::Sub,
    Binary::Mul,
    Binary::Div,
    Binary::Rem,
    Binary::Pow,
    Binary::Max,
    Binary::Min,
    Binary::Lt,
    Binary::Le,
    Binary::Eq,
    Binary::Copysign,
];

const INTEGERS: [Binary; 6] = [Binary::And, Binary::Or, Binary::Xor, Binary::Shl, Binary::Shr, Binary::Gcd];

/// Returns an expression for each floating-point primitive, and expressions with a selection and a constant.
fn all_primitives() -> Vec<Expr> {
    let (x, y) = (Expr::input(0), Expr::input(1));
    let unary = UNARIES.iter().map(|&u| Expr::unary(u, x.clone()));
    let binary = BINARIES.iter().map(|&b| Expr::binary(b, x.clone(), y.clone()));
    unary.chain(binary).chain([y.select(&x, 1.0 / 3.0), Expr::constant(f64::NEG_INFINITY)]).collect()
}

fn pairs() -> (Vec<f64>, Vec<f64>) {
    let special = [0.0, -0.0, 0.5, -0.5, 1.0, 1.5, -2.5, 3.0, 1e-30, 1e30, f64::NAN, f64::INFINITY, -f64::INFINITY];
    let wave = (0..60).map(|i| (f64::from(i) - 30.0) * 0.373);
    let values: Vec<f64> = special.into_iter().chain(wave).collect();
    values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b))).unzip()
}

fn close(got: f64, right: f64, tolerance: f64) -> bool {
    got == right || (got.is_nan() && right.is_nan()) || (got - right).abs() <= tolerance * right.abs().max(1e-30)
}

#[test]
fn floating_point_primitives_are_close_to_the_cpus() {
    let exprs = all_primitives();
    let program = Program::new(&exprs);
    let (a, b) = pairs();
    let exact = on_cpu(&program, &[&a, &b], &[], a.len());
    let (a32, b32): (Vec<f32>, Vec<f32>) =
        (a.iter().map(|&x| x as f32).collect(), b.iter().map(|&x| x as f32).collect());
    let (a_wide, b_wide): (Vec<f64>, Vec<f64>) =
        (a32.iter().map(|&x| x.into()).collect(), b32.iter().map(|&x| x.into()).collect());
    let exact32 = on_cpu(&program, &[&a_wide, &b_wide], &[], a.len());
    let check = |what: &str, got: &[Vec<f64>], exact: &[Vec<f64>], tolerance: f64| {
        for (j, expr) in exprs.iter().enumerate() {
            for i in 0..a.len() {
                let (got, right) = (got[j][i], exact[j][i]);
                let right = if tolerance > 1e-9 { f64::from(right as f32) } else { right };
                // near the zeros and the poles of the logarithm of gamma, only few digits agree
                let rough = matches!(expr.op(), Op::Unary(Unary::Lgamma)) && right.is_finite();
                let near = close(got, right, tolerance)
                    || (rough && (got - right).abs() <= 10.0 * tolerance * right.abs().max(1.0));
                assert!(near, "{what}: {expr:?} at {}, {}: {got} {right}", a[i], b[i]);
            }
        }
    };
    let widen =
        |v: Vec<Vec<f32>>| v.into_iter().map(|v| v.into_iter().map(f64::from).collect()).collect::<Vec<Vec<_>>>();
    check("tiles in f32", &widen(on_cpu(&program, &[&a32, &b32], &[], a.len())), &exact32, 3e-7);
    for device in devices() {
        let got = on_device(device, &program, &[&a32, &b32], &[], a.len()).unwrap();
        check(&device.info().name, &widen(got), &exact32, 2e-6);
        if device.info().fp64 {
            let got = on_device(device, &program, &[&a, &b], &[], a.len()).unwrap();
            check(&device.info().name, &got, &exact, 1e-14);
        }
    }
}

#[test]
fn integer_primitives_equal_the_cpus() {
    let bits = INTEGERS.iter().map(|&b| Expr::binary(b, Expr::input(0), Expr::input(1)));
    let exprs: Vec<Expr> = all_primitives()
        .into_iter()
        .filter(|e| !Program::new(std::slice::from_ref(e)).needs_float())
        .chain(bits)
        .collect();
    assert!(exprs.len() >= 23);
    let program = Program::new(&exprs);
    let values = [0, 1, -1, 2, -2, 7, -7, 1000, i64::MAX, i64::MIN, 1 << 40, -(1 << 33) + 1, 63];
    let all = || values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b)));
    let (a, b): (Vec<i64>, Vec<i64>) = all().filter(|&(_, b)| b != 0).unzip();
    let right = on_cpu(&program, &[&a, &b], &[], a.len());
    for device in devices() {
        assert_eq!(on_device(device, &program, &[&a, &b], &[], a.len()).unwrap(), right);
        let (a, b): (Vec<i64>, Vec<i64>) = all().unzip();
        let error = on_device(device, &program, &[&a, &b], &[], a.len()).unwrap_err();
        assert!(matches!(error, Error::DivisionByZero { .. }), "{error}");
    }
}

#[test]
fn random_numbers_have_the_cpus_bits() {
    let seeds = [Seed { key: 0xdead_beef_0123_4567, stream: 1 << 33 }, Seed { key: 5, stream: 6 }];
    let program = Program::new(&[Expr::uniform(0), Expr::normal(0), Expr::normal(1), Expr::bits(1)]);
    let len = 1_000_003;
    let right = on_cpu::<f32>(&program, &[], &seeds, len);
    for device in devices() {
        let got = on_device::<f32>(device, &program, &[], &seeds, len).unwrap();
        for (g, r) in got.iter().flatten().zip(right.iter().flatten()) {
            assert_eq!(g.to_bits(), r.to_bits(), "{}", device.info().name);
        }
        let bits = Program::new(&[Expr::bits(0)]);
        let got = on_device::<i64>(device, &bits, &[], &seeds[..1], 1001).unwrap();
        assert_eq!(got, on_cpu::<i64>(&bits, &[], &seeds[..1], 1001));
    }
}

/// Returns numbers at and around the limits of all conversions.
fn edges() -> Vec<f64> {
    let mut v =
        vec![0.0, -0.0, 0.4, -0.6, 0.5, 1.5, 2.5, 255.0, 255.9, 256.0, -1.0, 300.7, 65504.0, 65520.0, 1e-8, 6e-5];
    v.extend([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 2147483648.0, -2147483649.0, 4294967295.0, 4294967296.0]);
    v.extend([9.3e18, -9.3e18, 1.00390625, 1.01171875, 3.3895e38, 1e-40, 1.5e-45, 2049.0, 16777217.0]);
    v
}

/// Stores values as `dtype` on the device and loads them again. Returns the stored bytes and the loaded values, as bytes.
fn stored_and_loaded<C: Number>(device: &ClDevice, dtype: DType, values: &[C]) -> (Vec<u8>, Vec<u8>) {
    let class = ["I64", "F32", "F64"][C::COMPUTE as usize];
    let natural = dtype.compute();
    let source = format!(
        "__kernel void k(__global const {}* x, __global {dtype}_t* p, __global {}* y, ulong n) {{
            ulong i = get_global_id(0);
            if (i >= n) return;
            store_{dtype}_{class}(p, i, x[i]);
            y[i] = load_{dtype}(p, i);
        }}",
        C::COMPUTE.cl_name(),
        natural.cl_name(),
    );
    let n = values.len();
    let (mut stored, mut loaded) = (vec![0; n * dtype.size()], vec![0; n * natural.dtype().size()]);
    let x = buffer(device, bytemuck::cast_slice(values));
    let (p, y) = (buffer(device, &stored), buffer(device, &loaded));
    let kernel = device.build("test", &with_prelude(&source), "k").unwrap();
    let args = [Arg::Buffer(&x), Arg::Buffer(&p), Arg::Buffer(&y), Arg::U64(n as u64)];
    device.launch(&kernel, &args, &[n], &[64]).unwrap();
    device.read((&p, 0), &mut stored).unwrap();
    device.read((&y, 0), &mut loaded).unwrap();
    (stored, loaded)
}

#[test]
fn conversions_equal_the_cpus() {
    fn check<C: Number>(device: &ClDevice, values: &[C]) {
        for dtype in DType::ALL {
            if (dtype == DType::F64 || C::COMPUTE == Compute::F64) && !device.info().fp64 {
                continue;
            }
            let (stored, loaded) = stored_and_loaded(device, dtype, values);
            let words = &mut vec![0u64; values.len()];
            let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(words)[..stored.len()];
            store_tile(dtype, values, bytes, 0, 1);
            let mut aligned = vec![0u64; values.len()];
            let device_bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut aligned)[..stored.len()];
            device_bytes.copy_from_slice(&stored);
            // compared as f64 values, because the bits of NaNs may differ
            let read = |bytes: &[u8]| {
                let mut out = vec![0.0f64; values.len()];
                crate::backend::cpu::convert::load_tile(dtype, bytes, 0, 1, &mut out);
                out
            };
            let (got, right) = (read(device_bytes), read(bytes));
            let loaded: Vec<f64> = match dtype.compute() {
                Compute::F32 => bytemuck::pod_collect_to_vec::<u8, f32>(&loaded).iter().map(|&x| x.into()).collect(),
                Compute::F64 => bytemuck::pod_collect_to_vec::<u8, f64>(&loaded),
                Compute::I64 => bytemuck::pod_collect_to_vec::<u8, i64>(&loaded).iter().map(|&x| x as f64).collect(),
            };
            for (i, v) in values.iter().enumerate() {
                assert!(close(got[i], right[i], 0.0), "{} stores {v:?} as {dtype}: {}", device.info().name, got[i]);
                assert!(close(loaded[i], right[i], 0.0), "{} loads {dtype}: {}", device.info().name, loaded[i]);
            }
        }
    }
    for device in devices() {
        check::<f32>(device, &edges().iter().map(|&x| x as f32).collect::<Vec<_>>());
        check::<i64>(device, &edges().iter().map(|&x| x as i64).collect::<Vec<_>>());
        if device.info().fp64 {
            check::<f64>(device, &edges());
        }
    }
}
