//! Out-of-memory recovery: the steps tried, in order, when the bins have no block. After each step the bins are
//! searched again. The steps create, extend and release segments.
//!
//! An expandable segment grows in place: an address range larger than the device's memory, in which only used pages are committed.
//! A request that does not fit fills a hole or extends the end, together with adjacent free bytes. Free memory is released in whole
//! pages, which leaves a hole (addresses without memory) between live blocks. When no block is left, the addresses are released
//! too. A dedicated lock lets one thread at a time commit or release pages. Other threads can allocate and free blocks meanwhile.
//!
//! Decay releases segments that have been unused for a while. There is no background thread: the allocator checks the clock every
//! [`SEARCHES_PER_CLOCK_CHECK`](super::policy::SEARCHES_PER_CLOCK_CHECK) searches. Decay keeps at least the peak of active bytes of the last two
//! intervals reserved. If a segment is created soon after a release, decay waits longer before the next release. Nothing is released while any
//! stream has work, because a driver may stall the whole device while it releases memory.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard as PageGuard};

use super::super::allocator::Allocator;
use super::super::block::Block;
use super::super::config::{Config, Spill};
use super::super::driver::host_copy::{self, SpillFile};
use super::super::driver::{Driver, Failure};
use super::super::history::TraceAction;
use super::super::hooks::{FreeMemory, OomObserver, OutOfMemoryEvent, Registration, register};
use super::super::images::desc::OtherMemory;
use super::super::per_device;
use super::super::pool::too_large_error;
use super::super::segment::Segment;
use super::entry::MAX_SEGMENT_BYTES;
use super::heap::{Extension, Request, Search, UnmappedPages};
use super::policy::{Growth, MAX_IDLE_QUERIES, MAX_RESERVED_BYTES, MAX_SYNC_ATTEMPTS, RESERVED_EIGHTHS, SizeKind};
use super::report::Report;
use super::sync::MutexGuard;
use super::{CachingAllocator, Core};
use crate::device::{StreamId, lock, log};
use crate::{Error, Result};

/// The recovery steps, from the cheapest to the most expensive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecoveryStep {
    /// Free pending blocks whose streams have finished.
    Events,
    /// Empty the threads' caches.
    ThreadCaches,
    /// Take another stream's free block, or a pending block, behind a device-side wait.
    OtherStreams,
    /// Release unused segments older than the garbage collector's threshold, if `garbage_collection_threshold` is set.
    Collect,
    /// Create a segment of the usual size, or extend an expandable one.
    Grow,
    /// Call the user's free-memory callbacks.
    Callbacks,
    /// Ask other allocators of the device to release unused memory, then try to grow again.
    OtherAllocators,
    /// Release unused segments too large to be split, if `max_split_size_mb` is set, then try to grow again.
    Oversize,
    /// Wait for all streams, so that every pending block is free and may serve any stream.
    Wait,
    /// Release every unused segment, and create a segment of exactly the requested size.
    Release,
    /// Search the bins of the other size kind (small or large).
    OtherKind,
    /// Search the memory pools that have `use_on_oom`.
    UseOnOomPools,
    /// Move live blocks together.
    Compact,
    /// Move idle blocks to the host, if `spill` is set, and live blocks together after that.
    Spill,
}

const RECOVERY_STEPS: [RecoveryStep; 14] = [
    RecoveryStep::Events,
    RecoveryStep::ThreadCaches,
    RecoveryStep::OtherStreams,
    RecoveryStep::Collect,
    RecoveryStep::Grow,
    RecoveryStep::Callbacks,
    RecoveryStep::OtherAllocators,
    RecoveryStep::Oversize,
    RecoveryStep::Wait,
    RecoveryStep::Release,
    RecoveryStep::OtherKind,
    RecoveryStep::UseOnOomPools,
    RecoveryStep::Compact,
    RecoveryStep::Spill,
];

fn count_served(_step: RecoveryStep) {
    #[cfg(test)]
    SERVED_BY_STEP.with_borrow_mut(|served| *served.entry(format!("{_step:?}")).or_default() += 1);
}

/// The results of the recovery steps so far, for the error and the log.
#[derive(Default)]
pub(super) struct OomRecovery {
    /// Why the driver created no segment; `None` if it did not refuse one.
    pub(super) failure: Option<Failure>,
    /// The kind of the memory that was created and its size in bytes, for a log message.
    pub(super) growth_message: Option<(&'static str, u64)>,
    /// True if the memory is for a block that returns from the host. The thread may hold locks of other blocks, so no callback is called.
    /// The block returns to an arena of its own kind. A pending block is not taken, because the statistics would count a new allocation.
    pub(super) is_return: bool,
}

impl OomRecovery {
    pub(super) fn for_return() -> OomRecovery {
        OomRecovery { is_return: true, ..OomRecovery::default() }
    }
}

/// State of an allocator with expandable segments.
#[derive(Debug)]
pub(super) struct Expandable {
    /// The unit, in bytes, in which memory is committed and released.
    pub(super) page: usize,
    /// Addresses to reserve for a segment, in bytes.
    bytes: usize,
    /// The page lock, held while pages are committed or released.
    pages: Mutex<()>,
}

impl Expandable {
    /// Checks the configuration against the driver. Returns `None` if `expandable_segments` is off.
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> Result<Option<Expandable>> {
        let fail = |reason: String| Err(Error::invalid("expandable_segments", reason));
        let page = driver.page().max(driver.alignment());
        match config.expandable_segments {
            false => Ok(None),
            true if driver.page() == 0 => fail(format!(
                "the driver of {} cannot reserve addresses: leave it False, and rely on compaction",
                driver.device()
            )),
            true if config.max_split_size < usize::MAX => {
                fail("expandable segments are always split: leave max_split_size_mb out, or this key False".to_owned())
            }
            true => {
                let bytes = (driver.capacity() / 8)
                    .saturating_mul(RESERVED_EIGHTHS)
                    .clamp(page as u64, MAX_RESERVED_BYTES) as usize;
                Ok(Some(Expandable { page, bytes: bytes.next_multiple_of(page), pages: Mutex::new(()) }))
            }
        }
    }
}

/// The reason why no expandable segment grows for a request.
pub(super) enum CannotExpand {
    /// The memory limit is reached, or the device has no memory left.
    Full,
    /// No expandable segment can serve the request, so it needs an ordinary segment.
    NeedsOwnSegment,
}

impl CachingAllocator {
    /// Registers `free`, which is called when an allocation would exceed the device's memory or the limit. `free` may release memory that
    /// the program can spare, and returns whether it did (PyTorch's `FreeMemoryCallback`). The allocator then searches again.
    ///
    /// The allocating thread calls `free` with no allocator lock held, so `free` may allocate.
    pub fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Registration {
        register(&self.hooks.free_memory, Arc::from(free))
    }

    /// Registers `observe`, which is called when an allocation fails for lack of memory, before the error is returned
    /// (PyTorch's `attachOutOfMemoryObserver`).
    ///
    /// The allocating thread calls `observe` with no allocator lock held, so `observe` may query statistics, take a snapshot, or allocate.
    pub fn add_oom_observer(&self, observe: Box<OomObserver>) -> Registration {
        register(&self.hooks.observers, Arc::from(observe))
    }

    /// Releases unused memory and calls the free-memory callbacks, because images need memory of the device.
    pub(in crate::storage) fn make_room(&self) -> Result<()> {
        self.hooks.call_free_memory_callbacks();
        self.empty_cache()
    }

    /// Recovers memory for a request that the first search did not serve.
    #[cold]
    pub(super) fn recover_memory(&self, request: &Request, mut recovery: OomRecovery) -> Result<Block> {
        self.update_held_elsewhere();
        self.free_spilled();
        let found = self.run_recovery_steps(request, &mut recovery);
        // The message is logged last, because a subscriber may allocate and some steps hold locks.
        if let Some((what, bytes)) = recovery.growth_message {
            let device = self.driver.device();
            log::emit(move || tracing::debug!(%device, bytes, "{what}"));
        }
        found?.ok_or_else(|| self.out_of_memory(request, recovery))
    }

    /// Tries the recovery steps until one serves the request.
    fn run_recovery_steps(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        for step in RECOVERY_STEPS {
            if let Some(block) = self.run_recovery_step(step, request, recovery)? {
                count_served(step);
                return Ok(Some(block));
            }
            // Until the step `Grow`, the adaptive policy does not split an unused segment that is much larger than the request,
            // while it warms up.
            let any = step as usize >= RecoveryStep::Grow as usize;
            if let Some(block) = self.lock_with_stats().search_best_fit(self.number, request, any) {
                count_served(step);
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Runs one recovery step. Returns a block if the step itself allocated it.
    fn run_recovery_step(
        &self,
        step: RecoveryStep,
        request: &Request,
        recovery: &mut OomRecovery,
    ) -> Result<Option<Block>> {
        match step {
            RecoveryStep::OtherStreams
            | RecoveryStep::Callbacks
            | RecoveryStep::OtherKind
            | RecoveryStep::UseOnOomPools
                if recovery.is_return => {}
            RecoveryStep::Events => {
                self.process_events(false)?;
            }
            RecoveryStep::ThreadCaches => drop(self.drain_caches()),
            RecoveryStep::OtherStreams => return Ok(self.take_with_wait(request)),
            RecoveryStep::Collect if self.collect_garbage(request) => count_served(step), // a later step uses the freed memory
            RecoveryStep::Collect => {}
            RecoveryStep::Grow => return self.grow(request, false, recovery),
            RecoveryStep::Callbacks => {
                if self.hooks.call_free_memory_callbacks() {
                    self.process_events(false)?;
                    drop(self.drain_caches());
                }
            }
            RecoveryStep::OtherAllocators => {
                if self.other_memory().map_or(Ok(false), OtherMemory::make_room)? {
                    self.update_held_elsewhere();
                    return self.grow(request, false, recovery);
                }
            }
            RecoveryStep::Oversize => {
                if self.rules.config.max_split_size < usize::MAX {
                    let released = self.lock().remove_oversize(request.size);
                    if !released.is_empty() {
                        drop(released);
                        return self.grow(request, false, recovery);
                    }
                }
            }
            RecoveryStep::Wait => {
                self.wait_for_streams(request)?;
                let mut core = self.lock();
                core.heap.stats.num_alloc_retries += 1;
                core.heap.stats.num_sync_all_streams += 1;
            }
            // The driver never creates a segment of this size, however much memory is free. So the cache is kept.
            RecoveryStep::Release | RecoveryStep::Compact | RecoveryStep::Spill
                if matches!(recovery.failure, Some(Failure::TooBig)) => {}
            RecoveryStep::Release => {
                let unused = self.lock().heap.remove_unused(0);
                drop(unused);
                self.release_pages(0, 0);
                return self.grow(request, true, recovery);
            }
            RecoveryStep::Compact if self.may_spill_for(request) => {} // `Spill` compacts last
            RecoveryStep::Compact => return self.compact_for(request, recovery),
            RecoveryStep::Spill => return self.spill_for(request, recovery),
            RecoveryStep::OtherKind => {
                let other = Request { kind: request.kind.opposite(), ..*request };
                return Ok(self.lock_with_stats().search_best_fit(self.number, &other, true));
            }
            RecoveryStep::UseOnOomPools => {
                let mut core = self.lock_with_stats();
                for pool in core.pools_with_use_on_oom(request).collect::<Vec<_>>() {
                    for kind in [request.kind, request.kind.opposite()] {
                        let borrowed = Request { pool, kind, ..*request };
                        if let Some(block) = core.search_best_fit(self.number, &borrowed, true) {
                            return Ok(Some(block));
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    fn other_memory(&self) -> Option<&'static OtherMemory> {
        per_device::get(self.driver.device())
    }

    /// Updates the bytes that other allocators of this device hold, which count towards the limits.
    fn update_held_elsewhere(&self) {
        let elsewhere = self.other_memory().map_or(0, OtherMemory::held); // takes their locks, so this one is not held
        self.lock().limits.elsewhere = elsewhere;
    }

    /// Waits for all streams, and moves their free blocks to the request's stream. If a block was freed during the
    /// wait, work that uses the block may be unfinished, so the wait is repeated up to [`MAX_SYNC_ATTEMPTS`] times.
    pub(super) fn wait_for_streams(&self, request: &Request) -> Result<()> {
        for _ in 0..MAX_SYNC_ATTEMPTS {
            let freed_blocks = self.drain_caches().heap.freed_blocks;
            self.synchronize()?;
            self.process_events(true)?;
            let mut core = self.lock();
            if core.heap.freed_blocks == freed_blocks {
                let pools = core.pools_with_use_on_oom(request).chain([request.pool]).collect::<Vec<_>>();
                for (pool, kind) in
                    pools.into_iter().flat_map(|pool| [(pool, SizeKind::Small), (pool, SizeKind::Large)])
                {
                    core.move_free_blocks_to_stream(&Request { pool, kind, ..*request });
                }
                break;
            }
        }
        Ok(())
    }

    /// Records the failed request, notifies the observers, and builds the error.
    fn out_of_memory(&self, request: &Request, OomRecovery { failure, is_return, .. }: OomRecovery) -> Error {
        let config = &self.rules.config;
        let report = {
            let mut core = self.lock_with_stats();
            core.heap.stats.num_ooms += 1;
            let free = self.driver.capacity().saturating_sub(core.heap.stats.reserved()).min(i64::MAX as u64); // the trace format stores an `i64`
            core.heap.history.record(TraceAction::Oom, free, request.bytes as u64, request.stream.0);
            let mut pools = vec![(0, core.heap.pool_stats(0), true)];
            pools.extend(core.pools.iter().map(|(&id, options)| (id, core.heap.pool_stats(id), options.use_on_oom)));
            Report {
                size: request.size as u64,
                pool: request.pool,
                capacity: self.driver.capacity(),
                limit: core.limits.allowed(),
                stats: core.heap.stats.stats(),
                pools,
                spilled: core.heap.stats.spilled_bytes.current,
                idle: core.idle_bytes(),
                spill: config.spill,
                shares_host: host_copy::shares_host_memory(self.driver.device()),
                spill_limit: config.spill_limit as u64,
                elsewhere: core.limits.elsewhere,
                ran_out: failure.as_ref().and_then(Failure::ran_out),
                could_compact: !config.compaction,
                could_limit_splitting: config.max_split_size == usize::MAX && !config.expandable_segments,
                could_grow: !config.expandable_segments && self.driver.page() > 0,
            }
        };
        if !is_return {
            self.hooks.notify_observers(|| OutOfMemoryEvent {
                device: self.driver.device(),
                requested: request.bytes,
                allowed: report.limit,
                device_free: report.capacity.saturating_sub(report.stats.reserved_bytes.current + report.elsewhere),
            });
        }
        if matches!(failure, Some(Failure::TooBig)) {
            return self.too_large(request.bytes);
        }
        let mut detail = report.to_string();
        if config.spill == Spill::Disk
            && let Err(Error::OutOfMemory { detail: why, .. }) = SpillFile::of_process()
        {
            detail = format!("{detail}. {why}");
        }
        Error::OutOfMemory { device: self.driver.device(), requested: request.bytes, detail }
    }

    /// Builds the error for a request that exceeds the largest possible segment.
    pub(super) fn too_large(&self, requested: usize) -> Error {
        too_large_error(&*self.driver, requested, MAX_SEGMENT_BYTES.min(self.driver.largest_segment() as u64))
    }

    // Methods that create and release segments.

    /// Creates a segment for the request and allocates its first block. Returns `None` if the memory limit or the device does not
    /// allow the segment, and stores the reason in `recovery`. If `exact`, the segment is no larger than the request.
    pub(super) fn grow(&self, request: &Request, exact: bool, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        match self.expand(request, exact, recovery)? {
            Ok(block) => return Ok(Some(block)),
            Err(CannotExpand::Full) => return Ok(None),
            Err(CannotExpand::NeedsOwnSegment) => {}
        }
        let (bytes, recycled) = {
            let mut core = self.lock();
            let Some(bytes) = core.segment_size(request, exact, self.driver.largest_segment()) else { return Ok(None) };
            let recycled = if exact { Vec::new() } else { core.recycle(request.size) };
            core.growth.record_created(bytes);
            core.bytes_being_created += bytes as u64;
            (bytes, recycled)
        };
        drop(recycled);
        let made = self.driver.create(bytes);
        let segment = made.map(|memory| Arc::new(Segment::new(memory, bytes)));
        let mut guard = self.lock_with_stats();
        let core = &mut *guard;
        core.bytes_being_created -= bytes as u64;
        match segment {
            Ok(segment) => {
                core.heap.now = self.clock.now();
                let arena = core.heap.arena(request.pool, request.stream, request.kind);
                let id = core.heap.add_segment(segment, bytes, arena);
                core.growth.raise_target(core.heap.stats.reserved());
                core.decay.record_segment_created(self.clock.now());
                let id = core.heap.allocate_from(id, request.size, request.bytes);
                let block = core.create_handle(self.number, id, request.bytes);
                recovery.growth_message = Some(("segment made", bytes as u64));
                Ok(Some(block))
            }
            // This error is not reported, because a segment of exactly the requested size may still be possible.
            Err(Failure::TooBig) if bytes > request.size => Ok(None),
            Err(Failure::Other(error)) => Err(error),
            Err(other) => {
                recovery.failure = Some(other);
                Ok(None)
            }
        }
    }

    /// Releases unused segments until a lowered limit is met, or none is left.
    #[cold]
    pub(super) fn release_above_limit<'a>(&'a self, core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if !core.limits.is_exceeded {
            return core;
        }
        drop(core);
        let mut core = self.drain_caches();
        core.limits.is_exceeded = false;
        let limit = core.limits.limit();
        let excess = core.heap.stats.reserved().saturating_sub(limit);
        let unused = core.heap.first_blocks_of_unused_segments(0);
        let unused = core.remove_at_least(excess, unused);
        drop(core);
        drop(unused);
        self.release_pages(0, limit);
        self.lock_with_stats()
    }

    /// Runs PyTorch's garbage collection: if the threshold is exceeded, releases large segments that have been unused
    /// for longer than average, until enough is free. Returns true if any memory was released. Never waits.
    pub(super) fn collect_garbage(&self, request: &Request) -> bool {
        let (freed, keep) = {
            let mut core = self.lock();
            core.heap.merge_unused(|stream| self.driver.progress(stream));
            core.collect_garbage(request.size as u64)
        };
        let any = !freed.is_empty() || keep.is_some();
        drop(freed);
        if let Some(keep) = keep {
            self.release_pages(0, keep);
        }
        any
    }

    /// Releases segments that have been unused for long enough, if a check is due and the device is idle.
    #[cold]
    pub(super) fn decay<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if !core.decay.checks_clock_at(core.heap.ticks) {
            return core;
        }
        let now = self.clock.now();
        let (ticks, active) = (core.heap.ticks, core.heap.stats.active_bytes_on_device());
        let due = core.decay.is_due(now);
        if due {
            core.heap.record_segment_ends();
        }
        let old = core.decay.record_check(now, ticks, active);
        let any = |old| {
            !core.segments_unused_since(old).is_empty()
                || core.heap.has_unused_ends(self.expandable.as_ref().map_or(0, |expandable| expandable.page))
        };
        if !(old.is_some_and(any) || due && !core.heap.unused_of_several_streams(0).is_empty()) {
            return core;
        }
        let streams = core.heap.streams();
        drop(core);
        if self.is_idle(streams) {
            let mut core = self.lock();
            core.heap.now = now;
            core.heap.merge_unused(|stream| self.driver.progress(stream));
            let segments_unused_since = old.map_or_else(Vec::new, |old| core.segments_unused_since(old));
            let keep = core.decay.bytes_to_keep();
            let freed = core.remove_above(segments_unused_since, keep);
            drop(core);
            let any = !freed.is_empty();
            drop(freed);
            if old.is_some() && self.release_unused_ends(keep) > 0 || any {
                self.lock().decay.record_released(now);
            }
        }
        self.lock_with_stats()
    }

    /// True if every stream has finished its work. Queries a stream for at most some microseconds.
    fn is_idle(&self, streams: BTreeSet<StreamId>) -> bool {
        let is_idle = |stream| (0..MAX_IDLE_QUERIES).any(|_| self.driver.is_idle(stream).unwrap_or(false));
        streams.into_iter().all(is_idle)
    }

    /// Releases unused segments, the largest first, while at least `keep` bytes stay reserved. Returns the number of bytes released.
    pub(super) fn trim_to(&self, keep: u64) -> Result<u64> {
        self.process_events(false)?;
        let streams = self.drain_caches().heap.streams();
        if !self.is_idle(streams) {
            return Ok(0);
        }
        let (freed, bytes) = {
            let mut core = self.lock();
            let held = core.heap.stats.reserved();
            let mut unused = core.heap.unused_segments(0);
            unused.sort_unstable_by_key(|&at| Reverse((core.heap.committed_bytes(at), at)));
            let freed = core.remove_above(unused, keep);
            (freed, held - core.heap.stats.reserved())
        };
        drop(freed);
        Ok(bytes + self.release_pages(0, keep))
    }

    // Methods for segments that grow in place.

    /// Grows the segment of the request's arena and allocates a block from it. If `exact`, commits no more than the request needs.
    pub(super) fn expand(
        &self,
        request: &Request,
        exact: bool,
        recovery: &mut OomRecovery,
    ) -> Result<Result<Block, CannotExpand>> {
        let Some(expandable) = &self.expandable else { return Ok(Err(CannotExpand::NeedsOwnSegment)) };
        if request.size > expandable.bytes {
            return Ok(Err(CannotExpand::NeedsOwnSegment));
        }
        let _page_lock = lock(&expandable.pages);
        loop {
            let (extension, unmapped) = {
                let mut core = self.lock_with_stats();
                // A free block may suffice: the whole segment may be free, or another thread may have just extended it.
                if let Some(block) = core.search_best_fit(self.number, request, true) {
                    return Ok(Ok(block));
                }
                let unmapped = if exact { Vec::new() } else { core.recycle_pages(expandable, request) };
                let extension = core.plan_extension(expandable, request, exact);
                core.bytes_being_created += extension.as_ref().map_or(0, Extension::bytes);
                (extension, unmapped)
            };
            self.decommit(unmapped);
            let extension = match extension {
                Ok(extension) => extension,
                Err(reason) => return Ok(Err(reason)),
            };
            let bytes = extension.bytes();
            let segment = extension.segment.as_ref().map(|(_, segment)| Arc::clone(segment)).or_else(|| {
                let memory = self.driver.reserve(expandable.bytes)?;
                Some(Arc::new(Segment::reserved(memory, expandable.bytes)))
            });
            let Some(segment) = segment else {
                self.lock().bytes_being_created -= bytes;
                return Ok(Err(CannotExpand::NeedsOwnSegment)); // no addresses are left to reserve
            };
            if let Err(why) = self.commit_all(&segment, &extension) {
                self.lock().bytes_being_created -= bytes;
                return match why {
                    Failure::Other(error) => Err(error),
                    other => {
                        recovery.failure = Some(other);
                        Ok(Err(CannotExpand::Full))
                    }
                };
            }
            let mut guard = self.lock_with_stats();
            let core = &mut *guard;
            core.bytes_being_created -= bytes;
            core.heap.now = self.clock.now();
            let arena = core.heap.arena(request.pool, request.stream, request.kind);
            match &extension.segment {
                None => _ = core.heap.add_segment(segment, extension.end.len(), arena),
                Some((at, _)) if core.heap.is_segment(*at, &segment) => core.heap.extend(*at, &extension, arena),
                Some(_) => {
                    drop(guard); // another thread released the segment, together with the newly committed pages
                    continue;
                }
            }
            core.growth.raise_target(core.heap.stats.reserved());
            core.decay.record_segment_created(self.clock.now());
            // Another thread may have taken the free bytes that the extension relied on; if so, try again.
            if let Some(block) = core.search_best_fit(self.number, request, true) {
                recovery.growth_message = Some(("segment extended", bytes));
                return Ok(Ok(block));
            }
        }
    }

    /// Commits all ranges of an extension, or none.
    fn commit_all(&self, segment: &Segment, extension: &Extension) -> Result<(), Failure> {
        for (done, range) in extension.ranges().enumerate() {
            if let Err(why) = self.driver.extend(segment.memory(), range.start, range.end) {
                for range in extension.ranges().take(done) {
                    // SAFETY: these pages were committed just now, and the table does not contain them yet.
                    unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
                }
                return Err(why);
            }
        }
        Ok(())
    }

    /// Takes the page lock: until the guard is dropped, only this thread commits or releases pages.
    pub(super) fn lock_pages(&self) -> Option<PageGuard<'_, ()>> {
        self.expandable.as_ref().map(|expandable| lock(&expandable.pages))
    }

    /// Releases free pages of a pool's segments, the longest runs first, while at least `keep` bytes stay reserved. Returns the
    /// number of bytes released.
    pub(super) fn release_pages(&self, pool: u32, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _page_lock = lock(&expandable.pages);
        let unmapped = {
            let mut core = self.lock();
            let spare = core.heap.stats.reserved().saturating_sub(keep);
            core.heap.unmap_free_pages(pool, spare, &[], expandable.page)
        };
        self.decommit(unmapped)
    }

    /// Like [`release_pages`](Self::release_pages), for the segment ends that were unused at all of decay's recent checks.
    pub(super) fn release_unused_ends(&self, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _page_lock = lock(&expandable.pages);
        let unmapped = {
            let mut core = self.lock();
            let heap = &mut core.heap;
            let held = heap.segments().filter(|(_, held)| held.pool == 0 && held.segment.is_reserved());
            let segments: Vec<(u32, usize)> = held.map(|(at, held)| (at, held.end.last_used())).collect();
            let cut = |(at, floor): (u32, usize)| {
                let spare = heap.stats.reserved().saturating_sub(keep);
                let last = heap.last_block(at);
                heap.unmap(last, spare, floor, expandable.page)
            };
            segments.into_iter().filter_map(cut).collect()
        };
        self.decommit(unmapped)
    }

    /// Decommits pages that were removed from the table. The caller must hold the page lock. Returns the number of bytes released.
    pub(super) fn decommit(&self, unmapped: Vec<UnmappedPages>) -> u64 {
        let decommit = |(segment, range): UnmappedPages| {
            // SAFETY: the pages are in no block, and no block can be created on these pages before the page lock is released.
            unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
            range.len() as u64
        };
        unmapped.into_iter().map(decommit).sum()
    }
}

impl Core {
    /// Searches an arena and takes a block. Unless `any`, an unused segment is taken only if the policy permits splitting it.
    #[inline(always)]
    pub(super) fn search(&mut self, arena: u32, request: &Request, search: Search, any: bool) -> Option<u32> {
        let only_similar = !any && self.rules.is_adaptive() && !self.growth.steady;
        let max_split_segment = || match only_similar {
            true => {
                let segment = self.rules.segment_size(request.size, self.heap.stats.reserved());
                Growth::max_segment_to_split(segment.unwrap_or(request.size))
            }
            false => usize::MAX,
        };
        let id = self.heap.find_free(arena, request.size, search, max_split_segment)?;
        Some(self.heap.allocate_from(id, request.size, request.bytes))
    }

    /// Like [`search`](Self::search), but looks for the best fit and returns a handle.
    pub(super) fn search_best_fit(&mut self, owner: u32, request: &Request, any: bool) -> Option<Block> {
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let id = self.search(arena, request, Search::Thorough, any)?;
        Some(self.create_handle(owner, id, request.bytes))
    }

    /// Iterates over the other memory pools that have `use_on_oom`.
    fn pools_with_use_on_oom(&self, request: &Request) -> impl Iterator<Item = u32> {
        let others = self.pools.iter().filter(|(id, options)| options.use_on_oom && **id != request.pool);
        others.map(|(&id, _)| id)
    }

    /// Moves all free blocks of the request's pool and kind to its stream, and merges them. The caller must have waited for all streams.
    pub(super) fn move_free_blocks_to_stream(&mut self, request: &Request) {
        let home = self.heap.arena(request.pool, request.stream, request.kind);
        let others: Vec<u32> = (0..)
            .zip(self.heap.arenas())
            .filter(|(at, arena)| *at != home && (arena.pool, arena.kind) == (request.pool, request.kind))
            .map(|(at, _)| at)
            .collect();
        for arena in others {
            while let Some(id) = self.heap.any_free(arena) {
                self.heap.move_to_arena(id, home);
            }
        }
    }

    /// Returns the size in bytes of a new segment within the limit; `None` if the limit does not allow a segment for the request.
    fn segment_size(&self, request: &Request, exact: bool, largest: usize) -> Option<usize> {
        let reserved = self.heap.stats.reserved() + self.bytes_being_created;
        let room = usize::try_from(self.limits.limit().saturating_sub(reserved)).unwrap_or(usize::MAX);
        let own = self.rules.is_adaptive() && self.heap.is_unsplit(request.pool);
        if exact || own {
            return Some(request.size).filter(|&size| size <= room);
        }
        let usual = self.rules.segment_size(request.size, reserved)?;
        // The driver may create segments larger than the size it guarantees, so a larger request is still tried.
        Some(usual.min(largest.max(request.size))).filter(|&size| size <= room)
    }

    /// Removes unused segments from the table, so that a new one for `size` bytes does not exceed the target of
    /// reserved bytes. Removes as few segments as possible, the largest first.
    fn recycle(&mut self, size: usize) -> Vec<Arc<Segment>> {
        if !self.rules.is_adaptive() {
            return Vec::new();
        }
        let reserved = self.heap.stats.reserved() + self.bytes_being_created;
        let excess = self.growth.bytes_to_release(reserved, size as u64);
        if excess == 0 {
            return Vec::new();
        }
        let bytes = |core: &Core, id: u32| core.heap.segment_of(id).committed() as u64;
        let mut unused = self.heap.first_blocks_of_unused_segments(0);
        unused.sort_unstable_by_key(|&id| Reverse((bytes(self, id), id)));
        let mut sum = 0;
        let enough = unused.iter().position(|&id| {
            sum += bytes(self, id);
            sum >= excess
        });
        if let Some(last) = enough {
            unused.truncate(last + 1);
            unused.retain(|&id| {
                let needed = sum - bytes(self, id) < excess;
                sum -= if needed { 0 } else { bytes(self, id) };
                needed
            });
        }
        unused.iter().for_each(|&id| self.growth.record_recycled(bytes(self, id) as usize));
        unused.into_iter().map(|id| self.heap.remove_whole(id)).collect()
    }

    /// Removes unused segments from the table, the largest first, until the removed segments have at least `bytes` bytes together.
    fn remove_at_least(&mut self, bytes: u64, mut unused: Vec<u32>) -> Vec<Arc<Segment>> {
        unused.sort_unstable_by_key(|&id| Reverse((self.heap.segment_of(id).committed(), id)));
        let (mut left, mut removed) = (bytes, Vec::new());
        for id in unused {
            if left > 0 {
                left = left.saturating_sub(self.heap.segment_of(id).committed() as u64);
                removed.push(self.heap.remove_whole(id));
            }
        }
        removed
    }

    /// Removes oversize segments from the table, as PyTorch does first if `max_split_size_mb` is set, because they serve few requests. Removes the
    /// smallest unused oversize segment that is large enough for the request, or else the largest ones until they are large enough together.
    fn remove_oversize(&mut self, size: usize) -> Vec<Arc<Segment>> {
        let max = self.rules.config.max_split_size;
        let bytes = |id: u32| self.heap.segment_of(id).committed();
        let mut unused = self.heap.first_blocks_of_unused_segments(0);
        unused.retain(|&id| bytes(id) >= max);
        let enough = unused.iter().copied().filter(|&id| bytes(id) >= size);
        match enough.min_by_key(|&id| (bytes(id), id)) {
            Some(id) => vec![self.heap.remove_whole(id)],
            None => self.remove_at_least(size as u64, unused),
        }
    }

    /// Removes the segments to release from the table and returns them. Also returns, if they do not suffice, how many bytes may
    /// stay reserved.
    fn collect_garbage(&mut self, size: u64) -> (Vec<Arc<Segment>>, Option<u64>) {
        let threshold = self.rules.config.garbage_collection_threshold;
        let reserved = self.heap.stats.reserved();
        let most = (self.limits.limit() as f64 * threshold) as u64;
        if threshold == 0.0 || reserved + size <= most {
            return (Vec::new(), None);
        }
        let mut freed = Vec::new();
        let mut left = reserved + size - most;
        while left > 0 {
            let mut unused = self.heap.whole_blocks(0);
            unused.retain(|&id| self.heap.segment_of(id).kind == SizeKind::Large);
            let age = |core: &Core, id: u32| core.heap.ticks - core.heap.segment_of(id).idle_since.0;
            let total: u64 = unused.iter().map(|&id| age(self, id)).sum();
            let Some(average) = total.checked_div(unused.len() as u64) else { break };
            unused.retain(|&id| age(self, id) >= average);
            for id in unused {
                if left > 0 {
                    left = left.saturating_sub(self.heap.entry(id).size() as u64);
                    freed.push(self.heap.remove_whole(id));
                }
            }
        }
        (freed, (left > 0).then(|| most.saturating_sub(size)))
    }

    /// Returns the segments unused since before search `old`, the longest unused first.
    fn segments_unused_since(&self, old: u64) -> Vec<u32> {
        let idle = |at: u32| self.heap.segment(at).map_or(0, |held| held.idle_since.0);
        let whole = self.heap.whole_blocks(0).into_iter().map(|id| self.heap.entry(id).segment);
        let mut unused: Vec<u32> = whole.filter(|&at| idle(at) < old).collect();
        unused.sort_unstable_by_key(|&at| (idle(at), at));
        unused
    }

    /// Removes each given segment from the table, unless fewer than `keep` bytes would stay reserved.
    fn remove_above(&mut self, segments: Vec<u32>, keep: u64) -> Vec<Arc<Segment>> {
        let mut freed = Vec::new();
        for at in segments {
            if self.heap.stats.reserved() >= keep.saturating_add(self.heap.committed_bytes(at)) {
                freed.push(self.heap.remove_segment(at));
            }
        }
        freed
    }

    /// Chooses where to grow for a request that no free block serves.
    fn plan_extension(
        &mut self,
        expandable: &Expandable,
        request: &Request,
        exact: bool,
    ) -> Result<Extension, CannotExpand> {
        if self.heap.is_unsplit(request.pool) {
            return Err(CannotExpand::NeedsOwnSegment); // each block of an unsplit pool is a segment of its own
        }
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let own: Vec<u32> = (self.heap.segments())
            .filter(|(_, held)| held.segment.is_reserved())
            .filter(|(_, held)| (held.pool, held.stream, held.kind) == (request.pool, request.stream, request.kind))
            .map(|(at, _)| at)
            .collect();
        let best = own.into_iter().find_map(|at| {
            let found = self.heap.possible_extensions(at, arena, request.size, expandable.page);
            found.into_iter().min_by_key(Extension::bytes)
        });
        let new = || Extension {
            segment: None,
            holes: Vec::new(),
            end: 0..request.size.next_multiple_of(expandable.page),
            spared: Vec::new(),
        };
        let mut extension = best.unwrap_or_else(new);
        let all = extension.segment.as_ref().map_or(expandable.bytes, |(_, segment)| segment.bytes());
        if extension.end.end > all {
            return Err(CannotExpand::NeedsOwnSegment);
        }
        let held = self.heap.stats.reserved() + self.bytes_being_created;
        let (least, room) = (extension.bytes(), self.limits.limit().saturating_sub(held));
        if least > room {
            return Err(CannotExpand::Full);
        }
        if !exact && !extension.end.is_empty() {
            let Range { start, end } = extension.end;
            let more = self.rules.extension(request.kind, start, end - start, held).saturating_sub(end - start);
            let more = more.min(usize::try_from(room - least).unwrap_or(usize::MAX)).min(all - end);
            extension.end = start..end + more / expandable.page * expandable.page;
        }
        Ok(extension)
    }

    /// Removes free pages from the table, so that the request's extension does not exceed the target of reserved bytes.
    fn recycle_pages(&mut self, expandable: &Expandable, request: &Request) -> Vec<UnmappedPages> {
        if !self.rules.is_adaptive() {
            return Vec::new();
        }
        let Ok(extension) = self.plan_extension(expandable, request, true) else { return Vec::new() };
        let held = self.heap.stats.reserved() + self.bytes_being_created;
        match self.growth.bytes_to_release(held, extension.bytes()) {
            0 => Vec::new(),
            excess => {
                let excess = excess.next_multiple_of(expandable.page as u64);
                let unmapped = self.heap.unmap_free_pages(0, excess, &extension.spared, expandable.page);
                unmapped.first().into_iter().for_each(|(_, range)| self.growth.record_recycled(range.len()));
                unmapped
            }
        }
    }
}

// For tests: counts this thread's requests that each step served, and the garbage collections that released a segment.
#[cfg(test)]
thread_local!(pub(super) static SERVED_BY_STEP: std::cell::RefCell<std::collections::BTreeMap<String, u64>> = Default::default());
