//! Statistics of a pool of pinned memory: PyTorch's `HostStats`, with PyTorch's names.
//!
//! A block returned with an event stays active until the event is done; then the block's own size is subtracted.

use std::fmt;
use std::time::Duration;

use crate::storage::Stat;

/// Durations of driver calls, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DurationStat {
    /// The total time of all calls.
    pub total: u64,
    /// The time of the longest call; 0 before the first call.
    pub max: u64,
    /// The time of the shortest call; 0 before the first call.
    pub min: u64,
    /// The number of calls.
    pub count: u64,
    /// The mean time of a call, rounded down; 0 before the first call.
    pub avg: u64,
}

/// Statistics of a device's pinned host memory, as returned by
/// [`Device::pinned_memory_stats`](crate::Device::pinned_memory_stats) (`torch.cuda.host_memory_stats`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedStats {
    /// The number of blocks in use, by a caller or by an unfinished transfer.
    pub active_requests: Stat,
    /// Bytes of the active blocks.
    pub active_bytes: Stat,
    /// The number of pieces of memory that the driver created and that are not released, in use or not.
    pub allocations: Stat,
    /// The bytes of the pieces counted by `allocations`.
    pub allocated_bytes: Stat,
    /// Time the driver took to create pieces.
    pub host_alloc_time: DurationStat,
    /// Time the driver took to release pieces.
    pub host_free_time: DurationStat,
    /// The number of pieces that the driver created.
    pub num_host_alloc: u64,
    /// The number of pieces that were released to the driver.
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

impl DurationStat {
    fn add(&mut self, took: Duration) {
        let us = took.as_micros() as u64;
        self.min = if self.count == 0 { us } else { self.min.min(us) };
        self.max = self.max.max(us);
        (self.total, self.count) = (self.total + us, self.count + 1);
        self.avg = self.total / self.count;
    }
}

impl PinnedStats {
    pub(super) fn record_allocation(&mut self, bytes: usize) {
        self.active_requests.increase(1);
        self.active_bytes.increase(bytes as u64);
    }

    pub(super) fn record_free(&mut self, bytes: usize) {
        self.active_requests.decrease(1);
        self.active_bytes.decrease(bytes as u64);
    }

    pub(super) fn record_creation(&mut self, bytes: usize, took: Duration) {
        self.allocations.increase(1);
        self.allocated_bytes.increase(bytes as u64);
        self.host_alloc_time.add(took);
        self.num_host_alloc += 1;
    }

    pub(super) fn record_release(&mut self, bytes: usize, took: Duration) {
        self.allocations.decrease(1);
        self.allocated_bytes.decrease(bytes as u64);
        self.host_free_time.add(took);
        self.num_host_free += 1;
    }

    fn all(&mut self) -> [&mut Stat; 4] {
        [&mut self.active_requests, &mut self.active_bytes, &mut self.allocations, &mut self.allocated_bytes]
    }

    pub(super) fn reset_peak(&mut self) {
        self.all().into_iter().for_each(|stat| stat.peak = stat.current);
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.all().into_iter().for_each(|stat| (stat.allocated, stat.freed) = (0, 0));
        (self.host_alloc_time, self.host_free_time) = (DurationStat::default(), DurationStat::default());
        (self.num_host_alloc, self.num_host_free) = (0, 0);
    }
}
