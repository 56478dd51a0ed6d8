//! Block bookkeeping: which bytes of each segment are in use, which are free, and which blocks are neighbours.
//!
//! The heap uses no driver, clock or lock. An arena is one search space: a memory pool, a stream, and a size kind
//! (small or large). An arena keeps its free blocks in two [`Bins`]: one for blocks that are part of a segment, and one
//! for blocks that cover a whole segment. Unused segments are taken last, because they can be released.
//!
//! Between two calls of the heap's methods, the following holds ([`Heap::check`] tests it):
//! - The blocks of a segment cover its bytes without gaps or overlaps, and form a doubly linked list in address order.
//! - A block belongs to an arena of its segment's pool and size kind. No two adjacent free blocks belong to the same arena.
//! - The bins of an arena hold exactly its free blocks. Frozen blocks, which compaction works on, and holes are in no bin.
//! - The last block of an expandable segment is never a hole.
//! - `stats` counts the bytes of all segments except holes, and every block that is neither free nor frozen nor a hole.
//!
//! One exception: [`Heap::free_block_unmerged`] leaves one freed block, counted as free, unmerged until the next call.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::super::block::MAX_TABLE_ENTRIES;
use super::super::counters::Counters;
use super::super::driver::{Memory, Progress};
use super::super::history::{Context, History, TraceAction};
use super::super::segment::Segment;
use super::super::stats::{MemPoolStats, Split};
use super::bins::Bins;
use super::entry::{Entry, NONE, NOWHERE, SPILLED_POOL, Use, merge_with_next, prefetch, split_entry};
use super::policy::{MIN_HOLE_BYTES, REMEMBERED_ENDS, Rules, SizeKind};
use crate::device::StreamId;

/// The table of entries grows by this many entries.
const TABLE_GROWTH_ENTRIES: usize = 64;

/// How thoroughly to search for a free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// Takes constant time. May miss a fitting block in the request's own size class.
    Quick,
    /// Finds the smallest sufficient block.
    Thorough,
}

/// One allocation request and the arena that serves it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) bytes: usize,
    pub(super) size: usize,
    pub(super) kind: SizeKind,
    pub(super) pool: u32,
    pub(super) stream: StreamId,
}

/// A segment and its bookkeeping.
#[derive(Debug)]
pub(super) struct SegmentRecord {
    pub(super) segment: Arc<Segment>,
    /// The address that snapshots show. It does not change while the segment's blocks are being moved to another segment.
    pub(super) address: u64,
    /// Call stack of the segment's creation.
    pub(super) context: Context,
    /// Number of bytes covered by blocks: the whole segment, unless the segment grows in place.
    pub(super) size: usize,
    pub(super) kind: SizeKind,
    pub(super) pool: u32,
    /// The stream the segment was created for.
    pub(super) stream: StreamId,
    pub(super) first: u32,
    /// The search count and the time in milliseconds when the segment last became entirely free.
    pub(super) idle_since: (u64, u64),
    pub(super) end: SegmentEnd,
}

/// Bookkeeping of an expandable segment's end and holes.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentEnd {
    /// The last block or one of its predecessors, from which the search for the last block starts.
    hint: u32,
    /// The offsets up to which blocks were in use at decay's recent checks. `usize::MAX` for checks before the segment last grew.
    used: [usize; REMEMBERED_ENDS],
    /// Number of bytes in uncommitted holes before the end. For a segment on the host, all its bytes.
    pub(super) holes: usize,
}

impl Default for SegmentEnd {
    fn default() -> SegmentEnd {
        SegmentEnd { hint: NONE, used: [usize::MAX; REMEMBERED_ENDS], holes: 0 }
    }
}

impl SegmentEnd {
    /// Returns the highest offset in use at any of the recent checks.
    pub(super) fn last_used(&self) -> usize {
        self.used.into_iter().max().unwrap_or(usize::MAX)
    }
}

impl SegmentRecord {
    pub(super) fn committed(&self) -> usize {
        self.size - self.end.holes
    }
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

impl Arena {
    /// Iterates over all free blocks in arbitrary order.
    pub(super) fn free_blocks<'a>(&'a self, table: &'a [Entry]) -> impl Iterator<Item = u32> + 'a {
        self.partial.blocks(table).chain(self.whole_segments.blocks(table))
    }
}

/// A plan to commit more memory to a segment.
pub(super) struct Extension {
    /// The segment and its number in the table; `None` for a new segment.
    pub(super) segment: Option<(u32, Arc<Segment>)>,
    /// Holes to fill, with the range to commit at the start of each.
    pub(super) holes: Vec<(u32, Range<usize>)>,
    /// The range from the segment's current end to its new end.
    pub(super) end: Range<usize>,
    /// Adjacent free blocks that the request will use too, so their pages must not be released.
    pub(super) spared: Vec<u32>,
}

impl Extension {
    /// Iterates over the ranges to commit.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.holes.iter().map(|(_, range)| range).chain([&self.end]).filter(|range| !range.is_empty())
    }

    /// Returns the number of bytes to commit.
    pub(super) fn bytes(&self) -> u64 {
        self.ranges().map(|range| range.len() as u64).sum()
    }
}

/// A range of pages that was removed from the table and has to be decommitted.
pub(super) type UnmappedPages = (Arc<Segment>, Range<usize>);

/// Adjacent free blocks: the first block, and the bytes of all together.
type FreeRun = (u32, usize);

/// All segments and blocks of an allocator, with their statistics.
pub(super) struct Heap {
    rules: Arc<Rules>,
    /// Numbers of the memory pools whose blocks are never split.
    unsplit_pools: Vec<u32>,
    table: Vec<Entry>,
    vacant: Vec<u32>,
    segments: Vec<Option<SegmentRecord>>,
    vacant_segments: Vec<u32>,
    arenas: Vec<Arena>,
    vacant_arenas: Vec<u32>,
    arena_of: HashMap<(u32, StreamId, SizeKind), u32>,
    pub(super) stats: Counters,
    pub(super) history: History,
    /// The call stacks of the allocations of live blocks, if the history is recorded.
    pub(super) contexts: HashMap<u32, Context>,
    /// The block freed last, if it has not been merged yet. The table still lists it as live.
    last_freed: u32,
    /// Number of blocks freed so far. Work that uses a freed block may still run on the device.
    pub(super) freed_blocks: u64,
    /// Number of searches so far, which garbage collection uses as its clock.
    pub(super) ticks: u64,
    /// Milliseconds since the allocator was created, as last set by its owner.
    pub(super) now: u64,
}

fn round_down(bytes: usize, page: usize) -> usize {
    bytes & !(page - 1)
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
            return kind as u32; // almost every request takes this path
        }
        self.get_or_create_arena(pool, stream, kind)
    }

    /// The slow path of [`arena`](Self::arena): looks up an arena, and creates it if needed.
    #[cold]
    fn get_or_create_arena(&mut self, pool: u32, stream: StreamId, kind: SizeKind) -> u32 {
        if let Some(&arena) = self.arena_of.get(&(pool, stream, kind)) {
            return arena;
        }
        let min_remainder = if self.is_unsplit(pool) { usize::MAX } else { self.rules.min_remainder(kind) };
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
    fn retire_arena(&mut self, at: u32) {
        let arena = &mut self.arenas[at as usize];
        self.arena_of.remove(&(arena.pool, arena.stream, arena.kind));
        arena.pool = NOWHERE;
        self.vacant_arenas.push(at);
    }

    /// Returns a block's entry.
    #[inline(always)]
    pub(super) fn entry(&self, id: u32) -> &Entry {
        &self.table[id as usize]
    }

    /// Returns the arena that a block belongs to.
    #[inline(always)]
    pub(super) fn arena_of_block(&self, id: u32) -> &Arena {
        &self.arenas[self.table[id as usize].arena() as usize]
    }

    /// Returns the segment with this number, if there is one.
    #[inline(always)]
    pub(super) fn segment(&self, at: u32) -> Option<&SegmentRecord> {
        self.segments[at as usize].as_ref()
    }

    /// Iterates over the segments and their numbers.
    pub(super) fn segments(&self) -> impl Iterator<Item = (u32, &SegmentRecord)> {
        (0..).zip(&self.segments).filter_map(|(at, held)| Some((at, held.as_ref()?)))
    }

    /// Sets whether the blocks of a memory pool are never split.
    pub(super) fn set_unsplit(&mut self, pool: u32, unsplit: bool) {
        self.unsplit_pools.retain(|&other| other != pool);
        self.unsplit_pools.extend(unsplit.then_some(pool));
    }

    pub(super) fn is_unsplit(&self, pool: u32) -> bool {
        self.unsplit_pools.contains(&pool)
    }

    /// Takes all segments out of the table, for an allocator that is dropped before its blocks.
    pub(super) fn take_segments(&mut self) -> Vec<Option<SegmentRecord>> {
        std::mem::take(&mut self.segments)
    }

    /// Returns all arenas by number.
    pub(super) fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    // Methods that allocate and free blocks.

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
            return part.map(|(id, _)| id); // no block that covers a whole segment fits better
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
            vacant.pop(); // the vacant entry at the top becomes the remainder's entry
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

    /// Allocates a range of bytes from adjacent free blocks of one segment, given in address order. The new block belongs to
    /// `arena`. Returns the block and the streams to which its parts belonged.
    pub(super) fn allocate_at(
        &mut self,
        parts: &[u32],
        range: &Range<usize>,
        arena: u32,
        requested: usize,
    ) -> (u32, Vec<StreamId>) {
        let (mut split, mut streams, mut taken) = (Split::default(), Vec::new(), NONE);
        for &part in parts {
            self.remove_free(part, &mut split);
            let found = self.table[part as usize];
            streams.push(self.arenas[found.arena() as usize].stream);
            let mut inside = part;
            if found.offset() < range.start {
                inside = self.split(part, range.start - found.offset());
                self.insert_free(part, &mut split);
            }
            let (start, length) = (self.table[inside as usize].offset(), self.table[inside as usize].size());
            if start + length > range.end {
                let rest = self.split(inside, range.end - start);
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
        self.stats.record_allocation(kind, range.len(), requested);
        self.stats.record_split_change(kind, split);
        (taken, streams)
    }

    /// Frees the bytes of a live block after the first `size`.
    pub(super) fn trim_live(&mut self, id: u32, size: usize) {
        let (kind, all) = self.kind_and_size(id);
        if all > size {
            let rest = self.split(id, size);
            self.stats.correct_live(kind, [0, size as i64 - all as i64, 0]);
            self.unfreeze_block(rest);
        }
    }

    /// Splits a block, which must be in no bin, after `size` bytes. Returns the second part.
    fn split(&mut self, id: u32, size: usize) -> u32 {
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
            self.merge_last_freed_block(); // as in PyTorch, which merges before it searches for the best fit
        }
    }

    /// Merges the block kept by [`free_block_unmerged`](Self::free_block_unmerged), if the block has not been reused.
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

    /// Reuses the last freed block if it belongs to this arena and has exactly this size. Otherwise merges the block.
    #[inline(always)]
    pub(super) fn reuse_last_freed(&mut self, arena: u32, size: usize, requested: usize) -> Option<u32> {
        let id = std::mem::replace(&mut self.last_freed, NONE);
        let entry = &self.table[id as usize]; // if there is no last freed block, this is the entry `NONE` of 0 bytes
        if (entry.size() == size) & (entry.arena() == arena) {
            self.stats.record_allocation(self.arenas[arena as usize].kind, size, requested);
            return Some(id);
        }
        if id != NONE {
            self.free_and_count(id);
        }
        None
    }

    /// Puts a frozen block back into the bins, merged with its free neighbours.
    pub(super) fn unfreeze_block(&mut self, id: u32) {
        self.free_and_count(id);
    }

    /// Frees a block that leaves a thread's cache. The statistics already count it as free.
    pub(super) fn uncache(&mut self, id: u32) {
        self.freed_blocks += 1;
        self.unfreeze_block(id);
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
        self.stats.end_pending(kind, size);
        self.stats.record_split_change(kind, split);
    }

    /// Reallocates a pending block without splitting it. The new owner waits for the streams that use the block.
    /// `before` is the block's previous requested size, in bytes.
    pub(super) fn reuse_pending(&mut self, id: u32, before: usize, request: &Request) {
        self.record(TraceAction::FreeCompleted, id, before);
        let (kind, size) = self.kind_and_size(id);
        self.table[id as usize].set_usage(Use::Live);
        self.stats.record_reallocation(kind, size, request.bytes);
        let arena = self.arena(request.pool, request.stream, request.kind);
        self.table[id as usize].set_arena(arena);
    }

    /// Moves a free block to another arena of the same pool, and merges the block with its free neighbours in that arena.
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
    fn free_and_merge(&mut self, id: u32) -> Split {
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
    fn insert_free(&mut self, id: u32, split: &mut Split) {
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
    fn remove_free(&mut self, id: u32, split: &mut Split) {
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

    /// Merges a block with the block behind it, whose entry becomes vacant.
    fn merge_next(&mut self, id: u32) {
        let gone = self.table[id as usize].next;
        merge_with_next(&mut self.table, id, gone);
        self.vacant.push(gone);
    }

    fn vacate(&mut self, id: u32) {
        self.table[id as usize].set_usage(Use::Vacant);
        self.vacant.push(id);
    }

    /// Stores a new entry and returns its number.
    fn insert(&mut self, entry: Entry) -> u32 {
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

    // Methods that add and remove segments.

    /// Adds a segment as one free block of the arena. Returns the block.
    pub(super) fn add_segment(&mut self, segment: Arc<Segment>, size: usize, arena: u32) -> u32 {
        let Arena { pool, stream, kind, .. } = self.arenas[arena as usize];
        let at = self.vacant_segment();
        let id = self.insert(Entry::new(at, arena, Use::Free, 0, size));
        let action = if segment.is_reserved() { TraceAction::SegmentMap } else { TraceAction::SegmentAlloc };
        let context = self.history.record(action, segment.address(), size as u64, stream.0);
        self.set_segment(at, segment, context, size, (pool, stream, kind), id);
        self.stats.record_segment_alloc(kind, size);
        self.insert_free(id, &mut Split::default());
        id
    }

    /// Stores a segment under the number `at`. Its blocks, from `first` on, cover `size` bytes.
    fn set_segment(
        &mut self,
        at: u32,
        segment: Arc<Segment>,
        context: Context,
        size: usize,
        (pool, stream, kind): (u32, StreamId, SizeKind),
        first: u32,
    ) {
        let (address, idle_since, end) = (segment.address(), (self.ticks, self.now), SegmentEnd::default());
        self.segments[at as usize] =
            Some(SegmentRecord { segment, address, context, size, kind, pool, stream, first, idle_since, end });
    }

    /// Returns an unused number for a new segment.
    fn vacant_segment(&mut self) -> u32 {
        self.vacant_segments.pop().unwrap_or_else(|| {
            self.segments.push(None);
            self.segments.len() as u32 - 1
        })
    }

    /// Removes a segment, whose blocks must all be free, from the table. The caller releases the segment.
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
        match held.pool {
            SPILLED_POOL => self.stats.spilled_bytes.decrease(held.size as u64),
            _ => self.stats.record_segment_free(held.kind, held.committed()),
        }
        held.segment
    }

    /// Removes the segment of a block from the table. All blocks of the segment must be free.
    pub(super) fn remove_whole(&mut self, id: u32) -> Arc<Segment> {
        self.remove_segment(self.table[id as usize].segment)
    }

    /// Removes every segment of a pool whose blocks are all free, even if the blocks are unmerged because they belong to several streams.
    pub(super) fn remove_unused(&mut self, pool: u32) -> Vec<Arc<Segment>> {
        self.unused_segments(pool).into_iter().map(|at| self.remove_segment(at)).collect()
    }

    /// Returns the segments of a pool whose blocks are all free.
    pub(super) fn unused_segments(&self, pool: u32) -> Vec<u32> {
        let unused = |&at: &u32| {
            let of_pool = self.segment(at).is_some_and(|held| held.pool == pool);
            of_pool && self.blocks_of(at).all(|id| matches!(self.table[id as usize].usage(), Use::Free | Use::Unmapped))
        };
        (0..self.segments.len() as u32).filter(unused).collect()
    }

    /// Returns the number of the segment with this id; `None` if the segment is no longer in the table. Code that releases the lock
    /// keeps the id, because numbers are reused.
    pub(super) fn number_of(&self, id: u64) -> Option<u32> {
        self.segments().find(|(_, held)| held.segment.id() == id).map(|(at, _)| at)
    }

    #[inline(always)]
    pub(super) fn segment_of(&self, id: u32) -> &SegmentRecord {
        let segment = self.table[id as usize].segment;
        self.segment(segment).expect("a block's segment is held")
    }

    pub(super) fn any_free(&self, arena: u32) -> Option<u32> {
        self.arenas[arena as usize].free_blocks(&self.table).next()
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
        let first = self.segment(segment).map(|held| held.first);
        std::iter::successors(first, |&id| Some(self.table[id as usize].next).filter(|&next| next != NONE))
    }

    /// Returns the number of committed bytes of a segment; 0 if the segment was removed.
    pub(super) fn committed_bytes(&self, at: u32) -> u64 {
        self.segment(at).map_or(0, |held| held.committed() as u64)
    }

    /// Returns the streams that own blocks.
    pub(super) fn streams(&self) -> BTreeSet<StreamId> {
        self.table.iter().filter(|e| e.usage() != Use::Vacant).map(|e| self.arenas[e.arena() as usize].stream).collect()
    }

    // Adjacent free blocks that belong to different streams. They are not merged, because only its own stream may reuse a block
    // without a wait. If nothing else serves a request, it gets the bytes of several such blocks, and its stream waits for their
    // streams. A segment with only such blocks counts as unused. Its blocks merge once all but one of their streams have finished.

    /// Iterates over the arenas of a pool that have free blocks smaller than their segment.
    fn arenas_with_partial_blocks(&self, pool: u32) -> impl Iterator<Item = &Arena> {
        self.arenas.iter().filter(move |arena| arena.pool == pool && !arena.partial.is_empty())
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
        let blocks = arenas().flat_map(|arena| arena.free_blocks(&self.table));
        let is_first = |id: &u32| self.table[self.table[*id as usize].prev as usize].usage() != Use::Free;
        let serves = |&(first, bytes): &FreeRun| {
            bytes >= request.size
                && self.rules.may_serve(request.kind, bytes, request.size)
                && self.adjacent_free_blocks(first).any(|id| is_other(self.arena_of_block(id).stream))
        };
        let run = |first| (first, self.adjacent_free_blocks(first).map(|id| self.entry(id).size()).sum());
        blocks.filter(is_first).map(run).filter(serves).min_by_key(|&(first, bytes)| (bytes, first))
    }

    /// Allocates from a run the bytes that a request needs. Returns the block and the streams that its parts belonged to.
    pub(super) fn allocate_from_run(&mut self, (first, bytes): FreeRun, request: &Request) -> (u32, Vec<StreamId>) {
        let arena = self.arena(request.pool, request.stream, request.kind);
        let begin = self.table[first as usize].offset();
        let should_split = bytes - request.size >= self.arenas[arena as usize].min_remainder;
        let size = if should_split && self.rules.may_split_for(request.size) { request.size } else { bytes };
        // Uses both ends of a segment, as `Heap::allocate_from` does, so that the remainder stays contiguous.
        let start = if begin > 0 && self.rules.both_ends { begin + bytes - size } else { begin };
        let range = start..start + size;
        let parts: Vec<u32> = self.adjacent_free_blocks(first).filter(|&id| self.entry(id).overlaps(&range)).collect();
        self.allocate_at(&parts, &range, arena, request.bytes)
    }

    /// Returns the first block of each segment of a pool that consists only of free blocks of several streams.
    pub(super) fn unused_of_several_streams(&self, pool: u32) -> Vec<u32> {
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

    /// Merges each unused segment that several streams freed, if all of its streams but one have finished. The merged
    /// block belongs to the remaining stream.
    pub(super) fn merge_unused(&mut self, progress: impl Fn(StreamId) -> Progress) {
        for first in self.unused_of_several_streams(0) {
            let parts: Vec<u32> = self.adjacent_free_blocks(first).collect();
            let arena_of = |id: &u32| self.table[*id as usize].arena();
            let busy = |&arena: &u32| !progress(self.arenas[arena as usize].stream).is_finished();
            let arenas: Vec<u32> = parts.iter().map(arena_of).collect();
            let home = arenas.iter().copied().find(busy).unwrap_or(arenas[0]);
            if arenas.iter().all(|arena| *arena == home || !busy(arena)) {
                let apart = parts.into_iter().zip(arenas).filter(|(_, arena)| *arena != home);
                apart.for_each(|(id, _)| self.move_to_arena(id, home)); // a block merges only with neighbours of its new arena
            }
        }
    }

    // Methods that update the table after blocks have moved.

    /// Takes a free block out of its bins, so that no request can take it.
    pub(super) fn freeze_block(&mut self, id: u32) {
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        self.table[id as usize].set_usage(Use::Frozen);
        let kind = self.kind_and_size(id).0;
        self.stats.record_split_change(kind, split);
    }

    pub(super) fn frozen_blocks(&self, segment: u32) -> Vec<u32> {
        self.blocks_of(segment).filter(|&id| self.table[id as usize].usage() == Use::Frozen).collect()
    }

    /// Merges several segments into one, `target`. `layout` gives the new offset of each block in ascending order, and
    /// the bytes between the blocks become free. Returns the old segments, which are no longer used.
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
            let moves_out = !self.is_segment(at, target);
            if moves_out {
                self.record_released(at);
            }
            let holds_no_data = |id: &u32| matches!(self.entry(*id).usage(), Use::Frozen | Use::Unmapped);
            let unused: Vec<u32> = self.blocks_of(at).filter(holds_no_data).collect();
            unused.into_iter().for_each(|id| self.vacate(id));
            let Some(held) = &self.segments[at as usize] else { continue };
            if moves_out {
                self.stats.record_segment_free(held.kind, held.committed());
                gone.push(Arc::clone(&held.segment));
            }
        }
        let (pool, kind) = self.segment(into).map_or((0, SizeKind::Large), |held| (held.pool, held.kind));
        let own = self.segment(into).map(|held| (held.stream, held.context));
        let stays = self.is_segment(into, target);
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
        let (stream, context) = own.filter(|_| stays).unwrap_or_else(|| {
            self.stats.record_segment_alloc(kind, bytes);
            (stream, self.history.record(TraceAction::SegmentAlloc, target.address(), bytes as u64, stream.0))
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
        self.set_segment(into, Arc::clone(target), context, bytes, (pool, stream, kind), first);
        gaps.into_iter().for_each(|gap| self.unfreeze_block(gap));
        gone
    }

    /// Makes `next` the block after `prev`, unless `prev` is [`NONE`].
    fn link(&mut self, prev: u32, next: u32) {
        if prev != NONE {
            self.table[prev as usize].next = next;
        }
    }

    /// Takes segments whose contents have been copied out of the table. Their blocks have no memory until the segments are rebuilt.
    pub(super) fn take_old_segments(&mut self, segments: &[u32]) -> Vec<Arc<Segment>> {
        let mut gone = Vec::new();
        for &at in segments {
            if let Some(held) = &mut self.segments[at as usize] {
                let make = if held.segment.is_reserved() { Segment::reserved } else { Segment::new };
                gone.push(std::mem::replace(&mut held.segment, Arc::new(make(Memory::released(), 0))));
            }
        }
        gone
    }

    /// Moves a live block into its own segment in the pool of host blocks. Returns the block's old range as a frozen block, which
    /// stays reserved.
    pub(super) fn move_to_host_segment(&mut self, id: u32, segment: Arc<Segment>) -> u32 {
        let entry = self.table[id as usize];
        let size = entry.size();
        let gap = self.insert(Entry::new(entry.segment, entry.arena(), Use::Frozen, entry.offset(), size));
        self.take_position(gap, id);
        let Arena { stream, kind, .. } = self.arenas[entry.arena() as usize];
        let arena = self.arena(SPILLED_POOL, stream, kind);
        let at = self.vacant_segment();
        let block = &mut self.table[id as usize];
        (block.segment, block.prev, block.next) = (at, NONE, NONE);
        block.set_offset(0);
        block.set_arena(arena);
        let context = self.history.record(TraceAction::SegmentAlloc, segment.address(), size as u64, stream.0);
        self.set_segment(at, segment, context, size, (SPILLED_POOL, stream, kind), id);
        if let Some(held) = &mut self.segments[at as usize] {
            held.end.holes = size;
        }
        self.stats.spilled_bytes.increase(size as u64);
        self.stats.num_spills += 1;
        gap
    }

    /// Puts a frozen block into the bins of an arena of its pool and kind.
    pub(super) fn unfreeze_for(&mut self, id: u32, stream: StreamId) {
        let SegmentRecord { pool, kind, .. } = *self.segment_of(id);
        let arena = self.arena(pool, stream, kind);
        self.table[id as usize].set_arena(arena);
        self.unfreeze_block(id);
    }

    /// Moves a live block from its host segment to the range of another live block of the same size, whose entry becomes vacant.
    /// Returns the host segment.
    pub(super) fn return_from_host(&mut self, id: u32, place: u32) -> Arc<Segment> {
        let at = self.table[id as usize].segment;
        self.record_released(at);
        self.take_position(id, place);
        let arena = self.table[place as usize].arena();
        self.table[id as usize].set_arena(arena);
        self.vacate(place);
        self.contexts.remove(&place);
        self.vacant_segments.push(at);
        let held = self.segments[at as usize].take().expect("a block's segment is held");
        self.stats.spilled_bytes.decrease(held.size as u64);
        self.stats.num_returns += 1;
        held.segment
    }

    /// Gives entry `id` the range of entry `of`, which must have the same size. Entry `of` is left without a range.
    fn take_position(&mut self, id: u32, of: u32) {
        let Entry { segment, prev, next, .. } = self.table[of as usize];
        let offset = self.table[of as usize].offset();
        let block = &mut self.table[id as usize];
        (block.segment, block.prev, block.next) = (segment, prev, next);
        block.set_offset(offset);
        match (prev, &mut self.segments[segment as usize]) {
            (NONE, Some(held)) => held.first = id,
            (prev, _) => self.table[prev as usize].next = id,
        }
        if next != NONE {
            self.table[next as usize].prev = id;
        }
    }

    // Methods for the pages of expandable segments. A hole is a block that no request can take.

    /// True if the table still has this segment under the number `at`.
    pub(super) fn is_segment(&self, at: u32, segment: &Arc<Segment>) -> bool {
        self.segment(at).is_some_and(|held| Arc::ptr_eq(&held.segment, segment))
    }

    pub(super) fn is_expandable(&self, at: u32) -> bool {
        self.segment(at).is_some_and(|held| held.segment.is_reserved())
    }

    pub(super) fn last_block(&mut self, at: u32) -> u32 {
        let Some(held) = self.segment(at) else { return NONE };
        let is_of = |id: &u32| {
            let hinted = self.table.get(*id as usize);
            hinted.is_some_and(|entry| entry.segment == at && entry.usage() != Use::Vacant)
        };
        let mut last = Some(held.end.hint).filter(is_of).unwrap_or(held.first);
        while self.table[last as usize].next != NONE {
            last = self.table[last as usize].next;
        }
        if let Some(held) = &mut self.segments[at as usize] {
            held.end.hint = last;
        }
        last
    }

    /// Returns the ways to commit memory for a request of `size` bytes: runs of holes and free blocks of the arena, and the end of the segment.
    pub(super) fn possible_extensions(&mut self, at: u32, arena: u32, size: usize, page: usize) -> Vec<Extension> {
        let last = self.last_block(at);
        let mut found = Vec::new();
        let Some(held) = self.segment(at) else { return found };
        let made = |spared: Vec<u32>, holes, end| {
            let segment = Some((at, Arc::clone(&held.segment)));
            Extension { segment, holes, end, spared }
        };
        let (mut spared, mut holes, mut have) = (Vec::new(), Vec::new(), 0);
        let ids: Vec<u32> = if held.end.holes > 0 { self.blocks_of(at).collect() } else { vec![last] };
        for id in ids {
            let entry = self.table[id as usize];
            match entry.usage() {
                Use::Free if entry.arena() == arena => {
                    spared.push(id);
                    have += entry.size();
                }
                Use::Unmapped => {
                    let bytes = (size - have).next_multiple_of(page).min(entry.size());
                    holes.push((id, entry.offset()..entry.offset() + bytes));
                    have += bytes;
                }
                _ => (spared, holes, have) = (Vec::new(), Vec::new(), 0),
            }
            if have >= size {
                found.push(made(std::mem::take(&mut spared), std::mem::take(&mut holes), held.size..held.size));
                have = 0;
            }
        }
        // The last block is never a hole, because holes at the end are removed.
        let need = size.saturating_sub(have).next_multiple_of(page);
        if need > 0 && need <= held.segment.bytes() - held.size {
            found.push(made(spared, holes, held.size..held.size + need));
        }
        found
    }

    /// Adds newly committed memory to a segment, as free blocks of the arena.
    pub(super) fn extend(&mut self, at: u32, extension: &Extension, arena: u32) {
        let Some(held) = &mut self.segments[at as usize] else { return };
        let (kind, stream, address) = (held.kind, held.stream, held.address);
        held.end.holes -= extension.holes.iter().map(|(_, range)| range.len()).sum::<usize>();
        if !extension.end.is_empty() {
            held.end.used = SegmentEnd::default().used;
            held.size += extension.end.len();
        }
        let mut free: Vec<u32> = Vec::new();
        for (id, range) in &extension.holes {
            if self.table[*id as usize].size() > range.len() {
                let rest = self.split(*id, range.len());
                self.table[rest as usize].set_usage(Use::Unmapped);
            }
            free.push(*id);
        }
        if !extension.end.is_empty() {
            let last = self.last_block(at);
            let (offset, size) = (extension.end.start, extension.end.len());
            let made = Entry::new(at, arena, Use::Frozen, offset, size);
            let mut split = Split::default();
            let is_free = self.table[last as usize].usage() == Use::Free;
            if is_free {
                self.remove_free(last, &mut split); // as long as the segment has not grown, `last` may cover it
            }
            let made = self.insert(made);
            self.table[made as usize].prev = last;
            self.table[last as usize].next = made;
            if is_free {
                self.insert_free(last, &mut split);
            }
            self.stats.record_split_change(kind, split);
            free.push(made);
        }
        for id in free {
            self.table[id as usize].set_arena(arena);
            self.unfreeze_block(id);
        }
        for range in extension.ranges() {
            self.stats.change_segments(kind, true, [0, range.len() as i64]);
            self.history.record(TraceAction::SegmentMap, address + range.start as u64, range.len() as u64, stream.0);
        }
    }

    /// Removes free pages of a pool from the table, up to `most` bytes and none of the `spared` blocks. The longest
    /// runs of pages are removed first. The caller decommits the pages.
    pub(super) fn unmap_free_pages(&mut self, pool: u32, most: u64, spared: &[u32], page: usize) -> Vec<UnmappedPages> {
        let (mut left, mut unmapped) = (most, Vec::new());
        loop {
            let before = unmapped.len();
            for id in self.free_with_pages(pool, spared, page) {
                if left > 0
                    && let Some((segment, range)) = self.unmap(id, left, 0, page)
                {
                    left -= range.len() as u64;
                    unmapped.push((segment, range));
                }
            }
            // Tries again: a block that was too short to become a hole may now be at its segment's end, where any length is released.
            if left == 0 || unmapped.len() == before {
                return unmapped;
            }
        }
    }

    /// Returns a pool's free blocks of a page or more in expandable segments, except the `spared` ones, the largest first.
    fn free_with_pages(&self, pool: u32, spared: &[u32], page: usize) -> Vec<u32> {
        let arenas = self.arenas.iter().filter(|arena| arena.pool == pool);
        let mut free: Vec<u32> = arenas
            .flat_map(|arena| arena.free_blocks(&self.table))
            .filter(|&id| self.table[id as usize].size() >= page)
            .filter(|&id| self.segment_of(id).segment.is_reserved() && !spared.contains(&id))
            .collect();
        free.sort_unstable_by_key(|&id| (Reverse(self.table[id as usize].size()), id));
        free
    }

    /// Removes up to `most` bytes of a free block from the table, in whole pages at or above offset `floor`. If this leaves a hole
    /// at the end of the segment, the segment is shortened. If only a hole is left, the segment is removed.
    pub(super) fn unmap(&mut self, id: u32, most: u64, floor: usize, page: usize) -> Option<UnmappedPages> {
        let entry = self.table[id as usize];
        let Entry { segment: at, next, .. } = entry;
        let (offset, size, usage) = (entry.offset(), entry.size(), entry.usage());
        let end = round_down(offset + size, page);
        let most = round_down(usize::try_from(most).unwrap_or(usize::MAX), page);
        let start = offset.max(floor.min(end)).next_multiple_of(page).max(end.saturating_sub(most));
        let held = self.segments[at as usize].as_mut()?;
        if usage != Use::Free || start >= end || next != NONE && end - start < MIN_HOLE_BYTES {
            return None;
        }
        let (segment, kind, stream, address) = (Arc::clone(&held.segment), held.kind, held.stream, held.address);
        held.end.holes += end - start;
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        let mut hole = id;
        if offset < start {
            hole = self.split(id, start - offset);
            self.insert_free(id, &mut split);
        }
        if end < offset + size {
            let rest = self.split(hole, end - start);
            self.insert_free(rest, &mut split);
        }
        self.table[hole as usize].set_usage(Use::Unmapped);
        let Entry { prev, next, .. } = self.table[hole as usize];
        if next != NONE && self.table[next as usize].usage() == Use::Unmapped {
            self.merge_next(hole);
        }
        if prev != NONE && self.table[prev as usize].usage() == Use::Unmapped {
            self.merge_next(prev);
            hole = prev;
        }
        self.stats.change_segments(kind, false, [0, start as i64 - end as i64]);
        self.history.record(TraceAction::SegmentUnmap, address + start as u64, (end - start) as u64, stream.0);
        if self.table[hole as usize].next == NONE {
            self.remove_trailing_hole(hole, &mut split);
        }
        self.stats.record_split_change(kind, split);
        Some((segment, start..end))
    }

    /// Removes the hole at the end of a segment from the table.
    fn remove_trailing_hole(&mut self, hole: u32, split: &mut Split) {
        let Entry { segment: at, prev, .. } = self.table[hole as usize];
        let size = self.table[hole as usize].size();
        if prev == NONE {
            self.remove_segment(at); // the caller still has a handle on the segment
            return;
        }
        let before = Some(prev).filter(|&id| self.table[id as usize].usage() == Use::Free);
        before.into_iter().for_each(|id| self.remove_free(id, split)); // this block may now cover its whole segment
        self.vacate(hole);
        self.table[prev as usize].next = NONE;
        before.into_iter().for_each(|id| self.insert_free(id, split));
        if let Some(held) = &mut self.segments[at as usize] {
            held.size -= size;
            held.end.holes -= size;
            held.end.hint = prev;
        }
    }

    /// Returns the committed ranges of a segment, between its holes.
    pub(super) fn mapped(&self, at: u32) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for id in self.blocks_of(at) {
            let entry = self.table[id as usize];
            let (usage, offset, size) = (entry.usage(), entry.offset(), entry.size());
            match ranges.last_mut() {
                _ if usage == Use::Unmapped => {}
                Some(range) if range.end == offset => range.end += size,
                _ => ranges.push(offset..offset + size),
            }
        }
        ranges
    }

    /// Records the offset up to which each expandable segment is in use.
    pub(super) fn record_segment_ends(&mut self) {
        for at in 0..self.segments.len() as u32 {
            if !self.is_expandable(at) {
                continue;
            }
            let last = self.last_block(at);
            let entry = self.table[last as usize];
            let (usage, offset, size) = (entry.usage(), entry.offset(), entry.size());
            let used = if usage == Use::Free { offset } else { offset + size };
            if let Some(held) = &mut self.segments[at as usize] {
                held.end.used.rotate_right(1);
                held.end.used[0] = used;
            }
        }
    }

    /// True if decay has an unused segment end to release. `page` is 0 without expandable segments.
    pub(super) fn has_unused_ends(&self, page: usize) -> bool {
        if page == 0 {
            return false;
        }
        let held = self.segments().filter(|(_, held)| held.pool == 0 && held.segment.is_reserved());
        held.map(|(_, held)| (held.size, held.end.last_used()))
            .any(|(size, used)| used.checked_next_multiple_of(page).is_some_and(|end| end < size))
    }

    // Methods for private pools.

    /// Returns the pool's blocks with the given usage, by segment and offset.
    pub(super) fn blocks_of_pool(&self, pool: u32, usage: Use) -> impl Iterator<Item = u32> + '_ {
        let segments = self.segments().filter(move |(_, held)| held.pool == pool);
        let blocks = segments.flat_map(|(at, _)| self.blocks_of(at));
        blocks.filter(move |&id| self.table[id as usize].usage() == usage)
    }

    pub(super) fn pool_stats(&self, pool: u32) -> MemPoolStats {
        let mut stats = MemPoolStats { largest_free: self.largest_free(pool) as u64, ..MemPoolStats::default() };
        for (_, held) in self.segments().filter(|(_, held)| held.pool == pool) {
            stats.segments += 1;
            stats.reserved_bytes += held.committed() as u64;
        }
        let bytes = |id: u32| self.table[id as usize].size() as u64;
        for id in self.blocks_of_pool(pool, Use::Live) {
            stats.allocations += 1;
            stats.allocated_bytes += bytes(id);
        }
        stats.active_bytes = stats.allocated_bytes + self.blocks_of_pool(pool, Use::Pending).map(bytes).sum::<u64>();
        stats
    }

    pub(super) fn move_to_default_pool(&mut self, pool: u32) {
        let mut homes = HashMap::new();
        for at in 0..self.arenas.len() as u32 {
            let (stream, kind) = (self.arenas[at as usize].stream, self.arenas[at as usize].kind);
            if self.arenas[at as usize].pool == pool {
                let home = self.arena(0, stream, kind);
                homes.insert(at, home);
                while let Some(id) = self.any_free(at) {
                    self.move_to_arena(id, home);
                }
            }
        }
        for entry in self.table.iter_mut().filter(|entry| entry.usage() != Use::Vacant) {
            entry.set_arena(homes.get(&entry.arena()).copied().unwrap_or(entry.arena()));
        }
        self.segments.iter_mut().flatten().filter(|held| held.pool == pool).for_each(|held| held.pool = 0);
        homes.into_keys().for_each(|arena| self.retire_arena(arena));
    }

    // Methods that record the history.

    /// Records the release of a segment in the history. For an expandable segment, records its committed ranges.
    pub(super) fn record_released(&self, at: u32) {
        let Some(held) = self.segment(at) else { return };
        if !held.segment.is_reserved() {
            self.history.record(TraceAction::SegmentFree, held.address, held.size as u64, held.stream.0);
            return;
        }
        for range in self.mapped(at) {
            let (address, bytes) = (held.address + range.start as u64, range.len() as u64);
            self.history.record(TraceAction::SegmentUnmap, address, bytes, held.stream.0);
        }
    }

    /// Returns the address that snapshots show for a block.
    pub(super) fn address(&self, id: u32) -> u64 {
        self.segment_of(id).address + self.table[id as usize].offset() as u64
    }

    /// Records an event of a block that was allocated for `requested` bytes.
    #[inline]
    pub(super) fn record(&self, action: TraceAction, id: u32, requested: usize) -> Context {
        if !self.history.is_on() {
            return Context::NONE;
        }
        self.history.record(action, self.address(id), requested as u64, self.arena_of_block(id).stream.0)
    }

    /// Records that a block is free and no stream uses it any more.
    #[inline(always)]
    pub(super) fn record_free(&self, id: u32, requested: usize) {
        if self.history.is_on() {
            self.history.record_free(self.address(id), requested as u64, self.arena_of_block(id).stream.0);
        }
    }

    /// Records that a block is allocated, with its call stack.
    #[inline]
    pub(super) fn record_alloc(&mut self, id: u32, requested: usize) {
        if self.history.is_on() {
            let context = self.record(TraceAction::Alloc, id, requested);
            self.contexts.insert(id, context);
        }
    }
}

#[cfg(test)]
impl Heap {
    /// Iterates over the entries of all blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Entry> {
        self.table.iter().filter(|entry| entry.usage() != Use::Vacant)
    }

    /// Returns the blocks in all bins, each with its arena and whether it is in the bins of whole segments.
    fn binned(&self) -> std::collections::HashSet<(u32, bool, u32)> {
        let mut all = std::collections::HashSet::new();
        for (arena, bins) in (0..).zip(&self.arenas) {
            for (whole, bins) in [(false, &bins.partial), (true, &bins.whole_segments)] {
                for id in bins.blocks(&self.table) {
                    assert!(all.insert((arena, whole, id)), "block {id} is in bins twice");
                }
            }
        }
        all
    }

    /// Panics unless the table is consistent: blocks cover their segments and belong to their pools, no two adjacent
    /// free blocks share an arena, the bins hold exactly the free blocks, and the statistics match.
    pub(super) fn check(&self) {
        let binned = self.binned();
        let (mut reserved, mut active, mut inactive, mut blocks, mut free_blocks) = (0, 0, 0, 0, 0);
        for (at, held) in self.segments() {
            let (mut offset, mut prev, mut free_arena, mut holes) = (0, NONE, NOWHERE, 0);
            for id in self.blocks_of(at) {
                let entry = self.entry(id);
                assert_eq!((entry.segment, entry.prev, entry.offset()), (at, prev, offset), "blocks tile");
                let arena = self.arena_of_block(id);
                assert_eq!((arena.pool, arena.kind), (held.pool, held.kind), "blocks are of their segment's pool");
                assert!(entry.size() > 0 && entry.size().is_multiple_of(self.rules.alignment));
                let free = entry.usage() == Use::Free;
                assert!(!(free && entry.arena() == free_arena), "free neighbours are merged");
                let in_bins = binned.contains(&(entry.arena(), entry.covers_segment(), id));
                assert_eq!(in_bins, free, "bins hold the free blocks");
                free_blocks += usize::from(free);
                let hole = entry.usage() == Use::Unmapped;
                active += if free || hole { 0 } else { entry.size() };
                holes += if hole { entry.size() } else { 0 };
                inactive += if free && !entry.covers_segment() { entry.size() } else { 0 };
                (offset, prev) = (offset + entry.size(), id);
                free_arena = if free { entry.arena() } else { NOWHERE };
                blocks += 1;
            }
            let holes = if held.pool == SPILLED_POOL { held.end.holes } else { holes };
            assert_eq!((offset, offset - holes), (held.size, held.committed()));
            reserved += held.committed();
        }
        assert_eq!(free_blocks, binned.len(), "bins hold nothing else");
        assert_eq!(blocks, self.blocks().count());
        let s = self.stats.stats();
        assert_eq!(s.reserved_bytes.current, reserved as u64);
        assert_eq!(s.active_bytes.current, active as u64);
        assert_eq!(s.inactive_split_bytes.current, inactive as u64);
    }
}
