//! Scaled dot-product attention, either in one fused kernel or in blocks of queries.

use crate::Tensor;
use crate::expr::philox::Seed;
use crate::layout::shape::Shape;

/// `softmax(q kᵀ * scale + mask) v`. Shapes: queries `[batch.., heads, L, E]`, keys `[batch.., 1, S, E]`, values `[batch.., 1, S, V]`, all of the
/// same dtype, with any strides, and not empty. All query heads use the same keys and values. A query that attends to no key yields zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedAttention<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[batch.., heads, L, S]`. A bool mask is true where a query attends to a key. A float mask is added to the scores.
    pub(crate) mask: Option<&'a Tensor>,
    /// Whether query i attends only to keys 0 to i.
    pub(crate) causal: bool,
    pub(crate) scale: f64,
    /// The probability and the seed of dropout on the attention weights; `None` without dropout.
    pub(crate) dropout: Option<(f64, Seed)>,
}

/// The tensors of the backward pass, besides the inputs of the forward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionBackward<'a> {
    /// The result of the forward pass, `[batch.., heads, L, V]`.
    pub(crate) out: &'a Tensor,
    /// The log-sum-exp of each row of scores: `[batch.., heads, L]`, contiguous, in the compute type. -inf for a query without keys, NaN if a
    /// weight is NaN.
    pub(crate) logsumexp: &'a Tensor,
    /// The gradient of the result, with the shape of `out`.
    pub(crate) grad: &'a Tensor,
    /// The tensors that receive the gradients of queries, keys and values, each with the shape of its operand.
    pub(crate) results: [&'a Tensor; 3],
}

impl FusedAttention<'_> {
    /// Returns the shape of the scores, `[batch.., heads, L, S]`.
    pub(crate) fn scores(&self) -> Shape {
        let (q, k) = (self.q.shape().dims(), self.k.shape().dims());
        q[..q.len() - 1].iter().chain(&k[k.len() - 2..k.len() - 1]).copied().collect()
    }

    /// Returns the batch dims, which precede the heads.
    pub(crate) fn batch(&self) -> Shape {
        Shape::from(&self.q.shape().dims()[..self.q.rank() - 3])
    }

    /// Returns the sizes heads, L, S, E and V.
    pub(crate) fn sizes(&self) -> [usize; 5] {
        let dim = |t: &Tensor, from_last: usize| t.shape().dims()[t.rank() - from_last];
        [dim(self.q, 3), dim(self.q, 2), dim(self.k, 2), dim(self.q, 1), dim(self.v, 1)]
    }
}

/// How a device splits attention into blocks of queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// The maximum size of the scores, in bytes, at which all scores are computed at once and saved for the backward pass.
    pub(crate) unblocked_bytes: usize,
    /// The approximate size of one block's scores, in bytes.
    pub(crate) block_bytes: usize,
    /// The minimum number of queries in a block. Every block packs all keys and values again, so smaller blocks waste time.
    pub(crate) min_queries: usize,
}

impl Blocking {
    /// The minimum of [`unblocked_bytes`](Self::unblocked_bytes) over all devices.
    pub(crate) const MIN_UNBLOCKED_BYTES: usize = 4 << 20;

    /// Returns 1/32 of the device's memory, in bytes, but at least [`MIN_UNBLOCKED_BYTES`](Self::MIN_UNBLOCKED_BYTES).
    pub(crate) fn memory_fraction(memory: usize) -> usize {
        (memory / 32).max(Blocking::MIN_UNBLOCKED_BYTES)
    }
}
