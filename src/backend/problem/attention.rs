//! Scaled dot-product attention, either in one fused kernel or in blocks of queries.

use crate::Tensor;
use crate::expr::philox::Seed;
use crate::layout::shape::Shape;

/// `softmax(q kᵀ * scale + mask) v`. Shapes: queries `[batch.., heads, L, E]`, keys `[batch.., 1, S, E]`, values `[batch.., 1, S, V]`.
/// All have one dtype and any strides; none is empty. All heads of queries attend to the same keys and values. A query without keys yields zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedAttention<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[batch.., heads, L, S]`: a bool mask says which keys a query attends to, a float mask is added to the scores.
    pub(crate) mask: Option<&'a Tensor>,
    /// Whether query i attends only to keys 0 to i.
    pub(crate) causal: bool,
    pub(crate) scale: f64,
    /// The dropout probability and seed of the attention weights.
    pub(crate) dropout: Option<(f64, Seed)>,
}

/// The tensors of backward besides the inputs of forward.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionBackward<'a> {
    /// The result of forward, `[batch.., heads, L, V]`.
    pub(crate) out: &'a Tensor,
    /// The log-sum-exp of each row of scores: `[batch.., heads, L]`, contiguous, in the compute type. -inf without keys, NaN if a weight is NaN.
    pub(crate) logsumexp: &'a Tensor,
    /// The gradient of the result, with the shape of `out`.
    pub(crate) grad: &'a Tensor,
    /// Receive the gradients of queries, keys and values, each with the shape of its operand.
    pub(crate) results: [&'a Tensor; 3],
}

impl FusedAttention<'_> {
    /// The shape of the scores, `[batch.., heads, L, S]`.
    pub(crate) fn scores(&self) -> Shape {
        let (q, k) = (self.q.shape().dims(), self.k.shape().dims());
        q[..q.len() - 1].iter().chain(&k[k.len() - 2..k.len() - 1]).copied().collect()
    }

    /// The batch dims, which precede the heads.
    pub(crate) fn batch(&self) -> Shape {
        Shape::from(&self.q.shape().dims()[..self.q.rank() - 3])
    }

    /// The sizes heads, L, S, E and V.
    pub(crate) fn sizes(&self) -> [usize; 5] {
        let dim = |t: &Tensor, from_last: usize| t.shape().dims()[t.rank() - from_last];
        [dim(self.q, 3), dim(self.q, 2), dim(self.k, 2), dim(self.q, 1), dim(self.v, 1)]
    }
}

/// How a device splits attention into blocks of queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// Scores of at most this many bytes are computed at once and saved for backward.
    pub(crate) unblocked_bytes: usize,
    /// The approximate size of one block's scores, in bytes.
    pub(crate) block_bytes: usize,
    /// The fewest queries in a block, because every block packs all keys and values again.
    pub(crate) min_queries: usize,
}

impl Blocking {
    /// The smallest [`unblocked_bytes`](Self::unblocked_bytes) of any device.
    pub(crate) const MIN_UNBLOCKED_BYTES: usize = 4 << 20;

    /// 1/32 of the device's memory, in bytes, but at least [`MIN_UNBLOCKED_BYTES`](Self::MIN_UNBLOCKED_BYTES).
    pub(crate) fn memory_fraction(memory: usize) -> usize {
        (memory / 32).max(Blocking::MIN_UNBLOCKED_BYTES)
    }
}
