//! Compaction plans: which blocks move where, and the table update after the move.

use std::cmp::Reverse;
use std::sync::{Arc, RwLockWriteGuard};

use super::super::block::{ReaderCount, Slot};
use super::super::driver::Memory;
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::Core;
use super::events::PendingUses;
use super::heap::{SegmentRecord, Use};
use crate::device::StreamId;

/// The action for a block when its plan is applied or cancelled.
#[derive(Debug)]
pub(super) enum AfterMove {
    Nothing,
    /// Free the block, because its owner freed it during the move. The value is the requested size in bytes.
    FreeBlock(usize),
    /// Like `FreeBlock`, for a block that other streams may still be using.
    FreeUsedBlock(usize, PendingUses),
    /// Free the block, because it left a thread cache during the move.
    Uncache,
}

/// A block that is being moved.
pub(super) struct Move<'a> {
    pub(super) id: u32,
    /// The current location: the segment and the offset in bytes.
    pub(super) from: (Arc<Segment>, usize),
    /// The new offset in bytes.
    pub(super) to: usize,
    pub(super) size: usize,
    pub(super) slot: &'a Slot,
    _write_lock: RwLockWriteGuard<'a, ReaderCount>,
}

impl<'a> Move<'a> {
    pub(super) fn new(
        id: u32,
        from: (Arc<Segment>, usize),
        to: usize,
        size: usize,
        slot: &'a Slot,
        write_lock: RwLockWriteGuard<'a, ReaderCount>,
    ) -> Move<'a> {
        Move { id, from, to, size, slot, _write_lock: write_lock }
    }
}

/// A plan to move the blocks of several segments into one.
pub(super) struct CompactionPlan<'a> {
    pub(super) segments: Vec<u32>,
    pub(super) moves: Vec<Move<'a>>,
    /// Blocks that do not move, with their offsets and sizes in bytes.
    pub(super) staying: Vec<(u32, usize, usize)>,
    /// The stream that will own the free bytes.
    pub(super) stream: StreamId,
    /// Bytes of the new segment that are counted in `Core::bytes_being_created` in addition to the old segments.
    pub(super) bytes_being_created: u64,
}

impl CompactionPlan<'_> {
    /// Bytes of all blocks that may move.
    pub(super) fn bytes(&self) -> usize {
        self.moves.iter().map(|m| m.size).sum()
    }

    /// Bytes of the blocks whose offset changes.
    pub(super) fn bytes_moved(&self) -> usize {
        self.moves.iter().filter(|m| m.from.1 != m.to).map(|m| m.size).sum()
    }

    /// The end of the last block after the move, in bytes.
    pub(super) fn end(&self) -> usize {
        let moves = self.moves.iter().map(|m| m.to + m.size);
        moves.chain(self.staying.iter().map(|&(_, offset, size)| offset + size)).max().unwrap_or(0)
    }
}
/// Returns the size in bytes of the largest gap between the plan's blocks, in a segment of `bytes` bytes.
pub(super) fn largest_gap(plan: &CompactionPlan<'_>, bytes: usize) -> usize {
    let mut places: Vec<(usize, usize)> = plan.moves.iter().map(|m| (m.to, m.size)).collect();
    places.extend(plan.staying.iter().map(|&(_, offset, size)| (offset, size)));
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
    /// The bytes of a segment that blocks cover.
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

    /// Returns the segments of the default pool that have free bytes, those with the most first.
    pub(super) fn segments_by_free_bytes(&self) -> Vec<&SegmentRecord> {
        let held = (0u32..).zip(&self.heap.segments).filter_map(|(at, held)| Some((at, held.as_ref()?)));
        let free = held.filter(|(_, held)| held.pool == 0).map(|(at, held)| (self.free_bytes(at), at, held));
        let mut segments: Vec<_> = free.filter(|(free, ..)| *free > 0).collect();
        segments.sort_unstable_by_key(|&(free, at, _)| (Reverse(free), at));
        segments.into_iter().map(|(.., held)| held).collect()
    }

    /// Returns the ids of [`segments_by_free_bytes`](Self::segments_by_free_bytes), for a caller that releases the lock.
    pub(super) fn compaction_candidates(&self) -> Vec<u64> {
        self.segments_by_free_bytes().into_iter().map(|held| held.segment.id()).collect()
    }

    /// Plans to move the blocks of these segments together, in order. Until the plan is applied or cancelled, no request can allocate in the
    /// segments, and their freed blocks stay live. Blocks that cannot move stay. With `around`, the other blocks move down as far as the staying
    /// blocks allow. Returns `None` if a segment is gone or has a pending block.
    pub(super) fn plan_compaction<'a>(
        &mut self,
        segments: &[u64],
        around: bool,
        stream: StreamId,
    ) -> Option<CompactionPlan<'a>> {
        let segments: Vec<u32> = segments.iter().map(|&id| self.heap.number_of(id)).collect::<Option<_>>()?;
        let is_pending = |id: u32| self.heap.table[id as usize].usage() == Use::Pending;
        if segments.iter().any(|&segment| self.heap.blocks_of(segment).any(is_pending)) {
            return None; // a pending block may become free at any moment
        }
        let mut plan =
            CompactionPlan { segments, moves: Vec::new(), staying: Vec::new(), stream, bytes_being_created: 0 };
        let mut to = 0;
        for segment in plan.segments.clone() {
            let ids: Vec<u32> = self.heap.blocks_of(segment).collect();
            for id in ids {
                let entry = self.heap.table[id as usize];
                match entry.usage() {
                    Use::Free => {
                        self.heap.freeze_block(id);
                        continue;
                    }
                    Use::Unmapped => continue,
                    _ => {}
                }
                let slot = self.slots.get_or_create(id);
                // SAFETY: slots live as long as the allocator, which outlives this call's plan.
                let slot: &'a Slot = unsafe { slot.as_ref() };
                self.moving.insert(id, AfterMove::Nothing);
                match slot.try_lock_for_move().filter(|_| !slot.is_exported()) {
                    Some(write_lock) => {
                        let from = (Arc::clone(&self.heap.segment_of(id).segment), entry.offset());
                        plan.moves.push(Move::new(id, from, to, entry.size(), slot, write_lock));
                        to += entry.size();
                    }
                    None => {
                        plan.staying.push((id, entry.offset(), entry.size()));
                        to = if around { entry.offset() + entry.size() } else { to };
                    }
                }
            }
        }
        Some(plan)
    }

    /// Cancels a plan without moving anything.
    pub(super) fn cancel_plan(&mut self, plan: CompactionPlan<'_>) {
        let CompactionPlan { segments, moves, staying: stay, .. } = plan;
        for segment in segments {
            self.heap.frozen_blocks(segment).into_iter().for_each(|id| self.heap.unfreeze_block(id));
        }
        self.unlock_moved_blocks(moves, stay);
    }

    /// Takes the old segments of a plan, whose contents have been copied, out of the table.
    pub(super) fn take_old_segments(&mut self, plan: &CompactionPlan<'_>) -> Vec<Arc<Segment>> {
        let mut gone = Vec::new();
        for &at in &plan.segments {
            if let Some(held) = &mut self.heap.segments[at as usize] {
                let make = if held.segment.is_reserved() { Segment::reserved } else { Segment::new };
                gone.push(std::mem::replace(&mut held.segment, Arc::new(make(Memory::released(), 0))));
            }
        }
        gone
    }

    /// Updates the table after the moves: all blocks of the plan's segments are now in `target`. Returns the unused segments.
    pub(super) fn apply_moves(
        &mut self,
        plan: CompactionPlan<'_>,
        target: &Arc<Segment>,
        bytes: usize,
    ) -> Vec<Arc<Segment>> {
        let CompactionPlan { segments, moves, staying: stay, stream, .. } = plan;
        let mut layout: Vec<(u32, usize)> =
            moves.iter().map(|m| (m.id, m.to)).chain(stay.iter().map(|&(id, offset, _)| (id, offset))).collect();
        layout.sort_unstable_by_key(|&(_, offset)| offset);
        // The history records a move as a free and an allocation. A block that stays in place or was cached gets neither.
        let moves_away = |m: &&Move| {
            let cached = matches!(self.moving.get(&m.id), Some(AfterMove::Uncache));
            !cached && self.heap.address(m.id) != target.address() + m.to as u64
        };
        let moved: Vec<_> = moves.iter().filter(moves_away).map(|m| (m.id, m.slot.requested())).collect();
        moved.iter().for_each(|&(id, requested)| self.heap.record_free(id, requested));
        let gone = self.heap.rebuild_segment(&segments, &layout, target, bytes, stream);
        moved.iter().for_each(|&(id, requested)| _ = self.heap.record(TraceAction::Alloc, id, requested));
        for m in &moves {
            // SAFETY: the segment is held as long as one of its blocks is live. The slot is write-locked, and the bytes have been copied.
            unsafe { m.slot.set_location(target, m.to) };
        }
        self.unlock_moved_blocks(moves, stay);
        gone
    }

    /// Unlocks the blocks of a plan. Blocks freed during the move become free now.
    pub(super) fn unlock_moved_blocks<'a>(
        &mut self,
        moves: impl IntoIterator<Item = Move<'a>>,
        stay: impl IntoIterator<Item = (u32, usize, usize)>,
    ) {
        let moves: Vec<Move<'a>> = moves.into_iter().collect(); // unlocks the blocks only after all of them are in the table
        for id in moves.iter().map(|m| m.id).chain(stay.into_iter().map(|(id, ..)| id)) {
            match self.moving.remove(&id) {
                Some(AfterMove::FreeBlock(requested)) => self.heap.free_block(id, requested),
                Some(AfterMove::FreeUsedBlock(requested, uses)) => self.free_used_block(id, requested, uses),
                Some(AfterMove::Uncache) => self.heap.uncache(id),
                Some(AfterMove::Nothing) | None => {}
            }
        }
    }
}
