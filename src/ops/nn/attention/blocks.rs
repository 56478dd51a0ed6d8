//! Attention in blocks of queries, where no fused kernel computes the result or its gradients.
//!
//! Only the scores of one block exist at a time, so memory grows with the number of queries and of keys, not with their product. The
//! backward pass computes the scores again (Rabe and Staats 2021, "Self-attention does not need O(n²) memory"; Dao et al. 2022,
//! "FlashAttention"). With `is_causal`, keys that no query of a block attends to are skipped.

use std::ops::Range;

use crate::backend::problem::attention::Blocking;
use crate::ops::dispatch::prelude::*;
use crate::ops::linalg::products::scaled_product_into;
use crate::ops::nn::attention::{Attention, BackwardPass, allocate_heads_inside};
use crate::ops::nn::softmax::{masked_softmax, softmax_derivative};

/// Returns the limits of blocks on `device`.
///
/// With `cheap`, blocks take no more time than computing all scores at once, because causal keys are skipped or there is no backward
/// pass. On the CPU, such blocks fit in the caches of the threads. Without `cheap`, blocks only save memory, and are larger.
fn block_limits(device: Device, cheap: bool) -> Result<Blocking> {
    #[cfg(test)]
    if let Some(limits) = crate::ops::nn::attention::tests::BLOCK_LIMITS.get() {
        return Ok(limits);
    }
    let memory = usize::try_from(device.cached_info()?.memory).unwrap_or(usize::MAX);
    Ok(backend::of_device(device).attention_blocking(memory, cheap))
}

/// The partition of an attention into blocks of queries.
#[derive(Debug, Clone)]
pub(crate) struct BlockedAttention {
    /// The dims of the scores without the keys: `[batch.., L]`.
    sizes: Dims,
    /// The size of a block in each dim of `sizes`. The last blocks of a dim may be smaller.
    block_size: Dims,
    keys: usize,
    causal: bool,
    scale: Scalar,
}

/// One block: a range in each dim of the scores, and the keys that it needs.
struct Block {
    /// The range in each dim of [`BlockedAttention::sizes`].
    ranges: Dims<Range<usize>>,
    /// The keys to which queries of this block can attend.
    keys: Range<usize>,
}

impl BlockedAttention {
    /// Partitions an attention. `options.scale` is set; `backward` says whether gradients will be needed.
    ///
    /// Returns `None` if all scores should be computed at once, and if the shapes do not match: the unblocked code then returns the error.
    pub(crate) fn new([q, k, v]: [&Tensor; 3], options: &Attention<'_>, backward: bool) -> Option<BlockedAttention> {
        let Attention { attn_mask: mask, is_causal: causal, dropout_p, scale, .. } = *options;
        if dropout_p != 0.0 || mask.is_some_and(|mask| autograd::is_tracked(&[mask])) {
            return None;
        }
        let [[batch_q @ .., queries, width], [batch_k @ .., keys, _], [batch_v @ .., _, _]] =
            [q, k, v].map(|t| t.shape().dims())
        else {
            return None;
        };
        // In this case the scores need no more memory than the keys.
        if queries <= width {
            return None;
        }
        let broadcast = |a: &Shape, b: &[usize]| a.broadcast("scaled_dot_product_attention", &Shape::from(b)).ok();
        let batch = broadcast(&Shape::from(batch_q), batch_k)?;
        let scores: Shape = batch.dims().iter().copied().chain([*queries, *keys]).collect();
        let limits = block_limits(q.device(), causal || !backward).ok()?;
        let fits = |mask: &Tensor| broadcast(&scores, mask.shape().dims()).as_ref() == Some(&scores);
        if scores.bytes(q.dtype.size()) <= limits.unblocked_bytes
            || broadcast(&batch, batch_v)? != batch
            || !mask.is_none_or(fits)
        {
            return None;
        }
        let even = |n: usize, most: usize| n.div_ceil(n.div_ceil(most.max(1)));
        let room = limits.block_bytes / keys.saturating_mul(q.dtype.size());
        // With eight blocks of queries, the scores computed above the diagonal are about 1/16 of all scores.
        let most = if causal { queries.div_ceil(8) } else { *queries };
        let rows = even(*queries, room.min(most).max(limits.min_queries)).next_multiple_of(8).min(*queries);
        let mut heads = room / rows;
        let mut block_size: Dims = SmallVec::from_slice(&[rows]);
        for &n in batch.dims().iter().rev() {
            block_size.push(even(n, heads));
            heads /= even(n, heads);
        }
        block_size.reverse();
        let sizes = SmallVec::from_slice(&scores.dims()[..batch.rank() + 1]);
        Some(BlockedAttention { sizes, block_size, keys: *keys, causal, scale: Scalar::Float(scale.unwrap_or(1.0)) })
    }

    fn for_each_block(&self, mut f: impl FnMut(&Block) -> Result<()>) -> Result<()> {
        let counts: Dims = self.sizes.iter().zip(&self.block_size).map(|(n, part)| n.div_ceil(*part)).collect();
        for i in 0..counts.iter().product() {
            let mut rest = i;
            let mut ranges: Dims<Range<usize>> = (0..counts.len())
                .rev()
                .map(|d| {
                    let start = rest % counts[d] * self.block_size[d];
                    rest /= counts[d];
                    start..self.sizes[d].min(start + self.block_size[d])
                })
                .collect();
            ranges.reverse();
            let last = ranges[ranges.len() - 1].end;
            let keys = if self.causal { self.keys.min(last) } else { self.keys };
            f(&Block { ranges, keys: 0..keys })?;
        }
        Ok(())
    }

    /// Returns true if every element of `t` belongs to exactly one block, so that blocks can write to `t` instead of adding to it.
    /// With `of_queries`, the second-to-last dim of `t` contains the queries, otherwise the keys.
    fn is_partitioned(&self, t: &Tensor, of_queries: bool) -> bool {
        let (batch, length) = self.sizes.split_at(self.sizes.len() - 1);
        let all_keys = self.block_size[batch.len()] == length[0] && (!self.causal || self.keys <= length[0]);
        t.shape().dims()[..t.rank() - 2] == *batch && (of_queries || all_keys)
    }

    fn weights(&self, op: &'static str, block: &Block, [q, k]: [&Tensor; 2], mask: Option<&Tensor>) -> Result<Tensor> {
        let keys = block.keys(k)?.transpose(-1, -2)?;
        let scores = scaled_product_into(op, None, None, &block.queries(q)?, &keys, self.scale)?;
        let mask = mask.map(|mask| block.scores(mask)).transpose()?;
        let first = block.ranges[block.ranges.len() - 1].start;
        masked_softmax(op, &scores, mask.as_ref(), self.causal.then_some(first))
    }

    /// Computes the result outside the graph.
    pub(crate) fn forward(&self, op: &'static str, inputs: [&Tensor; 3], mask: Option<&Tensor>) -> Result<Tensor> {
        let [q, k, v] = inputs.map(Tensor::detach);
        let mask = mask.map(Tensor::detach);
        let shape: Shape = self.sizes.iter().copied().chain([v.shape().dims()[v.rank() - 1]]).collect();
        let out = match allocate_heads_inside(&shape, &q)? {
            Some(out) => out,
            None => Tensor::empty_with_shape(shape, q.dtype, q.device())?,
        };
        self.for_each_block(|block| {
            let weights = self.weights(op, block, [&q, &k], mask.as_ref())?;
            write_product(op, &block.queries(&out)?, &weights, &block.keys(&v)?, Scalar::Int(1))
        })?;
        Ok(out)
    }

    /// Computes the gradients of the inputs that need one, outside the graph.
    pub(super) fn backward(&self, pass: BackwardPass) -> Result<[Option<Tensor>; 3]> {
        let BackwardPass { op, inputs, mask, grad, slots, wanted } = pass;
        let [q, k, v] = inputs.map(Tensor::detach);
        let (mask, grad) = (mask.map(Tensor::detach), grad.detach());
        let transposed = |t: &Tensor| t.transpose(-1, -2);
        let [slot_q, slot_k, slot_v] = slots;
        let sum = |i: usize, t: &Tensor, slot| {
            wanted[i].then(|| GradientSum::new(t, slot, self.is_partitioned(t, i == 0))).transpose()
        };
        let (dq, dk, dv) = (sum(0, &q, slot_q)?, sum(1, &k, slot_k)?, sum(2, &v, slot_v)?);
        self.for_each_block(|block| {
            let weights = self.weights(op, block, [&q, &k], mask.as_ref())?;
            let grad = block.queries(&grad)?;
            if let Some(dv) = &dv {
                dv.add(op, |t| block.keys(t), &transposed(&weights)?, &grad, Scalar::Int(1))?;
            }
            if dq.is_none() && dk.is_none() {
                return Ok(());
            }
            let upstream = scaled_product_into(op, None, None, &grad, &transposed(&block.keys(&v)?)?, Scalar::Int(1))?;
            let ds = softmax_derivative(&weights, &upstream)?;
            if let Some(dq) = &dq {
                dq.add(op, |t| block.queries(t), &ds, &block.keys(&k)?, self.scale)?;
            }
            if let Some(dk) = &dk {
                dk.add(op, |t| block.keys(t), &transposed(&ds)?, &block.queries(&q)?, self.scale)?;
            }
            Ok(())
        })?;
        let [dq, dk, dv] = [dq, dk, dv].map(|sum| sum.map(GradientSum::finish).transpose());
        Ok([dq?, dk?, dv?])
    }
}

impl Block {
    /// Returns this block's part of `t`, which has dims `[batch.., L, ..]`.
    fn queries(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.ranges[self.ranges.len() - 1], None)
    }

    /// Returns this block's part of `t`, which has dims `[batch.., S, ..]`.
    fn keys(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.keys, None)
    }

    /// Returns this block's part of `t`, which has dims `[batch.., L, S]`.
    fn scores(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.ranges[self.ranges.len() - 1], Some(&self.keys))
    }

    /// Narrows `t` to this block. Missing dims are skipped, and dims of size 1 are kept.
    fn part(&self, t: &Tensor, rows: &Range<usize>, columns: Option<&Range<usize>>) -> Result<Tensor> {
        let batch = &self.ranges[..self.ranges.len() - 1];
        let ranges = columns.into_iter().map(Some).chain(columns.is_none().then_some(None)).chain([Some(rows)]);
        let mut layout = t.layout.clone();
        for (d, range) in (0..t.rank()).rev().zip(ranges.chain(batch.iter().rev().map(Some))) {
            if let Some(range) = range.filter(|_| layout.shape.dims()[d] != 1) {
                layout = layout.narrow("scaled_dot_product_attention", d, range.start, range.len())?;
            }
        }
        Ok(t.with_layout(layout))
    }
}

/// Computes `alpha a b` into `out`, which may have any strides.
fn write_product(op: &'static str, out: &Tensor, a: &Tensor, b: &Tensor, alpha: Scalar) -> Result<()> {
    let made = scaled_product_into(op, Some(out.shallow_clone()), None, a, b, alpha)?;
    // If the product cannot be written to `out` directly, it is in a new tensor and is copied here.
    if !made.shares_storage(out) {
        out.copy_(&made)?;
    }
    Ok(())
}

/// A gradient that is assembled from the contributions of blocks.
struct GradientSum {
    /// The tensor to which the caller wants the gradient written; `None` to allocate a tensor.
    slot: Option<Tensor>,
    /// The tensor to which blocks write if `partitioned`, and otherwise add, in the accumulator's dtype.
    total: Tensor,
    dtype: DType,
    /// Whether every element is written exactly once.
    partitioned: bool,
}

impl GradientSum {
    fn new(like: &Tensor, slot: Option<Tensor>, partitioned: bool) -> Result<GradientSum> {
        let dtype = like.dtype;
        let total = match (&slot, partitioned) {
            (Some(slot), true) => slot.detach(),
            (None, true) => Tensor::empty_with_shape(like.shape(), dtype, like.device())?,
            (_, false) => Tensor::zeros(like.shape(), (dtype.compute().dtype(), like.device()))?,
        };
        Ok(GradientSum { slot, total, dtype, partitioned })
    }

    /// Adds `alpha a b`, summed over broadcast dims, to the part of the gradient that belongs to a block.
    fn add(
        &self,
        op: &'static str,
        part: impl Fn(&Tensor) -> Result<Tensor>,
        a: &Tensor,
        b: &Tensor,
        alpha: Scalar,
    ) -> Result<()> {
        let total = part(&self.total)?;
        match self.partitioned {
            true => write_product(op, &total, a, b, alpha),
            false => {
                total.add_(&scaled_product_into(op, None, None, a, b, alpha)?.sum_to(total.shape())?)?;
                Ok(())
            }
        }
    }

    fn finish(self) -> Result<Tensor> {
        match self.slot {
            _ if self.partitioned => Ok(self.total),
            Some(slot) => {
                slot.copy_(&self.total)?;
                Ok(slot)
            }
            None => self.total.to_dtype(self.dtype),
        }
    }
}
