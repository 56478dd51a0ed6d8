//! Recurrences of recurrent layers, by their definition.

use ndarray::ArrayD;

use super::values::{read_floats, write};
use crate::Result;
use crate::backend::problem::recurrence::{CellKind, Pass, Recurrence};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the next state of a feature, the next cell state, and the kept gates. `x` and `z` are the parts of the gates' sums.
fn next_state(cell: CellKind, x: &[f64], z: &[f64], h: f64, c: f64) -> (f64, f64, Vec<f64>) {
    let sum = |gate: usize| x[gate] + z[gate];
    match cell {
        CellKind::Tanh => (sum(0).tanh(), 0.0, vec![]),
        CellKind::Relu => (sum(0).max(0.0), 0.0, vec![]),
        CellKind::Lstm => {
            let [i, f, g, o] = [sigmoid(sum(0)), sigmoid(sum(1)), sum(2).tanh(), sigmoid(sum(3))];
            let c = f * c + i * g;
            (o * c.tanh(), c, vec![i, f, g, o])
        }
        CellKind::Gru => {
            let [reset, update] = [sigmoid(sum(0)), sigmoid(sum(1))];
            let new = (x[2] + reset * z[2]).tanh();
            ((1.0 - update) * new + update * h, 0.0, vec![reset, update, new, z[2]])
        }
    }
}

/// Returns the gradients of a feature's sums, of the cell state before the step, and of the hidden state before the step, as far as the latter
/// does not go through the weight. `gates` are the kept gates, `h` and `c` the states before and after the step.
fn gradients(cell: CellKind, of_h: f64, of_c: f64, gates: &[f64], h: [f64; 2], c: [f64; 2]) -> (Vec<f64>, f64, f64) {
    let slope = |y: f64| y * (1.0 - y);
    match (cell, gates) {
        (CellKind::Lstm, &[i, f, g, o]) => {
            let of_c = of_c + of_h * o * (1.0 - c[1].tanh().powi(2));
            let of_o = of_h * c[1].tanh() * slope(o);
            (vec![of_c * g * slope(i), of_c * c[0] * slope(f), of_c * i * (1.0 - g * g), of_o], of_c * f, 0.0)
        }
        (CellKind::Gru, &[reset, update, new, part]) => {
            let of_new = of_h * (1.0 - update) * (1.0 - new * new);
            let of_update = of_h * (h[0] - new) * slope(update);
            (vec![of_new * part * slope(reset), of_update, of_new * reset, of_new], 0.0, of_h * update)
        }
        (CellKind::Relu, _) => (vec![if h[1] > 0.0 { of_h } else { 0.0 }], 0.0, 0.0),
        _ => (vec![of_h * (1.0 - h[1] * h[1])], 0.0, 0.0),
    }
}

pub(super) fn run(r: &Recurrence) -> Result<()> {
    let ([n, total], h, gates, sums) = (r.rows(), r.hidden(), r.cell.gates(), r.cell.sums());
    let starts: Vec<usize> = match r.starts {
        Some(t) => read_floats(t)?.iter().map(|&row| row as usize).collect(),
        None => (0..=total / n).map(|t| t * n).collect(),
    };
    let weight = read_floats(r.weight)?;
    let flat = |t: &crate::Tensor| Ok::<Vec<f64>, crate::Error>(read_floats(t)?.into_iter().collect());
    let (first, own) = if r.reverse { (total, 0) } else { (0, n) };
    // For each sequence, its rows in the order of computation.
    let rows = |s: usize| {
        let steps = starts.windows(2).filter(|w| w[1] - w[0] > s).map(|w| w[0] + s);
        if r.reverse { steps.rev().collect::<Vec<_>>() } else { steps.collect() }
    };
    match &r.pass {
        Pass::Forward { x, bias, initial, result } => {
            let x = flat(x)?;
            let bias = bias.map_or_else(|| Ok(vec![0.0; gates * h]), flat)?;
            let mut out = vec![0.0; result.numel()];
            let mut states = [vec![0.0; (n + total) * h], vec![0.0; (n + total) * h]];
            let mut kept = vec![0.0; 4 * total * h];
            for s in 0..n {
                let mut before: Vec<Vec<f64>> = Vec::new();
                for t in *initial {
                    before.push(flat(t)?[s * h..][..h].to_vec());
                }
                before.resize(2, vec![0.0; h]);
                let mut put = |row: usize, new: &[Vec<f64>]| {
                    states.iter_mut().zip(new).for_each(|(all, new)| all[row * h..][..h].copy_from_slice(new));
                };
                put(first + s, &before);
                for row in rows(s) {
                    let z = |k: usize| (0..h).map(|j| weight[[k, j]] * before[0][j]).sum::<f64>() + bias[k];
                    let mut after = before.clone();
                    for u in 0..h {
                        let [x, z] = [&|k: usize| x[row * gates * h + k], &z as &dyn Fn(usize) -> f64]
                            .map(|part| (0..gates).map(|g| part(g * h + u)).collect::<Vec<_>>());
                        let (new, cell, of_row) = next_state(r.cell, &x, &z, before[0][u], before[1][u]);
                        (after[0][u], after[1][u], out[row * h + u]) = (new, cell, new);
                        of_row.iter().enumerate().for_each(|(k, &gate)| kept[(k * total + row) * h + u] = gate);
                    }
                    put(own + row, &after);
                    before = after;
                }
                if r.cell == CellKind::Lstm {
                    out[(total + s) * h..][..h].copy_from_slice(&before[1]);
                }
            }
            write(result, out)?;
            let Some(of) = r.kept else { return Ok(()) };
            let gates = (0..4).map(|k| kept[k * total * h..][..total * h].to_vec());
            let all = states.into_iter().take(1 + of.cells.iter().count()).chain(gates);
            of.tensors().zip(all).try_for_each(|(t, values)| write(t, values))?;
        }
        Pass::Backward { grad, sums: out, initial } => {
            let kept = r.kept.expect("the backward pass has the kept states");
            let (grad, hidden) = (flat(grad)?, flat(kept.hidden)?);
            let cells = kept.cells.map_or_else(|| Ok(vec![0.0; hidden.len()]), flat)?;
            let of_gates: Vec<f64> = kept.gates.iter().map(flat).collect::<Result<Vec<_>>>()?.concat();
            let mut found = ArrayD::<f64>::zeros(vec![total, sums, h]);
            let mut firsts = vec![vec![0.0; n * h]; 2];
            for s in 0..n {
                let (rows, mut of_h) = (rows(s), vec![0.0; h]);
                let mut of_c =
                    if r.cell == CellKind::Lstm { grad[(total + s) * h..][..h].to_vec() } else { vec![0.0; h] };
                for (i, &row) in rows.iter().enumerate().rev() {
                    let previous = if i == 0 { first + s } else { own + rows[i - 1] };
                    let mut direct = vec![0.0; h];
                    for u in 0..h {
                        let states = |all: &[f64]| [all[previous * h + u], all[(own + row) * h + u]];
                        let of_row: Vec<f64> =
                            (0..of_gates.len() / (total * h)).map(|k| of_gates[(k * total + row) * h + u]).collect();
                        let of_h = of_h[u] + grad[row * h + u];
                        let made = gradients(r.cell, of_h, of_c[u], &of_row, states(&hidden), states(&cells));
                        made.0.iter().enumerate().for_each(|(k, &sum)| found[[row, k, u].as_slice()] = sum);
                        (of_c[u], direct[u]) = (made.1, made.2);
                    }
                    let through = |j: usize| {
                        let terms = (0..gates * h).map(|k| found[[row, k / h, k % h].as_slice()] * weight[[k, j]]);
                        terms.sum::<f64>()
                    };
                    of_h = (0..h).map(|j| through(j) + direct[j]).collect();
                }
                firsts[0][s * h..][..h].copy_from_slice(&of_h);
                firsts[1][s * h..][..h].copy_from_slice(&of_c);
            }
            write(out, found)?;
            initial.iter().zip(firsts).try_for_each(|(t, values)| write(t, values))?;
        }
    }
    Ok(())
}
