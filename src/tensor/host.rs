//! A tensor's values where the host sees them.

use std::fmt;
use std::ops::{Deref, DerefMut};

use ndarray::{ArrayViewD, ArrayViewMutD, IxDyn};

use super::{Layout, Shape};
use crate::storage::{Caller, ExclusiveHost};
use crate::{Device, Element, Error, Result, Tensor};

/// Values of a tensor in memory of the host, which nobody else sees: a slice, and an ndarray view, without a copy.
///
/// What [`Tensor::to_host`] and [`Tensor::into_host`] give (PyTorch's `t.cpu().numpy()`), and [`HostArray::into_tensor`]
/// takes back. A copy's memory is of the CPU's allocator, which keeps it when the array is dropped, where a [`Vec`]'s goes back
/// to the system and comes anew for the next one. As long as the array lives compaction does not move it.
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
    /// A copy of the values for the host, in row-major order. Waits for the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let host = Tensor::ones(3, Device::best())?.to_host::<f32>()?;
    /// assert_eq!(host.iter().sum::<f32>(), 3.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::to_ndarray`].
    #[track_caller]
    pub fn to_host<T: Element>(&self) -> Result<HostArray<T>> {
        let _caller = Caller::enter();
        let op = "to_host";
        self.check_element::<T>(op)?;
        HostArray::new(op, self.host_copy()?)
    }

    /// As [`Tensor::to_host`], without a copy where the tensor is on the CPU, contiguous and the last handle on its
    /// storage, all of which then stays with the array. Others keep their values: there it copies. Nor is anything copied where
    /// an OpenCL device works on memory of the host ([`from_host_memory`](Tensor::from_host_memory)), which is mapped as long
    /// as the array lives; [`HostArray::into_tensor`] is on that device again.
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
    ///
    /// # Errors
    /// As [`Tensor::to_ndarray`]. This handle is gone then, too.
    #[track_caller]
    pub fn into_host<T: Element>(mut self) -> Result<HostArray<T>> {
        let _caller = Caller::enter();
        let op = "into_host";
        self.check_element::<T>(op)?;
        self.detach_(); // what made it may have kept a handle
        let is_on_host = self.device().is_cpu() || self.storage.is_host_buffer();
        let is_exclusive = is_on_host && self.is_contiguous() && self.storage.is_unique();
        HostArray::new(op, if is_exclusive { self } else { self.host_copy()? })
    }

    /// Calls `f` with the values in row-major order where they are, without a copy, if the tensor is on the CPU and contiguous:
    /// how an operation of your own reads its weights. Otherwise `f` sees a copy, as [`Tensor::to_host`] makes one: of a strided
    /// tensor, and of one on an OpenCL device. Waits for the device.
    ///
    /// Until `f` returns, writing to the storage is an error, for each thread and through each view; reading is not.
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
    ///
    /// # Errors
    /// As [`Tensor::to_ndarray`].
    #[track_caller]
    pub fn with_host<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let _caller = Caller::enter();
        let op = "with_host";
        self.check_element::<T>(op)?;
        if self.device().is_cpu() && self.is_contiguous() {
            return self.storage.with_elements(op, self.layout.offset * size_of::<T>(), self.numel(), f);
        }
        Ok(f(&HostArray::new(op, self.host_copy()?)?))
    }

    /// A copy on the CPU, contiguous, of one handle, outside the graph.
    fn host_copy(&self) -> Result<Tensor> {
        let rows = self.detach().contiguous()?;
        match self.device().is_cpu() {
            true if self.is_contiguous() => rows.copied(true),
            true => Ok(rows),
            false => rows.to_device(Device::default()),
        }
    }
}

impl<T: Element> HostArray<T> {
    fn new(op: &'static str, tensor: Tensor) -> Result<HostArray<T>> {
        let Tensor { storage, layout, .. } = tensor;
        let elements = ExclusiveHost::new(op, storage, layout.offset * size_of::<T>(), layout.numel())?;
        // ndarray refuses a shape without elements whose other sizes are too large for any.
        let shape = IxDyn(layout.shape.dims());
        ArrayViewD::from_shape(shape, &elements).map_err(|e| Error::invalid(op, e.to_string()))?;
        Ok(HostArray { elements, layout })
    }

    /// The sizes of the dimensions.
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

    /// The values in row-major order.
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

    /// As [`HostArray::as_slice`], to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.elements
    }

    /// The values as an ndarray array of this shape, where they are.
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

    /// As [`HostArray::view`], to be changed.
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

    /// The values as a tensor in the same memory: on the CPU, or on the device that works on it.
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

/// The elements in row-major order.
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

/// As ndarray prints.
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
