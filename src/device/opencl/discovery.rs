//! Which OpenCL devices there are, and in which order.
//!
//! Every platform is asked at first use. A call that fails is made again a few times; numbers are given out once all that
//! they depend on is known, so that they are the same in every process, and until then each use asks again. Devices that
//! `CLAYSTONE_DEVICES` leaves out by naming places alone are not waited for. Discrete GPUs come first, then integrated ones, other accelerators and
//! CPUs; of a kind the one with more compute units first, equals in the drivers' order. `CLAYSTONE_DEVICES` chooses and
//! orders them itself. `CLAYSTONE_KERNELS=gpu` (or `gpu+fence`) has processors run those of GPUs, for tests.

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

/// The least that kernels need, in work-items of a group and bytes of local memory. Processors have kernels of their own, which
/// take groups of any size and no local memory.
const LEAST_GROUP: u64 = 32;
const LEAST_LOCAL: u64 = 16 << 10;

/// What a driver says a device is.
pub(super) struct Found {
    pub id: cl_device_id,
    pub platform: cl_platform_id,
    pub platform_name: String,
    pub platform_version: String,
    /// Major and minor of the OpenCL C it compiles.
    pub opencl_c: (u32, u32),
    /// Whether it tells what version of NVIDIA's instructions it has, as whatever takes PTX does.
    pub tells_capability: bool,
    pub large_buffers: LargeBuffers,
    pub info: DeviceInfo,
    /// The last thing the driver said through the callback of the device's context.
    pub driver_text: DriverText,
}

/// A device in its place among all, which it keeps for the life of the process.
pub(super) struct Entry {
    id: cl_device_id,
    /// `platform:index`, as CLAYSTONE_DEVICES names it.
    place: (usize, usize),
    platform: cl_platform_id,
    /// Its kind and compute units, which its number depends on.
    standing: (DeviceKind, usize),
    /// What else it is, once it has said so.
    found: OnceLock<Found>,
    /// Opened at first use and kept for the life of the process.
    pub opened: OnceLock<&'static ClDevice>,
    /// Held while opening, so that it happens once.
    pub opening: Mutex<()>,
}

// SAFETY: platform and device ids are process-wide names that OpenCL's thread-safe functions take; root devices are
// never released.
unsafe impl Send for Found {}
// SAFETY: as above.
unsafe impl Sync for Found {}
// SAFETY: as above.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// Why a device did not say what it is.
enum Silent {
    /// A call failed: it may say so later.
    Failed(ClError),
    /// It cannot be used.
    Unusable(String),
}

impl From<ClError> for Silent {
    fn from(e: ClError) -> Silent {
        if e.is_transient() || e.is_fatal() {
            return Silent::Failed(e);
        }
        Silent::Unusable(format!("does not say what it is: {} gives {}", e.call, e.name()))
    }
}

impl Entry {
    /// A device of another's context, which [`discover`] does not list.
    ///
    /// # Errors
    /// Why the device cannot be used; its driver fails to tell.
    pub(super) fn of_others(id: cl_device_id, platform: cl_platform_id) -> Result<Entry, Result<String, ClError>> {
        let standing = standing(id).map_err(|silent| match silent {
            Silent::Failed(e) => Err(e),
            Silent::Unusable(why) => Ok(why),
        })?;
        Ok(Entry::new(id, (usize::MAX, 0), platform, standing))
    }

    fn new(id: cl_device_id, place: (usize, usize), platform: cl_platform_id, standing: (DeviceKind, usize)) -> Entry {
        let (found, opened, opening) = (OnceLock::new(), OnceLock::new(), Mutex::new(()));
        Entry { id, place, platform, standing, found, opened, opening }
    }

    #[cfg(test)]
    pub(super) fn place(&self) -> (usize, usize) {
        self.place
    }

    #[cfg(test)]
    pub(super) fn is_described(&self) -> bool {
        self.found.get().is_some()
    }

    /// What the device is; asked if it has not said so yet.
    pub(super) fn found(&self, device: Device) -> Result<&Found> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        let found = describe(self).map_err(|e| failed(device, &e))?;
        Ok(self.found.get_or_init(|| found))
    }
}

/// Everything found, in order, or why nothing was.
pub(super) struct Discovery {
    pub devices: Vec<Entry>,
    why_none: String,
}

/// Set once the devices are known, or known not to be there: their numbers do not change after that.
static DISCOVERY: OnceLock<Discovery> = OnceLock::new();

/// The process's devices. Where a driver fails to tell of its own, the next use asks again.
fn discovery() -> Result<&'static Discovery, ClError> {
    if let Some(known) = DISCOVERY.get() {
        return Ok(known);
    }
    let _messages = log::defer(); // a subscriber may ask for devices as well
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&ONE_AT_A_TIME);
    if let Some(known) = DISCOVERY.get() {
        return Ok(known);
    }
    let (_under_way, _loading) = (exit::under_way(), exit::registering());
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
                tracing::warn!(call = e.call, code = e.name(), "which OpenCL devices there are is not known");
            });
            Err(e)
        }
    }
}

/// The entries of the devices that are known, in order, without asking a driver: adopted ones come last.
pub(super) fn known() -> impl Iterator<Item = &'static Entry> {
    DISCOVERY.get().map_or(&[][..], |known| &known.devices).iter().chain(adopted())
}

/// The devices of other code's contexts, in order of their indices, which follow those of all others. Read without a lock,
/// because the end of the process asks as well.
static ADOPTED: [OnceLock<&'static Entry>; MOST_ADOPTED] = [const { OnceLock::new() }; MOST_ADOPTED];

/// How many devices a process adopts at most.
pub(super) const MOST_ADOPTED: usize = 64;

/// The devices that were adopted.
pub(super) fn adopted() -> impl Iterator<Item = &'static Entry> {
    ADOPTED.iter().map_while(OnceLock::get).copied()
}

/// Adds a device that was adopted. One thread at a time.
pub(super) fn add_adopted(entry: &'static Entry) {
    _ = ADOPTED.iter().find(|free| free.get().is_none()).map(|free| free.set(entry));
}

/// How many devices there are; `None` where a driver fails to tell.
pub(super) fn count() -> Option<usize> {
    discovery().ok().map(|known| known.devices.len() + adopted().count())
}

/// How many devices there are without those that were adopted.
pub(super) fn count_own() -> Result<usize> {
    Ok(discovery().map_err(|e| failed(Device::OpenCL(0), &e))?.devices.len())
}

/// The device of this index, or an error that says what is there instead.
pub(super) fn entry(index: usize) -> Result<&'static Entry> {
    let device = Device::OpenCL(index);
    let all = discovery().map_err(|e| failed(device, &e))?;
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

/// What the device of this index is.
pub(super) fn find(index: usize) -> Result<&'static Found> {
    entry(index)?.found(Device::OpenCL(index))
}

/// A driver that does not say which devices there are, or what this one is.
fn failed(device: Device, e: &ClError) -> Error {
    let detail = " when the driver was asked, several times, which devices there are: the next use asks it again; if that \
                  fails too, see what `clinfo` says, or choose others by their places, as CLAYSTONE_DEVICES=0:0 (none: \
                  only the CPU)";
    Error::OpenCl { device, call: e.call, code: e.name(), detail: detail.into() }
}

/// Asks all drivers. An error where one fails to tell and that would change the numbers of the devices.
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
            Err(e) if e.is_transient() && choice.asks_of(p, None) => return Err(e),
            Err(e) if e.is_transient() => {
                log::emit(move || {
                    tracing::warn!(platform = p, call = e.call, code = e.name(), "platform left out");
                });
                continue;
            }
            ids => ids.unwrap_or_default(),
        };
        for (d, &id) in ids.iter().enumerate() {
            let standing = match standing(id) {
                Ok(standing) => standing,
                Err(Silent::Failed(e)) if choice.asks_of(p, Some(d)) => return Err(e),
                Err(Silent::Failed(e)) => {
                    let (call, code) = (e.call, e.name());
                    log::emit(move || tracing::warn!(platform = p, index = d, call, code, "device left out"));
                    continue;
                }
                Err(Silent::Unusable(why)) => {
                    _ = write!(skipped, " ({p}:{d} {why})");
                    log::emit(move || tracing::warn!(platform = p, index = d, why, "device left out"));
                    continue;
                }
            };
            let entry = Entry::new(id, (p, d), platform, standing);
            match describe(&entry) {
                Ok(found) => _ = entry.found.set(found),
                // Its name may be one that is asked for.
                Err(e) if choice.has_names() && e.is_transient() => return Err(e),
                Err(e) => {
                    let (call, code) = (e.call, e.name());
                    log::emit(move || tracing::warn!(platform = p, index = d, call, code, "a device is not known yet"));
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
        log::emit(move || tracing::warn!(entry, "CLAYSTONE_DEVICES names no device"));
    });
    let choice = choice.text;
    let why_none = format!("CLAYSTONE_DEVICES={choice} matches none of the {} OpenCL device(s) here", devices.len());
    let mut devices: Vec<_> = devices.into_iter().map(Some).collect();
    Ok(Discovery { devices: order.into_iter().filter_map(|i| devices[i].take()).collect(), why_none })
}

/// Puts devices in order. Their places and names for [`Choice::select`].
fn sort(devices: &mut [Entry]) -> Vec<((usize, usize), String)> {
    devices.sort_by_key(|d| (rank(d.standing.0), Reverse(d.standing.1), d.place));
    let name = |f: &Found| format!("{} {} {}", f.info.name, f.info.vendor, f.platform_name);
    devices.iter().map(|d| (d.place, d.found.get().map(name).unwrap_or_default())).collect()
}

fn no_library(cause: &str, dylib_path: Option<&str>) -> String {
    let place = dylib_path.map_or(String::new(), |p| format!(", and OPENCL_DYLIB_PATH={p}"));
    let names = opencl_libraries(OS).join(", ");
    format!("no OpenCL runtime was found: looked for {names}{place} ({cause}); {}", install_hint(OS))
}

fn no_driver(cause: &str) -> String {
    let (name, place, install) = (opencl_libraries(OS)[0], driver_registry(OS), install_hint(OS));
    format!("the OpenCL library {name} is there, but knows no driver ({cause}): {place}; {install}")
}

fn rank(kind: DeviceKind) -> u8 {
    match kind {
        DeviceKind::DiscreteGpu => 0,
        DeviceKind::IntegratedGpu => 1,
        DeviceKind::Accelerator => 2,
        DeviceKind::Cpu => 3,
    }
}

/// The platforms, or why there are none; an error where the loader fails to tell.
fn drivers(choice: &str) -> Result<Result<Vec<cl_platform_id>, String>, ClError> {
    if choice.trim().eq_ignore_ascii_case("none") {
        return Ok(Err(format!("CLAYSTONE_DEVICES={choice} takes no OpenCL device")));
    }
    if let Err(cause) = functions::load() {
        return Ok(Err(no_library(&cause.to_string(), std::env::var("OPENCL_DYLIB_PATH").ok().as_deref())));
    }
    match retry(platforms) {
        Ok(platforms) if !platforms.is_empty() => Ok(Ok(platforms)),
        Ok(_) => Ok(Err(no_driver("it names none"))),
        Err(e) if e.is_transient() => Err(e),
        Err(e) => Ok(Err(no_driver(e.name()))),
    }
}

/// All platforms, whichever of their devices are taken.
pub(super) fn all_platforms() -> Result<Vec<cl_platform_id>> {
    _ = discovery(); // which loads the library as it has to be
    let device = Device::OpenCL(0);
    let choice = std::env::var("CLAYSTONE_DEVICES").unwrap_or_default();
    drivers(&choice).map_err(|e| failed(device, &e))?.map_err(|reason| Error::NoDevice { device, reason })
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

/// What decides about a device's number: whether it can be used, its kind and its compute units.
fn standing(id: cl_device_id) -> Result<(DeviceKind, usize), Silent> {
    let number = |what| retry(|| device_number(id, what));
    for (what, problem) in [
        (cl::CL_DEVICE_AVAILABLE, "is not available"),
        (cl::CL_DEVICE_COMPILER_AVAILABLE, "has no compiler"),
        (cl::CL_DEVICE_ENDIAN_LITTLE, "is big-endian"),
    ] {
        if number(what)? == 0 {
            return Err(Silent::Unusable(problem.into()));
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
        _ => return Err(Silent::Unusable("is of no known type".into())),
    };
    if kind != DeviceKind::Cpu {
        let (group, local) = (number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)?, number(cl::CL_DEVICE_LOCAL_MEM_SIZE)?);
        if let Some(lack) = lack(group, local) {
            return Err(Silent::Unusable(lack));
        }
    }
    Ok((kind, number(cl::CL_DEVICE_MAX_COMPUTE_UNITS)? as usize))
}

/// What a device of such groups and so much local memory lacks, if anything.
fn lack(group: u64, local: u64) -> Option<String> {
    match () {
        _ if group < LEAST_GROUP => {
            Some(format!("has work-groups of {group} work-items, and kernels need {LEAST_GROUP}"))
        }
        _ if local < LEAST_LOCAL => Some(format!("has {local} bytes of local memory, and kernels need {LEAST_LOCAL}")),
        _ => None,
    }
}

fn has_unified_memory(id: cl_device_id) -> Result<bool, ClError> {
    if_known(retry(|| device_number(id, cl::CL_DEVICE_HOST_UNIFIED_MEMORY)))
}

/// Whether the answer is yes; no of a driver of an earlier version, which does not know the query.
fn if_known(answer: Result<u64, ClError>) -> Result<bool, ClError> {
    match answer {
        Err(e) if e.is_transient() => Err(e),
        answer => Ok(answer.unwrap_or(0) != 0),
    }
}

/// Asks a device everything else.
fn describe(entry: &Entry) -> Result<Found, ClError> {
    let (id, platform) = (entry.id, entry.platform);
    let text = |what| retry(|| info!(clGetDeviceInfo(id, what))).map(|b| text(&b));
    let number = |what| retry(|| device_number(id, what));
    let (kind, compute_units) = entry.standing;
    let extensions = text(cl::CL_DEVICE_EXTENSIONS)?;
    let has = |name| extensions.split_whitespace().any(|e| e == name);
    // "OpenCL C 1.2 ..."
    let opencl_c = version(text(cl::CL_DEVICE_OPENCL_C_VERSION)?.trim_start_matches("OpenCL C ")).unwrap_or((1, 1));
    let info = DeviceInfo {
        name: text(cl::CL_DEVICE_NAME)?,
        vendor: text(cl::CL_DEVICE_VENDOR)?,
        driver: text(cl::CL_DRIVER_VERSION)?,
        kind,
        compute_units,
        memory: number(cl::CL_DEVICE_GLOBAL_MEM_SIZE)?,
        largest_buffer: number(cl::CL_DEVICE_MAX_MEM_ALLOC_SIZE)?,
        // The driver answers in bits.
        base_alignment: (number(cl::CL_DEVICE_MEM_BASE_ADDR_ALIGN)? / 8).max(1) as usize,
        fp16: has("cl_khr_fp16"),
        fp64: has("cl_khr_fp64") || if_known(number(cl::CL_DEVICE_DOUBLE_FP_CONFIG))?,
        unified_memory: has_unified_memory(id)?,
        local_memory: number(cl::CL_DEVICE_LOCAL_MEM_SIZE)? as usize,
        max_work_group: number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)? as usize,
    };
    let platform_text = |what| retry(|| info!(clGetPlatformInfo(platform, what))).map(|b| self::text(&b));
    Ok(Found {
        id,
        platform,
        platform_name: platform_text(opencl3::platform::platform::CL_PLATFORM_NAME)?,
        platform_version: platform_text(opencl3::platform::platform::CL_PLATFORM_VERSION)?,
        opencl_c,
        tells_capability: has("cl_nv_device_attribute_query"),
        large_buffers: LargeBuffers::of(&info, &extensions),
        info,
        driver_text: DriverText::default(),
    })
}

/// A number of whatever width the query has.
fn device_number(id: cl_device_id, what: u32) -> Result<u64, ClError> {
    Ok(number_of(&info!(clGetDeviceInfo(id, what))?))
}

pub(super) fn number_of(bytes: &[u8]) -> u64 {
    let mut wide = [0u8; 8];
    let n = bytes.len().min(8);
    wide[..n].copy_from_slice(&bytes[..n]);
    u64::from_le_bytes(wide)
}

/// A driver's string without its terminator and the blanks some pad it with.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

fn version(s: &str) -> Option<(u32, u32)> {
    let (major, rest) = s.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}
