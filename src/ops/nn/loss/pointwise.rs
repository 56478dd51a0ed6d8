//! Losses of a prediction and a target of one shape.

use std::f64::consts::PI;

use crate::ops::dispatch::prelude::*;
use crate::ops::formula;
use crate::ops::nn::loss::{check_positive, losses, losses_of_one_shape, reduced, same_shape};
use crate::{Expr, LossReduction, Result, Tensor};

/// `log(x)`, at least -100.
fn bounded_log(x: &Expr) -> Expr {
    let log = x.log();
    log.lt(-100.0).select(-100.0, log)
}

impl Tensor {
    /// The mean of `(self - target)^2` over all elements, a scalar (PyTorch's `mse_loss`). Two launches. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let y = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu)?;
    /// let t = Tensor::from_slice(&[0f32, 4.0], 2, Device::Cpu)?;
    /// assert_eq!(y.mse_loss(&t)?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::ShapeMismatch`] for different shapes (nothing is broadcast), mismatching dtypes or devices, and
    /// [`crate::Error::UnsupportedDType`] for integers.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.mse_loss_with(target, LossReduction::Mean)
    }

    /// [`Tensor::mse_loss`] with a sum or a loss an element instead of the mean.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn mse_loss_with(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        replaced!("mse_loss", [self, target], reduction);
        losses_of_one_shape("mse_loss", &[self, target], reduction, |x| (&x[0] - &x[1]).square())
    }

    /// The mean of `|self - target|` over all elements, a scalar (PyTorch's `l1_loss`). Two launches. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.l1_loss_with(target, LossReduction::Mean)
    }

    /// [`Tensor::l1_loss`] with a sum or a loss an element instead of the mean.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn l1_loss_with(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        replaced!("l1_loss", [self, target], reduction);
        losses_of_one_shape("l1_loss", &[self, target], reduction, |x| (&x[0] - &x[1]).abs())
    }

    /// `d² / (2 beta)` where the error d is below beta, `d - beta / 2` elsewhere (PyTorch's `smooth_l1_loss`, whose default
    /// beta is 1; with 0 it is the L1 loss). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`]; [`crate::Error::Invalid`] for a beta below 0.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &Tensor, beta: f64, reduction: LossReduction) -> Result<Tensor> {
        replaced!(op = "smooth_l1_loss", [self, target], beta, reduction);
        check_positive(op, "beta", beta, true)?;
        losses_of_one_shape(op, &[self, target], reduction, |x| {
            let error = &x[0] - &x[1];
            let d = error.abs();
            // The square is of the error itself: |error| has no second derivative at 0.
            if beta == 0.0 { d } else { d.lt(beta).select(error.square() * (0.5 / beta), &d - 0.5 * beta) }
        })
    }

    /// `d² / 2` where the error d is at most delta, `delta (d - delta / 2)` elsewhere (PyTorch's `huber_loss`, whose default
    /// delta is 1). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`]; [`crate::Error::Invalid`] for a delta that is not above 0.
    #[track_caller]
    pub fn huber_loss(&self, target: &Tensor, delta: f64, reduction: LossReduction) -> Result<Tensor> {
        replaced!(op = "huber_loss", [self, target], delta, reduction);
        check_positive(op, "delta", delta, false)?;
        losses_of_one_shape(op, &[self, target], reduction, |x| {
            let error = &x[0] - &x[1];
            let d = error.abs();
            d.le(delta).select(error.square() * 0.5, (&d - 0.5 * delta) * delta)
        })
    }

    /// `-(t log x + (1 - t) log(1 - x))` of probabilities x and targets t, each times its weight (PyTorch's
    /// `binary_cross_entropy`); logarithms count as -100 at least. NaN for what is no probability. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, LossReduction, Tensor};
    /// let x = Tensor::from_slice(&[0.5f32, 1.0], 2, Device::Cpu)?;
    /// let t = Tensor::from_slice(&[1f32, 0.0], 2, Device::Cpu)?;
    /// let losses = x.binary_cross_entropy(&t, None, LossReduction::None)?.to_vec::<f32>()?;
    /// assert!((losses[0] - 2f32.ln()).abs() < 1e-6 && losses[1] == 100.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`]; the weight only has to broadcast.
    #[track_caller]
    pub fn binary_cross_entropy(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "binary_cross_entropy";
        same_shape(op, &[self, target])?;
        self.dtype().check_float(op)?;
        let inputs: Vec<&Tensor> = [self, target].into_iter().chain(weight).collect();
        crate::ops::same_dtype(op, &inputs)?;
        replaced!(op, inputs, reduction);
        let (x, t) = (Expr::input(0), Expr::input(1));
        let scale = weight.map_or(Expr::constant(1.0), |_| Expr::input(2));
        let loss = -(&t * bounded_log(&x) + (1.0 - &t) * bounded_log(&(1.0 - &x))) * &scale;
        // PyTorch's gradient, which is not zero for saturated probabilities.
        let derivative = (&x - &t) / ((1.0 - &x) * &x).max(1e-12) * &scale;
        let each = || {
            let of = |i: usize| if i == 0 { derivative.clone() } else { loss.diff(i) };
            reduced(formula(op, &inputs, self.dtype(), &loss, of)?, reduction)
        };
        each().named(op)
    }

    /// [`Tensor::binary_cross_entropy`] of `sigmoid(self)`, without overflow (PyTorch's
    /// `binary_cross_entropy_with_logits`). `pos_weight` multiplies the losses of positive targets; like `weight` it is
    /// broadcast. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::binary_cross_entropy`].
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
        replaced!(op, [Some(self), Some(target), weight, pos_weight], reduction);
        losses(op, &inputs, reduction, |e| {
            let (x, t, last) = (&e[0], &e[1], &e[e.len() - 1]);
            let log = x.logsigmoid();
            let log = if pos_weight.is_some() { (1.0 + (last - 1.0) * t) * log } else { log };
            let loss = (1.0 - t) * x - log;
            if weight.is_some() { loss * &e[2] } else { loss }
        })
    }

    /// The Kullback-Leibler divergence of log-probabilities from `target`: `t (log t - x)` an element, 0 where t is 0
    /// (PyTorch's `kl_div`); with `log_target` the target is given as logarithms too. The mean is over all elements;
    /// [`LossReduction::BatchMean`] is the divergence as mathematics has it. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn kl_div(&self, target: &Tensor, reduction: LossReduction, log_target: bool) -> Result<Tensor> {
        replaced!("kl_div", [self, target], reduction, log_target);
        losses_of_one_shape("kl_div", &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            match log_target {
                true => t.exp() * (t - x),
                false => t.eq(0.0).select(0.0, t * t.log()) - t * x,
            }
        })
    }

    /// The negative log-likelihood of counts under Poisson distributions: `exp(x) - t x`, without `log_input`
    /// `x - t log(x + eps)`; `full` adds Stirling's approximation of the constant (PyTorch's `poisson_nll_loss`, whose
    /// defaults are `true`, `false` and 1e-8). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn poisson_nll_loss(
        &self,
        target: &Tensor,
        log_input: bool,
        full: bool,
        eps: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        replaced!("poisson_nll_loss", [self, target], log_input, full, eps, reduction);
        losses_of_one_shape("poisson_nll_loss", &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            let loss = if log_input { x.exp() - t * x } else { x - t * (x + eps).log() };
            let stirling = || t * t.log() - t + 0.5 * (2.0 * PI * t).log();
            if full { loss + t.le(1.0).select(0.0, stirling()) } else { loss }
        })
    }

    /// The negative log-likelihood of targets under normal distributions with this mean and the variance `var`, which is
    /// broadcast and counts as `eps` at least; `full` adds the constant (PyTorch's `gaussian_nll_loss`, whose defaults are
    /// `false` and 1e-6). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn gaussian_nll_loss(
        &self,
        target: &Tensor,
        var: &Tensor,
        full: bool,
        eps: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        replaced!(op = "gaussian_nll_loss", [self, target, var], full, eps, reduction);
        same_shape(op, &[self, target])?;
        losses(op, &[self, target, var], reduction, |e| {
            let var = e[2].lt(eps).select(eps, &e[2]);
            let loss = (var.log() + (&e[0] - &e[1]).square() / &var) * 0.5;
            if full { loss + 0.5 * (2.0 * PI).ln() } else { loss }
        })
    }

    /// `log(1 + exp(-t x))` for targets t of 1 and -1 (PyTorch's `soft_margin_loss`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn soft_margin_loss(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        replaced!("soft_margin_loss", [self, target], reduction);
        losses_of_one_shape("soft_margin_loss", &[self, target], reduction, |e| -(&e[0] * &e[1]).logsigmoid())
    }

    /// x where the target is 1, `max(0, margin - x)` where it is -1 (PyTorch's `hinge_embedding_loss`, whose default margin is
    /// 1). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn hinge_embedding_loss(&self, target: &Tensor, margin: f64, reduction: LossReduction) -> Result<Tensor> {
        replaced!("hinge_embedding_loss", [self, target], margin, reduction);
        losses_of_one_shape("hinge_embedding_loss", &[self, target], reduction, |e| {
            let (x, t) = (&e[0], &e[1]);
            let far = margin - x;
            t.eq(1.0).select(0.0, far.lt(0.0).select(0.0, far)) + t.eq(-1.0).select(0.0, x)
        })
    }

    /// `max(0, margin - t (self - other))`: with a target t of 1 this tensor should be the greater, with -1 the other
    /// (PyTorch's `margin_ranking_loss`, whose default margin is 0). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn margin_ranking_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        replaced!("margin_ranking_loss", [self, other, target], margin, reduction);
        losses_of_one_shape("margin_ranking_loss", &[self, other, target], reduction, |e| {
            let loss = margin - &e[2] * (&e[0] - &e[1]);
            loss.lt(0.0).select(0.0, loss)
        })
    }
}
