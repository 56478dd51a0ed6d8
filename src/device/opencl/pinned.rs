//! Host memory that the device reads and writes at full speed.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use opencl3::memory::{CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE};

use super::driver::{ClBuffer, call, create, insist};
use super::queues::SERVICE;
use super::{ClDevice, ClError, exit};

/// Pinned host memory: a buffer that the driver keeps in host memory, mapped for as long as it lives. As the host's side
/// of a read or a write it saves the driver's own staging.
pub(crate) struct ClPinned {
    device: &'static ClDevice,
    /// Until dropped.
    buffer: ManuallyDrop<ClBuffer>,
    start: NonNull<u8>,
}

// SAFETY: it owns the mapped bytes, which belong to no thread; what points into them is the user's to synchronise.
unsafe impl Send for ClPinned {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl Sync for ClPinned {}

impl ClDevice {
    /// Pinned host memory of `bytes` (not zero). Slow (NVIDIA: 25 ms for 64 MiB): keep it.
    ///
    /// # Errors
    /// What the driver refuses; out of memory is that of the host.
    pub(crate) fn create_pinned(&'static self, bytes: usize) -> Result<ClPinned, ClError> {
        self.alive("clCreateBuffer")?;
        let flags = CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR;
        let made = exit::call(|| create!(clCreateBuffer(self.context, flags, bytes, ptr::null_mut())));
        let mem = made.map_err(|e| self.settle(e))?;
        let buffer = ClBuffer::new(mem, bytes);
        let (map, mut mapped) = (CL_MAP_READ | CL_MAP_WRITE, ptr::null_mut::<c_void>());
        let done = self.submit_and_wait(SERVICE, (), |q, (), event| {
            mapped = create!(clEnqueueMapBuffer(q.raw, mem, 0, map, 0, bytes, 0, ptr::null(), event))?;
            Ok(())
        });
        let Some(start) = NonNull::new(mapped.cast()) else {
            return Err(done.err().unwrap_or(ClError::new("clEnqueueMapBuffer", -12)));
        };
        let pinned = ClPinned { device: self, buffer: ManuallyDrop::new(buffer), start }; // dropped, it is unmapped
        done.map(|()| pinned)
    }
}

impl ClPinned {
    /// The first byte. What the bytes are at first is unspecified.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

/// No transfer may use it any more, but on a lost device, where it is leaked: transfers may be using it for good. The driver
/// releases the buffer once it is unmapped.
impl Drop for ClPinned {
    fn drop(&mut self) {
        if self.device.is_lost() {
            return;
        }
        let (mem, at) = (self.buffer.mem(), self.start.as_ptr().cast::<c_void>());
        {
            let mut queue = self.device.lock_for_waits(SERVICE);
            let _ = insist(|| call!(clEnqueueUnmapMemObject(queue.raw, mem, at, 0, ptr::null(), ptr::null_mut())));
            let _ = queue.flush();
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}
