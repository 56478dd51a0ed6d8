//! Recurrent layers and cells, and packed sequences (sequences of different lengths without padding).

mod cells;
mod packed;
mod pass;
mod schedule;
mod stack;
mod step;

use super::Module;
use crate::internal::CellKind;
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Result, Tensor};
use stack::Stack;

pub use cells::{GruCell, LstmCell, RnnCell};
pub use packed::{
    PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence, unpack_sequence,
    unpad_sequence,
};

options! {
    /// Options of [`Rnn`], [`Lstm`] and [`Gru`], with PyTorch's names and defaults.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct RnnOptions {
        /// The number of stacked layers.
        pub num_layers: usize = 1,
        /// Whether the layer has biases.
        pub bias: bool = true,
        /// Whether input and output have the shape `[N, L, ..]` instead of `[L, N, ..]`.
        pub batch_first: bool = false,
        /// The dropout probability between layers. Applies in training only.
        pub dropout: f64 = 0.0,
        /// Whether each layer also processes the sequence in reverse.
        pub bidirectional: bool = false,
        /// The number of features to which LSTM's hidden state is projected, less than the hidden size. 0 disables the projection.
        pub proj_size: usize = 0,
    }
}

macro_rules! layers {
    ($($(#[$doc:meta])* $name:ident $step:expr, $state:ty, $given:ident => $tensors:expr, $last:ident => $states:expr;)*) => { $(
        $(#[$doc])*
        pub struct $name {
            stack: Stack,
        }

        impl $name {
            /// Creates a layer from `input_size` to `hidden_size` features. All parameters are drawn uniformly from ±1/√hidden_size, as in
            /// PyTorch. Fails with [`Error::Invalid`](crate::Error::Invalid) for a size of 0, a dropout outside `0.0..=1.0`, and a
            /// projection in a layer other than LSTM or to at least the hidden size.
            #[track_caller]
            pub fn new(
                input_size: usize,
                hidden_size: usize,
                options: RnnOptions,
                tensors: impl Into<TensorOptions>,
            ) -> Result<$name> {
                let _caller = Caller::enter();
                let op = concat!(stringify!($name), "::new");
                Ok($name { stack: Stack::new(op, $step, [input_size, hidden_size], options, tensors.into())? })
            }

            /// Creates a layer from existing parameters, in PyTorch's order. Each layer and direction has `weight_ih` and `weight_hh`, then
            /// `bias_ih` and `bias_hh` if there are biases, then `weight_hr` if LSTM's hidden state is projected. Fails as
            /// [`new`](Self::new) does, with [`Error::Invalid`](crate::Error::Invalid) for a wrong number of parameters, and with
            /// [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) for incompatible shapes.
            pub fn from_parameters(parameters: Vec<Tensor>, options: RnnOptions) -> Result<$name> {
                let op = concat!(stringify!($name), "::from_parameters");
                Ok($name { stack: Stack::from_parameters(op, $step, parameters, options)? })
            }

            /// Computes the last layer's hidden states at all steps, and the final states of all layers, from `state`. A state of `None` is
            /// all zeros. This is how PyTorch calls a layer. Fails with [`Error::Invalid`](crate::Error::Invalid) for an input that is
            /// neither `[L, I]` nor `[L, N, I]`, and with [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) for a state that is not
            /// `[layers * directions, N, H]`.
            #[track_caller]
            pub fn run(&self, x: &Tensor, state: Option<&$state>) -> Result<(Tensor, $state)> {
                let _caller = Caller::enter();
                let op = concat!(stringify!($name), "::run");
                let initial = state.map(|$given| $tensors);
                let (out, mut $last) = self.stack.run(op, x, initial.as_ref().map(|tensors| &tensors[..]))?;
                Ok((out, $states))
            }

            /// Does the same as [`run`](Self::run) for sequences of different lengths. The final state of a sequence is the state after its
            /// own last step, where the reverse direction starts. States are in the order in which the sequences were packed. Fails with
            /// [`Error::Invalid`](crate::Error::Invalid) for elements with a wrong number of features, and with
            /// [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) for a state that is not `[layers * directions, N, H]`.
            pub fn run_packed(
                &self,
                packed: &PackedSequence,
                state: Option<&$state>,
            ) -> Result<(PackedSequence, $state)> {
                let op = concat!(stringify!($name), "::run_packed");
                let initial = state.map(|$given| $tensors);
                let (out, mut $last) = self.stack.run_packed(op, packed, initial.as_ref().map(|tensors| &tensors[..]))?;
                Ok((out, $states))
            }
        }

        impl Module for $name {
            crate::parts!(stack as "");

            /// Returns the hidden states of the last layer at all steps. The initial state is zero.
            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let _caller = Caller::enter();
                Ok(self.run(x, None)?.0)
            }
        }
    )* };
}

layers! {
    /// Elman's recurrent network, `h' = tanh(W x + b + V h + c)` (PyTorch's `nn.RNN`), from `[L, N, I]` or `[L, I]` to hidden states.
    /// Parameters have PyTorch's names: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0` and so on.
    Rnn CellKind::Tanh, Tensor, state => [state], last => last.remove(0);
    /// Long short-term memory (PyTorch's `nn.LSTM`), from `[L, N, I]` or `[L, I]` to hidden states. The state is a tuple `(h, c)`.
    /// Gates are in PyTorch's order, and parameters have PyTorch's names, including `weight_hr_l0` if
    /// [`proj_size`](RnnOptions::proj_size) projects the hidden state.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{Lstm, Module, RnnOptions}};
    /// let lstm = Lstm::new(3, 5, RnnOptions { num_layers: 2, ..RnnOptions::default() }, Device::Cpu)?;
    /// let x = Tensor::ones(&[7, 2, 3], Device::Cpu)?;
    /// let (out, state) = lstm.run(&x, None)?;
    /// assert_eq!((out.shape().dims(), state.0.shape().dims()), (&[7, 2, 5][..], &[2, 2, 5][..]));
    /// let (next, _) = lstm.run(&x, Some(&state))?;
    /// assert_eq!(next.shape(), lstm.forward(&x)?.shape());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    Lstm CellKind::Lstm, (Tensor, Tensor), state => [&state.0, &state.1], last => (last.remove(0), last.remove(0));
    /// The gated recurrent unit (PyTorch's `nn.GRU`), from `[L, N, I]` or `[L, I]` to hidden states. The gates and names are PyTorch's.
    Gru CellKind::Gru, Tensor, state => [state], last => last.remove(0);
}

impl Rnn {
    /// Makes the layer use `max(x, 0)` instead of the hyperbolic tangent (PyTorch's `nonlinearity='relu'`).
    pub fn with_relu(mut self) -> Rnn {
        self.stack.step = CellKind::Relu;
        self
    }
}
