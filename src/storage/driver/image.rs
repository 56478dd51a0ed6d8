//! Images of OpenCL devices: what they are, and the pool that each device has them from.

use std::sync::{Arc, PoisonError, RwLock};

use super::opencl::OpenCl;
use super::{At, Driver, Failure, Marker, Memory, Progress};
use crate::device::StreamId;
use crate::storage::config::Config;
use crate::storage::pool::PoolAllocator;
use crate::storage::registry;
use crate::{Device, Error, Result};

/// What a channel of an image is; a pixel has four (`CL_RGBA`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// `CL_FLOAT`: 16 bytes a pixel.
    F32,
    /// `CL_HALF_FLOAT`: 8 bytes a pixel.
    F16,
}

impl ImageFormat {
    /// Bytes of a pixel.
    pub fn pixel_bytes(self) -> usize {
        match self {
            ImageFormat::F32 => 16,
            ImageFormat::F16 => 8,
        }
    }
}

/// The size and the format of an image of two dimensions, as OpenCL's `cl_image_desc` and `cl_image_format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageDesc {
    /// In pixels.
    pub width: usize,
    /// In pixels.
    pub height: usize,
    /// What a pixel is.
    pub format: ImageFormat,
}

impl ImageDesc {
    /// Bytes of all pixels; the driver may pad rows beyond that.
    pub fn bytes(&self) -> usize {
        self.width.saturating_mul(self.height).saturating_mul(self.format.pixel_bytes())
    }

    /// Whether an image like this can be used where `other` was asked for: it is of the same format, and at least as wide and
    /// as high.
    pub fn serves(&self, other: &ImageDesc) -> bool {
        self.format == other.format && self.width >= other.width && self.height >= other.height
    }
}

static POOLS: RwLock<Vec<(Device, Arc<PoolAllocator>)>> = RwLock::new(Vec::new());

/// The pool of a device's images, if anybody has asked for it yet.
pub(in crate::storage) fn existing_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| Arc::clone(pool))
}

/// The pool of a device's images.
///
/// # Errors
/// [`Error::Invalid`] for a device without images.
pub(in crate::storage) fn pool(device: Device) -> Result<Arc<PoolAllocator>> {
    if let Some(pool) = existing_pool(device) {
        return Ok(pool);
    }
    let none = || Error::invalid("image", format!("{device} has no images: use tensors"));
    let Device::OpenCL(index) = device else { return Err(none()) };
    let driver = OpenCl::open(index)?;
    driver.device.image_limits().ok_or_else(none)?;
    let made = PoolAllocator::new(Arc::new(Images(driver)), Config::of_process()?.clone())?;
    let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == device) {
        return Ok(Arc::clone(pool));
    }
    let pool = Arc::new(made);
    pools.push((device, Arc::clone(&pool)));
    Ok(pool)
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
