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
//!
//! All functions that return a result also fail if the device fails or has too little memory. The documentation names only other errors.

/// Defines `state_dict` and `load_state_dict` of a type whose state consists of these fields, each with its name in the state.
macro_rules! state_of_fields {
    ($(#[$doc:meta])* $type:ident { $($name:literal => $($field:ident).+,)* }) => {
        impl $type {
            $(#[$doc])*
            pub fn state_dict(&self) -> Result<StateDict> {
                StateDict::from_parts(&[$(($name, &self.$($field).+)),*])
            }

            /// Restores a state from [`state_dict`](Self::state_dict). Fails with [`crate::Error::Invalid`] if a name is missing.
            pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
                state.load_parts(&mut [$(($name, &mut self.$($field).+)),*])
            }
        }
    };
}

mod clip;
mod flat;
mod fused;
mod rule;
mod rules;
mod scaler;
mod schedule;

use crate::Result;
use crate::io::{StateDict, Stateful};

pub use clip::{clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm};
pub(crate) use flat::{is_same_view, join_adjacent_views};
pub use fused::Fused;
pub use rule::{Optimizer, Rule};
pub use rules::{
    Adagrad, AdagradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Lion, LionConfig, RmsProp, RmsPropConfig, Sgd,
    SgdConfig,
};
pub use scaler::{GradScaler, GradScalerConfig};
pub use schedule::{
    AnnealStrategy, CosineAnnealingLr, CosineAnnealingWarmRestarts, ExponentialLr, LambdaLr, LinearLr, MultiStepLr,
    OneCycleLr, PlateauMode, ReduceLrOnPlateau, ReduceLrOnPlateauConfig, Schedule, Scheduler, SequentialLr, StepLr,
    ThresholdMode,
};

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
