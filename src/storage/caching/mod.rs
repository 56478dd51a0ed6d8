//! The caching allocator: a device's memory, taken in segments and handed out in blocks.
//!
//! Asking a driver for memory is slow (tens of microseconds, and giving it back waits for the device), so memory comes
//! in segments, is cut into blocks, and a block given back waits here for the next request. The ideas are those of
//! PyTorch's CUDA allocator; the search takes constant time ([`bins`]), the segments follow the need ([`policy`]), and
//! the ladder climbed when nothing fits searches again after every rung ([`ladder`]).
//!
//! A block belongs to the stream it was allocated on. Given back, it may be reused there at once, though work that uses
//! it may still be queued: whatever the next owner enqueues comes after. Another stream
//! gets it behind a wait on the device ([`events`]), or once the work that uses it is known to have ended.
//!
//! No call of the driver, no wait and no callback happens under the lock.

mod bins;
mod cache;
mod clock;
mod compact;
mod copies;
mod decay;
mod entry;
mod events;
mod expand;
mod grow;
mod heap;
mod ladder;
mod layout;
mod limits;
mod mempool;
mod moves;
mod pages;
mod policy;
mod record;
mod report;
mod runs;
mod segments;
mod slots;
mod spill;
mod sync;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::allocator::{Allocator, valid_fraction};
use super::block::{Block, KEEPS, owner_number};
use super::config::Config;
use super::counters::Deltas;
use super::driver::Driver;
use super::history::{HistoryOptions, Snapshot};
use super::hooks::{FreeMemory, Hooks, OomObserver, OutOfMemoryEvent, Registration};
use super::stats::{DeviceStats, Split};
use crate::device::{StreamId, log};
use crate::{Device, Result};
use cache::{Cached, Put, Shard, ThreadCaches};
use clock::Clock;
use events::Pending;
use expand::Expandable;
use heap::{Heap, Search};
use limits::{Limits, part_of};
pub use mempool::{MemPool, MemPoolOptions, MemPoolStats, PoolCheckpoint, use_mem_pool};
use moves::AfterMove;
pub(super) use policy::Kind;
use policy::Rules;
use slots::Slots;
pub(super) use spill::caching_inside;
use sync::{Mutex, MutexGuard, lock};

/// The default allocator of every device: PyTorch's caching allocator, rebuilt for devices without virtual memory.
///
/// ```
/// use std::sync::Arc;
/// use claystone::device::StreamId;
/// use claystone::storage::{Allocator, CachingAllocator, Config, Sim, SimOptions};
/// let device = Sim::new(SimOptions::default());
/// let allocator = CachingAllocator::new(Arc::new(device.clone()), Config::default())?;
/// let block = allocator.allocate(1000, StreamId::DEFAULT)?;
/// assert_eq!((block.size(), block.requested()), (1024, 1000));
/// allocator.deallocate(block);
/// let calls = device.call_count();
/// let again = allocator.allocate(900, StreamId::DEFAULT)?; // from the cache
/// assert_eq!(device.call_count(), calls);
/// allocator.deallocate(again);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct CachingAllocator {
    driver: Arc<dyn Driver>,
    number: u32,
    rules: Arc<Rules>,
    core: Mutex<Core>,
    caches: ThreadCaches,
    /// Whether any block was ever used by a stream other than its own.
    recorded: AtomicBool,
    hooks: Hooks,
    /// Held by who compacts: one thread at a time. Not the allocator's lock: others allocate and free meanwhile.
    compacting: std::sync::Mutex<()>,
    /// Where segments grow in place.
    expandable: Option<Expandable>,
    clock: Clock,
}

/// What the lock guards.
struct Core {
    heap: Heap,
    slots: Slots,
    /// Blocks given back that streams may still be using.
    pending: Pending,
    /// Memory pools other than the default one that have handles.
    pools: BTreeMap<u32, MemPoolOptions>,
    limits: Limits,
    /// Bytes of segments being made outside the lock.
    making: u64,
    growth: grow::Growth,
    /// Blocks of segments under compaction, and what has happened to them meanwhile.
    moving: HashMap<u32, AfterMove>,
    decay: decay::Decay,
    /// The largest size that threads' caches keep, where they are on.
    largest_cached: usize,
}

/// What is asked for, and where to look for it.
#[derive(Debug, Clone, Copy)]
struct Request {
    bytes: usize,
    size: usize,
    kind: Kind,
    pool: u32,
    stream: StreamId,
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the caching allocator of {}", self.driver.device())
    }
}

impl CachingAllocator {
    /// An allocator over this driver's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the configuration contradicts itself, or asks for `expandable_segments` of a driver that
    /// cannot reserve addresses.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<CachingAllocator> {
        config.check()?;
        let expandable = Expandable::new(&*driver, &config)?;
        let alignment = driver.alignment().max(entry::UNIT);
        let capacity = driver.capacity().min(entry::LONGEST);
        let fraction = part_of(driver.capacity(), config.per_process_memory_fraction);
        let caches = ThreadCaches::new(config.thread_cache, alignment);
        let limits = Limits { fraction, bytes: config.memory_limit as u64, elsewhere: 0, exceeded: false };
        let decay = decay::Decay::new(u64::try_from(config.decay.as_millis()).unwrap_or(u64::MAX));
        let rules = Arc::new(Rules::new(config, alignment, capacity));
        let mut heap = Heap::new(Arc::clone(&rules));
        heap.stats.max_split_size = rules.config.max_split_size as u64;
        let core = Core {
            heap,
            slots: Slots::default(),
            pending: Pending::default(),
            pools: BTreeMap::new(),
            limits,
            making: 0,
            growth: grow::Growth::default(),
            moving: HashMap::new(),
            decay,
            largest_cached: caches.largest(),
        };
        let number = owner_number();
        Ok(CachingAllocator {
            driver,
            number,
            rules,
            core: Mutex::new(core),
            caches,
            recorded: AtomicBool::new(false),
            hooks: Hooks::default(),
            compacting: std::sync::Mutex::new(()),
            expandable,
            clock: Clock::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        let mut core = lock(&self.core);
        core.heap.merge_last_freed();
        core
    }

    /// The lock, for one who is about to change statistics: what this thread's cache did comes first, so that peaks are
    /// those of the order in which things happened.
    fn lock_with_stats(&self) -> MutexGuard<'_, Core> {
        let mut core = self.lock_without_merge(self.caches.own());
        core.heap.merge_last_freed();
        core
    }

    /// As [`lock_with_stats`](Self::lock_with_stats), with the block that was given back last as it is.
    #[inline(always)]
    fn lock_without_merge(&self, own: Option<&Shard>) -> MutexGuard<'_, Core> {
        let mut core = lock(&self.core);
        core.heap.stats.see_cached(own.map_or(([0; 3], None), Shard::changes));
        core
    }

    /// Empties this thread's cache, which holds what nobody asks for.
    #[cold]
    #[inline(never)]
    fn renew_cache(&self) {
        self.lock().take_back(self.caches.drain_own());
    }

    /// Makes this thread's cache. Under the lock, so that who turns all caches off and empties them under it misses none.
    #[cold]
    #[inline(never)]
    fn make_cache(&self) {
        let _core = self.lock();
        self.caches.make_own();
    }

    /// Gives what all threads have cached back to the bins.
    fn drain_caches(&self) -> MutexGuard<'_, Core> {
        let mut core = self.lock();
        core.take_back(self.caches.drain());
        core
    }

    /// Gives back what is too much or old.
    #[cold]
    #[inline(never)]
    fn trim_if_due<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        core.heap.merge_last_freed();
        let core = self.shed(core);
        self.decay(core)
    }

    /// Milliseconds since the allocator was made.
    fn now(&self) -> u64 {
        self.clock.milliseconds()
    }
}

impl Core {
    /// Takes back a block that no other stream uses; one on the move when it has arrived.
    #[cold]
    fn give_back(&mut self, id: u32, requested: usize) {
        match self.moving.get_mut(&id) {
            Some(then) => *then = AfterMove::GiveBack(requested),
            None => self.heap.give_back(id, requested),
        }
    }

    /// As [`give_back`](Self::give_back), for a request that may come next.
    #[inline(always)]
    fn give_back_last(&mut self, id: u32, requested: usize) {
        match self.moving.is_empty() {
            true => self.heap.give_back_last(id, requested),
            false => self.give_back(id, requested),
        }
    }

    /// Takes back what was in threads' caches.
    fn take_back(&mut self, (ids, deltas): (Vec<u32>, Vec<Deltas>)) {
        deltas.iter().for_each(|deltas| self.heap.stats.fold(deltas));
        ids.into_iter().for_each(|id| self.uncache(id));
    }

    /// A block leaves a thread's cache.
    fn uncache(&mut self, id: u32) {
        match self.moving.get_mut(&id) {
            Some(then) => *then = AfterMove::Uncache,
            None => self.heap.uncache(id),
        }
    }

    /// Counts a request, whatever comes of it.
    fn see(&mut self, request: &Request) {
        self.heap.ticks += 1;
        let active = self.heap.stats.active_bytes() + request.size as u64;
        self.growth.see(active, self.heap.ticks);
        self.decay.see(active);
    }

    /// The handle on an entry that was just taken.
    fn block(&mut self, owner: u32, id: u32, requested: usize) -> Block {
        let rounded = self.heap.rules.round_size(requested).unwrap_or(0);
        self.block_for(owner, id, requested, rounded)
    }

    /// As [`block`](Self::block), where what the request is rounded up to is known.
    #[inline(always)]
    fn block_for(&mut self, owner: u32, id: u32, requested: usize, rounded: usize) -> Block {
        let slot = self.slots.of(id);
        let (entry, held) = (&self.heap.table[id as usize], self.heap.held(id));
        // Small ones of the default pool and stream. No branch: nothing foresees which they are.
        let keeps = (entry.arena() == 0) & (entry.size() == rounded) & (rounded <= self.largest_cached);
        let tagged = id | (u32::from(keeps) * KEEPS);
        // SAFETY: slots of the table live as long as the allocator, or for good. Nobody has this entry's block, so
        // nobody reads the slot; the segment is held as long as a block of it is live.
        let block = unsafe {
            slot.as_ref().set_place(&held.segment, entry.offset());
            Block::of_table(slot, owner, tagged, entry.size(), requested)
        };
        self.heap.record_alloc(id, requested);
        block
    }
}

impl Allocator for CachingAllocator {
    fn device(&self) -> Device {
        self.driver.device()
    }

    fn alignment(&self) -> usize {
        self.rules.alignment
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let size = match self.rules.round_size(bytes) {
            Some(size) if size as u64 <= self.rules.capacity => size,
            _ => return Err(self.too_large(bytes)),
        };
        let (kind, pool) = (Kind::of(size), mempool::routed(self.number));
        let own = self.caches.own();
        if pool == 0
            && stream == StreamId::DEFAULT
            && let Some(shard) = own
            && let Some(Cached { slot, id }) = self.caches.get(shard, size, bytes)
        {
            // SAFETY: the entry is live in the table, and its slot's place was set when it was.
            return Ok(unsafe { Block::of_table(slot, self.number, id | KEEPS, size, bytes) });
        }
        let request = Request { bytes, size, kind, pool, stream };
        let mut core = self.lock_without_merge(own);
        core.see(&request);
        if core.limits.exceeded || core.decay.looks_at(core.heap.ticks) {
            core = self.trim_if_due(core);
        }
        let arena = core.heap.arena(pool, stream, kind);
        if let Some(id) = core.heap.take_last(arena, size, bytes) {
            return Ok(core.block_for(self.number, id, bytes, size));
        }
        if core.pending.is_empty()
            && let Some(id) = core.search(arena, &request, Search::Quick, false)
        {
            return Ok(core.block_for(self.number, id, bytes, size));
        }
        drop(core);
        self.climb(&request)
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        let requested = block.requested();
        // Touches the block's slot only where any block has been used by other streams.
        if self.recorded.load(Relaxed) && block.slot().recorded.load(Relaxed) {
            return self.deallocate_used_by_others(block, requested);
        }
        let own = self.caches.own();
        if block.keeps()
            && let Some(size) = self.rules.round_size(requested)
        {
            let cached = Cached { slot: block.slot_ptr(), id: block.id() };
            match own.map(|shard| self.caches.put(shard, cached, size, requested)) {
                Some(Put::Kept) => return,
                Some(Put::Refused) => {}
                Some(Put::Stale) => self.renew_cache(),
                None => self.make_cache(),
            }
        }
        self.lock_without_merge(own).give_back_last(block.id(), requested);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.note_stream(block, stream);
    }

    fn stats(&self) -> DeviceStats {
        self.drain_caches().heap.stats.stats()
    }

    fn reset_peak_stats(&self) {
        self.drain_caches().heap.stats.reset_peak();
    }

    fn reset_accumulated_stats(&self) {
        self.drain_caches().heap.stats.reset_accumulated();
    }

    fn empty_cache(&self) -> Result<()> {
        drop(self.drain_caches());
        self.process_events(true)?;
        let unused = {
            let mut core = self.lock();
            core.growth.forget();
            core.heap.remove_unused(0)
        };
        drop(unused); // outside the lock: releasing waits for the device
        self.release_pages(0, 0);
        let _messages = log::defer(); // a subscriber may allocate, and wait for the lock that is held below
        if let Ok(_alone) = self.compacting.try_lock() {
            self.restore_all();
        }
        Ok(())
    }

    fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        Ok(CachingAllocator::add_free_memory_callback(self, free))
    }

    fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        Ok(CachingAllocator::add_oom_observer(self, observe))
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        self.trim_to(keep)
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        self.lock().set_limits(|limits| limits.bytes = bytes);
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        let fraction = valid_fraction(fraction)?;
        self.lock().set_limits(|limits| limits.fraction = part_of(self.driver.capacity(), fraction));
        Ok(())
    }

    fn compact(&self, budget: u64) -> Result<u64> {
        self.compact_all(budget)
    }

    fn make_room(&self, _bytes: usize) -> Result<()> {
        self.hooks.ask_for_memory();
        self.empty_cache()
    }

    fn tell_oom_observers(&self, event: &OutOfMemoryEvent) {
        self.hooks.tell_observers(|| *event);
    }

    fn snapshot(&self) -> Snapshot {
        self.take_snapshot()
    }

    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        self.record_history(options)
    }
}

impl Drop for CachingAllocator {
    fn drop(&mut self) {
        drop(self.drain_caches());
        let _ = self.process_events(true);
        let core = &mut *self.lock();
        if core.heap.stats.live_blocks() > 0 {
            // Blocks are still out there, with pointers to slots and segments: those stay for good.
            tracing::warn!(blocks = core.heap.stats.live_blocks(), "an allocator was dropped before its blocks");
            std::mem::forget(std::mem::take(&mut core.slots));
            std::mem::forget(std::mem::take(&mut core.heap.segments));
        }
    }
}

impl Heap {
    /// A block leaves a thread's cache: to the statistics it was free already.
    fn uncache(&mut self, id: u32) {
        self.given_back += 1;
        let kind = self.arenas[self.table[id as usize].arena() as usize].kind;
        let split: Split = self.set_free(id);
        self.stats.split_changed(kind, split);
    }
}

#[cfg(test)]
mod tests;
