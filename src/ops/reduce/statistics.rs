//! Variance, standard deviation, `aminmax` and `nanmean`.

use std::sync::LazyLock;

use super::ReduceDims;
use crate::backend::problem::norm;
use crate::backend::problem::reduction::{Combination, Element, Reduction, ReductionPlan, Rescaled, Rule};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;

operations! {
    var(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    std(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    var_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    std_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
    aminmax(input: x, dim: dims, keepdim: bool = false): Reduction, All -> Same, differentiable;
    nanmean(input: x, dim: dims, keepdim: bool = false): Reduction, Floats -> Same, differentiable;
}

impl Tensor {
    /// Returns the variance over `dims`: the sum of squared deviations from the mean, divided by the number of elements minus
    /// `correction` (PyTorch's `var`, with a default correction of 1). A correction of 0 gives the population variance. Differentiable.
    /// Fails as [`Tensor::mean`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], 4, Device::Cpu)?;
    /// assert_eq!(t.var((), 0, false)?.item::<f32>()?, 1.25);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn var(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        Variance { op: "var", dims: dims.into(), correction, keepdim, root: false }.compute(self)
    }

    /// Returns the standard deviation: the square root of [`Tensor::var`] (PyTorch's `std`). Differentiable; the gradient of a deviation
    /// of 0 is 0. Fails as [`Tensor::mean`] does.
    #[track_caller]
    pub fn std(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<Tensor> {
        Variance { op: "std", dims: dims.into(), correction, keepdim, root: true }.compute(self)
    }

    /// Returns the variance, as [`Tensor::var`], and the mean (PyTorch's `var_mean`). Differentiable. Fails as [`Tensor::mean`] does.
    #[track_caller]
    pub fn var_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        return_replacement!("var_mean", [self], &dims, correction, keepdim);
        let both = || Ok((self.var(dims.clone(), correction, keepdim)?, self.mean(dims.clone(), keepdim)?));
        both().with_op("var_mean")
    }

    /// Returns the standard deviation, as [`Tensor::std`], and the mean (PyTorch's `std_mean`). Differentiable. Fails as [`Tensor::mean`]
    /// does.
    #[track_caller]
    pub fn std_mean(&self, dims: impl Into<ReduceDims>, correction: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        return_replacement!("std_mean", [self], &dims, correction, keepdim);
        let both = || Ok((self.std(dims.clone(), correction, keepdim)?, self.mean(dims.clone(), keepdim)?));
        both().with_op("std_mean")
    }

    /// Returns the minimum and the maximum over `dims` (PyTorch's `aminmax`); NaN if any element is NaN. Differentiable. Fails as
    /// [`Tensor::max`] does.
    #[track_caller]
    pub fn aminmax(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = dims.into();
        return_replacement!("aminmax", [self], &dims, keepdim);
        Ok((self.min(dims.clone(), keepdim).with_op("aminmax")?, self.max(dims, keepdim).with_op("aminmax")?))
    }

    /// Returns the mean over `dims` of the elements that are not NaN, or NaN if all elements are NaN (PyTorch's `nanmean`). Floats.
    /// Differentiable. Fails as [`Tensor::mean`] does.
    #[track_caller]
    pub fn nanmean(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let (op, dims) = ("nanmean", dims.into());
        return_replacement!(op, [self], &dims, keepdim);
        self.dtype.check_float(op)?;
        // The sum of many halves overflows before the mean does, so the mean is computed in f32.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.nanmean(dims, keepdim)?.to_dtype(self.dtype);
        }
        let count = self.detach().isnan()?.logical_not()?.sum(dims.clone(), keepdim).with_op(op)?;
        self.nansum(dims, keepdim).with_op(op)?.div(&count.to_dtype(self.dtype)?)
    }
}

/// The parameters of a variance or, with `root`, of a standard deviation.
struct Variance {
    op: &'static str,
    dims: ReduceDims,
    correction: usize,
    keepdim: bool,
    root: bool,
}

impl Variance {
    #[track_caller]
    fn compute(&self, t: &Tensor) -> Result<Tensor> {
        return_replacement!(self.op, [t], &self.dims, self.correction, self.keepdim);
        match self.compute_fused(t)? {
            Some(out) => Ok(out),
            None => self.compute_composed(t),
        }
    }

    /// Computes the result by one fused kernel, which exists on GPUs. Takes one launch, or two for long rows. Returns `None` on other
    /// devices, if a gradient is needed, and if the elements of a row are further apart in memory than adjacent rows.
    fn compute_fused(&self, t: &Tensor) -> Result<Option<Tensor>> {
        let backend = backend::of_device(t.device());
        if !backend.has_variance() || !t.dtype.is_float() || t.numel() == 0 || autograd::is_tracked(&[t]) {
            return Ok(None);
        }
        let mask = self.dims.mask(self.op, t.shape())?;
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
        let out = Tensor::empty_with_shape(super::reduced_shape(t.shape(), &mask, self.keepdim), t.dtype, t.device())?;
        let freedom = plan.n.saturating_sub(self.correction) as f64;
        let problem = norm::Variance { x: &rows, out: &out, freedom, root: self.root };
        Ok(backend.variance(&problem)?.then_some(out))
    }

    /// Computes the result from the mean and the deviations from the mean, and records the result.
    fn compute_composed(&self, t: &Tensor) -> Result<Tensor> {
        // The squares are computed in f32, because squares of elements from 256 on overflow f16.
        if matches!(t.dtype, DType::F16 | DType::BF16) {
            return self.compute_composed(&t.to_dtype(DType::F32)?)?.to_dtype(t.dtype);
        }
        let &Variance { op, ref dims, correction, keepdim, root } = self;
        let mask = dims.mask(op, t.shape())?;
        let freedom = super::reduced_count(t.shape(), &mask).saturating_sub(correction) as f64;
        let x = t.detach();
        // A registered replacement of the subtraction may return any shape, so the shape is restored.
        let deviations = x.sub(&x.mean(dims.clone(), true).with_op(op)?)?.reshape(t.shape()).with_op(op)?;
        let kept = sum_of_squares(op, &deviations, &mask, freedom, root)?;
        let out = kept.detach().reshape(super::reduced_shape(t.shape(), &mask, keepdim))?;
        if !autograd::is_tracked(&[t]) {
            return Ok(out);
        }
        let (dims, deviations, kept) = (dims.clone(), Saved::new(&deviations), root.then(|| Saved::new(&kept)));
        Ok(autograd::record_differentiable(op, out, &[t], move |ctx| {
            let deviations = deviations.unpack(op)?;
            if ctx.create_graph() {
                // The variance of the deviations equals the variance of the elements.
                let x = ctx.with_input_node(0, deviations);
                let centred = x.sub(&x.mean(dims.clone(), true)?)?;
                let variance = centred.square()?.sum(dims.clone(), keepdim)?.div_scalar(freedom)?;
                if !root {
                    return ctx.differentiate_through(&variance);
                }
                let none = variance.eq_scalar(0)?;
                return ctx.differentiate_through(&variance.masked_fill(&none, 1)?.sqrt()?.masked_fill(&none, 0)?);
            }
            let grad = super::expand_reduced(&ctx.grad()?, deviations.shape(), &mask, keepdim);
            let (x, n) = (Expr::input(0), [Scalar::Float(freedom)]);
            let kept = kept.as_ref().map(|kept| kept.unpack(op)).transpose()?;
            // At a standard deviation of 0, the gradient is 0.
            let derivative = match kept {
                Some(_) => Expr::input(2).eq(0.0).select(0.0, x / Expr::input(2) / Expr::scalar(0)),
                None => x * (Expr::constant(2.0) / Expr::scalar(0)),
            };
            let inputs: SmallVec<[&Tensor; 3]> = [&deviations, &grad].into_iter().chain(&kept).collect();
            let grad =
                apply(op, &inputs, Params::from_scalars(&n), &[derivative * Expr::input(1)], &[deviations.dtype])?
                    .remove(0);
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    }
}

/// The rules that compute a sum of squares divided by the degrees of freedom: the first rule with a square root, the second without.
static MOMENT_RULES: LazyLock<[Rule; 2]> = LazyLock::new(|| {
    let (combination, square) = (Combination::Add, Expr::input(0).square());
    let quotient = Expr::input(0) / Expr::scalar(0);
    [(quotient.sqrt(), Rescaled::Norm), (quotient, Rescaled::Variance)].map(|(finish, rescaled)| Rule {
        combination,
        element: Element::Formula(square.clone()),
        finish: Some(finish),
        rescaled: Some(rescaled),
        counts: false,
    })
});

/// Sums squares over the dims of `mask`, kept with size 1, and divides by `freedom`. With `root`, returns the square root. NaN for no
/// elements. Not recorded.
pub(crate) fn sum_of_squares(op: &'static str, x: &Tensor, mask: &[bool], freedom: f64, root: bool) -> Result<Tensor> {
    let out = Tensor::empty_with_shape(super::reduced_shape(x.shape(), mask, true), x.dtype, x.device())?;
    if x.numel() == 0 {
        out.fill_(f64::NAN)?;
        return Ok(out);
    }
    let rule = &MOMENT_RULES[usize::from(!root)];
    backend::launch([&out], |b| b.reduce(&Reduction { op, rule, x, mask, out: &out, number: freedom }))?;
    Ok(out)
}
