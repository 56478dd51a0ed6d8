//! `cl_khr_command_buffer`: commands that the driver prepares once and enqueues together.
//!
//! The extension is experimental and has changed. Version 0.9.5 added an argument to every function that records a command. Up
//! to 0.9.7, a command buffer may be enqueued again before it is done only if it was created for simultaneous use; since 0.9.8
//! an in-order queue may hold it several times. So the device must report its version, and unknown versions are not used.

use std::ffi::c_void;
use std::ptr;

use opencl_sys::{
    self as cl, cl_command_buffer_khr, cl_command_queue, cl_event, cl_mem, cl_mutable_command_khr, cl_sync_point_khr,
};

use super::Command;
use crate::device::opencl::ClDevice;
use crate::device::opencl::driver::{call, call_unlocked, create, info, send_and_sync, value};
use crate::device::opencl::errors::ClError;
use crate::device::opencl::functions::extension_function;

const NAME: &str = "cl_khr_command_buffer";

/// The last arguments of every function that records a command: sync points and a handle, all unused.
type SyncArguments = (u32, *const cl_sync_point_khr, *mut cl_sync_point_khr, *mut cl_mutable_command_khr);
const NO_SYNC: SyncArguments = (0, ptr::null(), ptr::null_mut(), ptr::null_mut());

/// `clCommandCopyBufferKHR` from a `cl_mem`, or `clCommandFillBufferKHR` from a pattern, before version 0.9.5.
type Transfer090<From> = Option<
    unsafe extern "C" fn(
        cl_command_buffer_khr,
        cl_command_queue,
        cl_mem,
        From,
        usize,
        usize,
        usize,
        u32,
        *const cl_sync_point_khr,
        *mut cl_sync_point_khr,
        *mut cl_mutable_command_khr,
    ) -> i32,
>;

/// The functions that record transfers.
#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
struct Transfers<Copy, Fill> {
    clCommandCopyBufferKHR: Copy,
    clCommandFillBufferKHR: Fill,
}

/// The functions that record transfers. From version 0.9.5 on, the functions also take properties.
#[derive(Clone, Copy)]
enum TransferFunctions {
    Version090(Transfers<Transfer090<cl_mem>, Transfer090<*const c_void>>),
    Version095(Transfers<cl::clCommandCopyBufferKHR_t, cl::clCommandFillBufferKHR_t>),
}

#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
pub(super) struct CommandBuffers {
    clCreateCommandBufferKHR: cl::clCreateCommandBufferKHR_t,
    clCommandNDRangeKernelKHR: cl::clCommandNDRangeKernelKHR_t,
    transfers: TransferFunctions,
    clFinalizeCommandBufferKHR: cl::clFinalizeCommandBufferKHR_t,
    clEnqueueCommandBufferKHR: cl::clEnqueueCommandBufferKHR_t,
    clReleaseCommandBufferKHR: cl::clReleaseCommandBufferKHR_t,
    properties: Option<[u64; 3]>,
    /// True if the command buffer may be enqueued again before its previous execution is over.
    pub(super) may_be_pending: bool,
}

/// The properties in which versions of the extension differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VersionTraits {
    /// True if functions that record a command take the command's properties.
    with_properties: bool,
    /// True if an in-order queue may hold a command buffer several times.
    in_order_is_enough: bool,
}

/// Finds an extension's version in `CL_DEVICE_EXTENSIONS_WITH_VERSION`: each entry is a packed version and 64 bytes of name.
fn version_of(bytes: &[u8], name: &str) -> Option<(u32, u32, u32)> {
    let entry = bytes.chunks_exact(68).find(|entry| entry[4..].split(|&b| b == 0).next() == Some(name.as_bytes()))?;
    let version = u32::from_ne_bytes(entry[..4].try_into().ok()?);
    Some((version >> 22, version >> 12 & 0x3ff, version & 0xfff))
}

/// Returns the properties of a version; `None` for an unknown version.
fn version_traits(version: (u32, u32, u32)) -> Option<VersionTraits> {
    match version {
        (0, 9, patch @ 0..=8) => Some(VersionTraits { with_properties: patch >= 5, in_order_is_enough: patch >= 8 }),
        _ => None,
    }
}

impl CommandBuffers {
    /// Returns the extension's functions, if the device has a known version that supports the queues created here.
    pub(super) fn for_device(device: &ClDevice) -> Result<Option<CommandBuffers>, ClError> {
        let (id, platform) = (device.id(), device.description.platform);
        // If the driver reports no versions, the version is unknown and the extension is not used.
        let versions = info!(clGetDeviceInfo(id, cl::CL_DEVICE_EXTENSIONS_WITH_VERSION)).unwrap_or_default();
        let Some(version_traits) = version_of(&versions, NAME).and_then(version_traits) else { return Ok(None) };
        if value!(clGetDeviceInfo(id, cl::CL_DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES_KHR) as u64)? != 0 {
            return Ok(None);
        }
        let capabilities = value!(clGetDeviceInfo(id, cl::CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR) as u64)?;
        let simultaneous = capabilities & cl::CL_COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE_KHR != 0;
        let flags = [cl::CL_COMMAND_BUFFER_FLAGS_KHR, cl::CL_COMMAND_BUFFER_SIMULTANEOUS_USE_KHR, 0];
        // SAFETY: the device's version of the extension has functions of these types under these names.
        let found = unsafe {
            CommandBuffers {
                clCreateCommandBufferKHR: extension_function(platform, c"clCreateCommandBufferKHR")?,
                clCommandNDRangeKernelKHR: extension_function(platform, c"clCommandNDRangeKernelKHR")?,
                transfers: match version_traits.with_properties {
                    false => TransferFunctions::Version090(Transfers {
                        clCommandCopyBufferKHR: extension_function(platform, c"clCommandCopyBufferKHR")?,
                        clCommandFillBufferKHR: extension_function(platform, c"clCommandFillBufferKHR")?,
                    }),
                    true => TransferFunctions::Version095(Transfers {
                        clCommandCopyBufferKHR: extension_function(platform, c"clCommandCopyBufferKHR")?,
                        clCommandFillBufferKHR: extension_function(platform, c"clCommandFillBufferKHR")?,
                    }),
                },
                clFinalizeCommandBufferKHR: extension_function(platform, c"clFinalizeCommandBufferKHR")?,
                clEnqueueCommandBufferKHR: extension_function(platform, c"clEnqueueCommandBufferKHR")?,
                clReleaseCommandBufferKHR: extension_function(platform, c"clReleaseCommandBufferKHR")?,
                properties: (simultaneous && !version_traits.in_order_is_enough).then_some(flags),
                may_be_pending: simultaneous || version_traits.in_order_is_enough,
            }
        };
        let is_there = found.clCreateCommandBufferKHR.is_some() && found.clEnqueueCommandBufferKHR.is_some();
        Ok(is_there.then_some(found))
    }

    /// Records commands, to run one after another, into a command buffer for queues like `queue`. Call under the queues' lock.
    pub(super) fn record(&self, queue: cl_command_queue, commands: &[Command]) -> Result<CommandBuffer, ClError> {
        let properties = self.properties.as_ref().map_or(ptr::null(), |list| list.as_ptr());
        let raw = create!(in self, clCreateCommandBufferKHR(1, &queue, properties))?;
        let buffer = CommandBuffer { raw, functions: *self };
        commands.iter().try_for_each(|command| buffer.add(command))?;
        call!(in self, clFinalizeCommandBufferKHR(raw))?;
        Ok(buffer)
    }
}

/// A command buffer. Released on drop; the driver frees it after the last replay.
pub(super) struct CommandBuffer {
    raw: cl_command_buffer_khr,
    functions: CommandBuffers,
}

// Commands are added and buffers enqueued under the queues' lock, also where a driver's extension functions are not thread-safe.
send_and_sync!(CommandBuffer);

impl CommandBuffer {
    /// Records one more command. A null queue means the command buffer's queue, which is in order.
    fn add(&self, command: &Command) -> Result<(), ClError> {
        let (to, queue, none, (n, waits, point, handle)) = (self.raw, ptr::null_mut(), ptr::null(), NO_SYNC);
        match *command {
            Command::Kernel { ref kernel, dims, ref global, ref local } => {
                let (kernel, dims, at) = (kernel.raw, dims as u32, ptr::null());
                let (global, local) = (global.as_ptr(), local.as_ptr());
                call!(in self.functions, clCommandNDRangeKernelKHR(
                    to, queue, none, kernel, dims, at, global, local, n, waits, point, handle
                ))
            }
            Command::Fill { to: mem, offset, bytes, ref pattern, length } => {
                let with = pattern.as_ptr().cast();
                match self.functions.transfers {
                    TransferFunctions::Version090(earlier) => call!(in earlier, clCommandFillBufferKHR(
                        to, queue, mem, with, length, offset, bytes, n, waits, point, handle
                    )),
                    TransferFunctions::Version095(later) => call!(in later, clCommandFillBufferKHR(
                        to, queue, none, mem, with, length, offset, bytes, n, waits, point, handle
                    )),
                }
            }
            Command::Copy { from: (from, start), to: (mem, offset), bytes } => match self.functions.transfers {
                TransferFunctions::Version090(earlier) => call!(in earlier, clCommandCopyBufferKHR(
                    to, queue, from, mem, start, offset, bytes, n, waits, point, handle
                )),
                TransferFunctions::Version095(later) => call!(in later, clCommandCopyBufferKHR(
                    to, queue, none, from, mem, start, offset, bytes, n, waits, point, handle
                )),
            },
        }
    }

    /// Enqueues the command buffer. `event`, unless null, gets the event of the last command. Call under the queues' lock.
    pub(super) fn enqueue(&self, mut queue: cl_command_queue, event: *mut cl_event) -> Result<(), ClError> {
        call!(in self.functions, clEnqueueCommandBufferKHR(1, &mut queue, self.raw, 0, ptr::null(), event))
    }
}

impl Drop for CommandBuffer {
    fn drop(&mut self) {
        let _ = call_unlocked!(in self.functions, clReleaseCommandBufferKHR(self.raw));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_decide_the_functions() {
        let of = |patch| version_traits((0, 9, patch)).map(|d| (d.with_properties, d.in_order_is_enough));
        assert_eq!(
            [0, 4, 5, 7, 8, 9].map(of),
            [
                Some((false, false)),
                Some((false, false)),
                Some((true, false)),
                Some((true, false)),
                Some((true, true)),
                None,
            ]
        );
        assert_eq!([(0, 8, 0), (0, 10, 0), (1, 0, 0)].map(version_traits), [None; 3]);
    }

    #[test]
    fn versions_are_matched_by_whole_names() {
        let entry = |version: u32, name: &str| {
            let mut bytes = [0; 68];
            bytes[..4].copy_from_slice(&version.to_ne_bytes());
            bytes[4..4 + name.len()].copy_from_slice(name.as_bytes());
            bytes
        };
        let multi = "cl_khr_command_buffer_multi_device";
        let all = [entry(1 << 22, multi), entry(9 << 12 | 4, NAME), entry(3 << 22, "cl_khr_fp64")].concat();
        assert_eq!(version_of(&all, NAME), Some((0, 9, 4)));
        assert_eq!(version_of(&all, "cl_khr_fp64"), Some((3, 0, 0)));
        for (bytes, name) in [(&all[..], "cl_khr_command"), (&all[..68], NAME), (&all[..135], NAME), (&[], NAME)] {
            assert_eq!(version_of(bytes, name), None);
        }
    }
}
