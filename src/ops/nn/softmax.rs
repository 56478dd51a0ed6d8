//! Softmax, log-softmax and logsumexp along any dim, and cross-entropy.
//!
//! Each operation is one launch, also on strided input. The maximum of a row is subtracted first, so that no exponential overflows.
//! Cross-entropy computes the gradient of its logits in the same launch as the loss. Its backward pass returns that gradient, without any
//! launch if `backward()` starts at the loss.

use crate::backend::problem::cross_entropy::{CrossEntropy, LabelEntropy, LossReduction};
use crate::backend::problem::softmax::{MaskKind, RowOp, Softmax, SoftmaxMask};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply_one;
use crate::ops::reduce;
use crate::tensor::view::detach_at_least_1d;

/// Runs a row operation along dim `d` of `x` (and of the second operand `z`, of the same shape), outside the graph.
fn row_operation_unmasked(kind: RowOp, x: &Tensor, z: Option<&Tensor>, d: usize) -> Result<Tensor> {
    row_operation(kind, x, z, d, SoftmaxMask::default())
}

fn row_operation(kind: RowOp, x: &Tensor, z: Option<&Tensor>, d: usize, mask: SoftmaxMask) -> Result<Tensor> {
    let z = z.unwrap_or(x);
    let whole = kind != RowOp::LogSumExp;
    let shape: Shape = match whole {
        true => x.shape().clone(),
        false => x.shape().dims().iter().enumerate().map(|(i, &n)| if i == d { 1 } else { n }).collect(),
    };
    let out = Tensor::empty_with_shape(shape, x.dtype, x.device())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    if x.numel() == 0 {
        out.fill_(f64::NEG_INFINITY)?;
        return Ok(out);
    }
    backend::launch([&out], |b| b.softmax(&Softmax { kind, x, z, out: &out, d, mask }))?;
    Ok(out)
}

/// Computes a masked softmax along the last dim, in one launch each for forward and backward. Recorded for scores and mask.
///
/// A bool `mask` is true for elements that take part; a float mask is added to the scores. Both kinds of mask broadcast. `causal` is the
/// row number of the first row of each matrix; each row then ignores the elements after its own row number. A row in which no element
/// takes part is all zeros.
pub(crate) fn masked_softmax(
    op: &'static str,
    scores: &Tensor,
    mask: Option<&Tensor>,
    causal: Option<usize>,
) -> Result<Tensor> {
    let d = scores.rank() - 1;
    let softmax_mask = SoftmaxMask {
        kind: match mask {
            None => MaskKind::None,
            Some(mask) if mask.dtype == DType::Bool => MaskKind::Keep,
            Some(_) => MaskKind::Add,
        },
        causal: causal.map_or(0, |_| scores.shape().dims()[d - 1]),
        first: causal.unwrap_or(0),
    };
    let expanded = mask.map(|mask| mask.with_layout(mask.layout.broadcast_to(scores.shape())));
    let out = row_operation(RowOp::MaskedSoftmax, scores, expanded.as_ref(), d, softmax_mask)?;
    let like_mask = mask.map(|mask| (mask.shape().clone(), mask.dtype));
    let inputs: SmallVec<[&Tensor; 2]> = std::iter::once(scores).chain(mask).collect();
    Ok(record_gradients_with_result(op, out, &inputs, move |i, grad, weights| {
        let ds = softmax_derivative(weights, grad)?;
        match &like_mask {
            Some((shape, dtype)) if i == 1 => ds.sum_to(shape)?.to_dtype(*dtype),
            _ => Ok(ds),
        }
    }))
}

/// Computes the gradient of a softmax along the last dim from its result and the gradient of the result. Recorded for autograd.
pub(crate) fn softmax_derivative(weights: &Tensor, grad: &Tensor) -> Result<Tensor> {
    match autograd::is_tracked(&[weights, grad]) {
        true => weights.mul(&grad.sub(&weights.mul(grad)?.sum(-1, true)?)?),
        false => row_operation_unmasked(RowOp::SoftmaxGrad, weights, Some(grad), weights.rank() - 1),
    }
}

operations! {
    /// Computes `exp(x) / sum(exp(x))` along `dim` (PyTorch's `softmax`). Floats. Differentiable; forward and backward are one launch each.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let p = Tensor::from_slice(&[0f32, f32::NEG_INFINITY, 0.0], 3, Device::Cpu)?.softmax(-1)?;
    /// assert_eq!(p.to_vec::<f32>()?, [0.5, 0.0, 0.5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    softmax(input: x, dim: int): NeuralNetwork, Floats -> Same, differentiable = |op, self, dim| {
        self.softmax_along(op, RowOp::Softmax, RowOp::SoftmaxGrad, dim)
    };
    /// Computes `x - logsumexp(x)` along `dim` (PyTorch's `log_softmax`). Floats. Differentiable; forward and backward take one launch
    /// each.
    log_softmax(input: x, dim: int): NeuralNetwork, Floats -> Same, differentiable = |op, self, dim| {
        self.softmax_along(op, RowOp::LogSoftmax, RowOp::LogSoftmaxGrad, dim)
    };
    /// Computes the gradient of [`Tensor::softmax`] from its result `output` and the gradient of the result, which is this tensor
    /// (PyTorch's `_softmax_backward_data`). Not recorded, one launch.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let p = Tensor::from_slice(&[0f32, 0.0], 2, Device::Cpu)?.softmax(0)?;
    /// let grad = Tensor::from_slice(&[1f32, 0.0], 2, Device::Cpu)?;
    /// assert_eq!(grad.softmax_backward(&p, 0)?.to_vec::<f32>()?, [0.25, -0.25]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    softmax_backward(grad_output: x, output: x, dim: int) "_softmax_backward_data":
        NeuralNetwork, Floats -> Same = |op, self, output, dim| {
        self.softmax_backward_along(op, RowOp::SoftmaxGrad, output, dim)
    };
    /// Computes the gradient of [`Tensor::log_softmax`] like [`Tensor::softmax_backward`] (PyTorch's `_log_softmax_backward_data`).
    log_softmax_backward(grad_output: x, output: x, dim: int) "_log_softmax_backward_data":
        NeuralNetwork, Floats -> Same = |op, self, output, dim| {
        self.softmax_backward_along(op, RowOp::LogSoftmaxGrad, output, dim)
    };
    /// Computes [`Tensor::softmax`] of `-x`, so that the smallest elements have the largest probabilities (PyTorch's `softmin`).
    /// Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[0f32, f32::INFINITY, 0.0], 3, Device::Cpu)?;
    /// assert_eq!(x.softmin(-1)?.to_vec::<f32>()?, [0.5, 0.0, 0.5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    softmin(input: x, dim: int) functional: NeuralNetwork, Floats -> Same, differentiable = |op, self, dim| {
        self.dtype().check_float(op)?;
        self.neg()?.softmax(dim).with_op(op)
    };
    /// Computes `log(sum(exp(x)))` over `dims` without overflow (PyTorch's `logsumexp`). Floats. The result for no elements is -inf.
    /// `keepdim` keeps the reduced dims with size 1. One launch for each dim. Differentiable. Fails as [`Tensor::softmax`] does,
    /// and with [`Error::Invalid`] for a dim that is given twice.
    logsumexp(input: x, dim: dims, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, keepdim| {
        self.dtype.check_float(op)?;
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].logsumexp(dims, keepdim));
        let mask = dims.mask(op, self.shape())?;
        if self.rank() == 0 {
            return self.logsumexp_along(op, 0, keepdim);
        }
        let along = (0..self.rank()).rev().filter(|&d| mask[d]);
        let out = along.clone().try_fold(self.shallow_clone(), |t, d| t.logsumexp_along(op, d, keepdim))?;
        if along.count() == 0 { out.try_clone() } else { Ok(out) }
    };
}

impl Tensor {
    fn softmax_backward_along(&self, op: &'static str, backward: RowOp, output: &Tensor, dim: isize) -> Result<Tensor> {
        self.dtype.check_float(op)?;
        same_dtype(op, &[self, output])?;
        same_device(op, &[self, output])?;
        mismatch!(op if self.shape() != output.shape(), self, output, "the gradient has the shape of the result");
        let (y, grad) = (detach_at_least_1d(&output.detach()), detach_at_least_1d(&self.detach()));
        let out = row_operation_unmasked(backward, &y, Some(&grad), y.shape().dim(op, dim)?)?;
        Ok(out.with_layout(Layout::contiguous(self.shape().clone())))
    }

    fn softmax_along(&self, op: &'static str, forward: RowOp, backward: RowOp, dim: isize) -> Result<Tensor> {
        self.dtype.check_float(op)?;
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].softmax_along(op, forward, backward, dim));
        let scalar = (self.rank() == 0).then(|| detach_at_least_1d(self));
        let x = scalar.as_ref().unwrap_or(self);
        let d = x.shape().dim(op, dim)?;
        let mut out = row_operation_unmasked(forward, x, None, d)?;
        if scalar.is_some() {
            out.layout = Layout::contiguous(self.shape().clone());
        }
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let saved = Saved::new(&out);
        let shape = self.shape().clone();
        Ok(autograd::record_differentiable(op, out, &[self], move |ctx| {
            let (y, grad) = (ctx.unpack_result(&saved)?, ctx.grad()?);
            let grad = if !ctx.create_graph() {
                let grad =
                    row_operation_unmasked(backward, &detach_at_least_1d(&y), Some(&detach_at_least_1d(&grad)), d)?;
                grad.with_layout(Layout::contiguous(shape.clone()))
            } else if forward == RowOp::Softmax {
                grad.sub(&grad.mul(&y)?.sum([d as isize], true)?)?.mul(&y)?
            } else {
                grad.sub(&y.exp()?.mul(&grad.sum([d as isize], true)?)?)?
            };
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    }

    fn logsumexp_along(&self, op: &'static str, d: usize, keepdim: bool) -> Result<Tensor> {
        let x = detach_at_least_1d(self);
        let kept = row_operation_unmasked(RowOp::LogSumExp, &x, None, d)?;
        let mut shape = self.shape().dims().to_vec();
        match keepdim {
            _ if self.rank() == 0 => {}
            true => shape[d] = 1,
            false => drop(shape.remove(d)),
        }
        let out = kept.with_layout(Layout::contiguous(shape.into()));
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, result) = (Saved::new(self), Saved::new(&out));
        let (shape, kept) = (self.shape().clone(), kept.layout);
        Ok(autograd::record_differentiable(op, out, &[self], move |ctx| {
            let (x, result, grad) = (x.get(op)?, ctx.unpack_result(&result)?, ctx.grad()?);
            if ctx.create_graph() {
                let wide = |t: Tensor| if keepdim || t.rank() == x.rank() { Ok(t) } else { t.unsqueeze(d as isize) };
                let weight = x.sub(&wide(result)?)?.exp()?;
                return Ok(SmallVec::from_iter([Some(weight.mul(&wide(grad)?)?)]));
            }
            let result = result.contiguous()?;
            let kept = Layout { offset: result.layout.offset, ..kept.clone() };
            let (x, result) = (detach_at_least_1d(x), result.with_layout(kept));
            let grad = grad.contiguous()?;
            let grad = grad.with_layout(Layout { offset: grad.layout.offset, ..result.layout.clone() });
            // `exp(x - result)` is the softmax. If the result is infinite, the gradient is not finite, as in PyTorch.
            let weight = (Expr::input(0) - Expr::input(1)).exp() * Expr::input(2);
            let grad = apply_one(op, &[&x, &result, &grad], Params::default(), &weight, x.dtype)?;
            // A 0-d input was viewed as 1-D, so its gradient is reshaped. Any other gradient already has the shape and memory format of
            // x.
            let was_scalar = shape.rank() == 0;
            let grad = if was_scalar { grad.with_layout(Layout::contiguous(shape.clone())) } else { grad };
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    }

    /// Computes the cross-entropy of logits `[N, C]` and labels `[N]`, without weights or smoothing, with losses of `dtype`.
    ///
    /// One launch computes the losses and the gradient; at most one more launch computes their sum. `composed` computes the same losses
    /// from log-probabilities with recorded operations, for double backward.
    pub(crate) fn label_cross_entropy(
        &self,
        labels: &Tensor,
        options: CrossEntropy,
        dtype: DType,
        composed: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let op = "cross_entropy";
        let tracked = autograd::is_tracked(&[self]);
        let grad = match tracked {
            true => Some(Tensor::empty_with_shape(self.shape(), self.dtype, self.device())?),
            false => None,
        };
        let out = match self.numel() {
            0 => loss_without_logits(self, labels, options.reduction, dtype)?,
            _ => {
                let count = &|| count_labels(op, labels, options.ignore_index);
                let entropy = LabelEntropy { logits: self, labels, options, dtype, grad: grad.as_ref(), count };
                let out = backend::of_device(self.device()).cross_entropy(&entropy)?;
                let is_part = out.rank() > 0 && options.reduction != LossReduction::None;
                if is_part { reduce::sum_all(op, &out, dtype)? } else { out }
            }
        };
        let Some(saved) = grad else { return Ok(out) };
        let (saved, labels) = (Saved::new(&saved), Saved::new(labels));
        let CrossEntropy { reduction, ignore_index, .. } = options;
        Ok(autograd::record_differentiable(op, out, &[self], move |ctx| {
            let saved = saved.unpack(op)?;
            if ctx.create_graph() {
                let labels = labels.get(op)?;
                let log = log_probabilities(&saved, labels, reduction, ignore_index)?;
                // Log-probabilities differ from logits by a constant for each row, which does not change the loss.
                return ctx.differentiate_through(&composed(
                    &ctx.with_input_node(0, log).to_dtype(dtype)?.log_softmax(1)?,
                    labels,
                )?);
            }
            let grad = match ctx.grad_unless_one() {
                None => saved,
                Some(grad) => {
                    // The gradient of the loss is one number for all rows (stride 0), or one number for each row.
                    let step = if grad.rank() == 0 { 0 } else { grad.strides()[0] };
                    let shape = saved.shape().clone();
                    let strides = Dims::from_slice(&[step, 0]);
                    let grad = grad.with_layout(Layout { shape, strides, offset: grad.layout.offset });
                    let product = Expr::input(0) * Expr::input(1);
                    apply_one(op, &[&saved, &grad], Params::default(), &product, saved.dtype)?
                }
            };
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    }
}

/// Counts the labels that are not ignored, on the device.
fn count_labels(op: &'static str, labels: &Tensor, ignore: i64) -> Result<Tensor> {
    let ignore = [Scalar::Int(ignore)];
    let params = Params::from_scalars(&ignore);
    let kept = apply_one(op, &[labels], params, &Expr::input(0).ne(Expr::scalar(0)), DType::Bool)?;
    reduce::sum_all(op, &kept, DType::I64)
}

/// Recovers the log-probabilities of [`Tensor::label_cross_entropy`] from its gradient. The gradient is the probability, minus 1 at the
/// label, divided by the number of counted rows if the loss is a mean.
fn log_probabilities(grad: &Tensor, labels: &Tensor, reduction: LossReduction, ignore_index: i64) -> Result<Tensor> {
    let ignored = labels.eq_scalar(ignore_index)?;
    let labels = labels.masked_fill(&ignored, 0)?.one_hot(grad.shape().dims()[1])?;
    let whole = match reduction {
        LossReduction::Mean => grad.mul(&ignored.logical_not()?.sum((), false)?)?,
        _ => grad.shallow_clone(),
    };
    whole.add(&labels)?.clamp_min(0)?.log()
}

/// Returns the loss if there are no logits: the loss of no rows. If there are rows but no classes, returns an error, because every label
/// is out of range.
fn loss_without_logits(logits: &Tensor, labels: &Tensor, reduction: LossReduction, dtype: DType) -> Result<Tensor> {
    invalid!("cross_entropy" if labels.numel() > 0, "the logits have no class (shape [N, 0])");
    let options = (dtype, logits.device());
    match reduction {
        LossReduction::Mean => Tensor::full((), f64::NAN, options),
        LossReduction::Sum | LossReduction::BatchMean => Tensor::zeros((), options),
        LossReduction::None => Tensor::zeros(0, options),
    }
}
