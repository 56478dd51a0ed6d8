//! An allocator's statistics: PyTorch's counters with PyTorch's names.

use std::fmt;
use std::ops::Deref;

/// A quantity over time.
///
/// `peak` is the highest value of `current` since [`reset_peak_stats`](crate::Device::reset_peak_stats). `allocated -
/// freed` equals `current` until [`reset_accumulated_stats`](crate::Device::reset_accumulated_stats) sets both to zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// The current value.
    pub current: u64,
    /// The greatest `current` since the last reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    #[inline]
    pub(super) fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(super) fn decrease(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }

    #[inline]
    pub(super) fn change(&mut self, by: i64) {
        if by >= 0 { self.increase(by.unsigned_abs()) } else { self.decrease(by.unsigned_abs()) }
    }
}

/// The statistics of one pool, or of both pools together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// The number of allocations that the user holds.
    pub allocation: Stat,
    /// The number of segments that the driver created and that are not released.
    pub segment: Stat,
    /// The number of blocks that the user holds or that unfinished work uses.
    pub active: Stat,
    /// The number of free blocks in segments that are in use: such blocks cannot be returned to the driver.
    pub inactive_split: Stat,
    /// The bytes of blocks that the user holds: requests rounded up.
    pub allocated_bytes: Stat,
    /// Bytes of segments held from the driver.
    pub reserved_bytes: Stat,
    /// Bytes of active blocks.
    pub active_bytes: Stat,
    /// Bytes of inactive split blocks.
    pub inactive_split_bytes: Stat,
    /// Bytes requested by the user.
    pub requested_bytes: Stat,
}

/// A device's memory statistics, as returned by [`Device::memory_stats`](crate::Device::memory_stats).
///
/// Dereferences to the total over both pools: `stats.allocated_bytes.current`. Always `requested_bytes <=
/// allocated_bytes <= active_bytes <= reserved_bytes + spilled_bytes`.
///
/// ```
/// use claystone::Device;
/// let stats = Device::Cpu.memory_stats()?;
/// assert!(stats.allocated_bytes.current <= stats.reserved_bytes.current);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Both pools together. A peak is the peak of the sum of both pools, not the sum of the peaks.
    pub total: PoolStats,
    /// Requests of up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    /// The number of times that the driver ran out of memory, and the allocator released its cached memory and tried again.
    pub num_alloc_retries: u64,
    /// The number of times that the retry failed too, and [`Error::OutOfMemory`](crate::Error::OutOfMemory) was returned.
    pub num_ooms: u64,
    /// The number of times that the allocator waited for all streams because memory ran out.
    pub num_sync_all_streams: u64,
    /// Segments created by the driver, plus extensions of segments that grow in place.
    pub num_device_alloc: u64,
    /// Segments released to the driver, plus released ends of segments that grow in place.
    pub num_device_free: u64,
    /// Bytes of tensors that are kept on the host. They are allocated, but not reserved.
    pub spilled_bytes: Stat,
    /// The number of times that a block moved to the host.
    pub num_spills: u64,
    /// The number of times that a block came back from the host.
    pub num_returns: u64,
    /// Blocks of at least this many bytes are never split (`max_split_size_mb`).
    pub max_split_size: u64,
    /// Allocations of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
}

impl Deref for DeviceStats {
    type Target = PoolStats;

    fn deref(&self) -> &PoolStats {
        &self.total
    }
}

/// The sum of two allocators' statistics. The sum of two peaks is an upper bound, because they may have occurred at different times.
pub(super) trait Plus {
    fn plus(&self, other: &Self) -> Self;
}

impl Plus for u64 {
    fn plus(&self, other: &u64) -> u64 {
        self + other
    }
}

/// Implements [`Plus`] field by field. The fields after `keep` are the first operand's.
macro_rules! plus {
    ($($type:ident { $($field:ident)* $(; keep $kept:ident)? })*) => { $(
        impl Plus for $type {
            fn plus(&self, other: &$type) -> $type {
                $type { $($field: self.$field.plus(&other.$field),)* $($kept: self.$kept)? }
            }
        }
    )* };
}

plus! {
    Stat { current peak allocated freed }
    PoolStats {
        allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes
        requested_bytes
    }
    DeviceStats {
        total small_pool large_pool num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free
        spilled_bytes num_spills num_returns
        oversize_allocations oversize_segments; keep max_split_size
    }
}

/// Statistics of a memory pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemPoolStats {
    /// Number of segments.
    pub segments: u64,
    /// Bytes of all segments.
    pub reserved_bytes: u64,
    /// Number of blocks held by the user.
    pub allocations: u64,
    /// Bytes of blocks held by the user, with requests rounded up.
    pub allocated_bytes: u64,
    /// Bytes of blocks held by the user or by unfinished work.
    pub active_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free: u64,
}

/// A change in the free parts of split segments: their number and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
}

impl fmt::Display for DeviceStats {
    /// Prints the current and peak values of the main statistics, one per line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16} {:>15} {:>15}", "", "current", "peak")?;
        for (name, stat) in [
            ("allocations", self.allocation),
            ("requested bytes", self.requested_bytes),
            ("allocated bytes", self.allocated_bytes),
            ("segments", self.segment),
            ("reserved bytes", self.reserved_bytes),
        ] {
            writeln!(f, "{name:<16} {:>15} {:>15}", stat.current, stat.peak)?;
        }
        let (made, freed) = (self.num_device_alloc, self.num_device_free);
        let (retries, ooms) = (self.num_alloc_retries, self.num_ooms);
        write!(f, "driver: {made} segments made, {freed} given back; {retries} retries, {ooms} out of memory")
    }
}
