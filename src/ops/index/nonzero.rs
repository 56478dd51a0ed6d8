//! Operations whose result shape depends on the elements: `unique`, `nonzero`, `masked_select`, `bincount` and similar. Each operation
//! waits for the device to read the size of its result.
//!
//! The indices of nonzero elements are counted and written in two passes. All other operations are composed of sorts, scans and
//! searches.

use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;

operations! {
    /// Returns the distinct elements in ascending order, as a vector (PyTorch's `unique`). Each NaN counts as distinct. Waits for the device.
    unique(input: x): Sorting, All -> Same = |op, self| {
        Ok(split_into_runs(&flatten_detached(self)?.sort(0, false)?.0)?.0)
    };
    /// Returns the vector of [`Tensor::unique`], and a tensor of this shape with the index of each element's value in that vector
    /// (PyTorch's `unique` with `return_inverse`). Waits for the device.
    unique_inverse(input: x) "unique": Sorting, All -> Same = |op, self| -> (Tensor, Tensor) {
        let (sorted, order) = flatten_detached(self)?.sort(0, false)?;
        let (values, running, _) = split_into_runs(&sorted)?;
        let inverse = running.sub_scalar(1)?.index_select(0, &order.argsort(0, false)?)?;
        Ok((values, inverse.reshape(self.shape())?))
    };
    /// Returns the vector of [`Tensor::unique`], and the number of occurrences of each value (PyTorch's `unique` with `return_counts`).
    /// Waits for the device.
    unique_counts(input: x) "unique": Sorting, All -> Same = |op, self| -> (Tensor, Tensor) {
        let (values, _, starts) = split_into_runs(&flatten_detached(self)?.sort(0, false)?.0)?;
        Ok((values, starts.diff(1, 0)?))
    };
    /// Returns the distinct elements, a tensor of this shape with the index of each element's value, and the number of occurrences of each
    /// value (PyTorch's `unique` with `return_inverse`, `return_counts` and `dim`). Waits for the device.
    ///
    /// With a dim, slices along that dim are compared instead of elements. The results are then the distinct slices in lexicographic
    /// order, and vectors of indices and counts.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1i64, 2, 0, 5, 1, 2], [3, 2], Device::Cpu)?;
    /// let (rows, inverse, counts) = t.unique_all(0)?;
    /// assert_eq!(rows.to_vec::<i64>()?, [0, 5, 1, 2]);
    /// assert_eq!((inverse.to_vec::<i64>()?, counts.to_vec::<i64>()?), (vec![1, 0, 1], vec![1, 2]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    unique_all(input: x, dim: int?) "unique": Sorting, All -> Same = |op, self, dim| -> (Tensor, Tensor, Tensor) {
        let slices = match dim {
            Some(dim) => {
                self.shape().dim(op, dim)?;
                self.detach().movedim(dim, 0)?
            }
            None => flatten_detached(self)?,
        };
        let n = slices.shape().dims()[0];
        let columns = slices.shape().dims()[1..].iter().product();
        let inverse = row_ranks(&slices.reshape([n, columns])?)?;
        let (sorted, order) = inverse.sort(0, false)?;
        let (_, _, starts) = split_into_runs(&sorted)?;
        let first = order.index_select(0, &starts.narrow(0, 0, starts.numel() - 1)?)?;
        let values = slices.index_select(0, &first)?;
        match dim {
            Some(dim) => Ok((values.movedim(0, dim)?, inverse, starts.diff(1, 0)?)),
            None => Ok((values, inverse.reshape(self.shape())?, starts.diff(1, 0)?)),
        }
    };
    /// Collapses each run of equal elements in row-major order. Returns the value of each run, a tensor of this shape with the index of each
    /// element's run, and the length of each run (PyTorch's `unique_consecutive` with `return_inverse` and `return_counts`). Waits for the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1i64, 1, 2, 2, 2, 1], 6, Device::Cpu)?;
    /// let (values, inverse, counts) = t.unique_consecutive()?;
    /// assert_eq!(values.to_vec::<i64>()?, [1, 2, 1]);
    /// assert_eq!(inverse.to_vec::<i64>()?, [0, 0, 1, 1, 1, 2]);
    /// assert_eq!(counts.to_vec::<i64>()?, [2, 3, 1]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    unique_consecutive(input: x): Sorting, All -> Same = |op, self| -> (Tensor, Tensor, Tensor) {
        let (values, running, starts) = split_into_runs(&flatten_detached(self)?)?;
        Ok((values, running.sub_scalar(1)?.reshape(self.shape())?, starts.diff(1, 0)?))
    };
    bincount(input: x, weights: x?, minlength: size = 0): Sorting, IntegersOnly -> I64;
    /// Counts the elements in each of `bins` equal parts of `min` to `max`, in this tensor's dtype (PyTorch's `histc`). Floats.
    ///
    /// Elements outside the range, and NaN, are not counted; `max` itself is counted in the last part. If `min` and `max` are equal, the
    /// minimum and maximum of the elements are used instead. Waits for the device. Fails with [`Error::Invalid`] for zero bins, for `max`
    /// below `min`, and for limits that are not finite.
    histc(input: x, bins: size = 100, min: float = 0, max: float = 0):
        Sorting, Floats -> Same = |op, self, bins, min, max| {
        self.dtype.check_float(op)?;
        let (mut low, mut high) = (min, max);
        if low == high && self.numel() > 0 {
            let end = |t: Tensor| t.to_device(Device::HOST)?.to_dtype(DType::F64)?.item::<f64>();
            (low, high) = (end(self.detach().min((), false)?)?, end(self.detach().max((), false)?)?);
        }
        if low == high {
            (low, high) = (low - 1.0, high + 1.0);
        }
        invalid!(op if bins == 0 || !(low < high && (high - low).is_finite()), "{low} to {high} cannot be divided into {bins} bins");
        let (x, [low_, high_, parts]) = (Expr::input(0), [0, 1, 2].map(Expr::scalar));
        let part = ((&x - &low_) * &parts / (&high_ - &low_)).floor().min(&parts - 1.0);
        let part = [(x.ge(&low_) * x.le(&high_)).select(part, &parts)];
        let scalars = [Scalar::Float(low), Scalar::Float(high), Scalar::Float(bins as f64)];
        let params = Params::from_scalars(&scalars);
        let counts = count_in_blocks(&flatten_detached(&self.detach())?, bins, |block| {
            let part = apply(op, &[block], params, &part, &[DType::I64])?.remove(0);
            part.bincount(None, bins.saturating_add(1))
        })?;
        counts.narrow(0, 0, bins)?.to_dtype(self.dtype)
    };
    /// Returns the indices of the nonzero elements, one row for each element in row-major order, as an i64 tensor of shape
    /// `[count, rank]` (PyTorch's `nonzero`). NaN counts as nonzero. Waits for the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[0f32, 1.0, 2.0, 0.0], [2, 2], Device::Cpu)?;
    /// assert_eq!(t.nonzero()?.to_vec::<i64>()?, [0, 1, 1, 0]);
    /// assert_eq!(t.masked_select(&t.gt_scalar(1)?)?.to_vec::<f32>()?, [2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    nonzero(input: x): Indexing, All -> I64 = |op, self| {
        if self.rank() == 0 {
            let count = nonzero_indices(self, &[1])?.numel();
            return Tensor::zeros([count, 0], (DType::I64, self.device()));
        }
        nonzero_indices(self, self.shape().dims())
    };
    /// Returns the elements where `mask` is not zero, in row-major order, as a vector (PyTorch's `masked_select`). Tensor and mask are
    /// broadcast against each other. Waits for the device. Differentiable.
    masked_select(input: x, mask: x): Indexing, All -> Same, differentiable = |op, self, mask| {
        same_device(op, &[self, mask])?;
        let shape = self.shape().broadcast(op, mask.shape())?;
        let over = |t: &Tensor| t.with_layout(t.layout.broadcast_to(&shape));
        let mask = over(mask);
        if shape.numel() > 0
            && !autograd::is_tracked(&[self])
            && let Some(selected) = backend::of_device(self.device()).masked_select(&over(self), &mask)?
        {
            return Ok(selected);
        }
        let selected = nonzero_indices(&mask, &[shape.numel()])?.reshape([-1])?;
        let sizes: Vec<isize> = shape.dims().iter().map(|&n| n as isize).collect();
        self.broadcast_to(sizes)?.reshape([shape.numel()])?.index_select(0, &selected)
    };
}

/// Returns the numbers `first..end` on the tensor's device, as i64.
fn index_range(first: i64, end: i64, t: &Tensor) -> Result<Tensor> {
    Tensor::arange(first, end, 1, (DType::I64, t.device()))
}

/// Returns the elements in row-major order, outside the graph.
fn flatten_detached(t: &Tensor) -> Result<Tensor> {
    t.detach().reshape([t.numel()])
}

/// Returns the indices of the nonzero elements in row-major order. Each row of the result is one index, as coordinates in a tensor with
/// the sizes `dims`.
fn nonzero_indices(t: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if t.numel() == 0 {
        return Tensor::zeros([0, dims.len()], (DType::I64, t.device()));
    }
    let t = t.detach();
    let mask = || if t.dtype == DType::Bool { t.contiguous() } else { t.ne_scalar(0)?.contiguous() };
    backend::of_device(t.device()).nonzero(&t, &mask, dims)
}

/// Splits a vector into runs of equal elements. Returns the value of each run; for each element, the number of its run (counted from 1);
/// and the start of each run, followed by the number of elements.
fn split_into_runs(t: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let n = t.numel();
    let first = Tensor::ones(n, (DType::Bool, t.device()))?;
    if n > 1 {
        first.narrow(0, 1, n - 1)?.copy_(&t.narrow(0, 1, n - 1)?.ne(&t.narrow(0, 0, n - 1)?)?)?;
    }
    let running = first.cumsum(0)?;
    let count = match running.storage.simulated_count("unique", n) {
        _ if n == 0 => 0,
        Some(largest) => largest as i64,
        None => running.select(0, -1)?.item::<i64>()?,
    };
    let starts = running.searchsorted(&index_range(1, count + 2, t)?, false)?;
    let values = t.index_select(0, &starts.narrow(0, 0, starts.numel() - 1)?)?;
    Ok((values, running, starts))
}

/// The minimum number of elements that are counted at a time. The sort needs 8 bytes of memory per element.
const MIN_BLOCK_LEN: usize = 1 << 20;

/// Divides a vector into blocks, calls `count`, which returns `results` counts for a block, and adds up the counts of all blocks.
fn count_in_blocks(t: &Tensor, results: usize, count: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (n, block) = (t.numel(), MIN_BLOCK_LEN.max(results));
    let sums = count(&t.narrow(0, 0, block.min(n))?)?;
    for start in (block..n).step_by(block) {
        sums.add_(&count(&t.narrow(0, start, block.min(n - start))?)?)?;
    }
    Ok(sums)
}

/// Returns for each element of `[N, C]` the number of distinct smaller elements in its column.
fn dense_ranks(t: &Tensor) -> Result<Tensor> {
    let (sorted, order) = t.sort(0, false)?;
    let rises = Tensor::zeros(t.shape(), (DType::I64, t.device()))?;
    let n = t.shape().dims()[0];
    if n > 1 {
        rises.narrow(0, 1, n - 1)?.copy_(&sorted.narrow(0, 1, n - 1)?.ne(&sorted.narrow(0, 0, n - 1)?)?)?;
    }
    rises.scatter(0, &order, &rises.cumsum(0)?)
}

/// Returns for each row of `[N, C]` the number of distinct rows that are lexicographically smaller. The ranks of adjacent columns are
/// combined in pairs, so that the number of launches grows with the logarithm of the number of columns.
fn row_ranks(rows: &Tensor) -> Result<Tensor> {
    let n = rows.shape().dims()[0];
    if rows.numel() == 0 {
        return Tensor::zeros(n, (DType::I64, rows.device()));
    }
    let mut ranks = dense_ranks(rows)?;
    while let columns @ 2.. = ranks.shape().dims()[1] {
        let pairs = ranks.narrow(1, 0, columns / 2 * 2)?.reshape([n, columns / 2, 2])?;
        let combined = pairs.select(2, 0)?.mul_scalar(n)?.add(&pairs.select(2, 1)?)?;
        let last = ranks.narrow(1, columns / 2 * 2, columns % 2)?;
        ranks = Tensor::cat(&[&dense_ranks(&combined)?, &last], 1)?;
    }
    ranks.squeeze(1)
}

impl Tensor {
    /// Counts how often each of the numbers 0, 1, 2, ... occurs in a vector of integers, as i64 (PyTorch's `bincount`). With weights, adds
    /// up the weights instead, in their dtype. The result has at least `minlength` elements, and the same bits on every run. Waits for the
    /// device. Fails with [`Error::UnsupportedDType`] for floats, bool and weights that are not floats; [`Error::Invalid`] if the tensor is
    /// not a vector or has a negative element; [`Error::ShapeMismatch`] for weights of another shape.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1i64, 3, 1], 3, Device::Cpu)?;
    /// assert_eq!(t.bincount(None, 5)?.to_vec::<i64>()?, [0, 2, 0, 1, 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        let op = "bincount";
        let tensors: Vec<&Tensor> = std::iter::once(self).chain(weights).collect();
        return_replacement!(op, tensors, minlength);
        unsupported!(op if self.dtype.is_float() || self.dtype == DType::Bool, self.dtype, "integers");
        invalid!(op if self.rank() != 1, "the input must be a vector, and has shape {}", self.shape());
        if let Some(w) = weights {
            w.dtype.check_float(op)?;
            mismatch!(op if w.shape() != self.shape(), self, w, "there is a weight for each element");
        }
        let end = |t: Tensor| t.to_dtype(DType::I64)?.item::<i64>();
        let (least, greatest) = match self.numel() {
            0 => (0, -1),
            _ => (end(self.min((), false)?)?, end(self.max((), false)?)?),
        };
        invalid!(op if least < 0, "the input must not be negative, and contains {least}");
        let size = greatest.saturating_add(1).max(i64::try_from(minlength).unwrap_or(i64::MAX));
        match weights {
            Some(w) => Tensor::zeros(size as usize, w)?.index_add(0, self, &w.detach()),
            None => count_in_blocks(self, size as usize, |block| {
                let sorted = block.sort(0, false)?.0.to_dtype(DType::I64)?;
                sorted.searchsorted(&index_range(0, size.saturating_add(1), self)?, false)?.diff(1, 0)
            }),
        }
    }
}
