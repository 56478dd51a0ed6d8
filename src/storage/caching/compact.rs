//! Compaction: live blocks move together, so that what is free comes in one piece.
//!
//! Handles are indirect, so a block may move while nobody holds its place: its slot is locked for writing from the choice
//! of the new place until the table says so. Moves are copies on the device; where there is no room for old and new side
//! by side, the bytes go through the host. A block that is exported, or in use at this moment, stays, and its segment
//! with it.
//!
//! With this an allocation succeeds whenever all that is free suffices and the device can hold it in one buffer.

use std::cmp::Reverse;
use std::sync::{Arc, RwLockWriteGuard};
use std::time::Duration;

use super::super::allocator::{Block, Segment, Slot};
use super::super::driver::{Failure, Memory};
use super::super::history::TraceAction;
use super::heap::{NONE, Use};
use super::sync::lock;
use super::{CachingAllocator, Core, Request};
use crate::device::StreamId;
use crate::{Error, Result};

/// How often and how long to wait for memory that was given back a moment ago.
const RETRIES: u32 = 100;
const RETRY_AFTER: Duration = Duration::from_millis(10);
/// Copies for one block that moves by less than its size.
const PIECES: usize = 64;

/// What is to happen to a block of a plan when that is settled or abandoned.
#[derive(Debug, Clone, Copy)]
pub(super) enum Then {
    Stay,
    /// It was given back; so many bytes had been asked for.
    GiveBack(usize),
    /// It left a thread's cache.
    Uncache,
}

/// A block on the move.
struct Move<'a> {
    id: u32,
    /// Where it is: its segment, and bytes from its start.
    from: (Arc<Segment>, usize),
    to: usize,
    size: usize,
    slot: &'a Slot,
    _still: RwLockWriteGuard<'a, ()>,
}

/// Segments whose blocks are about to move into one.
pub(super) struct Plan<'a> {
    segments: Vec<u32>,
    moves: Vec<Move<'a>>,
    /// Blocks that stay, with their offsets and sizes.
    stay: Vec<(u32, usize, usize)>,
    /// Whose what is left over is.
    stream: StreamId,
}

impl Plan<'_> {
    fn bytes(&self) -> usize {
        self.moves.iter().map(|m| m.size).sum()
    }

    /// Bytes that come to lie elsewhere in their segment.
    pub(super) fn bytes_moved(&self) -> usize {
        self.moves.iter().filter(|m| m.from.1 != m.to).map(|m| m.size).sum()
    }

    /// Where the last block is to end.
    pub(super) fn end(&self) -> usize {
        let moves = self.moves.iter().map(|m| m.to + m.size);
        moves.chain(self.stay.iter().map(|&(_, offset, size)| offset + size)).max().unwrap_or(0)
    }
}

impl CachingAllocator {
    /// The last rung: makes room for the request by moving blocks.
    pub(super) fn compact_for(&self, request: &Request, failure: &mut Option<Failure>) -> Result<Option<Block>> {
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let mut budget = match self.rules.config.compaction_budget {
            0 => u64::MAX,
            bytes => bytes as u64,
        };
        let _alone = lock(&self.compacting);
        self.wait_for_streams(request)?;
        if let Some(block) = self.lock_folded().search(self.number, request, super::Search::Thorough, true) {
            return Ok(Some(block)); // somebody else has made room
        }
        // Blocks of private pools stay where they are: a checkpoint may name their places.
        if request.pool == 0 && self.slide(request, &mut budget)? {
            let mut core = self.lock_folded();
            if let Some(block) = core.search(self.number, request, super::Search::Thorough, true) {
                return Ok(Some(block));
            }
        }
        loop {
            if let Some(block) = self.grow(request, true, failure)? {
                return Ok(Some(block));
            }
            // The segment with the most to give; the request may have become possible by what others gave back.
            let candidates = self.lock().most_free(0);
            let mut shrunk = false;
            for segment in candidates {
                if self.repack(&[segment], &mut budget)? {
                    shrunk = true;
                    break;
                }
            }
            if !shrunk {
                return self.grow(request, true, failure);
            }
        }
    }

    /// Moves all blocks of the default pool together, copying at most `budget` bytes. Gives the bytes given back.
    pub(super) fn compact_all(&self, mut budget: u64) -> Result<u64> {
        let request = Request { bytes: 0, size: 0, kind: super::Kind::Large, pool: 0, stream: StreamId::DEFAULT };
        let _alone = lock(&self.compacting);
        self.wait_for_streams(&request)?;
        let (before, unused) = {
            let mut core = self.lock();
            (core.heap.stats.reserved_bytes.current, core.heap.remove_unused(0))
        };
        drop(unused);
        self.release_ends(0, 0);
        for kind in [super::Kind::Small, super::Kind::Large] {
            let all = self.lock().most_free(0);
            let all: Vec<u32> = {
                let core = self.lock();
                all.into_iter()
                    .filter(|&s| core.heap.segments[s as usize].as_ref().is_some_and(|h| h.kind == kind))
                    .collect()
            };
            let fixed: Vec<u32> = {
                let core = self.lock();
                all.iter().copied().filter(|&segment| !core.heap.grows(segment)).collect()
            };
            let together = fixed.len() > 1 && self.repack_beside(&fixed, &mut budget)?;
            for segment in all.into_iter().filter(|segment| !(together && fixed.contains(segment))) {
                self.repack(&[segment], &mut budget)?;
            }
        }
        let mut core = self.lock();
        core.growth.forget();
        Ok(before.saturating_sub(core.heap.stats.reserved_bytes.current))
    }

    /// Moves the blocks of one segment to its start, if that makes a hole for the request.
    fn slide(&self, request: &Request, budget: &mut u64) -> Result<bool> {
        let _ends = self.hold_ends();
        let candidates = self.lock().most_free(0);
        for segment in candidates {
            let plan = {
                let mut core = self.lock();
                let fits = core.heap.segments[segment as usize].as_ref().is_some_and(|held| held.kind == request.kind);
                let free = core.free_bytes(segment);
                if !fits || free < request.size {
                    continue;
                }
                let Some(plan) = core.plan(vec![segment], true, request.stream) else { continue };
                let hole = largest_gap(&plan, core.segment_bytes(segment));
                if hole < request.size || plan.bytes() as u64 > *budget {
                    core.abandon(plan);
                    continue;
                }
                plan
            };
            *budget -= plan.bytes() as u64;
            self.slide_down(plan)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Moves the blocks of a plan within their segment.
    pub(super) fn slide_down(&self, plan: Plan<'_>) -> Result<()> {
        let Some(target) = plan.moves.first().map(|first| Arc::clone(&first.from.0)) else {
            self.lock().abandon(plan);
            return Ok(());
        };
        // Upwards from the start: nothing is overwritten before it has moved.
        if let Err(error) = self.copy_all(&plan, &target) {
            // Some bytes may have been overwritten by others already: nothing there can be relied on.
            // The device is lost before the blocks are unlocked: nobody reads them in between.
            self.driver.give_up(&format!("a move within a segment failed: {error}"));
            self.lock().abandon(plan);
            return Err(error);
        }
        let mut core = self.lock();
        let bytes = core.segment_bytes(plan.segments[0]);
        let gone = core.settle_moves(plan, &target, bytes);
        drop(core);
        drop(gone);
        Ok(())
    }

    /// Moves the blocks of segments into a new one of just their size, beside the old ones or else through the host.
    fn repack(&self, segments: &[u32], budget: &mut u64) -> Result<bool> {
        if let &[segment] = segments
            && self.lock().heap.grows(segment)
        {
            return self.pack(segment, budget);
        }
        if self.repack_beside(segments, budget)? {
            return Ok(true);
        }
        self.repack_through_host(segments, budget)
    }

    fn plan_repack(&self, segments: &[u32], budget: &mut u64, beside: bool) -> Option<Plan<'_>> {
        let mut core = self.lock();
        let gone = segments.iter().any(|&s| core.heap.segments[s as usize].is_none());
        if gone {
            return None;
        }
        let plan = core.plan(segments.to_vec(), false, StreamId::DEFAULT)?;
        let bytes = plan.bytes() as u64;
        let room = core.limit().saturating_sub(core.heap.stats.reserved_bytes.current + core.making);
        let largest = self.driver.largest_segment() as u64;
        let old: u64 = segments.iter().map(|&s| core.segment_bytes(s) as u64).sum();
        if !plan.stay.is_empty() || bytes > *budget || bytes >= old || beside && (bytes > room || bytes > largest) {
            core.abandon(plan);
            return None;
        }
        core.making += bytes;
        *budget -= bytes;
        Some(plan)
    }

    fn repack_beside(&self, segments: &[u32], budget: &mut u64) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, true) else { return Ok(false) };
        let bytes = plan.bytes();
        let made = if bytes == 0 { Ok(Memory::gone()) } else { self.make(bytes) };
        let copied = made.map_err(Some).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            self.copy_all(&plan, &target).map(|()| target).map_err(|e| Some(Failure::Other(e)))
        });
        let mut core = self.lock();
        core.making -= bytes as u64;
        match copied {
            Ok(target) => {
                let gone = core.settle_moves(plan, &target, bytes);
                drop(core);
                drop(gone);
                Ok(true)
            }
            Err(failure) => {
                *budget = budget.saturating_add(bytes as u64);
                core.abandon(plan);
                match failure {
                    Some(Failure::Other(error)) => Err(error),
                    _ => Ok(false),
                }
            }
        }
    }

    fn repack_through_host(&self, segments: &[u32], budget: &mut u64) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, false) else { return Ok(false) };
        let bytes = plan.bytes();
        let mut host = vec![0u8; bytes];
        let read = self.driver.synchronize().and_then(|()| {
            plan.moves.iter().try_for_each(|m| {
                let (from, to) = ((m.from.0.memory(), m.from.1), &mut host[m.to..m.to + m.size]);
                // SAFETY: the block is locked for writing.
                unsafe { self.driver.read(from, to) }
            })
        });
        if let Err(error) = read {
            let mut core = self.lock();
            core.making -= bytes as u64;
            core.abandon(plan);
            return Err(error);
        }
        // From here on the bytes are on the host only, until there is a segment for them again.
        let gone = self.lock().let_go(&plan);
        let mut plan = plan;
        let nowhere = Arc::new(Segment::new(Memory::gone(), bytes));
        plan.moves.iter_mut().for_each(|m| m.from.0 = Arc::clone(&nowhere));
        drop(gone);
        let mut made = if bytes == 0 { Ok(Memory::gone()) } else { self.make(bytes) };
        for _ in 0..RETRIES {
            if made.is_ok() {
                break;
            }
            std::thread::sleep(RETRY_AFTER); // somebody else was faster: what is given back may take a moment
            made = self.make(bytes);
        }
        let written = made.ok().map(|memory| Arc::new(Segment::new(memory, bytes))).and_then(|target| {
            // SAFETY: the target is new, and nobody else's.
            let write = |m: &Move| unsafe { self.driver.write(&host[m.to..m.to + m.size], (target.memory(), m.to)) };
            plan.moves.iter().try_for_each(write).ok().map(|()| target)
        });
        let mut core = self.lock();
        core.making -= bytes as u64;
        let Some(target) = written else {
            let blocks = plan.moves.len();
            drop(core);
            let cause = format!("{blocks} blocks were moved, and the memory for them was taken by another process");
            self.driver.give_up(&cause); // before the blocks are unlocked
            let gone = self.lock().settle_moves(plan, &nowhere, bytes);
            drop(gone);
            return Err(Error::DeviceLost { device: self.driver.device(), cause });
        };
        let gone = core.settle_moves(plan, &target, bytes);
        drop(core);
        drop(gone);
        Ok(true)
    }

    fn make(&self, bytes: usize) -> Result<Memory, Failure> {
        self.driver.create(bytes).and_then(|memory| self.driver.commit(&memory).map(|()| memory))
    }

    fn copy_all(&self, plan: &Plan<'_>, target: &Arc<Segment>) -> Result<()> {
        self.driver.synchronize()?; // work may have been enqueued until the blocks were locked
        for m in &plan.moves {
            self.copy_one(m, target)?;
        }
        // Other streams may use the blocks next.
        self.driver.synchronize()
    }

    /// Copies a block to its new place. Drivers refuse copies that overlap: a block that moves down by less than its
    /// size goes in pieces, or over the host if those would be too many.
    fn copy_one(&self, m: &Move<'_>, target: &Arc<Segment>) -> Result<()> {
        let inside = Arc::ptr_eq(&m.from.0, target);
        let down = if inside { m.from.1 - m.to } else { m.size };
        if down == 0 {
            return Ok(());
        }
        let (from, to) = ((m.from.0.memory(), m.from.1), (target.memory(), m.to));
        if m.size / down > PIECES {
            let mut host = vec![0; m.size];
            // SAFETY: as below.
            unsafe { self.driver.read(from, &mut host) }?;
            // SAFETY: as below.
            return unsafe { self.driver.write(&host, to) };
        }
        (0..m.size).step_by(down).try_for_each(|at| {
            let bytes = down.min(m.size - at);
            // SAFETY: the block is locked for writing. Its new place is held by the plan: free, or of blocks that are
            // locked as well and have moved on.
            unsafe { self.driver.copy(StreamId::DEFAULT, (from.0, from.1 + at), (to.0, to.1 + at), bytes) }
        })
    }
}

/// The largest run of bytes between the blocks of a plan.
fn largest_gap(plan: &Plan<'_>, bytes: usize) -> usize {
    let mut places: Vec<(usize, usize)> = plan.moves.iter().map(|m| (m.to, m.size)).collect();
    places.extend(plan.stay.iter().map(|&(_, offset, size)| (offset, size)));
    places.sort_unstable();
    let mut last = bytes;
    let mut largest = 0;
    for (offset, size) in places.into_iter().rev() {
        largest = largest.max(last.saturating_sub(offset + size));
        last = offset;
    }
    largest.max(last)
}

impl Core {
    fn segment_bytes(&self, segment: u32) -> usize {
        self.heap.segments[segment as usize].as_ref().map_or(0, |held| held.size)
    }

    fn free_bytes(&self, segment: u32) -> usize {
        let entries = self.heap.blocks_of(segment).map(|id| self.heap.table[id as usize]);
        entries.filter(|entry| entry.usage == Use::Free).map(|entry| entry.size).sum()
    }

    /// Segments of a pool that are not full, those with the most free bytes first.
    fn most_free(&self, pool: u32) -> Vec<u32> {
        let held = (0u32..).zip(&self.heap.segments).filter(|(_, held)| held.as_ref().is_some_and(|h| h.pool == pool));
        let free = held.map(|(at, _)| (self.free_bytes(at), at)).filter(|(free, _)| *free > 0);
        let mut segments: Vec<_> = free.collect();
        segments.sort_unstable_by_key(|&(free, at)| (Reverse(free), at));
        segments.into_iter().map(|(_, at)| at).collect()
    }

    /// Plans to move the blocks of segments together, in order; nobody can allocate there until the plan is settled or
    /// abandoned, and what is given back becomes free only then. Blocks that must stay do; with `around` others move as
    /// far down as those let them.
    pub(super) fn plan<'a>(&mut self, segments: Vec<u32>, around: bool, stream: StreamId) -> Option<Plan<'a>> {
        let is_pending = |id: u32| self.heap.table[id as usize].usage == Use::Pending;
        if segments.iter().any(|&segment| self.heap.blocks_of(segment).any(is_pending)) {
            return None; // it may become free at any moment
        }
        let mut plan = Plan { segments, moves: Vec::new(), stay: Vec::new(), stream };
        let mut to = 0;
        for segment in plan.segments.clone() {
            let ids: Vec<u32> = self.heap.blocks_of(segment).collect();
            for id in ids {
                let entry = self.heap.table[id as usize];
                if entry.usage == Use::Free {
                    self.heap.hold(id);
                    continue;
                }
                let slot = self.slots.of(id);
                // SAFETY: slots live as long as the allocator, which outlives this call's plan.
                let slot: &'a Slot = unsafe { slot.as_ref() };
                self.moving.insert(id, Then::Stay);
                match slot.try_write().filter(|_| !slot.is_exported()) {
                    Some(still) => {
                        let from = (Arc::clone(&self.heap.held(id).segment), entry.offset);
                        plan.moves.push(Move { id, from, to, size: entry.size, slot, _still: still });
                        to += entry.size;
                    }
                    None => {
                        plan.stay.push((id, entry.offset, entry.size));
                        to = if around { entry.offset + entry.size } else { to };
                    }
                }
            }
        }
        Some(plan)
    }

    /// Leaves everything where it is.
    pub(super) fn abandon(&mut self, plan: Plan<'_>) {
        let Plan { segments, moves, stay, .. } = plan;
        for segment in segments {
            self.heap.held_blocks(segment).into_iter().for_each(|id| self.heap.unhold(id));
        }
        self.finish(moves, stay);
    }

    /// The old segments of a plan, which hold nothing that is needed any more.
    fn let_go(&mut self, plan: &Plan<'_>) -> Vec<Arc<Segment>> {
        let nowhere = Arc::new(Segment::new(Memory::gone(), 0));
        let mut gone = Vec::new();
        for &at in &plan.segments {
            if let Some(held) = &mut self.heap.segments[at as usize] {
                gone.push(std::mem::replace(&mut held.segment, Arc::clone(&nowhere)));
            }
        }
        gone
    }

    /// Writes the moves into the table: all blocks of the plan's segments are now in `target`. Gives what is left over.
    fn settle_moves(&mut self, plan: Plan<'_>, target: &Arc<Segment>, bytes: usize) -> Vec<Arc<Segment>> {
        let Plan { segments, moves, stay, stream } = plan;
        let mut layout: Vec<(u32, usize)> =
            moves.iter().map(|m| (m.id, m.to)).chain(stay.iter().map(|&(id, offset, _)| (id, offset))).collect();
        layout.sort_unstable_by_key(|&(_, offset)| offset);
        // To the history a move is a free and an allocation; what stays in place, or was a cache's, has neither.
        let moves_away = |m: &&Move| {
            let cached = matches!(self.moving.get(&m.id), Some(Then::Uncache));
            !cached && self.heap.address(m.id) != target.address() + m.to as u64
        };
        let moved: Vec<_> = moves.iter().filter(moves_away).map(|m| (m.id, m.slot.requested())).collect();
        moved.iter().for_each(|&(id, requested)| self.heap.record_free(id, requested));
        let gone = self.heap.lay_out(&segments, &layout, target, bytes, stream);
        moved.iter().for_each(|&(id, requested)| self.heap.record(TraceAction::Alloc, id, requested));
        for m in &moves {
            // SAFETY: the segment is held as long as a block of it is live; the slot is locked for writing, and the
            // bytes are there.
            unsafe { m.slot.set_place(target, m.to) };
        }
        self.finish(moves, stay);
        gone
    }

    /// Unlocks the blocks of a plan; those given back meanwhile become free now.
    fn finish(&mut self, moves: Vec<Move<'_>>, stay: Vec<(u32, usize, usize)>) {
        for id in moves.iter().map(|m| m.id).chain(stay.into_iter().map(|(id, ..)| id)) {
            match self.moving.remove(&id) {
                Some(Then::GiveBack(requested)) => self.heap.give_back(id, requested),
                Some(Then::Uncache) => self.heap.uncache(id),
                Some(Then::Stay) | None => {}
            }
        }
    }
}

impl super::Heap {
    /// Takes a free block out of its bins, so that nobody finds it.
    fn hold(&mut self, id: u32) {
        let mut split = super::Split::default();
        self.take_free(id, &mut split);
        self.table[id as usize].usage = Use::Held;
        let kind = self.arenas[self.table[id as usize].arena as usize].kind;
        self.stats.split_changed(kind, split);
    }

    fn held_blocks(&self, segment: u32) -> Vec<u32> {
        self.blocks_of(segment).filter(|&id| self.table[id as usize].usage == Use::Held).collect()
    }

    fn unhold(&mut self, id: u32) {
        let kind = self.arenas[self.table[id as usize].arena as usize].kind;
        let split = self.set_free(id);
        self.stats.split_changed(kind, split);
    }

    /// Makes one segment, `target`, of several: their blocks lie as `layout` says (in order of offsets), what is between
    /// them is free. Gives the segments that are not the target.
    fn lay_out(
        &mut self,
        segments: &[u32],
        layout: &[(u32, usize)],
        target: &Arc<Segment>,
        bytes: usize,
        stream: StreamId,
    ) -> Vec<Arc<Segment>> {
        let mut gone = Vec::new();
        let into = segments[0];
        for &at in segments {
            self.held_blocks(at).into_iter().for_each(|id| self.vacate(id));
            let Some(held) = self.segments[at as usize].as_ref() else { continue };
            if !Arc::ptr_eq(&held.segment, target) {
                self.stats.segment_released(held.kind, held.size);
                self.history.record(TraceAction::SegmentFree, held.address, held.size as u64, held.stream.0);
                gone.push(Arc::clone(&held.segment));
            }
        }
        let (pool, kind) =
            self.segments[into as usize].as_ref().map_or((0, super::Kind::Large), |held| (held.pool, held.kind));
        let own = self.segments[into as usize].as_ref().map(|held| held.stream);
        let stays = self.segments[into as usize].as_ref().is_some_and(|held| Arc::ptr_eq(&held.segment, target));
        for &at in segments {
            self.segments[at as usize] = None;
            if at != into {
                self.vacant_segments.push(at);
            }
        }
        if bytes == 0 {
            self.vacant_segments.push(into);
            return gone;
        }
        if !stays {
            self.stats.segment_made(kind, bytes);
            self.history.record(TraceAction::SegmentAlloc, target.address(), bytes as u64, stream.0);
        }
        let arena = self.arena(pool, stream, kind);
        let stream = own.filter(|_| stays).unwrap_or(stream);
        let (mut last, mut end, mut first, mut gaps) = (NONE, 0, NONE, Vec::new());
        let blocks = layout.iter().map(|&(id, offset)| (Some(id), offset)).chain([(None, bytes)]);
        for (id, offset) in blocks {
            if offset > end {
                let gap = super::heap::Entry {
                    segment: into,
                    arena,
                    prev: last,
                    offset: end,
                    size: offset - end,
                    usage: Use::Held,
                    ..super::heap::Entry::VACANT
                };
                let gap = self.insert(gap);
                self.link(last, gap);
                first = if first == NONE { gap } else { first };
                gaps.push(gap);
                last = gap;
            }
            let Some(id) = id else { break };
            let entry = &mut self.table[id as usize];
            (entry.segment, entry.offset, entry.prev, entry.next) = (into, offset, last, NONE);
            end = offset + entry.size;
            self.link(last, id);
            first = if first == NONE { id } else { first };
            last = id;
        }
        let idle_since = (self.ticks, self.now);
        let segment = Arc::clone(target);
        let (address, context) = (target.address(), self.history.context());
        let end = super::expand::End::default();
        let held =
            super::heap::Held { segment, address, context, size: bytes, kind, pool, stream, first, idle_since, end };
        self.segments[into as usize] = Some(held);
        gaps.into_iter().for_each(|gap| self.unhold(gap));
        gone
    }

    fn link(&mut self, prev: u32, next: u32) {
        if prev != NONE {
            self.table[prev as usize].next = next;
        }
    }
}
