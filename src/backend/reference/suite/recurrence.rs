//! Tests of the recurrences of recurrent layers.

use super::{Side, Suite, View};
use crate::backend::opencl::gemm::tests::PRETEND_GPU;
use crate::backend::problem::recurrence::{CellKind, KeptStates, Pass, Recurrence};
use crate::{DType, Result, Tensor};

/// Computes a forward pass, and a backward pass from the states of the reference.
fn compare_case(
    suite: &mut Suite,
    (cell, dtype, reverse): (CellKind, DType, bool),
    h: usize,
    sizes: &[usize],
) -> Result<()> {
    let (n, total, dense) = (sizes[0], sizes.iter().sum::<usize>(), sizes.first() == sizes.last());
    let (gates, lstm) = (cell.gates(), cell == CellKind::Lstm);
    let mut made = |dims: &[usize], scale: f64| {
        suite.tensor(View::Plain, dims, dtype, |r| (r.next_below(257) as f64 / 128.0 - 1.0) * scale)
    };
    let (x, weight, bias) = (made(&[total, gates * h], 2.0)?, made(&[gates * h, h], 0.25)?, made(&[gates * h], 1.0)?);
    let results = if lstm { vec![(total + n) * h] } else { vec![total, h] };
    let initial = (0..cell.states()).map(|_| made(&[n, h], 1.0)).collect::<Result<Vec<_>>>()?;
    let (grad, hidden, cells) = (made(&results, 1.0)?, made(&[n + total, h], 0.9)?, made(&[n + total, h], 1.5)?);
    let of_gates = (0..4).map(|_| made(&[total, h], 0.9)).collect::<Result<Vec<_>>>()?;
    let starts = |side: &Side| {
        let rows = (0..=sizes.len()).map(|t| sizes[..t].iter().sum::<usize>() as i64).collect::<Vec<_>>();
        Tensor::from_slice(&rows, rows.len(), side.device)
    };
    let what = format!("{cell:?} of {h}, {sizes:?}, reverse {reverse}");
    for keep in [false, true] {
        suite.compare(format!("{what}, keep {keep}"), dtype, 4 * h, |side: &Side| {
            let starts = if dense { None } else { Some(starts(side)?) };
            let [x, weight, bias] = [&x, &weight, &bias].map(|t| side.upload(t));
            let (x, weight, bias) = (x?, weight?, bias?);
            let initial = initial.iter().map(|t| side.upload(t)).collect::<Result<Vec<_>>>()?;
            let result = side.alloc_output(&results[..], dtype)?;
            let hidden = side.alloc_output([n + total, h], dtype)?;
            let cells = lstm.then(|| side.alloc_output([n + total, h], dtype)).transpose()?;
            let count = if gates > 1 { 4 } else { 0 };
            let of_gates = (0..count).map(|_| side.alloc_output([total, h], dtype)).collect::<Result<Vec<_>>>()?;
            let kept = KeptStates { hidden: &hidden, cells: cells.as_ref(), gates: &of_gates };
            let bias = Some(&bias).filter(|_| cell == CellKind::Gru);
            let pass = Pass::Forward { x: &x, bias, initial: &initial, result: &result };
            let (kept, starts) = (keep.then_some(kept), starts.as_ref());
            let done = side.backend.recurrence(&Recurrence { cell, reverse, starts, weight: &weight, kept, pass })?;
            let all = [result, hidden].into_iter().chain(cells).chain(of_gates);
            Ok(done.then(|| all.take(if keep { 7 } else { 1 }).collect()))
        })?;
    }
    suite.compare(format!("{what}, backward"), dtype, 4 * h, |side: &Side| {
        let starts = if dense { None } else { Some(starts(side)?) };
        let [grad, weight, hidden, cells] = [&grad, &weight, &hidden, &cells].map(|t| side.upload(t));
        let (grad, weight, hidden, cells) = (grad?, weight?, hidden?, cells?);
        let of_gates =
            of_gates.iter().take(if gates > 1 { 4 } else { 0 }).map(|t| side.upload(t)).collect::<Result<Vec<_>>>()?;
        let sums = side.alloc_output([total, cell.sums(), h], dtype)?;
        let initial = initial.iter().map(|_| side.alloc_output([n, h], dtype)).collect::<Result<Vec<_>>>()?;
        let cells = Some(&cells).filter(|_| lstm);
        let kept = Some(KeptStates { hidden: &hidden, cells, gates: &of_gates });
        let pass = Pass::Backward { grad: &grad, sums: &sums, initial: &initial };
        let starts = starts.as_ref();
        let done = side.backend.recurrence(&Recurrence { cell, reverse, starts, weight: &weight, kept, pass })?;
        Ok(done.then(|| [sums].into_iter().chain(initial).collect()))
    })
}

pub(super) fn recurrence(suite: &mut Suite) -> Result<()> {
    use CellKind::{Gru, Lstm, Relu, Tanh};
    PRETEND_GPU.set(true);
    for (cell, dtype, reverse, h, sizes) in [
        (Lstm, DType::F32, false, 5, &[2, 2, 2][..]),
        (Lstm, DType::F16, true, 20, &[3, 2, 2, 1]),
        (Gru, DType::F32, true, 9, &[3, 3, 1]),
        (Gru, DType::BF16, false, 33, &[4]),
        (Tanh, DType::F32, false, 40, &[5, 3]),
        (Relu, DType::F32, true, 3, &[1, 1, 1]),
    ] {
        compare_case(suite, (cell, dtype, reverse), h, sizes)?;
    }
    PRETEND_GPU.set(false);
    Ok(())
}
