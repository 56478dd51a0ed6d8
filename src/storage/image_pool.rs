//! The pool of an OpenCL device's images, beside the allocator of the device's buffers.

use std::ptr;
use std::sync::Arc;

use super::allocator::{Allocator, find_allocator};
use super::caching::CachingAllocator;
use super::config::Config;
use super::derived;
use super::driver::image::{OtherMemoryHolder, register_other_holder};
use super::driver::opencl::OpenCl;
use super::per_device::PerDevice;
use super::pool::PoolAllocator;
use super::registry;
use super::stats::DeviceStats;
use crate::{Device, Result};

/// The image pools of all devices that have used one.
static POOLS: PerDevice<Arc<PoolAllocator>> = PerDevice::new();

/// Returns the pool of a device's images, if it was made already.
pub(super) fn existing_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    POOLS.get(device)
}

/// Returns an allocator's statistics including the images of its device.
pub(super) fn with_images(allocator: &dyn Allocator) -> DeviceStats {
    match existing_pool(allocator.device()) {
        Some(images) if ptr::addr_eq(allocator, &*images) => allocator.device().memory_stats().unwrap_or_default(),
        Some(images) => allocator.stats().plus(&images.stats()),
        None => allocator.stats(),
    }
}

/// Returns the pool of a device's images, made on first use; `None` for a device without images.
pub(super) fn pool(device: Device) -> Result<Option<Arc<PoolAllocator>>> {
    let pool = existing_pool(device);
    let (None, Device::OpenCL(index)) = (&pool, device) else { return Ok(pool) };
    let driver = OpenCl::open(index)?;
    if driver.device.image_limits().is_none() {
        return Ok(None);
    }
    let config = Config::from_env_once()?.clone();
    let made = PoolAllocator::of_images(Arc::new(driver), config, Arc::new(BuffersAsHolder(device)))?;
    let pool = POOLS.get_or_insert(device, Arc::new(made));
    register_other_holder(device, Arc::new(PoolAsHolder(Arc::clone(&pool))));
    Ok(Some(pool))
}

/// Releases a device's unused images, including those cached with their tensors.
pub(super) fn empty_cache(device: Device) -> Result<()> {
    let Some(pool) = existing_pool(device) else { return Ok(()) };
    derived::drop_images_of_device(device);
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
