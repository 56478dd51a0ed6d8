//! Decay: segments that have been unused for a while are released to the driver.
//!
//! There is no background thread: the allocator checks the clock every [`SEARCHES_PER_CLOCK_CHECK`] searches. Decay keeps at least the peak of active
//! bytes of the last two intervals reserved. If a segment is created soon after a release, decay waits longer before the next release. Nothing is
//! released while any stream has work, because a driver may stall the whole device while it releases memory.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::segment::Segment;
use super::heap::{Heap, Use};
use super::sync::MutexGuard;
use super::{CachingAllocator, Core};
use crate::Result;
use crate::device::StreamId;

/// Searches between two checks of the clock.
const SEARCHES_PER_CLOCK_CHECK: u64 = 64;
/// At most this many checks are recorded in the time for which unused segments are kept.
const CHECKS_PER_INTERVAL: u64 = 4;
/// Upper bound on `patience`, in intervals.
const MAX_PATIENCE_INTERVALS: u64 = 64;
/// Queries of a stream before it counts as busy: an idle device takes some microseconds to report that it is idle.
const MAX_IDLE_QUERIES: usize = 64;

/// Records past checks and peaks, and decides when unused segments are released.
#[derive(Debug)]
pub(super) struct Decay {
    /// Milliseconds for which an unused segment is kept, at least; 0 means forever.
    interval: u64,
    /// Search count and milliseconds at past checks. A segment that was idle at a check and is idle now has been idle since.
    checks: VecDeque<(u64, u64)>,
    /// The peaks of active bytes in this interval and the previous one, and when this interval started.
    peaks: [u64; 2],
    interval_start: u64,
    /// Number of intervals for which unused segments are kept.
    patience: u64,
    /// Milliseconds at the last release, if no segment was created since.
    released: Option<u64>,
}

impl Decay {
    pub(super) fn new(interval: u64) -> Decay {
        Decay { interval, checks: VecDeque::new(), peaks: [0; 2], interval_start: 0, patience: 1, released: None }
    }

    #[inline]
    pub(super) fn record_active(&mut self, active: u64) {
        self.peaks[0] = self.peaks[0].max(active);
    }

    /// True if the clock is checked at this search.
    #[inline]
    pub(super) fn checks_clock_at(&self, ticks: u64) -> bool {
        ticks.is_multiple_of(SEARCHES_PER_CLOCK_CHECK) && self.interval > 0
    }

    /// Records that a segment was created. If that follows a release within an interval, doubles the patience.
    pub(super) fn record_segment_created(&mut self, now: u64) {
        if self.released.take_if(|at| now.saturating_sub(*at) <= self.interval).is_some() {
            self.patience = (self.patience * 2).min(MAX_PATIENCE_INTERVALS);
        }
    }

    /// Milliseconds for which unused segments are kept now.
    fn keep_milliseconds(&self) -> u64 {
        self.interval.saturating_mul(self.patience)
    }

    /// True if enough time has passed since the last recorded check.
    fn is_due(&self, now: u64) -> bool {
        self.checks.back().is_none_or(|(_, last)| now - last >= self.keep_milliseconds().div_ceil(CHECKS_PER_INTERVAL))
    }

    /// Records a check of the clock. Returns the search count before which segments must have been unused to be
    /// released; `None` if no check is due or no check is old enough.
    fn record_check(&mut self, now: u64, ticks: u64, active: u64) -> Option<u64> {
        if !self.is_due(now) {
            return None;
        }
        if now - self.interval_start >= self.interval {
            self.peaks = [active, if now - self.interval_start < 2 * self.interval { self.peaks[0] } else { active }];
            self.interval_start = now;
        }
        if self.released.take_if(|at| now - *at > self.interval).is_some() {
            self.patience = (self.patience / 2).max(1);
        }
        let mut old = None;
        while let Some(&(tick, _)) = self.checks.front().filter(|(_, at)| now - at >= self.keep_milliseconds()) {
            old = Some(tick);
            self.checks.pop_front();
        }
        self.checks.push_back((ticks, now));
        old
    }
}

impl CachingAllocator {
    /// Releases segments that have been unused for long enough, if a check is due and the device is idle.
    #[cold]
    pub(super) fn decay<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if !core.decay.checks_clock_at(core.heap.ticks) {
            return core;
        }
        let now = self.now();
        let (ticks, active) = (core.heap.ticks, core.heap.stats.active_bytes());
        let due = core.decay.is_due(now);
        if due {
            core.heap.record_segment_ends();
        }
        let old = core.decay.record_check(now, ticks, active);
        let any =
            |old| !core.segments_unused_since(old).is_empty() || core.heap.has_unused_ends(self.expandable.as_ref());
        if !(old.is_some_and(any) || due && core.has_unused_of_several_streams()) {
            return core;
        }
        let streams = core.heap.streams();
        drop(core);
        if self.is_idle(streams) {
            let mut core = self.lock();
            core.heap.now = now;
            core.merge_unused(|stream| self.driver.progress(stream));
            let segments_unused_since = old.map_or_else(Vec::new, |old| core.segments_unused_since(old));
            let keep = core.decay.peaks[0].max(core.decay.peaks[1]);
            let freed = core.remove_above(segments_unused_since, keep);
            drop(core);
            let any = !freed.is_empty();
            drop(freed);
            if old.is_some() && self.release_unused_ends(keep) > 0 || any {
                self.lock().decay.released = Some(now);
            }
        }
        self.lock_with_stats()
    }

    /// True if every stream has finished its work. Waits no longer than some microseconds per stream.
    fn is_idle(&self, streams: BTreeSet<StreamId>) -> bool {
        let is_idle = |stream| (0..MAX_IDLE_QUERIES).any(|_| self.driver.is_idle(stream).unwrap_or(false));
        streams.into_iter().all(is_idle)
    }

    /// Releases unused segments, the largest first, while at least `keep` bytes stay reserved. Returns the bytes released.
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
            unused.sort_unstable_by_key(|&at| std::cmp::Reverse((core.heap.segment_bytes(at), at)));
            let freed = core.remove_above(unused, keep);
            (freed, held - core.heap.stats.reserved())
        };
        drop(freed);
        Ok(bytes + self.release_pages(0, keep))
    }
}

impl Core {
    /// Returns the segments unused since before search `old`, the longest unused first.
    fn segments_unused_since(&self, old: u64) -> Vec<u32> {
        let idle = |at: u32| self.heap.segments[at as usize].as_ref().map_or(0, |held| held.idle_since.0);
        let mut segments_unused_since: Vec<u32> =
            self.heap.whole_blocks(0).into_iter().map(|id| self.heap.table[id as usize].segment).collect();
        segments_unused_since.retain(|&at| idle(at) < old);
        segments_unused_since.sort_unstable_by_key(|&at| (idle(at), at));
        segments_unused_since
    }

    /// Removes each given segment from the table, unless fewer than `keep` bytes would stay reserved.
    fn remove_above(&mut self, segments: Vec<u32>, keep: u64) -> Vec<Arc<Segment>> {
        let mut freed = Vec::new();
        for at in segments {
            if self.heap.stats.reserved() >= keep.saturating_add(self.heap.segment_bytes(at)) {
                freed.push(self.heap.remove_segment(at));
            }
        }
        freed
    }
}

impl Heap {
    fn segment_bytes(&self, at: u32) -> u64 {
        self.segments[at as usize].as_ref().map_or(0, |held| held.committed() as u64)
    }

    /// The streams that own blocks.
    fn streams(&self) -> BTreeSet<StreamId> {
        self.table.iter().filter(|e| e.usage() != Use::Vacant).map(|e| self.arenas[e.arena() as usize].stream).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recreating_a_released_segment_doubles_the_patience_and_quiet_halves_it() {
        let mut decay = Decay::new(1000);
        assert_eq!(decay.record_check(0, 1, 0), None);
        assert_eq!(decay.record_check(100, 2, 0), None, "too soon");
        assert_eq!(decay.record_check(1000, 3, 0), Some(1));
        for (at, patience) in [(1000, 2), (1500, 4), (1700, 8)] {
            decay.released = Some(at);
            decay.record_segment_created(at + 300);
            assert_eq!(decay.patience, patience);
            decay.record_segment_created(at + 301); // a release doubles the patience at most once
            assert_eq!(decay.patience, patience);
        }
        decay.released = Some(2000);
        assert_eq!(decay.record_check(9_500, 4, 0), Some(3));
        assert_eq!(decay.patience, 4, "nothing was made again");
        decay.released = Some(20_000);
        decay.record_segment_created(21_001);
        assert_eq!(decay.patience, 4, "an interval later it is a new need");
    }

    #[test]
    fn peaks_are_of_this_interval_and_the_one_before() {
        let mut decay = Decay::new(1000);
        decay.record_active(500);
        decay.record_check(1000, 1, 10);
        assert_eq!(decay.peaks, [10, 500]);
        decay.record_active(40);
        decay.record_check(2000, 2, 20);
        assert_eq!(decay.peaks, [20, 40]);
        decay.record_check(9000, 3, 7);
        assert_eq!(decay.peaks, [7, 7], "the intervals between saw nothing else");
    }
}
