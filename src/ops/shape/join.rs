//! Concatenation and repetition.

use std::borrow::Borrow;

use crate::MemoryFormat;
use crate::layout::shape::NewShape;
use crate::ops::PadMode;
use crate::ops::dispatch::prelude::*;
use crate::ops::dispatch::promote;

operations! {
    /// Repeats this tensor `repeats[i]` times along dim i (PyTorch's `repeat`). If there are more numbers than dims, dims are added in
    /// front. The result is always a copy. Differentiable. Fails if there are fewer numbers than dims.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 2, 1, Device::Cpu)?;
    /// assert_eq!(a.repeat(&[2, 2])?.to_vec::<f32>()?, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    repeat(input: x, repeats: &sizes) "Tensor.repeat": Joining, All -> Same, differentiable = |op, self, repeats| {
        self.repeat_by(op, repeats)
    };
    /// Repeats this tensor like [`Tensor::repeat`]; if there are fewer numbers than dims, the first dims are unchanged (PyTorch's
    /// `tile`).
    tile(input: x, dims: &sizes): Joining, All -> Same, differentiable = |op, self, repeats| {
        let missing = self.rank().saturating_sub(repeats.len());
        let all: Dims = std::iter::repeat_n(1, missing).chain(repeats.iter().copied()).collect();
        self.repeat_by(op, &all)
    };
    /// Repeats each index of dim `dim` `repeats` times in a row; for `None`, flattens the tensor first (PyTorch's `repeat_interleave`).
    /// Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 2, 1, Device::Cpu)?;
    /// assert_eq!(a.repeat_interleave(3, 0)?.to_vec::<f32>()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    repeat_interleave(input: x, repeats: size, dim: int?):
        Joining, All -> Same, differentiable = |op, self, repeats, dim| {
        let Some(dim) = dim else { return self.reshape(self.numel())?.repeat_interleave(repeats, 0) };
        let d = self.shape().dim(op, dim)?;
        let mut sizes: Dims<isize> = SmallVec::from_elem(-1, self.rank() + 1);
        sizes[d + 1] = isize::try_from(repeats).unwrap_or(isize::MAX);
        let wide = self.unsqueeze(d as isize + 1)?.expand(&sizes[..]).with_op(op)?;
        let mut whole = Dims::from_slice(self.shape().dims());
        whole[d] = whole[d].saturating_mul(repeats);
        let out = wide.reshape(whole.into_iter().collect::<Shape>())?;
        if out.shares_storage(self) { out.recorded_copy(op) } else { Ok(out) }
    };
    /// Repeats index i of dim `dim` `repeats[i]` times in a row (PyTorch's `repeat_interleave` with a tensor). Waits for the device,
    /// because `repeats` determines the size of the result. Differentiable. Fails for `repeats` that is not a vector of
    /// non-negative integers with one number for each index.
    repeat_interleave_tensor(input: x, repeats: x, dim: int) "repeat_interleave":
        Joining, All -> Same, differentiable = |op, self, repeats, dim| {
        let d = self.shape().dim(op, dim)?;
        let size = self.shape().dims()[d];
        invalid!(op if repeats.shape().dims() != [size] || repeats.dtype().is_float(),
            "a {} tensor of shape {} does not hold one integer for each of {size} indices", repeats.dtype(), repeats.shape());
        let counts = repeats.to_dtype(DType::I64)?.to_vec::<i64>()?;
        invalid!(op if let Some(n) = counts.iter().find(|&&n| n < 0),
            "the number of repetitions is {n}, it must not be negative");
        invalid!(op if repeats.storage.is_simulated() && size > 0 && counts.iter().all(|&n| n == 0),
            "a dry run does not compute the repetitions: make them from values of the host");
        let total = counts.iter().fold(0usize, |sum, &n| sum.saturating_add(n as usize));
        let mut indices: Vec<i64> = Vec::new();
        let too_many = |_| Error::invalid(op, format!("{total} indices do not fit in memory"));
        indices.try_reserve_exact(total).map_err(too_many)?;
        indices.extend((0..).zip(&counts).flat_map(|(i, &n)| std::iter::repeat_n(i, n as usize)));
        let index = Tensor::from_vec(indices, total, self.device())?;
        self.index_select(d as isize, &index)
    };
    /// Shifts the elements by `shifts[i]` along dim `dims[i]`, with wrap-around (PyTorch's `roll`). Without dims, shifts the flattened
    /// tensor. Differentiable. Fails for a number of shifts other than the number of dims.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// assert_eq!(a.roll(&[2], &[0])?.to_vec::<f32>()?, [3.0, 4.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    roll(input: x, shifts: &ints, dims: &ints = &[0i32; 0]):
        Joining, All -> Same, differentiable = |op, self, shifts, dims| {
        if dims.is_empty() && shifts.len() == 1 {
            return self.reshape(self.numel())?.roll(shifts, &[0])?.reshape(self.shape());
        }
        invalid!(op if dims.len() != shifts.len() || dims.is_empty(),
            "{} shifts for {} dimensions: there must be one for each", shifts.len(), dims.len());
        dims.iter().zip(shifts).try_fold(self.shallow_clone(), |x, (&dim, &shift)| {
            let size = x.shape().dims()[x.shape().dim(op, dim)?];
            let head = if size == 0 { 0 } else { shift.rem_euclid(size as isize) as usize };
            Tensor::cat(&[x.narrow(dim, size - head, head)?, x.narrow(dim, 0, size - head)?], dim).with_op(op)
        })
    };
}

impl Tensor {
    /// Concatenates tensors along dim `dim`, the only dim whose sizes may differ (PyTorch's `cat`). Dtypes are promoted to a common
    /// dtype; empty vectors can be joined with tensors of any shape. Differentiable. Fails for an empty list, and for tensors whose other
    /// sizes differ.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros(&[2, 3], Device::Cpu)?;
    /// let b = Tensor::ones(&[1, 3], Device::Cpu)?;
    /// assert_eq!(Tensor::cat(&[&a, &b], 0)?.shape().dims(), &[3, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn cat<T: Borrow<Tensor>>(tensors: &[T], dim: isize) -> Result<Tensor> {
        let tensors = borrow_all(tensors);
        return_replacement!(op = "cat", tensors, dim);
        join(op, &tensors, dim)
    }

    /// Joins tensors of one shape along a new dim, which is dim `dim` of the result (PyTorch's `stack`). Differentiable. Fails for an
    /// empty list, and for tensors of different shapes.
    #[track_caller]
    pub fn stack<T: Borrow<Tensor>>(tensors: &[T], dim: isize) -> Result<Tensor> {
        let op = "stack";
        let first = tensors.first().map(Borrow::borrow).ok_or_else(|| Error::invalid(op, "there is no tensor"))?;
        return_replacement!(op, borrow_all(tensors), dim);
        if let Some(t) = tensors.iter().map(Borrow::borrow).find(|t| t.shape() != first.shape()) {
            return Err(shape_mismatch(op, first, t, "all shapes must be equal"));
        }
        map_and_join(op, tensors, dim, |t| t.unsqueeze(dim))
    }

    /// Joins tensors horizontally: vectors along the first dim, other tensors along the second (PyTorch's `hstack`). Fails as
    /// [`Tensor::cat`] does.
    #[track_caller]
    pub fn hstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        let vectors = tensors.first().is_none_or(|t| t.borrow().rank() < 2);
        join_or_replace("hstack", tensors, if vectors { 0 } else { 1 }, Tensor::atleast_1d)
    }

    /// Joins tensors vertically: along the first dim, with vectors as rows (PyTorch's `vstack`). Fails as [`Tensor::cat`] does.
    #[track_caller]
    pub fn vstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        join_or_replace("vstack", tensors, 0, Tensor::atleast_2d)
    }

    /// Joins tensors along the third dim (PyTorch's `dstack`). Fails as [`Tensor::cat`] does.
    #[track_caller]
    pub fn dstack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        join_or_replace("dstack", tensors, 2, Tensor::atleast_3d)
    }

    /// Joins tensors along the second dim, with vectors as columns (PyTorch's `column_stack`). Fails as [`Tensor::cat`] does.
    #[track_caller]
    pub fn column_stack<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        join_or_replace("column_stack", tensors, 1, |t| {
            if t.rank() < 2 { t.reshape([t.numel(), 1]) } else { Ok(t.shallow_clone()) }
        })
    }

    /// Returns a matrix with the given matrices on its diagonal, one after another, and zeros elsewhere (PyTorch's `block_diag`). Vectors
    /// are treated as matrices with one row. Differentiable. Fails for an empty list, and for a tensor of three or more dims.
    #[track_caller]
    pub fn block_diag<T: Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        return_replacement!(op = "block_diag", borrow_all(tensors));
        let blocks = tensors.iter().map(|t| t.borrow().atleast_2d()).collect::<Result<Vec<_>>>()?;
        invalid!(op if let Some(t) = blocks.iter().find(|t| t.rank() > 2),
            "a tensor of shape {} is not a matrix", t.shape());
        let width = blocks.iter().fold(0isize, |sum, t| sum.saturating_add_unsigned(t.shape().dims()[1]));
        let mut left = 0isize;
        map_and_join(op, &blocks, 0, |t| {
            let columns = t.shape().dims()[1] as isize;
            left = left.saturating_add(columns);
            t.pad(&[left - columns, width - left], PadMode::default())
        })
    }

    pub(crate) fn recorded_copy(&self, op: &'static str) -> Result<Tensor> {
        Ok(autograd::record_unary_differentiable(op, self.deep_copy(false)?, self, Ok))
    }

    fn repeat_by(&self, op: &'static str, repeats: &[usize]) -> Result<Tensor> {
        let Some(more) = repeats.len().checked_sub(self.rank()) else {
            fail!(op, "{} numbers are fewer than the dimensions of shape {}", repeats.len(), self.shape());
        };
        // Each repeated dim is split in two: the repetitions, with stride 0, and the dim itself.
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
        let out = self.view(split).and_then(|t| t.expand(wide)?.reshape(whole)).with_op(op)?;
        if out.shares_storage(self) { out.recorded_copy(op) } else { Ok(out) }
    }
}

type TensorRefs<'a> = SmallVec<[&'a Tensor; 4]>;

fn borrow_all<T: Borrow<Tensor>>(tensors: &[T]) -> TensorRefs<'_> {
    tensors.iter().map(Borrow::borrow).collect()
}

/// Calls [`map_and_join`], unless a registered implementation replaces the operation.
#[track_caller]
fn join_or_replace<T: Borrow<Tensor>>(
    op: &'static str,
    tensors: &[T],
    dim: isize,
    each: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    return_replacement!(op, borrow_all(tensors));
    map_and_join(op, tensors, dim, each)
}

fn map_and_join<T: Borrow<Tensor>>(
    op: &'static str,
    tensors: &[T],
    dim: isize,
    each: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let made: Result<SmallVec<[Tensor; 4]>> = tensors.iter().map(Borrow::borrow).map(each).collect();
    join(op, &made.with_op(op)?.iter().collect::<TensorRefs>(), dim)
}

fn join(op: &'static str, all: &[&Tensor], dim: isize) -> Result<Tensor> {
    let is_empty_vector = |t: &&Tensor| t.shape().dims() == [0];
    let Some(first) = all.iter().find(|t| !is_empty_vector(t)).or(all.first()).copied() else {
        return Err(Error::invalid(op, "there is no tensor"));
    };
    let tensors: TensorRefs = all.iter().copied().filter(|t| first.rank() == 1 || !is_empty_vector(t)).collect();
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
    // The memory format that all joined tensors have, as in PyTorch's `cat`.
    let format = first.memory_format();
    let format = if tensors.iter().all(|t| t.memory_format() == format || t.is_contiguous_in(format)) {
        format
    } else {
        MemoryFormat::Contiguous
    };
    let out = Tensor::empty_with_layout(Layout::with_format(dims[..].into(), format), dtype, first.device())?;
    let joined = match format {
        MemoryFormat::Contiguous => backend::of_device(out.device()).join(&out, &tensors, d)?,
        _ => {
            let view = |t: &Tensor| t.with_layout(t.layout.with_channels_last(t.rank()));
            let (views, rank): (SmallVec<[Tensor; 4]>, _) = (tensors.iter().map(|t| view(t)).collect(), out.rank());
            let d = if d == 1 { rank - 1 } else { d.saturating_sub(1) };
            backend::of_device(out.device()).join(&view(&out), &views.iter().collect::<TensorRefs>(), d)?
        }
    };
    if !joined {
        let mut start = 0;
        for (t, &(n, _)) in tensors.iter().zip(&pieces) {
            out.with_layout(out.layout.narrow(op, d, start, n)?).copy_(&t.detach())?;
            start += n;
        }
    }
    if !autograd::is_tracked(&tensors) || !dtype.is_float() {
        return Ok(out);
    }
    Ok(autograd::record_differentiable(op, out, &tensors, move |ctx| {
        let grad = ctx.grad()?;
        let mut start = 0;
        let mut piece = |(i, &(n, dtype)): (usize, &(usize, DType))| {
            start += n;
            ctx.needs_gradient(i).then(|| grad.narrow(d as isize, start - n, n)?.to_dtype(dtype)).transpose()
        };
        pieces.iter().enumerate().map(&mut piece).collect()
    }))
}
