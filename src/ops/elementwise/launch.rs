//! Launches formulas: allocates their results, and reorders dims for the backends.

use std::slice;

use crate::MemoryFormat;
use crate::backend::problem::map::Formulas;
use crate::backend::{self, Recorded};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::storage::is_uninit_scope;
use crate::tensor::result_layout;

/// Calls `f` with the program of `exprs` and its parameters. The constants in `exprs` become arguments, which are appended to the
/// scalars.
#[inline(always)]
fn with_program<R>(exprs: &[Expr], params: Params, f: impl FnOnce(&Program, Params) -> R) -> R {
    let program = Program::shared(exprs);
    program.with_arguments(exprs, params.scalars, |scalars| f(&program, Params { scalars, ..params }))
}

/// Computes `exprs` over broadcast `inputs` into new tensors of the dtypes `out`, in one launch.
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
    let made = out.iter().map(|&t| allocate_result(inputs, layout.clone(), t, device));
    let made = made.collect::<Result<SmallVec<[Tensor; 2]>>>()?;
    let outputs: SmallVec<[&Tensor; 2]> = made.iter().collect();
    with_program(exprs, params, |program, params| {
        backend::fill(&made, |b| launch_formulas(b, &Formulas { op, inputs, params, program, outputs: &outputs }))
    })?;
    drop(outputs);
    Ok(made)
}

/// Computes a formula like [`apply`], for a single result.
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
            && let Some(fill) = backend::primitive_fast_path(op, inputs, params.scalars, program, dtype)
        {
            let made = Tensor::empty_with_shape(inputs[0].shape(), dtype, inputs[0].device());
            if let Ok(out) = &made {
                fill(out)?;
            }
            return made;
        }
        let made = allocate_broadcast_result(op, inputs, dtype, same_device(op, inputs)?);
        if let Ok(out) = &made {
            backend::fill([out], |b| launch_formulas(b, &Formulas { op, inputs, params, program, outputs: &[out] }))?;
        }
        made
    })
}

/// Computes `expr` into `made`, a new tensor to whose shape the operands are broadcast. Returns `made` itself, because moving a tensor
/// costs as much time as comparing several shapes.
#[inline]
pub(crate) fn fill_result(
    made: Result<Tensor>,
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    expr: &Expr,
) -> Result<Tensor> {
    if let Ok(out) = &made {
        with_program(slice::from_ref(expr), params, |program, params| {
            backend::fill([out], |b| launch_formulas(b, &Formulas { op, inputs, params, program, outputs: &[out] }))
        })?;
    }
    made
}

/// Allocates the result of an operation on broadcast operands, in the operands' memory format.
pub(super) fn allocate_broadcast_result(
    op: &'static str,
    inputs: &[&Tensor],
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let layout = result_layout(broadcast_shape(op, inputs)?, inputs.iter().map(|t| &t.layout));
    allocate_result(inputs, layout, dtype, device)
}

/// Allocates a result of an operation on `inputs`. Within `nn::uninit`, the result has no memory if an input has none.
pub(crate) fn allocate_result(inputs: &[&Tensor], layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
    match is_uninit_scope() && inputs.iter().any(|t| t.is_uninit()) {
        true => Tensor::empty_or_uninit(layout, dtype, device),
        false => Tensor::empty_with_layout(layout, dtype, device),
    }
}

/// Launches formulas. For channels-last results, the dims of all operands are reordered so that results are row-major, because backends
/// have their fastest kernels for that order. Formulas with random numbers are not reordered, because the order of the elements
/// determines the numbers.
fn launch_formulas(backend: Recorded, formulas: &Formulas) -> Result<()> {
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

/// Computes `exprs` over `inputs`, broadcast to the shape of `outputs`, into `outputs`. Takes one launch, or more if an input overlaps an
/// output without being the same view. The caller has already checked that autograd allows the write.
pub(crate) fn apply_into(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    exprs: &[Expr],
    outputs: &[&Tensor],
) -> Result<()> {
    with_program(exprs, params, |program, params| launch_program_into(op, inputs, params, program, outputs))
}

/// Computes a program like [`apply_into`]; the program is already compiled.
#[inline]
pub(super) fn launch_program_into(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    program: &Program,
    outputs: &[&Tensor],
) -> Result<()> {
    backend::launch(outputs.iter().copied(), |b| launch_formulas(b, &Formulas { op, inputs, params, program, outputs }))
}

/// True if `shape` broadcasts to `to`. If not, the backend returns the error.
fn broadcasts_to(shape: &Shape, to: &Shape) -> bool {
    let (dims, to) = (shape.dims().iter().rev(), to.dims().iter().rev());
    shape.rank() <= to.len() && dims.zip(to).all(|(&d, &n)| d == 1 || d == n)
}

pub(crate) fn broadcast_shape(op: &'static str, inputs: &[&Tensor]) -> Result<Shape> {
    let Some((first, others)) = inputs.split_first() else { return Ok(Shape::default()) };
    let mut shape = first.shape().clone();
    // Most operands have the shape of the first operand. Comparing sizes one by one is faster than `ends_with`, which calls `memcmp`.
    let like_first = |t: &Tensor| t.shape().dims().iter().rev().eq(first.shape().dims().iter().rev().take(t.rank()));
    for t in others.iter().filter(|t| !like_first(t)) {
        shape = shape.broadcast(op, t.shape())?;
    }
    Ok(shape)
}
