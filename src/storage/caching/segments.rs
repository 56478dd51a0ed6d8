//! Adding, removing and iterating over a heap's segments.

use std::sync::Arc;

use super::super::segment::Segment;
use super::super::stats::Split;
use super::entry::{Entry, NONE, Use};
use super::heap::{Arena, Heap, SegmentRecord};
use super::pages::SegmentEnd;

impl Heap {
    /// Adds a segment as one free block of the arena. Returns the block.
    pub(super) fn add_segment(&mut self, segment: Arc<Segment>, size: usize, arena: u32) -> u32 {
        let Arena { pool, stream, kind, .. } = self.arenas[arena as usize];
        let at = self.vacant_segment();
        let id = self.insert(Entry::new(at, arena, Use::Free, 0, size));
        let idle_since = (self.ticks, self.now);
        let (address, end) = (segment.address(), SegmentEnd::default());
        let context = self.history.record(segment.creation_action(), address, size as u64, stream.0);
        let held = SegmentRecord { segment, address, context, size, kind, pool, stream, first: id, idle_since, end };
        self.segments[at as usize] = Some(held);
        self.stats.record_segment_alloc(kind, size);
        self.insert_free(id, &mut Split::default());
        id
    }

    /// Returns a number for a new segment.
    pub(super) fn vacant_segment(&mut self) -> u32 {
        self.vacant_segments.pop().unwrap_or_else(|| {
            self.segments.push(None);
            self.segments.len() as u32 - 1
        })
    }

    /// Removes a segment whose blocks are all free from the table. The caller releases it.
    pub(super) fn remove_segment(&mut self, segment: u32) -> Arc<Segment> {
        let mut split = Split::default();
        let blocks: Vec<u32> = self.blocks_of(segment).collect();
        self.record_released(segment);
        let free = blocks.iter().filter(|&&id| self.table[id as usize].usage() == Use::Free);
        free.copied().collect::<Vec<_>>().into_iter().for_each(|id| self.remove_free(id, &mut split));
        blocks.into_iter().for_each(|id| self.vacate(id));
        let held = self.segments[segment as usize].take().expect("a removed segment is held");
        self.vacant_segments.push(segment);
        self.stats.record_split_change(held.kind, split);
        self.stats.record_segment_free(held.kind, held.committed());
        held.segment
    }

    /// Removes the segment of a block from the table. All blocks of the segment must be free.
    pub(super) fn remove_whole(&mut self, id: u32) -> Arc<Segment> {
        self.remove_segment(self.table[id as usize].segment)
    }

    /// Removes every segment of a pool whose blocks are all free, even if unmerged because they belong to several streams.
    pub(super) fn remove_unused(&mut self, pool: u32) -> Vec<Arc<Segment>> {
        self.unused_segments(pool).into_iter().map(|at| self.remove_segment(at)).collect()
    }

    /// Returns the segments of a pool whose blocks are all free.
    pub(super) fn unused_segments(&self, pool: u32) -> Vec<u32> {
        let unused = |&at: &u32| {
            let of_pool = self.segments[at as usize].as_ref().is_some_and(|held| held.pool == pool);
            of_pool && self.blocks_of(at).all(|id| matches!(self.table[id as usize].usage(), Use::Free | Use::Unmapped))
        };
        (0..self.segments.len() as u32).filter(unused).collect()
    }

    /// Returns the number of the segment with this id, if still in the table. Code that releases the lock keeps the id, because numbers are reused.
    pub(super) fn number_of(&self, id: u64) -> Option<u32> {
        let held = self.segments.iter().position(|held| held.as_ref().is_some_and(|held| held.segment.id() == id));
        held.map(|at| at as u32)
    }

    #[inline(always)]
    pub(super) fn segment_of(&self, id: u32) -> &SegmentRecord {
        let segment = self.table[id as usize].segment;
        self.segments[segment as usize].as_ref().expect("a block's segment is held")
    }

    pub(super) fn any_free(&self, arena: u32) -> Option<u32> {
        let arena = &self.arenas[arena as usize];
        arena.partial.blocks(&self.table).chain(arena.whole_segments.blocks(&self.table)).next()
    }

    /// Returns the free blocks that cover whole segments of a pool, of both kinds and all streams.
    pub(super) fn whole_blocks(&self, pool: u32) -> Vec<u32> {
        let arenas = self.arenas.iter().filter(|a| a.pool == pool);
        arenas.flat_map(|a| a.whole_segments.blocks(&self.table)).collect()
    }

    /// Returns the size in bytes of a pool's largest free block.
    pub(super) fn largest_free(&self, pool: u32) -> usize {
        let arenas = self.arenas.iter().filter(|a| a.pool == pool);
        arenas.map(|a| a.partial.largest(&self.table).max(a.whole_segments.largest(&self.table))).max().unwrap_or(0)
    }

    /// Iterates over the blocks of a segment in address order.
    pub(super) fn blocks_of(&self, segment: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.segments[segment as usize].as_ref().map(|held| held.first);
        std::iter::successors(first, |&id| Some(self.table[id as usize].next).filter(|&next| next != NONE))
    }
}
