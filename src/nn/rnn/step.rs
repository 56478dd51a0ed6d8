//! What a recurrent cell computes in one time step, and its parameters.

use crate::nn::{Part, Role, init, joined};
use crate::tensor::TensorOptions;
use crate::{Error, Expr, Result, Tensor};

/// What happens in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Step {
    Tanh,
    Relu,
    Lstm,
    Gru,
}

impl Step {
    pub(super) fn gates(self) -> usize {
        match self {
            Step::Tanh | Step::Relu => 1,
            Step::Lstm => 4,
            Step::Gru => 3,
        }
    }

    /// How many tensors go from step to step: the hidden state, and what LSTM calls its cell's.
    pub(super) fn states(self) -> usize {
        if self == Step::Lstm { 2 } else { 1 }
    }

    /// The next states, from the input's part of the gates, `[N, gates * H]`, and the states, `[N, H]`.
    pub(super) fn next(self, x: &Tensor, cell: &Cell, states: &[Tensor]) -> Result<Vec<Tensor>> {
        let h = &states[0];
        let gates = || x.addmm(h, &cell.weight_hh.t()?, 1, 1);
        match self {
            Step::Tanh => Ok(vec![gates()?.tanh()?]),
            Step::Relu => Ok(vec![gates()?.relu()?]),
            Step::Lstm => {
                let gates = gates()?.chunk(4, -1)?;
                let [input, forget, new, output] = &gates[..] else { unreachable!("four chunks") };
                let c = Tensor::map(&[input, forget, new, &states[1]], |e| lstm_cell(&lstm_gates(&e[..3]), &e[3]))?;
                let h = Tensor::map(&[output, &c], |e| e[0].sigmoid() * e[1].tanh())?;
                let h = cell.weight_hr.as_ref().map_or_else(|| Ok(h.shallow_clone()), |w| h.linear(w, None))?;
                Ok(vec![h, c])
            }
            Step::Gru => {
                let hidden_gates = h.linear(&cell.weight_hh, cell.bias_hh.as_ref())?.chunk(3, -1)?;
                let x = x.chunk(3, -1)?;
                let inputs: Vec<&Tensor> = x.iter().chain(&hidden_gates).chain([h]).collect();
                Ok(vec![Tensor::map(&inputs, |e| gru(e)[0].clone())?])
            }
        }
    }
}

/// LSTM's input, forget and new gate, from their sums.
pub(super) fn lstm_gates(sums: &[Expr]) -> [Expr; 3] {
    [sums[0].sigmoid(), sums[1].sigmoid(), sums[2].tanh()]
}

/// LSTM's next cell state, from those gates and the last one.
pub(super) fn lstm_cell([input, forget, new]: &[Expr; 3], cell: &Expr) -> Expr {
    forget * cell + input * new
}

/// GRU's next state, then its reset, update and new gate, from the input's part of the three, the hidden state's, and that state.
pub(super) fn gru(e: &[Expr]) -> [Expr; 4] {
    let (reset, update) = ((&e[0] + &e[3]).sigmoid(), (&e[1] + &e[4]).sigmoid());
    let new = (&e[2] + &reset * &e[5]).tanh();
    [&new + &update * (&e[6] - &new), reset, update, new]
}

/// How many features a cell has: of its input, of its state inside, and of its hidden state, which is smaller where it is projected.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) input: usize,
    pub(super) hidden: usize,
    pub(super) output: usize,
}

/// The parameters of a cell, or of one direction of a layer.
pub(super) struct Cell {
    pub(super) weight_ih: Tensor,
    pub(super) weight_hh: Tensor,
    pub(super) bias_ih: Option<Tensor>,
    pub(super) bias_hh: Option<Tensor>,
    /// LSTM's projection of the hidden state.
    pub(super) weight_hr: Option<Tensor>,
}

impl Cell {
    /// All parameters uniform in ±1/√hidden.
    pub(super) fn new(op: &'static str, step: Step, sizes: Sizes, bias: bool, at: TensorOptions) -> Result<Cell> {
        let Sizes { input, hidden, output } = sizes;
        // Sizes below are at most four times as large, and are computed without overflow.
        if !(1..=usize::MAX / 4).contains(&hidden) {
            let reason = format!("the hidden size {hidden} is not above 0, or too large to be counted with");
            return Err(Error::invalid(op, reason));
        }
        let rows = step.gates() * hidden;
        let parameter = |shape: &[usize]| init::default_parameter(shape, hidden, at);
        let bias = || bias.then(|| parameter(&[rows])).transpose();
        Ok(Cell {
            weight_ih: parameter(&[rows, input])?,
            weight_hh: parameter(&[rows, output])?,
            bias_ih: bias()?,
            bias_hh: bias()?,
            weight_hr: (output != hidden).then(|| parameter(&[output, hidden])).transpose()?,
        })
    }

    /// The input's part of the gates, at one step or at all, with the biases that need no state.
    pub(super) fn input_gates(&self, step: Step, x: &Tensor) -> Result<Tensor> {
        let bias = match (&self.bias_ih, &self.bias_hh) {
            (Some(a), Some(b)) if step != Step::Gru => Some(a.add(b)?),
            (bias, _) => bias.as_ref().map(Tensor::shallow_clone),
        };
        x.linear(&self.weight_ih, bias.as_ref())
    }

    /// [`Module::visit`](crate::nn::Module::visit), with `suffix` after each name, as in `weight_ih_l0`.
    pub(super) fn visit<'a>(&'a self, prefix: &str, suffix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        let name = |name: &str| joined(prefix, &format!("{name}{suffix}"));
        self.weight_ih.show(&name("weight_ih"), visitor);
        self.weight_hh.show(&name("weight_hh"), visitor);
        self.bias_ih.show(&name("bias_ih"), visitor);
        self.bias_hh.show(&name("bias_hh"), visitor);
        self.weight_hr.show(&name("weight_hr"), visitor);
    }

    /// Another handle on the parameters.
    pub(super) fn handle(&self) -> Cell {
        Cell {
            weight_ih: self.weight_ih.handle(),
            weight_hh: self.weight_hh.handle(),
            bias_ih: self.bias_ih.handle(),
            bias_hh: self.bias_hh.handle(),
            weight_hr: self.weight_hr.handle(),
        }
    }

    /// [`visit`](Cell::visit) for who changes the tensors.
    pub(super) fn visit_mut<'a>(
        &'a mut self,
        prefix: &str,
        suffix: &str,
        visitor: &mut dyn FnMut(String, Role, &'a mut Tensor),
    ) {
        let name = |name: &str| joined(prefix, &format!("{name}{suffix}"));
        self.weight_ih.show_mut(&name("weight_ih"), visitor);
        self.weight_hh.show_mut(&name("weight_hh"), visitor);
        self.bias_ih.show_mut(&name("bias_ih"), visitor);
        self.bias_hh.show_mut(&name("bias_hh"), visitor);
        self.weight_hr.show_mut(&name("weight_hr"), visitor);
    }
}
