//! Buffers made by other code, and buffers over host memory.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use opencl3::memory::{
    CL_MAP_READ, CL_MAP_WRITE, CL_MEM_CONTEXT, CL_MEM_FLAGS, CL_MEM_HOST_NO_ACCESS, CL_MEM_HOST_PTR,
    CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_WRITE_ONLY, CL_MEM_OBJECT_BUFFER, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE,
    CL_MEM_SIZE, CL_MEM_TYPE, CL_MEM_USE_HOST_PTR, CL_MEM_WRITE_ONLY,
};

use super::ClDevice;
use super::driver::{ClBuffer, call, create, value};
use super::errors::ClError;
use super::fault::Readings;
use crate::device::StreamId;
use crate::{Error, Result};

/// The width of the vectors that kernels read and write, in bytes.
const VECTOR_BYTES: usize = 16;

impl ClDevice {
    pub(crate) fn context(&self) -> *mut c_void {
        self.context
    }

    /// Retains a buffer of the device's context that kernels and the host may read and write.
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other memory object, the driver's errors, and a lost device.
    pub(crate) fn import_buffer(&self, op: &'static str, mem: *mut c_void) -> Result<ClBuffer> {
        self.check_lost()?;
        let to_error = |e| self.error(self.detect_loss(e));
        let fail = |reason: String| Err(Error::invalid(op, reason));
        let kind = value!(clGetMemObjectInfo(mem, CL_MEM_TYPE) as u32).map_err(to_error)?;
        if kind != CL_MEM_OBJECT_BUFFER {
            return fail(format!(
                "the memory object is of type {kind:#x}: give a buffer, type {CL_MEM_OBJECT_BUFFER:#x}"
            ));
        }
        let context = value!(clGetMemObjectInfo(mem, CL_MEM_CONTEXT) as usize).map_err(to_error)?;
        if context != self.context.addr() {
            return fail(format!(
                "the buffer is of another context: create it in that of {}.cl_context()",
                self.device()
            ));
        }
        let flags = value!(clGetMemObjectInfo(mem, CL_MEM_FLAGS) as u64).map_err(to_error)?;
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
            let start = value!(clGetMemObjectInfo(mem, CL_MEM_HOST_PTR) as usize).map_err(to_error)?;
            if !start.is_multiple_of(VECTOR_BYTES) {
                return fail(format!(
                    "the buffer's host memory begins at {start:#x}, which is not a multiple of {VECTOR_BYTES}"
                ));
            }
        }
        let bytes = value!(clGetMemObjectInfo(mem, CL_MEM_SIZE) as usize).map_err(to_error)?;
        call!(clRetainMemObject(mem)).map_err(to_error)?;
        self.note_buffer(bytes, false);
        Ok(ClBuffer::new(mem, bytes))
    }
}

/// A mapped buffer over host memory: until the drop, the host reads and writes that memory, and no command may.
pub(crate) struct MappedBuffer {
    device: &'static ClDevice,
    /// A handle that is retained for this mapping.
    buffer: ClBuffer,
    at: NonNull<u8>,
}

// SAFETY: OpenCL's objects belong to the process, and the address is that of bytes that no other code uses meanwhile.
unsafe impl Send for MappedBuffer {}
// SAFETY: as above; a shared reference only gives the address.
unsafe impl Sync for MappedBuffer {}

impl MappedBuffer {
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.at
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        if self.device.is_lost() {
            return;
        }
        // A refused unmap is repeated before the next command that uses a buffer; otherwise the device is lost.
        let unmapped = self.device.lock_for_waits(StreamId::DEFAULT).unmap(&self.buffer, self.at.as_ptr().cast());
        if let Err(e) = unmapped {
            self.device.detect_loss(e);
        }
    }
}

impl ClDevice {
    /// Unmaps all mapped ranges, and waits for all work, so that the host memory of a buffer may be released.
    ///
    /// # Errors
    /// A range that cannot be unmapped; a lost device.
    pub(crate) fn finish_host_memory(&self) -> Result<()> {
        drop(self.lock(StreamId::DEFAULT).map_err(|e| self.error(self.detect_loss(e)))?);
        self.drain()
    }

    /// Creates a buffer over bytes of the host (`CL_MEM_USE_HOST_PTR`).
    ///
    /// # Safety
    /// The bytes are valid, and no other code uses them, until the buffer is released and every command that uses it is over.
    pub(crate) unsafe fn buffer_over(&self, start: NonNull<u8>, bytes: usize) -> Result<ClBuffer, ClError> {
        self.new_buffer(CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, bytes, start.as_ptr().cast())
    }

    /// Maps all of a buffer for reading and writing. The caller must own the buffer's only handle. Waits for the device.
    ///
    /// # Errors
    /// The driver's errors, and a fault recorded by a kernel of this thread.
    pub(crate) fn map(&'static self, buffer: &ClBuffer) -> Result<MappedBuffer> {
        self.check_lost()?;
        let (mem, bytes, stream) = (buffer.mem(), buffer.bytes(), self.current_stream());
        call!(clRetainMemObject(mem)).map_err(|e| self.error(self.detect_loss(e)))?;
        let buffer = ClBuffer::new(mem, bytes);
        let (readings, at) = self
            .while_idle(stream, (Readings::default(), ptr::null_mut()), |q, (readings, at)| {
                readings.enqueue(q, &[self.slot()], false)?;
                let (flags, unasked) = (CL_MAP_READ | CL_MAP_WRITE, ptr::null_mut());
                *at = create!(clEnqueueMapBuffer(q.raw, mem, 1, flags, 0, bytes, 0, ptr::null(), unasked))?;
                Ok(())
            })
            .map_err(|e| self.error(e))?;
        let Some(at) = NonNull::new(at.cast()) else { return Err(Error::invalid("map", "the driver gave no address")) };
        let mapped = MappedBuffer { device: self, buffer, at };
        self.take_failed(stream)?;
        self.report(readings).map(|()| mapped)
    }
}
