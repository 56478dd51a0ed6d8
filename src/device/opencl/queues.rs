//! A device's queues, one in-order queue per stream, and the events between them.
//!
//! One lock covers all queues of a device, because kernel objects are shared, and setting arguments and enqueueing must be
//! one step. Queues live as long as their device: a dropped stream leaves its queue to the next stream.
//!
//! After a failed call, commands may be done, or may still use the host's memory. So a function that submits commands and waits
//! takes ownership of that memory, and returns the memory once the commands are over. A failed wait is followed by other waits
//! ([`Queue::wait_until_over`]). If no wait succeeds, the device is lost, the memory is never released, and later calls fail.

use std::any::Any;
use std::ffi::c_void;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use opencl3::types::{cl_command_queue, cl_context, cl_device_id, cl_event};

use super::ClDevice;
use super::driver::{ClBuffer, ClEvent, call, call_unlocked, retry_now, send_and_sync};
use super::errors::ClError;
use super::exit;
use super::fault::{FaultReads, FaultSlot, FaultWords, MAX_UNREAD_SLOTS, NO_FAULT, Reading};
use super::hints;
use super::launch::Arg;
use super::queue::{FIRST_FLUSH_LAUNCHES, Queue, barrier, command_times, marker};
use crate::device::hints::StreamHints;
use crate::device::profiler::{self, RecordKind};
use crate::device::stream_id::{self, MAX_STREAMS, StreamId, StreamIds};
use crate::device::{DeviceKind, capture, log};
use crate::sync::lock;
use crate::{Error, Result};

/// The queue for internal commands that the host waits for, such as committing memory. The queue belongs to no user's stream, so its
/// commands never wait behind a stream's work.
pub(super) const SERVICE_STREAM: StreamId = StreamId(1);

/// The maximum size of the buffers of the copy measurement, in bytes.
const MAX_COPIED_BYTES: usize = 256 << 20;
const COPIES: u32 = 8;

const NO_WAITS_REASON: &str = "the captured commands run only when the graph is replayed";

/// The progress of a stream. Written under the queues' lock, read without the lock.
#[derive(Default)]
struct Progress {
    /// Grows with everything that is enqueued, except markers.
    submitted: AtomicU64,
    /// The value of `submitted` up to which all commands are known to be done.
    finished: AtomicU64,
}

pub(super) struct LockedData {
    pub(super) all: Vec<Queue>,
    /// Mapped ranges that the driver has refused to unmap: a handle retained for the unmap, because the buffer's owner may release
    /// the original, and the address. Unmapped before a command uses any buffer, because OpenCL leaves commands on a mapped buffer
    /// undefined.
    mapped: Vec<(ClBuffer, *mut c_void)>,
}

send_and_sync!(LockedData);

/// The queues of one device, indexed by stream.
pub(super) struct Queues {
    locked: Mutex<LockedData>,
    pub(super) ids: Mutex<StreamIds>,
    progress: Box<[Progress]>,
}

/// The locked queues, dereferencing to the queue of one stream.
pub(super) struct LockedQueue<'a> {
    queues: MutexGuard<'a, LockedData>,
    at: usize,
}

impl Deref for LockedQueue<'_> {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queues.all[self.at]
    }
}

impl DerefMut for LockedQueue<'_> {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queues.all[self.at]
    }
}

impl LockedQueue<'_> {
    /// Orders commands enqueued later behind all commands enqueued to these streams so far.
    pub(super) fn order_behind(&mut self, streams: &[StreamId]) -> Result<(), ClError> {
        for other in streams.iter().map(|s| s.index()).filter(|&other| other != self.at) {
            let event = self.queues.all[other].mark()?;
            barrier(self.raw, &event)?;
        }
        Ok(())
    }

    /// Unmaps bytes of a buffer and waits. If the driver refuses, the unmap is repeated before the next command that uses a buffer, and
    /// this call succeeds.
    ///
    /// # Errors
    /// The driver does not report whether the queue's commands are over, or refuses to retain the buffer for later.
    pub(super) fn unmap(&mut self, buffer: &ClBuffer, at: *mut c_void) -> Result<(), ClError> {
        match self.try_unmap(buffer.mem(), at) {
            Err(e) if !e.unfinished => {
                let buffer = retry_now(|| buffer.retain()).map_err(|e| ClError { unfinished: true, ..e })?;
                self.queues.mapped.push((buffer, at));
                Ok(())
            }
            done => done,
        }
    }

    /// Enqueues an unmap, without a wait, and ignores a refusal.
    pub(super) fn begin_unmap(&mut self, buffer: &ClBuffer, at: *mut c_void) {
        let none = ptr::null_mut();
        let _ = retry_now(|| call!(clEnqueueUnmapMemObject(self.raw, buffer.mem(), at, 0, ptr::null(), none)));
        let _ = self.flush();
    }

    /// Enqueues a read of the words of each slot with unread launches, behind all kernels that may write the words. With
    /// `blocking`, each read waits.
    pub(super) fn read_faults(
        &mut self,
        readings: &mut Vec<Reading>,
        slots: &[&'static FaultSlot],
        blocking: bool,
    ) -> Result<(), ClError> {
        readings.extend(slots.iter().filter_map(|slot| slot.begin_reading()));
        // From here on the words must not move.
        for reading in readings {
            self.order_behind(&reading.writers)?;
            let (mem, to, none) = (reading.slot.buffer.mem(), reading.words.as_mut_ptr().cast(), ptr::null_mut());
            let bytes = size_of::<FaultWords>();
            call!(clEnqueueReadBuffer(self.raw, mem, blocking.into(), 0, bytes, to, 0, ptr::null(), none))?;
        }
        Ok(())
    }

    /// Unmaps all ranges that are still mapped. Call before a command that uses a user's buffer.
    pub(super) fn unmap_rest(&mut self) -> Result<(), ClError> {
        while let Some((buffer, at)) = self.queues.mapped.pop() {
            if let Err(e) = self.try_unmap(buffer.mem(), at) {
                self.queues.mapped.push((buffer, at));
                return Err(e);
            }
        }
        Ok(())
    }
}

impl Queues {
    /// Creates the default stream's queue, unless adopted, and the service queue.
    pub(super) fn new(
        context: cl_context,
        id: cl_device_id,
        adopted: Option<cl_command_queue>,
    ) -> Result<Queues, ClError> {
        let queue = || Queue::create(context, id, StreamHints::default());
        let all = [adopted.map_or_else(queue, |raw| Queue::adopt(context, id, raw))?, queue()?].into();
        let locked = Mutex::new(LockedData { all, mapped: Vec::new() });
        let progress = (0..MAX_STREAMS).map(|_| Progress::default()).collect();
        Ok(Queues { locked, ids: Mutex::new(StreamIds::from(SERVICE_STREAM.0 + 1)), progress })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LockedData> {
        lock(&self.locked)
    }

    fn progress(&self, stream: StreamId) -> &Progress {
        &self.progress[stream.index()]
    }

    /// True if all work submitted to the stream is known to be done.
    pub(super) fn is_finished(&self, stream: StreamId) -> bool {
        let progress = self.progress(stream);
        progress.finished.load(Acquire) == progress.submitted.load(Acquire)
    }

    /// True if all work before the current submission is known to be done. Call under the lock taken to submit to the stream.
    pub(super) fn is_only_submission(&self, stream: StreamId) -> bool {
        let progress = self.progress(stream);
        progress.finished.load(Acquire) + 1 == progress.submitted.load(Acquire)
    }

    /// Records that the first `submitted` submissions to the stream are done.
    fn note_finished(&self, stream: StreamId, submitted: u64) {
        self.progress(stream).finished.fetch_max(submitted, AcqRel);
    }
}

impl ClDevice {
    pub(crate) fn current_stream(&self) -> StreamId {
        stream_id::current_id(self.device())
    }

    /// Returns a counter that grows with everything enqueued to the stream except markers. An event of [`record`](Self::record) covers
    /// everything counted when it is recorded. Reads an atomic.
    pub(crate) fn submitted(&self, stream: StreamId) -> u64 {
        self.queues.progress(stream).submitted.load(Acquire)
    }

    /// Returns the counter [`submitted`](Self::submitted) of the stream, and the value up to which work is known to be done.
    /// Reads two atomics.
    pub(crate) fn progress(&self, stream: StreamId) -> (u64, u64) {
        let of = self.queues.progress.get(stream.index());
        of.map_or((0, 0), |of| (of.submitted.load(Acquire), of.finished.load(Acquire))) // `submitted` first, because both only grow
    }

    /// Returns the number of streams, including unused streams.
    fn stream_count(&self) -> u32 {
        self.queues.lock().all.len() as u32
    }

    pub(crate) fn has_stream(&self, stream: StreamId) -> bool {
        stream.index() < self.stream_count() as usize
    }

    /// Locks the queue of a stream, to submit commands that may use users' buffers. Fails if a buffer cannot be unmapped.
    pub(super) fn lock(&self, stream: StreamId) -> Result<LockedQueue<'_>, ClError> {
        let mut queue = self.lock_for_waits(stream);
        queue.unmap_rest()?;
        Ok(queue)
    }

    /// Locks the queue of a stream for commands that use no user's buffer; otherwise call [`unmap_rest`](LockedQueue::unmap_rest) first.
    pub(super) fn lock_for_waits(&self, stream: StreamId) -> LockedQueue<'_> {
        let queues = self.queues.lock();
        let submitted = &self.queues.progress(stream).submitted;
        submitted.store(submitted.load(Relaxed) + 1, Release);
        LockedQueue { queues, at: stream.index() }
    }

    /// True if waits call clFinish: on discrete GPUs clFinish is faster than a wait for an event, and other threads can submit
    /// meanwhile. PoCL's queues serve one thread at a time, so clFinish would delay other threads there.
    fn waits_by_finish(&self) -> bool {
        self.info().kind == DeviceKind::DiscreteGpu
    }

    /// Submits nothing: the `submit` argument of [`submit_and_wait`](Self::submit_and_wait) for a wait without commands.
    pub(super) fn submit_nothing(
        &self,
    ) -> impl FnOnce(&mut LockedQueue<'_>, &mut (), *mut cl_event) -> Result<(), ClError> + use<> {
        let finishes = self.waits_by_finish();
        move |q, (), event| if finishes { Ok(()) } else { marker(q.raw, event) }
    }

    /// Submits commands to a stream under the lock, and waits outside the lock until the commands are done. `submit` sets the event to
    /// that of its last command, or leaves the event null if waits call clFinish. The event's status is read after the wait, because
    /// neither clFinish nor NVIDIA's clWaitForEvents reports an accepted command that failed later.
    ///
    /// `memory` owns the host memory that the commands use, and is returned when the commands are done. After an error, `memory` is
    /// dropped if the commands are over, and leaked otherwise.
    pub(super) fn submit_and_wait<M>(
        &self,
        stream: StreamId,
        mut memory: M,
        submit: impl FnOnce(&mut LockedQueue<'_>, &mut M, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<M, ClError> {
        let (finishes, mut raw) = (self.waits_by_finish(), ptr::null_mut());
        let (over, event, ours, count) = {
            let mut queue = self.lock_for_waits(stream);
            let submitted = submit(&mut queue, &mut memory, &mut raw);
            queue.flush_at = FIRST_FLUSH_LAUNCHES;
            let event = (!raw.is_null()).then(|| ClEvent(raw));
            let over = match submitted {
                // Commands that were enqueued before the refused command may be using the memory.
                Err(refused) => Some(queue.wait_until_over(None, refused).and(Err(refused))),
                Ok(()) if finishes => {
                    queue.unflushed = 0; // clFinish flushes
                    None
                }
                Ok(()) if event.is_some() => queue.flush().err().map(|e| queue.wait_until_over(event.as_ref(), e)),
                Ok(()) => Some(queue.finish()), // no event to wait for
            };
            (over, event, queue.raw, self.submitted(stream))
        };
        let over = over.unwrap_or_else(|| {
            let _waiting = self.waiting(if finishes { "clFinish" } else { "clWaitForEvents" }, stream);
            let event = event.as_ref();
            let waited = match event {
                Some(event) if !finishes => event.wait_for_success(),
                _ => call_unlocked!(clFinish(ours)).map_err(|e| ClError { unfinished: true, ..e }),
            };
            let over = waited.and_then(|()| event.filter(|_| finishes).map_or(Ok(()), ClEvent::outcome));
            // The last command may have failed while earlier ones still run.
            over.or_else(|failed| self.queues.lock().all[stream.index()].wait_until_over(event, failed))
        });
        let memory = self.memory_after(over, memory)?;
        exit::note_wait();
        self.description.driver_text.log();
        self.queues.note_finished(stream, count);
        Ok(memory)
    }

    /// Returns the memory that commands used, once they are over. After an error, drops or leaks the memory.
    fn memory_after<M>(&self, over: Result<(), ClError>, memory: M) -> Result<M, ClError> {
        let Err(e) = over else { return Ok(memory) };
        if e.unfinished {
            mem::forget(memory);
        }
        Err(self.detect_loss(e))
    }

    /// Records in the profile that the host waits, until the returned value is dropped.
    pub(super) fn waiting(&self, call: &'static str, stream: StreamId) -> Option<profiler::Span> {
        profiler::span(RecordKind::Wait, call, self.device(), stream.0, 0)
    }

    /// Returns the error of a command that failed after submission, if any. Call once the stream's commands are over.
    pub(super) fn take_failed(&self, stream: StreamId) -> Result<()> {
        let failed = self.queues.lock().all[stream.index()].take_failed();
        failed.map_or(Ok(()), |failed| Err(self.failed(failed)))
    }

    /// Calls `f` with the queue of a stream while the device is idle and no thread can submit to it, then waits for the commands
    /// of `f`. Most running work is waited for before the lock is taken, so that other threads are delayed for little more than `f`.
    /// `memory` is as in [`submit_and_wait`](Self::submit_and_wait).
    pub(super) fn while_idle<M>(
        &self,
        stream: StreamId,
        mut memory: M,
        f: impl FnOnce(&mut LockedQueue<'_>, &mut M) -> Result<(), ClError>,
    ) -> Result<M, ClError> {
        if !self.queues.is_finished(stream) {
            self.submit_and_wait(stream, (), self.submit_nothing())?;
        }
        let done = {
            let mut queue = self.lock(stream).map_err(|e| self.detect_loss(e))?;
            queue.queues.all.iter_mut().try_for_each(Queue::finish).and_then(|()| {
                let done = f(&mut queue, &mut memory);
                // Any other error means that all commands are over.
                queue.finish().or_else(|e| if e.unfinished || e.is_fatal() { Err(e) } else { Ok(()) }).and(done)
            })
        };
        self.memory_after(done, memory)
    }

    /// Records an event that is done when everything submitted to the stream so far is done. Other streams may wait for it.
    pub(crate) fn record(&self, stream: StreamId) -> Result<ClEvent> {
        self.check_lost()?;
        let marked = self.queues.lock().all[stream.index()].mark();
        marked.map_err(|e| self.failed(e))
    }

    /// Records an event like [`record`](Self::record), with its time of completion.
    pub(crate) fn record_timed(&self, stream: StreamId) -> Result<ClEvent> {
        self.check_lost()?;
        let marked = self.queues.lock().all[stream.index()].mark_timed();
        marked.map_err(|e| self.failed(e))
    }

    /// Blocks until the event is done.
    pub(crate) fn wait(&self, event: &ClEvent) -> Result<()> {
        self.check_lost()?;
        let _waiting = self.waiting("clWaitForEvents", self.current_stream());
        // No memory depends on the event: if its status is unknown, the caller may ask again.
        event.wait_for_success().map_err(|e| self.failed(ClError { unfinished: false, ..e }))?;
        exit::note_wait();
        Ok(())
    }

    /// True if the event is done.
    pub(crate) fn query(&self, event: &ClEvent) -> Result<bool> {
        self.check_lost()?;
        event.query().map_err(|e| self.failed(e))
    }

    /// Makes work submitted to the stream from now on wait for the event. The host does not wait.
    pub(crate) fn stream_waits(&self, stream: StreamId, event: &ClEvent) -> Result<()> {
        self.check_lost()?;
        let enqueued = barrier(self.lock_for_waits(stream).raw, event);
        enqueued.map_err(|e| self.failed(e))
    }

    /// Waits for all work submitted so far, on every stream.
    pub(crate) fn finish(&self) -> Result<()> {
        capture::refuse_while_capturing(self.device(), "synchronize", NO_WAITS_REASON)?;
        let here = self.current_stream();
        let marks = self.mark_busy(here)?;
        // This thread's slot, and the slots of ended threads that have words to read.
        let idle = self.faults.idle().clone();
        let slots: Vec<_> = idle.into_iter().filter(|slot| slot.is_pending()).chain([self.slot()]).collect();
        let reported = self.wait_and_report(here, &slots);
        let reached = marks.into_iter().try_for_each(|(stream, submitted, event)| {
            self.wait(&event)?;
            self.queues.note_finished(stream, submitted);
            Ok(())
        });
        let take_failed = |stream| self.take_failed(StreamId(stream));
        reported.and(reached).and_then(|()| (0..self.stream_count()).try_for_each(take_failed))
    }

    /// Waits like [`finish`](Self::finish), but leaves faults to the user's next wait.
    pub(crate) fn drain(&self) -> Result<()> {
        (0..self.stream_count()).try_for_each(|stream| self.drain_stream(StreamId(stream)))
    }

    /// Waits like [`drain`](Self::drain) for one stream. On return, all commands are over or the device is lost, even if the driver
    /// refused calls.
    pub(crate) fn drain_stream(&self, stream: StreamId) -> Result<()> {
        self.check_lost()?;
        if !self.queues.is_finished(stream) {
            let _ = self.submit_and_wait(stream, (), self.submit_nothing());
        }
        self.check_lost()
    }

    /// Enqueues a marker on every stream that may be busy, except `except`.
    fn mark_busy(&self, except: StreamId) -> Result<Vec<(StreamId, u64, ClEvent)>> {
        self.check_lost()?;
        let marks: Result<Vec<_>, ClError> = {
            let mut queues = self.queues.lock();
            let streams = (0u32..).map(StreamId).zip(&mut queues.all);
            let busy = streams.filter(|(stream, _)| *stream != except && !self.queues.is_finished(*stream));
            busy.map(|(stream, queue)| Ok((stream, self.submitted(stream), queue.mark()?))).collect()
        };
        marks.map_err(|e| self.failed(e))
    }

    /// Waits for all work submitted to one stream.
    pub(crate) fn finish_stream(&self, stream: StreamId) -> Result<()> {
        capture::refuse_while_capturing(self.device(), "synchronize", NO_WAITS_REASON)?;
        let slot = self.slot();
        let slots: &[_] = if slot.is_pending_on(stream) { &[slot] } else { &[] };
        self.wait_and_report(stream, slots)
    }

    /// True if all work submitted to the stream is done.
    pub(crate) fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.check_lost()?;
        if self.queues.is_finished(stream) {
            return Ok(true);
        }
        let asked = {
            let (queue, submitted) = (&mut self.queues.lock().all[stream.index()], self.submitted(stream));
            // The marker is kept until the next submission, because a new marker would hardly ever be done at once.
            let known = queue.idle_marker.take().filter(|(at, _)| *at == submitted);
            known.map_or_else(|| queue.mark(), |(_, event)| Ok(event)).and_then(|event| {
                let done = event.query()?;
                queue.idle_marker = Some((submitted, event)).filter(|_| !done);
                Ok((done, submitted))
            })
        };
        let (done, submitted) = asked.map_err(|e| self.failed(e))?;
        if done {
            self.queues.note_finished(stream, submitted);
        }
        Ok(done)
    }

    /// Takes an unused stream, with its own queue.
    pub(crate) fn acquire_stream(&self, wanted: StreamHints) -> Result<StreamId> {
        self.check_lost()?;
        let hints = hints::supported(self.device(), wanted);
        let _messages = log::defer(); // emits messages after the lock is released
        lock(&self.queues.ids).acquire(hints, |_| {
            let queue = Queue::create(self.context, self.id(), hints);
            let queue = queue.map_err(|e| self.failed(e))?;
            if queue.hints != hints {
                hints::log_ignored(self.device(), hints, queue.hints);
            }
            self.queues.lock().all.push(queue);
            self.profile_if_on();
            Ok(())
        })
    }

    /// Releases a stream for reuse. Its submitted work still runs.
    pub(crate) fn release_stream(&self, stream: StreamId) {
        let hints = {
            let queue = &mut self.queues.lock().all[stream.index()];
            let _ = queue.flush();
            queue.hints
        };
        lock(&self.queues.ids).release(stream, hints);
    }

    /// Waits for the work submitted to the stream so far, and reports the faults in `slots`. The driver is called only if there is
    /// work to wait for.
    pub(super) fn wait_and_report(&self, stream: StreamId, slots: &[&'static FaultSlot]) -> Result<()> {
        if self.queues.is_finished(stream) && !slots.iter().any(|slot| slot.is_pending()) {
            return self.check_lost().and_then(|()| self.take_failed(stream));
        }
        self.submit_and_report(stream, slots, (), self.submit_nothing())
    }

    /// Calls [`submit_and_wait`](Self::submit_and_wait), and reports the faults that earlier kernels recorded in `slots`.
    pub(super) fn submit_and_report<M>(
        &self,
        stream: StreamId,
        slots: &[&'static FaultSlot],
        memory: M,
        submit: impl FnOnce(&mut LockedQueue<'_>, &mut M, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<M> {
        self.check_lost()?;
        let readings = Vec::new();
        let done = match self.info().kind {
            // NVIDIA's driver reads the fault words in 9 us once the kernels are done, but in 14 to 40 us behind running kernels.
            DeviceKind::DiscreteGpu => self.submit_and_wait(stream, memory, submit).and_then(|memory| {
                if !slots.iter().any(|slot| slot.is_pending()) {
                    return Ok((readings, memory));
                }
                // A blocking read under the queues' lock is allowed only if the wait is short.
                let ready = || {
                    self.queues.is_only_submission(stream)
                        && slots.iter().all(|slot| slot.is_pending_on_no_other(stream))
                };
                let read =
                    self.submit_and_wait(stream, readings, |q, readings, _| q.read_faults(readings, slots, ready()));
                read.map(|readings| (readings, memory))
            }),
            // The fault words are read first, because `event` must be the event of the last command.
            _ => self.submit_and_wait(stream, (readings, memory), |q, (readings, memory), event| {
                q.read_faults(readings, slots, false)?;
                submit(q, memory, event)
            }),
        };
        let (readings, memory) = done.map_err(|e| self.error(e))?;
        self.take_failed(stream)?;
        self.report(readings).map(|()| memory)
    }

    /// Returns this thread's four words `{code, index low, index high, size}` of device memory as a kernel argument. They are
    /// zero until a kernel records a [`Fault`]; the first fault wins, by `atomic_cmpxchg` on word 0. The fault becomes the error
    /// of this thread's next read, blocking copy or finish, and the words are reset. If the thread ends before that, the next
    /// finish on any thread reports the fault.
    pub(crate) fn faults(&self) -> Arg<'_> {
        Arg::Faults(&self.claim_slot().buffer)
    }

    /// Returns [`faults`](Self::faults) for a kernel that records no fault, so that no wait reads the words.
    pub(crate) fn no_faults(&self) -> Arg<'_> {
        Arg::Buffer(&self.claim_slot().buffer)
    }

    /// Reports the faults that kernels of this thread recorded; waits only if a kernel that can record a fault was launched.
    pub(crate) fn report_faults(&self) -> Result<()> {
        let (slot, stream) = (self.slot(), self.current_stream());
        if slot.is_pending() { self.wait_and_report(stream, &[slot]) } else { self.take_failed(stream) }
    }

    /// Returns the progress of this thread's fault reads. A kernel launched after `begun` reads recorded no fault if a later read was
    /// clean and `found` did not grow.
    pub(crate) fn fault_reads(&self) -> FaultReads {
        self.claim_slot().reads()
    }

    /// Returns the slot to read when this thread waits.
    pub(super) fn slot(&self) -> &'static FaultSlot {
        self.faults.current()
    }

    /// Reports the first fault among the reads. Later slots, and words that have not arrived, are left to the next read.
    pub(super) fn report(&self, readings: Vec<Reading>) -> Result<()> {
        for mut reading in readings {
            if let Some(fault) = reading.examine().map_err(|e| self.failed(e))? {
                // A failed reset is repeated before the next kernel that can record a fault.
                let _ = self.clear(reading.slot);
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Resets a slot's words to zero if necessary, before a kernel uses them.
    pub(super) fn clear(&self, slot: &FaultSlot) -> Result<()> {
        slot.clear(|| {
            let (mem, from, bytes) = (slot.buffer.mem(), NO_FAULT.as_ptr().cast(), size_of::<FaultWords>());
            let reset = self.submit_and_wait(self.current_stream(), (), |q, (), event| {
                call!(clEnqueueWriteBuffer(q.raw, mem, 0, 0, bytes, from, 0, ptr::null(), event))
            });
            reset.map_err(|e| self.error(e))
        })
    }

    /// Returns this thread's slot, which the first call makes or takes from an ended thread. Not to be called under the queues' lock.
    fn claim_slot(&self) -> &'static FaultSlot {
        let current = self.slot();
        if !self.faults.needs_slot(current) {
            return current;
        }
        let read = || (0..MAX_UNREAD_SLOTS).find_map(|_| self.take_slot_by_reading()); // slots with faults are skipped
        let unused = self.faults.take_clean().or_else(read).or_else(|| FaultSlot::new(self.context).ok());
        unused.map_or(current, |slot| self.faults.own(slot))
    }

    /// If many slots are idle, reads one idle slot and takes that slot. A slot with a fault is left, for the next finish to report.
    fn take_slot_by_reading(&self) -> Option<&'static FaultSlot> {
        let slot = self.faults.take_unread(|stream| self.queues.is_finished(stream))?;
        let read = self.submit_and_wait(SERVICE_STREAM, Vec::new(), |q, readings, event| {
            q.read_faults(readings, &[slot], false)?;
            marker(q.raw, event)
        });
        if read.is_ok_and(|mut readings| readings.len() == 1 && readings[0].is_clean()) {
            return Some(slot);
        }
        self.faults.idle().push(slot);
        None
    }

    /// Waits for all commands and marks the device as lost, at the end of the process. Returns the lock, so no thread can submit.
    pub(super) fn close(&'static self) -> Box<dyn Any> {
        let mut queues = self.queues.lock();
        if !self.is_lost() {
            let all: Vec<_> = queues.all.iter().map(|queue| queue.raw).collect();
            all.iter().for_each(|&queue| _ = call!(clFlush(queue)));
            all.iter().for_each(|&queue| _ = call!(clFinish(queue)));
            queues.all.iter_mut().for_each(Queue::collect_profiled);
            self.mark_lost_silently("the process ends");
        }
        Box::new(queues)
    }
}

/// Profiling: the times of commands, and the rate of copies.
impl ClDevice {
    /// Switches the timing of all streams' commands to the profiler's state, which is read under the queues' lock, so that the last of
    /// concurrent calls uses the current state. Waits for the submitted work. Does nothing on a lost device.
    ///
    /// # Errors
    /// The driver's errors; the commands of only some streams are then timed.
    pub(crate) fn set_profiling(&self) -> Result<()> {
        if self.is_lost() {
            return Ok(());
        }
        let set = (0u32..)
            .zip(&mut self.queues.lock().all)
            .try_for_each(|(stream, queue)| queue.set_profiling(profiler::is_on(), self.device(), stream));
        set.map_err(|e| self.error(self.detect_loss(e)))
    }

    /// Calls [`set_profiling`](Self::set_profiling) for a new device or stream; on failure the device works without times.
    pub(crate) fn profile_if_on(&self) {
        if profiler::is_on()
            && let Err(error) = self.set_profiling()
        {
            log::emit(move || tracing::warn!(%error, "commands are not timed"));
        }
    }

    /// Returns the time at which an event of [`record_timed`](Self::record_timed) was done, in nanoseconds of the device's clock. Call
    /// after waiting for the event.
    pub(crate) fn done_at(&self, event: &ClEvent) -> Result<u64> {
        let [.., end] = command_times(event).ok_or_else(|| {
            Error::invalid("elapsed_time", format!("the driver of {} reports no times of events", self.device()))
        })?;
        Ok(end)
    }

    /// Measures the rate of copies between two buffers of the device: bytes read plus bytes written, per second. The copies are not
    /// captured by a graph of this thread, and earlier faults of kernels are not reported here.
    pub(crate) fn copy_rate(&self) -> Result<f64> {
        let (memory, largest) = (self.info().memory as usize, self.info().largest_buffer as usize);
        let bytes = MAX_COPIED_BYTES.min(memory / 16).min(largest).max(1 << 20);
        let buffer = || self.create_buffer(bytes).map_err(|e| self.error(e));
        let (from, to) = (buffer()?, buffer()?);
        let stream = self.current_stream();
        let copies = |n: u32| (0..n).try_for_each(|_| self.copy_on(stream, (&from, 0), (&to, 0), bytes));
        copies(2)?; // makes the driver allocate the buffers
        self.drain_stream(stream)?;
        let began = Instant::now();
        copies(COPIES)?;
        self.drain_stream(stream)?;
        Ok(2.0 * bytes as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64())
    }
}
