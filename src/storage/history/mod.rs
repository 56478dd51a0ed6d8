//! The history of an allocator, which records its events.
//!
//! A [`History`] is a ring buffer of an allocator's latest events. While recording is off, an event costs one relaxed
//! load. While recording is on, an event takes one short lock and is written into memory that was reserved when
//! recording was switched on. A [`Snapshot`] contains the allocator's segments and blocks at one moment and the
//! recorded events, in the format of PyTorch's memory viewer. A [`CsvLog`] writes events in RMM's format.
//!
//! Events and live blocks have the call stack that caused them. Without stacks they have the program's line that
//! allocated them ([`Caller`]). Programs can also name their work: [`with_context`] labels every event of a thread, and
//! [`annotate`] marks a span of time.

mod caller;
mod check;
mod collect;
mod context;
mod csv;
mod live;
mod peak;
mod pickle;
mod setting;
mod snapshot;
mod stack;
mod summary;
mod symbols;
#[cfg(test)]
pub(super) mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use caller::Caller;
pub(super) use caller::add_caller_line;
pub(crate) use collect::SegmentWithContexts;
use context::FrameCache;
pub(super) use context::count_recording;
pub use context::{Context, annotate, annotations, set_context, with_context};
pub use csv::{CsvAction, CsvEvent, CsvLog};
pub use live::{LiveBlock, LiveMemory};
pub(super) use live::{fmt_sites, group_by_call_site};
pub use peak::PeakMemory;
pub use setting::Setting;
pub(super) use snapshot::device_number;
pub use snapshot::{
    Annotation, BlockInfo, BlockState, Frame, SegmentInfo, SegmentType, Snapshot, Stage, TraceAction, TraceEntry,
};
pub use summary::{Fragmentation, FreeSpace};

use crate::device::lock;
use crate::{Error, Result};

/// The detail that an allocator's [`History`] keeps: the arguments of PyTorch's `torch.cuda.memory._record_memory_history`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryOptions {
    /// Which events to record, if any.
    pub enabled: Recording,
    /// Which entries carry a context: the call stack, and the names given to [`with_context`].
    pub context: ContextLevel,
    /// Whether contexts include call stacks. Capturing a call stack takes a fraction of a microsecond per event, and
    /// some tens of microseconds the first time a stack occurs.
    ///
    /// The addresses of the innermost 64 frames are kept; functions, files and lines are looked up when a snapshot is
    /// taken. Lines need debug information, as by `debug = "line-tables-only"` in a profile of `Cargo.toml`. Without
    /// debug information only the innermost frame has a line: the program's line that allocated a block is always
    /// known, even without stacks and in stripped programs ([`Caller`]).
    ///
    /// The process keeps at most 65,536 different stacks. The number of stacks that were not kept is in a snapshot's
    /// `allocator_settings["stacks_lost"]`.
    ///
    /// Frames of this crate, the standard library, rayon and the test harness are left out, so that the innermost frame
    /// is the program's. A program's closure or method called inside an operation counts as the program's.
    pub stacks: bool,
    /// The number of latest events to keep, at 48 bytes each. It must be at least 1. (PyTorch keeps all events by default.)
    pub max_entries: usize,
    /// Whether to delete earlier events.
    pub clear_history: bool,
}

impl Default for HistoryOptions {
    /// Returns options that record everything, for the latest 100,000 events.
    fn default() -> HistoryOptions {
        HistoryOptions {
            enabled: Recording::All,
            context: ContextLevel::All,
            stacks: true,
            max_entries: 100_000,
            clear_history: false,
        }
    }
}

setters!(HistoryOptions {
    enabled: Recording,
    context: ContextLevel,
    stacks: bool,
    max_entries: usize,
    clear_history: bool
});

/// Selects what to record: PyTorch's `enabled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// Record nothing. Events that were recorded earlier are kept until they are cleared.
    Off,
    /// Record only the context of live blocks, which snapshots include. The trace keeps a single entry.
    State,
    /// Record the context of live blocks, and a trace of all events.
    All,
}

/// Selects the entries that carry contexts: PyTorch's `context`. Each level includes the levels before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ContextLevel {
    /// No entry carries a context.
    Never,
    /// Live blocks and segments in the snapshot carry a context.
    State,
    /// Also trace entries of allocations: of blocks, of segments, and of allocations that failed for lack of memory.
    Alloc,
    /// Every entry carries a context, including frees of blocks.
    All,
}

/// A ring buffer of an allocator's latest events. All methods may be called from any thread.
///
/// The entries of an address must be in the order of its events. Either record events under the lock that orders them,
/// or record a free before another thread can get the block, and an allocation after the block was taken.
///
/// ```
/// use claystone::storage::{History, HistoryOptions, TraceAction};
/// let history = History::new();
/// history.record_memory_history(HistoryOptions::default().max_entries(2))?;
/// for addr in [0, 512, 1024] {
///     history.record(TraceAction::Alloc, addr, 512, 0);
/// }
/// assert_eq!(history.entries().iter().map(|e| e.addr).collect::<Vec<_>>(), [512, 1024]);
/// assert_eq!(history.overwritten(), 1);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct History {
    on: AtomicBool,
    ring: Mutex<EventRing>,
}

/// The ring buffer and its options.
struct EventRing {
    options: HistoryOptions,
    /// The recorded events. The vector never grows beyond the capacity allocated when recording began.
    events: Vec<Event>,
    /// The index of the oldest event once the ring is full, which the next event replaces.
    next: usize,
    overwritten: u64,
}

/// A recorded event, whose context is not resolved to frames yet.
#[derive(Clone, Copy)]
struct Event {
    addr: u64,
    bytes: u64,
    time_us: u64,
    stream: u32,
    context: Context,
    action: TraceAction,
}

impl History {
    /// Makes a history that records nothing yet.
    pub const fn new() -> History {
        let options = HistoryOptions {
            enabled: Recording::Off,
            context: ContextLevel::Never,
            stacks: false,
            max_entries: 1,
            clear_history: false,
        };
        History {
            on: AtomicBool::new(false),
            ring: Mutex::new(EventRing { options, events: Vec::new(), next: 0, overwritten: 0 }),
        }
    }

    /// Switches recording on or off, or changes the number of entries kept. The latest entries that fit are kept.
    ///
    /// # Errors
    /// If `max_entries` is 0 or the host has no memory for that many entries. Nothing has changed then.
    pub fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        const OP: &str = "record_memory_history";
        if options.max_entries == 0 {
            return Err(Error::invalid(OP, "max_entries must be at least 1"));
        }
        let mut ring = lock(&self.ring);
        if options.enabled != Recording::Off {
            let entries = if options.enabled == Recording::State { 1 } else { options.max_entries };
            let mut events = Vec::new();
            events
                .try_reserve_exact(entries)
                .map_err(|_| Error::invalid(OP, format!("there is no memory for max_entries = {entries}")))?;
            let kept = if options.clear_history { 0 } else { ring.events.len().min(entries) };
            events.extend(ring.in_order().skip(ring.events.len() - kept));
            ring.overwritten += (ring.events.len() - kept) as u64;
            ring.options = HistoryOptions { max_entries: entries, ..options };
            (ring.events, ring.next) = (events, 0);
        }
        if options.clear_history {
            ring.clear();
        }
        let on = options.enabled != Recording::Off;
        if self.on.swap(on, Ordering::Relaxed) != on {
            context::count_recording(on);
        }
        Ok(())
    }

    /// True if events are being recorded.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records an event, with `addr` and `bytes` as [`TraceEntry`] defines them for the action. Does nothing while recording is off.
    ///
    /// For an event that creates a block or segment, returns the context to store with it ([`BlockInfo::frames`]).
    /// Returns [`Context::NONE`] for other events, and if the context level is lower.
    #[inline]
    pub fn record(&self, action: TraceAction, addr: u64, bytes: u64, stream: u32) -> Context {
        if self.is_on() { self.push(&[action], addr, bytes, stream) } else { Context::NONE }
    }

    /// Records that a block was returned and is free at once: adds two entries with the same context.
    #[inline]
    pub fn record_free(&self, addr: u64, bytes: u64, stream: u32) {
        if self.is_on() {
            self.push(&[TraceAction::FreeRequested, TraceAction::FreeCompleted], addr, bytes, stream);
        }
    }

    /// Records one entry per action, all with the same context and time.
    #[cold]
    fn push(&self, actions: &[TraceAction], addr: u64, bytes: u64, stream: u32) -> Context {
        use TraceAction::{Alloc, Oom, SegmentAlloc, SegmentMap};
        let mut ring = lock(&self.ring);
        let level = ring.options.context;
        let allocates = matches!(actions, [Alloc | SegmentAlloc | SegmentMap | Oom]);
        let in_entry = level >= if allocates { ContextLevel::Alloc } else { ContextLevel::All };
        let in_block = level >= ContextLevel::State && matches!(actions, [Alloc | SegmentAlloc | SegmentMap]);
        let context = match in_entry || in_block {
            true if ring.options.stacks => Context::with_stack(),
            true => Context::current(),
            false => Context::NONE,
        };
        // Entries of frees get no line: a block is often freed long after its last use, so the line would be misleading.
        let context = if allocates && (in_entry || in_block) { context.with_caller() } else { context };
        // The clock is read under the lock, so that times increase along the ring.
        let time_us = now_us();
        for &action in actions {
            let context = if in_entry { context } else { Context::NONE };
            ring.push(Event { addr, bytes, time_us, stream, context, action });
        }
        if in_block { context } else { Context::NONE }
    }

    /// Returns the recorded entries that are still kept, the oldest first.
    pub fn entries(&self) -> Vec<TraceEntry> {
        let events: Vec<Event> = lock(&self.ring).in_order().collect();
        let mut frames = FrameCache::default();
        events.into_iter().map(|event| event.entry(&mut frames)).collect()
    }

    /// Copies the data that [`Snapshot::of_device`] needs. Entries are resolved later, when no lock is held.
    pub(crate) fn copy(&self) -> RecordedEvents {
        let ring = lock(&self.ring);
        RecordedEvents {
            events: ring.in_order().collect(),
            max_entries: ring.options.max_entries,
            overwritten: ring.overwritten,
        }
    }

    /// Deletes the entries and resets the count of overwritten entries. Recording continues if it was on.
    pub fn clear(&self) {
        lock(&self.ring).clear();
    }

    /// Returns the number of entries overwritten since the last clear.
    pub fn overwritten(&self) -> u64 {
        lock(&self.ring).overwritten
    }

    /// Returns the maximum number of entries: PyTorch's `trace_alloc_max_entries`. Returns 1 if recording was never switched on.
    pub fn max_entries(&self) -> usize {
        lock(&self.ring).options.max_entries
    }
}

/// A copy of a history's events and counts.
#[derive(Default)]
pub(crate) struct RecordedEvents {
    events: Vec<Event>,
    max_entries: usize,
    overwritten: u64,
}

impl Default for History {
    fn default() -> History {
        History::new()
    }
}

impl Drop for History {
    fn drop(&mut self) {
        if self.is_on() {
            context::count_recording(false);
        }
    }
}

impl EventRing {
    fn push(&mut self, event: Event) {
        let max = self.options.max_entries;
        if self.events.len() < max {
            self.events.push(event);
        } else {
            self.events[self.next] = event;
            self.next = if self.next + 1 == max { 0 } else { self.next + 1 };
            self.overwritten += 1;
        }
    }

    /// Iterates over the events, oldest first.
    fn in_order(&self) -> impl Iterator<Item = Event> + '_ {
        let (newer, older) = self.events.split_at(self.next);
        older.iter().chain(newer).copied()
    }

    fn clear(&mut self) {
        self.events.clear();
        (self.next, self.overwritten) = (0, 0);
    }
}

impl Event {
    fn entry(self, frames: &mut FrameCache) -> TraceEntry {
        TraceEntry {
            action: self.action,
            addr: self.addr,
            size: self.bytes,
            stream: self.stream.into(),
            time_us: self.time_us,
            frames: frames.resolve(self.context),
            compile_context: self.context.path(),
        }
    }
}

/// Returns microseconds since 1970 from a monotonic clock: the wall clock is read only once.
pub(crate) fn now_us() -> u64 {
    static ANCHOR: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (start, wall) =
        ANCHOR.get_or_init(|| (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()));
    (*wall + start.elapsed()).as_micros() as u64
}
