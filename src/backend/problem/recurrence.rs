//! Recurrences: the part of a recurrent layer in which each time step needs the states of the previous step.

use smallvec::SmallVec;

use crate::Tensor;

/// The kind of a recurrent cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellKind {
    /// A plain RNN with tanh.
    Tanh,
    /// A plain RNN with ReLU.
    Relu,
    /// Long short-term memory.
    Lstm,
    /// Gated recurrent unit.
    Gru,
}

impl CellKind {
    /// Returns the number of gates: the rows of a weight divided by the hidden size.
    pub fn gates(self) -> usize {
        match self {
            CellKind::Tanh | CellKind::Relu => 1,
            CellKind::Lstm => 4,
            CellKind::Gru => 3,
        }
    }

    /// Returns the number of state tensors: 2 for LSTM (hidden state and cell state), otherwise 1.
    pub fn states(self) -> usize {
        if self == CellKind::Lstm { 2 } else { 1 }
    }

    /// Returns the number of gradients of a row that a backward pass computes: of each gate's input sum, and for GRU a fourth, because the
    /// new gate has two sums, from the hidden state and from the input.
    pub fn sums(self) -> usize {
        if self == CellKind::Gru { 4 } else { self.gates() }
    }
}

/// One pass of one direction of a recurrent layer over all time steps. All tensors are contiguous and have one dtype, except `starts`. There
/// are n sequences with `total` elements (rows) and H hidden features.
#[derive(Debug, Clone, Copy)]
pub struct Recurrence<'a> {
    /// The kind of the cell.
    pub cell: CellKind,
    /// Whether the direction goes from the end of each sequence to the beginning.
    pub reverse: bool,
    /// The first row of each step, then `total`: i64. None if all sequences have the same length.
    pub starts: Option<&'a Tensor>,
    /// The weight of the hidden state, `[gates * H, H]`.
    pub weight: &'a Tensor,
    /// None in a forward pass without a backward pass.
    pub kept: Option<KeptStates<'a>>,
    /// The direction of the pass, and its own tensors.
    pub pass: Pass<'a>,
}

/// Results of the forward pass that the backward pass reads.
#[derive(Debug, Clone, Copy)]
pub struct KeptStates<'a> {
    /// The hidden states of all rows, `[total, H]`, after the n initial states; before these if `reverse`.
    pub hidden: &'a Tensor,
    /// LSTM's cell states, in the same order.
    pub cells: Option<&'a Tensor>,
    /// The gates of LSTM and GRU after activation, `[total, H]` each. GRU's fourth is the new gate's sum from the hidden state.
    pub gates: &'a [Tensor],
}

/// The direction of a pass, and its tensors.
#[derive(Debug, Clone, Copy)]
pub enum Pass<'a> {
    /// Computes the hidden states.
    Forward {
        /// The products of the input and the gates' weights, `[total, gates * H]`, with the biases that do not depend on the state.
        x: &'a Tensor,
        /// GRU's bias of the hidden state, `[gates * H]`.
        bias: Option<&'a Tensor>,
        /// The initial states, `[n, H]` each.
        initial: &'a [Tensor],
        /// Receives the hidden states, `[total, H]`, then LSTM's final cell states, `[n, H]`: one vector.
        result: &'a Tensor,
    },
    /// Computes gradients. Needs `kept`.
    Backward {
        /// The gradient of the forward pass's result.
        grad: &'a Tensor,
        /// Receives the gradients of the gates' input sums, `[total, sums, H]`.
        sums: &'a Tensor,
        /// Receives the gradients of the initial states.
        initial: &'a [Tensor],
    },
}

impl<'a> KeptStates<'a> {
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &'a Tensor> + use<'a> {
        [self.hidden].into_iter().chain(self.cells).chain(self.gates)
    }
}

impl Recurrence<'_> {
    /// Returns the tensors in the order of the kernel's arguments.
    pub(crate) fn tensors(&self) -> SmallVec<[&Tensor; 13]> {
        let kept = self.kept.iter().flat_map(KeptStates::tensors);
        let mut all = SmallVec::new();
        match &self.pass {
            Pass::Forward { x, bias, initial, result } => {
                all.extend([*x, *result].into_iter().chain(*bias).chain(*initial))
            }
            Pass::Backward { grad, sums, initial } => all.extend([*grad, *sums].into_iter().chain(*initial)),
        }
        all.extend([self.weight].into_iter().chain(kept).chain(self.starts));
        all
    }

    /// Returns n and `total`.
    pub(crate) fn rows(&self) -> [usize; 2] {
        let (Pass::Forward { x: t, initial, .. } | Pass::Backward { sums: t, initial, .. }) = &self.pass;
        [initial[0].shape().dims()[0], t.shape().dims()[0]]
    }

    /// Returns H.
    pub(crate) fn hidden(&self) -> usize {
        self.weight.shape().dims()[1]
    }

    /// Returns the number of time steps.
    pub(crate) fn steps(&self) -> usize {
        let [n, total] = self.rows();
        self.starts.map_or_else(|| total / n, |t| t.numel() - 1)
    }
}
