//! Learning rate schedules in closed form, whose rate depends only on the initial rate and the number of the step, and a scheduler that
//! lowers the rate when a metric stops improving.

use std::f64::consts::PI;

use super::rule::{NON_NEGATIVE, Optimizer, check_range};
use crate::Result;
use crate::io::StateDict;

/// The learning rate as a function of time. Closures `|base, step| ..` implement this trait.
pub trait Schedule: Send {
    /// Returns the rate in step (or epoch) number `step`, counted from 0, for a group whose initial rate is `base`.
    fn learning_rate(&self, base: f64, step: usize) -> f64;
}

impl<F: Fn(f64, usize) -> f64 + Send> Schedule for F {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        self(base, step)
    }
}

/// Sets the learning rates of an optimiser from a [`Schedule`]. Call [`Scheduler::step`] after each step or epoch.
///
/// ```
/// use claystone::optim::{Optimizer, Scheduler, Sgd, SgdConfig, StepLr};
/// use claystone::{Device, Tensor};
/// let mut w = Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true)?;
/// let mut sgd = Sgd::new(vec![&mut w], SgdConfig { lr: 0.8, ..Default::default() })?;
/// let mut scheduler = Scheduler::new(&mut sgd, StepLr { step_size: 2, gamma: 0.5 })?;
/// let mut rates = vec![];
/// for _ in 0..5 {
///     rates.push(sgd.learning_rate());
///     sgd.step()?;
///     scheduler.step(&mut sgd)?;
/// }
/// assert_eq!(rates, [0.8, 0.8, 0.4, 0.4, 0.2]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Scheduler {
    schedule: Box<dyn Schedule>,
    base: Vec<f64>,
    step: usize,
}

impl Scheduler {
    /// Stores the optimiser's rates as the initial rates, and sets the rates of step 0. Fails as
    /// [`Optimizer::set_learning_rates`] does.
    pub fn new(optimizer: &mut dyn Optimizer, schedule: impl Schedule + 'static) -> Result<Scheduler> {
        let scheduler = Scheduler { schedule: Box::new(schedule), base: optimizer.learning_rates(), step: 0 };
        scheduler.set(optimizer)?;
        Ok(scheduler)
    }

    /// Advances to the next step, and sets the optimiser's rates for it. Fails with [`crate::Error::Invalid`] if groups
    /// were added to the optimiser after [`Scheduler::new`].
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.step += 1;
        self.set(optimizer)
    }

    /// Returns the number of the current step.
    pub fn last_step(&self) -> usize {
        self.step
    }

    fn set(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let rates: Vec<f64> = self.base.iter().map(|&b| self.schedule.learning_rate(b, self.step)).collect();
        optimizer.set_learning_rates(&rates)
    }

    /// Returns the state: `last_epoch` and `base_lrs`.
    pub fn state_dict(&self) -> Result<StateDict> {
        StateDict::from_parts(&[("last_epoch", &self.step), ("base_lrs", &self.base)])
    }

    /// Restores a state from [`Scheduler::state_dict`]. Current rates are not restored: they belong to the optimiser's
    /// state. Fails with [`crate::Error::Invalid`] for a missing name, and if the number of groups differs.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let (mut step, mut base) = (0, Vec::new());
        state.load_parts(&mut [("last_epoch", &mut step), ("base_lrs", &mut base)])?;
        let (wanted, given) = (self.base.len(), base.len());
        invalid!("Scheduler::load_state_dict" if wanted != given,
            "the state is of an optimiser with {given} groups, and this one has {wanted}: make the same groups");
        (self.step, self.base) = (step, base);
        Ok(())
    }
}

/// Multiplies the rate by `gamma` every `step_size` steps (PyTorch's `StepLR`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLr {
    /// The number of steps between changes of the rate; 0 counts as 1.
    pub step_size: usize,
    /// The factor of each change; 0.1 in PyTorch.
    pub gamma: f64,
}

impl Schedule for StepLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        base * gamma_power(self.gamma, step / self.step_size.max(1))
    }
}

/// Multiplies the rate by `gamma` at each of the milestones (PyTorch's `MultiStepLR`).
#[derive(Debug, Clone, PartialEq)]
pub struct MultiStepLr {
    /// The steps at which the rate changes.
    pub milestones: Vec<usize>,
    /// The factor of each change; 0.1 in PyTorch.
    pub gamma: f64,
}

impl Schedule for MultiStepLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        base * gamma_power(self.gamma, self.milestones.iter().filter(|m| **m <= step).count())
    }
}

/// Multiplies the rate by `gamma` every step (PyTorch's `ExponentialLR`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExponentialLr {
    /// The factor of each step.
    pub gamma: f64,
}

impl Schedule for ExponentialLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        base * gamma_power(self.gamma, step)
    }
}

fn gamma_power(gamma: f64, n: usize) -> f64 {
    gamma.powi(i32::try_from(n).unwrap_or(i32::MAX))
}

/// Lowers the rate along a cosine from the initial rate to `eta_min` in `t_max` steps, then raises it again (PyTorch's `CosineAnnealingLR`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CosineAnnealingLr {
    /// The number of steps until the lowest rate; 0 counts as 1.
    pub t_max: usize,
    /// The lowest rate.
    pub eta_min: f64,
}

impl Schedule for CosineAnnealingLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        cosine_interpolate(base, self.eta_min, step as f64 / self.t_max.max(1) as f64)
    }
}

/// Interpolates from `start` to `end` along half a cosine. `part` is the position between them, from 0 to 1.
fn cosine_interpolate(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) * (1.0 + (PI * part).cos()) / 2.0
}

/// For warm-up: multiplies the rate by a factor from `start_factor` to `end_factor`, linearly in `total_iters` steps (PyTorch's `LinearLR`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearLr {
    /// The factor in step 0.
    pub start_factor: f64,
    /// The factor from step `total_iters` on.
    pub end_factor: f64,
    /// The number of steps in which the factor changes. If 0, the factor is `end_factor` from step 0 on.
    pub total_iters: usize,
}

impl Default for LinearLr {
    /// Returns PyTorch's default: from a third of the rate to the full rate in five steps.
    fn default() -> LinearLr {
        LinearLr { start_factor: 1.0 / 3.0, end_factor: 1.0, total_iters: 5 }
    }
}

impl Schedule for LinearLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        let part = if step >= self.total_iters { 1.0 } else { step as f64 / self.total_iters as f64 };
        base * (self.start_factor + (self.end_factor - self.start_factor) * part)
    }
}

/// [`CosineAnnealingLr`] that restarts from the initial rate after `t_0` steps; each period is `t_mult` times as long as the one
/// before (Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"; PyTorch's `CosineAnnealingWarmRestarts`).
///
/// ```
/// use claystone::optim::{CosineAnnealingWarmRestarts, Schedule};
/// let schedule = CosineAnnealingWarmRestarts { t_mult: 2, ..CosineAnnealingWarmRestarts::new(10) };
/// assert_eq!([0, 5, 10, 20, 30].map(|t| schedule.learning_rate(2.0, t)), [2.0, 1.0, 2.0, 1.0, 2.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CosineAnnealingWarmRestarts {
    /// The number of steps until the first restart; 0 counts as 1.
    pub t_0: usize,
    /// The ratio of consecutive periods; 1 in PyTorch. 0 counts as 1.
    pub t_mult: usize,
    /// The lowest rate; 0 in PyTorch.
    pub eta_min: f64,
}

impl CosineAnnealingWarmRestarts {
    /// Creates a schedule with PyTorch's defaults.
    pub fn new(t_0: usize) -> CosineAnnealingWarmRestarts {
        CosineAnnealingWarmRestarts { t_0, t_mult: 1, eta_min: 0.0 }
    }
}

impl Schedule for CosineAnnealingWarmRestarts {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        let (mut t_cur, mut t_i) = (step, self.t_0.max(1));
        if self.t_mult <= 1 {
            t_cur %= t_i;
        }
        while t_cur >= t_i {
            t_cur -= t_i;
            t_i = t_i.saturating_mul(self.t_mult);
        }
        cosine_interpolate(base, self.eta_min, t_cur as f64 / t_i as f64)
    }
}

/// The shape of the curve between two rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnnealStrategy {
    /// Half a cosine.
    Cos,
    /// A straight line.
    Linear,
}

/// Raises the rate from `max_lr / div_factor` to `max_lr`, then lowers it to the first rate divided by `final_div_factor` (Smith and
/// Topin, "Super-Convergence"; PyTorch's `OneCycleLR` with `cycle_momentum=False`). Ignores the groups' initial rates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycleLr {
    /// The highest rate.
    pub max_lr: f64,
    /// The number of steps of the whole cycle. Later steps keep the last rate.
    pub total_steps: usize,
    /// The fraction of the cycle in which the rate rises; 0.3 in PyTorch.
    pub pct_start: f64,
    /// The curve of the rise and of the fall; cosine in PyTorch.
    pub anneal_strategy: AnnealStrategy,
    /// The ratio of the highest rate to the first rate; 25 in PyTorch.
    pub div_factor: f64,
    /// The ratio of the first rate to the last rate; 10,000 in PyTorch.
    pub final_div_factor: f64,
    /// Whether the fall has two phases: back to the first rate as fast as it rose, then to the last rate. False in PyTorch.
    pub three_phase: bool,
}

impl OneCycleLr {
    /// Creates a schedule with PyTorch's defaults.
    pub fn new(max_lr: f64, total_steps: usize) -> OneCycleLr {
        OneCycleLr {
            max_lr,
            total_steps,
            pct_start: 0.3,
            anneal_strategy: AnnealStrategy::Cos,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }
    }
}

impl Schedule for OneCycleLr {
    fn learning_rate(&self, _base: f64, step: usize) -> f64 {
        let (first, last) = (self.max_lr / self.div_factor, self.max_lr / self.div_factor / self.final_div_factor);
        let (total, up) = (self.total_steps as f64, self.pct_start * self.total_steps as f64);
        // For each phase: the number of its last step, and the rate in that step.
        let phases = match self.three_phase {
            true => [(up - 1.0, self.max_lr), (2.0 * up - 2.0, first), (total - 1.0, last)],
            false => [(up - 1.0, self.max_lr), (total - 1.0, last), (total - 1.0, last)],
        };
        let (mut start, mut from, step) = (0.0, first, step as f64);
        for (end, to) in phases {
            if step <= end {
                // A phase of only one step has the phase's last rate.
                let part = if end > start { (step - start) / (end - start) } else { 1.0 };
                return match self.anneal_strategy {
                    AnnealStrategy::Cos => cosine_interpolate(from, to, part),
                    AnnealStrategy::Linear => from + (to - from) * part,
                };
            }
            (start, from) = (end, to);
        }
        last
    }
}

/// Multiplies the rate by a function of the step (PyTorch's `LambdaLR`).
pub struct LambdaLr<F>(
    /// Returns the factor for a step.
    pub F,
);

impl<F: Fn(usize) -> f64 + Send> Schedule for LambdaLr<F> {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        base * (self.0)(step)
    }
}

/// Joins schedules in sequence. Each schedule counts steps from its own start (PyTorch's `SequentialLR`).
///
/// ```
/// use claystone::optim::{CosineAnnealingLr, LinearLr, Schedule, SequentialLr};
/// let warm_up = LinearLr { start_factor: 0.1, end_factor: 1.0, total_iters: 10 };
/// let schedule = SequentialLr::new(warm_up).then(10, CosineAnnealingLr { t_max: 90, eta_min: 0.0 });
/// assert_eq!([0, 10, 100].map(|t| schedule.learning_rate(2.0, t)), [0.2, 2.0, 0.0]);
/// ```
pub struct SequentialLr {
    /// The schedules, each with the number of its first step.
    parts: Vec<(usize, Box<dyn Schedule>)>,
}

impl SequentialLr {
    /// Creates a sequence that begins with `schedule`.
    pub fn new(schedule: impl Schedule + 'static) -> SequentialLr {
        SequentialLr { parts: vec![(0, Box::new(schedule))] }
    }

    /// Appends `schedule`, which begins at step `milestone`.
    pub fn then(mut self, milestone: usize, schedule: impl Schedule + 'static) -> SequentialLr {
        self.parts.push((milestone, Box::new(schedule)));
        self
    }
}

impl Schedule for SequentialLr {
    fn learning_rate(&self, base: f64, step: usize) -> f64 {
        let (start, part) = self.parts.iter().rev().find(|(start, _)| *start <= step).unwrap_or(&self.parts[0]);
        part.learning_rate(base, step - start)
    }
}

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
}

state_of_fields! {
    /// Returns the scheduler's state under PyTorch's names. Learning rates are not included: they belong to the optimiser's state.
    ReduceLrOnPlateau {
        "best" => best,
        "num_bad_epochs" => num_bad_epochs,
        "cooldown_counter" => cooldown_counter,
        "last_epoch" => last_epoch,
    }
}
