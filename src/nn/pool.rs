//! Layers without parameters that change shapes.

use super::Module;
use crate::storage::Caller;
use crate::{AvgPoolOptions, MaxPoolOptions, Result, Tensor};

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
                let _caller = Caller::enter();
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

macro_rules! adaptive_pool_layers {
    ($($(#[$doc:meta])* $name:ident $size:ty, $method:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name(
            /// The size of the result.
            pub $size,
        );

        impl Module for $name {
            crate::parts!();

            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let _caller = Caller::enter();
                x.$method(self.0)
            }
        }
    )* };
}

adaptive_pool_layers! {
    /// [`Tensor::adaptive_avg_pool1d`] (PyTorch's `nn.AdaptiveAvgPool1d`).
    AdaptiveAvgPool1d usize, adaptive_avg_pool1d;
    /// [`Tensor::adaptive_avg_pool2d`] to these rows and columns (PyTorch's `nn.AdaptiveAvgPool2d`).
    AdaptiveAvgPool2d [usize; 2], adaptive_avg_pool2d;
    /// [`Tensor::adaptive_avg_pool3d`] to these slices, rows and columns (PyTorch's `nn.AdaptiveAvgPool3d`).
    AdaptiveAvgPool3d [usize; 3], adaptive_avg_pool3d;
    /// [`Tensor::adaptive_max_pool1d`] (PyTorch's `nn.AdaptiveMaxPool1d`).
    AdaptiveMaxPool1d usize, adaptive_max_pool1d;
    /// [`Tensor::adaptive_max_pool2d`] to these rows and columns (PyTorch's `nn.AdaptiveMaxPool2d`).
    AdaptiveMaxPool2d [usize; 2], adaptive_max_pool2d;
    /// [`Tensor::adaptive_max_pool3d`] to these slices, rows and columns (PyTorch's `nn.AdaptiveMaxPool3d`).
    AdaptiveMaxPool3d [usize; 3], adaptive_max_pool3d;
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
