//! Scans (cumulative sums, products and extremes), compared with plain loops in f64.

use claystone::{DType, Device, Error, Tensor, autograd::gradcheck};
use ndarray::{ArrayD, Axis};

use crate::common::{each_device, f64s};
use crate::harness::{Case, case};
use crate::sorting::equal;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, dim) in [(&[5, 7][..], 1), (&[5, 7], 0), (&[2, 3, 4], -2isize), (&[0, 3], 0), (&[3, 0], 1)] {
        let d = if dim < 0 { shape.len() - dim.unsigned_abs() } else { dim as usize };
        cases.push(case("cumsum").input(shape).arg(dim).with_reference(move |x| vec![along(&x[0], d, cumsum)]));
        cases.push(case("cumprod").input_in(shape, 0.5..1.5).arg(dim).with_reference(move |x| vec![along(&x[0], d, cumprod)]));
        cases.push(case("logcumsumexp").input(shape).arg(dim).with_reference(move |x| vec![along(&x[0], d, logcumsumexp)]));
        for (name, places) in [("cummax", cummax as fn(&[f64]) -> Vec<usize>), ("cummin", cummin)] {
            // Running maxima and minima have no derivative at equal elements, so elements are distinct.
            cases.push(case(name).distinct(shape).arg(dim).with_reference(move |x| {
                let of = |line: &[f64]| places(line).iter().map(|&i| line[i]).collect();
                let at = |line: &[f64]| places(line).iter().map(|&i| i as f64).collect();
                vec![along(&x[0], d, of), along(&x[0], d, at)]
            }));
        }
        for n in [0, 1, 2] {
            // Differences of bools have no f64 reference; a test below checks them.
            for case in [case("diff").floats(), case("diff").integers()] {
                let made = move |x: &[ArrayD<f64>]| vec![(0..n).fold(x[0].clone(), |x, _| differences(&x, d))];
                cases.push(case.input(shape).arg(n).arg(dim).with_reference(made));
            }
        }
    }
    cases
}

fn differences(x: &ArrayD<f64>, d: usize) -> ArrayD<f64> {
    let pairs = x.len_of(Axis(d)).saturating_sub(1);
    let from = |start: usize| x.slice_axis(Axis(d), (start..start + pairs).into()).to_owned();
    from(x.len_of(Axis(d)) - pairs) - from(0)
}

/// Applies `f` to every line along `d`. `f` must keep the length of a line.
fn along(x: &ArrayD<f64>, d: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> ArrayD<f64> {
    let mut out = x.clone();
    for mut line in out.lanes_mut(Axis(d)) {
        let made = f(&line.to_vec());
        line.iter_mut().zip(made).for_each(|(o, v)| *o = v);
    }
    out
}

fn running(line: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let mut so_far = None;
    line.iter()
        .map(|&v| {
            let now = so_far.map_or(v, |s| f(s, v));
            so_far = Some(now);
            now
        })
        .collect()
}

fn cumsum(line: &[f64]) -> Vec<f64> {
    running(line, |a, b| a + b)
}

fn cumprod(line: &[f64]) -> Vec<f64> {
    running(line, |a, b| a * b)
}

fn logcumsumexp(line: &[f64]) -> Vec<f64> {
    (0..line.len())
        .map(|i| {
            let top = line[..=i].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            top + line[..=i].iter().map(|v| (v - top).exp()).sum::<f64>().ln()
        })
        .collect()
}

/// Returns the index of the running extreme at each position. Among equal elements and among NaN, the last is chosen.
fn extreme(line: &[f64], reaches: fn(f64, f64) -> bool) -> Vec<usize> {
    let mut best = 0;
    (0..line.len())
        .map(|i| {
            if line[i].is_nan() || (!line[best].is_nan() && reaches(line[i], line[best])) {
                best = i;
            }
            best
        })
        .collect()
}

fn cummax(line: &[f64]) -> Vec<usize> {
    extreme(line, |a, b| a >= b)
}

fn cummin(line: &[f64]) -> Vec<usize> {
    extreme(line, |a, b| a <= b)
}

/// Returns the numbers rounded to the dtype.
fn rounded(x: ArrayD<f64>, dtype: DType) -> ArrayD<f64> {
    f64s(&Tensor::from_ndarray(x, Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

/// Compares every scan of integers along every dim with plain loops. Results must be equal.
#[track_caller]
fn check(t: &Tensor) {
    let x = f64s(t);
    for d in 0..t.rank() {
        let what = &format!("{:?} strides {:?} along {d} {} on {}", t.shape(), t.strides(), t.dtype(), t.device());
        let dim = d as isize;
        let sums = t.cumsum(dim).unwrap();
        equal(&sums, &rounded(along(&x, d, cumsum), sums.dtype()), &format!("cumsum {what}"));
        for (name, (values, indices), places) in [
            ("cummax", t.cummax(dim).unwrap(), cummax as fn(&[f64]) -> Vec<usize>),
            ("cummin", t.cummin(dim - t.rank() as isize).unwrap(), cummin),
        ] {
            let of = |line: &[f64]| places(line).iter().map(|&i| line[i]).collect();
            equal(&values, &along(&x, d, of), &format!("{name} {what}"));
            let at = |line: &[f64]| places(line).iter().map(|&i| i as f64).collect();
            equal(&indices, &along(&x, d, at), &format!("indices of {name} {what}"));
            assert_eq!((values.dtype(), indices.dtype()), (t.dtype(), DType::I64));
        }
    }
}

fn numbers(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<i64> = (0..n as i64).map(|i| i * 7919 % 11).collect();
    Tensor::from_slice(&values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn scans_of_sizes_around_blocks() {
    each_device(|device| {
        for n in [1, 2, 3, 4, 5, 63, 64, 65, 255, 257, 1023, 1024, 1025, 4099] {
            check(&numbers(&[n], DType::F32, device));
            check(&numbers(&[3, n], DType::F32, device));
            check(&numbers(&[n, 3], DType::F32, device));
        }
        for (n, dtype) in [(2, DType::F16), (4, DType::U8), (5, DType::F64), (64, DType::I32), (65, DType::BF16)] {
            check(&numbers(&[1100, n], dtype, device));
            check(&numbers(&[300, n, 3], dtype, device));
            check(&numbers(&[300, n, 2], dtype, device).narrow(1, 1, n - 1).unwrap().flip(0).unwrap());
        }
        check(&numbers(&[9, 300, 5], DType::F32, device).permute(&[1, 2, 0]).unwrap());
        check(&numbers(&[7, 300], DType::I32, device).narrow(1, 3, 200).unwrap().flip(1).unwrap());
        check(&numbers(&[9], DType::I64, device).expand([40, 9]).unwrap());
    });
}

#[test]
fn long_lines_are_scanned_in_slices() {
    each_device(|device| {
        for dtype in [DType::F32, DType::I64] {
            check(&numbers(&[100_003], dtype, device));
            check(&numbers(&[2, 70_001], dtype, device));
        }
        check(&numbers(&[70_001, 2], DType::F32, device));
        // The first element of each slice is the maximum up to there, and the last NaN is the maximum after it.
        let mut values: Vec<f32> = (0..100_003).map(|i| (i / 5000) as f32).collect();
        values[60_000] = f32::NAN;
        values[90_001] = f32::NAN;
        check(&Tensor::from_slice(&values, values.len(), device).unwrap());
    });
}

/// Scans along lines whose elements are adjacent or not adjacent in memory, over whole lines and in sections.
#[test]
fn scans_of_many_lines_and_partial_lines() {
    for shape in [[2, 9, 65], [3, 64, 127], [1, 700, 64], [2, 5000, 9], [1, 3, 20_011], [2, 601, 129], [5, 33, 1026]] {
        for dtype in [DType::F32, DType::F64, DType::I32] {
            let t = numbers(&shape, dtype, Device::Cpu);
            check(&t);
            if dtype == DType::F32 {
                check(&t.transpose(0, 2).unwrap());
                check(&t.narrow(2, 1, shape[2] - 2).unwrap().narrow(1, 1, shape[1] - 1).unwrap());
                check(&t.flip(1).unwrap());
            }
        }
        // Sums in bf16 of integers that bf16 represents exactly. Then products that become 0 before they would overflow, and
        // products that wrap around.
        let few = numbers(&shape, DType::BF16, Device::Cpu).eq_scalar(3).unwrap().to_dtype(DType::BF16).unwrap();
        let want = along(&f64s(&few), 1, cumsum);
        let rounded = Tensor::from_ndarray(want, Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        equal(&few.cumsum(1).unwrap(), &f64s(&rounded), "sums of halves");
        let large = Tensor::full(shape, 1e30, Device::Cpu).unwrap();
        for d in [1, 2] {
            large.narrow(d, 0, 1).unwrap().zero_().unwrap();
            assert_eq!(large.cumprod(d).unwrap().abs().unwrap().sum((), false).unwrap().item::<f32>().unwrap(), 0.0);
            large.fill_(1e30).unwrap();
        }
        let threes = Tensor::full(shape, 3, (DType::I64, Device::Cpu)).unwrap().cumprod(1).unwrap();
        let mut power = 1i64;
        for i in 0..shape[1].min(100) {
            power = power.wrapping_mul(3);
            let line = threes.narrow(1, i, 1).unwrap().to_vec::<i64>().unwrap();
            assert!(line.iter().all(|&x| x == power), "{i} of {shape:?}");
        }
    }
    let mut values = vec![1f32; 100_003];
    values[40_000] = f32::INFINITY;
    values[90_000] = f32::NEG_INFINITY;
    check(&Tensor::from_slice(&values, values.len(), Device::Cpu).unwrap());
    let side = Tensor::from_slice(&values[..99_990], [9090, 11], Device::Cpu).unwrap();
    check(&side);
}

#[test]
fn scans_support_every_dtype() {
    each_device(|device| {
        for dtype in DType::ALL {
            let t = numbers(&[3, 20], dtype, device);
            let sum = t.cumsum(1).unwrap();
            assert_eq!(sum.dtype(), if dtype.is_float() { dtype } else { DType::I64 });
            equal(&sum, &along(&f64s(&t), 1, cumsum), "cumsum");
            let product = along(&f64s(&t), 0, cumprod);
            let rounded = Tensor::from_ndarray(product, device).unwrap().to_dtype(sum.dtype()).unwrap();
            equal(&t.cumprod(0).unwrap(), &f64s(&rounded), "cumprod");
            check(&t);
        }
        let large = Tensor::full(3, i64::MAX, (DType::I64, device)).unwrap();
        assert_eq!(large.cumsum(0).unwrap().to_vec::<i64>().unwrap(), [i64::MAX, -2, i64::MAX - 2]);
        assert_eq!(large.cumprod(0).unwrap().to_vec::<i64>().unwrap(), [i64::MAX, 1, i64::MAX]);
        // If the sum were accumulated in f16, it would stop at 2048, because 2049 is not an f16 number.
        let halves = Tensor::ones(3000, (DType::F16, device)).unwrap().cumsum(0).unwrap();
        assert_eq!(halves.narrow(0, 2999, 1).unwrap().to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap(), [3000.0]);
    });
}

#[test]
fn long_running_sums_stay_precise() {
    each_device(|device| {
        let values: Vec<f32> = (0..1_000_000i64).map(|i| (i * 7919 % 1009) as f32 / 1009.0).collect();
        let t = Tensor::from_slice(&values, values.len(), device).unwrap();
        let got = t.cumsum(0).unwrap().to_vec::<f32>().unwrap();
        let mut exact = 0.0;
        for (i, (&v, &g)) in values.iter().zip(&got).enumerate() {
            exact += f64::from(v);
            assert!((f64::from(g) - exact).abs() <= 2e-6 * exact.max(1.0), "element {i} on {device}: {g}, not {exact}");
        }
    });
}

#[test]
fn scans_of_special_values() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    each_device(|device| {
        for values in [[1.0, nan, 2.0, nan, 0.0], [-inf, -inf, 3.0, 3.0, inf], [inf, -inf, inf, 0.0, -0.0]] {
            let t = Tensor::from_slice(&values, 5, device).unwrap().to_dtype(DType::F32).unwrap();
            check(&t);
            equal(&t.cumprod(0).unwrap(), &along(&f64s(&t), 0, cumprod), "cumprod");
        }
        let log = |values: &[f32]| {
            let t = Tensor::from_slice(values, values.len(), device).unwrap();
            t.logcumsumexp(0).unwrap().to_vec::<f32>().unwrap()
        };
        let (inf, ln2) = (f32::INFINITY, std::f32::consts::LN_2);
        let got = log(&[-inf, -inf, 200.0, 200.0, inf, 1.0]);
        assert_eq!((&got[..3], &got[4..]), (&[-inf, -inf, 200.0][..], &[inf, inf][..]));
        assert!((got[3] - 200.0 - ln2).abs() < 1e-4);
        assert!(log(&[0.0, f32::NAN, inf])[1..].iter().all(|v| v.is_nan()));
    });
}

#[test]
fn scans_of_empty_tensors_and_scalars() {
    each_device(|device| {
        let empty = Tensor::zeros([3, 0], device).unwrap();
        assert_eq!(empty.cumsum(1).unwrap().shape().dims(), [3, 0]);
        assert_eq!(empty.cummax(0).unwrap().1.shape().dims(), [3, 0]);
        let scalar = Tensor::full((), 3.0, device).unwrap();
        assert_eq!(scalar.cumprod(-1).unwrap().item::<f32>().unwrap(), 3.0);
        assert_eq!(scalar.cummin(0).unwrap().1.item::<i64>().unwrap(), 0);
        assert!(matches!(scalar.cumsum(1), Err(Error::DimOutOfRange { op: "cumsum", .. })));
        let whole = Tensor::ones(2, (DType::I64, device)).unwrap();
        assert!(matches!(whole.logcumsumexp(0), Err(Error::UnsupportedDType { .. })));
        let flags = Tensor::from_slice(&[true, true, false, true], 4, device).unwrap();
        assert_eq!(flags.diff(1, 0).unwrap().to_vec::<bool>().unwrap(), [false, true, true]);
        assert_eq!(flags.diff(5, 0).unwrap().numel(), 0);
    });
}

#[test]
fn scans_have_gradients() {
    each_device(|device| {
        if !device.info().unwrap().fp64 {
            return;
        }
        let values = [0.5, -1.5, 2.0, 0.7, -0.3, 1.1, 0.9, -2.0, 0.4, 1.3, -0.6, 0.8];
        let t = Tensor::from_slice(&values, [3, 4], device).unwrap();
        let weights = Tensor::from_slice(&values, [4, 3], device).unwrap().t().unwrap();
        let weighted = |t: Tensor| t.mul(&weights)?.sum((), false);
        for dim in [0, 1] {
            gradcheck(|x| weighted(x[0].cumsum(dim)?), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].cumprod(dim)?), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].cummax(dim)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].cummin(dim)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].logcumsumexp(dim)?), &[t.detach()], 1e-6).unwrap();
        }
        // The rows contain one zero, two zeros, zeros at both ends, and no zeros.
        let zeros = [0.0, 2.0, 3.0, 0.5, 2.0, 0.0, 0.0, 0.5, 1.5, 2.0, 3.0, 0.0, 0.5, 1.0, 2.0, -1.0];
        let t = Tensor::from_slice(&zeros, [4, 4], device).unwrap();
        gradcheck(|x| x[0].cumprod(1)?.mul(&t.exp()?)?.sum((), false), &[t.detach()], 1e-6).unwrap();
        gradcheck(|x| x[0].diff(2, 1)?.exp()?.sum((), false), &[t.detach()], 1e-6).unwrap();
    });
}
