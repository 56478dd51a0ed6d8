//! What the allocator did, for people and programs to look at afterwards.
//!
//! A [`History`] is an allocator's ring of trace entries: off it costs one relaxed load an event, on it takes one short
//! lock and writes into memory that was reserved when it was switched on. A [`Snapshot`] is the allocator's segments and
//! blocks at one moment beside that trace, in the form that PyTorch's memory viewer opens. A [`CsvLog`] writes the
//! events in RMM's format.
//!
//! Events and live blocks carry the call stack that they come from, or without it the line of the program that allocated them
//! ([`Caller`]). Programs may name what they do besides: [`with_context`] labels every event of a thread, and [`annotate`] marks
//! a span of time.

mod caller;
mod check;
mod collect;
mod context;
mod csv;
mod frames;
mod live;
mod peak;
mod pickle;
mod pickler;
mod setting;
mod snapshot;
mod stack;
mod summary;
mod symbols;
#[cfg(test)]
pub(super) mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use caller::Caller;
pub(crate) use collect::WithContexts;
use context::Frames;
pub use context::{Context, annotate, annotations, with_context};
pub use csv::{CsvAction, CsvEvent, CsvLog};
pub use live::{LiveBlock, LiveMemory};
pub use peak::PeakMemory;
pub use setting::Setting;
pub(super) use snapshot::device_number;
pub use snapshot::{
    Annotation, BlockInfo, BlockState, Frame, SegmentInfo, SegmentType, Snapshot, Stage, TraceAction, TraceEntry,
};
pub use summary::{Fragmentation, FreeSpace};

use crate::device::lock;
use crate::{Error, Result};

/// How much an allocator's [`History`] keeps: the arguments of PyTorch's `torch.cuda.memory._record_memory_history`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryOptions {
    /// Whether, and what, to record.
    pub enabled: Recording,
    /// Which entries say where they come from: the call stack, and the names given to [`with_context`].
    pub context: ContextLevel,
    /// Whether call stacks are captured where `context` says so. That takes a fraction of a microsecond an event, and some
    /// tens the first time a stack is met. Addresses are kept, of the innermost 64 frames; their functions, files and lines
    /// are looked up when a snapshot is taken. Lines need debug information, as by `debug = "line-tables-only"` in a profile
    /// of `Cargo.toml`; without it there are the functions' names, and the line of the innermost: which line of the program
    /// allocated a block is known without stacks too, and in programs that were stripped ([`Caller`]). The process keeps at most 65,536 different stacks, and what it had to leave out is counted in a snapshot's
    /// `allocator_settings["stacks_lost"]`.
    ///
    /// Frames of this crate, the standard library, rayon and the test harness are left out, so that the innermost frame is
    /// the program's. What a closure or a method of the program does inside of an operation is the program's too.
    pub stacks: bool,
    /// The number of latest events kept, of 48 bytes each, at least 1. PyTorch's default has no bound.
    pub max_entries: usize,
    /// Forget what was recorded before.
    pub clear_history: bool,
}

impl Default for HistoryOptions {
    /// Everything, of the latest 100,000 events.
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

/// PyTorch's `enabled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// Record nothing. Entries already recorded stay until they are cleared.
    Off,
    /// Only the context of live blocks, which snapshots show: one trace entry is kept.
    State,
    /// A trace of all events besides.
    All,
}

/// PyTorch's `context`: each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ContextLevel {
    /// Nowhere.
    Never,
    /// On live blocks and segments in the snapshot.
    State,
    /// On entries of allocations as well: of blocks and segments, and of those that found no memory.
    Alloc,
    /// On every entry: where blocks are freed as well.
    All,
}

/// An allocator's ring of its latest events. All methods may be called from any thread.
///
/// Entries must be recorded in the order in which things happened to an address: while the lock is held that orders
/// them, or a free before its block can be found and an allocation after its block was taken.
///
/// ```
/// use claystone::storage::{History, HistoryOptions, TraceAction};
/// let history = History::new();
/// history.record_memory_history(HistoryOptions { max_entries: 2, ..Default::default() })?;
/// for addr in [0, 512, 1024] {
///     history.record(TraceAction::Alloc, addr, 512, 0);
/// }
/// assert_eq!(history.entries().iter().map(|e| e.addr).collect::<Vec<_>>(), [512, 1024]);
/// assert_eq!(history.overwritten(), 1);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct History {
    on: AtomicBool,
    ring: Mutex<Ring>,
}

struct Ring {
    options: HistoryOptions,
    /// Never grows past the capacity it got when recording began.
    events: Vec<Event>,
    /// Where the next event goes once the ring is full: the oldest is there.
    next: usize,
    overwritten: u64,
}

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
    /// A history that records nothing yet.
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
            ring: Mutex::new(Ring { options, events: Vec::new(), next: 0, overwritten: 0 }),
        }
    }

    /// Switches recording on, off, or to another size: the latest entries that fit are kept.
    ///
    /// # Errors
    /// When `max_entries` is 0 or there is no memory for as many; then nothing has changed.
    pub fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        const OP: &str = "record_memory_history";
        if options.max_entries == 0 {
            return Err(Error::invalid(OP, "max_entries must be at least 1"));
        }
        let mut ring = self.lock();
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

    /// Whether events are being recorded.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records an event: `addr` and `bytes` as [`TraceEntry`] says for the action. Does nothing while off. Gives the context
    /// that a block or segment keeps which the event makes, for [`BlockInfo::frames`]: [`Context::NONE`] for other events and
    /// where the level is lower.
    #[inline]
    pub fn record(&self, action: TraceAction, addr: u64, bytes: u64, stream: u32) -> Context {
        if self.is_on() { self.push(&[action], addr, bytes, stream) } else { Context::NONE }
    }

    /// Records that a block was given back and is free at once: two entries of one context.
    #[inline]
    pub fn record_free(&self, addr: u64, bytes: u64, stream: u32) {
        if self.is_on() {
            self.push(&[TraceAction::FreeRequested, TraceAction::FreeCompleted], addr, bytes, stream);
        }
    }

    #[cold]
    fn push(&self, actions: &[TraceAction], addr: u64, bytes: u64, stream: u32) -> Context {
        use TraceAction::{Alloc, Oom, SegmentAlloc, SegmentMap};
        let mut ring = self.lock();
        let level = ring.options.context;
        let allocates = matches!(actions, [Alloc | SegmentAlloc | SegmentMap | Oom]);
        let in_entry = level >= if allocates { ContextLevel::Alloc } else { ContextLevel::All };
        let in_block = level >= ContextLevel::State && matches!(actions, [Alloc | SegmentAlloc | SegmentMap]);
        let context = match in_entry || in_block {
            true if ring.options.stacks => Context::with_stack(),
            true => Context::current(),
            false => Context::NONE,
        };
        // Blocks are often freed long after their last use: the line of a free says nothing.
        let context = if allocates && (in_entry || in_block) { context.with_caller() } else { context };
        // The clock is read under the lock, so that times rise along the ring.
        let time_us = now_us();
        for &action in actions {
            let context = if in_entry { context } else { Context::NONE };
            ring.push(Event { addr, bytes, time_us, stream, context, action });
        }
        if in_block { context } else { Context::NONE }
    }

    /// The entries kept, oldest first.
    pub fn entries(&self) -> Vec<TraceEntry> {
        let events: Vec<Event> = self.lock().in_order().collect();
        let mut frames = Frames::default();
        events.into_iter().map(|event| event.entry(&mut frames)).collect()
    }

    /// All that [`Snapshot::of_device`] needs: made into entries later, when no lock is held.
    pub(crate) fn copy(&self) -> Recorded {
        let ring = self.lock();
        Recorded {
            events: ring.in_order().collect(),
            max_entries: ring.options.max_entries,
            overwritten: ring.overwritten,
        }
    }

    /// Forgets the entries and the count of overwritten ones. Recording goes on if it was on.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// How many entries had to make place for later ones since the last clear.
    pub fn overwritten(&self) -> u64 {
        self.lock().overwritten
    }

    /// The number of entries kept at most: PyTorch's `trace_alloc_max_entries`. 1 before recording first began.
    pub fn max_entries(&self) -> usize {
        self.lock().options.max_entries
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        lock(&self.ring)
    }
}

/// What a history had recorded at some moment.
#[derive(Default)]
pub(crate) struct Recorded {
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

impl Ring {
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
    fn entry(self, frames: &mut Frames) -> TraceEntry {
        TraceEntry {
            action: self.action,
            addr: self.addr,
            size: self.bytes,
            stream: self.stream.into(),
            time_us: self.time_us,
            frames: frames.of(self.context),
            compile_context: self.context.path(),
        }
    }
}

/// Microseconds since 1970, from a clock that never goes back: the wall clock is read once.
pub(crate) fn now_us() -> u64 {
    static ANCHOR: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (start, wall) =
        ANCHOR.get_or_init(|| (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()));
    (*wall + start.elapsed()).as_micros() as u64
}
