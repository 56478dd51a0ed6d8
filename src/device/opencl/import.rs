//! Buffers that other code made.

use std::ffi::c_void;

use opencl3::memory::{
    CL_MEM_CONTEXT, CL_MEM_FLAGS, CL_MEM_HOST_NO_ACCESS, CL_MEM_HOST_PTR, CL_MEM_HOST_READ_ONLY,
    CL_MEM_HOST_WRITE_ONLY, CL_MEM_OBJECT_BUFFER, CL_MEM_READ_ONLY, CL_MEM_SIZE, CL_MEM_TYPE, CL_MEM_USE_HOST_PTR,
    CL_MEM_WRITE_ONLY,
};

use super::ClDevice;
use super::driver::{ClBuffer, call, value};
use crate::{Error, Result};

/// Kernels read and write vectors of so many bytes.
const VECTOR: usize = 16;

impl ClDevice {
    /// The context that the device's buffers belong to.
    pub(crate) fn context(&self) -> *mut c_void {
        self.context
    }

    /// Another handle on a buffer of the device's context that kernels and the host may read and write.
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other, what the driver refuses to tell, and a lost device.
    pub(crate) fn import_buffer(&self, op: &'static str, mem: *mut c_void) -> Result<ClBuffer> {
        self.check_lost()?;
        let told = |e| self.error(self.settle(e));
        let fail = |reason: String| Err(Error::invalid(op, reason));
        let kind = value!(clGetMemObjectInfo(mem, CL_MEM_TYPE) as u32).map_err(told)?;
        if kind != CL_MEM_OBJECT_BUFFER {
            return fail(format!(
                "the memory object is of type {kind:#x}: give a buffer, type {CL_MEM_OBJECT_BUFFER:#x}"
            ));
        }
        let context = value!(clGetMemObjectInfo(mem, CL_MEM_CONTEXT) as usize).map_err(told)?;
        if context != self.context.addr() {
            return fail(format!(
                "the buffer is of another context: create it in that of {}.cl_context()",
                self.device()
            ));
        }
        let flags = value!(clGetMemObjectInfo(mem, CL_MEM_FLAGS) as u64).map_err(told)?;
        let partly = [
            (CL_MEM_READ_ONLY, "CL_MEM_READ_ONLY"),
            (CL_MEM_WRITE_ONLY, "CL_MEM_WRITE_ONLY"),
            (CL_MEM_HOST_READ_ONLY, "CL_MEM_HOST_READ_ONLY"),
            (CL_MEM_HOST_WRITE_ONLY, "CL_MEM_HOST_WRITE_ONLY"),
            (CL_MEM_HOST_NO_ACCESS, "CL_MEM_HOST_NO_ACCESS"),
        ];
        if let Some((_, name)) = partly.into_iter().find(|(flag, _)| flags & flag != 0) {
            return fail(format!(
                "the buffer was created with {name}: tensors are read and written, by the host as well"
            ));
        }
        if flags & CL_MEM_USE_HOST_PTR != 0 {
            let start = value!(clGetMemObjectInfo(mem, CL_MEM_HOST_PTR) as usize).map_err(told)?;
            if !start.is_multiple_of(VECTOR) {
                return fail(format!("the buffer's host memory begins at {start:#x}, no multiple of {VECTOR}"));
            }
        }
        let bytes = value!(clGetMemObjectInfo(mem, CL_MEM_SIZE) as usize).map_err(told)?;
        call!(clRetainMemObject(mem)).map_err(told)?;
        Ok(ClBuffer::new(mem, bytes))
    }
}
