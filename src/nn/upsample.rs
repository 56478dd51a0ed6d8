//! Layers without parameters that change the resolution of images.

use super::Module;
use crate::storage::Caller;
use crate::{Interpolation, Result, Tensor};

/// [`Tensor::pixel_shuffle`] with factor r: r² channels become r by r pixels (PyTorch's `nn.PixelShuffle`).
///
/// ```
/// use claystone::{Device, Tensor, nn::{Module, PixelShuffle}};
/// let x = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([1, 4, 1, 1])?;
/// assert_eq!(PixelShuffle(2).forward(&x)?.shape().dims(), [1, 1, 2, 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PixelShuffle(
    /// The upscale factor.
    pub usize,
);

impl Module for PixelShuffle {
    crate::parts!();

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        x.pixel_shuffle(self.0)
    }
}

/// [`Tensor::pixel_unshuffle`], the inverse of [`PixelShuffle`] (PyTorch's `nn.PixelUnshuffle`).
#[derive(Debug, Clone, Copy)]
pub struct PixelUnshuffle(
    /// The downscale factor.
    pub usize,
);

impl Module for PixelUnshuffle {
    crate::parts!();

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        x.pixel_unshuffle(self.0)
    }
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
        let _caller = Caller::enter();
        let scaled = |&n: &usize| (n as f64 * self.scale_factor) as usize;
        let sizes: Vec<usize> = x.shape().dims().iter().skip(2).map(scaled).collect();
        x.interpolate(&sizes, self.mode)
    }
}
