//! `cl_qcom_recordable_queues`, Qualcomm's extension for Adreno GPUs: kernels recorded on a special queue, enqueued together.
//!
//! Recordings contain kernels, but no transfers. Some drivers crash or leak memory with this extension, so it is used only on
//! request. This module was written from the public headers, and has not been run on such a device.

use std::ffi::c_void;
use std::ptr;

use opencl3::types::{cl_command_queue, cl_event};

use super::Command;
use crate::device::opencl::ClDevice;
use crate::device::opencl::driver::{call, call_unlocked, create, info, send_and_sync, value};
use crate::device::opencl::errors::ClError;
use crate::device::opencl::functions::extension_function;

const NAME: &str = "cl_qcom_recordable_queues";
const CL_QUEUE_RECORDABLE_QCOM: u64 = 1 << 30;
const CL_DEVICE_RECORDABLE_QUEUE_MAX_SIZE: u32 = 0x41DE;
/// The error for a command that a recording cannot contain.
const CL_INVALID_OPERATION: i32 = -59;

/// `clEndRecordingQCOM` and `clReleaseRecordingQCOM`.
type Status = Option<unsafe extern "C" fn(*mut c_void) -> i32>;
/// `clNewRecordingQCOM`.
type NewRecording = Option<unsafe extern "C" fn(cl_command_queue, *mut i32) -> *mut c_void>;
/// `clEnqueueRecordingQCOM`: takes four arrays of changes to the recording with their lengths, events to wait for, and an event.
type EnqueueRecording = Option<
    unsafe extern "C" fn(
        cl_command_queue,
        *mut c_void,
        usize,
        *const c_void,
        usize,
        *const c_void,
        usize,
        *const c_void,
        usize,
        *const c_void,
        u32,
        *const cl_event,
        *mut cl_event,
    ) -> i32,
>;

#[derive(Clone, Copy)]
#[allow(non_snake_case, reason = "OpenCL's names")]
pub(super) struct RecordableQueues {
    clNewRecordingQCOM: NewRecording,
    clEndRecordingQCOM: Status,
    clReleaseRecordingQCOM: Status,
    clEnqueueRecordingQCOM: EnqueueRecording,
    pub(super) max_kernels: usize,
}

impl RecordableQueues {
    /// Returns the extension's functions, if the device has the extension.
    pub(super) fn for_device(device: &ClDevice) -> Result<Option<RecordableQueues>, ClError> {
        let (id, platform) = (device.id(), device.description.platform);
        let extensions = info!(clGetDeviceInfo(id, opencl3::device::CL_DEVICE_EXTENSIONS))?;
        if !extensions.split(|&b| b == b' ' || b == 0).any(|name| name == NAME.as_bytes()) {
            return Ok(None);
        }
        let max_kernels = value!(clGetDeviceInfo(id, CL_DEVICE_RECORDABLE_QUEUE_MAX_SIZE) as u32).unwrap_or(0);
        // SAFETY: the extension has functions of these types under these names.
        let found = unsafe {
            RecordableQueues {
                clNewRecordingQCOM: extension_function(platform, c"clNewRecordingQCOM")?,
                clEndRecordingQCOM: extension_function(platform, c"clEndRecordingQCOM")?,
                clReleaseRecordingQCOM: extension_function(platform, c"clReleaseRecordingQCOM")?,
                clEnqueueRecordingQCOM: extension_function(platform, c"clEnqueueRecordingQCOM")?,
                max_kernels: if max_kernels == 0 { usize::MAX } else { max_kernels as usize },
            }
        };
        let is_there = found.clNewRecordingQCOM.is_some() && found.clEnqueueRecordingQCOM.is_some();
        Ok(is_there.then_some(found))
    }

    /// Records kernels. Call under the queues' lock.
    ///
    /// # Errors
    /// The driver's errors, and a command that is not a kernel.
    pub(super) fn record(&self, device: &ClDevice, commands: &[Command]) -> Result<QueueRecording, ClError> {
        let (context, id) = (device.context, device.id());
        let queue = create!(clCreateCommandQueue(context, id, CL_QUEUE_RECORDABLE_QCOM))?;
        let mut recording = QueueRecording { raw: ptr::null_mut(), queue, functions: *self };
        recording.raw = create!(in self, clNewRecordingQCOM(queue))?;
        for command in commands {
            let Command::Kernel { kernel, dims, global, local } = command else {
                return Err(ClError::new("clNewRecordingQCOM", CL_INVALID_OPERATION));
            };
            let (kernel, dims, global, local) = (kernel.raw, *dims as u32, global.as_ptr(), local.as_ptr());
            let (none, unasked) = (ptr::null(), ptr::null_mut());
            call!(clEnqueueNDRangeKernel(queue, kernel, dims, none, global, local, 0, ptr::null(), unasked))?;
        }
        call!(in self, clEndRecordingQCOM(recording.raw))?;
        Ok(recording)
    }
}

/// A recording and the queue on which it was made. Released on drop, after the graph's last replay.
pub(super) struct QueueRecording {
    raw: *mut c_void,
    queue: cl_command_queue,
    functions: RecordableQueues,
}

// Recordings are made and enqueued under the queues' lock, also where a driver's extension functions are not thread-safe.
send_and_sync!(QueueRecording);

impl QueueRecording {
    /// Enqueues the recording. `event`, unless null, gets the event of the whole recording. Call under the queues' lock.
    pub(super) fn enqueue(&self, queue: cl_command_queue, event: *mut cl_event) -> Result<(), ClError> {
        let none = ptr::null();
        call!(in self.functions, clEnqueueRecordingQCOM(
            queue, self.raw, 0, none, 0, none, 0, none, 0, none, 0, ptr::null(), event
        ))
    }
}

impl Drop for QueueRecording {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let _ = call_unlocked!(in self.functions, clReleaseRecordingQCOM(self.raw));
        }
        let _ = call_unlocked!(clReleaseCommandQueue(self.queue));
    }
}
