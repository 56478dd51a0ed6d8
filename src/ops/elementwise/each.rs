//! One formula for many tensors: [`map_each`] and [`foreach_into`].

use smallvec::SmallVec;

use crate::expr::table::ROWS;
use crate::ops::dispatch::prelude::*;
use crate::{Error, Expr, Result, Scalar, Shape, Tensor, for_each_part};

/// Operands of a launch: what kernels take on every device, and few enough to be as fast as apart.
const OPERANDS: usize = 32;

/// What [`map_each`] reads and writes at a time: as many inputs and as many outputs as all others.
#[derive(Debug, Clone, Default)]
pub struct TensorSet<'a> {
    /// Tensors that the formulas read.
    pub inputs: SmallVec<[&'a Tensor; 6]>,
    /// Tensors that they write, of one shape; they may be among the inputs.
    pub outputs: SmallVec<[&'a Tensor; 6]>,
}

/// [`Tensor::map_into`] for many sets of tensors; those whose outputs have one shape share launches. `f` gets the inputs of a set, then
/// those that are `common` to all, and the scalars. A step of an optimiser over parameters that lie apart is a call of this, and so are
/// the functions of PyTorch whose names begin with `_foreach_`.
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
/// Those of [`Tensor::map_into`]; sets of different sizes; [`Error::Partial`] where the device fails after some sets were done.
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
    if outputs == 0 || sets.iter().any(|s| (s.inputs.len(), s.outputs.len()) != (inputs, outputs)) {
        return Err(Error::invalid(op, "all sets have as many inputs and outputs, at least one of these"));
    }
    let most = (OPERANDS.saturating_sub(common.len()) / (inputs + outputs)).max(1);
    for_each_part(op, launches(sets, most), |launch| {
        let (mut read, mut written) = <[SmallVec<[&Tensor; OPERANDS]>; 2]>::default().into();
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
        .map_err(|e| e.of(op))
    })
}

/// The sets in groups that share a launch: of one shape, and none writes where another reads or writes.
fn launches<'s, 't>(sets: &'s [TensorSet<'t>], most: usize) -> Vec<Vec<&'s TensorSet<'t>>> {
    let mut done: Vec<Vec<&TensorSet>> = Vec::new();
    let mut open: Vec<(&Shape, Vec<&TensorSet>)> = Vec::new();
    let meet = |a: &TensorSet, b: &TensorSet| {
        a.outputs.iter().any(|t| b.inputs.iter().chain(&b.outputs).any(|u| t.shares_storage(u)))
    };
    for set in sets {
        let shape = set.outputs[0].shape();
        // What is before a set that it meets is launched before it, whatever its shape.
        let (met, free) = open
            .into_iter()
            .partition(|(_, group): &(_, Vec<_>)| group.iter().any(|other| meet(set, other) || meet(other, set)));
        open = free;
        done.extend(Vec::from_iter(met).into_iter().map(|(_, group): (&Shape, _)| group));
        match open.iter_mut().find(|(of, _)| *of == shape) {
            Some((_, group)) => group.push(set),
            None => open.push((shape, vec![set])),
        }
        if let Some(full) = open.iter().position(|(_, group)| group.len() == most) {
            done.push(open.swap_remove(full).1);
        }
    }
    done.extend(open.into_iter().map(|(_, group)| group));
    done
}

/// An elementwise operation on many tensors, by name: `lists` has its operands, each as many tensors as there are in `out`, which is
/// written; a list of one tensor is for all of them. Those of one shape share launches. PyTorch's `torch._foreach_add_` and the others
/// of that kind, where `out` is the first list.
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
/// [`Error::Invalid`] for a name that is none of [`ROWS`], another number of lists, tensors or scalars; those of [`map_each`].
#[track_caller]
pub fn foreach_into(name: &str, lists: &[&[&Tensor]], scalars: &[Scalar], out: &[&Tensor]) -> Result<()> {
    let _caller = Caller::enter();
    let op = "foreach_into";
    let Some(row) = ROWS.iter().find(|row| row.name == name) else {
        return Err(Error::invalid(op, format!("{name:?} is no elementwise operation")));
    };
    let fits = |list: &&[&Tensor]| list.len() == out.len() || list.len() == 1;
    if (lists.len(), scalars.len()) != (row.arity, row.samples.len()) || !lists.iter().all(fits) {
        let (arity, numbers) = (row.arity, row.samples.len());
        let reason =
            format!("{name} takes {arity} lists of as many tensors as there are to write, and {numbers} numbers");
        return Err(Error::invalid(op, reason));
    }
    let set = |(i, written)| TensorSet {
        inputs: lists.iter().map(|list| list[if list.len() == 1 { 0 } else { i }]).collect(),
        outputs: SmallVec::from_slice(&[written]),
    };
    let sets: Vec<TensorSet> = out.iter().copied().enumerate().map(set).collect();
    map_each(row.name, &sets, &[], scalars, |x, s| vec![row.build(x, s)])
}
