//! OpenCL devices.
//!
//! [`discovery`] finds them, [`adopt`] takes one from other code; [`open`] makes a device usable: one context and one in-order queue a stream, kept for the
//! life of the process. Work is submitted under the device's one lock and waited for outside it, so a thread that waits
//! never stops another from submitting: see [`queues`]. [`program`] builds kernels, [`cache`] keeps them on disk, [`launch`]
//! runs them, [`capture`] records them instead for [`replay`] (by the host, in a [`command_buffer`] or from a
//! [`recordable_queue`]), [`probe`] finds out what they may use, [`parameters`] are the numbers that they are made with,
//! [`tuning`] a device's, [`choices`] those that suit some sizes better, found by [`trials`], [`transfer`] moves bytes,
//! through [`pinned`] memory where it is to be fast, and from and to memory that
//! outlives what uses it: see [`host_memory`]. [`driver`] is the only file that owns raw handles; [`exit`] stops everything before the process ends.

mod adopt;
mod background;
mod blob;
mod cache;
mod capabilities;
pub(crate) mod capture;
mod carry;
mod choices;
mod command_buffer;
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
mod parameters;
mod pinned;
mod probe;
mod profiling;
mod program;
mod queue;
mod queues;
mod recordable_queue;
#[cfg(test)]
mod recovery_tests;
pub(crate) mod replay;
mod retry;
mod signature;
#[cfg(test)]
mod stream_tests;
mod streams;
#[cfg(test)]
mod tests;
mod transfer;
mod trials;
mod tuning;
pub(crate) mod user_kernel;

pub(crate) use adopt::adopt;
pub use cache::{ProgramCache, read_cache_file};
pub(crate) use capabilities::{capabilities, platforms};
pub(crate) use choices::{LARGEST_GROUP, SizeClass};
pub(crate) use context::{ARRIVALS, ClDevice};
pub(crate) use driver::{ClAt, ClBuffer, ClEvent, ClImage, ClKernel};
pub(crate) use errors::{ClError, Class};
pub(crate) use fault::{Fault, FaultReads, index_fault};
pub use fault::{report_faults_to_any_thread, reported_faults};
pub(crate) use host_memory::HostMemory;
pub(crate) use import::MappedBuffer;
pub(crate) use launch::Arg;
pub(crate) use parameters::{Knob, PARAMETERS, Tunable};
pub(crate) use pinned::ClPinned;
pub(crate) use probe::TensorCores;
pub(crate) use program::{FAST_DIVISION, MOST_REGISTERS, SM_90A};
pub(crate) use retry::Backoff;
pub(crate) use signature::{Parameter, Space};
pub(crate) use transfer::Mapped;
pub(crate) use tuning::times_tuned;
pub(crate) use user_kernel::{Argument as KernelArgument, KernelBuffer, KernelTensor};

use crate::Result;
use crate::device::{Device, DeviceInfo, log, profiler};

/// [`open`] for a device that is known to be an OpenCL device.
pub(crate) fn open_device(device: Device) -> Result<&'static ClDevice> {
    let Device::OpenCL(index) = device else { unreachable!("work for the CPU goes to the CPU's backend") };
    open(index)
}

/// The device of this index in [`Device::all`](crate::Device::all)'s order, opened at first use.
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
    let (_under_way, _opening) = (exit::under_way(), exit::registering());
    let opening = profiler::span(profiler::Kind::Open, "clCreateContext", Device::OpenCL(index), 0, 0);
    let device: &'static ClDevice = Box::leak(Box::new(ClDevice::open(index, found)?));
    let device = entry.opened.get_or_init(|| device);
    device.profile_if_on();
    drop(opening);
    Ok(device)
}

/// How many OpenCL devices there are; none where a driver fails to tell.
pub(crate) fn count() -> usize {
    discovery::count().unwrap_or(0)
}

/// Whether there is an OpenCL device, or may be one because a driver did not answer.
pub(crate) fn may_have_any() -> bool {
    discovery::count() != Some(0)
}

/// A device's properties, without opening it.
pub(crate) fn info(index: usize) -> Result<&'static DeviceInfo> {
    Ok(&discovery::find(index)?.info)
}

/// Whether the device exists and has not been lost.
pub(crate) fn is_available(index: usize) -> bool {
    discovery::entry(index).is_ok_and(|entry| match entry.opened.get() {
        Some(device) => !device.is_lost(),
        None => entry.found(Device::OpenCL(index)).is_ok(),
    })
}

/// The device, if anything has used it yet.
pub(crate) fn opened(index: usize) -> Option<&'static ClDevice> {
    discovery::known().nth(index)?.opened.get().copied()
}
