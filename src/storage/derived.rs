//! Data derived from a storage's bytes, valid until the bytes change: images, and the result of checking that the indices among the
//! bytes are in range.

use std::sync::atomic::{AtomicU64, Ordering};

use super::allocation::{Allocation, Storage};
use super::images::cache::CachedImages;

/// The images and the check result derived from a storage's bytes.
#[derive(Default)]
pub(super) struct DerivedData {
    pub(super) images: CachedImages,
    /// The last [`Storage::set_index_check`], or 0.
    checked: AtomicU64,
}

impl DerivedData {
    /// Resets everything when the storage is dropped.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.images.clear();
        *self.checked.get_mut() = 0;
    }

    /// Drops everything derived from the bytes, because some of them have changed, or may have in a failed transfer.
    pub(super) fn invalidate(&self) {
        self.checked.store(0, Ordering::Release);
        self.images.invalidate();
    }
}

impl Storage {
    /// Returns the number of the last [`set_index_check`](Self::set_index_check): 0 if none, or if other code may change the bytes unnoticed.
    pub(crate) fn index_check(&self) -> u64 {
        let allocation: &Allocation = self.allocation();
        if allocation.is_shared_outside() { 0 } else { allocation.derived.checked.load(Ordering::Acquire) }
    }

    /// Stores a number for the kernel that checked the indices among the bytes. The caller makes the storage's version a part of the number.
    pub(crate) fn set_index_check(&self, number: u64) {
        self.allocation().derived.checked.store(number, Ordering::Release);
    }
}
