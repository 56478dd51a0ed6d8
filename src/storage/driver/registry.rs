//! One driver a device for the whole process: made on first use, never taken down.

use std::sync::{Arc, PoisonError, RwLock};

use super::host::Host;
use super::opencl::OpenCl;
use super::{Driver, DynDriver};
use crate::storage::config::Config;
use crate::{Device, Result};

static DRIVERS: RwLock<Vec<(Device, DynDriver)>> = RwLock::new(Vec::new());

/// The driver of a device's memory: what allocators of a user's own are built on. Opens the device.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there.
pub fn driver(device: Device) -> Result<Arc<dyn Driver>> {
    let find = |drivers: &[(Device, DynDriver)]| {
        drivers.iter().find(|(of, _)| *of == device).map(|(_, driver)| Arc::clone(driver))
    };
    if let Some(driver) = find(&DRIVERS.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(driver);
    }
    let made: DynDriver = match device {
        Device::Cpu => Arc::new(Host::new(Config::of_process()?)),
        Device::OpenCL(index) => Arc::new(OpenCl::open(index)?),
    };
    let mut drivers = DRIVERS.write().unwrap_or_else(PoisonError::into_inner);
    Ok(find(&drivers).unwrap_or_else(|| {
        drivers.push((device, Arc::clone(&made)));
        made
    }))
}
