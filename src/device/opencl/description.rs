//! The properties that a driver reports about a device, and the messages that the driver passes to the context.

use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, MutexGuard};

use opencl3::device as cl;
use opencl3::types::{cl_device_id, cl_platform_id};

use super::driver::{info, send_and_sync};
use super::errors::ClError;
use super::retry::retry;
use crate::device::{DeviceInfo, DeviceKind, log};
use crate::sync::lock;

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

send_and_sync!(DeviceDescription);

/// The reason why a device has no description.
pub(super) enum QueryFailure {
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

/// Messages that the driver passes to the callback of a context. The driver calls the callback at any time, also inside a
/// call made under one of this crate's locks. A `tracing` subscriber must not run there, so the messages are logged later.
#[derive(Default)]
pub(super) struct DriverText {
    messages: Mutex<Messages>,
    is_unlogged: AtomicBool,
}

/// The driver's last message, which the next error quotes, and the messages to log.
#[derive(Default)]
struct Messages {
    last: String,
    unlogged: Vec<String>,
}

impl DriverText {
    /// The maximum number of messages that wait to be logged.
    const MAX_UNLOGGED: usize = 64;

    fn messages(&self) -> MutexGuard<'_, Messages> {
        lock(&self.messages)
    }

    fn push(&self, text: String) {
        let mut messages = self.messages();
        if messages.unlogged.len() < Self::MAX_UNLOGGED {
            messages.unlogged.push(text.clone());
        }
        messages.last = text;
        self.is_unlogged.store(true, Release);
    }

    /// Logs the messages since the last call. Not to be called under a queue's lock.
    pub(super) fn log(&self) {
        if self.is_unlogged.load(Relaxed) && self.is_unlogged.swap(false, Acquire) {
            let unlogged = mem::take(&mut self.messages().unlogged);
            unlogged.into_iter().for_each(|text| log::emit(move || tracing::warn!(text, "OpenCL driver")));
        }
    }

    /// Takes the end of an error message: the number of an unnamed code, and the driver's last message.
    pub(super) fn detail(&self, e: &ClError) -> String {
        self.log();
        let code = if e.name() == "UNKNOWN_ERROR" { format!(" ({})", e.code) } else { String::new() };
        let text = mem::take(&mut self.messages().last);
        if text.is_empty() { code } else { format!("{code}: {}", text.trim()) }
    }
}

/// Receives the messages that the driver passes to the callback of a context.
pub(super) extern "C" fn notify(text: *const c_char, _: *const c_void, _: usize, user: *mut c_void) {
    if text.is_null() || user.is_null() {
        return;
    }
    // SAFETY: `user` is the DriverText given at clCreateContext, which is never released; `text` is a string that lives
    // during the call.
    let (driver_text, text) = unsafe { (&*user.cast::<DriverText>(), CStr::from_ptr(text)) };
    driver_text.push(text.to_string_lossy().into_owned());
}

/// The method of requesting a buffer larger than the driver's promised maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LargeBuffers {
    /// As for any other buffer.
    Plain,
    /// With Intel's flag; programs are then built with 64-bit offsets.
    Intel,
    /// With Qualcomm's property.
    Qualcomm,
}

/// Returns the properties that decide a device's index: whether the device is usable, its kind and its compute units.
pub(super) fn rank_properties(id: cl_device_id) -> Result<(DeviceKind, usize), QueryFailure> {
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
pub(super) fn unusable_reason(group: u64, local: u64) -> Option<String> {
    if group < MIN_GROUP_ITEMS {
        return Some(format!("has work-groups of {group} work-items, and kernels need {MIN_GROUP_ITEMS}"));
    }
    let too_little = || format!("has {local} bytes of local memory, and kernels need {MIN_LOCAL_BYTES}");
    (local < MIN_LOCAL_BYTES).then(too_little)
}

fn has_unified_memory(id: cl_device_id) -> Result<bool, ClError> {
    true_if_known(retry(|| device_number(id, cl::CL_DEVICE_HOST_UNIFIED_MEMORY)))
}

/// True if the answer is not zero; false if an older driver does not know the query. A transient error is returned.
fn true_if_known(answer: Result<u64, ClError>) -> Result<bool, ClError> {
    match answer {
        Err(e) if e.is_transient() => Err(e),
        answer => Ok(answer.unwrap_or(0) != 0),
    }
}

/// Queries the rest of a device's description.
pub(super) fn describe(
    id: cl_device_id,
    platform: cl_platform_id,
    (kind, compute_units): (DeviceKind, usize),
) -> Result<DeviceDescription, ClError> {
    let text = |what| retry(|| info!(clGetDeviceInfo(id, what))).map(|b| text(&b));
    let number = |what| retry(|| device_number(id, what));
    let extensions = text(cl::CL_DEVICE_EXTENSIONS)?;
    let has = |name| extensions.split_whitespace().any(|e| e == name);
    // The driver's answer begins with "OpenCL C 1.2", for example.
    let opencl_c = version(text(cl::CL_DEVICE_OPENCL_C_VERSION)?.trim_start_matches("OpenCL C ")).unwrap_or((1, 1));
    let info = DeviceInfo {
        name: text(cl::CL_DEVICE_NAME)?,
        vendor: text(cl::CL_DEVICE_VENDOR)?,
        driver: text(cl::CL_DRIVER_VERSION)?,
        kind,
        compute_units,
        memory: number(cl::CL_DEVICE_GLOBAL_MEM_SIZE)?,
        largest_buffer: number(cl::CL_DEVICE_MAX_MEM_ALLOC_SIZE)?,
        // The driver reports the alignment in bits.
        base_alignment: (number(cl::CL_DEVICE_MEM_BASE_ADDR_ALIGN)? / 8).max(1) as usize,
        fp16: has("cl_khr_fp16"),
        fp64: has("cl_khr_fp64") || true_if_known(number(cl::CL_DEVICE_DOUBLE_FP_CONFIG))?,
        unified_memory: has_unified_memory(id)?,
        local_memory: number(cl::CL_DEVICE_LOCAL_MEM_SIZE)? as usize,
        max_work_group: number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)? as usize,
    };
    let large_buffers = match kind {
        _ if has("cl_qcom_large_buffer") => LargeBuffers::Qualcomm,
        // Processors are excluded: their drivers refuse the flag, and "GenuineIntel" is the vendor of processors.
        DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu if info.vendor.contains("Intel") => LargeBuffers::Intel,
        _ => LargeBuffers::Plain,
    };
    let platform_text = |what| retry(|| info!(clGetPlatformInfo(platform, what))).map(|b| self::text(&b));
    Ok(DeviceDescription {
        id,
        platform,
        platform_name: platform_text(opencl3::platform::platform::CL_PLATFORM_NAME)?,
        platform_version: platform_text(opencl3::platform::platform::CL_PLATFORM_VERSION)?,
        opencl_c,
        reports_compute_capability: has("cl_nv_device_attribute_query"),
        large_buffers,
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

pub(super) fn version(s: &str) -> Option<(u32, u32)> {
    let (major, rest) = s.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}
