//! Tests every operation in the catalogue on every device: values, gradients, dtypes, layouts, empty tensors. The cases of each family
//! of operations are in the file of that name; `CASE=name` selects an operation.

mod bad_input;
mod calls;
#[path = "../common/mod.rs"]
mod common;
mod conv_blocks;
mod conv_depthwise;
mod conv_size;
mod division;
mod dry;
mod gather;
mod harness;
mod images;
mod in_place;
mod indexing_edges;
mod matmul;
mod memory_formats;
mod moments;
mod numbers;
mod one_row;
mod programs;
mod quantized;
mod random;
mod reduce;
mod rounding;
mod second;
mod selection;
mod softmax_rows;
mod table;

use std::collections::HashSet;

use claystone::ops::{self, Kind};
use harness::Case;

/// Declares the families of operations: a module for each, and a test that runs its cases.
macro_rules! families {
    ($($family:ident),* $(,)?) => {
        $(mod $family;)*

        $(#[test]
        fn $family() {
            harness::check($family::cases());
        })*

        fn all_cases() -> Vec<Case> {
            let families: Vec<Vec<Case>> = vec![$($family::cases()),*];
            families.into_iter().flatten().collect()
        }
    };
}

families! {
    attention,
    conv,
    losses,
    native_norms,
    norms,
    padding,
    pooling,
    copies,
    creation,
    indexing,
    joining,
    linalg,
    pointwise,
    recurrent,
    reductions,
    resizing,
    scans,
    softmax,
    sorting,
    views,
    volumes,
}

#[test]
fn every_operation_has_cases() {
    let cases = all_cases();
    let names: HashSet<&str> = cases.iter().map(|case| case.op.name).collect();
    let listed = || ops::operations().iter().filter(|op| op.row().is_none());
    let missing: Vec<&str> = listed().map(|op| op.name).filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "operations without a case: {missing:?}");
    let with_operands: HashSet<&str> = cases.iter().filter(|c| c.has_operands()).map(|c| c.op.name).collect();
    let empty: HashSet<&str> = cases.iter().filter(|c| c.is_empty()).map(|c| c.op.name).collect();
    let missing: Vec<_> = with_operands.difference(&empty).collect();
    assert!(missing.is_empty(), "operations without a case of no elements: {missing:?}");
}

#[test]
fn every_computation_can_be_replaced() {
    let mut seen = HashSet::new();
    for case in all_cases().iter().filter(|case| case.op.is_replaceable()) {
        if seen.insert((case.op.name, case.has_gaps())) {
            harness::check_replaced(case);
        }
    }
}

#[test]
fn operations_page_is_up_to_date() {
    let page = include_str!("../../docs/operations.md");
    let right = ops::operations_markdown();
    assert_eq!(page, right, "run: cargo run -p claystone-cli -- operations > docs/operations.md");
    let rows = page.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, ops::operations().len());
}

#[test]
fn operations_are_sorted_by_kind() {
    let kinds: Vec<Kind> = ops::operations().iter().map(|op| op.kind).collect();
    assert!(kinds.is_sorted());
}
