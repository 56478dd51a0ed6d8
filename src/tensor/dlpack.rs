//! Exchange of tensors with other libraries through DLPack.

use dlpark::versioned::Dlpack;

use super::Shape;
use crate::layout::Layout;
use crate::storage::DlpackMemory;
use crate::{Result, Tensor};

impl Tensor {
    /// Exports this tensor without a copy as [DLPack](https://dmlc.github.io/dlpack/latest/) (PyTorch's `torch.utils.dlpack.to_dlpack`).
    /// The exported types are from the crate [`dlpark`]. The storage stays allocated as long as the other library uses it.
    ///
    /// Writes on either side are visible on the other side, and no lock protects them: the caller has to prevent a write during another
    /// access. Autograd does not notice writes of other libraries ([`Storage::version`](crate::storage::Storage::version)).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones([2, 3], Device::Cpu)?.t()?;
    /// let exported = x.to_dlpack()?;
    /// let described = exported.validate().unwrap();
    /// assert_eq!((described.shape(), described.strides()), (&[3, 2][..], Some(&[1, 3][..])));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`crate::Error::Invalid`] for a tensor that is not on the CPU and, as in PyTorch, for a tensor that requires a gradient;
    /// export the result of [`detach`](Self::detach) instead.
    pub fn to_dlpack(&self) -> Result<Dlpack> {
        invalid!("to_dlpack" if self.requires_grad(),
            "autograd would not notice writes of other libraries: export its detach()");
        let Layout { shape, strides, offset } = &self.layout;
        self.storage.to_dlpack(self.dtype, (shape.dims(), strides), *offset)
    }

    /// Imports a tensor of another library without a copy, with its strides (PyTorch's `torch.from_dlpack`).
    ///
    /// ```
    /// use claystone::storage::DlpackMemory;
    /// use claystone::{Device, Tensor};
    /// use dlpark::{allocation::dynamic, ffi::DLManagedTensorVersioned};
    /// let array = Box::new(ndarray::array![[1f32, 2.0], [3.0, 4.0]].reversed_axes());
    /// let made: dynamic::Initialized<DLManagedTensorVersioned> = array.try_into().unwrap();
    /// // SAFETY: the description is that of an array, whose elements are the tensor's alone.
    /// let memory = unsafe { DlpackMemory::new(made.finish())? };
    /// assert_eq!(Tensor::from_dlpack(memory).to_vec::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn from_dlpack(memory: DlpackMemory) -> Tensor {
        let DlpackMemory { storage, dtype, shape, strides, offset } = memory;
        let layout = Layout { shape: Shape::from(shape), strides: strides.into_iter().collect(), offset };
        Tensor::new(storage, layout, dtype)
    }
}
