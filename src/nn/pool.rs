//! Layers without parameters that change shapes.

use super::Module;
use crate::{AvgPoolOptions, MaxPoolOptions, Result, Tensor};

macro_rules! pools {
    ($($(#[$doc:meta])* $name:ident $options:ident $method:ident;)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            /// Rows and columns of a window.
            pub kernel: [usize; 2],
            /// How windows move.
            pub options: $options<2>,
        }

        impl $name {
            /// Windows side by side.
            pub fn new(kernel: [usize; 2]) -> $name {
                $name { kernel, options: $options::default() }
            }
        }

        impl Module for $name {
            crate::parts!();

            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$method(self.kernel, self.options)
            }
        }
    )* };
}

pools! {
    /// [`Tensor::max_pool2d`] (PyTorch's `nn.MaxPool2d`).
    MaxPool2d MaxPoolOptions max_pool2d;
    /// [`Tensor::avg_pool2d`] (PyTorch's `nn.AvgPool2d`).
    AvgPool2d AvgPoolOptions avg_pool2d;
}

/// [`Tensor::adaptive_avg_pool2d`] to this many rows and columns (PyTorch's `nn.AdaptiveAvgPool2d`).
#[derive(Debug, Clone, Copy)]
pub struct AdaptiveAvgPool2d(
    /// Rows and columns of the result.
    pub [usize; 2],
);

impl Module for AdaptiveAvgPool2d {
    crate::parts!();

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.adaptive_avg_pool2d(self.0)
    }
}

/// [`Tensor::flatten`] of the dims from the first to the second, which are all but the batch's unless said (PyTorch's
/// `nn.Flatten`).
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

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.flatten(self.0, self.1)
    }
}
