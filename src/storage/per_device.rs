//! Tables of one value per device, which live as long as the process.

use std::sync::{RwLock, RwLockWriteGuard};

use crate::Device;
use crate::device::{read, write};

/// One value for each device that was used.
pub(super) struct PerDevice<T>(RwLock<Vec<(Device, T)>>);

impl<T: Clone> PerDevice<T> {
    pub(super) const fn new() -> PerDevice<T> {
        PerDevice(RwLock::new(Vec::new()))
    }

    /// Returns the device's value, or `None` if the device has none.
    pub(super) fn get(&self, device: Device) -> Option<T> {
        let table = read(&self.0);
        table.iter().find(|(of, _)| *of == device).map(|(_, value)| value.clone())
    }

    /// Returns the device's value. If there is none, inserts `made` and returns it.
    pub(super) fn get_or_insert(&self, device: Device, made: T) -> T {
        let mut table = self.lock();
        match table.iter().find(|(of, _)| *of == device) {
            Some((_, value)) => value.clone(),
            None => {
                table.push((device, made.clone()));
                made
            }
        }
    }

    /// Locks the table for changes.
    pub(super) fn lock(&self) -> RwLockWriteGuard<'_, Vec<(Device, T)>> {
        write(&self.0)
    }
}
