//! The options of convolutions and their entries in the catalogue.

use crate::ops::dispatch::prelude::*;
use crate::ops::nn::padding::Padding;
use crate::ops::nn::window::{fold, unfold};

options! {
    /// Options of [`conv2d`](crate::Tensor::conv2d) and the other convolutions, with PyTorch's defaults.
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
        /// The distance between adjacent windows, in elements.
        pub stride: [usize; D] = [1; D],
        /// The number of zeros added around the image.
        pub padding: Padding<D> = Padding::Valid,
        /// The distance between adjacent elements of a window, in elements.
        pub dilation: [usize; D] = [1; D],
        /// The number of groups that the channels are divided into. Each group is convolved separately.
        pub groups: usize = 1,
    }

    /// Options of [`conv_transpose2d`](crate::Tensor::conv_transpose2d) and the other transposed convolutions, with PyTorch's defaults.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ConvTransposeOptions<const D: usize> {
        /// The distance between adjacent windows in the result, in elements.
        pub stride: [usize; D] = [1; D],
        /// The number of elements removed from the sides of the result.
        pub padding: Padding<D> = Padding::Valid,
        /// The number of elements added at the end of each dim of the result.
        pub output_padding: [usize; D] = [0; D],
        /// The distance between adjacent elements of a window, in elements.
        pub dilation: [usize; D] = [1; D],
        /// The number of groups that the channels are divided into. Each group is convolved separately.
        pub groups: usize = 1,
    }
}

impl<const D: usize> ConvOptions<D> {
    pub(super) fn arguments(self) -> Vec<Argument> {
        vec![(&self.stride).into(), self.padding.into(), (&self.dilation).into(), self.groups.into()]
    }

    fn from_args(a: &Args) -> Result<Self> {
        let (stride, padding, dilation) = (a.spatial_sizes(0)?, Padding::from_args(a, 1)?, a.spatial_sizes(2)?);
        Ok(ConvOptions { stride, padding, dilation, groups: a.size(3)? })
    }
}

impl<const D: usize> ConvTransposeOptions<D> {
    pub(super) fn arguments(self) -> Vec<Argument> {
        let ConvTransposeOptions { stride, padding, output_padding, dilation, groups } = self;
        vec![(&stride).into(), padding.into(), (&output_padding).into(), groups.into(), (&dilation).into()]
    }

    fn from_args(a: &Args) -> Result<Self> {
        let (stride, padding, output_padding) = (a.spatial_sizes(0)?, Padding::from_args(a, 1)?, a.spatial_sizes(2)?);
        Ok(ConvTransposeOptions { stride, padding, output_padding, groups: a.size(3)?, dilation: a.spatial_sizes(4)? })
    }
}

/// Generates the catalogue entries of the convolutions over one, two and three dims, and of unfold and fold.
macro_rules! convolution_operations {
    ($($conv:ident)*; $($transposed:ident)*) => {
        operations! {
            $($conv(input: x, weight: x, bias: x?, stride: sizes = 1, padding: padding = 0, dilation: sizes = 1, groups: size = 1)
                functional: NeuralNetwork, Floats -> Same, differentiable
                => |a| a.tensor(0)?.$conv(a.tensor(1)?, a.optional_tensor(2), ConvOptions::from_args(a)?);)*
            $($transposed(input: x, weight: x, bias: x?,
                stride: sizes = 1, padding: padding = 0, output_padding: sizes = 0, groups: size = 1, dilation: sizes = 1)
                functional: NeuralNetwork, Floats -> Same, differentiable
                => |a| a.tensor(0)?.$transposed(a.tensor(1)?, a.optional_tensor(2), ConvTransposeOptions::from_args(a)?);)*
            unfold2d(input: x, kernel_size: sizes, dilation: sizes = 1, padding: padding = 0, stride: sizes = 1)
                "nn.functional.unfold": NeuralNetwork, All -> Same, differentiable
                => |a| unfold(a.tensor(0)?, a.spatial_sizes(0)?, a.spatial_sizes(1)?, Padding::from_args(a, 2)?, a.spatial_sizes(3)?);
            fold(input: x, output_size: sizes, kernel_size: sizes, dilation: sizes = 1, padding: padding = 0, stride: sizes = 1)
                functional: NeuralNetwork, Floats -> Same, differentiable
                => |a| fold(a.tensor(0)?, a.spatial_sizes(0)?, a.spatial_sizes(1)?, a.spatial_sizes(2)?, Padding::from_args(a, 3)?, a.spatial_sizes(4)?);
        }
    };
}

convolution_operations! { conv1d conv2d conv3d; conv_transpose1d conv_transpose2d conv_transpose3d }
