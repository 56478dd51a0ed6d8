//! The process-wide table of drivers, one per device, created on first use and never destroyed.

use std::sync::{Arc, RwLock};

use super::host::Host;
use super::opencl::OpenCl;
use super::{Driver, DynDriver};
use crate::storage::config::Config;
use crate::sync;
use crate::{Device, Result};

/// The drivers of all devices in use.
static DRIVERS: RwLock<Vec<(Device, DynDriver)>> = RwLock::new(Vec::new());

/// Returns the driver of a device's memory, on which users can build their own allocators. Opens the device.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist.
pub fn driver(device: Device) -> Result<Arc<dyn Driver>> {
    let find = |drivers: &[(Device, DynDriver)]| {
        drivers.iter().find(|(of, _)| *of == device).map(|(_, driver)| Arc::clone(driver))
    };
    if let Some(driver) = find(&sync::read(&DRIVERS)) {
        return Ok(driver);
    }
    let made: DynDriver = match device {
        Device::Cpu => Arc::new(Host::new(Config::from_env_once()?)),
        Device::OpenCL(index) => Arc::new(OpenCl::open(index)?),
    };
    let mut drivers = sync::write(&DRIVERS);
    Ok(find(&drivers).unwrap_or_else(|| {
        drivers.push((device, Arc::clone(&made)));
        made
    }))
}
