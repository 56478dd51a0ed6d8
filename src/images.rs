//! Conversion between tensors and image objects of OpenCL devices.

use crate::ops::dispatch::prelude::*;
use crate::storage::{Image, ImageDesc, ImageFormat};

impl Tensor {
    /// Copies the elements to an RGBA image on their OpenCL device, in MNN's NC4HW4 layout, for kernels that read images.
    ///
    /// `[N, C, H, W]` gives an image of `ceil(C / 4) * W` pixels in width and `N * H` in height. Each pixel holds four channels,
    /// padded with zeros, and the blocks of four channels are side by side. `[C, H, W]` is converted as `[1, C, H, W]`, `[N, C]` as
    /// `[N, C, 1, 1]`, and `[C]` as `[1, C, 1, 1]`. f32 and bf16 become float images and f16 half images. All values are exact,
    /// except that OpenCL lets devices flush subnormal numbers to zero and change the bits of a NaN. The tensor may have any
    /// strides. The one launch is not counted by [`count_launches`](crate::device::count_launches). Not recorded by autograd.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let Some(device) = Device::all().into_iter().find(|device| device.capabilities().is_ok_and(|c| c.images.is_some()))
    /// else {
    ///     return Ok(()); // no OpenCL device has images
    /// };
    /// let x = Tensor::randn(&[2, 3, 5, 7], device)?;
    /// let image = x.to_image()?;
    /// assert_eq!((image.desc().width, image.desc().height), (7, 10));
    /// assert_eq!(Tensor::from_image(&image, [2, 3, 5, 7])?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for other dtypes; [`Error::Invalid`] for more than four dims, no elements, more pixels than the
    /// device's images can have ([`ImageLimits`](crate::device::ImageLimits)), and on devices without images.
    pub fn to_image(&self) -> Result<Image> {
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::UnsupportedDType { op: "to_image", dtype: self.dtype, expected: "f32, f16 or bf16" });
        }
        backend::of_device(self.device()).to_image(self)?.ok_or_else(|| {
            let (shape, device) = (self.shape(), self.device());
            let reason = format!(
                "a tensor of shape {shape} has no image on {device}: it needs at most 4 dims, at least one element, and no more pixels in \
                 width and height than Device::capabilities allows"
            );
            Error::invalid("to_image", reason)
        })
    }

    /// Copies an [image](Tensor::to_image) back to a contiguous tensor of this shape, in one launch: f32 for a float image, f16 for
    /// a half image. Fails with [`Error::Invalid`] if the image of a tensor of this shape would have another size.
    #[track_caller]
    pub fn from_image(image: &Image, shape: impl Into<Shape>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (shape, ImageDesc { width, height, format }) = (shape.into(), image.desc());
        let [n, c, h, w] = match *shape.dims() {
            [] => [1; 4],
            [c] => [1, c, 1, 1],
            [n, c] => [n, c, 1, 1],
            [c, h, w] => [1, c, h, w],
            [n, c, h, w] => [n, c, h, w],
            _ => [0; 4],
        };
        invalid!("from_image" if [c.div_ceil(4).saturating_mul(w), n.saturating_mul(h)] != [width, height],
            "the {image:?} does not have the size for a tensor of shape {shape}");
        let dtype = if format == ImageFormat::F16 { DType::F16 } else { DType::F32 };
        backend::compute(shape, dtype, image.device(), |b, out| b.read_image(image, out))
    }
}
