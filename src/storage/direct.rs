//! The direct allocator: one segment per allocation, and no cache. Implemented as a [`PoolAllocator`](super::PoolAllocator) that
//! reuses nothing.

use std::fmt;
use std::sync::Arc;

use super::allocator::Allocator;
use super::block::Block;
use super::config::Config;
use super::driver::Driver;
use super::pool::PoolAllocator;
use crate::device::StreamId;
use crate::{Device, Result};

/// Allocates every block from the driver and releases it when it is freed (PyTorch under `PYTORCH_NO_CUDA_MEMORY_CACHING`). This is
/// slow, but useful for finding out which code holds memory, or for sharing a device.
///
/// Reserved bytes equal allocated bytes, and there is no cache to empty. Streams need no tracking, because a driver keeps a
/// released buffer until the work that uses it is done. For the same reason, an allocation for which memory does not suffice waits
/// for the device once and tries again before it fails.
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
    inner: Arc<dyn Allocator>,
}

impl DirectAllocator {
    /// Creates an allocator over `driver`'s memory. Uses only the configuration's limits.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the configuration contradicts itself.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<DirectAllocator> {
        Ok(DirectAllocator { inner: Arc::new(PoolAllocator::with_options(driver, config, false, None)?) })
    }
}

impl fmt::Debug for DirectAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Allocator for DirectAllocator {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.inner.allocate(bytes, stream)
    }

    fn deallocate(&self, block: Block) {
        self.inner.deallocate(block);
    }

    fn record_stream(&self, _: &Block, _: StreamId) {}
}

#[cfg(test)]
mod tests;
