//! Passes tensors to kernels that the user wrote.

use crate::autograd::check_unrecorded;
use crate::backend::opencl::kernels::BufferView;
use crate::device::opencl::{Arg, KernelArgument, KernelBuffer, KernelTensor};
use crate::{DType, Device, Error, Result, Tensor};

pub use crate::device::opencl::user_kernel::{Kernel, KernelCall, KernelScalar};

impl<'a> KernelCall<'a> {
    /// Adds a tensor argument that the kernel only reads.
    pub fn arg(self, tensor: &'a Tensor) -> Self {
        self.with_argument(KernelArgument::Tensor { tensor, written: false })
    }

    /// Adds a tensor argument that the kernel writes, or reads and writes.
    pub fn out(self, tensor: &'a Tensor) -> Self {
        self.with_argument(KernelArgument::Tensor { tensor, written: true })
    }
}

impl KernelTensor for Tensor {
    fn device(&self) -> Device {
        self.device()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn storage_address(&self) -> usize {
        std::ptr::from_ref(self.storage.allocation()).addr()
    }

    fn check(&self, op: &'static str, written: bool) -> Result<()> {
        if self.numel() == 0 {
            let reason =
                format!("a tensor of shape {} has no elements and no buffer: do not launch the kernel", self.shape());
            return Err(Error::invalid(op, reason));
        }
        if written { check_unrecorded(op, self, &[]) } else { Ok(()) }
    }

    fn view(&self) -> Result<Box<dyn KernelBuffer + '_>> {
        Ok(Box::new((self.device_view()?, self.dtype)))
    }

    fn written(&self) {
        self.storage.bump_version();
    }
}

impl KernelBuffer for (BufferView<'_>, DType) {
    fn buffer(&self) -> Arg<'_> {
        self.0.buffer()
    }

    fn first_byte(&self) -> u64 {
        (self.0.first_element() * self.1.size()) as u64
    }
}
