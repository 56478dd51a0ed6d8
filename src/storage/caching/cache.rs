//! Per-thread caches of recently freed small blocks, which serve requests without the allocator's lock.
//!
//! To the allocator a cached block is live: the block is in no bin and is not merged. Before a request fails, all caches are emptied, so no
//! cached block can cause an out-of-memory error. Threads share 64 caches by thread number, each behind a lock that is rarely contended.

use std::array;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::super::block::Slot;
use super::super::counters::{BlockAmounts, ThreadCacheDeltas};
use super::super::thread;
use super::policy::{BLOCKS_PER_SIZE, CACHE_COUNT, MAX_CACHED_PART, MAX_REFUSALS};
use super::sync::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Mutex, Ordering::Relaxed, lock};

/// Blocks of 1 to this many units are cached. The unit is the alignment.
const CACHED_SIZE_COUNT: usize = BITMAP_WORDS * 64;
/// Number of `u64` words of the bitmap of cached sizes.
const BITMAP_WORDS: usize = if cfg!(loom) { 1 } else { 2 };

/// A cached block: its slot and its table entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedBlock {
    pub(super) slot: NonNull<Slot>,
    pub(super) id: u32,
}

// SAFETY: the pointee consists of atomics and a lock, and lives as long as the allocator.
unsafe impl Send for CachedBlock {}

/// The outcome of [`ThreadCaches::put`], which offers a freed block to a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PutOutcome {
    Kept,
    Refused,
    /// Refused, as were [`MAX_REFUSALS`] blocks since the cache last served a request: the cache should be emptied.
    Stale,
}

/// The blocks of one cache and their counts, guarded by the cache's lock.
#[derive(Debug)]
struct Contents {
    counts: [u8; CACHED_SIZE_COUNT],
    blocks: [[Option<CachedBlock>; BLOCKS_PER_SIZE]; CACHED_SIZE_COUNT],
    bytes: usize,
    /// Number of blocks that the cache has refused since it last served a request.
    refused: usize,
    increases: BlockAmounts,
}

/// One thread cache, aligned so that neighbours do not share cache lines.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct ThreadCache {
    /// Bitmap of the sizes of which a block is cached. Like the fields below, read without the lock and written under
    /// it. The last word, for sizes that are never cached, stays 0.
    occupied: [AtomicU64; BITMAP_WORDS + 1],
    /// Changes in the number of live blocks, their bytes and their requested bytes since the cache was last emptied.
    change: [AtomicI64; 3],
    /// The greatest `change` since the allocator last read it. The allocator may read without the lock, so statistics
    /// of threads that share a cache may miss a peak.
    highest: [AtomicI64; 3],
    /// True if a block was taken from the cache since [`read_deltas`](Self::read_deltas) was last called.
    has_new_peak: AtomicBool,
    contents: Mutex<Contents>,
}

impl ThreadCache {
    fn new() -> Box<ThreadCache> {
        Box::new(ThreadCache {
            occupied: array::from_fn(|_| AtomicU64::new(0)),
            change: array::from_fn(|_| AtomicI64::new(0)),
            highest: array::from_fn(|_| AtomicI64::new(0)),
            has_new_peak: AtomicBool::new(false),
            contents: Mutex::new(Contents {
                counts: [0; CACHED_SIZE_COUNT],
                blocks: [[None; BLOCKS_PER_SIZE]; CACHED_SIZE_COUNT],
                bytes: 0,
                refused: 0,
                increases: [0; 3],
            }),
        })
    }

    /// Returns the change since the cache was last emptied. If a block was taken since the last call, also returns the peak of the
    /// change in that time.
    #[inline(always)]
    pub(super) fn read_deltas(&self) -> (BlockAmounts, Option<BlockAmounts>) {
        let change: BlockAmounts = array::from_fn(|i| self.change[i].load(Relaxed));
        let has_new_peak = self.has_new_peak.load(Relaxed).then(|| {
            self.has_new_peak.store(false, Relaxed);
            array::from_fn(|i| self.highest[i].load(Relaxed))
        });
        (0..3).for_each(|i| self.highest[i].store(change[i], Relaxed));
        (change, has_new_peak)
    }

    /// Removes all blocks and resets the deltas. Returns the deltas, and appends the table entries of the blocks to `ids`.
    fn drain(&self, ids: &mut Vec<u32>) -> ThreadCacheDeltas {
        let mut guard = lock(&self.contents);
        let contents = &mut *guard;
        for (word, first) in self.occupied.iter().zip((0..).step_by(64)) {
            let mut left = word.swap(0, Relaxed);
            while left != 0 {
                let at = first + left.trailing_zeros() as usize;
                left &= left - 1;
                let count = usize::from(std::mem::take(&mut contents.counts[at]));
                ids.extend(contents.blocks[at][..count].iter().flatten().map(|cached| cached.id));
            }
        }
        (contents.bytes, contents.refused) = (0, 0);
        let take = |amounts: &[AtomicI64; 3]| array::from_fn(|i| amounts[i].swap(0, Relaxed));
        let increases = std::mem::take(&mut contents.increases);
        ThreadCacheDeltas { change: take(&self.change), highest: take(&self.highest), increases }
    }
}

/// The thread caches of one allocator.
#[derive(Debug)]
pub(super) struct ThreadCaches {
    /// The caches. Each is created when one of its threads first frees a block.
    shards: [OnceLock<Box<ThreadCache>>; CACHE_COUNT],
    /// Bytes that one cache may hold (0 turns all caches off), and the size of the largest block that it keeps.
    capacity: AtomicUsize,
    largest: AtomicUsize,
    /// log2 of the alignment, which is the unit of cached sizes.
    shift: u32,
}

/// Returns the index of this thread's cache.
#[inline]
fn this_thread_index() -> usize {
    if cfg!(loom) { 0 } else { thread::number() % CACHE_COUNT }
}

impl ThreadCaches {
    /// Creates empty caches of at most `capacity` bytes each.
    pub(super) fn new(capacity: usize, alignment: usize) -> ThreadCaches {
        let shards = array::from_fn(|_| OnceLock::new());
        let shift = alignment.trailing_zeros();
        let caches = ThreadCaches { shards, capacity: AtomicUsize::new(0), largest: AtomicUsize::new(0), shift };
        caches.set_capacity(capacity);
        caches
    }

    /// Sets the capacity of each cache in bytes; 0 turns the caches off. Blocks that are already cached stay in the caches until
    /// these are drained.
    pub(super) fn set_capacity(&self, bytes: usize) {
        self.capacity.store(bytes, Relaxed);
        self.largest.store((bytes / MAX_CACHED_PART).min(CACHED_SIZE_COUNT << self.shift), Relaxed);
    }

    /// Returns the largest block size, in bytes, that the caches currently keep.
    pub(super) fn largest(&self) -> usize {
        self.largest.load(Relaxed)
    }

    /// Returns this thread's cache, or `None` if the cache was not created yet.
    #[inline(always)]
    pub(super) fn of_this_thread(&self) -> Option<&ThreadCache> {
        self.shards[this_thread_index()].get().map(|shard| &**shard)
    }

    /// Takes a block of exactly `size` bytes from this thread's cache, now allocated for `requested` bytes.
    #[inline(always)]
    pub(super) fn get(&self, shard: &ThreadCache, size: usize, requested: usize) -> Option<CachedBlock> {
        // A single branch tests both whether the size is cacheable and whether a block is cached, because two branches would be
        // mispredicted more often.
        let at = ((size >> self.shift) - 1).min(CACHED_SIZE_COUNT);
        let (word, bit) = (&shard.occupied[at / 64], 1 << (at % 64));
        if word.load(Relaxed) & bit == 0 {
            return None;
        }
        let mut guard = lock(&shard.contents);
        let contents = &mut *guard;
        let left = contents.counts[at].checked_sub(1)?;
        let cached = contents.blocks[at][usize::from(left)]?;
        contents.counts[at] = left;
        if left == 0 {
            word.store(word.load(Relaxed) & !bit, Relaxed);
        }
        contents.bytes -= size;
        contents.refused = 0;
        for (i, by) in [1, size as i64, requested as i64].into_iter().enumerate() {
            let change = shard.change[i].load(Relaxed) + by;
            shard.change[i].store(change, Relaxed);
            shard.highest[i].store(change.max(shard.highest[i].load(Relaxed)), Relaxed);
            contents.increases[i] += by;
        }
        shard.has_new_peak.store(true, Relaxed);
        Some(cached)
    }

    /// Caches a block of the default stream that was allocated for `requested` bytes, if the cache is not full.
    #[inline(always)]
    pub(super) fn put(&self, shard: &ThreadCache, cached: CachedBlock, size: usize, requested: usize) -> PutOutcome {
        if size > self.largest() {
            return PutOutcome::Refused;
        }
        let at = (size >> self.shift) - 1;
        let mut guard = lock(&shard.contents);
        let contents = &mut *guard;
        let count = usize::from(contents.counts[at]);
        // The capacity is checked again under the lock, because a thread that turns the caches off sets the capacity to 0 and then
        // empties each cache under its lock.
        if count == BLOCKS_PER_SIZE || contents.bytes + size > self.capacity.load(Relaxed) {
            contents.refused += 1;
            return if contents.refused < MAX_REFUSALS { PutOutcome::Refused } else { PutOutcome::Stale };
        }
        contents.blocks[at][count] = Some(cached);
        contents.counts[at] += 1;
        let word = &shard.occupied[at / 64];
        word.store(word.load(Relaxed) | 1 << (at % 64), Relaxed);
        contents.bytes += size;
        for (i, by) in [1, size as i64, requested as i64].into_iter().enumerate() {
            shard.change[i].store(shard.change[i].load(Relaxed) - by, Relaxed);
        }
        PutOutcome::Kept
    }

    /// Creates this thread's cache. Must not run concurrently with turning all caches off.
    pub(super) fn create_for_this_thread(&self) {
        self.shards[this_thread_index()].get_or_init(ThreadCache::new);
    }

    /// Empties all caches. Returns the table entries of their blocks, and their deltas.
    pub(super) fn drain(&self) -> (Vec<u32>, Vec<ThreadCacheDeltas>) {
        let mut ids = Vec::new();
        let deltas = self.shards.iter().filter_map(OnceLock::get).map(|shard| shard.drain(&mut ids)).collect();
        (ids, deltas)
    }

    /// Empties this thread's cache. Returns the table entries of its blocks, and its deltas.
    pub(super) fn drain_this_thread(&self) -> (Vec<u32>, Vec<ThreadCacheDeltas>) {
        let mut ids = Vec::new();
        let deltas = self.shards[this_thread_index()].get().map(|shard| shard.drain(&mut ids)).into_iter().collect();
        (ids, deltas)
    }
}
