//! A learning rate that goes down when a metric stops getting better.

use super::Optimizer;
use super::rule::{NOT_NEGATIVE, check};
use crate::Result;
use crate::io::StateDict;

/// Which way a metric gets better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlateauMode {
    /// Smaller is better: a loss.
    Min,
    /// Larger is better: an accuracy.
    Max,
}

/// What a metric has to differ from the best one by to count as better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThresholdMode {
    /// A part of the best one.
    Rel,
    /// A number.
    Abs,
}

/// How [`ReduceLrOnPlateau`] works; PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReduceLrOnPlateauConfig {
    /// Which way the metric gets better.
    pub mode: PlateauMode,
    /// What the rates are multiplied by, below 1.
    pub factor: f64,
    /// How many epochs in a row may be no better before the rates go down.
    pub patience: usize,
    /// By how much a metric has to be better.
    pub threshold: f64,
    /// Whether that is relative.
    pub threshold_mode: ThresholdMode,
    /// How many epochs after a reduction do not count.
    pub cooldown: usize,
    /// The least rate.
    pub min_lr: f64,
    /// Rates that would change by no more than this stay as they are.
    pub eps: f64,
}

impl Default for ReduceLrOnPlateauConfig {
    fn default() -> ReduceLrOnPlateauConfig {
        ReduceLrOnPlateauConfig {
            mode: PlateauMode::Min,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            threshold_mode: ThresholdMode::Rel,
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
        }
    }
}

/// Lowers an optimiser's learning rates when a metric, such as the loss of the validation set, has not got better for some
/// epochs (PyTorch's `ReduceLROnPlateau`). A metric that is NaN is no better.
///
/// ```
/// use claystone::optim::{Optimizer, ReduceLrOnPlateau, ReduceLrOnPlateauConfig, Sgd, SgdConfig};
/// use claystone::{Device, Tensor};
/// let mut w = Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true)?;
/// let mut sgd = Sgd::new(vec![&mut w], SgdConfig { lr: 0.1, ..Default::default() })?;
/// let mut plateau = ReduceLrOnPlateau::new(ReduceLrOnPlateauConfig { factor: 0.5, patience: 1, ..Default::default() })?;
/// for validation_loss in [0.9, 0.5, 0.5, 0.51] {
///     plateau.step(&mut sgd, validation_loss)?;
/// }
/// assert_eq!(sgd.learning_rate(), 0.05);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ReduceLrOnPlateau {
    config: ReduceLrOnPlateauConfig,
    best: f64,
    num_bad_epochs: usize,
    cooldown_counter: usize,
    last_epoch: usize,
}

impl ReduceLrOnPlateau {
    /// One that has seen no metric yet.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a factor that is not in `0.0..1.0`, and for a `min_lr` or an `eps` below 0.
    pub fn new(config: ReduceLrOnPlateauConfig) -> Result<ReduceLrOnPlateau> {
        let op = "ReduceLrOnPlateau::new";
        check(op, "factor", config.factor, 0.0..1.0)?;
        check(op, "min_lr", config.min_lr, NOT_NEGATIVE)?;
        check(op, "eps", config.eps, NOT_NEGATIVE)?;
        let best = if config.mode == PlateauMode::Min { f64::INFINITY } else { f64::NEG_INFINITY };
        Ok(ReduceLrOnPlateau { config, best, num_bad_epochs: 0, cooldown_counter: 0, last_epoch: 0 })
    }

    /// Takes note of an epoch's metric, and lowers the rates of all groups where it has not got better for too long.
    ///
    /// # Errors
    /// As [`Optimizer::set_learning_rates`].
    pub fn step(&mut self, optimizer: &mut dyn Optimizer, metric: f64) -> Result<()> {
        self.last_epoch += 1;
        if self.is_better(metric) {
            self.best = metric;
            self.num_bad_epochs = 0;
        } else {
            self.num_bad_epochs += 1;
        }
        if self.cooldown_counter > 0 {
            self.cooldown_counter -= 1;
            self.num_bad_epochs = 0;
        }
        if self.num_bad_epochs > self.config.patience {
            let ReduceLrOnPlateauConfig { factor, min_lr, eps, cooldown, .. } = self.config;
            let reduced = |lr: f64| (lr * factor).max(min_lr);
            let rates = optimizer.learning_rates();
            let rates = rates.into_iter().map(|lr| if lr - reduced(lr) > eps { reduced(lr) } else { lr });
            optimizer.set_learning_rates(&rates.collect::<Vec<f64>>())?;
            self.cooldown_counter = cooldown;
            self.num_bad_epochs = 0;
        }
        Ok(())
    }

    fn is_better(&self, metric: f64) -> bool {
        let (best, by) = (self.best, self.config.threshold);
        match (self.config.mode, self.config.threshold_mode) {
            (PlateauMode::Min, ThresholdMode::Rel) => metric < best * (1.0 - by),
            (PlateauMode::Min, ThresholdMode::Abs) => metric < best - by,
            (PlateauMode::Max, ThresholdMode::Rel) => metric > best * (1.0 + by),
            (PlateauMode::Max, ThresholdMode::Abs) => metric > best + by,
        }
    }

    /// The best metric so far; infinite before the first.
    pub fn best(&self) -> f64 {
        self.best
    }

    /// What it has seen, by PyTorch's names. The optimiser's rates are part of its own state.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn state_dict(&self) -> Result<StateDict> {
        StateDict::from_parts(&[
            ("best", &self.best),
            ("num_bad_epochs", &self.num_bad_epochs),
            ("cooldown_counter", &self.cooldown_counter),
            ("last_epoch", &self.last_epoch),
        ])
    }

    /// Goes on where [`ReduceLrOnPlateau::state_dict`] was taken.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a name that is missing.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        state.load_parts(&mut [
            ("best", &mut self.best),
            ("num_bad_epochs", &mut self.num_bad_epochs),
            ("cooldown_counter", &mut self.cooldown_counter),
            ("last_epoch", &mut self.last_epoch),
        ])
    }
}
