//! One allocator a device for the whole process: made on first use, never taken down.

use std::sync::OnceLock;

use super::caching::{CachingAllocator, Manage};
use super::host::Host;
use crate::{Device, Error, Result};

/// The CPU device's allocator.
pub(super) fn host() -> &'static CachingAllocator<Host> {
    static HOST: OnceLock<CachingAllocator<Host>> = OnceLock::new();
    HOST.get_or_init(|| CachingAllocator::new(Host::new()))
}

/// The allocator of any device, to be asked and told.
pub(super) fn of(device: Device) -> Result<&'static dyn Manage> {
    match device {
        Device::Cpu => Ok(host()),
        Device::OpenCL(_) => Err(Error::NoDevice { device, reason: "no OpenCL yet".into() }),
    }
}
