//! A table of values by device and type, such as a device's driver and its pool of images. The values live as long as the process.

use std::any::Any;
use std::sync::RwLock;

use crate::Device;
use crate::device::{read, write};

static TABLE: RwLock<Vec<(Device, &'static (dyn Any + Send + Sync))>> = RwLock::new(Vec::new());

/// Replaced values, which are never freed because references to them may remain. Leak checkers find them here.
static REPLACED: RwLock<Vec<&'static (dyn Any + Send + Sync)>> = RwLock::new(Vec::new());

/// Returns the device's value of type `T`, or `None` if there is none.
pub(super) fn get<T: Any>(device: Device) -> Option<&'static T> {
    read(&TABLE).iter().filter(|(of, _)| *of == device).find_map(|(_, value)| value.downcast_ref())
}

/// Returns the device's value of type `T`. If there is none, inserts `made` and returns it.
pub(super) fn get_or_insert<T: Any + Send + Sync>(device: Device, made: T) -> &'static T {
    insert(device, made, false, |_| {})
}

/// Inserts a value, and calls `publish` with it before the table is unlocked. If the device already has a value of this type, it is
/// kept and returned unless `replace` is true.
pub(super) fn insert<T: Any + Send + Sync>(
    device: Device,
    made: T,
    replace: bool,
    publish: impl FnOnce(&'static T),
) -> &'static T {
    let mut table = write(&TABLE);
    let known = table.iter().position(|(of, value)| *of == device && value.is::<T>());
    if let Some(kept) = known.filter(|_| !replace).and_then(|at| table[at].1.downcast_ref()) {
        return kept;
    }
    let made: &'static T = Box::leak(Box::new(made));
    match known {
        Some(at) => write(&REPLACED).push(std::mem::replace(&mut table[at].1, made)),
        None => table.push((device, made)),
    }
    publish(made);
    made
}
