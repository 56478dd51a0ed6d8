//! What to do when nothing fits, one rung after another; after every rung the bins are searched again.

use super::super::allocator::{Allocator, Block};
use super::super::driver::Failure;
use super::heap::Search;
use super::{CachingAllocator, Core, Request};
use crate::{Error, Result};

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
    /// Make a segment of the usual size.
    Grow,
    /// Wait for all streams, so that every pending block is free and streams do not matter.
    Wait,
    /// Give every unused segment back, and make one of just the size.
    Release,
    /// Take what the other kind of pool has left over.
    OtherKind,
}

const LADDER: [Rung; 8] = [
    Rung::Events,
    Rung::ThreadCaches,
    Rung::OtherStreams,
    Rung::Collect,
    Rung::Grow,
    Rung::Wait,
    Rung::Release,
    Rung::OtherKind,
];

/// Waits for all streams before giving up on their blocks, which other threads keep giving back.
const WAITS: usize = 4;

impl CachingAllocator {
    /// Finds memory for a request that the bins did not serve at once.
    pub(super) fn climb(&self, request: &Request) -> Result<Block> {
        let mut failure = None;
        for rung in LADDER {
            if let Some(block) = self.step(rung, request, &mut failure)? {
                return Ok(block);
            }
            // Until growing has failed, unused segments are left to requests that fill them.
            let any = rung as usize >= Rung::Grow as usize;
            if let Some(block) = self.lock_folded().search(self.number, request, Search::Thorough, any) {
                return Ok(block);
            }
        }
        Err(self.out_of_memory(request, failure))
    }

    fn step(&self, rung: Rung, request: &Request, failure: &mut Option<Failure>) -> Result<Option<Block>> {
        match rung {
            Rung::Events => {
                self.settle_events(false)?;
            }
            Rung::ThreadCaches => drop(self.drain_caches()),
            Rung::OtherStreams => return self.take_with_wait(request),
            Rung::Collect => self.collect(request),
            Rung::Grow => return self.grow(request, false, failure),
            Rung::Wait => self.wait_for_streams(request)?,
            Rung::Release => {
                let unused = self.lock().heap.remove_unused(0);
                drop(unused);
                return self.grow(request, true, failure);
            }
            Rung::OtherKind => {
                let other = Request { kind: request.kind.other(), ..*request };
                return Ok(self.lock_folded().search(self.number, &other, Search::Thorough, true));
            }
        }
        Ok(None)
    }

    /// Waits for all streams, and makes their free blocks the request's. If a block was given back meanwhile, its work
    /// may not be done: then the wait was for nothing, and there is another, a few times.
    fn wait_for_streams(&self, request: &Request) -> Result<()> {
        for _ in 0..WAITS {
            let given_back = self.drain_caches().heap.given_back;
            self.driver.synchronize()?;
            self.settle_events(true)?;
            let mut core = self.lock();
            if core.heap.given_back == given_back {
                core.unite_streams(request);
                core.unite_streams(&Request { kind: request.kind.other(), ..*request });
                break;
            }
        }
        let mut core = self.lock();
        core.heap.stats.num_alloc_retries += 1;
        core.heap.stats.num_sync_all_streams += 1;
        Ok(())
    }

    fn out_of_memory(&self, request: &Request, failure: Option<Failure>) -> Error {
        let mut core = self.lock();
        core.heap.stats.num_ooms += 1;
        let stats = &core.heap.stats;
        let (allocated, reserved) = (stats.allocated_bytes.current, stats.reserved_bytes.current);
        let (capacity, largest) = (self.driver.capacity(), core.heap.largest_free(0));
        let mut detail = format!("{allocated} are allocated and {reserved} reserved of a capacity of {capacity}");
        if core.limit < capacity {
            detail += &format!(", of which {} are allowed", core.limit);
        }
        if reserved > allocated {
            detail += &format!("; the largest free block has {largest}");
        }
        if let Some(what) = failure.as_ref().and_then(Failure::ran_out) {
            detail += &format!("; the driver ran out of {what}");
        }
        Error::OutOfMemory { device: self.device(), requested: request.bytes, detail }
    }
}

impl Core {
    /// A free block of the request's arena, taken. With `any`, even one that the policy would rather not cut up.
    pub(super) fn search(&mut self, owner: u32, request: &Request, search: Search, any: bool) -> Option<Block> {
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let adaptive = self.heap.rules.is_adaptive();
        let most = if adaptive && !any { self.growth.most_to_open(self.usual_segment(request)) } else { usize::MAX };
        let id = self.heap.find(arena, request.size, search, most)?;
        let id = self.heap.take(id, request.size, request.bytes);
        Some(self.block(owner, id, request.bytes))
    }

    /// The size of a segment that would be made for the request.
    fn usual_segment(&self, request: &Request) -> usize {
        let reserved = self.heap.stats.reserved_bytes.current;
        self.heap.rules.segment_size(request.size, reserved).unwrap_or(request.size)
    }

    /// After the work of all blocks given back has been waited for: makes their free blocks this request's, merged where they touch.
    fn unite_streams(&mut self, request: &Request) {
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
