//! A simulated device for testing allocators. It commits memory lazily, has a capacity, runs streams on demand, checks
//! contents, fails on demand and records every call.
//!
//! Memory has no bytes, but is counted. With [`SimOptions::contents`] it also holds one number (a *tag*) per granule of
//! [`SimOptions::alignment`] bytes. Work consists of writing and checking blocks' tags. Bytes that were reused too
//! early, moved without their contents or handed out twice are reported as [violations](Sim::violations) when the check
//! runs.

mod memory;
mod queue;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::{At, Driver, Failure, ImageDesc, Marker, MarkerKind, Memory, MemoryKind, Progress};
use crate::device::{StreamId, lock};
use crate::{Device, Error, Result};
pub(crate) use memory::SimMemory;
use memory::SimSegments;
pub(crate) use queue::SimMarker;
use queue::{Command, Order, Span};

/// A driver call, with the number of bytes that it creates, releases or copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Create(usize),
    Commit(usize),
    Reserve(usize),
    Extend(usize),
    Shrink(usize),
    Release(usize),
    Synchronize,
    Record,
    Query,
    Wait,
    StreamWaits,
    Copy(usize),
    Read(usize),
    Write(usize),
}

/// Settings of a simulated device.
///
/// ```
/// use claystone::storage::{Sim, SimOptions};
/// let sim = Sim::new(SimOptions { capacity: 64 << 20, asynchronous: true, contents: true, ..SimOptions::default() });
/// assert_eq!(sim.committed(), 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// The device's memory in bytes.
    pub capacity: u64,
    /// The largest segment the device creates, in bytes.
    pub largest_segment: usize,
    /// The alignment of blocks in bytes, a power of two.
    pub alignment: usize,
    /// Whether commands wait in their streams until [`Sim::step`], [`Sim::run`] or [`Sim::run_some`] runs them, or
    /// until a wait needs them. Otherwise each command is done when its call returns.
    pub asynchronous: bool,
    /// Whether memory has tags, which take four bytes of host memory per granule.
    pub contents: bool,
    /// The size in bytes of the pages in which reserved memory is committed; 0 if the device cannot reserve addresses.
    pub page: usize,
    /// Whether unordered uses of the same bytes by different streams are [violations](Sim::violations), in whatever order they run.
    pub check_order: bool,
    /// Whether to record every call for [`Sim::calls`].
    pub record_calls: bool,
}

impl Default for SimOptions {
    /// Returns the settings of a device that is never full and always idle.
    fn default() -> SimOptions {
        SimOptions {
            capacity: 1 << 50,
            largest_segment: 1 << 49,
            alignment: 512,
            asynchronous: false,
            contents: false,
            page: 0,
            check_order: false,
            record_calls: false,
        }
    }
}

/// A simulated device, whose memory is only counted or has tags. Cloning makes another handle on the device.
#[derive(Clone)]
pub struct Sim(Arc<SimShared>);

/// The shared state behind all handles.
struct SimShared {
    options: SimOptions,
    /// The device that this device stands for in a dry run. It creates segments of any size, as real devices may.
    stands_for: Option<Device>,
    count: AtomicU64,
    state: Mutex<State>,
}

/// The device's state, guarded by its lock.
#[derive(Default)]
struct State {
    pieces: SimSegments,
    streams: BTreeMap<StreamId, VecDeque<Command>>,
    order: Order,
    other_process_bytes: u64,
    calls: Vec<Call>,
    violations: Vec<String>,
    stalls: u64,
    copied: u64,
    failures: Failures,
    lost: Option<String>,
    at_synchronize: Vec<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sim").field(&self.0.options).finish()
    }
}

impl Sim {
    /// Makes a simulated device.
    pub fn new(options: SimOptions) -> Sim {
        Sim::standing_for(None, options)
    }

    /// Makes a device that stands for a real one in a dry run.
    pub(in crate::storage) fn standing_for(stands_for: Option<Device>, options: SimOptions) -> Sim {
        let mut state = State::default();
        state.order.checks = options.check_order;
        Sim(Arc::new(SimShared { options, stands_for, count: AtomicU64::new(0), state: Mutex::new(state) }))
    }

    /// Returns the number of driver calls: every kind in [`Call`].
    pub fn call_count(&self) -> u64 {
        self.0.count.load(Relaxed)
    }

    /// Returns every call so far, if calls are recorded.
    pub fn calls(&self) -> Vec<Call> {
        self.with(|s| s.calls.clone())
    }

    /// Returns the number of bytes that are committed.
    pub fn committed(&self) -> u64 {
        self.with(|s| s.pieces.committed)
    }

    /// Returns how often enqueued work had to commit memory because no allocator had committed it before. At that point
    /// running out of memory could no longer be handled.
    pub fn late_commits(&self) -> u64 {
        self.with(|s| s.pieces.late_commits)
    }

    /// Returns the number of segments created or reserved and not yet released.
    pub fn live_segments(&self) -> usize {
        self.with(|s| s.pieces.pieces.len())
    }

    /// Returns how often memory was released while queued work still used it. As on a real device, such a call first runs that
    /// work, which stalls the program.
    pub fn stalls(&self) -> u64 {
        self.with(|s| s.stalls)
    }

    /// Returns the number of bytes copied on the device or read to the host so far.
    pub fn bytes_copied(&self) -> u64 {
        self.with(|s| s.copied)
    }

    /// Returns the errors that work found, a sentence each, oldest first. Empty for a correct allocator.
    pub fn violations(&self) -> Vec<String> {
        self.with(|s| s.violations.clone())
    }

    /// Sets the number of bytes that other processes hold, which reduce the memory that is left of `capacity`.
    pub fn set_others(&self, bytes: u64) {
        self.with(|s| s.other_process_bytes = bytes);
    }

    /// Runs `hook` once, during the allocator's next wait for the device.
    pub fn at_synchronize(&self, hook: impl FnOnce() + Send + 'static) {
        self.with(|s| s.at_synchronize.push(Box::new(hook)));
    }

    /// Returns the id of a stream; 0 is the default stream. Streams of this device need not be created.
    pub fn stream(&self, index: u32) -> StreamId {
        StreamId(index)
    }

    /// Like [`write_tag`](Sim::write_tag), for `bytes` bytes at any location.
    pub fn write_tag_at(&self, stream: StreamId, at: At<'_>, bytes: usize, tag: u32) -> Result<()> {
        self.launch(stream, at, bytes, |span| Command::Write(span, tag))
    }

    /// Like [`check_tag`](Sim::check_tag), for `bytes` bytes at any location.
    pub fn check_tag_at(&self, stream: StreamId, at: At<'_>, bytes: usize, tag: u32) -> Result<()> {
        self.launch(stream, at, bytes, |span| Command::Check(span, tag))
    }

    /// Runs the next command of a stream. Returns false if no command is queued, or if the next command waits for another stream.
    pub fn step(&self, stream: StreamId) -> bool {
        self.with(|s| s.step(stream))
    }

    /// Runs up to `n` commands of a stream. Returns the number of commands run.
    pub fn run(&self, stream: StreamId, n: usize) -> usize {
        self.with(|s| (0..n).take_while(|_| s.step(stream)).count())
    }

    /// Runs up to 16 commands of randomly chosen streams. Returns the number of commands run. The same seed in the same
    /// state runs the same commands.
    pub fn run_some(&self, seed: u64) -> usize {
        self.with(|s| s.run_some(seed))
    }

    /// Returns the number of commands that have not run, on all streams.
    pub fn queued(&self) -> usize {
        self.with(|s| s.streams.values().map(VecDeque::len).sum())
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut lock(&self.0.state))
    }

    /// Records a driver call, and then executes `f`, which is the call's work.
    fn call<R>(&self, call: Call, f: impl FnOnce(&mut State) -> R) -> R {
        self.0.count.fetch_add(1, Relaxed);
        self.with(|s| {
            if self.0.options.record_calls {
                s.calls.push(call);
            }
            f(s)
        })
    }

    /// Creates a segment whose memory is committed only by [`commit`](Sim::commit), or by the first work that uses it.
    fn create_lazily(&self, bytes: usize) -> Result<Memory, Failure> {
        self.attempt(Call::Create(bytes), |s| {
            if let Some(failure) = s.failures.create.pop_front() {
                return Err(failure);
            }
            if bytes > self.0.options.largest_segment && self.0.stands_for.is_none() {
                return Err(Failure::TooBig);
            }
            Ok(self.make_memory(s, bytes, false))
        })
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        let m = self.own_memory(&memory).map_err(Failure::Other)?;
        self.attempt(Call::Commit(m.size), |s| self.commit_range(s, m, 0, m.size))?;
        Ok(memory)
    }

    fn granule(&self) -> usize {
        self.0.options.alignment
    }

    fn commit_limit(&self, s: &State) -> u64 {
        self.0.options.capacity.saturating_sub(s.other_process_bytes)
    }

    /// Returns a segment as this device's own memory, even if the segment was made by a driver that wraps this driver.
    fn own_memory<'a>(&self, memory: &'a Memory) -> Result<&'a SimMemory> {
        match &memory.get().unwrap_or(memory).0 {
            MemoryKind::Sim(m) if Arc::ptr_eq(&m.sim.0, &self.0) => Ok(m),
            _ => Err(Error::invalid("driver", format!("{memory:?} is not this simulated device's memory"))),
        }
    }

    /// Returns the granules of `bytes` bytes of a segment. A partial granule counts as a whole one.
    fn span(&self, (memory, offset): At<'_>, bytes: usize) -> Result<Span> {
        let memory = self.own_memory(memory)?;
        if offset.checked_add(bytes).is_none_or(|end| end > memory.size) || !offset.is_multiple_of(self.granule()) {
            let (all, granule) = (memory.size, self.granule());
            let reason = format!("{bytes} bytes at {offset} are not granules of {granule} in a segment of {all}");
            return Err(Error::invalid("driver", reason));
        }
        let first = offset / self.granule();
        Ok(Span { piece: memory.id, first, end: first + bytes.div_ceil(self.granule()) })
    }

    fn launch(&self, stream: StreamId, at: At<'_>, bytes: usize, work: impl FnOnce(Span) -> Command) -> Result<()> {
        let span = self.span(at, bytes)?;
        self.with(|s| {
            self.commit_touched(s, span)?;
            self.submit(s, stream, work(span));
            Ok(())
        })
    }

    /// Commits these bytes if they are not committed yet. A lazy device does this when work on the bytes is enqueued.
    fn commit_touched(&self, s: &mut State, span: Span) -> Result<()> {
        let (granule, room) = (self.granule(), self.commit_limit(s));
        let range = span.first * granule..span.end * granule;
        if s.pieces.missing(span.piece, &range) == 0 {
            return Ok(());
        }
        if s.pieces.pieces[&span.piece].reserved {
            let fault = format!("{span:?} are reserved but not committed");
            s.violations.push(fault.clone());
            return Err(Error::invalid("clEnqueue", fault));
        }
        let done = s.failures.enqueue.pop_front().map_or_else(|| s.pieces.commit_late(span.piece, &range, room), Err);
        done.map_err(|failure| self.error("clEnqueue", failure))
    }

    fn submit(&self, s: &mut State, stream: StreamId, command: Command) {
        if !self.0.options.asynchronous {
            return s.execute(stream, command);
        }
        let unordered = s.order.submit(stream, &command);
        s.violations.extend(unordered);
        s.streams.entry(stream).or_default().push_back(command);
    }
}

/// The failures that tests requested and that have not happened yet, in order.
#[derive(Default)]
struct Failures {
    create: VecDeque<Failure>,
    commit: VecDeque<Failure>,
    enqueue: VecDeque<Failure>,
    /// Failures of other calls, each with the kind of the call.
    call: Vec<(Call, Failure)>,
    /// Set by `fail_calls`: the number of calls that still succeed, the number of calls that then fail, and the failure.
    calls: Option<(u64, u64, Failure)>,
    /// Whether every write from the host fails.
    writes: bool,
    /// Failures of enqueued copies, which happen when the copies run.
    copies: VecDeque<Failure>,
    /// A failure of a command that ran since the last wait for the device, which the next wait reports.
    pending_failure: Option<Failure>,
}

impl Failures {
    fn remaining(&self) -> usize {
        self.copies.len() + self.calls.as_ref().map_or(0, |(_, times, _)| usize::try_from(*times).unwrap_or(usize::MAX))
    }

    fn fails_copy(&mut self) -> bool {
        let failure = self.copies.pop_front();
        let fails = failure.is_some();
        self.pending_failure = failure.or(self.pending_failure.take());
        fails
    }

    fn failure_of_call(&mut self, call: Call) -> Option<Failure> {
        let next = self.call.iter().position(|(kind, _)| discriminant(kind) == discriminant(&call));
        if let Some(next) = next {
            return Some(self.call.remove(next).1);
        }
        if self.writes && matches!(call, Call::Write(_)) {
            return Some(Failure::Resources);
        }
        let (pass, times, failure) = self.calls.as_mut()?;
        if *pass > 0 {
            *pass -= 1;
            return None;
        }
        *times = times.checked_sub(1)?;
        Some(failure.clone())
    }
}

impl Sim {
    /// Makes the next creation fail. Calling again queues another failure; the same holds for the methods below.
    pub fn fail_next_create(&self, failure: Failure) {
        self.with(|s| s.failures.create.push_back(failure));
    }

    /// Makes the next commit or extension fail.
    pub fn fail_next_commit(&self, failure: Failure) {
        self.with(|s| s.failures.commit.push_back(failure));
    }

    /// Makes the next work that uses uncommitted memory fail when the work is enqueued.
    pub fn fail_next_enqueue(&self, failure: Failure) {
        self.with(|s| s.failures.enqueue.push_back(failure));
    }

    /// Makes the next call of this kind fail and do nothing, whatever its number of bytes. The kind is one of
    /// [`Synchronize`](Call::Synchronize), [`Record`](Call::Record), [`Query`](Call::Query), [`Wait`](Call::Wait),
    /// [`StreamWaits`](Call::StreamWaits), [`Copy`](Call::Copy), [`Read`](Call::Read) and [`Write`](Call::Write).
    pub fn fail_next_call(&self, kind: Call, failure: Failure) {
        self.with(|s| s.failures.call.push((kind, failure)));
    }

    /// Returns the number of requested failures that have not happened yet.
    pub fn failures_left(&self) -> usize {
        self.failures_lined_up().into_iter().sum::<usize>() + self.with(|s| s.failures.remaining())
    }

    /// Returns the number of requested failures of each kind: creation, commit, enqueueing and other calls.
    pub(crate) fn failures_lined_up(&self) -> [usize; 4] {
        self.with(|s| {
            let Failures { create, commit, enqueue, call, .. } = &s.failures;
            [create.len(), commit.len(), enqueue.len(), call.len()]
        })
    }

    /// Cancels every failure that has not happened yet.
    pub fn clear_failures(&self) {
        self.with(|s| s.failures = Failures::default());
    }

    /// Lets `pass` calls that can fail succeed; the next `times` such calls fail and do nothing. Calls that can fail
    /// are creating, committing and extending, waiting, recording, copying, reading and writing.
    pub fn fail_calls(&self, pass: u64, times: u64, failure: Failure) {
        self.with(|s| s.failures.calls = Some((pass, times, failure)));
    }

    /// Makes the next copy to run do nothing, and the wait after it fail.
    pub fn fail_next_copy(&self, failure: Failure) {
        self.with(|s| s.failures.copies.push_back(failure));
    }

    /// Makes every write from the host fail, until called with false.
    pub fn fail_writes(&self, fail: bool) {
        self.with(|s| s.failures.writes = fail);
    }

    /// Returns why the allocator declared the device lost; `None` if it did not.
    pub fn cause_of_loss(&self) -> Option<String> {
        self.with(|s| s.lost.clone())
    }

    /// Records a call, and executes the call unless a requested failure applies.
    fn attempt<R>(&self, call: Call, f: impl FnOnce(&mut State) -> Result<R, Failure>) -> Result<R, Failure> {
        self.call(call, |s| s.failures.failure_of_call(call).map_or_else(|| f(s), Err))
    }

    /// Like [`attempt`](Self::attempt), for calls whose failure is an [`Error`] and not a [`Failure`].
    fn try_call<R>(&self, call: Call, name: &'static str, f: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        self.call(call, |s| {
            s.failures.failure_of_call(call).map_or_else(|| f(s), |failure| Err(self.error(name, failure)))
        })
    }

    /// Converts a failure into the error that a failed call reports.
    fn error(&self, call: &'static str, failure: Failure) -> Error {
        let code = match failure {
            Failure::Other(error) => return error,
            Failure::DeviceMemory => "CL_MEM_OBJECT_ALLOCATION_FAILURE",
            Failure::Resources => "CL_OUT_OF_RESOURCES",
            Failure::HostMemory => "CL_OUT_OF_HOST_MEMORY",
            Failure::TooBig => "CL_INVALID_BUFFER_SIZE",
        };
        Error::OpenCl { device: self.device(), call, code, detail: String::new() }
    }
}

// SAFETY: segments have the requested size and are used by no other code. They have no bytes, only tags.
unsafe impl Driver for Sim {
    fn device(&self) -> Device {
        self.0.stands_for.unwrap_or(Device::OpenCL(99))
    }

    fn capacity(&self) -> u64 {
        self.0.options.capacity
    }

    fn largest_segment(&self) -> usize {
        self.0.options.largest_segment
    }

    fn alignment(&self) -> usize {
        self.0.options.alignment
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        self.commit(self.create_lazily(bytes)?)
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        self.create(image.bytes())
    }

    fn page(&self) -> usize {
        self.0.options.page
    }

    fn reserve(&self, bytes: usize) -> Option<Memory> {
        (self.0.options.page > 0).then(|| self.call(Call::Reserve(bytes), |s| self.make_memory(s, bytes, true)))
    }

    fn extend(&self, memory: &Memory, from: usize, to: usize) -> Result<(), Failure> {
        let m = self.own_memory(memory).map_err(Failure::Other)?;
        m.check_pages("extend", self.0.options.page, from, to).map_err(Failure::Other)?;
        self.attempt(Call::Extend(to - from), |s| self.commit_range(s, m, from, to))
    }

    unsafe fn shrink(&self, memory: &Memory, from: usize, to: usize) {
        let Ok(m) = self.own_memory(memory) else { return };
        self.call(Call::Shrink(to.saturating_sub(from)), |s| {
            match m.check_pages("shrink", self.0.options.page, from, to) {
                Err(error) => s.violations.push(error.to_string()),
                Ok(()) => {
                    s.finish_uses(Span { piece: m.id, first: from / self.granule(), end: to.div_ceil(self.granule()) });
                    s.pieces.decommit(m.id, &(from..to), self.granule());
                }
            }
        });
    }

    fn give_up(&self, cause: &str) {
        self.with(|s| _ = s.lost.get_or_insert_with(|| cause.to_owned()));
    }

    fn synchronize(&self) -> Result<()> {
        let hooks = self.try_call(Call::Synchronize, "clFinish", |s| Ok(std::mem::take(&mut s.at_synchronize)))?;
        hooks.into_iter().for_each(|hook| hook()); // not under the lock, because a hook may use the allocator
        let failed = self.with(|s| {
            s.finish_all();
            s.order.mark_all_known();
            s.failures.pending_failure.take()
        });
        failed.map_or(Ok(()), |failure| Err(self.error("clFinish", failure)))
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        self.try_call(Call::Record, "clEnqueueMarkerWithWaitList", |s| {
            if !self.0.options.asynchronous {
                return Ok(Marker(MarkerKind::Done));
            }
            let marker = SimMarker::new(stream, s.order.clock_after(stream));
            self.submit(s, stream, Command::Mark(marker.clone()));
            Ok(Marker(MarkerKind::Sim(marker)))
        })
    }

    fn is_done(&self, marker: &Marker) -> Result<bool> {
        match &marker.0 {
            MarkerKind::Sim(marker) => self.try_call(Call::Query, "clGetEventInfo", |s| {
                if marker.is_done() {
                    s.order.mark_known(&marker.before);
                }
                Ok(marker.is_done())
            }),
            _ => Ok(true),
        }
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.try_call(Call::Query, "clGetEventInfo", |s| Ok(s.order.progress(stream).is_finished()))
    }

    /// The simulated device knows at once which commands are done.
    fn progress(&self, stream: StreamId) -> Progress {
        self.with(|s| s.order.progress(stream))
    }

    fn wait(&self, marker: &Marker) -> Result<()> {
        match &marker.0 {
            MarkerKind::Sim(marker) => self.try_call(Call::Wait, "clWaitForEvents", |s| {
                s.finish(marker.clone());
                s.order.mark_known(&marker.before);
                Ok(())
            }),
            _ => Ok(()),
        }
    }

    fn stream_waits(&self, stream: StreamId, marker: &Marker) -> Result<()> {
        match &marker.0 {
            MarkerKind::Sim(marker) => self.try_call(Call::StreamWaits, "clEnqueueBarrierWithWaitList", |s| {
                self.submit(s, stream, Command::Wait(marker.clone()));
                Ok(())
            }),
            _ => Ok(()),
        }
    }

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        let (from, to) = (self.span(from, bytes)?, self.span(to, bytes)?);
        self.try_call(Call::Copy(bytes), "clEnqueueCopyBuffer", |s| {
            if from.overlaps(&to) {
                return Err(Error::invalid("copy", format!("{bytes} bytes of {from:?} overlap {to:?}")));
            }
            self.commit_touched(s, from)?;
            self.commit_touched(s, to)?;
            s.copied += bytes as u64;
            self.submit(s, stream, Command::Copy(from, to));
            Ok(())
        })
    }

    /// The bytes read from a granule are its tag, repeated. Writing these bytes to another granule gives it the same tag.
    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let span = self.span(from, to.len())?;
        self.try_call(Call::Read(to.len()), "clEnqueueReadBuffer", |s| {
            self.commit_touched(s, span)?;
            s.copied += to.len() as u64;
            s.finish_default(span, false);
            s.pieces.read(span, self.granule(), to);
            Ok(())
        })
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let span = self.span(to, from.len())?;
        self.try_call(Call::Write(from.len()), "clEnqueueWriteBuffer", |s| {
            self.commit_touched(s, span)?;
            s.finish_default(span, true);
            s.pieces.write(span, self.granule(), from);
            Ok(())
        })
    }
}
