//! Scans on the CPU: a line at a time, accumulated in f64 or i64.

use super::Scan;
use crate::ops::lane::Lane;
use crate::ops::lines::each;
use crate::{Compute, Result, Tensor};

pub(super) fn run(kind: Scan, x: &Tensor, d: usize, values: &Tensor, places: Option<&Tensor>) -> Result<()> {
    match x.dtype.compute() {
        Compute::I64 => run_as::<i64>(kind, x, d, values, places),
        _ => run_as::<f64>(kind, x, d, values, places),
    }
}

fn run_as<C: Lane>(kind: Scan, x: &Tensor, d: usize, values: &Tensor, places: Option<&Tensor>) -> Result<()> {
    let running = |from: C, combine: fn(C, C) -> C| {
        each::<C>(x, d, values, places, |line, values, _| {
            let mut so_far = from;
            for (value, &element) in values.iter_mut().zip(line) {
                so_far = combine(so_far, element);
                *value = so_far;
            }
        })
    };
    let chosen = |reaches: fn(C, C) -> bool| {
        each::<C>(x, d, values, places, |line, values, places| {
            let (mut best, mut at) = (line[0], 0);
            for (i, (&element, (value, place))) in line.iter().zip(values.iter_mut().zip(places)).enumerate() {
                if is_nan(element) || (!is_nan(best) && reaches(element, best)) {
                    (best, at) = (element, i as i64);
                }
                (*value, *place) = (best, at);
            }
        })
    };
    match kind {
        Scan::Sum => running(C::from_i32(0), C::add),
        Scan::Prod => running(C::from_i32(1), C::mul),
        Scan::LogSumExp => running(C::from_f64(f64::NEG_INFINITY), log_sum),
        Scan::Max => chosen(|a, b| a >= b),
        Scan::Min => chosen(|a, b| a <= b),
    }
}

fn is_nan<C: Lane>(v: C) -> bool {
    v.partial_cmp(&v).is_none()
}

/// `log(exp(a) + exp(b))`.
fn log_sum<C: Lane>(a: C, b: C) -> C {
    let greater = a.max(b);
    match greater.to_f64().is_infinite() {
        true => greater,
        false => greater.add(a.sub(b).abs().neg().exp().log1p()),
    }
}
