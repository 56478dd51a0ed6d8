//! Optimisers: one fused launch a step, whatever the number of parameters.
//!
//! An optimiser rehomes the parameters it is given: they become views of one flat buffer, and their gradients views of
//! another, into which backward writes directly. Those whose memory somebody else holds too stay where they are. A step is
//! then one expression over flat buffers. Half-precision parameters get master weights and state in f32; the step updates
//! the master and rounds it into the parameters in the same launch.
//!
//! What tells one optimiser from another is a [`Rule`]: the names of its state, its numbers, and one formula. [`Fused`] does
//! the rest, for rules of other crates too. [`Scheduler`] changes the learning rate from step to step, [`ReduceLrOnPlateau`] when a metric stops getting
//! better, [`clip_grad_norm_`]
//! and [`GradScaler`] look after gradients that are too large or, in f16, too small.
//!
//! [`fused_adamw_`] and its kin are single steps, for whoever keeps the state.

mod adam;
mod clip;
mod flat;
mod functional;
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
pub(crate) use flat::joined_views;
pub use functional::{FusedAdamState, FusedStep, fused_adagrad_, fused_adam_, fused_adamw_, fused_sgd_, unscale_};
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

/// What every optimiser does.
pub trait Optimizer {
    /// Updates every parameter that has a gradient, in place. One launch a group where all have one; zero allocations.
    ///
    /// # Errors
    /// Device failures. Parameters are then as they were; [`Error::Partial`](crate::Error::Partial) says that those of some
    /// groups, or stretches of those that backward reached, were updated fully and the others not at all.
    #[track_caller]
    fn step(&mut self) -> Result<()> {
        self.step_scaled(1.0)
    }

    /// [`Optimizer::step`] with gradients times `factor`, multiplied in the precision steps are computed in: what
    /// [`GradScaler`] calls.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn step_scaled(&mut self, factor: f64) -> Result<()>;

    /// Forgets the gradients: call it before each backward unless gradients are to add up. Launches nothing.
    fn zero_grad(&self);

    /// The parameters, group after group.
    fn parameters(&self) -> Vec<&Tensor>;

    /// The learning rate of each group's next step.
    fn learning_rates(&self) -> Vec<f64>;

    /// Changes the learning rate of each group, for schedules. No kernel is compiled again.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where there are more or fewer than groups.
    fn set_learning_rates(&mut self, rates: &[f64]) -> Result<()>;

    /// What a later run needs to go on: `state.3.exp_avg` and the like of the parameter with that number, `state.3.step`,
    /// `param_groups.0.lr`, and for half-precision parameters their f32 `state.3.master`. The large ones are views of the
    /// optimiser's memory: what is to outlive the next step has to be saved or cloned before it.
    ///
    /// # Errors
    /// Device failures.
    fn state_dict(&self) -> Result<StateDict>;

    /// Goes on where [`Optimizer::state_dict`] was taken. Parameters are the model's to load, before this. Everything is
    /// checked before anything is changed.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a name that is missing or unknown and for a tensor of another shape;
    /// [`crate::Error::Partial`] where the device fails after some of the state was copied.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;

    /// Whether all gradients are finite, which [`GradScaler`] asks before a step. Waits for the device.
    ///
    /// # Errors
    /// Device failures.
    fn gradients_are_finite(&self) -> Result<bool> {
        clip::all_finite(self.parameters())
    }

    /// The learning rate of the (first group's) next step.
    fn learning_rate(&self) -> f64 {
        self.learning_rates()[0]
    }

    /// Changes the learning rate of all groups.
    fn set_learning_rate(&mut self, lr: f64) {
        let rates = vec![lr; self.learning_rates().len()];
        self.set_learning_rates(&rates).expect("one for each group");
    }
}

/// Parts of a checkpoint, by methods that the types have already.
macro_rules! stateful {
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

stateful! {
    [R: Rule] Fused<R>: Optimizer, this => this, this;
    [] Box<dyn Optimizer>: Optimizer, this => &**this, &mut **this;
    [] Scheduler: Scheduler, this => this, this;
    [] ReduceLrOnPlateau: ReduceLrOnPlateau, this => this, this;
    [] GradScaler: GradScaler, this => this, this;
}
