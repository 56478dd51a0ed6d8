//! The pool of an OpenCL device's images, beside the allocator of the device's buffers.

use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use super::allocator::Allocator;
use super::config::Config;
use super::derived;
use super::driver::image::{OtherMemoryHolder, register_other_holder};
use super::driver::opencl::OpenCl;
use super::driver::{At, Driver, Failure, ImageDesc, Marker, Memory, Progress};
use super::pool::PoolAllocator;
use super::registry;
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// The image pools of all devices that have used one.
static POOLS: RwLock<Vec<(Device, Arc<PoolAllocator>)>> = RwLock::new(Vec::new());

/// Returns the pool of a device's images, if it was made already.
pub(super) fn existing_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| Arc::clone(pool))
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
    let made = PoolAllocator::new(Arc::new(ImageDriver(driver)), Config::from_env_once()?.clone())?;
    let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == device) {
        return Ok(Some(Arc::clone(pool)));
    }
    let pool = Arc::new(made);
    pools.push((device, Arc::clone(&pool)));
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

/// An OpenCL device as the image pool's driver. Memory held elsewhere is the memory of the device's buffers.
#[derive(Debug)]
struct ImageDriver(OpenCl);

// SAFETY: the pool hands out whole images of the driver below, which no other code has.
unsafe impl Driver for ImageDriver {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn largest_segment(&self) -> usize {
        self.0.largest_segment()
    }

    fn create(&self, _bytes: usize) -> Result<Memory, Failure> {
        Err(Failure::Other(Error::invalid("image", "the image pool creates no buffers")))
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        self.0.create_image(image)
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        self.0.commit(memory)
    }

    fn held_elsewhere(&self) -> u64 {
        registry::device_allocator(self.device()).map_or(0, |allocator| allocator.stats().reserved_bytes.current)
    }

    fn make_room_elsewhere(&self, bytes: usize) -> Result<bool> {
        let allocator = registry::device_allocator(self.device())?;
        let before = self.held_elsewhere();
        allocator.make_room(bytes)?;
        Ok(self.held_elsewhere() < before)
    }

    fn give_up(&self, cause: &str) {
        self.0.give_up(cause);
    }

    fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        self.0.record(stream)
    }

    fn is_done(&self, marker: &Marker) -> Result<bool> {
        self.0.is_done(marker)
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.0.is_idle(stream)
    }

    fn progress(&self, stream: StreamId) -> Progress {
        self.0.progress(stream)
    }

    fn wait(&self, marker: &Marker) -> Result<()> {
        self.0.wait(marker)
    }

    fn stream_waits(&self, stream: StreamId, marker: &Marker) -> Result<()> {
        self.0.stream_waits(stream, marker)
    }

    // Only kernels move the bytes of images: the driver below refuses these calls, because images are not buffers.

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.0.copy(stream, from, to, bytes) }
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.read(from, to) }
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.write(from, to) }
    }
}
