//! Layers without parameters that change shapes: pooling, flattening, and changes of the resolution.

use super::Module;
use crate::storage::Caller;
use crate::{AvgPoolOptions, Interpolation, MaxPoolOptions, Result, Tensor};

macro_rules! pool_layers {
    ($($(#[$doc:meta])* $name:ident $kernel:ty, $options:ty, $method:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            /// The size of a window.
            pub kernel: $kernel,
            /// Stride, padding and so on.
            pub options: $options,
        }

        impl $name {
            /// Creates a layer with adjacent windows that do not overlap.
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
    /// [`Tensor::max_pool1d`] (PyTorch's `nn.MaxPool1d`).
    MaxPool1d usize, MaxPoolOptions<1>, max_pool1d;
    /// [`Tensor::max_pool2d`] (PyTorch's `nn.MaxPool2d`).
    MaxPool2d [usize; 2], MaxPoolOptions<2>, max_pool2d;
    /// [`Tensor::max_pool3d`] (PyTorch's `nn.MaxPool3d`).
    MaxPool3d [usize; 3], MaxPoolOptions<3>, max_pool3d;
    /// [`Tensor::avg_pool1d`] (PyTorch's `nn.AvgPool1d`).
    AvgPool1d usize, AvgPoolOptions<1>, avg_pool1d;
    /// [`Tensor::avg_pool2d`] (PyTorch's `nn.AvgPool2d`).
    AvgPool2d [usize; 2], AvgPoolOptions<2>, avg_pool2d;
    /// [`Tensor::avg_pool3d`] (PyTorch's `nn.AvgPool3d`).
    AvgPool3d [usize; 3], AvgPoolOptions<3>, avg_pool3d;
}

/// Defines layers with one public field, the argument of the tensor method that they call.
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
    /// [`Tensor::adaptive_avg_pool1d`] (PyTorch's `nn.AdaptiveAvgPool1d`).
    AdaptiveAvgPool1d(usize) adaptive_avg_pool1d;
    /// [`Tensor::adaptive_avg_pool2d`] to these rows and columns (PyTorch's `nn.AdaptiveAvgPool2d`).
    AdaptiveAvgPool2d([usize; 2]) adaptive_avg_pool2d;
    /// [`Tensor::adaptive_avg_pool3d`] to these slices, rows and columns (PyTorch's `nn.AdaptiveAvgPool3d`).
    AdaptiveAvgPool3d([usize; 3]) adaptive_avg_pool3d;
    /// [`Tensor::adaptive_max_pool1d`] (PyTorch's `nn.AdaptiveMaxPool1d`).
    AdaptiveMaxPool1d(usize) adaptive_max_pool1d;
    /// [`Tensor::adaptive_max_pool2d`] to these rows and columns (PyTorch's `nn.AdaptiveMaxPool2d`).
    AdaptiveMaxPool2d([usize; 2]) adaptive_max_pool2d;
    /// [`Tensor::adaptive_max_pool3d`] to these slices, rows and columns (PyTorch's `nn.AdaptiveMaxPool3d`).
    AdaptiveMaxPool3d([usize; 3]) adaptive_max_pool3d;
}

/// [`Tensor::flatten`] of a range of dims, both ends included; by default all dims but the batch (PyTorch's `nn.Flatten`).
#[derive(Debug, Clone, Copy)]
pub struct Flatten(
    /// The first dim.
    pub isize,
    /// The last dim.
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
    /// [`Tensor::pixel_shuffle`] with factor r: r² channels become r by r pixels (PyTorch's `nn.PixelShuffle`).
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{Module, PixelShuffle}};
    /// let x = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([1, 4, 1, 1])?;
    /// assert_eq!(PixelShuffle(2).forward(&x)?.shape().dims(), [1, 1, 2, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    PixelShuffle(usize) pixel_shuffle;
    /// [`Tensor::pixel_unshuffle`], the inverse of [`PixelShuffle`] (PyTorch's `nn.PixelUnshuffle`).
    PixelUnshuffle(usize) pixel_unshuffle;
}

/// [`Tensor::interpolate`] of `[N, C, ..]` to spatial sizes multiplied by a factor (PyTorch's `nn.Upsample` with `scale_factor`).
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
    /// The factor of each spatial size; the products are rounded down.
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
