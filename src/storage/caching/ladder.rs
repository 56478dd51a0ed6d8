//! What to do when nothing fits, one rung after another; after every rung the bins are searched again.

use super::super::block::Block;
use super::super::driver::Failure;
use super::super::hooks::{FreeMemory, OomObserver, Registration};
use super::grow::Growth;
use super::heap::Search;
use super::{CachingAllocator, Core, Kind, Request};
use crate::Result;

/// The rungs, from the cheapest to the dearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rung {
    /// Free pending blocks whose streams are done.
    Events,
    /// Empty the threads' caches.
    ThreadCaches,
    /// Take another stream's block, or a pending one, behind a wait on the device.
    OtherStreams,
    /// Free unused segments that have aged, where garbage collection is on.
    Collect,
    /// Make a segment of the usual size, or extend one that grows.
    Grow,
    /// Ask the user's callbacks for memory.
    Callbacks,
    /// Have unused memory given back that others hold, and try that again.
    Elsewhere,
    /// Give back unused segments too large to be split, where `max_split_size_mb` is set, and try that again.
    Oversize,
    /// Wait for all streams, so that every pending block is free and streams do not matter.
    Wait,
    /// Give every unused segment back, and make one of just the size.
    Release,
    /// Take what the other kind of request has left over.
    OtherKind,
    /// Take what memory pools that lend have free.
    Lenders,
    /// Move live blocks together.
    Compact,
}

const LADDER: [Rung; 13] = [
    Rung::Events,
    Rung::ThreadCaches,
    Rung::OtherStreams,
    Rung::Collect,
    Rung::Grow,
    Rung::Callbacks,
    Rung::Elsewhere,
    Rung::Oversize,
    Rung::Wait,
    Rung::Release,
    Rung::OtherKind,
    Rung::Lenders,
    Rung::Compact,
];

// How often each rung has served a request of this thread, or collected something.
#[cfg(test)]
thread_local!(pub(super) static SERVED: std::cell::RefCell<std::collections::BTreeMap<String, u64>> = Default::default());

fn count(_rung: Rung) {
    #[cfg(test)]
    SERVED.with_borrow_mut(|served| *served.entry(format!("{_rung:?}")).or_default() += 1);
}

/// Waits for all streams before giving up on their blocks, which other threads keep giving back.
const WAITS: usize = 4;

/// What a climb has met so far.
#[derive(Default)]
pub(super) struct Climb {
    /// Why the device made no segment.
    pub(super) failure: Option<Failure>,
    /// What the device made, and its bytes.
    pub(super) made: Option<(&'static str, u64)>,
}

impl CachingAllocator {
    /// Has `free` called when the device, or the limit, has no room for an allocation: it may drop what it can spare,
    /// and says whether it did (PyTorch's `FreeMemoryCallback`). The allocator looks for memory again after that.
    ///
    /// It is called by the thread that allocates, with no lock of the allocator held, and may allocate itself.
    pub fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Registration {
        self.hooks.add_free_memory_callback(free)
    }

    /// Has `observe` called when an allocation fails for want of memory, before the error is returned (PyTorch's
    /// `attachOutOfMemoryObserver`).
    ///
    /// It is called by the thread that allocates, with no lock of the allocator held: it may ask for statistics, take a
    /// snapshot, or allocate.
    pub fn add_oom_observer(&self, observe: Box<OomObserver>) -> Registration {
        self.hooks.add_oom_observer(observe)
    }

    /// Finds memory for a request that the bins did not serve at once.
    #[cold]
    pub(super) fn climb(&self, request: &Request) -> Result<Block> {
        let mut climb = Climb::default();
        self.see_elsewhere();
        self.drop_spilled();
        let found = self.find(request, &mut climb);
        // Not before: a subscriber may allocate, and some rungs hold locks.
        if let Some((what, bytes)) = climb.made {
            tracing::debug!(device = %self.driver.device(), bytes, "{what}");
        }
        found?.ok_or_else(|| self.out_of_memory(request, climb.failure))
    }

    fn find(&self, request: &Request, climb: &mut Climb) -> Result<Option<Block>> {
        for rung in LADDER {
            if let Some(block) = self.step(rung, request, climb)? {
                count(rung);
                return Ok(Some(block));
            }
            // Until growing has failed, unused segments are left to requests that fill them.
            let any = rung as usize >= Rung::Grow as usize;
            if let Some(block) = self.lock_with_stats().search_all(self.number, request, any) {
                count(rung);
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    fn step(&self, rung: Rung, request: &Request, climb: &mut Climb) -> Result<Option<Block>> {
        match rung {
            Rung::Events => {
                self.process_events(false)?;
            }
            Rung::ThreadCaches => drop(self.drain_caches()),
            Rung::OtherStreams => return Ok(self.take_with_wait(request)),
            Rung::Collect if self.collect(request) => count(rung), // the room is the next rung's
            Rung::Collect => {}
            Rung::Grow => return self.grow(request, false, climb),
            Rung::Callbacks => {
                if self.hooks.ask_for_memory() {
                    self.process_events(false)?;
                    drop(self.drain_caches());
                }
            }
            Rung::Elsewhere => {
                if self.driver.make_room_elsewhere(request.size)? {
                    self.see_elsewhere();
                    return self.grow(request, false, climb);
                }
            }
            Rung::Oversize => {
                if self.rules.config.max_split_size < usize::MAX && self.release_oversize(request) {
                    return self.grow(request, false, climb);
                }
            }
            Rung::Wait => {
                self.wait_for_streams(request)?;
                let mut core = self.lock();
                core.heap.stats.num_alloc_retries += 1;
                core.heap.stats.num_sync_all_streams += 1;
            }
            // The driver makes no segment as large as the request, however much memory is free: the cache is kept.
            Rung::Release | Rung::Compact if matches!(climb.failure, Some(Failure::TooBig)) => {}
            Rung::Release => {
                let unused = self.lock().heap.remove_unused(0);
                drop(unused);
                self.release_pages(0, 0);
                return self.grow(request, true, climb);
            }
            Rung::Compact => return self.compact_for(request, climb),
            Rung::OtherKind => {
                let other = Request { kind: request.kind.other(), ..*request };
                return Ok(self.lock_with_stats().search_all(self.number, &other, true));
            }
            Rung::Lenders => {
                let mut core = self.lock_with_stats();
                for pool in core.lenders(request).collect::<Vec<_>>() {
                    for kind in [request.kind, request.kind.other()] {
                        let lent = Request { pool, kind, ..*request };
                        if let Some(block) = core.search_all(self.number, &lent, true) {
                            return Ok(Some(block));
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    /// Limits count what others hold of the device's memory.
    fn see_elsewhere(&self) {
        let elsewhere = self.driver.held_elsewhere(); // not under the lock: it takes locks of theirs
        self.lock().limits.elsewhere = elsewhere;
    }

    /// Waits for all streams, and makes their free blocks the request's. If a block was given back meanwhile, its work
    /// may not be done: then the wait was for nothing, and there is another, a few times.
    pub(super) fn wait_for_streams(&self, request: &Request) -> Result<()> {
        for _ in 0..WAITS {
            let given_back = self.drain_caches().heap.given_back;
            self.synchronize()?;
            self.process_events(true)?;
            let mut core = self.lock();
            if core.heap.given_back == given_back {
                let pools = core.lenders(request).chain([request.pool]).collect::<Vec<_>>();
                for (pool, kind) in pools.into_iter().flat_map(|pool| [(pool, Kind::Small), (pool, Kind::Large)]) {
                    core.merge_streams(&Request { pool, kind, ..*request });
                }
                break;
            }
        }
        Ok(())
    }
}

impl Core {
    /// The entry of a free block of the request's arena, taken. With `any`, even one that the policy would rather not cut up.
    #[inline(always)]
    pub(super) fn search(&mut self, arena: u32, request: &Request, search: Search, any: bool) -> Option<u32> {
        let only_similar = !any && self.heap.rules.is_adaptive() && !self.growth.is_steady();
        let most = || if only_similar { Growth::most_to_open(self.usual_segment(request)) } else { usize::MAX };
        let id = self.heap.find(arena, request.size, search, most)?;
        Some(self.heap.take(id, request.size, request.bytes))
    }

    /// As [`search`](Self::search), looking for the best fit; gives the handle.
    pub(super) fn search_all(&mut self, owner: u32, request: &Request, any: bool) -> Option<Block> {
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let id = self.search(arena, request, Search::Thorough, any)?;
        Some(self.block(owner, id, request.bytes))
    }

    /// Other memory pools that lend to a request that would fail.
    fn lenders(&self, request: &Request) -> impl Iterator<Item = u32> {
        let others = self.pools.iter().filter(|(id, options)| options.use_on_oom && **id != request.pool);
        others.map(|(&id, _)| id)
    }

    /// The size of a segment that would be made for the request.
    fn usual_segment(&self, request: &Request) -> usize {
        let reserved = self.heap.stats.reserved();
        self.heap.rules.segment_size(request.size, reserved).unwrap_or(request.size)
    }

    /// After the work of all blocks given back has been waited for: makes their free blocks this request's, merged where they touch.
    pub(super) fn merge_streams(&mut self, request: &Request) {
        let home = self.heap.arena(request.pool, request.stream, request.kind);
        let others: Vec<u32> = (0..self.heap.arenas.len() as u32)
            .filter(|&at| {
                let arena = &self.heap.arenas[at as usize];
                at != home && arena.pool == request.pool && arena.kind == request.kind
            })
            .collect();
        for arena in others {
            while let Some(id) = self.heap.any_free(arena) {
                self.heap.rehome(id, home);
            }
        }
    }
}
