//! Losses of classes, given as labels or as probabilities.

use crate::ops::dispatch::prelude::*;
use crate::ops::formula;
use crate::ops::nn::loss::{over_batch, reduced};
use crate::{CrossEntropy, DType, Expr, LossReduction, Result, Shape, Tensor, autocast_dtype};

impl Tensor {
    /// The mean over rows of `-log_softmax(logits)[label]`: [`Tensor::cross_entropy_with`] its defaults.
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
    ///
    /// # Errors
    /// As [`Tensor::cross_entropy_with`].
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(target, CrossEntropy::default())
    }

    /// Cross-entropy of logits and classes (PyTorch's `cross_entropy`): a scalar, or with [`LossReduction::None`] a loss for
    /// each label, of the logits' dtype. Logits are `[C]`, `[N, C]` or `[N, C, d1, ...]`; the target has class labels (i64,
    /// i32, u32 or u8) in their shape without C, or a probability for each class in their shape and dtype. The mean is over the
    /// labels that are not `ignore_index`, weighted as they are; of none it is NaN. Differentiable in the logits and in
    /// probabilities.
    ///
    /// With labels, no class weights and no smoothing, one launch gives losses and gradient, at most one more their sum.
    /// Losses are accumulated in f32 (f64 for f64).
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`], [`Error::UnsupportedDType`], [`Error::DTypeMismatch`], [`Error::DeviceMismatch`];
    /// [`Error::Invalid`] for a smoothing outside `0..=1`. [`Error::IndexOutOfRange`] for a label outside `0..C`: on the CPU at
    /// once; on OpenCL from the next call of this thread that waits for the device (reading a value, `synchronize`), until
    /// which the loss is NaN (0 where it is weighted or smoothed) and the row's gradient zero.
    #[track_caller]
    pub fn cross_entropy_with(&self, target: &Tensor, options: CrossEntropy) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "cross_entropy";
        self.dtype().check_float(op)?;
        let plain = !target.dtype().is_float() && options.weight.is_none() && options.label_smoothing == 0.0;
        let in_f32 = autocast_dtype().is_some() && matches!(self.dtype(), DType::F16 | DType::BF16);
        // Losses of labels are computed in f32 from halves too: a copy in f32 would be the same with twice the memory.
        if in_f32 && !plain {
            cast_first!(widened(&[self])?, |x| x[0].cross_entropy_with(target, options));
        }
        let dtype = if in_f32 { DType::F32 } else { self.dtype() };
        let inputs: &[&Tensor] = match &options.weight {
            Some(weight) => &[self, target, weight],
            None => &[self, target],
        };
        let CrossEntropy { reduction, ignore_index, label_smoothing, .. } = options;
        let arguments = || vec![reduction.into(), ignore_index.into(), label_smoothing.into()];
        replaced!(op, inputs; arguments);
        if reduction == LossReduction::BatchMean {
            return over_batch(self.cross_entropy_with(target, options.summed())?, batch(self)).named(op);
        }
        invalid!(op if !(0.0..=1.0).contains(&options.label_smoothing),
            "label_smoothing is {}, it must be in 0..=1", options.label_smoothing);
        if target.dtype().is_float() {
            unsupported!(op if target.rank() + 1 == self.rank(), target.dtype(),
                "labels of dtype i64, i32, u32 or u8, or for each class a probability, in the shape of the logits");
            return self.soft_cross_entropy(op, target, options).named(op);
        }
        on_rows(op, self, target, |logits, labels| match plain {
            true => logits.label_entropy(labels, options, dtype, move |log, labels| {
                let plain = CrossEntropy { reduction, ignore_index, ..CrossEntropy::default() };
                label_losses("cross_entropy", log, labels, plain)
            }),
            false => label_losses(op, &logits.log_softmax(1)?, labels, options),
        })
    }

    /// The negative log-likelihood `-x[label]` of log-probabilities, weighted, with the shapes and the mean of
    /// [`Tensor::cross_entropy_with`] (PyTorch's `nll_loss`). Differentiable.
    ///
    /// ```
    /// use claystone::{CrossEntropy, Device, Tensor};
    /// let x = Tensor::from_slice(&[-1f32, -2.0, -3.0, -4.0], [2, 2], Device::Cpu)?;
    /// let labels = Tensor::from_slice(&[1i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(x.nll_loss(&labels, CrossEntropy::default())?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::cross_entropy_with`]; [`Error::Invalid`] where labels are to be smoothed.
    #[track_caller]
    pub fn nll_loss(&self, labels: &Tensor, options: CrossEntropy) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "nll_loss";
        self.dtype().check_float(op)?;
        cast_first!(widened(&[self])?, |x| x[0].nll_loss(labels, options));
        let inputs: Vec<&Tensor> = [self, labels].into_iter().chain(options.weight).collect();
        let CrossEntropy { reduction, ignore_index, .. } = options;
        replaced!(op, inputs, reduction, ignore_index);
        if reduction == LossReduction::BatchMean {
            return over_batch(self.nll_loss(labels, options.summed())?, batch(self)).named(op);
        }
        invalid!(op if options.label_smoothing != 0.0, "it smooths no labels: use cross_entropy_with");
        on_rows(op, self, labels, |x, labels| label_losses(op, x, labels, options))
    }

    /// Cross-entropy with a probability for each class.
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
        reduced(each.sum(dim as isize, false)?, options.reduction)
    }
}

impl CrossEntropy<'_> {
    fn summed(self) -> Self {
        CrossEntropy { reduction: LossReduction::Sum, ..self }
    }
}

/// The dims of logits `[N, C, ..]` before the classes.
fn batch(logits: &Tensor) -> &[usize] {
    let dims = logits.shape().dims();
    &dims[..usize::from(dims.len() > 1)]
}

/// The weights of classes along a dim of `x`.
fn class_weight(op: &'static str, x: &Tensor, weight: &Tensor, dim: usize) -> Result<Tensor> {
    same_dtype(op, &[x, weight])?;
    let classes = x.shape().dims()[dim];
    mismatch!(op if weight.shape().dims() != [classes], x, weight, "there is one weight for each class");
    let shape: Shape = (0..x.rank()).map(|d| if d == dim { classes } else { 1 }).collect();
    weight.reshape(shape)
}

/// `f` of `[M, C]` and labels `[M]`, whatever the dims besides the classes were.
fn on_rows(
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
    run().named(op)
}

/// The losses of log-probabilities `[M, C]` with labels, weighted and smoothed.
fn label_losses(op: &'static str, log: &Tensor, labels: &Tensor, options: CrossEntropy) -> Result<Tensor> {
    let CrossEntropy { reduction, ignore_index, label_smoothing, weight } = options;
    let (dtype, classes) = (log.dtype(), log.shape().dims()[1]);
    let weight = weight.map(|w| class_weight(op, log, w, 1)).transpose()?;
    // An ignored label may not be a valid class: class 0 is read instead.
    let counted = labels.masked_fill(&labels.eq_scalar(ignore_index)?, 0)?;
    let picked = log.gather(1, &counted.unsqueeze(1)?)?.squeeze(1)?;
    let own = weight.as_ref().map(|w| w.flatten(0, 1)?.index_select(0, &counted)).transpose()?;
    let smooth = match (label_smoothing == 0.0, &weight) {
        (true, _) => None,
        (false, None) => Some(log.sum(1, false)?),
        (false, Some(w)) => Some(log.mul(w)?.sum(1, false)?),
    };
    let inputs: Vec<&Tensor> = [labels, &picked].into_iter().chain(&own).chain(&smooth).collect();
    let ignored = Expr::input(0).eq(ignore_index as f64);
    let loss = -Expr::input(1) * (1.0 - label_smoothing);
    let loss = if own.is_some() { loss * Expr::input(2) } else { loss };
    let loss = match &smooth {
        Some(_) => loss - Expr::input(inputs.len() - 1) * (label_smoothing / classes as f64),
        None => loss,
    };
    let loss = ignored.select(0.0, loss);
    let losses = formula(op, &inputs, dtype, &loss, |i| loss.diff(i))?;
    if reduction != LossReduction::Mean {
        return reduced(losses, reduction);
    }
    let share = ignored.select(0.0, own.as_ref().map_or(Expr::constant(1.0), |_| Expr::input(1)));
    let inputs: Vec<&Tensor> = std::iter::once(labels).chain(&own).collect();
    // Half precision would round the count.
    let wide = if dtype.size() < 4 { crate::DType::F32 } else { dtype };
    let shares = formula(op, &inputs, wide, &share, |i| share.diff(i))?.sum((), false)?;
    let sum = losses.sum((), false)?.to_dtype(wide)?;
    // The mean of no label is NaN, and its gradient zero, as in PyTorch.
    let mean = |sum: Expr| sum / Expr::input(1);
    let mean = Expr::input(1).eq(0.0).select(mean(Expr::input(2)), mean(Expr::input(0)));
    formula(op, &[&sum, &shares, &sum.detach()], wide, &mean, |i| mean.diff(i))?.to_dtype(dtype)
}
