//! The drivers of all devices in use, created on first use and never destroyed.

use std::sync::Arc;

use super::Driver;
use super::host::Host;
use super::opencl::OpenCl;
use crate::storage::{config::Config, per_device};
use crate::{Device, Result};

/// Returns the driver of a device's memory, on which users can build their own allocators. Opens the device.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist.
pub fn driver(device: Device) -> Result<Arc<dyn Driver>> {
    if let Some(driver) = per_device::get::<Arc<dyn Driver>>(device) {
        return Ok(Arc::clone(driver));
    }
    let made: Arc<dyn Driver> = match device {
        Device::Cpu => Arc::new(Host::new(Config::from_env_once()?)),
        Device::OpenCL(index) => Arc::new(OpenCl::open(index)?),
    };
    Ok(Arc::clone(per_device::get_or_insert(device, made)))
}
