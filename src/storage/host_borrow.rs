//! Access for closures that read elements of the CPU device in place without holding a lock.

use std::slice;

use super::allocation::Storage;
use crate::device::{OnDrop, read};
use crate::{Element, Error, Result, elements};

#[cold]
pub(super) fn write_during_read_error() -> Error {
    let reason = "a closure of Tensor::with_host is reading the elements: write to them when it has returned";
    Error::invalid("with_host", reason)
}

impl Storage {
    /// Calls `f` with `count` elements of a storage on the CPU device, starting at byte `offset`. `f` may use the
    /// storage, but until `f` returns a write to the storage is an error in every thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the bytes are not valid elements, and for a storage on another device.
    /// [`Error::DeviceLost`] if a transfer may still be writing to the bytes.
    pub(crate) fn with_elements<T: Element, R>(
        &self,
        op: &'static str,
        offset: usize,
        count: usize,
        f: impl FnOnce(&[T]) -> R,
    ) -> Result<R> {
        let range = self.checked_range(op, offset, count.saturating_mul(size_of::<T>()))?;
        if range.is_empty() {
            return Ok(f(&[]));
        }
        if self.is_simulated() {
            let bits = self.read_vec::<T::Bits>(offset, count)?;
            return elements::<T>(op, bytemuck::cast_slice(&bits)).map(f);
        }
        let allocation = self.allocation();
        allocation.check_memory()?;
        let elsewhere = || Error::invalid(op, format!("{self:?} are not in memory of the host"));
        let lock = allocation.host_lock().ok_or_else(elsewhere)?;
        // While the count is above 0, the bytes that the lock guards are neither written nor moved.
        allocation.lock_present(|| Ok(read(lock)))?.add_reader();
        let borrow = OnDrop(|| read(lock).remove_reader());
        if let Some(pinned) = allocation.pinned() {
            let _locked = read(lock);
            pinned.wait_and_check(false)?;
        }
        let (start, _) = allocation.host_range();
        // SAFETY: `range` is inside the storage's initialised bytes, which live as long as the borrowed storage. A
        // thread that writes or moves the bytes takes the lock for writing, finds the count above 0, and neither writes
        // nor moves the bytes until `borrow` is dropped.
        let bytes = unsafe { slice::from_raw_parts(start.as_ptr().add(range.start), range.len()) };
        let result = elements::<T>(op, bytes).map(f);
        drop(borrow);
        result
    }
}
