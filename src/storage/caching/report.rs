//! The text of out-of-memory errors: memory use by owner, and the settings that could have prevented the error.

use std::fmt;

use super::super::config::Spill;
use super::super::stats::{DeviceStats, MemPoolStats};
use crate::error::Size;

/// The values shown in an out-of-memory error.
pub(super) struct Report {
    pub(super) size: u64,
    pub(super) pool: u32,
    pub(super) capacity: u64,
    pub(super) limit: u64,
    pub(super) stats: DeviceStats,
    /// For each pool, the default pool first: its number, its statistics, and whether other pools may allocate from its free blocks.
    pub(super) pools: Vec<(u32, MemPoolStats, bool)>,
    pub(super) ran_out: Option<&'static str>,
    /// Number of bytes of tensors that are on the host.
    pub(super) spilled: u64,
    /// Number of bytes of tensors that could move to the host.
    pub(super) idle: u64,
    pub(super) spill: Spill,
    /// True if the device works in the host's memory.
    pub(super) shares_host: bool,
    pub(super) spill_limit: u64,
    /// Number of bytes of the device's memory that images or other allocators hold.
    pub(super) elsewhere: u64,
    /// True if compaction, `max_split_size_mb` or expandable segments are available but off.
    pub(super) could_compact: bool,
    pub(super) could_limit_splitting: bool,
    pub(super) could_grow: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (allocated, reserved) = (self.stats.allocated_bytes.current, self.stats.reserved_bytes.current);
        let [allocated, active] =
            [allocated, self.stats.active_bytes.current].map(|bytes| bytes.saturating_sub(self.spilled));
        if self.pool > 0 {
            write!(f, "in memory pool {}, ", self.pool)?;
        }
        match self.capacity {
            u64::MAX => write!(f, "the device does not say how much it has")?,
            capacity => write!(f, "the device has a total capacity of {:#}", Size(capacity))?,
        }
        if self.limit < self.capacity {
            write!(f, ", of which {:#} are allowed", Size(self.limit))?;
        }
        write!(f, ". Of {:#} reserved, {:#} are allocated", Size(reserved), Size(allocated))?;
        if active > allocated {
            write!(f, ", {:#} are freed but still in use by streams", Size(active - allocated))?;
        }
        let private = || self.pools.iter().filter(|(id, stats, _)| *id > 0 && stats.reserved_bytes > 0);
        write!(f, ", and {:#} are unallocated", Size(self.unallocated()))?;
        let largest = self.pools.iter().find(|(id, ..)| *id == self.pool).map_or(0, |(_, stats, _)| stats.largest_free);
        if largest > 0 {
            write!(f, "; the largest free block has {:#}", Size(largest))?;
        }
        if private().next().is_some() {
            let sum: u64 = private().map(|(_, stats, _)| stats.allocated_bytes).sum();
            write!(f, ". In private pools {:#} are allocated", Size(sum))?;
            for (id, stats, _) in private() {
                let (allocated, reserved) = (Size(stats.allocated_bytes), Size(stats.reserved_bytes));
                let largest = Size(stats.largest_free);
                write!(f, "; pool {id}: {allocated:#} of {reserved:#}, the largest free block has {largest:#}")?;
            }
        }
        if self.spilled > 0 {
            write!(f, ". {:#} of tensors are kept on the host until the device has memory", Size(self.spilled))?;
        }
        if self.elsewhere > 0 {
            write!(f, ". {:#} are held by images", Size(self.elsewhere))?;
        }
        if let Some(what) = self.ran_out {
            write!(f, ". The driver ran out of {what}")?;
        }
        self.write_advice(f)
    }
}

impl Report {
    /// Returns the number of reserved bytes outside active blocks. Changes by other threads' caches may be missing.
    fn unallocated(&self) -> u64 {
        let active = self.stats.active_bytes.current.saturating_sub(self.spilled);
        self.stats.reserved_bytes.current.saturating_sub(active)
    }

    /// Says what prevents spilling, or that it exists.
    fn write_spill_advice(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let enough = self.idle + self.unallocated() + self.limit.saturating_sub(self.stats.reserved_bytes.current);
        match self.spill {
            Spill::Off if self.pool == 0 && self.idle > 0 && enough >= self.size => {
                let (place, key) = if self.shares_host { ("a file", "disk") } else { ("the host", "host") };
                let idle = Size(self.idle);
                write!(f, ". {idle:#} of idle tensors could move to {place}: set spill:{key} in CLAYSTONE_ALLOC_CONF")
            }
            Spill::Off => Ok(()),
            _ if self.spilled + self.size > self.spill_limit => {
                write!(f, ". spill_limit_mb is reached: {:#} of {:#}", Size(self.spilled), Size(self.spill_limit))
            }
            _ => Ok(()),
        }
    }

    /// Suggests only settings that could have made this allocation succeed.
    fn write_advice(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (id, stats, has_use_on_oom) in &self.pools {
            if *id != self.pool && stats.largest_free >= self.size && !(*has_use_on_oom && *id > 0) {
                let largest = Size(stats.largest_free);
                match id {
                    0 => write!(f, ". The default pool has a free block of {largest:#}: empty_cache releases it")?,
                    _ => write!(
                        f,
                        ". Memory pool {id} has a free block of {largest:#}: empty its cache, or create it with use_on_oom"
                    )?,
                }
            }
        }
        let reserved = self.stats.reserved_bytes.current + self.elsewhere;
        if self.ran_out.is_none() && self.limit < self.capacity && reserved + self.size <= self.capacity {
            write!(f, ". The memory limit is exhausted, not the device: raise the memory fraction or limit")?;
        }
        self.write_spill_advice(f)?;
        if self.unallocated() < self.size {
            return Ok(()); // even all unallocated memory together would not suffice
        }
        let mut cures = Vec::new();
        if self.could_compact {
            cures.push("compaction:True");
        }
        if self.could_grow {
            cures.push("expandable_segments:True");
        }
        if self.could_limit_splitting && self.stats.inactive_split_bytes.current >= self.size {
            cures.push("a max_split_size_mb");
        }
        if cures.is_empty() {
            return Ok(());
        }
        let cures = cures.join(" or ");
        write!(f, ". The unallocated memory would suffice if it were contiguous: set {cures} in CLAYSTONE_ALLOC_CONF")
    }
}
