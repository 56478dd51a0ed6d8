//! Recurrent cells, which compute one time step of a recurrent layer.

use super::step::{Cell, Sizes};
use crate::internal::CellKind;
use crate::nn::Module;
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Error, Result, Tensor};

/// Computes the next states of a cell for a batch `[N, I]`, or for a single input `[I]`.
fn run_cell(
    op: &'static str,
    step: CellKind,
    cell: &Cell,
    x: &Tensor,
    states: Option<&[&Tensor]>,
) -> Result<Vec<Tensor>> {
    let [hidden, input] = [&cell.weight_hh, &cell.weight_ih].map(|w| w.shape().dims()[1]);
    let (n, batched) = match *x.shape().dims() {
        [features] if features == input => (1, false),
        [n, features] if features == input => (n, true),
        _ => invalid!(op, "the input must be [N, {input}] or [{input}], not of shape {}", x.shape()),
    };
    let shape = if batched { vec![n, hidden] } else { vec![hidden] };
    if let Some(wrong) = states.into_iter().flatten().find(|t| t.shape().dims() != shape) {
        let hint = "a cell's state must be [N, H], without N if the input has none";
        return Err(Error::ShapeMismatch { op, lhs: shape.into(), rhs: wrong.shape().clone(), hint });
    }
    let gates = cell.input_gates(step, &x.reshape([n, input])?)?;
    let start = |s: usize| match states {
        Some(states) => states[s].reshape([n, hidden]),
        None => Tensor::zeros([n, hidden], &gates),
    };
    let states = (0..step.states()).map(start).collect::<Result<Vec<_>>>()?;
    step.next_states(&gates, cell, &states)?.iter().map(|t| t.reshape(&shape[..])).collect()
}

macro_rules! cells {
    ($($(#[$doc:meta])* $name:ident $step:expr, $state:ty, $given:ident => $tensors:expr, $next:ident => $states:expr;)*) => { $(
        $(#[$doc])*
        pub struct $name {
            step: CellKind,
            cell: Cell,
        }

        impl $name {
            /// Creates a cell from `input_size` to `hidden_size` features. All parameters are drawn uniformly from ±1/√hidden_size, as in
            /// PyTorch. Fails with [`Error::Invalid`] for a hidden size of 0.
            #[track_caller]
            pub fn new(input_size: usize, hidden_size: usize, tensors: impl Into<TensorOptions>) -> Result<$name> {
                let _caller = Caller::enter();
                let sizes = Sizes { input: input_size, hidden: hidden_size, output: hidden_size };
                let cell = Cell::new(concat!(stringify!($name), "::new"), $step, sizes, true, "", tensors.into())?;
                Ok($name { step: $step, cell })
            }

            /// Returns the weights of the input and of the hidden state, `[gates * H, I]` and `[gates * H, H]` (`weight_ih`, `weight_hh`).
            pub fn weights(&self) -> [&Tensor; 2] {
                [&self.cell.weight_ih, &self.cell.weight_hh]
            }

            /// Returns the biases of the input and of the hidden state, `[gates * H]` each (PyTorch's `bias_ih`, `bias_hh`). `None` without biases.
            pub fn biases(&self) -> Option<[&Tensor; 2]> {
                Some([self.cell.bias_ih.as_ref()?, self.cell.bias_hh.as_ref()?])
            }

            /// Removes the biases.
            pub fn without_bias(self) -> $name {
                $name { cell: Cell { bias_ih: None, bias_hh: None, ..self.cell }, ..self }
            }

            /// Computes the next state from `state`; a state of `None` is all zeros. This is how PyTorch calls a cell. Fails with
            /// [`Error::Invalid`] for an input that is neither `[N, I]` nor `[I]`, and with [`Error::ShapeMismatch`] for a state that is
            /// not `[N, H]`, or not `[H]` if the input has no N.
            #[track_caller]
            pub fn run(&self, x: &Tensor, state: Option<&$state>) -> Result<$state> {
                let _caller = Caller::enter();
                let op = concat!(stringify!($name), "::run");
                let initial = state.map(|$given| $tensors);
                let initial = initial.as_ref().map(|tensors| &tensors[..]);
                let mut $next = run_cell(op, self.step, &self.cell, x, initial)?;
                Ok($states)
            }
        }

        impl Module for $name {
            crate::parts!(cell as "");

            /// Returns the hidden state after one step from a state of zeros.
            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let _caller = Caller::enter();
                let op = concat!(stringify!($name), "::forward");
                Ok(run_cell(op, self.step, &self.cell, x, None)?.remove(0))
            }
        }
    )* };
}

cells! {
    /// Computes one step of [`Rnn`](super::Rnn), from `[N, I]` or `[I]` to the next hidden state (PyTorch's `nn.RNNCell`). The parameters
    /// are `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::RnnCell};
    /// let cell = RnnCell::new(3, 5, Device::Cpu)?.with_relu();
    /// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
    /// let h = cell.run(&x, None)?;
    /// assert_eq!(cell.run(&x, Some(&h))?.shape().dims(), [2, 5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    RnnCell CellKind::Tanh, Tensor, state => [state], next => next.remove(0);
    /// Computes one step of [`Lstm`](super::Lstm), from `[N, I]` or `[I]` to the next state, a tuple `(h, c)` (PyTorch's `nn.LSTMCell`).
    /// The parameters are `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::LstmCell};
    /// let cell = LstmCell::new(3, 5, Device::Cpu)?;
    /// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
    /// let mut state = None;
    /// for _ in 0..4 {
    ///     state = Some(cell.run(&x, state.as_ref())?);
    /// }
    /// let (h, c) = state.unwrap();
    /// assert_eq!((h.shape().dims(), c.shape().dims()), (&[2, 5][..], &[2, 5][..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    LstmCell CellKind::Lstm, (Tensor, Tensor), state => [&state.0, &state.1], next => (next.remove(0), next.remove(0));
    /// Computes one step of [`Gru`](super::Gru), from `[N, I]` or `[I]` to the next hidden state (PyTorch's `nn.GRUCell`). The parameters
    /// are `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{GruCell, Module}};
    /// let cell = GruCell::new(3, 5, Device::Cpu)?;
    /// let h = cell.forward(&Tensor::ones(&[3], Device::Cpu)?)?;
    /// assert_eq!(h.shape().dims(), [5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    GruCell CellKind::Gru, Tensor, state => [state], next => next.remove(0);
}

impl RnnCell {
    /// Makes the cell use `max(x, 0)` instead of the hyperbolic tangent (PyTorch's `nonlinearity='relu'`).
    pub fn with_relu(self) -> RnnCell {
        RnnCell { step: CellKind::Relu, ..self }
    }
}
