//! The statistics, kept at a few instructions a pair.
//!
//! What is active is what is allocated and what is pending, and almost always nothing is pending: the active counters
//! are made from the others when somebody asks.

use std::ops::{Deref, DerefMut};

use super::super::stats::{Deltas, DeviceStats, PoolStats, Split, Stat};
use super::policy::Kind;

/// What has to be known beside [`PoolStats`] to tell what is active.
#[derive(Debug, Clone, Copy, Default)]
struct Active {
    /// Blocks and bytes that are pending now.
    pending: (u64, u64),
    /// Peaks of active blocks and bytes while any were pending.
    peak: (u64, u64),
    /// Pending blocks and bytes that were handed out as they were: allocated, but active all the time.
    retaken: (u64, u64),
    /// Blocks and bytes that were pending when the sums were last set to zero.
    base: (u64, u64),
}

/// The counters of an allocator. The `active` ones of the statistics inside are not kept: see [`stats`](Counters::stats).
#[derive(Debug, Default)]
pub(super) struct Counters {
    stats: DeviceStats,
    total: Active,
    kinds: [Active; 2],
}

impl Deref for Counters {
    type Target = DeviceStats;

    fn deref(&self) -> &DeviceStats {
        &self.stats
    }
}

impl DerefMut for Counters {
    fn deref_mut(&mut self) -> &mut DeviceStats {
        &mut self.stats
    }
}

impl Active {
    fn raise(&mut self, s: &PoolStats) {
        if self.pending.0 > 0 {
            self.peak.0 = self.peak.0.max(s.allocation.current + self.pending.0);
            self.peak.1 = self.peak.1.max(s.allocated_bytes.current + self.pending.1);
        }
    }

    fn fill(&self, s: &mut PoolStats) {
        let fill = |allocated: Stat, pending: u64, peak: u64, retaken: u64, base: u64| Stat {
            current: allocated.current + pending,
            peak: peak.max(allocated.peak),
            allocated: allocated.allocated - retaken,
            freed: allocated.freed + base - retaken - pending,
        };
        s.active = fill(s.allocation, self.pending.0, self.peak.0, self.retaken.0, self.base.0);
        s.active_bytes = fill(s.allocated_bytes, self.pending.1, self.peak.1, self.retaken.1, self.base.1);
    }
}

impl Counters {
    /// Everything, as users see it.
    pub(super) fn stats(&self) -> DeviceStats {
        let mut stats = self.stats;
        self.total.fill(&mut stats.total);
        self.kinds[0].fill(&mut stats.small_pool);
        self.kinds[1].fill(&mut stats.large_pool);
        stats
    }

    /// Bytes of active blocks.
    #[inline]
    pub(super) fn active_bytes(&self) -> u64 {
        self.stats.allocated_bytes.current + self.total.pending.1
    }

    #[inline]
    fn each(&mut self, kind: Kind, mut change: impl FnMut(&mut PoolStats, &mut Active)) {
        change(&mut self.stats.total, &mut self.total);
        match kind {
            Kind::Small => change(&mut self.stats.small_pool, &mut self.kinds[0]),
            Kind::Large => change(&mut self.stats.large_pool, &mut self.kinds[1]),
        }
    }

    /// A free block was handed out.
    #[inline]
    pub(super) fn taken(&mut self, kind: Kind, size: usize, requested: usize, split: Split) {
        self.each(kind, |s, active| {
            s.allocation.increase(1);
            s.allocated_bytes.increase(size as u64);
            s.requested_bytes.increase(requested as u64);
            s.split(split);
            active.raise(s);
        });
        self.stats.oversize(size, |s| &mut s.oversize_allocations, 1);
    }

    /// A block was given back and is free.
    #[inline]
    pub(super) fn given_back(&mut self, kind: Kind, size: usize, requested: usize, split: Split) {
        self.each(kind, |s, _| {
            s.allocation.decrease(1);
            s.allocated_bytes.decrease(size as u64);
            s.requested_bytes.decrease(requested as u64);
            s.split(split);
        });
        self.stats.oversize(size, |s| &mut s.oversize_allocations, -1);
    }

    /// A block was given back, but a stream may still use it.
    pub(super) fn pending(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |s, active| {
            active.peak.0 = active.peak.0.max(s.allocation.current + active.pending.0);
            active.peak.1 = active.peak.1.max(s.allocated_bytes.current + active.pending.1);
            s.allocation.decrease(1);
            s.allocated_bytes.decrease(size as u64);
            s.requested_bytes.decrease(requested as u64);
            active.pending.0 += 1;
            active.pending.1 += size as u64;
        });
        self.stats.oversize(size, |s| &mut s.oversize_allocations, -1);
    }

    /// No stream uses a block that was given back any more.
    pub(super) fn settled(&mut self, kind: Kind, size: usize, split: Split) {
        self.each(kind, |s, active| {
            active.pending.0 -= 1;
            active.pending.1 -= size as u64;
            s.split(split);
        });
    }

    /// A pending block was handed out again.
    pub(super) fn retaken(&mut self, kind: Kind, size: usize, requested: usize) {
        self.each(kind, |s, active| {
            s.allocation.increase(1);
            s.allocated_bytes.increase(size as u64);
            s.requested_bytes.increase(requested as u64);
            active.pending.0 -= 1;
            active.pending.1 -= size as u64;
            active.retaken.0 += 1;
            active.retaken.1 += size as u64;
        });
        self.stats.oversize(size, |s| &mut s.oversize_allocations, 1);
    }

    /// Free blocks were merged, or became parts of split segments.
    pub(super) fn split_changed(&mut self, kind: Kind, split: Split) {
        self.each(kind, |s, _| s.split(split));
    }

    /// What a thread's cache did. It caches small blocks only.
    pub(super) fn fold(&mut self, deltas: &Deltas) {
        self.each(Kind::Small, |s, active| {
            s.allocation.fold(&deltas.count);
            s.allocated_bytes.fold(&deltas.bytes);
            s.requested_bytes.fold(&deltas.requested);
            active.raise(s);
        });
    }

    pub(super) fn reset_peak(&mut self) {
        self.stats.reset_peak();
        let [small, large] = &mut self.kinds;
        let pools = [&self.stats.total, &self.stats.small_pool, &self.stats.large_pool];
        for (active, s) in [&mut self.total, small, large].into_iter().zip(pools) {
            active.peak = (s.allocation.current + active.pending.0, s.allocated_bytes.current + active.pending.1);
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.stats.reset_accumulated();
        let [small, large] = &mut self.kinds;
        for active in [&mut self.total, small, large] {
            (active.retaken, active.base) = ((0, 0), active.pending);
        }
    }
}
