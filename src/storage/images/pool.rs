//! The pool of an OpenCL device's images, beside the allocator of the device's buffers.

use std::sync::Arc;

use super::cache;
use super::desc::{OtherMemoryHolder, register_other_holder};
use crate::storage::allocator::{Allocator, find_allocator};
use crate::storage::caching::CachingAllocator;
use crate::storage::config::Config;
use crate::storage::driver::opencl::OpenCl;
use crate::storage::pool::{IMAGE_POOLS, PoolAllocator, existing_image_pool};
use crate::storage::registry;
use crate::{Device, Result};

/// Returns the pool of a device's images, made on first use; `None` for a device without images.
pub(in crate::storage) fn pool(device: Device) -> Result<Option<Arc<PoolAllocator>>> {
    let pool = existing_image_pool(device);
    let (None, Device::OpenCL(index)) = (&pool, device) else { return Ok(pool) };
    let driver = OpenCl::open(index)?;
    if driver.device.image_limits().is_none() {
        return Ok(None);
    }
    let config = Config::from_env_once()?.clone();
    let made = PoolAllocator::of_images(Arc::new(driver), config, Arc::new(BuffersAsHolder(device)))?;
    let pool = IMAGE_POOLS.get_or_insert(device, Arc::new(made));
    register_other_holder(device, Arc::new(PoolAsHolder(Arc::clone(&pool))));
    Ok(Some(pool))
}

/// Releases a device's unused images, including those cached with their tensors.
pub(in crate::storage) fn empty_cache(device: Device) -> Result<()> {
    let Some(pool) = existing_image_pool(device) else { return Ok(()) };
    cache::drop_images_of_device(device);
    pool.empty_cache()
}

/// The image pool as a holder of memory that the driver of buffers counts.
struct PoolAsHolder(Arc<PoolAllocator>);

impl OtherMemoryHolder for PoolAsHolder {
    fn held(&self) -> u64 {
        self.0.reserved()
    }

    fn make_room(&self) -> Result<bool> {
        let before = self.held();
        empty_cache(self.0.device())?;
        Ok(self.held() < before)
    }
}

/// The allocator of a device's buffers as a holder of memory that the image pool counts.
struct BuffersAsHolder(Device);

impl OtherMemoryHolder for BuffersAsHolder {
    fn held(&self) -> u64 {
        registry::device_allocator(self.0).map_or(0, |allocator| allocator.stats().reserved_bytes.current)
    }

    fn make_room(&self) -> Result<bool> {
        let (allocator, before) = (registry::device_allocator(self.0)?, self.held());
        match find_allocator::<CachingAllocator>(&**allocator) {
            Some(caching) => caching.make_room()?,
            None => allocator.empty_cache()?,
        }
        Ok(self.held() < before)
    }
}
