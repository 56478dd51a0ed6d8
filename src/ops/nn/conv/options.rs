//! The options of convolutions, and their rows in the catalogue.

use crate::Result;
use crate::ops::dispatch::arguments::Args;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::padding::Padding;
use crate::ops::nn::window::{fold, unfold};

/// How [`conv2d`](crate::Tensor::conv2d) and its kin move their windows, with PyTorch's defaults.
///
/// ```
/// use claystone::{ConvOptions, Device, Tensor};
/// let (x, w) = (Tensor::ones(&[1, 2, 8, 8], Device::Cpu)?, Tensor::ones(&[4, 2, 3, 3], Device::Cpu)?);
/// let halved = ConvOptions { stride: [2, 2], padding: 1.into(), ..ConvOptions::default() };
/// assert_eq!(x.conv2d(&w, None, halved)?.shape().dims(), [1, 4, 4, 4]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions<const D: usize> {
    /// Elements from one window to the next.
    pub stride: [usize; D],
    /// Zeros around the image.
    pub padding: Padding<D>,
    /// Elements from one of a window to the next.
    pub dilation: [usize; D],
    /// Parts of the channels that go separate ways.
    pub groups: usize,
}

impl<const D: usize> Default for ConvOptions<D> {
    fn default() -> Self {
        ConvOptions { stride: [1; D], padding: Padding::Valid, dilation: [1; D], groups: 1 }
    }
}

/// How [`conv_transpose2d`](crate::Tensor::conv_transpose2d) and its kin move their windows, with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvTransposeOptions<const D: usize> {
    /// Elements of the result from one window to the next.
    pub stride: [usize; D],
    /// Elements taken off the result.
    pub padding: Padding<D>,
    /// Elements added to the result behind.
    pub output_padding: [usize; D],
    /// Elements from one of a window to the next.
    pub dilation: [usize; D],
    /// Parts of the channels that go separate ways.
    pub groups: usize,
}

impl<const D: usize> Default for ConvTransposeOptions<D> {
    fn default() -> Self {
        ConvTransposeOptions {
            stride: [1; D],
            padding: Padding::Valid,
            output_padding: [0; D],
            dilation: [1; D],
            groups: 1,
        }
    }
}

impl<const D: usize> ConvOptions<D> {
    fn of(a: &Args) -> Result<Self> {
        let padding = Padding::of(a, 1)?;
        let groups = if a.given(3) { a.size(3)? } else { 1 };
        Ok(ConvOptions { stride: a.array(0, [1; D])?, padding, dilation: a.array(2, [1; D])?, groups })
    }
}

impl<const D: usize> ConvTransposeOptions<D> {
    fn of(a: &Args) -> Result<Self> {
        let groups = if a.given(3) { a.size(3)? } else { 1 };
        let (stride, padding, output_padding) = (a.array(0, [1; D])?, Padding::of(a, 1)?, a.array(2, [0; D])?);
        Ok(ConvTransposeOptions { stride, padding, output_padding, dilation: a.array(4, [1; D])?, groups })
    }
}

operations! {
    conv1d(3, 4) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv1d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv2d(3, 4) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv2d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv3d(3, 4) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv3d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv_transpose1d(3, 5) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose1d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    conv_transpose2d(3, 5) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose2d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    conv_transpose3d(3, 5) functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose3d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    unfold2d(1, 4) "nn.functional.unfold": NeuralNetwork, All -> Same, differentiable
        => |a| unfold(a.x(0)?, a.array(0, [1; 2])?, a.array(1, [1; 2])?, Padding::of(a, 2)?, a.array(3, [1; 2])?);
    fold(1, 5) functional: NeuralNetwork, Floats -> Same, differentiable => |a| {
        let (size, kernel, dilation) = (a.array(0, [1; 2])?, a.array(1, [1; 2])?, a.array(2, [1; 2])?);
        fold(a.x(0)?, size, kernel, dilation, Padding::of(a, 3)?, a.array(4, [1; 2])?)
    };
}
