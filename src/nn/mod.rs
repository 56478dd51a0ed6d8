//! Layers and losses: short compositions of operations.
//!
//! A layer owns its parameters as plain [`Tensor`] leaves and maps a tensor to a tensor; [`Module`] is the one trait.
//! Losses are methods of [`Tensor`] here ([`Tensor::mse_loss`]) and in `ops` ([`Tensor::cross_entropy`]).

mod attention;
pub mod functional;
mod linear;
mod loss;
mod sequential;
mod state;

pub use attention::{AttentionMasks, MultiheadAttention};
pub use linear::{Activation, Linear};
pub use sequential::{Dropout, Sequential};
pub use state::StateDict;

use crate::{Result, Tensor};

/// A layer or a network: a function of one tensor with parameters.
pub trait Module: Send + Sync {
    /// The result for a batch `x`; recorded where parameters or `x` require gradients.
    ///
    /// # Errors
    /// Those of the operations inside: shapes, dtypes and devices that do not go together, memory.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// The parameters, in a fixed order.
    fn parameters(&self) -> Vec<&Tensor>;

    /// The parameters, for an optimiser to rehome, in the same order.
    fn parameters_mut(&mut self) -> Vec<&mut Tensor>;

    /// Switches between training and evaluation what behaves differently in the two (PyTorch's `train` and `eval`); most
    /// layers do not.
    fn set_training(&self, _training: bool) {}

    /// How many numbers the parameters hold.
    fn parameter_count(&self) -> usize {
        self.parameters().iter().map(|p| p.numel()).sum()
    }
}
