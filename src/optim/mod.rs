//! Optimisers that update any number of parameters with one fused launch per step.
//!
//! An optimiser moves its parameters into one flat buffer and makes them views of the buffer. The gradients become views of a second
//! buffer, and backward writes into it directly. Parameters whose storage has other handles are not moved. A step then evaluates one
//! expression over the flat buffers. For half-precision parameters, master weights and state are in f32: a step updates the master
//! weights and rounds them into the parameters in the same launch.
//!
//! A [`Rule`] defines an optimiser by the names of its state, its numbers, and one formula. [`Fused`] implements the rest, also for
//! rules of other crates. [`Scheduler`] changes the learning rate from step to step, and [`ReduceLrOnPlateau`] lowers it when a
//! metric stops improving. [`clip_grad_norm_`] limits gradients, and [`GradScaler`] prevents underflow of f16 gradients.

mod adam;
mod clip;
mod flat;
mod fused;
mod lion;
mod plateau;
mod rmsprop;
mod rule;
mod scaler;
mod schedule;
mod sgd;

use crate::io::{StateDict, Stateful};
use crate::{Result, Tensor};

pub use adam::{Adam, AdamConfig, AdamW, AdamWConfig};
pub use clip::{clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm};
pub(crate) use flat::{is_same_view, join_adjacent_views};
pub use fused::Fused;
pub use lion::{Lion, LionConfig};
pub use plateau::{PlateauMode, ReduceLrOnPlateau, ReduceLrOnPlateauConfig, ThresholdMode};
pub use rmsprop::{Adagrad, AdagradConfig, RmsProp, RmsPropConfig};
pub use rule::Rule;
pub use scaler::{GradScaler, GradScalerConfig};
pub use schedule::{
    AnnealStrategy, CosineAnnealingLr, CosineAnnealingWarmRestarts, ExponentialLr, LambdaLr, LinearLr, MultiStepLr,
    OneCycleLr, Schedule, Scheduler, SequentialLr, StepLr,
};
pub use sgd::{Sgd, SgdConfig};

/// The interface of all optimisers.
pub trait Optimizer {
    /// Updates every parameter that has a gradient, in place and without allocations. Makes one launch per group if all have gradients.
    ///
    /// # Errors
    /// Device failures, after which no parameter is changed, except for [`Error::Partial`](crate::Error::Partial): then some groups, or
    /// some runs of adjacent parameters, are updated completely and the others not at all.
    #[track_caller]
    fn step(&mut self) -> Result<()> {
        self.step_scaled(1.0)
    }

    /// Does the same as [`Optimizer::step`], with gradients multiplied by `factor` in the precision of the step. [`GradScaler`] calls it.
    ///
    /// # Errors
    /// Errors of [`Optimizer::step`].
    fn step_scaled(&mut self, factor: f64) -> Result<()>;

    /// Clears the gradients without a launch. Call it before each backward pass, unless gradients are to be accumulated.
    fn zero_grad(&self);

    /// Returns the parameters of all groups.
    fn parameters(&self) -> Vec<&Tensor>;

    /// Returns the learning rate of each group.
    fn learning_rates(&self) -> Vec<f64>;

    /// Sets the learning rate of each group, in the order of the groups. Does not recompile kernels.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the number of rates differs from the number of groups.
    fn set_learning_rates(&mut self, rates: &[f64]) -> Result<()>;

    /// Returns the state needed to resume training. For parameter 3 it has `state.3.step`, the tensors of the rule such as
    /// `state.3.exp_avg`, and for half precision the f32 master weights `state.3.master`; for group 0 it has `param_groups.0.lr`. Large
    /// tensors are views of the optimiser's memory: save or clone them before the next step.
    ///
    /// # Errors
    /// Device failures.
    fn state_dict(&self) -> Result<StateDict>;

    /// Restores a state from [`Optimizer::state_dict`]. Load the model's parameters first. All names and shapes are checked before any change.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a missing or unknown name, and for a tensor with another shape than expected.
    /// [`crate::Error::Partial`] if the device fails after some of the state was copied.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;

    /// True if all gradients are finite; [`GradScaler`] calls it before a step. Waits for the device.
    ///
    /// # Errors
    /// Device failures.
    fn gradients_are_finite(&self) -> Result<bool> {
        clip::all_finite(self.parameters())
    }

    /// Returns the learning rate of the first group.
    fn learning_rate(&self) -> f64 {
        self.learning_rates()[0]
    }

    /// Sets the learning rate of all groups.
    fn set_learning_rate(&mut self, lr: f64) {
        let rates = vec![lr; self.learning_rates().len()];
        self.set_learning_rates(&rates).expect("one for each group");
    }
}

/// Implements [`Stateful`] by calling the type's own `state_dict` and `load_state_dict`.
macro_rules! impl_stateful {
    ($([$($generics:tt)*] $type:ty: $methods:ident, $this:ident => $inner:expr, $inner_mut:expr;)*) => { $(
        impl<$($generics)*> Stateful for $type {
            fn state_dict(&self) -> Result<StateDict> {
                let $this = self;
                $methods::state_dict($inner)
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
                let $this = self;
                $methods::load_state_dict($inner_mut, state)
            }
        }
    )* };
}

impl_stateful! {
    [R: Rule] Fused<R>: Optimizer, this => this, this;
    [] Box<dyn Optimizer>: Optimizer, this => &**this, &mut **this;
    [] Scheduler: Scheduler, this => this, this;
    [] ReduceLrOnPlateau: ReduceLrOnPlateau, this => this, this;
    [] GradScaler: GradScaler, this => this, this;
}
