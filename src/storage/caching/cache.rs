//! A few recently freed small blocks a thread, handed out again without the allocator's lock.
//!
//! To the allocator a cached block is live: it is in no bin and merges with nothing. Whoever needs memory that is not
//! there empties all caches first, so that they cost nothing in the end. Threads share 64 caches by number, each behind
//! a lock that is almost always free.

use std::array;
use std::cell::Cell;

use smallvec::SmallVec;

use super::super::allocator::Slot;
use super::super::stats::Deltas;
use super::sync::{AtomicBool, AtomicUsize, Mutex, Ordering::Relaxed, lock};
use std::ptr::NonNull;

const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };
const BUCKETS: usize = if cfg!(loom) { 1 } else { 32 };
/// Requests for other sizes after which a bucket changes to the last one.
const PATIENCE: usize = 16;
/// Blocks of one size.
const DEPTH: usize = if cfg!(loom) { 1 } else { 8 };
/// Arenas of private memory pools have this bit in [`Block::arena`](super::super::Block); large kinds the lowest.
pub(super) const PRIVATE: u32 = 1 << 31;

/// A cached block: the slot and the number of its entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cached {
    pub(super) slot: NonNull<Slot>,
    pub(super) id: u32,
}

// SAFETY: a pointer to atomics and a lock that live as long as the allocator.
unsafe impl Send for Cached {}

#[derive(Debug, Default)]
struct Bucket {
    blocks: [Option<Cached>; DEPTH],
    count: usize,
}

#[derive(Debug)]
struct Contents {
    buckets: [Bucket; BUCKETS],
    bytes: usize,
    deltas: Deltas,
}

/// Apart from its neighbours by two cache lines.
#[repr(align(128))]
#[derive(Debug)]
struct Shard {
    contents: Mutex<Contents>,
    /// What the buckets are for, read without the lock: most requests are for something else. Written by requests that
    /// found nothing, so a size is cached once it has been asked for and not before.
    keys: [AtomicUsize; BUCKETS],
    /// Requests for something else than a full bucket is for, since it last served one.
    misses: [AtomicUsize; BUCKETS],
    /// Whether there are deltas to fold.
    dirty: AtomicBool,
}

/// Entries of blocks that leave a cache.
pub(super) type Evicted = SmallVec<[u32; DEPTH]>;

/// The caches of one allocator.
#[derive(Debug)]
pub(super) struct ThreadCaches {
    shards: Box<[Shard]>,
    /// Bytes a cache may hold; 0 turns all of them off.
    most: AtomicUsize,
    /// The logarithm of the alignment: sizes are counted in units of it.
    shift: u32,
}

/// The number of this thread's cache.
#[inline]
fn index() -> usize {
    #[cfg(not(loom))]
    {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static INDEX: Cell<usize> = const { Cell::new(usize::MAX) });
        // While a thread ends its index may be gone: any will do.
        INDEX
            .try_with(|index| {
                if index.get() == usize::MAX {
                    index.set(NEXT.fetch_add(1, Relaxed) % SHARDS);
                }
                index.get()
            })
            .unwrap_or(0)
    }
    #[cfg(loom)]
    {
        loom::thread_local!(static INDEX: Cell<usize> = Cell::new(0));
        INDEX.with(Cell::get)
    }
}

impl ThreadCaches {
    /// Empty caches of at most `most` bytes each.
    pub(super) fn new(most: usize, alignment: usize) -> ThreadCaches {
        let shard = || Shard {
            contents: Mutex::new(Contents {
                buckets: array::from_fn(|_| Bucket::default()),
                bytes: 0,
                deltas: Deltas::default(),
            }),
            keys: array::from_fn(|_| AtomicUsize::new(0)),
            misses: array::from_fn(|_| AtomicUsize::new(0)),
            dirty: AtomicBool::new(false),
        };
        ThreadCaches {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            most: AtomicUsize::new(most),
            shift: alignment.trailing_zeros(),
        }
    }

    /// Whether blocks of this arena and size are cached at all: small ones of the default stream.
    #[inline]
    fn takes(&self, arena: u32, size: usize) -> bool {
        arena == 0 && size <= self.most.load(Relaxed) / 16
    }

    /// The bucket of a size, and the number that says it is for this size and arena.
    #[inline]
    fn key(&self, arena: u32, size: usize) -> (usize, usize) {
        let units = size >> self.shift;
        ((units ^ (arena as usize) << 3) % BUCKETS, units << 32 | arena as usize)
    }

    /// Turns the caches on (to this many bytes) or off (0). What they hold stays until they are drained.
    pub(super) fn set_most(&self, bytes: usize) {
        self.most.store(bytes, Relaxed);
    }

    /// A block of exactly this size that this thread freed, now handed out for `requested` bytes. Where there is none,
    /// blocks of a size that is no longer asked for may come out instead: they are the caller's to give back.
    pub(super) fn get(&self, arena: u32, size: usize, requested: usize) -> Result<Cached, Evicted> {
        if !self.takes(arena, size) {
            return Err(Evicted::new());
        }
        let shard = &self.shards[index()];
        let (at, key) = self.key(arena, size);
        if shard.keys[at].load(Relaxed) != key {
            return Err(self.miss(shard, at, key));
        }
        let mut contents = lock(&shard.contents);
        let bucket = &mut contents.buckets[at];
        if bucket.count == 0 || shard.keys[at].load(Relaxed) != key {
            return Err(Evicted::new());
        }
        bucket.count -= 1;
        let cached = bucket.blocks[bucket.count].take().ok_or_else(Evicted::new)?;
        contents.bytes -= size;
        contents.deltas.count.increase(1);
        contents.deltas.bytes.increase(size);
        contents.deltas.requested.increase(requested);
        shard.misses[at].store(0, Relaxed);
        shard.dirty.store(true, Relaxed);
        Ok(cached)
    }

    /// A request found its bucket to be another size's. After enough of them the bucket is this one's.
    fn miss(&self, shard: &Shard, at: usize, key: usize) -> Evicted {
        let misses = shard.misses[at].load(Relaxed);
        shard.misses[at].store(misses + 1, Relaxed);
        if misses < PATIENCE && shard.keys[at].load(Relaxed) != 0 {
            return Evicted::new();
        }
        let mut contents = lock(&shard.contents);
        let old = shard.keys[at].load(Relaxed);
        let bucket = &mut contents.buckets[at];
        let count = std::mem::take(&mut bucket.count);
        let evicted: Evicted = bucket.blocks[..count].iter_mut().filter_map(|b| b.take()).map(|b| b.id).collect();
        contents.bytes -= ((old >> 32) << self.shift) * evicted.len();
        shard.keys[at].store(key, Relaxed);
        shard.misses[at].store(0, Relaxed);
        evicted
    }

    /// Keeps a block that was handed out for `requested` bytes; false where there is no room.
    pub(super) fn put(&self, cached: Cached, arena: u32, size: usize, requested: usize) -> bool {
        if !self.takes(arena, size) {
            return false;
        }
        let shard = &self.shards[index()];
        let (at, key) = self.key(arena, size);
        if shard.keys[at].load(Relaxed) != key {
            return false;
        }
        let mut contents = lock(&shard.contents);
        let bucket = &mut contents.buckets[at];
        let full = bucket.count == DEPTH || shard.keys[at].load(Relaxed) != key;
        if full || contents.bytes + size > self.most.load(Relaxed) {
            return false;
        }
        let bucket = &mut contents.buckets[at];
        bucket.blocks[bucket.count] = Some(cached);
        bucket.count += 1;
        contents.bytes += size;
        contents.deltas.count.decrease(1);
        contents.deltas.bytes.decrease(size);
        contents.deltas.requested.decrease(requested);
        shard.dirty.store(true, Relaxed);
        true
    }

    /// What this thread's cache did since the last call.
    #[inline]
    pub(super) fn deltas(&self) -> Option<Deltas> {
        let shard = &self.shards[index()];
        shard.dirty.load(Relaxed).then(|| {
            let mut contents = lock(&shard.contents);
            shard.dirty.store(false, Relaxed);
            std::mem::take(&mut contents.deltas)
        })
    }

    /// Takes everything out of all caches: the blocks, which are nobody's now, and what the caches did.
    pub(super) fn drain(&self) -> (Vec<u32>, Vec<Deltas>) {
        let (mut ids, mut deltas) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let mut contents = lock(&shard.contents);
            for bucket in &mut contents.buckets {
                ids.extend(bucket.blocks[..bucket.count].iter_mut().filter_map(|b| b.take()).map(|b| b.id));
                bucket.count = 0;
            }
            contents.bytes = 0;
            if shard.dirty.swap(false, Relaxed) {
                deltas.push(std::mem::take(&mut contents.deltas));
            }
        }
        (ids, deltas)
    }
}
