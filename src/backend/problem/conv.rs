//! Convolutions that do not store an im2col matrix.

use crate::backend::problem::windows::Windows;
use crate::device::DeviceKind;
use crate::{Device, Result, Tensor};

/// A convolution of images `[N, C, image]` with a weight `[O, C / groups, kernel]`.
pub(crate) struct Conv2d<'a> {
    pub(crate) windows: Windows,
    pub(crate) x: &'a Tensor,
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) groups: usize,
    /// Whether windows are single pixels, so that the image itself is the im2col matrix.
    pub(crate) single: bool,
}

/// A convolution, its transpose and its weight gradient, in one launch each. Shapes: images `[N, C, image]`, windows (the outputs of the
/// convolution) `[N, O, grid]`, weight `[O, C / groups, kernel]`.
pub(crate) trait Convolution: Send + Sync {
    /// Computes the convolution of images.
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Computes the transposed convolution of windows.
    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// True if [`transposed`](Self::transposed) may be called, with a bias if `_biased`. If false, im2col and a product are faster.
    fn has_transposed(&self, _biased: bool) -> bool {
        true
    }
    /// Computes the gradient of images. Unlike [`transposed`](Self::transposed), this may spread an infinity or NaN to image elements
    /// that the window does not read.
    fn image_gradient(&self, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.transposed(y, weight, None)
    }
    /// True if [`image_gradient`](Self::image_gradient) may be called.
    fn has_image_gradient(&self) -> bool {
        self.has_transposed(false)
    }
    /// True if [`weight_gradient`](Self::weight_gradient) can write its result to `slot`, a tensor with the weight's shape.
    fn accepts(&self, slot: &Tensor) -> bool {
        slot.is_contiguous()
    }
    /// Computes the weight gradient from images and windows, one of which is a gradient. Writes to `slot` if given; see [`accepts`](Self::accepts).
    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor>;
}

/// Returns the maximum size in bytes of the columns that are in memory at a time. On GPUs this is 1/512 of the memory, but at least 16
/// and at most 256 MiB, because larger products use a GPU better. A single row of windows may exceed this size.
pub(crate) fn max_column_block_bytes(device: Device) -> Result<usize> {
    let info = device.cached_info()?;
    let part = if info.kind == DeviceKind::Cpu { 0 } else { info.memory >> 9 };
    Ok((part as usize).clamp(16 << 20, 256 << 20))
}
