//! The statistics, kept at a few instructions a pair.
//!
//! What was freed is what was allocated and is not there any more, what is active is what is allocated and what is
//! pending, and the sums of both kinds are sums: only what cannot be made from the rest is kept, and the public
//! [`DeviceStats`] are made of it when somebody asks.
//!
//! A block in a thread's cache counts as allocated here. What the caches hold is taken off what is shown, and off the
//! peaks: of its own thread's cache a peak knows at every moment, of the others' when they are emptied.

use super::super::stats::{DeviceStats, PoolStats, Split, Stat};
use super::policy::Kind;

/// Blocks, their bytes, and the bytes asked for.
pub(super) type Amounts = [i64; 3];

/// What a thread's cache did to what is allocated while the allocator was not looking: by how much it changed in the end
/// and at most, and upwards in all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Deltas {
    pub(super) change: Amounts,
    pub(super) highest: Amounts,
    pub(super) increases: Amounts,
}

/// Quantities over time, of one kind. Signed, as part of a change may be known before the rest.
#[derive(Debug, Clone, Copy)]
struct Flows<const N: usize> {
    current: [i64; N],
    peak: [i64; N],
    allocated: [i64; N],
    /// What was there when the sums were last set to zero.
    base: [i64; N],
}

impl<const N: usize> Default for Flows<N> {
    fn default() -> Flows<N> {
        Flows { current: [0; N], peak: [0; N], allocated: [0; N], base: [0; N] }
    }
}

impl<const N: usize> Flows<N> {
    #[inline(always)]
    fn rise(&mut self, by: [i64; N]) {
        self.allocated = plus(self.allocated, by);
        self.current = plus(self.current, by);
    }

    #[inline(always)]
    fn fall(&mut self, by: [i64; N]) {
        for i in 0..N {
            self.current[i] -= by[i];
        }
    }

    #[inline(always)]
    fn change(&mut self, by: [i64; N]) {
        for i in 0..N {
            self.allocated[i] += by[i].max(0);
            self.current[i] += by[i];
        }
    }

    /// Raises the peaks to what is there, with so much more elsewhere.
    #[inline(always)]
    fn raise(&mut self, elsewhere: [i64; N]) {
        self.peak = higher(self.peak, plus(self.current, elsewhere));
    }

    fn stat(&self, i: usize) -> Stat {
        let (current, allocated) = (self.current[i], self.allocated[i]);
        let freed = self.base[i] + allocated - current;
        let [current, peak, allocated, freed] = [current, self.peak[i], allocated, freed].map(|v| v.max(0) as u64);
        Stat { current, peak, allocated, freed }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        (self.allocated, self.base) = ([0; N], self.current);
    }
}

#[inline(always)]
fn plus<const N: usize>(a: [i64; N], b: [i64; N]) -> [i64; N] {
    std::array::from_fn(|i| a[i] + b[i])
}

#[inline(always)]
fn higher<const N: usize>(a: [i64; N], b: [i64; N]) -> [i64; N] {
    std::array::from_fn(|i| a[i].max(b[i]))
}

/// The counters of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Pool {
    /// Blocks that are handed out.
    live: Flows<3>,
    /// Free parts of split segments: blocks and bytes.
    split: Flows<2>,
    /// Segments and bytes.
    segment: Flows<2>,
    /// Blocks and bytes that are pending now.
    pending: [i64; 2],
    /// Peaks of active blocks and bytes while any were pending.
    active_peak: [i64; 2],
    /// Pending blocks and bytes that were handed out as they were: allocated, but active all the time.
    retaken: [i64; 2],
    /// Blocks and bytes that were pending when the sums were last set to zero.
    pending_base: [i64; 2],
}

impl Pool {
    /// As users see it.
    fn stats(&self) -> PoolStats {
        let active = |i: usize| {
            let live = self.live.stat(i);
            let [pending, peak, retaken, base] =
                [self.pending[i], self.active_peak[i], self.retaken[i], self.pending_base[i]].map(|v| v as u64);
            Stat {
                current: live.current + pending,
                peak: live.peak.max(peak),
                allocated: live.allocated - retaken,
                freed: live.freed + base - retaken - pending,
            }
        };
        PoolStats {
            allocation: self.live.stat(0),
            allocated_bytes: self.live.stat(1),
            requested_bytes: self.live.stat(2),
            active: active(0),
            active_bytes: active(1),
            inactive_split: self.split.stat(0),
            inactive_split_bytes: self.split.stat(1),
            segment: self.segment.stat(0),
            reserved_bytes: self.segment.stat(1),
        }
    }

    /// Blocks and bytes in use.
    fn active(&self) -> [i64; 2] {
        [self.live.current[0] + self.pending[0], self.live.current[1] + self.pending[1]]
    }

    fn reset_peak(&mut self) {
        self.live.reset_peak();
        self.split.reset_peak();
        self.segment.reset_peak();
        self.active_peak = self.active();
    }

    fn reset_accumulated(&mut self) {
        self.live.reset_accumulated();
        self.split.reset_accumulated();
        self.segment.reset_accumulated();
        (self.retaken, self.pending_base) = ([0; 2], self.pending);
    }
}

/// Peaks of the sums of both kinds.
#[derive(Debug, Clone, Copy, Default)]
struct Peaks {
    live: [i64; 3],
    split: [i64; 2],
    segment: [i64; 2],
    active: [i64; 2],
}

/// The counters of an allocator.
#[derive(Debug, Default)]
pub(super) struct Counters {
    kinds: [Pool; 2],
    peaks: Peaks,
    /// What this thread's cache has done to what is live: caches hold small blocks only.
    cached: Amounts,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    num_device_alloc: u64,
    num_device_free: u64,
    pub(super) max_split_size: u64,
    oversize_allocations: Stat,
    oversize_segments: Stat,
}

impl Counters {
    /// Everything, as users see it. The threads' caches are folded in already.
    pub(super) fn stats(&self) -> DeviceStats {
        DeviceStats {
            total: self.total().stats(),
            small_pool: self.kinds[0].stats(),
            large_pool: self.kinds[1].stats(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            max_split_size: self.max_split_size,
            oversize_allocations: self.oversize_allocations,
            oversize_segments: self.oversize_segments,
        }
    }

    /// Both kinds together.
    fn total(&self) -> Pool {
        fn sum<const N: usize>(a: Flows<N>, b: Flows<N>, peak: [i64; N]) -> Flows<N> {
            let (current, allocated) = (plus(a.current, b.current), plus(a.allocated, b.allocated));
            Flows { current, peak, allocated, base: plus(a.base, b.base) }
        }
        let [a, b] = &self.kinds;
        Pool {
            live: sum(a.live, b.live, self.peaks.live),
            split: sum(a.split, b.split, self.peaks.split),
            segment: sum(a.segment, b.segment, self.peaks.segment),
            pending: plus(a.pending, b.pending),
            active_peak: self.peaks.active,
            retaken: plus(a.retaken, b.retaken),
            pending_base: plus(a.pending_base, b.pending_base),
        }
    }

    #[inline(always)]
    fn live(&self) -> Amounts {
        plus(self.kinds[0].live.current, self.kinds[1].live.current)
    }

    /// Bytes of active blocks.
    #[inline(always)]
    pub(super) fn active_bytes(&self) -> u64 {
        let active = |pool: &Pool| pool.live.current[1] + pool.pending[1];
        (active(&self.kinds[0]) + active(&self.kinds[1]) + self.cached[1]).max(0) as u64
    }

    /// Blocks that are handed out.
    pub(super) fn live_blocks(&self) -> u64 {
        self.live()[0] as u64
    }

    /// Bytes of segments held from the driver.
    pub(super) fn reserved(&self) -> u64 {
        (self.kinds[0].segment.current[1] + self.kinds[1].segment.current[1]) as u64
    }

    fn pool(&mut self, kind: Kind) -> &mut Pool {
        &mut self.kinds[kind as usize]
    }

    /// What was taken or given back raises peaks.
    #[inline(always)]
    fn raise_live(&mut self, kind: Kind) {
        let cached = self.cached;
        self.pool(kind).live.raise(if kind == Kind::Small { cached } else { [0; 3] });
        self.peaks.live = higher(self.peaks.live, plus(self.live(), cached));
        if self.kinds[0].pending[0] + self.kinds[1].pending[0] > 0 {
            self.raise_active();
        }
    }

    #[cold]
    fn raise_active(&mut self) {
        let cached = [self.cached[0], self.cached[1]];
        let [small, large] = &mut self.kinds;
        self.peaks.active = higher(self.peaks.active, plus(plus(small.active(), large.active()), cached));
        small.active_peak = higher(small.active_peak, plus(small.active(), cached));
        large.active_peak = higher(large.active_peak, large.active());
    }

    #[inline(always)]
    fn change_split(&mut self, kind: Kind, split: Split) {
        let flows = &mut self.pool(kind).split;
        flows.change([split.blocks, split.bytes]);
        flows.raise([0; 2]);
        let both = plus(self.kinds[0].split.current, self.kinds[1].split.current);
        self.peaks.split = higher(self.peaks.split, both);
    }

    #[inline(always)]
    fn oversize(&mut self, size: usize, by: i64) {
        if size as u64 >= self.max_split_size {
            self.oversize_allocations.change(by);
        }
    }

    /// A free block was handed out.
    #[inline(always)]
    pub(super) fn taken(&mut self, kind: Kind, size: usize, requested: usize, split: Split) {
        self.pool(kind).live.rise([1, size as i64, requested as i64]);
        self.raise_live(kind);
        self.change_split(kind, split);
        self.oversize(size, 1);
    }

    /// A block was given back and is free.
    #[inline(always)]
    pub(super) fn given_back(&mut self, kind: Kind, size: usize, requested: usize, split: Split) {
        self.pool(kind).live.fall([1, size as i64, requested as i64]);
        self.change_split(kind, split);
        self.oversize(size, -1);
    }

    /// A block was given back, but a stream may still use it.
    pub(super) fn pending(&mut self, kind: Kind, size: usize, requested: usize) {
        self.raise_active(); // of all that was live until now
        let pool = self.pool(kind);
        pool.live.fall([1, size as i64, requested as i64]);
        pool.pending = plus(pool.pending, [1, size as i64]);
        self.oversize(size, -1);
    }

    /// No stream uses a block that was given back any more.
    pub(super) fn settled(&mut self, kind: Kind, size: usize, split: Split) {
        let pool = self.pool(kind);
        pool.pending = plus(pool.pending, [-1, -(size as i64)]);
        self.change_split(kind, split);
    }

    /// A pending block was handed out again.
    pub(super) fn retaken(&mut self, kind: Kind, size: usize, requested: usize) {
        let pool = self.pool(kind);
        pool.pending = plus(pool.pending, [-1, -(size as i64)]);
        pool.retaken = plus(pool.retaken, [1, size as i64]);
        pool.live.rise([1, size as i64, requested as i64]);
        self.raise_live(kind);
        self.oversize(size, 1);
    }

    /// Free blocks were merged, or became parts of split segments.
    pub(super) fn split_changed(&mut self, kind: Kind, split: Split) {
        self.change_split(kind, split);
    }

    pub(super) fn segment_made(&mut self, kind: Kind, size: usize) {
        self.num_device_alloc += 1;
        self.segments(kind, [1, size as i64]);
        if size as u64 >= self.max_split_size {
            self.oversize_segments.change(1);
        }
    }

    pub(super) fn segment_released(&mut self, kind: Kind, size: usize) {
        self.num_device_free += 1;
        self.segments(kind, [-1, -(size as i64)]);
        if size as u64 >= self.max_split_size {
            self.oversize_segments.change(-1);
        }
    }

    /// A segment grew in place.
    pub(super) fn segment_extended(&mut self, kind: Kind, by: usize) {
        self.num_device_alloc += 1;
        self.segments(kind, [0, by as i64]);
    }

    /// The end of a segment was given back.
    pub(super) fn segment_shrunk(&mut self, kind: Kind, by: usize) {
        self.num_device_free += 1;
        self.segments(kind, [0, -(by as i64)]);
    }

    fn segments(&mut self, kind: Kind, by: [i64; 2]) {
        let flows = &mut self.pool(kind).segment;
        flows.change(by);
        flows.raise([0; 2]);
        let both = plus(self.kinds[0].segment.current, self.kinds[1].segment.current);
        self.peaks.segment = higher(self.peaks.segment, both);
    }

    /// What this thread's cache has done so far, and done at most since the last time.
    #[inline(always)]
    pub(super) fn see_cached(&mut self, change: Amounts, highest: Amounts) {
        self.cached = highest;
        self.raise_live(Kind::Small);
        self.cached = change;
    }

    /// What a thread's cache did before it was emptied.
    pub(super) fn fold(&mut self, deltas: &Deltas) {
        self.see_cached([0; 3], deltas.highest);
        let live = &mut self.kinds[0].live;
        live.current = plus(live.current, deltas.change);
        live.allocated = plus(live.allocated, deltas.increases);
    }

    pub(super) fn reset_peak(&mut self) {
        self.kinds.iter_mut().for_each(Pool::reset_peak);
        let Pool { live, split, segment, .. } = self.total();
        self.peaks =
            Peaks { live: live.current, split: split.current, segment: segment.current, active: self.total().active() };
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            stat.peak = stat.current;
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.kinds.iter_mut().for_each(Pool::reset_accumulated);
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            (stat.allocated, stat.freed) = (0, 0);
        }
        (self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams) = (0, 0, 0);
        (self.num_device_alloc, self.num_device_free) = (0, 0);
    }
}
