//! OpenCL images, and how the allocators of buffers count the memory of images.

use std::sync::Arc;

use crate::storage::per_device::PerDevice;
use crate::{Device, Result};

/// The type of an image's channels. A pixel has four channels (`CL_RGBA`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// `CL_FLOAT`: 16 bytes a pixel.
    F32,
    /// `CL_HALF_FLOAT`: 8 bytes a pixel.
    F16,
}

impl ImageFormat {
    /// Returns the size of a pixel in bytes.
    pub fn pixel_bytes(self) -> usize {
        match self {
            ImageFormat::F32 => 16,
            ImageFormat::F16 => 8,
        }
    }
}

/// The size and the format of a two-dimensional image, as in OpenCL's `cl_image_desc` and `cl_image_format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageDesc {
    /// The width in pixels.
    pub width: usize,
    /// The height in pixels.
    pub height: usize,
    /// The format of a pixel.
    pub format: ImageFormat,
}

impl ImageDesc {
    /// Returns the size of all pixels in bytes. The driver may use more memory, because it may pad rows.
    pub fn bytes(&self) -> usize {
        self.width.saturating_mul(self.height).saturating_mul(self.format.pixel_bytes())
    }

    /// True if an image like this can be used where `other` was requested: same format, and at least as wide and high.
    pub fn serves(&self, other: &ImageDesc) -> bool {
        self.format == other.format && self.width >= other.width && self.height >= other.height
    }
}

/// A holder of device memory that counts towards the limits of another allocator: the image pool for the allocator of buffers, and
/// the reverse.
pub(in crate::storage) trait OtherMemoryHolder: Send + Sync {
    fn held(&self) -> u64;
    /// Releases unused memory. Returns true if any memory was released.
    fn make_room(&self) -> Result<bool>;
}

/// The registered holder of each device: its image pool.
static OTHER_HOLDERS: PerDevice<Arc<dyn OtherMemoryHolder>> = PerDevice::new();

/// Makes the allocators of the device's buffers count the bytes that `other` holds, from now on.
pub(in crate::storage) fn register_other_holder(device: Device, other: Arc<dyn OtherMemoryHolder>) {
    OTHER_HOLDERS.get_or_insert(device, other);
}

/// Returns the registered holder of device memory other than buffers, or `None` if there is none.
pub(in crate::storage) fn other_holder(device: Device) -> Option<Arc<dyn OtherMemoryHolder>> {
    OTHER_HOLDERS.get(device)
}
