//! Elements of the CPU device that a closure reads where they are, without a lock.

use std::slice;
use std::sync::{PoisonError, RwLock};

use super::allocation::Storage;
use super::block::Borrows;
use crate::{Element, Error, Result, elements};

/// The error of a write while a closure reads.
#[cold]
pub(super) fn refused() -> Error {
    let reason = "a closure of Tensor::with_host is reading the elements: write to them when it has returned";
    Error::invalid("with_host", reason)
}

/// While the borrow lives, the bytes that the lock guards are neither written nor moved.
struct HostBorrow<'a>(&'a RwLock<Borrows>);

impl<'a> HostBorrow<'a> {
    fn new(lock: &'a RwLock<Borrows>) -> HostBorrow<'a> {
        let borrow = HostBorrow(lock);
        borrow.count(Borrows::begin);
        borrow
    }

    fn count(&self, change: impl FnOnce(&Borrows)) {
        change(&self.0.read().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for HostBorrow<'_> {
    fn drop(&mut self) {
        self.count(Borrows::end);
    }
}

impl Storage {
    /// Calls `f` with the `count` elements from byte `offset` on, of a storage on the CPU device. `f` may use the storage: to
    /// write to it is an error meanwhile, for every thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] where bytes are no elements, and for a storage elsewhere; [`Error::DeviceLost`] where a transfer may
    /// still be writing to the bytes.
    pub(crate) fn with_elements<T: Element, R>(
        &self,
        op: &'static str,
        offset: usize,
        count: usize,
        f: impl FnOnce(&[T]) -> R,
    ) -> Result<R> {
        let range = self.range(op, offset, count.saturating_mul(size_of::<T>()))?;
        if range.is_empty() {
            return Ok(f(&[]));
        }
        let allocation = self.allocation();
        allocation.check_memory()?;
        let elsewhere = || Error::invalid(op, format!("{self:?} are not in memory of the host"));
        let borrow = HostBorrow::new(allocation.host_lock().ok_or_else(elsewhere)?);
        if let Some(pinned) = allocation.pinned() {
            let _locked = borrow.0.read().unwrap_or_else(PoisonError::into_inner);
            pinned.check(false)?;
        }
        let (start, _) = allocation.host_range();
        // SAFETY: `range` is inside the storage's initialised bytes, which live as long as the borrowed storage. Who writes to
        // or moves them has the lock for writing and finds the count above 0, and so does neither until `borrow` is dropped.
        let bytes = unsafe { slice::from_raw_parts(start.as_ptr().add(range.start), range.len()) };
        let result = elements::<T>(op, bytes).map(f);
        drop(borrow);
        result
    }
}
