//! Views that may repeat elements: sliding windows, and explicit strides.

use super::Layout;
use super::create::check_storage;
use crate::autograd::{is_tracked, record_unary_differentiable, record_view};
use crate::layout::shape::Shape;
use crate::storage::Storage;
use crate::{DType, Result, Tensor};

/// The maximum absolute value of a stride, in elements. No storage is as large, and computations with such strides cannot overflow.
const MAX_STRIDE_ELEMENTS: usize = 1 << 48;

impl Tensor {
    /// Returns all windows of `size` elements along dimension `dim`, `step` elements apart; the elements of a window form a new last
    /// dimension (PyTorch's `unfold`). If `size` exceeds `step`, windows overlap and share memory, and the gradients of shared elements
    /// are added. Fails for a window longer than the dimension, and for a step of zero.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// let windows = a.unfold(0, 3, 2)?;
    /// assert_eq!(windows.shape().dims(), &[2, 3]);
    /// assert_eq!(windows.to_vec::<f32>()?, [0.0, 1.0, 2.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn unfold(&self, dim: isize, size: usize, step: usize) -> Result<Tensor> {
        let op = "unfold";
        if self.rank() == 0 && matches!(dim, -1 | 0) && size <= 1 && step > 0 {
            return self.unsqueeze(0)?.narrow(0, 0, size); // the only window of a scalar is the scalar itself
        }
        let d = self.shape().dim(op, dim)?;
        let len = self.shape().dims()[d];
        invalid!(op if size > len || step == 0,
            "windows of {size}, {step} apart, do not fit in dimension {d} of size {len}");
        let windows = self.layout.unfold(d, size, step);
        windows.shape.clone().checked(op)?; // the windows of an expanded view may overflow the element count
        let shape = self.shape().clone();
        Ok(record_view(op, windows, self, move |grad| grad.sum_windows(&shape, d, step)))
    }

    /// Computes the gradient of [`Tensor::unfold`] for an input of `shape`: each element is the sum of its copies in the windows.
    fn sum_windows(&self, shape: &Shape, d: usize, step: usize) -> Result<Tensor> {
        let op = "unfold_backward";
        let size = self.shape().dims()[self.rank() - 1];
        let is_half = matches!(self.dtype, DType::F16 | DType::BF16) && size > step;
        let sum = Tensor::zeros(shape, (if is_half { DType::F32 } else { self.dtype }, self.device()))?;
        // The windows are divided into ceil(size / step) sections, each at most `step` wide. The sections of different windows do not
        // overlap, so a section is added for all windows in one launch.
        for first in (0..size).step_by(step) {
            let width = step.min(size - first);
            let rest = sum.layout.narrow(op, d, first, shape.dims()[d] - first)?;
            // A section of `width` elements may fit once more than there are whole windows.
            let windows = rest.unfold(d, width, step).narrow(op, d, 0, self.shape().dims()[d])?;
            let (to, from) = (sum.with_layout(windows), self.detach().narrow(-1, first, width)?);
            Tensor::map_into(&[&to, &from], &[], &[&to], |e, _| vec![&e[0] + &e[1]])?;
        }
        let sum = if is_half { sum.cast(self.dtype)? } else { sum };
        Ok(record_unary_differentiable(op, sum, self, move |grad| grad.unfold(d as isize, size, step)))
    }

    /// Returns a view of this tensor's storage by shape, strides and offset, all in elements; an offset of `None` keeps this tensor's
    /// offset (PyTorch's `as_strided`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?;
    /// assert_eq!(a.as_strided([2, 2], &[2, 1], 1)?.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// assert!(a.as_strided([7], &[1], 0).is_err());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails for elements outside the storage, for different numbers of strides and sizes, and for a tracked tensor that repeats elements
    /// itself.
    pub fn as_strided(
        &self,
        size: impl Into<Shape>,
        stride: &[isize],
        storage_offset: impl Into<Option<usize>>,
    ) -> Result<Tensor> {
        let op = "as_strided";
        let offset = storage_offset.into().unwrap_or(self.layout.offset);
        let layout =
            checked_strided_layout(op, size.into(), stride, offset, self.storage.nbytes() / self.dtype.size())?;
        let old = self.layout.clone();
        no_gradient!(op if is_tracked(&[self]) && old.may_alias_itself(),
            "the tensor repeats elements (an expanded view), so their gradients have no single place: call contiguous() first");
        Ok(record_view(op, layout.clone(), self, strided_gradient_fn(old, layout)))
    }

    /// Creates a tensor over a storage by shape, strides and offset, all in elements of `dtype`. Other tensors may share the
    /// storage (PyTorch's `set_(storage, storage_offset, size, stride)`). Strides may be zero or negative. For bool, each byte has
    /// to be 0 or 1: reading any other byte to the host is an error.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::arange(0, 6, 1, Device::Cpu)?;
    /// let columns = Tensor::from_storage_strided(x.storage().clone(), [2, 2], &[1, -2], 4, DType::F32)?;
    /// assert_eq!(columns.to_vec::<f32>()?, [4.0, 2.0, 5.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`crate::Error::Invalid`] for elements outside the storage, for different numbers of strides and sizes, and for a storage
    /// that is not a whole number of elements or not aligned for the dtype (possible for a vector of bytes).
    pub fn from_storage_strided(
        storage: Storage,
        shape: impl Into<Shape>,
        strides: &[isize],
        offset: usize,
        dtype: DType,
    ) -> Result<Tensor> {
        let op = "from_storage_strided";
        check_storage(op, &storage, dtype)?;
        let layout = checked_strided_layout(op, shape.into(), strides, offset, storage.nbytes() / dtype.size())?;
        Ok(Tensor::new(storage, layout, dtype).detach())
    }
}

/// Builds a layout after checking that all of its elements are within a storage of `storage_len` elements.
fn checked_strided_layout(
    op: &'static str,
    shape: Shape,
    stride: &[isize],
    offset: usize,
    storage_len: usize,
) -> Result<Layout> {
    let shape = shape.checked(op)?;
    invalid!(op if stride.len() != shape.rank(),
        "shape {shape} has {} dimensions, and {} strides are given", shape.rank(), stride.len());
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (&d, &s) in shape.dims().iter().zip(stride) {
        let reach = (d as i128 - 1) * s as i128;
        if reach < 0 { low += reach } else { high += reach }
    }
    // An empty tensor accesses no element, but its strides are still used in computations, which must not overflow.
    let computable = offset <= storage_len && stride.iter().all(|s| s.unsigned_abs() <= MAX_STRIDE_ELEMENTS);
    invalid!(op if !computable || shape.numel() > 0 && (low < 0 || high >= storage_len as i128),
        "shape {shape}, strides {stride:?} and offset {offset} reach elements {low} to {high} of a storage of {storage_len}");
    Ok(Layout { shape, strides: stride.iter().copied().collect(), offset })
}

/// Returns a function that computes the gradient of a tensor `old` from the gradient of a view `new` on the same storage.
pub(crate) fn strided_gradient_fn(
    old: Layout,
    new: Layout,
) -> impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static {
    move |grad| match is_tracked(&[&grad]) {
        true => recorded_strided_gradient(&old, &new, &grad),
        false => strided_gradient(&old, &new, &grad),
    }
}

/// Computes the gradient of a tensor `old` from the gradient of a view `new` on the same storage. Elements of `new` that are not in `old`
/// are dropped.
fn strided_gradient(old: &Layout, new: &Layout, grad: &Tensor) -> Result<Tensor> {
    let (Some((a, b)), Some((c, d))) = (old.bounds(), new.bounds()) else { return Tensor::zeros(&old.shape, grad) };
    let (low, len) = (a.min(c), b.max(d) + 1 - a.min(c));
    let at = |layout: &Layout| Layout { offset: layout.offset - low, ..layout.clone() };
    let storage = Tensor::zeros(len, grad)?;
    if new.may_alias_itself() {
        let indices = Tensor::arange(0, len as i64, 1, (DType::I64, grad.device()))?.with_layout(at(new));
        storage.index_add_(0, &indices.reshape(grad.numel())?, &grad.reshape(grad.numel())?)?;
    } else {
        storage.with_layout(at(new)).copy_(grad)?;
    }
    Ok(storage.with_layout(at(old)))
}

/// Computes [`strided_gradient`] by differentiable operations, for second-order gradients.
fn recorded_strided_gradient(old: &Layout, new: &Layout, grad: &Tensor) -> Result<Tensor> {
    let (n, options) = (old.shape.numel(), (DType::I64, grad.device()));
    let (Some((a, b)), Some((c, d))) = (old.bounds(), new.bounds()) else { return Tensor::zeros(&old.shape, grad) };
    let low = a.min(c);
    let at = |layout: &Layout| Layout { offset: layout.offset - low, ..layout.clone() };
    // Maps each element of the storage to its index in `old`, or to n if it is not in `old`.
    let elements = Tensor::full(b.max(d) + 1 - low, n as i64, options)?;
    elements.with_layout(at(old)).copy_(&Tensor::arange(0, n as i64, 1, options)?.reshape(&old.shape)?)?;
    let index = elements.with_layout(at(new)).reshape(grad.numel())?;
    let sums = Tensor::zeros(n + 1, grad)?.index_add(0, &index, &grad.reshape(grad.numel())?)?;
    sums.narrow(0, 0, n)?.reshape(&old.shape)
}
