//! Convolutions without columns in memory.

use crate::{Result, Tensor};

/// A way to make images `[N, C, image]`, windows `[N, O, grid]` and a weight `[O, C / groups, kernel]` of one another in one launch.
pub(crate) trait Convolution: Send + Sync {
    /// The convolution of images.
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// The transposed convolution of windows.
    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// Whether [`images`](Self::images) may be called, with a bias or without: otherwise they are better made of columns.
    fn makes_images(&self, _biased: bool) -> bool {
        true
    }
    /// Whether the gradient of the weight can be written to this memory of its shape.
    fn fills(&self, slot: &Tensor) -> bool {
        slot.is_contiguous()
    }
    /// The gradient of the weight from images and the gradient of windows, or the other way round; in `slot`, which it
    /// [`fills`](Self::fills), where it is given.
    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor>;
}
