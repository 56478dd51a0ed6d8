//! One allocator a device for the whole process: made on first use, never taken down.

use std::sync::{OnceLock, PoisonError, RwLock};

use super::caching::{CachingAllocator, Manage};
use super::host::Host;
use super::opencl::OpenCl;
use crate::device::opencl;
use crate::{Device, Result};

/// The CPU device's allocator.
pub(super) fn host() -> &'static CachingAllocator<Host> {
    static HOST: OnceLock<CachingAllocator<Host>> = OnceLock::new();
    HOST.get_or_init(|| CachingAllocator::new(Host::new()))
}

/// An OpenCL device's allocator; opens the device.
pub(super) fn opencl(index: usize) -> Result<&'static CachingAllocator<OpenCl>> {
    static OPENCL: RwLock<Vec<Option<&'static CachingAllocator<OpenCl>>>> = RwLock::new(Vec::new());
    let known = OPENCL.read().unwrap_or_else(PoisonError::into_inner).get(index).copied().flatten();
    if let Some(allocator) = known {
        return Ok(allocator);
    }
    let device = opencl::open(index)?; // fails for an index that is none, before the table grows to hold it
    let mut table = OPENCL.write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index {
        table.resize(index + 1, None);
    }
    Ok(table[index].get_or_insert_with(|| Box::leak(Box::new(CachingAllocator::new(OpenCl::new(device))))))
}

/// The allocator of any device, to be asked and told.
pub(super) fn of(device: Device) -> Result<&'static dyn Manage> {
    Ok(match device {
        Device::Cpu => host(),
        Device::OpenCL(index) => opencl(index)?,
    })
}
