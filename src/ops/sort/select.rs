//! Selection by order along a dim: top-k, k-th value, medians, quantiles, mode. Each computes indices and gathers the elements, which
//! also gives the gradient. Where only one or a few elements of a line are needed, backends select instead of sorting.

use crate::backend::problem::map::Params;
use crate::backend::problem::select::{Nth, Selected};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::{apply, apply_into};
use crate::ops::sort::{first_sorted, nans, nth, sorted};
use crate::{DType, Expr, Result, Scalar, Tensor};

operations! {
    topk(input: x, k: size, dim: int = -1, largest: bool = true): Sorting, All -> Same, differentiable;
    kthvalue(input: x, k: size, dim: int = -1, keepdim: bool = false): Sorting, All -> Same, differentiable;
    median(input: x, dim: int, keepdim: bool = false): Sorting, All -> Same, differentiable;
    nanmedian(input: x, dim: int, keepdim: bool = false): Sorting, All -> Same, differentiable;
    mode(input: x, dim: int = -1, keepdim: bool = false): Sorting, All -> Same, differentiable;
    quantile(input: x, q: float, dim: int, keepdim: bool = false): Sorting, Floats -> Same, differentiable;
    nanquantile(input: x, q: float, dim: int, keepdim: bool = false): Sorting, Floats -> Same, differentiable;
    max_dim(input: x, dim: int, keepdim: bool = false) "max": Reduction, All -> Same, differentiable;
    min_dim(input: x, dim: int, keepdim: bool = false) "min": Reduction, All -> Same, differentiable;
}

/// The element of every line of `t` along `dim` that `find` gives the index of (of a tensor of rank 1 at least; the
/// indices keep the dim with size 1), and the indices.
fn chosen(
    op: &'static str,
    t: &Tensor,
    dim: isize,
    keepdim: bool,
    find: impl FnOnce(&Tensor) -> Result<Selected>,
) -> Result<(Tensor, Tensor)> {
    let x = t.atleast_1d()?;
    let d = x.shape().dim(op, dim)?;
    invalid!(op if x.shape().dims()[d] == 0,
        "dimension {dim} is empty in shape {}: there is no element to choose", t.shape());
    let (values, indices) = find(&x.detach()).and_then(|found| found.of(&x, dim)).named(op)?;
    match keepdim && t.rank() > 0 {
        true => Ok((values, indices)),
        false => Ok((values.squeeze(dim)?, indices.squeeze(dim)?)),
    }
}

fn check_quantile(op: &'static str, t: &Tensor, q: f64) -> Result<()> {
    t.dtype.check_float(op)?;
    invalid!(op if !(0.0..=1.0).contains(&q), "{q} is not between 0 and 1");
    Ok(())
}

fn one(op: &'static str, x: &Tensor, dim: isize, rank: Nth<'_>) -> Result<Selected> {
    nth(op, x, dim, &[rank]).map(|mut found| found.remove(0))
}

fn size(t: &Tensor, dim: isize) -> Result<usize> {
    Ok(t.shape().dims()[t.shape().dim("size", dim)?])
}

impl Tensor {
    /// The `k` greatest elements along `dim`, greatest first, or with `largest` false the least, and their indices
    /// (PyTorch's `topk`; always sorted). NaN is above everything. Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the dim has less than `k` elements; [`Error::DimOutOfRange`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn topk(&self, k: usize, dim: isize, largest: bool) -> Result<(Tensor, Tensor)> {
        replaced!(op = "topk", [self], k, dim, largest);
        let x = self.atleast_1d()?;
        let n = x.shape().dims()[x.shape().dim(op, dim)?];
        invalid!(op if k > n, "{k} elements of {n} along dimension {dim} of {}", self.shape());
        let (values, indices) = first_sorted(op, &x.detach(), dim, k, largest)?.of(&x, dim)?;
        match self.rank() == 0 && k == 1 {
            true => Ok((values.squeeze(dim)?, indices.squeeze(dim)?)),
            false => Ok((values, indices)),
        }
    }

    /// The `k`-th least element along `dim`, counted from 1, and its index (PyTorch's `kthvalue`). NaN is above everything.
    /// `keepdim` leaves the dim in place with size 1. Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the dim has less than `k` elements or `k` is 0; [`Error::DimOutOfRange`].
    #[track_caller]
    pub fn kthvalue(&self, k: usize, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!(op = "kthvalue", [self], k, dim, keepdim);
        chosen(op, self, dim, keepdim, |x| {
            let n = size(x, dim)?;
            invalid!(op if k == 0 || k > n, "the dimension has elements 1 to {n}, and {k} was asked for");
            one(op, x, dim, Nth::Rank(k - 1))
        })
    }

    /// The median along `dim`, of two in the middle the lower, and its index (PyTorch's `median` with a dim); NaN if there
    /// is one. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[7f32, 1.0, 3.0, 2.0], 4, Device::Cpu)?;
    /// assert_eq!(t.median(0, false)?.0.item::<f32>()?, 2.0);
    /// assert_eq!(t.quantile(0.5, 0, false)?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] where the dim is empty; [`Error::DimOutOfRange`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn median(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!("median", [self], dim, keepdim);
        chosen("median", self, dim, keepdim, |x| one("median", x, dim, Nth::OrNan((size(x, dim)? - 1) / 2)))
    }

    /// The median along `dim` of the elements that are not NaN, and its index; NaN where all are (PyTorch's `nanmedian`).
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::median`].
    #[track_caller]
    pub fn nanmedian(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!("nanmedian", [self], dim, keepdim);
        chosen("nanmedian", self, dim, keepdim, |x| one("nanmedian", x, dim, Nth::NanMedian))
    }

    /// The value along `dim` that a share `q` of the elements is below, between two elements in proportion (PyTorch's
    /// `quantile`); NaN if there is one; floats. Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a `q` outside 0 to 1 and where the dim is empty; [`Error::DimOutOfRange`],
    /// [`Error::UnsupportedDType`].
    #[track_caller]
    pub fn quantile(&self, q: f64, dim: isize, keepdim: bool) -> Result<Tensor> {
        replaced!(op = "quantile", [self], q, dim, keepdim);
        check_quantile(op, self, q)?;
        let last = match self.rank() {
            0 => 0,
            _ => self.shape().dims()[self.shape().dim(op, dim)?].saturating_sub(1),
        };
        let place = q * last as f64;
        let mut high = None;
        let low = chosen(op, self, dim, keepdim, |x| {
            let ranks = [place.floor(), place.ceil()].map(|rank| Nth::OrNan(rank as usize));
            let mut found = nth(op, x, dim, &ranks[..1 + usize::from(place.fract() > 0.0)])?;
            high = found.split_off(1).pop();
            Ok(found.remove(0))
        })?;
        match high {
            Some(high) => low.0.lerp(&chosen(op, self, dim, keepdim, |_| Ok(high))?.0, place.fract()),
            None => Ok(low.0),
        }
    }

    /// [`Tensor::quantile`] of the elements that are not NaN; NaN where all are (PyTorch's `nanquantile`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::quantile`].
    #[track_caller]
    pub fn nanquantile(&self, q: f64, dim: isize, keepdim: bool) -> Result<Tensor> {
        replaced!(op = "nanquantile", [self], q, dim, keepdim);
        check_quantile(op, self, q)?;
        let mut between = None;
        let (low, _) = chosen(op, self, dim, keepdim, |x| {
            let nans = nans(op, x, x.shape().dim(op, dim)?)?.to_dtype(x.dtype.compute().dtype())?;
            // The first element of a line that is all NaN.
            let place = ((size(x, dim)? - 1) as f64 - Expr::input(0)).max(0.0) * q;
            let exprs = [place.floor(), place.ceil(), &place - place.floor()];
            let dtypes = [DType::I64, DType::I64, nans.dtype];
            let made = apply(op, &[&nans], Params::default(), &exprs, &dtypes)?;
            let mut found = nth(op, x, dim, &[Nth::Ranks(&made[0]), Nth::Ranks(&made[1])])?;
            between = Some((found.remove(1), made[2].shallow_clone()));
            Ok(found.remove(0))
        })?;
        let Some((high, share)) = between else { return Ok(low) };
        let share = if keepdim && self.rank() > 0 { share } else { share.squeeze(dim)? };
        let (high, _) = chosen(op, self, dim, keepdim, |_| Ok(high))?;
        low.lerp_tensor(&high, &share)?.to_dtype(self.dtype)
    }

    /// The most frequent element along `dim`, the least of several, and the index of its last appearance (PyTorch's
    /// `mode`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::median`].
    #[track_caller]
    pub fn mode(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!(op = "mode", [self], dim, keepdim);
        chosen(op, self, dim, keepdim, |x| {
            let n = size(x, dim)?;
            let (values, order) = sorted(op, x, dim, false)?;
            let place = Tensor::arange(0, n as i64, 1, (DType::I64, x.device()))?;
            let behind = x.rank() - 1 - x.shape().dim(op, dim)?;
            let place = place.reshape(std::iter::once(n).chain(std::iter::repeat_n(1, behind)).collect::<Vec<_>>())?;
            // The start of the run of equal elements that each element is in. The longest run ends where the distance to it is greatest.
            let (place, scalars) = (
                place.broadcast_to(x.shape().dims().iter().map(|&n| n as isize).collect::<Vec<_>>())?,
                [Scalar::Int(0)],
            );
            let starts = Tensor::zeros(x.shape(), (DType::I64, x.device()))?;
            let (next, this) = (values.narrow(dim, 1, n - 1)?, values.narrow(dim, 0, n - 1)?);
            let differs = Expr::input(0).ne(Expr::input(1)).select(Expr::input(2), Expr::scalar(0));
            let params = Params::of(&scalars);
            apply_into(
                op,
                &[&next, &this, &place.narrow(dim, 1, n - 1)?],
                params,
                &[differs],
                &[&starts.narrow(dim, 1, n - 1)?],
            )?;
            let run = place.sub(&starts.cummax(dim)?.0)?;
            order.gather(dim, &run.argmax(dim, true)?).map(Selected::from)
        })
    }

    /// The greatest element along `dim` and its index, as i64 (PyTorch's `max` with a dim): the first among equals, the
    /// first NaN if there is one. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::median`].
    #[track_caller]
    pub fn max_dim(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!("max_dim", [self], dim, keepdim);
        chosen("max_dim", self, dim, keepdim, |x| x.argmax(dim, true).map(Selected::from))
    }

    /// The least element along `dim` and its index (PyTorch's `min` with a dim); as [`Tensor::max_dim`] otherwise.
    ///
    /// # Errors
    /// As [`Tensor::median`].
    #[track_caller]
    pub fn min_dim(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        replaced!("min_dim", [self], dim, keepdim);
        chosen("min_dim", self, dim, keepdim, |x| x.argmin(dim, true).map(Selected::from))
    }
}
