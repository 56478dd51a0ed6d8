//! One direction of a recurrent layer over all time steps, computed as one operation with its own gradient.
//!
//! On GPUs, a pass of a small layer takes one launch: see [`recurrence`]. Otherwise a forward step is two launches: a matrix product with
//! the hidden state, and one launch for the formulas of all gates. A backward step is also two launches. The gradient of a gate's input sum is the gradient of a state times a factor that depends only on the forward
//! pass, so the factors of all steps are computed first. Each backward step is then one formula for all gates and for the gradient of
//! the previous step's state, and one matrix product. The gradients of the weights are one product over all steps.

use super::schedule::{RowSchedule, TimeStep};
use super::step::{Cell, gru_formulas, lstm_cell, lstm_gates};
use crate::autograd::{CustomOp, GradOptions, OpContext, grad_with_options};
use crate::internal::{CellKind, KeptStates, Pass, Recurrence, recurrence, same_device, same_dtype};
use crate::{Expr, Result, Tensor, is_grad_enabled};

/// One direction of a layer as a custom operation.
pub(super) struct LayerPass {
    pub(super) step: CellKind,
    pub(super) schedule: RowSchedule,
    /// Whether the product with the hidden state has its own bias. GRU needs it: the reset gate is applied to product and bias together.
    has_hidden_bias: bool,
    projected: bool,
}

/// The input tensors of a pass, or their gradients.
struct Inputs<T> {
    gates: T,
    weight_hh: T,
    states: Vec<T>,
    bias_hh: Option<T>,
    weight_hr: Option<T>,
}

impl<T> Inputs<T> {
    fn into_list(self) -> Vec<T> {
        [self.gates, self.weight_hh].into_iter().chain(self.states).chain(self.bias_hh).chain(self.weight_hr).collect()
    }
}

/// The states of all rows, and the gates that the gradient needs.
struct States {
    /// The initial hidden states and the hidden states of all rows, in one tensor.
    hidden: Tensor,
    /// LSTM's cell states, in the same order as `hidden`. `None` for other cells.
    cell: Option<Tensor>,
    /// The gates of all rows, if a gradient is needed. LSTM has four; GRU has three, and the product with the hidden state in the new gate.
    gates: Vec<Tensor>,
}

/// Creates an uninitialised tensor `[rows, columns]` with the dtype and device of `t`.
fn rows_like(t: &Tensor, rows: usize, columns: usize) -> Result<Tensor> {
    Tensor::empty([rows, columns], t)
}

impl LayerPass {
    /// Computes the hidden states of all rows, and the final states of the sequences.
    pub(super) fn run(
        op: &'static str,
        step: CellKind,
        cell: &Cell,
        schedule: RowSchedule,
        gates: &Tensor,
        start: &[Tensor],
    ) -> Result<(Tensor, Vec<Tensor>)> {
        // Under autocast, `gates` has the autocast dtype. The other inputs are cast to the dtype of `gates`.
        let cast = |t: &Tensor| {
            if crate::ops::autocast_dtype().is_some() { t.to_dtype(gates.dtype()) } else { Ok(t.shallow_clone()) }
        };
        let bias_hh = cell.bias_hh.as_ref().filter(|_| step == CellKind::Gru).map(cast).transpose()?;
        let weight_hr = cell.weight_hr.as_ref().map(cast).transpose()?;
        let (has_hidden_bias, projected) = (bias_hh.is_some(), weight_hr.is_some());
        let states = start.iter().map(cast).collect::<Result<Vec<_>>>()?;
        let weight_hh = cast(&cell.weight_hh)?;
        let output = weight_hh.shape().dims()[1];
        let inputs = Inputs { gates: gates.shallow_clone(), weight_hh, states, bias_hh, weight_hr }.into_list();
        for t in &inputs {
            same_device(op, &[gates, t])?;
            same_dtype(op, &[gates, t])?;
        }
        if schedule.sequences() == 0 {
            return run_composed(step, cell, gates, &schedule, start.iter().map(Tensor::shallow_clone).collect());
        }
        let pass = LayerPass { step, schedule: schedule.clone(), has_hidden_bias, projected };
        let all = Tensor::apply_op(pass, &inputs.iter().collect::<Vec<_>>())?;
        if step != CellKind::Lstm {
            let last = schedule.final_states(&all)?;
            return Ok((all, vec![last]));
        }
        let (total, n) = (schedule.total_rows(), schedule.sequences());
        let size = gates.shape().dims()[1] / step.gates();
        let hidden = all.narrow(0, 0, total * output)?.reshape([total, output])?;
        let cell = all.narrow(0, total * output, n * size)?.reshape([n, size])?;
        let last = schedule.final_states(&hidden)?;
        Ok((hidden, vec![last, cell]))
    }

    /// Assigns the recorded inputs to the fields of [`Inputs`]: gates, recurrent weight, states, then the optional bias and projection.
    fn unpack_inputs(&self, list: &[Tensor]) -> Inputs<Tensor> {
        let (states, rest) = list[2..].split_at(self.step.states());
        let (biases, rest) = rest.split_at(usize::from(self.has_hidden_bias));
        Inputs {
            gates: list[0].shallow_clone(),
            weight_hh: list[1].shallow_clone(),
            states: states.iter().map(Tensor::shallow_clone).collect(),
            bias_hh: biases.first().map(Tensor::shallow_clone),
            weight_hr: rest.first().filter(|_| self.projected).map(Tensor::shallow_clone),
        }
    }

    /// Computes a pass in one launch. Returns false if the pass must be computed step by step.
    fn run_fused(&self, weight: &Tensor, kept: Option<&States>, pass: Pass) -> Result<bool> {
        let starts = self.schedule.packed_starts(weight.device())?;
        let kept = kept.map(|t| KeptStates { hidden: &t.hidden, cells: t.cell.as_ref(), gates: &t.gates });
        let (cell, reverse, starts) = (self.step, self.schedule.reverse, starts.as_ref());
        recurrence(&Recurrence { cell, reverse, starts, weight: &weight.contiguous()?, kept, pass })
    }

    /// Computes the result in one launch, and the states that are to be kept. Returns None if they must be computed step by step.
    fn fused_forward(&self, inputs: &Inputs<Tensor>, kept: Option<&States>) -> Result<Option<Tensor>> {
        if self.projected {
            return Ok(None);
        }
        let (total, n, x) = (self.schedule.total_rows(), self.schedule.sequences(), &inputs.gates);
        let size = inputs.weight_hh.shape().dims()[1];
        let result = match self.step {
            CellKind::Lstm => Tensor::empty((total + n) * size, x)?,
            _ => rows_like(x, total, size)?,
        };
        let initial = inputs.states.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let (x, bias) = (x.contiguous()?, inputs.bias_hh.as_ref().map(Tensor::contiguous).transpose()?);
        let pass = Pass::Forward { x: &x, bias: bias.as_ref(), initial: &initial, result: &result };
        Ok(self.run_fused(&inputs.weight_hh, kept, pass)?.then_some(result))
    }

    /// Concatenates the results into one tensor, because an operation has one result: the hidden states of all rows, then LSTM's cell states.
    fn pack_result(hidden: Tensor, cell: Option<Tensor>) -> Result<Tensor> {
        match cell {
            Some(cell) => Tensor::cat(&[hidden.flatten(0, -1)?, cell.flatten(0, -1)?], 0),
            None => Ok(hidden),
        }
    }

    /// Allocates the states of all rows, with gates if `keep` is true.
    fn alloc_states(&self, inputs: &Inputs<Tensor>, keep: bool) -> Result<States> {
        let (n, total) = (self.schedule.sequences(), self.schedule.total_rows());
        let with_initial = |start: &Tensor| rows_like(start, n + total, start.shape().dims()[1]);
        let h = inputs.weight_hh.shape().dims()[0] / self.step.gates();
        let gates = if keep && self.step.gates() > 1 { 4 } else { 0 };
        Ok(States {
            hidden: with_initial(&inputs.states[0])?,
            cell: inputs.states.get(1).map(with_initial).transpose()?,
            gates: (0..gates).map(|_| rows_like(&inputs.gates, total, h)).collect::<Result<_>>()?,
        })
    }

    /// Computes the states of all rows step by step.
    fn compute_states(&self, inputs: &Inputs<Tensor>, states: &States) -> Result<()> {
        let LayerPass { step, schedule, .. } = self;
        for (all, start) in [&states.hidden].into_iter().chain(&states.cell).zip(&inputs.states) {
            all.narrow(0, schedule.initial_start(), schedule.sequences())?.copy_(start)?;
        }
        let weight = inputs.weight_hh.t()?;
        let mut before = 0;
        for at in schedule.steps() {
            let previous = |states: &Tensor| self.previous(states, at, before);
            let rows = |states: &Tensor| states.narrow(0, schedule.states_start() + at.start, at.rows);
            let (x, h) = (inputs.gates.narrow(0, at.start, at.rows)?, previous(&states.hidden)?);
            let kept = states.gates.iter().map(|t| t.narrow(0, at.start, at.rows)).collect::<Result<Vec<_>>>()?;
            let out = rows(&states.hidden)?;
            match (step, &states.cell) {
                (CellKind::Lstm, Some(cells)) => {
                    let sums = x.addmm(&h, &weight, 1, 1)?.chunk(4, 1)?;
                    let (c, next) = (previous(cells)?, rows(cells)?);
                    let projected = match inputs.weight_hr {
                        Some(_) => Some(rows_like(&c, at.rows, c.shape().dims()[1])?),
                        None => None,
                    };
                    let inside = projected.as_ref().unwrap_or(&out);
                    let read: Vec<&Tensor> = sums.iter().chain([&c]).collect();
                    let written: Vec<&Tensor> = [inside, &next].into_iter().chain(&kept).collect();
                    Tensor::map_into(&read, &[], &written, |e, _| {
                        let (gates, o) = (lstm_gates(&e[..3]), e[3].sigmoid());
                        let c = lstm_cell(&gates, &e[4]);
                        let [i, f, g] = gates;
                        [&o * c.tanh(), c, i, f, g, o].into_iter().take(2 + kept.len()).collect()
                    })?;
                    if let (Some(inside), Some(w)) = (&projected, &inputs.weight_hr) {
                        out.copy_(&inside.linear(w, None)?)?;
                    }
                }
                (CellKind::Gru, _) => {
                    let (x, z) = (x.chunk(3, 1)?, h.linear(&inputs.weight_hh, inputs.bias_hh.as_ref())?.chunk(3, 1)?);
                    let read: Vec<&Tensor> = x.iter().chain(&z).chain([&h]).collect();
                    let written: Vec<&Tensor> = [&out].into_iter().chain(&kept).collect();
                    Tensor::map_into(&read, &[], &written, |e, _| {
                        gru_formulas(e).into_iter().chain([e[5].clone()]).take(1 + kept.len()).collect()
                    })?;
                }
                _ => {
                    let sum = x.addmm(&h, &weight, 1, 1)?;
                    let relu = *step == CellKind::Relu;
                    Tensor::map_into(&[&sum], &[], &[&out], |e, _| vec![if relu { e[0].relu() } else { e[0].tanh() }])?;
                }
            }
            before = at.start;
        }
        Ok(())
    }

    /// Returns the states before a time step, taken from the states of all rows. `before` is the first row of the previous step.
    fn previous(&self, states: &Tensor, at: TimeStep, before: usize) -> Result<Tensor> {
        let (initial, first) = (self.schedule.initial_start(), self.schedule.states_start());
        let begun = states.narrow(0, initial + at.continued, at.rows - at.continued);
        match at.continued {
            0 => begun,
            _ if at.continued == at.rows => states.narrow(0, first + before, at.rows),
            _ => Tensor::cat(&[states.narrow(0, first + before, at.continued)?, begun?], 0),
        }
    }

    /// Computes the backward factors of all rows, `[rows, factors, H]`: the factor of each gate's input sum, then the factor of the gradient
    /// of the previous step's state. LSTM has one more: from the hidden state's gradient to the cell state's gradient. GRU's sums are
    /// the reset gate, the update gate, and the hidden state's and the input's part of the new gate.
    fn backward_factors(&self, states: &States) -> Result<Tensor> {
        let schedule = &self.schedule;
        let own = |t: &Tensor| t.narrow(0, schedule.states_start(), schedule.total_rows());
        let hidden = own(&states.hidden)?;
        let compute_factors =
            |inputs: &[&Tensor], count: usize, f: &dyn Fn(&[Expr], usize) -> Expr| -> Result<Tensor> {
                let [rows, size] = [inputs[0].shape().dims()[0], inputs[0].shape().dims()[1]];
                // Each factor is written to contiguous memory, because writing strided rows is slower.
                let all = Tensor::empty([count, rows, size], inputs[0])?;
                for k in 0..count {
                    Tensor::map_into(inputs, &[], &[&all.select(0, k as isize)?], |e, _| vec![f(e, k)])?;
                }
                all.transpose(0, 1)
            };
        let one = || Expr::constant(1.0);
        let sigmoid = |y: &Expr| y * (one() - y);
        let tanh = |y: &Expr| one() - y * y;
        match (&states.gates[..], &states.cell) {
            ([i, f, g, o], Some(cell)) => {
                compute_factors(&[i, f, g, o, &schedule.previous(cell)?, &own(cell)?], 6, &|e, k| match k {
                    0 => &e[2] * sigmoid(&e[0]),
                    1 => &e[4] * sigmoid(&e[1]),
                    2 => &e[0] * tanh(&e[2]),
                    3 => e[5].tanh() * sigmoid(&e[3]),
                    4 => e[1].clone(),
                    _ => &e[3] * tanh(&e[5].tanh()),
                })
            }
            ([reset, update, new, part], None) => {
                compute_factors(&[reset, update, new, part, &schedule.previous(&states.hidden)?], 5, &|e, k| {
                    let new = (one() - &e[1]) * tanh(&e[2]);
                    match k {
                        0 => new * &e[3] * sigmoid(&e[0]),
                        1 => (&e[4] - &e[2]) * sigmoid(&e[1]),
                        2 => new * &e[0],
                        3 => new,
                        _ => e[1].clone(),
                    }
                })
            }
            _ if self.step == CellKind::Relu => compute_factors(&[&hidden], 1, &|e, _| e[0].gt(0.0)),
            _ => compute_factors(&[&hidden], 1, &|e, _| tanh(&e[0])),
        }
    }

    /// Computes the gradients of the gates' input sums, `[rows, sums, H]`, and of the initial states, in one launch. Returns None if they
    /// must be computed step by step.
    fn fused_backward(
        &self,
        inputs: &Inputs<Tensor>,
        states: &States,
        grad: &Tensor,
    ) -> Result<Option<(Tensor, Vec<Tensor>)>> {
        if self.projected {
            return Ok(None);
        }
        let (size, grad) = (inputs.weight_hh.shape().dims()[1], grad.contiguous()?);
        let sums = Tensor::empty([self.schedule.total_rows(), self.step.sums(), size], &grad)?;
        let initial = inputs.states.iter().map(|t| Tensor::empty(t.shape(), t)).collect::<Result<Vec<_>>>()?;
        let pass = Pass::Backward { grad: &grad, sums: &sums, initial: &initial };
        Ok(self.run_fused(&inputs.weight_hh, Some(states), pass)?.then_some((sums, initial)))
    }

    /// Computes the gradients of the gates' input sums and of the initial states step by step, and the gradients of projected states.
    fn step_backward(
        &self,
        inputs: &Inputs<Tensor>,
        states: &States,
        grad: &Tensor,
        grad_cell: Option<&Tensor>,
    ) -> Result<(Tensor, Vec<Tensor>, Option<Tensor>)> {
        let LayerPass { step, schedule, .. } = self;
        let (n, total) = (schedule.sequences(), schedule.total_rows());
        let factors = self.backward_factors(states)?;
        let [_, count, size] = *factors.shape().dims() else { unreachable!("factors have three dimensions") };
        let is_lstm = *step == CellKind::Lstm;
        let count = if is_lstm { count - 1 } else { count };
        let sums = Tensor::empty([total, count, size], grad)?;
        // The gradients of the projected hidden states. The gradient of the projection's weight is computed from them.
        let projected = inputs.weight_hr.as_ref().map(|_| Tensor::empty(grad.shape(), grad)).transpose()?;
        // LSTM's last gate (output) gets the gradient of the hidden state. The other gates get the gradient of the cell state.
        let selected = is_lstm.then(|| Tensor::zeros([count, 1], grad)).transpose()?;
        if let Some(selected) = &selected {
            selected.narrow(0, 3, 1)?.fill_(1)?;
        }
        // `after` has the gradients of the states after a step, from later steps. `initial_grads` has the gradients of the initial states.
        let mut after: Vec<Tensor> = Vec::new();
        let mut initial_grads: Vec<Vec<Tensor>> = vec![Vec::new(); step.states()];
        for at in schedule.steps().rev() {
            // Only the first `have` sequences continue after this step; the others get no gradient from later steps.
            let have = after.first().map_or(0, |t| t.shape().dims()[0]);
            if have < at.rows {
                let hidden = Tensor::zeros([at.rows - have, grad.shape().dims()[1]], grad)?;
                let cell = grad_cell.map(|t| t.narrow(0, have, at.rows - have)).transpose()?;
                let ended = [hidden].into_iter().chain(cell);
                after = match have {
                    0 => ended.collect(),
                    _ => after.iter().zip(ended).map(|(t, e)| Tensor::cat(&[t, &e], 0)).collect::<Result<_>>()?,
                };
            }
            let rows = |t: &Tensor| t.narrow(0, at.start, at.rows);
            let (mut own, mut h) = (rows(grad)?, after[0].shallow_clone());
            if let (Some(w), Some(all)) = (&inputs.weight_hr, &projected) {
                Tensor::map_into(&[&own, &h], &[], &[&rows(all)?], |e, _| vec![&e[0] + &e[1]])?;
                own = rows(all)?.mm(w)?;
                h = Tensor::zeros_like(&own)?;
            }
            let (factor, out) = (rows(&factors)?, rows(&sums)?);
            let between = |t: &Tensor| t.unsqueeze(1);
            let (own, h) = (between(&own)?, between(&h)?);
            match (after.get(1), &selected) {
                (Some(c), Some(selected)) => {
                    let (through, factor) = (factor.narrow(1, count, 1)?, factor.narrow(1, 0, count)?);
                    Tensor::map_into(&[&factor, &own, &h, &between(c)?, &through, selected], &[], &[&out], |e, _| {
                        let h = &e[1] + &e[2];
                        let c = &e[3] + &h * &e[4];
                        vec![&e[0] * e[5].select(h, c)]
                    })?
                }
                _ => Tensor::map_into(&[&factor, &own, &h], &[], &[&out], |e, _| vec![&e[0] * (&e[1] + &e[2])])?,
            }
            let direct = out.select(1, count as isize - 1)?;
            let through = self.flat_gate_sums(&out)?;
            let mut before = match step {
                CellKind::Lstm => vec![through.mm(&inputs.weight_hh)?, direct],
                CellKind::Gru => vec![direct.addmm(&through, &inputs.weight_hh, 1, 1)?],
                _ => vec![through.mm(&inputs.weight_hh)?],
            };
            if at.continued < at.rows {
                for (t, initial_grads) in before.iter_mut().zip(&mut initial_grads) {
                    initial_grads.push(t.narrow(0, at.continued, at.rows - at.continued)?);
                    *t = t.narrow(0, 0, at.continued)?;
                }
            }
            after = before;
        }
        debug_assert!(initial_grads.iter().all(|parts| parts.iter().map(|t| t.shape().dims()[0]).sum::<usize>() == n));
        let join_steps = |mut parts: Vec<Tensor>| -> Result<Tensor> {
            parts.reverse();
            if parts.len() == 1 { Ok(parts.remove(0)) } else { Tensor::cat(&parts, 0) }
        };
        Ok((sums, initial_grads.into_iter().map(join_steps).collect::<Result<_>>()?, projected))
    }

    /// Returns the sums of the gates that depend on the hidden state, as a matrix `[rows, gates * H]`.
    fn flat_gate_sums(&self, sums: &Tensor) -> Result<Tensor> {
        let (gates, size) = (self.step.gates(), sums.shape().dims()[2]);
        sums.narrow(1, 0, gates)?.reshape([-1, (gates * size) as isize])
    }

    fn gradients(&self, inputs: &Inputs<Tensor>, states: &States, grad: &Tensor) -> Result<Inputs<Tensor>> {
        let LayerPass { step, schedule, .. } = self;
        let (n, total) = (schedule.sequences(), schedule.total_rows());
        let (sums, initial, projected) = match self.fused_backward(inputs, states, grad)? {
            Some((sums, initial)) => (sums, initial, None),
            None => match &inputs.states[..] {
                [h, c] => {
                    let [output, size] = [h, c].map(|t| t.shape().dims()[1]);
                    let hidden = grad.narrow(0, 0, total * output)?.reshape([total, output])?;
                    let cell = grad.narrow(0, total * output, n * size)?.reshape([n, size])?;
                    self.step_backward(inputs, states, &hidden, Some(&cell))?
                }
                _ => self.step_backward(inputs, states, grad, None)?,
            },
        };
        let through = self.flat_gate_sums(&sums)?;
        let weight_hh = through.t()?.mm(&schedule.previous(&states.hidden)?)?;
        let input_gates = match step {
            CellKind::Gru => {
                let parts = [sums.narrow(1, 0, 2)?, sums.narrow(1, 3, 1)?];
                Tensor::cat(&parts, 1)?.reshape(through.shape())?
            }
            _ => through.shallow_clone(),
        };
        let weight_hr = match (&projected, &states.gates[..], &states.cell) {
            (Some(all), [_, _, _, o], Some(cell)) => {
                let cell = cell.narrow(0, schedule.states_start(), total)?;
                Some(all.t()?.mm(&Tensor::map(&[o, &cell], |e| &e[0] * e[1].tanh())?)?)
            }
            _ => None,
        };
        Ok(Inputs {
            gates: input_gates,
            weight_hh,
            states: initial,
            bias_hh: inputs.bias_hh.as_ref().map(|_| through.sum(0, false)).transpose()?,
            weight_hr,
        })
    }

    /// Computes the gradients of the inputs with recorded operations, so that double backward can differentiate them.
    fn recorded_gradients(&self, given: &[Tensor], grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        // The pass differentiates views of the inputs, so that hooks on the inputs themselves are not called a second time.
        let views = given.iter().map(|t| t.narrow(0, 0, t.shape().dims()[0])).collect::<Result<Vec<_>>>()?;
        let Inputs { gates, weight_hh, states, bias_hh, weight_hr } = self.unpack_inputs(&views);
        let cell = Cell {
            weight_ih: gates.shallow_clone(),
            weight_hh,
            bias_ih: None,
            bias_hh,
            weight_hr,
            suffix: String::new(),
        };
        let (hidden, last) = run_composed(self.step, &cell, &gates, &self.schedule, states)?;
        let result = LayerPass::pack_result(hidden, last.into_iter().nth(1))?;
        let wanted: Vec<&Tensor> = views.iter().filter(|t| t.requires_grad()).collect();
        let options =
            GradOptions { grad_outputs: &[grad], create_graph: true, allow_unused: true, ..GradOptions::default() };
        let mut gradients = grad_with_options(&[&result], &wanted, options)?.into_iter();
        Ok(views.iter().map(|t| if t.requires_grad() { gradients.next().flatten() } else { None }).collect())
    }
}

impl CustomOp for LayerPass {
    fn name(&self) -> &'static str {
        match self.step {
            CellKind::Tanh => "rnn_tanh",
            CellKind::Relu => "rnn_relu",
            CellKind::Lstm => "lstm",
            CellKind::Gru => "gru",
        }
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        let tracked = (0..inputs.len()).any(|i| ctx.needs_input_grad(i));
        let given = self.unpack_inputs(&inputs.iter().map(|t| t.shallow_clone()).collect::<Vec<_>>());
        let kept = tracked.then(|| self.alloc_states(&given, true)).transpose()?;
        let result = match self.fused_forward(&given, kept.as_ref())? {
            Some(result) => result,
            None => {
                let made = if tracked { None } else { Some(self.alloc_states(&given, false)?) };
                let states = kept.as_ref().or(made.as_ref()).expect("one of both was allocated");
                self.compute_states(&given, states)?;
                let own = |t: &Tensor| t.narrow(0, self.schedule.states_start(), self.schedule.total_rows());
                let cell = states.cell.as_ref().map(|t| self.schedule.final_states(&own(t)?)).transpose()?;
                let hidden = own(&states.hidden)?;
                // The caller may overwrite the result, but not the states that the backward pass reads.
                let hidden = match &cell {
                    None if tracked => hidden.empty_like()?.copy_(&hidden)?.shallow_clone(),
                    _ => hidden,
                };
                LayerPass::pack_result(hidden, cell)?
            }
        };
        if let Some(states) = &kept {
            let kept = [&states.hidden].into_iter().chain(&states.cell).chain(&states.gates);
            ctx.save_for_backward(&inputs.iter().copied().chain(kept).collect::<Vec<_>>());
        }
        Ok(result)
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.saved_tensors()?;
        let count = 2 + self.step.states() + usize::from(self.has_hidden_bias) + usize::from(self.projected);
        let (given, kept) = saved.split_at(count);
        if is_grad_enabled() {
            return self.recorded_gradients(given, grad);
        }
        let inputs = self.unpack_inputs(given);
        let cells = self.step.states() - 1;
        let states = States {
            hidden: kept[0].shallow_clone(),
            cell: kept[1..1 + cells].first().map(Tensor::shallow_clone),
            gates: kept[1 + cells..].iter().map(Tensor::shallow_clone).collect(),
        };
        let gradients = self.gradients(&inputs, &states, grad)?;
        Ok(gradients.into_list().into_iter().map(Some).collect())
    }

    fn differentiable_twice(&self) -> bool {
        true
    }
}

/// Computes the hidden states of all rows and the final states of all sequences step by step with recorded operations, so that double
/// backward can differentiate them. The input has already been multiplied by its weights.
fn run_composed(
    step: CellKind,
    cell: &Cell,
    gates: &Tensor,
    schedule: &RowSchedule,
    start: Vec<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let rows = |states: &[Tensor], from: usize, to: usize| -> Result<Vec<Tensor>> {
        states.iter().map(|t| t.narrow(0, from, to - from)).collect()
    };
    let joined = |parts: Vec<Vec<Tensor>>| -> Result<Vec<Tensor>> {
        (0..step.states()).map(|s| Tensor::cat(&parts.iter().map(|p| &p[s]).collect::<Vec<_>>(), 0)).collect()
    };
    let (mut outputs, mut ended) = (Vec::new(), Vec::new());
    let (mut states, mut size) = (rows(&start, 0, 0)?, 0);
    for at in schedule.steps() {
        if at.continued < size {
            // The shortest sequences are the last rows, so these rows end first.
            ended.push(rows(&states, at.continued, size)?);
            states = rows(&states, 0, at.continued)?;
        }
        if at.continued < at.rows {
            states = joined(vec![states, rows(&start, at.continued, at.rows)?])?;
        }
        size = at.rows;
        states = step.next_states(&gates.narrow(0, at.start, at.rows)?, cell, &states)?;
        outputs.push(states[0].shallow_clone());
    }
    if schedule.reverse {
        outputs.reverse();
    }
    ended.push(states);
    ended.reverse();
    Ok((Tensor::cat(&outputs, 0)?, joined(ended)?))
}
