//! One in-order queue: flushing it, markers and barriers, and finding out whether what was put on it is over.
//!
//! A queue gives times of commands only if it was created to. So while something is profiled, each stream has a second
//! queue. Neither is released, because threads wait for queues outside the lock. Events are released in batches, as soon as
//! their commands are over: drivers slow down when there are thousands of them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use opencl3::command_queue::CL_QUEUE_PROFILING_ENABLE;
use opencl3::event::{
    CL_PROFILING_COMMAND_END, CL_PROFILING_COMMAND_QUEUED, CL_PROFILING_COMMAND_START, CL_PROFILING_COMMAND_SUBMIT,
};
use opencl3::types::{cl_command_queue, cl_command_queue_properties, cl_context, cl_device_id, cl_event, cl_mem};

use super::driver::{ATTEMPTS, ClEvent, call, create, value};
use super::errors::{ClError, Class};
use super::exit;
use super::hints;
use crate::device::Device;
use crate::device::hints::StreamHints;
use crate::device::profiler::{self, Kind, Record};

/// Launches after a wait that are flushed together, so that the device starts while the host goes on; twice as many each
/// time after.
pub(super) const FIRST_FLUSH: u32 = 2;

/// What is said of a launch that turns out to have failed.
pub(super) const LAUNCH: &str = "an earlier clEnqueueNDRangeKernel";

/// Between two attempts to find out whether commands are over.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// A queue and what is counted under the lock.
pub(super) struct Queue {
    pub raw: cl_command_queue,
    /// Whether other code submits to the queue as well, so that no other may stand in for it.
    is_adopted: bool,
    /// Launches since the last flush, and how many make the next one due.
    pub unflushed: u32,
    pub flush_at: u32,
    /// Launches since `checkpoint` was taken.
    pub since_checkpoint: u32,
    /// An earlier launch to wait for when the queue has grown too long behind it.
    pub checkpoint: Option<ClEvent>,
    /// Transfers that nobody waits for in particular, and the calls that enqueued them, in order.
    pub transfers: VecDeque<(&'static str, Arc<ClEvent>)>,
    /// What a command failed with after it was submitted: the next wait that a user asks for reports it.
    pub failed: Option<ClError>,
    /// The last answer sought by `is_idle`: what had been submitted then, and the event behind it.
    pub(super) probe: Option<(u64, ClEvent)>,
    pub(super) hints: StreamHints,
    /// The queue that is not in use: the one that gives times, or the one that does not.
    pub(super) other: Option<cl_command_queue>,
    /// The commands whose times are wanted, while something is profiled.
    pub(super) profiled: Option<Profiled>,
}

// SAFETY: a queue is a process-wide object that OpenCL's thread-safe functions take.
unsafe impl Send for Queue {}

/// A queue is dropped only if opening its device failed.
impl Drop for Queue {
    fn drop(&mut self) {
        for raw in [Some(self.raw), self.other].into_iter().flatten() {
            let _ = call!(clReleaseCommandQueue(raw));
        }
    }
}

impl Queue {
    /// A new queue of a device.
    pub(super) fn create(context: cl_context, id: cl_device_id, hints: StreamHints) -> Result<Queue, ClError> {
        let (raw, hints) = Queue::create_raw(context, id, 0, hints)?;
        Ok(Queue::new(raw, hints, false))
    }

    /// The in-order queue of other code.
    pub(super) fn adopt(raw: cl_command_queue) -> Result<Queue, ClError> {
        call!(clRetainCommandQueue(raw))?;
        Ok(Queue::new(raw, StreamHints::default(), true))
    }

    fn new(raw: cl_command_queue, hints: StreamHints, is_adopted: bool) -> Queue {
        Queue {
            raw,
            is_adopted,
            hints,
            unflushed: 0,
            flush_at: FIRST_FLUSH,
            since_checkpoint: 0,
            checkpoint: None,
            transfers: VecDeque::new(),
            failed: None,
            probe: None,
            other: None,
            profiled: None,
        }
    }

    /// A queue, and the hints that it has: none where the driver refuses these.
    fn create_raw(
        context: cl_context,
        id: cl_device_id,
        properties: cl_command_queue_properties,
        hints: StreamHints,
    ) -> Result<(cl_command_queue, StreamHints), ClError> {
        if let Some(all) = hints::properties(hints, properties) {
            match exit::call(|| create!(clCreateCommandQueueWithProperties(context, id, all.as_ptr()))) {
                Err(refused) if refused.classify() == Class::Other => {}
                created => return created.map(|raw| (raw, hints)),
            }
        }
        let created = exit::call(|| create!(clCreateCommandQueue(context, id, properties)));
        created.map(|raw| (raw, StreamHints::default()))
    }

    /// What a command failed with after it was submitted, once. A wait for the queue may succeed although one failed; the
    /// checkpoint's event says how that one launch ended, those of transfers say it of each.
    pub(super) fn take_failed(&mut self) -> Option<ClError> {
        if let Some(launch) = self.checkpoint.take_if(|launch| launch.is_over().unwrap_or(false)) {
            self.since_checkpoint = 0;
            self.note_failed(LAUNCH, launch.failure().unwrap_or_else(|e| Some(e.code)));
        }
        self.collect_transfers();
        self.failed.take()
    }

    /// Has the next wait report a command that this call enqueued, if it failed.
    pub(super) fn note_failed(&mut self, call: &'static str, code: Option<i32>) {
        self.failed = self.failed.or(code.map(|code| ClError::new(call, code)));
    }

    /// Forgets transfers that are over, and notes those that failed.
    pub(super) fn collect_transfers(&mut self) {
        let is_over = |(_, event): &(_, Arc<ClEvent>)| event.is_over().unwrap_or(false);
        while self.transfers.front().is_some_and(is_over)
            && let Some((call, over)) = self.transfers.pop_front()
        {
            self.note_failed(call, over.failure().unwrap_or_else(|e| Some(e.code)));
        }
    }

    /// Makes sure that the device starts on what was enqueued. After a failure it is due as before.
    pub(super) fn flush(&mut self) -> Result<(), ClError> {
        call!(clFlush(self.raw))?;
        self.unflushed = 0;
        Ok(())
    }

    /// Waits, under the lock, until everything on the queue is over.
    pub(super) fn finish(&mut self) -> Result<(), ClError> {
        call!(clFinish(self.raw)).or_else(|failed| self.ascertain(None, failed))
    }

    /// Unmaps bytes of a buffer, and waits until that is done, under the lock. It is tried a few times. Where the driver has
    /// accepted it and does not tell how it ended, it counts as done: a second time would be a mistake.
    pub(super) fn try_unmap(&mut self, mem: cl_mem, at: *mut c_void) -> Result<(), ClError> {
        let mut tried = Ok(());
        for _ in 0..ATTEMPTS {
            let mut raw = ptr::null_mut();
            tried = call!(clEnqueueUnmapMemObject(self.raw, mem, at, 0, ptr::null(), &mut raw));
            if tried.is_ok() {
                let event = ClEvent(raw);
                match self.finish() {
                    Err(e) if e.unfinished || e.is_fatal() => return Err(ClError { unfinished: true, ..e }),
                    _ => {}
                }
                match event.failure() {
                    Ok(Some(code)) => tried = Err(ClError::new("clEnqueueUnmapMemObject", code)),
                    _ => return Ok(()),
                }
            }
        }
        tried
    }

    /// Waits, under the lock and after a call that failed, until everything on the queue is over, and tells how the command
    /// of this event ended. Everything that waits is tried a few times; after that the error says
    /// [`unfinished`](ClError::unfinished).
    pub(super) fn ascertain(&mut self, event: Option<&ClEvent>, failed: ClError) -> Result<(), ClError> {
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                thread::sleep(RETRY_AFTER);
            }
            // A marker that fails does not say that the commands before it are over.
            if call!(clFinish(self.raw)).or_else(|_| self.mark()?.wait_for_success()).is_err() {
                continue;
            }
            if failed.is_fatal() {
                return Err(failed);
            }
            let code = event.map_or(Ok(None), ClEvent::failure)?;
            return code.map_or(Ok(()), |code| Err(ClError::new(failed.call, code)));
        }
        Err(ClError { unfinished: true, ..failed })
    }

    /// Enqueues a marker: its event is done when everything before it is.
    pub(super) fn marker(&self, event: *mut cl_event) -> Result<(), ClError> {
        marker(self.raw, event)
    }

    /// Enqueues a marker and flushes, so that another queue may wait for it: without the flush this one might never get there.
    pub(super) fn mark(&mut self) -> Result<ClEvent, ClError> {
        let mut raw = ptr::null_mut();
        self.marker(&mut raw)?;
        let event = ClEvent(raw);
        self.flush()?;
        Ok(event)
    }

    /// Holds back everything enqueued later until the event is done.
    pub(super) fn barrier(&self, event: &ClEvent) -> Result<(), ClError> {
        barrier(self.raw, event)
    }

    /// [`mark`](Self::mark), with an event that knows when it was done: the marker is on a queue that gives times, and waits for
    /// one on this queue.
    pub(super) fn mark_timed(&mut self, context: cl_context, id: cl_device_id) -> Result<ClEvent, ClError> {
        let here = self.mark()?;
        if self.profiled.is_some() && !self.is_adopted {
            return Ok(here);
        }
        let timing = self.other_queue(true, context, id)?;
        let mut raw = ptr::null_mut();
        barrier(timing, &here)?;
        marker(timing, &mut raw)?;
        let event = ClEvent(raw);
        call!(clFlush(timing))?;
        Ok(event)
    }

    /// The queue that is not in use, which gives times or does not.
    fn other_queue(&mut self, times: bool, context: cl_context, id: cl_device_id) -> Result<cl_command_queue, ClError> {
        if self.other.is_none() {
            let properties = if times { CL_QUEUE_PROFILING_ENABLE } else { 0 };
            self.other = Some(Queue::create_raw(context, id, properties, self.hints)?.0);
        }
        Ok(self.other.expect("made above"))
    }

    /// Enqueues a command with `enqueue`, which is given the queue and where the command's event goes: to `event`, unless
    /// that is null, and to the profiler while something is profiled.
    #[inline]
    pub(super) fn command(
        &mut self,
        (kind, name, bytes): (Kind, &'static str, usize),
        event: *mut cl_event,
        enqueue: impl FnOnce(cl_command_queue, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<(), ClError> {
        let Some(profiled) = &mut self.profiled else { return enqueue(self.raw, event) };
        let record = Record::begin(kind, name, profiled.device).on_stream(profiled.stream).with_bytes(bytes);
        let mut raw = ptr::null_mut();
        enqueue(self.raw, &mut raw)?;
        let record = record.ended();
        if !event.is_null() && !raw.is_null() {
            // SAFETY: the caller's place for an event, which a driver would write to as well.
            unsafe { *event = raw };
            if call!(clRetainEvent(raw)).is_err() {
                profiler::push(record); // the event is the caller's alone
                return Ok(());
            }
        }
        match raw.is_null() {
            true => profiler::push(record),
            false => profiled.pending.push_back((ClEvent(raw), record)),
        }
        if profiled.pending.len() % BATCH == 0 {
            profiled.collect();
        }
        Ok(())
    }

    /// Enqueues a copy of n bytes from one buffer and offset to another.
    pub(super) fn copy(
        &mut self,
        (src, from): (cl_mem, usize),
        (dst, to): (cl_mem, usize),
        n: usize,
        event: *mut cl_event,
    ) -> Result<(), ClError> {
        self.command((Kind::Copy, "clEnqueueCopyBuffer", n), event, |q, event| {
            call!(clEnqueueCopyBuffer(q, src, dst, from, to, n, 0, ptr::null(), event))
        })
    }

    /// Enqueues a fill of n bytes from an offset on with a pattern.
    pub(super) fn fill(&mut self, mem: cl_mem, pattern: &[u8], at: usize, n: usize) -> Result<(), ClError> {
        let (from, length) = (pattern.as_ptr().cast(), pattern.len());
        self.command((Kind::Fill, "clEnqueueFillBuffer", n), ptr::null_mut(), |q, event| {
            call!(clEnqueueFillBuffer(q, mem, from, length, at, n, 0, ptr::null(), event))
        })
    }

    /// Goes on with a queue that gives times, or with one that does not; an adopted queue stays, and gives times if it was
    /// created to. What was submitted is over then.
    pub(super) fn set_profiling(
        &mut self,
        on: bool,
        (context, id): (cl_context, cl_device_id),
        (device, stream): (Device, u32),
    ) -> Result<(), ClError> {
        if self.profiled.is_some() == on {
            return Ok(());
        }
        let other = if self.is_adopted { None } else { Some(self.other_queue(on, context, id)?) };
        self.finish()?;
        self.unflushed = 0;
        self.collect_profiled();
        if let Some(other) = other {
            self.other = Some(mem::replace(&mut self.raw, other));
        }
        self.profiled = on.then(|| Profiled { device, stream, pending: VecDeque::with_capacity(2 * BATCH) });
        Ok(())
    }

    /// Records the commands that are over.
    pub(super) fn collect_profiled(&mut self) {
        self.profiled.iter_mut().for_each(Profiled::collect);
    }
}

/// Commands after which those that are over are looked for.
const BATCH: usize = 64;

/// The commands of a queue whose times are not known yet, in order.
pub(super) struct Profiled {
    device: Device,
    stream: u32,
    pending: VecDeque<(ClEvent, Record)>,
}

impl Profiled {
    /// Records the commands that are over, and releases their events.
    fn collect(&mut self) {
        while self.pending.front().is_some_and(|(event, _)| event.is_over().unwrap_or(true)) {
            if let Some((event, mut record)) = self.pending.pop_front() {
                record.device_times = times(&event).map(Box::new);
                profiler::push(record);
            }
        }
    }
}

/// Enqueues a marker.
fn marker(queue: cl_command_queue, event: *mut cl_event) -> Result<(), ClError> {
    match call!(clEnqueueMarkerWithWaitList(queue, 0, ptr::null(), event)) {
        Err(e) if e.is_missing() => call!(clEnqueueMarker(queue, event)),
        other => other,
    }
}

/// Holds back everything enqueued later until the event is done.
fn barrier(queue: cl_command_queue, event: &ClEvent) -> Result<(), ClError> {
    match call!(clEnqueueBarrierWithWaitList(queue, 1, &event.0, ptr::null_mut())) {
        Err(e) if e.is_missing() => {
            let mut raw = event.0;
            call!(clEnqueueWaitForEvents(queue, 1, &mut raw))
        }
        other => other,
    }
}

/// When a command was queued, submitted, started and ended; None where the driver does not tell.
pub(super) fn times(event: &ClEvent) -> Option<[u64; 4]> {
    let time = |which| exit::call(|| value!(clGetEventProfilingInfo(event.0, which) as u64)).ok();
    Some([
        time(CL_PROFILING_COMMAND_QUEUED)?,
        time(CL_PROFILING_COMMAND_SUBMIT)?,
        time(CL_PROFILING_COMMAND_START)?,
        time(CL_PROFILING_COMMAND_END)?,
    ])
}
