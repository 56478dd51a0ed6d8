//! Second derivatives of every differentiable operation.

use std::collections::HashMap;

use claystone::autograd::gradgradcheck;
use claystone::ops::{self, Accepts, ROWS};
use claystone::{DType, Device, Tensor};

use crate::harness::{Case, check_second_gradient, differentiable_elements};

/// Cases with at least this many elements are checked first, and cases with more than `MAX_ELEMENTS` elements are skipped.
const PREFERRED_MIN_ELEMENTS: usize = 4;
const MAX_ELEMENTS: usize = 500;
/// The maximum number of cases that are checked for each operation.
const CASES_PER_OPERATION: usize = 3;

#[test]
fn every_operation_has_second_derivatives() {
    let only = std::env::var("CASE").ok();
    let mut cases: Vec<Case> = crate::all_cases();
    cases.retain(|case| only.as_deref().is_none_or(|name| name == case.op.name));
    cases.retain(|case| (1..=MAX_ELEMENTS).contains(&differentiable_elements(case)));
    cases.sort_by_key(|case| (differentiable_elements(case) < PREFERRED_MIN_ELEMENTS, differentiable_elements(case)));
    let mut checked: HashMap<&str, usize> = HashMap::new();
    for case in &cases {
        let count = checked.entry(case.op.name).or_default();
        if *count < CASES_PER_OPERATION {
            *count += 1;
            check_second_gradient(case);
        }
    }
    let differentiable = ops::operations().iter().filter(|op| op.is_differentiable() && op.row().is_none());
    let missing: Vec<&str> = differentiable.map(|op| op.name).filter(|name| !checked.contains_key(name)).collect();
    assert!(only.is_some() || missing == ["to_dtype"], "without second gradients: {missing:?}");
}

#[test]
fn every_row_has_second_derivatives() {
    for row in ROWS.iter().filter(|row| row.accepts != Accepts::Integer) {
        let operand = |(k, &(low, high)): (usize, &(f64, f64))| {
            let point = |i: usize| low + (high - low) * ((i + 1) as f64 * (0.618 + 0.137 * k as f64)).fract();
            Tensor::from_vec((0..7).map(point).collect::<Vec<f64>>(), 7, Device::Cpu).unwrap()
        };
        let inputs: Vec<Tensor> = row.domain.iter().enumerate().map(operand).collect();
        let scalars: Vec<claystone::Scalar> = row.samples.iter().map(|&s| s.into()).collect();
        let squares = |x: &[Tensor]| {
            let out = row.apply(&x.iter().collect::<Vec<_>>(), &scalars)?;
            match out.dtype() {
                DType::F64 if out.requires_grad() => out.square()?.sum((), false),
                _ => x[0].sum((), false), // the operation has no gradient
            }
        };
        gradgradcheck(squares, &inputs, 1e-4).unwrap_or_else(|e| panic!("{}: {e}", row.name));
    }
}
