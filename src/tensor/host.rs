//! Access to a tensor's values from the host.

use std::fmt;
use std::ops::{Deref, DerefMut};

use ndarray::{ArrayViewD, ArrayViewMutD, IxDyn};

use super::{Layout, Shape};
use crate::storage::{Caller, ExclusiveHost};
use crate::{Device, Element, Error, Result, Tensor};

/// A tensor's values in host memory that no tensor uses. Gives access as a slice and as an ndarray view, without a copy.
///
/// [`Tensor::to_host`] and [`Tensor::into_host`] return such an array (PyTorch's `t.cpu().numpy()`), and [`HostArray::into_tensor`] turns
/// the array back into a tensor. Copies use memory of the CPU's caching allocator, which is reused after the array is dropped, whereas
/// the memory of a [`Vec`] is returned to the system each time. Compaction of the allocator does not move a live array.
///
/// ```
/// use claystone::{Device, Tensor};
/// let x = Tensor::arange(0, 6, 1, Device::best())?.reshape([2, 3])?;
/// let mut host = x.t()?.to_host::<f32>()?;
/// assert_eq!(host[..], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
/// assert_eq!(host.view()[[2, 1]], 5.0);
/// host.iter_mut().for_each(|v| *v += 1.0); // x is as it was
/// assert_eq!(host.into_tensor().sum((), false)?.item::<f32>()?, 21.0);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct HostArray<T: Element> {
    elements: ExclusiveHost<T>,
    layout: Layout,
}

impl Tensor {
    /// Copies the values to the host, in row-major order. Waits for the device. Fails as [`Tensor::to_ndarray`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let host = Tensor::ones(3, Device::best())?.to_host::<f32>()?;
    /// assert_eq!(host.iter().sum::<f32>(), 3.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn to_host<T: Element>(&self) -> Result<HostArray<T>> {
        let _caller = Caller::enter();
        let op = "to_host";
        self.check_element::<T>(op)?;
        HostArray::new(op, self.host_copy()?)
    }

    /// Returns the values like [`Tensor::to_host`], but without a copy if the tensor is on the CPU, contiguous and the last handle on its
    /// storage; the array then owns the whole storage. There is also no copy if an OpenCL device works on host memory
    /// ([`from_host_memory`](Tensor::from_host_memory)): this memory is mapped while the array lives, and [`HostArray::into_tensor`]
    /// returns a tensor on the same device. In all other cases the values are copied. Fails as [`Tensor::to_ndarray`] does. This handle
    /// is dropped even on an error.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones(3, Device::Cpu)?;
    /// let other = x.shallow_clone();
    /// let mut host = x.into_host::<f32>()?;
    /// host[0] = 2.0;
    /// assert_eq!(other.into_host::<f32>()?[..], [1.0; 3]); // this one is the last
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn into_host<T: Element>(mut self) -> Result<HostArray<T>> {
        let _caller = Caller::enter();
        let op = "into_host";
        self.check_element::<T>(op)?;
        self.detach_(); // the node that produced this tensor may hold another handle
        let is_on_host = self.device().is_host() || self.storage.is_host_buffer();
        let is_exclusive = is_on_host && self.is_contiguous() && self.storage.is_unique();
        HostArray::new(op, if is_exclusive { self } else { self.host_copy()? })
    }

    /// Calls `f` with the values in row-major order, for your own operations that read tensors. A contiguous tensor on the CPU is not
    /// copied. A strided tensor or a tensor on an OpenCL device is copied as by [`Tensor::to_host`]. Waits for the device.
    ///
    /// Until `f` returns, writing to the storage is an error in every thread and through every view; reading is allowed. Fails as
    /// [`Tensor::to_ndarray`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::full([2, 3], 1.5, Device::Cpu)?;
    /// let sum = w.with_host(|values: &[f32]| {
    ///     assert!(w.zero_().is_err() && w.mul_scalar(2).is_ok());
    ///     values.iter().sum::<f32>()
    /// })?;
    /// assert_eq!(sum, 9.0);
    /// w.zero_()?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn with_host<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let _caller = Caller::enter();
        let op = "with_host";
        self.check_element::<T>(op)?;
        if self.device().is_host() && self.is_contiguous() {
            return self.storage.with_elements(op, self.layout.offset * size_of::<T>(), self.numel(), f);
        }
        Ok(f(&HostArray::new(op, self.host_copy()?)?))
    }

    /// Returns a contiguous copy on the CPU, outside the graph, as the only handle on its storage.
    fn host_copy(&self) -> Result<Tensor> {
        let rows = self.detach().contiguous()?;
        match self.device().is_host() {
            true if self.is_contiguous() => rows.deep_copy(true),
            true => Ok(rows),
            false => rows.to_device(Device::default()),
        }
    }
}

impl<T: Element> HostArray<T> {
    fn new(op: &'static str, tensor: Tensor) -> Result<HostArray<T>> {
        let Tensor { storage, layout, .. } = tensor;
        let elements = ExclusiveHost::new(op, storage, layout.offset * size_of::<T>(), layout.numel())?;
        // ndarray rejects an empty shape if the product of its other sizes overflows, so such a shape is replaced.
        let shape = IxDyn(layout.shape.dims());
        ArrayViewD::from_shape(shape, &elements).map_err(|e| Error::invalid(op, e.to_string()))?;
        Ok(HostArray { elements, layout })
    }

    /// Returns the sizes of the dimensions.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let host = Tensor::zeros([2, 3], Device::Cpu)?.into_host::<f32>()?;
    /// assert_eq!((host.shape().dims(), host.len()), (&[2, 3][..], 6));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn shape(&self) -> &Shape {
        &self.layout.shape
    }

    /// Returns the values in row-major order.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let host = Tensor::eye(2, Device::Cpu)?.into_host::<f32>()?;
    /// assert_eq!(host.as_slice(), [1.0, 0.0, 0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn as_slice(&self) -> &[T] {
        &self.elements
    }

    /// Mutable version of [`HostArray::as_slice`].
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.elements
    }

    /// Returns the values as an ndarray view of this shape, without a copy.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let host = Tensor::eye(2, Device::Cpu)?.into_host::<f32>()?;
    /// assert_eq!(host.view(), ndarray::array![[1.0, 0.0], [0.0, 1.0]].into_dyn());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn view(&self) -> ArrayViewD<'_, T> {
        let shape = IxDyn(self.layout.shape.dims());
        ArrayViewD::from_shape(shape, &self.elements).expect("the shape was checked when the array was made")
    }

    /// Mutable version of [`HostArray::view`].
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let mut host = Tensor::zeros([2, 2], Device::Cpu)?.into_host::<f32>()?;
    /// host.view_mut()[[1, 0]] = 5.0;
    /// assert_eq!(host[..], [0.0, 0.0, 5.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn view_mut(&mut self) -> ArrayViewMutD<'_, T> {
        let shape = IxDyn(self.layout.shape.dims());
        ArrayViewMutD::from_shape(shape, &mut self.elements).expect("the shape was checked when the array was made")
    }

    /// Turns the values back into a tensor in the same memory: on the CPU, or on the OpenCL device that uses this memory.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let mut host = Tensor::zeros(3, Device::Cpu)?.into_host::<f32>()?;
    /// host.fill(7.0);
    /// assert_eq!(host.into_tensor().mean((), false)?.item::<f32>()?, 7.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn into_tensor(self) -> Tensor {
        Tensor::new(self.elements.into_storage(), self.layout, T::DTYPE)
    }
}

/// Dereferences to the slice of elements in row-major order.
impl<T: Element> Deref for HostArray<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.elements
    }
}

impl<T: Element> DerefMut for HostArray<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements
    }
}

/// Prints the values like an ndarray array.
impl<T: Element> fmt::Debug for HostArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.view(), f)
    }
}

/// See [`HostArray::into_tensor`].
impl<T: Element> From<HostArray<T>> for Tensor {
    fn from(host: HostArray<T>) -> Tensor {
        host.into_tensor()
    }
}
