//! The process-wide table of drivers, one per device, created on first use and never destroyed.

use std::sync::Arc;

use super::host::Host;
use super::opencl::OpenCl;
use super::{Driver, DynDriver};
use crate::storage::config::Config;
use crate::storage::per_device::PerDevice;
use crate::{Device, Result};

/// The drivers of all devices in use.
static DRIVERS: PerDevice<DynDriver> = PerDevice::new();

/// Returns the driver of a device's memory, on which users can build their own allocators. Opens the device.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist.
pub fn driver(device: Device) -> Result<Arc<dyn Driver>> {
    if let Some(driver) = DRIVERS.get(device) {
        return Ok(driver);
    }
    let made: DynDriver = match device {
        Device::Cpu => Arc::new(Host::new(Config::from_env_once()?)),
        Device::OpenCL(index) => Arc::new(OpenCl::open(index)?),
    };
    Ok(DRIVERS.get_or_insert(device, made))
}
