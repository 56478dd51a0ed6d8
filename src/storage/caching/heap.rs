//! Segments cut into blocks: which bytes are taken, which are free, who lies beside whom.
//!
//! Pure bookkeeping: no driver, no clock, no lock. The blocks of a segment tile it: a doubly linked list in address
//! order in which no two free neighbours belong to the same arena. An arena is what a request searches: a memory pool,
//! a stream, small or large. Free blocks lie in their arena's [`Bins`], those that are a whole segment apart from those
//! that are part of one: a segment that nothing uses can be given back, so it is touched last.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::block::MAX_ENTRIES;
use super::super::counters::Counters;
use super::super::history::{Context, History, TraceAction};
use super::super::segment::Segment;
use super::super::stats::Split;
use super::bins::Bins;
pub(super) use super::entry::{Entry, NONE, NOWHERE, SPILLED, Use};
use super::entry::{absorb, cut, prefetch};
use super::pages::End;
use super::policy::{Kind, Rules};
use crate::device::StreamId;

/// Entries the table grows by.
const ENTRIES: usize = 64;

/// How hard to look for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// In constant time: a block of the request's own size class may be missed.
    Quick,
    /// For the best fit.
    Thorough,
}

/// A segment and what is known of it.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) segment: Arc<Segment>,
    /// Where snapshots show it. Stays what it was while its blocks are on the way to another.
    pub(super) address: u64,
    /// Where in the program it was made.
    pub(super) context: Context,
    /// Where its last block ends: all of its bytes, but for a segment that grows in place.
    pub(super) size: usize,
    pub(super) kind: Kind,
    pub(super) pool: u32,
    /// The stream it was made for.
    pub(super) stream: StreamId,
    pub(super) first: u32,
    /// Ticks and milliseconds when it last became wholly free.
    pub(super) idle_since: (u64, u64),
    pub(super) end: End,
}

/// What one kind of request searches.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) pool: u32,
    pub(super) stream: StreamId,
    pub(super) kind: Kind,
    /// The least remainder of a block that is worth keeping.
    pub(super) min_remainder: usize,
    pub(super) partial: Bins,
    pub(super) whole: Bins,
}

/// All segments and blocks of an allocator, and the statistics over them.
pub(super) struct Heap {
    pub(super) rules: Arc<Rules>,
    /// Memory pools whose blocks are never split.
    pub(super) unsplit_pools: Vec<u32>,
    pub(super) table: Vec<Entry>,
    vacant: Vec<u32>,
    pub(super) segments: Vec<Option<Held>>,
    pub(super) vacant_segments: Vec<u32>,
    pub(super) arenas: Vec<Arena>,
    vacant_arenas: Vec<u32>,
    arena_of: HashMap<(u32, StreamId, Kind), u32>,
    pub(super) stats: Counters,
    pub(super) history: History,
    /// Where in the program live blocks were handed out, while that is recorded.
    pub(super) contexts: HashMap<u32, Context>,
    /// The block that was given back last, where it may be taken as it is; to the table it is live.
    last: u32,
    /// Blocks given back so far: each with work behind it that may not be done.
    pub(super) given_back: u64,
    /// Searches so far: the clock of garbage collection.
    pub(super) ticks: u64,
    /// Milliseconds since the allocator was made, as its owner last said.
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
            last: NONE,
            given_back: 0,
            ticks: 0,
            now: 0,
        };
        for kind in [Kind::Small, Kind::Large] {
            heap.other_arena(0, StreamId::DEFAULT, kind);
        }
        heap
    }

    /// The arena of a pool, a stream and a kind; the default pool's on the default stream are 0 and 1.
    #[inline(always)]
    pub(super) fn arena(&mut self, pool: u32, stream: StreamId, kind: Kind) -> u32 {
        if pool == 0 && stream == StreamId::DEFAULT {
            return kind as u32; // almost every request's
        }
        self.other_arena(pool, stream, kind)
    }

    #[cold]
    fn other_arena(&mut self, pool: u32, stream: StreamId, kind: Kind) -> u32 {
        if let Some(&arena) = self.arena_of.get(&(pool, stream, kind)) {
            return arena;
        }
        let min_remainder =
            if self.unsplit_pools.contains(&pool) { usize::MAX } else { self.rules.min_remainder(kind) };
        let made = Arena { pool, stream, kind, min_remainder, partial: Bins::new(), whole: Bins::new() };
        let arena = self.vacant_arenas.pop().unwrap_or(self.arenas.len() as u32);
        match self.arenas.get_mut(arena as usize) {
            Some(vacant) => *vacant = made,
            None => self.arenas.push(made),
        }
        self.arena_of.insert((pool, stream, kind), arena);
        arena
    }

    /// Takes an arena that no block belongs to out of use; its number serves another.
    pub(super) fn retire_arena(&mut self, at: u32) {
        let arena = &mut self.arenas[at as usize];
        self.arena_of.remove(&(arena.pool, arena.stream, arena.kind));
        arena.pool = NOWHERE;
        self.vacant_arenas.push(at);
    }

    /// A free block of the arena for `size` bytes, which is not taken yet. Unused segments larger than `most_to_open` says
    /// are left alone.
    #[inline(always)]
    pub(super) fn find(
        &self,
        arena: u32,
        size: usize,
        search: Search,
        most_to_open: impl FnOnce() -> usize,
    ) -> Option<u32> {
        let arena = &self.arenas[arena as usize];
        let class = Bins::class_of(size);
        let look = |bins: &Bins| match search {
            Search::Quick => bins.find(&self.table, size, class),
            Search::Thorough => bins.find_best(&self.table, size),
        };
        let bytes = |id: u32| self.table[id as usize].size();
        let allowed = |&(id, _): &(u32, usize)| self.rules.may_serve(arena.kind, bytes(id), size);
        let part = look(&arena.partial).filter(allowed);
        if arena.whole.is_empty() || part.is_some_and(|(_, fit)| fit == class) {
            return part.map(|(id, _)| id); // nothing fits better
        }
        let whole = look(&arena.whole).filter(allowed);
        match (part, whole) {
            (Some((part, fit)), Some((_, class))) if class > fit => Some(part),
            (part, Some((whole, _))) if bytes(whole) > most_to_open() => part.map(|(id, _)| id),
            (part, whole) => whole.or(part).map(|(id, _)| id),
        }
    }

    /// Hands out a free block found for `size` bytes: splits off what is left. Gives the entry of what is handed out.
    #[inline(always)]
    pub(super) fn take(&mut self, id: u32, size: usize, requested: usize) -> u32 {
        let spare = self.spare();
        let Heap { table, vacant, arenas, rules, stats, .. } = self;
        let table = &mut table[..];
        let found = table[id as usize];
        let arena = &mut arenas[found.arena() as usize];
        let (length, whole) = (found.size(), found.is_whole());
        let bins = if whole { &mut arena.whole } else { &mut arena.partial };
        bins.remove(table, id);
        let mut split = Split { blocks: i64::from(whole) - 1, bytes: if whole { 0 } else { -(length as i64) } };
        let (mut taken, mut given) = (id, length);
        if length - size >= arena.min_remainder && rules.may_split_for(size) {
            vacant.pop(); // the spare one
            // From both ends of a segment, so that what is left over stays in one piece between them.
            let high = (found.offset() > 0) & rules.both_ends;
            let free = if high { id } else { spare };
            (taken, given) = (if high { spare } else { id }, size);
            cut(table, id, if high { length - size } else { size }, spare);
            arena.partial.insert(table, free);
            split.blocks += 1;
            split.bytes += (length - size) as i64;
        }
        table[taken as usize].set_usage(Use::Live);
        stats.taken(arena.kind, given, requested);
        stats.split_changed(arena.kind, split);
        taken
    }

    /// Hands out `size` bytes at `offset`, which adjoining free blocks of one segment, given in order, cover. The block
    /// belongs to `arena` from now on. Gives it and the streams that the parts belonged to.
    pub(super) fn take_at(
        &mut self,
        parts: &[u32],
        (offset, size): (usize, usize),
        arena: u32,
        requested: usize,
    ) -> (u32, Vec<StreamId>) {
        let (mut split, mut streams, mut taken) = (Split::default(), Vec::new(), NONE);
        for &part in parts {
            self.take_free(part, &mut split);
            let found = self.table[part as usize];
            streams.push(self.arenas[found.arena() as usize].stream);
            let mut inside = part;
            if found.offset() < offset {
                inside = self.split(part, offset - found.offset());
                self.put_free(part, &mut split);
            }
            let (start, length) = (self.table[inside as usize].offset(), self.table[inside as usize].size());
            if start + length > offset + size {
                let rest = self.split(inside, offset + size - start);
                self.put_free(rest, &mut split);
            }
            self.table[inside as usize].set_usage(Use::Live);
            if taken == NONE {
                taken = inside;
            } else {
                self.absorb_next(taken);
            }
        }
        self.table[taken as usize].set_arena(arena);
        let kind = self.arenas[arena as usize].kind;
        self.stats.taken(kind, size, requested);
        self.stats.split_changed(kind, split);
        (taken, streams)
    }

    /// Cuts a block that is in no bin after `size` bytes. Gives the second part.
    pub(super) fn split(&mut self, id: u32, size: usize) -> u32 {
        let rest = self.spare();
        self.vacant.pop();
        cut(&mut self.table, id, size, rest);
        rest
    }

    /// Gives a block back that no other stream uses.
    #[inline(always)]
    pub(super) fn give_back(&mut self, id: u32, requested: usize) {
        self.given_back += 1;
        self.record_free(id, requested);
        let (kind, size) = self.kind_and_size(id);
        self.stats.given_back(kind, size, requested);
        self.release(id);
    }

    /// As [`give_back`](Self::give_back), but leaves the block as it is until the next call: most often the next request is
    /// for its size. Nobody but who takes it may look at the table before [`merge_last_freed`](Self::merge_last_freed).
    #[inline(always)]
    pub(super) fn give_back_last(&mut self, id: u32, requested: usize) {
        self.merge_last_freed();
        self.given_back += 1;
        self.record_free(id, requested);
        let (kind, size) = self.kind_and_size(id);
        let Entry { prev, next, .. } = self.table[id as usize];
        prefetch(&self.table, next);
        prefetch(&self.table, prev);
        self.stats.given_back(kind, size, requested);
        self.last = id;
        if !self.rules.is_adaptive() {
            self.merge_it(); // PyTorch merges it first, and then looks for the best fit
        }
    }

    /// Makes the block that was given back last free, if it has not been taken.
    #[inline]
    pub(super) fn merge_last_freed(&mut self) {
        if self.last != NONE {
            self.merge_it();
        }
    }

    #[inline(never)]
    fn merge_it(&mut self) {
        let id = std::mem::replace(&mut self.last, NONE);
        self.release(id);
    }

    #[inline(always)]
    fn kind_and_size(&self, id: u32) -> (Kind, usize) {
        let entry = &self.table[id as usize];
        (self.arenas[entry.arena() as usize].kind, entry.size())
    }

    #[inline(always)]
    fn release(&mut self, id: u32) {
        let kind = self.kind_and_size(id).0;
        let split = self.set_free(id);
        self.stats.split_changed(kind, split);
    }

    /// Hands out the block that was given back last if it is the arena's and of just this size; else that one is free from
    /// now on.
    #[inline(always)]
    pub(super) fn take_last(&mut self, arena: u32, size: usize, requested: usize) -> Option<u32> {
        let id = std::mem::replace(&mut self.last, NONE);
        let entry = &self.table[id as usize]; // that of none has no bytes
        if (entry.size() == size) & (entry.arena() == arena) {
            self.stats.taken(self.arenas[arena as usize].kind, size, requested);
            return Some(id);
        }
        if id != NONE {
            self.release(id);
        }
        None
    }

    /// Gives a block back that another stream may be using: it counts as active until [`settle`](Self::settle).
    pub(super) fn give_back_pending(&mut self, id: u32, requested: usize) {
        self.given_back += 1;
        self.record(TraceAction::FreeRequested, id, requested);
        let (kind, size) = self.kind_and_size(id);
        self.table[id as usize].set_usage(Use::Pending);
        self.stats.pending(kind, size, requested);
    }

    /// Makes a pending block free, which was handed out for `requested` bytes.
    pub(super) fn settle(&mut self, id: u32, requested: usize) {
        self.record(TraceAction::FreeCompleted, id, requested);
        let (kind, size) = self.kind_and_size(id);
        let split = self.set_free(id);
        self.stats.settled(kind, size, split);
    }

    /// Hands out a pending block as it is, last handed out for `before` bytes: its new owner waits for its streams.
    pub(super) fn take_pending(&mut self, id: u32, before: usize, requested: usize) {
        self.record(TraceAction::FreeCompleted, id, before);
        let (kind, size) = self.kind_and_size(id);
        self.table[id as usize].set_usage(Use::Live);
        self.stats.retaken(kind, size, requested);
    }

    /// Moves a free block to another arena of the same pool and merges it there.
    pub(super) fn rehome(&mut self, id: u32, arena: u32) {
        let mut split = Split::default();
        self.take_free(id, &mut split);
        self.table[id as usize].set_arena(arena);
        let Split { blocks, bytes } = self.set_free(id);
        let split = Split { blocks: split.blocks + blocks, bytes: split.bytes + bytes };
        self.stats.split_changed(self.arenas[arena as usize].kind, split);
    }

    /// Makes a block free, and one with its free neighbours of the same arena.
    #[inline(always)]
    pub(super) fn set_free(&mut self, id: u32) -> Split {
        let Heap { table, vacant, arenas, segments, .. } = self;
        let table = &mut table[..];
        let Entry { segment, prev, next, .. } = table[id as usize];
        let at = table[id as usize].arena();
        let arena = &mut arenas[at as usize];
        let mut split = Split::default();
        table[id as usize].set_usage(Use::Free);
        let mut free = id;
        // A neighbour is not all of its segment: it is among the partial ones. The entry of no block is vacant.
        if table[next as usize].is_free_in(at) {
            arena.partial.remove(table, next);
            split.blocks -= 1;
            split.bytes -= absorb(table, id, next) as i64;
            vacant.push(next);
        }
        if table[prev as usize].is_free_in(at) {
            arena.partial.remove(table, prev);
            split.blocks -= 1;
            split.bytes -= table[prev as usize].size() as i64;
            absorb(table, prev, id);
            vacant.push(id);
            free = prev;
        }
        let entry = &table[free as usize];
        if entry.is_whole() {
            arena.whole.insert(table, free);
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

    #[inline(always)]
    pub(super) fn put_free(&mut self, id: u32, split: &mut Split) {
        let entry = self.table[id as usize];
        let arena = &mut self.arenas[entry.arena() as usize];
        if entry.is_whole() {
            arena.whole.insert(&mut self.table, id);
            if let Some(held) = &mut self.segments[entry.segment as usize] {
                held.idle_since = (self.ticks, self.now);
            }
        } else {
            arena.partial.insert(&mut self.table, id);
            split.blocks += 1;
            split.bytes += entry.size() as i64;
        }
    }

    #[inline(always)]
    pub(super) fn take_free(&mut self, id: u32, split: &mut Split) {
        let entry = self.table[id as usize];
        let arena = &mut self.arenas[entry.arena() as usize];
        if entry.is_whole() {
            arena.whole.remove(&mut self.table, id);
        } else {
            arena.partial.remove(&mut self.table, id);
            split.blocks -= 1;
            split.bytes -= entry.size() as i64;
        }
    }

    /// Joins a block with the one after it, which leaves the table.
    pub(super) fn absorb_next(&mut self, id: u32) {
        let gone = self.table[id as usize].next;
        absorb(&mut self.table, id, gone);
        self.vacant.push(gone);
    }

    pub(super) fn vacate(&mut self, id: u32) {
        self.table[id as usize].set_usage(Use::Vacant);
        self.vacant.push(id);
    }

    pub(super) fn insert(&mut self, entry: Entry) -> u32 {
        let id = self.spare();
        self.vacant.pop();
        self.table[id as usize] = entry;
        id
    }

    /// The vacant entry that will be used next.
    #[inline(always)]
    fn spare(&mut self) -> u32 {
        match self.vacant.last() {
            Some(&id) => id,
            None => self.more_entries(),
        }
    }

    #[cold]
    fn more_entries(&mut self) -> u32 {
        let first = self.table.len() as u32;
        assert!(self.table.len() + ENTRIES <= MAX_ENTRIES, "fewer blocks than that fit in memory");
        self.table.resize(self.table.len() + ENTRIES, Entry::VACANT);
        self.vacant.extend((first..first + ENTRIES as u32).rev());
        first
    }
}
