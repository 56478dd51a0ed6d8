//! What images of OpenCL devices are, and how a driver of buffers learns of them.

use std::sync::{Arc, PoisonError, RwLock};

use crate::{Device, Result};

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

/// Who else holds memory of a device, as [`Driver::held_elsewhere`](super::Driver::held_elsewhere) counts it: the pool of images.
pub(in crate::storage) trait Elsewhere: Send + Sync {
    /// Bytes that it holds.
    fn held(&self) -> u64;
    /// Gives back what is unused; says whether that was anything.
    fn make_room(&self) -> Result<bool>;
}

static OTHERS: RwLock<Vec<(Device, Arc<dyn Elsewhere>)>> = RwLock::new(Vec::new());

/// Has the driver of a device count what this one holds, from now on.
pub(in crate::storage) fn count_elsewhere(device: Device, other: Arc<dyn Elsewhere>) {
    OTHERS.write().unwrap_or_else(PoisonError::into_inner).push((device, other));
}

/// Who else holds memory of the device.
pub(super) fn elsewhere(device: Device) -> Option<Arc<dyn Elsewhere>> {
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    others.iter().find(|(of, _)| *of == device).map(|(_, other)| Arc::clone(other))
}
