//! Losses of a prediction and a target of the same shape.

use std::f64::consts::PI;

use crate::LossReduction;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::loss::{check_positive, losses, losses_of_equal_shapes, read_reduction, reduce_losses, same_shape};

/// Returns `log(x)`, clamped to at least -100.
fn bounded_log(x: &Expr) -> Expr {
    let log = x.log();
    log.lt(-100.0).select(-100.0, log)
}

operations! {
    mse_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable
        => |a| a.tensor(0)?.mse_loss_with(a.tensor(1)?, read_reduction(a, 0)?);
    l1_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable
        => |a| a.tensor(0)?.l1_loss_with(a.tensor(1)?, read_reduction(a, 0)?);
    /// Computes `d² / (2 beta)` if the absolute error d is below beta, otherwise `d - beta / 2` (PyTorch's `smooth_l1_loss`, with a
    /// default beta of 1). A beta of 0 gives the L1 loss. Differentiable. Fails as [`Tensor::mse_loss`] does, and with
    /// [`Error::Invalid`] for a beta below 0.
    smooth_l1_loss(input: x, target: x, beta: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, target, beta, reduction| {
        check_positive(op, "beta", beta, true)?;
        losses_of_equal_shapes(op, &[self, target], reduction, |x| {
            let error = &x[0] - &x[1];
            let d = error.abs();
            // The error itself is squared, because |error| has no second derivative at 0.
            if beta == 0.0 { d } else { d.lt(beta).select(error.square() * (0.5 / beta), &d - 0.5 * beta) }
        })
    };
    /// Computes `d² / 2` if the absolute error d is at most delta, otherwise `delta (d - delta / 2)` (PyTorch's `huber_loss`, with a
    /// default delta of 1). Differentiable. Fails as [`Tensor::mse_loss`] does, and with [`Error::Invalid`] unless delta is
    /// above 0.
    huber_loss(input: x, target: x, delta: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, target, delta, reduction| {
        check_positive(op, "delta", delta, false)?;
        losses_of_equal_shapes(op, &[self, target], reduction, |x| {
            let error = &x[0] - &x[1];
            let d = error.abs();
            d.le(delta).select(error.square() * 0.5, (&d - 0.5 * delta) * delta)
        })
    };
    /// Computes `-(t log x + (1 - t) log(1 - x))` of probabilities x and targets t, times an optional weight (PyTorch's
    /// `binary_cross_entropy`). Logarithms are clamped to at least -100. An x outside `0..=1` gives NaN. Differentiable. Fails as
    /// [`Tensor::mse_loss`] does, except that the weight is broadcast.
    ///
    /// ```
    /// use claystone::{Device, LossReduction, Tensor};
    /// let x = Tensor::from_slice(&[0.5f32, 1.0], 2, Device::Cpu)?;
    /// let t = Tensor::from_slice(&[1f32, 0.0], 2, Device::Cpu)?;
    /// let losses = x.binary_cross_entropy(&t, None, LossReduction::None)?.to_vec::<f32>()?;
    /// assert!((losses[0] - 2f32.ln()).abs() < 1e-6 && losses[1] == 100.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    binary_cross_entropy(input: x, target: x, weight: x?, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = manual |op, self, target, weight, reduction| {
        same_shape(op, &[self, target])?;
        self.dtype().check_float(op)?;
        let inputs: Vec<&Tensor> = [self, target].into_iter().chain(weight).collect();
        same_dtype(op, &inputs)?;
        return_replacement!(op, inputs, reduction);
        let (x, t) = (Expr::input(0), Expr::input(1));
        let scale = weight.map_or(Expr::constant(1.0), |_| Expr::input(2));
        let loss = -(&t * bounded_log(&x) + (1.0 - &t) * bounded_log(&(1.0 - &x))) * &scale;
        // This is PyTorch's gradient, which is not zero for probabilities of exactly 0 or 1.
        let derivative = (&x - &t) / ((1.0 - &x) * &x).max(1e-12) * &scale;
        let each = || {
            let of = |i: usize| if i == 0 { derivative.clone() } else { loss.diff(i) };
            reduce_losses(apply_formula(op, &inputs, self.dtype(), &loss, of)?, reduction)
        };
        each().with_op(op)
    };
    binary_cross_entropy_with_logits(input: x, target: x, weight: x?, pos_weight: x?, reduction: text @read_reduction = "mean")
        functional: Loss, Floats -> Same, differentiable;
    /// Computes the Kullback-Leibler divergence of log-probabilities x from `target` (PyTorch's `kl_div`): `t (log t - x)` for each
    /// element, and 0 where t is 0. With `log_target`, `target` holds logarithms too. [`LossReduction::Mean`] divides by the number of
    /// elements; [`LossReduction::BatchMean`] is the mathematical definition. Differentiable.
    kl_div(input: x, target: x, reduction: text @read_reduction = "mean", log_target: bool = false) functional:
        Loss, Floats -> Same, differentiable = |op, self, target, reduction, log_target| {
        losses_of_equal_shapes(op, &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            match log_target {
                true => t.exp() * (t - x),
                false => t.eq(0.0).select(0.0, t * t.log()) - t * x,
            }
        })
    };
    /// Computes the negative log-likelihood of counts t under Poisson distributions (PyTorch's `poisson_nll_loss`): `exp(x) - t x`, or
    /// `x - t log(x + eps)` without `log_input`. `full` adds Stirling's approximation of the constant term. PyTorch's defaults are `true`
    /// for `log_input`, `false` for `full` and 1e-8 for `eps`. Differentiable.
    poisson_nll_loss(input: x, target: x, log_input: bool = true, full: bool = false, eps: float = 1e-8,
        reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, target, log_input, full, eps, reduction| {
        losses_of_equal_shapes(op, &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            let loss = if log_input { x.exp() - t * x } else { x - t * (x + eps).log() };
            let stirling = || t * t.log() - t + 0.5 * (2.0 * PI * t).log();
            if full { loss + t.le(1.0).select(0.0, stirling()) } else { loss }
        })
    };
    /// Computes the negative log-likelihood of targets under normal distributions with mean `self` and variance `var` (PyTorch's
    /// `gaussian_nll_loss`, where `full` defaults to `false` and `eps` to 1e-6). `var` broadcasts and is clamped to at least `eps`.
    /// `full` adds the constant term. Differentiable.
    gaussian_nll_loss(input: x, target: x, var: x, full: bool = false, eps: float = 1e-6, reduction: text @read_reduction = "mean")
        functional: Loss, Floats -> Same, differentiable = |op, self, target, var, full, eps, reduction| {
        same_shape(op, &[self, target])?;
        losses(op, &[self, target, var], reduction, |e| {
            let var = e[2].lt(eps).select(eps, &e[2]);
            let loss = (var.log() + (&e[0] - &e[1]).square() / &var) * 0.5;
            if full { loss + 0.5 * (2.0 * PI).ln() } else { loss }
        })
    };
    /// Computes `log(1 + exp(-t x))` for targets t of 1 and -1 (PyTorch's `soft_margin_loss`). Differentiable.
    soft_margin_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, target, reduction| {
        losses_of_equal_shapes(op, &[self, target], reduction, |e| -(&e[0] * &e[1]).logsigmoid())
    };
    /// Computes x for a target of 1, and `max(0, margin - x)` for a target of -1 (PyTorch's `hinge_embedding_loss`, with a default margin
    /// of 1). Differentiable.
    hinge_embedding_loss(input: x, target: x, margin: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, target, margin, reduction| {
        losses_of_equal_shapes(op, &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            let far = margin - x;
            t.eq(1.0).select(0.0, far.lt(0.0).select(0.0, far)) + t.eq(-1.0).select(0.0, x)
        })
    };
    /// Computes `max(0, margin - t (self - other))` (PyTorch's `margin_ranking_loss`, with a default margin of 0). A target t of 1 means
    /// that `self` should be greater, and -1 that `other` should be greater. Differentiable.
    margin_ranking_loss(input1: x, input2: x, target: x, margin: float = 0, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, other, target, margin, reduction| {
        losses_of_equal_shapes(op, &[self, other, target], reduction, |e| {
            let loss = margin - &e[2] * (&e[0] - &e[1]);
            loss.lt(0.0).select(0.0, loss)
        })
    };
}

impl Tensor {
    /// Returns the mean of `(self - target)^2` over all elements, a scalar (PyTorch's `mse_loss`). Two launches. Differentiable. Both
    /// tensors are floats of the same shape, without broadcasting.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let y = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu)?;
    /// let t = Tensor::from_slice(&[0f32, 4.0], 2, Device::Cpu)?;
    /// assert_eq!(y.mse_loss(&t)?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.mse_loss_with(target, LossReduction::Mean)
    }

    /// Computes the loss like [`Tensor::mse_loss`], with the given reduction instead of the mean.
    #[track_caller]
    pub fn mse_loss_with(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        return_replacement!("mse_loss", [self, target], reduction);
        losses_of_equal_shapes("mse_loss", &[self, target], reduction, |x| (&x[0] - &x[1]).square())
    }

    /// Returns the mean of `|self - target|` over all elements, a scalar (PyTorch's `l1_loss`). Two launches. Differentiable.
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.l1_loss_with(target, LossReduction::Mean)
    }

    /// Computes the loss like [`Tensor::l1_loss`], with the given reduction instead of the mean.
    #[track_caller]
    pub fn l1_loss_with(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        return_replacement!("l1_loss", [self, target], reduction);
        losses_of_equal_shapes("l1_loss", &[self, target], reduction, |x| (&x[0] - &x[1]).abs())
    }

    /// Computes [`Tensor::binary_cross_entropy`] of `sigmoid(self)` without overflow (PyTorch's `binary_cross_entropy_with_logits`).
    /// `pos_weight` multiplies the losses of positive targets. Both `weight` and `pos_weight` are broadcast. Differentiable.
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        pos_weight: Option<&Tensor>,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "binary_cross_entropy_with_logits";
        same_shape(op, &[self, target])?;
        let inputs: Vec<&Tensor> = [self, target].into_iter().chain(weight).chain(pos_weight).collect();
        return_replacement!(op, [Some(self), Some(target), weight, pos_weight], reduction);
        losses(op, &inputs, reduction, |e| {
            let (x, t, last) = (&e[0], &e[1], &e[e.len() - 1]);
            let log = x.logsigmoid();
            let log = if pos_weight.is_some() { (1.0 + (last - 1.0) * t) * log } else { log };
            let loss = (1.0 - t) * x - log;
            if weight.is_some() { loss * &e[2] } else { loss }
        })
    }
}
