//! Losses: a formula of an element each, and what becomes of all of them.
//!
//! `pointwise` has the losses of a prediction and a target of one shape, `labels` those of classes, `distance` those that
//! compare vectors.

mod distance;
mod labels;
mod pointwise;

use crate::ops::autocast::widened;
use crate::{Error, Expr, LossReduction, Result, Tensor};

/// The losses as a mean, a sum, or as they are.
fn reduced(losses: Tensor, reduction: LossReduction) -> Result<Tensor> {
    match reduction {
        LossReduction::Mean => losses.mean((), false),
        LossReduction::Sum => losses.sum((), false),
        LossReduction::None => Ok(losses),
    }
}

/// The formula over tensors of one float dtype, broadcast together: one launch, and at most two more for the reduction.
fn losses(
    op: &'static str,
    inputs: &[&Tensor],
    reduction: LossReduction,
    f: impl FnOnce(&[Expr]) -> Expr,
) -> Result<Tensor> {
    inputs[0].dtype().check_float(op)?;
    if let Some(wide) = widened(inputs)? {
        return losses(op, &wide.iter().collect::<Vec<_>>(), reduction, f);
    }
    let each = || reduced(Tensor::map(inputs, f)?, reduction);
    each().map_err(|e| e.of(op))
}

/// [`losses`] of tensors that have one shape.
fn alike(
    op: &'static str,
    inputs: &[&Tensor],
    reduction: LossReduction,
    f: impl FnOnce(&[Expr]) -> Expr,
) -> Result<Tensor> {
    same_shape(op, inputs)?;
    losses(op, inputs, reduction, f)
}

fn same_shape(op: &'static str, inputs: &[&Tensor]) -> Result<()> {
    match inputs.iter().find(|t| t.shape() != inputs[0].shape()) {
        None => Ok(()),
        Some(other) => {
            let hint = "prediction and target have one shape";
            Err(Error::ShapeMismatch { op, lhs: inputs[0].shape().clone(), rhs: other.shape().clone(), hint })
        }
    }
}

/// A hyperparameter that has to be above 0, or at least 0.
fn check_positive(op: &'static str, name: &str, value: f64, zero: bool) -> Result<()> {
    if value > 0.0 || (zero && value == 0.0) {
        return Ok(());
    }
    let least = if zero { "at least" } else { "above" };
    Err(Error::invalid(op, format!("{name} is {value}, it must be {least} 0")))
}
