//! The pool of an OpenCL device's images, beside the allocator of the device's buffers.

use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use super::cache;
use crate::storage::allocator::Allocator;
use crate::storage::config::Config;
use crate::storage::driver::opencl::{ELSEWHERE, OpenCl, OtherMemory};
use crate::storage::pool::PoolAllocator;
use crate::storage::registry;
use crate::storage::stats::DeviceStats;
use crate::{Device, Result};

/// The image pools of all devices that have used one.
static POOLS: RwLock<Vec<(Device, Arc<PoolAllocator>)>> = RwLock::new(Vec::new());

/// Returns the pool of a device's images, if it was made already.
pub(in crate::storage) fn existing_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| Arc::clone(pool))
}

/// Returns an allocator's statistics including the images of its device.
pub(in crate::storage) fn with_images(allocator: &dyn Allocator) -> DeviceStats {
    match existing_pool(allocator.device()) {
        Some(images) if ptr::addr_eq(allocator, &*images) => allocator.device().memory_stats().unwrap_or_default(),
        Some(images) => allocator.stats().plus(&images.stats()),
        None => allocator.stats(),
    }
}

/// Returns the pool of a device's images, made on first use; `None` for a device without images.
pub(in crate::storage) fn pool(device: Device) -> Result<Option<Arc<PoolAllocator>>> {
    let pool = existing_pool(device);
    let (None, Device::OpenCL(index)) = (&pool, device) else { return Ok(pool) };
    let driver = OpenCl::<true>::of_images(index)?;
    if driver.device.image_limits().is_none() {
        return Ok(None);
    }
    ELSEWHERE.get_or_init(|| {
        [OtherMemory { held, make_room }, OtherMemory { held: held_by_buffers, make_room: make_room_among_buffers }]
    });
    let made = PoolAllocator::new(Arc::new(driver), Config::from_env_once()?.clone())?;
    let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == device) {
        return Ok(Some(Arc::clone(pool)));
    }
    let pool = Arc::new(made);
    pools.push((device, Arc::clone(&pool)));
    Ok(Some(pool))
}

/// Releases a device's unused images, including those cached with their tensors.
pub(in crate::storage) fn empty_cache(device: Device) -> Result<()> {
    let Some(pool) = existing_pool(device) else { return Ok(()) };
    cache::drop_images_of_device(device);
    pool.empty_cache()
}

/// Releases a device's unused images. Returns true if there were any.
fn make_room(device: Device, _bytes: usize) -> Result<bool> {
    let before = held(device);
    empty_cache(device)?;
    Ok(held(device) < before)
}

/// Returns the bytes of a device's images.
fn held(device: Device) -> u64 {
    existing_pool(device).map_or(0, |pool| pool.reserved())
}

/// Returns the bytes of a device's buffers.
fn held_by_buffers(device: Device) -> u64 {
    registry::device_allocator(device).map_or(0, |allocator| allocator.stats().reserved_bytes.current)
}

fn make_room_among_buffers(device: Device, bytes: usize) -> Result<bool> {
    let before = held_by_buffers(device);
    registry::device_allocator(device)?.make_room(bytes)?;
    Ok(held_by_buffers(device) < before)
}
