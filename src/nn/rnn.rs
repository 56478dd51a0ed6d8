//! Recurrent layers, composed of operations: a product for all steps, then for each step a product and a formula or two.

use super::{Mode, Module, Part, Role, init, joined};
use crate::tensor::TensorOptions;
use crate::{Error, Result, Tensor};

/// What [`Rnn`], [`Lstm`] and [`Gru`] leave to choose, with PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RnnOptions {
    /// Layers on top of each other.
    pub num_layers: usize,
    /// Whether there are biases.
    pub bias: bool,
    /// Whether input and output are `[N, L, ..]` instead of `[L, N, ..]`.
    pub batch_first: bool,
    /// The probability with which what goes from one layer to the next is dropped in training.
    pub dropout: f64,
    /// Whether each layer also goes through the sequence from its end.
    pub bidirectional: bool,
}

impl Default for RnnOptions {
    fn default() -> Self {
        RnnOptions { num_layers: 1, bias: true, batch_first: false, dropout: 0.0, bidirectional: false }
    }
}

/// What happens in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Tanh,
    Relu,
    Lstm,
    Gru,
}

impl Step {
    fn gates(self) -> usize {
        match self {
            Step::Tanh | Step::Relu => 1,
            Step::Lstm => 4,
            Step::Gru => 3,
        }
    }

    /// How many tensors go from step to step: the hidden state, and what LSTM calls its cell's.
    fn states(self) -> usize {
        if self == Step::Lstm { 2 } else { 1 }
    }

    /// The next states, from the input's part of the gates, `[N, gates * H]`, and the states, `[N, H]`.
    fn next(self, x: &Tensor, cell: &Cell, states: &[Tensor]) -> Result<Vec<Tensor>> {
        let h = &states[0];
        let gates = || x.addmm(h, &cell.weight_hh.t()?, 1, 1);
        match self {
            Step::Tanh => Ok(vec![gates()?.tanh()?]),
            Step::Relu => Ok(vec![gates()?.relu()?]),
            Step::Lstm => {
                let gates = gates()?.chunk(4, -1)?;
                let [input, forget, new, output] = &gates[..] else { unreachable!("four chunks") };
                let c = Tensor::map(&[input, forget, new, &states[1]], |e| {
                    e[1].sigmoid() * &e[3] + e[0].sigmoid() * e[2].tanh()
                })?;
                Ok(vec![Tensor::map(&[output, &c], |e| e[0].sigmoid() * e[1].tanh())?, c])
            }
            Step::Gru => {
                let hidden_gates = h.linear(&cell.weight_hh, cell.bias_hh.as_ref())?.chunk(3, -1)?;
                let x = x.chunk(3, -1)?;
                let inputs: Vec<&Tensor> = x.iter().chain(&hidden_gates).chain([h]).collect();
                let next = Tensor::map(&inputs, |e| {
                    let (reset, update) = ((&e[0] + &e[3]).sigmoid(), (&e[1] + &e[4]).sigmoid());
                    let new = (&e[2] + reset * &e[5]).tanh();
                    &new + update * (&e[6] - &new)
                })?;
                Ok(vec![next])
            }
        }
    }
}

/// The parameters of one direction of a layer.
struct Cell {
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Option<Tensor>,
    bias_hh: Option<Tensor>,
}

impl Cell {
    /// The input's part of the gates at all steps, with the biases that need no state.
    fn input_gates(&self, step: Step, x: &Tensor) -> Result<Tensor> {
        let bias = match (&self.bias_ih, &self.bias_hh) {
            (Some(a), Some(b)) if step != Step::Gru => Some(a.add(b)?),
            (bias, _) => bias.as_ref().map(Tensor::shallow_clone),
        };
        x.linear(&self.weight_ih, bias.as_ref())
    }
}

/// Layers of cells.
struct Stack {
    step: Step,
    /// Of each layer the cell from the beginning, and the one from the end where there is one.
    layers: Vec<Vec<Cell>>,
    sizes: [usize; 2],
    options: RnnOptions,
    mode: Mode,
}

impl Stack {
    fn new(op: &'static str, step: Step, sizes: [usize; 2], options: RnnOptions, at: TensorOptions) -> Result<Stack> {
        let [input, hidden] = sizes;
        let directions = if options.bidirectional { 2 } else { 1 };
        // Sizes below are at most four times as large, and are computed without overflow.
        if !(1..=usize::MAX / 4).contains(&hidden) || options.num_layers == 0 || !(0.0..=1.0).contains(&options.dropout)
        {
            let reason = format!(
                "hidden size {hidden} and {options:?}: sizes are above 0 and can be counted with, and dropout is in 0.0..=1.0"
            );
            return Err(Error::invalid(op, reason));
        }
        let rows = step.gates() * hidden;
        let parameter = |shape: &[usize]| init::default_parameter(shape, hidden, at);
        let bias = || options.bias.then(|| parameter(&[rows])).transpose();
        let cell = |l: usize| -> Result<Cell> {
            let weight_ih = parameter(&[rows, if l == 0 { input } else { directions * hidden }])?;
            Ok(Cell { weight_ih, weight_hh: parameter(&[rows, hidden])?, bias_ih: bias()?, bias_hh: bias()? })
        };
        let layer = |l| (0..directions).map(|_| cell(l)).collect();
        let layers = (0..options.num_layers).map(layer).collect::<Result<_>>()?;
        Ok(Stack { step, layers, sizes, options, mode: Mode::default() })
    }

    /// The hidden states of the last layer at all steps, and the last states of all layers.
    fn run(&self, op: &'static str, x: &Tensor, initial: Option<&[&Tensor]>) -> Result<(Tensor, Vec<Tensor>)> {
        let batched = x.rank() == 3;
        let first = if batched && self.options.batch_first { x.transpose(0, 1)? } else { x.shallow_clone() };
        let mut below = if batched { first } else { first.unsqueeze(1)? };
        let &[steps, n, features] = below.shape().dims() else {
            return Err(Error::invalid(op, format!("the input is [L, I] or [L, N, I], not of shape {}", x.shape())));
        };
        let ([input, hidden], directions) = (self.sizes, self.layers[0].len());
        if features != input || steps == 0 {
            let reason = format!("the input has {input} features and at least one step, not shape {}", x.shape());
            return Err(Error::invalid(op, reason));
        }
        let slots = self.layers.len() * directions;
        let shape = if batched { vec![slots, n, hidden] } else { vec![slots, hidden] };
        if let Some(wrong) = initial.into_iter().flatten().find(|t| t.shape().dims() != shape) {
            let hint = "a state is [layers * directions, N, H], without N where the input has none";
            return Err(Error::ShapeMismatch { op, lhs: shape.into(), rhs: wrong.shape().clone(), hint });
        }
        let mut last: Vec<Vec<Tensor>> = (0..self.step.states()).map(|_| Vec::new()).collect();
        for (l, cells) in self.layers.iter().enumerate() {
            let mut directions_out = Vec::with_capacity(directions);
            for (d, cell) in cells.iter().enumerate() {
                let input_gates = cell.input_gates(self.step, &below)?;
                let start = |s: usize| match initial {
                    Some(states) => states[s].select(0, (l * directions + d) as isize)?.reshape([n, hidden]),
                    None => Tensor::zeros([n, hidden], &input_gates),
                };
                let mut states = (0..self.step.states()).map(start).collect::<Result<Vec<_>>>()?;
                let mut outputs = Vec::with_capacity(steps);
                for t in 0..steps {
                    let t = if d == 0 { t } else { steps - 1 - t };
                    states = self.step.next(&input_gates.select(0, t as isize)?, cell, &states)?;
                    outputs.push(states[0].shallow_clone());
                }
                if d == 1 {
                    outputs.reverse();
                }
                directions_out.push(Tensor::stack(&outputs, 0)?);
                last.iter_mut().zip(states).for_each(|(all, state)| all.push(state));
            }
            below = if directions == 1 { directions_out.remove(0) } else { Tensor::cat(&directions_out, -1)? };
            if l + 1 < self.layers.len() && self.options.dropout > 0.0 && self.mode.is_training() {
                below = below.dropout(self.options.dropout)?;
            }
        }
        let out = if batched { below } else { below.squeeze(1)? };
        let out = if batched && self.options.batch_first { out.transpose(0, 1)? } else { out };
        Ok((out, last.iter().map(|all| Tensor::stack(all, 0)?.reshape(&shape[..])).collect::<Result<_>>()?))
    }

    /// Each parameter's name as PyTorch has it, after its prefix.
    fn names(&self, prefix: &str) -> impl Iterator<Item = [String; 4]> {
        let directions = if self.options.bidirectional { &["", "_reverse"][..] } else { &[""] };
        let prefix = prefix.to_string();
        (0..self.layers.len()).flat_map(|l| directions.iter().map(move |d| (l, d))).map(move |(l, d)| {
            ["weight_ih", "weight_hh", "bias_ih", "bias_hh"].map(|name| joined(&prefix, &format!("{name}_l{l}{d}")))
        })
    }
}

macro_rules! layers {
    ($($(#[$doc:meta])* $name:ident $step:expr, $state:ty, $given:ident => $tensors:expr, $last:ident => $states:expr;)*) => { $(
        $(#[$doc])*
        pub struct $name(Stack);

        impl $name {
            /// A layer from `input_size` features to `hidden_size`; all parameters uniform in ±1/√hidden_size, as PyTorch's.
            ///
            /// # Errors
            /// [`Error::Invalid`] for sizes of 0 and a dropout outside `0.0..=1.0`; [`Error::UnsupportedDType`] for dtypes that
            /// are no floats; [`Error::OutOfMemory`].
            pub fn new(
                input_size: usize,
                hidden_size: usize,
                options: RnnOptions,
                tensors: impl Into<TensorOptions>,
            ) -> Result<$name> {
                let op = concat!(stringify!($name), "::new");
                Stack::new(op, $step, [input_size, hidden_size], options, tensors.into()).map($name)
            }

            /// What PyTorch's layer gives when it is called: the last layer's hidden states at all steps, and what all layers
            /// end with; from `state`, or from zeros.
            ///
            /// # Errors
            /// [`Error::Invalid`] for an input that is neither `[L, I]` nor `[L, N, I]`; [`Error::ShapeMismatch`] for a state
            /// that is not `[layers * directions, N, H]`.
            pub fn run(&self, x: &Tensor, state: Option<&$state>) -> Result<(Tensor, $state)> {
                let op = concat!(stringify!($name), "::run");
                let (out, mut $last) = match state {
                    Some($given) => self.0.run(op, x, Some(&$tensors))?,
                    None => self.0.run(op, x, None)?,
                };
                Ok((out, $states))
            }
        }

        impl Module for $name {
            /// The hidden states of the last layer.
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Ok(self.run(x, None)?.0)
            }

            fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
                let names = self.0.names(prefix);
                for (cell, [a, b, c, d]) in self.0.layers.iter().flatten().zip(names) {
                    cell.weight_ih.show(&a, visitor);
                    cell.weight_hh.show(&b, visitor);
                    cell.bias_ih.show(&c, visitor);
                    cell.bias_hh.show(&d, visitor);
                }
            }

            fn visit_mut<'a>(&'a mut self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
                let names: Vec<_> = self.0.names(prefix).collect();
                for (cell, [a, b, c, d]) in self.0.layers.iter_mut().flatten().zip(names) {
                    cell.weight_ih.show_mut(&a, visitor);
                    cell.weight_hh.show_mut(&b, visitor);
                    cell.bias_ih.show_mut(&c, visitor);
                    cell.bias_hh.show_mut(&d, visitor);
                }
            }

            fn set_training(&self, training: bool) {
                self.0.mode.switch(training);
            }
        }
    )* };
}

layers! {
    /// Elman's recurrent network, `h' = tanh(W x + b + V h + c)` (PyTorch's `nn.RNN`): `[L, N, I]` or `[L, I]` to hidden states.
    /// Parameters have PyTorch's names, `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0` and so on.
    Rnn Step::Tanh, Tensor, state => [state], last => last.remove(0);
    /// Long short-term memory (PyTorch's `nn.LSTM`): `[L, N, I]` or `[L, I]` to hidden states. The state is a pair, `(h, c)`;
    /// gates lie in PyTorch's order, and parameters have its names.
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
    Lstm Step::Lstm, (Tensor, Tensor), state => [&state.0, &state.1], last => (last.remove(0), last.remove(0));
    /// The gated recurrent unit (PyTorch's `nn.GRU`): `[L, N, I]` or `[L, I]` to hidden states. Gates lie in PyTorch's order, and
    /// parameters have its names.
    Gru Step::Gru, Tensor, state => [state], last => last.remove(0);
}

impl Rnn {
    /// With `max(x, 0)` in place of the hyperbolic tangent (PyTorch's `nonlinearity='relu'`).
    pub fn with_relu(self) -> Rnn {
        Rnn(Stack { step: Step::Relu, ..self.0 })
    }
}
