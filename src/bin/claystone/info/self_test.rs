//! Small computations on a device, compared with the host's.

use std::time::Instant;

use claystone::{DType, Device, Result, Tensor};
use serde::Serialize;

/// What came of one computation.
#[derive(Serialize)]
pub struct Outcome {
    pub name: &'static str,
    pub passed: bool,
    /// What went wrong, in a sentence.
    pub error: Option<String>,
    /// With compiling, in milliseconds.
    pub milliseconds: f64,
}

/// What the device makes of it, and what it should be.
type Computed = Result<(Vec<f32>, Vec<f64>)>;

/// A computation and its name.
type Test = (&'static str, fn(Device) -> Computed);

const TESTS: [Test; 5] = [
    ("copy", copy),
    ("elementwise", elementwise),
    ("reduction", reduction),
    ("matmul", matmul),
    ("half precision", half),
];

/// The most that a result may differ, relative to its size or to 1.
const TOLERANCE: f64 = 1e-4;

pub fn run(device: Device) -> Vec<Outcome> {
    let run = |(name, test): Test| {
        let start = Instant::now();
        let error = match test(device) {
            Ok((is, expected)) => difference(&is, &expected),
            Err(error) => Some(error.to_string()),
        };
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Outcome { name, passed: error.is_none(), error, milliseconds }
    };
    TESTS.into_iter().map(run).collect()
}

/// The first element that is wrong, in a sentence.
fn difference(is: &[f32], expected: &[f64]) -> Option<String> {
    if is.len() != expected.len() {
        return Some(format!("it gives {} elements, not {}", is.len(), expected.len()));
    }
    let wrong = |&(_, (&is, &expected)): &(usize, (&f32, &f64))| {
        let error = (f64::from(is) - expected).abs();
        error.is_nan() || error > TOLERANCE * expected.abs().max(1.0)
    };
    let (at, (is, expected)) = is.iter().zip(expected).enumerate().find(wrong)?;
    Some(format!("element {at} is {is}, not {expected}"))
}

/// Numbers between -1 and 1 that need no rounding in any float.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 65) as f32 / 32.0 - 1.0).collect()
}

fn wide(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|&x| f64::from(x))
}

fn copy(device: Device) -> Computed {
    let x = values(100_003);
    let there = Tensor::from_slice(&x, x.len(), device)?;
    Ok((there.try_clone()?.to_vec()?, wide(&x).collect()))
}

fn elementwise(device: Device) -> Computed {
    let x = values(10_007);
    let t = Tensor::from_slice(&x, x.len(), device)?;
    Ok((t.exp()?.mul(&t)?.add(&t)?.to_vec()?, wide(&x).map(|x| x.exp() * x + x).collect()))
}

fn reduction(device: Device) -> Computed {
    let (rows, columns) = (37, 1009);
    let x = values(rows * columns);
    let t = Tensor::from_slice(&x, [rows, columns], device)?;
    let sums = x.chunks(columns).map(|row| wide(row).sum());
    Ok((t.sum(1, false)?.to_vec()?, sums.collect()))
}

fn matmul(device: Device) -> Computed {
    let (m, k, n) = (65, 130, 33);
    let (a, b) = (values(m * k), values(k * n));
    let product = Tensor::from_slice(&a, [m, k], device)?.matmul(&Tensor::from_slice(&b, [k, n], device)?)?;
    let element = |i: usize, j: usize| (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum();
    Ok((product.to_vec()?, (0..m * n).map(|at| element(at / n, at % n)).collect()))
}

/// Sums of the values are halves of 64ths, which f16 has.
fn half(device: Device) -> Computed {
    let x = values(1000);
    let t = Tensor::from_slice(&x, x.len(), device)?.to_dtype(DType::F16)?;
    Ok((t.add(&t)?.to_dtype(DType::F32)?.to_vec()?, wide(&x).map(|x| x + x).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_told() {
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 2.0001]), None);
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 3.0]).as_deref(), Some("element 1 is 2, not 3"));
        assert_eq!(difference(&[f32::NAN], &[0.0]).as_deref(), Some("element 0 is NaN, not 0"));
        assert_eq!(difference(&[], &[0.0]).as_deref(), Some("it gives 0 elements, not 1"));
    }

    #[test]
    fn every_device_passes() {
        for device in Device::all() {
            for outcome in run(device) {
                assert!(outcome.passed, "{device}: {}: {:?}", outcome.name, outcome.error);
            }
        }
        assert!(run(Device::OpenCL(10_000)).iter().all(|outcome| outcome.error.is_some()));
    }
}
