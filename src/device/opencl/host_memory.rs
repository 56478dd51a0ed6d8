//! Host memory that commands read and write.
//!
//! A driver uses the memory until the command is over, which after a failed call may be long after the caller got the error. So
//! commands never use borrowed memory: borrowed bytes are copied to or from an owned buffer, which is leaked if the driver never
//! reports that the command is over.

use std::cell::Cell;
use std::mem;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::{Device, Error, Result};

/// An owner of bytes that a command may use.
///
/// # Safety
/// The range consists of initialised bytes. While the owner lives, no other code uses the bytes; if commands only read them, no
/// other code writes them. The range is the same at every call, also after the owner has been moved. If the owner is
/// forgotten and the device is lost, the bytes are never freed.
pub(crate) unsafe trait HostMemory {
    /// Returns the first byte and the number of bytes.
    fn range(&mut self) -> (*mut u8, usize);
}

// SAFETY: a vector owns its elements, which are on the heap; a forgotten vector never frees them.
unsafe impl<T: AnyBitPattern + NoUninit> HostMemory for Vec<T> {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr().cast(), size_of_val(self.as_slice()))
    }
}

/// The maximum number of bytes that are copied to or from borrowed memory at a time.
pub(super) const BOUNCE_BYTES: usize = 16 << 20;
/// The maximum size of the buffer that a thread keeps for reuse, in bytes.
const MAX_KEPT_BYTES: usize = 4 << 20;

thread_local! {
    /// This thread's buffer, while no transfer uses it.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A bounce buffer between commands and borrowed memory. The drop returns the buffer to the thread.
pub(super) struct BounceBuffer {
    buffer: Vec<u8>,
    bytes: usize,
}

impl BounceBuffer {
    /// Takes the thread's buffer, enlarged to `bytes` if necessary.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] of the host.
    pub(super) fn new(bytes: usize) -> Result<BounceBuffer> {
        let mut buffer = BUFFER.try_with(Cell::take).unwrap_or_default();
        if buffer.len() < bytes {
            let failed = |_| Error::OutOfMemory {
                device: Device::Cpu,
                requested: bytes,
                detail: "a transfer's bytes pass through a buffer on the host".into(),
            };
            buffer.clear(); // the old contents need not be copied to the larger buffer
            buffer.try_reserve_exact(bytes).map_err(failed)?;
            buffer.resize(bytes, 0);
        }
        Ok(BounceBuffer { buffer, bytes })
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}

// SAFETY: the range is a part of the vector `buffer`, for which the same promises hold.
unsafe impl HostMemory for BounceBuffer {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.buffer.as_mut_ptr(), self.bytes)
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        if self.buffer.len() <= MAX_KEPT_BYTES {
            let _ = BUFFER.try_with(|mine| mine.set(mem::take(&mut self.buffer)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounce_buffer_is_reused_unless_leaked() {
        let mut first = BounceBuffer::new(1000).unwrap();
        let (start, bytes) = first.range();
        assert_eq!((bytes, first.bytes().len()), (1000, 1000));
        drop(first);
        let mut again = BounceBuffer::new(10).unwrap();
        assert_eq!(again.range(), (start, 10), "the same one");
        let mut other = BounceBuffer::new(1000).unwrap();
        assert_ne!(other.range().0, start, "that one is in use");
        other.bytes().fill(1);
        again.bytes().fill(7);
        mem::forget(again);
        drop(other);
        let mut next = BounceBuffer::new(1000).unwrap();
        assert_ne!(next.range().0, start, "that one never comes back");
    }

    #[test]
    fn a_large_bounce_buffer_is_not_kept() {
        drop(BounceBuffer::new(MAX_KEPT_BYTES + 1).unwrap());
        assert_eq!(BUFFER.take().capacity(), 0);
        drop(BounceBuffer::new(MAX_KEPT_BYTES).unwrap());
        assert_eq!(BUFFER.take().len(), MAX_KEPT_BYTES);
    }
}
