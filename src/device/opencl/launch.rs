//! Arguments of kernels, and the enqueueing of one kernel: the hot path of all work on an OpenCL device.

use std::ffi::c_void;
use std::ptr;

use super::driver::{ClBuffer, ClEvent, ClImage, ClKernel, call};
use super::errors::ClError;
use super::queue::Queue;
use crate::device::profiler::RecordKind;

/// A kernel argument. The set of types is closed, so that each argument has the size of its OpenCL C type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg<'a> {
    /// `__global` memory.
    Buffer(&'a ClBuffer),
    Image(&'a ClImage),
    /// The words in which a kernel records a fault: see `ClDevice::faults`.
    Faults(&'a ClBuffer),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
    /// A struct by value, in OpenCL C's layout.
    Bytes(&'a [u8]),
    /// The size of an argument in `__local` memory, in bytes.
    Local(usize),
}

/// The maximum number of launches between two flushes. More than one, because a flush per launch would slow down the host.
const MAX_UNFLUSHED_LAUNCHES: u32 = 16;
/// The number of launches between two checkpoints. A queue holds at most about twice this many launches, because drivers slow
/// down or run out of memory if a queue grows without bound.
const LAUNCHES_PER_CHECKPOINT: u32 = 1024;

/// True if a kernel with these arguments can record a fault of this thread.
pub(super) fn records_faults(args: &[Arg<'_>]) -> bool {
    args.iter().any(|arg| matches!(arg, Arg::Faults(_)))
}

/// Enqueues a kernel whose arguments are set. Returns the earlier launch to wait for if the queue is too long. If this call
/// succeeds, the kernel runs: a failed flush is repeated with the next launch, and every wait flushes as well.
pub(super) fn enqueue_kernel(
    queue: &mut Queue,
    kernel: &ClKernel,
    global: &[usize],
    local: &[usize],
) -> Result<Option<ClEvent>, ClError> {
    let mut raw = ptr::null_mut();
    let to = if is_checkpoint(queue, 1) { &raw mut raw } else { ptr::null_mut() };
    queue.command((RecordKind::Kernel, kernel.name(), 0), to, |queue, event| {
        let (dims, global, local) = (global.len() as u32, global.as_ptr(), local.as_ptr());
        call!(clEnqueueNDRangeKernel(queue, kernel.raw, dims, ptr::null(), global, local, 0, ptr::null(), event))
    })?;
    Ok(flush_if_due(queue, 1, (!raw.is_null()).then(|| ClEvent(raw))))
}

/// Counts launches that are about to be enqueued. Returns true if the last launch needs an event, to be the next checkpoint.
pub(super) fn is_checkpoint(queue: &mut Queue, launches: u32) -> bool {
    queue.since_checkpoint += launches;
    queue.since_checkpoint >= LAUNCHES_PER_CHECKPOINT
}

/// Flushes if a flush is due. Returns the earlier launch to wait for if the queue is too long.
pub(super) fn flush_if_due(queue: &mut Queue, launches: u32, checkpoint: Option<ClEvent>) -> Option<ClEvent> {
    queue.unflushed += launches;
    if queue.unflushed >= queue.flush_at || checkpoint.is_some() {
        if queue.flush().is_err() {
            return None; // without a flush the checkpoint might never be reached
        }
        queue.flush_at = (2 * queue.flush_at).min(MAX_UNFLUSHED_LAUNCHES);
    }
    let checkpoint = checkpoint?;
    queue.since_checkpoint = 0;
    queue.checkpoint.replace(checkpoint)
}

/// Sets an argument, unless it is a number that is already set. Call under the queues' lock.
pub(super) fn set_arg(kernel: &ClKernel, index: u32, arg: &Arg<'_>) -> Result<(), ClError> {
    fn value<T>(kernel: &ClKernel, index: u32, x: T) -> Result<(), ClError> {
        call!(clSetKernelArg(kernel.raw, index, size_of::<T>(), ptr::from_ref(&x).cast::<c_void>()))
    }
    fn number<T>(kernel: &ClKernel, index: u32, bits: u64, x: T) -> Result<(), ClError> {
        if kernel.has_number(index, bits) {
            return Ok(());
        }
        value(kernel, index, x)?;
        kernel.store_number(index, bits);
        Ok(())
    }
    match *arg {
        // Always set: a buffer may have the handle of a released buffer, and the driver need not notice that the buffer changed.
        Arg::Buffer(b) | Arg::Faults(b) => value(kernel, index, b.mem()),
        Arg::Image(image) => value(kernel, index, image.mem()),
        Arg::U32(x) => number(kernel, index, x.into(), x),
        Arg::I64(x) => number(kernel, index, x as u64, x),
        Arg::U64(x) => number(kernel, index, x, x),
        Arg::F32(x) => number(kernel, index, x.to_bits().into(), x),
        Arg::F64(x) => number(kernel, index, x.to_bits(), x),
        Arg::Bytes(b) => call!(clSetKernelArg(kernel.raw, index, b.len(), b.as_ptr().cast())),
        Arg::Local(bytes) => call!(clSetKernelArg(kernel.raw, index, bytes, ptr::null())),
    }
}
