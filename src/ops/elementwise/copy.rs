//! Copies between layouts, dtypes and tensors. A copy that changes strides or dtype launches the identity formula, `x`.

use std::sync::LazyLock;

use crate::MemoryFormat;
use crate::autograd::InPlace;
use crate::device::capture::is_capturing;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise;
use crate::tensor::bytes::check_bytes;

/// The formulas `x` (the first input) and `s` (the first scalar), created once because creating an expression allocates memory.
static IDENTITY_AND_SCALAR: LazyLock<[Expr; 2]> = LazyLock::new(|| [Expr::input(0), Expr::scalar(0)]);

operations! {
    clone(input: x): Copying, All -> Same, differentiable => |a| a.tensor(0)?.try_clone();
    contiguous(input: x): Copying, All -> Same, differentiable;
    to_dtype(input: x, dtype: dtype) "to": Copying, All -> Asked, differentiable;
    copy_(input: x, src: x): InPlace, All -> Same;
    copy_non_blocking_(input: x, src: x) "copy_": InPlace, All -> Same;
    fill_(input: x, value: scalar): InPlace, All -> Same;
    zero_(input: x): InPlace, All -> Same;
}

impl Tensor {
    /// Returns a deep copy: a new tensor of this shape and [memory format](Tensor::memory_format) with its own storage. This is the
    /// fallible form of [`Clone`]. Differentiable.
    ///
    /// A dense tensor, including a view with an offset, is copied by one blocking command of exactly its bytes
    /// (`clEnqueueCopyBuffer` on every OpenCL device). A strided tensor is copied by one kernel, into an allocation that holds
    /// exactly the viewed elements.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.t()?.try_clone()?;
    /// assert_eq!(b.to_vec::<f32>()?, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    /// assert!(b.is_contiguous() && !b.shares_storage(&a));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn try_clone(&self) -> Result<Tensor> {
        let _caller = Caller::enter();
        match autograd::is_tracked(&[self]) {
            true => Ok(autograd::record_unary_differentiable("clone", self.deep_copy(true)?, self, Ok)),
            false => self.deep_copy(true),
        }
    }

    /// Returns a deep copy outside the graph. Without `blocking`, the copy is only enqueued; later operations on the device run after the copy.
    pub(crate) fn deep_copy(&self, blocking: bool) -> Result<Tensor> {
        // During graph capture nothing runs, so there is nothing to wait for.
        let blocking = blocking && !is_capturing(self.device());
        let size = self.dtype.size();
        if self.layout.is_dense() {
            let layout = Layout::with_format(self.shape().clone(), self.memory_format());
            let made = elementwise::allocate_result(&[self], layout, self.dtype, self.device());
            if let Ok(out) = &made
                && !out.is_uninit()
            {
                let bytes = self.numel() * size;
                out.storage.copy_from(0, &self.storage, self.layout.offset * size, bytes, blocking)?;
            }
            return made;
        }
        let out = self.cast_to_format(self.dtype, self.memory_format())?;
        if blocking {
            self.device().synchronize()?;
        }
        Ok(out)
    }

    /// Returns the elements as a row-major tensor: this tensor itself if it is contiguous, otherwise a copy made by one launch.
    /// Operations of this crate accept any strides; call this method for other code that needs contiguous memory. Differentiable.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.to_format("contiguous", MemoryFormat::Contiguous)
    }

    /// Returns a tensor in the given memory format: this tensor itself if it has that format, otherwise a copy made by one launch
    /// (PyTorch's `x.to(memory_format=torch.channels_last)`). Operations and layers keep the memory format of their input if they can.
    /// Views such as [`Tensor::flatten`] follow the order of indices and not the order in memory. Differentiable. Fails with
    /// [`Error::Invalid`] for a tensor whose number of dims does not match the format.
    ///
    /// ```
    /// use claystone::{Device, MemoryFormat, Tensor};
    /// let x = Tensor::arange(0, 8, 1, Device::Cpu)?.reshape([1, 2, 2, 2])?;
    /// let y = x.to_memory_format(MemoryFormat::ChannelsLast)?;
    /// assert_eq!(y.to_vec::<f32>()?, x.to_vec::<f32>()?); // values go by the indices
    /// assert_eq!(y.permute(&[0, 2, 3, 1])?.is_contiguous(), true);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn to_memory_format(&self, format: MemoryFormat) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "to_memory_format";
        format.check(op, self.shape())?;
        self.to_format(op, format)
    }

    fn to_format(&self, op: &'static str, format: MemoryFormat) -> Result<Tensor> {
        if self.layout.has_format(format) {
            return Ok(self.shallow_clone());
        }
        let out = self.cast_to_format(self.dtype, format)?;
        Ok(autograd::record_unary_differentiable(op, out, self, Ok))
    }

    /// Copies to any dtype and memory format, outside the graph.
    fn cast_to_format(&self, dtype: DType, format: MemoryFormat) -> Result<Tensor> {
        let layout = Layout::with_format(self.shape().clone(), format);
        let made = elementwise::allocate_result(&[self], layout, dtype, self.device());
        elementwise::fill_result(made, "copy", &[self], Params::default(), &IDENTITY_AND_SCALAR[0])
    }

    /// Converts the elements to `dtype`. Returns this tensor itself if it already has that dtype, otherwise a new tensor. Differentiable
    /// between floats.
    ///
    /// Conversions follow Rust's `as`. Floats truncate towards zero and saturate as integers, NaN becomes 0, and integers wrap. Halves
    /// round to nearest even. Converted to bool, every value except 0 is true. A device without double precision cannot convert to or
    /// from f64.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let t = Tensor::from_slice(&[1.5f32, -2.5, 300.0], 3, Device::Cpu)?;
    /// assert_eq!(t.to_dtype(DType::U8)?.to_vec::<u8>()?, [1, 0, 255]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        let _caller = Caller::enter();
        if dtype == self.dtype {
            return Ok(self.shallow_clone());
        }
        let out = self.cast_to_format(dtype, self.memory_format())?;
        let from = self.dtype;
        if !dtype.is_float() || !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let format = self.memory_format();
        autograd::note_recipe(&out, &[self], || move |x: &[&Tensor]| x[0].cast_to_format(dtype, format));
        Ok(autograd::record_differentiable("to_dtype", out, &[self], move |ctx| {
            let grad = ctx.grad()?;
            // If this is autocast's copy of a weight, the gradient is written directly to the buffer that the optimiser reads.
            let converted = match ctx.slot(0) {
                Some(slot) => {
                    slot.copy_(&grad)?;
                    slot
                }
                None => grad.to_dtype(from)?,
            };
            Ok(SmallVec::from_iter([Some(converted)]))
        }))
    }

    /// Copies to any dtype in row-major order, outside the graph.
    pub(crate) fn cast(&self, dtype: DType) -> Result<Tensor> {
        self.cast_to_format(dtype, MemoryFormat::Contiguous)
    }

    /// Copies `src`, broadcast to this tensor's shape and converted to its dtype, into this tensor. In place; differentiable with respect
    /// to `src`.
    ///
    /// Both tensors must be on the same device, unless they have the same shape and dtype and are contiguous in the same memory format; a
    /// copy between devices waits for the device. Fails with [`Error::Partial`] if a copy between devices, or between overlapping views,
    /// fails midway.
    pub fn copy_(&self, src: &Tensor) -> Result<&Tensor> {
        self.copy_recorded("copy_", src, false)
    }

    /// Copies like [`Tensor::copy_`], but returns as soon as the copy is enqueued on the current stream (PyTorch's
    /// `copy_(src, non_blocking=True)`).
    ///
    /// Only a copy between a device and memory that is pinned for that device ([`Tensor::pin_memory`]), with equal shape, dtype and
    /// memory format, does not wait. All other copies wait as in `copy_`. The next access to the pinned tensor waits for the copy, and
    /// its memory is not reused until the copy is done. Other code that reads the memory by its address must wait first, with
    /// [`crate::Stream::synchronize`] or an event. The next wait on the stream reports failures of the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let device = Device::best();
    /// let x = Tensor::zeros(3, device)?;
    /// x.copy_non_blocking_(&Tensor::ones(3, Device::Cpu)?.pin_memory(device)?)?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0; 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn copy_non_blocking_(&self, src: &Tensor) -> Result<&Tensor> {
        self.copy_recorded("copy_non_blocking_", src, true)
    }

    fn copy_recorded(&self, op: &'static str, src: &Tensor, non_blocking: bool) -> Result<&Tensor> {
        let change = autograd::begin_in_place(op, self, &[src])?;
        self.copy_elements(op, src, non_blocking)?;
        match change {
            Some(change) if src.requires_grad() => {
                let (shape, dtype, device) = (src.shape().clone(), src.dtype, src.device());
                let back = move |grad: Tensor| grad.sum_to(&shape)?.to_device(device)?.to_dtype(dtype);
                change.finish(|out| autograd::record_unary_differentiable(op, out, src, back));
            }
            Some(change) => change.finish_overwrite(),
            None => {}
        }
        Ok(self)
    }

    /// Copies as [`Tensor::copy_`] does, outside the graph.
    fn copy_elements(&self, op: &'static str, src: &Tensor, non_blocking: bool) -> Result<()> {
        if self.skips_writes() {
            return Ok(());
        }
        let format = self.memory_format();
        let plain = self.dtype == src.dtype
            && self.shape() == src.shape()
            && self.is_contiguous_in(format)
            && src.is_contiguous_in(format);
        if !plain {
            return elementwise::apply_into(op, &[src], Params::default(), &IDENTITY_AND_SCALAR[..1], &[self]);
        }
        let size = self.dtype.size();
        let (to, from, bytes) = (self.layout.offset * size, src.layout.offset * size, self.numel() * size);
        let copy = || match non_blocking {
            true if self.storage.start_copy_from(to, &src.storage, from, bytes)? => Ok(()),
            _ => self.storage.copy_from(to, &src.storage, from, bytes, false),
        };
        // A copy between devices runs in pieces, and some pieces may already be complete when a later piece fails.
        let across = self.device() != src.device();
        let named = |e| if across || matches!(e, Error::Partial { .. }) { e.into_partial(op) } else { e };
        backend::launch([self], |_| copy().map_err(named))
    }

    /// Overwrites the elements, in row-major order, with `bytes` in the host's byte order. In place; the inverse of
    /// [`Tensor::read_bytes`]. `bytes` may be reused when the call returns.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::zeros([2, 2], (claystone::DType::U8, Device::Cpu))?;
    /// x.t()?.write_bytes_(&[1, 2, 3, 4])?;
    /// assert_eq!(x.to_vec::<u8>()?, [1, 3, 2, 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a wrong number of bytes, for bools other than 0 and 1, and for an expanded view; the errors of
    /// [`Tensor::fill_`]; [`Error::Partial`] if the device fails midway.
    pub fn write_bytes_(&self, bytes: &[u8]) -> Result<&Tensor> {
        self.write_elements("write_bytes_", bytes, false)
    }

    /// Overwrites the elements like [`Tensor::write_bytes_`], but copies the bytes to pinned memory and returns as soon as the transfer
    /// is enqueued on the current stream. The call does not wait for earlier work of the stream.
    ///
    /// The call waits if the tensor is not contiguous, if there are more than 16 MiB of bytes, or if no pinned memory is available.
    /// The next wait on the stream reports failures of the device.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::zeros(4, (DType::U8, Device::best()))?;
    /// x.write_bytes_non_blocking_(&[1, 2, 3, 4])?;
    /// assert_eq!(x.to_vec::<u8>()?, [1, 2, 3, 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn write_bytes_non_blocking_(&self, bytes: &[u8]) -> Result<&Tensor> {
        self.write_elements("write_bytes_non_blocking_", bytes, true)
    }

    fn write_elements(&self, op: &'static str, bytes: &[u8], non_blocking: bool) -> Result<&Tensor> {
        check_bytes(op, bytes, self.shape(), self.dtype)?;
        if self.skips_writes() {
            return Ok(self);
        }
        let change = autograd::begin_in_place(op, self, &[])?;
        if self.is_contiguous() {
            let at = self.layout.offset * self.dtype.size();
            let write = || match non_blocking && self.storage.start_write(at, bytes)? {
                true => Ok(()),
                false => self.storage.write(at, bytes),
            };
            backend::launch([self], |_| write().map_err(|e| e.into_partial(op)))?;
        } else {
            self.copy_elements(op, &Tensor::from_bytes(bytes, self.shape(), self)?, false)?;
        }
        change.into_iter().for_each(InPlace::finish_overwrite);
        Ok(self)
    }

    /// Sets every element to `value`, converted to the dtype. A negative integer wraps in an unsigned dtype. In place. Fails with
    /// [`Error::Invalid`] for a fraction if the dtype is an integer, for a number outside the dtype's range, such as NaN, for a finite
    /// number that rounds to infinity, and for an expanded view.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::zeros(2, (DType::U8, Device::Cpu))?;
    /// assert_eq!(x.fill_(7.0)?.to_vec::<u8>()?, [7, 7]);
    /// let refused = x.fill_(256.0).unwrap_err().to_string();
    /// assert_eq!(refused, "fill_: 256.0 is out of the range of u8, 0 to 255");
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn fill_(&self, value: impl Into<Scalar>) -> Result<&Tensor> {
        let op = "fill_";
        let scalars = [value.into().stored(op, self.dtype)?];
        let change = autograd::begin_in_place(op, self, &[])?;
        elementwise::apply_into(op, &[], Params::from_scalars(&scalars), &IDENTITY_AND_SCALAR[1..], &[self])?;
        change.into_iter().for_each(InPlace::finish_overwrite);
        Ok(self)
    }

    /// Sets every element to zero. In place. Fails as [`Tensor::fill_`] does.
    pub fn zero_(&self) -> Result<&Tensor> {
        self.fill_(0).with_op("zero_")
    }
}

impl Clone for Tensor {
    /// Returns a deep copy with its own storage; see [`Tensor::try_clone`]. [`Tensor::shallow_clone`] shares the storage instead.
    ///
    /// # Panics
    /// Panics if the device is out of memory or lost. [`Tensor::try_clone`] returns the error instead.
    #[track_caller]
    fn clone(&self) -> Tensor {
        match self.try_clone() {
            Ok(copy) => copy,
            Err(e) => panic!("{e}"), // not in a closure, so that the panic names the caller's line
        }
    }
}
