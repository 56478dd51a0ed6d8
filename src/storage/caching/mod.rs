//! The caching allocator: gets segments of device memory from the driver and divides them into blocks for requests.
//!
//! Driver allocations are slow (tens of microseconds, and releasing waits for the device). So segments are cut into
//! blocks, and a freed block is cached for the next request. The design follows PyTorch's CUDA caching allocator,
//! with three differences: the free-list search takes constant time ([`bins`]), segment sizes adapt to the program's
//! need ([`policy`]), and out-of-memory recovery searches the bins again after every step ([`ladder`]).
//!
//! A block belongs to the stream of its allocation. That stream may reuse a freed block at once, even if queued work
//! still uses the block, because the next owner's work is enqueued later. Another stream gets the block after a
//! device-side wait for the block's stream ([`events`]), or once the queued work is complete.
//!
//! No driver call, wait or callback happens while the allocator's lock is held.

mod bins;
mod cache;
mod compact;
mod entry;
mod events;
mod heap;
mod ladder;
mod mempool;
mod policy;
mod report;
mod slots;
mod spill;
mod sync;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use super::allocator::{Allocator, check_fraction};
use super::block::{Block, CACHEABLE_FLAG, advance_use_clock, next_owner_number};
use super::config::{Config, Spill};
use super::counters::ThreadCacheDeltas;
use super::driver::{Driver, Marker};
use super::history::{
    BlockInfo, BlockState, Context, HistoryOptions, Recording, SegmentInfo, SegmentWithContexts, Snapshot, TraceAction,
    device_number,
};
use super::hooks::{Hooks, OutOfMemoryEvent};
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Result};
use cache::{CachedBlock, PutOutcome, ThreadCache, ThreadCaches};
use entry::{SPILLED_POOL, Use};
use events::{AfterMove, Pending, PendingUses};
use heap::{Heap, Request, Search, SegmentRecord};
use ladder::{Expandable, OomRecovery};
pub(crate) use mempool::CaptureClaim;
pub use mempool::{EnteredPool, MemPool, MemPoolOptions, PoolCheckpoint, use_mem_pool};
pub(super) use policy::SizeKind;
use policy::{Decay, Growth, Limits, Rules, fraction_of};
use slots::Slots;
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
    /// True once any block has been used by a stream other than its own.
    has_cross_stream_use: AtomicBool,
    pub(super) hooks: Hooks,
    /// Locked while compacting, so that one thread compacts at a time. Other threads allocate and free meanwhile.
    compacting: std::sync::Mutex<()>,
    /// Creates segments that grow in place; `None` unless `expandable_segments` is on.
    expandable: Option<Expandable>,
    clock: Clock,
}

/// The allocator's state, guarded by the allocator's lock.
struct Core {
    rules: Arc<Rules>,
    heap: Heap,
    slots: Slots,
    /// Freed blocks that other streams may still be using.
    pending: Pending,
    /// Options of the memory pools that still have handles, by pool number. The default pool is not included.
    pools: BTreeMap<u32, MemPoolOptions>,
    limits: Limits,
    /// Number of bytes of segments that are being created, which happens without the lock.
    bytes_being_created: u64,
    growth: Growth,
    /// Blocks of segments being compacted, and what to do with each after its copy.
    moving: HashMap<u32, AfterMove>,
    decay: Decay,
    /// The largest block size, in bytes, that thread caches keep; 0 if the caches are off.
    largest_cached: usize,
    /// Whether idle blocks may move to the host, so that the clock of blocks' uses has to run.
    spills: bool,
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the caching allocator of {}", self.driver.device())
    }
}

impl CachingAllocator {
    /// Creates an allocator over `driver`'s memory.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the configuration contradicts itself, or asks for
    /// `expandable_segments` and the driver cannot reserve addresses.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<CachingAllocator> {
        config.check()?;
        let expandable = Expandable::new(&*driver, &config)?;
        let alignment = driver.alignment().max(entry::UNIT);
        let capacity = driver.capacity().min(entry::MAX_SEGMENT_BYTES);
        let fraction = fraction_of(driver.capacity(), config.per_process_memory_fraction);
        let caches = ThreadCaches::new(config.thread_cache, alignment);
        let limits = Limits { fraction, bytes: config.memory_limit as u64, elsewhere: 0, is_exceeded: false };
        let decay = Decay::new(u64::try_from(config.decay.as_millis()).unwrap_or(u64::MAX));
        let rules = Arc::new(Rules::new(config, alignment, capacity));
        let mut heap = Heap::new(Arc::clone(&rules));
        heap.stats.max_split_size = rules.config.max_split_size as u64;
        let core = Core {
            rules: Arc::clone(&rules),
            heap,
            slots: Slots::default(),
            pending: Pending::default(),
            pools: BTreeMap::new(),
            limits,
            bytes_being_created: 0,
            growth: Growth::default(),
            moving: HashMap::new(),
            decay,
            largest_cached: caches.largest(),
            spills: rules.config.spill != Spill::Off,
        };
        if core.spills {
            advance_use_clock();
        }
        let number = next_owner_number();
        Ok(CachingAllocator {
            driver,
            number,
            rules,
            core: Mutex::new(core),
            caches,
            has_cross_stream_use: AtomicBool::new(false),
            hooks: Hooks::default(),
            compacting: std::sync::Mutex::new(()),
            expandable,
            clock: Clock {
                started: Instant::now(),
                #[cfg(test)]
                ahead: std::sync::atomic::AtomicU64::new(0),
            },
        })
    }

    /// Locks the allocator, and merges the last freed block.
    fn lock(&self) -> MutexGuard<'_, Core> {
        let mut core = lock(&self.core);
        core.heap.merge_last_freed();
        core
    }

    /// Locks the allocator to change statistics. Adds this thread's cache deltas first, so that peaks reflect the order of events.
    fn lock_with_stats(&self) -> MutexGuard<'_, Core> {
        let mut core = self.lock_without_merge(self.caches.of_this_thread());
        core.heap.merge_last_freed();
        core
    }

    /// Like [`lock_with_stats`](Self::lock_with_stats), but does not merge the last freed block into its neighbours.
    #[inline(always)]
    fn lock_without_merge(&self, own: Option<&ThreadCache>) -> MutexGuard<'_, Core> {
        let mut core = lock(&self.core);
        core.heap.stats.apply_thread_cache_deltas(own.map_or(([0; 3], None), ThreadCache::read_deltas));
        core
    }

    /// Empties this thread's cache, whose block sizes are no longer requested.
    #[cold]
    #[inline(never)]
    fn drain_own_cache(&self) {
        self.lock().free_drained_blocks(self.caches.drain_this_thread());
    }

    /// Creates this thread's cache. Holds the allocator's lock, so that a thread that turns all caches off under this lock does not
    /// miss the new cache.
    #[cold]
    #[inline(never)]
    fn create_own_cache(&self) {
        let _core = self.lock();
        self.caches.create_for_this_thread();
    }

    /// Moves the blocks of all thread caches back to the bins.
    fn drain_caches(&self) -> MutexGuard<'_, Core> {
        let mut core = self.lock();
        core.free_drained_blocks(self.caches.drain());
        core
    }

    /// Releases unused memory above the limit, and memory that decay releases because it was unused for long.
    #[cold]
    #[inline(never)]
    fn trim_if_due<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        core.heap.merge_last_freed();
        let core = self.release_above_limit(core);
        self.decay(core)
    }

    /// Recovers memory for a request that is no return from the host.
    #[cold]
    #[inline(never)]
    fn recover(&self, request: &Request) -> Result<Block> {
        self.recover_memory(request, OomRecovery::default())
    }

    /// Notifies the observers of a request that exceeds the device's memory, and builds the error.
    #[cold]
    #[inline(never)]
    fn refuse_too_large(&self, bytes: usize) -> crate::Error {
        self.hooks.notify_observers(|| {
            let core = self.lock_with_stats();
            let held = core.heap.stats.reserved() + core.limits.elsewhere;
            OutOfMemoryEvent {
                device: self.driver.device(),
                requested: bytes,
                allowed: core.limits.allowed(),
                device_free: self.driver.capacity().saturating_sub(held),
            }
        });
        self.too_large(bytes)
    }

    // Methods for blocks that several streams use.

    /// Frees a block that other streams have used. The block is pending until those streams finish.
    #[cold]
    #[inline(never)]
    fn deallocate_used_by_others(&self, block: Block, requested: usize) {
        let streams = self.lock().pending.take_users(block.id());
        let uses = streams.into_iter().map(|stream| (stream, self.driver.record(stream).ok())).collect();
        let has_spilled = {
            let mut core = self.lock_with_stats();
            core.free_used_block(block.id(), requested, uses);
            core.heap.stats.spilled_bytes.current > 0
        };
        if has_spilled {
            self.free_spilled(); // the block may be on the host
        }
    }

    /// Frees pending blocks whose streams have finished; with `wait`, waits for all of them. Returns whether any block became free.
    ///
    /// # Errors
    /// With `wait`, the errors that the driver reports. Blocks whose streams could not be waited for stay pending.
    fn process_events(&self, wait: bool) -> Result<bool> {
        let (mut settled, mut failed) = (false, self.record_missing_markers());
        loop {
            let heads = self.lock().pending.oldest_markers();
            let query_marker =
                |marker| if wait { self.driver.wait(marker).map(|()| true) } else { self.driver.is_done(marker) };
            let marker_results: Vec<_> =
                heads.iter().map(|(stream, marker, ticket)| (*stream, *ticket, query_marker(marker))).collect();
            if marker_results.iter().all(|(.., done)| matches!(done, Ok(false))) {
                return if wait { failed.map(|()| settled) } else { Ok(settled) };
            }
            let mut core = self.lock();
            for (stream, ticket, done) in marker_results {
                match done {
                    Ok(true) => settled |= core.pending.pop(stream, ticket).map(|id| core.free_pending(id)).is_some(),
                    Ok(false) => {}
                    Err(error) => {
                        core.pending.discard_marker(stream, ticket);
                        failed = failed.and(Err(error));
                    }
                }
            }
        }
    }

    /// Records markers on the streams for which pending blocks have no marker yet.
    fn record_missing_markers(&self) -> Result<()> {
        let (streams, before) = {
            let core = self.lock();
            (core.pending.streams_without_marker(), core.pending.next_ticket())
        };
        let mark = |stream| {
            let marker = self.driver.record(stream)?;
            self.lock().pending.assign_marker(stream, before, &marker);
            Ok(())
        };
        streams.into_iter().map(mark).fold(Ok(()), Result::and) // records a marker on every stream, even after an error
    }

    /// Waits for the whole device. Frees all blocks that were pending before, even those without a marker.
    fn synchronize(&self) -> Result<()> {
        let before = self.lock().pending.next_ticket();
        self.driver.synchronize()?;
        let mut core = self.lock();
        core.pending.pop_before(before).into_iter().for_each(|id| core.free_pending(id));
        Ok(())
    }

    /// Takes free blocks of other streams, or one pending block. The request's stream waits on the device until the streams that may still use the
    /// memory have finished. If that wait cannot be enqueued, the block becomes pending instead.
    fn take_with_wait(&self, request: &Request) -> Option<Block> {
        let (block, mut uses) = {
            let mut core = self.lock_with_stats();
            if !self.rules.config.cross_stream_reuse {
                return None;
            }
            core.take_from_other_streams(self.number, request).or_else(|| core.reuse_pending(self.number, request))?
        };
        let wait = |(stream, marker): &mut (StreamId, Option<Marker>)| {
            if let Some(marker) = marker {
                return self.driver.stream_waits(request.stream, marker);
            }
            let (streams, at) = ((request.stream, *stream), self.driver.progress(*stream));
            if at.is_finished() || self.lock().pending.has_waited(streams, at) {
                return Ok(()); // the work is done, or nothing was submitted since the last wait
            }
            self.driver.stream_waits(request.stream, marker.insert(self.driver.record(*stream)?))?;
            self.lock().pending.record_wait(streams, at);
            Ok(())
        };
        match uses.iter_mut().try_for_each(wait) {
            Ok(()) => Some(block),
            Err(error) => {
                tracing::debug!(%error, "could not wait for another stream: its block is not reused yet");
                self.lock_with_stats().free_used_block(block.id(), block.requested(), uses);
                None
            }
        }
    }

    /// Waits on the host for the other streams that used these blocks.
    fn wait_for_users(&self, blocks: &[Block]) -> Result<()> {
        for block in
            blocks.iter().filter(|block| block.owner == self.number && block.slot().used_by_other_stream.load(Relaxed))
        {
            let streams = self.lock().pending.users(block.id());
            for stream in streams {
                self.driver.wait(&self.driver.record(stream)?)?;
            }
        }
        Ok(())
    }

    // Methods for the history and for snapshots.

    /// Runs `f` under the lock with all thread caches drained into the table and the statistics. The caches stay
    /// empty until the lock is released, and off while history is recorded, because they would bypass the recording.
    fn with_exact_state<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let mut core = self.lock();
        self.caches.set_capacity(0);
        core.free_drained_blocks(self.caches.drain());
        let result = f(&mut core);
        self.caches.set_capacity(if core.heap.history.is_on() { 0 } else { self.rules.config.thread_cache });
        result
    }
}

impl Core {
    /// Frees a block that no other stream uses. If compaction is moving the block, it is freed after the move.
    #[cold]
    fn free_block(&mut self, id: u32, requested: usize) {
        match self.moving.get_mut(&id) {
            Some(then) => *then = AfterMove::FreeBlock(requested),
            None => self.heap.free_block(id, requested),
        }
    }

    /// Like [`free_block`](Self::free_block), but keeps the block unmerged for the next request.
    #[inline(always)]
    fn free_block_unmerged(&mut self, id: u32, requested: usize) {
        match self.moving.is_empty() {
            true => self.heap.free_block_unmerged(id, requested),
            false => self.free_block(id, requested),
        }
    }

    /// Frees the blocks drained from thread caches, and adds the caches' deltas to the statistics.
    fn free_drained_blocks(&mut self, (ids, deltas): (Vec<u32>, Vec<ThreadCacheDeltas>)) {
        deltas.iter().for_each(|deltas| self.heap.stats.fold_thread_cache(deltas));
        ids.into_iter().for_each(|id| self.uncache(id));
    }

    /// Frees a block that leaves a thread's cache. If compaction is moving the block, it is freed after the move.
    fn uncache(&mut self, id: u32) {
        match self.moving.get_mut(&id) {
            Some(then) => *then = AfterMove::Uncache,
            None => self.heap.uncache(id),
        }
    }

    /// Records a request for the growth and decay heuristics, before its outcome is known.
    fn record_request(&mut self, request: &Request) {
        self.heap.ticks += 1;
        if self.spills {
            advance_use_clock();
        }
        let active = self.heap.stats.active_bytes_on_device() + request.size as u64;
        self.growth.record_active(active, self.heap.ticks);
        self.decay.record_active(active);
    }

    /// Creates the handle of a table entry that was just taken.
    fn create_handle(&mut self, owner: u32, id: u32, requested: usize) -> Block {
        let rounded = self.rules.round_size(requested).unwrap_or(0);
        self.create_handle_of(owner, id, requested, rounded)
    }

    /// Like [`create_handle`](Self::create_handle), for a caller that has already rounded the size.
    #[inline(always)]
    fn create_handle_of(&mut self, owner: u32, id: u32, requested: usize, rounded: usize) -> Block {
        let slot = self.slots.get_or_create(id);
        let (entry, held) = (self.heap.entry(id), self.heap.segment_of(id));
        // Thread caches keep small blocks of the default pool and stream. The test has no branches, because they would be unpredictable.
        let keeps = (entry.arena() == 0) & (entry.size() == rounded) & (rounded <= self.largest_cached);
        let tagged = id | (u32::from(keeps) * CACHEABLE_FLAG);
        // SAFETY: slots of the table live as long as the allocator, or forever. No live `Block` refers to this entry,
        // so no other thread reads the slot. `held` keeps the segment alive as long as one of its blocks is live.
        let block = unsafe {
            slot.as_ref().set_location(&held.segment, entry.offset());
            Block::with_table_slot(slot, owner, tagged, entry.size(), requested)
        };
        self.heap.record_alloc(id, requested);
        block
    }

    /// Changes the limits, and notes whether the reserved bytes now exceed them.
    fn set_limits(&mut self, set: impl FnOnce(&mut Limits)) {
        set(&mut self.limits);
        self.limits.is_exceeded = self.heap.stats.reserved() > self.limits.limit();
    }

    // Methods for blocks that several streams use.

    /// Frees a block that these streams may still be using. If compaction is moving the block, it is freed after the
    /// move, because the move may not have waited for the latest work.
    fn free_used_block(&mut self, id: u32, requested: usize, uses: PendingUses) {
        match self.moving.get_mut(&id) {
            _ if uses.is_empty() => self.free_block(id, requested),
            Some(then) => *then = AfterMove::FreeUsedBlock(requested, uses),
            None => {
                self.heap.mark_pending(id, requested);
                self.pending.add(id, uses);
            }
        }
    }

    /// Frees a pending block whose streams have finished.
    fn free_pending(&mut self, id: u32) {
        let requested = self.slots.requested(id);
        self.heap.free_pending(id, requested);
    }

    /// Allocates from adjacent free blocks, some of which belong to other streams. The result belongs to the request's stream.
    fn take_from_other_streams(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
        let run = self.heap.find_run(request)?;
        let (id, mut streams) = self.heap.allocate_from_run(run, request);
        streams.sort_unstable();
        streams.dedup();
        let others = streams.into_iter().filter(|&stream| stream != request.stream);
        Some((self.create_handle(owner, id, request.bytes), others.map(|stream| (stream, None)).collect()))
    }

    /// Takes a pending block. Returns it with the uses that its new owner must wait for.
    fn reuse_pending(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
        let heap = &self.heap;
        let fits = |&id: &u32| {
            let (entry, arena) = (heap.entry(id), heap.arena_of_block(id));
            let same = arena.pool == request.pool && arena.kind == request.kind && entry.size() >= request.size;
            same && self.rules.may_serve(request.kind, entry.size(), request.size)
        };
        let id = self.pending.blocks().filter(fits).min_by_key(|&id| (heap.entry(id).size(), id))?;
        let from = heap.arena_of_block(id).stream;
        let mut uses = self.pending.take(id);
        if from != request.stream {
            uses.push((from, None));
        }
        self.heap.reuse_pending(id, self.slots.requested(id), request);
        Some((self.create_handle(owner, id, request.bytes), uses))
    }

    // Methods for snapshots.

    /// Describes all segments. As in PyTorch, an expandable segment is shown as the parts between its holes.
    fn segments(&self, device: u32) -> Vec<SegmentWithContexts> {
        let parts = |(at, held)| self.heap.mapped(at).into_iter().map(move |part| self.segment(at, held, part, device));
        self.heap.segments().flat_map(parts).collect()
    }

    fn segment(&self, at: u32, held: &SegmentRecord, part: Range<usize>, device: u32) -> SegmentWithContexts {
        let inside = |id: &u32| part.contains(&self.heap.entry(*id).offset());
        let blocks = self.heap.blocks_of(at).filter(inside).map(|id| self.block_info(id));
        let (blocks, contexts) = blocks.unzip();
        let segment = SegmentInfo {
            device,
            address: held.address + part.start as u64,
            total_size: part.len() as u64,
            stream: held.stream.0.into(),
            segment_type: held.kind,
            segment_pool_id: if held.pool == SPILLED_POOL { (2, 0) } else { (0, held.pool.into()) },
            is_expandable: held.segment.is_reserved(),
            frames: [].into(),
            blocks,
        };
        SegmentWithContexts { segment, context: held.context, contexts }
    }

    /// Describes a block, with the call stack of its allocation.
    fn block_info(&self, id: u32) -> (BlockInfo, Context) {
        let entry = self.heap.entry(id);
        let state = match entry.usage() {
            Use::Live if matches!(self.moving.get(&id), Some(AfterMove::Uncache)) => BlockState::Inactive,
            Use::Live => BlockState::ActiveAllocated,
            Use::Pending => BlockState::ActivePendingFree,
            Use::Free | Use::Frozen | Use::Unmapped | Use::Vacant => BlockState::Inactive,
        };
        let live = state != BlockState::Inactive;
        let context = self.heap.contexts.get(&id).copied().filter(|_| live).unwrap_or(Context::NONE);
        let block = BlockInfo {
            address: self.heap.address(id),
            size: entry.size() as u64,
            requested_size: if live { self.slots.requested(id) as u64 } else { 0 },
            state,
            frames: [].into(),
        };
        (block, context)
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
            _ => return Err(self.refuse_too_large(bytes)),
        };
        let (kind, pool) = (SizeKind::of_size(size), mempool::routed_pool(self.number));
        let own = self.caches.of_this_thread();
        if pool == 0
            && stream == StreamId::DEFAULT
            && let Some(shard) = own
            && let Some(CachedBlock { slot, id }) = self.caches.get(shard, size, bytes)
        {
            // SAFETY: the entry is live in the table, and its slot's location was set when it became live.
            return Ok(unsafe { Block::with_table_slot(slot, self.number, id | CACHEABLE_FLAG, size, bytes) });
        }
        let request = Request { bytes, size, kind, pool, stream };
        let mut core = self.lock_without_merge(own);
        core.record_request(&request);
        if core.limits.is_exceeded || core.decay.checks_clock_at(core.heap.ticks) {
            core = self.trim_if_due(core);
        }
        let arena = core.heap.arena(pool, stream, kind);
        if let Some(id) = core.heap.reuse_last_freed(arena, size, bytes) {
            return Ok(core.create_handle_of(self.number, id, bytes, size));
        }
        if core.pending.is_empty()
            && let Some(id) = core.search(arena, &request, Search::Quick, false)
        {
            return Ok(core.create_handle_of(self.number, id, bytes, size));
        }
        drop(core);
        self.recover(&request)
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        let requested = block.requested();
        // Reads the block's slot only if some block has been used by another stream.
        if self.has_cross_stream_use.load(Relaxed) && block.slot().used_by_other_stream.load(Relaxed) {
            return self.deallocate_used_by_others(block, requested);
        }
        let own = self.caches.of_this_thread();
        if block.is_cacheable()
            && let Some(size) = self.rules.round_size(requested)
        {
            let cached = CachedBlock { slot: block.slot_ptr(), id: block.id() };
            match own.map(|shard| self.caches.put(shard, cached, size, requested)) {
                Some(PutOutcome::Kept) => return,
                Some(PutOutcome::Refused) => {}
                Some(PutOutcome::Stale) => self.drain_own_cache(),
                None => self.create_own_cache(),
            }
        }
        self.lock_without_merge(own).free_block_unmerged(block.id(), requested);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if block.owner != self.number {
            return; // only the allocator that made the block knows its number
        }
        let mut core = self.lock();
        if stream == core.heap.arena_of_block(block.id()).stream {
            return;
        }
        core.pending.add_user(block.id(), stream);
        self.has_cross_stream_use.store(true, Relaxed);
        block.slot().used_by_other_stream.store(true, Relaxed);
    }

    fn stats(&self) -> DeviceStats {
        self.drain_caches().heap.stats.stats()
    }

    fn reset_peak_stats(&self) {
        self.drain_caches().heap.stats.reset_peak();
    }

    fn raise_peaks(&self, to: &DeviceStats) {
        self.drain_caches().heap.stats.raise_peaks(to);
    }

    fn reset_accumulated_stats(&self) {
        self.drain_caches().heap.stats.reset_accumulated();
    }

    fn empty_cache(&self) -> Result<()> {
        drop(self.drain_caches());
        self.process_events(true)?;
        let unused = {
            let mut core = self.lock();
            core.growth.restart_warm_up();
            core.heap.remove_unused(0)
        };
        drop(unused); // not under the lock, because releasing segments waits for the device
        self.release_pages(0, 0);
        self.free_spilled();
        Ok(())
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        self.trim_to(keep)
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        self.lock().set_limits(|limits| limits.bytes = bytes);
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        let fraction = check_fraction(fraction)?;
        self.lock().set_limits(|limits| limits.fraction = fraction_of(self.driver.capacity(), fraction));
        Ok(())
    }

    fn compact(&self, budget: u64) -> Result<u64> {
        self.compact_all(budget)
    }

    fn snapshot(&self) -> Snapshot {
        let device = device_number(self.driver.device());
        let (segments, history) = self.with_exact_state(|core| {
            core.heap.history.record(TraceAction::Snapshot, 0, core.heap.stats.active_bytes(), 0);
            (core.segments(device), core.heap.history.copy())
        });
        Snapshot::of_device(device, segments, history, &self.rules.config)
    }

    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        // As in PyTorch, turning recording off also clears the trace, because later events will be missing from it.
        let ends = options.enabled == Recording::Off;
        let options = HistoryOptions { clear_history: options.clear_history || ends, ..options };
        self.with_exact_state(|core| {
            core.heap.history.record_memory_history(options)?;
            if !core.heap.history.is_on() {
                core.heap.contexts.clear();
            }
            Ok(())
        })
    }
}

impl CachingAllocator {
    pub(in crate::storage) fn records_history(&self) -> bool {
        self.lock().heap.history.is_on()
    }
}

impl Drop for CachingAllocator {
    fn drop(&mut self) {
        drop(self.drain_caches());
        let _ = self.process_events(true);
        let core = &mut *self.lock();
        if core.heap.stats.live_blocks() > 0 {
            // Live blocks still point to slots and segments, so slots and segments are leaked.
            tracing::warn!(blocks = core.heap.stats.live_blocks(), "an allocator was dropped before its blocks");
            std::mem::forget(std::mem::take(&mut core.slots));
            std::mem::forget(core.heap.take_segments());
        }
    }
}

/// Measures milliseconds since the allocator was created. Tests can advance the clock.
#[derive(Debug)]
struct Clock {
    started: Instant,
    #[cfg(test)]
    ahead: std::sync::atomic::AtomicU64,
}

impl Clock {
    fn now(&self) -> u64 {
        let elapsed = self.started.elapsed().as_millis() as u64;
        #[cfg(test)] // under Miri, which is slow, only tests advance the clock
        let elapsed = if cfg!(miri) { 0 } else { elapsed } + self.ahead.load(std::sync::atomic::Ordering::Relaxed);
        elapsed
    }
}

#[cfg(test)]
mod tests;
