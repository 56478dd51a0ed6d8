//! Self-test: small computations on a device, compared with the host's results.

use std::time::Instant;

use claystone::{DType, Device, Result, Tensor};
use serde::Serialize;

/// The outcome of one computation.
#[derive(Serialize)]
pub struct Outcome {
    pub name: &'static str,
    pub passed: bool,
    /// The error as a sentence.
    pub error: Option<String>,
    /// Duration including compilation, in milliseconds.
    pub milliseconds: f64,
}

/// The device's result, and the expected result.
type TestResult = Result<(Vec<f32>, Vec<f64>)>;

/// A computation and its name.
type Test = (&'static str, fn(Device) -> TestResult);

/// All computations of the self-test.
const TESTS: [Test; 5] = [
    ("copy", copy),
    ("elementwise", elementwise),
    ("reduction", reduction),
    ("matmul", matmul),
    ("half precision", half),
];

/// Maximum error, relative to the larger of the expected magnitude and 1.
const TOLERANCE: f64 = 1e-4;

pub fn run_self_tests(device: Device) -> Vec<Outcome> {
    let run = |(name, test): Test| {
        let start = Instant::now();
        let error = match test(device) {
            Ok((is, expected)) => describe_difference(&is, &expected),
            Err(error) => Some(error.to_string()),
        };
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Outcome { name, passed: error.is_none(), error, milliseconds }
    };
    TESTS.into_iter().map(run).collect()
}

/// Describes the first element whose error exceeds [`TOLERANCE`], in a sentence; `None` if there is no such element.
fn describe_difference(is: &[f32], expected: &[f64]) -> Option<String> {
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

/// Returns numbers between -1 and 1 that are exact in every float dtype.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 65) as f32 / 32.0 - 1.0).collect()
}

fn wide(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|&x| f64::from(x))
}

fn copy(device: Device) -> TestResult {
    let x = values(100_003);
    let there = Tensor::from_slice(&x, x.len(), device)?;
    Ok((there.try_clone()?.to_vec()?, wide(&x).collect()))
}

fn elementwise(device: Device) -> TestResult {
    let x = values(10_007);
    let t = Tensor::from_slice(&x, x.len(), device)?;
    Ok((t.exp()?.mul(&t)?.add(&t)?.to_vec()?, wide(&x).map(|x| x.exp() * x + x).collect()))
}

fn reduction(device: Device) -> TestResult {
    let (rows, columns) = (37, 1009);
    let x = values(rows * columns);
    let t = Tensor::from_slice(&x, [rows, columns], device)?;
    let sums = x.chunks(columns).map(|row| wide(row).sum());
    Ok((t.sum(1, false)?.to_vec()?, sums.collect()))
}

fn matmul(device: Device) -> TestResult {
    let (m, k, n) = (65, 130, 33);
    let (a, b) = (values(m * k), values(k * n));
    let product = Tensor::from_slice(&a, [m, k], device)?.matmul(&Tensor::from_slice(&b, [k, n], device)?)?;
    let element = |i: usize, j: usize| (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum();
    Ok((product.to_vec()?, (0..m * n).map(|at| element(at / n, at % n)).collect()))
}

/// Doubles the values in f16. The sums are multiples of 1/16, which f16 represents exactly.
fn half(device: Device) -> TestResult {
    let x = values(1000);
    let t = Tensor::from_slice(&x, x.len(), device)?.to_dtype(DType::F16)?;
    Ok((t.add(&t)?.to_dtype(DType::F32)?.to_vec()?, wide(&x).map(|x| x + x).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_described() {
        assert_eq!(describe_difference(&[1.0, 2.0], &[1.0, 2.0001]), None);
        assert_eq!(describe_difference(&[1.0, 2.0], &[1.0, 3.0]).as_deref(), Some("element 1 is 2, not 3"));
        assert_eq!(describe_difference(&[f32::NAN], &[0.0]).as_deref(), Some("element 0 is NaN, not 0"));
        assert_eq!(describe_difference(&[], &[0.0]).as_deref(), Some("it gives 0 elements, not 1"));
    }

    #[test]
    fn every_device_passes_the_self_test() {
        for device in Device::all() {
            for outcome in run_self_tests(device) {
                assert!(outcome.passed, "{device}: {}: {:?}", outcome.name, outcome.error);
            }
        }
        assert!(run_self_tests(Device::OpenCL(10_000)).iter().all(|outcome| outcome.error.is_some()));
    }
}
