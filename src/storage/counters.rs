//! The statistics, kept at a few instructions a pair.
//!
//! What was freed is what was allocated and is not there any more, what is active is what is allocated and what is
//! pending, and the sums of both kinds are sums: only what cannot be made from the rest is kept, and the public
//! [`DeviceStats`] are made of it when somebody asks.
//!
//! A block in a thread's cache counts as allocated here. What the caches hold is taken off what is shown, and off the
//! peaks: of its own thread's cache a peak knows at every moment, of the others' when they are emptied.

use super::caching::Kind;
use super::stats::{DeviceStats, PoolStats, Split, Stat};

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

/// A quantity over time. Signed, as part of a change may be known before the rest.
///
/// One after the other, not side by side: the compiler would add two at a time, and a wide load of what was stored in
/// parts just before waits for both.
#[derive(Debug, Clone, Copy, Default)]
struct Flow {
    current: i64,
    peak: i64,
    allocated: i64,
    /// What was there when the sums were last set to zero.
    base: i64,
}

impl Flow {
    #[inline(always)]
    fn rise(&mut self, by: i64, elsewhere: i64) {
        self.allocated += by;
        self.current += by;
        self.raise(elsewhere);
    }

    #[inline(always)]
    fn fall(&mut self, by: i64) {
        self.current -= by;
    }

    #[inline(always)]
    fn change(&mut self, by: i64) {
        self.allocated += by.max(0);
        self.current += by;
        self.raise(0);
    }

    /// Raises the peak to what is there, with so much more elsewhere.
    #[inline(always)]
    fn raise(&mut self, elsewhere: i64) {
        self.peak = self.peak.max(self.current + elsewhere);
    }

    fn stat(&self) -> Stat {
        let freed = self.base + self.allocated - self.current;
        let [current, peak, allocated, freed] =
            [self.current, self.peak, self.allocated, freed].map(|value| value.max(0) as u64);
        Stat { current, peak, allocated, freed }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        (self.allocated, self.base) = (0, self.current);
    }
}

/// Quantities that are pending or have been: blocks, or their bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Pending {
    current: i64,
    /// The peak of what was active while any were pending.
    active_peak: i64,
    /// Handed out as they were: allocated, but active all the time.
    retaken: i64,
    /// What was pending when the sums were last set to zero.
    base: i64,
}

impl Pending {
    fn active(&self, live: &Flow) -> Stat {
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
}

/// The counters of one kind, or of both together.
#[derive(Debug, Clone, Copy, Default)]
struct Pool {
    /// Blocks that are handed out, their bytes, and the bytes asked for.
    live: [Flow; 3],
    /// Free parts of split segments, and their bytes.
    split: [Flow; 2],
    /// Segments and their bytes.
    segment: [Flow; 2],
    /// Blocks and bytes.
    pending: [Pending; 2],
}

impl Pool {
    /// Rises, with so much more in this thread's cache.
    #[inline(always)]
    fn rise(&mut self, by: Amounts, cached: &Amounts) {
        for i in 0..3 {
            self.live[i].rise(by[i], cached[i]);
        }
        if self.pending[0].current > 0 {
            self.raise_active(cached);
        }
    }

    #[inline(always)]
    fn fall(&mut self, by: Amounts) {
        for (flow, by) in self.live.iter_mut().zip(by) {
            flow.fall(by);
        }
    }

    #[cold]
    fn raise_active(&mut self, cached: &Amounts) {
        for ((pending, live), cached) in self.pending.iter_mut().zip(&self.live).zip(cached) {
            pending.active_peak = pending.active_peak.max(live.current + cached + pending.current);
        }
    }

    #[inline(always)]
    fn split(&mut self, split: Split) {
        self.split[0].change(split.blocks);
        self.split[1].change(split.bytes);
    }

    fn fold(&mut self, deltas: &Deltas) {
        self.rise([0; 3], &deltas.highest);
        for i in 0..3 {
            self.live[i].current += deltas.change[i];
            self.live[i].allocated += deltas.increases[i];
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

    fn flows(&mut self) -> impl Iterator<Item = &mut Flow> {
        self.live.iter_mut().chain(&mut self.split).chain(&mut self.segment)
    }

    fn reset_peak(&mut self) {
        self.flows().for_each(Flow::reset_peak);
        for i in 0..2 {
            self.pending[i].active_peak = self.live[i].current + self.pending[i].current;
        }
    }

    fn reset_accumulated(&mut self) {
        self.flows().for_each(Flow::reset_accumulated);
        for pending in &mut self.pending {
            (pending.retaken, pending.base) = (0, pending.current);
        }
    }
}

/// The counters of an allocator. `max_split_size` is to be set.
#[derive(Debug, Default)]
pub(super) struct Counters {
    total: Pool,
    kinds: [Pool; 2],
    /// What this thread's cache has done to the live blocks of the total and of the small kind, which alone is cached.
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
            total: self.total.stats(),
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

    /// Bytes of active blocks.
    #[inline(always)]
    pub(super) fn active_bytes(&self) -> u64 {
        let total = &self.total;
        (total.live[1].current + self.cached[1] + total.pending[1].current).max(0) as u64
    }

    /// Bytes of blocks that are handed out.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.total.live[1].current as u64
    }

    /// Blocks that are handed out.
    pub(super) fn live_blocks(&self) -> u64 {
        self.total.live[0].current as u64
    }

    /// Bytes of segments held from the driver.
    pub(super) fn reserved(&self) -> u64 {
        self.total.segment[1].current as u64
    }

    #[inline(always)]
    fn each(&mut self, kind: Kind, change: impl Fn(&mut Pool, &Amounts)) {
        change(&mut self.total, &self.cached);
        let none = [0; 3];
        change(&mut self.kinds[kind as usize], if kind == Kind::Small { &self.cached } else { &none });
    }

    #[inline(always)]
    fn oversize(&mut self, size: usize, by: i64) {
        if size as u64 >= self.max_split_size {
            self.oversize_allocations.change(by);
        }
    }

    /// A free block was handed out.
    #[inline(always)]
    pub(super) fn taken(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |pool, cached| pool.rise([1, size as i64, requested as i64], cached));
        self.oversize(size, 1);
    }

    /// A block was given back.
    #[inline(always)]
    pub(super) fn given_back(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |pool, _| pool.fall([1, size as i64, requested as i64]));
        self.oversize(size, -1);
    }

    /// A block was given back, but a stream may still use it.
    pub(super) fn pending(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |pool, cached| {
            pool.raise_active(cached); // to all that was live until now
            pool.fall([1, size as i64, requested as i64]);
            pool.pending[0].current += 1;
            pool.pending[1].current += size as i64;
        });
        self.oversize(size, -1);
    }

    /// No stream uses a block that was given back any more.
    pub(super) fn settled(&mut self, kind: Kind, size: usize, split: Split) {
        self.each(kind, |pool, _| {
            pool.pending[0].current -= 1;
            pool.pending[1].current -= size as i64;
            pool.split(split);
        });
    }

    /// A pending block was handed out again.
    pub(super) fn retaken(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |pool, cached| {
            for (pending, by) in pool.pending.iter_mut().zip([1, size as i64]) {
                pending.current -= by;
                pending.retaken += by;
            }
            pool.rise([1, size as i64, requested as i64], cached);
        });
        self.oversize(size, 1);
    }

    /// Free blocks were merged, or became parts of split segments.
    #[inline(always)]
    pub(super) fn split_changed(&mut self, kind: Kind, split: Split) {
        self.each(kind, |pool, _| pool.split(split));
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
        self.each(kind, |pool, _| (0..2).for_each(|i| pool.segment[i].change(by[i])));
    }

    /// What this thread's cache has done so far; and done at most since the last time, if that is more than then.
    #[inline(always)]
    pub(super) fn see_cached(&mut self, (change, highest): (Amounts, Option<Amounts>)) {
        if let Some(highest) = highest {
            self.raise_cached(highest);
        }
        self.cached = change;
    }

    fn raise_cached(&mut self, highest: Amounts) {
        self.cached = highest;
        self.each(Kind::Small, |pool, cached| pool.rise([0; 3], cached));
    }

    /// What a thread's cache did before it was emptied.
    pub(super) fn fold(&mut self, deltas: &Deltas) {
        self.each(Kind::Small, |pool, _| pool.fold(deltas));
        self.cached = [0; 3];
    }

    pub(super) fn reset_peak(&mut self) {
        self.total.reset_peak();
        self.kinds.iter_mut().for_each(Pool::reset_peak);
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            stat.peak = stat.current;
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.total.reset_accumulated();
        self.kinds.iter_mut().for_each(Pool::reset_accumulated);
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            (stat.allocated, stat.freed) = (0, 0);
        }
        (self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams) = (0, 0, 0);
        (self.num_device_alloc, self.num_device_free) = (0, 0);
    }
}
