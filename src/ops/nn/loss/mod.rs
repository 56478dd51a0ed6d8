//! Losses: a formula for each element, followed by a reduction.
//!
//! `pointwise` has losses of predictions and targets with the same shape, `labels` losses for classification, and `distance` losses that
//! compare vectors.

pub(crate) mod distance;
pub(crate) mod labels;
pub(crate) mod pointwise;

use crate::LossReduction;
use crate::ops::dispatch::prelude::*;

/// Reduces losses to a mean or a sum, or returns them unreduced.
fn reduce_losses(losses: Tensor, reduction: LossReduction) -> Result<Tensor> {
    match reduction {
        LossReduction::Mean => losses.mean((), false),
        LossReduction::Sum => losses.sum((), false),
        LossReduction::BatchMean => divide_by_batch(losses.sum((), false)?, losses.shape().dims()),
        LossReduction::None => Ok(losses),
    }
}

/// Divides a sum of losses by the batch size, which is the first of `dims`, or 1 if there are no dims.
fn divide_by_batch(sum: Tensor, dims: &[usize]) -> Result<Tensor> {
    sum.div_scalar(dims.first().map_or(1.0, |&n| n as f64))
}

/// Evaluates a formula over broadcast tensors of one float dtype, and reduces the losses. Takes one launch, and at most two more for the
/// reduction.
fn losses(
    op: &'static str,
    inputs: &[&Tensor],
    reduction: LossReduction,
    f: impl FnOnce(&[Expr]) -> Expr,
) -> Result<Tensor> {
    inputs[0].dtype().check_float(op)?;
    cast_first!(autocast_to_f32(inputs)?, |x| losses(op, &x.iter().collect::<Vec<_>>(), reduction, f));
    let each = || reduce_losses(Tensor::map(inputs, f)?, reduction);
    each().with_op(op)
}

/// Evaluates a formula like [`losses`], for tensors that must have one shape.
fn losses_of_equal_shapes(
    op: &'static str,
    inputs: &[&Tensor],
    reduction: LossReduction,
    f: impl FnOnce(&[Expr]) -> Expr,
) -> Result<Tensor> {
    same_shape(op, inputs)?;
    losses(op, inputs, reduction, f)
}

fn same_shape(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    for t in inputs {
        mismatch!(op if t.shape() != inputs[0].shape(), inputs[0], t, "prediction and target have one shape");
    }
    Ok(())
}

/// Returns an error unless a hyperparameter is above 0 or, if `zero` is set, at least 0.
fn check_positive(op: &'static str, name: &str, value: f64, zero: bool) -> Result<()> {
    let least = if zero { "at least" } else { "above" };
    invalid!(op if !(value > 0.0 || (zero && value == 0.0)), "{name} is {value}, it must be {least} 0");
    Ok(())
}

/// The names that PyTorch gives the reductions.
const REDUCTION_NAMES: [(&str, LossReduction); 4] = [
    ("mean", LossReduction::Mean),
    ("sum", LossReduction::Sum),
    ("batchmean", LossReduction::BatchMean),
    ("none", LossReduction::None),
];

impl From<LossReduction> for Argument {
    fn from(reduction: LossReduction) -> Argument {
        REDUCTION_NAMES.iter().find(|(_, of)| *of == reduction).map(|(name, _)| *name).into()
    }
}

fn read_reduction(a: &Args, i: usize) -> Result<LossReduction> {
    let name = a.text(i)?;
    match REDUCTION_NAMES.iter().find(|(of, _)| *of == name) {
        Some((_, reduction)) => Ok(*reduction),
        None => a.argument_error(i, "mean, sum, batchmean or none"),
    }
}
