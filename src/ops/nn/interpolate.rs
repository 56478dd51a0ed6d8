//! Resizing of images: nearest and linear interpolation, and pixel shuffle.

use crate::backend::problem::interpolation::{Interpolate, Interpolation, Resize, Samples};
use crate::backend::problem::windows::sizes_4d;
use crate::ops::dispatch::prelude::*;

impl Interpolation {
    fn from_args(a: &Args) -> Result<Interpolation> {
        match a.text(1)? {
            mode if mode != "linear" && a.bool(2)? => {
                fail!("interpolate", "align_corners needs the mode linear, not {mode}")
            }
            "nearest" => Ok(Interpolation::Nearest),
            "nearest-exact" => Ok(Interpolation::NearestExact),
            "linear" => Ok(Interpolation::Linear { align_corners: a.bool(2)? }),
            _ => a.argument_error(1, "nearest, nearest-exact or linear"),
        }
    }
}

impl From<Interpolation> for Argument {
    fn from(mode: Interpolation) -> Argument {
        mode.name().into()
    }
}

impl Resize {
    pub(crate) fn is_linear(&self) -> bool {
        self.rows.or(self.columns).is_some_and(|samples| samples.linear)
    }

    fn forward(self, op: &'static str, x: &Tensor) -> Result<Tensor> {
        let out = self.resize(x, false)?;
        Ok(autograd::record_unary_differentiable(op, out, x, move |grad| self.backward(op, &grad)))
    }

    fn backward(self, op: &'static str, grad: &Tensor) -> Result<Tensor> {
        let out = self.resize(grad, true)?;
        Ok(autograd::record_unary_differentiable(op, out, grad, move |grad| self.forward(op, &grad)))
    }

    fn resize(&self, x: &Tensor, transposed: bool) -> Result<Tensor> {
        let [n, c, h, w] = sizes_4d(x);
        let [h, w] = [(self.rows, h), (self.columns, w)]
            .map(|(samples, n)| samples.map_or(n, |samples| if transposed { samples.from } else { samples.to }));
        backend::compute([n, c, h, w], x.dtype, x.device(), |b, out| {
            b.interpolate(&Interpolate { resize: self, x, out, transposed })
        })
    }
}

impl Tensor {
    /// Resizes all dims after the first two of images `[N, C, ..]` to `size` (PyTorch's `interpolate` with a `size`). Floats.
    /// Differentiable.
    ///
    /// Images can have any number of dims; two dims take one launch, and each further dim one more. Linear interpolation of f16 and bf16
    /// in three or more dims takes two more launches. Fails with [`Error::Invalid`] for sizes that are 0 or too large for any memory, and
    /// for a wrong number of sizes.
    ///
    /// ```
    /// use claystone::{Device, Interpolation, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0], [1, 1, 2], Device::Cpu)?;
    /// assert_eq!(x.interpolate(&[4], Interpolation::Nearest)?.to_vec::<f32>()?, [1.0, 1.0, 3.0, 3.0]);
    /// let linear = Interpolation::Linear { align_corners: false };
    /// assert_eq!(x.interpolate(&[4], linear)?.to_vec::<f32>()?, [1.0, 1.5, 2.5, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn interpolate(&self, size: &[usize], mode: Interpolation) -> Result<Tensor> {
        return_replacement!(op = "interpolate", [self], size, mode, mode.align_corners());
        self.dtype.check_float(op)?;
        invalid!(op if size.is_empty() || self.rank() != size.len() + 2,
            "the input is [N, C, ..] with a dim for each of {} sizes, not {}", size.len(), self.shape());
        invalid!(op if size.iter().chain(&self.shape().dims()[2..]).any(|&n| n == 0),
            "all sizes must be above 0: {} cannot be resized to {size:?}", self.shape());
        let dims = self.shape().dims();
        let samples = |d: usize| Samples::new(op, mode, dims[2 + d], size[d]);
        // The last two dims are resized together, then the other dims one by one. Linear modes compute at least in f32 and round only at
        // the end.
        let last = size.len() - 1;
        let first = last.saturating_sub(1);
        let wide = match mode {
            Interpolation::Linear { .. } if first > 0 => self.to_dtype(self.dtype.compute().dtype())?,
            _ => self.shallow_clone(),
        };
        let rows = if last > 0 { Some(samples(first)?) } else { None };
        let high = if last > 0 { dims[2 + first] } else { 1 };
        let product = |dims: &[usize]| dims.iter().fold(1, |product: usize, &n| product.saturating_mul(n));
        let planes = |d: usize| product(&dims[1..2 + d]);
        let images = wide.reshape([dims[0], planes(first), high, dims[2 + last]])?;
        let mut out = Resize { rows, columns: Some(samples(last)?) }.forward(op, &images)?;
        for d in (0..first).rev() {
            let images = out.reshape([dims[0], planes(d), dims[2 + d], product(&size[d + 1..])])?;
            out = Resize { rows: Some(samples(d)?), columns: None }.forward(op, &images)?;
        }
        out.reshape(dims[..2].iter().chain(size).copied().collect::<Shape>())?.to_dtype(self.dtype)
    }

    /// Returns the dims before the last three, and the last three.
    fn split_image_dims(&self, op: &'static str) -> Result<(&[usize], [usize; 3])> {
        match self.shape().dims() {
            [rest @ .., c, h, w] => Ok((rest, [*c, *h, *w])),
            _ => fail!(op, "images are [.., C, H, W], not of shape {}", self.shape()),
        }
    }
}

operations! {
    interpolate(input: x, size: sizes, mode: text = "nearest", align_corners: bool = false) functional:
        NeuralNetwork, Floats -> Same, differentiable => |a| a.tensor(0)?.interpolate(&a.sizes(0)?, Interpolation::from_args(a)?);
    /// Rearranges `[.., C r², H, W]` to `[.., C, H r, W r]`: r² channels of one pixel become a block of r x r pixels (PyTorch's
    /// `pixel_shuffle`). Differentiable. Fails with [`Error::Invalid`] for fewer than three dims, and if the channels are not
    /// divisible by r².
    pixel_shuffle(input: x, upscale_factor: size) functional:
        NeuralNetwork, All -> Same, differentiable = |op, self, r| {
        let (rest, [c, h, w]) = self.split_image_dims(op)?;
        let square = r.saturating_mul(r);
        invalid!(op if square == 0 || !c.is_multiple_of(square), "{c} channels are not a multiple of {r} squared");
        let n: usize = rest.iter().product();
        let parts = self.reshape([n, c / square, r, r, h, w])?.permute(&[0, 1, 4, 2, 5, 3])?;
        parts.reshape(rest.iter().copied().chain([c / square, h * r, w * r]).collect::<Shape>())
    };
    /// Rearranges `[.., C, H r, W r]` to `[.., C r², H, W]`, the inverse of [`Tensor::pixel_shuffle`] (PyTorch's `pixel_unshuffle`).
    /// Differentiable. Fails with [`Error::Invalid`] for fewer than three dims, and if the last two dims are not divisible by r.
    pixel_unshuffle(input: x, downscale_factor: size) functional:
        NeuralNetwork, All -> Same, differentiable = |op, self, r| {
        let (rest, [c, h, w]) = self.split_image_dims(op)?;
        invalid!(op if r == 0 || !h.is_multiple_of(r) || !w.is_multiple_of(r),
            "images of {h} x {w} cannot be divided into blocks of {r} x {r}");
        let n: usize = rest.iter().product();
        let parts = self.reshape([n, c, h / r, r, w / r, r])?.permute(&[0, 1, 3, 5, 2, 4])?;
        parts.reshape(rest.iter().copied().chain([c * r * r, h / r, w / r]).collect::<Shape>())
    };
}
