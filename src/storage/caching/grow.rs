//! Creating segments, and releasing unused ones.

use std::sync::Arc;

use super::super::block::Block;
use super::super::driver::Failure;
use super::super::segment::Segment;
use super::expand::ExpandOutcome;
use super::ladder::OomRecovery;
use super::sync::MutexGuard;
use super::{CachingAllocator, Core, Request};
use crate::Result;

/// The adaptive policy's estimate of how many bytes the program needs reserved.
///
/// The target follows the peak of active bytes. If a new segment would push the reserved bytes over the target, unused segments are released first,
/// so that unused segments never raise the peak of reserved bytes. During warm-up, while the need still grows, an unused segment is not split for a
/// much smaller request, but replaced by a fitting one. The warm-up ends when no new peak came for as many searches as led to the last peak. From
/// then on any unused segment serves. Every miss that would release a segment raises the target a little, so a repetitive program soon makes no
/// driver calls.
#[derive(Debug)]
pub(super) struct Growth {
    /// Bytes that may be reserved without releasing anything, and the factor by which the target exceeds the peak.
    target: u64,
    slack: f64,
    /// The peak of active bytes, the last clear rise of it, and the search count at that rise.
    peak: u64,
    last_rise_bytes: u64,
    last_rise_search: u64,
    /// Number of segments recycled so far, and the sizes of the last few in bytes.
    recycled: u64,
    recycled_sizes: [usize; RECYCLED_SIZE_COUNT],
    /// Segments created since the last rise with the size of a segment recycled shortly before.
    recreated: u64,
    steady: bool,
}

/// Increase of `slack` at each miss, after the warm-up, that would release a segment.
const SLACK_STEP: f64 = 0.02;
/// The warm-up ends after this many recycled segments, even if the need still grows.
const MAX_RECYCLED_SEGMENTS: u64 = 256;
/// The warm-up ends after this many segments were recycled and recreated without a rise.
const MAX_RECREATED_SEGMENTS: u64 = 4;
const RECYCLED_SIZE_COUNT: usize = 8;
/// The warm-up ends at search `WARM_UP_FACTOR * (searches until the last rise) + WARM_UP_MIN_SEARCHES`, if no rise came since.
const WARM_UP_FACTOR: u64 = 2;
const WARM_UP_MIN_SEARCHES: u64 = 64;

impl Default for Growth {
    fn default() -> Growth {
        Growth {
            target: 0,
            slack: 1.0,
            peak: 0,
            last_rise_bytes: 0,
            last_rise_search: 0,
            recycled: 0,
            recycled_sizes: [0; RECYCLED_SIZE_COUNT],
            recreated: 0,
            steady: false,
        }
    }
}

impl Growth {
    /// Records a request after which `active` bytes would be in use. `search` counts requests.
    #[inline]
    pub(super) fn record_active(&mut self, active: u64, search: u64) {
        // After the warm-up only a new peak matters, because a clear rise exceeds the peak.
        if active > self.peak || !self.steady {
            self.update_warm_up(active, search);
        }
    }

    /// Updates the peak, the last clear rise (by more than 1/64), and whether the warm-up is over.
    fn update_warm_up(&mut self, active: u64, search: u64) {
        if active > self.last_rise_bytes + self.last_rise_bytes / 64 {
            (self.last_rise_bytes, self.last_rise_search, self.recreated) = (active, search, 0);
            self.steady = self.recycled >= MAX_RECYCLED_SEGMENTS;
        } else if !self.steady {
            self.steady = search > WARM_UP_FACTOR * self.last_rise_search + WARM_UP_MIN_SEARCHES
                || self.recycled >= MAX_RECYCLED_SEGMENTS;
        }
        self.peak = self.peak.max(active);
    }

    #[inline]
    pub(super) fn is_steady(&self) -> bool {
        self.steady
    }

    /// Records that a segment of this size was released to make room for another.
    pub(super) fn record_recycled(&mut self, bytes: usize) {
        self.recycled_sizes[self.recycled as usize % RECYCLED_SIZE_COUNT] = bytes;
        self.recycled += 1;
    }

    /// Records that a segment of this size is created.
    fn record_created(&mut self, bytes: usize) {
        if let Some(size) = self.recycled_sizes.iter_mut().find(|size| **size == bytes) {
            *size = 0;
            self.recreated += 1;
            self.steady |= self.recreated >= MAX_RECREATED_SEGMENTS;
        }
    }

    /// Upper bound, in bytes, on an unused segment that may be split during warm-up. `segment` is the size of a new segment for the request.
    pub(super) fn max_segment_to_split(segment: usize) -> usize {
        segment.saturating_add(segment / 2)
    }

    /// Returns how many bytes of unused segments to release before `bytes` more are reserved.
    pub(super) fn bytes_to_release(&mut self, reserved: u64, bytes: u64) -> u64 {
        self.raise_target(self.implied_target());
        if reserved + bytes > self.target && self.steady {
            self.slack += SLACK_STEP;
            self.raise_target(self.implied_target());
        }
        (reserved + bytes).saturating_sub(self.target)
    }

    /// The target in bytes: peak times slack.
    fn implied_target(&self) -> u64 {
        (self.slack * self.peak as f64) as u64
    }

    pub(super) fn raise_target(&mut self, target: u64) {
        self.target = self.target.max(target);
    }

    /// Restarts the warm-up, after everything unused was released.
    pub(super) fn restart_warm_up(&mut self) {
        *self = Growth::default();
    }
}

impl CachingAllocator {
    /// Creates a segment for the request and allocates its first block. Returns `None` if the limit or the device has
    /// no room, and leaves the reason in `recovery`. If `exact`, the segment is no larger than the request.
    pub(super) fn grow(&self, request: &Request, exact: bool, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        match self.expand(request, exact, recovery)? {
            ExpandOutcome::Block(block) => return Ok(Some(block)),
            ExpandOutcome::Full => return Ok(None),
            ExpandOutcome::NeedsOwnSegment => {}
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
        // Commits now, because a driver that allocates lazily would otherwise fail at some later launch.
        let made = self.driver.create(bytes).and_then(|memory| self.driver.commit(memory));
        let segment = made.map(|memory| Arc::new(Segment::new(memory, bytes)));
        let mut guard = self.lock_with_stats();
        let core = &mut *guard;
        core.bytes_being_created -= bytes as u64;
        match segment {
            Ok(segment) => {
                core.heap.now = self.now();
                let arena = core.heap.arena(request.pool, request.stream, request.kind);
                let id = core.heap.add_segment(segment, bytes, arena);
                core.growth.raise_target(core.heap.stats.reserved());
                core.decay.record_segment_created(core.heap.now);
                let id = core.heap.allocate_from(id, request.size, request.bytes);
                let block = core.create_handle(self.number, id, request.bytes);
                recovery.growth_message = Some(("segment made", bytes as u64));
                Ok(Some(block))
            }
            // Not reported: a segment of exactly the requested size may still be possible.
            Err(Failure::TooBig) if bytes > request.size => Ok(None),
            Err(Failure::Other(error)) => Err(error),
            Err(other) => {
                recovery.failure = Some(other);
                Ok(None)
            }
        }
    }

    /// Releases oversize segments, as PyTorch does first if `max_split_size_mb` is set, because they serve few
    /// requests. Releases the smallest unused one that covers the request, or else the largest ones that together do.
    pub(super) fn release_oversize(&self, request: &Request) -> bool {
        let released = self.lock().remove_oversize(request.size);
        !released.is_empty()
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
        let limit = core.limit();
        let excess = core.heap.stats.reserved().saturating_sub(limit);
        let unused = core.remove_at_least(excess, |core| core.heap.first_blocks_of_unused_segments(0));
        drop(core);
        drop(unused);
        self.release_pages(0, limit);
        self.lock_with_stats()
    }

    /// Runs PyTorch's garbage collection: if the threshold is exceeded, releases large segments that have been unused
    /// for longer than average, until enough is free. Returns whether any memory was released. Never waits.
    pub(super) fn collect_garbage(&self, request: &Request) -> bool {
        let (freed, keep) = {
            let mut core = self.lock();
            core.merge_unused(|stream| self.driver.progress(stream));
            core.collect_garbage(request.size as u64)
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
    /// Returns the size in bytes of a new segment within the limit; `None` if the request does not fit.
    fn segment_size(&self, request: &Request, exact: bool, largest: usize) -> Option<usize> {
        let reserved = self.heap.stats.reserved() + self.bytes_being_created;
        let room = usize::try_from(self.limit().saturating_sub(reserved)).unwrap_or(usize::MAX);
        let own = self.heap.rules.is_adaptive() && self.heap.unsplit_pools.contains(&request.pool);
        if exact || own {
            return Some(request.size).filter(|&size| size <= room);
        }
        let usual = self.heap.rules.segment_size(request.size, reserved)?;
        // The driver may create segments larger than the size it guarantees, so a larger request is still tried.
        Some(usual.min(largest.max(request.size))).filter(|&size| size <= room)
    }

    /// Removes unused segments from the table, so that a new one for `size` bytes does not exceed the target. Removes
    /// as few as possible, the largest first.
    fn recycle(&mut self, size: usize) -> Vec<Arc<Segment>> {
        if !self.heap.rules.is_adaptive() {
            return Vec::new();
        }
        let reserved = self.heap.stats.reserved() + self.bytes_being_created;
        let excess = self.growth.bytes_to_release(reserved, size as u64);
        if excess == 0 {
            return Vec::new();
        }
        let bytes = |core: &Core, id: u32| core.heap.segment_of(id).committed() as u64;
        let mut unused = self.heap.first_blocks_of_unused_segments(0);
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
        unused.iter().for_each(|&id| self.growth.record_recycled(bytes(self, id) as usize));
        unused.into_iter().map(|id| self.heap.remove_whole(id)).collect()
    }

    /// Removes unused segments from the table, the largest first, until they add up to `bytes`.
    fn remove_at_least(&mut self, bytes: u64, candidates: impl Fn(&Core) -> Vec<u32>) -> Vec<Arc<Segment>> {
        let mut unused = candidates(self);
        unused.sort_unstable_by_key(|&id| std::cmp::Reverse((self.heap.segment_of(id).committed(), id)));
        let (mut left, mut removed) = (bytes, Vec::new());
        for id in unused {
            if left > 0 {
                left = left.saturating_sub(self.heap.segment_of(id).committed() as u64);
                removed.push(self.heap.remove_whole(id));
            }
        }
        removed
    }

    /// Removes oversize segments from the table; see `release_oversize`.
    fn remove_oversize(&mut self, size: usize) -> Vec<Arc<Segment>> {
        let max = self.heap.rules.config.max_split_size;
        let bytes = |core: &Core, id: u32| core.heap.segment_of(id).committed();
        let oversize = |core: &Core| {
            let mut unused = core.heap.first_blocks_of_unused_segments(0);
            unused.retain(|&id| bytes(core, id) >= max);
            unused
        };
        let enough = oversize(self).into_iter().filter(|&id| bytes(self, id) >= size);
        match enough.min_by_key(|&id| (bytes(self, id), id)) {
            Some(id) => vec![self.heap.remove_whole(id)],
            None => self.remove_at_least(size as u64, oversize),
        }
    }

    /// Returns the segments to release and, if they do not suffice, how many bytes may stay reserved.
    fn collect_garbage(&mut self, size: u64) -> (Vec<Arc<Segment>>, Option<u64>) {
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
            unused.retain(|&id| self.heap.segment_of(id).kind == super::SizeKind::Large);
            let age = |core: &Core, id: u32| core.heap.ticks - core.heap.segment_of(id).idle_since.0;
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
