//! Dry runs: a program runs on simulated memory, and the result is how much memory it needs.

use claystone::storage::{self, Role};

use crate::memory::ClaystoneBytes;
use crate::pointers::{borrow, output};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::ClaystoneTensor;

/// Begins a dry run of all threads and devices. Tensors have no bytes, no kernel runs, and values that are read are zeros. `capacity` is
/// the device memory in bytes that the report compares with, 0 for no comparison, or UINT64_MAX for each device's own memory. An error if
/// a device has tensors already, or a dry run is in progress.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_dry_run_begin(capacity: u64) -> ClaystoneStatus {
    guard("claystone_dry_run_begin", || Ok(storage::begin_dry_run((capacity > 0).then_some(capacity))?))
}

/// Ends the dry run that claystone_dry_run_begin began, and reports the memory that the program needs: as a JSON object, and as a text
/// to print. The caller owns the bytes of both. Tensors that were made meanwhile stay without bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_dry_run_end(
    json: *mut ClaystoneBytes,
    text: *mut ClaystoneBytes,
) -> ClaystoneStatus {
    guard("claystone_dry_run_end", || {
        // SAFETY: the caller promises pointers that are null or valid for writing.
        let (json, text) = unsafe { (output(json, "json")?, output(text, "text")?) };
        let estimate = storage::end_dry_run()?;
        json.write(ClaystoneBytes::new(estimate.to_json().into_bytes()));
        text.write(ClaystoneBytes::new(estimate.to_string().into_bytes()));
        Ok(())
    })
}

/// The purpose of a tensor's memory in the report of a dry run.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneRole {
    /// A parameter of a model.
    Parameter = 0,
    /// A gradient of a parameter.
    Gradient = 1,
    /// A state that an optimiser keeps between steps.
    OptimizerState = 2,
    /// A result that backward needs.
    Saved = 3,
    /// Any other memory: the role of a new tensor.
    Temporary = 4,
}

/// Sets the role, a ClaystoneRole, of a tensor's storage in the report of a dry run. Does nothing in other runs. The roles Saved and
/// Temporary do not replace the others.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_set_role(tensor: *const ClaystoneTensor, role: i32) -> ClaystoneStatus {
    guard("claystone_tensor_set_role", || {
        // SAFETY: the caller promises a handle or null.
        let tensor = unsafe { borrow(tensor, "tensor")? };
        let known = usize::try_from(role).ok().and_then(|role| Role::ALL.get(role));
        let role = known.ok_or_else(|| Fault::Argument(format!("{role} is no ClaystoneRole")))?;
        tensor.0.storage().set_role(*role);
        Ok(())
    })
}
