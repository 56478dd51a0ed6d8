//! What is composed of reductions: variances, standard deviations, extremes together, means around NaN.

use smallvec::SmallVec;

use super::ReduceDims;
use crate::autograd::{self, Saved};
use crate::backend::problem::map::Params;
use crate::backend::problem::reduction::Plan;
use crate::expr::Expr;
use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::{replaced, replaced_several};
use crate::ops::elementwise::apply;
use crate::ops::pair;
use crate::tensor::Layout;
use crate::{DType, Result, Scalar, Tensor, backend};

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new("var", "var", Kind::Reduction, Dtypes::Floats, Gives::Same, (1, 3), |a| {
        a.x(0)?.var(a.dims(0)?, a.size(1)?, a.bool(2)?)
    })
    .differentiable(),
    Operation::new("std", "std", Kind::Reduction, Dtypes::Floats, Gives::Same, (1, 3), |a| {
        a.x(0)?.std(a.dims(0)?, a.size(1)?, a.bool(2)?)
    })
    .differentiable(),
    Operation::several("var_mean", "var_mean", Kind::Reduction, Dtypes::Floats, Gives::Same, (1, 3), |a| {
        a.x(0)?.var_mean(a.dims(0)?, a.size(1)?, a.bool(2)?).map(|(v, m)| vec![v, m])
    })
    .differentiable(),
    Operation::several("std_mean", "std_mean", Kind::Reduction, Dtypes::Floats, Gives::Same, (1, 3), |a| {
        a.x(0)?.std_mean(a.dims(0)?, a.size(1)?, a.bool(2)?).map(|(s, m)| vec![s, m])
    })
    .differentiable(),
    Operation::several("aminmax", "aminmax", Kind::Reduction, Dtypes::All, Gives::Same, (1, 2), |a| {
        a.x(0)?.aminmax(a.dims(0)?, a.bool(1)?).map(|(l, g)| vec![l, g])
    })
    .differentiable(),
    Operation::new("nanmean", "nanmean", Kind::Reduction, Dtypes::Floats, Gives::Same, (1, 2), |a| {
        a.x(0)?.nanmean(a.dims(0)?, a.bool(1)?)
    })
    .differentiable(),
];

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
        replaced!("var", [self], &dims, correction, keepdim);
        if let Some(out) = in_rows("var", self, &dims, correction, keepdim, false)? {
            return Ok(out);
        }
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
        let (op, dims) = ("std", dims.into());
        replaced!(op, [self], &dims, correction, keepdim);
        if let Some(out) = in_rows(op, self, &dims, correction, keepdim, true)? {
            return Ok(out);
        }
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.std(dims, correction, keepdim)?.to_dtype(self.dtype);
        }
        let freedom = freedom(op, self, &dims, correction)?;
        let mask = dims.mask(op, self.shape())?;
        let x = self.detach();
        let deviations = x.sub(&x.mean(dims.clone(), true).map_err(|e| e.of(op))?)?;
        let kept = deviations.mul(&deviations)?.sum(dims.clone(), true)?.div_scalar(freedom)?.sqrt()?;
        let out = kept.detach().reshape(super::reduced_shape(self.shape(), &mask, keepdim))?;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (deviations, std) = (Saved::new(&deviations), Saved::new(&kept));
        Ok(autograd::record_twice(op, out, &[self], move |ctx| {
            let (deviations, std) = (deviations.unpack(op)?, std.unpack(op)?);
            if ctx.create_graph() {
                // What all elements have in common changes nothing: their deviations stand in for them.
                let variance = ctx.input(0, deviations).var(dims.clone(), correction, keepdim)?;
                let none = variance.eq_scalar(0)?;
                return ctx.through(&variance.masked_fill(&none, 1)?.sqrt()?.masked_fill(&none, 0)?);
            }
            let grad = super::spread(&ctx.grad()?, deviations.shape(), &mask, keepdim);
            Ok(SmallVec::from_iter([Some(derivative(&deviations, &std, &grad, freedom)?)]))
        }))
    }

    /// [`Tensor::var`] and the mean (PyTorch's `var_mean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    pub fn var_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced_several!("var_mean", [self], &dims, correction, keepdim; pair);
        let named = |r: Result<Tensor>| r.map_err(|e| e.of("var_mean"));
        Ok((named(self.var(dims.clone(), correction, keepdim))?, named(self.mean(dims, keepdim))?))
    }

    /// [`Tensor::std`] and the mean (PyTorch's `std_mean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    pub fn std_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced_several!("std_mean", [self], &dims, correction, keepdim; pair);
        let named = |r: Result<Tensor>| r.map_err(|e| e.of("std_mean"));
        Ok((named(self.std(dims.clone(), correction, keepdim))?, named(self.mean(dims, keepdim))?))
    }

    /// The least and the greatest element over `dims` (PyTorch's `aminmax`); NaN if there is one. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::max`].
    pub fn aminmax(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        replaced_several!("aminmax", [self], &dims, keepdim; pair);
        let named = |r: Result<Tensor>| r.map_err(|e| e.of("aminmax"));
        Ok((named(self.min(dims.clone(), keepdim))?, named(self.max(dims, keepdim))?))
    }

    /// The mean over `dims` of what is not NaN, of floats; NaN where all are (PyTorch's `nanmean`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mean`].
    pub fn nanmean(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let (op, dims) = ("nanmean", dims.into());
        replaced!(op, [self], &dims, keepdim);
        self.dtype.check_float(op)?;
        // The sum of many halves overflows before the mean does.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.nanmean(dims, keepdim)?.to_dtype(self.dtype);
        }
        let named = |r: Result<Tensor>| r.map_err(|e| e.of(op));
        let count = named(self.detach().isnan()?.logical_not()?.sum(dims.clone(), keepdim))?;
        named(self.nansum(dims, keepdim))?.div(&count.to_dtype(self.dtype)?)
    }
}

/// The variances, or with `root` the standard deviations, where GPUs have them in one go: of what nobody differentiates and whose
/// elements lie closer together than neighbouring results. One launch, two for long rows.
fn in_rows(
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
    let plan = Plan::new(&t.layout, &mask, false);
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
    let freedom = plan.n.saturating_sub(correction) as f64;
    Ok(backend.variance(&rows, &out, freedom, root)?.then_some(out))
}

/// What the sum of squares is divided by: how many elements a result is of, less the correction.
fn freedom(op: &'static str, t: &Tensor, dims: &ReduceDims, correction: usize) -> Result<f64> {
    let mask = dims.mask(op, t.shape())?;
    let n: usize = t.shape().dims().iter().zip(&mask).filter(|(_, r)| **r).map(|(&d, _)| d).product();
    Ok(n.saturating_sub(correction) as f64)
}

/// `grad * x / (root * n)`: the gradient of `root = sqrt(sum(x²) / n)`, 0 where the root is.
fn derivative(x: &Tensor, root: &Tensor, grad: &Tensor, n: f64) -> Result<Tensor> {
    let (e, params) = (Expr::input(1), Params { scalars: &[Scalar::Float(n)], seeds: &[] });
    let derivative = e.eq(0.0).select(0.0, Expr::input(0) / (&e * Expr::scalar(0))) * Expr::input(2);
    Ok(apply("sqrt", &[x, root, grad], params, &[derivative], &[x.dtype])?.remove(0))
}
