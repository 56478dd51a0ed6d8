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
    /// Where it was only asked for yet, none.
    image: Option<Image>,
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
    /// until the bytes change or are gone. Where they are changed by others unseen, or where they are asked for the first time and
    /// `only_again` is set, nothing is kept: `None` in the latter case.
    pub(crate) fn derived_image(
        &self,
        key: ImageKey,
        only_again: bool,
        make: impl FnOnce() -> Result<Image>,
    ) -> Result<Option<Image>> {
        let allocation: &Allocation = self.allocation();
        if allocation.is_shared_outside() {
            return if only_again { Ok(None) } else { make().map(Some) };
        }
        let version = self.version();
        let lock = || allocation.derived.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().as_ref().and_then(|all| {
            all.iter().find(|made| made.key == key && made.version == version).map(|made| made.image.clone())
        });
        let image = match known {
            Some(Some(image)) => return Ok(Some(image)),
            None if only_again => None,
            _ => Some(make()?),
        };
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
