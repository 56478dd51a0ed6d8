//! Creation of tensors: constants, sequences and values of the host. (Random tensors are in `ops::random`.)

use ndarray::{Array, ArrayBase, Data, Dimension};

use super::Layout;
use crate::layout::shape::impl_from;
use crate::storage::{Caller, HostElements, Storage};
use crate::{DType, Device, Element, Result, Scalar, Shape, Tensor, get_default_dtype};

/// The dtype and device of a new tensor. Methods that create tensors take `impl Into<TensorOptions>`: a device, a pair of a dtype and a
/// device, or a tensor whose dtype and device are used. The default dtype is f32, unless [`set_default_dtype`](crate::set_default_dtype)
/// sets another dtype.
///
/// ```
/// use claystone::{DType, Device, Tensor, TensorOptions};
/// let a = Tensor::zeros(&[2], Device::Cpu)?;
/// assert_eq!(a.dtype(), DType::F32);
/// let b = Tensor::ones(&[2], (DType::F16, Device::Cpu))?;
/// assert_eq!(TensorOptions::from(&b), TensorOptions { dtype: DType::F16, device: Device::Cpu });
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorOptions {
    /// The element type.
    pub dtype: DType,
    /// The device that holds the elements.
    pub device: Device,
}

impl_from! { TensorOptions:
    [] Device, device => TensorOptions { dtype: get_default_dtype(), device };
    [] (DType, Device), (dtype, device) => TensorOptions { dtype, device };
    [] &Tensor, tensor => TensorOptions { dtype: tensor.dtype(), device: tensor.device() };
}

/// Constants and sequences.
impl Tensor {
    /// Returns a tensor with uninitialised elements (PyTorch's `empty`), which must be written before they are read.
    #[track_caller]
    pub fn empty(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let options = options.into();
        match options.dtype {
            // Uninitialised bytes could be invalid bools: only 0 and 1 are valid.
            DType::Bool => Tensor::zeros(shape, options),
            dtype => Tensor::empty_or_uninit(Layout::contiguous(shape.into()), dtype, options.device),
        }
    }

    /// Returns zeros (PyTorch's `zeros`); `false` for bool.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let a = Tensor::zeros(&[3, 4], Device::Cpu)?; // f32 unless said
    /// let b = Tensor::zeros(&[3, 4], (DType::F16, Device::Cpu))?;
    /// assert_eq!((a.storage().nbytes(), b.storage().nbytes()), (48, 24));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn zeros(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let TensorOptions { dtype, device } = options.into();
        let layout = Layout::contiguous(shape.into());
        let bytes = layout.shape.bytes(dtype.size());
        let storage = match Storage::uninit(device, bytes)? {
            Some(storage) => storage,
            None => Storage::alloc_zeroed(device, bytes)?,
        };
        Ok(Tensor::new(storage, layout, dtype))
    }

    /// Returns ones (PyTorch's `ones`); `true` for bool.
    #[track_caller]
    pub fn ones(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        Tensor::full(shape, 1, options)
    }

    /// Returns a tensor filled with `value` (PyTorch's `full`, but f32 by default).
    ///
    /// The value is converted to the dtype like Rust's `as`: floats too large for an integer saturate, integers wrap. Fails with
    /// [`crate::Error::Invalid`] for a number that the dtype cannot hold (see [`Tensor::fill_`]).
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let a = Tensor::full(&[2, 2], 7, (DType::I64, Device::Cpu))?;
    /// assert_eq!(a.to_vec::<i64>()?, [7; 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn full(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
        let TensorOptions { dtype, device } = options.into();
        let value = value.into().stored("full", dtype)?;
        let out = Tensor::empty_or_uninit(Layout::contiguous(shape.into()), dtype, device)?;
        if out.is_uninit() {
            return Ok(out);
        }
        let mut pattern = [0; 8];
        let pattern = &mut pattern[..dtype.size()];
        value.encode(dtype, pattern);
        out.storage.fill(0, out.storage.nbytes(), pattern)?;
        Ok(out)
    }

    /// Returns a matrix with ones on the diagonal and zeros elsewhere (PyTorch's `eye`). The shape is `n` or `[rows, columns]`.
    /// Fails with [`crate::Error::Invalid`] for a shape that does not have one or two sizes.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// assert_eq!(Tensor::eye(2, Device::Cpu)?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 1.0]);
    /// assert_eq!(Tensor::eye([2, 3], Device::Cpu)?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn eye(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let shape = shape.into();
        let (rows, columns) = match *shape.dims() {
            [n] => (n, n),
            [n, m] => (n, m),
            _ => invalid!("eye", "the shape must have one or two sizes, not {shape}"),
        };
        let out = Tensor::zeros([rows, columns], options)?;
        out.diagonal(0, 0, 1)?.fill_(1)?;
        Ok(out)
    }

    /// Returns an uninitialised tensor like [`Tensor::empty`], with this tensor's shape, memory format, dtype and device.
    #[track_caller]
    pub fn empty_like(&self) -> Result<Tensor> {
        Ok(Tensor::empty(self.shape(), self)?.with_format_of(self))
    }

    /// Returns zeros with this tensor's shape, memory format, dtype and device.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor> {
        Ok(Tensor::zeros(self.shape(), self)?.with_format_of(self))
    }

    /// Returns ones with this tensor's shape, memory format, dtype and device.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor> {
        Ok(Tensor::ones(self.shape(), self)?.with_format_of(self))
    }

    /// Returns a tensor filled with `value`, like [`Tensor::full`], with this tensor's shape, memory format, dtype and device.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        Ok(Tensor::full(self.shape(), value, self)?.with_format_of(self))
    }
}

impl Tensor {
    /// Changes the strides to the memory format of `other`. Only for a new tensor whose elements are all equal, because no element moves.
    fn with_format_of(mut self, other: &Tensor) -> Tensor {
        self.layout = Layout::with_format(self.layout.shape, other.memory_format());
        self
    }
}

/// Tensors over existing memory.
impl Tensor {
    /// Creates a row-major tensor over the first bytes of a storage, which other tensors may share
    /// (PyTorch's `torch.empty(0).set_(storage)`).
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::from_slice(&[1.0f32, 0.0], 2, Device::Cpu)?;
    /// let bits = Tensor::from_storage(x.storage().clone(), 2, DType::U32)?;
    /// assert_eq!(bits.to_vec::<u32>()?, [1.0f32.to_bits(), 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the storage has too few bytes, is not a whole number of elements, or is not aligned for the dtype
    /// (possible for a vector of bytes); and for bool, because not every byte is a valid bool: use u8 and `ne_scalar(0)`.
    pub fn from_storage(storage: Storage, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let layout = Layout::contiguous(shape.into());
        let (wanted, has) = (layout.shape.bytes(dtype.size()), storage.nbytes());
        let shape = &layout.shape;
        invalid!("from_storage" if dtype == DType::Bool, "not every byte is a bool: use u8, and ne_scalar(0)");
        invalid!("from_storage" if wanted > has,
            "{shape:?} of {dtype} takes {wanted} bytes, and the storage has {has}");
        check_storage("from_storage", &storage, dtype)?;
        // The tensor is detached, so that other tensors on this storage keep their own autograd history.
        Ok(Tensor::new(storage, layout, dtype).detach())
    }
}

/// Tensors from values in host memory, whose type determines the dtype.
impl Tensor {
    /// Copies `values`, in row-major order. Fails with [`crate::Error::Invalid`] if the shape has another number of elements.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2], Device::Cpu)?;
    /// assert_eq!(a.i((1, 0))?.item::<f32>()?, 3.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn from_slice<T: Element>(values: &[T], shape: impl Into<Shape>, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let shape = check_len("from_slice", values.len(), shape.into())?;
        let out = Tensor::empty_with_shape(shape, T::DTYPE, device)?;
        out.storage.write(0, bytemuck::cast_slice(values))?;
        Ok(out)
    }

    /// Creates a tensor of `values`, in row-major order. On [`Device::Cpu`] the tensor takes over the vector without a copy. Fails
    /// with [`crate::Error::Invalid`] for a shape of another number of elements.
    #[track_caller]
    pub fn from_vec<T: Element>(values: Vec<T>, shape: impl Into<Shape>, device: Device) -> Result<Tensor> {
        if !device.is_host() {
            return Tensor::from_slice(&values, shape, device);
        }
        let layout = Layout::contiguous(check_len("from_vec", values.len(), shape.into())?);
        Ok(Tensor::new(Storage::adopt(values), layout, T::DTYPE))
    }

    /// Creates a tensor over elements that `memory` owns, in row-major order: a vector, a boxed slice, a mapped file, or anything else
    /// that gives a slice. `memory` is dropped with the last handle on the storage. Allocator statistics do not count this memory.
    ///
    /// On [`Device::Cpu`] nothing is copied. An OpenCL device that works on the host's memory
    /// ([`unified_memory`](crate::device::DeviceInfo::unified_memory)) also makes no copy if the address and the size in bytes are
    /// multiples of 16. The device then uses these elements through a separate buffer with `CL_MEM_USE_HOST_PTR`; some drivers need a
    /// larger alignment, usually a page, to use the elements in place. [`into_host`](Self::into_host) maps the buffer, and dropping the
    /// last handle waits for the device. Other devices copy the elements. Fails with [`crate::Error::Invalid`] for a shape of another
    /// number of elements.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let samples: Box<[f32]> = vec![1.0; 1024].into(); // which a library might have filled
    /// let place = samples.as_ptr();
    /// let x = Tensor::from_host_memory(samples, [32, 32], Device::Cpu)?;
    /// x.mul_scalar_(2)?;
    /// let host = x.into_host::<f32>()?;
    /// assert_eq!((host[0], host.as_ptr()), (2.0, place));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn from_host_memory<T: Element>(
        memory: impl AsMut<[T]> + Send + 'static,
        shape: impl Into<Shape>,
        device: Device,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
        let elements = HostElements::new(memory);
        let layout = Layout::contiguous(check_len("from_host_memory", elements.len(), shape.into())?);
        Ok(Tensor::new(elements.into_storage(device)?, layout, T::DTYPE))
    }

    /// Creates a tensor from an ndarray array. On [`Device::Cpu`] the tensor takes over the memory without a copy, for any strides.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_ndarray(ndarray::array![[1i64, 2], [3, 4]], Device::Cpu)?;
    /// assert_eq!(a.shape().dims(), &[2, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn from_ndarray<T: Element, D: Dimension>(array: Array<T, D>, device: Device) -> Result<Tensor> {
        if !device.is_host() || array.is_empty() {
            return Tensor::from_ndarray_view(&array, device);
        }
        let (shape, strides) = (Shape::from(array.shape()), array.strides().iter().copied().collect());
        let (values, offset) = array.into_raw_vec_and_offset();
        let layout = Layout { shape, strides, offset: offset.unwrap_or(0) };
        Ok(Tensor::new(Storage::adopt(values), layout, T::DTYPE))
    }

    /// Copies the elements of an ndarray array or view.
    #[track_caller]
    pub fn from_ndarray_view<T, S, D>(array: &ArrayBase<S, D>, device: Device) -> Result<Tensor>
    where
        T: Element,
        S: Data<Elem = T>,
        D: Dimension,
    {
        match array.as_slice() {
            Some(values) => Tensor::from_slice(values, array.shape(), device),
            None => Tensor::from_vec(array.iter().copied().collect(), array.shape(), device),
        }
    }
}

/// Checks that all bytes of a storage are valid as elements of this dtype, because CPU kernels access the whole storage as a slice of
/// elements.
pub(super) fn check_storage(op: &'static str, storage: &Storage, dtype: DType) -> Result<()> {
    let has = storage.nbytes();
    invalid!(op if !has.is_multiple_of(dtype.size()), "{has} bytes are not a whole number of {dtype}");
    invalid!(op if !storage.is_aligned(dtype.size()), "the storage is not aligned for {dtype}: copy it");
    Ok(())
}

fn check_len(op: &'static str, given: usize, shape: Shape) -> Result<Shape> {
    invalid!(op if shape.numel() != given, "{given} values were given for shape {shape}, which has {}", shape.numel());
    shape.checked(op)
}
