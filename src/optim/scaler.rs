//! Loss scaling: f16 gradients that would underflow are computed as multiples of themselves.

use super::Optimizer;
use super::clip::gradients;
use super::rule::check;
use crate::io::StateDict;
use crate::{Error, Result, Tensor, for_each_part, no_grad};

/// How [`GradScaler`] changes its factor; PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScalerConfig {
    /// The first factor.
    pub init_scale: f64,
    /// What the factor is multiplied by after `growth_interval` good steps.
    pub growth_factor: f64,
    /// What the factor is multiplied by after a step whose gradients were not all finite.
    pub backoff_factor: f64,
    /// Good steps in a row before the factor grows.
    pub growth_interval: usize,
}

impl Default for GradScalerConfig {
    fn default() -> GradScalerConfig {
        GradScalerConfig { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

/// Multiplies losses so that small f16 gradients do not underflow, divides the gradients again before the step, and skips the
/// step where some overflowed (PyTorch's `torch.amp.GradScaler`). Whether they did is read from the device: one wait a step.
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
    /// Whether the gradients of the step to come are unscaled, and then whether they are finite.
    unscaled: Option<bool>,
    /// Whether a step was skipped since the last update.
    overflowed: bool,
}

impl GradScaler {
    /// A scaler at its first factor.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a factor that is not above 0.
    pub fn new(config: GradScalerConfig) -> Result<GradScaler> {
        let op = "GradScaler::new";
        let least = f64::MIN_POSITIVE;
        check(op, "init_scale", config.init_scale, least..f64::INFINITY)?;
        check(op, "growth_factor", config.growth_factor, 1.0..f64::INFINITY)?;
        check(op, "backoff_factor", config.backoff_factor, least..1.0)?;
        let scale = config.init_scale;
        Ok(GradScaler { config, scale, good_steps: 0, unscaled: None, overflowed: false })
    }

    /// The factor now.
    pub fn get_scale(&self) -> f64 {
        self.scale
    }

    /// `loss` times the factor: what to call `backward` on.
    ///
    /// # Errors
    /// As [`Tensor::mul_scalar`].
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        loss.mul_scalar(self.scale)
    }

    /// Divides the gradients by the factor, for who wants to see or clip them before the step. In f16 the smallest are lost by
    /// that; a step without it divides in f32.
    ///
    /// # Errors
    /// [`Error::Invalid`] where this step's already are; [`Error::Partial`] where the device fails after some were divided.
    pub fn unscale_(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        let op = "GradScaler::unscale_";
        if self.unscaled.is_some() {
            return Err(Error::invalid(op, "the gradients of this step are unscaled already"));
        }
        let (finite, factor) = (optimizer.gradients_are_finite()?, 1.0 / self.scale);
        let gradients = gradients(optimizer.parameters())?;
        no_grad(|| for_each_part(op, &gradients, |run| run.mul_scalar_(factor).map(|_| ())))?;
        self.unscaled = Some(finite);
        Ok(())
    }

    /// Makes the optimiser's step unless a gradient is infinite or NaN; gives whether it did.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let (finite, factor) = match self.unscaled {
            Some(finite) => (finite, 1.0),
            None => (optimizer.gradients_are_finite()?, 1.0 / self.scale),
        };
        if finite {
            optimizer.step_scaled(factor)?;
        }
        // After a step that failed the gradients are what they were, to be tried again.
        self.unscaled = None;
        self.overflowed |= !finite;
        Ok(finite)
    }

    /// Sets the factor for the next pass: smaller after an overflow, larger after many steps without one.
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

    /// The factor and how it changes, by PyTorch's names: to be taken after [`GradScaler::update`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn state_dict(&self) -> Result<StateDict> {
        let GradScalerConfig { growth_factor, backoff_factor, growth_interval, .. } = &self.config;
        StateDict::from_parts(&[
            ("scale", &self.scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("growth_interval", growth_interval),
            ("_growth_tracker", &self.good_steps),
        ])
    }

    /// Goes on where [`GradScaler::state_dict`] was taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is missing.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let GradScalerConfig { growth_factor, backoff_factor, growth_interval, .. } = &mut self.config;
        state.load_parts(&mut [
            ("scale", &mut self.scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("growth_interval", growth_interval),
            ("_growth_tracker", &mut self.good_steps),
        ])
    }
}
