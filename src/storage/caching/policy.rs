//! Allocation policy: the numbers and rules that decide about sizes, splitting, growth, decay, limits, compaction and thread caches.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::config::{Config, SegmentSizes};
use super::super::history::SegmentType;

const MIB: usize = 1 << 20;

/// Requests of up to this many bytes are of the size kind small.
const SMALL_REQUEST_MAX_BYTES: usize = MIB;

/// PyTorch's segment sizes in bytes: fixed sizes for shared segments, multiples of a step for the larger, dedicated ones.
const SMALL_SEGMENT_BYTES: usize = 2 * MIB;
const MIN_DEDICATED_SEGMENT_BYTES: usize = 10 * MIB;
const SEGMENT_STEP_BYTES: usize = 2 * MIB;
/// A new segment has at least 1/16 of the reserved bytes, but no less than its request and no more than PyTorch's
/// segment size. So a program creates few segments, and never reserves much more than it needs.
const GROWTH_DIVISOR: usize = 16;

/// Addresses reserved per segment, in eighths of the device's memory (PyTorch's factor 1.125).
pub(super) const RESERVED_EIGHTHS: u64 = 9;
/// Upper bound on the addresses reserved per segment, in bytes, so that many segments fit into a process.
pub(super) const MAX_RESERVED_BYTES: u64 = 1 << 40;
/// The smallest hole between blocks, in bytes. Smaller holes are not made, because operating systems limit the number of mappings.
pub(super) const MIN_HOLE_BYTES: usize = 64 << 10;
/// Number of recent decay checks, together one interval, whose end of use is remembered for each expandable segment.
pub(super) const REMEMBERED_ENDS: usize = 5;

/// After the warm-up, `slack` grows by this much whenever a request would cause the release of a segment.
const SLACK_STEP: f64 = 0.02;
/// The warm-up ends after this many recycled segments, even if the need still grows.
const MAX_RECYCLED_SEGMENTS: u64 = 256;
/// The warm-up ends after this many segments were recycled and then created again, with no clear rise of the peak since.
const MAX_RECREATED_SEGMENTS: u64 = 4;
const RECYCLED_SIZE_COUNT: usize = 8;
/// The warm-up ends at search `WARM_UP_FACTOR * (searches until the last rise) + WARM_UP_MIN_SEARCHES`, if the peak has not clearly
/// risen since.
const WARM_UP_FACTOR: u64 = 2;
const WARM_UP_MIN_SEARCHES: u64 = 64;

/// Number of searches between two checks of the clock.
const SEARCHES_PER_CLOCK_CHECK: u64 = 64;
/// Maximum number of decay checks that are recorded within the time for which unused segments are kept.
const CHECKS_PER_INTERVAL: u64 = 4;
/// Upper bound on `patience`, in intervals.
const MAX_PATIENCE_INTERVALS: u64 = 64;
/// Number of times a stream is queried before it counts as busy: an idle device takes some microseconds to report that it is idle.
pub(super) const MAX_IDLE_QUERIES: usize = 64;

/// Number of waits for all streams before giving up, if other threads keep freeing blocks.
pub(super) const MAX_SYNC_ATTEMPTS: usize = 4;
/// Maximum number of tries of a call that may fail temporarily, and the pause between tries.
pub(super) const MAX_TRIES: u32 = 8;
pub(super) const RETRY_AFTER: Duration = Duration::from_micros(if cfg!(test) { 10 } else { 10_000 });
/// Maximum number of tries to lock a block that returns from the host, while other threads read it there.
pub(super) const MAX_RETURN_TRIES: u32 = 1000;
/// Like [`MAX_TRIES`], for calls whose failure would leave blocks on the host or lose a block.
pub(super) const MAX_TRIES_BEFORE_LOSS: u32 = 100;
/// Maximum number of copies for one block that moves by less than its size. A block that needs more copies goes through the host.
pub(super) const MAX_COPIES_PER_BLOCK: usize = 64;

pub(super) const CACHE_COUNT: usize = if cfg!(loom) { 2 } else { 64 };
pub(super) const BLOCKS_PER_SIZE: usize = if cfg!(loom) { 1 } else { 8 };
/// A cache that refuses this many blocks without serving a request is emptied: blocks of the cached sizes are no longer requested.
pub(super) const MAX_REFUSALS: usize = 64;
/// A block is cached only if its size is at most the thread cache's capacity divided by this.
pub(super) const MAX_CACHED_PART: usize = 16;

/// The size kind of a request, and the type of the segments that serve the request. Small and large requests use separate segments, so that
/// small, short-lived blocks do not pin large segments.
pub(in crate::storage) type SizeKind = SegmentType;

impl SizeKind {
    #[inline]
    pub(in crate::storage) fn of_size(size: usize) -> SizeKind {
        if size <= SMALL_REQUEST_MAX_BYTES { SizeKind::Small } else { SizeKind::Large }
    }

    #[inline]
    pub(in crate::storage) fn opposite(self) -> SizeKind {
        match self {
            SizeKind::Small => SizeKind::Large,
            SizeKind::Large => SizeKind::Small,
        }
    }
}

/// The policy of one allocator: the allocator's configuration and the device's alignment.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) alignment: usize,
    pub(super) config: Config,
    /// Size of the device's memory in bytes.
    pub(super) capacity: u64,
    /// True if sizes are rounded to divisions of powers of two.
    has_roundup_divisions: bool,
    /// True if blocks are taken from both ends of a segment. False if segments can grow at one end.
    pub(super) both_ends: bool,
    /// The smallest remainder, in bytes, that is split off as a block of its own, for small and for large requests.
    min_remainder: [usize; 2],
}

impl Rules {
    pub(super) fn new(config: Config, alignment: usize, capacity: u64) -> Rules {
        let has_roundup_divisions = config.roundup_power2_divisions.iter().any(|&divisions| divisions > 1);
        let both_ends = config.segments == SegmentSizes::Adaptive && !config.expandable_segments;
        let keeps_small_remainders = config.segments == SegmentSizes::Adaptive || config.expandable_segments;
        let min_remainder = [alignment, if keeps_small_remainders { alignment } else { SMALL_REQUEST_MAX_BYTES + 1 }];
        Rules { alignment, config, capacity, has_roundup_divisions, both_ends, min_remainder }
    }

    /// True if segment sizes adapt to the requests so far.
    pub(super) fn is_adaptive(&self) -> bool {
        self.config.segments == SegmentSizes::Adaptive
    }

    /// Returns the size in bytes of the block for a request; `None` on overflow.
    #[inline(always)]
    pub(super) fn round_size(&self, bytes: usize) -> Option<usize> {
        if self.has_roundup_divisions {
            return self.round_to_division(bytes);
        }
        let mask = self.alignment - 1; // uses a mask, because an integer division would take most of the time
        Some(bytes.max(1).checked_add(mask)? & !mask)
    }

    #[cold]
    #[inline(never)]
    fn round_to_division(&self, bytes: usize) -> Option<usize> {
        self.config.round_size(bytes, self.alignment)
    }

    /// True if a free block of `block` bytes may serve a request of `size` bytes. Blocks too large to be split are kept for requests of similar size.
    #[inline(always)]
    pub(super) fn may_serve(&self, kind: SizeKind, block: usize, size: usize) -> bool {
        self.config.max_split_size == usize::MAX || self.may_serve_oversize(kind, block, size)
    }

    #[cold]
    fn may_serve_oversize(&self, kind: SizeKind, block: usize, size: usize) -> bool {
        let max = self.config.max_split_size;
        if block < max || kind == SizeKind::Small {
            return true;
        }
        // An oversize block serves only requests that are oversize too and at most `max_non_split_rounding` bytes smaller.
        size >= max && block - size <= self.config.max_non_split_rounding
    }

    pub(super) fn min_remainder(&self, kind: SizeKind) -> usize {
        self.min_remainder[kind as usize]
    }

    /// True if a larger block may be split for a request of `size` bytes.
    #[inline(always)]
    pub(super) fn may_split_for(&self, size: usize) -> bool {
        size < self.config.max_split_size // sizes above `max_split_size` are always of the large kind
    }

    /// Returns the size in bytes of a new segment for a rounded request, given the bytes already reserved.
    pub(super) fn segment_size(&self, size: usize, reserved: u64) -> Option<usize> {
        let large = self.config.large_segment_size;
        if self.is_adaptive() {
            let share = usize::try_from(reserved).unwrap_or(usize::MAX) / GROWTH_DIVISOR;
            let cap = if size <= SMALL_REQUEST_MAX_BYTES { SMALL_SEGMENT_BYTES } else { large };
            return Some(size.max(share.min(cap) & !(self.alignment - 1)));
        }
        if size <= SMALL_REQUEST_MAX_BYTES {
            Some(SMALL_SEGMENT_BYTES)
        } else if size < MIN_DEDICATED_SEGMENT_BYTES.max(large / 2) {
            Some(large)
        } else {
            size.checked_next_multiple_of(SEGMENT_STEP_BYTES)
        }
    }

    /// Returns how many bytes to add to a segment of `from` bytes that lacks `need` bytes, given the bytes already
    /// reserved. Uses PyTorch's steps, or the size that a new segment would have.
    pub(super) fn extension(&self, kind: SizeKind, from: usize, need: usize, reserved: u64) -> usize {
        if self.is_adaptive() {
            return self.segment_size(need, reserved).unwrap_or(need);
        }
        let step = if kind == SizeKind::Small { SMALL_SEGMENT_BYTES } else { self.config.large_segment_size };
        (from + need).next_multiple_of(step) - from
    }
}

/// The memory limits of an allocator. Both bounds, `fraction` and `bytes`, apply.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) fraction: u64,
    pub(super) bytes: u64,
    /// Number of bytes that other allocators of this device held when a request last found no memory.
    pub(super) elsewhere: u64,
    /// True if a bound was lowered while more bytes were reserved than it allows.
    pub(super) is_exceeded: bool,
}

impl Limits {
    /// Returns the maximum number of bytes that all allocators of the device may reserve together.
    pub(super) fn allowed(&self) -> u64 {
        self.fraction.min(self.bytes)
    }

    /// Returns the maximum number of bytes that this allocator may reserve.
    pub(super) fn limit(&self) -> u64 {
        self.allowed().saturating_sub(self.elsewhere)
    }
}

/// Returns a fraction of a device's memory in bytes. The fraction 1 gives `capacity` exactly.
pub(super) fn fraction_of(capacity: u64, fraction: f64) -> u64 {
    if fraction == 1.0 { capacity } else { (capacity as f64 * fraction) as u64 }
}

/// The adaptive policy's estimate of how many bytes the program needs reserved.
///
/// The target follows the peak of active bytes. If a new segment would push the reserved bytes over the target, unused segments are
/// released first, so that unused segments never raise the peak of reserved bytes. During warm-up, while the need still grows, an
/// unused segment is not split for a much smaller request, but replaced by a fitting one. The warm-up ends when no new peak came
/// for as many searches as led to the last peak. From then on any unused segment serves a request. Whenever a segment would have to
/// be released, the target rises a little, so a repetitive program soon makes no driver calls.
#[derive(Debug)]
pub(super) struct Growth {
    /// Number of bytes that may be reserved before unused segments are released, and the factor by which the target exceeds the peak.
    target: u64,
    slack: f64,
    /// The peak of active bytes, the value of the peak at its last clear rise, and the search count at that rise.
    peak: u64,
    last_rise_bytes: u64,
    last_rise_search: u64,
    /// Number of segments recycled so far, and the sizes of the last few in bytes.
    recycled: u64,
    recycled_sizes: [usize; RECYCLED_SIZE_COUNT],
    /// Number of segments created since the last clear rise that had the size of a segment recycled shortly before.
    recreated: u64,
    /// True once the warm-up is over.
    pub(super) steady: bool,
}

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

    /// Records that a segment of this size was released to make room for another.
    pub(super) fn record_recycled(&mut self, bytes: usize) {
        self.recycled_sizes[self.recycled as usize % RECYCLED_SIZE_COUNT] = bytes;
        self.recycled += 1;
    }

    /// Records that a segment of this size is created.
    pub(super) fn record_created(&mut self, bytes: usize) {
        if let Some(size) = self.recycled_sizes.iter_mut().find(|size| **size == bytes) {
            *size = 0;
            self.recreated += 1;
            self.steady |= self.recreated >= MAX_RECREATED_SEGMENTS;
        }
    }

    /// Returns the size, in bytes, of the largest unused segment that may be split during warm-up. `segment` is the size of a new
    /// segment for the request.
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

    /// Returns the target in bytes: `peak` times `slack`.
    fn implied_target(&self) -> u64 {
        (self.slack * self.peak as f64) as u64
    }

    pub(super) fn raise_target(&mut self, target: u64) {
        self.target = self.target.max(target);
    }

    /// Restarts the warm-up, because all unused segments were released.
    pub(super) fn restart_warm_up(&mut self) {
        *self = Growth::default();
    }
}

/// Records past checks and peaks, and decides when unused segments are released.
#[derive(Debug)]
pub(super) struct Decay {
    /// The minimum time in milliseconds for which an unused segment is kept; 0 means that it is never released.
    interval: u64,
    /// Search count and milliseconds at past checks. A segment whose last use precedes a check's search count has been unused since
    /// the time of that check.
    checks: VecDeque<(u64, u64)>,
    /// The peaks of active bytes in this interval and the previous one, and when this interval started.
    peaks: [u64; 2],
    interval_start: u64,
    /// Number of intervals for which unused segments are kept.
    patience: u64,
    /// The time in milliseconds of the last release; `None` if a segment was created since.
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

    /// True if the allocator has to check the clock at this search.
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

    /// Records that segments were released.
    pub(super) fn record_released(&mut self, now: u64) {
        self.released = Some(now);
    }

    /// Returns the bytes that decay keeps reserved: the peak of active bytes in this interval and the previous one.
    pub(super) fn bytes_to_keep(&self) -> u64 {
        self.peaks[0].max(self.peaks[1])
    }

    /// Returns for how many milliseconds unused segments are currently kept.
    fn keep_milliseconds(&self) -> u64 {
        self.interval.saturating_mul(self.patience)
    }

    /// True if enough time has passed since the last recorded check.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.checks.back().is_none_or(|(_, last)| now - last >= self.keep_milliseconds().div_ceil(CHECKS_PER_INTERVAL))
    }

    /// Records a check of the clock. Returns the search count before which segments must have been unused to be
    /// released; `None` if no check is due or no check is old enough.
    pub(super) fn record_check(&mut self, now: u64, ticks: u64, active: u64) -> Option<u64> {
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
            decay.record_segment_created(at + 301); // the patience doubles at most once per release
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
