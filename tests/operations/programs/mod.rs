//! Runs random programs on the CPU, on every OpenCL device, and in an interpreter on lists of f64. The number of programs is
//! 10,000, or the environment variable `PROPTEST_CASES`.
//!
//! Values are integers of magnitude at most 1000, clamped after every step, so that the CPU, OpenCL and the interpreter agree
//! exactly. Few distinct kernels are compiled: each launch has one operation, and shapes have up to three dims.

mod interpreter;
mod run;
mod steps;

use claystone::DType;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use run::Run;
use steps::{Fold, Step, step};

use crate::common::devices;

/// Number of programs.
const CASES: u32 = 10_000;
/// Values are clamped to this magnitude after every step.
const BOUND: f64 = 1000.0;
/// Maximum number of elements of a value.
const ELEMENTS: usize = 200;

/// Half of the programs use f32, the other half i32.
#[test]
fn random_programs_agree_with_an_interpreter_on_every_device() {
    let devices = devices();
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let program = (prop_oneof![Just(DType::F32), Just(DType::I32)], prop::collection::vec(step(), 2..14));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&program, |(dtype, steps)| {
        let mut run = Run::new(&devices, dtype);
        steps.iter().for_each(|step| run.step(step));
        run.check();
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
}

/// Checks the interpreter on a small program.
#[test]
fn interpreter_shares_views_and_copies_clones() {
    let mut run = Run::new(&devices(), DType::F32);
    for step in [
        Step::New { shape: vec![2, 3], seed: 0 },
        Step::Transpose { of: 0, a: 0, b: 1 },
        Step::Slice { of: 0, dim: 0, start: -1, end: -7, step: -2 },
        Step::Fill { into: 0, value: 4 },
        Step::Clone { of: 2 },
        Step::Fold { what: Fold::Sum, of: 0, dims: 2, keepdim: false },
    ] {
        run.step(&step);
    }
    run.check();
    assert_eq!(run.values[0].read(), [4.0, -2.0, 4.0, 4.0, 0.0, 4.0]);
    assert_eq!(run.values[4].read(), [6.0, 8.0]);
    assert_eq!(run.log[2], "t2 = t1.slice(0, -1, -7, -2)");
}
