//! The pool of pinned host memory.
//!
//! A device reads and writes pinned memory at the full speed of its bus, but creating pinned memory takes the driver
//! milliseconds. So blocks are created in size classes and kept. There are eight classes per power of two, so a block
//! is at most 12.5 % larger than requested, where PyTorch's powers of two waste up to 100 %. Each class has its own
//! lock, and no lock is held during calls of the [`PinnedSource`].
//!
//! A block that a transfer still uses is returned with the transfer's event. The block waits in its class until the
//! event is done; blocks of the class whose events are done earlier are reused earlier.
//!
//! All pinned memory of the process is bounded, because no other program can use it. If the bound is reached or the
//! source refuses, the caller uses ordinary memory. After the source has refused a block or the reserve, it is asked
//! again only after a number of requests, which grows with every refusal.

mod stats;
#[cfg(test)]
mod tests;

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

pub use stats::{DurationStat, PinnedStats};

use super::Failure;
use crate::device::lock;
use crate::device::opencl::Backoff;

/// The smallest class and the granularity of the reserve, in bytes: a page.
const PAGE_BYTES: usize = 4096;
/// The number of classes per power of two.
const CLASSES_PER_DOUBLING: usize = 8;

pub(crate) trait PinnedSource: Send + Sync {
    /// A piece of pinned memory, released on drop.
    type Memory: Send + Sync;
    /// An event at the end of a transfer.
    type Event: Send;

    /// Creates a piece of `bytes` bytes, a multiple of 512.
    fn create(&self, bytes: usize) -> Result<Self::Memory, Failure>;
    /// True if the transfer is done or has failed, so that it no longer uses the memory.
    fn is_done(&self, event: &Self::Event) -> bool;
    /// True if dropped memory is not released, because transfers of a lost device may never end.
    fn is_lost(&self) -> bool;
}

/// The limit of the process's pinned memory in bytes, and the bytes in use.
#[derive(Debug)]
pub(crate) struct Budget {
    cap: usize,
    taken: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(cap: usize) -> Arc<Budget> {
        Arc::new(Budget { cap, taken: AtomicUsize::new(0) })
    }

    fn take(&self, bytes: usize) -> bool {
        let more = |taken: usize| taken.checked_add(bytes).filter(|sum| *sum <= self.cap);
        self.taken.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    fn give(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Relaxed);
    }
}

/// The pinned memory of one device.
pub(crate) struct PinnedPool<S: PinnedSource> {
    source: S,
    classes: Box<[Mutex<SizeClass<S>>]>,
    /// The size of the reserve in bytes (0 for none), and the reserve once the source has created it.
    reserve_bytes: usize,
    reserve: OnceLock<Reserve<S::Memory>>,
    /// When to ask for the reserve again. Separate from `source_backoff`, because a refusal of the large reserve must not delay
    /// requests for blocks.
    reserve_backoff: Backoff,
    budget: Arc<Budget>,
    /// The size of the largest blocks that are kept when they are freed, in bytes.
    max_cached_bytes: usize,
    /// When to ask the source again after it refused a block although no unused block was left to release.
    source_backoff: Backoff,
    stats: Mutex<PinnedStats>,
}

/// The blocks of one size.
struct SizeClass<S: PinnedSource> {
    free: Vec<Piece<S::Memory>>,
    /// Blocks returned while a transfer still used them.
    in_flight: Vec<(S::Event, Piece<S::Memory>)>,
}

/// A block's memory: a piece of its own, or a part of the reserve.
struct Piece<M> {
    memory: Arc<M>,
    offset: usize,
    reserved: bool,
}

/// The reason why the source created no piece.
enum Refusal {
    ByBudget,
    BySource,
}

/// A piece created before all others. It is handed out from its start to its end and never released.
struct Reserve<M> {
    memory: Arc<M>,
    used: AtomicUsize,
}

/// Returns the smallest class for a request; `None` if its size overflows.
fn size_class(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(PAGE_BYTES).checked_next_multiple_of(PAGE_BYTES / CLASSES_PER_DOUBLING)?;
    // `bytes` is above 2^`lower` and at most twice that, so the class is one of the eight from 9/8 to 16/8 of 2^`lower`.
    let lower = (bytes - 1).ilog2();
    let steps = (bytes - (1 << lower)).div_ceil((1 << lower) / CLASSES_PER_DOUBLING);
    let class = (lower as usize * CLASSES_PER_DOUBLING + steps)
        .checked_sub(PAGE_BYTES.ilog2() as usize * CLASSES_PER_DOUBLING)?;
    (class <= (usize::BITS - 2 - PAGE_BYTES.ilog2()) as usize * CLASSES_PER_DOUBLING).then_some(class)
}

fn class_size(class: usize) -> usize {
    (PAGE_BYTES / CLASSES_PER_DOUBLING * (CLASSES_PER_DOUBLING + class % CLASSES_PER_DOUBLING))
        << (class / CLASSES_PER_DOUBLING)
}

impl<S: PinnedSource> PinnedPool<S> {
    /// Makes a pool over `source`, with a reserve of `reserve` bytes (0 for none). The reserve is created at once, or
    /// at a later request if the source or the budget refuses the reserve at first.
    pub(crate) fn new(source: S, reserve: usize, budget: Arc<Budget>) -> PinnedPool<S> {
        let last = size_class(budget.cap.max(PAGE_BYTES)).unwrap_or(0);
        let class = |_| Mutex::new(SizeClass { free: Vec::new(), in_flight: Vec::new() });
        let pool = PinnedPool {
            source,
            classes: (0..=last).map(class).collect(),
            reserve_bytes: reserve,
            reserve: OnceLock::new(),
            reserve_backoff: Backoff::default(),
            budget,
            max_cached_bytes: usize::MAX,
            source_backoff: Backoff::default(),
            stats: Mutex::default(),
        };
        pool.reserve_or_retry();
        pool
    }

    /// Releases blocks of more than `bytes` bytes, except those of the reserve, when they are freed.
    pub(crate) fn with_max_cached_bytes(mut self, bytes: usize) -> PinnedPool<S> {
        self.max_cached_bytes = bytes;
        self
    }

    /// Allocates a block of at least `bytes` bytes. Returns `None` if the caller has to use ordinary memory.
    pub(crate) fn alloc(&self, bytes: usize) -> Option<Pinned<'_, S>> {
        let class = size_class(bytes).filter(|class| *class < self.classes.len())?;
        let size = class_size(class);
        let piece = self.take_cached(class).or_else(|| self.take_from_reserve(size)).or_else(|| self.create(size))?;
        lock(&self.stats).record_allocation(size);
        Some(Pinned { pool: self, class, piece: Some(piece) })
    }

    /// Releases every unused block (`torch.cuda.host_empty_cache`), except those of the reserve.
    pub(crate) fn empty_cache(&self) {
        self.source_backoff.reset();
        self.reserve_backoff.reset();
        self.release_unused();
    }

    /// Frees the blocks whose transfers are done. Returns true if other blocks are still in use by transfers.
    pub(crate) fn free_finished(&self) -> bool {
        (0..self.classes.len()).filter(|class| self.free_finished_of_class(*class)).count() > 0 // `count`, unlike `any`, polls every class
    }

    pub(crate) fn stats(&self) -> PinnedStats {
        *lock(&self.stats)
    }

    pub(crate) fn reset_peak_stats(&self) {
        lock(&self.stats).reset_peak();
    }

    pub(crate) fn reset_accumulated_stats(&self) {
        lock(&self.stats).reset_accumulated();
    }

    fn lock(&self, class: usize) -> MutexGuard<'_, SizeClass<S>> {
        // The lock is never poisoned, because no code under it can panic.
        lock(&self.classes[class])
    }

    fn take_cached(&self, class: usize) -> Option<Piece<S::Memory>> {
        if let Some(piece) = self.lock(class).free.pop() {
            return Some(piece);
        }
        self.free_finished_of_class(class);
        self.lock(class).free.pop()
    }

    fn free_finished_of_class(&self, class: usize) -> bool {
        let in_flight = mem::take(&mut self.lock(class).in_flight);
        if in_flight.is_empty() {
            return false;
        }
        let (done, still): (Vec<_>, Vec<_>) = in_flight.into_iter().partition(|(event, _)| self.source.is_done(event));
        let (events, free): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        drop(events); // not under the lock, because releasing an event calls the driver
        let mut stats = lock(&self.stats);
        free.iter().for_each(|_| stats.record_free(class_size(class)));
        drop(stats);
        let mut locked = self.lock(class);
        locked.in_flight.extend(still);
        let is_busy = !locked.in_flight.is_empty();
        drop(locked);
        free.into_iter().for_each(|piece| self.keep_or_release(class, piece));
        is_busy
    }

    /// Keeps a freed block, unless blocks of its size are not cached.
    fn keep_or_release(&self, class: usize, piece: Piece<S::Memory>) {
        match class_size(class) > self.max_cached_bytes && !piece.reserved && !self.source.is_lost() {
            true => self.release(class_size(class), piece),
            false => self.lock(class).free.push(piece),
        }
    }

    /// Returns the reserve, and asks the source again if it refused the reserve before.
    fn reserve_or_retry(&self) -> Option<&Reserve<S::Memory>> {
        if self.reserve_bytes == 0 || self.reserve.get().is_some() {
            return self.reserve.get();
        }
        if !self.reserve_backoff.is_due() {
            return None;
        }
        let Ok(piece) = self.try_create(self.reserve_bytes) else {
            self.reserve_backoff.refused();
            return None;
        };
        if let Err(second) = self.reserve.set(Reserve { memory: piece.memory, used: AtomicUsize::new(0) }) {
            // Another thread created the reserve first, so this second reserve is released.
            self.release(self.reserve_bytes, Piece { memory: second.memory, offset: 0, reserved: false });
        }
        self.reserve.get()
    }

    fn take_from_reserve(&self, size: usize) -> Option<Piece<S::Memory>> {
        let reserve = self.reserve_or_retry()?;
        let pages = size.next_multiple_of(PAGE_BYTES);
        let room = |used: usize| used.checked_add(pages).filter(|end| *end <= self.reserve_bytes);
        let offset = reserve.used.fetch_update(Relaxed, Relaxed, room).ok()?;
        Some(Piece { memory: Arc::clone(&reserve.memory), offset, reserved: true })
    }

    /// Creates a piece, unless the source refused a piece lately and must not be asked again yet.
    fn create(&self, size: usize) -> Option<Piece<S::Memory>> {
        if !self.source_backoff.is_due() {
            return None;
        }
        let made = self.try_create(size);
        match &made {
            Ok(_) => self.source_backoff.reset(),
            Err(Refusal::BySource) => self.source_backoff.refused(),
            Err(Refusal::ByBudget) => {}
        }
        made.ok()
    }

    /// Creates a piece. If the source or the budget refuses, releases the unused blocks and tries once more.
    fn try_create(&self, size: usize) -> Result<Piece<S::Memory>, Refusal> {
        let mut refused = Refusal::ByBudget;
        for last in [false, true] {
            refused = Refusal::ByBudget;
            if self.budget.take(size) {
                let start = Instant::now();
                match self.source.create(size) {
                    Ok(memory) => {
                        lock(&self.stats).record_creation(size, start.elapsed());
                        return Ok(Piece { memory: Arc::new(memory), offset: 0, reserved: false });
                    }
                    Err(failure) => {
                        tracing::debug!(size, ?failure, "no pinned memory");
                        self.budget.give(size);
                        refused = Refusal::BySource;
                    }
                }
            }
            if !last {
                self.release_unused();
            }
        }
        Err(refused)
    }

    fn release_unused(&self) {
        if self.source.is_lost() {
            return; // the memory stays pinned, and still counts towards the budget
        }
        self.free_finished();
        for class in 0..self.classes.len() {
            let unused: Vec<_> = self.lock(class).free.extract_if(.., |piece| !piece.reserved).collect();
            unused.into_iter().for_each(|piece| self.release(class_size(class), piece));
        }
    }

    fn release(&self, size: usize, piece: Piece<S::Memory>) {
        let start = Instant::now();
        drop(piece);
        lock(&self.stats).record_release(size, start.elapsed());
        self.budget.give(size);
    }
}

impl<S: PinnedSource> Drop for PinnedPool<S> {
    fn drop(&mut self) {
        // The memory itself is released by dropping the fields.
        self.budget.give(self.stats().allocated_bytes.current as usize);
    }
}

/// A block of pinned memory. Dropping the value frees the block at once, so no transfer may be using the block any more.
pub(crate) struct Pinned<'p, S: PinnedSource> {
    pool: &'p PinnedPool<S>,
    class: usize,
    piece: Option<Piece<S::Memory>>,
}

impl<S: PinnedSource> Pinned<'_, S> {
    /// Returns the memory, and the offset of the block in bytes.
    pub(crate) fn memory(&self) -> (&S::Memory, usize) {
        let piece = self.piece.as_ref().expect("taken only when it is given back");
        (&piece.memory, piece.offset)
    }

    /// Returns the block's size in bytes: at least the requested size.
    pub(crate) fn bytes(&self) -> usize {
        class_size(self.class)
    }

    /// Returns the block to the pool, to be reused when `event` is done.
    pub(crate) fn release_after(mut self, event: S::Event) {
        if let Some(piece) = self.piece.take() {
            self.pool.lock(self.class).in_flight.push((event, piece));
        }
    }
}

impl<S: PinnedSource> Drop for Pinned<'_, S> {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            lock(&self.pool.stats).record_free(self.bytes());
            self.pool.keep_or_release(self.class, piece);
        }
    }
}
