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

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::allocator::{Allocator, Block, Segment};
use super::blocks::{Blocks, Pool, SegmentId, round_size, segment_size};
use super::driver::{Driver, Failure, Memory};
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// The allocator of one device.
#[derive(Debug)]
pub struct CachingAllocator {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    blocks: Blocks,
    segments: HashMap<SegmentId, Arc<Segment>>,
    next_segment: SegmentId,
    stats: DeviceStats,
    /// The most bytes of segments to hold.
    limit: u64,
}

impl CachingAllocator {
    /// An allocator over this driver's memory.
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        let state = State {
            blocks: Blocks::default(),
            segments: HashMap::new(),
            next_segment: 0,
            stats: DeviceStats::default(),
            limit: driver.capacity(),
        };
        CachingAllocator { driver, state: Mutex::new(state) }
    }

    /// A block of at least `requested > 0` bytes.
    fn alloc(&self, requested: usize) -> Result<Block> {
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

    /// Adds a segment; false where the device or the limit has no room for it.
    fn grow(&self, state: &mut State, pool: Pool, bytes: usize, requested: usize) -> Result<bool> {
        if state.stats.reserved_bytes.current.saturating_add(bytes as u64) > state.limit {
            return Ok(false);
        }
        let made = self.driver.create(bytes).and_then(|memory| self.driver.commit(&memory).map(|()| memory));
        match made {
            Ok(memory) => state.add_segment(pool, bytes, memory),
            Err(failure) if failure.ran_out().is_some() => return Ok(false),
            Err(Failure::Other(error)) => return Err(error),
            Err(_) => return Err(self.too_large(requested)),
        }
        tracing::debug!(device = %self.driver.device(), bytes, "segment made");
        Ok(true)
    }

    fn too_large(&self, requested: usize) -> Error {
        let (capacity, largest) = (self.driver.capacity(), self.driver.largest_segment());
        let detail = format!("the device has {capacity}, and promises buffers of up to {largest}");
        Error::OutOfMemory { device: self.driver.device(), requested, detail }
    }

    fn out_of_memory(&self, state: &mut State, requested: usize) -> Error {
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Allocator for CachingAllocator {
    fn device(&self) -> Device {
        self.driver.device()
    }

    fn allocate(&self, bytes: usize, _: StreamId) -> Result<Block> {
        self.alloc(bytes)
    }

    fn deallocate(&self, block: Block) {
        let id = block.id;
        drop(block); // before the lock: a segment released later must be the last share
        let mut state = self.lock();
        let block = state.blocks.get(id);
        let split = state.blocks.give_back(id);
        state.stats.block_given_back(&block, split);
    }

    fn record_stream(&self, _: &Block, _: StreamId) {}

    fn stats(&self) -> DeviceStats {
        self.lock().stats
    }

    fn reset_peak_stats(&self) {
        self.lock().stats.reset_peak();
    }

    fn reset_accumulated_stats(&self) {
        self.lock().stats.reset_accumulated();
    }

    fn empty_cache(&self) -> Result<()> {
        self.lock().release_unused();
        Ok(())
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        self.lock().limit = bytes.min(self.driver.capacity());
        Ok(())
    }
}

impl State {
    fn take(&mut self, pool: Pool, size: usize, requested: usize) -> Option<Block> {
        let (id, split) = self.blocks.take(pool, size, requested)?;
        let block = self.blocks.get(id);
        self.stats.block_taken(&block, split);
        let segment = &self.segments[&block.segment];
        // SAFETY: the table's blocks lie inside their segment and never overlap.
        let mut taken = unsafe { Block::new(segment, block.offset, block.size, requested) }.ok()?;
        taken.id = id;
        Some(taken)
    }

    fn add_segment(&mut self, pool: Pool, size: usize, memory: Memory) {
        let segment = self.next_segment;
        self.next_segment += 1;
        self.segments.insert(segment, Arc::new(Segment::new(memory, size)));
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
