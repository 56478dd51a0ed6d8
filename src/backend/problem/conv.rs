//! Convolutions that do not store the im2col matrix.

use crate::{Result, Tensor};

/// A convolution, its transpose and the gradient of its weight, in one launch each, of images `[N, C, image]`, windows `[N, O, grid]`
/// (the output of the convolution) and a weight `[O, C / groups, kernel]`.
pub(crate) trait Convolution: Send + Sync {
    /// The convolution of images.
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// The transposed convolution of windows.
    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Whether [`images`](Self::images) may be called, with a bias or without. Otherwise im2col and a product are faster.
    fn makes_images(&self, _biased: bool) -> bool {
        true
    }
    /// The gradient of images, which may compute zeros times what is not finite where [`images`](Self::images) has no element.
    fn image_gradient(&self, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.images(y, weight, None)
    }
    /// Whether [`image_gradient`](Self::image_gradient) may be called.
    fn makes_image_gradient(&self) -> bool {
        self.makes_images(false)
    }
    /// Whether the gradient of the weight can be written to this tensor of its shape.
    fn fills(&self, slot: &Tensor) -> bool {
        slot.is_contiguous()
    }
    /// The gradient of the weight from images and windows, one of which is a gradient; in `slot`, if given, which [`fills`](Self::fills) accepts.
    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor>;
}
