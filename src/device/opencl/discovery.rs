//! The list of OpenCL devices and their order.
//!
//! Every platform is queried at first use. A failed query is repeated a few times. Devices get their indices only once all
//! properties that decide the order are known, so that the indices are equal in every process. Until then, each use repeats
//! the queries. If `CLAYSTONE_DEVICES` has only `platform:index` entries, failures of other devices are ignored.
//!
//! Discrete GPUs come first, then integrated GPUs, other accelerators and CPUs. Within a kind, devices with more compute units
//! come first, equals in the drivers' order. `CLAYSTONE_DEVICES` sets its own selection and order. `CLAYSTONE_KERNELS=gpu`
//! (or `gpu+fence`) makes processors run the kernels of GPUs, for tests.

mod choice;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Mutex, OnceLock};

use opencl3::device as cl;
use opencl3::types::{cl_device_id, cl_platform_id};

use super::context::ClDevice;
use super::description::{DeviceDescription, QueryFailure, describe, rank_properties};
use super::driver::{call, library, send_and_sync};
use super::errors::ClError;
use super::exit;
use super::functions;
use super::retry::retry;
use crate::device::system::{OS, driver_registry, install_hint, opencl_libraries};
use crate::device::{Device, DeviceInfo, DeviceKind, log, profiler};
use crate::sync::lock;
use crate::{Error, Result};
use choice::Choice;

/// A device and its description. The position in the list is the device's index until the process ends.
pub(super) struct Entry {
    id: cl_device_id,
    /// `platform:index`, as in CLAYSTONE_DEVICES.
    platform_index: (usize, usize),
    platform: cl_platform_id,
    /// The kind and the number of compute units, by which devices are sorted.
    rank_properties: (DeviceKind, usize),
    /// The rest of the description, once the driver has answered.
    found: OnceLock<DeviceDescription>,
    /// Opened at first use, and open until the process ends.
    opened: OnceLock<&'static ClDevice>,
    /// Locked while opening, so that the device is opened once.
    opening: Mutex<()>,
}

send_and_sync!(Entry);

impl Entry {
    /// Creates the entry of a device in a context of other code, which [`discover`] does not list.
    ///
    /// # Errors
    /// The reason why the device cannot be used, or the error of its driver.
    pub(super) fn for_adopted(id: cl_device_id, platform: cl_platform_id) -> Result<Entry, Result<String, ClError>> {
        let rank_properties = rank_properties(id).map_err(|silent| match silent {
            QueryFailure::Failed(e) => Err(e),
            QueryFailure::Unusable(why) => Ok(why),
        })?;
        Ok(Entry::new(id, (usize::MAX, 0), platform, rank_properties))
    }

    fn new(
        id: cl_device_id,
        platform_index: (usize, usize),
        platform: cl_platform_id,
        rank_properties: (DeviceKind, usize),
    ) -> Entry {
        let (found, opened, opening) = (OnceLock::new(), OnceLock::new(), Mutex::new(()));
        Entry { id, platform_index, platform, rank_properties, found, opened, opening }
    }

    /// Stores the opened device, which is closed when the process ends.
    pub(super) fn store_opened(&self, device: ClDevice) -> &'static ClDevice {
        let device: &'static ClDevice = Box::leak(Box::new(device));
        exit::close_at_exit(Box::new(move || device.close()));
        self.opened.get_or_init(|| device)
    }

    #[cfg(test)]
    pub(super) fn platform_index(&self) -> (usize, usize) {
        self.platform_index
    }

    #[cfg(test)]
    pub(super) fn is_described(&self) -> bool {
        self.found.get().is_some()
    }

    /// Returns the device's description, querying the driver unless it has answered already.
    pub(super) fn found(&self, device: Device) -> Result<&DeviceDescription> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        let found = describe(self.id, self.platform, self.rank_properties).map_err(|e| query_error(device, &e))?;
        Ok(self.found.get_or_init(|| found))
    }
}

/// The devices in order. If there are none, `why_none` is the reason that errors give.
pub(super) struct Discovery {
    pub devices: Vec<Entry>,
    why_none: String,
}

/// The process's devices.
struct Devices {
    /// Set once all devices are known, or known not to exist: the indices do not change after that.
    discovered: OnceLock<Discovery>,
    /// The adopted devices, in order of their indices, which follow those of all other devices.
    adopted: [OnceLock<Adopted>; MAX_ADOPTED],
    /// Locked while devices are discovered or adopted.
    changing: Mutex<()>,
}

/// The addresses of context, device and queue of an adopted device, and its entry.
struct Adopted {
    handles: [usize; 3],
    entry: &'static Entry,
}

const MAX_ADOPTED: usize = 64;

static DEVICES: Devices = Devices {
    discovered: OnceLock::new(),
    adopted: [const { OnceLock::new() }; MAX_ADOPTED],
    changing: Mutex::new(()),
};

/// Returns the process's devices. If a driver fails to list its devices, the next use queries again.
fn discovery() -> Result<&'static Discovery, ClError> {
    exit::watch_thread();
    if let Some(known) = DEVICES.discovered.get() {
        return Ok(known);
    }
    let _messages = log::defer(); // a subscriber may list devices, which needs the lock
    let _one_at_a_time = lock(&DEVICES.changing);
    if let Some(known) = DEVICES.discovered.get() {
        return Ok(known);
    }
    let choice = std::env::var("CLAYSTONE_DEVICES").unwrap_or_default();
    match exit::delay_exit(|| discover(&choice)) {
        Ok(found) => {
            let known = DEVICES.discovered.get_or_init(|| found);
            log::emit(move || {
                tracing::debug!(devices = known.devices.len(), why_none = known.why_none, "OpenCL discovery");
            });
            Ok(known)
        }
        Err(e) => {
            log::emit(move || {
                tracing::warn!(call = e.call, code = e.name(), "the OpenCL devices could not be listed");
            });
            Err(e)
        }
    }
}

/// Returns the entries of the known devices in order, without calling a driver: adopted devices come last.
fn known_entries() -> impl Iterator<Item = &'static Entry> {
    let discovered = DEVICES.discovered.get().map_or(&[][..], |known| &known.devices);
    discovered.iter().chain(adopted().map(|adopted| adopted.entry))
}

fn adopted() -> impl Iterator<Item = &'static Adopted> {
    DEVICES.adopted.iter().map_while(OnceLock::get)
}

/// Returns the device adopted with these handles. The first call opens the device with `make`, at a new index.
pub(super) fn adopt(handles: [usize; 3], make: impl FnOnce(Device) -> Result<&'static Entry>) -> Result<Device> {
    let own = discovery().map_err(|e| query_error(Device::OpenCL(0), &e))?.devices.len();
    let _messages = log::defer(); // a subscriber may use devices, which needs the lock
    let _one_at_a_time = lock(&DEVICES.changing);
    if let Some(at) = adopted().position(|adopted| adopted.handles == handles) {
        return Ok(Device::OpenCL(own + at));
    }
    let device = Device::OpenCL(own + adopted().count());
    let Some(free) = DEVICES.adopted.iter().find(|slot| slot.get().is_none()) else {
        return Err(Error::invalid("Device::adopt", format!("a process adopts at most {MAX_ADOPTED} queues")));
    };
    let entry = make(device)?;
    _ = free.set(Adopted { handles, entry });
    if let Some(opened) = entry.opened.get() {
        opened.profile_if_on();
    }
    Ok(device)
}

/// Returns the number of OpenCL devices; 0 if a driver fails to list its devices.
pub(crate) fn count() -> usize {
    discovery().map_or(0, |known| known.devices.len() + adopted().count())
}

/// True if there is an OpenCL device, or if a driver did not answer and so may have a device.
pub(crate) fn may_have_any() -> bool {
    discovery().is_err() || count() > 0
}

/// Returns the device of this index, or an error that lists the existing devices.
fn entry(index: usize) -> Result<&'static Entry> {
    let device = Device::OpenCL(index);
    let all = discovery().map_err(|e| query_error(device, &e))?;
    if let Some(entry) = all.devices.get(index).or_else(|| Some(adopted().nth(index - all.devices.len())?.entry)) {
        return Ok(entry);
    }
    let reason = match all.devices.len() + adopted().count() {
        0 => all.why_none.clone(),
        1 => "there is one OpenCL device, opencl:0".into(),
        n => format!("there are {n} OpenCL devices, opencl:0 to opencl:{}", n - 1),
    };
    Err(Error::NoDevice { device, reason })
}

pub(super) fn description(index: usize) -> Result<&'static DeviceDescription> {
    entry(index)?.found(Device::OpenCL(index))
}

/// Returns a device's description, without opening the device.
pub(crate) fn info(index: usize) -> Result<&'static DeviceInfo> {
    Ok(&description(index)?.info)
}

pub(crate) fn is_available(index: usize) -> bool {
    entry(index).is_ok_and(|entry| match entry.opened.get() {
        Some(device) => !device.is_lost(),
        None => entry.found(Device::OpenCL(index)).is_ok(),
    })
}

pub(crate) fn opened(index: usize) -> Option<&'static ClDevice> {
    known_entries().nth(index)?.opened.get().copied()
}

/// Calls [`open`] for a device known to be an OpenCL device.
pub(crate) fn open_device(device: Device) -> Result<&'static ClDevice> {
    let Device::OpenCL(index) = device else { unreachable!("work for the CPU goes to the CPU's backend") };
    open(index)
}

/// Returns the device of this index in the order of [`Device::all`], opened at its first use.
pub(crate) fn open(index: usize) -> Result<&'static ClDevice> {
    let entry = entry(index)?;
    if let Some(device) = entry.opened.get() {
        return Ok(device);
    }
    let _messages = log::defer(); // a subscriber may use the device, which needs the lock
    let _one_at_a_time = lock(&entry.opening);
    if let Some(device) = entry.opened.get() {
        return Ok(device);
    }
    let found = entry.found(Device::OpenCL(index))?;
    let _opening = profiler::span(profiler::RecordKind::Open, "clCreateContext", Device::OpenCL(index), 0, 0);
    let device = exit::delay_exit(|| ClDevice::open(index, found).map(|device| entry.store_opened(device)))?;
    device.profile_if_on();
    Ok(device)
}

/// Converts the error of a driver that fails to list its devices or to describe this one.
fn query_error(device: Device, e: &ClError) -> Error {
    let detail = " in several attempts to list the driver's devices: the next use tries again; if that fails too, see the \
                  output of `clinfo`, or select other devices by index, as CLAYSTONE_DEVICES=0:0 (none: only the CPU)";
    Error::OpenCl { device, call: e.call, code: e.name(), detail: detail.into() }
}

/// Queries all drivers. Returns an error if a driver fails to answer and its devices would change the indices.
pub(super) fn discover(choice: &str) -> Result<Discovery, ClError> {
    let none = |why_none: String| Ok(Discovery { devices: Vec::new(), why_none });
    let platforms = match drivers(choice)? {
        Ok(platforms) => platforms,
        Err(why_none) => return none(why_none),
    };
    let choice = Choice::parse(choice);
    let mut devices = Vec::new();
    let mut skipped = String::new();
    for (p, &platform) in platforms.iter().enumerate() {
        let ids = match retry(|| device_ids(platform)) {
            Err(e) if e.is_transient() && choice.depends_on(p, None) => return Err(e),
            Err(e) if e.is_transient() => {
                log::emit(move || {
                    tracing::warn!(platform = p, call = e.call, code = e.name(), "platform skipped");
                });
                continue;
            }
            ids => ids.unwrap_or_default(),
        };
        for (d, &id) in ids.iter().enumerate() {
            let rank_properties = match rank_properties(id) {
                Ok(rank_properties) => rank_properties,
                Err(QueryFailure::Failed(e)) if choice.depends_on(p, Some(d)) => return Err(e),
                Err(QueryFailure::Failed(e)) => {
                    let (call, code) = (e.call, e.name());
                    log::emit(move || tracing::warn!(platform = p, index = d, call, code, "device skipped"));
                    continue;
                }
                Err(QueryFailure::Unusable(why)) => {
                    _ = write!(skipped, " ({p}:{d} {why})");
                    log::emit(move || tracing::warn!(platform = p, index = d, why, "device skipped"));
                    continue;
                }
            };
            let entry = Entry::new(id, (p, d), platform, rank_properties);
            match describe(id, platform, rank_properties) {
                Ok(found) => _ = entry.found.set(found),
                // The device's name is unknown, and an entry of `CLAYSTONE_DEVICES` might be part of the name.
                Err(e) if choice.has_names() && e.is_transient() => return Err(e),
                Err(e) => {
                    let (call, code) = (e.call, e.name());
                    log::emit(move || {
                        tracing::warn!(platform = p, index = d, call, code, "a device could not be described yet");
                    });
                }
            }
            devices.push(entry);
        }
    }
    if devices.is_empty() {
        let count = platforms.len();
        return none(format!(
            "{count} OpenCL platform(s), but none has a usable device{skipped}: {}",
            install_hint(OS)
        ));
    }
    let names = sort(&mut devices);
    let (order, unmatched) = choice.select(&names);
    unmatched.into_iter().for_each(|entry| {
        log::emit(move || tracing::warn!(entry, "an entry of CLAYSTONE_DEVICES matches no device"));
    });
    let choice = choice.text;
    let why_none = format!("CLAYSTONE_DEVICES={choice} matches none of the {} OpenCL device(s) here", devices.len());
    let mut devices: Vec<_> = devices.into_iter().map(Some).collect();
    Ok(Discovery { devices: order.into_iter().filter_map(|i| devices[i].take()).collect(), why_none })
}

/// Sorts the devices, and returns their `platform:index` and their names for [`Choice::select`].
fn sort(devices: &mut [Entry]) -> Vec<((usize, usize), String)> {
    devices.sort_by_key(|d| (rank(d.rank_properties.0), Reverse(d.rank_properties.1), d.platform_index));
    let name = |f: &DeviceDescription| format!("{} {} {}", f.info.name, f.info.vendor, f.platform_name);
    devices.iter().map(|d| (d.platform_index, d.found.get().map(name).unwrap_or_default())).collect()
}

fn no_library(cause: &str, dylib_path: Option<&str>) -> String {
    let place = dylib_path.map_or(String::new(), |p| format!(", and OPENCL_DYLIB_PATH={p}"));
    let names = opencl_libraries(OS).join(", ");
    format!("no OpenCL runtime was found: looked for {names}{place} ({cause}); {}", install_hint(OS))
}

fn no_driver(cause: &str) -> String {
    let (name, place, install) = (opencl_libraries(OS)[0], driver_registry(OS), install_hint(OS));
    format!("the OpenCL library {name} was found, but has no driver ({cause}): {place}; {install}")
}

/// Returns the position of a kind in the order of devices.
fn rank(kind: DeviceKind) -> u8 {
    match kind {
        DeviceKind::DiscreteGpu => 0,
        DeviceKind::IntegratedGpu => 1,
        DeviceKind::Accelerator => 2,
        DeviceKind::Cpu => 3,
    }
}

/// Returns the platforms, or the reason why there are none; an error if the loader fails to answer.
fn drivers(choice: &str) -> Result<Result<Vec<cl_platform_id>, String>, ClError> {
    if choice.trim().eq_ignore_ascii_case("none") {
        return Ok(Err(format!("CLAYSTONE_DEVICES={choice} selects no OpenCL device")));
    }
    if let Err(cause) = functions::load() {
        return Ok(Err(no_library(&cause.to_string(), std::env::var("OPENCL_DYLIB_PATH").ok().as_deref())));
    }
    match retry(platforms) {
        Ok(platforms) if !platforms.is_empty() => Ok(Ok(platforms)),
        Ok(_) => Ok(Err(no_driver("it lists no platform"))),
        Err(e) if e.is_transient() => Err(e),
        Err(e) => Ok(Err(no_driver(e.name()))),
    }
}

/// Returns all platforms, independently of the devices that `CLAYSTONE_DEVICES` selects.
pub(super) fn all_platforms() -> Result<Vec<cl_platform_id>> {
    _ = discovery(); // loads the library, and registers the exit handler
    let device = Device::OpenCL(0);
    let choice = std::env::var("CLAYSTONE_DEVICES").unwrap_or_default();
    drivers(&choice).map_err(|e| query_error(device, &e))?.map_err(|reason| Error::NoDevice { device, reason })
}

fn platforms() -> Result<Vec<cl_platform_id>, ClError> {
    library()?;
    let mut n = 0;
    call!(clGetPlatformIDs(0, ptr::null_mut(), &mut n))?;
    let mut ids = vec![ptr::null_mut(); n as usize];
    if n > 0 {
        call!(clGetPlatformIDs(n, ids.as_mut_ptr(), ptr::null_mut()))?;
    }
    Ok(ids)
}

pub(super) fn device_ids(platform: cl_platform_id) -> Result<Vec<cl_device_id>, ClError> {
    let mut n = 0;
    call!(clGetDeviceIDs(platform, cl::CL_DEVICE_TYPE_ALL, 0, ptr::null_mut(), &mut n))?;
    let mut ids = vec![ptr::null_mut(); n as usize];
    call!(clGetDeviceIDs(platform, cl::CL_DEVICE_TYPE_ALL, n, ids.as_mut_ptr(), ptr::null_mut()))?;
    Ok(ids)
}
