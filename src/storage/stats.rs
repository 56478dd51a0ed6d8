//! What an allocator holds and has done: PyTorch's counters under PyTorch's names.

use std::fmt;
use std::ops::Deref;

use super::blocks::{Block, Pool, Split};
use super::registry;
use crate::{Device, Error, Result};

/// A quantity over time.
///
/// `current` is always what is there now, `peak` the greatest it was since [`Device::reset_peak_stats`], and
/// `allocated - freed` equals `current` until [`Device::reset_accumulated_stats`] sets both to zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The greatest `current` since the last reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    pub(super) fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    pub(super) fn decrease(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }

    fn change(&mut self, by: i64) {
        if by >= 0 { self.increase(by.unsigned_abs()) } else { self.decrease(by.unsigned_abs()) }
    }
}

/// The counters of one pool, or of both together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Allocations held by the user.
    pub allocation: Stat,
    /// Segments held from the driver.
    pub segment: Stat,
    /// Blocks in use, by the user or by work not yet done.
    pub active: Stat,
    /// Free blocks that are parts of segments in use: they cannot be given back to the driver.
    pub inactive_split: Stat,
    /// Bytes of blocks held by the user: requests rounded up.
    pub allocated_bytes: Stat,
    /// Bytes of segments held from the driver.
    pub reserved_bytes: Stat,
    /// Bytes of active blocks.
    pub active_bytes: Stat,
    /// Bytes of inactive split blocks.
    pub inactive_split_bytes: Stat,
    /// Bytes the user asked for.
    pub requested_bytes: Stat,
}

impl PoolStats {
    fn all_mut(&mut self) -> [&mut Stat; 9] {
        [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ]
    }

    fn split(&mut self, split: Split) {
        self.inactive_split.change(split.blocks);
        self.inactive_split_bytes.change(split.bytes);
    }
}

/// A device's memory statistics, as [`Device::memory_stats`] gives them.
///
/// Dereferences to the sums over both pools: `stats.allocated_bytes.current`. Always
/// `requested_bytes <= allocated_bytes <= active_bytes <= reserved_bytes`.
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
    /// Both pools together, with peaks of the sums.
    pub total: PoolStats,
    /// Requests of up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    /// Times the driver ran out and the allocator gave back what it had cached and tried again.
    pub num_alloc_retries: u64,
    /// Times that did not help: [`Error::OutOfMemory`] was returned.
    pub num_ooms: u64,
    /// Segments made by the driver.
    pub num_device_alloc: u64,
    /// Segments given back to the driver.
    pub num_device_free: u64,
}

impl Deref for DeviceStats {
    type Target = PoolStats;

    fn deref(&self) -> &PoolStats {
        &self.total
    }
}

impl DeviceStats {
    fn each(&mut self, pool: Pool, change: impl Fn(&mut PoolStats)) {
        change(&mut self.total);
        match pool {
            Pool::Small => change(&mut self.small_pool),
            Pool::Large => change(&mut self.large_pool),
        }
    }

    pub(super) fn block_taken(&mut self, block: &Block, split: Split) {
        self.each(block.pool, |s| {
            s.allocation.increase(1);
            s.active.increase(1);
            s.allocated_bytes.increase(block.size as u64);
            s.active_bytes.increase(block.size as u64);
            s.requested_bytes.increase(block.requested as u64);
            s.split(split);
        });
    }

    pub(super) fn block_given_back(&mut self, block: &Block, split: Split) {
        self.each(block.pool, |s| {
            s.allocation.decrease(1);
            s.active.decrease(1);
            s.allocated_bytes.decrease(block.size as u64);
            s.active_bytes.decrease(block.size as u64);
            s.requested_bytes.decrease(block.requested as u64);
            s.split(split);
        });
    }

    pub(super) fn segment_made(&mut self, pool: Pool, size: usize) {
        self.num_device_alloc += 1;
        self.each(pool, |s| {
            s.segment.increase(1);
            s.reserved_bytes.increase(size as u64);
        });
    }

    pub(super) fn segment_released(&mut self, pool: Pool, size: usize) {
        self.num_device_free += 1;
        self.each(pool, |s| {
            s.segment.decrease(1);
            s.reserved_bytes.decrease(size as u64);
        });
    }

    pub(super) fn reset_peak(&mut self) {
        for pool in [&mut self.total, &mut self.small_pool, &mut self.large_pool] {
            pool.all_mut().into_iter().for_each(|stat| stat.peak = stat.current);
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        for pool in [&mut self.total, &mut self.small_pool, &mut self.large_pool] {
            pool.all_mut().into_iter().for_each(|stat| (stat.allocated, stat.freed) = (0, 0));
        }
        (self.num_alloc_retries, self.num_ooms, self.num_device_alloc, self.num_device_free) = (0, 0, 0, 0);
    }
}

impl fmt::Display for DeviceStats {
    /// Current and peak of what matters most, a line each.
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

/// Memory: what the device's caching allocator holds, and what it is told.
impl Device {
    /// What the allocator of this device holds and has done (`torch.cuda.memory_stats`).
    ///
    /// # Errors
    /// [`Error::NoDevice`] where the device is not there; likewise below.
    pub fn memory_stats(&self) -> Result<DeviceStats> {
        Ok(registry::of(*self)?.stats())
    }

    /// Sets every peak to the current value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peak_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_peak_stats();
        Ok(())
    }

    /// Sets the sums of increases and decreases and the counts of events to zero
    /// (`torch.cuda.reset_accumulated_memory_stats`).
    pub fn reset_accumulated_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_accumulated_stats();
        Ok(())
    }

    /// Gives every segment that nothing uses back to the driver (`torch.cuda.empty_cache`).
    pub fn empty_cache(&self) -> Result<()> {
        registry::of(*self)?.empty_cache()
    }

    /// Lets the allocator hold at most this part, 0 to 1, of the device's memory
    /// (`torch.cuda.set_per_process_memory_fraction`). What it holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a fraction outside 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1")));
        }
        let capacity = registry::driver(*self)?.capacity();
        registry::of(*self)?.set_memory_limit((capacity as f64 * fraction) as u64)
    }
}
