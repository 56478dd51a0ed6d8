//! Matrix products, reductions and scans. Sums are computed in f64 or i64, one term after another.

use super::formula;
use super::values::{add, converted, indices, is_true, max, min, mul, order, read, read_as, write};
use crate::backend::problem::gemm::Gemm;
use crate::backend::problem::map::Params;
use crate::backend::problem::reduction::{Combination, Element, Reduction};
use crate::backend::problem::scan::Scan;
use crate::{Result, Scalar, Shape, Tensor};

/// `out[.., i, j] = epilogue(sum over p of a[.., i, p] * b[.., p, j], extras[.., i, j])`, and `sums[i] = sum over p of a[i, p]`.
pub(super) fn gemm(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let compute = g.a.dtype.compute().max(g.b.dtype.compute());
    let (batch, [m, n]) = shape.dims().split_last_chunk().expect("matrices");
    let k = g.a.shape().dims()[g.a.rank() - 1];
    let over_batch = |t: &Tensor, matrix: [usize; 2]| read_as(t, &batch.iter().copied().chain(matrix).collect());
    let (a, b) = (over_batch(g.a, [*m, k])?, over_batch(g.b, [k, *n])?);
    let extras = g.extras.iter().map(|t| read_as(t, shape)).collect::<Result<Vec<_>>>()?;
    let params = Params::from_scalars(g.scalars);
    let mut results = vec![Vec::new(); outs.len()];
    for index in indices(shape.dims()) {
        let (batch, &[i, j]) = index.split_last_chunk().expect("matrices");
        let term = |p: usize| {
            let [a, b] = [(&a, [i, p]), (&b, [p, j])].map(|(t, element)| t[&[batch, &element].concat()[..]]);
            mul(converted(a, compute), converted(b, compute))
        };
        let product = (0..k).map(term).fold(converted(0.into(), compute), add);
        let inputs: Vec<Scalar> = [product].into_iter().chain(extras.iter().map(|t| t[&index[..]])).collect();
        for (result, epilogue) in results.iter_mut().zip(g.epilogue) {
            result.push(formula::value(epilogue, &inputs, params, 0, compute));
        }
    }
    outs.iter().zip(results).try_for_each(|(out, result)| write(out, result))?;
    if let Some(sums) = g.sums {
        let rows = read(g.a)?;
        write(sums, rows.rows().into_iter().map(|row| row.iter().copied().fold(0.into(), add)))?;
    }
    Ok(g.sums.is_some())
}

/// Computes each result from the elements that have the result's index in the kept dims, in row-major order.
pub(super) fn reduce(reduction: &Reduction) -> Result<()> {
    let Reduction { rule, x, mask, out, .. } = *reduction;
    let (compute, accumulator) = (x.dtype.compute(), rule.accumulator(x.dtype));
    let element = |value: Scalar| match &rule.element {
        Element::Identity => value,
        Element::NonZero => Scalar::Int(is_true(value).into()),
        Element::Formula(formula) => formula::value(formula, &[value], Params::default(), 0, compute),
    };
    let dims = |reduced: bool| -> Vec<usize> {
        x.shape().dims().iter().zip(mask).map(|(&n, &r)| if r == reduced { n } else { 1 }).collect()
    };
    let x = read(x)?;
    let results = indices(&dims(false)).map(|kept| {
        let of_result = indices(&dims(true)).map(|reduced| {
            let index: Vec<usize> = kept.iter().zip(reduced).map(|(k, r)| k + r).collect();
            converted(element(x[&index[..]]), accumulator)
        });
        let elements: Vec<Scalar> = of_result.collect();
        let all = elements.iter().copied();
        let result = match rule.combination {
            Combination::Add => all.fold(0.into(), add),
            Combination::Mul => all.fold(1.into(), mul),
            Combination::Max => all.reduce(max).expect("elements"),
            Combination::Min => all.reduce(min).expect("elements"),
            Combination::ArgMax => return first_index(&elements, all.reduce(max)),
            Combination::ArgMin => return first_index(&elements, all.reduce(min)),
        };
        let count = [Scalar::Float(reduction.number)];
        let params = Params::from_scalars(&count);
        rule.finish.as_ref().map_or(result, |finish| formula::value(finish, &[result], params, 0, accumulator))
    });
    write(out, results)
}

/// Returns the index of the first element that equals `chosen`.
fn first_index(elements: &[Scalar], chosen: Option<Scalar>) -> Scalar {
    let same = |x: &Scalar| chosen.is_some_and(|chosen| order(*x, chosen).is_eq());
    Scalar::Int(elements.iter().position(same).expect("one of them") as i64)
}

/// Computes element i of each line of the result from the elements `0..=i` of the input's line. Indices refer to the last of equal elements.
pub(super) fn scan(scan: Scan, x: &Tensor, d: usize, values: &Tensor, chosen: Option<&Tensor>) -> Result<()> {
    let mut results = read(x)?;
    let mut indices = results.clone();
    for (mut line, mut indices) in
        results.lanes_mut(ndarray::Axis(d)).into_iter().zip(indices.lanes_mut(ndarray::Axis(d)))
    {
        let elements: Vec<Scalar> = line.iter().copied().collect();
        for i in 0..elements.len() {
            let so_far = &elements[..=i];
            let all = so_far.iter().copied();
            line[i] = match scan {
                Scan::Sum => all.reduce(add),
                Scan::Prod => all.reduce(mul),
                Scan::Max => all.reduce(max),
                Scan::Min => all.reduce(min),
                Scan::LogSumExp => Some(log_sum_exp(all.map(Scalar::to_f64)).into()),
            }
            .expect("one element at least");
            let last = so_far.iter().rposition(|&x| order(x, line[i]).is_eq()).map_or(0, |last| last as i64);
            indices[i] = Scalar::Int(last);
        }
    }
    chosen.map_or(Ok(()), |chosen| write(chosen, indices))?;
    write(values, results)
}

/// Returns `log(sum(exp(x)))`. If the largest element is infinite, returns that element.
pub(super) fn log_sum_exp(x: impl Iterator<Item = f64> + Clone) -> f64 {
    let top = max_of(x.clone());
    if top.is_infinite() { top } else { top + x.map(|x| (x - top).exp()).sum::<f64>().ln() }
}

/// Returns the largest element: NaN if any element is NaN, and -inf for an empty iterator.
pub(super) fn max_of(x: impl Iterator<Item = f64>) -> f64 {
    x.fold(f64::NEG_INFINITY, |a, b| max(a.into(), b.into()).to_f64())
}
