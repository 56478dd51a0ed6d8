//! Splitting along a dimension, and other views that are composed of a few simple views.

use super::Dims;
use crate::{Error, Result, Tensor};

/// Collects `count` items. Returns an error instead of aborting if there is no memory for the list.
fn try_collect_list<T>(op: &'static str, count: usize, items: impl Iterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let too_many = |_| Error::invalid(op, format!("there is not enough memory for a list of {count} tensors"));
    all.try_reserve_exact(count).map_err(too_many)?;
    for item in items {
        all.push(item?);
    }
    Ok(all)
}

impl Tensor {
    /// Returns one view for each index of dimension `dim`, without that dimension (PyTorch's `unbind`).
    pub fn unbind(&self, dim: isize) -> Result<Vec<Tensor>> {
        let size = self.dim_size("unbind", dim)?;
        try_collect_list("unbind", size, (0..size as isize).map(|i| self.select(dim, i)))
    }

    /// Splits dimension `dim` into pieces of `size`; the last piece has the remainder (PyTorch's `split`). Fails for a size of
    /// zero.
    pub fn split(&self, size: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.dim_size("split", dim)?;
        invalid!("split" if size == 0, "the size of a piece must be above 0");
        // An empty dimension gives one empty piece.
        let starts = (0..whole.max(1)).step_by(size);
        try_collect_list("split", starts.len(), starts.map(|i| self.narrow(dim, i, size.min(whole - i))))
    }

    /// Splits dimension `dim` into pieces of the given `sizes` (PyTorch's `split` with a list). Fails unless the sum of `sizes` is the
    /// size of the dimension.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let pieces = Tensor::arange(0, 5, 1, Device::Cpu)?.split_with_sizes(&[2, 3], 0)?;
    /// assert_eq!(pieces[1].to_vec::<f32>()?, [2.0, 3.0, 4.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn split_with_sizes(&self, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
        let (op, whole) = ("split_with_sizes", self.dim_size("split_with_sizes", dim)?);
        invalid!(op if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(whole),
            "the sizes {sizes:?} do not add up to {whole}");
        let mut end = 0;
        let piece = |&n: &usize| {
            end += n;
            self.narrow(dim, end - n, n)
        };
        sizes.iter().map(piece).collect()
    }

    /// Splits dimension `dim` into at most `chunks` pieces of equal size; the last piece has the remainder (PyTorch's `chunk`). Fails for
    /// zero chunks.
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.dim_size("chunk", dim)?;
        invalid!("chunk" if chunks == 0, "the number of chunks must be above 0");
        self.split(whole.div_ceil(chunks).max(1), dim)
    }

    /// Splits dimension `dim` into exactly `sections` pieces; the first pieces are larger by one if the sizes cannot be equal
    /// (PyTorch's `tensor_split`). Fails for zero sections.
    pub fn tensor_split(&self, sections: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.dim_size("tensor_split", dim)?;
        invalid!("tensor_split" if sections == 0, "the number of sections must be above 0");
        let size = |i: usize| whole / sections + usize::from(i < whole % sections);
        let sizes = try_collect_list("tensor_split", sections, (0..sections).map(|i| Ok(size(i))))?;
        self.split_with_sizes(&sizes, dim)
    }

    /// Splits dimension `dim` at the given indexes, which are clamped like the ends of a slice (PyTorch's `tensor_split` with indices).
    pub fn tensor_split_at(&self, indices: &[isize], dim: isize) -> Result<Vec<Tensor>> {
        self.dim_size("tensor_split_at", dim)?;
        let starts = std::iter::once(Some(0)).chain(indices.iter().copied().map(Some));
        let ends = indices.iter().copied().map(Some).chain([None]);
        starts.zip(ends).map(|(start, end)| self.slice(dim, start, end, 1)).collect()
    }

    fn dim_size(&self, op: &'static str, dim: isize) -> Result<usize> {
        Ok(self.shape().dims()[self.shape().dim(op, dim)?])
    }

    /// Reshapes a scalar to `[1]`; other tensors keep their shape (PyTorch's `atleast_1d`).
    pub fn atleast_1d(&self) -> Result<Tensor> {
        if self.rank() == 0 { self.unsqueeze(0) } else { Ok(self.shallow_clone()) }
    }

    /// Adds leading dimensions until there are two, so that a vector becomes a row (PyTorch's `atleast_2d`).
    pub fn atleast_2d(&self) -> Result<Tensor> {
        if self.rank() < 2 { self.atleast_1d()?.unsqueeze(0) } else { Ok(self.shallow_clone()) }
    }

    /// Adds dimensions until there are three: a matrix `[m, n]` becomes `[m, n, 1]`, a vector `[n]` becomes `[1, n, 1]` (PyTorch's
    /// `atleast_3d`).
    pub fn atleast_3d(&self) -> Result<Tensor> {
        if self.rank() < 3 { self.atleast_2d()?.unsqueeze(-1) } else { Ok(self.shallow_clone()) }
    }

    /// Returns the view rotated by `k` times 90 degrees from dimension `a` towards dimension `b` (PyTorch's `rot90`, where the
    /// dimensions default to 0 and 1). Fails for two equal dimensions.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([2, 2])?;
    /// assert_eq!(a.rot90(1, 0, 1)?.to_vec::<f32>()?, [1.0, 3.0, 0.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn rot90(&self, k: isize, a: isize, b: isize) -> Result<Tensor> {
        let op = "rot90";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        invalid!(op if i == j, "a rotation needs two dimensions, and {a} and {b} are the same");
        match k.rem_euclid(4) {
            0 => Ok(self.shallow_clone()),
            1 => self.flip(b)?.transpose(a, b),
            2 => self.flip([a, b]),
            _ => self.flip(a)?.transpose(a, b),
        }
    }

    /// Swaps the last two dimensions (PyTorch's `mT`). Fails for fewer than two dimensions.
    pub fn mt(&self) -> Result<Tensor> {
        self.transpose(-2, -1).map_err(|e| e.with_op("mt"))
    }

    /// Expands to the shape of `other` (PyTorch's `expand_as`). Fails as [`Tensor::expand`] does.
    pub fn expand_as(&self, other: &Tensor) -> Result<Tensor> {
        self.expand(other.shape()).map_err(|e| e.with_op("expand_as"))
    }

    /// Reshapes to the shape of `other` (PyTorch's `reshape_as`). Fails as [`Tensor::reshape`] does.
    #[track_caller]
    pub fn reshape_as(&self, other: &Tensor) -> Result<Tensor> {
        self.reshape(other.shape()).map_err(|e| e.with_op("reshape_as"))
    }

    /// Flattens to one dimension (PyTorch's `ravel`); a view if the strides allow it.
    #[track_caller]
    pub fn ravel(&self) -> Result<Tensor> {
        self.reshape(self.numel())
    }

    /// Removes each of the dimensions `dims` whose size is 1 (PyTorch's `squeeze` with several dimensions).
    pub fn squeeze_dims(&self, dims: &[isize]) -> Result<Tensor> {
        let op = "squeeze_dims";
        let mut removed = dims.iter().map(|&d| self.shape().dim(op, d)).collect::<Result<Dims>>()?;
        removed.sort_unstable();
        removed.dedup();
        removed.iter().rev().try_fold(self.shallow_clone(), |t, &d| t.squeeze(d as isize))
    }
}
