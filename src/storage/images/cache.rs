//! Images derived from a storage's bytes, valid until the bytes change, so that constant weights are converted once.

use std::mem;
use std::sync::{Arc, Mutex, Weak};

use smallvec::SmallVec;

use super::Image;
use crate::device::lock;
use crate::storage::allocation::Storage;
use crate::storage::sidecar::DerivedData;
use crate::{Device, Result};

/// A key that distinguishes images made from the same bytes in different ways.
pub(crate) type ImageKey = SmallVec<[i64; 12]>;

/// The images of one storage.
#[derive(Default)]
struct ImageCache(Mutex<Vec<CachedImage>>);

impl DerivedData for ImageCache {
    fn clear(&self) {
        let gone = mem::take(&mut *lock(&self.0));
        drop(gone); // dropped after the lock is released
    }
}

struct CachedImage {
    key: ImageKey,
    /// The version of the storage's bytes from which the image was made.
    version: u64,
    image: Image,
}

/// Limit on the bytes of a storage's images, as a multiple of the storage's bytes: 4, because channels are padded to multiples of 4. A
/// constant weight stays below the limit; a storage with images of many views loses its oldest images.
const MAX_IMAGE_BYTES_RATIO: usize = 4;

/// The images of all storages, by device, so that the images can be dropped when memory runs short.
static ALL_IMAGES: Mutex<Vec<(Device, Weak<ImageCache>)>> = Mutex::new(Vec::new());

/// Drops all images of a device's storages. They are made again on demand.
pub(super) fn drop_images_of_device(device: Device) {
    let mut kept = Vec::new();
    lock(&ALL_IMAGES).retain(|(of, images)| {
        let images = images.upgrade();
        let is_there = images.is_some();
        kept.extend(images.filter(|_| *of == device));
        is_there
    });
    kept.into_iter().for_each(|images| images.clear());
}

impl Storage {
    /// Returns the image of these bytes for `key`: the cached image if it was made from this version of the bytes, or else the
    /// result of `make`.
    ///
    /// The image is cached until the bytes change, the storage is dropped, memory runs short, or the images get too large. Nothing is cached
    /// if other code may change the bytes unnoticed.
    pub(crate) fn derived_image(&self, key: ImageKey, make: impl FnOnce() -> Result<Image>) -> Result<Image> {
        let new_cache = || {
            let (images, mut all) = (Arc::<ImageCache>::default(), lock(&ALL_IMAGES));
            if all.len().is_power_of_two() {
                all.retain(|(_, images)| images.strong_count() > 0);
            }
            all.push((self.device(), Arc::downgrade(&images)));
            images
        };
        let Some(images) = self.derived_data(new_cache) else { return make() };
        let images = &images.0;
        let version = self.version();
        let known =
            lock(images).iter().find(|made| made.key == key && made.version == version).map(|m| m.image.clone());
        if let Some(image) = known {
            return Ok(image);
        }
        let image = make()?;
        let mut gone = Vec::new(); // dropped after the lock is released
        let mut all = lock(images);
        gone.extend(all.extract_if(.., |made| made.version != version || made.key == key));
        let mut bytes: usize = all.iter().map(|made| made.image.storage().nbytes()).sum();
        while bytes + image.storage().nbytes() > MAX_IMAGE_BYTES_RATIO * self.nbytes() && !all.is_empty() {
            let oldest = all.remove(0);
            bytes -= oldest.image.storage().nbytes();
            gone.push(oldest);
        }
        all.push(CachedImage { key, version, image: image.clone() });
        drop(all);
        Ok(image)
    }
}
