//! Which rows of packed elements each time step has.

use super::packed::index;
use crate::{Result, Tensor};

/// The time steps of a direction of a layer: step t has `batch_sizes[t]` rows, of the longest sequences.
#[derive(Debug, Clone)]
pub(super) struct Schedule {
    pub(super) batch_sizes: Vec<usize>,
    /// Whether it goes from the end to the beginning.
    pub(super) reverse: bool,
    /// The first row of each step, then how many rows there are.
    starts: Vec<usize>,
}

/// A time step.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeStep {
    pub(super) start: usize,
    pub(super) rows: usize,
    /// How many of them have a state of the step before; the other sequences begin here.
    pub(super) continued: usize,
}

impl Schedule {
    pub(super) fn new(batch_sizes: &[usize], reverse: bool) -> Schedule {
        let mut starts = vec![0];
        starts.extend(batch_sizes.iter().scan(0, |end, &size| {
            *end += size;
            Some(*end)
        }));
        Schedule { batch_sizes: batch_sizes.to_vec(), reverse, starts }
    }

    /// How many rows there are.
    pub(super) fn total(&self) -> usize {
        self.starts[self.batch_sizes.len()]
    }

    /// How many sequences there are.
    pub(super) fn sequences(&self) -> usize {
        self.batch_sizes[0]
    }

    /// The time steps, in the order in which they are computed.
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

    /// Whether all sequences are equally long.
    fn is_dense(&self) -> bool {
        self.batch_sizes.first() == self.batch_sizes.last()
    }

    /// The row of the first state to begin with, in a tensor that has those and the states of all rows: before them, or after them
    /// where the direction is reversed, so that the states of equally long sequences follow each other.
    pub(super) fn initial_start(&self) -> usize {
        if self.reverse { self.total() } else { 0 }
    }

    /// The row of the first of all rows' states in that tensor.
    pub(super) fn states_start(&self) -> usize {
        if self.reverse { 0 } else { self.sequences() }
    }

    /// For each row the state of the step before, from a tensor that has the states to begin with beside those of all rows.
    pub(super) fn previous(&self, states: &Tensor) -> Result<Tensor> {
        if self.is_dense() {
            let start = if self.reverse { self.sequences() } else { 0 };
            return states.narrow(0, start, self.total());
        }
        let mut rows = vec![0; self.total()];
        let (initial, first) = (self.initial_start(), self.states_start());
        let mut before = 0;
        for step in self.steps() {
            for rank in 0..step.rows {
                let continued = rank < step.continued;
                rows[step.start + rank] = if continued { first + before + rank } else { initial + rank };
            }
            before = step.start;
        }
        states.index_select(0, &index(&rows, states.device())?)
    }

    /// What each sequence ends with, from the states of all rows.
    pub(super) fn last(&self, states: &Tensor) -> Result<Tensor> {
        if self.reverse || self.is_dense() {
            let start = if self.reverse { 0 } else { self.total() - self.sequences() };
            return states.narrow(0, start, self.sequences());
        }
        let length = |rank: usize| self.batch_sizes.partition_point(|&size| size > rank);
        let rows: Vec<usize> = (0..self.sequences()).map(|rank| self.starts[length(rank) - 1] + rank).collect();
        states.index_select(0, &index(&rows, states.device())?)
    }
}
