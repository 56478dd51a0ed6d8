//! Views that repeat elements: sliding windows, and strides of the caller's own.

use super::Layout;
use super::create::check_storage;
use crate::autograd::{is_tracked, record_unary_twice, record_view};
use crate::layout::shape::Shape;
use crate::storage::Storage;
use crate::{DType, Error, Result, Tensor};

/// Longer steps are no strides: no storage is as large.
const LONGEST: usize = 1 << 48;

impl Tensor {
    /// All windows of `size` elements along dimension `dim`, `step` apart, as a new last dimension (PyTorch's `unfold`).
    /// Windows overlap where they are longer than the step: the elements are the same bytes, and their gradients add up.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// let windows = a.unfold(0, 3, 2)?;
    /// assert_eq!(windows.shape().dims(), &[2, 3]);
    /// assert_eq!(windows.to_vec::<f32>()?, [0.0, 1.0, 2.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; a window longer than the dimension, a step of zero.
    pub fn unfold(&self, dim: isize, size: usize, step: usize) -> Result<Tensor> {
        let op = "unfold";
        if self.rank() == 0 && matches!(dim, -1 | 0) && size <= 1 && step > 0 {
            return self.unsqueeze(0)?.narrow(0, 0, size); // a scalar has one window: itself
        }
        let d = self.shape().dim(op, dim)?;
        let len = self.shape().dims()[d];
        if size > len || step == 0 {
            let reason = format!("windows of {size}, {step} apart, do not fit in dimension {d} of size {len}");
            return Err(Error::invalid(op, reason));
        }
        let windows = self.layout.unfold(d, size, step);
        windows.shape.clone().checked(op)?; // those of an expanded view may be more than can be counted
        let shape = self.shape().clone();
        Ok(record_view(op, windows, self, move |grad| grad.windows_sum(&shape, d, step)))
    }

    /// The opposite of [`Tensor::unfold`] into a tensor of `shape`: every element is the sum of its copies in the windows.
    fn windows_sum(&self, shape: &Shape, d: usize, step: usize) -> Result<Tensor> {
        let op = "unfold_backward";
        let size = self.shape().dims()[self.rank() - 1];
        let halves = matches!(self.dtype, DType::F16 | DType::BF16) && size > step;
        let sum = Tensor::zeros(shape, (if halves { DType::F32 } else { self.dtype }, self.device()))?;
        // Of parts of the windows that are no longer than the step no two overlap: as many launches as one element has
        // windows.
        for first in (0..size).step_by(step) {
            let width = step.min(size - first);
            let rest = sum.layout.narrow(op, d, first, shape.dims()[d] - first)?;
            // A window of `width` fits once more where the whole one does not.
            let windows = rest.unfold(d, width, step).narrow(op, d, 0, self.shape().dims()[d])?;
            let (to, from) = (sum.with_layout(windows), self.detach().narrow(-1, first, width)?);
            Tensor::map_into(&[&to, &from], &[], &[&to], |e, _| vec![&e[0] + &e[1]])?;
        }
        let sum = if halves { sum.cast(self.dtype)? } else { sum };
        Ok(record_unary_twice(op, sum, self, move |grad| grad.unfold(d as isize, size, step)))
    }

    /// Elements of this tensor's storage by shape, strides and offset (None: this tensor's), all in elements (PyTorch's
    /// `as_strided`, which reads beyond the storage where it is told to).
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
    /// Elements that lie outside the storage; another number of strides than of sizes; a tracked tensor that repeats
    /// elements itself.
    pub fn as_strided(
        &self,
        size: impl Into<Shape>,
        stride: &[isize],
        storage_offset: impl Into<Option<usize>>,
    ) -> Result<Tensor> {
        let op = "as_strided";
        let offset = storage_offset.into().unwrap_or(self.layout.offset);
        let layout = strided_layout(op, size.into(), stride, offset, self.storage.nbytes() / self.dtype.size())?;
        let old = self.layout.clone();
        if is_tracked(&[self]) && old.may_alias_itself() {
            let reason = "the tensor repeats elements (an expanded view), so their gradients have no single place: \
                          call contiguous() first";
            return Err(Error::Autograd { op, reason: reason.into() });
        }
        Ok(record_view(op, layout.clone(), self, strided_back(old, layout)))
    }

    /// A tensor over a storage by shape, strides and offset, all in elements of `dtype`, which shares them with the storage's
    /// other tensors (PyTorch's `set_(storage, storage_offset, size, stride)`). Strides may be zero or negative. Of bool each byte has
    /// to be 0 or 1: reading another to the host is an error.
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
    /// [`Error::Invalid`] for elements that lie outside the storage, another number of strides than of sizes, and a storage that is
    /// no whole number of elements or begins at an address that they cannot have (as a vector of bytes may).
    pub fn from_storage_strided(
        storage: Storage,
        shape: impl Into<Shape>,
        strides: &[isize],
        offset: usize,
        dtype: DType,
    ) -> Result<Tensor> {
        let op = "from_storage_strided";
        check_storage(op, &storage, dtype)?;
        let layout = strided_layout(op, shape.into(), strides, offset, storage.nbytes() / dtype.size())?;
        Ok(Tensor::new(storage, layout, dtype).detach())
    }
}

/// The layout of these sizes, strides and offset, where all of its elements are among the `there` elements of a storage.
fn strided_layout(op: &'static str, shape: Shape, stride: &[isize], offset: usize, there: usize) -> Result<Layout> {
    let shape = shape.checked(op)?;
    if stride.len() != shape.rank() {
        let reason = format!("shape {shape} has {} dimensions, and {} strides are given", shape.rank(), stride.len());
        return Err(Error::invalid(op, reason));
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (&d, &s) in shape.dims().iter().zip(stride) {
        let reach = (d as i128 - 1) * s as i128;
        if reach < 0 { low += reach } else { high += reach }
    }
    // Strides of what is empty reach nothing, and are computed with all the same.
    let computable = offset <= there && stride.iter().all(|s| s.unsigned_abs() <= LONGEST);
    if !computable || shape.numel() > 0 && (low < 0 || high >= there as i128) {
        let reason = format!(
            "shape {shape}, strides {stride:?} and offset {offset} reach elements {low} to {high} of a storage of {there}"
        );
        return Err(Error::invalid(op, reason));
    }
    Ok(Layout { shape, strides: stride.iter().copied().collect(), offset })
}

/// How a gradient of a view `new` becomes that of what has the layout `old` in the same storage.
pub(crate) fn strided_back(old: Layout, new: Layout) -> impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static {
    move |grad| match is_tracked(&[&grad]) {
        true => recorded_gradient(&old, &new, &grad),
        false => strided_gradient(&old, &new, &grad),
    }
}

/// The gradient of a tensor with layout `old` from that of a view of its storage with layout `new`: elements outside of `old`
/// pass none on.
fn strided_gradient(old: &Layout, new: &Layout, grad: &Tensor) -> Result<Tensor> {
    let (Some((a, b)), Some((c, d))) = (old.bounds(), new.bounds()) else {
        return Tensor::zeros(&old.shape, grad);
    };
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

/// [`strided_gradient`] of operations that have gradients themselves.
fn recorded_gradient(old: &Layout, new: &Layout, grad: &Tensor) -> Result<Tensor> {
    let (n, options) = (old.shape.numel(), (DType::I64, grad.device()));
    let (Some((a, b)), Some((c, d))) = (old.bounds(), new.bounds()) else {
        return Tensor::zeros(&old.shape, grad);
    };
    let low = a.min(c);
    let at = |layout: &Layout| Layout { offset: layout.offset - low, ..layout.clone() };
    // For each element of the storage the index of the tensor's element there, or n where there is none.
    let elements = Tensor::full(b.max(d) + 1 - low, n as i64, options)?;
    elements.with_layout(at(old)).copy_(&Tensor::arange(0, n as i64, 1, options)?.reshape(&old.shape)?)?;
    let index = elements.with_layout(at(new)).reshape(grad.numel())?;
    let sums = Tensor::zeros(n + 1, grad)?.index_add(0, &index, &grad.reshape(grad.numel())?)?;
    sums.narrow(0, 0, n)?.reshape(&old.shape)
}
