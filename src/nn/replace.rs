//! Replacement of a module's tensors, for conversions, copies, and freezing of parameters.

use super::{Module, Role};
use crate::{Result, Tensor};

/// Converts each tensor with `f`, outside the graph. If `keep_flat_buffers`, a flat buffer of an optimiser is converted as a whole.
pub(super) fn convert_tensors<M: Module + ?Sized>(
    module: &mut M,
    keep_flat_buffers: bool,
    f: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let mut buffers = Vec::new();
    for_each_tensor(module, |_, t| {
        *t = convert_tensor(t, keep_flat_buffers, &f, &mut buffers)?;
        Ok(())
    })
}

/// Replaces each tensor by the result of `f`. Tied tensors stay tied: `f` is called once for all of them.
pub(super) fn replace_each<M: Module + ?Sized>(
    module: &mut M,
    f: impl Fn(Role, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let mut known: Vec<(Role, Tensor, Tensor)> = Vec::new();
    for_each_tensor(module, |role, t| {
        let view = |t: &Tensor| (t.leaf_id(), t.offset(), t.shape().clone(), t.strides().to_vec());
        let same = |old: &Tensor| old.shares_storage(t) && view(old) == view(t);
        let new = match known.iter().find(|(of, old, _)| *of == role && same(old)) {
            Some((.., new)) => new.shallow_clone(),
            None => f(role, t)?,
        };
        known.push((role, std::mem::replace(t, new.shallow_clone()), new));
        Ok(())
    })
}

/// Calls `f` with each tensor and stops at the first error.
fn for_each_tensor<M: Module + ?Sized>(
    module: &mut M,
    mut f: impl FnMut(Role, &mut Tensor) -> Result<()>,
) -> Result<()> {
    let mut result = Ok(());
    module.visit_mut("", &mut |_, role, t| {
        if result.is_ok() {
            result = f(role, t);
        }
    });
    result
}

/// Converts a tensor with `f`. For a parameter, returns the leaf that replaces the parameter, with a converted gradient. If
/// `keep_flat_buffers`, views of one flat buffer remain views of one buffer. `buffers` has these buffers before and after conversion.
fn convert_tensor(
    t: &Tensor,
    keep_flat_buffers: bool,
    f: &impl Fn(&Tensor) -> Result<Tensor>,
    buffers: &mut Vec<(Tensor, Tensor)>,
) -> Result<Tensor> {
    // A tied parameter may already be replaced, under another name.
    let t = t.successor().unwrap_or_else(|| t.shallow_clone());
    let mut in_buffer = |part: &Tensor| {
        let known = buffers.iter().position(|(buffer, _)| buffer.shares_storage(part));
        let at = known.map_or_else(
            || {
                let elements = part.storage().nbytes() / part.dtype().size();
                let whole = part.detach().as_strided(elements, &[1], 0)?;
                buffers.push((whole.shallow_clone(), f(&whole)?));
                Ok(buffers.len() - 1)
            },
            Ok,
        )?;
        buffers[at].1.as_strided(part.shape(), part.strides(), part.offset())
    };
    let slot = if keep_flat_buffers { t.grad_slot() } else { None };
    // If parameter and gradient have the same offset in buffers of the same size, both buffers belong to an optimiser.
    let alike = |slot: &Tensor| slot.offset() == t.offset() && slot.storage().nbytes() == t.storage().nbytes();
    let data = if slot.as_ref().is_some_and(alike) { in_buffer(&t)? } else { f(&t.detach())? };
    if t.leaf_id().is_none() {
        return Ok(data);
    }
    if data.shares_storage(&t) {
        return Ok(t);
    }
    let grad = match t.grad() {
        Some(grad) if slot.as_ref().is_some_and(|slot| slot.shares_storage(&grad)) => Some(in_buffer(&grad)?),
        Some(grad) => Some(f(&grad.detach())?),
        None => None,
    };
    let slot = slot.as_ref().map(in_buffer).transpose()?;
    t.succeeded_by(data, grad, slot)
}
