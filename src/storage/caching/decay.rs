//! Memory comes back by itself: segments that nothing has used for a while go back to the driver.
//!
//! There is no thread for this: every so many searches the allocator looks at the clock. What goes back is bounded from
//! below by what was active at the peak of the last interval, and a segment that had to be made again soon after makes
//! the allocator more patient. A driver may stall the whole device while it releases memory, so that nothing is
//! released while any stream has work.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::super::segment::Segment;
use super::heap::{Heap, Use};
use super::sync::MutexGuard;
use super::{CachingAllocator, Core};
use crate::Result;
use crate::device::StreamId;

/// Searches between two looks at the clock.
const LOOK_EVERY: u64 = 64;
/// Looks at the streams an interval, at most.
const LOOKS: u64 = 4;
/// The most intervals to wait for after segments had to be made again.
const PATIENCE: u64 = 64;
/// Times to ask a stream whether it is idle: an idle device needs some microseconds to say so.
const QUESTIONS: usize = 64;

/// What decay remembers.
#[derive(Debug)]
pub(super) struct Decay {
    /// Milliseconds an unused segment is kept, at least; 0 is for ever.
    interval: u64,
    /// Searches and milliseconds at past looks: what was idle at one and still is has been idle since.
    looks: VecDeque<(u64, u64)>,
    /// The greatest number of active bytes in this interval and in the one before, and when this one began.
    peaks: [u64; 2],
    began: u64,
    /// Intervals to keep unused segments for.
    patience: u64,
    released: Option<u64>,
}

impl Decay {
    pub(super) fn new(interval: u64) -> Decay {
        Decay { interval, looks: VecDeque::new(), peaks: [0; 2], began: 0, patience: 1, released: None }
    }

    /// Notes that so many bytes are active.
    #[inline]
    pub(super) fn see(&mut self, active: u64) {
        self.peaks[0] = self.peaks[0].max(active);
    }

    /// Whether to look at the clock at this search.
    #[inline]
    pub(super) fn looks_at(&self, ticks: u64) -> bool {
        ticks.is_multiple_of(LOOK_EVERY) && self.interval > 0
    }

    /// A segment was made: soon after a release, that one was for nothing.
    pub(super) fn regrown(&mut self, now: u64) {
        if self.released.take_if(|at| now.saturating_sub(*at) <= self.interval).is_some() {
            self.patience = (self.patience * 2).min(PATIENCE);
        }
    }

    fn keep_for(&self) -> u64 {
        self.interval.saturating_mul(self.patience)
    }

    /// Whether enough time has passed since the last look.
    fn is_due(&self, now: u64) -> bool {
        self.looks.back().is_none_or(|(_, last)| now - last >= self.keep_for().div_ceil(LOOKS))
    }

    /// Notes the time. What has been unused since a search before the one given is old, if this is the time to ask.
    fn look(&mut self, now: u64, ticks: u64, active: u64) -> Option<u64> {
        if !self.is_due(now) {
            return None;
        }
        if now - self.began >= self.interval {
            self.peaks = [active, if now - self.began < 2 * self.interval { self.peaks[0] } else { active }];
            self.began = now;
        }
        if self.released.take_if(|at| now - *at > self.interval).is_some() {
            self.patience = (self.patience / 2).max(1);
        }
        let mut old = None;
        while let Some(&(tick, _)) = self.looks.front().filter(|(_, at)| now - at >= self.keep_for()) {
            old = Some(tick);
            self.looks.pop_front();
        }
        self.looks.push_back((ticks, now));
        old
    }
}

impl CachingAllocator {
    /// Gives back what has been unused for long enough, if it is time to look and the device is idle.
    #[cold]
    pub(super) fn decay<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        if !core.decay.looks_at(core.heap.ticks) {
            return core;
        }
        let now = self.now();
        let (ticks, active) = (core.heap.ticks, core.heap.stats.active_bytes());
        let due = core.decay.is_due(now);
        if due {
            core.heap.look_at_ends();
        }
        let old = core.decay.look(now, ticks, active);
        let any = |old| !core.aged(old).is_empty() || core.heap.has_old_ends(self.expandable.as_ref());
        if !(old.is_some_and(any) || due && core.has_unused_but_shared()) {
            return core;
        }
        let streams = core.heap.streams();
        drop(core);
        if self.is_idle(streams) {
            let mut core = self.lock();
            core.heap.now = now;
            core.merge_unused(|stream| self.driver.progress(stream));
            let aged = old.map_or_else(Vec::new, |old| core.aged(old));
            let keep = core.decay.peaks[0].max(core.decay.peaks[1]);
            let freed = core.release_above(aged, keep);
            drop(core);
            let any = !freed.is_empty();
            drop(freed);
            if old.is_some() && self.release_old_ends(keep) > 0 || any {
                self.lock().decay.released = Some(now);
            }
        }
        self.lock_with_stats()
    }

    /// Whether every stream is done with everything. Waits for none: one that needs longer than a moment is not.
    fn is_idle(&self, streams: BTreeSet<StreamId>) -> bool {
        let is_idle = |stream| (0..QUESTIONS).any(|_| self.driver.is_idle(stream).unwrap_or(false));
        streams.into_iter().all(is_idle)
    }

    /// Gives unused segments back, the largest first, as long as at least `keep` bytes stay held.
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
            let freed = core.release_above(unused, keep);
            (freed, held - core.heap.stats.reserved())
        };
        drop(freed);
        Ok(bytes + self.release_pages(0, keep))
    }
}

impl Core {
    /// Segments unused since before a search, the longest unused first.
    fn aged(&self, old: u64) -> Vec<u32> {
        let idle = |at: u32| self.heap.segments[at as usize].as_ref().map_or(0, |held| held.idle_since.0);
        let mut aged: Vec<u32> =
            self.heap.whole_blocks(0).into_iter().map(|id| self.heap.table[id as usize].segment).collect();
        aged.retain(|&at| idle(at) < old);
        aged.sort_unstable_by_key(|&at| (idle(at), at));
        aged
    }

    /// Takes those of the segments out of the table without which at least `keep` bytes are held.
    fn release_above(&mut self, segments: Vec<u32>, keep: u64) -> Vec<Arc<Segment>> {
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

    /// Streams that blocks belong to.
    fn streams(&self) -> BTreeSet<StreamId> {
        self.table.iter().filter(|e| e.usage() != Use::Vacant).map(|e| self.arenas[e.arena() as usize].stream).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn making_again_what_was_released_doubles_the_patience_and_quiet_halves_it() {
        let mut decay = Decay::new(1000);
        assert_eq!(decay.look(0, 1, 0), None);
        assert_eq!(decay.look(100, 2, 0), None, "too soon");
        assert_eq!(decay.look(1000, 3, 0), Some(1));
        for (at, patience) in [(1000, 2), (1500, 4), (1700, 8)] {
            decay.released = Some(at);
            decay.regrown(at + 300);
            assert_eq!(decay.patience, patience);
            decay.regrown(at + 301); // one release is regretted once
            assert_eq!(decay.patience, patience);
        }
        decay.released = Some(2000);
        assert_eq!(decay.look(9_500, 4, 0), Some(3));
        assert_eq!(decay.patience, 4, "nothing was made again");
        decay.released = Some(20_000);
        decay.regrown(21_001);
        assert_eq!(decay.patience, 4, "an interval later it is a new need");
    }

    #[test]
    fn peaks_are_of_this_interval_and_the_one_before() {
        let mut decay = Decay::new(1000);
        decay.see(500);
        decay.look(1000, 1, 10);
        assert_eq!(decay.peaks, [10, 500]);
        decay.see(40);
        decay.look(2000, 2, 20);
        assert_eq!(decay.peaks, [20, 40]);
        decay.look(9000, 3, 7);
        assert_eq!(decay.peaks, [7, 7], "the intervals between saw nothing else");
    }
}
