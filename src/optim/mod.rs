//! Optimisers: one fused launch a step, whatever the number of parameters.
//!
//! An optimiser rehomes the parameters it is given: they become views of one flat buffer, and their gradients views of
//! another, into which backward writes directly. A step is then one expression over flat buffers. Half-precision
//! parameters get master weights and state in f32; the step updates the master and rounds it into the parameters in the
//! same launch.

mod adamw;
mod flat;
mod sgd;

pub use adamw::{AdamW, AdamWConfig};
pub use sgd::{Sgd, SgdConfig};

use crate::Result;

/// What every optimiser does.
pub trait Optimizer {
    /// Updates every parameter that has a gradient, in place. One launch where all have one; zero allocations.
    ///
    /// # Errors
    /// Device failures. Parameters are then as they were or fully updated, where backward reached only some of them each
    /// stretch of those for itself.
    fn step(&mut self) -> Result<()>;

    /// Forgets the gradients: call it before each backward unless gradients are to add up. Launches nothing.
    fn zero_grad(&self);

    /// The learning rate of the next step.
    fn learning_rate(&self) -> f64;

    /// Changes the learning rate, for schedules. No kernel is compiled again.
    fn set_learning_rate(&mut self, lr: f64);
}
