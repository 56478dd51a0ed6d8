//! Concatenation and repetition.

use std::borrow::Borrow;

use smallvec::SmallVec;

use crate::autograd::{is_tracked, record_twice, record_unary_twice};
use crate::layout::shape::{Dims, NewShape, Shape};
use crate::ops::PadMode;
use crate::ops::dispatch::prelude::*;
use crate::ops::dispatch::promote;
use crate::tensor::Layout;
use crate::{DType, MemoryFormat, Result, Tensor, backend};

impl Tensor {
    /// Tensors one after another along dimension `dim`, in which alone their shapes may differ (PyTorch's `cat`). Dtypes
    /// promote; vectors of no element go with every shape. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros(&[2, 3], Device::Cpu)?;
    /// let b = Tensor::ones(&[1, 3], Device::Cpu)?;
    /// assert_eq!(Tensor::cat(&[&a, &b], 0)?.shape().dims(), &[3, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// No tensor at all; tensors on different devices, or whose other sizes differ.
    #[track_caller]
    pub fn cat<T: Borrow<Tensor>>(tensors: &[T], dim: isize) -> Result<Tensor> {
        let tensors = borrowed(tensors);
        replaced!(op = "cat", tensors, dim);
        join(op, &tensors, dim)
    }

    /// Tensors of one shape along a new dimension, which is dimension `dim` of the result (PyTorch's `stack`).
    /// Differentiable.
    ///
    /// # Errors
    /// No tensor at all; tensors of different shapes or on different devices.
    #[track_caller]
    pub fn stack<T: Borrow<Tensor>>(tensors: &[T], dim: isize) -> Result<Tensor> {
        let op = "stack";
        let first = tensors.first().map(Borrow::borrow).ok_or_else(|| Error::invalid(op, "there is no tensor"))?;
        replaced!(op, borrowed(tensors), dim);
        if let Some(t) = tensors.iter().map(Borrow::borrow).find(|t| t.shape() != first.shape()) {
            return Err(shape_mismatch(op, first, t, "they must be equal"));
        }
        join_all(op, tensors, dim, |t| t.unsqueeze(dim))
    }

    /// Tensors side by side: along the second dimension, vectors along their only one (PyTorch's `hstack`).
    ///
    /// # Errors
    /// As [`Tensor::cat`].
    #[track_caller]
    pub fn hstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        let vectors = tensors.first().is_none_or(|t| t.borrow().rank() < 2);
        stacked("hstack", tensors, if vectors { 0 } else { 1 }, Tensor::atleast_1d)
    }

    /// Tensors on top of each other: along the first dimension, vectors as rows (PyTorch's `vstack`).
    ///
    /// # Errors
    /// As [`Tensor::cat`].
    #[track_caller]
    pub fn vstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        stacked("vstack", tensors, 0, Tensor::atleast_2d)
    }

    /// Tensors one behind the other: along the third dimension (PyTorch's `dstack`).
    ///
    /// # Errors
    /// As [`Tensor::cat`].
    #[track_caller]
    pub fn dstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        stacked("dstack", tensors, 2, Tensor::atleast_3d)
    }

    /// Vectors as the columns of a matrix, beside matrices (PyTorch's `column_stack`).
    ///
    /// # Errors
    /// As [`Tensor::cat`].
    #[track_caller]
    pub fn column_stack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        stacked("column_stack", tensors, 1, |t| {
            if t.rank() < 2 { t.reshape([t.numel(), 1]) } else { Ok(t.shallow_clone()) }
        })
    }

    /// A matrix with these on its diagonal, one after another, and zeros elsewhere; vectors are rows (PyTorch's
    /// `block_diag`). Differentiable.
    ///
    /// # Errors
    /// No tensor at all; one of three dimensions or more; tensors on different devices.
    #[track_caller]
    pub fn block_diag<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        replaced!(op = "block_diag", borrowed(tensors));
        let blocks = tensors.iter().map(|t| t.borrow().atleast_2d()).collect::<Result<Vec<_>>>()?;
        invalid!(op if let Some(t) = blocks.iter().find(|t| t.rank() > 2),
            "a tensor of shape {} is no matrix", t.shape());
        let width = blocks.iter().fold(0isize, |sum, t| sum.saturating_add_unsigned(t.shape().dims()[1]));
        let mut left = 0isize;
        join_all(op, &blocks, 0, |t| {
            let columns = t.shape().dims()[1] as isize;
            left = left.saturating_add(columns);
            t.pad(&[left - columns, width - left], PadMode::default())
        })
    }

    /// This tensor `repeats[i]` times along dimension i; more numbers than dimensions add dimensions in front (PyTorch's
    /// `repeat`). Always a copy. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 2, 1, Device::Cpu)?;
    /// assert_eq!(a.repeat(&[2, 2])?.to_vec::<f32>()?, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fewer numbers than dimensions; [`Error::OutOfMemory`].
    #[track_caller]
    pub fn repeat(&self, repeats: &[usize]) -> Result<Tensor> {
        replaced!("repeat", [self], repeats);
        self.repeated("repeat", repeats)
    }

    /// [`Tensor::repeat`], but fewer numbers than dimensions leave the first ones as they are (PyTorch's `tile`).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn tile(&self, repeats: &[usize]) -> Result<Tensor> {
        replaced!("tile", [self], repeats);
        let missing = self.rank().saturating_sub(repeats.len());
        let all: Dims = std::iter::repeat_n(1, missing).chain(repeats.iter().copied()).collect();
        self.repeated("tile", &all)
    }

    /// A copy, recorded.
    pub(crate) fn owned(&self, op: &'static str) -> Result<Tensor> {
        Ok(record_unary_twice(op, self.copied(false)?, self, Ok))
    }

    fn repeated(&self, op: &'static str, repeats: &[usize]) -> Result<Tensor> {
        let Some(more) = repeats.len().checked_sub(self.rank()) else {
            let reason = format!("{} numbers are fewer than the dimensions of shape {}", repeats.len(), self.shape());
            return Err(Error::invalid(op, reason));
        };
        // Each repeated dimension is split in two: the repetitions, of stride 0, and the dimension itself.
        let (mut split, mut wide, mut whole): (Dims, Dims, Dims) = Default::default();
        for (i, &n) in repeats.iter().enumerate() {
            let size = i.checked_sub(more).map_or(1, |d| self.shape().dims()[d]);
            if n != 1 {
                split.push(1);
                wide.push(n);
            }
            split.push(size);
            wide.push(size);
            whole.push(size.saturating_mul(n));
        }
        let shapes = [split, wide, whole].map(|dims| NewShape::from(&dims.into_iter().collect::<Shape>()));
        let [split, wide, whole] = shapes;
        let out = self.view(split).and_then(|t| t.expand(wide)?.reshape(whole)).named(op)?;
        if out.shares_storage(self) { out.owned(op) } else { Ok(out) }
    }

    /// Each index of dimension `dim` `repeats` times in a row; None flattens first (PyTorch's `repeat_interleave`).
    /// Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 2, 1, Device::Cpu)?;
    /// assert_eq!(a.repeat_interleave(3, 0)?.to_vec::<f32>()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn repeat_interleave(&self, repeats: usize, dim: impl Into<Option<isize>>) -> Result<Tensor> {
        let op = "repeat_interleave";
        let dim = dim.into();
        replaced!(op, [self], repeats, dim);
        let Some(dim) = dim else { return self.reshape(self.numel())?.repeat_interleave(repeats, 0) };
        let d = self.shape().dim(op, dim)?;
        let mut sizes: Dims<isize> = SmallVec::from_elem(-1, self.rank() + 1);
        sizes[d + 1] = isize::try_from(repeats).unwrap_or(isize::MAX);
        let wide = self.unsqueeze(d as isize + 1)?.expand(&sizes[..]).named(op)?;
        let mut whole = Dims::from_slice(self.shape().dims());
        whole[d] = whole[d].saturating_mul(repeats);
        let out = wide.reshape(whole.into_iter().collect::<Shape>())?;
        if out.shares_storage(self) { out.owned(op) } else { Ok(out) }
    }

    /// Index i of dimension `dim` `repeats[i]` times in a row (PyTorch's `repeat_interleave` with a tensor). Waits for the
    /// device: the numbers say how large the result is. Differentiable.
    ///
    /// # Errors
    /// `repeats` that is not a vector of integers, of one number for each index, none negative; [`Error::DimOutOfRange`].
    #[track_caller]
    pub fn repeat_interleave_tensor(&self, repeats: &Tensor, dim: isize) -> Result<Tensor> {
        replaced!(op = "repeat_interleave_tensor", [self, repeats], dim);
        let d = self.shape().dim(op, dim)?;
        let size = self.shape().dims()[d];
        if repeats.shape().dims() != [size] || repeats.dtype().is_float() {
            let reason = format!(
                "a {} tensor of shape {} does not have a whole number for each of {size} indexes",
                repeats.dtype(),
                repeats.shape()
            );
            return Err(Error::invalid(op, reason));
        }
        let counts = repeats.to_dtype(DType::I64)?.to_vec::<i64>()?;
        if let Some(n) = counts.iter().find(|&&n| n < 0) {
            return Err(Error::invalid(op, format!("{n} repetitions make no sense")));
        }
        let total = counts.iter().fold(0usize, |sum, &n| sum.saturating_add(n as usize));
        let mut indices: Vec<i64> = Vec::new();
        let too_many = |_| Error::invalid(op, format!("there is no room for {total} indices"));
        indices.try_reserve_exact(total).map_err(too_many)?;
        indices.extend((0..).zip(&counts).flat_map(|(i, &n)| std::iter::repeat_n(i, n as usize)));
        let index = Tensor::from_vec(indices, total, self.device())?;
        self.index_select(d as isize, &index)
    }

    /// The elements moved `shifts[i]` places on along dimension `dims[i]`, and from the end to the start; without any
    /// dimension along the flattened tensor (PyTorch's `roll`). Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// assert_eq!(a.roll(&[2], &[0])?.to_vec::<f32>()?, [3.0, 4.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Not one shift for each dimension; [`Error::DimOutOfRange`].
    #[track_caller]
    pub fn roll(&self, shifts: &[isize], dims: &[isize]) -> Result<Tensor> {
        replaced!(op = "roll", [self], shifts, dims);
        if dims.is_empty() && shifts.len() == 1 {
            return self.reshape(self.numel())?.roll(shifts, &[0])?.reshape(self.shape());
        }
        invalid!(op if dims.len() != shifts.len() || dims.is_empty(),
            "{} shifts do not go with {} dimensions", shifts.len(), dims.len());
        dims.iter().zip(shifts).try_fold(self.shallow_clone(), |x, (&dim, &shift)| {
            let size = x.shape().dims()[x.shape().dim(op, dim)?];
            let head = if size == 0 { 0 } else { shift.rem_euclid(size as isize) as usize };
            Tensor::cat(&[x.narrow(dim, size - head, head)?, x.narrow(dim, 0, size - head)?], dim).named(op)
        })
    }
}

type Tensors<'a> = SmallVec<[&'a Tensor; 4]>;

fn borrowed<T: Borrow<Tensor>>(tensors: &[T]) -> Tensors<'_> {
    tensors.iter().map(Borrow::borrow).collect()
}

/// [`join_all`] where nothing registered replaces it.
#[track_caller]
fn stacked<T: Borrow<Tensor>>(
    op: &'static str,
    tensors: &[T],
    dim: isize,
    each: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    replaced!(op, borrowed(tensors));
    join_all(op, tensors, dim, each)
}

fn join_all<T: Borrow<Tensor>>(
    op: &'static str,
    tensors: &[T],
    dim: isize,
    each: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let made: Result<SmallVec<[Tensor; 4]>> = tensors.iter().map(Borrow::borrow).map(each).collect();
    join(op, &made.named(op)?.iter().collect::<Tensors>(), dim)
}

fn join(op: &'static str, all: &[&Tensor], dim: isize) -> Result<Tensor> {
    let is_empty_vector = |t: &&Tensor| t.shape().dims() == [0];
    let Some(first) = all.iter().find(|t| !is_empty_vector(t)).or(all.first()).copied() else {
        return Err(Error::invalid(op, "there is no tensor"));
    };
    let tensors: Tensors = all.iter().copied().filter(|t| first.rank() == 1 || !is_empty_vector(t)).collect();
    let d = first.shape().dim(op, dim)?;
    let mut dims = Dims::from_slice(first.shape().dims());
    let mut pieces = SmallVec::<[(usize, DType); 4]>::new();
    dims[d] = 0;
    for t in &tensors {
        let others = |s: &Shape| s.dims().iter().enumerate().all(|(i, &n)| i == d || dims[i] == n);
        mismatch!(op if t.rank() != first.rank() || !others(t.shape()),
            first, t, "only the joined dimension may differ");
        same_device(op, &[first, t])?;
        pieces.push((t.shape().dims()[d], t.dtype()));
    }
    dims[d] = pieces.iter().fold(0, |sum, &(n, _)| sum.saturating_add(n));
    let dtype = promote::result_type(all, &[]).unwrap_or(first.dtype());
    // In the format of all that are joined, as PyTorch's `cat`.
    let format = first.memory_format();
    let format = if tensors.iter().all(|t| t.memory_format() == format || t.is_contiguous_in(format)) {
        format
    } else {
        MemoryFormat::Contiguous
    };
    let out = Tensor::empty_like_layout(Layout::in_format(dims[..].into(), format), dtype, first.device())?;
    let joined = match format {
        MemoryFormat::Contiguous => backend::of(out.device()).join(&out, &tensors, d)?,
        _ => {
            let view = |t: &Tensor| t.with_layout(t.layout.with_channels_last(t.rank()));
            let (views, rank): (SmallVec<[Tensor; 4]>, _) = (tensors.iter().map(|t| view(t)).collect(), out.rank());
            let d = if d == 1 { rank - 1 } else { d.saturating_sub(1) };
            backend::of(out.device()).join(&view(&out), &views.iter().collect::<Tensors>(), d)?
        }
    };
    if !joined {
        let mut start = 0;
        for (t, &(n, _)) in tensors.iter().zip(&pieces) {
            out.with_layout(out.layout.narrow(op, d, start, n)?).copy_(&t.detach())?;
            start += n;
        }
    }
    if !is_tracked(&tensors) || !dtype.is_float() {
        return Ok(out);
    }
    Ok(record_twice(op, out, &tensors, move |ctx| {
        let grad = ctx.grad()?;
        let mut start = 0;
        let mut piece = |(i, &(n, dtype)): (usize, &(usize, DType))| {
            start += n;
            ctx.needs(i).then(|| grad.narrow(d as isize, start - n, n)?.to_dtype(dtype)).transpose()
        };
        pieces.iter().enumerate().map(&mut piece).collect()
    }))
}
