//! Scaled dot-product attention: in one kernel, or by blocks of queries.

use crate::Tensor;
use crate::expr::philox::Seed;
use crate::layout::shape::Shape;

/// `softmax(q kᵀ * scale + mask) v`. Queries are `[batch.., heads, L, E]`, keys `[batch.., 1, S, E]` and values `[batch.., 1, S, V]` of
/// one dtype and any strides: all heads of queries attend to the same keys and values. No tensor is empty. A query that sees nothing gives
/// zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedAttention<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[batch.., heads, L, S]`: a key takes part where a bool is true, floats are added.
    pub(crate) mask: Option<&'a Tensor>,
    /// Query i sees the keys up to key i.
    pub(crate) causal: bool,
    pub(crate) scale: f64,
    /// Weights are dropped with this probability, as `dropout` of all of them with this seed drops them.
    pub(crate) dropout: Option<(f64, Seed)>,
}

/// What backward gets: the result, the log-sum-exp of each row of scores, and the result's gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attended<'a> {
    /// `[batch.., heads, L, V]`.
    pub(crate) out: &'a Tensor,
    /// `[batch.., heads, L]`, contiguous, in the type computed in; -inf for a query that sees
    /// nothing, NaN where weights are.
    pub(crate) logsumexp: &'a Tensor,
    /// As `out`.
    pub(crate) grad: &'a Tensor,
}

impl FusedAttention<'_> {
    /// `[batch.., heads, L, S]`.
    pub(crate) fn scores(&self) -> Shape {
        let (q, k) = (self.q.shape().dims(), self.k.shape().dims());
        q[..q.len() - 1].iter().chain(&k[k.len() - 2..k.len() - 1]).copied().collect()
    }

    /// The dims before the heads.
    pub(crate) fn batch(&self) -> Shape {
        Shape::from(&self.q.shape().dims()[..self.q.rank() - 3])
    }

    /// Heads, L, S, E and V.
    pub(crate) fn sizes(&self) -> [usize; 5] {
        let dim = |t: &Tensor, from_last: usize| t.shape().dims()[t.rank() - from_last];
        [dim(self.q, 3), dim(self.q, 2), dim(self.k, 2), dim(self.q, 1), dim(self.v, 1)]
    }
}

/// What a device computes at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// Bytes of all scores, up to which they are made in one go and kept for backward.
    pub(crate) whole: usize,
    /// Bytes of the scores of a block, about.
    pub(crate) block: usize,
    /// Queries of a block, at least: each block's products lay out all of its keys and values anew.
    pub(crate) queries: usize,
}

impl Blocking {
    /// Scores of at most this many bytes are always made in one go.
    pub(crate) const FEW: usize = 4 << 20;

    /// A 32nd of the device's memory, in bytes.
    pub(crate) fn share(memory: usize) -> usize {
        (memory / 32).max(Blocking::FEW)
    }
}
