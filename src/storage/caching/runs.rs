//! Adjacent free blocks that belong to different streams.
//!
//! These blocks are not merged, because only its own stream may reuse a block without a wait. A request that finds nothing else takes the bytes it
//! needs from several adjacent blocks, behind a wait for each of their streams. A segment left with only such blocks counts as unused. Its blocks
//! merge once all but one of their streams have finished.

use super::super::driver::Progress;
use super::heap::{Arena, Heap, NONE, Use};
use super::{Core, Request};
use crate::device::StreamId;

/// Adjacent free blocks: the first block, and the bytes of all together.
type FreeRun = (u32, usize);

impl Heap {
    /// Arenas of a pool that have free blocks smaller than their segment.
    fn arenas_with_partial_blocks(&self, pool: u32) -> impl Iterator<Item = &Arena> {
        self.arenas.iter().filter(move |arena| arena.pool == pool && !arena.partial.is_empty())
    }

    /// Returns the run that begins with the free block `first`.
    fn run_from(&self, first: u32) -> FreeRun {
        (first, self.adjacent_free_blocks(first).map(|id| self.table[id as usize].size()).sum())
    }

    /// Iterates over adjacent free blocks, starting at `first`.
    fn adjacent_free_blocks(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let is_free = |id: &u32| self.table[*id as usize].usage() == Use::Free; // `NONE`, the entry after the last block, is vacant
        std::iter::successors(Some(first), move |&id| Some(self.table[id as usize].next).filter(is_free))
    }

    /// Finds the smallest run that serves a request and contains a block of another stream.
    pub(super) fn find_run(&self, request: &Request) -> Option<FreeRun> {
        let arenas = || self.arenas.iter().filter(|arena| (arena.pool, arena.kind) == (request.pool, request.kind));
        let is_other = |stream: StreamId| stream != request.stream;
        if !arenas()
            .any(|arena| is_other(arena.stream) && !(arena.partial.is_empty() && arena.whole_segments.is_empty()))
        {
            return None;
        }
        let blocks = arenas()
            .flat_map(|arena| arena.partial.blocks(&self.table).chain(arena.whole_segments.blocks(&self.table)));
        let is_first = |id: &u32| self.table[self.table[*id as usize].prev as usize].usage() != Use::Free;
        let serves = |&(first, bytes): &FreeRun| {
            bytes >= request.size
                && self.rules.may_serve(request.kind, bytes, request.size)
                && self
                    .adjacent_free_blocks(first)
                    .any(|id| is_other(self.arenas[self.table[id as usize].arena() as usize].stream))
        };
        blocks.filter(is_first).map(|id| self.run_from(id)).filter(serves).min_by_key(|&(first, bytes)| (bytes, first))
    }

    /// Allocates from a run the bytes that a request needs. Returns the block and the streams that its parts belonged to.
    pub(super) fn allocate_from_run(&mut self, (first, bytes): FreeRun, request: &Request) -> (u32, Vec<StreamId>) {
        let arena = self.arena(request.pool, request.stream, request.kind);
        let begin = self.table[first as usize].offset();
        let should_split = bytes - request.size >= self.arenas[arena as usize].min_remainder;
        let size = if should_split && self.rules.may_split_for(request.size) { request.size } else { bytes };
        // Uses both ends of a segment, as `Heap::allocate_from` does, so that the remainder stays contiguous.
        let start = if begin > 0 && self.rules.both_ends { begin + bytes - size } else { begin };
        let overlaps = |id: &u32| {
            let entry = &self.table[*id as usize];
            entry.offset() < start + size && start < entry.offset() + entry.size()
        };
        let parts: Vec<u32> = self.adjacent_free_blocks(first).filter(overlaps).collect();
        self.allocate_at(&parts, (start, size), arena, request.bytes)
    }

    /// Returns the first block of each segment of a pool that consists only of free blocks of several streams.
    fn unused_of_several_streams(&self, pool: u32) -> Vec<u32> {
        if self.arenas_with_partial_blocks(pool).nth(1).is_none() {
            return Vec::new();
        }
        let firsts = self.arenas_with_partial_blocks(pool).flat_map(|arena| arena.partial.blocks(&self.table));
        let firsts = firsts.filter(|&id| self.table[id as usize].prev == NONE);
        firsts
            .filter(|&first| {
                self.adjacent_free_blocks(first).last().is_some_and(|id| self.table[id as usize].next == NONE)
            })
            .collect()
    }

    /// Returns the first block of each unused segment of a pool, whether one or several streams freed it.
    pub(super) fn first_blocks_of_unused_segments(&self, pool: u32) -> Vec<u32> {
        let mut unused = self.whole_blocks(pool);
        unused.extend(self.unused_of_several_streams(pool));
        unused
    }
}

impl Core {
    /// True if there are unused segments whose blocks were freed by several streams.
    pub(super) fn has_unused_of_several_streams(&self) -> bool {
        !self.heap.unused_of_several_streams(0).is_empty()
    }

    /// Merges each unused segment that several streams freed, if all of its streams but one have finished. The merged
    /// block belongs to the remaining stream.
    pub(super) fn merge_unused(&mut self, progress: impl Fn(StreamId) -> Progress) {
        for first in self.heap.unused_of_several_streams(0) {
            let parts: Vec<u32> = self.heap.adjacent_free_blocks(first).collect();
            let arena_of = |id: &u32| self.heap.table[*id as usize].arena();
            let busy = |&arena: &u32| !progress(self.heap.arenas[arena as usize].stream).is_finished();
            let arenas: Vec<u32> = parts.iter().map(arena_of).collect();
            let home = arenas.iter().copied().find(busy).unwrap_or(arenas[0]);
            if arenas.iter().all(|arena| *arena == home || !busy(arena)) {
                let apart = parts.into_iter().zip(arenas).filter(|(_, arena)| *arena != home);
                apart.for_each(|(id, _)| self.heap.move_to_arena(id, home)); // merges only with neighbours of the same arena
            }
        }
    }
}
