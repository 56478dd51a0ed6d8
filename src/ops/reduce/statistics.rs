//! Variance, standard deviation, `aminmax` and `nanmean`.

use std::sync::LazyLock;

use super::{Mask, ReduceDims};
use crate::backend::problem::norm;
use crate::backend::problem::reduction::{Combination, Element, Reduction, ReductionPlan, Rescaled, Rule};
use crate::backend::problem::select::dims_with;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;

operations! {
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
    var(input: x, dim: dims, correction: size = 1, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, correction, keepdim| {
        Variance { op, dims, correction, keepdim, root: false }.compute(self)
    };
    /// Returns the standard deviation: the square root of [`Tensor::var`] (PyTorch's `std`). Differentiable; the gradient of a deviation
    /// of 0 is 0. Fails as [`Tensor::mean`] does.
    std(input: x, dim: dims, correction: size = 1, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, correction, keepdim| {
        Variance { op, dims, correction, keepdim, root: true }.compute(self)
    };
    /// Returns the variance, as [`Tensor::var`], and the mean (PyTorch's `var_mean`). Differentiable. Fails as [`Tensor::mean`] does.
    var_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, correction, keepdim| -> (Tensor, Tensor) {
        let both = || Ok((self.var(dims.clone(), correction, keepdim)?, self.mean(dims.clone(), keepdim)?));
        both().with_op(op)
    };
    /// Returns the standard deviation, as [`Tensor::std`], and the mean (PyTorch's `std_mean`). Differentiable. Fails as [`Tensor::mean`]
    /// does.
    std_mean(input: x, dim: dims, correction: size = 1, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, correction, keepdim| -> (Tensor, Tensor) {
        let both = || Ok((self.std(dims.clone(), correction, keepdim)?, self.mean(dims.clone(), keepdim)?));
        both().with_op(op)
    };
    /// Returns the minimum and the maximum over `dims` (PyTorch's `aminmax`); NaN if any element is NaN. Differentiable. Fails as
    /// [`Tensor::max`] does.
    aminmax(input: x, dim: dims, keepdim: bool = false):
        Reduction, All -> Same, differentiable = |op, self, dims, keepdim| -> (Tensor, Tensor) {
        Ok((self.min(dims.clone(), keepdim).with_op(op)?, self.max(dims, keepdim).with_op(op)?))
    };
    /// Returns the mean over `dims` of the elements that are not NaN, or NaN if all elements are NaN (PyTorch's `nanmean`). Floats.
    /// Differentiable. Fails as [`Tensor::mean`] does.
    nanmean(input: x, dim: dims, keepdim: bool = false):
        Reduction, Floats -> Same, differentiable = |op, self, dims, keepdim| {
        self.dtype.check_float(op)?;
        // The sum of many halves overflows before the mean does, so the mean is computed in f32.
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.nanmean(dims, keepdim)?.to_dtype(self.dtype);
        }
        let count = self.detach().isnan()?.logical_not()?.sum(dims.clone(), keepdim).with_op(op)?;
        self.nansum(dims, keepdim).with_op(op)?.div(&count.to_dtype(self.dtype)?)
    };
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
    fn compute(&self, t: &Tensor) -> Result<Tensor> {
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

/// The rules of sums that have no row in the table of reductions. The first two compute a sum of squares divided by the degrees of freedom,
/// with and without a square root. The third counts the NaN elements.
static RULES: LazyLock<[Rule; 3]> = LazyLock::new(|| {
    let (x, quotient) = (Expr::input(0), Expr::input(0) / Expr::scalar(0));
    let sum = |element, finish, rescaled: Option<Rescaled>| {
        let (combination, element, counts) = (Combination::Add, Element::Formula(element), rescaled.is_none());
        Rule { combination, element, finish, rescaled, counts }
    };
    [
        sum(x.square(), Some(quotient.sqrt()), Some(Rescaled::Norm)),
        sum(x.square(), Some(quotient), Some(Rescaled::Variance)),
        sum(x.is_nan(), None, None),
    ]
});

/// Counts the NaN elements of each line along `d`, as i64, and keeps the dim with size 1. Outside the graph.
pub(crate) fn count_nans(op: &'static str, x: &Tensor, d: usize) -> Result<Tensor> {
    let mask: Mask = (0..x.rank()).map(|i| i == d).collect();
    backend::compute(dims_with(x, d, 1), DType::I64, x.device(), |b, out| {
        b.reduce(&Reduction { op, rule: &RULES[2], x, mask: &mask, out, number: 0.0 })
    })
}

/// Sums squares over the dims of `mask`, kept with size 1, and divides by `freedom`. With `root`, returns the square root. NaN for no
/// elements. Not recorded.
pub(crate) fn sum_of_squares(op: &'static str, x: &Tensor, mask: &[bool], freedom: f64, root: bool) -> Result<Tensor> {
    let out = Tensor::empty_with_shape(super::reduced_shape(x.shape(), mask, true), x.dtype, x.device())?;
    if x.numel() == 0 {
        out.fill_(f64::NAN)?;
        return Ok(out);
    }
    let rule = &RULES[usize::from(!root)];
    backend::launch([&out], |b| b.reduce(&Reduction { op, rule, x, mask, out: &out, number: freedom }))?;
    Ok(out)
}
