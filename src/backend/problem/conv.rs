//! Convolutions that do not store the im2col matrix.

use crate::backend::problem::windows::Windows;
use crate::{Result, Tensor};

/// A convolution of images `[N, C, image]` with a weight `[O, C / groups, kernel]`.
pub(crate) struct Conv2d<'a> {
    pub(crate) windows: Windows,
    pub(crate) x: &'a Tensor,
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) groups: usize,
    /// Whether the im2col matrix is the image itself.
    pub(crate) single: bool,
}

/// A convolution, its transpose and its weight gradient, in one launch each. Images are `[N, C, image]`, windows (the convolution's output)
/// `[N, O, grid]`, and the weight is `[O, C / groups, kernel]`.
pub(crate) trait Convolution: Send + Sync {
    /// Computes the convolution of images.
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Computes the transposed convolution of windows.
    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// True if [`transposed`](Self::transposed) may be called, with or without a bias. Otherwise im2col and a product are faster.
    fn has_transposed(&self, _biased: bool) -> bool {
        true
    }
    /// Computes the gradient of images. Unlike [`transposed`](Self::transposed), it may multiply non-finite values by zero where nothing contributes.
    fn image_gradient(&self, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.transposed(y, weight, None)
    }
    /// True if [`image_gradient`](Self::image_gradient) may be called.
    fn has_image_gradient(&self) -> bool {
        self.has_transposed(false)
    }
    /// True if [`weight_gradient`](Self::weight_gradient) can write to `slot`, a tensor with the weight's shape.
    fn accepts(&self, slot: &Tensor) -> bool {
        slot.is_contiguous()
    }
    /// Computes the weight gradient from images and windows, one of which is a gradient. Writes to `slot` if given: see [`accepts`](Self::accepts).
    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor>;
}
