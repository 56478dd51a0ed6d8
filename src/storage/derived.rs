//! Images that were made of a storage's bytes and are kept with it, so that constant weights are converted once.

use std::sync::{Mutex, PoisonError};

use smallvec::SmallVec;

use super::allocation::{Allocation, Storage};
use super::image::Image;
use crate::Result;

/// What an image was made of: numbers that say how the bytes were read.
pub(crate) type ImageKey = SmallVec<[i64; 12]>;

/// The images of a storage.
#[derive(Default)]
pub(super) struct Derived(Mutex<Option<Box<Vec<Made>>>>); // rare, and every storage has one of these

struct Made {
    key: ImageKey,
    /// The storage's version that it was made of.
    version: u64,
    image: Image,
}

impl Derived {
    /// Forgets all: the bytes change.
    #[inline]
    pub(super) fn clear(&mut self) {
        let images = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if images.is_some() {
            *images = None;
        }
    }

    /// [`clear`](Self::clear) where others may ask meanwhile.
    pub(super) fn forget(&self) {
        let images = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(images); // not under the lock
    }
}

impl Storage {
    /// The image of these bytes under `key`: the one that was made of this version of them, or what `make` gives, which is kept
    /// until the bytes change or are gone. Where others may change them unseen, nothing is kept.
    pub(crate) fn derived_image(&self, key: ImageKey, make: impl FnOnce() -> Result<Image>) -> Result<Image> {
        let allocation: &Allocation = self.allocation();
        if allocation.is_shared_outside() {
            return make();
        }
        let version = self.version();
        let lock = || allocation.derived.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |made: &&Made| made.key == key && made.version == version;
        if let Some(known) = lock().as_ref().and_then(|all| all.iter().find(is_it).map(|made| made.image.clone())) {
            return Ok(known);
        }
        let image = make()?;
        let mut all = lock();
        let images = all.get_or_insert_default();
        let (old, mut kept): (Vec<Made>, Vec<Made>) =
            images.drain(..).partition(|made| made.version != version || made.key == key);
        kept.push(Made { key, version, image: image.clone() });
        **images = kept;
        drop(all);
        drop(old); // not under the lock
        Ok(image)
    }
}
