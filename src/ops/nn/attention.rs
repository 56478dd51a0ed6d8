//! Scaled dot-product attention.
//!
//! On GPUs, `fused` computes attention with one kernel, and the gradients with two more; on x86-64 processors, it computes attention whose
//! gradient is not needed or is computed from new scores. Otherwise, attention consists of two batched products with a softmax between
//! them, in three launches forward and five backward; `blocks` limits the memory for long sequences.
//!
//! The epilogue of the first product applies the scale, and the softmax applies the mask. Heads are strided views: queries, keys and
//! values may be views of one projection, and query heads that share a key head read this key head with batch stride 0. The result is
//! stored as `[batch, length, heads, width]`, so that merging the heads copies nothing.

mod blocks;
mod fused;

#[cfg(test)]
mod tests;

use crate::autograd::replay_draws;
use crate::ops::dispatch::prelude::*;
use crate::ops::linalg::gemm::product_shape;
use crate::ops::linalg::products::{scaled_product, scaled_product_into};
use crate::ops::nn::attention::blocks::BlockedAttention;
use crate::ops::nn::attention::fused::Fused;
use crate::ops::nn::softmax::{masked_softmax, softmax_derivative};

/// Options of [`Tensor::scaled_dot_product_attention`]. By default every query attends to every key.
///
/// ```
/// use claystone::{Device, Tensor, ops::Attention};
/// let x = Tensor::ones(&[1, 2, 5, 4], Device::Cpu)?;
/// let y = x.scaled_dot_product_attention(&x, &x, Attention { is_causal: true, ..Attention::default() })?;
/// assert_eq!(y.shape(), x.shape());
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention<'a> {
    /// A mask that broadcasts to the scores, `[.., L, S]`. A bool mask is true for keys that take part; a float mask is added to the
    /// scores.
    pub attn_mask: Option<&'a Tensor>,
    /// The probability of dropping an attention weight.
    pub dropout_p: f64,
    /// Whether query i attends only to keys 0 to i. A mask can exclude some of these keys.
    pub is_causal: bool,
    /// The factor of the scores; if `None`, `1 / sqrt(E)`.
    pub scale: Option<f64>,
    /// Whether several heads of queries share one head of keys and values (grouped-query attention).
    pub enable_gqa: bool,
}

impl<'a> Attention<'a> {
    /// Returns the options as arguments of a call by name, in which the mask is the last tensor.
    fn arguments(&self) -> [Argument; 4] {
        [self.dropout_p.into(), self.is_causal.into(), self.scale.into(), self.enable_gqa.into()]
    }

    /// Reads the options of a call by name: the arguments from index `i` on, and the tensor at index `mask` as the mask.
    fn from_args(args: &Args<'a>, i: usize, mask: usize) -> Result<Attention<'a>> {
        Ok(Attention {
            attn_mask: args.optional_tensor(mask),
            dropout_p: args.float(i)?,
            is_causal: args.bool(i + 1)?,
            scale: args.read_optional(i + 2, Args::float)?,
            enable_gqa: args.bool(i + 3)?,
        })
    }
}

operations! {
    scaled_dot_product_attention(query: x, key: x, value: x, attn_mask: x?,
        dropout_p: float = 0, is_causal: bool = false, scale: float?, enable_gqa: bool = false) functional:
        NeuralNetwork, Floats -> Same, differentiable
        => |a| a.tensor(0)?.scaled_dot_product_attention(a.tensor(1)?, a.tensor(2)?, Attention::from_args(a, 0, 3)?);
    scaled_dot_product_attention_math(query: x, key: x, value: x, attn_mask: x?,
        dropout_p: float = 0, is_causal: bool = false, scale: float?, enable_gqa: bool = false)
        "_scaled_dot_product_attention_math": NeuralNetwork, Floats -> Same
        => |a| a.tensor(0)?.scaled_dot_product_attention_math(a.tensor(1)?, a.tensor(2)?, Attention::from_args(a, 0, 3)?);
    packed_attention(input: x, attn_mask: x?,
        heads: size, dropout_p: float = 0, is_causal: bool = false, scale: float?, enable_gqa: bool = false)
        "nn.functional.scaled_dot_product_attention": NeuralNetwork, Floats -> Same, differentiable
        => |a| a.tensor(0)?.packed_attention(a.size(0)?, Attention::from_args(a, 1, 1)?);
}

impl Tensor {
    /// Computes `softmax(q kᵀ * scale + mask) v` with this tensor as the queries (PyTorch's `scaled_dot_product_attention`).
    ///
    /// Queries are `[.., L, E]`, keys `[.., S, E]` and values `[.., S, V]`; the leading dims broadcast, and the result is `[.., L, V]`. A
    /// query that attends to no key gives zeros. Floats of one dtype. Differentiable, also with respect to a float mask.
    ///
    /// On GPUs, one kernel stores only the result and one number for each query, so memory grows with `L + S` and not with `L S`, also
    /// with a mask and with dropout. The kernel supports E and V up to 256, or less if a device has little local memory. In the following
    /// cases, all scores or blocks of scores are stored instead:
    /// - the gradient of a mask or a second derivative is needed,
    /// - dropout is captured in a [`Graph`](crate::Graph),
    /// - f16 or bf16 with more than 16 queries on a device with tensor cores.
    ///
    /// If there are many scores, other devices compute them in blocks of queries, and compute them again in the backward pass, which saves
    /// the same memory. On the CPU, this starts above 4 MiB of scores if `is_causal` is set or no gradient is needed, otherwise above 1/32
    /// of the device's memory. Blocks are not used with dropout, for the gradient of a mask, or if L is at most E. Processors with AVX2
    /// keep the scores in their caches instead, if no gradient is needed or the scores are computed again for it: for f32, f16 and bf16
    /// (bf16 if no faster instructions multiply it), at least 16 queries, keys of adjacent elements, and no dropout.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and for a mask of integers; [`Error::Invalid`] for a `dropout_p` outside `0.0..1.0`.
    #[track_caller]
    pub fn scaled_dot_product_attention(&self, key: &Tensor, value: &Tensor, options: Attention<'_>) -> Result<Tensor> {
        let tensors: SmallVec<[&Tensor; 4]> = [self, key, value].into_iter().chain(options.attn_mask).collect();
        return_replacement!("scaled_dot_product_attention", tensors; || options.arguments().into());
        attend(self, key, value, options)
    }

    /// Computes [`Tensor::scaled_dot_product_attention`] with all scores at once. Also returns the attention weights, `[.., L, S]`, from
    /// which a gradient can be computed (PyTorch's `_scaled_dot_product_attention_math`). Not recorded for autograd. Fails as
    /// [`Tensor::scaled_dot_product_attention`] does, and with [`Error::Invalid`] for `enable_gqa`.
    #[track_caller]
    pub fn scaled_dot_product_attention_math(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: Attention<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let op = "scaled_dot_product_attention_math";
        let tensors: SmallVec<[&Tensor; 4]> = [self, key, value].into_iter().chain(options.attn_mask).collect();
        return_replacement!(op, tensors; || options.arguments().into());
        invalid!(op if options.enable_gqa, "attention weights with enable_gqa are not supported: expand keys and values");
        check(op, self, key, value, &options)?;
        let scale = Some(options.scale.unwrap_or_else(|| default_scale(self.shape().dims()[self.rank() - 1])));
        no_grad(|| attend_unblocked(op, [self, key, value], Attention { scale, ..options }))
    }

    /// Computes self-attention of all heads from one projection that holds queries, keys and values: `[.., L, 3 E]` gives `[.., L, E]`.
    ///
    /// Each of the three parts has `heads` heads of width E / heads. The result is PyTorch's `scaled_dot_product_attention` of the three
    /// parts, as in `nn.MultiheadAttention` between its projections. Nothing is copied, forward or backward. Fails as
    /// [`Tensor::scaled_dot_product_attention`] does, and with [`Error::Invalid`] for a width that is not 3 times a multiple of `heads`.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops::Attention};
    /// let projected = Tensor::ones(&[2, 5, 3 * 8], Device::Cpu)?;
    /// let y = projected.packed_attention(4, Attention { is_causal: true, ..Attention::default() })?;
    /// assert_eq!(y.shape().dims(), [2, 5, 8]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn packed_attention(&self, heads: usize, options: Attention<'_>) -> Result<Tensor> {
        let tensors: SmallVec<[&Tensor; 2]> = std::iter::once(self).chain(options.attn_mask).collect();
        let arguments = || std::iter::once(heads.into()).chain(options.arguments()).collect();
        return_replacement!(op = "packed_attention", tensors; arguments);
        cast_first!(autocast_inputs(op, &[self])?, |x| x[0].packed_attention(heads, options));
        self.dtype.check_float(op)?;
        let packed = PackedProjection::new(op, self.shape(), heads)?;
        let (scale, is_causal) = (options.scale.unwrap_or_else(|| default_scale(packed.width)), options.is_causal);
        let [q, k, v] = packed.layouts(&self.layout).map(|layout| self.with_layout(layout));
        let options = Attention { scale: Some(scale), ..options };
        let [rows @ .., length, _] = q.shape().dims() else { unreachable!("[.., heads, L, width]") };
        let scores = rows.iter().chain([length, length]).copied().collect();
        check_mask(op, self, options.attn_mask, &scores)?;
        if let Some((out, recomputed)) = Recomputed::forward(op, [&q, &k, &v], &options, autograd::is_tracked(&[self]))?
        {
            let out = packed.merge_heads(&out)?;
            return Ok(packed.record(op, out, self, options, recomputed));
        }
        if options.dropout_p > 0.0 || options.attn_mask.is_some_and(|mask| autograd::is_tracked(&[mask])) {
            let [q, k, v] = packed.parts(self)?;
            return packed.merge_heads(&attend(&q, &k, &v, options).with_op(op)?);
        }
        let (out, weights) = attend_unblocked(op, [&q, &k, &v], options).with_op(op)?;
        let out = packed.merge_heads(&out)?;
        let save = |t| Saved::for_inputs(&[self], t);
        let (saved, mask) = ([self, &weights].map(save), options.attn_mask.map(save));
        Ok(record_gradients(op, out, &[self], move |_, grad| {
            let all = saved[0].get(op)?;
            let [q, k, v] = packed.parts(all)?;
            let grad = packed.split_heads(grad)?;
            // For double backward, all steps are computed by recorded operations.
            let twice = autograd::is_tracked(&[all, &grad]);
            let weights = match twice {
                true => {
                    let attn_mask = mask.as_ref().map(|m| m.get(op)).transpose()?;
                    let options = Attention { attn_mask, is_causal, scale: Some(scale), ..Attention::default() };
                    attend_unblocked(op, [&q, &k, &v], options)?.1
                }
                false => saved[1].unpack(op)?,
            };
            let transposed = |t: &Tensor| t.transpose(-1, -2);
            let slots: [Option<Tensor>; 3] = match twice {
                true => [None, None, None],
                false => {
                    let whole = Tensor::empty_with_shape(all.shape(), all.dtype, all.device())?;
                    packed.layouts(&whole.layout).map(|layout| Some(whole.with_layout(layout)))
                }
            };
            let [to_q, to_k, to_v] = slots;
            let whole = to_q.as_ref().map(|q| q.with_layout(Layout::contiguous(all.shape().clone())));
            let one = Scalar::Int(1);
            let dv = scaled_product_into(op, to_v, None, &transposed(&weights)?, &grad, one)?;
            let ds = softmax_derivative(&weights, &scaled_product_into(op, None, None, &grad, &transposed(&v)?, one)?)?;
            let dq = scaled_product_into(op, to_q, None, &ds, &k, scale.into())?;
            let dk = scaled_product_into(op, to_k, None, &transposed(&ds)?, &q, scale.into())?;
            match whole {
                Some(whole) => Ok(whole),
                None => {
                    let parts = [dq, dk, dv].iter().map(|t| packed.merge_heads(t)).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&parts, -1)
                }
            }
        }))
    }
}

/// The layout of a tensor `[.., L, 3 * heads * width]` that holds queries, keys and values.
#[derive(Clone)]
struct PackedProjection {
    /// The dims `[.., L]`.
    rows: Shape,
    heads: usize,
    /// The width of one head.
    width: usize,
}

impl PackedProjection {
    fn new(op: &'static str, shape: &Shape, heads: usize) -> Result<PackedProjection> {
        let divides = |all: &usize| heads.checked_mul(3).is_some_and(|n| n > 0 && all.is_multiple_of(n));
        match shape.dims() {
            [rows @ .., all] if divides(all) && !rows.is_empty() => {
                Ok(PackedProjection { rows: Shape::from(rows), heads, width: all / (3 * heads) })
            }
            _ => fail!(op, "shape {shape} is not [.., L, 3 E] with E a multiple of the {heads} heads"),
        }
    }

    /// Returns the layouts of queries, keys and values in `all`, each `[.., heads, L, width]`.
    fn layouts(&self, all: &Layout) -> [Layout; 3] {
        let (rank, last) = (self.rows.rank(), all.strides[all.strides.len() - 1]);
        let (batch, length) = self.rows.dims().split_at(rank - 1);
        let shape: Shape = batch.iter().copied().chain([self.heads, length[0], self.width]).collect();
        let strides: Dims<isize> = (all.strides[..rank - 1].iter().copied())
            .chain([last * self.width as isize, all.strides[rank - 1], last])
            .collect();
        [0, 1, 2].map(|i| {
            let skipped = (i * self.heads * self.width) as isize * last;
            Layout { shape: shape.clone(), strides: strides.clone(), offset: all.offset.wrapping_add_signed(skipped) }
        })
    }

    /// Records `out`, computed from `all` by [`Recomputed::forward`]. The gradients of queries, keys and values are views of one tensor.
    fn record(
        self,
        op: &'static str,
        out: Tensor,
        all: &Tensor,
        options: Attention<'_>,
        recomputed: Recomputed,
    ) -> Tensor {
        if !autograd::is_tracked(&[all]) {
            return out;
        }
        let (saved, saved_options) = (Saved::new(all), SavedOptions::new(options));
        autograd::record_differentiable(op, out, &[all], move |ctx| {
            let (all, options) = (saved.get(op)?, saved_options.options(op)?);
            let [q, k, v] = self.parts(all)?;
            if ctx.create_graph() {
                return ctx.differentiate_through(&self.merge_heads(&recomputed.attend_recorded(
                    op,
                    [&q, &k, &v],
                    options,
                )?)?);
            }
            let whole = Tensor::empty_with_shape(all.shape(), all.dtype, all.device())?;
            let slots = self.layouts(&whole.layout).map(|layout| Some(whole.with_layout(layout)));
            let (mask, grad) = (options.attn_mask, &self.split_heads(&ctx.grad()?)?);
            recomputed.backward(BackwardPass { op, inputs: [&q, &k, &v], mask, grad, slots, wanted: [true; 3] })?;
            Ok(Gradients::from_iter([Some(whole)]))
        })
    }

    /// Returns queries, keys and values in `all` as recorded views, with the layouts of [`PackedProjection::layouts`].
    fn parts(&self, all: &Tensor) -> Result<[Tensor; 3]> {
        let each = self.heads * self.width;
        let part = |i: usize| self.split_heads(&all.narrow(-1, i * each, each)?);
        Ok([part(0)?, part(1)?, part(2)?])
    }

    /// Views `[.., L, E]` as `[.., heads, L, width]`.
    fn split_heads(&self, t: &Tensor) -> Result<Tensor> {
        t.unflatten(-1, [self.heads, self.width])?.transpose(-2, -3)
    }

    /// Views `[.., heads, L, width]` as `[.., L, E]`.
    fn merge_heads(&self, t: &Tensor) -> Result<Tensor> {
        t.transpose(-2, -3)?.flatten(-2, -1)
    }
}

fn default_scale(width: usize) -> f64 {
    1.0 / (width as f64).sqrt()
}

/// Computes and records attention. If there are many scores, computes them in blocks of queries.
fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: Attention<'_>) -> Result<Tensor> {
    let op = "scaled_dot_product_attention";
    cast_first!(autocast_inputs(op, &[q, k, v])?, |x| attend(&x[0], &x[1], &x[2], options));
    check(op, q, k, v, &options)?;
    if options.enable_gqa {
        return attend_grouped(op, [q, k, v], options);
    }
    let width = q.shape().dims()[q.rank() - 1];
    let options = Attention { scale: Some(options.scale.unwrap_or_else(|| default_scale(width))), ..options };
    let tracked = autograd::is_tracked(&[q, k, v]);
    let Some((out, recomputed)) = Recomputed::forward(op, [q, k, v], &options, tracked)? else {
        return Ok(attend_unblocked(op, [q, k, v], options)?.0);
    };
    if !tracked {
        return Ok(out);
    }
    let (saved, saved_options) = ([q, k, v].map(Saved::new), SavedOptions::new(options));
    Ok(autograd::record_differentiable(op, out, &[q, k, v], move |ctx| {
        let inputs = [saved[0].get(op)?, saved[1].get(op)?, saved[2].get(op)?];
        let options = saved_options.options(op)?;
        if ctx.create_graph() {
            return ctx.differentiate_through(&recomputed.attend_recorded(op, inputs, options)?);
        }
        let (slots, wanted) = ([0, 1, 2].map(|i| ctx.slot(i)), [0, 1, 2].map(|i| ctx.needs_gradient(i)));
        let (mask, grad) = (options.attn_mask, &ctx.grad()?);
        let gradients = recomputed.backward(BackwardPass { op, inputs, mask, grad, slots, wanted })?;
        Ok(gradients.into_iter().collect())
    }))
}

/// Checks the operands of an attention. Errors name the shapes that the caller passed.
fn check(op: &'static str, q: &Tensor, k: &Tensor, v: &Tensor, options: &Attention<'_>) -> Result<()> {
    same_dtype(op, &[q, k, v])?;
    same_device(op, &[q, k, v])?;
    q.dtype.check_float(op)?;
    let mismatch =
        |t: &Tensor, hint| Err(Error::ShapeMismatch { op, lhs: q.shape().clone(), rhs: t.shape().clone(), hint });
    let ([.., width], [.., keys, key_width], [.., values, _]) = (q.shape().dims(), k.shape().dims(), v.shape().dims())
    else {
        return mismatch(k, "queries are [.., L, E], keys [.., S, E], values [.., S, V]");
    };
    if q.rank() < 2 || width != key_width {
        return mismatch(k, "queries are [.., L, E] and keys [.., S, E]");
    }
    if keys != values {
        return mismatch(v, "keys and values must have the same length S");
    }
    // The batch dims end before [heads, rows, columns] for grouped heads, otherwise before [rows, columns].
    let batch = |t: &Tensor, last: usize| Shape::from(&t.shape().dims()[..t.rank().saturating_sub(last)]);
    let of_keys = |last| batch(q, last).broadcast(op, &batch(k, last));
    let last = if options.enable_gqa { 3 } else { 2 };
    let head = |t: &Tensor| t.rank().checked_sub(3).map_or(1, |d| t.shape().dims()[d]);
    let of_keys = match of_keys(last) {
        Ok(shape) => shape,
        Err(_) if last == 2 && head(k) > 0 && head(q).is_multiple_of(head(k)) && of_keys(3).is_ok() => {
            return mismatch(k, "several heads of queries (dim -3) for one of keys need enable_gqa");
        }
        Err(_) => return mismatch(k, "the dims of queries and keys before [L, E] and [S, E] broadcast"),
    };
    if of_keys.broadcast(op, &batch(v, last)).is_err() {
        return mismatch(v, "the dims of queries and values before [L, E] and [S, V] broadcast");
    }
    let heads = options.enable_gqa.then(|| head(q));
    let rows = q.shape().dims()[q.rank() - 2];
    let scores: Shape = of_keys.dims().iter().copied().chain(heads).chain([rows, *keys]).collect();
    check_mask(op, q, options.attn_mask, &scores)
}

/// Checks that `mask` broadcasts to the scores, `[.., L, S]`. `given` is the tensor that errors and the device check refer to.
fn check_mask(op: &'static str, given: &Tensor, mask: Option<&Tensor>, scores: &Shape) -> Result<()> {
    let Some(mask) = mask else { return Ok(()) };
    same_device(op, &[given, mask])?;
    unsupported!(op if !mask.dtype.is_float() && mask.dtype != DType::Bool, mask.dtype, "a mask of bool or floats");
    mismatch!(op if scores.broadcast(op, mask.shape()).ok().as_ref() != Some(scores),
        given, mask, "the mask broadcasts to the scores, [.., L, S]");
    Ok(())
}

/// The arguments of a backward pass that computes the scores again.
struct BackwardPass<'a> {
    op: &'static str,
    inputs: [&'a Tensor; 3],
    mask: Option<&'a Tensor>,
    /// The gradient of the result.
    grad: &'a Tensor,
    /// For each input, the tensor to which its gradient is written, or `None` to allocate a tensor.
    slots: [Option<Tensor>; 3],
    wanted: [bool; 3],
}

/// An attention whose scores are not stored; the backward pass computes the scores again.
enum Recomputed {
    Fused(Box<Fused>),
    Blocked(BlockedAttention),
}

impl Recomputed {
    /// Computes the result outside the graph. `options.scale` is set; `backward` says whether gradients will be needed.
    ///
    /// Returns `None` if all scores should be computed at once, and if the operands do not match.
    fn forward(
        op: &'static str,
        inputs: [&Tensor; 3],
        options: &Attention<'_>,
        backward: bool,
    ) -> Result<Option<(Tensor, Recomputed)>> {
        if let Some((out, fused)) = Fused::forward(op, inputs, options, backward)? {
            return Ok(Some((out, Recomputed::Fused(Box::new(fused)))));
        }
        let Some(blocks) = BlockedAttention::new(inputs, options, backward) else { return Ok(None) };
        // A device may have a kernel for the result alone.
        let alone = if backward { Fused::forward(op, inputs, options, false)? } else { None };
        let out = match alone {
            Some((out, _)) => out,
            None => blocks.forward(op, inputs, options.attn_mask)?,
        };
        Ok(Some((out, Recomputed::Blocked(blocks))))
    }

    fn backward(&self, pass: BackwardPass) -> Result<[Option<Tensor>; 3]> {
        match self {
            Recomputed::Fused(fused) => fused.backward(pass),
            Recomputed::Blocked(blocks) => blocks.backward(pass),
        }
    }

    /// Computes the same result as [`Recomputed::forward`] with recorded operations, for double backward.
    fn attend_recorded(&self, op: &'static str, inputs: [&Tensor; 3], options: Attention<'_>) -> Result<Tensor> {
        let seeds = match self {
            Recomputed::Fused(fused) => fused.seeds(),
            Recomputed::Blocked(_) => SmallVec::new(),
        };
        Ok(replay_draws(&seeds, || attend_unblocked(op, inputs, options))?.0)
    }
}

/// The options that the backward pass needs. Grouped heads have been expanded to separate heads before.
struct SavedOptions {
    mask: Option<Saved>,
    is_causal: bool,
    scale: Option<f64>,
    dropout_p: f64,
}

impl SavedOptions {
    fn new(options: Attention<'_>) -> SavedOptions {
        let Attention { is_causal, scale, dropout_p, .. } = options;
        SavedOptions { mask: options.attn_mask.map(Saved::new), is_causal, scale, dropout_p }
    }

    fn options(&self, op: &'static str) -> Result<Attention<'_>> {
        let attn_mask = self.mask.as_ref().map(|mask| mask.get(op)).transpose()?;
        let SavedOptions { is_causal, scale, dropout_p, .. } = *self;
        Ok(Attention { attn_mask, is_causal, scale, dropout_p, enable_gqa: false })
    }
}

/// Computes all scores at once and records every step. Returns the result and the attention weights.
/// `options.scale` is set, and heads are not grouped.
fn attend_unblocked(op: &'static str, [q, k, v]: [&Tensor; 3], options: Attention<'_>) -> Result<(Tensor, Tensor)> {
    let scale = Scalar::Float(options.scale.unwrap_or(1.0));
    let scores = scaled_product(op, None, q, &k.transpose(-1, -2)?, scale)?;
    let mut weights = masked_softmax(op, &scores, options.attn_mask, options.is_causal.then_some(0))?;
    drop(scores);
    if options.dropout_p != 0.0 {
        weights = weights.dropout(options.dropout_p).with_op(op)?;
    }
    let slot = allocate_heads_inside(&product_shape(op, &weights, v)?, &weights)?;
    let out = scaled_product_into(op, slot, None, &weights, v, Scalar::Int(1))?;
    Ok((out, weights))
}

/// Allocates a result `[batch, heads.., L, V]` that is stored as `[batch, L, heads.., V]`.
fn allocate_heads_inside(shape: &Shape, like: &Tensor) -> Result<Option<Tensor>> {
    let [batch, heads @ .., length, width] = shape.dims() else { return Ok(None) };
    if heads.is_empty() {
        return Ok(None);
    }
    let memory: Shape = [*batch, *length].into_iter().chain(heads.iter().copied()).chain([*width]).collect();
    let out = Tensor::empty_with_shape(memory, like.dtype, like.device())?;
    let rank = shape.rank();
    let order: Dims = [0].into_iter().chain(2..rank - 1).chain([1, rank - 1]).collect();
    Ok(Some(out.with_layout(out.layout.permute(&order))))
}

/// Computes attention in which each group of query heads shares one head of keys and values.
fn attend_grouped(op: &'static str, [q, k, v]: [&Tensor; 3], options: Attention<'_>) -> Result<Tensor> {
    let heads = |t: &Tensor| t.rank().checked_sub(3).map(|d| t.shape().dims()[d]);
    let groups = match [q, k, v].map(heads) {
        [Some(all), Some(keys), Some(values)] if keys == values && keys > 0 && all % keys == 0 => [keys, all / keys],
        _ => {
            let hint = "the heads of the queries, dim -3, are a multiple of those of keys and values";
            return Err(shape_mismatch(op, q, k, hint));
        }
    };
    let mask = match options.attn_mask {
        Some(mask) if heads(mask).is_some_and(|n| n != 1) => Some(mask.unflatten(-3, groups).with_op(op)?),
        Some(mask) if mask.rank() > 3 => Some(mask.unsqueeze(-3)?),
        mask => mask.map(Tensor::shallow_clone),
    };
    let options = Attention { attn_mask: mask.as_ref(), enable_gqa: false, ..options };
    attend(&q.unflatten(-3, groups)?, &k.unsqueeze(-3)?, &v.unsqueeze(-3)?, options)?.flatten(-4, -3)
}
