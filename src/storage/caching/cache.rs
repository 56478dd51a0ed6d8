//! A few recently freed small blocks a thread, handed out again without the allocator's lock.
//!
//! To the allocator a cached block is live: it is in no bin and merges with nothing. Whoever needs memory that is not
//! there empties all caches first, so that they cost nothing in the end. Threads share 64 caches by number, each behind
//! a lock that is almost always free.

use std::array;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::super::block::Slot;
use super::super::counters::{Amounts, Deltas};
use super::sync::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Mutex, Ordering::Relaxed, lock};

const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };
/// Blocks of one size.
const DEPTH: usize = if cfg!(loom) { 1 } else { 8 };
/// Sizes that are cached: 1 to this many units of the alignment.
const SIZES: usize = WORDS * 64;
const WORDS: usize = if cfg!(loom) { 1 } else { 2 };
/// A cache that refused so many blocks and served nothing meanwhile holds sizes that nobody asks for any more.
const PATIENCE: usize = 64;

/// A cached block: the slot and the number of its entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cached {
    pub(super) slot: NonNull<Slot>,
    pub(super) id: u32,
}

// SAFETY: a pointer to atomics and a lock that live as long as the allocator.
unsafe impl Send for Cached {}

/// What became of a block that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Kept,
    Refused,
    /// There was no room, and there has been none for long: the cache should be emptied.
    Stale,
}

#[derive(Debug)]
struct Contents {
    counts: [u8; SIZES],
    blocks: [[Option<Cached>; DEPTH]; SIZES],
    bytes: usize,
    /// Blocks refused since a request was last served.
    refused: usize,
    increases: Amounts,
}

/// Apart from its neighbours by two cache lines.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Shard {
    /// Sizes of which there are blocks, read without the lock: a bit each. Written under it, as are the others. The last
    /// word, that of all sizes that are never kept, stays 0.
    occupied: [AtomicU64; WORDS + 1],
    /// By how much what is allocated has changed since the cache was last emptied.
    change: [AtomicI64; 3],
    /// The greatest `change` since the allocator last looked. It may look without the lock: threads that share a cache
    /// may then miss a peak.
    highest: [AtomicI64; 3],
    /// Whether anything was taken out since then.
    raised: AtomicBool,
    contents: Mutex<Contents>,
}

impl Shard {
    fn new() -> Box<Shard> {
        Box::new(Shard {
            occupied: array::from_fn(|_| AtomicU64::new(0)),
            change: array::from_fn(|_| AtomicI64::new(0)),
            highest: array::from_fn(|_| AtomicI64::new(0)),
            raised: AtomicBool::new(false),
            contents: Mutex::new(Contents {
                counts: [0; SIZES],
                blocks: [[None; DEPTH]; SIZES],
                bytes: 0,
                refused: 0,
                increases: [0; 3],
            }),
        })
    }

    /// By how much it has changed what is allocated since it was last emptied; and at most since the last call, if that may
    /// be more than it was then.
    #[inline(always)]
    pub(super) fn changes(&self) -> (Amounts, Option<Amounts>) {
        let change: Amounts = array::from_fn(|i| self.change[i].load(Relaxed));
        let raised = self.raised.load(Relaxed).then(|| {
            self.raised.store(false, Relaxed);
            array::from_fn(|i| self.highest[i].load(Relaxed))
        });
        (0..3).for_each(|i| self.highest[i].store(change[i], Relaxed));
        (change, raised)
    }

    /// Takes everything out: the blocks, which are nobody's now, and what the cache did.
    fn drain(&self, ids: &mut Vec<u32>) -> Deltas {
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
        Deltas { change: take(&self.change), highest: take(&self.highest), increases }
    }
}

/// The caches of one allocator.
#[derive(Debug)]
pub(super) struct ThreadCaches {
    /// Made when their threads first give a block back.
    shards: [OnceLock<Box<Shard>>; SHARDS],
    /// Bytes a cache may hold, and the largest size it takes; 0 turns all of them off.
    most: AtomicUsize,
    largest: AtomicUsize,
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
        let shards = array::from_fn(|_| OnceLock::new());
        let shift = alignment.trailing_zeros();
        let caches = ThreadCaches { shards, most: AtomicUsize::new(0), largest: AtomicUsize::new(0), shift };
        caches.set_most(most);
        caches
    }

    /// Turns the caches on (to this many bytes) or off (0). What they hold stays until they are drained.
    pub(super) fn set_most(&self, bytes: usize) {
        self.most.store(bytes, Relaxed);
        self.largest.store((bytes / 16).min(SIZES << self.shift), Relaxed);
    }

    /// The largest size that is kept, whatever is set.
    pub(super) fn largest(&self) -> usize {
        self.largest.load(Relaxed)
    }

    /// This thread's cache, once it has one.
    #[inline(always)]
    pub(super) fn own(&self) -> Option<&Shard> {
        self.shards[index()].get().map(|shard| &**shard)
    }

    /// A block of exactly this size that this thread, whose cache it is, freed; now handed out for `requested` bytes.
    #[inline(always)]
    pub(super) fn get(&self, shard: &Shard, size: usize, requested: usize) -> Option<Cached> {
        // One question for both, whether such sizes are kept and whether one is there: few answers can be foreseen.
        let at = ((size >> self.shift) - 1).min(SIZES);
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
        shard.raised.store(true, Relaxed);
        Some(cached)
    }

    /// Keeps a block of the default stream's that was handed out for `requested` bytes, if there is room.
    #[inline(always)]
    pub(super) fn put(&self, shard: &Shard, cached: Cached, size: usize, requested: usize) -> Put {
        if size > self.largest() {
            return Put::Refused;
        }
        let at = (size >> self.shift) - 1;
        let mut guard = lock(&shard.contents);
        let contents = &mut *guard;
        let count = usize::from(contents.counts[at]);
        // Looked at again under the lock: who turns the caches off empties them then.
        if count == DEPTH || contents.bytes + size > self.most.load(Relaxed) {
            contents.refused += 1;
            return if contents.refused < PATIENCE { Put::Refused } else { Put::Stale };
        }
        contents.blocks[at][count] = Some(cached);
        contents.counts[at] += 1;
        let word = &shard.occupied[at / 64];
        word.store(word.load(Relaxed) | 1 << (at % 64), Relaxed);
        contents.bytes += size;
        for (i, by) in [1, size as i64, requested as i64].into_iter().enumerate() {
            shard.change[i].store(shard.change[i].load(Relaxed) - by, Relaxed);
        }
        Put::Kept
    }

    /// Makes this thread's cache. Who turns all caches off and empties them must not run beside.
    pub(super) fn make_own(&self) {
        self.shards[index()].get_or_init(Shard::new);
    }

    /// Empties all caches: gives their blocks, and what they did.
    pub(super) fn drain(&self) -> (Vec<u32>, Vec<Deltas>) {
        let mut ids = Vec::new();
        let deltas = self.shards.iter().filter_map(OnceLock::get).map(|shard| shard.drain(&mut ids)).collect();
        (ids, deltas)
    }

    /// Empties this thread's cache.
    pub(super) fn drain_own(&self) -> (Vec<u32>, Vec<Deltas>) {
        let mut ids = Vec::new();
        let deltas = self.shards[index()].get().map(|shard| shard.drain(&mut ids)).into_iter().collect();
        (ids, deltas)
    }
}
