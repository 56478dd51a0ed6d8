//! Segments cut into blocks: which bytes are taken, which are free, who lies beside whom.
//!
//! Pure bookkeeping over (segment id, offset, size). The blocks of a segment tile it: a doubly linked list in address
//! order, in which no two neighbours are free. Free blocks are kept in one ordered set a pool, so the best fit (the
//! smallest that is large enough, then the lowest address) is found in O(log n), and splitting and merging cost the same.

use std::collections::BTreeSet;

/// Sizes are multiples of this; so are offsets, hence every block is aligned to it.
pub(super) const MIN_BLOCK: usize = 512;
/// Requests up to this size share small segments.
pub(super) const SMALL: usize = 1 << 20;
const SMALL_SEGMENT: usize = 2 << 20;
const LARGE_SEGMENT: usize = 20 << 20;
const MIN_OWN_SEGMENT: usize = 10 << 20;
const SEGMENT_STEP: usize = 2 << 20;

/// Names a segment; never reused, growing with age.
pub(super) type SegmentId = u64;

/// Names a block in the table while it exists.
pub(super) type BlockId = u32;
const NONE: BlockId = BlockId::MAX;

/// Small and large requests live apart, so that short-lived small ones do not pin large segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pool {
    Small,
    Large,
}

impl Pool {
    /// The pool that serves a rounded size.
    pub(super) fn of(size: usize) -> Pool {
        if size <= SMALL { Pool::Small } else { Pool::Large }
    }

    pub(super) fn other(self) -> Pool {
        match self {
            Pool::Small => Pool::Large,
            Pool::Large => Pool::Small,
        }
    }

    /// Whether what remains of a block is worth keeping as a block of its own.
    fn keeps(self, remaining: usize) -> bool {
        match self {
            Pool::Small => remaining >= MIN_BLOCK,
            Pool::Large => remaining > SMALL,
        }
    }
}

/// The bytes a request of `bytes > 0` takes; `None` where that overflows.
pub(super) fn round_size(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(MIN_BLOCK)
}

/// The size of the segment made for a rounded size: shared up to 10 MiB, its own beyond.
pub(super) fn segment_size(size: usize) -> Option<usize> {
    if size <= SMALL {
        Some(SMALL_SEGMENT)
    } else if size < MIN_OWN_SEGMENT {
        Some(LARGE_SEGMENT)
    } else {
        size.checked_next_multiple_of(SEGMENT_STEP)
    }
}

/// A block: a run of bytes of one segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) segment: SegmentId,
    pub(super) pool: Pool,
    pub(super) offset: usize,
    pub(super) size: usize,
    /// What was asked for; 0 exactly when the block is free.
    pub(super) requested: usize,
    prev: BlockId,
    next: BlockId,
}

impl Block {
    pub(super) fn is_free(&self) -> bool {
        self.requested == 0
    }

    /// Whether the block is only a part of its segment.
    pub(super) fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

/// The order of a free set: size, then address.
type Key = (usize, SegmentId, usize, BlockId);

/// What a change did to the free parts of split segments: for the statistics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
}

/// The table of blocks and the free sets of both pools.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    table: Vec<Block>,
    vacant: Vec<BlockId>,
    small: BTreeSet<Key>,
    large: BTreeSet<Key>,
}

impl Blocks {
    /// Adds a segment: one free block that is not split.
    pub(super) fn add_segment(&mut self, segment: SegmentId, pool: Pool, size: usize) {
        let block = Block { segment, pool, offset: 0, size, requested: 0, prev: NONE, next: NONE };
        let id = self.insert(block);
        self.put_free(id, &mut Split::default());
    }

    /// Takes the best fitting free block of the pool for a rounded `size` and splits off what is left.
    pub(super) fn take(&mut self, pool: Pool, size: usize, requested: usize) -> Option<(BlockId, Split)> {
        let key = *self.free(pool).range((size, 0, 0, 0)..).next()?;
        let id = key.3;
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        let found = self.table[id as usize];
        let remaining = found.size - size;
        if pool.keeps(remaining) {
            let offset = found.offset + size;
            let rest = self.insert(Block { offset, size: remaining, prev: id, next: found.next, ..found });
            if found.next != NONE {
                self.table[found.next as usize].prev = rest;
            }
            self.table[id as usize].next = rest;
            self.table[id as usize].size = size;
            self.put_free(rest, &mut split);
        }
        self.table[id as usize].requested = requested;
        Some((id, split))
    }

    /// Gives a block back and merges it with free neighbours.
    pub(super) fn give_back(&mut self, id: BlockId) -> Split {
        let mut split = Split::default();
        let Block { prev, next, .. } = self.table[id as usize];
        self.table[id as usize].requested = 0;
        let mut merged = id;
        if next != NONE && self.table[next as usize].is_free() {
            self.remove_free(next, &mut split);
            self.absorb_next(merged);
        }
        if prev != NONE && self.table[prev as usize].is_free() {
            self.remove_free(prev, &mut split);
            self.absorb_next(prev);
            merged = prev;
        }
        self.put_free(merged, &mut split);
        split
    }

    /// Removes every segment that is one free block and returns (id, pool, size) of each.
    pub(super) fn remove_unused_segments(&mut self) -> Vec<(SegmentId, Pool, usize)> {
        let table = &self.table;
        let unused: Vec<BlockId> = (self.small.iter().chain(&self.large))
            .map(|key| key.3)
            .filter(|&id| !table[id as usize].is_split())
            .collect();
        unused.into_iter().map(|id| self.remove_segment(id)).collect()
    }

    fn remove_segment(&mut self, id: BlockId) -> (SegmentId, Pool, usize) {
        self.remove_free(id, &mut Split::default());
        self.vacant.push(id);
        let block = self.table[id as usize];
        (block.segment, block.pool, block.size)
    }

    /// The block of this name.
    pub(super) fn get(&self, id: BlockId) -> Block {
        self.table[id as usize]
    }

    /// The largest free block of both pools: what fragmentation leaves for one request.
    pub(super) fn largest_free(&self) -> usize {
        [&self.small, &self.large].into_iter().filter_map(|set| set.last()).map(|key| key.0).max().unwrap_or(0)
    }

    fn free(&mut self, pool: Pool) -> &mut BTreeSet<Key> {
        match pool {
            Pool::Small => &mut self.small,
            Pool::Large => &mut self.large,
        }
    }

    fn key(&self, id: BlockId) -> (Pool, Key) {
        let b = &self.table[id as usize];
        (b.pool, (b.size, b.segment, b.offset, id))
    }

    fn put_free(&mut self, id: BlockId, split: &mut Split) {
        self.count(id, 1, split);
        let (pool, key) = self.key(id);
        self.free(pool).insert(key);
    }

    fn remove_free(&mut self, id: BlockId, split: &mut Split) {
        self.count(id, -1, split);
        let (pool, key) = self.key(id);
        let was_free = self.free(pool).remove(&key);
        debug_assert!(was_free, "a free block is in its pool's set");
    }

    fn count(&self, id: BlockId, sign: i64, split: &mut Split) {
        let block = &self.table[id as usize];
        if block.is_split() {
            split.blocks += sign;
            split.bytes += sign * block.size as i64;
        }
    }

    /// Joins a block with the one after it, which leaves the table.
    fn absorb_next(&mut self, id: BlockId) {
        let gone = self.table[id as usize].next;
        let Block { size, next, .. } = self.table[gone as usize];
        let block = &mut self.table[id as usize];
        block.size += size;
        block.next = next;
        if next != NONE {
            self.table[next as usize].prev = id;
        }
        self.vacant.push(gone);
    }

    fn insert(&mut self, block: Block) -> BlockId {
        if let Some(id) = self.vacant.pop() {
            self.table[id as usize] = block;
            return id;
        }
        let id = BlockId::try_from(self.table.len()).ok().filter(|&id| id != NONE);
        self.table.push(block);
        id.expect("fewer than 2^32 blocks fit in memory")
    }
}
