//! `cl_khr_command_buffer`: recorded commands that the driver keeps, ready to be enqueued as one.
//!
//! The extension is experimental and has changed. Version 0.9.5 gave every function that records a command one more
//! argument. Until 0.9.7 a command buffer may only be enqueued again before it is done where it was created for that; since
//! 0.9.8 an in-order queue may have it several times. So the device has to tell its version, and versions that are not known
//! here are not used.

use std::ffi::c_void;
use std::ptr;

use opencl_sys::{
    CL_COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE_KHR, CL_COMMAND_BUFFER_FLAGS_KHR,
    CL_COMMAND_BUFFER_SIMULTANEOUS_USE_KHR, CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR,
    CL_DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES_KHR, CL_DEVICE_EXTENSIONS_WITH_VERSION, cl_command_buffer_khr,
    cl_mutable_command_khr, cl_sync_point_khr, clCommandCopyBufferKHR_t, clCommandFillBufferKHR_t,
    clCommandNDRangeKernelKHR_t, clCreateCommandBufferKHR_t, clEnqueueCommandBufferKHR_t, clFinalizeCommandBufferKHR_t,
    clReleaseCommandBufferKHR_t,
};
use opencl3::types::{cl_command_queue, cl_event, cl_mem};

use super::ClDevice;
use super::capture::Command;
use super::driver::{call, call_unlocked, create, info, value};
use super::errors::ClError;
use super::extension::extension_function;

const NAME: &str = "cl_khr_command_buffer";

/// What every function that records a command takes last: points to wait for and the command's own, which are not used.
type Points = (u32, *const cl_sync_point_khr, *mut cl_sync_point_khr, *mut cl_mutable_command_khr);
const POINTS: Points = (0, ptr::null(), ptr::null_mut(), ptr::null_mut());

/// `clCommandCopyBufferKHR` before version 0.9.5.
type EarlierCopy = Option<
    unsafe extern "C" fn(
        cl_command_buffer_khr,
        cl_command_queue,
        cl_mem,
        cl_mem,
        usize,
        usize,
        usize,
        u32,
        *const cl_sync_point_khr,
        *mut cl_sync_point_khr,
        *mut cl_mutable_command_khr,
    ) -> i32,
>;

/// `clCommandFillBufferKHR` before version 0.9.5.
type EarlierFill = Option<
    unsafe extern "C" fn(
        cl_command_buffer_khr,
        cl_command_queue,
        cl_mem,
        *const c_void,
        usize,
        usize,
        usize,
        u32,
        *const cl_sync_point_khr,
        *mut cl_sync_point_khr,
        *mut cl_mutable_command_khr,
    ) -> i32,
>;

/// The functions that record transfers, before version 0.9.5.
#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
struct Earlier {
    clCommandCopyBufferKHR: EarlierCopy,
    clCommandFillBufferKHR: EarlierFill,
}

/// Those of version 0.9.5 and later, which take properties as well.
#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
struct Later {
    clCommandCopyBufferKHR: clCommandCopyBufferKHR_t,
    clCommandFillBufferKHR: clCommandFillBufferKHR_t,
}

#[derive(Clone, Copy)]
enum Transfers {
    Earlier(Earlier),
    Later(Later),
}

/// The extension, as a device has it.
#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
pub(super) struct CommandBuffers {
    clCreateCommandBufferKHR: clCreateCommandBufferKHR_t,
    clCommandNDRangeKernelKHR: clCommandNDRangeKernelKHR_t,
    transfers: Transfers,
    clFinalizeCommandBufferKHR: clFinalizeCommandBufferKHR_t,
    clEnqueueCommandBufferKHR: clEnqueueCommandBufferKHR_t,
    clReleaseCommandBufferKHR: clReleaseCommandBufferKHR_t,
    /// What command buffers are created with.
    properties: Option<[u64; 3]>,
    /// Whether a command buffer may be enqueued while it is on the queue already.
    may_be_pending: bool,
}

/// What a version of the extension asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dialect {
    /// Functions that record take properties of the command.
    with_properties: bool,
    /// An in-order queue may have a command buffer several times.
    in_order_is_enough: bool,
}

/// The version of an extension among what `CL_DEVICE_EXTENSIONS_WITH_VERSION` gives: for each a version in bits and a name of
/// 64 bytes.
fn version_of(bytes: &[u8], name: &str) -> Option<(u32, u32, u32)> {
    let entry = bytes.chunks_exact(68).find(|entry| entry[4..].split(|&b| b == 0).next() == Some(name.as_bytes()))?;
    let version = u32::from_ne_bytes(entry[..4].try_into().ok()?);
    Some((version >> 22, version >> 12 & 0x3ff, version & 0xfff))
}

/// None for a version that is not known.
fn dialect(version: (u32, u32, u32)) -> Option<Dialect> {
    match version {
        (0, 9, patch @ 0..=8) => Some(Dialect { with_properties: patch >= 5, in_order_is_enough: patch >= 8 }),
        _ => None,
    }
}

impl CommandBuffers {
    /// The extension, if the device has it in a version that is known and for queues as they are created here.
    ///
    /// # Errors
    /// What the driver refuses to tell.
    pub(super) fn of(device: &ClDevice) -> Result<Option<CommandBuffers>, ClError> {
        let (id, platform) = (device.id(), device.found.platform);
        // A driver that tells no versions has none that is known.
        let versions = info!(clGetDeviceInfo(id, CL_DEVICE_EXTENSIONS_WITH_VERSION)).unwrap_or_default();
        let Some(dialect) = version_of(&versions, NAME).and_then(dialect) else { return Ok(None) };
        if value!(clGetDeviceInfo(id, CL_DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES_KHR) as u64)? != 0 {
            return Ok(None);
        }
        let capabilities = value!(clGetDeviceInfo(id, CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR) as u64)?;
        let simultaneous = capabilities & CL_COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE_KHR != 0;
        let flags = [CL_COMMAND_BUFFER_FLAGS_KHR, CL_COMMAND_BUFFER_SIMULTANEOUS_USE_KHR, 0];
        // SAFETY: the device's version of the extension has functions of these types under these names.
        let found = unsafe {
            CommandBuffers {
                clCreateCommandBufferKHR: extension_function(platform, c"clCreateCommandBufferKHR")?,
                clCommandNDRangeKernelKHR: extension_function(platform, c"clCommandNDRangeKernelKHR")?,
                transfers: match dialect.with_properties {
                    false => Transfers::Earlier(Earlier {
                        clCommandCopyBufferKHR: extension_function(platform, c"clCommandCopyBufferKHR")?,
                        clCommandFillBufferKHR: extension_function(platform, c"clCommandFillBufferKHR")?,
                    }),
                    true => Transfers::Later(Later {
                        clCommandCopyBufferKHR: extension_function(platform, c"clCommandCopyBufferKHR")?,
                        clCommandFillBufferKHR: extension_function(platform, c"clCommandFillBufferKHR")?,
                    }),
                },
                clFinalizeCommandBufferKHR: extension_function(platform, c"clFinalizeCommandBufferKHR")?,
                clEnqueueCommandBufferKHR: extension_function(platform, c"clEnqueueCommandBufferKHR")?,
                clReleaseCommandBufferKHR: extension_function(platform, c"clReleaseCommandBufferKHR")?,
                properties: (simultaneous && !dialect.in_order_is_enough).then_some(flags),
                may_be_pending: simultaneous || dialect.in_order_is_enough,
            }
        };
        let is_there = found.clCreateCommandBufferKHR.is_some() && found.clEnqueueCommandBufferKHR.is_some();
        Ok(is_there.then_some(found))
    }

    /// A command buffer with these commands, one after another, for queues like this one. Under the queues' lock.
    pub(super) fn record(&self, queue: cl_command_queue, commands: &[Command]) -> Result<CommandBuffer, ClError> {
        let properties = self.properties.as_ref().map_or(ptr::null(), |list| list.as_ptr());
        let raw = create!(in self, clCreateCommandBufferKHR(1, &queue, properties))?;
        let buffer = CommandBuffer { raw, functions: *self };
        commands.iter().try_for_each(|command| buffer.add(command))?;
        call!(in self, clFinalizeCommandBufferKHR(raw))?;
        Ok(buffer)
    }
}

/// A command buffer. Released on drop, when the driver has finished it.
pub(super) struct CommandBuffer {
    raw: cl_command_buffer_khr,
    functions: CommandBuffers,
}

// SAFETY: OpenCL objects belong to the process; it is recorded and enqueued under the queues' lock.
unsafe impl Send for CommandBuffer {}
// SAFETY: as above.
unsafe impl Sync for CommandBuffer {}

impl CommandBuffer {
    /// Records one more command. Naming no queue means that of the command buffer, which is in order.
    fn add(&self, command: &Command) -> Result<(), ClError> {
        let (to, queue, none, (n, waits, point, handle)) = (self.raw, ptr::null_mut(), ptr::null(), POINTS);
        match *command {
            Command::Kernel { ref kernel, dims, ref global, ref local } => {
                let (kernel, dims, at) = (kernel.raw(), dims as u32, ptr::null());
                let (global, local) = (global.as_ptr(), local.as_ptr());
                call!(in self.functions, clCommandNDRangeKernelKHR(
                    to, queue, none, kernel, dims, at, global, local, n, waits, point, handle
                ))
            }
            Command::Fill { to: mem, offset, bytes, ref pattern, length } => {
                let with = pattern.as_ptr().cast();
                match self.functions.transfers {
                    Transfers::Earlier(earlier) => call!(in earlier, clCommandFillBufferKHR(
                        to, queue, mem, with, length, offset, bytes, n, waits, point, handle
                    )),
                    Transfers::Later(later) => call!(in later, clCommandFillBufferKHR(
                        to, queue, none, mem, with, length, offset, bytes, n, waits, point, handle
                    )),
                }
            }
            Command::Copy { from, to: mem, from_offset, to_offset, bytes } => match self.functions.transfers {
                Transfers::Earlier(earlier) => call!(in earlier, clCommandCopyBufferKHR(
                    to, queue, from, mem, from_offset, to_offset, bytes, n, waits, point, handle
                )),
                Transfers::Later(later) => call!(in later, clCommandCopyBufferKHR(
                    to, queue, none, from, mem, from_offset, to_offset, bytes, n, waits, point, handle
                )),
            },
        }
    }

    /// Enqueues it. The event, unless it is null, is that of the last command. Under the queues' lock.
    pub(super) fn enqueue(&self, mut queue: cl_command_queue, event: *mut cl_event) -> Result<(), ClError> {
        call!(in self.functions, clEnqueueCommandBufferKHR(1, &mut queue, self.raw, 0, ptr::null(), event))
    }

    /// Whether it may be enqueued while it is on the queue already.
    pub(super) fn may_be_pending(&self) -> bool {
        self.functions.may_be_pending
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
    fn versions_choose_the_functions() {
        let of = |patch| dialect((0, 9, patch)).map(|d| (d.with_properties, d.in_order_is_enough));
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
        assert_eq!([(0, 8, 0), (0, 10, 0), (1, 0, 0)].map(dialect), [None; 3]);
    }

    #[test]
    fn versions_are_found_by_whole_names() {
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
