//! Loading of the values of a state dict into the tensors of a module.

use std::collections::HashMap;

use crate::internal::for_each_part;
use crate::io::{IncompatibleKeys, StateDict};
use crate::{Result, Tensor, no_grad};

/// Checks that shapes are equal and, if `strict`, that names are equal. Returns the names that only one of the two state dicts has.
pub(super) fn check_state(
    op: &'static str,
    own: &StateDict,
    state: &StateDict,
    strict: bool,
) -> Result<IncompatibleKeys> {
    if strict {
        state.check_against(op, own)?;
    }
    own.iter().try_for_each(|(name, t)| state.check_shape(op, name, t))?;
    Ok(state.incompatible_keys(own))
}

/// Copies the values of `state` into the tensors of `own`, except tensors without memory (made in `uninit`).
pub(super) fn copy_values(op: &'static str, own: &StateDict, state: &StateDict) -> Result<()> {
    let initialised = own.iter().filter(|(_, t)| !t.is_uninit());
    no_grad(|| {
        for_each_part(op, initialised, |(name, t)| match state.get(name) {
            Some(value) => t.copy_(&value.detach().to_dtype(t.dtype())?.to_device(t.device())?).map(|_| ()),
            None => Ok(()),
        })
    })
}

/// Replaces the tensors of `own` that have no memory by tensors of `state`, and copies values into the other tensors. `visit` calls its
/// argument with each tensor of the module. Conversions, which can fail, are all done before the first tensor is replaced.
pub(super) fn assign_values(
    op: &'static str,
    own: StateDict,
    mut state: StateDict,
    strict: bool,
    mut visit: impl FnMut(&mut dyn FnMut(String, &mut Tensor)),
) -> Result<IncompatibleKeys> {
    let keys = check_state(op, &own, &state, strict)?;
    let mut values = HashMap::new();
    for (name, t) in own.iter().filter(|(_, t)| t.is_uninit()) {
        match state.remove(name) {
            Some(value) => _ = values.insert(name.to_string(), into_unique(value, t)?),
            None => t.storage().name_uninit(name),
        }
    }
    copy_values(op, &own, &state)?;
    drop(own);
    let (mut assigned, mut result) = (Vec::new(), Ok(()));
    // A tied tensor may come before the tensor under whose name `state` has the value. The second pass assigns such tensors.
    for _ in 0..2 {
        visit(&mut |name, t| {
            if result.is_ok() && t.is_uninit() {
                result = assign_tensor(t, values.remove(&name), &mut assigned);
            }
        });
    }
    result.map(|()| keys)
}

/// Replaces a tensor without memory by `value`. A tied tensor (the same view of the same storage) gets the replacement of its twin.
fn assign_tensor(t: &mut Tensor, value: Option<Tensor>, assigned: &mut Vec<[Tensor; 2]>) -> Result<()> {
    let view = |t: &Tensor| (t.shape().clone(), t.strides().to_vec(), t.offset());
    let tied = assigned.iter().find(|[old, _]| old.shares_storage(t) && view(old) == view(t));
    let new = match (tied, value) {
        (Some([_, new]), _) => new.shallow_clone(),
        (None, Some(value)) if t.leaf_id().is_some() => t.succeeded_by(value, None, None)?,
        (None, Some(value)) => value,
        (None, None) => return Ok(()),
    };
    assigned.push([std::mem::replace(t, new.shallow_clone()), new]);
    Ok(())
}

/// Converts a value to the dtype and device of `t`. Copies the value unless it is the only handle on its storage and fills the storage.
fn into_unique(value: Tensor, t: &Tensor) -> Result<Tensor> {
    no_grad(|| {
        let converted = value.detach().to_dtype(t.dtype())?.to_device(t.device())?;
        drop(value);
        let fills_storage = converted.numel() * t.dtype().size() == converted.storage().nbytes();
        match fills_storage && converted.is_contiguous() && converted.storage().is_unique() {
            true => Ok(converted),
            false => converted.contiguous()?.try_clone(),
        }
    })
}
