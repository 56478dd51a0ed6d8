//! Selection by order along a dim: top-k, k-th value, medians, quantiles, mode. Each operation computes indices and gathers the elements
//! at these indices; the gather defines the gradient. If only one or a few elements of a line are needed, backends select instead of
//! sorting.

use crate::backend::problem::select::{RankQuery, Selected};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::{apply, apply_into};
use crate::ops::reduce::statistics::count_nans;
use crate::ops::sort::{elements_of_ranks, sort_detached, topk_sorted};

operations! {
    /// Returns the `k` largest elements along `dim` in descending order, or if `largest` is false the `k` smallest in ascending order,
    /// and their indices (PyTorch's `topk`; always sorted). NaN is greater than all numbers. Differentiable. Fails with
    /// [`Error::Invalid`] if the dim has fewer than `k` elements.
    topk(input: x, k: size, dim: int = -1, largest: bool = true):
        Sorting, All -> Same, differentiable = |op, self, k, dim, largest| -> (Tensor, Tensor) {
        let x = self.atleast_1d()?;
        let n = x.shape().dims()[x.shape().dim(op, dim)?];
        invalid!(op if k > n, "k is {k}, and there are {n} elements along dimension {dim} of shape {}", self.shape());
        let (values, indices) = topk_sorted(op, &x.detach(), dim, k, largest)?.values_and_indices(&x, dim)?;
        match self.rank() == 0 && k == 1 {
            true => Ok((values.squeeze(dim)?, indices.squeeze(dim)?)),
            false => Ok((values, indices)),
        }
    };
    /// Returns the `k`-th smallest element along `dim`, counted from 1, and its index (PyTorch's `kthvalue`). NaN is greater than all numbers.
    /// `keepdim` keeps the dim with size 1. Differentiable. Fails with [`Error::Invalid`] if the dim has fewer than `k` elements or
    /// `k` is 0.
    kthvalue(input: x, k: size, dim: int = -1, keepdim: bool = false):
        Sorting, All -> Same, differentiable = |op, self, k, dim, keepdim| -> (Tensor, Tensor) {
        select_elements(op, self, dim, keepdim, |x| {
            let n = dim_size(x, dim)?;
            invalid!(op if k == 0 || k > n, "k is {k}, it must be in 1..={n}");
            element_of_rank(op, x, dim, RankQuery::Rank(k - 1))
        })
    };
    /// Returns the median along `dim`, the lower of two middle elements, and its index (PyTorch's `median` with a dim). NaN if any element
    /// is NaN. Differentiable. Fails with [`Error::Invalid`] if the dim is empty.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[7f32, 1.0, 3.0, 2.0], 4, Device::Cpu)?;
    /// assert_eq!(t.median(0, false)?.0.item::<f32>()?, 2.0);
    /// assert_eq!(t.quantile(0.5, 0, false)?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    median(input: x, dim: int, keepdim: bool = false):
        Sorting, All -> Same, differentiable = |op, self, dim, keepdim| -> (Tensor, Tensor) {
        select_elements(op, self, dim, keepdim, |x| {
            element_of_rank(op, x, dim, RankQuery::OrNan((dim_size(x, dim)? - 1) / 2))
        })
    };
    /// Returns the median along `dim` of the elements that are not NaN, and its index (PyTorch's `nanmedian`). NaN if all elements are NaN.
    /// Differentiable. Fails as [`Tensor::median`] does.
    nanmedian(input: x, dim: int, keepdim: bool = false):
        Sorting, All -> Same, differentiable = |op, self, dim, keepdim| -> (Tensor, Tensor) {
        select_elements(op, self, dim, keepdim, |x| element_of_rank(op, x, dim, RankQuery::NanMedian))
    };
    mode(input: x, dim: int = -1, keepdim: bool = false): Sorting, All -> Same, differentiable;
    /// Returns the quantile `q` along `dim`, interpolated linearly between two elements (PyTorch's `quantile`). NaN if any element is NaN.
    /// Floats. Differentiable. Fails with [`Error::Invalid`] for a `q` outside 0 to 1 and if the dim is empty.
    quantile(input: x, q: float, dim: int, keepdim: bool = false):
        Sorting, Floats -> Same, differentiable = |op, self, q, dim, keepdim| {
        check_quantile(op, self, q)?;
        let last = match self.rank() {
            0 => 0,
            _ => self.shape().dims()[self.shape().dim(op, dim)?].saturating_sub(1),
        };
        let position = q * last as f64;
        let mut high = None;
        let low = select_elements(op, self, dim, keepdim, |x| {
            let ranks = [position.floor(), position.ceil()].map(|rank| RankQuery::OrNan(rank as usize));
            let mut found = elements_of_ranks(op, x, dim, &ranks[..1 + usize::from(position.fract() > 0.0)])?;
            high = found.split_off(1).pop();
            Ok(found.remove(0))
        })?;
        match high {
            Some(high) => low.0.lerp(&select_elements(op, self, dim, keepdim, |_| Ok(high))?.0, position.fract()),
            None => Ok(low.0),
        }
    };
    /// Returns the [`Tensor::quantile`] of the elements that are not NaN (PyTorch's `nanquantile`). NaN if all are NaN. Differentiable.
    /// Fails as [`Tensor::quantile`] does.
    nanquantile(input: x, q: float, dim: int, keepdim: bool = false):
        Sorting, Floats -> Same, differentiable = |op, self, q, dim, keepdim| {
        check_quantile(op, self, q)?;
        let mut between = None;
        let (low, _) = select_elements(op, self, dim, keepdim, |x| {
            let nans = count_nans(op, x, x.shape().dim(op, dim)?)?.to_dtype(x.dtype.compute().dtype())?;
            // In a line in which all elements are NaN, index 0 is selected.
            let position = ((dim_size(x, dim)? - 1) as f64 - Expr::input(0)).max(0.0) * q;
            let exprs = [position.floor(), position.ceil(), &position - position.floor()];
            let dtypes = [DType::I64, DType::I64, nans.dtype];
            let made = apply(op, &[&nans], Params::default(), &exprs, &dtypes)?;
            let mut found = elements_of_ranks(op, x, dim, &[RankQuery::Ranks(&made[0]), RankQuery::Ranks(&made[1])])?;
            between = Some((found.remove(1), made[2].shallow_clone()));
            Ok(found.remove(0))
        })?;
        let Some((high, share)) = between else { return Ok(low) };
        let share = if keepdim && self.rank() > 0 { share } else { share.squeeze(dim)? };
        let (high, _) = select_elements(op, self, dim, keepdim, |_| Ok(high))?;
        low.lerp_tensor(&high, &share)?.to_dtype(self.dtype)
    };
    /// Returns the maximum along `dim` and its index, as i64 (PyTorch's `max` with a dim): the first if several elements are equal, or
    /// the first NaN if there is one. Differentiable. Fails as [`Tensor::median`] does.
    max_dim(input: x, dim: int, keepdim: bool = false) "max":
        Reduction, All -> Same, differentiable = |op, self, dim, keepdim| -> (Tensor, Tensor) {
        select_elements(op, self, dim, keepdim, |x| x.argmax(dim, true).map(Selected::from))
    };
    /// Returns the minimum along `dim` and its index (PyTorch's `min` with a dim). See [`Tensor::max_dim`]. Fails as
    /// [`Tensor::median`] does.
    min_dim(input: x, dim: int, keepdim: bool = false) "min":
        Reduction, All -> Same, differentiable = |op, self, dim, keepdim| -> (Tensor, Tensor) {
        select_elements(op, self, dim, keepdim, |x| x.argmin(dim, true).map(Selected::from))
    };
}

/// Returns one element of every line of `t` along `dim`, and its index. `find` computes the indices of a tensor of at least one dim, and
/// keeps the dim with size 1.
fn select_elements(
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
    let (values, indices) = find(&x.detach()).and_then(|found| found.values_and_indices(&x, dim)).with_op(op)?;
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

fn element_of_rank(op: &'static str, x: &Tensor, dim: isize, rank: RankQuery<'_>) -> Result<Selected> {
    elements_of_ranks(op, x, dim, &[rank]).map(|mut found| found.remove(0))
}

fn dim_size(t: &Tensor, dim: isize) -> Result<usize> {
    Ok(t.shape().dims()[t.shape().dim("size", dim)?])
}

impl Tensor {
    /// Returns the most frequent element along `dim` (the smallest if several are equally frequent), and the index of its last occurrence
    /// (PyTorch's `mode`). Differentiable. Fails as [`Tensor::median`] does.
    #[track_caller]
    pub fn mode(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        return_replacement!(op = "mode", [self], dim, keepdim);
        select_elements(op, self, dim, keepdim, |x| {
            let n = dim_size(x, dim)?;
            let (values, order) = sort_detached(op, x, dim, false)?;
            let position = Tensor::arange(0, n as i64, 1, (DType::I64, x.device()))?;
            let behind = x.rank() - 1 - x.shape().dim(op, dim)?;
            let position =
                position.reshape(std::iter::once(n).chain(std::iter::repeat_n(1, behind)).collect::<Vec<_>>())?;
            // For each element, the start of its run of equal elements. The longest run ends at the element that is furthest from the
            // start of its run.
            let (position, scalars) = (
                position.broadcast_to(x.shape().dims().iter().map(|&n| n as isize).collect::<Vec<_>>())?,
                [Scalar::Int(0)],
            );
            let starts = Tensor::zeros(x.shape(), (DType::I64, x.device()))?;
            let (next, this) = (values.narrow(dim, 1, n - 1)?, values.narrow(dim, 0, n - 1)?);
            let differs = Expr::input(0).ne(Expr::input(1)).select(Expr::input(2), Expr::scalar(0));
            let params = Params::from_scalars(&scalars);
            apply_into(
                op,
                &[&next, &this, &position.narrow(dim, 1, n - 1)?],
                params,
                &[differs],
                &[&starts.narrow(dim, 1, n - 1)?],
            )?;
            let run = position.sub(&starts.cummax(dim)?.0)?;
            order.gather(dim, &run.argmax(dim, true)?).map(Selected::from)
        })
    }
}
