//! The pool of pinned host memory.
//!
//! A device reads and writes pinned memory at the full speed of its bus, but making some takes the driver milliseconds.
//! So it is made in size classes, eight a power of two (at most 12.5 % more than asked for, where PyTorch's powers of
//! two are up to twice as much), and kept. Each class has a lock of its own, and the source is never called under one.
//!
//! A block that a transfer still uses is given back with the transfer's event. It waits in its class until the event is
//! done, while others of the class whose events are done already overtake it.
//!
//! There is a bound on all pinned memory of the process, since no one else can use it: a pool that may take no more, or
//! whose source refuses, says so, and its caller uses ordinary memory. A source that has refused a block, or the reserve, is
//! asked for such again after a number of requests that grows with every refusal.

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
use stats::Counters;

/// Smallest class, and the granularity of the reserve: a page.
const PAGE: usize = 4096;
/// Classes a power of two.
const STEPS: usize = 8;

/// Where pinned memory comes from.
pub(crate) trait PinnedSource: Send + Sync {
    /// A piece of it, released on drop.
    type Memory: Send + Sync;
    /// The end of a transfer.
    type Event: Send;

    /// Makes a piece of `bytes`, a multiple of 512.
    fn create(&self, bytes: usize) -> Result<Self::Memory, Failure>;
    /// Whether the transfer is done, or has failed for good.
    fn is_done(&self, event: &Self::Event) -> bool;
    /// Whether what is dropped is not released: transfers may be using it for good.
    fn is_lost(&self) -> bool;
}

/// Pinned memory of the whole process: what may be taken and what is.
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
    classes: Box<[Mutex<Class<S>>]>,
    /// Bytes of the reserve, 0 for none, and the reserve once the source has given it.
    reserve_bytes: usize,
    reserve: OnceLock<Reserve<S::Memory>>,
    /// When to ask for the reserve again: blocks do not wait for what is larger than any of them.
    reserve_backoff: Backoff,
    budget: Arc<Budget>,
    /// When to ask the source again after it has failed with nothing cached that could be given back.
    source_backoff: Backoff,
    counters: Counters,
}

struct Class<S: PinnedSource> {
    free: Vec<Piece<S::Memory>>,
    /// Given back while a transfer still used them.
    flying: Vec<(S::Event, Piece<S::Memory>)>,
}

/// A block's memory: a piece of its own, or a part of the reserve.
struct Piece<M> {
    memory: Arc<M>,
    offset: usize,
    reserved: bool,
}

/// Who has refused a piece.
enum Refused {
    ByBudget,
    BySource,
}

/// One piece made before any other, handed out from its start to its end and never released.
struct Reserve<M> {
    memory: Arc<M>,
    used: AtomicUsize,
}

/// The smallest class for a request; `None` beyond what can be counted.
fn class_of(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(PAGE).checked_next_multiple_of(PAGE / STEPS)?;
    // `bytes` is above `lower` and at most twice it, so the class is one of the eight from 9/8 to 16/8 of it.
    let lower = (bytes - 1).ilog2();
    let steps = (bytes - (1 << lower)).div_ceil((1 << lower) / STEPS);
    let class = (lower as usize * STEPS + steps).checked_sub(PAGE.ilog2() as usize * STEPS)?;
    (class <= (usize::BITS - 2 - PAGE.ilog2()) as usize * STEPS).then_some(class)
}

/// Bytes of a block of a class.
fn class_size(class: usize) -> usize {
    (PAGE / STEPS * (STEPS + class % STEPS)) << (class / STEPS)
}

impl<S: PinnedSource> PinnedPool<S> {
    /// A pool over `source`, with a reserve of `reserve` bytes (0 for none). It is made at once, or at a later request where
    /// the source or the budget refuses it.
    pub(crate) fn new(source: S, reserve: usize, budget: Arc<Budget>) -> PinnedPool<S> {
        let last = class_of(budget.cap.max(PAGE)).unwrap_or(0);
        let class = |_| Mutex::new(Class { free: Vec::new(), flying: Vec::new() });
        let pool = PinnedPool {
            source,
            classes: (0..=last).map(class).collect(),
            reserve_bytes: reserve,
            reserve: OnceLock::new(),
            reserve_backoff: Backoff::default(),
            budget,
            source_backoff: Backoff::default(),
            counters: Counters::default(),
        };
        pool.the_reserve();
        pool
    }

    /// A block of at least `bytes`; `None` where ordinary memory must do.
    pub(crate) fn alloc(&self, bytes: usize) -> Option<Pinned<'_, S>> {
        let class = class_of(bytes).filter(|class| *class < self.classes.len())?;
        let size = class_size(class);
        let piece = self.cached(class).or_else(|| self.reserved(size)).or_else(|| self.create(size))?;
        self.counters.taken(size);
        Some(Pinned { pool: self, class, piece: Some(piece) })
    }

    /// Releases every block that nothing uses (`torch.cuda.host_empty_cache`), except the reserve's.
    pub(crate) fn empty_cache(&self) {
        self.source_backoff.reset();
        self.reserve_backoff.reset();
        self.release_unused();
    }

    /// Makes blocks whose transfers are done free again; whether others are still flying.
    pub(crate) fn poll(&self) -> bool {
        (0..self.classes.len()).filter(|class| self.poll_class(*class)).count() > 0 // every class is asked
    }

    /// What the pool holds and has done.
    pub(crate) fn stats(&self) -> PinnedStats {
        self.counters.read()
    }

    pub(crate) fn reset_peak_stats(&self) {
        self.counters.reset_peak();
    }

    pub(crate) fn reset_accumulated_stats(&self) {
        self.counters.reset_accumulated();
    }

    fn lock(&self, class: usize) -> MutexGuard<'_, Class<S>> {
        // Nothing that can panic is done under the lock.
        lock(&self.classes[class])
    }

    fn cached(&self, class: usize) -> Option<Piece<S::Memory>> {
        if let Some(piece) = self.lock(class).free.pop() {
            return Some(piece);
        }
        self.poll_class(class);
        self.lock(class).free.pop()
    }

    fn poll_class(&self, class: usize) -> bool {
        let flying = mem::take(&mut self.lock(class).flying);
        if flying.is_empty() {
            return false;
        }
        let (done, still): (Vec<_>, Vec<_>) = flying.into_iter().partition(|(event, _)| self.source.is_done(event));
        let (events, free): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        drop(events); // releasing one is a call of the driver
        free.iter().for_each(|_| self.counters.returned(class_size(class)));
        let mut class = self.lock(class);
        class.free.extend(free);
        class.flying.extend(still);
        !class.flying.is_empty()
    }

    /// The reserve, asked for again if the source has refused it.
    fn the_reserve(&self) -> Option<&Reserve<S::Memory>> {
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
            // Another thread was faster.
            self.release(self.reserve_bytes, Piece { memory: second.memory, offset: 0, reserved: false });
        }
        self.reserve.get()
    }

    fn reserved(&self, size: usize) -> Option<Piece<S::Memory>> {
        let reserve = self.the_reserve()?;
        let pages = size.next_multiple_of(PAGE);
        let room = |used: usize| used.checked_add(pages).filter(|end| *end <= self.reserve_bytes);
        let offset = reserve.used.fetch_update(Relaxed, Relaxed, room).ok()?;
        Some(Piece { memory: Arc::clone(&reserve.memory), offset, reserved: true })
    }

    /// A piece from the source, unless it has refused one lately.
    fn create(&self, size: usize) -> Option<Piece<S::Memory>> {
        if !self.source_backoff.is_due() {
            return None;
        }
        let made = self.try_create(size);
        match &made {
            Ok(_) => self.source_backoff.reset(),
            Err(Refused::BySource) => self.source_backoff.refused(),
            Err(Refused::ByBudget) => {}
        }
        made.ok()
    }

    /// A piece from the source; if that fails or would be too much, once more without what is cached.
    fn try_create(&self, size: usize) -> Result<Piece<S::Memory>, Refused> {
        let mut refused = Refused::ByBudget;
        for last in [false, true] {
            refused = Refused::ByBudget;
            if self.budget.take(size) {
                let start = Instant::now();
                match self.source.create(size) {
                    Ok(memory) => {
                        self.counters.made(size, start.elapsed());
                        return Ok(Piece { memory: Arc::new(memory), offset: 0, reserved: false });
                    }
                    Err(failure) => {
                        tracing::debug!(size, ?failure, "no pinned memory");
                        self.budget.give(size);
                        refused = Refused::BySource;
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
            return; // it stays pinned, and counted
        }
        self.poll();
        for class in 0..self.classes.len() {
            let unused: Vec<_> = self.lock(class).free.extract_if(.., |piece| !piece.reserved).collect();
            unused.into_iter().for_each(|piece| self.release(class_size(class), piece));
        }
    }

    fn release(&self, size: usize, piece: Piece<S::Memory>) {
        let start = Instant::now();
        drop(piece);
        self.counters.released(size, start.elapsed());
        self.budget.give(size);
    }
}

impl<S: PinnedSource> Drop for PinnedPool<S> {
    fn drop(&mut self) {
        // What else it holds is released by its fields.
        self.budget.give(self.stats().allocated_bytes.current as usize);
    }
}

/// A block of pinned memory. Dropping it makes it free at once, which is right when no transfer uses it any more.
pub(crate) struct Pinned<'p, S: PinnedSource> {
    pool: &'p PinnedPool<S>,
    class: usize,
    piece: Option<Piece<S::Memory>>,
}

impl<S: PinnedSource> Pinned<'_, S> {
    /// The memory and where in it the block begins.
    pub(crate) fn memory(&self) -> (&S::Memory, usize) {
        let piece = self.piece.as_ref().expect("taken only when it is given back");
        (&piece.memory, piece.offset)
    }

    /// The block's size: at least what was asked for.
    pub(crate) fn bytes(&self) -> usize {
        class_size(self.class)
    }

    /// Gives the block back, to be reused when `event` is done.
    pub(crate) fn release_after(mut self, event: S::Event) {
        if let Some(piece) = self.piece.take() {
            self.pool.lock(self.class).flying.push((event, piece));
        }
    }
}

impl<S: PinnedSource> Drop for Pinned<'_, S> {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.pool.counters.returned(self.bytes());
            self.pool.lock(self.class).free.push(piece);
        }
    }
}
