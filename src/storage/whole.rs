//! What the two allocators that never cut a segment up share: the books, and making segments.

use std::sync::Arc;

use super::allocator::Segment;
use super::caching::Kind;
use super::config::Config;
use super::driver::{Driver, Failure};
use super::stats::{DeviceStats, Split};
use crate::{Device, Error, Result};

/// What is held and has been done, and the limit of it. Lives under the allocator's lock.
#[derive(Debug)]
pub(super) struct Books {
    device: Device,
    capacity: u64,
    pub(super) stats: DeviceStats,
    /// The most bytes of segments to hold, as a number and as a part of the capacity.
    most: u64,
    part: u64,
    /// Bytes of segments being made outside the lock.
    making: u64,
}

impl Books {
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> Books {
        let (device, capacity) = (driver.device(), driver.capacity());
        let (stats, most) = (DeviceStats::default(), config.limit(capacity));
        Books { device, capacity, stats, most, part: capacity, making: 0 }
    }

    /// The most bytes of segments to hold.
    pub(super) fn limit(&self) -> u64 {
        self.most.min(self.part)
    }

    pub(super) fn set_limit(&mut self, bytes: u64) {
        self.most = bytes.min(self.capacity);
    }

    pub(super) fn set_fraction(&mut self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1")));
        }
        self.part = (self.capacity as f64 * fraction) as u64;
        Ok(())
    }

    /// Makes room under the limit for a segment about to be made; says so if there is none.
    pub(super) fn begin(&mut self, size: usize) -> Option<&'static str> {
        let held = self.stats.reserved_bytes.current + self.making;
        if held.saturating_add(size as u64) > self.limit() {
            return Some("there is no room for it");
        }
        self.making += size as u64;
        None
    }

    /// The segment was made, or was not.
    pub(super) fn end(&mut self, size: usize, made: bool) {
        self.making -= size as u64;
        if made {
            self.stats.segment_made(Kind::of(size), size);
        }
    }

    pub(super) fn released(&mut self, size: usize) {
        self.stats.segment_released(Kind::of(size), size);
    }

    pub(super) fn taken(&mut self, size: usize, requested: usize) {
        self.stats.block_taken(Kind::of(size), size, requested, Split::default());
    }

    pub(super) fn given_back(&mut self, size: usize, requested: usize) {
        self.stats.block_given_back(Kind::of(size), size, requested, Split::default());
    }

    /// The error for a request that nothing could serve; `why` is what was missing, `unused` what has been given back to
    /// no avail.
    pub(super) fn out_of_memory(&mut self, requested: usize, why: &str, unused: Unused) -> Error {
        self.stats.num_ooms += 1;
        let (allocated, reserved) = (self.stats.allocated_bytes.current, self.stats.reserved_bytes.current);
        let capacity = self.capacity;
        let mut detail = format!("{allocated} are allocated and {reserved} reserved of a capacity of {capacity}");
        if self.limit() < capacity {
            detail += &format!(", of which {} are allowed", self.limit());
        }
        if unused.bytes > 0 {
            let Unused { bytes, largest } = unused;
            detail += &format!("; {bytes} in unused buffers, the largest of {largest}, were given back");
        }
        Error::OutOfMemory { device: self.device, requested, detail: format!("{detail}; {why}") }
    }
}

/// Unused segments: their bytes, and those of the largest.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unused {
    pub(super) bytes: u64,
    pub(super) largest: usize,
}

/// Bytes of the segment for a request.
pub(super) fn segment_size(driver: &dyn Driver, bytes: usize) -> Result<usize> {
    let size = bytes.max(1).checked_next_multiple_of(driver.alignment());
    size.filter(|&size| size as u64 <= driver.capacity()).ok_or_else(|| too_large(driver, bytes))
}

fn too_large(driver: &dyn Driver, requested: usize) -> Error {
    let (capacity, largest) = (driver.capacity(), driver.largest_segment());
    let detail = format!("the device has {capacity}, and promises buffers of up to {largest}");
    Error::OutOfMemory { device: driver.device(), requested, detail }
}

/// A segment made and committed, or what ran out. Never under a lock.
pub(super) fn make(driver: &dyn Driver, size: usize, requested: usize) -> Result<Result<Arc<Segment>, &'static str>> {
    match driver.create(size).and_then(|memory| driver.commit(&memory).map(|()| memory)) {
        Ok(memory) => {
            tracing::debug!(device = %driver.device(), size, "segment made");
            Ok(Ok(Arc::new(Segment::new(memory, size))))
        }
        Err(Failure::DeviceMemory) => Ok(Err("the driver ran out of the device's memory (-4)")),
        Err(Failure::Resources) => Ok(Err("the driver ran out of the device's resources (-5)")),
        Err(Failure::HostMemory) => Ok(Err("the driver ran out of the host's memory (-6)")),
        Err(Failure::TooBig) => Err(too_large(driver, requested)),
        Err(Failure::Other(error)) => Err(error),
    }
}
