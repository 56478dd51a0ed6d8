//! Launches of formulas: their results, and the order of dims in which backends see operands.

use std::slice;

use smallvec::SmallVec;

use crate::backend::problem::map::{Formulas, Params};
use crate::backend::{self, Backend};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::storage::is_uninit_scope;
use crate::tensor::{Layout, result_layout};
use crate::{DType, Device, MemoryFormat, Result, Shape, Tensor};

/// Calls `f` with the program of `exprs` and all that it reads, their numbers among its scalars.
#[inline(always)]
fn with_program<R>(exprs: &[Expr], params: Params, f: impl FnOnce(&Program, Params) -> R) -> R {
    let program = Program::of(exprs);
    program.with_arguments(exprs, params.scalars, |scalars| f(&program, Params { scalars, ..params }))
}

/// Computes `exprs` over `inputs`, broadcast together, into new tensors of dtypes `out`. One launch.
pub(crate) fn apply(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    exprs: &[Expr],
    out: &[DType],
) -> Result<SmallVec<[Tensor; 2]>> {
    let device = same_device(op, inputs)?;
    let shape = broadcast_shape(op, inputs)?;
    let layout = result_layout(shape, inputs.iter().map(|t| &t.layout));
    let made = out.iter().map(|&t| result_of(inputs, layout.clone(), t, device));
    let made = made.collect::<Result<SmallVec<[Tensor; 2]>>>()?;
    let outputs: SmallVec<[&Tensor; 2]> = made.iter().collect();
    with_program(exprs, params, |program, params| {
        backend::fill(&made, |b| run(b, &Formulas { op, inputs, params, program, outputs: &outputs }))
    })?;
    drop(outputs);
    Ok(made)
}

/// [`apply`] for one result.
pub(crate) fn apply_one(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    expr: &Expr,
    dtype: DType,
) -> Result<Tensor> {
    with_program(slice::from_ref(expr), params, |program, params| {
        if params.seeds.is_empty()
            && !is_uninit_scope()
            && let Some(fill) = backend::primitive(op, inputs, params.scalars, program, dtype)
        {
            let made = Tensor::empty_like_shape(inputs[0].shape(), dtype, inputs[0].device());
            if let Ok(out) = &made {
                fill(out)?;
            }
            return made;
        }
        let made = empty_result(op, inputs, dtype, same_device(op, inputs)?);
        if let Ok(out) = &made {
            backend::fill([out], |b| run(b, &Formulas { op, inputs, params, program, outputs: &[out] }))?;
        }
        made
    })
}

/// `made`, a new tensor that operands are broadcast to, with what `expr` makes of them. It is returned without a move: moving a
/// tensor costs as much as comparing several shapes.
#[inline]
pub(crate) fn filled(
    made: Result<Tensor>,
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    expr: &Expr,
) -> Result<Tensor> {
    if let Ok(out) = &made {
        with_program(slice::from_ref(expr), params, |program, params| {
            backend::fill([out], |b| run(b, &Formulas { op, inputs, params, program, outputs: &[out] }))
        })?;
    }
    made
}

/// Room for the result of operands that are broadcast together, in their memory format.
pub(super) fn empty_result(op: &'static str, inputs: &[&Tensor], dtype: DType, device: Device) -> Result<Tensor> {
    let layout = result_layout(broadcast_shape(op, inputs)?, inputs.iter().map(|t| &t.layout));
    result_of(inputs, layout, dtype, device)
}

/// Room for a result of `inputs`; none within `nn::uninit` where an input has no memory.
pub(crate) fn result_of(inputs: &[&Tensor], layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
    match is_uninit_scope() && inputs.iter().any(|t| t.is_uninit()) {
        true => Tensor::factory(layout, dtype, device),
        false => Tensor::empty_like_layout(layout, dtype, device),
    }
}

/// The launch of formulas. Where results have their channels last, all operands are viewed so that results are row-major, which
/// backends have the fastest kernels for. Random numbers count positions in the shape's own order.
fn run(backend: &dyn Backend, formulas: &Formulas) -> Result<()> {
    let first = formulas.outputs[0];
    if is_uninit_scope() && formulas.outputs.iter().all(|t| t.is_uninit()) {
        return Ok(());
    }
    match MemoryFormat::channels_last(first.rank()) {
        Some(_)
            if formulas.params.seeds.is_empty()
                && first.memory_format() != MemoryFormat::Contiguous
                && formulas.inputs.iter().all(|t| broadcasts_to(t.shape(), first.shape())) =>
        {
            let view = |t: &&Tensor| t.with_layout(t.layout.with_channels_last(first.rank()));
            let (inputs, outputs): (SmallVec<[Tensor; 4]>, SmallVec<[Tensor; 2]>) =
                (formulas.inputs.iter().map(view).collect(), formulas.outputs.iter().map(view).collect());
            let (inputs, outputs): (SmallVec<[&Tensor; 4]>, SmallVec<[&Tensor; 2]>) =
                (inputs.iter().collect(), outputs.iter().collect());
            backend.map(&Formulas { inputs: &inputs, outputs: &outputs, ..*formulas })
        }
        _ => backend.map(formulas),
    }
}

/// Computes `exprs` over `inputs`, broadcast to the outputs' shape, into `outputs`. One launch, more where an input
/// overlaps an output without being the same view of it. The caller has checked autograd.
pub(crate) fn apply_into(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    exprs: &[Expr],
    outputs: &[&Tensor],
) -> Result<()> {
    with_program(exprs, params, |program, params| run_into(op, inputs, params, program, outputs))
}

/// [`apply_into`] of a program and all of its arguments.
#[inline]
pub(super) fn run_into(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    program: &Program,
    outputs: &[&Tensor],
) -> Result<()> {
    backend::launch(outputs.iter().copied(), |b| run(b, &Formulas { op, inputs, params, program, outputs }))
}

/// Whether a tensor of this shape is broadcast to the other: the backend refuses it otherwise.
fn broadcasts_to(shape: &Shape, to: &Shape) -> bool {
    let (dims, to) = (shape.dims().iter().rev(), to.dims().iter().rev());
    shape.rank() <= to.len() && dims.zip(to).all(|(&d, &n)| d == 1 || d == n)
}

/// The shape that operands are broadcast to together.
pub(crate) fn broadcast_shape(op: &'static str, inputs: &[&Tensor]) -> Result<Shape> {
    let Some((first, others)) = inputs.split_first() else { return Ok(Shape::default()) };
    let mut shape = first.shape().clone();
    // Most have the shape of the first. Comparing size by size is faster than `ends_with`, which compares memory.
    let like_first = |t: &Tensor| t.shape().dims().iter().rev().eq(first.shape().dims().iter().rev().take(t.rank()));
    for t in others.iter().filter(|t| !like_first(t)) {
        shape = shape.broadcast(op, t.shape())?;
    }
    Ok(shape)
}
