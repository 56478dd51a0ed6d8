//! Serves the requests of a step from its plan.
//!
//! Time is a cursor over the recorded requests. A block is *overdue* if it is still alive although the cursor has passed the point
//! at which the recorded step freed the block. While no block is overdue, every live block matches the plan, so the next request's
//! range is free without a search. Otherwise the range is free unless an overdue block overlaps it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::allocator::Allocator;
use super::super::block::{ALIGNMENT, Block, Slot, next_owner_number};
use super::super::history::with_context;
use super::super::segment::Segment;
use super::PlanStats;
use super::record::Trace;
use crate::device::StreamId;
use crate::device::lock;
use crate::{Device, Result};

/// When the step deviates, the next this many requests of the plan are searched for one of the right size. The search
/// starts at the cursor, and also where the cursor would be if each missed request had replaced a planned one.
const LOOKAHEAD_REQUESTS: usize = 8;

/// A request of the recorded step.
#[derive(Debug)]
struct PlannedRequest {
    size: usize,
    /// The number of blocks that had been freed when the request was made.
    frees: usize,
    /// The block's offset in the arena; `None` if the allocator serves the request.
    offset: Option<usize>,
}

/// The recorded step with the blocks' offsets.
#[derive(Debug)]
pub(super) struct Schedule {
    entries: Vec<PlannedRequest>,
    /// The entries whose blocks were freed, in the order of the frees.
    frees: Vec<usize>,
    pub(super) arena: usize,
    pub(super) planned: usize,
}

impl Schedule {
    /// Builds the schedule. `offsets` has one offset for each planned request.
    pub(super) fn new(trace: Trace, offsets: &[u64], arena: u64) -> Schedule {
        let mut offsets = offsets.iter().map(|&offset| offset as usize);
        let planned = offsets.len();
        let entries = trace.requests.iter().map(|request| PlannedRequest {
            size: request.size,
            frees: request.frees,
            offset: if request.planned { offsets.next() } else { None },
        });
        Schedule { entries: entries.collect(), frees: trace.frees, arena: arena as usize, planned }
    }
}

/// The state of a planned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Live,
    Overdue,
    /// Used by another stream, which the plan did not foresee. The range is not used again.
    Retired,
}

/// The block of the underlying allocator that contains all planned blocks.
struct Arena {
    block: Block,
    segment: Arc<Segment>,
    offset: usize,
}

/// The server's state, guarded by the server's lock.
struct ServerState {
    running: bool,
    /// True once the plan was dropped: the arena is freed with the last of its blocks.
    is_plan_dropped: bool,
    /// The next request, the number of frees before it, and the number of requests missed since the last match.
    cursor: usize,
    freed: usize,
    missed: usize,
    states: Vec<State>,
    live: usize,
    /// The ranges of overdue blocks: end by offset.
    overdue: BTreeMap<usize, usize>,
    /// Live blocks that other streams use, and all other streams that ever used a block.
    used_by_other_streams: HashSet<u32>,
    streams: BTreeSet<StreamId>,
    arena: Option<Arena>,
    stats: PlanStats,
}

/// An allocator that serves the requests of a plan's runs from the arena, and all other requests from another allocator.
pub(super) struct PlanServer {
    inner: Arc<dyn Allocator>,
    stream: StreamId,
    owner: u32,
    alignment: usize,
    pub(super) schedule: Schedule,
    /// One slot per request. Allocated blocks point into this array.
    slots: ManuallyDrop<Box<[Slot]>>,
    state: Mutex<ServerState>,
}

impl PlanServer {
    pub(super) fn new(inner: Arc<dyn Allocator>, stream: StreamId, schedule: Schedule) -> PlanServer {
        let count = schedule.entries.len();
        let run = ServerState {
            running: false,
            is_plan_dropped: false,
            cursor: 0,
            freed: 0,
            missed: 0,
            states: vec![State::Free; count],
            live: 0,
            overdue: BTreeMap::new(),
            used_by_other_streams: HashSet::new(),
            streams: BTreeSet::new(),
            arena: None,
            stats: PlanStats::default(),
        };
        PlanServer {
            alignment: inner.alignment().max(ALIGNMENT),
            inner,
            stream,
            owner: next_owner_number(),
            schedule,
            slots: ManuallyDrop::new((0..count).map(|_| Slot::vacant()).collect()),
            state: Mutex::new(run),
        }
    }

    pub(super) fn stats(&self) -> PlanStats {
        lock(&self.state).stats
    }

    /// Begins a run at the first request. If there is no memory for the arena, every request of the run counts as a miss.
    pub(super) fn begin(&self) {
        let missing = self.schedule.arena > 0 && lock(&self.state).arena.is_none();
        let made = if missing { self.allocate_arena() } else { None };
        let mut run = lock(&self.state);
        run.arena = made.or(run.arena.take());
        (run.running, run.cursor, run.freed, run.missed) = (true, 0, 0, 0);
        run.stats.runs += 1;
    }

    /// Allocates the arena; `None` if that fails.
    fn allocate_arena(&self) -> Option<Arena> {
        // Histories and snapshots show the arena as one block with this context.
        let made = with_context("plan", || self.inner.allocate(self.schedule.arena, self.stream));
        let block = made.ok()?;
        let segment = block.export_segment();
        let offset = block.location().offset();
        // The block is checked, because a user's own allocator may violate its contract, and planned blocks rely on size and alignment.
        if block.size() < self.schedule.arena || !offset.is_multiple_of(self.alignment) {
            self.inner.deallocate(block);
            return None;
        }
        Some(Arena { block, segment, offset })
    }

    /// Ends a run. Blocks that are still alive become overdue.
    pub(super) fn end(&self) {
        let mut run = lock(&self.state);
        run.advance_frees(&self.schedule, self.schedule.frees.len());
        run.running = false;
    }

    /// Marks the plan as dropped, and frees the arena if no block is live.
    pub(super) fn mark_plan_dropped(&self) {
        lock(&self.state).is_plan_dropped = true;
        self.free_unused_arena();
    }

    /// Frees the arena once the plan is dropped and no block is live.
    fn free_unused_arena(&self) {
        let mut run = lock(&self.state);
        if !run.is_plan_dropped || run.live > 0 {
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

    /// Serves a request from the arena; `None` if the allocator must serve it.
    fn serve(&self, bytes: usize) -> Option<Block> {
        // A request of 0 bytes has no range.
        let size = bytes.checked_next_multiple_of(self.alignment).filter(|&size| size > 0)?;
        let mut run = lock(&self.state);
        if !run.running {
            return None;
        }
        let Some(id) = run.match_request(&self.schedule, size) else {
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
        // SAFETY: the arena's block, and with it the segment, stays allocated as long as a block of the plan is live. The entry's state is `Free`, so
        // no block uses its slot. `PlanServer::drop` keeps the slots while a block is live.
        let block = unsafe {
            slot.set_location(&arena.segment, arena.offset + offset);
            Block::with_table_slot(NonNull::from(slot), self.owner, id as u32, size, bytes)
        };
        run.states[id] = State::Live;
        run.live += 1;
        run.stats.hits += 1;
        Some(block)
    }
}

impl ServerState {
    /// Moves the cursor behind the next request of this size; `None` if there is none within [`LOOKAHEAD_REQUESTS`].
    fn match_request(&mut self, schedule: &Schedule, size: usize) -> Option<usize> {
        let fits = |at: &usize| schedule.entries.get(*at).is_some_and(|entry| entry.size == size);
        let replaced = self.cursor + self.missed;
        let mut candidates =
            (self.cursor..self.cursor + LOOKAHEAD_REQUESTS).chain(replaced..replaced + LOOKAHEAD_REQUESTS);
        let id = candidates.find(fits)?;
        self.advance_frees(schedule, schedule.entries[id].frees);
        (self.cursor, self.missed) = (id + 1, 0);
        Some(id)
    }

    /// Processes the schedule's frees before number `until`. A block that is still live after its planned free becomes overdue.
    fn advance_frees(&mut self, schedule: &Schedule, until: usize) {
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

    /// True if an overdue block overlaps this range. Overdue blocks are disjoint, so checking the last one that begins before `to` suffices.
    fn is_overdue(&self, from: usize, to: usize) -> bool {
        self.overdue.range(..to).next_back().is_some_and(|(_, &end)| end > from)
    }
}

impl fmt::Debug for PlanServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a plan over {:?}", self.inner)
    }
}

impl Allocator for PlanServer {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let planned = if stream == self.stream { self.serve(bytes) } else { None };
        planned.map_or_else(|| self.inner.allocate(bytes, stream), Ok)
    }

    fn deallocate(&self, block: Block) {
        if block.owner != self.owner {
            return self.inner.deallocate(block);
        }
        let id = block.id() as usize;
        let mut run = lock(&self.state);
        let Some(offset) = self.schedule.entries[id].offset else { return };
        if run.used_by_other_streams.remove(&block.id()) {
            // The range is not used again, because without a driver the server cannot tell when the other streams are done.
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
        let last = run.is_plan_dropped && run.live == 0;
        drop(run);
        if last {
            self.free_unused_arena();
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if block.owner != self.owner {
            return self.inner.record_stream(block, stream);
        }
        if stream != self.stream {
            let mut run = lock(&self.state);
            run.used_by_other_streams.insert(block.id());
            run.streams.insert(stream);
        }
    }
}

impl Drop for PlanServer {
    fn drop(&mut self) {
        self.mark_plan_dropped();
        let run = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        match run.arena.take() {
            // Live blocks still point to slots and the segment, so both are leaked.
            Some(arena) => std::mem::forget(arena),
            // SAFETY: no block is live, and nothing uses the slots after this.
            None => unsafe { ManuallyDrop::drop(&mut self.slots) },
        }
    }
}
