//! Statistics of a pool of pinned memory: PyTorch's `HostStats`, with PyTorch's names.
//!
//! A block returned with an event stays active until the event is done; a single function then subtracts the block with its own size.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::storage::Stat;

/// Durations of driver calls, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DurationStat {
    /// The sum over all calls.
    pub total: u64,
    /// The longest; 0 before the first call.
    pub max: u64,
    /// The shortest; 0 before the first call.
    pub min: u64,
    /// The number of calls.
    pub count: u64,
    /// The mean, rounded down; 0 before the first call.
    pub avg: u64,
}

/// Statistics of a device's pinned host memory, as returned by
/// [`Device::pinned_memory_stats`](crate::Device::pinned_memory_stats) (`torch.cuda.host_memory_stats`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedStats {
    /// Blocks in use, by a caller or by an unfinished transfer.
    pub active_requests: Stat,
    /// Bytes of the active blocks.
    pub active_bytes: Stat,
    /// Pieces of memory held from the driver, in use or not.
    pub allocations: Stat,
    /// Bytes of the pieces held from the driver.
    pub allocated_bytes: Stat,
    /// Time the driver took to create pieces.
    pub host_alloc_time: DurationStat,
    /// Time the driver took to release pieces.
    pub host_free_time: DurationStat,
    /// Pieces created by the driver.
    pub num_host_alloc: u64,
    /// Pieces released to the driver.
    pub num_host_free: u64,
}

impl fmt::Display for PinnedStats {
    /// Prints current and peak values, one statistic per line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16} {:>15} {:>15}", "pinned", "current", "peak")?;
        for (name, stat) in [
            ("requests", self.active_requests),
            ("active bytes", self.active_bytes),
            ("allocations", self.allocations),
            ("allocated bytes", self.allocated_bytes),
        ] {
            writeln!(f, "{name:<16} {:>15} {:>15}", stat.current, stat.peak)?;
        }
        let (made, freed) = (self.host_alloc_time, self.host_free_time);
        write!(
            f,
            "driver: {} made in {} us, {} given back in {} us",
            self.num_host_alloc, made.total, self.num_host_free, freed.total
        )
    }
}

/// The counters behind [`PinnedStats`], updated by all threads without a lock.
#[derive(Default)]
pub(super) struct PinnedCounters {
    active_requests: Counter,
    active_bytes: Counter,
    allocations: Counter,
    allocated_bytes: Counter,
    host_alloc_time: Durations,
    host_free_time: Durations,
}

impl PinnedCounters {
    pub(super) fn record_allocation(&self, bytes: usize) {
        self.active_requests.increase(1);
        self.active_bytes.increase(bytes as u64);
    }

    pub(super) fn record_free(&self, bytes: usize) {
        self.active_requests.decrease(1);
        self.active_bytes.decrease(bytes as u64);
    }

    pub(super) fn record_creation(&self, bytes: usize, took: Duration) {
        self.allocations.increase(1);
        self.allocated_bytes.increase(bytes as u64);
        self.host_alloc_time.add(took);
    }

    pub(super) fn record_release(&self, bytes: usize, took: Duration) {
        self.allocations.decrease(1);
        self.allocated_bytes.decrease(bytes as u64);
        self.host_free_time.add(took);
    }

    pub(super) fn read(&self) -> PinnedStats {
        let (host_alloc_time, host_free_time) = (self.host_alloc_time.read(), self.host_free_time.read());
        PinnedStats {
            active_requests: self.active_requests.read(),
            active_bytes: self.active_bytes.read(),
            allocations: self.allocations.read(),
            allocated_bytes: self.allocated_bytes.read(),
            host_alloc_time,
            host_free_time,
            num_host_alloc: host_alloc_time.count,
            num_host_free: host_free_time.count,
        }
    }

    fn all(&self) -> [&Counter; 4] {
        [&self.active_requests, &self.active_bytes, &self.allocations, &self.allocated_bytes]
    }

    pub(super) fn reset_peak(&self) {
        self.all().iter().for_each(|c| c.peak.store(c.current.load(Relaxed), Relaxed));
    }

    pub(super) fn reset_accumulated(&self) {
        for counter in self.all() {
            counter.allocated.store(0, Relaxed);
            counter.freed.store(0, Relaxed);
        }
        self.host_alloc_time.reset();
        self.host_free_time.reset();
    }
}

/// A [`Stat`] that threads update without a lock.
#[derive(Default)]
struct Counter {
    current: AtomicU64,
    peak: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl Counter {
    fn increase(&self, by: u64) {
        self.allocated.fetch_add(by, Relaxed);
        self.peak.fetch_max(self.current.fetch_add(by, Relaxed) + by, Relaxed);
    }

    fn decrease(&self, by: u64) {
        self.freed.fetch_add(by, Relaxed);
        self.current.fetch_sub(by, Relaxed);
    }

    fn read(&self) -> Stat {
        let [current, peak, allocated, freed] =
            [&self.current, &self.peak, &self.allocated, &self.freed].map(|n| n.load(Relaxed));
        Stat { current, peak, allocated, freed }
    }
}

/// A [`DurationStat`] that threads update without a lock.
#[derive(Default)]
struct Durations {
    total: AtomicU64,
    max: AtomicU64,
    /// One more than the shortest duration; 0 if there is none yet.
    min_plus_one: AtomicU64,
    count: AtomicU64,
}

impl Durations {
    fn add(&self, took: Duration) {
        let us = took.as_micros() as u64;
        self.total.fetch_add(us, Relaxed);
        self.max.fetch_max(us, Relaxed);
        let shorter = |min: u64| (min == 0 || us + 1 < min).then_some(us + 1);
        let _ = self.min_plus_one.fetch_update(Relaxed, Relaxed, shorter);
        self.count.fetch_add(1, Relaxed);
    }

    fn read(&self) -> DurationStat {
        let [total, max, min, count] =
            [&self.total, &self.max, &self.min_plus_one, &self.count].map(|n| n.load(Relaxed));
        DurationStat { total, max, min: min.saturating_sub(1), count, avg: total.checked_div(count).unwrap_or(0) }
    }

    fn reset(&self) {
        [&self.total, &self.max, &self.min_plus_one, &self.count].iter().for_each(|n| n.store(0, Relaxed));
    }
}
