//! The direct allocator: a segment an allocation, and nothing kept.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::allocator::Allocator;
use super::block::{Block, owner_number};
use super::config::Config;
use super::driver::Driver;
use super::segment::Segment;
use super::unsplit::{Books, Unused, answer_from_books, make, segment_size};
use crate::Result;
use crate::device::StreamId;
use crate::device::lock;

/// Asks the driver for every allocation and gives each back when it is freed (PyTorch under
/// `PYTORCH_NO_CUDA_MEMORY_CACHING`): slow, and the right thing for finding out who holds what, or for sharing a device.
///
/// What is reserved is what is allocated: there is no cache to empty. Streams need no care either: a driver keeps a
/// buffer that was given back until the work that uses it is done. That also is why a full device is waited for once,
/// before the error: buffers given back may only then be gone.
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
    books: Mutex<Books>,
}

impl DirectAllocator {
    /// An allocator over this driver's memory. Of the configuration, the limits count.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the configuration contradicts itself.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<DirectAllocator> {
        config.check()?;
        let books = Mutex::new(Books::new(&*driver, &config));
        Ok(DirectAllocator { driver, number: owner_number(), books })
    }

    /// A new segment, or why there is none.
    fn grow(&self, size: usize, requested: usize, stream: StreamId) -> Result<Result<Arc<Segment>, String>> {
        let elsewhere = self.driver.held_elsewhere();
        if let Some(why) = lock(&self.books).begin(size, elsewhere) {
            return Ok(Err(why));
        }
        let made = make(&*self.driver, size, None, requested);
        let segment = made.as_ref().ok().and_then(|made| made.as_ref().ok());
        lock(&self.books).end(size, stream, segment.map(|segment| &**segment));
        made
    }
}

impl fmt::Debug for DirectAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the direct allocator of {}", self.driver.device())
    }
}

impl Allocator for DirectAllocator {
    answer_from_books!(self, lock(&self.books));

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let size = segment_size(&*self.driver, bytes)?;
        let mut made = self.grow(size, bytes, stream)?;
        if made.is_err() && self.driver.make_room_elsewhere(size)? {
            made = self.grow(size, bytes, stream)?;
        }
        if made.is_err() && size as u64 <= lock(&self.books).limit() {
            self.driver.synchronize()?;
            let mut books = lock(&self.books);
            books.stats.num_alloc_retries += 1;
            books.stats.num_sync_all_streams += 1;
            drop(books);
            made = self.grow(size, bytes, stream)?;
        }
        let mut books = lock(&self.books);
        match made {
            Ok(segment) => {
                // SAFETY: the segment is new and nobody else's.
                let mut block = unsafe { Block::new(&segment, 0, size, bytes) }?;
                block.owner = self.number;
                books.taken(segment.address(), stream, bytes);
                Ok(block)
            }
            Err(why) => Err(books.out_of_memory(bytes, stream, &why, Unused::default())),
        }
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        let address = block.segment().address();
        drop(block); // the last share of the segment: the driver has it back before the books say so
        let mut books = lock(&self.books);
        books.given_back(address);
        books.released(address);
    }

    fn record_stream(&self, _: &Block, _: StreamId) {}

    fn empty_cache(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
