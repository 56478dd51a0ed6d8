//! An allocator's statistics, updated in a few instructions per allocation and free.
//!
//! Only quantities that cannot be derived from others are kept. [`DeviceStats`] are computed from them when requested.
//! The current value is the sum allocated minus the sum freed. Active means allocated or pending. The total is the sum
//! of the small and the large pool, except for peaks, which are tracked separately.
//!
//! A block in a thread's cache counts as allocated in these counters, so the caches' contents are subtracted from the
//! reported values and from the peaks. A peak accounts for the calling thread's cache at every moment, and for the
//! cache of another thread only when that cache is emptied.

use std::array;

use super::caching::SizeKind;
use super::stats::{DeviceStats, PoolStats, Split, Stat};

/// The number of blocks, their bytes, and the requested bytes.
pub(super) type BlockAmounts = [i64; 3];

/// Changes that a thread cache made to the allocated amounts without the allocator: the net change, its highest value, and the sum
/// of the increases.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ThreadCacheDeltas {
    pub(super) change: BlockAmounts,
    pub(super) highest: BlockAmounts,
    pub(super) increases: BlockAmounts,
}

/// A quantity over time, as the sums of increases and decreases; the current value is their difference. The sums are
/// signed, because a decrease may be counted before the increase it belongs to.
///
/// Each quantity has its own struct. In an array of sums, the compiler would vectorise updates of neighbouring sums,
/// and a wide load of two values stored just before stalls until both stores are done.
#[derive(Debug, Clone, Copy, Default)]
struct FlowCounter {
    allocated: i64,
    freed: i64,
    peak: i64,
    /// `allocated` and `freed` at the time when the accumulated statistics were last reset.
    base: [i64; 2],
}

impl FlowCounter {
    #[inline(always)]
    fn current(&self) -> i64 {
        self.allocated - self.freed
    }

    #[inline(always)]
    fn change(&mut self, by: i64) {
        let up = by.max(0);
        self.allocated += up;
        self.freed += up - by;
    }

    /// Adds the counters of the small and the large pool. `peak` is the peak of the total, which is not the sum of the two peaks.
    fn total(kinds: [&FlowCounter; 2], peak: i64) -> FlowCounter {
        let [a, b] = kinds;
        let base = [a.base[0] + b.base[0], a.base[1] + b.base[1]];
        FlowCounter { allocated: a.allocated + b.allocated, freed: a.freed + b.freed, peak, base }
    }

    fn stat(&self) -> Stat {
        let (allocated, freed) = (self.allocated - self.base[0], self.freed - self.base[1]);
        let [current, peak, allocated, freed] =
            [self.current(), self.peak, allocated, freed].map(|value| value.max(0) as u64);
        Stat { current, peak, allocated, freed }
    }

    fn reset_accumulated(&mut self) {
        self.base = [self.allocated, self.freed];
    }
}

/// Raises a peak to `to`. Branches, because a branch that is nearly always predicted costs less than a store.
#[inline(always)]
fn raise_peak(peak: &mut i64, to: i64) {
    if to > *peak {
        *peak = to;
    }
}

/// The count, or the bytes, of pending blocks: returned blocks that a stream may still use.
#[derive(Debug, Clone, Copy, Default)]
struct PendingCounter {
    current: i64,
    /// The highest number (or bytes) of active blocks while any block was pending.
    active_peak: i64,
    /// The number (or bytes) of pending blocks that were handed out again: newly allocated, but active all the time.
    retaken: i64,
    /// The pending amount when the accumulated statistics were last reset.
    base: i64,
}

impl PendingCounter {
    fn active(&self, live: &FlowCounter) -> Stat {
        let live = live.stat();
        let [current, peak, retaken, base] =
            [self.current, self.active_peak, self.retaken, self.base].map(|value| value as u64);
        Stat {
            current: live.current + current,
            peak: live.peak.max(peak),
            allocated: live.allocated - retaken,
            freed: live.freed + base - retaken - current,
        }
    }

    fn total(kinds: [&PendingCounter; 2], active_peak: i64) -> PendingCounter {
        let [a, b] = kinds;
        let (retaken, base) = (a.retaken + b.retaken, a.base + b.base);
        PendingCounter { current: a.current + b.current, active_peak, retaken, base }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct PoolCounters {
    /// Allocated blocks: their number, bytes and requested bytes.
    live: [FlowCounter; 3],
    /// Free parts of split segments: their number and bytes.
    split: [FlowCounter; 2],
    /// Segments: their number and bytes.
    segment: [FlowCounter; 2],
    /// Pending blocks: their number and bytes.
    pending: [PendingCounter; 2],
}

/// Peaks of the small and the large pool together, which are not the sums of the pools' peaks.
#[derive(Debug, Clone, Copy, Default)]
struct Peaks {
    live: [i64; 3],
    split: [i64; 2],
    segment: [i64; 2],
    active: [i64; 2],
}

impl PoolCounters {
    fn total([a, b]: &[PoolCounters; 2], peaks: &Peaks) -> PoolCounters {
        PoolCounters {
            live: array::from_fn(|i| FlowCounter::total([&a.live[i], &b.live[i]], peaks.live[i])),
            split: array::from_fn(|i| FlowCounter::total([&a.split[i], &b.split[i]], peaks.split[i])),
            segment: array::from_fn(|i| FlowCounter::total([&a.segment[i], &b.segment[i]], peaks.segment[i])),
            pending: array::from_fn(|i| PendingCounter::total([&a.pending[i], &b.pending[i]], peaks.active[i])),
        }
    }

    fn stats(&self) -> PoolStats {
        PoolStats {
            allocation: self.live[0].stat(),
            allocated_bytes: self.live[1].stat(),
            requested_bytes: self.live[2].stat(),
            active: self.pending[0].active(&self.live[0]),
            active_bytes: self.pending[1].active(&self.live[1]),
            inactive_split: self.split[0].stat(),
            inactive_split_bytes: self.split[1].stat(),
            segment: self.segment[0].stat(),
            reserved_bytes: self.segment[1].stat(),
        }
    }

    fn flows(&mut self) -> impl Iterator<Item = &mut FlowCounter> {
        self.live.iter_mut().chain(&mut self.split).chain(&mut self.segment)
    }

    /// Returns the number (`i` = 0) or bytes (`i` = 1) of active blocks: allocated or pending.
    fn active(&self, i: usize) -> i64 {
        self.live[i].current() + self.pending[i].current
    }

    fn reset_peak(&mut self) {
        self.flows().for_each(|flow| flow.peak = flow.current());
        for i in 0..2 {
            self.pending[i].active_peak = self.active(i);
        }
    }

    /// Iterates over the peaks, in the order of [`peaks_of`].
    fn peaks(&mut self) -> impl Iterator<Item = &mut i64> {
        let flows = self.live.iter_mut().chain(&mut self.split).chain(&mut self.segment);
        flows.map(|flow| &mut flow.peak).chain(self.pending.iter_mut().map(|pending| &mut pending.active_peak))
    }

    fn reset_accumulated(&mut self) {
        self.flows().for_each(FlowCounter::reset_accumulated);
        for pending in &mut self.pending {
            (pending.retaken, pending.base) = (0, pending.current);
        }
    }
}

/// Returns the peaks of allocated blocks, free parts of split segments, segments and active blocks.
fn peaks_of(s: &PoolStats) -> [i64; 9] {
    let [live, split] = [[s.allocated_bytes, s.requested_bytes], [s.inactive_split, s.inactive_split_bytes]];
    let stats =
        [s.allocation, live[0], live[1], split[0], split[1], s.segment, s.reserved_bytes, s.active, s.active_bytes];
    stats.map(|stat| stat.peak as i64)
}

/// All counters of an allocator. The allocator sets `max_split_size` after construction.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pools: [PoolCounters; 2],
    peaks: Peaks,
    /// Changes by the calling thread's cache to the allocated blocks, per pool. Only small blocks are cached.
    thread_cache: [BlockAmounts; 2],
    num_pending: u64,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    num_device_alloc: u64,
    num_device_free: u64,
    pub(super) spilled_bytes: Stat,
    pub(super) num_spills: u64,
    pub(super) num_returns: u64,
    pub(super) max_split_size: u64,
    oversize_allocations: Stat,
    oversize_segments: Stat,
}

impl Counters {
    /// Computes the public statistics. The caller must have added the deltas of all thread caches.
    pub(super) fn stats(&self) -> DeviceStats {
        DeviceStats {
            total: PoolCounters::total(&self.pools, &self.peaks).stats(),
            small_pool: self.pools[0].stats(),
            large_pool: self.pools[1].stats(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            spilled_bytes: self.spilled_bytes,
            num_spills: self.num_spills,
            num_returns: self.num_returns,
            max_split_size: self.max_split_size,
            oversize_allocations: self.oversize_allocations,
            oversize_segments: self.oversize_segments,
        }
    }

    #[inline(always)]
    pub(super) fn active_bytes(&self) -> u64 {
        let [a, b] = &self.pools;
        (a.active(1) + b.active(1) + self.thread_cache[0][1]).max(0) as u64
    }

    /// Returns the active bytes that are in the device's memory.
    #[inline(always)]
    pub(super) fn active_bytes_on_device(&self) -> u64 {
        self.active_bytes().saturating_sub(self.spilled_bytes.current)
    }

    pub(super) fn allocated_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.live[1].current()).sum::<i64>() as u64
    }

    pub(super) fn live_blocks(&self) -> u64 {
        self.pools.iter().map(|pool| pool.live[0].current()).sum::<i64>() as u64
    }

    pub(super) fn reserved(&self) -> u64 {
        self.pools.iter().map(|pool| pool.segment[1].current()).sum::<i64>() as u64
    }

    /// Raises the peaks of the allocated amounts: the peak of the pool to its current value plus `pool_delta`, and the
    /// total's peak to the total plus `total_delta`. The deltas are the changes by this thread's cache.
    #[inline(always)]
    fn raise_live(&mut self, kind: SizeKind, pool_delta: &BlockAmounts, total_delta: &BlockAmounts) {
        let (at, other) = (kind as usize, kind.opposite() as usize);
        for i in 0..3 {
            let here = self.pools[at].live[i].current();
            let all = here + self.pools[other].live[i].current();
            raise_peak(&mut self.pools[at].live[i].peak, here + pool_delta[i]);
            raise_peak(&mut self.peaks.live[i], all + total_delta[i]);
        }
        if self.num_pending > 0 {
            self.raise_active(kind, pool_delta, total_delta);
        }
    }

    #[cold]
    fn raise_active(&mut self, kind: SizeKind, pool_delta: &BlockAmounts, total_delta: &BlockAmounts) {
        for i in 0..2 {
            let (here, other) = (self.pools[kind as usize].active(i), self.pools[kind.opposite() as usize].active(i));
            raise_peak(&mut self.pools[kind as usize].pending[i].active_peak, here + pool_delta[i]);
            raise_peak(&mut self.peaks.active[i], here + other + total_delta[i]);
        }
    }

    #[inline(always)]
    fn count_oversize(&mut self, size: usize, by: i64) {
        if size as u64 >= self.max_split_size {
            self.oversize_allocations.change(by);
        }
    }

    #[inline(always)]
    pub(super) fn record_allocation(&mut self, kind: SizeKind, size: usize, requested: usize) {
        for (flow, by) in self.pools[kind as usize].live.iter_mut().zip([1, size as i64, requested as i64]) {
            flow.allocated += by;
        }
        let [cached, all] = [self.thread_cache[kind as usize], self.thread_cache[0]];
        self.raise_live(kind, &cached, &all);
        self.count_oversize(size, 1);
    }

    #[inline(always)]
    pub(super) fn record_free(&mut self, kind: SizeKind, size: usize, requested: usize) {
        for (flow, by) in self.pools[kind as usize].live.iter_mut().zip([1, size as i64, requested as i64]) {
            flow.freed += by;
        }
        self.count_oversize(size, -1);
    }

    /// Changes the allocated amounts as if an earlier allocation had been different.
    pub(super) fn correct_live(&mut self, kind: SizeKind, by: BlockAmounts) {
        for (flow, by) in self.pools[kind as usize].live.iter_mut().zip(by) {
            flow.allocated += by;
        }
        self.raise_live(kind, &[0; 3], &[0; 3]);
        if by[0] != 0 {
            self.count_oversize(by[1].unsigned_abs() as usize, by[0]);
        }
    }

    /// Records that a block was returned that a stream may still use.
    pub(super) fn record_pending_free(&mut self, kind: SizeKind, size: usize, requested: usize) {
        let [cached, all] = [self.thread_cache[kind as usize], self.thread_cache[0]];
        self.raise_active(kind, &cached, &all); // first counts the blocks allocated so far
        self.record_free(kind, size, requested);
        self.num_pending += 1;
        for (pending, by) in self.pools[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.current += by;
        }
    }

    /// Records that no stream uses a returned block any more.
    pub(super) fn end_pending(&mut self, kind: SizeKind, size: usize) {
        self.num_pending -= 1;
        for (pending, by) in self.pools[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.current -= by;
        }
    }

    /// Records that a pending block was handed out again.
    pub(super) fn record_reallocation(&mut self, kind: SizeKind, size: usize, requested: usize) {
        self.end_pending(kind, size);
        for (pending, by) in self.pools[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.retaken += by;
        }
        self.record_allocation(kind, size, requested);
    }

    /// Records that free blocks were merged, or became parts of split segments.
    #[inline(always)]
    pub(super) fn record_split_change(&mut self, kind: SizeKind, split: Split) {
        for (i, by) in [split.blocks, split.bytes].into_iter().enumerate() {
            let other = self.pools[kind.opposite() as usize].split[i].current();
            let flow = &mut self.pools[kind as usize].split[i];
            flow.change(by);
            let now = flow.current();
            raise_peak(&mut flow.peak, now);
            raise_peak(&mut self.peaks.split[i], now + other);
        }
    }

    pub(super) fn record_segment_alloc(&mut self, kind: SizeKind, size: usize) {
        self.change_segments(kind, true, [1, size as i64]);
    }

    pub(super) fn record_segment_free(&mut self, kind: SizeKind, size: usize) {
        self.change_segments(kind, false, [-1, -(size as i64)]);
    }

    /// Records that the driver allocated or freed memory, which changed the number and the bytes of segments.
    pub(super) fn change_segments(&mut self, kind: SizeKind, allocated: bool, by: [i64; 2]) {
        *(if allocated { &mut self.num_device_alloc } else { &mut self.num_device_free }) += 1;
        if by[1].unsigned_abs() >= self.max_split_size {
            self.oversize_segments.change(by[0]);
        }
        for (i, by) in by.into_iter().enumerate() {
            let other = self.pools[kind.opposite() as usize].segment[i].current();
            let flow = &mut self.pools[kind as usize].segment[i];
            flow.change(by);
            let now = flow.current();
            raise_peak(&mut flow.peak, now);
            raise_peak(&mut self.peaks.segment[i], now + other);
        }
    }

    /// Counts the changes that this thread's cache has made since it was last emptied; `change` is their sum. `highest` is given if
    /// the cache's peak may have grown since the last call.
    #[inline(always)]
    pub(super) fn apply_thread_cache_deltas(&mut self, (change, highest): (BlockAmounts, Option<BlockAmounts>)) {
        if let Some(highest) = highest {
            self.raise_live(SizeKind::Small, &highest, &highest);
        }
        self.thread_cache[0] = change;
    }

    /// Adds the changes that a thread's cache made before it was emptied.
    pub(super) fn fold_thread_cache(&mut self, deltas: &ThreadCacheDeltas) {
        self.raise_live(SizeKind::Small, &deltas.highest, &deltas.highest);
        for (flow, i) in self.pools[SizeKind::Small as usize].live.iter_mut().zip(0..) {
            flow.allocated += deltas.increases[i];
            flow.freed += deltas.increases[i] - deltas.change[i];
        }
        self.thread_cache[0] = [0; 3];
    }

    pub(super) fn reset_peak(&mut self) {
        self.pools.iter_mut().for_each(PoolCounters::reset_peak);
        let [a, b] = &self.pools;
        self.peaks = Peaks {
            live: array::from_fn(|i| a.live[i].current() + b.live[i].current()),
            split: array::from_fn(|i| a.split[i].current() + b.split[i].current()),
            segment: array::from_fn(|i| a.segment[i].current() + b.segment[i].current()),
            active: array::from_fn(|i| a.active(i) + b.active(i)),
        };
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments, &mut self.spilled_bytes] {
            stat.peak = stat.current;
        }
    }

    pub(super) fn raise_peaks(&mut self, to: &DeviceStats) {
        let Peaks { live, split, segment, active } = &mut self.peaks;
        let total = live.iter_mut().chain(split).chain(segment).chain(active);
        total.zip(peaks_of(&to.total)).for_each(|(peak, to)| raise_peak(peak, to));
        for (pool, to) in self.pools.iter_mut().zip([&to.small_pool, &to.large_pool]) {
            pool.peaks().zip(peaks_of(to)).for_each(|(peak, to)| raise_peak(peak, to));
        }
        self.oversize_allocations.peak = self.oversize_allocations.peak.max(to.oversize_allocations.peak);
        self.oversize_segments.peak = self.oversize_segments.peak.max(to.oversize_segments.peak);
        self.spilled_bytes.peak = self.spilled_bytes.peak.max(to.spilled_bytes.peak);
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.pools.iter_mut().for_each(PoolCounters::reset_accumulated);
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments, &mut self.spilled_bytes] {
            (stat.allocated, stat.freed) = (0, 0);
        }
        (self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams) = (0, 0, 0);
        (self.num_device_alloc, self.num_device_free) = (0, 0);
        (self.num_spills, self.num_returns) = (0, 0);
    }
}
