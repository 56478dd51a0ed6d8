//! Stable sorting along a dim, and binary search in sorted tensors.
//!
//! On GPUs, work-groups sort blocks in local memory, and then each launch merges pairs of runs. A line that fits in a block takes one
//! launch. If only one or a few elements of a line are needed, backends select instead of sorting. Elements are compared by unsigned
//! keys: NaN is greater than all numbers, as in PyTorch, and -0 equals 0. The gradient of a sort gathers through the inverse permutation.

pub(crate) mod select;

use super::result_type;
use crate::Compute;
use crate::backend::problem::select::{RankQuery, RankedElement, Search, Selected, Sorting, TopK};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;
use crate::ops::index::gather::record_read;
use crate::ops::reduce::statistics::count_nans;
use crate::tensor::view::detach_at_least_1d;

/// Returns the sorted values and their original indices, outside the graph.
pub(crate) fn sort_detached(op: &'static str, t: &Tensor, dim: isize, descending: bool) -> Result<(Tensor, Tensor)> {
    let x = detach_at_least_1d(t);
    let d = x.shape().dim(op, dim)?;
    let values = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let indices = Tensor::empty_with_shape(x.shape(), DType::I64, x.device())?;
    if x.numel() > 0 {
        backend::launch([&values, &indices], |b| {
            b.sort(&Sorting { x: &x, d, descending, values: &values, indices: &indices })
        })?;
    }
    // The results have the shape of the input, also for a scalar.
    let shaped = |made: Tensor| made.with_layout(Layout::contiguous(t.shape().clone()));
    Ok((shaped(values), shaped(indices)))
}

impl Selected {
    pub(crate) fn allocate(x: &Tensor, dims: Dims) -> Result<Selected> {
        let indices = Tensor::empty_with_shape(&dims[..], DType::I64, x.device())?;
        Ok(Selected { values: Some(Tensor::empty_with_shape(dims, x.dtype, x.device())?), indices })
    }

    /// Returns values and indices. If the values were not computed, gathers them from `x` along `dim`. Differentiable.
    pub(crate) fn values_and_indices(self, x: &Tensor, dim: isize) -> Result<(Tensor, Tensor)> {
        let values = match self.values {
            Some(values) => record_read("gather", values, x, dim, &self.indices, false),
            None => x.gather(dim, &self.indices)?,
        };
        Ok((values, self.indices))
    }
}

/// Returns the first `k` elements of each line in sorted order, outside the graph. The tensor has at least one dim.
pub(crate) fn topk_sorted(op: &'static str, t: &Tensor, dim: isize, k: usize, descending: bool) -> Result<Selected> {
    let d = t.shape().dim(op, dim)?;
    if let Some(found) = backend::fill_or_decline(t, |b| b.topk(TopK { x: t, d, k, descending }))? {
        return Ok(found);
    }
    Ok(sort_detached(op, t, dim, descending)?.1.narrow(dim, 0, k)?.contiguous()?.into())
}

/// Returns the elements with the given ranks from each line, and keeps the dim with size 1. The tensor has at least one dim.
pub(crate) fn elements_of_ranks(
    op: &'static str,
    t: &Tensor,
    dim: isize,
    ranks: &[RankQuery<'_>],
) -> Result<Vec<Selected>> {
    let d = t.shape().dim(op, dim)?;
    let found =
        |&rank: &RankQuery<'_>| backend::fill_or_decline(t, |b| b.kth(RankedElement { x: t, d, rank })).transpose();
    if let Some(found) = ranks.iter().map(found).collect::<Option<Result<_>>>() {
        return found;
    }
    let (order, last) = (sort_detached(op, t, dim, false)?.1, t.shape().dims()[d] as f64 - 1.0);
    let at = |rank: Expr| {
        let positions = apply(op, &[&count_nans(op, t, d)?], Params::default(), &[rank], &[DType::I64])?.remove(0);
        order.gather(dim, &positions)
    };
    let (nans, float) = (Expr::input(0), t.dtype.compute() != Compute::I64);
    let taken = ranks.iter().map(|nth| {
        let indices = match *nth {
            RankQuery::Ranks(ranks) => order.gather(dim, ranks),
            // NaN elements are last in the sorted order.
            RankQuery::OrNan(rank) if float => at(nans.gt(0.0).select(last + 1.0 - &nans, rank as f64)),
            RankQuery::NanMedian if float => at((last - &nans).max(0.0) / 2.0),
            RankQuery::Rank(rank) | RankQuery::OrNan(rank) => order.narrow(dim, rank, 1),
            RankQuery::NanMedian => order.narrow(dim, last as usize / 2, 1),
        };
        indices.map(Selected::from)
    });
    taken.collect()
}

operations! {
    /// Sorts the elements along `dim` (PyTorch's `sort`, always stable). Returns the values and their original indices, as i64. NaN is
    /// greater than all numbers. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[3f32, 1.0, 2.0, 1.0], 4, Device::Cpu)?;
    /// let (values, indices) = t.sort(-1, false)?;
    /// assert_eq!(values.to_vec::<f32>()?, [1.0, 1.0, 2.0, 3.0]);
    /// assert_eq!(indices.to_vec::<i64>()?, [1, 3, 2, 0]);
    /// assert_eq!(t.topk(2, -1, true)?.0.to_vec::<f32>()?, [3.0, 2.0]);
    /// assert_eq!(t.unique()?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    sort(input: x, dim: int = -1, descending: bool = false):
        Sorting, All -> Same, differentiable = |op, self, dim, descending| -> (Tensor, Tensor) {
        let (values, indices) = sort_detached(op, self, dim, descending)?;
        let saved = Saved::for_inputs(&[self], &indices);
        let values = autograd::record_unary_differentiable(op, values, self, move |grad| match grad.rank() {
            0 => Ok(grad),
            _ => grad.gather(dim, &saved.get(op)?.argsort(dim, false)?),
        });
        Ok((values, indices))
    };
    /// Returns the indices that sort the elements along `dim`, as i64 (PyTorch's `argsort`, always stable).
    argsort(input: x, dim: int = -1, descending: bool = false): Sorting, All -> I64 = |op, self, dim, descending| {
        Ok(sort_detached(op, self, dim, descending)?.1)
    };
    /// Sorts the elements in ascending order along the first dim (PyTorch's `msort`). Differentiable.
    msort(input: x): Sorting, All -> Same, differentiable = |op, self| {
        Ok(self.sort(0, false).with_op(op)?.0)
    };
    /// Returns whether each element is one of `test_elements`, of any shape, as bool (PyTorch's `isin`). False for NaN.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let among = Tensor::from_slice(&[5i64, 2], 2, Device::Cpu)?;
    /// let found = Tensor::arange(0, 4, 1, Device::Cpu)?.isin(&among)?;
    /// assert_eq!(found.to_vec::<bool>()?, [false, false, true, false]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    isin(elements: x, test_elements: x): Sorting, All -> Bool = |op, self, test_elements| {
        same_device(op, &[self, test_elements])?;
        let n = test_elements.numel();
        if n == 0 {
            return Tensor::zeros(self.shape(), (DType::Bool, self.device()));
        }
        let dtype = result_type(&[self, test_elements], &[]).unwrap_or(self.dtype);
        let (x, among) = (self.detach().to_dtype(dtype)?, test_elements.detach().to_dtype(dtype)?.reshape(n)?);
        let among = sort_detached(op, &among, 0, false)?.0;
        binary_search(op, &among, &x, false, DType::Bool)
    };
    /// Returns the index at which each of `values` can be inserted in this tensor's sorted last dim to keep the order, as i64 (PyTorch's
    /// `searchsorted`).
    ///
    /// The index is the number of elements below the value, or with `right` the number of elements not above the value. NaN is inserted
    /// at the end. If this tensor is a vector, `values` can have any shape; otherwise all dims except the last must be equal. Fails with
    /// [`Error::Invalid`] for a scalar.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 3.0, 5.0], 3, Device::Cpu)?;
    /// let values = Tensor::from_slice(&[3f32, 6.0], 2, Device::Cpu)?;
    /// assert_eq!(t.searchsorted(&values, false)?.to_vec::<i64>()?, [1, 3]);
    /// assert_eq!(t.searchsorted(&values, true)?.to_vec::<i64>()?, [2, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    searchsorted(sorted_sequence: x, input: x, right: bool = false): Sorting, All -> I64 = |op, self, values, right| {
        binary_search(op, self, values, right, DType::I64)
    };
    /// Returns the bucket of each element between `boundaries`, a sorted vector, as i64 (PyTorch's `bucketize`). The bucket is the number
    /// of boundaries below the element, or with `right` the number of boundaries not above the element. Fails as [`Tensor::searchsorted`]
    /// does, and with [`Error::Invalid`] if `boundaries` is not a vector.
    bucketize(input: x, boundaries: x, right: bool = false): Sorting, All -> I64 = |op, self, boundaries, right| {
        invalid!(op if boundaries.rank() != 1, "the boundaries are a vector, not of shape {}", boundaries.shape());
        binary_search(op, boundaries, self, right, DType::I64)
    };
}

/// For each value, returns the index at which the value can be inserted in `sorted`, as i64, or whether the value occurs in `sorted`, as
/// bool. `dtype` selects which.
fn binary_search(op: &'static str, sorted: &Tensor, values: &Tensor, right: bool, dtype: DType) -> Result<Tensor> {
    same_device(op, &[sorted, values])?;
    same_dtype(op, &[sorted, values])?;
    let Some((_, leading)) = sorted.shape().dims().split_last() else {
        return Err(Error::invalid(op, "the sorted tensor is a scalar, and needs at least one dim"));
    };
    let of_values = values.shape().dims();
    mismatch!(op if !leading.is_empty() && of_values.split_last().is_none_or(|(_, of_values)| of_values != leading),
        sorted, values, "all dims except the last must be equal, or the sorted tensor must be a vector");
    // The strides of the sorted line that each value is searched in: 0 along the dims that only the values have.
    let mut strides: Dims<isize> = Dims::from_elem(0, values.rank());
    strides.iter_mut().zip(&sorted.strides()[..leading.len()]).for_each(|(to, &stride)| *to = stride);
    let lines = Layout { shape: values.shape().clone(), strides, offset: sorted.layout.offset };
    let step = sorted.strides()[leading.len()];
    backend::compute(values.shape(), dtype, values.device(), |b, out| {
        b.searchsorted(&Search { sorted, lines: &lines, step, values, right, out })
    })
}
