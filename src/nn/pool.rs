//! Layers without parameters that change shapes.

use super::Module;
use crate::{AvgPoolOptions, MaxPoolOptions, Result, Tensor};

/// [`Tensor::max_pool2d`] (PyTorch's `nn.MaxPool2d`).
#[derive(Debug, Clone, Copy)]
pub struct MaxPool2d {
    /// Rows and columns of a window.
    pub kernel: [usize; 2],
    /// How windows move.
    pub options: MaxPoolOptions<2>,
}

impl MaxPool2d {
    /// Windows side by side.
    pub fn new(kernel: [usize; 2]) -> MaxPool2d {
        MaxPool2d { kernel, options: MaxPoolOptions::default() }
    }
}

impl Module for MaxPool2d {
    crate::parts!();

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.max_pool2d(self.kernel, self.options)
    }
}

/// [`Tensor::avg_pool2d`] (PyTorch's `nn.AvgPool2d`).
#[derive(Debug, Clone, Copy)]
pub struct AvgPool2d {
    /// Rows and columns of a window.
    pub kernel: [usize; 2],
    /// How windows move.
    pub options: AvgPoolOptions<2>,
}

impl AvgPool2d {
    /// Windows side by side.
    pub fn new(kernel: [usize; 2]) -> AvgPool2d {
        AvgPool2d { kernel, options: AvgPoolOptions::default() }
    }
}

impl Module for AvgPool2d {
    crate::parts!();

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.avg_pool2d(self.kernel, self.options)
    }
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
