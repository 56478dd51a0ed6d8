//! Attention in one kernel, on devices that have a fused kernel. The kernel stores the result and one number for each query, but no
//! scores.

use crate::autograd::RandomSource;
use crate::backend::problem::attention::{AttentionBackward, FusedAttention};
use crate::device::capture::is_capturing;
use crate::expr::philox::Seed;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::attention::{Attention, BackwardPass, allocate_heads_inside};
use crate::ops::random::next_seed;

/// An attention that the device's fused kernel has computed, with the data for its backward pass.
pub(crate) struct Fused {
    call: FusedParams,
    out: Saved,
    logsumexp: Saved,
}

/// The parameters of a fused attention, without its tensors.
struct FusedParams {
    /// The dims of the scores before the last two. All operands are broadcast to these dims.
    batch: Shape,
    /// Whether the last batch dim contains heads that share keys and values.
    grouped: bool,
    causal: bool,
    scale: f64,
    dropout: Option<(f64, Seed)>,
}

/// The operands as views with the shapes that the kernel expects.
struct Views {
    inputs: [Tensor; 3],
    mask: Option<Tensor>,
}

impl Fused {
    /// Computes the result outside the graph, and keeps the data for the backward pass. `options.scale` is set. With grouped heads, the
    /// heads that share keys are a separate dim.
    ///
    /// Returns `None` if the device has no fused kernel for the result or, with `tracked`, for the gradients; if the gradient of the mask is
    /// needed; and if the operands do not match, in which case the code without a fused kernel returns the error.
    pub(crate) fn forward(
        op: &'static str,
        inputs: [&Tensor; 3],
        options: &Attention<'_>,
        tracked: bool,
    ) -> Result<Option<(Tensor, Fused)>> {
        let (q, mask) = (inputs[0], options.attn_mask);
        let Some(mut call) = FusedParams::new(op, inputs, options) else { return Ok(None) };
        let views = call.views(inputs, mask);
        if !backend::of_device(q.device()).has_attention(&call.problem(&views), tracked)? {
            return Ok(None);
        }
        if let Some((_, seed)) = &mut call.dropout {
            *seed = next_seed(q.device())?.seed;
        }
        let a = call.problem(&views);
        let [_, queries, _, _, value_width] = a.sizes();
        let shape: Shape = call.batch.dims().iter().copied().chain([queries, value_width]).collect();
        let out = match allocate_heads_inside(&shape, q)? {
            Some(out) => out,
            None => Tensor::empty_with_shape(shape, q.dtype, q.device())?,
        };
        let rows = a.q.shape().dims().split_last().map(|(_, rows)| Shape::from(rows)).unwrap_or_default();
        let logsumexp = Tensor::empty_with_shape(rows, q.dtype.compute().dtype(), q.device())?;
        let view = call.view(&out, false);
        backend::fill([&out, &logsumexp], |b| b.attention(&a, &view, &logsumexp))?;
        let save = if tracked { Saved::new } else { Saved::without_hooks };
        let (saved, logsumexp) = (save(&out), save(&logsumexp));
        Ok(Some((out, Fused { call, out: saved, logsumexp })))
    }

    /// Computes the gradients of the inputs that need one, outside the graph.
    pub(super) fn backward(&self, pass: BackwardPass) -> Result<[Option<Tensor>; 3]> {
        let BackwardPass { op, inputs, mask, grad, slots, wanted } = pass;
        let call = &self.call;
        let views = call.views(inputs, mask);
        let a = call.problem(&views);
        let (out, grad) = (call.view(self.out.get(op)?, false), call.view(grad, false));
        // For a broadcast operand, the kernel writes one gradient per copy. The operand's gradient is the sum of these gradients.
        let made = inputs.iter().zip(&views.inputs).zip(slots).enumerate().map(|(i, ((t, view), slot))| {
            let whole = t.numel() == view.numel();
            let made = match slot.filter(|_| whole) {
                Some(slot) => slot.detach(),
                None if whole => Tensor::empty_with_shape(t.shape(), t.dtype, t.device())?,
                None => Tensor::empty_with_shape(call.broadcast(t, i > 0), t.dtype, t.device())?,
            };
            Ok((whole, made))
        });
        let made = made.collect::<Result<SmallVec<[(bool, Tensor); 3]>>>()?;
        let gradient_views = [0, 1, 2].map(|i| call.view(&made[i].1, i > 0));
        let results = gradient_views.each_ref();
        let of = AttentionBackward { out: &out, logsumexp: self.logsumexp.get(op)?, grad: &grad, results };
        backend::launch(results, |b| b.attention_backward(&a, &of))?;
        let mut gradients = [None, None, None];
        for (i, (whole, made)) in made.into_iter().enumerate().filter(|(i, _)| wanted[*i]) {
            gradients[i] = Some(if whole { made } else { made.sum_to(inputs[i].shape())? });
        }
        Ok(gradients)
    }

    /// Returns the seeds with which recorded operations drop the same weights as the kernel.
    pub(crate) fn seeds(&self) -> SmallVec<[RandomSource; 1]> {
        self.call.dropout.iter().map(|(_, seed)| RandomSource { seed: *seed, base: None }).collect()
    }
}

impl FusedParams {
    fn new(op: &'static str, inputs: [&Tensor; 3], options: &Attention<'_>) -> Option<FusedParams> {
        let Attention { attn_mask: mask, is_causal: causal, dropout_p, scale, .. } = *options;
        let is_probability = (0.0..=1.0).contains(&dropout_p);
        let tracked = mask.is_some_and(|mask| autograd::is_tracked(&[mask]));
        // In a captured graph, the seeds are in device memory, which this kernel does not read.
        let captured = dropout_p != 0.0 && is_capturing(inputs[0].device());
        if tracked || captured || !is_probability || inputs.iter().any(|t| t.numel() == 0) {
            return None;
        }
        let [[batch_q @ .., queries, _], [batch_k @ .., keys, _], [batch_v @ .., _, _]] =
            inputs.map(|t| t.shape().dims())
        else {
            return None;
        };
        let batch = Shape::from(batch_q).broadcast(op, &Shape::from(batch_k)).ok()?;
        let scores: Shape = batch.dims().iter().copied().chain([*queries, *keys]).collect();
        let fits = |shape: &Shape, t: &[usize]| shape.broadcast(op, &Shape::from(t)).is_ok_and(|all| all == *shape);
        if !fits(&batch, batch_v) || mask.is_some_and(|mask| !fits(&scores, mask.shape().dims())) {
            return None;
        }
        let last = |dims: &[usize]| dims.last().copied().unwrap_or(1);
        let grouped = last(batch_q) > 1 && last(batch_k) == 1 && last(batch_v) == 1;
        let dropout = (dropout_p != 0.0).then(|| (dropout_p, Seed::default()));
        Some(FusedParams { batch, grouped, causal, scale: scale.unwrap_or(1.0), dropout })
    }

    fn problem<'a>(&self, views: &'a Views) -> FusedAttention<'a> {
        let [q, k, v] = views.inputs.each_ref();
        let FusedParams { causal, scale, dropout, .. } = *self;
        FusedAttention { q, k, v, mask: views.mask.as_ref(), causal, scale, dropout }
    }

    fn views(&self, inputs: [&Tensor; 3], mask: Option<&Tensor>) -> Views {
        let [q, k, v] = inputs;
        let keys = k.shape().dims()[k.rank() - 2];
        let of_scores = |mask: &Tensor| {
            let queries = q.shape().dims()[q.rank() - 2];
            let scores = self.batch.dims().iter().copied().chain([queries, keys]).collect();
            self.with_heads(mask, mask.layout.broadcast_to(&scores))
        };
        Views { inputs: [self.view(q, false), self.view(k, true), self.view(v, true)], mask: mask.map(of_scores) }
    }

    /// Views `[batch.., L, E]` as `[batch.., heads, L, E]`.
    fn view(&self, t: &Tensor, of_keys: bool) -> Tensor {
        self.with_heads(t, t.layout.broadcast_to(&self.broadcast(t, of_keys)))
    }

    /// Inserts a heads dim of size 1 before the last two dims, unless the heads are grouped.
    fn with_heads(&self, t: &Tensor, layout: Layout) -> Tensor {
        let rank = layout.shape.rank();
        t.with_layout(if self.grouped { layout } else { layout.insert(rank - 2) })
    }

    /// Returns the shape of `t` broadcast to all batch dims, except that keys keep size 1 in the dim of heads that share them.
    fn broadcast(&self, t: &Tensor, of_keys: bool) -> Shape {
        let (batch, dims) = (self.batch.dims(), t.shape().dims());
        let shared = usize::from(self.grouped && of_keys);
        let outer = batch[..batch.len() - shared].iter().copied().chain((shared > 0).then_some(1));
        outer.chain(dims[dims.len() - 2..].iter().copied()).collect()
    }
}
