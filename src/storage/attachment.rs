//! What the layers above keep with a storage: autograd's record of how its elements were changed in place.
//!
//! What is kept may itself hold handles on the storage: values saved for a backward pass. These are counted, and do not keep
//! it: it goes with the last handle that is none of them.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::allocation::{Allocation, Storage};
use super::captured::{self, Replays};
use crate::device::lock;

type Value = Arc<dyn Any + Send + Sync>;

/// The attachment of a storage, if it has one.
#[derive(Default)]
pub(super) struct Attachment {
    present: AtomicBool,
    /// Handles that are counted by [`Storage::save`].
    saved: AtomicUsize,
    value: Mutex<Option<Value>>,
    /// What a capture calls the storage; 0 for nothing.
    number: AtomicU64,
    /// Counts the replays of the graph that it was allocated in.
    replays: OnceLock<Replays>,
}

/// Held while a handle on a storage with an attachment is dropped, so that the last one of two notices.
static DROPS: Mutex<()> = Mutex::new(());

impl Attachment {
    #[inline]
    fn is_present(&self) -> bool {
        self.present.load(Ordering::Acquire)
    }

    /// The storage is gone.
    #[inline]
    pub(super) fn clear(&mut self) {
        if *self.present.get_mut() {
            drop(self.take());
        }
        let number = self.number.get_mut();
        if *number != 0 {
            captured::dropped(std::mem::take(number));
        }
        self.replays.take();
    }

    /// Each replay of a graph writes the storage.
    pub(super) fn rewritten_by(&self, replays: &Replays) {
        self.replays.get_or_init(|| Arc::clone(replays));
    }

    /// The number that captures know the storage by: no other one has it.
    pub(super) fn number(&self) -> u64 {
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

    fn take(&self) -> Option<Value> {
        let mut value = lock(&self.value);
        self.present.store(false, Ordering::Release);
        value.take()
    }
}

/// A handle that is to be dropped, unless that has been done: it was not the last one. The attachment goes with the last handle
/// that is not a saved one.
#[inline]
pub(super) fn released(shared: Arc<Allocation>) -> Option<Arc<Allocation>> {
    if shared.attachment.is_present() { drop_handle(shared) } else { Some(shared) }
}

#[cold]
fn drop_handle(shared: Arc<Allocation>) -> Option<Arc<Allocation>> {
    let drops = lock(&DROPS);
    let others = Arc::strong_count(&shared) - 1;
    let only_saved = others <= shared.attachment.saved.load(Ordering::Acquire);
    let gone = if only_saved { shared.attachment.take() } else { None };
    // A handle that was dropped while the attachment was made does not wait for the lock: this may be the last one now.
    let (last, allocation) = if others == 0 { (Some(shared), None) } else { (None, Arc::into_inner(shared)) };
    drop(drops);
    drop((gone, allocation)); // they may hold the last handles on other storages
    last
}

impl Storage {
    /// Whether something is attached.
    #[inline]
    pub(crate) fn has_attachment(&self) -> bool {
        self.0.attachment.is_present()
    }

    /// What is attached, if it is of this type.
    pub(crate) fn attachment<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        if !self.has_attachment() {
            return None;
        }
        lock(&self.0.attachment.value).clone()?.downcast().ok()
    }

    /// What is attached, made where nothing is: it lives as long as any handle that is not a saved one.
    pub(crate) fn attachment_or_default<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut value = lock(&self.0.attachment.value);
        let attached = value.get_or_insert_with(|| Arc::<T>::default()).clone();
        self.0.attachment.present.store(true, Ordering::Release);
        attached.downcast().expect("one type is attached")
    }

    /// How often a graph has written the storage, which it allocated, in replays.
    pub(crate) fn replays(&self) -> u64 {
        self.0.attachment.replays.get().map_or(0, |replays| replays.load(Ordering::Acquire))
    }

    /// Counts a handle among the saved ones, until [`Storage::unsave`].
    pub(crate) fn save(&self) {
        self.0.attachment.saved.fetch_add(1, Ordering::AcqRel);
    }

    /// The handle is about to be dropped.
    pub(crate) fn unsave(&self) {
        self.0.attachment.saved.fetch_sub(1, Ordering::AcqRel);
    }
}
