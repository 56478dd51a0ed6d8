//! Pinned host memory, which the device reads and writes at full speed.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use opencl3::memory::{CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE};

use super::driver::{ClBuffer, call, create, retry_now};
use super::queues::SERVICE_STREAM;
use super::{ClDevice, ClError, exit};

/// Pinned host memory: a buffer that the driver allocates in host memory, mapped until the drop. Reads and writes of pinned memory
/// avoid the driver's staging copy.
pub(crate) struct ClPinned {
    device: &'static ClDevice,
    /// Dropped after the unmap.
    buffer: ManuallyDrop<ClBuffer>,
    start: NonNull<u8>,
}

// SAFETY: it owns the mapped bytes, which belong to no thread; users synchronise their accesses through `start`.
unsafe impl Send for ClPinned {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl Sync for ClPinned {}

impl ClDevice {
    /// Allocates `bytes` (not zero) of pinned host memory. Slow (NVIDIA: 25 ms for 64 MiB), so callers keep the memory.
    ///
    /// # Errors
    /// The driver's errors; out of memory refers to the host's memory.
    pub(crate) fn create_pinned(&'static self, bytes: usize) -> Result<ClPinned, ClError> {
        self.check_alive("clCreateBuffer")?;
        let flags = CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR;
        let made = exit::call(|| create!(clCreateBuffer(self.context, flags, bytes, ptr::null_mut())));
        let mem = made.map_err(|e| self.detect_loss(e))?;
        let buffer = ClBuffer::new(mem, bytes);
        let (map, mut mapped) = (CL_MAP_READ | CL_MAP_WRITE, ptr::null_mut::<c_void>());
        let done = self.submit_and_wait(SERVICE_STREAM, (), |q, (), event| {
            mapped = create!(clEnqueueMapBuffer(q.raw, mem, 0, map, 0, bytes, 0, ptr::null(), event))?;
            Ok(())
        });
        let Some(start) = NonNull::new(mapped.cast()) else {
            return Err(done.err().unwrap_or(ClError::new("clEnqueueMapBuffer", -12)));
        };
        let pinned = ClPinned { device: self, buffer: ManuallyDrop::new(buffer), start }; // unmapped on drop, also after an error
        done.map(|()| pinned)
    }
}

impl ClPinned {
    /// Returns the address of the first byte. The initial contents are unspecified.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

/// Unmaps and releases the buffer, which no transfer may use any more. On a lost device, transfers may use the memory forever,
/// so the memory is leaked.
impl Drop for ClPinned {
    fn drop(&mut self) {
        if self.device.is_lost() {
            return;
        }
        let (mem, at) = (self.buffer.mem(), self.start.as_ptr().cast::<c_void>());
        {
            let mut queue = self.device.lock_for_waits(SERVICE_STREAM);
            let _ = retry_now(|| call!(clEnqueueUnmapMemObject(queue.raw, mem, at, 0, ptr::null(), ptr::null_mut())));
            let _ = queue.flush();
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}
