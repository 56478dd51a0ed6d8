//! OpenCL images, and how the allocators of buffers count the memory of images.

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

/// Device memory that one allocator holds and that counts towards the limits of another: images for the allocator of buffers, and the
/// reverse.
#[derive(Clone, Copy)]
pub(in crate::storage) struct OtherMemory {
    pub(in crate::storage) device: Device,
    /// Returns the number of bytes held.
    pub(in crate::storage) held: fn(Device) -> u64,
    /// Releases unused memory.
    pub(in crate::storage) release: fn(Device) -> Result<()>,
}

impl OtherMemory {
    pub(in crate::storage) fn held(&self) -> u64 {
        (self.held)(self.device)
    }

    /// Releases unused memory. Returns true if any memory was released.
    pub(in crate::storage) fn make_room(&self) -> Result<bool> {
        let before = self.held();
        (self.release)(self.device)?;
        Ok(self.held() < before)
    }
}
