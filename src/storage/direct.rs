//! The direct allocator: one segment per allocation, and no cache.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::allocator::Allocator;
use super::block::{Block, next_owner_number};
use super::config::Config;
use super::driver::Driver;
use super::segment::Segment;
use super::unsplit::{ReleasedMemory, SegmentLedger, create_segment, forward_to_ledger, segment_size};
use crate::Result;
use crate::device::StreamId;
use crate::device::lock;

/// Allocates every block from the driver and releases it when it is freed (PyTorch under `PYTORCH_NO_CUDA_MEMORY_CACHING`). Slow, but useful for
/// finding out which code holds memory, or for sharing a device.
///
/// Reserved bytes equal allocated bytes, and there is no cache to empty. Streams need no tracking, because a driver keeps a released buffer until the
/// work that uses it is done. For the same reason, an allocation that finds no room waits for the device once, and retries, before it fails.
///
/// ```
/// use std::sync::Arc;
/// use claystone::device::StreamId;
/// use claystone::storage::{Allocator, Config, DirectAllocator, Sim, SimOptions};
/// let device = Sim::new(SimOptions::default());
/// let allocator = DirectAllocator::new(Arc::new(device.clone()), Config::default())?;
/// let block = allocator.allocate(1000, StreamId::DEFAULT)?;
/// assert_eq!((device.committed(), allocator.stats().reserved_bytes.current), (1024, 1024));
/// allocator.deallocate(block);
/// assert_eq!((device.committed(), allocator.stats().reserved_bytes.current), (0, 0));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct DirectAllocator {
    driver: Arc<dyn Driver>,
    number: u32,
    ledger: Mutex<SegmentLedger>,
}

impl DirectAllocator {
    /// Creates an allocator over `driver`'s memory. Uses only the configuration's limits.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the configuration contradicts itself.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<DirectAllocator> {
        config.check()?;
        let ledger = Mutex::new(SegmentLedger::new(&*driver, &config));
        Ok(DirectAllocator { driver, number: next_owner_number(), ledger })
    }

    /// Creates a segment. The inner error says why there is none.
    fn create_segment(&self, size: usize, requested: usize, stream: StreamId) -> Result<Result<Arc<Segment>, String>> {
        let elsewhere = self.driver.held_elsewhere();
        if let Some(why) = lock(&self.ledger).reserve_room(size, elsewhere) {
            return Ok(Err(why));
        }
        let made = create_segment(&*self.driver, size, None, requested);
        let segment = made.as_ref().ok().and_then(|made| made.as_ref().ok());
        lock(&self.ledger).finish_creation(size, stream, segment.map(|segment| &**segment));
        made
    }
}

impl fmt::Debug for DirectAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the direct allocator of {}", self.driver.device())
    }
}

impl Allocator for DirectAllocator {
    forward_to_ledger!(self, lock(&self.ledger));

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let size = segment_size(&*self.driver, bytes)?;
        let mut made = self.create_segment(size, bytes, stream)?;
        if made.is_err() && self.driver.make_room_elsewhere(size)? {
            made = self.create_segment(size, bytes, stream)?;
        }
        if made.is_err() && size as u64 <= lock(&self.ledger).limit() {
            self.driver.synchronize()?;
            let mut ledger = lock(&self.ledger);
            ledger.stats.num_alloc_retries += 1;
            ledger.stats.num_sync_all_streams += 1;
            drop(ledger);
            made = self.create_segment(size, bytes, stream)?;
        }
        let mut ledger = lock(&self.ledger);
        match made {
            Ok(segment) => {
                // SAFETY: the segment is new, so no other block refers to it.
                let mut block = unsafe { Block::new(&segment, 0, size, bytes) }?;
                block.owner = self.number;
                ledger.record_allocation(segment.address(), stream, bytes);
                Ok(block)
            }
            Err(why) => Err(ledger.out_of_memory(bytes, stream, &why, ReleasedMemory::default())),
        }
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        let address = block.segment().address();
        drop(block); // releases the segment before the statistics change
        let mut ledger = lock(&self.ledger);
        ledger.record_free(address);
        ledger.record_release(address);
    }

    fn record_stream(&self, _: &Block, _: StreamId) {}

    fn empty_cache(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
