//! Losses for classification. Classes are given as labels or as probabilities.

use crate::ops::dispatch::prelude::*;
use crate::ops::nn::loss::{divide_by_batch, read_reduction, reduce_losses};
use crate::{CrossEntropy, LossReduction, autocast_dtype};

operations! {
    cross_entropy(input: x, target: x, weight: x?,
        reduction: text = "mean", ignore_index: int = -100, label_smoothing: float = 0) functional:
        Loss, Floats -> Same, differentiable => |a| {
        let (reduction, ignore_index, label_smoothing) = (read_reduction(a, 0)?, a.int(1)? as i64, a.float(2)?);
        let options = CrossEntropy { reduction, ignore_index, label_smoothing, weight: a.optional_tensor(2) };
        a.tensor(0)?.cross_entropy_with(a.tensor(1)?, options)
    };
    nll_loss(input: x, target: x, weight: x?, reduction: text = "mean", ignore_index: int = -100) functional:
        Loss, Floats -> Same, differentiable => |a| {
        let (reduction, ignore_index) = (read_reduction(a, 0)?, a.int(1)? as i64);
        a.tensor(0)?
            .nll_loss(a.tensor(1)?, CrossEntropy { reduction, ignore_index, weight: a.optional_tensor(2), ..CrossEntropy::default() })
    };
}

impl Tensor {
    /// Returns the mean over rows of `-log_softmax(logits)[label]`, as [`Tensor::cross_entropy_with`] does with the default options, and
    /// fails as it does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let logits = Tensor::zeros(&[2, 4], Device::Cpu)?.requires_grad_(true)?;
    /// let labels = Tensor::from_slice(&[3i64, 0], 2, Device::Cpu)?;
    /// let loss = logits.cross_entropy(&labels)?;
    /// assert!((loss.item::<f32>()? - 4f32.ln()).abs() < 1e-6);
    /// loss.backward()?;
    /// assert_eq!(logits.grad().unwrap().to_vec::<f32>()?[3], (0.25 - 1.0) / 2.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(target, CrossEntropy::default())
    }

    /// Computes the cross-entropy of logits and classes (PyTorch's `cross_entropy`). Returns a scalar of the logits' dtype, or one loss
    /// for each label with [`LossReduction::None`]. Differentiable in the logits and in probabilities.
    ///
    /// Logits are `[C]`, `[N, C]` or `[N, C, d1, ...]`. The target is either class labels (integers) with that shape without
    /// C, or one probability for each class, with the shape and dtype of the logits. The mean is over the labels other than
    /// `ignore_index`, weighted by the class weights. If all labels are ignored, the mean is NaN.
    ///
    /// With labels, no class weights and no smoothing, one launch computes the losses and the gradient, and at most one more launch
    /// computes the sum of the losses. Losses are accumulated in f32 (f64 for f64).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for other dtypes; [`Error::Invalid`] for a smoothing outside `0..=1`; [`Error::IndexOutOfRange`] for a
    /// label outside `0..C`. On the CPU this call returns the last error; on OpenCL, the next call of this thread that waits for the
    /// device (such as reading a value or `synchronize`) returns it. Until then the loss is NaN (0 if weighted or smoothed) and the
    /// gradient of the row is zero.
    #[track_caller]
    pub fn cross_entropy_with(&self, target: &Tensor, options: CrossEntropy) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "cross_entropy";
        self.dtype().check_float(op)?;
        let plain = !target.dtype().is_float() && options.weight.is_none() && options.label_smoothing == 0.0;
        let in_f32 = autocast_dtype().is_some() && matches!(self.dtype(), DType::F16 | DType::BF16);
        // The kernel for labels reads f16 and bf16 logits and computes in f32, so autocast needs no f32 copy of the logits.
        if in_f32 && !plain {
            cast_first!(autocast_to_f32(&[self])?, |x| x[0].cross_entropy_with(target, options));
        }
        let dtype = if in_f32 { DType::F32 } else { self.dtype() };
        let inputs: &[&Tensor] = match &options.weight {
            Some(weight) => &[self, target, weight],
            None => &[self, target],
        };
        let CrossEntropy { reduction, ignore_index, label_smoothing, .. } = options;
        let arguments = || vec![reduction.into(), ignore_index.into(), label_smoothing.into()];
        return_replacement!(op, inputs; arguments);
        if reduction == LossReduction::BatchMean {
            return divide_by_batch(self.cross_entropy_with(target, options.summed())?, batch_dims(self)).with_op(op);
        }
        invalid!(op if !(0.0..=1.0).contains(&options.label_smoothing),
            "label_smoothing is {}, it must be in 0..=1", options.label_smoothing);
        if target.dtype().is_float() {
            unsupported!(op if target.rank() + 1 == self.rank(), target.dtype(),
                "labels of an integer dtype, or for each class a probability, in the shape of the logits");
            return self.soft_cross_entropy(op, target, options).with_op(op);
        }
        apply_to_rows(op, self, target, |logits, labels| match plain {
            true => logits.label_cross_entropy(labels, options, dtype, move |log, labels| {
                let plain = CrossEntropy { reduction, ignore_index, ..CrossEntropy::default() };
                label_losses("cross_entropy", log, labels, plain)
            }),
            false => label_losses(op, &logits.log_softmax(1)?, labels, options),
        })
    }

    /// Returns the negative log-likelihood `-x[label]` of log-probabilities, weighted (PyTorch's `nll_loss`). Shapes and mean follow
    /// [`Tensor::cross_entropy_with`]. Differentiable. Fails as [`Tensor::cross_entropy_with`] does, and with [`Error::Invalid`]
    /// for label smoothing.
    ///
    /// ```
    /// use claystone::{CrossEntropy, Device, Tensor};
    /// let x = Tensor::from_slice(&[-1f32, -2.0, -3.0, -4.0], [2, 2], Device::Cpu)?;
    /// let labels = Tensor::from_slice(&[1i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(x.nll_loss(&labels, CrossEntropy::default())?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn nll_loss(&self, labels: &Tensor, options: CrossEntropy) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "nll_loss";
        self.dtype().check_float(op)?;
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].nll_loss(labels, options));
        let inputs: Vec<&Tensor> = [self, labels].into_iter().chain(options.weight).collect();
        let CrossEntropy { reduction, ignore_index, .. } = options;
        return_replacement!(op, inputs, reduction, ignore_index);
        if reduction == LossReduction::BatchMean {
            return divide_by_batch(self.nll_loss(labels, options.summed())?, batch_dims(self)).with_op(op);
        }
        invalid!(op if options.label_smoothing != 0.0, "label_smoothing is not supported: use cross_entropy_with");
        apply_to_rows(op, self, labels, |x, labels| label_losses(op, x, labels, options))
    }

    fn soft_cross_entropy(&self, op: &'static str, target: &Tensor, options: CrossEntropy) -> Result<Tensor> {
        mismatch!(op if self.shape() != target.shape() || self.rank() == 0,
            self, target, "probabilities have the shape of the logits, [C] or [N, C, ..]");
        let dim = usize::from(self.rank() > 1);
        let classes = self.shape().dims()[dim];
        let log = self.log_softmax(dim as isize)?;
        let weight = options.weight.map(|w| class_weight(op, self, w, dim)).transpose()?;
        let inputs: Vec<&Tensor> = [&log, target].into_iter().chain(&weight).collect();
        let smoothing = options.label_smoothing;
        let each = Tensor::map(&inputs, |e| {
            let target =
                if smoothing == 0.0 { e[1].clone() } else { &e[1] * (1.0 - smoothing) + smoothing / classes as f64 };
            let loss = -(&e[0] * target);
            e.get(2).map_or_else(|| loss.clone(), |w| &loss * w)
        })?;
        reduce_losses(each.sum(dim as isize, false)?, options.reduction)
    }
}

impl CrossEntropy<'_> {
    fn summed(self) -> Self {
        CrossEntropy { reduction: LossReduction::Sum, ..self }
    }
}

/// Returns the batch dim of logits `[N, C, ..]`; returns no dims for logits `[C]`.
fn batch_dims(logits: &Tensor) -> &[usize] {
    let dims = logits.shape().dims();
    &dims[..usize::from(dims.len() > 1)]
}

/// Checks the class weights, and views them so that they broadcast along dim `dim` of `x`.
fn class_weight(op: &'static str, x: &Tensor, weight: &Tensor, dim: usize) -> Result<Tensor> {
    same_dtype(op, &[x, weight])?;
    let classes = x.shape().dims()[dim];
    mismatch!(op if weight.shape().dims() != [classes], x, weight, "there is one weight for each class");
    let shape: Shape = (0..x.rank()).map(|d| if d == dim { classes } else { 1 }).collect();
    weight.reshape(shape)
}

/// Calls `f` with x reshaped to `[M, C]` and labels reshaped to `[M]`, and restores the other dims if the result is not reduced.
fn apply_to_rows(
    op: &'static str,
    x: &Tensor,
    labels: &Tensor,
    f: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    same_device(op, &[x, labels])?;
    crate::ops::check_index(op, labels)?;
    let dims = x.shape().dims();
    let dim = usize::from(x.rank() > 1);
    let others: Shape = dims.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n).collect();
    mismatch!(op if x.rank() == 0 || labels.shape() != &others,
        x, labels, "logits are [C], [N, C] or [N, C, ..] and labels the same without C");
    let run = || match x.rank() {
        2 => f(x, labels),
        _ => {
            let rows = x.movedim(dim as isize, -1)?.reshape([others.numel(), dims[dim]])?;
            let out = f(&rows, &labels.reshape(others.numel())?)?;
            if out.rank() == 1 { out.reshape(&others) } else { Ok(out) }
        }
    };
    run().with_op(op)
}

/// Computes losses from log-probabilities `[M, C]` and labels, with class weights and smoothing.
fn label_losses(op: &'static str, log: &Tensor, labels: &Tensor, options: CrossEntropy) -> Result<Tensor> {
    let CrossEntropy { reduction, ignore_index, label_smoothing, weight } = options;
    let (dtype, classes) = (log.dtype(), log.shape().dims()[1]);
    let weight = weight.map(|w| class_weight(op, log, w, 1)).transpose()?;
    // An ignored label need not be a valid class, so it is replaced by class 0 to read a valid element.
    let counted = labels.masked_fill(&labels.eq_scalar(ignore_index)?, 0)?;
    let label_values = log.gather(1, &counted.unsqueeze(1)?)?.squeeze(1)?;
    let label_weights = weight.as_ref().map(|w| w.flatten(0, 1)?.index_select(0, &counted)).transpose()?;
    let smooth = match (label_smoothing == 0.0, &weight) {
        (true, _) => None,
        (false, None) => Some(log.sum(1, false)?),
        (false, Some(w)) => Some(log.mul(w)?.sum(1, false)?),
    };
    let inputs: Vec<&Tensor> = [labels, &label_values].into_iter().chain(&label_weights).chain(&smooth).collect();
    let ignored = Expr::input(0).eq(ignore_index as f64);
    let loss = -Expr::input(1) * (1.0 - label_smoothing);
    let loss = if label_weights.is_some() { loss * Expr::input(2) } else { loss };
    let loss = match &smooth {
        Some(_) => loss - Expr::input(inputs.len() - 1) * (label_smoothing / classes as f64),
        None => loss,
    };
    let loss = ignored.select(0.0, loss);
    let losses = apply_formula(op, &inputs, dtype, &loss, |i| loss.diff(i))?;
    if reduction != LossReduction::Mean {
        return reduce_losses(losses, reduction);
    }
    let counted_weight = ignored.select(0.0, label_weights.as_ref().map_or(Expr::constant(1.0), |_| Expr::input(1)));
    let inputs: Vec<&Tensor> = std::iter::once(labels).chain(&label_weights).collect();
    // The count is in f32, because half precision would round it.
    let wide = if dtype.size() < 4 { crate::DType::F32 } else { dtype };
    let counted_weights =
        apply_formula(op, &inputs, wide, &counted_weight, |i| counted_weight.diff(i))?.sum((), false)?;
    let sum = losses.sum((), false)?.to_dtype(wide)?;
    // If all labels are ignored, the mean is NaN and the gradient zero, as in PyTorch.
    let mean = |sum: Expr| sum / Expr::input(1);
    let mean = Expr::input(1).eq(0.0).select(mean(Expr::input(2)), mean(Expr::input(0)));
    apply_formula(op, &[&sum, &counted_weights, &sum.detach()], wide, &mean, |i| mean.diff(i))?.to_dtype(dtype)
}
