//! Running kernels: the hot path of everything on an OpenCL device.

use std::ffi::c_void;
use std::ptr;

use super::driver::{ClBuffer, ClEvent, ClImage, ClKernel, call};
use super::errors::ClError;
use super::{ClDevice, capture, queue::Queue};
use crate::device::capture::is_capturing;
use crate::device::profiler::Kind;
use crate::device::{StreamId, count_launch};
use crate::{Error, Result};

/// A kernel's argument. A closed set, so that its size is always the one OpenCL C gives the type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg<'a> {
    /// `__global` memory.
    Buffer(&'a ClBuffer),
    Image(&'a ClImage),
    /// The words in which a kernel records what it finds wrong: see [`ClDevice::faults`].
    Faults(&'a ClBuffer),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
    /// A struct by value, laid out as OpenCL C lays it out.
    Bytes(&'a [u8]),
    /// So many bytes of `__local` memory.
    Local(usize),
}

/// Launches between two flushes, once there are many: a flush is not paid for each.
const FLUSH_EVERY: u32 = 16;
/// The queue never holds more than about twice this many launches: drivers slow down, or run out of memory, when it
/// grows without bound.
const CHECKPOINT_EVERY: u32 = 1024;

impl ClDevice {
    /// Runs a kernel over at least `global` work-items (rounded up to whole groups of `local`; the kernel checks its
    /// bounds), on this thread's current stream. Returns as soon as it is submitted. Nothing at all runs, and nothing is
    /// counted, if `global` has a zero.
    ///
    /// # Errors
    /// A wrong number of arguments, a group larger than the kernel can have, and everything the driver refuses. The kernel
    /// does not run then.
    pub(crate) fn launch(&self, kernel: &ClKernel, args: &[Arg<'_>], global: &[usize], local: &[usize]) -> Result<()> {
        self.launch_uncounted(kernel, args, global, local)?;
        if !global.contains(&0) && !capture::count_launch(self.device()) {
            count_launch();
        }
        Ok(())
    }

    /// [`launch`](Self::launch), for what is no operation of the user's.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn launch_uncounted(
        &self,
        kernel: &ClKernel,
        args: &[Arg<'_>],
        global: &[usize],
        local: &[usize],
    ) -> Result<()> {
        self.check_lost()?;
        let dims = global.len();
        let bug = |reason: String| Err(Error::invalid(kernel.name(), reason));
        if dims == 0 || dims > 3 || dims != local.len() || local.contains(&0) {
            return bug(format!("cannot launch over {global:?} in groups of {local:?}"));
        }
        // Fewer arguments would leave the last launch's in place.
        if args.len() != kernel.arg_count() {
            return bug(format!("the kernel takes {} arguments, not {}", kernel.arg_count(), args.len()));
        }
        if local.iter().product::<usize>() > kernel.max_work_group() {
            return bug(format!("groups of {local:?} exceed the kernel's {} work-items", kernel.max_work_group()));
        }
        if global.contains(&0) {
            return Ok(());
        }
        let mut whole = [1usize; 3];
        for d in 0..dims {
            whole[d] = match global[d].checked_next_multiple_of(local[d]) {
                Some(n) => n,
                None => return bug(format!("{global:?} work-items are too many")),
            };
        }
        if is_capturing(self.device()) {
            return self.record_kernel(kernel, args, &whole[..dims], local);
        }
        let slot = records_faults(args).then(|| self.slot());
        slot.map_or(Ok(()), |slot| self.clear(slot))?;
        let stream = self.current_stream();
        let behind = {
            let mut queue = self.lock(stream).map_err(|e| self.error(self.settle(e)))?;
            let launched = enqueue(&mut queue, kernel, args, &whole[..dims], local);
            if let Some(slot) = slot {
                slot.note_pending(stream);
            }
            launched
        };
        self.hold_back(stream, behind.map_err(|e| self.error(self.settle(e)))?);
        Ok(())
    }

    /// Waits for `behind`, an earlier launch that is given when the queue has grown too long. If that one failed, or the driver
    /// does not tell, the next wait on the stream reports it; what was just submitted runs anyway.
    pub(super) fn hold_back(&self, stream: StreamId, behind: Option<ClEvent>) {
        let _waiting = behind.as_ref().and_then(|_| self.waiting("clWaitForEvents", stream));
        if let Some(Err(e)) = behind.map(|event| event.wait_for_success()) {
            self.note_failed(stream, e.code);
        }
    }
}

/// Whether a kernel with these arguments may record a fault of this thread's.
pub(super) fn records_faults(args: &[Arg<'_>]) -> bool {
    args.iter().any(|arg| matches!(arg, Arg::Faults(_)))
}

/// Sets the arguments and enqueues, as one step under the lock. Gives the launch to wait for if the queue is too long.
fn enqueue(
    queue: &mut Queue,
    kernel: &ClKernel,
    args: &[Arg<'_>],
    global: &[usize],
    local: &[usize],
) -> Result<Option<ClEvent>, ClError> {
    for (i, arg) in args.iter().enumerate() {
        set_arg(kernel, i as u32, arg)?;
    }
    enqueue_kernel(queue, kernel, global, local)
}

/// Enqueues a kernel whose arguments are set, as [`enqueue`] does. It runs unless there is an error: a flush that fails is due
/// again with the next launch, and whoever waits flushes as well.
pub(super) fn enqueue_kernel(
    queue: &mut Queue,
    kernel: &ClKernel,
    global: &[usize],
    local: &[usize],
) -> Result<Option<ClEvent>, ClError> {
    let mut raw = ptr::null_mut();
    let to = if is_checkpoint(queue, 1) { &raw mut raw } else { ptr::null_mut() };
    queue.command((Kind::Kernel, kernel.name(), 0), to, |queue, event| {
        let (dims, global, local) = (global.len() as u32, global.as_ptr(), local.as_ptr());
        call!(clEnqueueNDRangeKernel(queue, kernel.raw(), dims, ptr::null(), global, local, 0, ptr::null(), event))
    })?;
    Ok(launched(queue, 1, (!raw.is_null()).then(|| ClEvent(raw))))
}

/// Counts launches that are enqueued next. Tells whether the last of them is to give an event: the next checkpoint.
pub(super) fn is_checkpoint(queue: &mut Queue, launches: u32) -> bool {
    queue.since_checkpoint += launches;
    queue.since_checkpoint >= CHECKPOINT_EVERY
}

/// Flushes after launches where that is due. Gives the launch to wait for if the queue is too long.
pub(super) fn launched(queue: &mut Queue, launches: u32, checkpoint: Option<ClEvent>) -> Option<ClEvent> {
    queue.unflushed += launches;
    if queue.unflushed >= queue.flush_at || checkpoint.is_some() {
        if queue.flush().is_err() {
            return None; // nor is there a checkpoint that might never be reached
        }
        queue.flush_at = (2 * queue.flush_at).min(FLUSH_EVERY);
    }
    let checkpoint = checkpoint?;
    queue.since_checkpoint = 0;
    queue.checkpoint.replace(checkpoint)
}

/// Sets an argument, but for a number that the kernel has there from an earlier launch. Under the queues' lock.
pub(super) fn set_arg(kernel: &ClKernel, index: u32, arg: &Arg<'_>) -> Result<(), ClError> {
    fn value<T>(kernel: &ClKernel, index: u32, x: T) -> Result<(), ClError> {
        call!(clSetKernelArg(kernel.raw(), index, size_of::<T>(), ptr::from_ref(&x).cast::<c_void>()))
    }
    fn number<T>(kernel: &ClKernel, index: u32, bits: u64, x: T) -> Result<(), ClError> {
        if kernel.has_number(index, bits) {
            return Ok(());
        }
        value(kernel, index, x)?;
        kernel.note_number(index, bits);
        Ok(())
    }
    match *arg {
        // Always: a buffer may have the handle of one that is gone, which the driver need not see to be another.
        Arg::Buffer(b) | Arg::Faults(b) => value(kernel, index, b.mem()),
        Arg::Image(image) => value(kernel, index, image.mem()),
        Arg::U32(x) => number(kernel, index, x.into(), x),
        Arg::I64(x) => number(kernel, index, x as u64, x),
        Arg::U64(x) => number(kernel, index, x, x),
        Arg::F32(x) => number(kernel, index, x.to_bits().into(), x),
        Arg::F64(x) => number(kernel, index, x.to_bits(), x),
        Arg::Bytes(b) => call!(clSetKernelArg(kernel.raw(), index, b.len(), b.as_ptr().cast())),
        Arg::Local(bytes) => call!(clSetKernelArg(kernel.raw(), index, bytes, ptr::null())),
    }
}
