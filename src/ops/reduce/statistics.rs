//! What is composed of reductions: variance, standard deviation, norm.

use super::ReduceDims;
use crate::autograd::{self, Saved};
use crate::ops::autocast::widened;
use crate::ops::elementwise::{Params, apply};
use crate::ops::expr::Expr;
use crate::tensor::Layout;
use crate::{DType, Result, Scalar, Tensor};

impl Tensor {
    /// The variance over `dims`: squared deviations from the mean, summed and divided by their number less `correction`
    /// (PyTorch's `var`, whose default correction is 1; 0 is the population's). Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], 4, Device::Cpu)?;
    /// assert_eq!(t.var((), 0, false)?.item::<f32>()?, 1.25);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    pub fn var(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        let dims = dims.into();
        // The square of a half overflows at 256.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.var(dims, correction, keepdim)?.to_dtype(self.dtype);
        }
        let freedom = freedom("var", self, &dims, correction)?;
        let deviations = self.sub(&self.mean(dims.clone(), true).map_err(|e| e.of("var"))?)?;
        deviations.mul(&deviations)?.sum(dims, keepdim)?.div_scalar(freedom)
    }

    /// The square root of [`Tensor::var`] (PyTorch's `std`). Differentiable; at 0 the gradient is 0.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    pub fn std(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.std(dims, correction, keepdim)?.to_dtype(self.dtype);
        }
        let (op, dims) = ("std", dims.into());
        let freedom = freedom(op, self, &dims, correction)?;
        let mask = dims.mask(op, self.shape())?;
        let x = self.detach();
        let deviations = x.sub(&x.mean(dims.clone(), true).map_err(|e| e.of(op))?)?;
        let kept = deviations.mul(&deviations)?.sum(dims, true)?.div_scalar(freedom)?.sqrt()?;
        let out = kept.with_layout(Layout::contiguous(super::reduced_shape(self.shape(), &mask, keepdim)));
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (deviations, std) = (Saved::new(&deviations), Saved::new(&kept));
        Ok(autograd::record_unary(op, out, self, move |grad| {
            let (deviations, std) = (deviations.unpack(op)?, std.unpack(op)?);
            slope(&deviations, &std, &super::spread(&grad, deviations.shape(), &mask, keepdim), freedom)
        }))
    }

    /// The Euclidean norm over `dims` (PyTorch's `linalg.vector_norm`). Differentiable; at 0 the gradient is 0.
    ///
    /// # Errors
    /// As [`Tensor::sum`]; [`crate::Error::UnsupportedDType`] for integers and bool.
    pub fn norm(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let op = "norm";
        self.dtype.check_float(op)?;
        if let Some(wide) = widened(&[self])? {
            return wide[0].norm(dims, keepdim);
        }
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.norm(dims, keepdim)?.to_dtype(self.dtype);
        }
        let dims = dims.into();
        let mask = dims.mask(op, self.shape())?;
        let x = self.detach();
        let squares = x.mul(&x)?;
        let kept = squares.sum(dims, true)?.sqrt()?;
        let shape = super::reduced_shape(self.shape(), &mask, keepdim);
        let out = kept.with_layout(Layout::contiguous(shape));
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, norm) = (Saved::new(&x), Saved::new(&kept));
        Ok(autograd::record_unary(op, out, self, move |grad| {
            let (x, norm) = (x.unpack(op)?, norm.unpack(op)?);
            slope(&x, &norm, &super::spread(&grad, x.shape(), &mask, keepdim), 1.0)
        }))
    }
}

/// What the sum of squares is divided by: how many elements a result is of, less the correction.
fn freedom(op: &'static str, t: &Tensor, dims: &ReduceDims, correction: usize) -> Result<f64> {
    let mask = dims.mask(op, t.shape())?;
    let n: usize = t.shape().dims().iter().zip(&mask).filter(|(_, r)| **r).map(|(&d, _)| d).product();
    Ok(n.saturating_sub(correction) as f64)
}

/// `grad * x / (root * n)`: the gradient of `root = sqrt(sum(x²) / n)`, 0 where the root is.
fn slope(x: &Tensor, root: &Tensor, grad: &Tensor, n: f64) -> Result<Tensor> {
    let (e, params) = (Expr::input(1), Params { scalars: &[Scalar::Float(n)], seeds: &[] });
    let slope = e.eq(0.0).select(0.0, Expr::input(0) / (&e * Expr::scalar(0))) * Expr::input(2);
    Ok(apply("sqrt", &[x, root, grad], params, &[slope], &[x.dtype])?.remove(0))
}
