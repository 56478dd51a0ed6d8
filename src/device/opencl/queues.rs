//! A device's queues, one in-order queue a stream, and the events between them.
//!
//! One lock covers all queues of a device, since kernel objects are shared and setting arguments and enqueueing must be
//! one step. Queues live as long as their device: a stream that nobody holds any more leaves its queue to the next.
//!
//! A call that fails says little of the commands it was about: they may be done, or still be using the host's memory. So
//! whoever submits commands and waits hands that memory in, and has it back once they are over. A failed wait is followed
//! by others ([`Queue::ascertain`]); where none tells, the device is lost and the memory is never released. Every call is
//! an error then.

use std::ffi::c_void;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, MutexGuard};

use opencl3::types::{cl_command_queue, cl_context, cl_device_id, cl_event};

use super::ClDevice;
use super::driver::{ClBuffer, ClEvent, call, call_unlocked, insist};
use super::errors::ClError;
use super::exit;
use super::queue::{FIRST_FLUSH, LAUNCH, Queue};
use crate::Result;
use crate::device::hints::StreamHints;
use crate::device::lock;
use crate::device::profiler::{self, Kind};
use crate::device::stream::{self, Ids, MAX_STREAMS, StreamId};
use crate::device::{DeviceKind, capture};

/// The queue for what waits on the host and orders nothing, such as committing memory: no stream's, so that it never
/// waits behind a stream's work.
pub(super) const SERVICE: StreamId = StreamId(1);

/// Why a recording has no waits.
const WAITS: &str = "nothing of it runs yet that could be waited for";

/// How far a stream is. Written under the lock, read without it.
#[derive(Default)]
struct Progress {
    /// Grows with everything that is enqueued, markers aside.
    submitted: AtomicU64,
    /// What `submitted` was at the last point that is known to be reached.
    finished: AtomicU64,
}

/// Bytes of a buffer that the driver has refused to unmap.
struct StillMapped {
    /// A handle of its own: the buffer's owner may release his.
    buffer: ClBuffer,
    at: *mut c_void,
}

// SAFETY: OpenCL's objects belong to the process, and `at` is only handed back to the driver.
unsafe impl Send for StillMapped {}

/// What the lock covers.
pub(super) struct Inner {
    /// By stream.
    queues: Vec<Queue>,
    /// To be unmapped before any command uses a buffer: what one does with a buffer that is mapped is undefined.
    mapped: Vec<StillMapped>,
}

impl Deref for Inner {
    type Target = Vec<Queue>;

    fn deref(&self) -> &Vec<Queue> {
        &self.queues
    }
}

impl DerefMut for Inner {
    fn deref_mut(&mut self) -> &mut Vec<Queue> {
        &mut self.queues
    }
}

/// The queues of one device, by stream.
pub(super) struct Queues {
    all: Mutex<Inner>,
    pub(super) ids: Mutex<Ids>,
    progress: Box<[Progress]>,
}

/// The queues, locked for submitting to one of them, which it stands for.
pub(super) struct Locked<'a> {
    queues: MutexGuard<'a, Inner>,
    at: usize,
}

impl Deref for Locked<'_> {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queues[self.at]
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queues[self.at]
    }
}

impl Locked<'_> {
    /// Orders what is enqueued next behind everything on these streams so far.
    pub(super) fn after(&mut self, streams: &[StreamId]) -> Result<(), ClError> {
        for other in streams.iter().map(|s| s.index()).filter(|&other| other != self.at) {
            let event = self.queues[other].mark()?;
            self.barrier(&event)?;
        }
        Ok(())
    }

    /// Unmaps bytes of a buffer and waits for it. If the driver refuses, that is done before the next command that uses a
    /// buffer: to whoever submits that it makes no difference.
    ///
    /// # Errors
    /// Nothing tells whether the queue's commands are over, or the driver refuses to keep the buffer until then.
    pub(super) fn unmap(&mut self, buffer: &ClBuffer, at: *mut c_void) -> Result<(), ClError> {
        match self.try_unmap(buffer.mem(), at) {
            Err(e) if !e.unfinished => {
                let retained = insist(|| call!(clRetainMemObject(buffer.mem())));
                retained.map_err(|e| ClError { unfinished: true, ..e })?;
                let buffer = ClBuffer::new(buffer.mem(), buffer.bytes());
                self.queues.mapped.push(StillMapped { buffer, at });
                Ok(())
            }
            done => done,
        }
    }

    /// Unmaps what is still mapped: before a command that uses a user's buffer.
    pub(super) fn unmap_rest(&mut self) -> Result<(), ClError> {
        while let Some(rest) = self.queues.mapped.pop() {
            if let Err(e) = self.try_unmap(rest.buffer.mem(), rest.at) {
                self.queues.mapped.push(rest);
                return Err(e);
            }
        }
        Ok(())
    }
}

impl Queues {
    /// The default stream's queue, which may be an adopted one, and the service queue.
    pub(super) fn new(
        context: cl_context,
        id: cl_device_id,
        adopted: Option<cl_command_queue>,
    ) -> Result<Queues, ClError> {
        let queue = || Queue::create(context, id, StreamHints::default());
        let all = [adopted.map_or_else(queue, Queue::adopt)?, queue()?];
        let progress = (0..MAX_STREAMS).map(|_| Progress::default()).collect();
        let all = Inner { queues: all.into(), mapped: Vec::new() };
        Ok(Queues { all: Mutex::new(all), ids: Mutex::new(Ids::from(SERVICE.0 + 1)), progress })
    }

    /// Whoever panicked while holding the lock left nothing half done that matters.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.all)
    }

    fn progress(&self, stream: StreamId) -> &Progress {
        &self.progress[stream.index()]
    }

    /// Calls `f` with every queue, under the lock, until it fails.
    pub(super) fn each(&self, mut f: impl FnMut(StreamId, &mut Queue) -> Result<(), ClError>) -> Result<(), ClError> {
        (0u32..).map(StreamId).zip(self.lock().iter_mut()).try_for_each(|(stream, queue)| f(stream, queue))
    }

    /// Whether everything submitted to the stream is known to be done.
    pub(super) fn is_finished(&self, stream: StreamId) -> bool {
        let progress = self.progress(stream);
        progress.finished.load(Acquire) == progress.submitted.load(Acquire)
    }

    /// Under the lock that somebody took to submit to it: whether everything before is known to be done.
    pub(super) fn is_first(&self, stream: StreamId) -> bool {
        let progress = self.progress(stream);
        progress.finished.load(Acquire) + 1 == progress.submitted.load(Acquire)
    }

    fn finished(&self, stream: StreamId, submitted: u64) {
        self.progress(stream).finished.fetch_max(submitted, AcqRel);
    }
}

impl ClDevice {
    /// The stream that this thread's work goes to.
    pub(crate) fn current_stream(&self) -> StreamId {
        stream::current_id(self.device())
    }

    /// A number that has grown whenever anything but a marker was enqueued to the stream. What is counted when
    /// [`record`](Self::record) is called is covered by its event. Reads an atomic.
    pub(crate) fn submitted(&self, stream: StreamId) -> u64 {
        self.queues.progress(stream).submitted.load(Acquire)
    }

    /// What was [`submitted`](Self::submitted) to the stream, and up to what count that is known to be done. Reads two
    /// atomics.
    pub(crate) fn progress(&self, stream: StreamId) -> (u64, u64) {
        let of = self.queues.progress.get(stream.index());
        of.map_or((0, 0), |of| (of.submitted.load(Acquire), of.finished.load(Acquire))) // in this order: neither shrinks
    }

    /// Whether the stream is one of this device's.
    pub(crate) fn has_stream(&self, stream: StreamId) -> bool {
        stream.index() < self.queues.lock().len()
    }

    /// The queue of a stream, to submit commands that may use users' buffers.
    ///
    /// # Errors
    /// A buffer cannot be unmapped.
    pub(super) fn lock(&self, stream: StreamId) -> Result<Locked<'_>, ClError> {
        let mut queue = self.lock_for_waits(stream);
        queue.unmap_rest()?;
        Ok(queue)
    }

    /// The queue of a stream, to submit what uses none of them, or [`unmap_rest`](Locked::unmap_rest) before what does.
    pub(super) fn lock_for_waits(&self, stream: StreamId) -> Locked<'_> {
        let queues = self.queues.lock();
        let submitted = &self.queues.progress(stream).submitted;
        submitted.store(submitted.load(Relaxed) + 1, Release);
        Locked { queues, at: stream.index() }
    }

    /// Whether waits finish a queue, as discrete GPUs' drivers do that sooner than they wait for an event, and while others
    /// submit to it. PoCL's queues are used by one thread at a time: there clFinish would hold up others.
    fn finishes(&self) -> bool {
        self.info().kind == DeviceKind::DiscreteGpu
    }

    /// What [`submit_and_wait`](Self::submit_and_wait) submits where only what was submitted before is waited for.
    pub(super) fn wait_only(
        &self,
    ) -> impl FnOnce(&mut Locked<'_>, &mut (), *mut cl_event) -> Result<(), ClError> + use<> {
        let finishes = self.finishes();
        move |q, (), event| if finishes { Ok(()) } else { q.marker(event) }
    }

    /// Submits commands to a stream under the lock, and waits outside it until they are done. The last of them fills in the
    /// event: the queue is in order. Where queues are finished it may leave it null; otherwise the event is asked how the
    /// command ended, since it may fail after it was accepted, and neither clFinish nor NVIDIA's clWaitForEvents says so.
    ///
    /// `memory` owns what the commands use of the host's memory, and comes back when they are done. After an error it is
    /// dropped if they are over, and else leaked.
    pub(super) fn submit_and_wait<M>(
        &self,
        stream: StreamId,
        mut memory: M,
        submit: impl FnOnce(&mut Locked<'_>, &mut M, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<M, ClError> {
        let (finishes, mut raw) = (self.finishes(), ptr::null_mut());
        let (over, event, ours, count) = {
            let mut queue = self.lock_for_waits(stream);
            let submitted = submit(&mut queue, &mut memory, &mut raw);
            queue.flush_at = FIRST_FLUSH;
            let event = (!raw.is_null()).then(|| ClEvent(raw));
            let over = match submitted {
                // What did get onto the queue may be using the memory.
                Err(refused) => Some(queue.ascertain(None, refused).and(Err(refused))),
                Ok(()) if finishes => {
                    queue.unflushed = 0; // clFinish flushes
                    None
                }
                Ok(()) if event.is_some() => queue.flush().err().map(|e| queue.ascertain(event.as_ref(), e)),
                Ok(()) => Some(queue.finish()), // nothing that could be waited for
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
            // The last command may have failed while others of these still run.
            over.or_else(|failed| self.queues.lock()[stream.index()].ascertain(event, failed))
        });
        if let Err(e) = over {
            if e.unfinished {
                mem::forget(memory);
            }
            return Err(self.settle(e));
        }
        exit::waited();
        self.found.driver_text.log();
        self.queues.finished(stream, count);
        Ok(memory)
    }

    /// Records that the host waits, until what it gives is dropped.
    pub(super) fn waiting(&self, call: &'static str, stream: StreamId) -> Option<profiler::Span> {
        profiler::span(Kind::Wait, call, self.device(), stream.0, 0)
    }

    /// Has the next wait for the stream report a launch that failed with this code.
    pub(super) fn note_failed(&self, stream: StreamId, code: i32) {
        self.queues.lock()[stream.index()].note_failed(LAUNCH, Some(code));
    }

    /// Once the stream's commands are over: the error of one that failed after it was submitted, as far as the driver tells.
    pub(super) fn take_failed(&self, stream: StreamId) -> Result<()> {
        let failed = self.queues.lock()[stream.index()].take_failed();
        failed.map_or(Ok(()), |failed| Err(self.error(self.settle(failed))))
    }

    /// Calls `f` with the queue of a stream while nothing runs on the device and nobody submits anything to it, and waits for
    /// what it submits. Waits for what runs before it takes the lock, so that others are held up for little more than `f`.
    /// `memory` is as in [`submit_and_wait`](Self::submit_and_wait).
    pub(super) fn while_idle<M>(
        &self,
        stream: StreamId,
        mut memory: M,
        f: impl FnOnce(&mut Locked<'_>, &mut M) -> Result<(), ClError>,
    ) -> Result<M, ClError> {
        if !self.queues.is_finished(stream) {
            self.submit_and_wait(stream, (), self.wait_only())?;
        }
        let done = {
            let mut queue = self.lock(stream).map_err(|e| self.settle(e))?;
            queue.queues.iter_mut().try_for_each(Queue::finish).and_then(|()| {
                let done = f(&mut queue, &mut memory);
                // Any other error than these says that all is over.
                queue.finish().or_else(|e| if e.unfinished || e.is_fatal() { Err(e) } else { Ok(()) }).and(done)
            })
        };
        match done {
            Ok(()) => Ok(memory),
            Err(e) => {
                if e.unfinished {
                    mem::forget(memory);
                }
                Err(self.settle(e))
            }
        }
    }

    /// An event that is done when everything submitted to the stream so far is. Other streams may wait for it.
    pub(crate) fn record(&self, stream: StreamId) -> Result<ClEvent> {
        self.check_lost()?;
        let marked = self.queues.lock()[stream.index()].mark();
        marked.map_err(|e| self.error(self.settle(e)))
    }

    /// [`record`](Self::record), with an event that knows when it was done.
    pub(crate) fn record_timed(&self, stream: StreamId) -> Result<ClEvent> {
        self.check_lost()?;
        let marked = self.queues.lock()[stream.index()].mark_timed(self.context, self.id());
        marked.map_err(|e| self.error(self.settle(e)))
    }

    /// Blocks until the event is done.
    pub(crate) fn wait(&self, event: &ClEvent) -> Result<()> {
        self.check_lost()?;
        let _waiting = self.waiting("clWaitForEvents", self.current_stream());
        // Nobody's memory depends on it: where nothing is known of the event, its owner may ask again.
        event.wait_for_success().map_err(|e| self.error(self.settle(ClError { unfinished: false, ..e })))?;
        exit::waited();
        Ok(())
    }

    /// Whether the event is done.
    pub(crate) fn query(&self, event: &ClEvent) -> Result<bool> {
        self.check_lost()?;
        event.query().map_err(|e| self.error(self.settle(e)))
    }

    /// Holds back what is submitted to the stream from now on until the event is done. The host does not wait.
    pub(crate) fn stream_waits(&self, stream: StreamId, event: &ClEvent) -> Result<()> {
        self.check_lost()?;
        let enqueued = self.lock_for_waits(stream).barrier(event);
        enqueued.map_err(|e| self.error(self.settle(e)))
    }

    /// Waits for everything submitted so far, on every stream.
    ///
    /// # Errors
    /// What a kernel of this thread, or of one that has ended, recorded as a fault, or a lost device.
    pub(crate) fn finish(&self) -> Result<()> {
        capture::refuse(self.device(), "synchronize", WAITS)?;
        let here = self.current_stream();
        let marks = self.mark_busy(here)?;
        let reported = self.wait_and_report(here, &self.slots_to_finish());
        let reached = self.reach(marks);
        let streams = self.queues.lock().len() as u32;
        reported.and(reached).and_then(|()| (0..streams).try_for_each(|stream| self.take_failed(StreamId(stream))))
    }

    /// [`finish`](Self::finish) for those who have their own reasons to wait: tells no fault, so that the user's next
    /// wait does.
    pub(crate) fn drain(&self) -> Result<()> {
        let streams = self.queues.lock().len() as u32;
        (0..streams).try_for_each(|stream| self.drain_stream(StreamId(stream)))
    }

    /// [`drain`](Self::drain) for one stream. Whatever call the driver refuses, everything is over when this returns, or the
    /// device is lost.
    pub(crate) fn drain_stream(&self, stream: StreamId) -> Result<()> {
        self.check_lost()?;
        if !self.queues.is_finished(stream) {
            let _ = self.submit_and_wait(stream, (), self.wait_only());
        }
        self.check_lost()
    }

    /// Waits for everything, and makes the device lost: the process ends. What it returns keeps others from submitting.
    pub(super) fn finish_for_good(&self) -> impl Sized + use<'_> {
        let mut queues = self.queues.lock();
        if !self.is_lost() {
            let all: Vec<_> = queues.iter().map(|queue| queue.raw).collect();
            all.iter().for_each(|&queue| _ = call!(clFlush(queue)));
            all.iter().for_each(|&queue| _ = call!(clFinish(queue)));
            queues.iter_mut().for_each(Queue::collect_profiled);
            self.end("the process ends");
        }
        queues
    }

    /// A marker on every stream that may be busy, but for one.
    fn mark_busy(&self, except: StreamId) -> Result<Vec<(StreamId, u64, ClEvent)>> {
        self.check_lost()?;
        let marks: Result<Vec<_>, ClError> = {
            let mut queues = self.queues.lock();
            let streams = (0u32..).map(StreamId).zip(queues.iter_mut());
            let busy = streams.filter(|(stream, _)| *stream != except && !self.queues.is_finished(*stream));
            busy.map(|(stream, queue)| Ok((stream, self.submitted(stream), queue.mark()?))).collect()
        };
        marks.map_err(|e| self.error(self.settle(e)))
    }

    fn reach(&self, marks: Vec<(StreamId, u64, ClEvent)>) -> Result<()> {
        marks.into_iter().try_for_each(|(stream, submitted, event)| {
            self.wait(&event)?;
            self.queues.finished(stream, submitted);
            Ok(())
        })
    }

    /// Waits for everything submitted to one stream.
    ///
    /// # Errors
    /// What a kernel of this thread on this stream recorded as a fault, or a lost device.
    pub(crate) fn finish_stream(&self, stream: StreamId) -> Result<()> {
        capture::refuse(self.device(), "synchronize", WAITS)?;
        let slot = self.slot();
        if slot.is_pending_on(stream) {
            self.wait_and_report(stream, &[slot])
        } else {
            self.wait_and_report(stream, &[])
        }
    }

    /// Whether everything submitted to the stream is done.
    pub(crate) fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.check_lost()?;
        if self.queues.is_finished(stream) {
            return Ok(true);
        }
        let asked = {
            let (queue, submitted) = (&mut self.queues.lock()[stream.index()], self.submitted(stream));
            // One marker until something else is submitted: a new one would hardly ever be done at once.
            let known = queue.probe.take().filter(|(at, _)| *at == submitted);
            known.map_or_else(|| queue.mark(), |(_, event)| Ok(event)).and_then(|event| {
                let done = event.query()?;
                queue.probe = Some((submitted, event)).filter(|_| !done);
                Ok((done, submitted))
            })
        };
        let (done, submitted) = asked.map_err(|e| self.error(self.settle(e)))?;
        if done {
            self.queues.finished(stream, submitted);
        }
        Ok(done)
    }
}
