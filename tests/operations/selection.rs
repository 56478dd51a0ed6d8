//! What the CPU selects, counts and numbers in pieces and on several threads, at the edges of these.

use claystone::{DType, Device, Tensor};
use ndarray::ArrayD;

use crate::common::{each_device, f64s};
use crate::sorting::{along, equal, numbers, sorted};

const CPU: Device = Device::Cpu;

/// Ties, zeros of both signs and, of floats, infinities and NaN.
fn special(shape: &[usize], dtype: DType, nans: usize) -> Tensor {
    let t = numbers(shape, dtype, CPU);
    if !dtype.is_float() {
        return t;
    }
    let values = f64s(&t).into_iter().enumerate().map(|(i, v)| match i % 97 {
        k if k < nans => f64::NAN,
        50 => -0.0,
        51 => f64::INFINITY,
        52 => f64::NEG_INFINITY,
        _ => v,
    });
    Tensor::from_slice(&values.collect::<Vec<_>>(), shape, CPU).unwrap().to_dtype(dtype).unwrap()
}

/// The element of every line at `place` in ascending order, and its index.
fn is_at(got: (Tensor, Tensor), x: &ArrayD<f64>, d: usize, place: impl Fn(&[f64]) -> usize, what: &str) {
    let index = |line: &[f64]| sorted(line, false)[place(line)];
    equal(&got.1, &along(x, d, |line| vec![index(line) as f64]), what);
    equal(&got.0, &along(x, d, |line| vec![line[index(line)]]), what);
}

fn check(t: &Tensor, counts: &[usize]) {
    let x = f64s(t);
    for d in 0..t.rank() {
        let n = t.shape().dims()[d];
        let dim = d as isize;
        for &k in counts.iter().filter(|&&k| k <= n) {
            for largest in [true, false] {
                let what =
                    &format!("the first {k} of {:?} {:?} {} along {d}, {largest}", t.shape(), t.strides(), t.dtype());
                let (values, indices) = t.topk(k, dim, largest).unwrap();
                let first = |line: &[f64]| sorted(line, largest)[..k].to_vec();
                equal(&indices, &along(&x, d, |line| first(line).iter().map(|&i| i as f64).collect()), what);
                equal(&values, &along(&x, d, |line| first(line).iter().map(|&i| line[i]).collect()), what);
            }
            is_at(t.kthvalue(k, dim, true).unwrap(), &x, d, |_| k - 1, "kthvalue");
        }
        let nans = |line: &[f64]| line.iter().filter(|v| v.is_nan()).count();
        let middle = |line: &[f64]| if nans(line) > 0 { n - nans(line) } else { (n - 1) / 2 };
        is_at(t.median(dim, true).unwrap(), &x, d, middle, "median");
        is_at(t.nanmedian(dim, true).unwrap(), &x, d, |line| (n - 1).saturating_sub(nans(line)) / 2, "nanmedian");
    }
}

#[test]
fn the_first_of_lines_are_those_of_a_sort() {
    for dtype in DType::ALL {
        for nans in [0, 3, 97] {
            check(&special(&[3, 200], dtype, nans), &[1, 2, 8, 31, 32, 33, 99, 100, 101, 199, 200]);
        }
    }
    let t = special(&[70, 90, 3], DType::F32, 1);
    for t in [&t, &t.permute(&[2, 0, 1]).unwrap(), &t.narrow(1, 7, 40).unwrap().flip(1).unwrap()] {
        check(t, &[1, 3, 40]);
    }
    for n in [1, 15, 16, 17, 2047, 2048, 2049, 16385, 100_003] {
        check(&special(&[n], DType::F32, 2), &[1, 8, 32, 33, 5000]);
        check(&special(&[n], DType::I64, 0), &[1, 33]);
    }
    // In descending order every one is among the first until the end; in ascending order none after them.
    let falling = Tensor::arange(100_000, 0, -1, CPU).unwrap();
    assert_eq!(falling.topk(3, 0, false).unwrap().1.to_vec::<i64>().unwrap(), [99_999, 99_998, 99_997]);
    assert_eq!(falling.topk(3, 0, true).unwrap().1.to_vec::<i64>().unwrap(), [0, 1, 2]);
    assert_eq!(falling.topk(0, 0, true).unwrap().0.numel(), 0);
    let ends = Tensor::from_slice(&[i64::MAX, i64::MIN, 0, i64::MIN + 1, i64::MAX - 1], 5, CPU).unwrap();
    assert_eq!(ends.topk(2, 0, true).unwrap().0.to_vec::<i64>().unwrap(), [i64::MAX, i64::MAX - 1]);
    assert_eq!(ends.median(0, false).unwrap().0.item::<i64>().unwrap(), 0);
}

#[test]
fn places_of_what_is_not_zero_around_blocks() {
    for shape in [&[1][..], &[255], &[256], &[257], &[16_384], &[16_385], &[50_001], &[1, 1], &[400, 300], &[20_000, 2]]
        .into_iter()
        .chain([&[3, 5000, 7][..], &[2, 3, 4, 5], &[33_000, 1, 2]])
    {
        for dtype in [DType::Bool, DType::F32, DType::U8, DType::I64] {
            let t = numbers(shape, dtype, CPU);
            let t = if dtype == DType::Bool { numbers(shape, DType::I64, CPU).gt_scalar(7).unwrap() } else { t };
            for t in [t.shallow_clone(), t.t().unwrap_or(t), Tensor::ones(shape, (dtype, CPU)).unwrap()] {
                let x = f64s(&t);
                let want: Vec<i64> = x
                    .indexed_iter()
                    .filter(|(_, v)| **v != 0.0)
                    .flat_map(|(at, _)| (0..t.rank()).map(|d| at[d] as i64).collect::<Vec<_>>())
                    .collect();
                let places = t.nonzero().unwrap();
                assert_eq!(places.to_vec::<i64>().unwrap(), want, "{shape:?} {dtype}");
                assert_eq!(places.shape().dims(), [want.len() / t.rank(), t.rank()]);
                let picked = t.masked_select(&t).unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
                assert_eq!(picked, x.iter().copied().filter(|v| *v != 0.0).collect::<Vec<_>>());
            }
        }
    }
    let flags = Tensor::from_slice(&[false, true, true, false, true], 5, CPU).unwrap();
    assert_eq!(flags.narrow(0, 2, 3).unwrap().nonzero().unwrap().to_vec::<i64>().unwrap(), [0, 2]);
    let x = Tensor::arange(0, 90_000, 1, CPU).unwrap().reshape([300, 300]).unwrap();
    let mask = flags.narrow(0, 1, 3).unwrap().repeat(&[100]).unwrap();
    let want: Vec<f32> = (0..90_000).filter(|i| i % 300 % 3 != 2).map(|i| i as f32).collect();
    assert_eq!(x.masked_select(&mask).unwrap().to_vec::<f32>().unwrap(), want);
}

#[test]
fn long_sequences_of_every_dtype() {
    for n in [8191, 8192, 8193, 65_537, 200_000i64] {
        for dtype in DType::ALL {
            let made = Tensor::arange(-5, 3 * n - 5, 3, (dtype, CPU)).unwrap();
            let want: Vec<i64> = (0..n).map(|i| 3 * i - 5).collect();
            let want = Tensor::from_slice(&want, n as usize, CPU).unwrap().to_dtype(dtype).unwrap();
            assert!(made.equal(&want).unwrap(), "{n} {dtype}");
            let made = Tensor::linspace(-1.0, 300.0, n as usize, (dtype, CPU)).unwrap();
            let step = 301.0 / (n - 1) as f64;
            let value = |i: i64| if 2 * i < n { step * i as f64 - 1.0 } else { 300.0 - step * (n - 1 - i) as f64 };
            let want: Vec<f64> = (0..n).map(value).collect();
            let want = Tensor::from_slice(&want, n as usize, CPU).unwrap().to_dtype(dtype).unwrap();
            assert!(made.equal(&want).unwrap(), "{n} {dtype}");
        }
    }
}

/// Looks up and counts more elements than one block has.
#[test]
fn membership_and_counts_of_many_elements() {
    each_device(|device| {
        let n = (1 << 21) + 77;
        let values: Vec<i64> = (0..n).map(|i: i64| i * 7919 % 251).collect();
        let t = Tensor::from_slice(&values, n as usize, device).unwrap();
        let mut counts = vec![0i64; 251];
        values.iter().for_each(|&x| counts[x as usize] += 1);
        for dtype in [DType::I64, DType::U8] {
            let t = t.to_dtype(dtype).unwrap();
            let some = Tensor::from_slice(&[3i64, 250, 77], 3, device).unwrap().to_dtype(dtype).unwrap();
            let found = t.isin(&some).unwrap().to_vec::<bool>().unwrap();
            assert!(
                found.iter().zip(&values).all(|(&found, x)| found == [3, 250, 77].contains(x)),
                "{dtype} on {device}"
            );
            assert_eq!(t.bincount(None, 0).unwrap().to_vec::<i64>().unwrap(), counts, "{dtype} on {device}");
            assert!(t.equal(&t.contiguous().unwrap()).unwrap());
            assert!(!t.equal(&t.flip(0).unwrap()).unwrap());
            assert!(t.allclose(&t, 0.0, 0.0, false).unwrap());
        }
        let parts = t.to_dtype(DType::F32).unwrap().histc(251, -0.5, 250.5).unwrap();
        assert!(f64s(&parts).iter().zip(&counts).all(|(&a, &b)| a == b as f64), "histc on {device}");
        // Products of integers beside others, wrapping: a product that is summed in 64 bits before a bias is added in parts.
        let x = t.narrow(0, 0, 1 << 21).unwrap().reshape([1 << 19, 4]).unwrap().to_dtype(DType::U8).unwrap();
        let w = x.narrow(0, 5, 9).unwrap();
        let bias = w.select(1, 0).unwrap();
        let made = x.linear(&w, Some(&bias)).unwrap().to_vec::<u8>().unwrap();
        let of = |i: usize, k: usize| values[i * 4 + k];
        let right = |i: usize| (0..4).map(|k| of(i / 9, k) * of(i % 9 + 5, k)).sum::<i64>() + of(i % 9 + 5, 0);
        assert!(made.iter().enumerate().all(|(i, &x)| x == right(i) as u8), "linear of u8 on {device}");
    });
}
