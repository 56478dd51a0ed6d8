//! Reading through one index tensor: `index_select`, `gather`, `embedding`. Writing is in `scatter`, several indices in `advanced`.
//!
//! All reads are one kernel over the shape of the result. A stride of zero says that the index is the same along a dim, and
//! neighbours with the same index are moved together, sixteen bytes at a time. All writes are deterministic: values reach an
//! element in the order of the indices. On OpenCL processors a work-item owns one column (a position outside the indexed dim) and
//! a range of destinations, and goes through the indices in order. On GPUs (`kernels/scatter.cl`) a work-group handles many
//! indices at a time: where one index serves a whole row, it lists those of its destinations and adds up the rows; elsewhere,
//! work-items with the same destination take turns. Atomics would be faster for millions of indices into one column, but would not
//! give the same bits on every run.

use smallvec::SmallVec;

use crate::autograd::Saved;
use crate::backend::problem::index::Indexed;
use crate::ops::dispatch::prelude::*;
use crate::ops::recorded;
use crate::tensor::{Dims, Layout};
use crate::{DType, Result, Shape, Tensor, autograd, backend};

pub use crate::ops::index::scatter_reduce::ScatterReduce;

/// The layout of t with the stride along d taken out, over `shape`.
pub(crate) fn without_stride(t: &Tensor, d: usize, shape: &Shape) -> (Layout, isize) {
    let mut strides = Dims::from_slice(t.strides());
    let step = std::mem::replace(&mut strides[d], 0);
    (Layout { shape: shape.clone(), strides, offset: t.layout.offset }, step)
}

pub(crate) fn check_index(op: &'static str, index: &Tensor) -> Result<()> {
    match index.dtype {
        DType::I64 | DType::I32 | DType::U32 | DType::U8 => Ok(()),
        dtype => Err(Error::UnsupportedDType { op, dtype, expected: "an integer index (i64, i32, u32, u8)" }),
    }
}

/// A vector as a view of `shape`, along dim d.
pub(crate) fn broadcast_vector(index: &Tensor, d: usize, shape: &Shape) -> Layout {
    let mut strides: Dims<isize> = SmallVec::from_elem(0, shape.rank());
    strides[d] = index.strides().first().copied().unwrap_or(0);
    Layout { shape: shape.clone(), strides, offset: index.layout.offset }
}

pub(crate) fn with_size(shape: &Shape, d: usize, size: usize) -> Shape {
    let mut dims = Dims::from_slice(shape.dims());
    dims[d] = size;
    dims.into()
}

impl Indexed<'_> {
    pub(crate) fn read(&self) -> Result<Tensor> {
        backend::compute(&self.x_layout.shape, self.x.dtype, self.x.device(), |b, out| match self.size {
            0 => Err(self.empty_dim_error()?),
            _ => b.gather(self, out),
        })
    }

    /// The error for an empty dim, which has no memory for a kernel to look at: the first index is out of range.
    pub(crate) fn empty_dim_error(&self) -> Result<Error> {
        let indices = self.index.with_layout(self.index_layout.clone()).cast(DType::I64)?.to_vec::<i64>()?;
        Ok(Error::IndexOutOfRange { op: self.op, index: indices[0], size: 0 })
    }
}

/// The gradient of reading from a tensor of `shape`: zeros to which `add(zeros, grad, in place)` adds the gradient of what was
/// read, in f32 for halves.
pub(crate) fn read_gradient(
    grad: &Tensor,
    shape: &Shape,
    add: impl FnOnce(&Tensor, &Tensor, bool) -> Result<Tensor>,
) -> Result<Tensor> {
    let halves = matches!(grad.dtype, DType::F16 | DType::BF16);
    let zeros = Tensor::zeros(shape, (if halves { DType::F32 } else { grad.dtype }, grad.device()))?;
    let wide = grad.to_dtype(zeros.dtype)?;
    add(&zeros, &wide, !autograd::is_tracked(&[grad]))?.to_dtype(grad.dtype)
}

operations! {
    index_select(input: x, dim: int, index: x): Indexing, All -> Same, differentiable;
    gather(input: x, dim: int, index: x): Indexing, All -> Same, differentiable;
    take_along_dim(input: x, indices: x, dim: int?): Indexing, All -> Same, differentiable;
    embedding(weight: x, input: x) functional: Indexing, All -> Same, differentiable;
    embedding_with(weight: x, input: x, padding_idx: int?) "nn.functional.embedding": Indexing, All -> Same, differentiable;
    one_hot(input: x, num_classes: size) functional: Indexing, IntegersOnly -> I64;
}

/// `out`, which was read from `x` along `dim` through `index`, as [`Tensor::gather`] gives it: with its node.
pub(crate) fn read_through(out: Tensor, x: &Tensor, dim: isize, index: &Tensor) -> Tensor {
    gathered_through("gather", out, x, dim, index)
}

fn gathered_through(op: &'static str, out: Tensor, x: &Tensor, dim: isize, index: &Tensor) -> Tensor {
    let (index, shape) = (Saved::new(index), x.shape().clone());
    recorded(op, out, &[x], move |_, grad| {
        let index = index.get(op)?;
        read_gradient(grad, &shape, |zeros, grad, in_place| match in_place {
            true => zeros.scatter_add_(dim, index, grad).map(Tensor::detach),
            false => zeros.scatter_add(dim, index, grad),
        })
    })
}

impl Tensor {
    /// The slices of this tensor along `dim` that a vector of indices names, in its order (PyTorch's `index_select`). Any
    /// integer dtype but bool indexes. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let index = Tensor::from_slice(&[2i64, 0, 2], 3, Device::Cpu)?;
    /// assert_eq!(t.index_select(1, &index)?.to_vec::<f32>()?, [2.0, 0.0, 2.0, 5.0, 3.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`], [`Error::UnsupportedDType`], [`Error::DeviceMismatch`]; [`Error::Invalid`] where `index` is
    /// no vector. [`Error::IndexOutOfRange`] for a negative or too large index: on the CPU at once; on OpenCL from the next
    /// call of this thread that waits for the device, until which the elements are 0.
    #[track_caller]
    pub fn index_select(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        replaced!("index_select", [self, index], dim);
        self.selected("index_select", dim, index)
    }

    fn selected(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<Tensor> {
        let d = self.shape().dim(op, dim)?;
        self.check_vector(op, index)?;
        let shape = with_size(self.shape(), d, index.numel());
        let (x_layout, step) = without_stride(self, d, &shape);
        let (index_layout, size) = (broadcast_vector(index, d, &shape), self.shape().dims()[d]);
        let out = Indexed { op, x: self, x_layout, index, index_layout, size, step, wraps: false }.read()?;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (index, shape) = (Saved::new(index), self.shape().clone());
        Ok(recorded(op, out, &[self], move |_, grad| {
            let index = index.get(op)?;
            read_gradient(grad, &shape, |zeros, grad, in_place| match in_place {
                true => zeros.index_add_(dim, index, grad).map(Tensor::detach),
                false => zeros.index_add(dim, index, grad),
            })
        }))
    }

    pub(crate) fn check_vector(&self, op: &'static str, index: &Tensor) -> Result<()> {
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        match index.rank() {
            1 => Ok(()),
            _ => Err(Error::invalid(op, format!("the index is a vector, this one has shape {}", index.shape()))),
        }
    }

    /// `out[i][j] = self[index[i][j]][j]` and so on along `dim`: an element for each index, other positions staying put
    /// (PyTorch's `gather`). `index` has this tensor's rank and is nowhere larger outside `dim`. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let index = Tensor::from_slice(&[2i64, 0], [2, 1], Device::Cpu)?;
    /// assert_eq!(t.gather(1, &index)?.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::ShapeMismatch`].
    #[track_caller]
    pub fn gather(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        replaced!("gather", [self, index], dim);
        self.gathered("gather", dim, index)
    }

    fn gathered(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<Tensor> {
        let d = self.shape().dim(op, dim)?;
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        check_index_shape(op, index.shape(), self.shape(), d)?;
        let (x_layout, step) = without_stride(self, d, index.shape());
        let (index_layout, size) = (index.layout.clone(), self.shape().dims()[d]);
        let out = Indexed { op, x: self, x_layout, index, index_layout, size, step, wraps: false }.read()?;
        Ok(gathered_through(op, out, self, dim, index))
    }

    /// [`Tensor::gather`] with this tensor and `index` broadcast against each other outside `dim`; without a `dim` both are
    /// taken as vectors (PyTorch's `take_along_dim`). What `argsort` and `argmax` give with `keepdim` fits. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::gather`].
    #[track_caller]
    pub fn take_along_dim(&self, index: &Tensor, dim: impl Into<Option<isize>>) -> Result<Tensor> {
        let (op, dim) = ("take_along_dim", dim.into());
        replaced!(op, [self, index], dim);
        let Some(dim) = dim else { return self.reshape(self.numel())?.gathered(op, 0, &index.reshape(index.numel())?) };
        let d = self.shape().dim(op, dim)?;
        mismatch!(op if index.rank() != self.rank(), self, index, "the index has the tensor's rank");
        let outside = with_size(self.shape(), d, 1).broadcast(op, &with_size(index.shape(), d, 1))?;
        let stretched = |t: &Tensor| t.expand(with_size(&outside, d, t.shape().dims()[d]));
        stretched(self)?.gathered(op, dim, &stretched(index)?)
    }

    /// The rows of this table that `index` (any shape) names: shape `index.shape() + self.shape()[1..]` (PyTorch's
    /// `embedding`). Differentiable in the table.
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::Invalid`] for a scalar table.
    #[track_caller]
    pub fn embedding(&self, index: &Tensor) -> Result<Tensor> {
        replaced!("embedding", [self, index]);
        self.embedding_with(index, None)
    }

    /// [`Tensor::embedding`] whose row `padding_idx` (from the end where negative) gets no gradient, so that it stays what
    /// it is in training.
    ///
    /// # Errors
    /// As [`Tensor::embedding`]; [`Error::IndexOutOfRange`] for the padding.
    #[track_caller]
    pub fn embedding_with(&self, index: &Tensor, padding_idx: impl Into<Option<isize>>) -> Result<Tensor> {
        let (op, padding) = ("embedding", padding_idx.into());
        replaced!("embedding_with", [self, index], padding);
        check_index(op, index)?;
        let Some((&count, width)) = self.shape().dims().split_first() else {
            return Err(Error::invalid(op, "the table is a scalar: it has no rows"));
        };
        if let Some(row) = padding.filter(|&row| !(-(count as isize)..count as isize).contains(&row)) {
            return Err(Error::IndexOutOfRange { op, index: row as i64, size: count });
        }
        let padded = match padding {
            Some(row) if autograd::is_tracked(&[self]) => {
                let row = Tensor::from_slice(&[row as i64], 1, self.device())?;
                Some(recorded(op, self.detach(), &[self], move |_, grad| grad.index_fill(0, &row, 0)))
            }
            _ => None,
        };
        let table = padded.as_ref().unwrap_or(self);
        if index.rank() == 1 {
            return table.selected(op, 0, index);
        }
        let rows = table.selected(op, 0, &index.detach().reshape([index.numel()])?)?;
        let shape: Shape = index.shape().dims().iter().chain(width).copied().collect();
        rows.reshape(shape)
    }

    /// For class numbers of any shape, vectors with 1 at the class and 0 elsewhere, as i64: shape `self.shape() + [classes]`
    /// (PyTorch's `one_hot`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[2i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(t.one_hot(3)?.to_vec::<i64>()?, [0, 0, 1, 1, 0, 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`]; [`Error::IndexOutOfRange`] as [`Tensor::index_select`] gives it.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        replaced!(op = "one_hot", [self], classes);
        check_index(op, self)?;
        let shape: Shape = self.shape().dims().iter().copied().chain([classes]).collect();
        invalid!(op if classes == 0 && self.numel() > 0, "there are no classes (0), but elements");
        backend::compute(shape, DType::I64, self.device(), |b, out| b.one_hot(op, self, out, classes))
    }
}

/// Whether an index of shape `index` goes with a tensor of shape `of` along d.
pub(crate) fn check_index_shape(op: &'static str, index: &Shape, of: &Shape, d: usize) -> Result<()> {
    let fits = |(i, (a, b)): (usize, (&usize, &usize))| i == d || a <= b;
    if index.rank() == of.rank() && index.dims().iter().zip(of.dims()).enumerate().all(fits) {
        return Ok(());
    }
    let hint = "the index has the tensor's rank and is nowhere larger outside the dim";
    Err(Error::ShapeMismatch { op, lhs: of.clone(), rhs: index.clone(), hint })
}
