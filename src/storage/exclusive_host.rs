//! Host memory that has one owner, who reads and writes it without a lock.
//!
//! It may be what an OpenCL device works on in place: that is mapped as long as the owner sees it.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use super::allocation::{Storage, alone};
use super::block::Block;
use super::driver::opencl::MappedHost;
use crate::{Device, Element, Error, Result, elements};

/// Elements of a storage that nobody else has a handle on, nor gets one, in memory of the host that stays where it is.
pub(crate) struct ExclusiveHost<T> {
    /// Ended before the storage.
    mapped: Option<MappedHost>,
    storage: Storage,
    /// Whether the block may move again after this.
    could_move: bool,
    start: NonNull<T>,
    count: usize,
}

// SAFETY: it owns its elements as a `Box<[T]>` does: there is no other handle on them, and its own is never lent.
unsafe impl<T: Send> Send for ExclusiveHost<T> {}
// SAFETY: as above; a shared one gives out shared elements only.
unsafe impl<T: Sync> Sync for ExclusiveHost<T> {}

impl<T: Element> ExclusiveHost<T> {
    /// The `count` elements from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`] where bytes are no elements; for what is not in memory of the host, and where there is another
    /// handle. [`Error::DeviceLost`] where a transfer may still be using them; where they are to be mapped, what a kernel found
    /// wrong and what the driver refuses.
    pub(crate) fn new(op: &'static str, mut storage: Storage, offset: usize, count: usize) -> Result<ExclusiveHost<T>> {
        storage.check_memory()?;
        let is_host_buffer = storage.is_host_buffer();
        if storage.device() != Device::Cpu && !is_host_buffer || alone(&mut storage.0).is_none() {
            return Err(Error::invalid(op, format!("{storage:?} are not one handle's alone")));
        }
        if let Some(pinned) = storage.allocation().pinned() {
            pinned.check(true)?;
        }
        let could_move = storage.allocation().block().is_some_and(Block::pin);
        // From here on, also where an error is returned, dropping it lets the block go.
        let mut exclusive = ExclusiveHost { mapped: None, storage, could_move, start: NonNull::dangling(), count: 0 };
        if is_host_buffer {
            exclusive.mapped = Some(exclusive.storage.map_host_buffer()?);
        }
        let (start, size) = match &exclusive.mapped {
            Some(mapped) => (mapped.start(), exclusive.storage.nbytes()),
            None => exclusive.storage.allocation().host_range(),
        };
        let bytes = count.checked_mul(size_of::<T>());
        let Some(end) = bytes.and_then(|bytes| bytes.checked_add(offset)).filter(|&end| end <= size) else {
            return Err(Error::invalid(op, format!("{count} elements at {offset} are not in a storage of {size}")));
        };
        // SAFETY: inside the storage's bytes, or their end.
        let start = unsafe { start.add(offset) };
        // SAFETY: bytes of the storage, all initialised. Nobody writes to them: there is no other handle, and the block is
        // pinned, so that they are not moved either.
        elements::<T>(op, unsafe { slice::from_raw_parts(start.as_ptr(), end - offset) })?;
        (exclusive.start, exclusive.count) = (start.cast(), count);
        Ok(exclusive)
    }

    /// The storage again, as it was before.
    pub(crate) fn into_storage(self) -> Storage {
        self.storage.clone() // and `self`, who sees the elements no more, lets the block go
    }
}

impl<T> Drop for ExclusiveHost<T> {
    fn drop(&mut self) {
        if let Some(block) = self.storage.allocation().block() {
            block.unpin(self.could_move);
        }
    }
}

impl<T> Deref for ExclusiveHost<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` found so many aligned, valid elements there, where they stay as long as this lives. Nobody else
        // reaches them, and this is borrowed as long as the slice is used.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T> DerefMut for ExclusiveHost<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests;
