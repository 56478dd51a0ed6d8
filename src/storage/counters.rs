//! The statistics, kept at a few instructions a pair.
//!
//! What is there is what was allocated less what was freed, what is active is what is allocated and what is pending, and
//! both kinds together are their sum, but for the peaks: only what cannot be made from the rest is kept, and the public
//! [`DeviceStats`] are made of it when somebody asks.
//!
//! A block in a thread's cache counts as allocated here. What the caches hold is taken off what is shown, and off the
//! peaks: of its own thread's cache a peak knows at every moment, of the others' when they are emptied.

use std::array;

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

/// A quantity over time, as two sums: what is there is their difference. Signed, as part of a change may be known before
/// the rest.
///
/// One after the other, not side by side: the compiler would add two at a time, and a wide load of what was stored in
/// parts just before waits for both.
#[derive(Debug, Clone, Copy, Default)]
struct Flow {
    allocated: i64,
    freed: i64,
    peak: i64,
    /// What the sums were when they were last set to zero.
    base: [i64; 2],
}

impl Flow {
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

    /// Of both kinds together, of which the peak is known.
    fn total(kinds: [&Flow; 2], peak: i64) -> Flow {
        let [a, b] = kinds;
        let base = [a.base[0] + b.base[0], a.base[1] + b.base[1]];
        Flow { allocated: a.allocated + b.allocated, freed: a.freed + b.freed, peak, base }
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

/// Raises a peak. Most often there is nothing to do, which is cheaper to foresee than to store.
#[inline(always)]
fn raise(peak: &mut i64, to: i64) {
    if to > *peak {
        *peak = to;
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

    fn total(kinds: [&Pending; 2], active_peak: i64) -> Pending {
        let [a, b] = kinds;
        let (retaken, base) = (a.retaken + b.retaken, a.base + b.base);
        Pending { current: a.current + b.current, active_peak, retaken, base }
    }
}

/// The counters of one kind.
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

/// The peaks of both kinds together, which are not the sums of theirs.
#[derive(Debug, Clone, Copy, Default)]
struct Peaks {
    live: [i64; 3],
    split: [i64; 2],
    segment: [i64; 2],
    active: [i64; 2],
}

impl Pool {
    /// Both kinds together.
    fn total([a, b]: &[Pool; 2], peaks: &Peaks) -> Pool {
        Pool {
            live: array::from_fn(|i| Flow::total([&a.live[i], &b.live[i]], peaks.live[i])),
            split: array::from_fn(|i| Flow::total([&a.split[i], &b.split[i]], peaks.split[i])),
            segment: array::from_fn(|i| Flow::total([&a.segment[i], &b.segment[i]], peaks.segment[i])),
            pending: array::from_fn(|i| Pending::total([&a.pending[i], &b.pending[i]], peaks.active[i])),
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

    /// What is active: live, or pending. Blocks, or bytes.
    fn active(&self, i: usize) -> i64 {
        self.live[i].current() + self.pending[i].current
    }

    fn reset_peak(&mut self) {
        self.flows().for_each(|flow| flow.peak = flow.current());
        for i in 0..2 {
            self.pending[i].active_peak = self.active(i);
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
    kinds: [Pool; 2],
    peaks: Peaks,
    /// What this thread's cache has done to the live blocks of each kind: to small ones, which alone are cached.
    cached: [Amounts; 2],
    /// Blocks that are pending.
    num_pending: u64,
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
            total: Pool::total(&self.kinds, &self.peaks).stats(),
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
        let [a, b] = &self.kinds;
        (a.active(1) + b.active(1) + self.cached[0][1]).max(0) as u64
    }

    /// Bytes of blocks that are handed out.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.kinds.iter().map(|pool| pool.live[1].current()).sum::<i64>() as u64
    }

    /// Blocks that are handed out.
    pub(super) fn live_blocks(&self) -> u64 {
        self.kinds.iter().map(|pool| pool.live[0].current()).sum::<i64>() as u64
    }

    /// Bytes of segments held from the driver.
    pub(super) fn reserved(&self) -> u64 {
        self.kinds.iter().map(|pool| pool.segment[1].current()).sum::<i64>() as u64
    }

    /// Raises the peaks of what is live, with so much more in this thread's cache: of blocks of the kind, and of all.
    #[inline(always)]
    fn raise_live(&mut self, kind: Kind, of_kind: &Amounts, of_all: &Amounts) {
        let (at, other) = (kind as usize, kind.other() as usize);
        for i in 0..3 {
            let here = self.kinds[at].live[i].current();
            let all = here + self.kinds[other].live[i].current();
            raise(&mut self.kinds[at].live[i].peak, here + of_kind[i]);
            raise(&mut self.peaks.live[i], all + of_all[i]);
        }
        if self.num_pending > 0 {
            self.raise_active(kind, of_kind, of_all);
        }
    }

    #[cold]
    fn raise_active(&mut self, kind: Kind, of_kind: &Amounts, of_all: &Amounts) {
        for i in 0..2 {
            let (here, other) = (self.kinds[kind as usize].active(i), self.kinds[kind.other() as usize].active(i));
            raise(&mut self.kinds[kind as usize].pending[i].active_peak, here + of_kind[i]);
            raise(&mut self.peaks.active[i], here + other + of_all[i]);
        }
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
        for (flow, by) in self.kinds[kind as usize].live.iter_mut().zip([1, size as i64, requested as i64]) {
            flow.allocated += by;
        }
        let [cached, all] = [self.cached[kind as usize], self.cached[0]];
        self.raise_live(kind, &cached, &all);
        self.oversize(size, 1);
    }

    /// A block was given back.
    #[inline(always)]
    pub(super) fn given_back(&mut self, kind: Kind, size: usize, requested: usize) {
        for (flow, by) in self.kinds[kind as usize].live.iter_mut().zip([1, size as i64, requested as i64]) {
            flow.freed += by;
        }
        self.oversize(size, -1);
    }

    /// A block was given back, but a stream may still use it.
    pub(super) fn pending(&mut self, kind: Kind, size: usize, requested: usize) {
        let [cached, all] = [self.cached[kind as usize], self.cached[0]];
        self.raise_active(kind, &cached, &all); // to all that was live until now
        self.given_back(kind, size, requested);
        self.num_pending += 1;
        for (pending, by) in self.kinds[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.current += by;
        }
    }

    /// A block is not pending any more.
    fn not_pending(&mut self, kind: Kind, size: usize) {
        self.num_pending -= 1;
        for (pending, by) in self.kinds[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.current -= by;
        }
    }

    /// No stream uses a block that was given back any more.
    pub(super) fn settled(&mut self, kind: Kind, size: usize, split: Split) {
        self.not_pending(kind, size);
        self.split_changed(kind, split);
    }

    /// A pending block was handed out again.
    pub(super) fn retaken(&mut self, kind: Kind, size: usize, requested: usize) {
        self.not_pending(kind, size);
        for (pending, by) in self.kinds[kind as usize].pending.iter_mut().zip([1, size as i64]) {
            pending.retaken += by;
        }
        self.taken(kind, size, requested);
    }

    /// Free blocks were merged, or became parts of split segments.
    #[inline(always)]
    pub(super) fn split_changed(&mut self, kind: Kind, split: Split) {
        for (i, by) in [split.blocks, split.bytes].into_iter().enumerate() {
            let other = self.kinds[kind.other() as usize].split[i].current();
            let flow = &mut self.kinds[kind as usize].split[i];
            flow.change(by);
            let now = flow.current();
            raise(&mut flow.peak, now);
            raise(&mut self.peaks.split[i], now + other);
        }
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
        for (i, by) in by.into_iter().enumerate() {
            let other = self.kinds[kind.other() as usize].segment[i].current();
            let flow = &mut self.kinds[kind as usize].segment[i];
            flow.change(by);
            let now = flow.current();
            raise(&mut flow.peak, now);
            raise(&mut self.peaks.segment[i], now + other);
        }
    }

    /// What this thread's cache has done so far; and done at most since the last time, if that may be more than then.
    #[inline(always)]
    pub(super) fn see_cached(&mut self, (change, highest): (Amounts, Option<Amounts>)) {
        if let Some(highest) = highest {
            self.raise_live(Kind::Small, &highest, &highest);
        }
        self.cached[0] = change;
    }

    /// What a thread's cache did before it was emptied.
    pub(super) fn fold(&mut self, deltas: &Deltas) {
        self.raise_live(Kind::Small, &deltas.highest, &deltas.highest);
        for (flow, i) in self.kinds[Kind::Small as usize].live.iter_mut().zip(0..) {
            flow.allocated += deltas.increases[i];
            flow.freed += deltas.increases[i] - deltas.change[i];
        }
        self.cached[0] = [0; 3];
    }

    pub(super) fn reset_peak(&mut self) {
        self.kinds.iter_mut().for_each(Pool::reset_peak);
        let [a, b] = &self.kinds;
        self.peaks = Peaks {
            live: array::from_fn(|i| a.live[i].current() + b.live[i].current()),
            split: array::from_fn(|i| a.split[i].current() + b.split[i].current()),
            segment: array::from_fn(|i| a.segment[i].current() + b.segment[i].current()),
            active: array::from_fn(|i| a.active(i) + b.active(i)),
        };
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
