//! Losses: a formula of an element each, and what becomes of all of them.
//!
//! `pointwise` has the losses of a prediction and a target of one shape, `labels` those of classes, `distance` those that
//! compare vectors.

mod distance;
mod labels;
mod pointwise;

use crate::ops::dispatch::arguments::{Args, Argument};
use crate::ops::dispatch::autocast::widened;
use crate::ops::dispatch::operation::{Arity, Dtypes, Gives, Kind, Operation};
use crate::{CrossEntropy, Error, Expr, LossReduction, Result, Tensor};

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

impl From<LossReduction> for Argument {
    fn from(reduction: LossReduction) -> Argument {
        match reduction {
            LossReduction::Mean => "mean".into(),
            LossReduction::Sum => "sum".into(),
            LossReduction::None => "none".into(),
        }
    }
}

/// The mean where it is left out.
fn reduction(a: &Args, i: usize) -> Result<LossReduction> {
    match if a.given(i) { a.text(i)? } else { "mean" } {
        "mean" => Ok(LossReduction::Mean),
        "sum" => Ok(LossReduction::Sum),
        "none" => Ok(LossReduction::None),
        other => Err(Error::invalid("call", format!("the reduction is mean, sum or none, not {other}"))),
    }
}

const fn loss(name: &'static str, torch: &'static str, most: Arity, call: fn(&Args) -> Result<Tensor>) -> Operation {
    Operation::new(name, torch, Kind::Loss, Dtypes::Floats, Gives::Same, most, call).differentiable()
}

/// Tensor i where it was given.
fn maybe<'a>(a: &Args<'a>, i: usize) -> Option<&'a Tensor> {
    a.xs().get(i).copied()
}

pub(crate) static OPERATIONS: &[Operation] = &[
    loss("mse_loss", "nn.functional.mse_loss", (2, 1), |a| a.x(0)?.mse_loss_with(a.x(1)?, reduction(a, 0)?)),
    loss("l1_loss", "nn.functional.l1_loss", (2, 1), |a| a.x(0)?.l1_loss_with(a.x(1)?, reduction(a, 0)?)),
    loss("smooth_l1_loss", "nn.functional.smooth_l1_loss", (2, 2), |a| {
        a.x(0)?.smooth_l1_loss(a.x(1)?, a.float(0)?, reduction(a, 1)?)
    }),
    loss("huber_loss", "nn.functional.huber_loss", (2, 2), |a| {
        a.x(0)?.huber_loss(a.x(1)?, a.float(0)?, reduction(a, 1)?)
    }),
    loss("binary_cross_entropy", "nn.functional.binary_cross_entropy", (3, 1), |a| {
        a.x(0)?.binary_cross_entropy(a.x(1)?, maybe(a, 2), reduction(a, 0)?)
    }),
    loss("binary_cross_entropy_with_logits", "nn.functional.binary_cross_entropy_with_logits", (4, 2), |a| {
        // The switch says that a single third tensor is for positive targets; of two it is always the second.
        let (weight, positive) = match (a.bool(1)?, maybe(a, 2), maybe(a, 3)) {
            (true, positive, None) => (None, positive),
            (_, weight, positive) => (weight, positive),
        };
        a.x(0)?.binary_cross_entropy_with_logits(a.x(1)?, weight, positive, reduction(a, 0)?)
    }),
    loss("kl_div", "nn.functional.kl_div", (2, 2), |a| a.x(0)?.kl_div(a.x(1)?, reduction(a, 0)?, a.bool(1)?)),
    loss("poisson_nll_loss", "nn.functional.poisson_nll_loss", (2, 4), |a| {
        a.x(0)?.poisson_nll_loss(a.x(1)?, a.bool(0)?, a.bool(1)?, a.float(2)?, reduction(a, 3)?)
    }),
    loss("gaussian_nll_loss", "nn.functional.gaussian_nll_loss", (3, 3), |a| {
        a.x(0)?.gaussian_nll_loss(a.x(1)?, a.x(2)?, a.bool(0)?, a.float(1)?, reduction(a, 2)?)
    }),
    loss("soft_margin_loss", "nn.functional.soft_margin_loss", (2, 1), |a| {
        a.x(0)?.soft_margin_loss(a.x(1)?, reduction(a, 0)?)
    }),
    loss("hinge_embedding_loss", "nn.functional.hinge_embedding_loss", (2, 2), |a| {
        a.x(0)?.hinge_embedding_loss(a.x(1)?, a.float(0)?, reduction(a, 1)?)
    }),
    loss("margin_ranking_loss", "nn.functional.margin_ranking_loss", (3, 2), |a| {
        a.x(0)?.margin_ranking_loss(a.x(1)?, a.x(2)?, a.float(0)?, reduction(a, 1)?)
    }),
    loss("cosine_embedding_loss", "nn.functional.cosine_embedding_loss", (3, 2), |a| {
        a.x(0)?.cosine_embedding_loss(a.x(1)?, a.x(2)?, a.float(0)?, reduction(a, 1)?)
    }),
    loss("triplet_margin_loss", "nn.functional.triplet_margin_loss", (3, 4), |a| {
        a.x(0)?.triplet_margin_loss(a.x(1)?, a.x(2)?, a.float(0)?, a.float(1)?, a.bool(2)?, reduction(a, 3)?)
    }),
    loss("cross_entropy", "nn.functional.cross_entropy", (3, 3), |a| {
        let ignore_index = a.int(1)? as i64;
        let (reduction, label_smoothing) = (reduction(a, 0)?, a.float(2)?);
        let options = CrossEntropy { reduction, ignore_index, label_smoothing, weight: maybe(a, 2) };
        a.x(0)?.cross_entropy_with(a.x(1)?, options)
    }),
    loss("nll_loss", "nn.functional.nll_loss", (3, 2), |a| {
        let (reduction, ignore_index) = (reduction(a, 0)?, a.int(1)? as i64);
        a.x(0)?
            .nll_loss(a.x(1)?, CrossEntropy { reduction, ignore_index, weight: maybe(a, 2), ..CrossEntropy::default() })
    }),
];
