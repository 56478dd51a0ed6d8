//! Making segments, and giving them back.

use std::sync::Arc;

use super::super::block::Block;
use super::super::driver::Failure;
use super::super::segment::Segment;
use super::expand::Grown;
use super::ladder::Climb;
use super::sync::MutexGuard;
use super::{CachingAllocator, Core, Request};
use crate::Result;

/// How much to hold: what the adaptive policy has learnt of the need.
///
/// The target follows the greatest number of active bytes. A miss that would push what is reserved over it first gives
/// unused segments back, so that these never cost anything; and as long as the need still grows, an unused segment is not
/// cut up for a request much smaller than itself, but rebuilt. Once the need has been seen (nothing new for as long as it
/// took to get there), any unused segment serves, and every miss that would recycle raises the target a little: a program
/// that repeats itself soon asks the driver for nothing.
#[derive(Debug)]
pub(super) struct Growth {
    /// Bytes to hold without giving anything back, and what it exceeds the need by.
    target: u64,
    slack: f64,
    /// The greatest number of active bytes, and the last one that was a clear rise, with its time in searches.
    peak: u64,
    mark: u64,
    marked: u64,
    /// Segments recycled so far, and the sizes of the last few.
    recycled: u64,
    sizes: [usize; REMEMBERED],
    /// Segments made of a size that had just been recycled, since the last rise.
    remade: u64,
    steady: bool,
}

/// How much a recycling miss raises the target in the steady state.
const SLACK_STEP: f64 = 0.02;
/// Recycling that many segments ends the warm-up, whatever the need does.
const RECYCLING_CREDIT: u64 = 256;
/// Segments recycled and made again without a rise that end it, and how many recycled sizes are remembered.
const REMADE_CREDIT: u64 = 4;
const REMEMBERED: usize = 8;
/// Searches without a rise that end it: this many times those until the last rise, and a few.
const WARM_UP: u64 = 2;
const WARM_UP_LEAST: u64 = 64;

impl Default for Growth {
    fn default() -> Growth {
        Growth {
            target: 0,
            slack: 1.0,
            peak: 0,
            mark: 0,
            marked: 0,
            recycled: 0,
            sizes: [0; REMEMBERED],
            remade: 0,
            steady: false,
        }
    }
}

impl Growth {
    /// Sees a request that would make `active` bytes active, the `search`th.
    #[inline]
    pub(super) fn see(&mut self, active: u64, search: u64) {
        // A clear rise is more than the peak, which follows the last one closely.
        if active > self.peak || !self.steady {
            self.learn(active, search);
        }
    }

    fn learn(&mut self, active: u64, search: u64) {
        if active > self.mark + self.mark / 64 {
            (self.mark, self.marked, self.remade) = (active, search, 0);
            self.steady = self.recycled >= RECYCLING_CREDIT;
        } else if !self.steady {
            self.steady = search > WARM_UP * self.marked + WARM_UP_LEAST || self.recycled >= RECYCLING_CREDIT;
        }
        self.peak = self.peak.max(active);
    }

    /// Whether the need has been seen.
    #[inline]
    pub(super) fn is_steady(&self) -> bool {
        self.steady
    }

    /// Notes that a segment of this size was recycled.
    pub(super) fn note_recycled(&mut self, bytes: usize) {
        self.sizes[self.recycled as usize % REMEMBERED] = bytes;
        self.recycled += 1;
    }

    /// Notes that a segment of this size is made.
    fn note_made(&mut self, bytes: usize) {
        if let Some(size) = self.sizes.iter_mut().find(|size| **size == bytes) {
            *size = 0;
            self.remade += 1;
            self.steady |= self.remade >= REMADE_CREDIT;
        }
    }

    /// The largest unused segment to open while it has not, for a request whose new segment would have `segment` bytes.
    pub(super) fn most_to_open(segment: usize) -> usize {
        segment.saturating_add(segment / 2)
    }

    /// How many bytes of unused segments to give back before `bytes` more are reserved.
    pub(super) fn excess(&mut self, reserved: u64, bytes: u64) -> u64 {
        self.raise(self.wanted());
        if reserved + bytes > self.target && self.steady {
            self.slack += SLACK_STEP;
            self.raise(self.wanted());
        }
        (reserved + bytes).saturating_sub(self.target)
    }

    fn wanted(&self) -> u64 {
        (self.slack * self.peak as f64) as u64
    }

    pub(super) fn raise(&mut self, target: u64) {
        self.target = self.target.max(target);
    }

    /// Everything unused was given back: the need is learnt anew.
    pub(super) fn forget(&mut self) {
        *self = Growth::default();
    }
}

impl CachingAllocator {
    /// Makes a segment for the request and hands out its first block; `None` where the limit or the device has no room,
    /// for the reason left in `climb`. An `exact` segment is no larger than the request.
    pub(super) fn grow(&self, request: &Request, exact: bool, climb: &mut Climb) -> Result<Option<Block>> {
        match self.expand(request, exact, climb)? {
            Grown::Block(block) => return Ok(Some(block)),
            Grown::Full => return Ok(None),
            Grown::Elsewhere => {}
        }
        let (bytes, recycled) = {
            let mut core = self.lock();
            let Some(bytes) = core.segment_size(request, exact, self.driver.largest_segment()) else { return Ok(None) };
            let recycled = if exact { Vec::new() } else { core.recycle(request.size) };
            core.growth.note_made(bytes);
            core.making += bytes as u64;
            (bytes, recycled)
        };
        drop(recycled);
        // The device may be lazy: it has to find the memory now, not at some later launch.
        let made = self.driver.create(bytes).and_then(|memory| self.driver.commit(memory));
        let segment = made.map(|memory| Arc::new(Segment::new(memory, bytes)));
        let mut guard = self.lock_with_stats();
        let core = &mut *guard;
        core.making -= bytes as u64;
        match segment {
            Ok(segment) => {
                core.heap.now = self.now();
                let arena = core.heap.arena(request.pool, request.stream, request.kind);
                let id = core.heap.add_segment(segment, bytes, arena);
                core.growth.raise(core.heap.stats.reserved());
                core.decay.regrown(core.heap.now);
                let id = core.heap.take(id, request.size, request.bytes);
                let block = core.block(self.number, id, request.bytes);
                climb.made = Some(("segment made", bytes as u64));
                Ok(Some(block))
            }
            // No news: one of just the size may be possible.
            Err(Failure::TooBig) if bytes > request.size => Ok(None),
            Err(Failure::Other(error)) => Err(error),
            Err(other) => {
                climb.failure = Some(other);
                Ok(None)
            }
        }
    }

    /// What PyTorch does first where `max_split_size_mb` is set: blocks too large to be split serve few requests, so the
    /// smallest unused one that covers the request goes back, or else the largest ones that together do.
    pub(super) fn release_oversize(&self, request: &Request) -> bool {
        let released = self.lock().take_oversize(request.size);
        !released.is_empty()
    }

    /// Gives unused segments back until a limit that was lowered below what is held is met again, or none is left.
    #[cold]
    pub(super) fn shed<'a>(&'a self, core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if !core.limits.exceeded {
            return core;
        }
        drop(core);
        let mut core = self.drain_caches();
        core.limits.exceeded = false;
        let limit = core.limit();
        let excess = core.heap.stats.reserved().saturating_sub(limit);
        let unused = core.remove_to_spare(excess, |core| core.heap.first_blocks_of_unused(0));
        drop(core);
        drop(unused);
        self.release_pages(0, limit);
        self.lock_with_stats()
    }

    /// PyTorch's garbage collection: where a threshold is set and passed, gives back the unused large segments that have
    /// been unused for longer than the average, until enough is free again, and says whether any did. Waits for nothing.
    pub(super) fn collect(&self, request: &Request) -> bool {
        let (freed, keep) = {
            let mut core = self.lock();
            core.merge_unused(|stream| self.driver.progress(stream));
            core.collect(request.size as u64)
        };
        let any = !freed.is_empty() || keep.is_some();
        drop(freed);
        if let Some(keep) = keep {
            self.release_pages(0, keep);
        }
        any
    }
}

impl Core {
    /// Bytes for a new segment that the limit allows; `None` if not even the request fits.
    fn segment_size(&self, request: &Request, exact: bool, largest: usize) -> Option<usize> {
        let reserved = self.heap.stats.reserved() + self.making;
        let room = usize::try_from(self.limit().saturating_sub(reserved)).unwrap_or(usize::MAX);
        let own = self.heap.rules.is_adaptive() && self.heap.unsplit_pools.contains(&request.pool);
        if exact || own {
            return Some(request.size).filter(|&size| size <= room);
        }
        let usual = self.heap.rules.segment_size(request.size, reserved)?;
        // The largest segment the device promises is no hard limit: it may make a larger one.
        Some(usual.min(largest.max(request.size))).filter(|&size| size <= room)
    }

    /// Takes unused segments out of the table, so that a new one for a request of `size` bytes does not make more be held
    /// than the target: the fewest and largest that suffice.
    fn recycle(&mut self, size: usize) -> Vec<Arc<Segment>> {
        if !self.heap.rules.is_adaptive() {
            return Vec::new();
        }
        let reserved = self.heap.stats.reserved() + self.making;
        let excess = self.growth.excess(reserved, size as u64);
        if excess == 0 {
            return Vec::new();
        }
        let bytes = |core: &Core, id: u32| core.heap.held(id).committed() as u64;
        let mut unused = self.heap.first_blocks_of_unused(0);
        unused.sort_unstable_by_key(|&id| std::cmp::Reverse((bytes(self, id), id)));
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
        unused.iter().for_each(|&id| self.growth.note_recycled(bytes(self, id) as usize));
        unused.into_iter().map(|id| self.heap.remove_whole(id)).collect()
    }

    /// Takes unused segments out of the table, the largest first, until they have `bytes` bytes.
    fn remove_to_spare(&mut self, bytes: u64, candidates: impl Fn(&Core) -> Vec<u32>) -> Vec<Arc<Segment>> {
        let mut unused = candidates(self);
        unused.sort_unstable_by_key(|&id| std::cmp::Reverse((self.heap.held(id).committed(), id)));
        let (mut left, mut removed) = (bytes, Vec::new());
        for id in unused {
            if left > 0 {
                left = left.saturating_sub(self.heap.held(id).committed() as u64);
                removed.push(self.heap.remove_whole(id));
            }
        }
        removed
    }

    fn take_oversize(&mut self, size: usize) -> Vec<Arc<Segment>> {
        let max = self.heap.rules.config.max_split_size;
        let bytes = |core: &Core, id: u32| core.heap.held(id).committed();
        let oversize = |core: &Core| {
            let mut unused = core.heap.first_blocks_of_unused(0);
            unused.retain(|&id| bytes(core, id) >= max);
            unused
        };
        let enough = oversize(self).into_iter().filter(|&id| bytes(self, id) >= size);
        match enough.min_by_key(|&id| (bytes(self, id), id)) {
            Some(id) => vec![self.heap.remove_whole(id)],
            None => self.remove_to_spare(size as u64, oversize),
        }
    }

    /// Gives the segments, and how much may stay held where they do not suffice.
    fn collect(&mut self, size: u64) -> (Vec<Arc<Segment>>, Option<u64>) {
        let threshold = self.heap.rules.config.garbage_collection_threshold;
        let reserved = self.heap.stats.reserved();
        let most = (self.limit() as f64 * threshold) as u64;
        if threshold == 0.0 || reserved + size <= most {
            return (Vec::new(), None);
        }
        let mut freed = Vec::new();
        let mut left = reserved + size - most;
        while left > 0 {
            let mut unused = self.heap.whole_blocks(0);
            unused.retain(|&id| self.heap.held(id).kind == super::Kind::Large);
            let age = |core: &Core, id: u32| core.heap.ticks - core.heap.held(id).idle_since.0;
            let total: u64 = unused.iter().map(|&id| age(self, id)).sum();
            let Some(average) = total.checked_div(unused.len() as u64) else { break };
            unused.retain(|&id| age(self, id) >= average);
            for id in unused {
                if left > 0 {
                    left = left.saturating_sub(self.heap.table[id as usize].size() as u64);
                    freed.push(self.heap.remove_whole(id));
                }
            }
        }
        (freed, (left > 0).then(|| most.saturating_sub(size)))
    }
}
