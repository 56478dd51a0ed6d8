//! Loss scaling. The loss is multiplied by a large factor so that small f16 gradients do not underflow.

use super::clip::gradient_views;
use super::rule::{Optimizer, check_range};
use crate::internal::for_each_part;
use crate::io::StateDict;
use crate::{Result, Tensor, no_grad};

options! {
    /// Options of [`GradScaler`], with PyTorch's names and defaults.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct GradScalerConfig {
        /// The initial factor.
        pub init_scale: f64 = 65536.0,
        /// The factor is multiplied by this number after `growth_interval` consecutive steps with finite gradients.
        pub growth_factor: f64 = 2.0,
        /// The factor is multiplied by this number after a step with infinite or NaN gradients.
        pub backoff_factor: f64 = 0.5,
        /// The number of consecutive steps with finite gradients after which the factor grows.
        pub growth_interval: usize = 2000,
    }
}

/// Multiplies losses by a factor so that small f16 gradients do not underflow, divides the gradients by it before the step, and skips
/// the step if a gradient overflowed (PyTorch's `torch.amp.GradScaler`). Each step waits for the device to read the overflow flag.
///
/// ```
/// use claystone::optim::{GradScaler, GradScalerConfig, Optimizer, Sgd, SgdConfig};
/// use claystone::{DType, Device, Tensor};
/// let mut w = Tensor::ones(&[2], (DType::F16, Device::Cpu))?.requires_grad_(true)?;
/// let mut sgd = Sgd::new(vec![&mut w], SgdConfig { lr: 0.5, ..Default::default() })?;
/// let mut scaler = GradScaler::new(GradScalerConfig { init_scale: 1024.0, ..Default::default() })?;
/// let loss = w.mul(&w)?.sum((), false)?;
/// scaler.scale(&loss)?.backward()?;
/// assert!(scaler.step(&mut sgd)?);
/// scaler.update();
/// assert_eq!(w.to_dtype(DType::F32)?.to_vec::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradScaler {
    config: GradScalerConfig,
    scale: f64,
    good_steps: usize,
    /// Set by `unscale_` until the next step: whether the unscaled gradients are finite. `None` if gradients are not unscaled yet.
    unscaled: Option<bool>,
    /// Whether a step was skipped since the last call of `update`.
    overflowed: bool,
}

impl GradScaler {
    /// Creates a scaler with the initial factor. Fails with [`crate::Error::Invalid`] if `init_scale` is not above 0, `growth_factor` is
    /// below 1, or `backoff_factor` is not between 0 and 1.
    pub fn new(config: GradScalerConfig) -> Result<GradScaler> {
        let op = "GradScaler::new";
        let least = f64::MIN_POSITIVE;
        check_range(op, "init_scale", config.init_scale, least..f64::INFINITY)?;
        check_range(op, "growth_factor", config.growth_factor, 1.0..f64::INFINITY)?;
        check_range(op, "backoff_factor", config.backoff_factor, least..1.0)?;
        let scale = config.init_scale;
        Ok(GradScaler { config, scale, good_steps: 0, unscaled: None, overflowed: false })
    }

    /// Returns the current factor.
    pub fn get_scale(&self) -> f64 {
        self.scale
    }

    /// Returns `loss` times the factor. Call `backward` on the result. Fails as [`Tensor::mul_scalar`] does.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        loss.mul_scalar(self.scale)
    }

    /// Divides the gradients by the factor, for example to clip them before the step. The smallest f16 gradients may underflow here.
    /// Without this call, the step divides in f32, where they do not. Fails with [`crate::Error::Invalid`] if the gradients are already
    /// unscaled, and with [`crate::Error::Partial`] if the device fails after some were divided.
    pub fn unscale_(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        let op = "GradScaler::unscale_";
        invalid!(op if self.unscaled.is_some(), "the gradients of this step are already unscaled");
        let (finite, factor) = (optimizer.gradients_are_finite()?, 1.0 / self.scale);
        let gradients = gradient_views(optimizer.parameters())?;
        no_grad(|| for_each_part(op, &gradients, |run| run.mul_scalar_(factor).map(|_| ())))?;
        self.unscaled = Some(finite);
        Ok(())
    }

    /// Calls the optimiser's step unless a gradient is infinite or NaN. Returns whether the step was made. Fails as [`Optimizer::step`]
    /// does.
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let (finite, factor) = match self.unscaled {
            Some(finite) => (finite, 1.0),
            None => (optimizer.gradients_are_finite()?, 1.0 / self.scale),
        };
        if finite {
            optimizer.step_scaled(factor)?;
        }
        // A failed step does not reach this line, so the step can be tried again with the same gradients.
        self.unscaled = None;
        self.overflowed |= !finite;
        Ok(finite)
    }

    /// Updates the factor. Call it after each step: it lowers the factor after an overflow, and raises it after many steps without one.
    pub fn update(&mut self) {
        if std::mem::take(&mut self.overflowed) {
            self.scale *= self.config.backoff_factor;
            self.good_steps = 0;
            return;
        }
        self.good_steps += 1;
        if self.good_steps >= self.config.growth_interval {
            self.scale *= self.config.growth_factor;
            self.good_steps = 0;
        }
    }
}

state_of_fields! {
    /// Returns the factor and the options under PyTorch's names. Call this function after [`GradScaler::update`].
    GradScaler {
        "scale" => scale,
        "growth_factor" => config.growth_factor,
        "backoff_factor" => config.backoff_factor,
        "growth_interval" => config.growth_interval,
        "_growth_tracker" => good_steps,
    }
}
