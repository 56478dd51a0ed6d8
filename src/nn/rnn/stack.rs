//! Stacks of recurrent layers, computed over all time steps.

use super::RnnOptions;
use super::packed::PackedSequence;
use super::pass::LayerPass;
use super::schedule::RowSchedule;
use super::step::{Cell, Sizes};
use crate::internal::CellKind;
use crate::nn::{Mode, Part, Role};
use crate::tensor::TensorOptions;
use crate::{Error, Result, Shape, Tensor};

/// The layers of an RNN, LSTM or GRU.
pub(super) struct Stack {
    pub(super) step: CellKind,
    /// For each layer, the cell of the forward direction and, if bidirectional, the cell of the reverse direction.
    layers: Vec<Vec<Cell>>,
    sizes: Sizes,
    options: RnnOptions,
    mode: Mode,
}

/// The elements of sequences in the order of steps, `[elements, I]` or `[L, N, I]`, and the number of sequences that have each step.
struct PackedInput<'a> {
    data: Tensor,
    batch_sizes: &'a [usize],
}

impl Stack {
    pub(super) fn new(
        op: &'static str,
        step: CellKind,
        [input, hidden]: [usize; 2],
        options: RnnOptions,
        at: TensorOptions,
    ) -> Result<Stack> {
        let sizes = Self::sizes(op, step, [input, hidden], options)?;
        let cell = |input, suffix: &str| Cell::new(op, step, Sizes { input, ..sizes }, options.bias, suffix, at);
        Stack::with_cells(step, sizes, options, cell)
    }

    pub(super) fn from_parameters(
        op: &'static str,
        step: CellKind,
        parameters: Vec<Tensor>,
        options: RnnOptions,
    ) -> Result<Stack> {
        let biases = if options.bias { 2 } else { 0 };
        let each = 2 + biases + usize::from(options.proj_size > 0);
        let directions = if options.bidirectional { 2 } else { 1 };
        let count = parameters.len();
        invalid!(op if Some(count) != options.num_layers.checked_mul(directions * each),
            "{count} parameters do not match {options:?}: each direction has {each}");
        let first = parameters.first().map(|t| t.shape().dims()).filter(|dims| dims.first() != Some(&0));
        let Some(&[rows, input]) = first else {
            return Err(Error::invalid(op, "the first parameter must be weight_ih, a matrix with rows for each gate"));
        };
        let sizes = Self::sizes(op, step, [input, rows / step.gates()], options)?;
        let mut left = parameters.into_iter();
        Stack::with_cells(step, sizes, options, |input, suffix| {
            let rows = step.gates() * sizes.hidden;
            let mut take = |shape: &[usize]| match left.next() {
                Some(t) if t.shape().dims() == shape => Ok(t),
                other => {
                    let (lhs, rhs) = (shape.into(), other.map_or(Shape::from(()), |t| t.shape().clone()));
                    let hint = "the parameter does not match the first parameter and the options";
                    Err(Error::ShapeMismatch { op, lhs, rhs, hint })
                }
            };
            let (weight_ih, weight_hh) = (take(&[rows, input])?, take(&[rows, sizes.output])?);
            let mut bias = || options.bias.then(|| take(&[rows])).transpose();
            let (bias_ih, bias_hh) = (bias()?, bias()?);
            let weight_hr = (options.proj_size > 0).then(|| take(&[sizes.output, sizes.hidden])).transpose()?;
            Ok(Cell { weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, suffix: suffix.into() })
        })
    }

    /// Checks the options and returns the sizes of the first layer.
    fn sizes(op: &'static str, step: CellKind, [input, hidden]: [usize; 2], options: RnnOptions) -> Result<Sizes> {
        let RnnOptions { num_layers, dropout, proj_size, .. } = options;
        invalid!(op if num_layers == 0 || !(0.0..=1.0).contains(&dropout),
            "{options:?}: num_layers must be at least 1, and dropout in 0.0..=1.0");
        invalid!(op if proj_size > 0 && (step != CellKind::Lstm || proj_size >= hidden),
            "only Lstm has a projection, and proj_size {proj_size} must be below the hidden size {hidden}");
        Ok(Sizes { input, hidden, output: if proj_size > 0 { proj_size } else { hidden } })
    }

    /// Creates a stack. `cell(n, suffix)` creates a cell with n input features, whose parameters' names end with PyTorch's suffix.
    fn with_cells(
        step: CellKind,
        sizes: Sizes,
        options: RnnOptions,
        mut cell: impl FnMut(usize, &str) -> Result<Cell>,
    ) -> Result<Stack> {
        let directions = if options.bidirectional { &["", "_reverse"][..] } else { &[""] };
        let below = |l: usize| if l == 0 { sizes.input } else { directions.len() * sizes.output };
        let layer = |l| directions.iter().map(|d| cell(below(l), &format!("_l{l}{d}"))).collect();
        let layers = (0..options.num_layers).map(layer).collect::<Result<_>>()?;
        Ok(Stack { step, layers, sizes, options, mode: Mode::default() })
    }

    /// Computes the hidden states of the last layer at all steps, and the final states of all layers.
    pub(super) fn run(
        &self,
        op: &'static str,
        x: &Tensor,
        initial: Option<&[&Tensor]>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let batched = x.rank() == 3;
        let batch_first = batched && self.options.batch_first;
        let data = if batch_first { x.transpose(0, 1)? } else { x.shallow_clone() };
        let data = if batched { data } else { data.unsqueeze(1)? };
        let &[steps, n, features] = data.shape().dims() else {
            invalid!(op, "the input must be [L, I] or [L, N, I], not of shape {}", x.shape());
        };
        invalid!(op if features != self.sizes.input || steps == 0,
            "the input must have {} features and at least one step, not shape {}", self.sizes.input, x.shape());
        self.check_states(op, initial, batched.then_some(n))?;
        let state_count = self.state_count();
        let initial = initial.map(|states| {
            let as_batch = |t: &&Tensor| t.reshape([state_count, n, t.shape().dims()[t.rank() - 1]]);
            states.iter().map(as_batch).collect::<Result<Vec<_>>>()
        });
        let batch_sizes = vec![n; steps];
        let (out, last) = self.run_layers(op, PackedInput { data, batch_sizes: &batch_sizes }, initial.transpose()?)?;
        let out = out.reshape([steps, n, out.shape().dims()[1]])?;
        Ok(match (batched, batch_first) {
            (false, _) => (out.squeeze(1)?, last.iter().map(|t| t.squeeze(1)).collect::<Result<_>>()?),
            (true, true) => (out.transpose(0, 1)?, last),
            (true, false) => (out, last),
        })
    }

    /// Does the same as [`run`](Stack::run) for packed sequences. States are in the order in which the sequences were packed.
    pub(super) fn run_packed(
        &self,
        op: &'static str,
        packed: &PackedSequence,
        initial: Option<&[&Tensor]>,
    ) -> Result<(PackedSequence, Vec<Tensor>)> {
        let data = packed.data();
        let (input, shape) = (self.sizes.input, data.shape());
        invalid!(op if data.rank() != 2 || shape.dims()[1] != input,
            "packed elements must be [.., {input}], not of shape {shape}");
        self.check_states(op, initial, Some(packed.batch_sizes()[0]))?;
        let ordered = |t: &Tensor, order: Option<&Tensor>| match order {
            Some(order) => t.index_select(1, order),
            None => Ok(t.shallow_clone()),
        };
        let sorted = |states: &[&Tensor]| states.iter().map(|t| ordered(t, packed.sorted_indices())).collect();
        let initial = initial.map(sorted).transpose()?;
        let steps = PackedInput { data: data.shallow_clone(), batch_sizes: packed.batch_sizes() };
        let (out, last) = self.run_layers(op, steps, initial)?;
        let last = last.iter().map(|t| ordered(t, packed.unsorted_indices())).collect::<Result<_>>()?;
        Ok((packed.map(|_| Ok(out))?, last))
    }

    /// Returns the number of states: the number of layers times the number of directions.
    fn state_count(&self) -> usize {
        self.layers.len() * self.layers[0].len()
    }

    /// Checks the shapes of the initial states. `n` is the batch size, or `None` for input without a batch dimension.
    fn check_states(&self, op: &'static str, initial: Option<&[&Tensor]>, n: Option<usize>) -> Result<()> {
        for (t, size) in initial.into_iter().flatten().zip([self.sizes.output, self.sizes.hidden]) {
            let shape: Vec<usize> = [self.state_count()].into_iter().chain(n).chain([size]).collect();
            if t.shape().dims() != shape {
                let hint = "a state must be [layers * directions, N, H], without N if the input has none";
                return Err(Error::ShapeMismatch { op, lhs: shape.into(), rhs: t.shape().clone(), hint });
            }
        }
        Ok(())
    }

    /// Computes the hidden states of the last layer, `[elements, ..]`, and the final states of all layers, `[state_count, N, ..]`.
    fn run_layers(
        &self,
        op: &'static str,
        steps: PackedInput,
        initial: Option<Vec<Tensor>>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let PackedInput { data: mut below, batch_sizes } = steps;
        let directions = self.layers[0].len();
        let initial = initial.map_or_else(
            || {
                let zeros = |&size: &usize| {
                    Tensor::zeros([self.state_count(), batch_sizes[0], size], &self.layers[0][0].weight_hh)
                };
                [self.sizes.output, self.sizes.hidden][..self.step.states()].iter().map(zeros).collect()
            },
            Ok,
        )?;
        let mut last: Vec<Vec<Tensor>> = (0..self.step.states()).map(|_| Vec::new()).collect();
        for (l, cells) in self.layers.iter().enumerate() {
            let mut outputs = Vec::with_capacity(directions);
            for (d, cell) in cells.iter().enumerate() {
                let gates = cell.input_gates(self.step, &below)?;
                let gates = gates.reshape([batch_sizes.iter().sum(), self.step.gates() * self.sizes.hidden])?;
                let start = initial.iter().map(|states| states.select(0, (l * directions + d) as isize));
                let start = start.collect::<Result<Vec<_>>>()?;
                let (output, states) =
                    LayerPass::run(op, self.step, cell, RowSchedule::new(batch_sizes, d == 1), &gates, &start)?;
                outputs.push(output);
                last.iter_mut().zip(states).for_each(|(all, state)| all.push(state));
            }
            below = if directions == 1 { outputs.remove(0) } else { Tensor::cat(&outputs, -1)? };
            if l + 1 < self.layers.len() && self.options.dropout > 0.0 && self.mode.is_training() {
                below = below.dropout(self.options.dropout)?;
            }
        }
        Ok((below, last.iter().map(|all| Tensor::stack(all, 0)).collect::<Result<_>>()?))
    }
}

impl Part for Stack {
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.layers.iter().flatten().for_each(|cell| cell.visit_field(name, visitor));
    }

    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.layers.iter_mut().flatten().for_each(|cell| cell.visit_field_mut(name, visitor));
    }

    fn set_field_training(&self, training: bool) {
        self.mode.set_field_training(training);
    }

    fn clone_handle(&self) -> Stack {
        Stack { layers: self.layers.clone_handle(), mode: self.mode.clone_handle(), ..*self }
    }
}
