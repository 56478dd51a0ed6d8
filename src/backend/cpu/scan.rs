//! Scans on the CPU, one line at a time, accumulated in f64 or i64.

use crate::backend::cpu::accumulate::{Add, Mul};
use crate::backend::cpu::lines::for_each_line;
use crate::backend::cpu::running;
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::scan::Scan;
use crate::{Compute, DType, Result, Tensor};

pub(crate) fn run_scan(kind: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()> {
    match x.dtype.compute() {
        Compute::I64 => run_as::<i64>(kind, x, d, values, indices),
        _ => run_as::<f64>(kind, x, d, values, indices),
    }
}

fn run_as<C: Number>(kind: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()> {
    let chosen = |reaches: fn(C, C) -> bool| {
        for_each_line::<C>(x, d, values, indices, |line, values, indices| {
            let (mut best, mut at) = (line[0], 0);
            for (i, (&element, (value, index))) in line.iter().zip(values.iter_mut().zip(indices)).enumerate() {
                if is_nan(element) || (!is_nan(best) && reaches(element, best)) {
                    (best, at) = (element, i as i64);
                }
                (*value, *index) = (best, at);
            }
        })
    };
    match kind {
        Scan::Sum => running::run_lines::<Add, C>(x, d, values, x.dtype != DType::F64),
        Scan::Prod => running::run_lines::<Mul, C>(x, d, values, C::COMPUTE == Compute::I64),
        Scan::LogSumExp => for_each_line::<C>(x, d, values, indices, |line, values, _| {
            let mut so_far = C::from_f64(f64::NEG_INFINITY);
            for (value, &element) in values.iter_mut().zip(line) {
                so_far = log_add_exp(so_far, element);
                *value = so_far;
            }
        }),
        Scan::Max => chosen(|a, b| a >= b),
        Scan::Min => chosen(|a, b| a <= b),
    }
}

fn is_nan<C: Number>(v: C) -> bool {
    v.partial_cmp(&v).is_none()
}

/// Returns `log(exp(a) + exp(b))`.
fn log_add_exp<C: Number>(a: C, b: C) -> C {
    let greater = a.max(b);
    match greater.to_f64().is_infinite() {
        true => greater,
        false => greater.add(a.sub(b).abs().neg().exp().log1p()),
    }
}
