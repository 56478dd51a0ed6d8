//! OpenCL devices.
//!
//! [`discovery`] lists the devices, [`adopt`] adds a device of other code. [`open`] creates a device's context and queues,
//! which live until the process ends. Every stream has one in-order queue. Work is submitted under the device's only lock
//! and waited for outside the lock, so a waiting thread never stops another thread from submitting: see [`queues`].
//!
//! Kernels: [`program`] builds kernels, [`cache`] stores their binaries on disk, [`launch`] runs kernels. [`capture`]
//! records launches instead, and replays them. [`probe`] finds out which features kernels can use.
//!
//! Tuning: [`tuning`] has the numbers compiled into kernels, and values per kernel and size class.
//!
//! Memory: [`transfer`] copies bytes, through [`pinned`] memory for speed. [`host_memory`] keeps the host's side of a transfer
//! alive until the transfer is over. [`driver`] is the only file that owns raw handles. [`exit`] stops all work before the
//! process ends.

mod adopt;
mod background;
mod blob;
mod cache;
mod capabilities;
pub(crate) mod capture;
mod carry;
mod context;
mod discovery;
mod driver;
mod errors;
mod exit;
mod extension;
mod fault;
mod functions;
mod hints;
mod host_memory;
mod import;
mod large_buffer;
mod launch;
#[cfg(test)]
#[path = "../../../tests/readers/mutate.rs"]
mod mutate;
mod pinned;
mod probe;
mod profiling;
mod program;
mod queue;
mod queues;
#[cfg(test)]
mod recovery_tests;
mod retry;
mod signature;
#[cfg(test)]
mod stream_tests;
mod streams;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod tuning;
pub(crate) mod user_kernel;

pub(crate) use adopt::adopt;
pub use cache::{ProgramCache, read_cache_file};
pub(crate) use capabilities::{capabilities, platforms};
pub(crate) use context::{ARRIVAL_COUNTERS, ClDevice};
pub(crate) use driver::{ClAt, ClBuffer, ClEvent, ClImage, ClKernel};
pub(crate) use errors::{ClError, Class};
pub(crate) use fault::{Fault, FaultReads, index_fault};
pub use fault::{report_faults_to_any_thread, reported_faults};
pub(crate) use host_memory::HostMemory;
pub(crate) use import::MappedBuffer;
pub(crate) use launch::Arg;
pub(crate) use pinned::ClPinned;
pub(crate) use probe::TensorCores;
pub(crate) use program::{FAST_DIVISION, MOST_REGISTERS, SM_90A};
pub(crate) use retry::Backoff;
pub(crate) use signature::{AddressSpace, Parameter};
pub(crate) use transfer::MapRegion;
pub(crate) use tuning::{MAX_TUNED_GROUP_ITEMS, SizeClass, TuningParameter, times_tuned};
pub(crate) use user_kernel::{Argument as KernelArgument, KernelBuffer, KernelTensor};

use crate::Result;
use crate::device::{Device, DeviceInfo, log, profiler};

/// Calls [`open`] for a device known to be an OpenCL device.
pub(crate) fn open_device(device: Device) -> Result<&'static ClDevice> {
    let Device::OpenCL(index) = device else { unreachable!("work for the CPU goes to the CPU's backend") };
    open(index)
}

/// Returns the device of this index in the order of [`Device::all`](crate::Device::all), opened at its first use.
pub(crate) fn open(index: usize) -> Result<&'static ClDevice> {
    let entry = discovery::entry(index)?;
    if let Some(device) = entry.opened.get() {
        return Ok(device);
    }
    let _messages = log::defer(); // a subscriber may use the device as well
    let _one_at_a_time = entry.opening.lock().unwrap_or_else(|poison| poison.into_inner());
    if let Some(device) = entry.opened.get() {
        return Ok(device);
    }
    let found = entry.found(Device::OpenCL(index))?;
    let (_under_way, _opening) = (exit::delay_exit(), exit::keep_handler_last());
    let opening = profiler::span(profiler::RecordKind::Open, "clCreateContext", Device::OpenCL(index), 0, 0);
    let device: &'static ClDevice = Box::leak(Box::new(ClDevice::open(index, found)?));
    let device = entry.opened.get_or_init(|| device);
    device.profile_if_on();
    drop(opening);
    Ok(device)
}

/// Returns the number of OpenCL devices; 0 if a driver fails to list its devices.
pub(crate) fn count() -> usize {
    discovery::count().unwrap_or(0)
}

/// True if there is an OpenCL device, or if a driver did not answer and so may have a device.
pub(crate) fn may_have_any() -> bool {
    discovery::count() != Some(0)
}

/// Returns a device's description, without opening the device.
pub(crate) fn info(index: usize) -> Result<&'static DeviceInfo> {
    Ok(&discovery::description(index)?.info)
}

pub(crate) fn is_available(index: usize) -> bool {
    discovery::entry(index).is_ok_and(|entry| match entry.opened.get() {
        Some(device) => !device.is_lost(),
        None => entry.found(Device::OpenCL(index)).is_ok(),
    })
}

pub(crate) fn opened(index: usize) -> Option<&'static ClDevice> {
    discovery::known_entries().nth(index)?.opened.get().copied()
}
