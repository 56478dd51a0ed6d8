//! Hooks on the tensors that recordings save for their gradients.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use claystone::autograd::{disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks};
use claystone::{Error, Result, Tensor};

use crate::pointers::{borrow, text};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::ClaystoneTensor;

/// Hooks on saved tensors. Any thread may call `unpack` and `release`. No hook may be left by an exception or a jump.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneSavedTensorsHooks {
    /// Stores a copy of a tensor, for instance on another device, and sets `*packed` to a value from which `unpack` finds the copy. The
    /// handle is borrowed.
    pub pack: Option<
        unsafe extern "C" fn(
            data: *mut c_void,
            tensor: *const ClaystoneTensor,
            packed: *mut *mut c_void,
        ) -> ClaystoneStatus,
    >,
    /// Sets `*tensor` to a new handle, which claystone releases, on a tensor of the shape, dtype and device of the packed tensor.
    pub unpack: Option<
        unsafe extern "C" fn(
            data: *mut c_void,
            packed: *mut c_void,
            tensor: *mut *mut ClaystoneTensor,
        ) -> ClaystoneStatus,
    >,
    /// Frees a packed value. Called once for each value; may be null.
    pub release: Option<unsafe extern "C" fn(data: *mut c_void, packed: *mut c_void)>,
    /// Passed to the hooks. Valid until all packed values are released.
    pub data: *mut c_void,
}

/// Hooks that other threads may call.
struct Hooks(ClaystoneSavedTensorsHooks);

// SAFETY: the C program promises that any thread may call `unpack` and `release` with the data; `pack` runs on the scope's thread.
unsafe impl Send for Hooks {}
// SAFETY: as above.
unsafe impl Sync for Hooks {}

/// A value that the pack hook returned.
struct Packed {
    hooks: Arc<Hooks>,
    value: *mut c_void,
}

// SAFETY: the value is only passed to `unpack` and `release`, which any thread may call.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Drop for Packed {
    fn drop(&mut self) {
        if let Some(release) = self.hooks.0.release {
            // SAFETY: the C program promises a function that may be called with its data and a packed value.
            unsafe { release(self.hooks.0.data, self.value) }
        }
    }
}

/// Turns a hook's status into a result.
fn checked(hook: &str, status: ClaystoneStatus) -> Result<()> {
    match status {
        ClaystoneStatus::Ok => Ok(()),
        _ => Err(Error::Autograd { op: "saved_tensors_hooks", reason: format!("the {hook} hook returned {status:?}") }),
    }
}

impl Packed {
    fn new(hooks: &Arc<Hooks>, tensor: Tensor) -> Result<Packed> {
        let (pack, mut value) = (hooks.0.pack.expect("it was checked"), std::ptr::null_mut());
        let tensor = ClaystoneTensor(tensor);
        // SAFETY: the C program promises a function that may be called with its data; the handle and the destination are valid.
        checked("pack", unsafe { pack(hooks.0.data, &tensor, &mut value) })?;
        Ok(Packed { hooks: hooks.clone(), value })
    }

    fn unpack(&self) -> Result<Tensor> {
        let (unpack, mut made) = (self.hooks.0.unpack.expect("it was checked"), std::ptr::null_mut());
        // SAFETY: as in `new`, with a value that `pack` has made.
        checked("unpack", unsafe { unpack(self.hooks.0.data, self.value, &mut made) })?;
        if made.is_null() {
            return Err(Error::Autograd {
                op: "saved_tensors_hooks",
                reason: "the unpack hook gave a null tensor".into(),
            });
        }
        // SAFETY: the C program promises a new handle, which belongs to claystone.
        let made = unsafe { Arc::from_raw(made.cast_const()) };
        Ok(made.0.shallow_clone())
    }
}

/// Returns a closure that calls `run(data)`.
///
/// # Safety
/// `run` is null, or a function that may be called with this data.
unsafe fn runner(
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> std::result::Result<impl FnOnce() -> Result<()>, Fault> {
    let run = run.ok_or_else(|| Fault::Argument("run is null".into()))?;
    Ok(move || {
        // SAFETY: the caller upholds this function's contract.
        unsafe { run(data) };
        Ok(())
    })
}

/// Calls `run(data)`. The hooks store the tensors that `claystone_recurrent` and `claystone_call_backward` save meanwhile for gradients
/// (PyTorch's `torch.autograd.graph.saved_tensors_hooks`). The hooks of the innermost scope are used. If a hook fails, the call that
/// computes gradients fails with CLAYSTONE_STATUS_AUTOGRAD. `run` must return: leaving it by an exception or a jump is undefined
/// behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_saved_tensors_hooks(
    hooks: *const ClaystoneSavedTensorsHooks,
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_saved_tensors_hooks", || {
        // SAFETY: the caller promises a pointer that is null or valid for reading, and a function that may be called with its data.
        let (hooks, run) = unsafe { (*borrow(hooks, "hooks")?, runner(run, data)?) };
        if hooks.pack.is_none() || hooks.unpack.is_none() {
            return Err(Fault::Argument("pack or unpack is null".into()));
        }
        let hooks = Arc::new(Hooks(hooks));
        Ok(saved_tensors_hooks(move |tensor| Packed::new(&hooks, tensor), Packed::unpack, run)?)
    })
}

/// Calls `run(data)`. The tensors that `claystone_recurrent` and `claystone_call_backward` save meanwhile wait in host memory, pinned if
/// `pin_memory` is true (PyTorch's `torch.autograd.graph.save_on_cpu`). `run` must return, as for `claystone_saved_tensors_hooks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_save_on_cpu(
    pin_memory: bool,
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_save_on_cpu", || {
        // SAFETY: the caller promises a function that may be called with this data.
        Ok(save_on_cpu(pin_memory, unsafe { runner(run, data)? })?)
    })
}

/// Calls `run(data)`. Meanwhile `claystone_saved_tensors_hooks` and `claystone_save_on_cpu` fail with `reason` as their message. Fails with
/// `reason` if hooks are on already (PyTorch's `torch.autograd.graph.disable_saved_tensors_hooks`). `run` must return, as for
/// `claystone_saved_tensors_hooks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_disable_saved_tensors_hooks(
    reason: *const c_char,
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_disable_saved_tensors_hooks", || {
        // SAFETY: the caller promises a string, and a function that may be called with this data.
        let (reason, run) = unsafe { (text(reason, "reason")?, runner(run, data)?) };
        Ok(disable_saved_tensors_hooks(reason, run)?)
    })
}
