//! A scheduler that lowers the learning rate when a metric stops improving.

use super::rule::{NON_NEGATIVE, Optimizer, check_range};
use crate::Result;
use crate::io::StateDict;

/// The direction in which a metric improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlateauMode {
    /// Smaller values are better, as for a loss.
    Min,
    /// Larger values are better, as for an accuracy.
    Max,
}

/// How [`ReduceLrOnPlateauConfig::threshold`] is compared: relative to the best metric, or as an absolute difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThresholdMode {
    /// The threshold is a fraction of the best metric.
    Rel,
    /// The threshold is a difference from the best metric.
    Abs,
}

options! {
    /// Options of [`ReduceLrOnPlateau`], with PyTorch's names and defaults.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct ReduceLrOnPlateauConfig {
        /// The direction in which the metric improves.
        pub mode: PlateauMode = PlateauMode::Min,
        /// The factor by which a reduction multiplies the learning rate, below 1.
        pub factor: f64 = 0.1,
        /// The number of consecutive epochs without improvement that do not yet reduce the rate.
        pub patience: usize = 10,
        /// The smallest improvement of the metric that counts as an improvement.
        pub threshold: f64 = 1e-4,
        /// How the threshold is compared with the improvement.
        pub threshold_mode: ThresholdMode = ThresholdMode::Rel,
        /// The number of epochs after a reduction in which epochs without improvement are not counted.
        pub cooldown: usize = 0,
        /// The lower bound of the learning rate.
        pub min_lr: f64 = 0.0,
        /// The smallest reduction: if the rate would fall by `eps` or less, it is not changed.
        pub eps: f64 = 1e-8,
    }
}

/// Lowers an optimiser's learning rates when a metric, such as the validation loss, has not improved for more than `patience`
/// epochs (PyTorch's `ReduceLROnPlateau`). A NaN never counts as an improvement.
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
    /// Creates a scheduler without a best metric. Fails with [`crate::Error::Invalid`] for a factor outside `0.0..1.0`,
    /// and for a `min_lr` or an `eps` below 0.
    pub fn new(config: ReduceLrOnPlateauConfig) -> Result<ReduceLrOnPlateau> {
        let op = "ReduceLrOnPlateau::new";
        check_range(op, "factor", config.factor, 0.0..1.0)?;
        check_range(op, "min_lr", config.min_lr, NON_NEGATIVE)?;
        check_range(op, "eps", config.eps, NON_NEGATIVE)?;
        let best = if config.mode == PlateauMode::Min { f64::INFINITY } else { f64::NEG_INFINITY };
        Ok(ReduceLrOnPlateau { config, best, num_bad_epochs: 0, cooldown_counter: 0, last_epoch: 0 })
    }

    /// Records the metric of an epoch. Lowers the rates of all groups after more than `patience` epochs without
    /// improvement. Fails as [`Optimizer::set_learning_rates`] does.
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

    /// Returns the best metric so far. Before the first epoch it is infinite: positive for `Min`, negative for `Max`.
    pub fn best(&self) -> f64 {
        self.best
    }

    /// Returns the scheduler's state under PyTorch's names. Learning rates are not included: they belong to the optimiser's state.
    pub fn state_dict(&self) -> Result<StateDict> {
        StateDict::from_parts(&[
            ("best", &self.best),
            ("num_bad_epochs", &self.num_bad_epochs),
            ("cooldown_counter", &self.cooldown_counter),
            ("last_epoch", &self.last_epoch),
        ])
    }

    /// Restores a state from [`ReduceLrOnPlateau::state_dict`]. Fails with [`crate::Error::Invalid`] if a name is
    /// missing.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        state.load_parts(&mut [
            ("best", &mut self.best),
            ("num_bad_epochs", &mut self.num_bad_epochs),
            ("cooldown_counter", &mut self.cooldown_counter),
            ("last_epoch", &mut self.last_epoch),
        ])
    }
}
