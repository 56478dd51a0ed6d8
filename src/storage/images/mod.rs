//! Images: storages that kernels read through a device's texture units.

pub(super) mod cache;
pub(super) mod desc;
pub(super) mod pool;

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;

use crate::device::capture;
use crate::storage::allocation::{AllocatorRef, Backing, Lease, Storage};
use crate::storage::allocator::find_allocator;
use crate::storage::caching::CachingAllocator;
use crate::storage::driver::driver;
use crate::storage::driver::opencl::OpenCl;
use crate::storage::history::Caller;
use crate::storage::hooks::OutOfMemoryEvent;
use crate::storage::pool::{PoolAllocator, StorageType};
use crate::storage::{registry, scope};
use crate::{Device, Error, Result};
pub(crate) use cache::ImageKey;
pub use desc::{ImageDesc, ImageFormat};
use pool::pool;

/// A two-dimensional image of an OpenCL device: a [`Storage`] of pixels, which kernels read with `read_imagef`. No
/// tensor can be a view of an image; [`Tensor::to_image`](crate::Tensor::to_image) converts tensors.
///
/// Images come from a pool per device that follows the rules of MNN's pool. A free image serves a request if it has the
/// same format and is at least as wide and as high. Of several such images, the pool takes the one with the least
/// excess area. An image returns to the pool when its last handle is dropped.
///
/// [`Device::memory_stats`], snapshots and limits include images. Unused images are released if tensors need memory,
/// and unused memory of tensors is released if images need memory.
///
/// ```
/// use claystone::Device;
/// use claystone::storage::{Image, ImageDesc, ImageFormat, StorageType};
/// let Some(device) = Device::all().into_iter().find(|device| device.capabilities().is_ok_and(|c| c.images.is_some()))
/// else {
///     return Ok(()); // no OpenCL device has images
/// };
/// let desc = ImageDesc { width: 64, height: 32, format: ImageFormat::F32 };
/// let made = || Ok::<_, claystone::Error>(device.image_memory_stats()?.num_device_alloc);
/// drop(Image::new(device, desc, StorageType::Dynamic)?);
/// let before = made()?;
/// let smaller = ImageDesc { height: 30, ..desc };
/// assert_eq!(Image::new(device, smaller, StorageType::Dynamic)?.storage().nbytes(), 64 * 30 * 16);
/// assert_eq!(made()?, before); // the same image
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Clone)]
pub struct Image {
    storage: Storage,
    desc: ImageDesc,
}

impl Image {
    /// Makes an image with unspecified contents, for work on this thread's current stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a device without images, and for an image without pixels or beyond the device's limits
    /// ([`ImageLimits::size_2d`](crate::device::ImageLimits::size_2d)); [`Error::OutOfMemory`] if there is no room.
    #[track_caller]
    pub fn new(device: Device, desc: ImageDesc, kind: StorageType) -> Result<Image> {
        let _caller = Caller::enter();
        let (Some(pool), Device::OpenCL(index)) = (pool(device)?, device) else {
            return Err(Error::invalid("Image::new", format!("{device} has no images: use tensors")));
        };
        capture::refuse_while_capturing(
            device,
            "Image::new",
            "a replay would not keep the image alive: make it outside the capture",
        )?;
        let opened = OpenCl::open(index)?;
        let [width, height] = opened.device.image_limits().unwrap_or_default();
        if desc.width == 0 || desc.height == 0 || desc.width > width || desc.height > height {
            let reason =
                format!("{} x {} pixels: {device} has images of 1 x 1 to {width} x {height}", desc.width, desc.height);
            return Err(Error::invalid("Image::new", reason));
        }
        let block = pool.allocate_image(desc, scope::home_stream(device), kind);
        let block = block.inspect_err(|error| notify_observers(device, pool, desc.bytes(), error))?;
        let lease = Lease { block: ManuallyDrop::new(block), owner: AllocatorRef::Device(pool) };
        Ok(Image { storage: Storage::new(device, desc.bytes(), Backing::OpenCl(opened, lease)), desc })
    }

    /// Returns the size and format. The `cl_mem` may be wider and higher.
    pub fn desc(&self) -> ImageDesc {
        self.desc
    }

    /// Returns the device the image is on.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Returns the storage that holds the pixels. No tensor can be a view of the storage.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Returns the `cl_mem`, as [`Storage::export_cl`] does for buffers.
    pub fn export_cl(&self) -> *mut c_void {
        let block = self.storage.allocation().block();
        block.and_then(OpenCl::image_of_block).map_or(std::ptr::null_mut(), |image| image.mem())
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ImageDesc { width, height, format } = self.desc;
        write!(f, "image of {width} x {height} pixels, {format:?}, on {}", self.device())
    }
}

/// Reports a failure to the observers of the device's allocator, because the image pool has none of its own.
fn notify_observers(device: Device, pool: &PoolAllocator, requested: usize, error: &Error) {
    let (Error::OutOfMemory { .. }, Ok(allocator), Ok(driver)) =
        (error, registry::device_allocator(device), driver(device))
    else {
        return;
    };
    let held = allocator.stats().reserved_bytes.current + pool.reserved();
    let (allowed, device_free) = (pool.limit(), driver.capacity().saturating_sub(held));
    if let Some(caching) = find_allocator::<CachingAllocator>(&**allocator) {
        caching.hooks.notify_observers(|| OutOfMemoryEvent { device, requested, allowed, device_free });
    }
}
