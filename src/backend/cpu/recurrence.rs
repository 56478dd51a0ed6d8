//! Recurrences of recurrent layers in f32. Each thread computes its own sequences of a time step: a product with the packed weight, then the
//! gates. States, sums and results of a step are rows next to each other, so that threads share no rows.

use bytemuck::{cast_slice, cast_slice_mut};
use smallvec::SmallVec;

use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::kernels::gemm::Floats;
use crate::backend::cpu::kernels::gemm::serial::{LeftMatrix, RightMatrix, SerialGemm};
use crate::backend::cpu::kernels::math::{Sigmoid, Tanh, map_in_place, map_into};
use crate::backend::problem::recurrence::{CellKind, KeptStates, Pass, Recurrence};
use crate::device::cpu::blocks::Block;
use crate::device::cpu::{parallel, threads};
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The maximum number of elements of a weight for fewer sequences than threads. A larger weight is read faster by all threads.
const MAX_WEIGHT_OF_FEW_SEQUENCES: usize = 1 << 18;

/// A time step, in the order of computation: its first row, and its number of sequences, which are the first ones.
#[derive(Clone, Copy)]
struct Step {
    first: usize,
    count: usize,
}

/// A pass, and what its steps share.
struct Job<'a> {
    r: &'a Recurrence<'a>,
    gemm: SerialGemm,
    /// In the order of computation.
    steps: Vec<Step>,
    /// The number of sequences.
    n: usize,
    /// The number of rows of all steps.
    total: usize,
    /// The hidden size.
    h: usize,
    gates: usize,
}

/// Returns the elements of a contiguous tensor from the bytes of its storage.
fn floats<'a>(bytes: &'a [u8], t: &Tensor) -> &'a [f32] {
    cast_slice(&bytes[t.layout.offset * size_of::<f32>()..][..t.numel() * size_of::<f32>()])
}

fn floats_mut<'a>(bytes: &'a mut [u8], t: &Tensor) -> &'a mut [f32] {
    cast_slice_mut(&mut bytes[t.layout.offset * size_of::<f32>()..][..t.numel() * size_of::<f32>()])
}

/// Calls `f` with the elements of all tensors; `written` must have storages of their own.
fn with_floats(read: &[&Tensor], written: &[&Tensor], f: impl FnOnce(&[&[f32]], &mut [&mut [f32]])) -> Result<()> {
    let [from, to] = [read, written].map(|tensors| tensors.iter().map(|t| &t.storage).collect::<Vec<_>>());
    with_host(&from, &to, |reads, writes| {
        let from: Vec<&[f32]> = reads.iter().zip(read).map(|(bytes, t)| floats(bytes, t)).collect();
        let mut to: Vec<&mut [f32]> = writes.iter_mut().zip(written).map(|(bytes, t)| floats_mut(bytes, t)).collect();
        f(&from, &mut to);
    })
}

/// Computes a pass. Returns false for other dtypes than f32, for processors without product kernels, and for few sequences with a large weight.
pub(crate) fn run(r: &Recurrence) -> Result<bool> {
    let ([n, total], h) = (r.rows(), r.hidden());
    let Some(gemm) = SerialGemm::for_f32() else { return Ok(false) };
    if r.weight.dtype != DType::F32
        || total * h == 0
        || (n < threads() && r.weight.numel() > MAX_WEIGHT_OF_FEW_SEQUENCES)
    {
        return Ok(false);
    }
    let mut steps: Vec<Step> = match r.starts {
        Some(starts) => {
            let starts = starts.to_vec::<i64>()?;
            starts.windows(2).map(|w| Step { first: w[0] as usize, count: (w[1] - w[0]) as usize }).collect()
        }
        None => (0..total / n).map(|t| Step { first: t * n, count: n }).collect(),
    };
    if r.reverse {
        steps.reverse();
    }
    let job = Job { r, gemm, steps, n, total, h, gates: r.cell.gates() };
    match &r.pass {
        Pass::Forward { .. } => job.forward()?,
        Pass::Backward { .. } => job.backward()?,
    }
    Ok(true)
}

impl Job<'_> {
    /// Returns the rows at which the initial states and the states of the steps begin, in tensors that hold both.
    fn state_rows(&self) -> [usize; 2] {
        if self.r.reverse { [self.total, 0] } else { [0, self.n] }
    }

    fn forward(&self) -> Result<()> {
        let Pass::Forward { x, bias, initial, result } = self.r.pass else { unreachable!("a forward pass") };
        let (&Job { n, total, h, gates, .. }, cell) = (self, self.r.cell);
        let kept = self.r.kept;
        let written: Vec<&Tensor> = [result].into_iter().chain(kept.iter().flat_map(KeptStates::tensors)).collect();
        let read: Vec<&Tensor> = [x, self.r.weight].into_iter().chain(initial).chain(bias).collect();
        with_floats(&read, &written, |from, to| {
            let (x, weight, bias) = (from[0], from[1], bias.map(|_| from[2 + initial.len()]));
            let mut packed = vec![0.0; self.gemm.packed_len(gates * h, h)];
            self.gemm.pack_columns(Floats::F32(weight), (0, h), (gates * h, h), &mut packed);
            let right = RightMatrix { data: &packed, stride: self.gemm.padded_width(gates * h), times: 1, jump: 0 };
            let mut hidden = from[2].to_vec();
            let mut cells = if cell == CellKind::Lstm { from[3].to_vec() } else { vec![0.0; n * h] };
            let mut sums = vec![0.0; n * gates * h];
            let (result, kept) = to.split_at_mut(1);
            let [first_initial, first_own] = self.state_rows().map(|row| row * h);
            // The tensors that hold states: of all cells the hidden states, of LSTM also the cell states.
            let of_states = kept.len().min(cell.states());
            for (all, start) in kept[..of_states].iter_mut().zip([&hidden, &cells]) {
                all[first_initial..][..n * h].copy_from_slice(start);
            }
            for &Step { first, count } in &self.steps {
                let each = count.div_ceil(threads());
                let mut rows: SmallVec<[&mut [f32]; 10]> = SmallVec::new();
                rows.extend([
                    &mut hidden[..count * h],
                    &mut cells[..count * h],
                    &mut result[0][first * h..][..count * h],
                ]);
                rows.extend(kept.iter_mut().enumerate().map(|(k, all)| {
                    let start = if k < of_states { first_own + first * h } else { first * h };
                    &mut all[start..][..count * h]
                }));
                let mut sizes: SmallVec<[usize; 10]> = SmallVec::from_elem(each * h, rows.len());
                rows.push(&mut sums[..count * gates * h]);
                sizes.push(each * gates * h);
                parallel::for_each_chunks(&mut rows, &sizes, |i, rows| {
                    let [hidden, cells, result, rest @ .., sums] = rows else { unreachable!("four slices or more") };
                    let own = hidden.len() / h;
                    let x = &x[(first + i * each) * gates * h..][..own * gates * h];
                    match (cell, bias) {
                        (CellKind::Gru, Some(bias)) => {
                            sums.chunks_mut(gates * h).for_each(|row| row.copy_from_slice(bias));
                        }
                        (CellKind::Gru, None) => sums.fill(0.0),
                        _ => sums.copy_from_slice(x),
                    }
                    let left = LeftMatrix::Rows { data: hidden, stride: h };
                    let mut out = Block::new(sums, own, gates * h, gates * h);
                    self.gemm.multiply((own, gates * h, h), left, right, &mut out, true);
                    next_states(cell, x, sums, hidden, cells, h);
                    result.copy_from_slice(hidden);
                    let (states, of_gates) = rest.split_at_mut(of_states);
                    states
                        .iter_mut()
                        .zip([&hidden[..], &cells[..]])
                        .for_each(|(kept, state)| kept.copy_from_slice(state));
                    for (k, kept) in of_gates.iter_mut().enumerate() {
                        // GRU's gates are the reset and the update gate, the new gate, and the new gate's sum from the hidden state.
                        match (cell, k) {
                            (CellKind::Gru, 2) => kept.copy_from_slice(cells),
                            _ => {
                                let part = if cell == CellKind::Gru { k.min(2) } else { k };
                                let gate = sums.chunks(gates * h).map(|row| &row[part * h..][..h]);
                                kept.chunks_mut(h).zip(gate).for_each(|(kept, gate)| kept.copy_from_slice(gate));
                            }
                        }
                    }
                });
            }
            if cell == CellKind::Lstm {
                result[0][total * h..].copy_from_slice(&cells);
            }
        })
    }

    fn backward(&self) -> Result<()> {
        let (Pass::Backward { grad, sums, initial }, Some(kept)) = (self.r.pass, self.r.kept) else {
            unreachable!("a backward pass has kept states")
        };
        let (&Job { n, total, h, gates, .. }, cell) = (self, self.r.cell);
        let per_row = cell.sums() * h;
        let written: Vec<&Tensor> = [sums].into_iter().chain(initial).collect();
        let read: Vec<&Tensor> = [grad, self.r.weight].into_iter().chain(kept.tensors()).collect();
        with_floats(&read, &written, |from, to| {
            let (grad, weight, hidden) = (from[0], from[1], from[2]);
            let of_gates = &from[from.len() - kept.gates.len()..];
            let states = if cell == CellKind::Lstm { from[3] } else { hidden };
            let width = self.gemm.padded_width(h);
            let mut padded = Vec::new();
            if width > h {
                padded.resize(gates * h * width, 0.0);
                padded.chunks_mut(width).zip(weight.chunks(h)).for_each(|(to, row)| to[..h].copy_from_slice(row));
            }
            let data = if width > h { &padded } else { weight };
            let right = RightMatrix { data, stride: width, times: 1, jump: 0 };
            let mut of_hidden = vec![0.0; n * h];
            let mut of_cells = if cell == CellKind::Lstm { grad[total * h..].to_vec() } else { vec![0.0; n * h] };
            let [initial_row, own_row] = self.state_rows();
            for (at, &Step { first, count }) in self.steps.iter().enumerate().rev() {
                let before = if at == 0 { Step { first: 0, count: 0 } } else { self.steps[at - 1] };
                let each = count.div_ceil(threads());
                let mut rows = [
                    &mut of_hidden[..count * h],
                    &mut of_cells[..count * h],
                    &mut to[0][first * per_row..][..count * per_row],
                ];
                parallel::for_each_chunks(&mut rows, &[each * h, each * h, each * per_row], |i, rows| {
                    let [of_hidden, of_cells, sums] = rows else { unreachable!("three slices") };
                    let own = of_hidden.len() / h;
                    for k in 0..own {
                        let sequence = i * each + k;
                        let row = first + sequence;
                        let previous = if sequence < before.count {
                            own_row + before.first + sequence
                        } else {
                            initial_row + sequence
                        };
                        let state = |row: usize| &states[row * h..][..h];
                        let values = RowValues {
                            grad: &grad[row * h..][..h],
                            gates: std::array::from_fn(|k| {
                                of_gates.get(k).map_or(&[][..], |gate| &gate[row * h..][..h])
                            }),
                            before: state(previous),
                            after: state(own_row + row),
                        };
                        let [of_hidden, of_cells] = [&mut *of_hidden, &mut *of_cells].map(|all| &mut all[k * h..][..h]);
                        gradients_of_row(cell, values, of_hidden, of_cells, &mut sums[k * per_row..][..per_row]);
                    }
                    let left = LeftMatrix::Rows { data: sums, stride: per_row };
                    let mut out = Block::new(of_hidden, own, h, h);
                    self.gemm.multiply((own, h, gates * h), left, right, &mut out, cell == CellKind::Gru);
                });
            }
            to[1..].iter_mut().zip([&of_hidden, &of_cells]).for_each(|(to, state)| to.copy_from_slice(state));
        })
    }
}

/// The values of a row that its gradients need. `before` and `after` are LSTM's cell states, or the hidden states of other cells.
#[derive(Clone, Copy)]
struct RowValues<'a> {
    grad: &'a [f32],
    gates: [&'a [f32]; 4],
    before: &'a [f32],
    after: &'a [f32],
}

vectorised! {
    /// Replaces the sums of rows by their gates, and the states by the next ones. LSTM's and the RNN's sums include `x`. GRU's `cells` receive
    /// the new gate.
    fn next_states<'a>(_simd: S, cell: CellKind, x: &'a [f32], sums: &'a mut [f32], hidden: &'a mut [f32], cells: &'a mut [f32], h: usize) {
        let gates = cell.gates() * h;
        let rows = sums.chunks_exact_mut(gates).zip(x.chunks_exact(gates));
        for ((sums, x), (hidden, cells)) in rows.zip(hidden.chunks_exact_mut(h).zip(cells.chunks_exact_mut(h))) {
            match cell {
                CellKind::Tanh => map_into::<Tanh>(hidden, sums, |x| x),
                CellKind::Relu => hidden.iter_mut().zip(sums).for_each(|(h, x)| *h = if *x < 0.0 { 0.0 } else { *x }),
                CellKind::Lstm => {
                    map_in_place::<Sigmoid>(&mut sums[..2 * h], |x| x);
                    map_in_place::<Tanh>(&mut sums[2 * h..3 * h], |x| x);
                    map_in_place::<Sigmoid>(&mut sums[3 * h..], |x| x);
                    let [i, f, g, o] = std::array::from_fn(|gate| &sums[gate * h..][..h]);
                    for u in 0..h {
                        cells[u] = f[u] * cells[u] + i[u] * g[u];
                    }
                    map_into::<Tanh>(hidden, cells, |c| c);
                    hidden.iter_mut().zip(o).for_each(|(h, o)| *h *= o);
                }
                CellKind::Gru => {
                    sums[..2 * h].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                    map_in_place::<Sigmoid>(&mut sums[..2 * h], |x| x);
                    let [reset, update, part] = std::array::from_fn(|gate| &sums[gate * h..][..h]);
                    for u in 0..h {
                        cells[u] = x[2 * h + u] + reset[u] * part[u];
                    }
                    map_in_place::<Tanh>(cells, |x| x);
                    for u in 0..h {
                        hidden[u] = (1.0 - update[u]) * cells[u] + update[u] * hidden[u];
                    }
                }
            }
        }
    }
}

vectorised! {
    /// Computes the gradients of a row's sums from those of its states, and the part of the previous states' gradients that does not go through
    /// the weight. For GRU that part replaces the hidden state's gradient.
    fn gradients_of_row<'a>(_simd: S, cell: CellKind, values: RowValues<'a>, of_hidden: &'a mut [f32], of_cells: &'a mut [f32], sums: &'a mut [f32]) {
        let RowValues { grad, gates: [a, b, c, d], before, after } = values;
        let h = grad.len();
        of_hidden.iter_mut().zip(grad).for_each(|(of_h, grad)| *of_h += grad);
        let (before, after, of_cells) = (&before[..h], &after[..h], &mut of_cells[..h]);
        match cell {
            CellKind::Tanh => (0..h).for_each(|u| sums[u] = of_hidden[u] * (1.0 - after[u] * after[u])),
            CellKind::Relu => (0..h).for_each(|u| sums[u] = if after[u] > 0.0 { of_hidden[u] } else { 0.0 }),
            CellKind::Lstm => {
                let (i, f, g, o) = (&a[..h], &b[..h], &c[..h], &d[..h]);
                let (inner, of_o) = sums.split_at_mut(3 * h);
                map_into::<Tanh>(of_o, after, |c| c);
                let ([of_i, rest], of_o) = (<[&mut [f32]; 2]>::from(inner.split_at_mut(h)), &mut of_o[..h]);
                let (of_f, of_g) = rest.split_at_mut(h);
                let (of_f, of_g) = (&mut of_f[..h], &mut of_g[..h]);
                for u in 0..h {
                    let bent = of_o[u];
                    let of_c = of_cells[u] + of_hidden[u] * o[u] * (1.0 - bent * bent);
                    of_i[u] = of_c * g[u] * (i[u] * (1.0 - i[u]));
                    of_f[u] = of_c * before[u] * (f[u] * (1.0 - f[u]));
                    of_g[u] = of_c * i[u] * (1.0 - g[u] * g[u]);
                    of_o[u] = of_hidden[u] * bent * (o[u] * (1.0 - o[u]));
                    of_cells[u] = of_c * f[u];
                }
            }
            CellKind::Gru => {
                let (reset, update, new, part) = (&a[..h], &b[..h], &c[..h], &d[..h]);
                for u in 0..h {
                    let of_new = of_hidden[u] * (1.0 - update[u]) * (1.0 - new[u] * new[u]);
                    sums[u] = of_new * part[u] * (reset[u] * (1.0 - reset[u]));
                    sums[h + u] = of_hidden[u] * (before[u] - new[u]) * (update[u] * (1.0 - update[u]));
                    sums[2 * h + u] = of_new * reset[u];
                    sums[3 * h + u] = of_new;
                    of_hidden[u] *= update[u];
                }
            }
        }
    }
}
