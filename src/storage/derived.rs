//! What is known of a storage's bytes until they change: images that were made of them, so that constant weights are converted once, and
//! that indices among them are in range.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use smallvec::SmallVec;

use super::allocation::{Allocation, Storage};
use super::image::Image;
use crate::device::lock;
use crate::{Device, Result};

/// What an image was made of: numbers that say how the bytes were read.
pub(crate) type ImageKey = SmallVec<[i64; 12]>;

/// What was made of a storage's bytes.
#[derive(Default)]
pub(super) struct Derived {
    /// The images, if it ever had any.
    images: OnceLock<Arc<Images>>,
    checked: AtomicU64,
}

type Images = Mutex<Vec<Made>>;

struct Made {
    key: ImageKey,
    /// The storage's version that it was made of.
    version: u64,
    image: Image,
}

/// The bytes of a storage's images are at most this many times its own: channels are padded to fours. More than that are images of
/// many views, which are not constants.
const MOST: usize = 4;

/// The images of all storages, by device, to have them back when memory runs short.
static ALL: Mutex<Vec<(Device, Weak<Images>)>> = Mutex::new(Vec::new());

/// Forgets all images of a device's storages: they are made again when they are asked for.
pub(super) fn forget_all(device: Device) {
    let mut kept = Vec::new();
    lock(&ALL).retain(|(of, images)| {
        let images = images.upgrade();
        let is_there = images.is_some();
        kept.extend(images.filter(|_| *of == device));
        is_there
    });
    kept.into_iter().for_each(|images| forget(&images));
}

fn forget(images: &Images) {
    let gone = mem::take(&mut *lock(images));
    drop(gone); // not under the lock
}

impl Derived {
    /// Forgets all, for good: the storage is gone.
    #[inline]
    pub(super) fn clear(&mut self) {
        drop(self.images.take());
        *self.checked.get_mut() = 0;
    }

    /// Forgets all: the bytes have changed, or some of them where a transfer failed.
    pub(super) fn forget(&self) {
        self.checked.store(0, Ordering::Release);
        if let Some(images) = self.images.get() {
            forget(images);
        }
    }
}

impl Storage {
    /// The last [`set_checked`](Self::set_checked); 0 before, and where others may change the bytes unseen.
    pub(crate) fn checked(&self) -> u64 {
        let allocation: &Allocation = self.allocation();
        if allocation.is_shared_outside() { 0 } else { allocation.derived.checked.load(Ordering::Acquire) }
    }

    /// Keeps a number that says which kernel has checked the indices among the bytes; the version is the caller's part.
    pub(crate) fn set_checked(&self, number: u64) {
        self.allocation().derived.checked.store(number, Ordering::Release);
    }

    /// The image of these bytes under `key`: the one that was made of this version of them, or what `make` gives, which is kept
    /// until the bytes change or are gone, memory runs short, or there are too many. Where others may change them unseen, nothing
    /// is kept.
    pub(crate) fn derived_image(&self, key: ImageKey, make: impl FnOnce() -> Result<Image>) -> Result<Image> {
        let allocation: &Allocation = self.allocation();
        if allocation.is_shared_outside() {
            return make();
        }
        let images = allocation.derived.images.get_or_init(|| {
            let (images, mut all) = (Arc::default(), lock(&ALL));
            if all.len().is_power_of_two() {
                all.retain(|(_, images)| images.strong_count() > 0);
            }
            all.push((self.device(), Arc::downgrade(&images)));
            images
        });
        let version = self.version();
        let known =
            lock(images).iter().find(|made| made.key == key && made.version == version).map(|m| m.image.clone());
        if let Some(image) = known {
            return Ok(image);
        }
        let image = make()?;
        let mut gone = Vec::new(); // dropped after the lock
        let mut all = lock(images);
        gone.extend(all.extract_if(.., |made| made.version != version || made.key == key));
        let mut bytes: usize = all.iter().map(|made| made.image.storage().nbytes()).sum();
        while bytes + image.storage().nbytes() > MOST * self.nbytes() && !all.is_empty() {
            let oldest = all.remove(0);
            bytes -= oldest.image.storage().nbytes();
            gone.push(oldest);
        }
        all.push(Made { key, version, image: image.clone() });
        drop(all);
        Ok(image)
    }
}
