//! Arithmetic sequences: `arange` and `linspace`.

use crate::Scalar;

/// The formula for element i of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sequence {
    /// Element i is `start + i * step`, with wrapping arithmetic.
    Int { start: i64, step: i64 },
    /// Element i of `n` is `start + i * step` if `i < middle`, otherwise `end - (n - 1 - i) * step`, computed in f64.
    Float { start: f64, step: f64, middle: usize, end: f64, n: usize },
}

impl Sequence {
    /// Returns `n` evenly spaced numbers from `start` to `end`. Each number is computed from the closer end, so both ends are exact.
    pub(crate) fn evenly_spaced(start: f64, end: f64, n: usize) -> Sequence {
        let step = if n > 1 { (end - start) / (n - 1) as f64 } else { 0.0 };
        Sequence::Float { start, step, middle: n.div_ceil(2), end, n }
    }

    #[inline(always)]
    pub(crate) fn value(self, i: usize) -> Scalar {
        match self {
            Sequence::Int { start, step } => Scalar::Int(start.wrapping_add(step.wrapping_mul(i as i64))),
            Sequence::Float { start, step, middle, .. } if i < middle => Scalar::Float(start + step * i as f64),
            Sequence::Float { step, end, n, .. } => Scalar::Float(end - step * (n - 1 - i) as f64),
        }
    }
}
