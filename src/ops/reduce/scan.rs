//! Scans: cumulative sums, products, maxima and minima with their indices, and logsumexp.
//!
//! A scan takes one launch, also on strided input. If there are only a few long lines, they are split into parts, which takes three
//! launches: the totals of the parts, a scan of the totals, and a scan of each part. f16 and bf16 accumulate in f32, integers in i64
//! (wrapping). Running sums are added in blocks, so that the last running sum of ten million f32 is accurate to about 1e-6.

use crate::backend::problem::scan::{RunningReduction, Scan};
use crate::ops::dispatch::prelude::*;
use crate::tensor::view::detach_at_least_1d;

/// Computes the scan along `dim`, outside the graph: the values, and the indices for maxima and minima.
fn scan(op: &'static str, kind: Scan, t: &Tensor, dim: isize) -> Result<(Tensor, Option<Tensor>)> {
    let x = detach_at_least_1d(t);
    let d = x.shape().dim(op, dim)?;
    let dtype = match kind {
        Scan::Sum | Scan::Prod if !t.dtype.is_float() => DType::I64,
        _ => t.dtype,
    };
    let values = Tensor::empty_with_shape(x.shape(), dtype, x.device())?;
    let indices = match kind.is_arg() {
        true => Some(Tensor::empty_with_shape(x.shape(), DType::I64, x.device())?),
        false => None,
    };
    if x.numel() > 0 {
        backend::launch([&values].into_iter().chain(&indices), |b| {
            b.scan(&RunningReduction { scan: kind, x: &x, d, values: &values, indices: indices.as_ref() })
        })?;
    }
    // The results have the shape of the input, also for a scalar.
    let shaped = |made: Tensor| made.with_layout(Layout::contiguous(t.shape().clone()));
    Ok((shaped(values), indices.map(shaped)))
}

/// Applies `f` in reversed order of the elements along `dim`: reverses the tensor, calls `f`, and reverses the result.
fn apply_reversed(t: &Tensor, dim: isize, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match t.rank() {
        0 => f(t),
        _ => f(&t.flip(dim)?)?.flip(dim),
    }
}

/// Converts halves to f32, so that a gradient is rounded only once.
fn half_to_f32(t: &Tensor) -> Result<Tensor> {
    let halves = matches!(t.dtype, DType::F16 | DType::BF16);
    t.to_dtype(if halves { DType::F32 } else { t.dtype })
}

/// Computes [`Tensor::cumprod`] in steps that double the number of factors. Because it is composed of recorded products, second
/// derivatives are right also after zeros.
fn cumprod_by_doubling(x: &Tensor, dim: isize) -> Result<Tensor> {
    let n = if x.rank() == 0 { 1 } else { x.shape().dims()[x.shape().dim("cumprod", dim)?] };
    let (mut y, mut reach) = (x.shallow_clone(), 1);
    while reach < n {
        let (head, tail) = (y.narrow(dim, 0, reach)?, y.narrow(dim, reach, n - reach)?);
        y = Tensor::cat(&[head, tail.mul(&y.narrow(dim, 0, n - reach)?)?], dim)?;
        reach *= 2;
    }
    Ok(y)
}

operations! {
    /// Returns the cumulative sum along `dim` (PyTorch's `cumsum`). Floats keep their dtype; integers and bool give i64. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 3.0, 2.0, 4.0], 4, Device::Cpu)?;
    /// assert_eq!(t.cumsum(0)?.to_vec::<f32>()?, [1.0, 4.0, 6.0, 10.0]);
    /// let (greatest, at) = t.cummax(0)?;
    /// assert_eq!(greatest.to_vec::<f32>()?, [1.0, 3.0, 3.0, 4.0]);
    /// assert_eq!(at.to_vec::<i64>()?, [0, 1, 1, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    cumsum(input: x, dim: int): Scan, All -> Sum, differentiable = |op, self, dim| {
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].cumsum(dim));
        let out = scan(op, Scan::Sum, self, dim)?.0;
        Ok(autograd::record_unary_differentiable(op, out, self, move |grad| {
            apply_reversed(&grad, dim, |g| g.cumsum(dim))
        }))
    };
    cumprod(input: x, dim: int): Scan, All -> Sum, differentiable;
    /// Returns the cumulative maximum along `dim` and its index, as i64 (PyTorch's `cummax`). If several elements are equal, the index is
    /// that of the last. After a NaN, all results are NaN. Differentiable.
    cummax(input: x, dim: int): Scan, All -> Same, differentiable = |op, self, dim| -> (Tensor, Tensor) {
        self.cumulative_extreme(op, Scan::Max, dim)
    };
    /// Returns the cumulative minimum along `dim` and its index (PyTorch's `cummin`). See [`Tensor::cummax`].
    cummin(input: x, dim: int): Scan, All -> Same, differentiable = |op, self, dim| -> (Tensor, Tensor) {
        self.cumulative_extreme(op, Scan::Min, dim)
    };
    /// Returns the cumulative `log(sum(exp(x)))` along `dim`, without overflow (PyTorch's `logcumsumexp`). Floats. Differentiable.
    logcumsumexp(input: x, dim: int): Scan, Floats -> Same, differentiable = |op, self, dim| {
        self.dtype.check_float(op)?;
        let out = scan(op, Scan::LogSumExp, self, dim)?.0;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, result, dtype) = (Saved::new(self), Saved::new(&out), self.dtype);
        Ok(autograd::record_differentiable(op, out, &[self], move |ctx| {
            let (x, result, grad) =
                (half_to_f32(x.get(op)?)?, half_to_f32(&ctx.unpack_result(&result)?)?, half_to_f32(&ctx.grad()?)?);
            let log = grad.abs()?.log()?.sub(&result)?;
            // For each sign of grad, the reversed cumulative sum of |grad| * exp(x - result), computed with logarithms.
            let part = |other_sign: &Tensor| {
                let log = log.masked_fill(other_sign, f64::NEG_INFINITY)?;
                apply_reversed(&log, dim, |t| t.logcumsumexp(dim))?.add(&x)?.exp()
            };
            let grad = part(&grad.le_scalar(0)?)?.sub(&part(&grad.ge_scalar(0)?)?)?.to_dtype(dtype)?;
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    };
    /// Takes the differences of adjacent elements along `dim`, `n` times (PyTorch's `diff`). For bool, a difference is whether adjacent
    /// elements differ. Differentiable. Fails with [`Error::DimOutOfRange`] for a scalar.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 4.0, 9.0, 16.0], 4, Device::Cpu)?;
    /// assert_eq!(t.diff(1, -1)?.to_vec::<f32>()?, [3.0, 5.0, 7.0]);
    /// assert_eq!(t.diff(2, -1)?.to_vec::<f32>()?, [2.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    diff(input: x, n: size = 1, dim: int = -1): Scan, All -> Same, differentiable = |op, self, n, dim| {
        let d = self.shape().dim(op, dim)?;
        // The number of differences is limited to the number of elements, because then no element is left.
        (0..n.min(self.shape().dims()[d])).try_fold(self.shallow_clone(), |t, _| {
            let pairs = t.shape().dims()[d].saturating_sub(1);
            let (next, this) = (t.narrow(dim, t.shape().dims()[d] - pairs, pairs)?, t.narrow(dim, 0, pairs)?);
            let made = if t.dtype == DType::Bool { next.ne(&this) } else { next.sub(&this) };
            made.with_op(op)
        })
    };
}

impl Tensor {
    /// Returns the cumulative product along `dim` (PyTorch's `cumprod`). Dtypes as for [`Tensor::cumsum`]. Differentiable, also where
    /// elements are zero.
    #[track_caller]
    pub fn cumprod(&self, dim: isize) -> Result<Tensor> {
        return_replacement!(op = "cumprod", [self], dim);
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].cumprod(dim));
        let out = scan(op, Scan::Prod, self, dim)?.0;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, result, dtype) = (Saved::new(self), Saved::new(&out), self.dtype);
        Ok(autograd::record_differentiable(op, out, &[self], move |ctx| {
            if ctx.create_graph() {
                return ctx.differentiate_through(&cumprod_by_doubling(x.get(op)?, dim)?);
            }
            let (x, result, grad) =
                (half_to_f32(x.get(op)?)?, half_to_f32(&ctx.unpack_result(&result)?)?, half_to_f32(&ctx.grad()?)?);
            let zero = x.eq_scalar(0)?;
            let zeros = zero.cumsum(dim)?;
            let reversed_cumsum = |t: &Tensor| apply_reversed(t, dim, |t| t.cumsum(dim));
            // Before the first zero, the gradient is the sum of all later results times their gradients, divided by the element. After
            // the first zero, it is zero.
            let before = reversed_cumsum(&result.mul(&grad)?)?.div(&x.masked_fill(&zero, 1)?)?;
            // At the first zero, the gradient uses the products of the other elements.
            let first = zero.logical_and(&zeros.eq_scalar(1)?)?;
            let others = reversed_cumsum(&x.masked_fill(&first, 1)?.cumprod(dim)?.mul(&grad)?)?;
            let nothing = before.masked_fill(&zeros.ne_scalar(0)?, 0)?;
            Ok(SmallVec::from_iter([Some(first.where_cond(&others, &nothing)?.to_dtype(dtype)?)]))
        }))
    }

    fn cumulative_extreme(&self, op: &'static str, kind: Scan, dim: isize) -> Result<(Tensor, Tensor)> {
        let (out, indices) = scan(op, kind, self, dim)?;
        let indices = indices.expect("it chooses");
        let (saved, shape) = (Saved::for_inputs(&[self], &indices), self.shape().clone());
        let out = autograd::record_unary_differentiable(op, out, self, move |grad| match shape.rank() {
            0 => Ok(grad),
            _ => Tensor::zeros(&shape, &grad)?.scatter_add(dim, saved.get(op)?, &grad),
        });
        Ok((out, indices))
    }
}
