//! Attention in blocks, where the device has no kernel for it: the scores of some queries at a time, so that memory grows with the lengths and not with their product;
//! backward recomputes them (Rabe and Staats 2021, "Self-attention does not need O(n²) memory"; Dao et al. 2022,
//! "FlashAttention"). With `is_causal`, keys that no query of a block attends to are skipped.

use std::ops::Range;

use smallvec::SmallVec;

use crate::backend::problem::attention::Blocking;
use crate::ops::linalg::products::product_in;
use crate::ops::nn::attention::{Attention, empty_heads_inside};
use crate::ops::nn::softmax::{masked_softmax, softmax_derivative};
use crate::tensor::Dims;
use crate::{DType, Device, Result, Scalar, Shape, Tensor, autograd, backend};

/// Blocks are `cheap` on processors where keys are left out, which takes less time, or no backward makes scores again, and lie
/// in the caches of the threads that share them. Elsewhere they are there for the memory's sake.
fn blocking(device: Device, cheap: bool) -> Result<Blocking> {
    #[cfg(test)]
    if let Some(limits) = crate::ops::nn::attention::tests::LIMITS.get() {
        return Ok(limits);
    }
    let memory = usize::try_from(device.known()?.memory).unwrap_or(usize::MAX);
    Ok(backend::of(device).blocking(memory, cheap))
}

/// How queries are cut into blocks, and what they see.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    /// Of the scores, but for the keys: `[batch.., L]`.
    sizes: Dims,
    /// Of a block; the last ones may be less.
    tile: Dims,
    keys: usize,
    causal: bool,
    scale: Scalar,
}

/// One of them.
struct Block {
    /// In each dim of [`Blocks::sizes`].
    at: Dims<Range<usize>>,
    /// Those that may be seen.
    keys: Range<usize>,
}

impl Blocks {
    /// None where all scores are made in one go, and where shapes do not fit, which the other way reports. The options' scale is given;
    /// `backward` says whether there will be one.
    pub(crate) fn new([q, k, v]: [&Tensor; 3], options: &Attention<'_>, backward: bool) -> Option<Blocks> {
        let Attention { attn_mask: mask, is_causal: causal, dropout_p, scale, .. } = *options;
        if dropout_p != 0.0 || mask.is_some_and(|mask| autograd::is_tracked(&[mask])) {
            return None;
        }
        let [[batch_q @ .., queries, width], [batch_k @ .., keys, _], [batch_v @ .., _, _]] =
            [q, k, v].map(|t| t.shape().dims())
        else {
            return None;
        };
        // Scores that are no larger than the keys.
        if queries <= width {
            return None;
        }
        let broadcast = |a: &Shape, b: &[usize]| a.broadcast("scaled_dot_product_attention", &Shape::from(b)).ok();
        let batch = broadcast(&Shape::from(batch_q), batch_k)?;
        let scores: Shape = batch.dims().iter().copied().chain([*queries, *keys]).collect();
        let limits = blocking(q.device(), causal || !backward).ok()?;
        let fits = |mask: &Tensor| broadcast(&scores, mask.shape().dims()).as_ref() == Some(&scores);
        if scores.bytes(q.dtype.size()) <= limits.unblocked_bytes
            || broadcast(&batch, batch_v)? != batch
            || !mask.is_none_or(fits)
        {
            return None;
        }
        let even = |n: usize, most: usize| n.div_ceil(n.div_ceil(most.max(1)));
        let room = limits.block_bytes / keys.saturating_mul(q.dtype.size());
        // Eight blocks below each other skip all but a sixteenth of the scores above the diagonal.
        let most = if causal { queries.div_ceil(8) } else { *queries };
        let rows = even(*queries, room.min(most).max(limits.min_queries)).next_multiple_of(8).min(*queries);
        let mut heads = room / rows;
        let mut tile: Dims = SmallVec::from_slice(&[rows]);
        for &n in batch.dims().iter().rev() {
            tile.push(even(n, heads));
            heads /= even(n, heads);
        }
        tile.reverse();
        let sizes = SmallVec::from_slice(&scores.dims()[..batch.rank() + 1]);
        Some(Blocks { sizes, tile, keys: *keys, causal, scale: Scalar::Float(scale.unwrap_or(1.0)) })
    }

    fn each(&self, mut f: impl FnMut(&Block) -> Result<()>) -> Result<()> {
        let counts: Dims = self.sizes.iter().zip(&self.tile).map(|(n, part)| n.div_ceil(*part)).collect();
        for i in 0..counts.iter().product() {
            let mut rest = i;
            let mut at: Dims<Range<usize>> = (0..counts.len())
                .rev()
                .map(|d| {
                    let start = rest % counts[d] * self.tile[d];
                    rest /= counts[d];
                    start..self.sizes[d].min(start + self.tile[d])
                })
                .collect();
            at.reverse();
            let last = at[at.len() - 1].end;
            let keys = if self.causal { self.keys.min(last) } else { self.keys };
            f(&Block { at, keys: 0..keys })?;
        }
        Ok(())
    }

    /// Whether every element of `t`, which has queries before its last dim or otherwise keys, is in exactly one block: then blocks
    /// write it, otherwise they add to it.
    fn is_partitioned(&self, t: &Tensor, of_queries: bool) -> bool {
        let (batch, length) = self.sizes.split_at(self.sizes.len() - 1);
        let all_keys = self.tile[batch.len()] == length[0] && (!self.causal || self.keys <= length[0]);
        t.shape().dims()[..t.rank() - 2] == *batch && (of_queries || all_keys)
    }

    /// The weights of the values in a block.
    fn weights(&self, op: &'static str, block: &Block, [q, k]: [&Tensor; 2], mask: Option<&Tensor>) -> Result<Tensor> {
        let keys = block.keys(k)?.transpose(-1, -2)?;
        let scores = product_in(op, None, None, &block.queries(q)?, &keys, self.scale)?;
        let mask = mask.map(|mask| block.scores(mask)).transpose()?;
        let first = block.at[block.at.len() - 1].start;
        masked_softmax(op, &scores, mask.as_ref(), self.causal.then_some(first))
    }

    /// The result, outside the graph.
    pub(crate) fn forward(&self, op: &'static str, inputs: [&Tensor; 3], mask: Option<&Tensor>) -> Result<Tensor> {
        let [q, k, v] = inputs.map(Tensor::detach);
        let mask = mask.map(Tensor::detach);
        let shape: Shape = self.sizes.iter().copied().chain([v.shape().dims()[v.rank() - 1]]).collect();
        let out = match empty_heads_inside(&shape, &q)? {
            Some(out) => out,
            None => Tensor::empty_like_shape(shape, q.dtype, q.device())?,
        };
        self.each(|block| {
            let weights = self.weights(op, block, [&q, &k], mask.as_ref())?;
            write(op, &block.queries(&out)?, &weights, &block.keys(&v)?, Scalar::Int(1))
        })?;
        Ok(out)
    }

    /// The gradients of queries, keys and values that are wanted, outside the graph, in `slots` where these are given.
    pub(crate) fn backward(
        &self,
        op: &'static str,
        inputs: [&Tensor; 3],
        mask: Option<&Tensor>,
        grad: &Tensor,
        slots: [Option<Tensor>; 3],
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let [q, k, v] = inputs.map(Tensor::detach);
        let (mask, grad) = (mask.map(Tensor::detach), grad.detach());
        let transposed = |t: &Tensor| t.transpose(-1, -2);
        let [slot_q, slot_k, slot_v] = slots;
        let sum = |i: usize, t: &Tensor, slot| {
            wanted[i].then(|| GradientSum::new(t, slot, self.is_partitioned(t, i == 0))).transpose()
        };
        let (dq, dk, dv) = (sum(0, &q, slot_q)?, sum(1, &k, slot_k)?, sum(2, &v, slot_v)?);
        self.each(|block| {
            let weights = self.weights(op, block, [&q, &k], mask.as_ref())?;
            let grad = block.queries(&grad)?;
            if let Some(dv) = &dv {
                dv.add(op, |t| block.keys(t), &transposed(&weights)?, &grad, Scalar::Int(1))?;
            }
            if dq.is_none() && dk.is_none() {
                return Ok(());
            }
            let upstream = product_in(op, None, None, &grad, &transposed(&block.keys(&v)?)?, Scalar::Int(1))?;
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
    /// The part of `t`, `[batch.., L, ..]`.
    fn queries(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.at[self.at.len() - 1], None)
    }

    /// Of `t`, `[batch.., S, ..]`.
    fn keys(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.keys, None)
    }

    /// Of `t`, `[batch.., L, S]`.
    fn scores(&self, t: &Tensor) -> Result<Tensor> {
        self.part(t, &self.at[self.at.len() - 1], Some(&self.keys))
    }

    /// Dims that are missing or broadcast stay as they are.
    fn part(&self, t: &Tensor, rows: &Range<usize>, columns: Option<&Range<usize>>) -> Result<Tensor> {
        let batch = &self.at[..self.at.len() - 1];
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

/// `alpha a b` into `out`.
fn write(op: &'static str, out: &Tensor, a: &Tensor, b: &Tensor, alpha: Scalar) -> Result<()> {
    let made = product_in(op, Some(out.shallow_clone()), None, a, b, alpha)?;
    // The product allocates its own result where it cannot write to `out`.
    if !made.shares_storage(out) {
        out.copy_(&made)?;
    }
    Ok(())
}

/// A gradient that blocks have parts of.
struct GradientSum {
    /// Where it goes, if somebody said.
    slot: Option<Tensor>,
    /// What the blocks write to, or, of the type it is summed in, add to.
    total: Tensor,
    dtype: DType,
    /// Whether every element is written once.
    partitioned: bool,
}

impl GradientSum {
    /// Of the shape and dtype of `like`.
    fn new(like: &Tensor, slot: Option<Tensor>, partitioned: bool) -> Result<GradientSum> {
        let dtype = like.dtype;
        let total = match (&slot, partitioned) {
            (Some(slot), true) => slot.detach(),
            (None, true) => Tensor::empty_like_shape(like.shape(), dtype, like.device())?,
            (_, false) => Tensor::zeros(like.shape(), (dtype.compute().dtype(), like.device()))?,
        };
        Ok(GradientSum { slot, total, dtype, partitioned })
    }

    /// `alpha a b`, summed over dims that are broadcast, in the part of a block.
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
            true => write(op, &total, a, b, alpha),
            false => {
                total.add_(&product_in(op, None, None, a, b, alpha)?.sum_to(total.shape())?)?;
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
