//! The pool that an OpenCL device has its images from, beside the allocator of its buffers.

use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use super::allocator::Allocator;
use super::config::Config;
use super::derived;
use super::driver::image::{Elsewhere, count_elsewhere};
use super::driver::opencl::OpenCl;
use super::driver::{At, Driver, Failure, ImageDesc, Marker, Memory, Progress};
use super::pool::PoolAllocator;
use super::registry;
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

static POOLS: RwLock<Vec<(Device, Arc<PoolAllocator>)>> = RwLock::new(Vec::new());

/// The pool of a device's images, if anybody has asked for it yet.
pub(super) fn existing_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| Arc::clone(pool))
}

/// What an allocator has, with the images of its device, which are counted with the buffers there.
pub(super) fn with_images(allocator: &dyn Allocator) -> DeviceStats {
    match existing_pool(allocator.device()) {
        Some(images) if ptr::addr_eq(allocator, &*images) => allocator.device().memory_stats().unwrap_or_default(),
        Some(images) => allocator.stats().plus(&images.stats()),
        None => allocator.stats(),
    }
}

/// The pool of a device's images; `None` for a device without.
pub(super) fn pool(device: Device) -> Result<Option<Arc<PoolAllocator>>> {
    let pool = existing_pool(device);
    let (None, Device::OpenCL(index)) = (&pool, device) else { return Ok(pool) };
    let driver = OpenCl::open(index)?;
    if driver.device.image_limits().is_none() {
        return Ok(None);
    }
    let made = PoolAllocator::new(Arc::new(Images(driver)), Config::of_process()?.clone())?;
    let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == device) {
        return Ok(Some(Arc::clone(pool)));
    }
    let pool = Arc::new(made);
    pools.push((device, Arc::clone(&pool)));
    count_elsewhere(device, Arc::new(Pool(Arc::clone(&pool))));
    Ok(Some(pool))
}

/// Gives back the images of a device that nothing uses, those that were kept with their tensors among them.
pub(super) fn empty_cache(device: Device) -> Result<()> {
    let Some(pool) = existing_pool(device) else { return Ok(()) };
    derived::forget_all(device);
    pool.empty_cache()
}

/// The pool as the allocator of buffers sees it.
struct Pool(Arc<PoolAllocator>);

impl Elsewhere for Pool {
    fn held(&self) -> u64 {
        self.0.reserved()
    }

    fn make_room(&self) -> Result<bool> {
        let before = self.held();
        empty_cache(self.0.device())?;
        Ok(self.held() < before)
    }
}

/// An OpenCL device as the pool of its images sees it: what is elsewhere are buffers.
#[derive(Debug)]
struct Images(OpenCl);

// SAFETY: the pool gives out whole images of the driver below, which nobody else has.
unsafe impl Driver for Images {
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
        Err(Failure::Other(Error::invalid("image", "the pool of images makes no buffers")))
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        self.0.create_image(image)
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        self.0.commit(memory)
    }

    fn held_elsewhere(&self) -> u64 {
        registry::of(self.device()).map_or(0, |allocator| allocator.stats().reserved_bytes.current)
    }

    fn make_room_elsewhere(&self, bytes: usize) -> Result<bool> {
        let allocator = registry::of(self.device())?;
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

    // Bytes of images are moved by kernels alone: the driver below refuses these, as images are no buffers.

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
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
