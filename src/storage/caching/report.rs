//! The text of out-of-memory errors: memory use by owner, and settings that would help.

use std::fmt;

use super::super::driver::Failure;
use super::super::hooks::OutOfMemoryEvent;
use super::super::stats::DeviceStats;
use super::super::unsplit::too_large_error;
use super::entry::MAX_SEGMENT_BYTES;
use super::mempool::MemPoolStats;
use super::{CachingAllocator, Request};
use crate::Error;
use crate::error::Size;

/// The values shown in an out-of-memory error.
struct Report {
    size: u64,
    pool: u32,
    capacity: u64,
    limit: u64,
    stats: DeviceStats,
    /// Every pool by number, the default pool first, and whether other pools may take its free blocks.
    pools: Vec<(u32, MemPoolStats, bool)>,
    ran_out: Option<&'static str>,
    /// Bytes of tensors that were moved to the host to make room.
    spilled: u64,
    /// Bytes that images or other allocators hold of the device's memory.
    elsewhere: u64,
    /// True if compaction, `max_split_size_mb` or expandable segments are available but off.
    could_compact: bool,
    could_limit_splitting: bool,
    could_grow: bool,
}

impl CachingAllocator {
    /// Records the failed request, notifies the observers, and builds the error.
    pub(super) fn out_of_memory(&self, request: &Request, failure: Option<Failure>) -> Error {
        let config = &self.rules.config;
        let report = {
            let mut core = self.lock_with_stats();
            core.heap.stats.num_ooms += 1;
            core.heap.record_oom(request, self.driver.capacity());
            let mut pools = vec![(0, core.heap.pool_stats(0), true)];
            pools.extend(core.pools.iter().map(|(&id, options)| (id, core.heap.pool_stats(id), options.use_on_oom)));
            Report {
                size: request.size as u64,
                pool: request.pool,
                capacity: self.driver.capacity(),
                limit: core.limits.allowed(),
                stats: core.heap.stats.stats(),
                pools,
                spilled: core.spilled_bytes(),
                elsewhere: core.limits.elsewhere,
                ran_out: failure.as_ref().and_then(Failure::ran_out),
                could_compact: !config.compaction,
                could_limit_splitting: config.max_split_size == usize::MAX && !config.expandable_segments,
                could_grow: !config.expandable_segments && self.driver.page() > 0,
            }
        };
        self.hooks.notify_observers(|| OutOfMemoryEvent {
            device: self.driver.device(),
            requested: request.bytes,
            allowed: report.limit,
            device_free: report.capacity.saturating_sub(report.stats.reserved_bytes.current + report.elsewhere),
        });
        if matches!(failure, Some(Failure::TooBig)) {
            return self.too_large(request.bytes);
        }
        let detail = report.to_string();
        Error::OutOfMemory { device: self.driver.device(), requested: request.bytes, detail }
    }

    /// Builds the error for a request that exceeds the largest possible segment.
    pub(super) fn too_large(&self, requested: usize) -> Error {
        too_large_error(&*self.driver, requested, MAX_SEGMENT_BYTES.min(self.driver.largest_segment() as u64))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (allocated, reserved) = (self.stats.allocated_bytes.current, self.stats.reserved_bytes.current);
        let active = self.stats.active_bytes.current;
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
    /// Reserved bytes in no active block. Deltas of other threads' caches may be missing.
    fn unallocated(&self) -> u64 {
        self.stats.reserved_bytes.current.saturating_sub(self.stats.active_bytes.current)
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
        if self.unallocated() < self.size {
            return Ok(()); // rearranging the unallocated memory would not suffice
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
