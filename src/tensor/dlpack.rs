//! Tensors for other libraries, and from them.

use dlpark::versioned::Dlpack;

use super::Shape;
use crate::layout::Layout;
use crate::storage::DlpackMemory;
use crate::{Error, Result, Tensor};

impl Tensor {
    /// This tensor for other libraries, without a copy, as [DLPack](https://dmlc.github.io/dlpack/latest/) describes tensors
    /// (PyTorch's `torch.utils.dlpack.to_dlpack`), of which the crate [`dlpark`] has the types. The storage lives as long as they
    /// use it.
    ///
    /// They see what is written here, and what they write is seen here, without a lock: see that nobody writes while others
    /// use the values. Autograd does not see their writes ([`Storage::version`](crate::storage::Storage::version)).
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
    /// [`Error::Invalid`] for a tensor that is not on the CPU, and for one that needs a gradient, as PyTorch has it: export
    /// what [`detach`](Self::detach) gives.
    pub fn to_dlpack(&self) -> Result<Dlpack> {
        if self.requires_grad() {
            let reason = "autograd would not see what others write to it: export detach() of it";
            return Err(Error::invalid("to_dlpack", reason));
        }
        let Layout { shape, strides, offset } = &self.layout;
        self.storage.to_dlpack(self.dtype, (shape.dims(), strides), *offset)
    }

    /// A tensor of another library, in the memory that it has there (PyTorch's `torch.from_dlpack`), with its strides.
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
