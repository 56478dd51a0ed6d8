//! Images: memory of two dimensions that kernels read through the texture units.

use std::ptr;

use opencl_sys::{CL_FLOAT, CL_HALF_FLOAT, CL_MEM_OBJECT_IMAGE2D, CL_RGBA, cl_image_desc, cl_image_format};
use opencl3::memory::CL_MEM_READ_WRITE;
use opencl3::types::cl_mem;

use super::ClDevice;
use super::capabilities::capabilities;
use super::driver::{ClBuffer, create};
use super::errors::ClError;
use super::exit;
use crate::device::Device;

/// An image of two dimensions, RGBA. Released as a [`ClBuffer`] is.
#[derive(Debug)]
pub(crate) struct ClImage(ClBuffer);

impl ClImage {
    pub(crate) fn mem(&self) -> cl_mem {
        self.0.mem()
    }
}

impl ClDevice {
    /// An image of so many pixels in width and height, of four halves or four floats each. The driver may give it memory only
    /// when it is first used: see [`commit_image`](Self::commit_image).
    pub(crate) fn create_image(&self, [width, height]: [usize; 2], half: bool) -> Result<ClImage, ClError> {
        self.alive("clCreateImage")?;
        let channel = if half { CL_HALF_FLOAT } else { CL_FLOAT };
        let format = cl_image_format { image_channel_order: CL_RGBA, image_channel_data_type: channel };
        let desc = cl_image_desc {
            image_type: CL_MEM_OBJECT_IMAGE2D,
            image_width: width,
            image_height: height,
            image_depth: 0,
            image_array_size: 0,
            image_row_pitch: 0,
            image_slice_pitch: 0,
            num_mip_levels: 0,
            num_samples: 0,
            buffer: ptr::null_mut(),
        };
        let created =
            exit::call(|| create!(clCreateImage(self.context, CL_MEM_READ_WRITE, &format, &desc, ptr::null_mut())));
        let bytes = width * height * if half { 8 } else { 16 };
        created.map(|mem| ClImage(ClBuffer::new(mem, bytes))).map_err(|e| self.settle(e))
    }

    /// [`commit`](Self::commit) of an image.
    pub(crate) fn commit_image(&self, image: &ClImage) -> Result<(), ClError> {
        self.commit(&image.0)
    }

    /// The greatest width and height of images, in pixels; `None` where the device has no images.
    pub(crate) fn image_limits(&self) -> Option<[usize; 2]> {
        *self.image_limits.get_or_init(|| {
            let Device::OpenCL(index) = self.device() else { return None };
            let capabilities = capabilities(index).ok()?;
            // OpenCL 1.1 has no clCreateImage, though a newer loader has.
            let version = capabilities.version?;
            if ["OpenCL 1.0", "OpenCL 1.1"].iter().any(|old| version.starts_with(old)) {
                return None;
            }
            let sizes = capabilities.images?.size_2d?;
            let [width, height] = sizes.map(|size| usize::try_from(size).unwrap_or(usize::MAX));
            (width > 0 && height > 0).then_some([width, height])
        })
    }
}
