//! Reading through one index tensor: `index_select`, `gather`, `embedding`. Writing is in `scatter`, several indices in `advanced`.
//!
//! All reads use the same kernel, which runs over the shape of the result. If the index is constant along a dim, its stride is zero.
//! Adjacent elements with the same index are moved together, sixteen bytes at a time.
//!
//! All writes are deterministic: values reach an element in the order of the indices. On OpenCL CPUs a work-item owns one column (a
//! position outside the indexed dim) and a range of destinations, and reads the indices in order. On GPUs (`kernels/scatter.cl`) a
//! work-group handles many indices at a time. If one index serves a whole row, the work-group lists the indices of its destinations and
//! adds up the rows; otherwise work-items with the same destination write one after another. Atomics would be faster for millions of
//! indices into one column, but would not give the same bits on every run.

use crate::backend::problem::index::Indexed;
use crate::ops::dispatch::prelude::*;

/// Returns the layout of `t` broadcast to `shape` with stride 0 along dim `d`, and the original stride of dim `d`.
pub(crate) fn without_stride(t: &Tensor, d: usize, shape: &Shape) -> (Layout, isize) {
    let mut strides = Dims::from_slice(t.strides());
    let step = std::mem::replace(&mut strides[d], 0);
    (Layout { shape: shape.clone(), strides, offset: t.layout.offset }, step)
}

pub(crate) fn check_index(op: &'static str, index: &Tensor) -> Result<()> {
    unsupported!(op if index.dtype.is_float() || index.dtype == DType::Bool, index.dtype, "an index of integers");
    Ok(())
}

/// Returns the layout of a vector of indices along dim `d`, broadcast to `shape`.
pub(crate) fn broadcast_index(index: &Tensor, d: usize, shape: &Shape) -> Layout {
    let mut strides: Dims<isize> = SmallVec::from_elem(0, shape.rank());
    strides[d] = index.strides().first().copied().unwrap_or(0);
    Layout { shape: shape.clone(), strides, offset: index.layout.offset }
}

pub(crate) fn with_dim_size(shape: &Shape, d: usize, size: usize) -> Shape {
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

    /// Returns the error for an index into an empty dim, which has no memory that a kernel could read. The error names the first index.
    pub(crate) fn empty_dim_error(&self) -> Result<Error> {
        let indices = self.index.with_layout(self.index_layout.clone()).cast(DType::I64)?.to_vec::<i64>()?;
        Ok(Error::IndexOutOfRange { op: self.op, index: indices[0], size: 0 })
    }
}

/// Computes the gradient of reading from a tensor of `shape`. `add(zeros, grad, in_place)` adds the gradient of the read elements to a
/// tensor of zeros, which is f32 for f16 and bf16 gradients.
pub(crate) fn gradient_of_read(
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
    /// Returns the slices of this tensor along `dim` that a vector of indices selects, in the order of the indices (PyTorch's
    /// `index_select`). Indices have any integer dtype. Differentiable.
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
    /// [`Error::UnsupportedDType`] for other dtypes; [`Error::Invalid`] if `index` is not a vector; [`Error::IndexOutOfRange`] for a
    /// negative or too large index. On the CPU this call returns the last error; on OpenCL, the next call of this thread that waits for
    /// the device returns it, and until then the elements are 0.
    index_select(input: x, dim: int, index: x): Indexing, All -> Same, differentiable = |op, self, dim, index| {
        self.index_select_by(op, dim, index)
    };
    /// Gathers one element for each index along `dim`; for dim 0 of a matrix, `out[i][j] = self[index[i][j]][j]` (PyTorch's `gather`).
    /// `index` has as many dims as this tensor, and is not larger in any dim except `dim`. Differentiable. Fails as
    /// [`Tensor::index_select`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let index = Tensor::from_slice(&[2i64, 0], [2, 1], Device::Cpu)?;
    /// assert_eq!(t.gather(1, &index)?.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    gather(input: x, dim: int, index: x): Indexing, All -> Same, differentiable = |op, self, dim, index| {
        self.gather_by(op, dim, index)
    };
    /// Gathers elements like [`Tensor::gather`], after this tensor and `index` are broadcast against each other outside `dim` (PyTorch's
    /// `take_along_dim`). Without a `dim`, both are flattened. Accepts the results of `argsort`, and of `argmax` with `keepdim`.
    /// Differentiable.
    take_along_dim(input: x, indices: x, dim: int?): Indexing, All -> Same, differentiable = |op, self, index, dim| {
        let Some(dim) = dim else {
            return self.reshape(self.numel())?.gather_by(op, 0, &index.reshape(index.numel())?);
        };
        let d = self.shape().dim(op, dim)?;
        mismatch!(op if index.rank() != self.rank(), self, index, "the index has the tensor's rank");
        let outside = with_dim_size(self.shape(), d, 1).broadcast(op, &with_dim_size(index.shape(), d, 1))?;
        let expanded = |t: &Tensor| t.expand(with_dim_size(&outside, d, t.shape().dims()[d]));
        expanded(self)?.gather_by(op, dim, &expanded(index)?)
    };
    /// Returns the rows of this table that `index`, of any shape, selects; the result has shape `index.shape() + self.shape()[1..]`
    /// (PyTorch's `embedding`). Differentiable with respect to the table. Fails as [`Tensor::index_select`] does, and with
    /// [`Error::Invalid`] for a scalar table.
    embedding(weight: x, input: x) functional: Indexing, All -> Same, differentiable = |op, self, index| {
        self.embedding_with(index, None)
    };
    embedding_with(weight: x, input: x, padding_idx: int?) "nn.functional.embedding": Indexing, All -> Same, differentiable;
    /// Converts class numbers of any shape to vectors with 1 at the class and 0 elsewhere, as i64; the result has shape
    /// `self.shape() + [classes]` (PyTorch's `one_hot`). Fails as [`Tensor::index_select`] does for numbers out of range.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[2i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(t.one_hot(3)?.to_vec::<i64>()?, [0, 0, 1, 1, 0, 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    one_hot(input: x, num_classes: size) functional: Indexing, IntegersOnly -> I64 = |op, self, classes| {
        check_index(op, self)?;
        let shape: Shape = self.shape().dims().iter().copied().chain([classes]).collect();
        invalid!(op if classes == 0 && self.numel() > 0, "the number of classes is 0, and the tensor is not empty");
        backend::compute(shape, DType::I64, self.device(), |b, out| b.one_hot(op, self, out))
    };
}

/// Records `out`, which was read from `x` along `dim` through `index`: a vector that selects slices, or one index for each element.
pub(crate) fn record_read(
    op: &'static str,
    out: Tensor,
    x: &Tensor,
    dim: isize,
    index: &Tensor,
    slices: bool,
) -> Tensor {
    if !autograd::is_tracked(&[x]) {
        return out;
    }
    let (index, shape) = (Saved::new(index), x.shape().clone());
    record_gradients(op, out, &[x], move |_, grad| {
        let index = index.get(op)?;
        gradient_of_read(grad, &shape, |zeros, grad, in_place| match (in_place, slices) {
            (true, true) => zeros.index_add_(dim, index, grad).map(Tensor::detach),
            (true, false) => zeros.scatter_add_(dim, index, grad).map(Tensor::detach),
            (false, true) => zeros.index_add(dim, index, grad),
            (false, false) => zeros.scatter_add(dim, index, grad),
        })
    })
}

impl Tensor {
    fn index_select_by(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<Tensor> {
        let d = self.shape().dim(op, dim)?;
        self.check_index_vector(op, index)?;
        let shape = with_dim_size(self.shape(), d, index.numel());
        let (x_layout, step) = without_stride(self, d, &shape);
        let (index_layout, size) = (broadcast_index(index, d, &shape), self.shape().dims()[d]);
        let out = Indexed { op, x: self, x_layout, index, index_layout, size, step, wraps: false }.read()?;
        Ok(record_read(op, out, self, dim, index, true))
    }

    pub(crate) fn check_index_vector(&self, op: &'static str, index: &Tensor) -> Result<()> {
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        invalid!(op if index.rank() != 1, "the index is a vector, this one has shape {}", index.shape());
        Ok(())
    }

    /// Checks an index that has as many dims as this tensor, and may be larger only along `dim`. Returns the dim.
    pub(crate) fn check_element_index(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        let (sizes, dims) = (index.shape().dims(), self.shape().dims());
        let fits = sizes.len() == dims.len() && (0..dims.len()).all(|i| i == d || sizes[i] <= dims[i]);
        mismatch!(op if !fits, self, index, "the index must have the tensor's rank and may be larger only along the dim");
        Ok(d)
    }

    fn gather_by(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<Tensor> {
        let d = self.check_element_index(op, dim, index)?;
        let (x_layout, step) = without_stride(self, d, index.shape());
        let (index_layout, size) = (index.layout.clone(), self.shape().dims()[d]);
        let out = Indexed { op, x: self, x_layout, index, index_layout, size, step, wraps: false }.read()?;
        Ok(record_read(op, out, self, dim, index, false))
    }

    /// Returns rows like [`Tensor::embedding`], but row `padding_idx` gets no gradient, so that training does not change it. A negative
    /// `padding_idx` counts from the end. Fails as [`Tensor::embedding`] does, and with [`Error::IndexOutOfRange`] if `padding_idx` is
    /// out of range.
    #[track_caller]
    pub fn embedding_with(&self, index: &Tensor, padding_idx: impl Into<Option<isize>>) -> Result<Tensor> {
        let (op, padding) = ("embedding", padding_idx.into());
        return_replacement!("embedding_with", [self, index], padding);
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
                Some(record_gradients(op, self.detach(), &[self], move |_, grad| grad.index_fill(0, &row, 0)))
            }
            _ => None,
        };
        let table = padded.as_ref().unwrap_or(self);
        if index.rank() == 1 {
            return table.index_select_by(op, 0, index);
        }
        let rows = table.index_select_by(op, 0, &index.detach().reshape([index.numel()])?)?;
        let shape: Shape = index.shape().dims().iter().chain(width).copied().collect();
        rows.reshape(shape)
    }
}
