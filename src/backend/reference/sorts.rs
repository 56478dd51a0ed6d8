//! Sorts, searches and choices by order: NaN is above everything, equal elements keep their order.

use ndarray::{ArrayD, Axis};

use super::values::{Memory, indices, is_nan, order, position, read, tensor, write};
use crate::backend::problem::select::{Nth, Selected};
use crate::layout::Layout;
use crate::{DType, Result, Scalar, Tensor};

/// The indices of a line's elements in their order.
fn sorted(line: &[Scalar], descending: bool) -> Vec<usize> {
    let mut at: Vec<usize> = (0..line.len()).collect();
    at.sort_by(|&a, &b| if descending { order(line[b], line[a]) } else { order(line[a], line[b]) });
    at
}

/// Values and indices of what `choose` takes of each line along d, in the order in which it gives them.
fn chosen(
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
    let results = chosen(x, d, x.shape().dims()[d], |line| sorted(line, descending))?;
    [values, indices].into_iter().zip(results).try_for_each(|(t, result)| write(t, result))
}

pub(super) fn first(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Selected> {
    let [values, indices] = chosen(x, d, k, |line| sorted(line, descending)[..k].to_vec())?;
    Ok(Selected { values: Some(tensor(&values, x.dtype)?), indices: tensor(&indices, DType::I64)? })
}

pub(super) fn nth(x: &Tensor, d: usize, nth: Nth<'_>) -> Result<Selected> {
    let ranks = nth.ranks().map(read).transpose()?;
    let mut listed = ranks.iter().flatten();
    let [values, indices] = chosen(x, d, 1, |line| {
        let nans = line.iter().filter(|x| is_nan(**x)).count();
        let rank = nth.rank(line.len(), nans, || listed.next().expect("a rank for each line").to_f64() as i64);
        vec![sorted(line, false)[rank]]
    })?;
    Ok(Selected { values: Some(tensor(&values, x.dtype)?), indices: tensor(&indices, DType::I64)? })
}

/// How many elements of its line come before each value: those that are less, on the right side equal ones as well. All do
/// before NaN.
pub(super) fn search(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    let (x, n, values) = (Memory::of(x)?, *x.shape().dims().last().expect("a line"), read(v)?);
    let found = indices(v.shape().dims()).map(|index| {
        let (start, value) = (position(lines, &index), values[&index[..]].to_f64());
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
