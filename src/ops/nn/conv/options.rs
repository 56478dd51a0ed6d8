//! The options of convolutions, and their rows in the catalogue.

use crate::Result;
use crate::ops::dispatch::args::Args;
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
        let (stride, padding, dilation) = (a.array(0)?, Padding::of(a, 1)?, a.array(2)?);
        Ok(ConvOptions { stride, padding, dilation, groups: a.size(3)? })
    }
}

impl<const D: usize> ConvTransposeOptions<D> {
    fn of(a: &Args) -> Result<Self> {
        let (stride, padding, output_padding) = (a.array(0)?, Padding::of(a, 1)?, a.array(2)?);
        Ok(ConvTransposeOptions { stride, padding, output_padding, groups: a.size(3)?, dilation: a.array(4)? })
    }
}

operations! {
    conv1d(input: x, weight: x, bias: x?, stride: sizes = 1, padding: padding = 0, dilation: sizes = 1, groups: size = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv1d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv2d(input: x, weight: x, bias: x?, stride: sizes = 1, padding: padding = 0, dilation: sizes = 1, groups: size = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv2d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv3d(input: x, weight: x, bias: x?, stride: sizes = 1, padding: padding = 0, dilation: sizes = 1, groups: size = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv3d(a.x(1)?, a.optional(2), ConvOptions::of(a)?);
    conv_transpose1d(input: x, weight: x, bias: x?,
        stride: sizes = 1, padding: padding = 0, output_padding: sizes = 0, groups: size = 1, dilation: sizes = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose1d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    conv_transpose2d(input: x, weight: x, bias: x?,
        stride: sizes = 1, padding: padding = 0, output_padding: sizes = 0, groups: size = 1, dilation: sizes = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose2d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    conv_transpose3d(input: x, weight: x, bias: x?,
        stride: sizes = 1, padding: padding = 0, output_padding: sizes = 0, groups: size = 1, dilation: sizes = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| a.x(0)?.conv_transpose3d(a.x(1)?, a.optional(2), ConvTransposeOptions::of(a)?);
    unfold2d(input: x, kernel_size: sizes, dilation: sizes = 1, padding: padding = 0, stride: sizes = 1)
        "nn.functional.unfold": NeuralNetwork, All -> Same, differentiable
        => |a| unfold(a.x(0)?, a.array(0)?, a.array(1)?, Padding::of(a, 2)?, a.array(3)?);
    fold(input: x, output_size: sizes, kernel_size: sizes, dilation: sizes = 1, padding: padding = 0, stride: sizes = 1)
        functional: NeuralNetwork, Floats -> Same, differentiable
        => |a| fold(a.x(0)?, a.array(0)?, a.array(1)?, a.array(2)?, Padding::of(a, 3)?, a.array(4)?);
}
