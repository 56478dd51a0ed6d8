//! Block bookkeeping: which bytes of each segment are in use, which are free, and which blocks are neighbours.
//!
//! The heap knows no driver, clock or lock. The blocks of a segment cover it completely and form a doubly linked list in
//! address order. No two adjacent free blocks belong to the same arena. An arena is one search space: a memory pool, a
//! stream, and a size kind (small or large). An arena keeps its free blocks in two [`Bins`]: blocks that are part of a
//! segment, and blocks that cover one. Unused segments are taken last, because they can be released.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::block::MAX_TABLE_ENTRIES;
use super::super::counters::Counters;
use super::super::history::{Context, History, TraceAction};
use super::super::segment::Segment;
use super::super::stats::Split;
use super::bins::Bins;
pub(super) use super::entry::{Entry, NONE, NOWHERE, SPILLED_POOL, Use};
use super::entry::{merge_with_next, prefetch, split_entry};
use super::pages::SegmentEnd;
use super::policy::{Rules, SizeKind};
use crate::device::StreamId;

/// The table of entries grows by this many entries.
const TABLE_GROWTH_ENTRIES: usize = 64;

/// How thoroughly to search for a free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// Constant time. May miss a fitting block in the request's own size class.
    Quick,
    /// Finds the best fit.
    Thorough,
}

/// A segment and its bookkeeping.
#[derive(Debug)]
pub(super) struct SegmentRecord {
    pub(super) segment: Arc<Segment>,
    /// The address that snapshots show, unchanged while the segment's blocks are being moved to another segment.
    pub(super) address: u64,
    /// Call stack of the segment's creation.
    pub(super) context: Context,
    /// Bytes covered by blocks: the whole segment, unless the segment grows in place.
    pub(super) size: usize,
    pub(super) kind: SizeKind,
    pub(super) pool: u32,
    /// The stream the segment was created for.
    pub(super) stream: StreamId,
    pub(super) first: u32,
    /// Ticks and milliseconds at which the segment last became entirely free.
    pub(super) idle_since: (u64, u64),
    pub(super) end: SegmentEnd,
}

/// The free blocks of one search space: a pool, a stream and a size kind.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) pool: u32,
    pub(super) stream: StreamId,
    pub(super) kind: SizeKind,
    /// The smallest remainder, in bytes, that is split off as a block of its own.
    pub(super) min_remainder: usize,
    pub(super) partial: Bins,
    pub(super) whole_segments: Bins,
}

/// All segments and blocks of an allocator, with their statistics.
pub(super) struct Heap {
    pub(super) rules: Arc<Rules>,
    /// Memory pools whose blocks are never split.
    pub(super) unsplit_pools: Vec<u32>,
    pub(super) table: Vec<Entry>,
    vacant: Vec<u32>,
    pub(super) segments: Vec<Option<SegmentRecord>>,
    pub(super) vacant_segments: Vec<u32>,
    pub(super) arenas: Vec<Arena>,
    vacant_arenas: Vec<u32>,
    arena_of: HashMap<(u32, StreamId, SizeKind), u32>,
    pub(super) stats: Counters,
    pub(super) history: History,
    /// Call stacks of live blocks' allocations, while history is recorded.
    pub(super) contexts: HashMap<u32, Context>,
    /// The block freed last, if it has not been merged yet. The table still lists it as live.
    last_freed: u32,
    /// Number of blocks freed so far. Each may have unfinished work behind it.
    pub(super) freed_blocks: u64,
    /// Number of searches so far: the clock of garbage collection.
    pub(super) ticks: u64,
    /// Milliseconds since the allocator was created, as last set by its owner.
    pub(super) now: u64,
}

impl Heap {
    pub(super) fn new(rules: Arc<Rules>) -> Heap {
        let mut heap = Heap {
            rules,
            unsplit_pools: Vec::new(),
            table: vec![Entry::VACANT],
            vacant: Vec::new(),
            segments: Vec::new(),
            vacant_segments: Vec::new(),
            arenas: Vec::new(),
            vacant_arenas: Vec::new(),
            arena_of: HashMap::new(),
            stats: Counters::default(),
            history: History::new(),
            contexts: HashMap::new(),
            last_freed: NONE,
            freed_blocks: 0,
            ticks: 0,
            now: 0,
        };
        for kind in [SizeKind::Small, SizeKind::Large] {
            heap.get_or_create_arena(0, StreamId::DEFAULT, kind);
        }
        heap
    }

    /// Returns the arena of a pool, stream and kind. Arenas 0 and 1 are the default pool's on the default stream.
    #[inline(always)]
    pub(super) fn arena(&mut self, pool: u32, stream: StreamId, kind: SizeKind) -> u32 {
        if pool == 0 && stream == StreamId::DEFAULT {
            return kind as u32; // almost every request
        }
        self.get_or_create_arena(pool, stream, kind)
    }

    /// Looks up an arena outside the fast path, and creates it if needed.
    #[cold]
    fn get_or_create_arena(&mut self, pool: u32, stream: StreamId, kind: SizeKind) -> u32 {
        if let Some(&arena) = self.arena_of.get(&(pool, stream, kind)) {
            return arena;
        }
        let min_remainder =
            if self.unsplit_pools.contains(&pool) { usize::MAX } else { self.rules.min_remainder(kind) };
        let made = Arena { pool, stream, kind, min_remainder, partial: Bins::new(), whole_segments: Bins::new() };
        let arena = self.vacant_arenas.pop().unwrap_or(self.arenas.len() as u32);
        match self.arenas.get_mut(arena as usize) {
            Some(vacant) => *vacant = made,
            None => self.arenas.push(made),
        }
        self.arena_of.insert((pool, stream, kind), arena);
        arena
    }

    /// Retires an arena that has no blocks, so that its number can be reused.
    pub(super) fn retire_arena(&mut self, at: u32) {
        let arena = &mut self.arenas[at as usize];
        self.arena_of.remove(&(arena.pool, arena.stream, arena.kind));
        arena.pool = NOWHERE;
        self.vacant_arenas.push(at);
    }

    /// Finds a free block of the arena for `size` bytes, without taking it. Skips unused segments larger than `max_segment_to_split()` bytes.
    #[inline(always)]
    pub(super) fn find_free(
        &self,
        arena: u32,
        size: usize,
        search: Search,
        max_segment_to_split: impl FnOnce() -> usize,
    ) -> Option<u32> {
        let arena = &self.arenas[arena as usize];
        let class = Bins::class_of(size);
        let look = |bins: &Bins| match search {
            Search::Quick => bins.find_good_fit(&self.table, size, class),
            Search::Thorough => bins.find_best_fit(&self.table, size),
        };
        let bytes = |id: u32| self.table[id as usize].size();
        let allowed = |&(id, _): &(u32, usize)| self.rules.may_serve(arena.kind, bytes(id), size);
        let part = look(&arena.partial).filter(allowed);
        if arena.whole_segments.is_empty() || part.is_some_and(|(_, fit)| fit == class) {
            return part.map(|(id, _)| id); // no whole segment fits better
        }
        let whole = look(&arena.whole_segments).filter(allowed);
        match (part, whole) {
            (Some((part, fit)), Some((_, class))) if class > fit => Some(part),
            (part, Some((whole, _))) if bytes(whole) > max_segment_to_split() => part.map(|(id, _)| id),
            (part, whole) => whole.or(part).map(|(id, _)| id),
        }
    }

    /// Allocates `size` bytes from a free block, and splits off the remainder. Returns the allocated entry.
    #[inline(always)]
    pub(super) fn allocate_from(&mut self, id: u32, size: usize, requested: usize) -> u32 {
        let spare = self.next_vacant_entry();
        let Heap { table, vacant, arenas, rules, stats, .. } = self;
        let table = &mut table[..];
        let found = table[id as usize];
        let arena = &mut arenas[found.arena() as usize];
        let (length, whole) = (found.size(), found.covers_segment());
        let bins = if whole { &mut arena.whole_segments } else { &mut arena.partial };
        bins.remove(table, id);
        let mut split = Split { blocks: i64::from(whole) - 1, bytes: if whole { 0 } else { -(length as i64) } };
        let (mut taken, mut given) = (id, length);
        if length - size >= arena.min_remainder && rules.may_split_for(size) {
            vacant.pop(); // takes the spare entry
            // Allocates from both ends of a segment, so that the remainder stays contiguous between the ends.
            let high = (found.offset() > 0) & rules.both_ends;
            let free = if high { id } else { spare };
            (taken, given) = (if high { spare } else { id }, size);
            split_entry(table, id, if high { length - size } else { size }, spare);
            arena.partial.insert(table, free);
            split.blocks += 1;
            split.bytes += (length - size) as i64;
        }
        table[taken as usize].set_usage(Use::Live);
        stats.record_allocation(arena.kind, given, requested);
        stats.record_split_change(arena.kind, split);
        taken
    }

    /// Allocates `size` bytes at `offset` from adjacent free blocks of one segment, given in address order. The new
    /// block belongs to `arena`. Returns the block and the streams of the parts.
    pub(super) fn allocate_at(
        &mut self,
        parts: &[u32],
        (offset, size): (usize, usize),
        arena: u32,
        requested: usize,
    ) -> (u32, Vec<StreamId>) {
        let (mut split, mut streams, mut taken) = (Split::default(), Vec::new(), NONE);
        for &part in parts {
            self.remove_free(part, &mut split);
            let found = self.table[part as usize];
            streams.push(self.arenas[found.arena() as usize].stream);
            let mut inside = part;
            if found.offset() < offset {
                inside = self.split(part, offset - found.offset());
                self.insert_free(part, &mut split);
            }
            let (start, length) = (self.table[inside as usize].offset(), self.table[inside as usize].size());
            if start + length > offset + size {
                let rest = self.split(inside, offset + size - start);
                self.insert_free(rest, &mut split);
            }
            self.table[inside as usize].set_usage(Use::Live);
            if taken == NONE {
                taken = inside;
            } else {
                self.merge_next(taken);
            }
        }
        self.table[taken as usize].set_arena(arena);
        let kind = self.arenas[arena as usize].kind;
        self.stats.record_allocation(kind, size, requested);
        self.stats.record_split_change(kind, split);
        (taken, streams)
    }

    /// Splits a block, which must be in no bin, after `size` bytes. Returns the second part.
    pub(super) fn split(&mut self, id: u32, size: usize) -> u32 {
        let rest = self.next_vacant_entry();
        self.vacant.pop();
        split_entry(&mut self.table, id, size, rest);
        rest
    }

    /// Frees a block that no other stream uses.
    #[inline(always)]
    pub(super) fn free_block(&mut self, id: u32, requested: usize) {
        self.freed_blocks += 1;
        self.record_free(id, requested);
        let (kind, size) = self.kind_and_size(id);
        self.stats.record_free(kind, size, requested);
        self.free_and_count(id);
    }

    /// Like [`free_block`](Self::free_block), but does not merge the block until the next call, because the next request is most often for the same
    /// size. Until [`merge_last_freed`](Self::merge_last_freed), only `reuse_last_freed` may read the table.
    #[inline(always)]
    pub(super) fn free_block_unmerged(&mut self, id: u32, requested: usize) {
        self.merge_last_freed();
        self.freed_blocks += 1;
        self.record_free(id, requested);
        let (kind, size) = self.kind_and_size(id);
        let Entry { prev, next, .. } = self.table[id as usize];
        prefetch(&self.table, next);
        prefetch(&self.table, prev);
        self.stats.record_free(kind, size, requested);
        self.last_freed = id;
        if !self.rules.is_adaptive() {
            self.merge_last_freed_block(); // PyTorch merges first, then searches for the best fit
        }
    }

    /// Merges the block kept by [`free_block_unmerged`](Self::free_block_unmerged), if it has not been reused.
    #[inline]
    pub(super) fn merge_last_freed(&mut self) {
        if self.last_freed != NONE {
            self.merge_last_freed_block();
        }
    }

    /// Merges the last freed block, which must exist, with its free neighbours.
    #[inline(never)]
    fn merge_last_freed_block(&mut self) {
        let id = std::mem::replace(&mut self.last_freed, NONE);
        self.free_and_count(id);
    }

    #[inline(always)]
    fn kind_and_size(&self, id: u32) -> (SizeKind, usize) {
        let entry = &self.table[id as usize];
        (self.arenas[entry.arena() as usize].kind, entry.size())
    }

    /// Makes a block free and updates the split statistics.
    #[inline(always)]
    fn free_and_count(&mut self, id: u32) {
        let kind = self.kind_and_size(id).0;
        let split = self.free_and_merge(id);
        self.stats.record_split_change(kind, split);
    }

    /// Reuses the last freed block if it has this arena and exactly this size, and otherwise merges the block.
    #[inline(always)]
    pub(super) fn reuse_last_freed(&mut self, arena: u32, size: usize, requested: usize) -> Option<u32> {
        let id = std::mem::replace(&mut self.last_freed, NONE);
        let entry = &self.table[id as usize]; // the entry `NONE` has 0 bytes
        if (entry.size() == size) & (entry.arena() == arena) {
            self.stats.record_allocation(self.arenas[arena as usize].kind, size, requested);
            return Some(id);
        }
        if id != NONE {
            self.free_and_count(id);
        }
        None
    }

    /// Frees a block that another stream may be using. The block counts as active until [`free_pending`](Self::free_pending).
    pub(super) fn mark_pending(&mut self, id: u32, requested: usize) {
        self.freed_blocks += 1;
        self.record(TraceAction::FreeRequested, id, requested);
        let (kind, size) = self.kind_and_size(id);
        self.table[id as usize].set_usage(Use::Pending);
        self.stats.record_pending_free(kind, size, requested);
    }

    /// Makes a pending block free. `requested` is the size of its last allocation, in bytes.
    pub(super) fn free_pending(&mut self, id: u32, requested: usize) {
        self.record(TraceAction::FreeCompleted, id, requested);
        let (kind, size) = self.kind_and_size(id);
        let split = self.free_and_merge(id);
        self.stats.record_settled(kind, size, split);
    }

    /// Reallocates a pending block without splitting it. The new owner waits for the streams that use the block.
    /// `before` is the block's previous requested size, in bytes.
    pub(super) fn reuse_pending(&mut self, id: u32, before: usize, requested: usize) {
        self.record(TraceAction::FreeCompleted, id, before);
        let (kind, size) = self.kind_and_size(id);
        self.table[id as usize].set_usage(Use::Live);
        self.stats.record_reallocation(kind, size, requested);
    }

    /// Moves a free block to another arena of the same pool, and merges it with its neighbours there.
    pub(super) fn move_to_arena(&mut self, id: u32, arena: u32) {
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        self.table[id as usize].set_arena(arena);
        let Split { blocks, bytes } = self.free_and_merge(id);
        let split = Split { blocks: split.blocks + blocks, bytes: split.bytes + bytes };
        self.stats.record_split_change(self.arenas[arena as usize].kind, split);
    }

    /// Makes a block free, and merges it with its free neighbours of the same arena.
    #[inline(always)]
    pub(super) fn free_and_merge(&mut self, id: u32) -> Split {
        let Heap { table, vacant, arenas, segments, .. } = self;
        let table = &mut table[..];
        let Entry { segment, prev, next, .. } = table[id as usize];
        let at = table[id as usize].arena();
        let arena = &mut arenas[at as usize];
        let mut split = Split::default();
        table[id as usize].set_usage(Use::Free);
        let mut free = id;
        // A neighbour covers only part of its segment, so it is in the partial bins. The entry `NONE` is vacant.
        if table[next as usize].is_free_in(at) {
            arena.partial.remove(table, next);
            split.blocks -= 1;
            split.bytes -= merge_with_next(table, id, next) as i64;
            vacant.push(next);
        }
        if table[prev as usize].is_free_in(at) {
            arena.partial.remove(table, prev);
            split.blocks -= 1;
            split.bytes -= table[prev as usize].size() as i64;
            merge_with_next(table, prev, id);
            vacant.push(id);
            free = prev;
        }
        let entry = &table[free as usize];
        if entry.covers_segment() {
            arena.whole_segments.insert(table, free);
            if let Some(held) = &mut segments[segment as usize] {
                held.idle_since = (self.ticks, self.now);
            }
        } else {
            split.blocks += 1;
            split.bytes += entry.size() as i64;
            arena.partial.insert(table, free);
        }
        split
    }

    /// Adds a free block to its arena's bins without merging, and updates `split`.
    #[inline(always)]
    pub(super) fn insert_free(&mut self, id: u32, split: &mut Split) {
        let entry = self.table[id as usize];
        let arena = &mut self.arenas[entry.arena() as usize];
        if entry.covers_segment() {
            arena.whole_segments.insert(&mut self.table, id);
            if let Some(held) = &mut self.segments[entry.segment as usize] {
                held.idle_since = (self.ticks, self.now);
            }
        } else {
            arena.partial.insert(&mut self.table, id);
            split.blocks += 1;
            split.bytes += entry.size() as i64;
        }
    }

    /// Removes a free block from its arena's bins, and updates `split`.
    #[inline(always)]
    pub(super) fn remove_free(&mut self, id: u32, split: &mut Split) {
        let entry = self.table[id as usize];
        let arena = &mut self.arenas[entry.arena() as usize];
        if entry.covers_segment() {
            arena.whole_segments.remove(&mut self.table, id);
        } else {
            arena.partial.remove(&mut self.table, id);
            split.blocks -= 1;
            split.bytes -= entry.size() as i64;
        }
    }

    /// Merges a block with its next neighbour, whose entry becomes vacant.
    pub(super) fn merge_next(&mut self, id: u32) {
        let gone = self.table[id as usize].next;
        merge_with_next(&mut self.table, id, gone);
        self.vacant.push(gone);
    }

    pub(super) fn vacate(&mut self, id: u32) {
        self.table[id as usize].set_usage(Use::Vacant);
        self.vacant.push(id);
    }

    /// Stores a new entry and returns its number.
    pub(super) fn insert(&mut self, entry: Entry) -> u32 {
        let id = self.next_vacant_entry();
        self.vacant.pop();
        self.table[id as usize] = entry;
        id
    }

    /// Returns the vacant entry that will be used next.
    #[inline(always)]
    fn next_vacant_entry(&mut self) -> u32 {
        match self.vacant.last() {
            Some(&id) => id,
            None => self.grow_table(),
        }
    }

    /// Grows the table, and returns the first new entry.
    #[cold]
    fn grow_table(&mut self) -> u32 {
        let first = self.table.len() as u32;
        assert!(self.table.len() + TABLE_GROWTH_ENTRIES <= MAX_TABLE_ENTRIES, "the block table is full");
        self.table.resize(self.table.len() + TABLE_GROWTH_ENTRIES, Entry::VACANT);
        self.vacant.extend((first..first + TABLE_GROWTH_ENTRIES as u32).rev());
        first
    }
}
