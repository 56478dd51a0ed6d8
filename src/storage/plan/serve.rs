//! Serving a step from its plan.
//!
//! Time is the recording's: a cursor over its requests. A block is *overdue* when it is still alive though the cursor has
//! passed the point where it was given back in the recording. While no block is, every live one is where and when the
//! plan wants it, so the next request's place is free: nothing is searched. Otherwise it is free unless an overdue block
//! is there.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::allocator::{Allocator, forward_to_inner};
use super::super::block::{ALIGNMENT, Block, Slot, owner_number};
use super::super::history::with_context;
use super::super::segment::Segment;
use super::PlanStats;
use super::record::Trace;
use crate::Result;
use crate::device::StreamId;
use crate::device::lock;

/// Requests looked at for one of the right size when the step leaves the plan: from the cursor on, and from where it
/// would be if every request missed since had replaced a planned one.
const LOOK: usize = 8;

/// A request of the recorded step.
#[derive(Debug)]
struct Entry {
    size: usize,
    frees: usize,
    /// Where its block goes in the arena; none for what is left to the allocator.
    offset: Option<usize>,
}

/// The recorded step with its places.
#[derive(Debug)]
pub(super) struct Schedule {
    entries: Vec<Entry>,
    frees: Vec<usize>,
    pub(super) arena: usize,
    pub(super) planned: usize,
}

impl Schedule {
    /// `offsets` has one for each planned request.
    pub(super) fn new(trace: Trace, offsets: &[u64], arena: u64) -> Schedule {
        let mut offsets = offsets.iter().map(|&offset| offset as usize);
        let planned = offsets.len();
        let entries = trace.requests.iter().map(|request| Entry {
            size: request.size,
            frees: request.frees,
            offset: if request.planned { offsets.next() } else { None },
        });
        Schedule { entries: entries.collect(), frees: trace.frees, arena: arena as usize, planned }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Live,
    Overdue,
    /// Another stream has used it, which the plan did not foresee: its place is not used again.
    Retired,
}

/// The one block of the underlying allocator that the planned ones are parts of.
struct Arena {
    block: Block,
    segment: Arc<Segment>,
    offset: usize,
}

/// What the lock guards.
struct Run {
    running: bool,
    /// The plan is gone: the arena goes back with the last of its blocks.
    closed: bool,
    /// The next request, the frees before it, and the requests missed since the last that was met.
    cursor: usize,
    freed: usize,
    missed: usize,
    states: Vec<State>,
    live: usize,
    /// The bytes of overdue blocks: end by offset.
    overdue: BTreeMap<usize, usize>,
    /// Live blocks that other streams use, and the streams that ever used one.
    shared: HashSet<u32>,
    streams: BTreeSet<StreamId>,
    arena: Option<Arena>,
    stats: PlanStats,
}

/// An allocator that serves the requests of a plan's runs from the arena, and all others from another allocator.
pub(super) struct Server {
    inner: Arc<dyn Allocator>,
    stream: StreamId,
    owner: u32,
    alignment: usize,
    pub(super) schedule: Schedule,
    /// One a planned request. Given-out blocks point here.
    slots: ManuallyDrop<Box<[Slot]>>,
    run: Mutex<Run>,
}

impl Server {
    pub(super) fn new(inner: Arc<dyn Allocator>, stream: StreamId, schedule: Schedule) -> Server {
        let count = schedule.entries.len();
        let run = Run {
            running: false,
            closed: false,
            cursor: 0,
            freed: 0,
            missed: 0,
            states: vec![State::Free; count],
            live: 0,
            overdue: BTreeMap::new(),
            shared: HashSet::new(),
            streams: BTreeSet::new(),
            arena: None,
            stats: PlanStats::default(),
        };
        Server {
            alignment: inner.alignment().max(ALIGNMENT),
            inner,
            stream,
            owner: owner_number(),
            schedule,
            slots: ManuallyDrop::new((0..count).map(|_| Slot::vacant()).collect()),
            run: Mutex::new(run),
        }
    }

    pub(super) fn stats(&self) -> PlanStats {
        lock(&self.run).stats
    }

    /// Begins a run at the first request. Without memory for the arena it is one that misses everything.
    pub(super) fn begin(&self) {
        let missing = self.schedule.arena > 0 && lock(&self.run).arena.is_none();
        let made = if missing { self.make_arena() } else { None };
        let mut run = lock(&self.run);
        run.arena = made.or(run.arena.take());
        (run.running, run.cursor, run.freed, run.missed) = (true, 0, 0, 0);
        run.stats.runs += 1;
    }

    fn make_arena(&self) -> Option<Arena> {
        // The name by which histories and snapshots show it: to them it is one block.
        let made = with_context("plan", || self.inner.allocate(self.schedule.arena, self.stream));
        let block = made.ok()?;
        let segment = block.export_segment();
        let offset = block.place().offset();
        // A user's own allocator is not trusted with this: blocks of ours will be there.
        if block.size() < self.schedule.arena || !offset.is_multiple_of(self.alignment) {
            self.inner.deallocate(block);
            return None;
        }
        Some(Arena { block, segment, offset })
    }

    /// Ends a run: blocks still alive are overdue.
    pub(super) fn end(&self) {
        let mut run = lock(&self.run);
        run.pass_frees(&self.schedule, self.schedule.frees.len());
        run.running = false;
    }

    /// The plan is gone.
    pub(super) fn close(&self) {
        lock(&self.run).closed = true;
        self.give_arena_back();
    }

    /// Once nothing will need it any more.
    fn give_arena_back(&self) {
        let mut run = lock(&self.run);
        if !run.closed || run.live > 0 {
            return;
        }
        let (arena, streams) = (run.arena.take(), std::mem::take(&mut run.streams));
        drop(run);
        if let Some(Arena { block, segment, .. }) = arena {
            drop(segment);
            streams.into_iter().for_each(|stream| self.inner.record_stream(&block, stream));
            self.inner.deallocate(block);
        }
    }

    /// A block of the arena; `None` for what goes to the allocator.
    fn serve(&self, bytes: usize) -> Option<Block> {
        // Of nothing there is no place to hold.
        let size = bytes.checked_next_multiple_of(self.alignment).filter(|&size| size > 0)?;
        let mut run = lock(&self.run);
        if !run.running {
            return None;
        }
        let Some(id) = run.meet(&self.schedule, size) else {
            run.missed += 1;
            run.stats.misses += 1;
            return None;
        };
        let offset = self.schedule.entries[id].offset?;
        let run = &mut *run;
        let free = run.states[id] == State::Free && !run.is_overdue(offset, offset + size);
        let Some(arena) = run.arena.as_ref().filter(|_| free) else {
            run.stats.misses += 1;
            return None;
        };
        let slot = &self.slots[id];
        // SAFETY: the arena's block, and with it the segment, stays as long as a block of the plan is live. The entry's
        // state is free, so no block has its slot. `drop` keeps the slots while a block is live.
        let block = unsafe {
            slot.set_place(&arena.segment, arena.offset + offset);
            Block::of_table(NonNull::from(slot), self.owner, id as u32, size, bytes)
        };
        run.states[id] = State::Live;
        run.live += 1;
        run.stats.hits += 1;
        Some(block)
    }
}

impl Run {
    /// Moves the cursor behind the next request of this size; `None` where none is near.
    fn meet(&mut self, schedule: &Schedule, size: usize) -> Option<usize> {
        let fits = |at: &usize| schedule.entries.get(*at).is_some_and(|entry| entry.size == size);
        let replaced = self.cursor + self.missed;
        let mut near = (self.cursor..self.cursor + LOOK).chain(replaced..replaced + LOOK);
        let id = near.find(fits)?;
        self.pass_frees(schedule, schedule.entries[id].frees);
        (self.cursor, self.missed) = (id + 1, 0);
        Some(id)
    }

    /// Moves time on to the `until`th free.
    fn pass_frees(&mut self, schedule: &Schedule, until: usize) {
        for &id in &schedule.frees[self.freed..until] {
            if self.states[id] == State::Live
                && let Some(offset) = schedule.entries[id].offset
            {
                self.states[id] = State::Overdue;
                self.overdue.insert(offset, offset + schedule.entries[id].size);
            }
        }
        self.freed = until;
    }

    /// Whether an overdue block has any of these bytes. They overlap no other: the last that begins before decides.
    fn is_overdue(&self, from: usize, to: usize) -> bool {
        self.overdue.range(..to).next_back().is_some_and(|(_, &end)| end > from)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a plan over {:?}", self.inner)
    }
}

impl Allocator for Server {
    forward_to_inner!();

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let planned = if stream == self.stream { self.serve(bytes) } else { None };
        planned.map_or_else(|| self.inner.allocate(bytes, stream), Ok)
    }

    fn deallocate(&self, block: Block) {
        if block.owner != self.owner {
            return self.inner.deallocate(block);
        }
        let id = block.id() as usize;
        let mut run = lock(&self.run);
        let Some(offset) = self.schedule.entries[id].offset else { return };
        if run.shared.remove(&block.id()) {
            // Kept for good: without a driver there is no telling when the other streams are done.
            if run.states[id] == State::Live {
                run.overdue.insert(offset, offset + self.schedule.entries[id].size);
            }
            run.states[id] = State::Retired;
        } else {
            if run.states[id] == State::Overdue {
                run.overdue.remove(&offset);
            }
            run.states[id] = State::Free;
        }
        run.live -= 1;
        let last = run.closed && run.live == 0;
        drop(run);
        if last {
            self.give_arena_back();
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if block.owner != self.owner {
            return self.inner.record_stream(block, stream);
        }
        if stream != self.stream {
            let mut run = lock(&self.run);
            run.shared.insert(block.id());
            run.streams.insert(stream);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
        let run = self.run.get_mut().unwrap_or_else(PoisonError::into_inner);
        match run.arena.take() {
            // Blocks are still out there, with pointers to slots and the segment: those stay for good.
            Some(arena) => std::mem::forget(arena),
            // SAFETY: no block is live, and nothing uses the slots after this.
            None => unsafe { ManuallyDrop::drop(&mut self.slots) },
        }
    }
}
