//! A tensor in several pieces: views along one dimension.

use super::Dims;
use crate::{Error, Result, Tensor};

/// As many items as `count` says: an error where there is no room for so many.
fn filled<T>(op: &'static str, count: usize, items: impl Iterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let too_many = |_| Error::invalid(op, format!("there is no room for a list of {count} tensors"));
    all.try_reserve_exact(count).map_err(too_many)?;
    for item in items {
        all.push(item?);
    }
    Ok(all)
}

impl Tensor {
    /// One tensor for each index of dimension `dim`, which goes (PyTorch's `unbind`).
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`].
    pub fn unbind(&self, dim: isize) -> Result<Vec<Tensor>> {
        let size = self.size_of("unbind", dim)?;
        filled("unbind", size, (0..size as isize).map(|i| self.select(dim, i)))
    }

    /// Pieces of `size` along dimension `dim`, the last as small as is left (PyTorch's `split`).
    ///
    /// # Errors
    /// A size of zero; [`Error::DimOutOfRange`].
    pub fn split(&self, size: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.size_of("split", dim)?;
        if size == 0 {
            return Err(Error::invalid("split", "pieces of size 0 never reach the end"));
        }
        // An empty dimension is one empty piece.
        let starts = (0..whole.max(1)).step_by(size);
        filled("split", starts.len(), starts.map(|i| self.narrow(dim, i, size.min(whole - i))))
    }

    /// Pieces of these sizes along dimension `dim` (PyTorch's `split` with a list).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let pieces = Tensor::arange(0, 5, 1, Device::Cpu)?.split_with_sizes(&[2, 3], 0)?;
    /// assert_eq!(pieces[1].to_vec::<f32>()?, [2.0, 3.0, 4.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Sizes that do not add up to the dimension's; [`Error::DimOutOfRange`].
    pub fn split_with_sizes(&self, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
        let (op, whole) = ("split_with_sizes", self.size_of("split_with_sizes", dim)?);
        if sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) != Some(whole) {
            return Err(Error::invalid(op, format!("the sizes {sizes:?} do not add up to {whole}")));
        }
        let mut end = 0;
        let piece = |&n: &usize| {
            end += n;
            self.narrow(dim, end - n, n)
        };
        sizes.iter().map(piece).collect()
    }

    /// At most `chunks` pieces of one size along dimension `dim`, the last as small as is left (PyTorch's `chunk`).
    ///
    /// # Errors
    /// Zero chunks; [`Error::DimOutOfRange`].
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.size_of("chunk", dim)?;
        if chunks == 0 {
            return Err(Error::invalid("chunk", "nothing can be cut into 0 chunks"));
        }
        self.split(whole.div_ceil(chunks).max(1), dim)
    }

    /// Exactly `sections` pieces along dimension `dim`, the first ones larger by one where they cannot be equal (PyTorch's
    /// `tensor_split`).
    ///
    /// # Errors
    /// Zero sections; [`Error::DimOutOfRange`].
    pub fn tensor_split(&self, sections: usize, dim: isize) -> Result<Vec<Tensor>> {
        let whole = self.size_of("tensor_split", dim)?;
        if sections == 0 {
            return Err(Error::invalid("tensor_split", "nothing can be cut into 0 sections"));
        }
        let size = |i: usize| whole / sections + usize::from(i < whole % sections);
        let sizes = filled("tensor_split", sections, (0..sections).map(|i| Ok(size(i))))?;
        self.split_with_sizes(&sizes, dim)
    }

    /// The pieces between these indexes of dimension `dim`, which are clamped as a slice's are (PyTorch's `tensor_split` with
    /// indices).
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`].
    pub fn tensor_split_at(&self, indices: &[isize], dim: isize) -> Result<Vec<Tensor>> {
        self.size_of("tensor_split_at", dim)?;
        let starts = std::iter::once(Some(0)).chain(indices.iter().copied().map(Some));
        let ends = indices.iter().copied().map(Some).chain([None]);
        starts.zip(ends).map(|(start, end)| self.slice(dim, start, end, 1)).collect()
    }

    fn size_of(&self, op: &'static str, dim: isize) -> Result<usize> {
        Ok(self.shape().dims()[self.shape().dim(op, dim)?])
    }

    /// With one dimension at least: a scalar becomes `[1]` (PyTorch's `atleast_1d`).
    ///
    /// # Errors
    /// None: it is a view.
    pub fn atleast_1d(&self) -> Result<Tensor> {
        if self.rank() == 0 { self.unsqueeze(0) } else { Ok(self.shallow_clone()) }
    }

    /// With two dimensions at least: a vector becomes a row (PyTorch's `atleast_2d`).
    ///
    /// # Errors
    /// None: it is a view.
    pub fn atleast_2d(&self) -> Result<Tensor> {
        if self.rank() < 2 { self.atleast_1d()?.unsqueeze(0) } else { Ok(self.shallow_clone()) }
    }

    /// With three dimensions at least: a matrix `[m, n]` becomes `[m, n, 1]`, a vector `[1, n, 1]` (PyTorch's `atleast_3d`).
    ///
    /// # Errors
    /// None: it is a view.
    pub fn atleast_3d(&self) -> Result<Tensor> {
        if self.rank() < 3 { self.atleast_2d()?.unsqueeze(-1) } else { Ok(self.shallow_clone()) }
    }

    /// Turned by `k` quarters from dimension `a` towards dimension `b` (PyTorch's `rot90`, whose `dims` are 0 and 1 where
    /// nothing is said). A view.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 4, 1, Device::Cpu)?.reshape([2, 2])?;
    /// assert_eq!(a.rot90(1, 0, 1)?.to_vec::<f32>()?, [1.0, 3.0, 0.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; the same dimension twice.
    pub fn rot90(&self, k: isize, a: isize, b: isize) -> Result<Tensor> {
        let op = "rot90";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        if i == j {
            return Err(Error::invalid(op, format!("it takes two dimensions, and {a} and {b} are one")));
        }
        match k.rem_euclid(4) {
            0 => Ok(self.shallow_clone()),
            1 => self.flip(b)?.transpose(a, b),
            2 => self.flip([a, b]),
            _ => self.flip(a)?.transpose(a, b),
        }
    }

    /// Every matrix (the last two dimensions) transposed (PyTorch's `mT`).
    ///
    /// # Errors
    /// Fewer than two dimensions.
    pub fn mt(&self) -> Result<Tensor> {
        self.transpose(-2, -1).map_err(|e| e.of("mt"))
    }

    /// Stretched to the shape of another (PyTorch's `expand_as`).
    ///
    /// # Errors
    /// As [`Tensor::expand`].
    pub fn expand_as(&self, other: &Tensor) -> Result<Tensor> {
        self.expand(other.shape()).map_err(|e| e.of("expand_as"))
    }

    /// The elements in the shape of another (PyTorch's `reshape_as`).
    ///
    /// # Errors
    /// As [`Tensor::reshape`].
    #[track_caller]
    pub fn reshape_as(&self, other: &Tensor) -> Result<Tensor> {
        self.reshape(other.shape()).map_err(|e| e.of("reshape_as"))
    }

    /// All elements in one dimension (PyTorch's `ravel`); a view where the strides can express it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn ravel(&self) -> Result<Tensor> {
        self.reshape(self.numel())
    }

    /// Without the dimensions `dims` whose size is 1 (PyTorch's `squeeze` with several dimensions).
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`].
    pub fn squeeze_dims(&self, dims: &[isize]) -> Result<Tensor> {
        let op = "squeeze_dims";
        let mut gone = dims.iter().map(|&d| self.shape().dim(op, d)).collect::<Result<Dims>>()?;
        gone.sort_unstable();
        gone.dedup();
        gone.iter().rev().try_fold(self.shallow_clone(), |t, &d| t.squeeze(d as isize))
    }
}
