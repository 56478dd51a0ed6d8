//! Layers without parameters that change shapes: pooling, flattening, and resizing.

use super::Module;
use crate::storage::Caller;
use crate::{AvgPoolOptions, Interpolation, MaxPoolOptions, Result, Tensor};

macro_rules! pool_layers {
    ($($(#[$doc:meta])* $name:ident $kernel:ty, $options:ty, $method:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            /// The size of the window in each spatial dim.
            pub kernel: $kernel,
            /// The stride, the padding and other options.
            pub options: $options,
        }

        impl $name {
            /// Creates a layer whose windows are adjacent and do not overlap.
            pub fn new(kernel: $kernel) -> $name {
                $name { kernel, options: <$options>::default() }
            }
        }

        impl Module for $name {
            crate::parts!();

            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$method(self.kernel, self.options)
            }
        }
    )* };
}

pool_layers! {
    /// Applies [`Tensor::max_pool1d`] (PyTorch's `nn.MaxPool1d`).
    MaxPool1d usize, MaxPoolOptions<1>, max_pool1d;
    /// Applies [`Tensor::max_pool2d`] (PyTorch's `nn.MaxPool2d`).
    MaxPool2d [usize; 2], MaxPoolOptions<2>, max_pool2d;
    /// Applies [`Tensor::max_pool3d`] (PyTorch's `nn.MaxPool3d`).
    MaxPool3d [usize; 3], MaxPoolOptions<3>, max_pool3d;
    /// Applies [`Tensor::avg_pool1d`] (PyTorch's `nn.AvgPool1d`).
    AvgPool1d usize, AvgPoolOptions<1>, avg_pool1d;
    /// Applies [`Tensor::avg_pool2d`] (PyTorch's `nn.AvgPool2d`).
    AvgPool2d [usize; 2], AvgPoolOptions<2>, avg_pool2d;
    /// Applies [`Tensor::avg_pool3d`] (PyTorch's `nn.AvgPool3d`).
    AvgPool3d [usize; 3], AvgPoolOptions<3>, avg_pool3d;
}

/// Defines layers whose only field is public. The field is the argument of the tensor method that the layer applies.
macro_rules! tuple_layers {
    ($field_doc:literal; $($(#[$doc:meta])* $name:ident($field:ty) $method:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name(
            #[doc = $field_doc]
            pub $field,
        );

        impl Module for $name {
            crate::parts!();

            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$method(self.0)
            }
        }
    )* };
}
pub(super) use tuple_layers;

tuple_layers! {
    "The size of the result.";
    /// Applies [`Tensor::adaptive_avg_pool1d`] (PyTorch's `nn.AdaptiveAvgPool1d`).
    AdaptiveAvgPool1d(usize) adaptive_avg_pool1d;
    /// Applies [`Tensor::adaptive_avg_pool2d`] with this number of output rows and columns (PyTorch's `nn.AdaptiveAvgPool2d`).
    AdaptiveAvgPool2d([usize; 2]) adaptive_avg_pool2d;
    /// Applies [`Tensor::adaptive_avg_pool3d`] with this number of output slices, rows and columns (PyTorch's `nn.AdaptiveAvgPool3d`).
    AdaptiveAvgPool3d([usize; 3]) adaptive_avg_pool3d;
    /// Applies [`Tensor::adaptive_max_pool1d`] (PyTorch's `nn.AdaptiveMaxPool1d`).
    AdaptiveMaxPool1d(usize) adaptive_max_pool1d;
    /// Applies [`Tensor::adaptive_max_pool2d`] with this number of output rows and columns (PyTorch's `nn.AdaptiveMaxPool2d`).
    AdaptiveMaxPool2d([usize; 2]) adaptive_max_pool2d;
    /// Applies [`Tensor::adaptive_max_pool3d`] with this number of output slices, rows and columns (PyTorch's `nn.AdaptiveMaxPool3d`).
    AdaptiveMaxPool3d([usize; 3]) adaptive_max_pool3d;
}

/// Applies [`Tensor::flatten`] to a range of dims, both ends included. By default all dims except the batch (PyTorch's `nn.Flatten`).
#[derive(Debug, Clone, Copy)]
pub struct Flatten(
    /// The first dim of the range.
    pub isize,
    /// The last dim of the range.
    pub isize,
);

impl Default for Flatten {
    fn default() -> Flatten {
        Flatten(1, -1)
    }
}

impl Module for Flatten {
    crate::parts!();

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        x.flatten(self.0, self.1)
    }
}

tuple_layers! {
    "The factor by which rows and columns change.";
    /// Applies [`Tensor::pixel_shuffle`] with factor r: groups of r² channels become blocks of r by r pixels (PyTorch's `nn.PixelShuffle`).
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{Module, PixelShuffle}};
    /// let x = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([1, 4, 1, 1])?;
    /// assert_eq!(PixelShuffle(2).forward(&x)?.shape().dims(), [1, 1, 2, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    PixelShuffle(usize) pixel_shuffle;
    /// Applies [`Tensor::pixel_unshuffle`], the inverse of [`PixelShuffle`] (PyTorch's `nn.PixelUnshuffle`).
    PixelUnshuffle(usize) pixel_unshuffle;
}

/// Resizes `[N, C, ..]` with [`Tensor::interpolate`], multiplying each spatial size by a factor (PyTorch's `nn.Upsample(scale_factor)`).
///
/// ```
/// use claystone::{Device, Interpolation, Tensor, nn::{Module, Upsample}};
/// let x = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([1, 1, 2, 2])?;
/// let y = Upsample { scale_factor: 2.0, mode: Interpolation::Nearest }.forward(&x)?;
/// assert_eq!(y.i((0, 0, 3))?.to_vec::<f32>()?, [2.0, 2.0, 3.0, 3.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Upsample {
    /// The factor of each spatial size. The resulting sizes are rounded down.
    pub scale_factor: f64,
    /// The interpolation method.
    pub mode: Interpolation,
}

impl Module for Upsample {
    crate::parts!();

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scaled = |&n: &usize| (n as f64 * self.scale_factor) as usize;
        let sizes: Vec<usize> = x.shape().dims().iter().skip(2).map(scaled).collect();
        x.interpolate(&sizes, self.mode)
    }
}
