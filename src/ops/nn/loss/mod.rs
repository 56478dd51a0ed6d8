//! Losses: a formula for each element, and a reduction.
//!
//! `pointwise` has the losses of a prediction and a target of one shape, `labels` those of classes, `distance` those that compare
//! vectors.

mod distance;
mod labels;
mod pointwise;

use crate::ops::dispatch::arguments::{Args, Argument};
use crate::ops::dispatch::prelude::*;
use crate::{CrossEntropy, Expr, LossReduction, Result, Tensor};

/// The losses as a mean, a sum, or as they are.
fn reduced(losses: Tensor, reduction: LossReduction) -> Result<Tensor> {
    match reduction {
        LossReduction::Mean => losses.mean((), false),
        LossReduction::Sum => losses.sum((), false),
        LossReduction::BatchMean => over_batch(losses.sum((), false)?, losses.shape().dims()),
        LossReduction::None => Ok(losses),
    }
}

/// A sum of losses divided by the first of these dims, which is the batch; there may be none.
fn over_batch(sum: Tensor, dims: &[usize]) -> Result<Tensor> {
    sum.div_scalar(dims.first().map_or(1.0, |&n| n as f64))
}

/// The formula over tensors of one float dtype, broadcast together: one launch, and at most two more for the reduction.
fn losses(
    op: &'static str,
    inputs: &[&Tensor],
    reduction: LossReduction,
    f: impl FnOnce(&[Expr]) -> Expr,
) -> Result<Tensor> {
    inputs[0].dtype().check_float(op)?;
    cast_first!(widened(inputs)?, |x| losses(op, &x.iter().collect::<Vec<_>>(), reduction, f));
    let each = || reduced(Tensor::map(inputs, f)?, reduction);
    each().named(op)
}

/// [`losses`] of tensors that have one shape.
fn losses_of_one_shape(
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
        Some(other) => Err(shape_mismatch(op, inputs[0], other, "prediction and target have one shape")),
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

impl From<LossReduction> for Argument {
    fn from(reduction: LossReduction) -> Argument {
        match reduction {
            LossReduction::Mean => "mean".into(),
            LossReduction::Sum => "sum".into(),
            LossReduction::BatchMean => "batchmean".into(),
            LossReduction::None => "none".into(),
        }
    }
}

/// The mean where it is left out.
fn reduction(a: &Args, i: usize) -> Result<LossReduction> {
    match if a.given(i) { a.text(i)? } else { "mean" } {
        "mean" => Ok(LossReduction::Mean),
        "sum" => Ok(LossReduction::Sum),
        "batchmean" => Ok(LossReduction::BatchMean),
        "none" => Ok(LossReduction::None),
        other => Err(Error::invalid("call", format!("the reduction is mean, sum, batchmean or none, not {other}"))),
    }
}

operations! {
    mse_loss(2, 1) functional: Loss, Floats -> Same, differentiable
        => |a| a.x(0)?.mse_loss_with(a.x(1)?, reduction(a, 0)?);
    l1_loss(2, 1) functional: Loss, Floats -> Same, differentiable
        => |a| a.x(0)?.l1_loss_with(a.x(1)?, reduction(a, 0)?);
    smooth_l1_loss(x, x, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    huber_loss(x, x, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    binary_cross_entropy(x, x, x?, @reduction) functional: Loss, Floats -> Same, differentiable;
    binary_cross_entropy_with_logits(4, 2) functional: Loss, Floats -> Same, differentiable => |a| {
        // With the flag, a single third tensor is `pos_weight`; otherwise `pos_weight` is the fourth.
        let (weight, positive) = match (a.bool(1)?, a.optional(2), a.optional(3)) {
            (true, positive, None) => (None, positive),
            (_, weight, positive) => (weight, positive),
        };
        a.x(0)?.binary_cross_entropy_with_logits(a.x(1)?, weight, positive, reduction(a, 0)?)
    };
    kl_div(x, x, @reduction, bool) functional: Loss, Floats -> Same, differentiable;
    poisson_nll_loss(x, x, bool, bool, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    gaussian_nll_loss(x, x, x, bool, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    soft_margin_loss(x, x, @reduction) functional: Loss, Floats -> Same, differentiable;
    hinge_embedding_loss(x, x, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    margin_ranking_loss(x, x, x, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    cosine_embedding_loss(x, x, x, float, @reduction) functional: Loss, Floats -> Same, differentiable;
    triplet_margin_loss(x, x, x, float, float, bool, @reduction) functional: Loss, Floats -> Same, differentiable;
    cross_entropy(3, 3) functional: Loss, Floats -> Same, differentiable => |a| {
        let ignore_index = a.int(1)? as i64;
        let (reduction, label_smoothing) = (reduction(a, 0)?, a.float(2)?);
        let options = CrossEntropy { reduction, ignore_index, label_smoothing, weight: a.optional(2) };
        a.x(0)?.cross_entropy_with(a.x(1)?, options)
    };
    nll_loss(3, 2) functional: Loss, Floats -> Same, differentiable => |a| {
        let (reduction, ignore_index) = (reduction(a, 0)?, a.int(1)? as i64);
        a.x(0)?
            .nll_loss(a.x(1)?, CrossEntropy { reduction, ignore_index, weight: a.optional(2), ..CrossEntropy::default() })
    };
}
