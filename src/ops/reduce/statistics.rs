//! Variance, standard deviation, `aminmax` and `nanmean`.

use smallvec::SmallVec;

use super::ReduceDims;
use crate::autograd::{self, Saved};
use crate::backend::problem::map::Params;
use crate::backend::problem::reduction::ReductionPlan;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;
use crate::tensor::Layout;
use crate::{DType, Expr, Result, Scalar, Tensor, backend};

operations! {
    var(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    std(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    var_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    std_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    aminmax(input: x, dim: dims, keepdim: bool = false): Reduction, All -> Same, differentiable;
    nanmean(input: x, dim: dims, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
}

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
    #[track_caller]
    pub fn var(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        let dims = dims.into();
        replaced!("var", [self], &dims, correction, keepdim);
        if let Some(out) = fused_variance("var", self, &dims, correction, keepdim, false)? {
            return Ok(out);
        }
        // The square of a half overflows at 256.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.var(dims, correction, keepdim)?.to_dtype(self.dtype);
        }
        let degrees_of_freedom = degrees_of_freedom("var", self, &dims, correction)?;
        let deviations = self.sub(&self.mean(dims.clone(), true).named("var")?)?;
        deviations.mul(&deviations)?.sum(dims, keepdim)?.div_scalar(degrees_of_freedom)
    }

    /// The square root of [`Tensor::var`] (PyTorch's `std`). Differentiable; at 0 the gradient is 0.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    #[track_caller]
    pub fn std(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        let (op, dims) = ("std", dims.into());
        replaced!(op, [self], &dims, correction, keepdim);
        if let Some(out) = fused_variance(op, self, &dims, correction, keepdim, true)? {
            return Ok(out);
        }
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.std(dims, correction, keepdim)?.to_dtype(self.dtype);
        }
        let degrees_of_freedom = degrees_of_freedom(op, self, &dims, correction)?;
        let mask = dims.mask(op, self.shape())?;
        let x = self.detach();
        let deviations = x.sub(&x.mean(dims.clone(), true).named(op)?)?;
        let kept = deviations.mul(&deviations)?.sum(dims.clone(), true)?.div_scalar(degrees_of_freedom)?.sqrt()?;
        let out = kept.detach().reshape(super::reduced_shape(self.shape(), &mask, keepdim))?;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (deviations, std) = (Saved::new(&deviations), Saved::new(&kept));
        Ok(autograd::record_twice(op, out, &[self], move |ctx| {
            let (deviations, std) = (deviations.unpack(op)?, std.unpack(op)?);
            if ctx.create_graph() {
                // The variance of the deviations is that of the elements.
                let variance = ctx.input(0, deviations).var(dims.clone(), correction, keepdim)?;
                let none = variance.eq_scalar(0)?;
                return ctx.through(&variance.masked_fill(&none, 1)?.sqrt()?.masked_fill(&none, 0)?);
            }
            let grad = super::expand_reduced(&ctx.grad()?, deviations.shape(), &mask, keepdim);
            Ok(SmallVec::from_iter([Some(derivative(&deviations, &std, &grad, degrees_of_freedom)?)]))
        }))
    }

    /// [`Tensor::var`] and the mean (PyTorch's `var_mean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    #[track_caller]
    pub fn var_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced!("var_mean", [self], &dims, correction, keepdim);
        Ok((
            self.var(dims.clone(), correction, keepdim).named("var_mean")?,
            self.mean(dims, keepdim).named("var_mean")?,
        ))
    }

    /// [`Tensor::std`] and the mean (PyTorch's `std_mean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    #[track_caller]
    pub fn std_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced!("std_mean", [self], &dims, correction, keepdim);
        Ok((
            self.std(dims.clone(), correction, keepdim).named("std_mean")?,
            self.mean(dims, keepdim).named("std_mean")?,
        ))
    }

    /// The least and the greatest element over `dims` (PyTorch's `aminmax`); NaN if there is one. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::max`].
    #[track_caller]
    pub fn aminmax(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced!("aminmax", [self], &dims, keepdim);
        Ok((self.min(dims.clone(), keepdim).named("aminmax")?, self.max(dims, keepdim).named("aminmax")?))
    }

    /// The mean over `dims` of what is not NaN, of floats; NaN where all are (PyTorch's `nanmean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    #[track_caller]
    pub fn nanmean(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let (op, dims) = ("nanmean", dims.into());
        replaced!(op, [self], &dims, keepdim);
        self.dtype.check_float(op)?;
        // The sum of many halves overflows before the mean does.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.nanmean(dims, keepdim)?.to_dtype(self.dtype);
        }
        let count = self.detach().isnan()?.logical_not()?.sum(dims.clone(), keepdim).named(op)?;
        self.nansum(dims, keepdim).named(op)?.div(&count.to_dtype(self.dtype)?)
    }
}

/// The variances, or with `root` the standard deviations, where GPUs have them in one go: of what nobody differentiates and whose
/// elements lie closer together than neighbouring results. One launch, two for long rows.
fn fused_variance(
    op: &'static str,
    t: &Tensor,
    dims: &ReduceDims,
    correction: usize,
    keepdim: bool,
    root: bool,
) -> Result<Option<Tensor>> {
    let backend = backend::of(t.device());
    if !backend.has_variance() || !t.dtype.is_float() || t.numel() == 0 || autograd::is_tracked(&[t]) {
        return Ok(None);
    }
    let mask = dims.mask(op, t.shape())?;
    let plan = ReductionPlan::new(&t.layout, &mask, false);
    if plan.by_column() || plan.kept.rank() > 2 || plan.reduced.rank() > 2 {
        return Ok(None);
    }
    let mut rows = Layout::contiguous([1; 4].into());
    let mut sizes = [1; 4];
    for (axes, end) in [(&plan.kept, 2), (&plan.reduced, 4)] {
        let from = end - axes.rank();
        sizes[from..end].copy_from_slice(&axes.sizes);
        rows.strides[from..end].copy_from_slice(&axes.strides);
    }
    let rows = t.with_layout(Layout { shape: sizes.into(), offset: plan.start, ..rows });
    let out = Tensor::empty_like_shape(super::reduced_shape(t.shape(), &mask, keepdim), t.dtype, t.device())?;
    let degrees_of_freedom = plan.n.saturating_sub(correction) as f64;
    Ok(backend.variance(&rows, &out, degrees_of_freedom, root)?.then_some(out))
}

/// What the sum of squares is divided by: how many elements a result is of, less the correction.
fn degrees_of_freedom(op: &'static str, t: &Tensor, dims: &ReduceDims, correction: usize) -> Result<f64> {
    let mask = dims.mask(op, t.shape())?;
    Ok(super::reduced_count(t.shape(), &mask).saturating_sub(correction) as f64)
}

/// `grad * x / (root * n)`: the gradient of `root = sqrt(sum(x²) / n)`, 0 where the root is.
fn derivative(x: &Tensor, root: &Tensor, grad: &Tensor, n: f64) -> Result<Tensor> {
    let (e, n) = (Expr::input(1), [Scalar::Float(n)]);
    let params = Params::of(&n);
    let derivative = e.eq(0.0).select(0.0, Expr::input(0) / (&e * Expr::scalar(0))) * Expr::input(2);
    Ok(apply("sqrt", &[x, root, grad], params, &[derivative], &[x.dtype])?.remove(0))
}
