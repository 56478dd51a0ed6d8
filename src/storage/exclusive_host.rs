//! Host memory with a single owner, who reads and writes it without a lock.
//!
//! The memory may be a buffer that an OpenCL device uses in place. Such a buffer stays mapped as long as the `ExclusiveHost` lives.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use super::allocation::{Storage, get_mut_if_unique};
use super::block::Block;
use super::driver::opencl::MappedHost;
use crate::{Device, Element, Error, Result, elements};

/// The elements of a storage that has one handle and cannot get another, in host memory that does not move.
pub(crate) struct ExclusiveHost<T> {
    /// The mapping of a buffer that a device uses in place. This field is dropped before the storage.
    mapped: Option<MappedHost>,
    storage: Storage,
    /// True if the block may move again after this access.
    could_move: bool,
    start: NonNull<T>,
    count: usize,
}

// SAFETY: `ExclusiveHost` owns its elements as a `Box<[T]>` does: its storage handle is the only one, and is never lent.
unsafe impl<T: Send> Send for ExclusiveHost<T> {}
// SAFETY: as above. A shared `ExclusiveHost` gives out only shared references to elements.
unsafe impl<T: Sync> Sync for ExclusiveHost<T> {}

impl<T: Element> ExclusiveHost<T> {
    /// Takes exclusive access to `count` elements from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if some bytes are not a valid `T`, the storage is not in host memory, or the storage has another handle.
    /// [`Error::DeviceLost`] if a transfer may still be using the bytes. If the memory must be mapped, also kernel faults and
    /// errors that the driver reports.
    pub(crate) fn new(op: &'static str, mut storage: Storage, offset: usize, count: usize) -> Result<ExclusiveHost<T>> {
        storage.allocation().check_memory()?;
        let is_host_buffer = storage.is_host_buffer();
        if storage.device() != Device::Cpu && !is_host_buffer || get_mut_if_unique(&mut storage.0).is_none() {
            return Err(Error::invalid(op, format!("{storage:?} are not in host memory with a single owner")));
        }
        if storage.is_simulated() {
            storage = Storage::adopt(vec![0f64; storage.nbytes().div_ceil(8)]); // zeros in place of bytes that do not exist
        }
        if let Some(pinned) = storage.allocation().pinned() {
            pinned.wait_and_check(true)?;
        }
        let could_move = storage.allocation().block().is_some_and(Block::pin);
        // From here on, dropping `exclusive` unpins the block, also when an error is returned.
        let mut exclusive = ExclusiveHost { mapped: None, storage, could_move, start: NonNull::dangling(), count: 0 };
        exclusive.storage.allocation().bring_back()?; // the pinned block does not move again
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
        // SAFETY: `offset` is at most `end`, which is at most the size of the storage.
        let start = unsafe { start.add(offset) };
        // SAFETY: these are initialised bytes of the storage. No other code writes to the bytes, because there is no
        // other handle. The block is pinned, so the bytes do not move.
        elements::<T>(op, unsafe { slice::from_raw_parts(start.as_ptr(), end - offset) })?;
        (exclusive.start, exclusive.count) = (start.cast(), count);
        Ok(exclusive)
    }

    /// Ends the access, and returns the storage. Its block may move again if it could before.
    pub(crate) fn into_storage(self) -> Storage {
        self.storage.clone() // dropping `self` unpins the block
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
        // SAFETY: `new` checked that `count` aligned, valid elements start here, and the elements do not move while
        // `self` lives. No other handle exists, and `self` is borrowed as long as the slice is used.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T> DerefMut for ExclusiveHost<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, with `self` borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests;
