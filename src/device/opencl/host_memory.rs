//! Memory of the host that commands read and write.
//!
//! A driver uses it on its own until the command is over, which after a failed call may be long after the caller was told
//! of the error. So no command is given memory that somebody else owns: what a caller lends is copied to or from memory of
//! ours, which can be leaked if it never becomes known that the command is over.

use std::cell::Cell;
use std::mem;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::{Device, Error, Result};

/// An owner of bytes that a command may use.
///
/// # Safety
/// The range is of initialised bytes that nobody else uses (if they are only read, that nobody writes) as long as the owner
/// lives. It is the same at every call, also when the owner has been moved. Once the owner is forgotten and the device is
/// lost, the bytes are never freed.
pub(crate) unsafe trait HostMemory {
    /// The first byte, and how many there are.
    fn range(&mut self) -> (*mut u8, usize);
}

// SAFETY: a vector owns its elements, on the heap, and forgotten never frees them.
unsafe impl<T: AnyBitPattern + NoUninit> HostMemory for Vec<T> {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr().cast(), size_of_val(self.as_slice()))
    }
}

/// Bytes that are copied at a time from or to what a caller lends.
pub(super) const BOUNCE: usize = 16 << 20;
/// A thread keeps its buffer up to this size.
const KEPT: usize = 4 << 20;

thread_local! {
    /// This thread's buffer, while no transfer uses it.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A buffer for bytes on their way from or to what a caller lends. Dropped, it is the thread's again.
pub(super) struct Bounce {
    buffer: Vec<u8>,
    bytes: usize,
}

impl Bounce {
    /// Room for so many bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] of the host.
    pub(super) fn new(bytes: usize) -> Result<Bounce> {
        let mut buffer = BUFFER.try_with(Cell::take).unwrap_or_default();
        if buffer.len() < bytes {
            let failed = |_| Error::OutOfMemory {
                device: Device::Cpu,
                requested: bytes,
                detail: "a transfer's bytes pass through a buffer on the host".into(),
            };
            buffer.clear(); // they are not worth copying to a larger one
            buffer.try_reserve_exact(bytes).map_err(failed)?;
            buffer.resize(bytes, 0);
        }
        Ok(Bounce { buffer, bytes })
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}

// SAFETY: as for the vector, which is part of it.
unsafe impl HostMemory for Bounce {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.buffer.as_mut_ptr(), self.bytes)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if self.buffer.len() <= KEPT {
            let _ = BUFFER.try_with(|mine| mine.set(mem::take(&mut self.buffer)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_unless_it_was_leaked() {
        let mut first = Bounce::new(1000).unwrap();
        let (start, bytes) = first.range();
        assert_eq!((bytes, first.bytes().len()), (1000, 1000));
        drop(first);
        let mut again = Bounce::new(10).unwrap();
        assert_eq!(again.range(), (start, 10), "the same one");
        let mut other = Bounce::new(1000).unwrap();
        assert_ne!(other.range().0, start, "that one is in use");
        other.bytes().fill(1);
        again.bytes().fill(7);
        mem::forget(again);
        drop(other);
        let mut next = Bounce::new(1000).unwrap();
        assert_ne!(next.range().0, start, "that one never comes back");
    }

    #[test]
    fn a_large_buffer_is_not_kept() {
        drop(Bounce::new(KEPT + 1).unwrap());
        assert_eq!(BUFFER.take().capacity(), 0);
        drop(Bounce::new(KEPT).unwrap());
        assert_eq!(BUFFER.take().len(), KEPT);
    }
}
