//! Scaled dot-product attention: in one kernel, or in blocks of queries.

use crate::Tensor;
use crate::expr::philox::Seed;
use crate::layout::shape::Shape;

/// `softmax(q kᵀ * scale + mask) v`. Queries are `[batch.., heads, L, E]`, keys `[batch.., 1, S, E]` and values `[batch.., 1, S, V]` of
/// one dtype and any strides: all heads of queries attend to the same keys and values. No tensor is empty. A query that attends to no key
/// gives zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedAttention<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[batch.., heads, L, S]`: bools say which keys a query attends to, floats are added to the scores.
    pub(crate) mask: Option<&'a Tensor>,
    /// Whether query i attends to keys 0 to i only.
    pub(crate) causal: bool,
    pub(crate) scale: f64,
    /// The probability and the seed of the dropout of attention weights.
    pub(crate) dropout: Option<(f64, Seed)>,
}

/// What backward needs besides the inputs of forward.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionBackward<'a> {
    /// The result of forward, `[batch.., heads, L, V]`.
    pub(crate) out: &'a Tensor,
    /// Of each row of scores, `[batch.., heads, L]`, contiguous, in the compute type; -inf without keys, NaN where weights are NaN.
    pub(crate) logsumexp: &'a Tensor,
    /// The result's gradient, shaped as `out`.
    pub(crate) grad: &'a Tensor,
}

impl FusedAttention<'_> {
    /// The shape of the scores, `[batch.., heads, L, S]`.
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

/// How a device divides attention into blocks of queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// Scores of at most this many bytes are computed without blocks, and saved for backward.
    pub(crate) unblocked_bytes: usize,
    /// The approximate bytes of a block's scores.
    pub(crate) block_bytes: usize,
    /// The fewest queries of a block, because the products of each block pack all keys and values again.
    pub(crate) min_queries: usize,
}

impl Blocking {
    /// The least [`unblocked_bytes`](Self::unblocked_bytes) of any device.
    pub(crate) const MIN_UNBLOCKED_BYTES: usize = 4 << 20;

    /// A 32nd of the device's memory, in bytes.
    pub(crate) fn share(memory: usize) -> usize {
        (memory / 32).max(Blocking::MIN_UNBLOCKED_BYTES)
    }
}
