//! The pool of an OpenCL device's images, beside the allocator of the device's buffers.

use std::sync::Arc;

use super::cache;
use super::desc::OtherMemory;
use crate::storage::allocator::{Allocator, find_allocator};
use crate::storage::caching::CachingAllocator;
use crate::storage::config::Config;
use crate::storage::driver::opencl::OpenCl;
use crate::storage::dry;
use crate::storage::pool::{PoolAllocator, existing_image_pool};
use crate::storage::{per_device, registry};
use crate::{Device, Result};

/// Returns the pool of a device's images, made on first use; `None` for a device without images.
pub(in crate::storage) fn pool(device: Device) -> Result<Option<&'static PoolAllocator>> {
    if dry::is_simulating(device) {
        return Ok(None); // images are not simulated
    }
    let pool = existing_image_pool(device);
    let (None, Device::OpenCL(index)) = (pool, device) else { return Ok(pool) };
    let driver = OpenCl::open(index)?;
    if driver.device.image_limits().is_none() {
        return Ok(None);
    }
    let held = |device| registry::device_allocator(device).map_or(0, |buffers| buffers.stats().reserved_bytes.current);
    let buffers = OtherMemory { device, held, release: release_buffers };
    let config = Config::from_env_once()?.clone();
    let made = PoolAllocator::with_options(Arc::new(driver), config, true, Some(buffers))?;
    let pool = per_device::get_or_insert(device, made);
    let held = |device| existing_image_pool(device).map_or(0, PoolAllocator::reserved);
    per_device::get_or_insert(device, OtherMemory { device, held, release: empty_cache });
    Ok(Some(pool))
}

/// Releases a device's unused images, including those cached with their tensors.
pub(in crate::storage) fn empty_cache(device: Device) -> Result<()> {
    let Some(pool) = existing_image_pool(device) else { return Ok(()) };
    cache::drop_images_of_device(device);
    pool.empty_cache()
}

/// Releases unused memory of the allocator of a device's buffers.
fn release_buffers(device: Device) -> Result<()> {
    let allocator = registry::device_allocator(device)?;
    match find_allocator::<CachingAllocator>(&**allocator) {
        Some(caching) => caching.make_room(),
        None => allocator.empty_cache(),
    }
}
