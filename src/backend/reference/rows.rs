//! Operations on whole rows: softmax, cross-entropy and normalisation.

use ndarray::{Array1, ArrayD, Axis};

use super::reductions::{log_sum_exp, max_of};
use super::values::{new_tensor, read, read_floats, write};
use crate::backend::problem::cross_entropy::{LabelEntropy, LossReduction};
use crate::backend::problem::norm::{Channels, Normalisation};
use crate::backend::problem::softmax::{MaskKind, RowOp, Softmax};
use crate::{Device, Error, Result, Tensor};

pub(super) fn softmax(s: &Softmax) -> Result<()> {
    let (x, z) = (read_floats(s.x)?, read_floats(s.z)?);
    let rows = x.lanes(Axis(s.d)).into_iter().zip(z.lanes(Axis(s.d)));
    let mut results = read_floats(s.out)?;
    for ((r, (x, z)), mut y) in rows.enumerate().zip(results.lanes_mut(Axis(s.d))) {
        let (x, z) = (x.to_owned(), z.to_owned());
        let sum = || log_sum_exp(x.iter().copied());
        y.assign(&match s.kind {
            RowOp::Softmax => plain_softmax(&x),
            RowOp::MaskedSoftmax => masked_softmax(s, r, x, z),
            RowOp::LogSoftmax => {
                let top = max_of(x.iter().copied());
                &x - top - x.mapv(|x| (x - top).exp()).sum().ln()
            }
            RowOp::LogSumExp => Array1::from_elem(1, sum()),
            RowOp::SoftmaxGrad => &x * (&z - (&x * &z).sum()),
            RowOp::LogSoftmaxGrad => &z - x.mapv(f64::exp) * z.sum(),
        });
    }
    write(s.out, results)
}

fn plain_softmax(x: &Array1<f64>) -> Array1<f64> {
    let top = max_of(x.iter().copied());
    let powers = x.mapv(|x| (x - top).exp());
    &powers / powers.sum()
}

/// Computes softmax over the visible elements of row r. Hidden elements give 0; if no element is visible, the whole row is 0.
fn masked_softmax(s: &Softmax, r: usize, x: Array1<f64>, z: Array1<f64>) -> Array1<f64> {
    let visible = s.mask.visible_len(r, x.len());
    let score = |i: usize| match s.mask.kind {
        _ if i >= visible => f64::NEG_INFINITY,
        MaskKind::None => x[i],
        MaskKind::Keep => {
            if z[i] != 0.0 {
                x[i]
            } else {
                f64::NEG_INFINITY
            }
        }
        MaskKind::Add => x[i] + z[i],
    };
    let scores = Array1::from_shape_fn(x.len(), score);
    let nothing = scores.iter().all(|&x| x == f64::NEG_INFINITY);
    if nothing { Array1::zeros(x.len()) } else { plain_softmax(&scores) }
}

/// Computes the loss of each row, `log(sum(exp(x))) - x[label]`. The gradient of a row is its softmax, minus 1 at the label.
pub(super) fn cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> {
    let LabelEntropy { logits, labels, options, dtype, grad, .. } = *entropy;
    let (x, labels) = (read_floats(logits)?, read(labels)?.mapv(|label| label.to_i64()));
    let (mut losses, mut gradients) = (ArrayD::zeros(labels.shape()), ArrayD::zeros(x.shape()));
    let counts = |label: i64| label != options.ignore_index;
    let count = labels.iter().filter(|label| counts(**label)).count() as f64;
    let divisor = if options.reduction == LossReduction::Mean { count } else { 1.0 };
    for (r, &label) in labels.iter().enumerate().filter(|(_, label)| counts(**label)) {
        let (row, size) = (x.index_axis(Axis(0), r).to_owned(), x.shape()[1]);
        let error = Error::IndexOutOfRange { op: "cross_entropy", index: label, size };
        let label = usize::try_from(label).ok().filter(|&label| label < size).ok_or(error)?;
        losses[r] = log_sum_exp(row.iter().copied()) - row[label];
        let row: Array1<f64> = row.into_dimensionality().expect("a row");
        let mut gradient = plain_softmax(&row);
        gradient[label] -= 1.0;
        gradients.index_axis_mut(Axis(0), r).assign(&(gradient / divisor));
    }
    grad.map_or(Ok(()), |grad| write(grad, gradients))?;
    if options.reduction == LossReduction::None {
        return new_tensor(&losses, dtype);
    }
    let out = Tensor::empty_with_shape((), dtype, Device::Cpu)?;
    write(&out, [losses.sum() / divisor])?;
    Ok(out)
}

/// Copies one row, which consists of the last two dims.
fn row(t: &ArrayD<f64>, r: [usize; 2]) -> Array1<f64> {
    t.index_axis(Axis(0), r[0]).index_axis(Axis(0), r[1]).iter().copied().collect()
}

fn mean(x: &Array1<f64>) -> f64 {
    x.sum() / x.len() as f64
}

/// The forward pass is `y = (x - mean) / sqrt(var + eps) * weight + bias`; in RMS norms the mean is 0. In the backward pass, x is the gradient
/// of the result. That pass computes the gradient of z, and the sums of x and of x times the normalised z over each row and over each column.
pub(super) fn norm(rows: &Normalisation) -> Result<()> {
    let x = read_floats(rows.x)?;
    let other = |t: Option<&Tensor>, otherwise: f64| match t {
        Some(t) => read_floats(t),
        None => Ok(ArrayD::from_elem(x.shape(), otherwise)),
    };
    let (z, weight, bias) = (other(rows.z, 0.0)?, other(rows.weight, 1.0)?, other(rows.bias, 0.0)?);
    let known: Vec<f64> = read_floats(rows.statistics)?.into_iter().collect();
    let (count, n) = (rows.count(), rows.len());
    let (mut statistics, mut sums, mut columns) = (vec![0.0; 3 * count], vec![0.0; 2 * count], vec![0.0; 2 * n]);
    let mut results = Vec::new();
    for r in 0..count {
        let index = [r / x.shape()[1], r % x.shape()[1]];
        let [x, z, weight, bias] = [&x, &z, &weight, &bias].map(|t| row(t, index));
        if rows.z.is_none() {
            let mean_of_row = if rows.rms { 0.0 } else { mean(&x) };
            let centred = &x - mean_of_row;
            let variance = mean(&(&centred * &centred));
            results.extend(centred / (variance + rows.eps).sqrt() * weight + bias);
            statistics[r] = mean_of_row;
            statistics[count + r] = (variance + rows.eps).sqrt().recip();
            statistics[2 * count + r] = variance;
            continue;
        }
        let root = known[count + r].recip();
        let normal = (z - known[r]) / root;
        let product = &x * &normal;
        (sums[r], sums[count + r]) = (x.sum(), product.sum());
        columns.iter_mut().zip(x.iter().chain(&product)).for_each(|(sum, x)| *sum += x);
        let weighted = x * weight;
        let less = if rows.rms { 0.0 } else { mean(&weighted) };
        let share = mean(&(&weighted * &normal));
        results.extend((weighted - less - normal * share) / root);
    }
    write(rows.y, results)?;
    match rows.z {
        None => write(rows.statistics, statistics)?,
        Some(_) => rows.sums.map_or(Ok(()), |t| write(t, sums))?,
    }
    // The reference accumulates the columns in a single part.
    rows.columns.map_or(Ok(()), |t| write(t, columns))
}

/// Like the forward pass of [`norm`], for `[N, C, ..]` with given statistics of each channel.
pub(super) fn normalise_channels(x: &Tensor, numbers: Channels, eps: f64) -> Result<Tensor> {
    let mut values = read_floats(x)?;
    let [mean, variance, weight, bias] = numbers.map(|t| t.map(read_floats).transpose());
    let (mean, variance, weight, bias) = (mean?, variance?, weight?, bias?);
    for (index, value) in values.indexed_iter_mut() {
        let of = |t: &Option<ArrayD<f64>>, otherwise: f64| t.as_ref().map_or(otherwise, |t| t[index[1]]);
        let normal = (*value - of(&mean, 0.0)) / (of(&variance, 1.0) + eps).sqrt();
        *value = normal * of(&weight, 1.0) + of(&bias, 0.0);
    }
    new_tensor(&values, x.dtype)
}

/// Writes the sum of squared deviations of each row divided by `freedom`, or with `root` its square root.
pub(super) fn variance(rows: &Tensor, out: &Tensor, freedom: f64, root: bool) -> Result<()> {
    let x = read_floats(rows)?;
    let [first, second, ..] = *x.shape() else { unreachable!("four dims") };
    let variances = (0..first * second).map(|r| {
        let row = row(&x, [r / second, r % second]);
        let centred = &row - mean(&row);
        let variance = (&centred * &centred).sum() / freedom;
        if root { variance.sqrt() } else { variance }
    });
    write(out, variances.collect::<Vec<f64>>())
}
