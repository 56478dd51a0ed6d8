//! Out-of-memory recovery: the steps tried, in order, when the bins have no block. The bins are searched again after each.

use super::super::block::Block;
use super::super::driver::Failure;
use super::super::hooks::{FreeMemory, OomObserver, Registration};
use super::grow::Growth;
use super::heap::Search;
use super::{CachingAllocator, Core, Request, SizeKind};
use crate::Result;

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
    /// Search the bins of the other size kind.
    OtherKind,
    /// Search the memory pools that have `use_on_oom`.
    UseOnOomPools,
    /// Move live blocks together.
    Compact,
}

const RECOVERY_STEPS: [RecoveryStep; 13] = [
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
];

// For tests: the number of this thread's requests that each step served, and of collections that released a segment.
#[cfg(test)]
thread_local!(pub(super) static SERVED_BY_STEP: std::cell::RefCell<std::collections::BTreeMap<String, u64>> = Default::default());

fn count_served(_step: RecoveryStep) {
    #[cfg(test)]
    SERVED_BY_STEP.with_borrow_mut(|served| *served.entry(format!("{_step:?}")).or_default() += 1);
}

/// Waits for all streams before giving up, while other threads keep freeing blocks.
const MAX_SYNC_ATTEMPTS: usize = 4;

/// The outcome of the recovery steps so far.
#[derive(Default)]
pub(super) struct OomRecovery {
    /// Why the driver created no segment.
    pub(super) failure: Option<Failure>,
    /// The kind of memory created, for the log, and its size in bytes.
    pub(super) growth_message: Option<(&'static str, u64)>,
}

impl CachingAllocator {
    /// Registers `free`, which is called when the device or the limit has no room for an allocation. `free` may drop memory it can spare, and returns
    /// whether it did (PyTorch's `FreeMemoryCallback`). The allocator then searches again.
    ///
    /// The allocating thread calls `free` with no allocator lock held, so `free` may allocate.
    pub fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Registration {
        self.hooks.add_free_memory_callback(free)
    }

    /// Registers `observe`, which is called when an allocation fails for lack of memory, before the error is returned
    /// (PyTorch's `attachOutOfMemoryObserver`).
    ///
    /// The allocating thread calls `observe` with no allocator lock held, so `observe` may query statistics, take a snapshot, or allocate.
    pub fn add_oom_observer(&self, observe: Box<OomObserver>) -> Registration {
        self.hooks.add_oom_observer(observe)
    }

    /// Recovers memory for a request that the first search did not serve.
    #[cold]
    pub(super) fn recover_memory(&self, request: &Request) -> Result<Block> {
        let mut recovery = OomRecovery::default();
        self.update_held_elsewhere();
        self.free_spilled();
        let found = self.run_recovery_steps(request, &mut recovery);
        // Logged last: a subscriber may allocate, and some steps hold locks.
        if let Some((what, bytes)) = recovery.growth_message {
            tracing::debug!(device = %self.driver.device(), bytes, "{what}");
        }
        found?.ok_or_else(|| self.out_of_memory(request, recovery.failure))
    }

    /// Tries the recovery steps until one serves the request.
    fn run_recovery_steps(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        for step in RECOVERY_STEPS {
            if let Some(block) = self.run_recovery_step(step, request, recovery)? {
                count_served(step);
                return Ok(Some(block));
            }
            // Until growing has failed, unused segments are reserved for requests that fill them.
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
            RecoveryStep::Events => {
                self.process_events(false)?;
            }
            RecoveryStep::ThreadCaches => drop(self.drain_caches()),
            RecoveryStep::OtherStreams => return Ok(self.take_with_wait(request)),
            RecoveryStep::Collect if self.collect_garbage(request) => count_served(step), // the next step uses the room
            RecoveryStep::Collect => {}
            RecoveryStep::Grow => return self.grow(request, false, recovery),
            RecoveryStep::Callbacks => {
                if self.hooks.call_free_memory_callbacks() {
                    self.process_events(false)?;
                    drop(self.drain_caches());
                }
            }
            RecoveryStep::OtherAllocators => {
                if self.driver.make_room_elsewhere(request.size)? {
                    self.update_held_elsewhere();
                    return self.grow(request, false, recovery);
                }
            }
            RecoveryStep::Oversize => {
                if self.rules.config.max_split_size < usize::MAX && self.release_oversize(request) {
                    return self.grow(request, false, recovery);
                }
            }
            RecoveryStep::Wait => {
                self.wait_for_streams(request)?;
                let mut core = self.lock();
                core.heap.stats.num_alloc_retries += 1;
                core.heap.stats.num_sync_all_streams += 1;
            }
            // The driver allows no segment of this size however much memory is free, so the cache is kept.
            RecoveryStep::Release | RecoveryStep::Compact if matches!(recovery.failure, Some(Failure::TooBig)) => {}
            RecoveryStep::Release => {
                let unused = self.lock().heap.remove_unused(0);
                drop(unused);
                self.release_pages(0, 0);
                return self.grow(request, true, recovery);
            }
            RecoveryStep::Compact => return self.compact_for(request, recovery),
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

    /// Updates the bytes that other allocators of this device hold, which count towards the limits.
    fn update_held_elsewhere(&self) {
        let elsewhere = self.driver.held_elsewhere(); // takes the other allocators' locks, so not under this one
        self.lock().limits.elsewhere = elsewhere;
    }

    /// Waits for all streams, and moves their free blocks to the request's stream. If a block was freed during the
    /// wait, its work may be unfinished, so the wait is repeated up to [`MAX_SYNC_ATTEMPTS`] times.
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
}

impl Core {
    /// Searches an arena and takes a block. Unless `any`, an unused segment is taken only if the policy permits splitting it.
    #[inline(always)]
    pub(super) fn search(&mut self, arena: u32, request: &Request, search: Search, any: bool) -> Option<u32> {
        let only_similar = !any && self.heap.rules.is_adaptive() && !self.growth.is_steady();
        let max_split_segment =
            || if only_similar { Growth::max_segment_to_split(self.usual_segment_bytes(request)) } else { usize::MAX };
        let id = self.heap.find_free(arena, request.size, search, max_split_segment)?;
        Some(self.heap.allocate_from(id, request.size, request.bytes))
    }

    /// Like [`search`](Self::search), but looks for the best fit and returns a handle.
    pub(super) fn search_best_fit(&mut self, owner: u32, request: &Request, any: bool) -> Option<Block> {
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let id = self.search(arena, request, Search::Thorough, any)?;
        Some(self.create_handle(owner, id, request.bytes))
    }

    /// The other memory pools that have `use_on_oom`.
    fn pools_with_use_on_oom(&self, request: &Request) -> impl Iterator<Item = u32> {
        let others = self.pools.iter().filter(|(id, options)| options.use_on_oom && **id != request.pool);
        others.map(|(&id, _)| id)
    }

    /// Returns the size, in bytes, of a segment that would be created for the request.
    fn usual_segment_bytes(&self, request: &Request) -> usize {
        let reserved = self.heap.stats.reserved();
        self.heap.rules.segment_size(request.size, reserved).unwrap_or(request.size)
    }

    /// Moves all free blocks of the request's pool and kind to its stream, and merges them. All streams must have been waited for.
    pub(super) fn move_free_blocks_to_stream(&mut self, request: &Request) {
        let home = self.heap.arena(request.pool, request.stream, request.kind);
        let others: Vec<u32> = (0..self.heap.arenas.len() as u32)
            .filter(|&at| {
                let arena = &self.heap.arenas[at as usize];
                at != home && arena.pool == request.pool && arena.kind == request.kind
            })
            .collect();
        for arena in others {
            while let Some(id) = self.heap.any_free(arena) {
                self.heap.move_to_arena(id, home);
            }
        }
    }
}
