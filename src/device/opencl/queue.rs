//! One in-order queue: flushes, markers, barriers, and whether enqueued commands are over.
//!
//! A queue measures the times of commands only if created with profiling. So while profiling, each stream uses a second
//! queue. Neither queue is released, because threads wait for queues outside the lock. Events are released in batches once
//! their commands are over: drivers slow down with thousands of live events.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use opencl_sys::{self as cl, cl_command_queue, cl_context, cl_device_id, cl_event, cl_mem};

use super::driver::{ATTEMPTS, ClEvent, call, create, send_and_sync, value};
use super::errors::{ClError, Class};
use super::exit;
use super::hints;
use crate::device::Device;
use crate::device::hints::StreamHints;
use crate::device::profiler::{self, Record, RecordKind};

/// The number of launches after a wait that are flushed together, so that the device starts early. The number doubles with
/// every further flush.
pub(super) const FIRST_FLUSH_LAUNCHES: u32 = 2;

/// The name of the call in errors of failed launches.
pub(super) const EARLIER_LAUNCH: &str = "an earlier clEnqueueNDRangeKernel";

/// The pause between two attempts to wait until commands are over.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A queue, and the counts that the queues' lock protects.
pub(super) struct Queue {
    pub raw: cl_command_queue,
    context: cl_context,
    id: cl_device_id,
    /// True if other code submits to the queue as well, so that no second queue can replace it for profiling.
    is_adopted: bool,
    /// The number of launches since the last flush.
    pub unflushed: u32,
    /// The number of unflushed launches at which the next flush is due.
    pub flush_at: u32,
    /// The number of launches since `checkpoint` was taken.
    pub since_checkpoint: u32,
    /// The earlier launch to wait for when the queue has grown too long.
    pub checkpoint: Option<ClEvent>,
    /// Transfers whose callers do not wait, each with the name of its call, in order.
    pub transfers: VecDeque<(&'static str, Arc<ClEvent>)>,
    /// The error of a command that failed after submission; the next wait by a user reports it.
    pub failed: Option<ClError>,
    /// The marker of the last [`is_idle`](super::ClDevice::is_idle), and the count of submissions before it.
    pub(super) idle_marker: Option<(u64, ClEvent)>,
    pub(super) hints: StreamHints,
    /// The stream's second queue, which is not in use now: the queue with profiling, or the queue without.
    pub(super) second: Option<cl_command_queue>,
    /// The commands whose times are pending, while profiling.
    pub(super) profiled: Option<Profiled>,
}

send_and_sync!(Queue);

/// Releases the queues. Runs only if opening the device failed.
impl Drop for Queue {
    fn drop(&mut self) {
        for raw in [Some(self.raw), self.second].into_iter().flatten() {
            let _ = call!(clReleaseCommandQueue(raw));
        }
    }
}

impl Queue {
    pub(super) fn create(context: cl_context, id: cl_device_id, hints: StreamHints) -> Result<Queue, ClError> {
        let (raw, hints) = Queue::create_raw(context, id, 0, hints)?;
        Ok(Queue::new(context, id, raw, hints, false))
    }

    /// Retains the in-order queue of other code.
    pub(super) fn adopt(context: cl_context, id: cl_device_id, raw: cl_command_queue) -> Result<Queue, ClError> {
        call!(clRetainCommandQueue(raw))?;
        Ok(Queue::new(context, id, raw, StreamHints::default(), true))
    }

    fn new(
        context: cl_context,
        id: cl_device_id,
        raw: cl_command_queue,
        hints: StreamHints,
        is_adopted: bool,
    ) -> Queue {
        Queue {
            raw,
            context,
            id,
            is_adopted,
            hints,
            unflushed: 0,
            flush_at: FIRST_FLUSH_LAUNCHES,
            since_checkpoint: 0,
            checkpoint: None,
            transfers: VecDeque::new(),
            failed: None,
            idle_marker: None,
            second: None,
            profiled: None,
        }
    }

    /// Creates a queue with the hints, or without hints if the driver refuses them. Returns the hints in force.
    fn create_raw(
        context: cl_context,
        id: cl_device_id,
        properties: cl::cl_command_queue_properties,
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

    /// Takes the error of a command that failed after submission. A wait for the queue can succeed although a command failed: only
    /// the events of the checkpoint and of transfers report the failure.
    pub(super) fn take_failed(&mut self) -> Option<ClError> {
        if let Some(launch) = self.checkpoint.take_if(|launch| launch.is_over().unwrap_or(false)) {
            self.since_checkpoint = 0;
            self.note_failed(EARLIER_LAUNCH, launch.failure().unwrap_or_else(|e| Some(e.code)));
        }
        self.collect_transfers();
        self.failed.take()
    }

    /// Stores the error of a command that `call` enqueued, if it failed, for the next wait to report.
    pub(super) fn note_failed(&mut self, call: &'static str, code: Option<i32>) {
        self.failed = self.failed.or(code.map(|code| ClError::new(call, code)));
    }

    /// Forgets transfers that are over, and stores the errors of failed transfers.
    pub(super) fn collect_transfers(&mut self) {
        let is_over = |(_, event): &(_, Arc<ClEvent>)| event.is_over().unwrap_or(false);
        while self.transfers.front().is_some_and(is_over)
            && let Some((call, over)) = self.transfers.pop_front()
        {
            self.note_failed(call, over.failure().unwrap_or_else(|e| Some(e.code)));
        }
    }

    /// Flushes, so that the device starts on the enqueued commands. After an error, the flush is still due.
    pub(super) fn flush(&mut self) -> Result<(), ClError> {
        call!(clFlush(self.raw))?;
        self.unflushed = 0;
        Ok(())
    }

    /// Waits, under the queues' lock, until all commands on the queue are over.
    pub(super) fn finish(&mut self) -> Result<(), ClError> {
        call!(clFinish(self.raw)).or_else(|failed| self.wait_until_over(None, failed))
    }

    /// Unmaps bytes of a buffer and waits, under the queues' lock. A refused unmap is retried a few times. If the driver accepted
    /// the unmap and does not report its status, the unmap counts as done, because a second unmap would be an error.
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

    /// After a failed call, waits under the queues' lock until all commands on the queue are over, and returns the outcome of
    /// `event`. Failed waits are retried a few times; if none succeeds, the error is [`unfinished`](ClError::unfinished).
    pub(super) fn wait_until_over(&mut self, event: Option<&ClEvent>, failed: ClError) -> Result<(), ClError> {
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                thread::sleep(RETRY_PAUSE);
            }
            // A failed marker does not mean that the commands before the marker are over.
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

    /// Enqueues a marker and flushes: without the flush, another queue's wait for the marker might never end.
    pub(super) fn mark(&mut self) -> Result<ClEvent, ClError> {
        let mut raw = ptr::null_mut();
        marker(self.raw, &mut raw)?;
        let event = ClEvent(raw);
        self.flush()?;
        Ok(event)
    }

    /// Enqueues a marker whose event has a time. Unless this queue is known to measure times, the marker is on the second queue,
    /// behind a barrier that waits for a marker on this queue.
    pub(super) fn mark_timed(&mut self) -> Result<ClEvent, ClError> {
        let here = self.mark()?;
        if self.profiled.is_some() && !self.is_adopted {
            return Ok(here);
        }
        let timing = self.second_queue(true)?;
        let mut raw = ptr::null_mut();
        barrier(timing, &here)?;
        marker(timing, &mut raw)?;
        let event = ClEvent(raw);
        call!(clFlush(timing))?;
        Ok(event)
    }

    /// Returns the second queue, created if necessary, with profiling if `times`.
    fn second_queue(&mut self, times: bool) -> Result<cl_command_queue, ClError> {
        if let Some(second) = self.second {
            return Ok(second);
        }
        let properties = if times { cl::CL_QUEUE_PROFILING_ENABLE } else { 0 };
        Ok(*self.second.insert(Queue::create_raw(self.context, self.id, properties, self.hints)?.0))
    }

    /// Enqueues a command with `enqueue`, which receives the queue and a pointer for the command's event. The event goes to
    /// `event`, unless null, and to the profiler while profiling.
    #[inline]
    pub(super) fn command(
        &mut self,
        (kind, name, bytes): (RecordKind, &'static str, usize),
        event: *mut cl_event,
        enqueue: impl FnOnce(cl_command_queue, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<(), ClError> {
        let Some(profiled) = &mut self.profiled else { return enqueue(self.raw, event) };
        let record = Record::begin(kind, name, profiled.device, profiled.stream, bytes as u64);
        let mut raw = ptr::null_mut();
        enqueue(self.raw, &mut raw)?;
        let record = record.ended();
        if !event.is_null() && !raw.is_null() {
            // SAFETY: `event` is the caller's pointer for an event, to which a driver would write as well.
            unsafe { *event = raw };
            if call!(clRetainEvent(raw)).is_err() {
                profiler::push(record); // not retained: the event belongs to the caller alone
                return Ok(());
            }
        }
        match raw.is_null() {
            true => profiler::push(record),
            false => profiled.pending.push_back((ClEvent(raw), record)),
        }
        if profiled.pending.len() % PROFILED_BATCH == 0 {
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
        self.command((RecordKind::Copy, "clEnqueueCopyBuffer", n), event, |q, event| {
            call!(clEnqueueCopyBuffer(q, src, dst, from, to, n, 0, ptr::null(), event))
        })
    }

    /// Enqueues a fill of n bytes from offset `at` on with a pattern.
    pub(super) fn fill(&mut self, mem: cl_mem, pattern: &[u8], at: usize, n: usize) -> Result<(), ClError> {
        let (from, length) = (pattern.as_ptr().cast(), pattern.len());
        self.command((RecordKind::Fill, "clEnqueueFillBuffer", n), ptr::null_mut(), |q, event| {
            call!(clEnqueueFillBuffer(q, mem, from, length, at, n, 0, ptr::null(), event))
        })
    }

    /// Switches to the queue with profiling, or back. An adopted queue is never replaced, and has times only if created with
    /// profiling. Waits for all submitted commands.
    pub(super) fn set_profiling(&mut self, on: bool, device: Device, stream: u32) -> Result<(), ClError> {
        if self.profiled.is_some() == on {
            return Ok(());
        }
        let other = if self.is_adopted { None } else { Some(self.second_queue(on)?) };
        self.finish()?;
        self.unflushed = 0;
        self.collect_profiled();
        if let Some(other) = other {
            self.second = Some(mem::replace(&mut self.raw, other));
        }
        self.profiled = on.then(|| Profiled { device, stream, pending: VecDeque::with_capacity(2 * PROFILED_BATCH) });
        Ok(())
    }

    pub(super) fn collect_profiled(&mut self) {
        self.profiled.iter_mut().for_each(Profiled::collect);
    }
}

/// The number of commands between two scans for commands that are over.
const PROFILED_BATCH: usize = 64;

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
                record.device_times = command_times(&event).map(Box::new);
                profiler::push(record);
            }
        }
    }
}

/// Enqueues a marker, whose event is done when all commands before the marker are done.
pub(super) fn marker(queue: cl_command_queue, event: *mut cl_event) -> Result<(), ClError> {
    match call!(clEnqueueMarkerWithWaitList(queue, 0, ptr::null(), event)) {
        Err(e) if e.is_missing() => call!(clEnqueueMarker(queue, event)),
        other => other,
    }
}

/// Makes commands enqueued from now on wait for the event.
pub(super) fn barrier(queue: cl_command_queue, event: &ClEvent) -> Result<(), ClError> {
    match call!(clEnqueueBarrierWithWaitList(queue, 1, &event.0, ptr::null_mut())) {
        Err(e) if e.is_missing() => {
            let mut raw = event.0;
            call!(clEnqueueWaitForEvents(queue, 1, &mut raw))
        }
        other => other,
    }
}

/// Returns the times at which a command was queued, submitted, started and ended, in nanoseconds; None if the driver refuses.
pub(super) fn command_times(event: &ClEvent) -> Option<[u64; 4]> {
    let time = |which| exit::call(|| value!(clGetEventProfilingInfo(event.0, which) as u64)).ok();
    Some([
        time(cl::CL_PROFILING_COMMAND_QUEUED)?,
        time(cl::CL_PROFILING_COMMAND_SUBMIT)?,
        time(cl::CL_PROFILING_COMMAND_START)?,
        time(cl::CL_PROFILING_COMMAND_END)?,
    ])
}
