//! The rows of packed sequences that each time step processes.

use super::packed::index_tensor;
use crate::{Device, Result, Tensor};

/// The time steps of one direction of a layer. Step t has `batch_sizes[t]` rows, one for each sequence longer than t.
#[derive(Debug, Clone)]
pub(super) struct RowSchedule {
    pub(super) batch_sizes: Vec<usize>,
    /// Whether the direction goes from the end of each sequence to the beginning.
    pub(super) reverse: bool,
    /// The first row of each step, then the total number of rows.
    starts: Vec<usize>,
}

/// The rows of one time step.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeStep {
    pub(super) start: usize,
    pub(super) rows: usize,
    /// The number of rows whose sequence has a state from the previous step. The other rows start from the initial state.
    pub(super) continued: usize,
}

impl RowSchedule {
    pub(super) fn new(batch_sizes: &[usize], reverse: bool) -> RowSchedule {
        let mut starts = vec![0];
        starts.extend(batch_sizes.iter().scan(0, |end, &size| {
            *end += size;
            Some(*end)
        }));
        RowSchedule { batch_sizes: batch_sizes.to_vec(), reverse, starts }
    }

    pub(super) fn total_rows(&self) -> usize {
        self.starts[self.batch_sizes.len()]
    }

    pub(super) fn sequences(&self) -> usize {
        self.batch_sizes[0]
    }

    /// Returns the time steps in the order of computation.
    pub(super) fn steps(&self) -> impl DoubleEndedIterator<Item = TimeStep> {
        let count = self.batch_sizes.len();
        (0..count).map(move |i| {
            let t = if self.reverse { count - 1 - i } else { i };
            let rows = self.batch_sizes[t];
            let continued = match self.reverse {
                true => self.batch_sizes.get(t + 1).copied().unwrap_or(0),
                false if t == 0 => 0,
                false => rows,
            };
            TimeStep { start: self.starts[t], rows, continued }
        })
    }

    /// True if all sequences have the same length.
    fn is_dense(&self) -> bool {
        self.batch_sizes.first() == self.batch_sizes.last()
    }

    /// Returns the first row of each step, and then the total number of rows, as a tensor. None if all sequences have the same length.
    pub(super) fn packed_starts(&self, device: Device) -> Result<Option<Tensor>> {
        if self.is_dense() { Ok(None) } else { index_tensor(&self.starts, device).map(Some) }
    }

    /// Returns the first row of the initial states in a tensor with initial states and the states of all rows. Initial states come first,
    /// or last in the reverse direction. Consecutive states are then adjacent in memory if all sequences have the same length.
    pub(super) fn initial_start(&self) -> usize {
        if self.reverse { self.total_rows() } else { 0 }
    }

    /// Returns the first row of the steps' states in a tensor that also has the initial states.
    pub(super) fn states_start(&self) -> usize {
        if self.reverse { 0 } else { self.sequences() }
    }

    /// Returns, for each row, the state of the previous step. `states` has the states of all rows and the initial states.
    pub(super) fn previous(&self, states: &Tensor) -> Result<Tensor> {
        if self.is_dense() {
            let start = if self.reverse { self.sequences() } else { 0 };
            return states.narrow(0, start, self.total_rows());
        }
        let mut rows = vec![0; self.total_rows()];
        let (initial, first) = (self.initial_start(), self.states_start());
        let mut previous_start = 0;
        for step in self.steps() {
            for rank in 0..step.rows {
                let continued = rank < step.continued;
                rows[step.start + rank] = if continued { first + previous_start + rank } else { initial + rank };
            }
            previous_start = step.start;
        }
        states.index_select(0, &index_tensor(&rows, states.device())?)
    }

    /// Returns the final state of each sequence. `states` has the states of all rows.
    pub(super) fn final_states(&self, states: &Tensor) -> Result<Tensor> {
        if self.reverse || self.is_dense() {
            let start = if self.reverse { 0 } else { self.total_rows() - self.sequences() };
            return states.narrow(0, start, self.sequences());
        }
        let length = |rank: usize| self.batch_sizes.partition_point(|&size| size > rank);
        let rows: Vec<usize> = (0..self.sequences()).map(|rank| self.starts[length(rank) - 1] + rank).collect();
        states.index_select(0, &index_tensor(&rows, states.device())?)
    }
}
