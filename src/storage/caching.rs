//! The caching allocator: a device's memory, taken in segments and handed out in blocks.
//!
//! Asking a driver for memory is slow (tens of microseconds, and it may wait for the device), so memory comes in large
//! segments, is cut into blocks, and a block given back waits here for the next request. The policy is that of
//! PyTorch's CUDA allocator: see [`blocks`](super::blocks) for the sizes.
//!
//! A block given back may be reused at once, though work that uses it may still be queued: all work of a device runs
//! through one in-order queue, so whatever the next owner enqueues comes after.
//!
//! When the device has no more: wait for it, search again (another thread may have given something back meanwhile),
//! release every unused segment, ask for the usual segment and then for the smallest that would do, try what the other
//! pool has left over, and only then report [`Error::OutOfMemory`] with the numbers that explain it.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(test)]
use super::blocks::Seen;
use super::blocks::{BlockId, Blocks, Pool, SegmentId, round_size, segment_size};
use super::driver::{Driver, Failure};
use super::stats::DeviceStats;
use crate::{Error, Result};

/// A block handed out: its place, and a share in the segment so that the memory outlives it.
///
/// Not Clone: whoever holds it owns the bytes `offset..offset + size` of the memory until it is given back.
#[derive(Debug)]
pub(crate) struct Place<M> {
    id: BlockId,
    segment: SegmentId,
    offset: usize,
    memory: Arc<M>,
}

impl<M> Place<M> {
    pub(crate) fn segment(&self) -> SegmentId {
        self.segment
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }
}

/// The allocator of one device.
#[derive(Debug)]
pub(crate) struct CachingAllocator<D: Driver> {
    driver: D,
    state: Mutex<State<D::Memory>>,
}

#[derive(Debug)]
struct State<M> {
    blocks: Blocks,
    segments: HashMap<SegmentId, Arc<M>>,
    next_segment: SegmentId,
    stats: DeviceStats,
    /// The most bytes of segments to hold.
    limit: u64,
}

impl<D: Driver> CachingAllocator<D> {
    pub(crate) fn new(driver: D) -> Self {
        let state = State {
            blocks: Blocks::default(),
            segments: HashMap::new(),
            next_segment: 0,
            stats: DeviceStats::default(),
            limit: driver.capacity(),
        };
        CachingAllocator { driver, state: Mutex::new(state) }
    }

    pub(crate) fn driver(&self) -> &D {
        &self.driver
    }

    /// A block of at least `requested > 0` bytes.
    pub(crate) fn alloc(&self, requested: usize) -> Result<Place<D::Memory>> {
        debug_assert!(requested > 0, "empty storages have no block");
        let sizes = round_size(requested).and_then(|size| Some((size, segment_size(size)?)));
        let Some((size, segment)) = sizes.filter(|&(size, _)| size as u64 <= self.driver.capacity()) else {
            return Err(self.too_large(requested));
        };
        let (pool, segment) = (Pool::of(size), segment.min(self.driver.largest_segment()).max(size));
        let mut state = self.lock();
        if let Some(place) = state.take(pool, size, requested) {
            return Ok(place);
        }
        if self.grow(&mut state, pool, segment, requested)? {
            return Ok(state.take(pool, size, requested).expect("a new segment holds what it was made for"));
        }
        if size as u64 > state.limit {
            return Err(self.out_of_memory(&mut state, requested)); // nothing given back could help
        }
        drop(state); // never wait for the device with the lock held
        self.driver.synchronize()?;
        let mut state = self.lock();
        state.stats.num_alloc_retries += 1;
        if let Some(place) = state.take(pool, size, requested) {
            return Ok(place);
        }
        state.release_unused();
        for bytes in [segment, size] {
            if self.grow(&mut state, pool, bytes, requested)? {
                return Ok(state.take(pool, size, requested).expect("a new segment holds what it was made for"));
            }
        }
        match state.take(pool.other(), size, requested) {
            Some(place) => Ok(place),
            None => Err(self.out_of_memory(&mut state, requested)),
        }
    }

    /// Takes a block back; its neighbours, if free, are merged with it. Never fails.
    pub(crate) fn give_back(&self, place: Place<D::Memory>) {
        let Place { id, memory, .. } = place;
        drop(memory); // before the lock: a segment released later must be the last share
        let mut state = self.lock();
        let block = state.blocks.get(id);
        let split = state.blocks.give_back(id);
        state.stats.block_given_back(&block, split);
    }

    /// Adds a segment; false where the device or the limit has no room for it.
    fn grow(&self, state: &mut State<D::Memory>, pool: Pool, bytes: usize, requested: usize) -> Result<bool> {
        if state.stats.reserved_bytes.current.saturating_add(bytes as u64) > state.limit {
            return Ok(false);
        }
        let made = self.driver.create(bytes).and_then(|memory| self.driver.commit(&memory).map(|()| memory));
        match made {
            Ok(memory) => state.add_segment(pool, bytes, memory),
            Err(Failure::OutOfMemory) => return Ok(false),
            Err(Failure::TooBig) => return Err(self.too_large(requested)),
            Err(Failure::Other(error)) => return Err(error),
        }
        tracing::debug!(device = %self.driver.device(), bytes, "segment made");
        Ok(true)
    }

    fn too_large(&self, requested: usize) -> Error {
        let (capacity, largest) = (self.driver.capacity(), self.driver.largest_segment());
        let detail = format!("the device has {capacity}, and promises buffers of up to {largest}");
        Error::OutOfMemory { device: self.driver.device(), requested, detail }
    }

    fn out_of_memory(&self, state: &mut State<D::Memory>, requested: usize) -> Error {
        state.stats.num_ooms += 1;
        let (allocated, reserved) = (state.stats.allocated_bytes.current, state.stats.reserved_bytes.current);
        let (capacity, largest) = (self.driver.capacity(), state.blocks.largest_free());
        let mut detail = format!("{allocated} are allocated and {reserved} reserved of a capacity of {capacity}");
        if state.limit < capacity {
            detail += &format!(", of which set_memory_fraction allows {}", state.limit);
        }
        if reserved > allocated {
            detail += &format!("; the largest free block has {largest}");
        }
        Error::OutOfMemory { device: self.driver.device(), requested, detail }
    }

    fn lock(&self) -> MutexGuard<'_, State<D::Memory>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What can be asked of any allocator, whatever its driver.
pub(super) trait Manage: Sync {
    fn stats(&self) -> DeviceStats;
    fn reset_peak_stats(&self);
    fn reset_accumulated_stats(&self);
    fn empty_cache(&self);
    fn set_memory_fraction(&self, fraction: f64) -> Result<()>;
}

impl<D: Driver> Manage for CachingAllocator<D> {
    fn stats(&self) -> DeviceStats {
        self.lock().stats
    }

    fn reset_peak_stats(&self) {
        self.lock().stats.reset_peak();
    }

    fn reset_accumulated_stats(&self) {
        self.lock().stats.reset_accumulated();
    }

    fn empty_cache(&self) {
        self.lock().release_unused();
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1")));
        }
        self.lock().limit = (self.driver.capacity() as f64 * fraction) as u64;
        Ok(())
    }
}

impl<M> State<M> {
    fn take(&mut self, pool: Pool, size: usize, requested: usize) -> Option<Place<M>> {
        let (id, split) = self.blocks.take(pool, size, requested)?;
        let block = self.blocks.get(id);
        self.stats.block_taken(&block, split);
        let memory = Arc::clone(&self.segments[&block.segment]);
        Some(Place { id, segment: block.segment, offset: block.offset, memory })
    }

    fn add_segment(&mut self, pool: Pool, size: usize, memory: M) {
        let segment = self.next_segment;
        self.next_segment += 1;
        self.segments.insert(segment, Arc::new(memory));
        self.blocks.add_segment(segment, pool, size);
        self.stats.segment_made(pool, size);
    }

    fn release_unused(&mut self) {
        for (segment, pool, size) in self.blocks.remove_unused_segments() {
            self.segments.remove(&segment);
            self.stats.segment_released(pool, size);
        }
    }
}

#[cfg(test)]
impl<D: Driver> CachingAllocator<D> {
    /// Checks the table of blocks and that the statistics say what is there; returns all blocks.
    pub(super) fn check(&self) -> Vec<Seen> {
        let state = self.lock();
        let blocks = state.blocks.check();
        let s = state.stats;
        let sum = |f: &dyn Fn(&Seen) -> usize| blocks.iter().map(|b| f(b) as u64).sum::<u64>();
        assert_eq!(s.reserved_bytes.current, sum(&|b| b.2));
        assert_eq!(s.segment.current, state.segments.len() as u64);
        assert_eq!(s.allocated_bytes.current, sum(&|b| if b.3 > 0 { b.2 } else { 0 }));
        assert_eq!(s.requested_bytes.current, sum(&|b| b.3));
        assert_eq!(s.allocation.current, sum(&|b| usize::from(b.3 > 0)));
        let whole = |b: &Seen| blocks.iter().filter(|o| o.0 == b.0).count() == 1;
        assert_eq!(s.inactive_split.current, sum(&|b| usize::from(b.3 == 0 && !whole(b))));
        assert_eq!(s.inactive_split_bytes.current, sum(&|b| if b.3 == 0 && !whole(b) { b.2 } else { 0 }));
        blocks
    }
}
