//! Copies: between layouts, dtypes and tensors. A strided or converting copy is the expression `x`.

use std::slice;
use std::sync::LazyLock;

use smallvec::SmallVec;

use crate::autograd::{self, InPlace};
use crate::backend::problem::map::Params;
use crate::device::capture::is_capturing;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise;
use crate::tensor::Layout;
use crate::tensor::bytes::check_bytes;
use crate::{DType, Expr, MemoryFormat, Result, Scalar, Tensor, backend};

/// `x`, and a scalar: made once, since making one asks the heap.
static IDENTITY: LazyLock<Expr> = LazyLock::new(|| Expr::input(0));
static SCALAR: LazyLock<Expr> = LazyLock::new(|| Expr::scalar(0));

operations! {
    clone(input: x): Copying, All -> Same, differentiable => |a| a.x(0)?.try_clone();
    contiguous(input: x): Copying, All -> Same, differentiable;
    to_dtype(input: x, dtype: dtype) "to": Copying, All -> Asked, differentiable;
    copy_(input: x, src: x): InPlace, All -> Same;
    copy_non_blocking_(input: x, src: x) "copy_": InPlace, All -> Same;
    fill_(input: x, value: scalar): InPlace, All -> Same;
    zero_(input: x): InPlace, All -> Same;
}

impl Tensor {
    /// A deep copy: a new tensor of this shape and [memory format](Tensor::memory_format) that shares nothing, the fallible form
    /// of [`Clone`].
    ///
    /// Elements that lie in one piece (a view with an offset too) are copied by one blocking command of exactly their bytes
    /// (`clEnqueueCopyBuffer` on every OpenCL device), strided ones by one kernel into an allocation of exactly the viewed
    /// elements. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.t()?.try_clone()?;
    /// assert_eq!(b.to_vec::<f32>()?, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    /// assert!(b.is_contiguous() && !b.shares_storage(&a));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] and device failures.
    #[track_caller]
    pub fn try_clone(&self) -> Result<Tensor> {
        let _caller = Caller::enter();
        match autograd::is_tracked(&[self]) {
            true => Ok(autograd::record_unary_twice("clone", self.copied(true)?, self, Ok)),
            false => self.copied(true),
        }
    }

    /// A deep copy outside the graph; without `blocking` it is only enqueued, which is all that later operations need.
    pub(crate) fn copied(&self, blocking: bool) -> Result<Tensor> {
        // A graph that is being captured runs nothing to wait for.
        let blocking = blocking && !is_capturing(self.device());
        let size = self.dtype.size();
        if self.layout.is_dense() {
            let layout = Layout::in_format(self.shape().clone(), self.memory_format());
            let made = elementwise::result_of(&[self], layout, self.dtype, self.device());
            if let Ok(out) = &made
                && !out.is_uninit()
            {
                let bytes = self.numel() * size;
                out.storage.copy_from(0, &self.storage, self.layout.offset * size, bytes, blocking)?;
            }
            return made;
        }
        let out = self.cast_in(self.dtype, self.memory_format())?;
        if blocking {
            self.device().synchronize()?;
        }
        Ok(out)
    }

    /// These elements in row-major order: this tensor itself where they already are, otherwise a copy (one launch).
    /// No operation of this crate needs it; it is there for code that hands bytes to somebody else. Differentiable.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] and device failures.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.in_format("contiguous", MemoryFormat::Contiguous)
    }

    /// These elements in this order in memory: this tensor itself where they already are, otherwise a copy (one launch). PyTorch's
    /// `x.to(memory_format=torch.channels_last)`. Operations on the result, and layers of it, keep the order where they can;
    /// views, such as [`Tensor::flatten`], go by the shape as ever. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, MemoryFormat, Tensor};
    /// let x = Tensor::arange(0, 8, 1, Device::Cpu)?.reshape([1, 2, 2, 2])?;
    /// let y = x.to_memory_format(MemoryFormat::ChannelsLast)?;
    /// assert_eq!(y.to_vec::<f32>()?, x.to_vec::<f32>()?); // values go by the indices
    /// assert_eq!(y.permute(&[0, 2, 3, 1])?.is_contiguous(), true);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a tensor of another number of dims than the format has; [`crate::Error::OutOfMemory`] and
    /// device failures.
    #[track_caller]
    pub fn to_memory_format(&self, format: MemoryFormat) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "to_memory_format";
        format.check(op, self.shape())?;
        self.in_format(op, format)
    }

    fn in_format(&self, op: &'static str, format: MemoryFormat) -> Result<Tensor> {
        if self.layout.is_in(format) {
            return Ok(self.shallow_clone());
        }
        let out = self.cast_in(self.dtype, format)?;
        Ok(autograd::record_unary_twice(op, out, self, Ok))
    }

    /// A copy of any dtype in this format, outside the graph.
    fn cast_in(&self, dtype: DType, format: MemoryFormat) -> Result<Tensor> {
        let layout = Layout::in_format(self.shape().clone(), format);
        let made = elementwise::result_of(&[self], layout, dtype, self.device());
        elementwise::filled(made, "copy", &[self], Params::default(), &IDENTITY)
    }

    /// These elements converted to `dtype`, in a new tensor; this tensor itself where it has that dtype. Differentiable
    /// between floats.
    ///
    /// Conversions are Rust's `as`: floats to integers truncate towards zero and saturate, NaN gives 0, integers wrap,
    /// halves round to nearest even; to bool, everything but 0 is true.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let t = Tensor::from_slice(&[1.5f32, -2.5, 300.0], 3, Device::Cpu)?;
    /// assert_eq!(t.to_dtype(DType::U8)?.to_vec::<u8>()?, [1, 0, 255]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; a device without double precision cannot convert f64.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        let _caller = Caller::enter();
        if dtype == self.dtype {
            return Ok(self.shallow_clone());
        }
        let out = self.cast_in(dtype, self.memory_format())?;
        let from = self.dtype;
        if !dtype.is_float() || !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        Ok(autograd::record_twice("to_dtype", out, &[self], move |ctx| {
            let grad = ctx.grad()?;
            // Autocast's copies of weights: their gradients go where the optimiser reads them.
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

    /// A row-major copy of any dtype, outside the graph.
    pub(crate) fn cast(&self, dtype: DType) -> Result<Tensor> {
        self.cast_in(dtype, MemoryFormat::Contiguous)
    }

    /// Copies `src` into this tensor, broadcast to its shape and converted to its dtype; both on one device, or, where they
    /// are contiguous in one memory format and of one shape and dtype, on any two: that waits. In place; differentiable in `src`.
    ///
    /// # Errors
    /// [`crate::Error::ShapeMismatch`], [`crate::Error::DeviceMismatch`]; [`crate::Error::Autograd`] where this is a leaf that
    /// requires a gradient, or a view of one; [`crate::Error::Invalid`] into an expanded view; [`crate::Error::Partial`] where a copy between devices, or
    /// to where it overlaps, fails midway.
    pub fn copy_(&self, src: &Tensor) -> Result<&Tensor> {
        self.copy_recorded("copy_", src, false)
    }

    /// [`Tensor::copy_`] that returns when it is enqueued on the current stream, between a device and memory that is pinned for it
    /// ([`Tensor::pin_memory`]), of one shape, dtype and memory format: PyTorch's `copy_(src, non_blocking=True)`. Other copies wait as
    /// before. Whoever gets at the pinned tensor next waits for it, and its memory is not given to others before; where
    /// another program's code reads at its address, that has to wait first ([`crate::Stream::synchronize`], an event). The device's
    /// failures are told by the stream's next wait.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let device = Device::best();
    /// let x = Tensor::zeros(3, device)?;
    /// x.copy_non_blocking_(&Tensor::ones(3, Device::Cpu)?.pin_memory(device)?)?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0; 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Tensor::copy_`].
    pub fn copy_non_blocking_(&self, src: &Tensor) -> Result<&Tensor> {
        self.copy_recorded("copy_non_blocking_", src, true)
    }

    fn copy_recorded(&self, op: &'static str, src: &Tensor, non_blocking: bool) -> Result<&Tensor> {
        let change = autograd::in_place(op, self, &[src])?;
        self.copy_elements(op, src, non_blocking)?;
        match change {
            Some(change) if src.requires_grad() => {
                let (shape, dtype, device) = (src.shape().clone(), src.dtype, src.device());
                let back = move |grad: Tensor| grad.sum_to(&shape)?.to_device(device)?.to_dtype(dtype);
                change.finish(|out| autograd::record_unary_twice(op, out, src, back));
            }
            Some(change) => change.overwritten(),
            None => {}
        }
        Ok(self)
    }

    /// [`Tensor::copy_`] outside the graph.
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
            elementwise::apply_into(op, &[src], Params::default(), slice::from_ref(&*IDENTITY), &[self])?;
            return Ok(());
        }
        let size = self.dtype.size();
        let (to, from, bytes) = (self.layout.offset * size, src.layout.offset * size, self.numel() * size);
        let copy = || match non_blocking {
            true if self.storage.start_copy_from(to, &src.storage, from, bytes)? => Ok(()),
            _ => self.storage.copy_from(to, &src.storage, from, bytes, false),
        };
        // Between devices in pieces, of which some may be there.
        let across = self.device() != src.device();
        let named = |e| if across || matches!(e, Error::Partial { .. }) { e.in_part(op) } else { e };
        backend::launch([self], |_| copy().map_err(named))
    }

    /// Sets the elements, in row-major order, to those that are given as bytes in the byte order of the host, which may be reused
    /// when it returns: the opposite of [`Tensor::read_bytes`]. In place.
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
    /// [`crate::Error::Invalid`] for another number of bytes, for bools other than 0 and 1, and into an expanded view; otherwise as
    /// [`Tensor::fill_`]; [`crate::Error::Partial`] where the device fails midway.
    pub fn write_bytes_(&self, bytes: &[u8]) -> Result<&Tensor> {
        self.write_elements("write_bytes_", bytes, false)
    }

    /// [`Tensor::write_bytes_`] that returns when it is enqueued on the current stream, with a copy of the bytes in pinned memory: it does
    /// not wait for what the stream has to do before. Where the tensor is not contiguous, the bytes are more than 16 MiB or there
    /// is no pinned memory left, it waits. The device's failures are told by the stream's next wait.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::zeros(4, (DType::U8, Device::best()))?;
    /// x.write_bytes_non_blocking_(&[1, 2, 3, 4])?;
    /// assert_eq!(x.to_vec::<u8>()?, [1, 2, 3, 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Tensor::write_bytes_`].
    pub fn write_bytes_non_blocking_(&self, bytes: &[u8]) -> Result<&Tensor> {
        self.write_elements("write_bytes_non_blocking_", bytes, true)
    }

    fn write_elements(&self, op: &'static str, bytes: &[u8], non_blocking: bool) -> Result<&Tensor> {
        check_bytes(op, bytes, self.shape(), self.dtype)?;
        if self.skips_writes() {
            return Ok(self);
        }
        let change = autograd::in_place(op, self, &[])?;
        if self.is_contiguous() {
            let at = self.layout.offset * self.dtype.size();
            let write = || match non_blocking && self.storage.start_write(at, bytes)? {
                true => Ok(()),
                false => self.storage.write(at, bytes),
            };
            backend::launch([self], |_| write().map_err(|e| e.in_part(op)))?;
        } else {
            self.copy_elements(op, &Tensor::from_bytes(bytes, self.shape(), self)?, false)?;
        }
        change.into_iter().for_each(InPlace::overwritten);
        Ok(self)
    }

    /// Sets every element to `value`, converted to the dtype; a negative integer wraps in an unsigned dtype. In place.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::zeros(2, (DType::U8, Device::Cpu))?;
    /// assert_eq!(x.fill_(7.0)?.to_vec::<u8>()?, [7, 7]);
    /// let refused = x.fill_(256.0).unwrap_err().to_string();
    /// assert_eq!(refused, "fill_: 256.0 is out of the range of u8, 0 to 255");
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a fraction into integers, a number out of the dtype's range, such as NaN, and a finite one that rounds to infinity;
    /// [`crate::Error::Autograd`] where this is a leaf that requires a gradient, or a view of one; [`crate::Error::Invalid`] on
    /// an expanded view.
    pub fn fill_(&self, value: impl Into<Scalar>) -> Result<&Tensor> {
        let op = "fill_";
        let scalars = [value.into().stored(op, self.dtype)?];
        let change = autograd::in_place(op, self, &[])?;
        elementwise::apply_into(op, &[], Params::of(&scalars), slice::from_ref(&*SCALAR), &[self])?;
        change.into_iter().for_each(InPlace::overwritten);
        Ok(self)
    }

    /// Sets every element to zero. In place.
    ///
    /// # Errors
    /// As [`Tensor::fill_`].
    pub fn zero_(&self) -> Result<&Tensor> {
        self.fill_(0).named("zero_")
    }
}

impl Clone for Tensor {
    /// A deep copy with its own storage; see [`Tensor::try_clone`]. [`Tensor::shallow_clone`] shares instead.
    ///
    /// # Panics
    /// When the device is out of memory or lost; [`Tensor::try_clone`] gives the error instead.
    #[track_caller]
    fn clone(&self) -> Tensor {
        match self.try_clone() {
            Ok(copy) => copy,
            Err(e) => panic!("{e}"), // here and not in a closure, so that the caller's line is named
        }
    }
}
