//! Losses: a formula for each element, followed by a reduction.
//!
//! `pointwise` has losses of predictions and targets with the same shape, `labels` losses for classification, and `distance` losses that
//! compare vectors.

mod distance;
mod labels;
mod pointwise;

use crate::ops::dispatch::prelude::*;
use crate::{CrossEntropy, LossReduction};

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
    match inputs.iter().find(|t| t.shape() != inputs[0].shape()) {
        None => Ok(()),
        Some(other) => Err(shape_mismatch(op, inputs[0], other, "prediction and target have one shape")),
    }
}

/// Returns an error unless a hyperparameter is above 0 or, if `zero` is set, at least 0.
fn check_positive(op: &'static str, name: &str, value: f64, zero: bool) -> Result<()> {
    if value > 0.0 || (zero && value == 0.0) {
        return Ok(());
    }
    let least = if zero { "at least" } else { "above" };
    Err(Error::invalid(op, format!("{name} is {value}, it must be {least} 0")))
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

operations! {
    mse_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable
        => |a| a.tensor(0)?.mse_loss_with(a.tensor(1)?, read_reduction(a, 0)?);
    l1_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable
        => |a| a.tensor(0)?.l1_loss_with(a.tensor(1)?, read_reduction(a, 0)?);
    smooth_l1_loss(input: x, target: x, beta: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    huber_loss(input: x, target: x, delta: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    binary_cross_entropy(input: x, target: x, weight: x?, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    binary_cross_entropy_with_logits(input: x, target: x, weight: x?, pos_weight: x?, reduction: text @read_reduction = "mean")
        functional: Loss, Floats -> Same, differentiable;
    kl_div(input: x, target: x, reduction: text @read_reduction = "mean", log_target: bool = false) functional:
        Loss, Floats -> Same, differentiable;
    poisson_nll_loss(input: x, target: x, log_input: bool = true, full: bool = false, eps: float = 1e-8,
        reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable;
    gaussian_nll_loss(input: x, target: x, var: x, full: bool = false, eps: float = 1e-6, reduction: text @read_reduction = "mean")
        functional: Loss, Floats -> Same, differentiable;
    soft_margin_loss(input: x, target: x, reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable;
    hinge_embedding_loss(input: x, target: x, margin: float = 1, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    margin_ranking_loss(input1: x, input2: x, target: x, margin: float = 0, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    cosine_embedding_loss(input1: x, input2: x, target: x, margin: float = 0, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable;
    triplet_margin_loss(anchor: x, positive: x, negative: x, margin: float = 1, p: float = 2, swap: bool = false,
        reduction: text @read_reduction = "mean") functional: Loss, Floats -> Same, differentiable;
    cross_entropy(input: x, target: x, weight: x?,
        reduction: text = "mean", ignore_index: int = -100, label_smoothing: float = 0) functional:
        Loss, Floats -> Same, differentiable => |a| {
        let (reduction, ignore_index, label_smoothing) = (read_reduction(a, 0)?, a.int(1)? as i64, a.float(2)?);
        let options = CrossEntropy { reduction, ignore_index, label_smoothing, weight: a.optional_tensor(2) };
        a.tensor(0)?.cross_entropy_with(a.tensor(1)?, options)
    };
    nll_loss(input: x, target: x, weight: x?, reduction: text = "mean", ignore_index: int = -100) functional:
        Loss, Floats -> Same, differentiable => |a| {
        let (reduction, ignore_index) = (read_reduction(a, 0)?, a.int(1)? as i64);
        a.tensor(0)?
            .nll_loss(a.tensor(1)?, CrossEntropy { reduction, ignore_index, weight: a.optional_tensor(2), ..CrossEntropy::default() })
    };
}
