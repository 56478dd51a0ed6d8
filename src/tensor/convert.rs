//! Copies to the host and to other devices. (Conversions of dtypes are in `ops::elementwise::copy`.)

use std::any::Any;

use ndarray::{ArrayD, IxDyn};

use super::Layout;
use crate::autograd::record_unary_differentiable;
use crate::storage::{Caller, Storage};
use crate::{DType, Device, Element, Error, Result, Tensor, elements};

impl Tensor {
    /// Returns the elements in row-major order. Waits for the device. For read access
    /// [`Tensor::to_host`] is cheaper: it uses memory that the allocator caches. Fails with [`Error::DTypeMismatch`] if `T` is not
    /// this tensor's element type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.read_elements("to_vec")
    }

    /// Returns the elements as an ndarray array of this shape. Waits for the device. Fails as [`Tensor::to_vec`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::eye(2, Device::Cpu)?;
    /// assert_eq!(a.to_ndarray::<f32>()?, ndarray::array![[1.0, 0.0], [0.0, 1.0]].into_dyn());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        let op = "to_ndarray";
        let values = self.read_elements(op)?;
        ArrayD::from_shape_vec(IxDyn(self.shape().dims()), values).map_err(|e| Error::invalid(op, e.to_string()))
    }

    /// Returns the only element (PyTorch's `item`). Waits for the device. Fails as [`Tensor::to_vec`] does, and if the tensor does not
    /// have exactly one element.
    pub fn item<T: Element>(&self) -> Result<T> {
        match self.numel() {
            1 => Ok(self.read_elements("item")?[0]),
            n => Err(Error::invalid("item", format!("a tensor of shape {} has {n} elements, not one", self.shape()))),
        }
    }

    /// Copies the elements to the host, in row-major order.
    fn read_elements<T: Element>(&self, op: &'static str) -> Result<Vec<T>> {
        self.check_element::<T>(op)?;
        // The elements are copied before the vector is allocated. If an expanded tensor does not fit in memory, this returns an error,
        // whereas the vector would panic.
        let source = self.detach().contiguous()?;
        let bits: Vec<T::Bits> = source.storage.read_vec(source.layout.offset * self.dtype.size(), source.numel())?;
        // If every bit pattern of `T` is valid, `Bits` is `T` itself, and the vector is returned without a copy.
        let bits = match (Box::new(bits) as Box<dyn Any>).downcast::<Vec<T>>() {
            Ok(values) => return Ok(*values),
            Err(bits) => bits.downcast::<Vec<T::Bits>>().unwrap_or_default(),
        };
        elements::<T>(op, bytemuck::cast_slice(&bits)).map(<[T]>::to_vec)
    }

    pub(super) fn check_element<T: Element>(&self, op: &'static str) -> Result<()> {
        if T::DTYPE == self.dtype { Ok(()) } else { Err(Error::DTypeMismatch { op, lhs: self.dtype, rhs: T::DTYPE }) }
    }

    /// Returns this tensor on `device`: the same storage if the tensor is already there, otherwise a copy of its elements, without other
    /// elements of the storage, in its [memory format](Tensor::memory_format) (PyTorch's `to`). Differentiable: the gradient is copied
    /// back.
    #[track_caller]
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let source_device = self.device();
        if device == source_device {
            return Ok(self.shallow_clone());
        }
        let source = self.detach().to_memory_format(self.memory_format())?;
        let layout = Layout::with_format(self.shape().clone(), self.memory_format());
        let out = Tensor::empty_with_layout(layout, self.dtype, device)?;
        let size = self.dtype.size();
        out.storage.copy_from(0, &source.storage, source.layout.offset * size, self.numel() * size, true)?;
        Ok(record_unary_differentiable("to_device", out, self, move |grad| grad.to_device(source_device)))
    }

    /// Copies to host memory that `device` transfers at the full speed of its bus (PyTorch's `pin_memory`). The result is a contiguous
    /// tensor on [`Device::Cpu`] without a gradient. [`to_device`](Tensor::to_device) from this tensor and `copy_` into it need no
    /// further copy on the host, and [`copy_non_blocking_`](Tensor::copy_non_blocking_) does not wait. On the CPU device, or if no pinned
    /// memory is left, the result is an ordinary copy; [`is_pinned`](Tensor::is_pinned) tells whether the copy is pinned. Pinned memory
    /// is scarce, so dropped blocks are cached for reuse (see [`Device::pinned_memory_stats`]).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (device, x) = (Device::best(), Tensor::eye(3, Device::Cpu)?);
    /// let pinned = x.pin_memory(device)?;
    /// assert_eq!(pinned.to_device(device)?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn pin_memory(&self, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let source = self.detach().contiguous()?;
        let size = self.dtype.size();
        let out = match Storage::pinned(device, self.numel() * size)? {
            Some(storage) => Tensor::new(storage, Layout::contiguous(self.shape().clone()), self.dtype),
            None => Tensor::empty_with_shape(self.shape(), self.dtype, Device::default())?,
        };
        out.storage.copy_from(0, &source.storage, source.layout.offset * size, self.numel() * size, true)?;
        Ok(out)
    }

    /// True if the memory is pinned for transfers to and from `device`: see [`pin_memory`](Tensor::pin_memory).
    pub fn is_pinned(&self, device: Device) -> bool {
        self.storage.is_pinned(device)
    }

    /// Converts to `dtype` and moves to `device`: calls [`Tensor::to_dtype`] and [`Tensor::to_device`] in the order that transfers fewer
    /// bytes. Fails as these two methods do.
    #[track_caller]
    pub fn to(&self, dtype: DType, device: Device) -> Result<Tensor> {
        if dtype.size() < self.dtype.size() {
            self.to_dtype(dtype)?.to_device(device)
        } else {
            self.to_device(device)?.to_dtype(dtype)
        }
    }
}
