//! Sorting, searching and selection. NaN is greater than every number, and equal elements keep their order.

use ndarray::{ArrayD, Axis};

use super::values::{Memory, indices, is_nan, new_tensor, order, read, storage_index, write};
use crate::backend::problem::select::{RankQuery, Search, Selected};
use crate::{DType, Result, Scalar, Tensor};

/// Returns the indices of a line's elements in sorted order.
fn sorted_indices(line: &[Scalar], descending: bool) -> Vec<usize> {
    let mut at: Vec<usize> = (0..line.len()).collect();
    at.sort_by(|&a, &b| if descending { order(line[b], line[a]) } else { order(line[a], line[b]) });
    at
}

/// Returns the values and the indices of the elements that `choose` selects from each line along d, in the order of `choose`.
fn select_lines(
    x: &Tensor,
    d: usize,
    count: usize,
    mut choose: impl FnMut(&[Scalar]) -> Vec<usize>,
) -> Result<[ArrayD<Scalar>; 2]> {
    let x = read(x)?;
    let mut dims = x.shape().to_vec();
    dims[d] = count;
    let [mut values, mut indices] = [(); 2].map(|()| ArrayD::from_elem(&dims[..], Scalar::Int(0)));
    let results = values.lanes_mut(Axis(d)).into_iter().zip(indices.lanes_mut(Axis(d)));
    for (line, (mut values, mut indices)) in x.lanes(Axis(d)).into_iter().zip(results) {
        let line: Vec<Scalar> = line.iter().copied().collect();
        for (i, at) in choose(&line).into_iter().enumerate() {
            (values[i], indices[i]) = (line[at], Scalar::Int(at as i64));
        }
    }
    Ok([values, indices])
}

pub(super) fn sort(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    let results = select_lines(x, d, x.shape().dims()[d], |line| sorted_indices(line, descending))?;
    [values, indices].into_iter().zip(results).try_for_each(|(t, result)| write(t, result))
}

pub(super) fn topk(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Selected> {
    let [values, indices] = select_lines(x, d, k, |line| sorted_indices(line, descending)[..k].to_vec())?;
    Ok(Selected { values: Some(new_tensor(&values, x.dtype)?), indices: new_tensor(&indices, DType::I64)? })
}

pub(super) fn kth(x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Selected> {
    let ranks = nth.ranks().map(read).transpose()?;
    let mut listed = ranks.iter().flatten();
    let [values, indices] = select_lines(x, d, 1, |line| {
        let nans = line.iter().filter(|x| is_nan(**x)).count();
        let rank = nth.rank(line.len(), nans, || listed.next().expect("a rank for each line").to_f64() as i64);
        vec![sorted_indices(line, false)[rank]]
    })?;
    Ok(Selected { values: Some(new_tensor(&values, x.dtype)?), indices: new_tensor(&indices, DType::I64)? })
}

/// Counts the elements in front of each value in its line: smaller elements, and with `right` also equal elements. All numbers are in front of NaN.
pub(super) fn searchsorted(search: &Search) -> Result<()> {
    let &Search { sorted: x, lines, step, values: v, right, out } = search;
    let (x, n, values) = (Memory::read(x)?, *x.shape().dims().last().expect("a line"), read(v)?);
    let found = indices(v.shape().dims()).map(|index| {
        let (start, value) = (storage_index(lines, &index), values[&index[..]].to_f64());
        let before = |i: &usize| {
            let element = x.get(start + *i as isize * step).to_f64();
            !(if right { element > value } else { element >= value })
        };
        let at = (0..n).take_while(before).count();
        match out.dtype {
            DType::Bool => i64::from(at < n && x.get(start + at as isize * step).to_f64() == value),
            _ => at as i64,
        }
    });
    write(out, found)
}
