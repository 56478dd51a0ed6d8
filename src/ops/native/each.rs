//! Launches of one formula for many tensors: [`map_each`] and [`foreach_into`].

use crate::error::for_each_part;
use crate::expr::table::ROWS;
use crate::ops::dispatch::prelude::*;

/// The maximum number of operands of one launch. Every device accepts this number, and one launch takes no more time than separate
/// launches.
const MAX_LAUNCH_OPERANDS: usize = 32;

/// The inputs and outputs of one evaluation in [`map_each`]. All sets of a call have the same number of inputs and of outputs.
#[derive(Debug, Clone, Default)]
pub struct TensorSet<'a> {
    /// The tensors that the formulas read.
    pub inputs: SmallVec<[&'a Tensor; 6]>,
    /// The tensors that the formulas write, all of one shape. An output may also be an input.
    pub outputs: SmallVec<[&'a Tensor; 6]>,
}

/// Applies the formulas of [`Tensor::map_into`] to many sets of tensors. Sets whose outputs have the same shape share launches.
///
/// `f` receives the inputs of a set followed by the `common` inputs, and the scalars. Use it for an optimiser step over parameters
/// in separate allocations, or for the `_foreach_` functions of PyTorch.
///
/// ```
/// use claystone::ops::{TensorSet, map_each};
/// use claystone::{Device, Tensor};
/// let (x, y, rate) = (Tensor::ones(3, Device::Cpu)?, Tensor::ones(2, Device::Cpu)?, Tensor::full((), 0.5, Device::Cpu)?);
/// let sets: Vec<TensorSet> =
///     [&x, &y].map(|t| TensorSet { inputs: [t].into_iter().collect(), outputs: [t].into_iter().collect() }).into();
/// map_each("shrink", &sets, &[&rate], &[], |x, _| vec![&x[0] * &x[1]])?;
/// assert_eq!(y.to_vec::<f32>()?, [0.5; 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`Tensor::map_into`], an error for sets of different sizes, and [`Error::Partial`] if the device fails after
/// some sets were written.
#[track_caller]
pub fn map_each(
    op: &'static str,
    sets: &[TensorSet],
    common: &[&Tensor],
    scalars: &[Scalar],
    f: impl Fn(&[Expr], &[Expr]) -> Vec<Expr>,
) -> Result<()> {
    let _caller = Caller::enter();
    let Some(first) = sets.first() else { return Ok(()) };
    let (inputs, outputs) = (first.inputs.len(), first.outputs.len());
    invalid!(op if outputs == 0 || sets.iter().any(|s| (s.inputs.len(), s.outputs.len()) != (inputs, outputs)),
        "all sets must have the same numbers of inputs and of outputs, and at least one output");
    let max_sets = (MAX_LAUNCH_OPERANDS.saturating_sub(common.len()) / (inputs + outputs)).max(1);
    for_each_part(op, group_into_launches(sets, max_sets), |launch| {
        let (mut read, mut written) = <[SmallVec<[&Tensor; MAX_LAUNCH_OPERANDS]>; 2]>::default().into();
        for set in &launch {
            read.extend_from_slice(&set.inputs);
            written.extend_from_slice(&set.outputs);
        }
        read.extend_from_slice(common);
        Tensor::map_into(&read, scalars, &written, |x, s| {
            let shared = &x[launch.len() * inputs..];
            let of_set = |i: usize| [&x[i * inputs..][..inputs], shared].concat();
            (0..launch.len()).flat_map(|i| f(&of_set(i), s)).collect()
        })
        .map_err(|e| e.with_op(op))
    })
}

/// Groups the sets into launches. The outputs of a launch have one shape, and no set writes a tensor that another set accesses.
fn group_into_launches<'s, 't>(sets: &'s [TensorSet<'t>], max_sets: usize) -> Vec<Vec<&'s TensorSet<'t>>> {
    let mut done: Vec<Vec<&TensorSet>> = Vec::new();
    let mut open: Vec<(&Shape, Vec<&TensorSet>)> = Vec::new();
    let conflicts_with = |a: &TensorSet, b: &TensorSet| {
        a.outputs.iter().any(|t| b.inputs.iter().chain(&b.outputs).any(|u| t.shares_storage(u)))
    };
    for set in sets {
        let shape = set.outputs[0].shape();
        // Earlier sets that conflict with this set are launched first, whatever their shape.
        let (conflicting, free) = open.into_iter().partition(|(_, group): &(_, Vec<_>)| {
            group.iter().any(|other| conflicts_with(set, other) || conflicts_with(other, set))
        });
        open = free;
        done.extend(Vec::from_iter(conflicting).into_iter().map(|(_, group): (&Shape, _)| group));
        match open.iter_mut().find(|(of, _)| *of == shape) {
            Some((_, group)) => group.push(set),
            None => open.push((shape, vec![set])),
        }
        if let Some(full) = open.iter().position(|(_, group)| group.len() == max_sets) {
            done.push(open.swap_remove(full).1);
        }
    }
    done.extend(open.into_iter().map(|(_, group)| group));
    done
}

/// Applies an elementwise operation, given by name, to lists of tensors and writes the results to `out` (PyTorch's
/// `torch._foreach_add_` and similar functions, which have `out` as the first list).
///
/// `lists` holds one list for each operand, with as many tensors as `out`. A list of one tensor is used for all outputs.
/// Tensors of the same shape share launches.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let (x, y) = (Tensor::ones(3, Device::Cpu)?, Tensor::ones(3, Device::Cpu)?);
/// // As one after the other: y adds what x is by then.
/// ops::foreach_into("add_alpha", &[&[&x, &y], &[&y, &x]], &[2.0.into()], &[&x, &y])?;
/// assert_eq!((x.to_vec::<f32>()?[0], y.to_vec::<f32>()?[0]), (3.0, 7.0));
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Returns [`Error::Invalid`] for a name that is not in [`ROWS`] and for a wrong number of lists, tensors or scalars, and the errors of
/// [`map_each`].
#[track_caller]
pub fn foreach_into(name: &str, lists: &[&[&Tensor]], scalars: &[Scalar], out: &[&Tensor]) -> Result<()> {
    let _caller = Caller::enter();
    let op = "foreach_into";
    let Some(row) = ROWS.iter().find(|row| row.name == name) else {
        fail!(op, "{name:?} is not an elementwise operation");
    };
    let fits = |list: &&[&Tensor]| list.len() == out.len() || list.len() == 1;
    let (arity, numbers) = (row.arity, row.samples.len());
    invalid!(op if (lists.len(), scalars.len()) != (arity, numbers) || !lists.iter().all(fits),
        "{name} takes {arity} lists, each with one tensor or one for each output, and {numbers} scalars");
    let set = |(i, written)| TensorSet {
        inputs: lists.iter().map(|list| list[if list.len() == 1 { 0 } else { i }]).collect(),
        outputs: SmallVec::from_slice(&[written]),
    };
    let sets: Vec<TensorSet> = out.iter().copied().enumerate().map(set).collect();
    map_each(row.name, &sets, &[], scalars, |x, s| vec![row.build(x, s)])
}
