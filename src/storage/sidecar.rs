//! The side-car of a storage: data that higher layers keep with the bytes, and that the storage does not interpret.
//!
//! - An attached value: autograd's record of how the elements were changed in place.
//! - Data derived from the bytes, which is cleared when they change: images of constant weights.
//! - A stamp, reset when the bytes change: it records that the indices stored in the bytes were checked to be in range.
//! - A number and a replay counter, for graph captures; the number also identifies storages that a budget observes.
//! - A recipe: how autograd computes the elements again.
//!
//! The attached value may itself hold handles on the storage, namely tensors saved for a backward pass. Such saved handles are
//! counted separately and do not keep the value alive: the value is dropped with the last handle that is not a saved handle.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::allocation::{Allocation, Storage};
use super::captured::{self, Replays};
use super::dry::Role;
use crate::device::lock;

type AttachedValue = Arc<dyn Any + Send + Sync>;

/// Data derived from a storage's bytes, kept with the storage.
pub(crate) trait DerivedData: Any + Send + Sync {
    /// Drops the data, because bytes have changed, or may have changed in a failed transfer.
    fn clear(&self);
}

#[derive(Default)]
pub(super) struct SideCar {
    present: AtomicBool,
    /// The number of handles counted by [`Storage::add_saved_handle`].
    saved: AtomicUsize,
    value: Mutex<Option<AttachedValue>>,
    derived: OnceLock<Arc<dyn DerivedData>>,
    /// The number given to the last [`Storage::set_stamp`], or 0.
    stamp: AtomicU64,
    /// The storage's number in graph captures; 0 if none was assigned.
    number: AtomicU64,
    /// The replay counter of the graph that allocated the storage.
    replays: OnceLock<Replays>,
    /// How autograd computes the elements again.
    recipe: OnceLock<AttachedValue>,
}

/// Held while a handle on a storage with an attachment is dropped, so that exactly one of two concurrent drops is the last.
static DROP_LOCK: Mutex<()> = Mutex::new(());

impl SideCar {
    #[inline]
    fn is_present(&self) -> bool {
        self.present.load(Ordering::Acquire)
    }

    /// Resets everything when the storage is dropped.
    #[inline]
    pub(super) fn clear(&mut self) {
        if *self.present.get_mut() {
            drop(self.take());
        }
        let number = self.number.get_mut();
        if *number != 0 {
            captured::note_drop(std::mem::take(number));
        }
        self.replays.take();
        drop((self.derived.take(), self.recipe.take()));
        *self.stamp.get_mut() = 0;
    }

    /// Drops everything that was derived from the bytes, because bytes have changed, or may have changed in a failed transfer.
    pub(super) fn invalidate(&self) {
        self.stamp.store(0, Ordering::Release);
        if let Some(derived) = self.derived.get() {
            derived.clear();
        }
    }

    pub(super) fn set_replay_counter(&self, replays: &Replays) {
        self.replays.get_or_init(|| Arc::clone(replays));
    }

    /// Returns the storage's number in captures, assigned at the first call and unique in the process.
    pub(super) fn capture_number(&self) -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        match self.number.load(Ordering::Relaxed) {
            0 => {
                let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                let set = self.number.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed);
                set.map_or_else(|other| other, |_| new)
            }
            number => number,
        }
    }

    fn take(&self) -> Option<AttachedValue> {
        let mut value = lock(&self.value);
        self.present.store(false, Ordering::Release);
        value.take()
    }
}

/// Drops a handle, or returns the last handle undropped. The last handle that is not a saved handle drops the attachment.
#[inline]
pub(super) fn release_handle(shared: Arc<Allocation>) -> Option<Arc<Allocation>> {
    if shared.sidecar.is_present() { drop_attached_handle(shared) } else { Some(shared) }
}

#[cold]
fn drop_attached_handle(shared: Arc<Allocation>) -> Option<Arc<Allocation>> {
    let drops = lock(&DROP_LOCK);
    let others = Arc::strong_count(&shared) - 1;
    let only_saved = others <= shared.sidecar.saved.load(Ordering::Acquire);
    let gone = if only_saved { shared.sidecar.take() } else { None };
    // A handle dropped while the attachment was being made takes no lock, so this handle may be the last one by now.
    let (last, allocation) = if others == 0 { (Some(shared), None) } else { (None, Arc::into_inner(shared)) };
    drop(drops);
    drop((gone, allocation)); // dropped after the lock is released, because they may own the last handles on other storages
    last
}

impl Storage {
    #[inline]
    pub(crate) fn has_attachment(&self) -> bool {
        self.0.sidecar.is_present()
    }

    /// Returns the attached value, or `None` if there is none of type `T`.
    pub(crate) fn attachment<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        if !self.has_attachment() {
            return None;
        }
        lock(&self.0.sidecar.value).clone()?.downcast().ok()
    }

    /// Returns the attached value, or attaches a default one. The value lives as long as any handle that is not a saved handle.
    pub(crate) fn attachment_or_default<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut value = lock(&self.0.sidecar.value);
        let attached = value.get_or_insert_with(|| Arc::<T>::default()).clone();
        self.0.sidecar.present.store(true, Ordering::Release);
        attached.downcast().expect("one type is attached")
    }

    /// Returns the data derived from the bytes, which `make` creates on first use. Returns `None` if other code may change the
    /// bytes unnoticed.
    pub(crate) fn derived_data<T: DerivedData>(&self, make: impl FnOnce() -> Arc<T>) -> Option<Arc<T>> {
        if self.0.is_shared_outside() {
            return None;
        }
        let derived: Arc<dyn Any + Send + Sync> = Arc::clone(self.0.sidecar.derived.get_or_init(|| make())) as _;
        Some(derived.downcast().expect("one type is derived"))
    }

    /// Returns the number of the last [`set_stamp`](Self::set_stamp): 0 if none, or if other code may change the bytes unnoticed.
    pub(crate) fn stamp(&self) -> u64 {
        if self.0.is_shared_outside() { 0 } else { self.0.sidecar.stamp.load(Ordering::Acquire) }
    }

    /// Stores a number with the bytes until they change. The caller must include the storage's version in the number.
    pub(crate) fn set_stamp(&self, number: u64) {
        self.0.sidecar.stamp.store(number, Ordering::Release);
    }

    /// Returns the number of replays of the graph that allocated the storage; each replay writes the storage.
    pub(crate) fn replays(&self) -> u64 {
        self.0.sidecar.replays.get().map_or(0, |replays| replays.load(Ordering::Acquire))
    }

    /// Returns the storage's number, unique in the process.
    pub(crate) fn number(&self) -> u64 {
        self.0.sidecar.capture_number()
    }

    /// Keeps a recipe of the elements until the storage is dropped. Has no effect if there is a recipe already.
    pub(crate) fn set_recipe(&self, recipe: AttachedValue) {
        self.0.sidecar.recipe.get_or_init(|| recipe);
    }

    /// Returns the recipe of the elements, or `None` if there is none of type `T`.
    pub(crate) fn recipe<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.sidecar.recipe.get()?.clone().downcast().ok()
    }

    /// True if all handles are counted as saved.
    pub(crate) fn is_only_saved(&self) -> bool {
        Arc::strong_count(&self.0) <= self.0.sidecar.saved.load(Ordering::Acquire)
    }

    /// Counts a handle as saved, until [`Storage::remove_saved_handle`].
    pub(crate) fn add_saved_handle(&self) {
        if self.0.sidecar.saved.fetch_add(1, Ordering::AcqRel) == 0 {
            self.set_role(Role::Saved);
        }
    }

    /// Stops counting a saved handle, which is about to be dropped.
    pub(crate) fn remove_saved_handle(&self) {
        if self.0.sidecar.saved.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.set_role(Role::Temporary);
        }
    }
}
