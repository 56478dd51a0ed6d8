//! Scans: what has come together of a line so far, at every element. Sums, products, extremes with their indices, log-sums of
//! exponentials.
//!
//! One launch on strided input; three where few lines are long, which are then cut in slices: totals of the slices, a scan
//! of those, the slices from what comes before them. f16 and bf16 accumulate in f32, integers in i64 (wrapping); running sums
//! are kept in blocks, so that the last one of ten million f32 is good to about 1e-6.

use smallvec::SmallVec;

use crate::autograd::Saved;
use crate::backend::problem::scan::Scan;
use crate::ops::dispatch::autocast::widened;
use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::{replaced, replaced_several};
use crate::ops::pair;
use crate::tensor::Layout;
use crate::tensor::view::at_least_1d;
use crate::{DType, Result, Tensor, autograd, backend};

/// The scan along `dim`, outside the graph: values, and indices where it chooses.
fn scan(op: &'static str, kind: Scan, t: &Tensor, dim: isize) -> Result<(Tensor, Option<Tensor>)> {
    let x = at_least_1d(t);
    let d = x.shape().dim(op, dim)?;
    let dtype = match kind {
        Scan::Sum | Scan::Prod if !t.dtype.is_float() => DType::I64,
        _ => t.dtype,
    };
    let values = Tensor::empty_like_shape(x.shape(), dtype, x.device())?;
    let places = match kind.is_arg() {
        true => Some(Tensor::empty_like_shape(x.shape(), DType::I64, x.device())?),
        false => None,
    };
    if x.numel() > 0 {
        backend::launch(&[&values], |b| b.scan(kind, &x, d, &values, places.as_ref()))?;
    }
    // Of a scalar too.
    let shaped = |made: Tensor| made.with_layout(Layout::contiguous(t.shape().clone()));
    Ok((shaped(values), places.map(shaped)))
}

/// `f` from the last element to the first.
fn from_behind(t: &Tensor, dim: isize, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match t.rank() {
        0 => f(t),
        _ => f(&t.flip(dim)?)?.flip(dim),
    }
}

/// Wider halves: what a gradient is made of is rounded once.
fn wide(t: &Tensor) -> Result<Tensor> {
    let halves = matches!(t.dtype, DType::F16 | DType::BF16);
    t.to_dtype(if halves { DType::F32 } else { t.dtype })
}

/// [`Tensor::cumprod`] of factors that reach twice as far back with every step: a composition of products, whose gradients of
/// gradients are right behind zeros, too.
fn doubling(x: &Tensor, dim: isize) -> Result<Tensor> {
    let n = if x.rank() == 0 { 1 } else { x.shape().dims()[x.shape().dim("cumprod", dim)?] };
    let (mut y, mut reach) = (x.shallow_clone(), 1);
    while reach < n {
        let (head, tail) = (y.narrow(dim, 0, reach)?, y.narrow(dim, reach, n - reach)?);
        y = Tensor::cat(&[head, tail.mul(&y.narrow(dim, 0, n - reach)?)?], dim)?;
        reach *= 2;
    }
    Ok(y)
}

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new("cumsum", "cumsum", Kind::Scan, Dtypes::All, Gives::Sum, (1, 1), |a| a.x(0)?.cumsum(a.int(0)?))
        .differentiable(),
    Operation::new("cumprod", "cumprod", Kind::Scan, Dtypes::All, Gives::Sum, (1, 1), |a| a.x(0)?.cumprod(a.int(0)?))
        .differentiable(),
    Operation::several("cummax", "cummax", Kind::Scan, Dtypes::All, Gives::Same, (1, 1), |a| {
        a.x(0)?.cummax(a.int(0)?).map(|(v, i)| vec![v, i])
    })
    .differentiable(),
    Operation::several("cummin", "cummin", Kind::Scan, Dtypes::All, Gives::Same, (1, 1), |a| {
        a.x(0)?.cummin(a.int(0)?).map(|(v, i)| vec![v, i])
    })
    .differentiable(),
    Operation::new("logcumsumexp", "logcumsumexp", Kind::Scan, Dtypes::Floats, Gives::Same, (1, 1), |a| {
        a.x(0)?.logcumsumexp(a.int(0)?)
    })
    .differentiable(),
    Operation::new("diff", "diff", Kind::Scan, Dtypes::All, Gives::Same, (1, 2), |a| {
        a.x(0)?.diff(a.size(0)?, a.int(1)?)
    })
    .differentiable(),
];

impl Tensor {
    /// The sum of all elements so far along `dim` (PyTorch's `cumsum`). Floats keep their dtype, integers and bool give
    /// i64. Differentiable.
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
    ///
    /// # Errors
    /// [`crate::Error::DimOutOfRange`], [`crate::Error::OutOfMemory`].
    pub fn cumsum(&self, dim: isize) -> Result<Tensor> {
        replaced!("cumsum", [self], dim);
        if let Some(wide) = widened(&[self])? {
            return wide[0].cumsum(dim);
        }
        let out = scan("cumsum", Scan::Sum, self, dim)?.0;
        Ok(autograd::record_unary_twice("cumsum", out, self, move |grad| from_behind(&grad, dim, |g| g.cumsum(dim))))
    }

    /// The product of all elements so far along `dim` (PyTorch's `cumprod`). Dtypes as [`Tensor::cumsum`]. Differentiable,
    /// where elements are zero too.
    ///
    /// # Errors
    /// As [`Tensor::cumsum`].
    pub fn cumprod(&self, dim: isize) -> Result<Tensor> {
        let op = "cumprod";
        replaced!(op, [self], dim);
        if let Some(wide) = widened(&[self])? {
            return wide[0].cumprod(dim);
        }
        let out = scan(op, Scan::Prod, self, dim)?.0;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, result, dtype) = (Saved::new(self), Saved::new(&out), self.dtype);
        Ok(autograd::record_twice(op, out, &[self], move |ctx| {
            if ctx.create_graph() {
                return ctx.through(&doubling(x.get(op)?, dim)?);
            }
            let (x, result, grad) = (wide(x.get(op)?)?, wide(&ctx.result(&result)?)?, wide(&ctx.grad()?)?);
            let zero = x.eq_scalar(0)?;
            let zeros = zero.cumsum(dim)?;
            let sum_behind = |t: &Tensor| from_behind(t, dim, |t| t.cumsum(dim));
            // Before the first zero: all later results, without this factor. Behind it nothing changes any result.
            let before = sum_behind(&result.mul(&grad)?)?.div(&x.masked_fill(&zero, 1)?)?;
            // At it: the products of the others.
            let first = zero.logical_and(&zeros.eq_scalar(1)?)?;
            let others = sum_behind(&x.masked_fill(&first, 1)?.cumprod(dim)?.mul(&grad)?)?;
            let nothing = before.masked_fill(&zeros.ne_scalar(0)?, 0)?;
            Ok(SmallVec::from_iter([Some(first.where_cond(&others, &nothing)?.to_dtype(dtype)?)]))
        }))
    }

    /// The greatest element so far along `dim` and its index, as i64 (PyTorch's `cummax`): the last among equals, and from
    /// a NaN on NaN. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::cumsum`].
    pub fn cummax(&self, dim: isize) -> Result<(Tensor, Tensor)> {
        self.running_extreme("cummax", Scan::Max, dim)
    }

    /// The least element so far along `dim` and its index (PyTorch's `cummin`); as [`Tensor::cummax`] otherwise.
    ///
    /// # Errors
    /// As [`Tensor::cumsum`].
    pub fn cummin(&self, dim: isize) -> Result<(Tensor, Tensor)> {
        self.running_extreme("cummin", Scan::Min, dim)
    }

    fn running_extreme(&self, op: &'static str, kind: Scan, dim: isize) -> Result<(Tensor, Tensor)> {
        replaced_several!(op, [self], dim; pair);
        let (out, places) = scan(op, kind, self, dim)?;
        let places = places.expect("it chooses");
        let (saved, shape) = (Saved::new(&places), self.shape().clone());
        let out = autograd::record_unary_twice(op, out, self, move |grad| match shape.rank() {
            0 => Ok(grad),
            _ => Tensor::zeros(&shape, &grad)?.scatter_add(dim, saved.get(op)?, &grad),
        });
        Ok((out, places))
    }

    /// `log(sum(exp(x)))` of all elements so far along `dim` (PyTorch's `logcumsumexp`), without overflow; floats.
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::cumsum`]; [`crate::Error::UnsupportedDType`] for integers and bool.
    pub fn logcumsumexp(&self, dim: isize) -> Result<Tensor> {
        let op = "logcumsumexp";
        replaced!(op, [self], dim);
        self.dtype.check_float(op)?;
        let out = scan(op, Scan::LogSumExp, self, dim)?.0;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (x, result, dtype) = (Saved::new(self), Saved::new(&out), self.dtype);
        Ok(autograd::record_twice(op, out, &[self], move |ctx| {
            let (x, result, grad) = (wide(x.get(op)?)?, wide(&ctx.result(&result)?)?, wide(&ctx.grad()?)?);
            let log = grad.abs()?.log()?.sub(&result)?;
            // The sum of grad * exp(x - result) from behind, in logarithms, for either sign of grad.
            let part = |other_sign: &Tensor| {
                let log = log.masked_fill(other_sign, f64::NEG_INFINITY)?;
                from_behind(&log, dim, |t| t.logcumsumexp(dim))?.add(&x)?.exp()
            };
            let grad = part(&grad.le_scalar(0)?)?.sub(&part(&grad.ge_scalar(0)?)?)?.to_dtype(dtype)?;
            Ok(SmallVec::from_iter([Some(grad)]))
        }))
    }

    /// Differences of neighbours along `dim`, `n` times over (PyTorch's `diff`); of bool whether they differ.
    /// Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 4.0, 9.0, 16.0], 4, Device::Cpu)?;
    /// assert_eq!(t.diff(1, -1)?.to_vec::<f32>()?, [3.0, 5.0, 7.0]);
    /// assert_eq!(t.diff(2, -1)?.to_vec::<f32>()?, [2.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::DimOutOfRange`], for a scalar too; [`crate::Error::OutOfMemory`].
    pub fn diff(&self, n: usize, dim: isize) -> Result<Tensor> {
        let op = "diff";
        replaced!(op, [self], n, dim);
        let d = self.shape().dim(op, dim)?;
        // After as many times as there are elements none is left.
        (0..n.min(self.shape().dims()[d])).try_fold(self.shallow_clone(), |t, _| {
            let pairs = t.shape().dims()[d].saturating_sub(1);
            let (next, this) = (t.narrow(dim, t.shape().dims()[d] - pairs, pairs)?, t.narrow(dim, 0, pairs)?);
            let made = if t.dtype == DType::Bool { next.ne(&this) } else { next.sub(&this) };
            made.map_err(|e| e.of(op))
        })
    }
}
