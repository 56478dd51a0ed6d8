//! Operations whose result's shape depends on the elements: `unique`, `nonzero`, `masked_select`, `bincount` and similar. Each reads
//! the size of its result from the device, and so waits for it.
//!
//! Indices of nonzero elements are counted and written in two passes; the others are compositions of sorts, scans and searches.

use crate::backend::problem::map::Params;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply;
use crate::{DType, Device, Expr, Result, Scalar, Tensor, autograd, backend};

operations! {
    unique(input: x): Sorting, All -> Same;
    unique_inverse(input: x) "unique": Sorting, All -> Same;
    unique_counts(input: x) "unique": Sorting, All -> Same;
    unique_all(input: x, dim: int?) "unique": Sorting, All -> Same;
    unique_consecutive(input: x): Sorting, All -> Same;
    bincount(input: x, weights: x?, minlength: size = 0): Sorting, IntegersOnly -> I64;
    histc(input: x, bins: size = 100, min: float = 0, max: float = 0): Sorting, Floats -> Same;
    nonzero(input: x): Indexing, All -> I64;
    argwhere(input: x): Indexing, All -> I64;
    masked_select(input: x, mask: x): Indexing, All -> Same, differentiable;
}

/// `first..end` on the tensor's device, as i64.
fn range(first: i64, end: i64, t: &Tensor) -> Result<Tensor> {
    Tensor::arange(first, end, 1, (DType::I64, t.device()))
}

/// The elements in row-major order, outside the graph.
fn flatten(t: &Tensor) -> Result<Tensor> {
    t.detach().reshape([t.numel()])
}

/// Where a tensor is not zero, in one piece.
fn mask(t: &Tensor) -> Result<Tensor> {
    if t.dtype == DType::Bool { t.detach().contiguous() } else { t.detach().ne_scalar(0)?.contiguous() }
}

/// The indices of the elements that are not zero, in row-major order: one row each, as in a tensor of sizes `dims`.
fn indices(t: &Tensor, dims: &[usize]) -> Result<Tensor> {
    match t.device() {
        _ if t.numel() == 0 => Tensor::zeros([0, dims.len()], (DType::I64, t.device())),
        device => backend::of(device).nonzero(t, &|| mask(t), dims),
    }
}

/// A vector's runs of equal elements: the element of each; for each element the number of its run, from 1; where each run starts,
/// and at the end the number of elements.
fn runs(t: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let n = t.numel();
    let first = Tensor::ones(n, (DType::Bool, t.device()))?;
    if n > 1 {
        first.narrow(0, 1, n - 1)?.copy_(&t.narrow(0, 1, n - 1)?.ne(&t.narrow(0, 0, n - 1)?)?)?;
    }
    let running = first.cumsum(0)?;
    let count = if n == 0 { 0 } else { running.select(0, -1)?.item::<i64>()? };
    let starts = running.searchsorted(&range(1, count + 2, t)?, false)?;
    let values = t.index_select(0, &starts.narrow(0, 0, starts.numel() - 1)?)?;
    Ok((values, running, starts))
}

/// Elements that are counted at a time, at least: the places of each take 8 bytes.
const BLOCK: usize = 1 << 20;

/// The sums of what `count` gives for blocks of a vector: `results` numbers.
fn summed_by_blocks(t: &Tensor, results: usize, count: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (n, block) = (t.numel(), BLOCK.max(results));
    let sums = count(&t.narrow(0, 0, block.min(n))?)?;
    for start in (block..n).step_by(block) {
        sums.add_(&count(&t.narrow(0, start, block.min(n - start))?)?)?;
    }
    Ok(sums)
}

/// For every element of `[N, C]` how many different elements of its column are below it.
fn dense_ranks(t: &Tensor) -> Result<Tensor> {
    let (sorted, order) = t.sort(0, false)?;
    let rises = Tensor::zeros(t.shape(), (DType::I64, t.device()))?;
    let n = t.shape().dims()[0];
    if n > 1 {
        rises.narrow(0, 1, n - 1)?.copy_(&sorted.narrow(0, 1, n - 1)?.ne(&sorted.narrow(0, 0, n - 1)?)?)?;
    }
    rises.scatter(0, &order, &rises.cumsum(0)?)
}

/// For every row of `[N, C]` how many different rows are below it, compared from the left. Ranks of neighbouring columns are
/// combined in pairs, so that the number of launches grows with the logarithm of the columns.
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
    /// The different elements, in ascending order; a vector (PyTorch's `unique`). Every NaN is different. Waits.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and device failures.
    #[track_caller]
    pub fn unique(&self) -> Result<Tensor> {
        replaced!("unique", [self]);
        Ok(runs(&flatten(self)?.sort(0, false)?.0)?.0)
    }

    /// [`Tensor::unique`], and for every element the place of its equal there, of this tensor's shape (PyTorch's `unique`
    /// with `return_inverse`). Waits.
    ///
    /// # Errors
    /// As [`Tensor::unique`].
    #[track_caller]
    pub fn unique_inverse(&self) -> Result<(Tensor, Tensor)> {
        replaced!("unique_inverse", [self]);
        let (sorted, order) = flatten(self)?.sort(0, false)?;
        let (values, running, _) = runs(&sorted)?;
        let inverse = running.sub_scalar(1)?.index_select(0, &order.argsort(0, false)?)?;
        Ok((values, inverse.reshape(self.shape())?))
    }

    /// [`Tensor::unique`], and how often each element is there (PyTorch's `unique` with `return_counts`). Waits.
    ///
    /// # Errors
    /// As [`Tensor::unique`].
    #[track_caller]
    pub fn unique_counts(&self) -> Result<(Tensor, Tensor)> {
        replaced!("unique_counts", [self]);
        let (values, _, starts) = runs(&flatten(self)?.sort(0, false)?.0)?;
        Ok((values, starts.diff(1, 0)?))
    }

    /// [`Tensor::unique`] with all that it tells: the different elements, for every element the index of its equal among them, in
    /// this tensor's shape, and how often each is there. Along a dim it is about the slices at each index of that dim, in
    /// lexicographic order: the different ones, and a vector each of indices and counts (PyTorch's `unique` with
    /// `return_inverse`, `return_counts` and `dim`). Waits.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1i64, 2, 0, 5, 1, 2], [3, 2], Device::Cpu)?;
    /// let (rows, inverse, counts) = t.unique_all(0)?;
    /// assert_eq!(rows.to_vec::<i64>()?, [0, 5, 1, 2]);
    /// assert_eq!((inverse.to_vec::<i64>()?, counts.to_vec::<i64>()?), (vec![1, 0, 1], vec![1, 2]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; those of [`Tensor::unique`].
    #[track_caller]
    pub fn unique_all(&self, dim: impl Into<Option<isize>>) -> Result<(Tensor, Tensor, Tensor)> {
        let dim = dim.into();
        replaced!(op = "unique_all", [self], dim);
        let slices = match dim {
            Some(dim) => {
                self.shape().dim(op, dim)?;
                self.detach().movedim(dim, 0)?
            }
            None => flatten(self)?,
        };
        let n = slices.shape().dims()[0];
        let columns = slices.shape().dims()[1..].iter().product();
        let inverse = row_ranks(&slices.reshape([n, columns])?)?;
        let (sorted, order) = inverse.sort(0, false)?;
        let (_, _, starts) = runs(&sorted)?;
        let first = order.index_select(0, &starts.narrow(0, 0, starts.numel() - 1)?)?;
        let values = slices.index_select(0, &first)?;
        match dim {
            Some(dim) => Ok((values.movedim(0, dim)?, inverse, starts.diff(1, 0)?)),
            None => Ok((values, inverse.reshape(self.shape())?, starts.diff(1, 0)?)),
        }
    }

    /// One of each run of equal elements in row-major order, for every element the number of its run, of this tensor's
    /// shape, and how long each run is (PyTorch's `unique_consecutive` with `return_inverse` and `return_counts`). Waits.
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
    ///
    /// # Errors
    /// As [`Tensor::unique`].
    #[track_caller]
    pub fn unique_consecutive(&self) -> Result<(Tensor, Tensor, Tensor)> {
        replaced!("unique_consecutive", [self]);
        let (values, running, starts) = runs(&flatten(self)?)?;
        Ok((values, running.sub_scalar(1)?.reshape(self.shape())?, starts.diff(1, 0)?))
    }

    /// The indices of the elements that are not zero, one row for each in row-major order: shape `[count, rank]`, i64
    /// (PyTorch's `nonzero`). NaN is not zero. Waits.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[0f32, 1.0, 2.0, 0.0], [2, 2], Device::Cpu)?;
    /// assert_eq!(t.nonzero()?.to_vec::<i64>()?, [0, 1, 1, 0]);
    /// assert_eq!(t.masked_select(&t.gt_scalar(1)?)?.to_vec::<f32>()?, [2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and device failures.
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        replaced!("nonzero", [self]);
        if self.rank() == 0 {
            let count = indices(self, &[1])?.numel();
            return Tensor::zeros([count, 0], (DType::I64, self.device()));
        }
        indices(self, self.shape().dims())
    }

    /// [`Tensor::nonzero`] by its other name (PyTorch's `argwhere`).
    ///
    /// # Errors
    /// As [`Tensor::nonzero`].
    #[track_caller]
    pub fn argwhere(&self) -> Result<Tensor> {
        replaced!("argwhere", [self]);
        self.nonzero()
    }

    /// The elements where `mask` is not zero, in row-major order; a vector (PyTorch's `masked_select`). Both are broadcast
    /// together. Waits. Differentiable.
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`], [`Error::DeviceMismatch`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        replaced!(op = "masked_select", [self, mask]);
        crate::ops::same_device(op, &[self, mask])?;
        let shape = self.shape().broadcast(op, mask.shape())?;
        let over = |t: &Tensor| t.with_layout(t.layout.broadcast_to(&shape));
        let mask = over(mask);
        if shape.numel() > 0
            && !autograd::is_tracked(&[self])
            && let Some(selected) = backend::of(self.device()).masked_select(&over(self), &mask)?
        {
            return Ok(selected);
        }
        let selected = indices(&mask, &[shape.numel()])?.reshape([-1])?;
        let sizes: Vec<isize> = shape.dims().iter().map(|&n| n as isize).collect();
        self.broadcast_to(sizes)?.reshape([shape.numel()])?.index_select(0, &selected)
    }

    /// How often each number from 0 on is in a vector of integers, as i64; with weights their sums, in the weights' dtype
    /// (PyTorch's `bincount`). At least `minlength` results. The same bits on every run. Waits.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1i64, 3, 1], 3, Device::Cpu)?;
    /// assert_eq!(t.bincount(None, 5)?.to_vec::<i64>()?, [0, 2, 0, 1, 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for floats, bool and weights that are not floats; [`Error::Invalid`] where the tensor is
    /// no vector or has a negative element; [`Error::ShapeMismatch`] for weights of another shape.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        let op = "bincount";
        let tensors: Vec<&Tensor> = std::iter::once(self).chain(weights).collect();
        replaced!(op, tensors, minlength);
        unsupported!(op if self.dtype.is_float() || self.dtype == DType::Bool,
            self.dtype, "integers (i64, i32, u32, u8)");
        invalid!(op if self.rank() != 1, "it counts in a vector, not in shape {}", self.shape());
        if let Some(w) = weights {
            w.dtype.check_float(op)?;
            mismatch!(op if w.shape() != self.shape(), self, w, "there is a weight for each element");
        }
        let end = |t: Tensor| t.to_dtype(DType::I64)?.item::<i64>();
        let (least, greatest) = match self.numel() {
            0 => (0, -1),
            _ => (end(self.min((), false)?)?, end(self.max((), false)?)?),
        };
        invalid!(op if least < 0, "{least} is negative: numbers from 0 on are counted");
        let size = greatest.saturating_add(1).max(i64::try_from(minlength).unwrap_or(i64::MAX));
        match weights {
            Some(w) => Tensor::zeros(size as usize, w)?.index_add(0, self, &w.detach()),
            None => summed_by_blocks(self, size as usize, |block| {
                let sorted = block.sort(0, false)?.0.to_dtype(DType::I64)?;
                sorted.searchsorted(&range(0, size.saturating_add(1), self)?, false)?.diff(1, 0)
            }),
        }
    }

    /// How many elements lie in each of `bins` equal parts of `min` to `max`, in this tensor's dtype (PyTorch's `histc`);
    /// floats. What is outside, NaN too, does not count; `max` itself is in the last part. Where `min` and `max` are equal,
    /// the least and greatest element stand for them. Waits.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`]; [`Error::Invalid`] without bins, for `max` below `min`, and for ends that are not finite.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<Tensor> {
        replaced!(op = "histc", [self], bins, min, max);
        self.dtype.check_float(op)?;
        let (mut low, mut high) = (min, max);
        if low == high && self.numel() > 0 {
            let end = |t: Tensor| t.to_device(Device::HOST)?.to_dtype(DType::F64)?.item::<f64>();
            (low, high) = (end(self.detach().min((), false)?)?, end(self.detach().max((), false)?)?);
        }
        if low == high {
            (low, high) = (low - 1.0, high + 1.0);
        }
        invalid!(op if bins == 0 || !(low < high && (high - low).is_finite()), "{bins} parts of {low} to {high}");
        let (x, [low_, high_, parts]) = (Expr::input(0), [0, 1, 2].map(Expr::scalar));
        let part = ((&x - &low_) / (&high_ - &low_) * &parts).floor().min(&parts - 1.0);
        let part = [(x.ge(&low_) * x.le(&high_)).select(part, &parts)];
        let scalars = [Scalar::Float(low), Scalar::Float(high), Scalar::Float(bins as f64)];
        let params = Params::of(&scalars);
        let counts = summed_by_blocks(&flatten(&self.detach())?, bins, |block| {
            let part = apply(op, &[block], params, &part, &[DType::I64])?.remove(0);
            part.bincount(None, bins.saturating_add(1))
        })?;
        counts.narrow(0, 0, bins)?.to_dtype(self.dtype)
    }
}
