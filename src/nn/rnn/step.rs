//! The formulas and the parameters of one time step of a recurrent cell.

use crate::internal::{CellKind, join_names};
use crate::nn::{Part, Role, init};
use crate::tensor::TensorOptions;
use crate::{Expr, Result, Tensor};

impl CellKind {
    /// Computes the next states from the states, `[N, H]`, and `x`: the input multiplied by the gates' weights, `[N, gates * H]`.
    pub(super) fn next_states(self, x: &Tensor, cell: &Cell, states: &[Tensor]) -> Result<Vec<Tensor>> {
        let h = &states[0];
        let gates = || x.addmm(h, &cell.weight_hh.t()?, 1, 1);
        match self {
            CellKind::Tanh => Ok(vec![gates()?.tanh()?]),
            CellKind::Relu => Ok(vec![gates()?.relu()?]),
            CellKind::Lstm => {
                let gates = gates()?.chunk(4, -1)?;
                let [input, forget, new, output] = &gates[..] else { unreachable!("four chunks") };
                let c = Tensor::map(&[input, forget, new, &states[1]], |e| lstm_cell(&lstm_gates(&e[..3]), &e[3]))?;
                let h = Tensor::map(&[output, &c], |e| e[0].sigmoid() * e[1].tanh())?;
                let h = cell.weight_hr.as_ref().map_or_else(|| Ok(h.shallow_clone()), |w| h.linear(w, None))?;
                Ok(vec![h, c])
            }
            CellKind::Gru => {
                let hidden_gates = h.linear(&cell.weight_hh, cell.bias_hh.as_ref())?.chunk(3, -1)?;
                let x = x.chunk(3, -1)?;
                let inputs: Vec<&Tensor> = x.iter().chain(&hidden_gates).chain([h]).collect();
                Ok(vec![Tensor::map(&inputs, |e| gru_formulas(e)[0].clone())?])
            }
        }
    }
}

/// Returns LSTM's input, forget and new gates, given their input sums.
pub(super) fn lstm_gates(sums: &[Expr]) -> [Expr; 3] {
    [sums[0].sigmoid(), sums[1].sigmoid(), sums[2].tanh()]
}

/// Returns LSTM's next cell state from the gates and the current cell state.
pub(super) fn lstm_cell([input, forget, new]: &[Expr; 3], cell: &Expr) -> Expr {
    forget * cell + input * new
}

/// Returns GRU's next state and its reset, update and new gates. `e` has the input's 3 parts, the hidden state's 3 parts, and the state.
pub(super) fn gru_formulas(e: &[Expr]) -> [Expr; 4] {
    let (reset, update) = ((&e[0] + &e[3]).sigmoid(), (&e[1] + &e[4]).sigmoid());
    let new = (&e[2] + &reset * &e[5]).tanh();
    [&new + &update * (&e[6] - &new), reset, update, new]
}

/// The numbers of features of a cell: input, internal state, and hidden state (smaller than the internal state if projected).
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
    /// The weight of LSTM's projection of the hidden state.
    pub(super) weight_hr: Option<Tensor>,
    /// The suffix of the parameters' names, such as `_l0` in `weight_ih_l0`.
    pub(super) suffix: String,
}

impl Cell {
    /// Creates a cell whose parameters are all drawn uniformly from ±1/√hidden.
    pub(super) fn new(
        op: &'static str,
        step: CellKind,
        sizes: Sizes,
        bias: bool,
        suffix: &str,
        at: TensorOptions,
    ) -> Result<Cell> {
        let Sizes { input, hidden, output } = sizes;
        // A gate tensor has up to four times the hidden size, which must not overflow.
        invalid!(op if !(1..=usize::MAX / 4).contains(&hidden), "the hidden size {hidden} is 0 or too large");
        let rows = step.gates() * hidden;
        let parameter = |shape: &[usize]| init::default_parameter(shape, hidden, at);
        let bias = || bias.then(|| parameter(&[rows])).transpose();
        Ok(Cell {
            weight_ih: parameter(&[rows, input])?,
            weight_hh: parameter(&[rows, output])?,
            bias_ih: bias()?,
            bias_hh: bias()?,
            weight_hr: (output != hidden).then(|| parameter(&[output, hidden])).transpose()?,
            suffix: suffix.into(),
        })
    }

    /// Computes the product of the input and the gates' weights, for one step or all steps. Adds all biases that do not depend on the state.
    pub(super) fn input_gates(&self, step: CellKind, x: &Tensor) -> Result<Tensor> {
        let bias = match (&self.bias_ih, &self.bias_hh) {
            (Some(a), Some(b)) if step != CellKind::Gru => Some(a.add(b)?),
            (bias, _) => bias.as_ref().map(Tensor::shallow_clone),
        };
        x.linear(&self.weight_ih, bias.as_ref())
    }
}

impl Part for Cell {
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        let Cell { weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, suffix } = self;
        let optional = [("bias_ih", bias_ih), ("bias_hh", bias_hh), ("weight_hr", weight_hr)];
        let all = [("weight_ih", Some(weight_ih)), ("weight_hh", Some(weight_hh))].into_iter();
        for (field, t) in all.chain(optional.map(|(field, t)| (field, t.as_ref()))) {
            t.iter().for_each(|t| t.visit_field(&join_names(name, &format!("{field}{suffix}")), visitor));
        }
    }

    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        let Cell { weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, suffix } = self;
        let optional = [("bias_ih", bias_ih), ("bias_hh", bias_hh), ("weight_hr", weight_hr)];
        let all = [("weight_ih", Some(weight_ih)), ("weight_hh", Some(weight_hh))].into_iter();
        for (field, t) in all.chain(optional.map(|(field, t)| (field, t.as_mut()))) {
            t.into_iter().for_each(|t| t.visit_field_mut(&join_names(name, &format!("{field}{suffix}")), visitor));
        }
    }

    fn clone_handle(&self) -> Cell {
        Cell {
            weight_ih: self.weight_ih.clone_handle(),
            weight_hh: self.weight_hh.clone_handle(),
            bias_ih: self.bias_ih.clone_handle(),
            bias_hh: self.bias_hh.clone_handle(),
            weight_hr: self.weight_hr.clone_handle(),
            suffix: self.suffix.clone(),
        }
    }
}
