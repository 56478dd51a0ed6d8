//! Free blocks that lie beside each other and belong to several streams.
//!
//! They are not merged: only its own stream may reuse each without a wait. A request that finds nothing else takes what it
//! needs of them together, behind a wait for each of those streams. A segment of which nothing but such blocks is left is
//! unused like any other; they become one block when all but one of the streams are known to be done.

use super::super::driver::Progress;
use super::heap::{Arena, Heap, NONE, Use};
use super::{Core, Request};
use crate::device::StreamId;

/// Adjoining free blocks: the first one, and the bytes of all.
type FreeRun = (u32, usize);

impl Heap {
    /// Arenas of a pool with free blocks that are smaller than their segment.
    fn with_partial_blocks(&self, pool: u32) -> impl Iterator<Item = &Arena> {
        self.arenas.iter().filter(move |arena| arena.pool == pool && !arena.partial.is_empty())
    }

    /// The run that begins with a free block.
    fn run_from(&self, first: u32) -> FreeRun {
        (first, self.run(first).map(|id| self.table[id as usize].size()).sum())
    }

    /// The free blocks from one on, as long as they adjoin.
    fn run(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let is_free = |id: &u32| self.table[*id as usize].usage() == Use::Free; // the entry behind the last one, `NONE`, is vacant
        std::iter::successors(Some(first), move |&id| Some(self.table[id as usize].next).filter(is_free))
    }

    /// The smallest run that serves a request and has a block of another stream's.
    pub(super) fn find_run(&self, request: &Request) -> Option<FreeRun> {
        let arenas = || self.arenas.iter().filter(|arena| (arena.pool, arena.kind) == (request.pool, request.kind));
        let is_other = |stream: StreamId| stream != request.stream;
        if !arenas().any(|arena| is_other(arena.stream) && !(arena.partial.is_empty() && arena.whole.is_empty())) {
            return None;
        }
        let blocks =
            arenas().flat_map(|arena| arena.partial.blocks(&self.table).chain(arena.whole.blocks(&self.table)));
        let is_first = |id: &u32| self.table[self.table[*id as usize].prev as usize].usage() != Use::Free;
        let serves = |&(first, bytes): &FreeRun| {
            bytes >= request.size
                && self.rules.may_serve(request.kind, bytes, request.size)
                && self.run(first).any(|id| is_other(self.arenas[self.table[id as usize].arena() as usize].stream))
        };
        blocks.filter(is_first).map(|id| self.run_from(id)).filter(serves).min_by_key(|&(first, bytes)| (bytes, first))
    }

    /// Hands out a run found for a request, or what of it the request needs. Gives the block and the streams that its parts
    /// belonged to.
    pub(super) fn take_run(&mut self, (first, bytes): FreeRun, request: &Request) -> (u32, Vec<StreamId>) {
        let arena = self.arena(request.pool, request.stream, request.kind);
        let begin = self.table[first as usize].offset();
        let should_split = bytes - request.size >= self.arenas[arena as usize].min_remainder;
        let size = if should_split && self.rules.may_split_for(request.size) { request.size } else { bytes };
        // From both ends of a segment, as in `Heap::take`, so that the remainder stays in one piece.
        let start = if begin > 0 && self.rules.both_ends { begin + bytes - size } else { begin };
        let overlaps = |id: &u32| {
            let entry = &self.table[*id as usize];
            entry.offset() < start + size && start < entry.offset() + entry.size()
        };
        let parts: Vec<u32> = self.run(first).filter(overlaps).collect();
        self.take_at(&parts, (start, size), arena, request.bytes)
    }

    /// The first blocks of the segments of a pool of which nothing but free blocks of several streams is left.
    fn unused_but_shared(&self, pool: u32) -> Vec<u32> {
        if self.with_partial_blocks(pool).nth(1).is_none() {
            return Vec::new();
        }
        let firsts = self.with_partial_blocks(pool).flat_map(|arena| arena.partial.blocks(&self.table));
        let firsts = firsts.filter(|&id| self.table[id as usize].prev == NONE);
        firsts.filter(|&first| self.run(first).last().is_some_and(|id| self.table[id as usize].next == NONE)).collect()
    }

    /// The first blocks of the segments of a pool that nothing uses, whoever freed them.
    pub(super) fn first_blocks_of_unused(&self, pool: u32) -> Vec<u32> {
        let mut unused = self.whole_blocks(pool);
        unused.extend(self.unused_but_shared(pool));
        unused
    }
}

impl Core {
    /// Whether there are unused segments that several streams freed.
    pub(super) fn has_unused_but_shared(&self) -> bool {
        !self.heap.unused_but_shared(0).is_empty()
    }

    /// Makes one block of each unused segment that several streams freed, if all of them but one are known to be done. The
    /// block belongs to that one, and counts as unused from now on.
    pub(super) fn merge_unused(&mut self, progress: impl Fn(StreamId) -> Progress) {
        for first in self.heap.unused_but_shared(0) {
            let parts: Vec<u32> = self.heap.run(first).collect();
            let arena_of = |id: &u32| self.heap.table[*id as usize].arena();
            let busy = |&arena: &u32| !progress(self.heap.arenas[arena as usize].stream).is_finished();
            let arenas: Vec<u32> = parts.iter().map(arena_of).collect();
            let home = arenas.iter().copied().find(busy).unwrap_or(arenas[0]);
            if arenas.iter().all(|arena| *arena == home || !busy(arena)) {
                let apart = parts.into_iter().zip(arenas).filter(|(_, arena)| *arena != home);
                apart.for_each(|(id, _)| self.heap.rehome(id, home)); // merges only with neighbours that are in that arena
            }
        }
    }
}
