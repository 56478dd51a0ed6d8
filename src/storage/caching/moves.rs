//! Which blocks are to move where, and the table after that.

use std::cmp::Reverse;
use std::sync::{Arc, RwLockWriteGuard};

use super::super::block::{Borrows, Slot};
use super::super::driver::Memory;
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::Core;
use super::events::PendingUses;
use super::heap::{Held, Use};
use crate::device::StreamId;

/// What is to happen to a block of a plan when that is settled or abandoned.
#[derive(Debug)]
pub(super) enum AfterMove {
    Stay,
    /// It was given back; so many bytes had been asked for.
    GiveBack(usize),
    /// As `GiveBack`, while streams may still be using it.
    Pend(usize, PendingUses),
    /// It left a thread's cache.
    Uncache,
}

/// A block on the move.
pub(super) struct Move<'a> {
    pub(super) id: u32,
    /// Where it is: its segment, and bytes from its start.
    pub(super) from: (Arc<Segment>, usize),
    pub(super) to: usize,
    pub(super) size: usize,
    pub(super) slot: &'a Slot,
    _still: RwLockWriteGuard<'a, Borrows>,
}

impl<'a> Move<'a> {
    pub(super) fn new(
        id: u32,
        from: (Arc<Segment>, usize),
        to: usize,
        size: usize,
        slot: &'a Slot,
        still: RwLockWriteGuard<'a, Borrows>,
    ) -> Move<'a> {
        Move { id, from, to, size, slot, _still: still }
    }
}

/// Segments whose blocks are about to move into one.
pub(super) struct Plan<'a> {
    pub(super) segments: Vec<u32>,
    pub(super) moves: Vec<Move<'a>>,
    /// Blocks that stay, with their offsets and sizes.
    pub(super) stay: Vec<(u32, usize, usize)>,
    /// Whose what is left over is.
    pub(super) stream: StreamId,
    /// Bytes of the new segment that count as being made, beside the old ones.
    pub(super) making: u64,
}

impl Plan<'_> {
    pub(super) fn bytes(&self) -> usize {
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
/// The largest run of bytes between the blocks of a plan.
pub(super) fn largest_gap(plan: &Plan<'_>, bytes: usize) -> usize {
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
    pub(super) fn segment_bytes(&self, segment: u32) -> usize {
        self.heap.segments[segment as usize].as_ref().map_or(0, |held| held.size)
    }

    pub(super) fn committed_bytes(&self, segment: u32) -> usize {
        self.heap.segments[segment as usize].as_ref().map_or(0, |held| held.committed())
    }

    pub(super) fn free_bytes(&self, segment: u32) -> usize {
        let entries = self.heap.blocks_of(segment).map(|id| self.heap.table[id as usize]);
        entries.filter(|entry| entry.usage() == Use::Free).map(|entry| entry.size()).sum()
    }

    /// Segments of the default pool that are not full, those with the most free bytes first.
    pub(super) fn most_free(&self) -> Vec<&Held> {
        let held = (0u32..).zip(&self.heap.segments).filter_map(|(at, held)| Some((at, held.as_ref()?)));
        let free = held.filter(|(_, held)| held.pool == 0).map(|(at, held)| (self.free_bytes(at), at, held));
        let mut segments: Vec<_> = free.filter(|(free, ..)| *free > 0).collect();
        segments.sort_unstable_by_key(|&(free, at, _)| (Reverse(free), at));
        segments.into_iter().map(|(.., held)| held).collect()
    }

    /// Ids of [`most_free`](Self::most_free): for who lets go of the lock.
    pub(super) fn candidates(&self) -> Vec<u64> {
        self.most_free().into_iter().map(|held| held.segment.id()).collect()
    }

    /// Plans to move the blocks of the segments with these ids together, in order; nobody can allocate there until the
    /// plan is settled or abandoned, and what is given back becomes free only then. Blocks that must stay do; with
    /// `around` others move as far down as those let them. None where a segment is gone, or a block of it pending.
    pub(super) fn plan<'a>(&mut self, segments: &[u64], around: bool, stream: StreamId) -> Option<Plan<'a>> {
        let segments: Vec<u32> = segments.iter().map(|&id| self.heap.number_of(id)).collect::<Option<_>>()?;
        let is_pending = |id: u32| self.heap.table[id as usize].usage() == Use::Pending;
        if segments.iter().any(|&segment| self.heap.blocks_of(segment).any(is_pending)) {
            return None; // it may become free at any moment
        }
        let mut plan = Plan { segments, moves: Vec::new(), stay: Vec::new(), stream, making: 0 };
        let mut to = 0;
        for segment in plan.segments.clone() {
            let ids: Vec<u32> = self.heap.blocks_of(segment).collect();
            for id in ids {
                let entry = self.heap.table[id as usize];
                match entry.usage() {
                    Use::Free => {
                        self.heap.hold(id);
                        continue;
                    }
                    Use::Unmapped => continue,
                    _ => {}
                }
                let slot = self.slots.of(id);
                // SAFETY: slots live as long as the allocator, which outlives this call's plan.
                let slot: &'a Slot = unsafe { slot.as_ref() };
                self.moving.insert(id, AfterMove::Stay);
                match slot.try_write().filter(|_| !slot.is_exported()) {
                    Some(still) => {
                        let from = (Arc::clone(&self.heap.held(id).segment), entry.offset());
                        plan.moves.push(Move::new(id, from, to, entry.size(), slot, still));
                        to += entry.size();
                    }
                    None => {
                        plan.stay.push((id, entry.offset(), entry.size()));
                        to = if around { entry.offset() + entry.size() } else { to };
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
    pub(super) fn let_go(&mut self, plan: &Plan<'_>) -> Vec<Arc<Segment>> {
        let mut gone = Vec::new();
        for &at in &plan.segments {
            if let Some(held) = &mut self.heap.segments[at as usize] {
                let make = if held.segment.is_reserved() { Segment::reserved } else { Segment::new };
                gone.push(std::mem::replace(&mut held.segment, Arc::new(make(Memory::gone(), 0))));
            }
        }
        gone
    }

    /// Writes the moves into the table: all blocks of the plan's segments are now in `target`. Gives what is left over.
    pub(super) fn settle_moves(&mut self, plan: Plan<'_>, target: &Arc<Segment>, bytes: usize) -> Vec<Arc<Segment>> {
        let Plan { segments, moves, stay, stream, .. } = plan;
        let mut layout: Vec<(u32, usize)> =
            moves.iter().map(|m| (m.id, m.to)).chain(stay.iter().map(|&(id, offset, _)| (id, offset))).collect();
        layout.sort_unstable_by_key(|&(_, offset)| offset);
        // To the history a move is a free and an allocation; what stays in place, or was a cache's, has neither.
        let moves_away = |m: &&Move| {
            let cached = matches!(self.moving.get(&m.id), Some(AfterMove::Uncache));
            !cached && self.heap.address(m.id) != target.address() + m.to as u64
        };
        let moved: Vec<_> = moves.iter().filter(moves_away).map(|m| (m.id, m.slot.requested())).collect();
        moved.iter().for_each(|&(id, requested)| self.heap.record_free(id, requested));
        let gone = self.heap.lay_out(&segments, &layout, target, bytes, stream);
        moved.iter().for_each(|&(id, requested)| _ = self.heap.record(TraceAction::Alloc, id, requested));
        for m in &moves {
            // SAFETY: the segment is held as long as a block of it is live; the slot is locked for writing, and the
            // bytes are there.
            unsafe { m.slot.set_place(target, m.to) };
        }
        self.finish(moves, stay);
        gone
    }

    /// Unlocks the blocks of a plan; those given back meanwhile become free now.
    pub(super) fn finish<'a>(
        &mut self,
        moves: impl IntoIterator<Item = Move<'a>>,
        stay: impl IntoIterator<Item = (u32, usize, usize)>,
    ) {
        let moves: Vec<Move<'a>> = moves.into_iter().collect(); // unlocked when all of them are in the table
        for id in moves.iter().map(|m| m.id).chain(stay.into_iter().map(|(id, ..)| id)) {
            match self.moving.remove(&id) {
                Some(AfterMove::GiveBack(requested)) => self.heap.give_back(id, requested),
                Some(AfterMove::Pend(requested, uses)) => self.give_back_used(id, requested, uses),
                Some(AfterMove::Uncache) => self.heap.uncache(id),
                Some(AfterMove::Stay) | None => {}
            }
        }
    }
}
