//! Rebuilding a segment's entries in the table after its blocks have moved.

use std::sync::Arc;

use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::heap::{Entry, Heap, NONE, SegmentRecord, Use};
use super::{SizeKind, Split};
use crate::device::StreamId;

impl Heap {
    /// Takes a free block out of its bins, so that no request can take it.
    pub(super) fn freeze_block(&mut self, id: u32) {
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        self.table[id as usize].set_usage(Use::Frozen);
        let kind = self.arenas[self.table[id as usize].arena() as usize].kind;
        self.stats.record_split_change(kind, split);
    }

    pub(super) fn frozen_blocks(&self, segment: u32) -> Vec<u32> {
        self.blocks_of(segment).filter(|&id| self.table[id as usize].usage() == Use::Frozen).collect()
    }

    /// Returns the blocks of a segment under compaction that hold no data.
    fn unused_blocks(&self, segment: u32) -> Vec<u32> {
        let unused = |id: &u32| matches!(self.table[*id as usize].usage(), Use::Frozen | Use::Unmapped);
        self.blocks_of(segment).filter(unused).collect()
    }

    /// Puts a frozen block back into the bins, merged with its free neighbours.
    pub(super) fn unfreeze_block(&mut self, id: u32) {
        let kind = self.arenas[self.table[id as usize].arena() as usize].kind;
        let split = self.free_and_merge(id);
        self.stats.record_split_change(kind, split);
    }

    /// Merges several segments into one, `target`. `layout` gives the new offset of each block in ascending order,
    /// and the bytes between the blocks become free. Returns the segments that are no longer used.
    pub(super) fn rebuild_segment(
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
            let moves_out = self.segments[at as usize].as_ref().is_some_and(|held| !Arc::ptr_eq(&held.segment, target));
            if moves_out {
                self.record_released(at);
            }
            self.unused_blocks(at).into_iter().for_each(|id| self.vacate(id));
            let Some(held) = self.segments[at as usize].as_ref() else { continue };
            if moves_out {
                self.stats.record_segment_free(held.kind, held.committed());
                gone.push(Arc::clone(&held.segment));
            }
        }
        let (pool, kind) =
            self.segments[into as usize].as_ref().map_or((0, SizeKind::Large), |held| (held.pool, held.kind));
        let own = self.segments[into as usize].as_ref().map(|held| (held.stream, held.context));
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
        let arena = self.arena(pool, stream, kind);
        let address = target.address();
        let (stream, context) = own.filter(|_| stays).unwrap_or_else(|| {
            self.stats.record_segment_alloc(kind, bytes);
            (stream, self.history.record(TraceAction::SegmentAlloc, address, bytes as u64, stream.0))
        });
        let (mut last, mut end, mut first, mut gaps) = (NONE, 0, NONE, Vec::new());
        let blocks = layout.iter().map(|&(id, offset)| (Some(id), offset)).chain([(None, bytes)]);
        for (id, offset) in blocks {
            if offset > end {
                let gap = self.insert(Entry::new(into, arena, Use::Frozen, end, offset - end));
                self.table[gap as usize].prev = last;
                self.link(last, gap);
                first = if first == NONE { gap } else { first };
                gaps.push(gap);
                last = gap;
            }
            let Some(id) = id else { break };
            let entry = &mut self.table[id as usize];
            (entry.segment, entry.prev, entry.next) = (into, last, NONE);
            entry.set_offset(offset);
            end = offset + entry.size();
            self.link(last, id);
            first = if first == NONE { id } else { first };
            last = id;
        }
        let idle_since = (self.ticks, self.now);
        let segment = Arc::clone(target);
        let end = super::pages::SegmentEnd::default();
        let held = SegmentRecord { segment, address, context, size: bytes, kind, pool, stream, first, idle_since, end };
        self.segments[into as usize] = Some(held);
        gaps.into_iter().for_each(|gap| self.unfreeze_block(gap));
        gone
    }

    /// Links two neighbours, unless `prev` is no block.
    fn link(&mut self, prev: u32, next: u32) {
        if prev != NONE {
            self.table[prev as usize].next = next;
        }
    }
}
