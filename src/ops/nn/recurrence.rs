//! Recurrences of recurrent layers.

use crate::backend::fill;
use crate::backend::problem::recurrence::{KeptStates, Pass, Recurrence};
use crate::ops::dispatch::prelude::*;

/// Computes a pass over all time steps in one launch. Returns false if the caller must compute the pass step by step. Not recorded.
pub fn recurrence(pass: &Recurrence) -> Result<bool> {
    let results: SmallVec<[&Tensor; 7]> = match &pass.pass {
        Pass::Forward { result, .. } => {
            [*result].into_iter().chain(pass.kept.iter().flat_map(KeptStates::tensors)).collect()
        }
        Pass::Backward { sums, initial, .. } => [*sums].into_iter().chain(*initial).collect(),
    };
    fill(results, |b| b.recurrence(pass))
}
