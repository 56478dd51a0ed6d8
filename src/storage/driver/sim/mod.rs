//! A simulated device: lazy, with a capacity, streams that run when they are told to, contents that are checked,
//! failures on demand and a record of every call.
//!
//! Its memory is counted and, with [`SimOptions::contents`], carries one number (a *tag*) per granule of
//! [`SimOptions::alignment`] bytes. Work is writing a block's tag and checking it: bytes that were reused too early, moved
//! without their contents or handed out twice show as a [violation](Sim::violations) when the check runs.

mod failures;
mod memory;
mod order;
mod queue;
mod tags;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::{At, Driver, Failure, ImageDesc, Marker, MarkerKind, Memory, MemoryKind, Progress};
use crate::device::StreamId;
use crate::device::lock;
use crate::{Device, Error, Result};
use failures::Failures;
use memory::Pieces;
pub(crate) use memory::SimMemory;
use order::Order;
pub(crate) use queue::SimMarker;
use queue::{Command, Span};

/// A call of an allocator, with the bytes it is about.
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

/// What a simulated device is like.
///
/// ```
/// use claystone::storage::{Sim, SimOptions};
/// let sim = Sim::new(SimOptions { capacity: 64 << 20, asynchronous: true, contents: true, ..SimOptions::default() });
/// assert_eq!(sim.committed(), 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// Bytes it has.
    pub capacity: u64,
    /// The largest segment it makes, in bytes.
    pub largest_segment: usize,
    /// Blocks begin at multiples of this many bytes, a power of two.
    pub alignment: usize,
    /// Whether commands wait in their streams until [`Sim::step`] and its kin run them, or something waits for them.
    /// Otherwise each is done when its call returns.
    pub asynchronous: bool,
    /// Whether memory has tags: takes four bytes of the host's memory for each granule.
    pub contents: bool,
    /// Bytes of the pages that reserved memory is committed in; 0 for a device that cannot reserve.
    pub page: usize,
    /// Whether uses of the same bytes by streams that nothing has ordered are [violations](Sim::violations), in whatever
    /// order they run.
    pub check_order: bool,
    /// Whether to keep every call for [`Sim::calls`].
    pub record_calls: bool,
}

impl Default for SimOptions {
    /// A device that is never full and always idle.
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

/// A device whose memory is counted only, or carries tags. Cloning makes another handle on it.
#[derive(Clone)]
pub struct Sim(Arc<Shared>);

struct Shared {
    options: SimOptions,
    count: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pieces: Pieces,
    streams: BTreeMap<StreamId, VecDeque<Command>>,
    order: Order,
    others: u64,
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
    /// A device like this.
    pub fn new(options: SimOptions) -> Sim {
        let mut state = State::default();
        state.order.checks = options.check_order;
        Sim(Arc::new(Shared { options, count: AtomicU64::new(0), state: Mutex::new(state) }))
    }

    /// How often the driver was called: everything in [`Call`].
    pub fn call_count(&self) -> u64 {
        self.0.count.load(Relaxed)
    }

    /// Every call so far, if they are recorded.
    pub fn calls(&self) -> Vec<Call> {
        self.with(|s| s.calls.clone())
    }

    /// Bytes committed now.
    pub fn committed(&self) -> u64 {
        self.with(|s| s.pieces.committed())
    }

    /// How often work had to commit the memory it touched, because nobody had: at such a point a full device fails
    /// where no allocator can help.
    pub fn late_commits(&self) -> u64 {
        self.with(|s| s.pieces.late_commits())
    }

    /// Segments made or reserved and not yet released.
    pub fn live_segments(&self) -> usize {
        self.with(|s| s.pieces.len())
    }

    /// How often memory was given back while queued work still needed it: the call had to run that work first, as a
    /// real device stalls.
    pub fn stalls(&self) -> u64 {
        self.with(|s| s.stalls)
    }

    /// Bytes copied on the device or read to the host so far.
    pub fn bytes_copied(&self) -> u64 {
        self.with(|s| s.copied)
    }

    /// What work found that should not be: a sentence each, oldest first. Empty for a correct allocator.
    pub fn violations(&self) -> Vec<String> {
        self.with(|s| s.violations.clone())
    }

    /// Bytes that other processes hold: `capacity` does not tell.
    pub fn set_others(&self, bytes: u64) {
        self.with(|s| s.others = bytes);
    }

    /// What happens while the allocator next waits for the device.
    pub fn at_synchronize(&self, hook: impl FnOnce() + Send + 'static) {
        self.with(|s| s.at_synchronize.push(Box::new(hook)));
    }

    /// The name of a stream; 0 is the default one. Streams of this device need no making.
    pub fn stream(&self, index: u32) -> StreamId {
        StreamId(index)
    }

    /// As [`write_tag`](Sim::write_tag), of `bytes` bytes anywhere.
    pub fn write_tag_at(&self, stream: StreamId, at: At<'_>, bytes: usize, tag: u32) -> Result<()> {
        self.launch(stream, at, bytes, |span| Command::Write(span, tag))
    }

    /// As [`check_tag`](Sim::check_tag), of `bytes` bytes anywhere.
    pub fn check_tag_at(&self, stream: StreamId, at: At<'_>, bytes: usize, tag: u32) -> Result<()> {
        self.launch(stream, at, bytes, |span| Command::Check(span, tag))
    }

    /// Runs the next command of a stream; false where there is none, or it waits for another stream.
    pub fn step(&self, stream: StreamId) -> bool {
        self.with(|s| s.step(stream))
    }

    /// Runs up to `n` commands of a stream, and says how many ran.
    pub fn run(&self, stream: StreamId, n: usize) -> usize {
        self.with(|s| (0..n).take_while(|_| s.step(stream)).count())
    }

    /// Runs a few commands (up to 16) of streams taken at random, and says how many ran. The same seed in the same
    /// state does the same.
    pub fn run_some(&self, seed: u64) -> usize {
        self.with(|s| s.run_some(seed))
    }

    /// Commands that have not run, on all streams.
    pub fn queued(&self) -> usize {
        self.with(|s| s.streams.values().map(VecDeque::len).sum())
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut lock(&self.0.state))
    }

    /// Notes a call, and does it.
    fn call<R>(&self, call: Call, f: impl FnOnce(&mut State) -> R) -> R {
        self.0.count.fetch_add(1, Relaxed);
        self.with(|s| {
            if self.0.options.record_calls {
                s.calls.push(call);
            }
            f(s)
        })
    }

    fn granule(&self) -> usize {
        self.0.options.alignment
    }

    /// Bytes that may be committed in all.
    fn room(&self, s: &State) -> u64 {
        self.0.options.capacity.saturating_sub(s.others)
    }

    /// The driver's memory as this device's own; that of a driver which hands it out wrapped, too.
    fn own<'a>(&self, memory: &'a Memory) -> Result<&'a SimMemory> {
        match &memory.get().unwrap_or(memory).0 {
            MemoryKind::Sim(m) if Arc::ptr_eq(&m.sim.0, &self.0) => Ok(m),
            _ => Err(Error::invalid("driver", format!("{memory:?} is not this simulated device's memory"))),
        }
    }

    /// `bytes` bytes of a segment, in granules; bytes beyond a whole granule take all of it.
    fn span(&self, (memory, offset): At<'_>, bytes: usize) -> Result<Span> {
        let memory = self.own(memory)?;
        if offset.checked_add(bytes).is_none_or(|end| end > memory.size) || !offset.is_multiple_of(self.granule()) {
            let (all, granule) = (memory.size, self.granule());
            let reason = format!("{bytes} bytes at {offset} are not granules of {granule} in a segment of {all}");
            return Err(Error::invalid("driver", reason));
        }
        let first = offset / self.granule();
        Ok(Span { piece: memory.id, first, end: first + bytes.div_ceil(self.granule()) })
    }

    /// Enqueues work on `bytes` bytes.
    fn launch(&self, stream: StreamId, at: At<'_>, bytes: usize, work: impl FnOnce(Span) -> Command) -> Result<()> {
        let span = self.span(at, bytes)?;
        self.with(|s| {
            self.touch(s, span)?;
            self.submit(s, stream, work(span));
            Ok(())
        })
    }

    /// What a lazy device does when work on these bytes is enqueued: it finds the memory if nobody has made it.
    fn touch(&self, s: &mut State, span: Span) -> Result<()> {
        let (granule, room) = (self.granule(), self.room(s));
        let range = span.first * granule..span.end * granule;
        if s.pieces.missing(span.piece, &range) == 0 {
            return Ok(());
        }
        if s.pieces.is_reserved(span.piece) {
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

// SAFETY: segments are of the size asked for and nobody else's; they have tags instead of bytes.
unsafe impl Driver for Sim {
    fn device(&self) -> Device {
        Device::OpenCL(99)
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

    fn has_contents(&self) -> bool {
        self.0.options.contents
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        self.attempt(Call::Create(bytes), |s| {
            if let Some(failure) = s.failures.create.pop_front() {
                return Err(failure);
            }
            if bytes > self.0.options.largest_segment {
                return Err(Failure::TooBig);
            }
            Ok(self.make(s, bytes, false))
        })
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        self.create(image.bytes())
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        let m = self.own(&memory).map_err(Failure::Other)?;
        self.attempt(Call::Commit(m.size), |s| self.find(s, m, 0, m.size))?;
        Ok(memory)
    }

    fn page(&self) -> usize {
        self.0.options.page
    }

    fn reserve(&self, bytes: usize) -> Option<Memory> {
        (self.0.options.page > 0).then(|| self.call(Call::Reserve(bytes), |s| self.make(s, bytes, true)))
    }

    fn extend(&self, memory: &Memory, from: usize, to: usize) -> Result<(), Failure> {
        let m = self.own(memory).map_err(Failure::Other)?;
        m.check_pages("extend", self.0.options.page, from, to).map_err(Failure::Other)?;
        self.attempt(Call::Extend(to - from), |s| self.find(s, m, from, to))
    }

    unsafe fn shrink(&self, memory: &Memory, from: usize, to: usize) {
        let Ok(m) = self.own(memory) else { return };
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
        hooks.into_iter().for_each(|hook| hook()); // without the lock: a hook may use the allocator
        let failed = self.with(|s| {
            s.finish_all();
            s.order.know_all();
            s.failures.met.take()
        });
        failed.map_or(Ok(()), |failure| Err(self.error("clFinish", failure)))
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        self.try_call(Call::Record, "clEnqueueMarkerWithWaitList", |s| {
            if !self.0.options.asynchronous {
                return Ok(Marker(MarkerKind::Done));
            }
            let marker = SimMarker::new(stream, s.order.now(stream));
            self.submit(s, stream, Command::Mark(marker.clone()));
            Ok(Marker(MarkerKind::Sim(marker)))
        })
    }

    fn is_done(&self, marker: &Marker) -> Result<bool> {
        match &marker.0 {
            MarkerKind::Sim(marker) => self.try_call(Call::Query, "clGetEventInfo", |s| {
                if marker.is_done() {
                    s.order.know(marker.before());
                }
                Ok(marker.is_done())
            }),
            _ => Ok(true),
        }
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.try_call(Call::Query, "clGetEventInfo", |s| Ok(s.order.progress(stream).is_finished()))
    }

    /// It knows at once what is done.
    fn progress(&self, stream: StreamId) -> Progress {
        self.with(|s| s.order.progress(stream))
    }

    fn wait(&self, marker: &Marker) -> Result<()> {
        match &marker.0 {
            MarkerKind::Sim(marker) => self.try_call(Call::Wait, "clWaitForEvents", |s| {
                s.finish(marker.clone());
                s.order.know(marker.before());
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
            self.touch(s, from)?;
            self.touch(s, to)?;
            s.copied += bytes as u64;
            self.submit(s, stream, Command::Copy(from, to));
            Ok(())
        })
    }

    /// The bytes of a granule are its tag, over and over: written elsewhere they are the same tag.
    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let span = self.span(from, to.len())?;
        self.try_call(Call::Read(to.len()), "clEnqueueReadBuffer", |s| {
            self.touch(s, span)?;
            s.copied += to.len() as u64;
            s.finish_default(span, false);
            s.pieces.read(span, self.granule(), to);
            Ok(())
        })
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let span = self.span(to, from.len())?;
        self.try_call(Call::Write(from.len()), "clEnqueueWriteBuffer", |s| {
            self.touch(s, span)?;
            s.finish_default(span, true);
            s.pieces.write(span, self.granule(), from);
            Ok(())
        })
    }
}
