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
mod large_buffers;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Mutex, OnceLock};

use opencl3::device as cl;
use opencl3::types::{cl_device_id, cl_platform_id};

use super::context::{ClDevice, DriverText};
use super::driver::{call, info, library};
use super::errors::ClError;
use super::exit;
use super::functions;
use super::retry::retry;
use crate::device::lock;
use crate::device::system::{OS, driver_registry, install_hint, opencl_libraries};
use crate::device::{Device, DeviceInfo, DeviceKind, log};
use crate::{Error, Result};
use choice::Choice;
pub(super) use large_buffers::LargeBuffers;

/// The minimum size of work-groups that kernels need, in work-items. Processors have their own kernels, which run in groups of
/// any size and without local memory.
const MIN_GROUP_ITEMS: u64 = 32;
/// The minimum size of local memory that kernels need, in bytes.
const MIN_LOCAL_BYTES: u64 = 16 << 10;

pub(super) struct DeviceDescription {
    pub id: cl_device_id,
    pub platform: cl_platform_id,
    pub platform_name: String,
    pub platform_version: String,
    /// The major and minor version of OpenCL C that the compiler accepts.
    pub opencl_c: (u32, u32),
    /// True if the device reports the version of NVIDIA's instruction set, as every device that accepts PTX does.
    pub reports_compute_capability: bool,
    pub large_buffers: LargeBuffers,
    pub info: DeviceInfo,
    /// The driver's messages from the callback of the device's context.
    pub driver_text: DriverText,
}

/// A device at its index, which it keeps until the process ends.
pub(super) struct Entry {
    id: cl_device_id,
    /// `platform:index`, as in CLAYSTONE_DEVICES.
    platform_index: (usize, usize),
    platform: cl_platform_id,
    /// The kind and the number of compute units, which decide the index.
    rank_properties: (DeviceKind, usize),
    /// The rest of the description, once the driver has answered.
    found: OnceLock<DeviceDescription>,
    /// Opened at first use, and open until the process ends.
    pub opened: OnceLock<&'static ClDevice>,
    /// Locked while opening, so that the device is opened once.
    pub opening: Mutex<()>,
}

// SAFETY: platform and device ids are process-wide names that OpenCL's thread-safe functions take; root devices are
// never released.
unsafe impl Send for DeviceDescription {}
// SAFETY: as above.
unsafe impl Sync for DeviceDescription {}
// SAFETY: as above.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// The reason why a device has no description.
enum QueryFailure {
    /// A call failed, and may succeed later.
    Failed(ClError),
    /// The device cannot be used.
    Unusable(String),
}

impl From<ClError> for QueryFailure {
    fn from(e: ClError) -> QueryFailure {
        if e.is_transient() || e.is_fatal() {
            return QueryFailure::Failed(e);
        }
        QueryFailure::Unusable(format!("cannot be described: {} returns {}", e.call, e.name()))
    }
}

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
        let found = describe(self).map_err(|e| query_error(device, &e))?;
        Ok(self.found.get_or_init(|| found))
    }
}

/// The devices in order. `why_none` is the reason in errors if there are none.
pub(super) struct Discovery {
    pub devices: Vec<Entry>,
    why_none: String,
}

/// Set once all devices are known, or known not to exist: the indices do not change after that.
static DISCOVERY: OnceLock<Discovery> = OnceLock::new();

/// Returns the process's devices. If a driver fails to list its devices, the next use queries again.
fn discovery() -> Result<&'static Discovery, ClError> {
    if let Some(known) = DISCOVERY.get() {
        return Ok(known);
    }
    let _messages = log::defer(); // a subscriber may list devices as well
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&ONE_AT_A_TIME);
    if let Some(known) = DISCOVERY.get() {
        return Ok(known);
    }
    let (_under_way, _loading) = (exit::delay_exit(), exit::keep_handler_last());
    let choice = std::env::var("CLAYSTONE_DEVICES").unwrap_or_default();
    let found = discover(&choice);
    match found {
        Ok(found) => {
            let known = DISCOVERY.get_or_init(|| found);
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
pub(super) fn known_entries() -> impl Iterator<Item = &'static Entry> {
    DISCOVERY.get().map_or(&[][..], |known| &known.devices).iter().chain(adopted())
}

/// The adopted devices, in order of their indices, which follow those of all other devices. Read without a lock, because the
/// exit handler reads them as well.
static ADOPTED: [OnceLock<&'static Entry>; MAX_ADOPTED] = [const { OnceLock::new() }; MAX_ADOPTED];

pub(super) const MAX_ADOPTED: usize = 64;

pub(super) fn adopted() -> impl Iterator<Item = &'static Entry> {
    ADOPTED.iter().map_while(OnceLock::get).copied()
}

/// Adds an adopted device. Callers serialise the calls.
pub(super) fn add_adopted(entry: &'static Entry) {
    _ = ADOPTED.iter().find(|free| free.get().is_none()).map(|free| free.set(entry));
}

/// Returns the number of devices; `None` if a driver fails to list its devices.
pub(super) fn count() -> Option<usize> {
    discovery().ok().map(|known| known.devices.len() + adopted().count())
}

pub(super) fn count_without_adopted() -> Result<usize> {
    Ok(discovery().map_err(|e| query_error(Device::OpenCL(0), &e))?.devices.len())
}

/// Returns the device of this index, or an error that lists the existing devices.
pub(super) fn entry(index: usize) -> Result<&'static Entry> {
    let device = Device::OpenCL(index);
    let all = discovery().map_err(|e| query_error(device, &e))?;
    if let Some(entry) = all.devices.get(index).or_else(|| adopted().nth(index - all.devices.len())) {
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
            match describe(&entry) {
                Ok(found) => _ = entry.found.set(found),
                // An entry of the choice may be part of this device's name.
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
    _ = discovery(); // loads the library, with its exit handler
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

/// Returns the properties that decide a device's index: whether the device is usable, its kind and its compute units.
fn rank_properties(id: cl_device_id) -> Result<(DeviceKind, usize), QueryFailure> {
    let number = |what| retry(|| device_number(id, what));
    for (what, problem) in [
        (cl::CL_DEVICE_AVAILABLE, "is not available"),
        (cl::CL_DEVICE_COMPILER_AVAILABLE, "has no compiler"),
        (cl::CL_DEVICE_ENDIAN_LITTLE, "is big-endian"),
    ] {
        if number(what)? == 0 {
            return Err(QueryFailure::Unusable(problem.into()));
        }
    }
    let kind = match number(cl::CL_DEVICE_TYPE)? {
        k if k & cl::CL_DEVICE_TYPE_GPU != 0 && has_unified_memory(id)? => DeviceKind::IntegratedGpu,
        k if k & cl::CL_DEVICE_TYPE_GPU != 0 => DeviceKind::DiscreteGpu,
        k if k & cl::CL_DEVICE_TYPE_CPU != 0
            && std::env::var("CLAYSTONE_KERNELS").is_ok_and(|k| k.starts_with("gpu")) =>
        {
            DeviceKind::Accelerator
        }
        k if k & cl::CL_DEVICE_TYPE_CPU != 0 => DeviceKind::Cpu,
        k if k & cl::CL_DEVICE_TYPE_ACCELERATOR != 0 => DeviceKind::Accelerator,
        _ => return Err(QueryFailure::Unusable("is of no known type".into())),
    };
    if kind != DeviceKind::Cpu {
        let (group, local) = (number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)?, number(cl::CL_DEVICE_LOCAL_MEM_SIZE)?);
        if let Some(reason) = unusable_reason(group, local) {
            return Err(QueryFailure::Unusable(reason));
        }
    }
    Ok((kind, number(cl::CL_DEVICE_MAX_COMPUTE_UNITS)? as usize))
}

/// Returns the reason if this work-group size or this size of local memory is too small for kernels.
fn unusable_reason(group: u64, local: u64) -> Option<String> {
    match () {
        _ if group < MIN_GROUP_ITEMS => {
            Some(format!("has work-groups of {group} work-items, and kernels need {MIN_GROUP_ITEMS}"))
        }
        _ if local < MIN_LOCAL_BYTES => {
            Some(format!("has {local} bytes of local memory, and kernels need {MIN_LOCAL_BYTES}"))
        }
        _ => None,
    }
}

fn has_unified_memory(id: cl_device_id) -> Result<bool, ClError> {
    true_if_known(retry(|| device_number(id, cl::CL_DEVICE_HOST_UNIFIED_MEMORY)))
}

/// True if the answer is not zero; false if an older driver does not know the query.
fn true_if_known(answer: Result<u64, ClError>) -> Result<bool, ClError> {
    match answer {
        Err(e) if e.is_transient() => Err(e),
        answer => Ok(answer.unwrap_or(0) != 0),
    }
}

/// Queries the rest of a device's description.
fn describe(entry: &Entry) -> Result<DeviceDescription, ClError> {
    let (id, platform) = (entry.id, entry.platform);
    let text = |what| retry(|| info!(clGetDeviceInfo(id, what))).map(|b| text(&b));
    let number = |what| retry(|| device_number(id, what));
    let (kind, compute_units) = entry.rank_properties;
    let extensions = text(cl::CL_DEVICE_EXTENSIONS)?;
    let has = |name| extensions.split_whitespace().any(|e| e == name);
    // As in "OpenCL C 1.2 ...".
    let opencl_c = version(text(cl::CL_DEVICE_OPENCL_C_VERSION)?.trim_start_matches("OpenCL C ")).unwrap_or((1, 1));
    let info = DeviceInfo {
        name: text(cl::CL_DEVICE_NAME)?,
        vendor: text(cl::CL_DEVICE_VENDOR)?,
        driver: text(cl::CL_DRIVER_VERSION)?,
        kind,
        compute_units,
        memory: number(cl::CL_DEVICE_GLOBAL_MEM_SIZE)?,
        largest_buffer: number(cl::CL_DEVICE_MAX_MEM_ALLOC_SIZE)?,
        // The driver's unit is bits.
        base_alignment: (number(cl::CL_DEVICE_MEM_BASE_ADDR_ALIGN)? / 8).max(1) as usize,
        fp16: has("cl_khr_fp16"),
        fp64: has("cl_khr_fp64") || true_if_known(number(cl::CL_DEVICE_DOUBLE_FP_CONFIG))?,
        unified_memory: has_unified_memory(id)?,
        local_memory: number(cl::CL_DEVICE_LOCAL_MEM_SIZE)? as usize,
        max_work_group: number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)? as usize,
    };
    let platform_text = |what| retry(|| info!(clGetPlatformInfo(platform, what))).map(|b| self::text(&b));
    Ok(DeviceDescription {
        id,
        platform,
        platform_name: platform_text(opencl3::platform::platform::CL_PLATFORM_NAME)?,
        platform_version: platform_text(opencl3::platform::platform::CL_PLATFORM_VERSION)?,
        opencl_c,
        reports_compute_capability: has("cl_nv_device_attribute_query"),
        large_buffers: LargeBuffers::for_device(&info, &extensions),
        info,
        driver_text: DriverText::default(),
    })
}

/// Returns the number that a query returns, of any width.
fn device_number(id: cl_device_id, what: u32) -> Result<u64, ClError> {
    Ok(decode_number(&info!(clGetDeviceInfo(id, what))?))
}

/// Converts a little-endian number of up to 8 bytes.
pub(super) fn decode_number(bytes: &[u8]) -> u64 {
    let mut wide = [0u8; 8];
    let n = bytes.len().min(8);
    wide[..n].copy_from_slice(&bytes[..n]);
    u64::from_le_bytes(wide)
}

/// Converts a driver's string, without the terminator and the blanks with which some drivers pad strings.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

fn version(s: &str) -> Option<(u32, u32)> {
    let (major, rest) = s.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}
