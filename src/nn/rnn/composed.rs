//! One direction of a recurrent layer, computed step by step with recorded operations, so that double backward can differentiate it.

use super::schedule::RowSchedule;
use super::step::{Cell, CellKind};
use crate::{Result, Tensor};

/// Computes the hidden states of all rows and the final states of all sequences. The input has already been multiplied by its weights.
pub(super) fn run_composed(
    step: CellKind,
    cell: &Cell,
    gates: &Tensor,
    schedule: &RowSchedule,
    start: Vec<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let rows = |states: &[Tensor], from: usize, to: usize| -> Result<Vec<Tensor>> {
        states.iter().map(|t| t.narrow(0, from, to - from)).collect()
    };
    let joined = |parts: Vec<Vec<Tensor>>| -> Result<Vec<Tensor>> {
        (0..step.states()).map(|s| Tensor::cat(&parts.iter().map(|p| &p[s]).collect::<Vec<_>>(), 0)).collect()
    };
    let (mut outputs, mut ended) = (Vec::new(), Vec::new());
    let (mut states, mut size) = (rows(&start, 0, 0)?, 0);
    for at in schedule.steps() {
        if at.continued < size {
            // The shortest sequences are the last rows, so these rows end first.
            ended.push(rows(&states, at.continued, size)?);
            states = rows(&states, 0, at.continued)?;
        }
        if at.continued < at.rows {
            states = joined(vec![states, rows(&start, at.continued, at.rows)?])?;
        }
        size = at.rows;
        states = step.next_states(&gates.narrow(0, at.start, at.rows)?, cell, &states)?;
        outputs.push(states[0].shallow_clone());
    }
    if schedule.reverse {
        outputs.reverse();
    }
    ended.push(states);
    ended.reverse();
    Ok((Tensor::cat(&outputs, 0)?, joined(ended)?))
}
