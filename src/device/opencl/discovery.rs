//! Which OpenCL devices there are, and in which order.
//!
//! Every platform is asked once, at first use. Discrete GPUs come first, then integrated ones, other accelerators and
//! CPUs; of a kind the one with more compute units first, equals in the drivers' order. `CLAYSTONE_DEVICES` chooses and
//! orders them itself. `CLAYSTONE_KERNELS=gpu` has processors run the kernels of GPUs, to test those where there is none.

use std::cmp::Reverse;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Mutex, OnceLock};

use opencl3::device as cl;
use opencl3::types::{cl_device_id, cl_platform_id};

use super::context::ClDevice;
use super::driver::{call, runtime};
use super::errors::ClError;
use crate::device::{Device, DeviceInfo, DeviceKind};
use crate::{Error, Result};

/// What to install where nothing is found.
const INSTALL: &str = "install your GPU vendor's driver, or for the processor PoCL: \
                       `apt-get install pocl-opencl-icd ocl-icd-libopencl1`";

/// A device that a driver reported.
pub(super) struct Found {
    pub id: cl_device_id,
    /// `platform:index`, as CLAYSTONE_DEVICES names it.
    pub place: (usize, usize),
    pub platform: cl_platform_id,
    pub platform_name: String,
    pub platform_version: String,
    /// Major and minor of the OpenCL C it compiles.
    pub opencl_c: (u32, u32),
    /// Whether it tells what version of NVIDIA's instructions it has, as whatever takes PTX does.
    pub tells_capability: bool,
    pub info: DeviceInfo,
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

/// Everything found, in order, or why nothing was.
pub(super) struct Discovery {
    pub devices: Vec<Found>,
    pub why_none: String,
}

/// The process's devices. Looked for once.
pub(super) fn discovery() -> &'static Discovery {
    static DISCOVERY: OnceLock<Discovery> = OnceLock::new();
    DISCOVERY.get_or_init(|| {
        let choice = std::env::var("CLAYSTONE_DEVICES").unwrap_or_default();
        let discovery = discover(&choice);
        tracing::debug!(devices = discovery.devices.len(), why_none = discovery.why_none, "OpenCL discovery");
        discovery
    })
}

/// The device of this index, or an error that says what is there instead.
pub(super) fn find(index: usize) -> Result<&'static Found> {
    let all = discovery();
    all.devices.get(index).ok_or_else(|| Error::NoDevice {
        device: Device::OpenCL(index),
        reason: match all.devices.len() {
            0 => all.why_none.clone(),
            1 => "there is one OpenCL device, opencl:0".into(),
            n => format!("there are {n} OpenCL devices, opencl:0 to opencl:{}", n - 1),
        },
    })
}

fn discover(choice: &str) -> Discovery {
    let none = |why_none: String| Discovery { devices: Vec::new(), why_none };
    if let Err(cause) = cl3::load_library() {
        return none(no_library(&cause.to_string(), std::env::var("OPENCL_DYLIB_PATH").ok().as_deref()));
    }
    let platforms = match platforms() {
        Ok(p) if !p.is_empty() => p,
        Ok(_) => return none(no_driver("it names none")),
        Err(e) => return none(no_driver(e.name())),
    };
    let mut devices = Vec::new();
    let mut skipped = String::new();
    for (p, &platform) in platforms.iter().enumerate() {
        for (d, &id) in device_ids(platform).unwrap_or_default().iter().enumerate() {
            match describe((p, d), platform, id) {
                Ok(found) => devices.push(found),
                Err(why) => _ = write!(skipped, " ({p}:{d} {why})"),
            }
        }
    }
    devices.sort_by_key(|f| (rank(f.info.kind), Reverse(f.info.compute_units), f.place));
    if devices.is_empty() {
        return none(format!(
            "{} OpenCL platform(s), but none has a usable device{skipped}: {INSTALL}",
            platforms.len()
        ));
    }
    let names: Vec<_> =
        devices.iter().map(|f| (f.place, format!("{} {} {}", f.info.name, f.info.vendor, f.platform_name))).collect();
    let (order, unmatched) = select(choice, &names);
    for entry in &unmatched {
        tracing::warn!(entry, "CLAYSTONE_DEVICES names no device");
    }
    let why_none = format!("CLAYSTONE_DEVICES={choice} matches none of the {} OpenCL device(s) here", devices.len());
    let mut devices: Vec<_> = devices.into_iter().map(Some).collect();
    Discovery { devices: order.into_iter().filter_map(|i| devices[i].take()).collect(), why_none }
}

fn no_library(cause: &str, dylib_path: Option<&str>) -> String {
    let place = dylib_path.map_or(String::new(), |p| format!(", and OPENCL_DYLIB_PATH={p}"));
    format!("no OpenCL runtime was found: looked for the ICD loader libOpenCL.so.1{place} ({cause}); {INSTALL}")
}

fn no_driver(cause: &str) -> String {
    format!(
        "the ICD loader libOpenCL.so.1 is there, but knows no driver ({cause}): looked in /etc/OpenCL/vendors \
         (OCL_ICD_VENDORS overrides); {INSTALL}"
    )
}

fn rank(kind: DeviceKind) -> u8 {
    match kind {
        DeviceKind::DiscreteGpu => 0,
        DeviceKind::IntegratedGpu => 1,
        DeviceKind::Accelerator => 2,
        DeviceKind::Cpu => 3,
    }
}

/// Indices into `names` in the order that `choice` asks for, each once, and the entries that match nothing.
/// An entry is `platform:index` or part of a name, in any case. An empty choice is all, as they are.
fn select(choice: &str, names: &[((usize, usize), String)]) -> (Vec<usize>, Vec<String>) {
    let entries: Vec<&str> = choice.split(',').map(str::trim).filter(|e| !e.is_empty()).collect();
    if entries.is_empty() {
        return ((0..names.len()).collect(), Vec::new());
    }
    let (mut order, mut unmatched) = (Vec::new(), Vec::new());
    for entry in entries {
        let place = entry.split_once(':').and_then(|(p, d)| Some((p.parse().ok()?, d.parse().ok()?)));
        let part = entry.to_lowercase();
        let mut hit = false;
        for (i, (at, name)) in names.iter().enumerate() {
            if place.map_or_else(|| name.to_lowercase().contains(&part), |p: (usize, usize)| p == *at) {
                hit = true;
                if !order.contains(&i) {
                    order.push(i);
                }
            }
        }
        if !hit {
            unmatched.push(entry.to_owned());
        }
    }
    (order, unmatched)
}

fn platforms() -> Result<Vec<cl_platform_id>, ClError> {
    runtime()?;
    let mut n = 0;
    call!(clGetPlatformIDs(0, ptr::null_mut(), &mut n))?;
    let mut ids = vec![ptr::null_mut(); n as usize];
    if n > 0 {
        call!(clGetPlatformIDs(n, ids.as_mut_ptr(), ptr::null_mut()))?;
    }
    Ok(ids)
}

fn device_ids(platform: cl_platform_id) -> Result<Vec<cl_device_id>, ClError> {
    let mut n = 0;
    call!(clGetDeviceIDs(platform, cl::CL_DEVICE_TYPE_ALL, 0, ptr::null_mut(), &mut n))?;
    let mut ids = vec![ptr::null_mut(); n as usize];
    call!(clGetDeviceIDs(platform, cl::CL_DEVICE_TYPE_ALL, n, ids.as_mut_ptr(), ptr::null_mut()))?;
    Ok(ids)
}

/// Asks a device everything; `Err` says why it cannot be used.
fn describe(place: (usize, usize), platform: cl_platform_id, id: cl_device_id) -> Result<Found, String> {
    let text = |what| device_bytes(id, what).map(|b| text(&b)).map_err(|e| format!("{} {}", e.call, e.name()));
    let number = |what| device_number(id, what).map_err(|e| format!("{} {}", e.call, e.name()));
    for (what, problem) in [
        (cl::CL_DEVICE_AVAILABLE, "is not available"),
        (cl::CL_DEVICE_COMPILER_AVAILABLE, "has no compiler"),
        (cl::CL_DEVICE_ENDIAN_LITTLE, "is big-endian"),
    ] {
        if number(what)? == 0 {
            return Err(problem.into());
        }
    }
    let (kind, unified) = (number(cl::CL_DEVICE_TYPE)?, number(cl::CL_DEVICE_HOST_UNIFIED_MEMORY).unwrap_or(0) != 0);
    let kind = match kind {
        k if k & cl::CL_DEVICE_TYPE_GPU != 0 && unified => DeviceKind::IntegratedGpu,
        k if k & cl::CL_DEVICE_TYPE_GPU != 0 => DeviceKind::DiscreteGpu,
        // For testing the kernels of GPUs where there is none.
        k if k & cl::CL_DEVICE_TYPE_CPU != 0 && std::env::var("CLAYSTONE_KERNELS").is_ok_and(|k| k == "gpu") => {
            DeviceKind::Accelerator
        }
        k if k & cl::CL_DEVICE_TYPE_CPU != 0 => DeviceKind::Cpu,
        k if k & cl::CL_DEVICE_TYPE_ACCELERATOR != 0 => DeviceKind::Accelerator,
        _ => return Err("is of no known type".into()),
    };
    let extensions = text(cl::CL_DEVICE_EXTENSIONS)?;
    let has = |name| extensions.split_whitespace().any(|e| e == name);
    // "OpenCL C 1.2 ..."
    let opencl_c = version(text(cl::CL_DEVICE_OPENCL_C_VERSION)?.trim_start_matches("OpenCL C ")).unwrap_or((1, 1));
    let info = DeviceInfo {
        name: text(cl::CL_DEVICE_NAME)?,
        vendor: text(cl::CL_DEVICE_VENDOR)?,
        driver: text(cl::CL_DRIVER_VERSION)?,
        kind,
        compute_units: number(cl::CL_DEVICE_MAX_COMPUTE_UNITS)? as usize,
        memory: number(cl::CL_DEVICE_GLOBAL_MEM_SIZE)?,
        largest_buffer: number(cl::CL_DEVICE_MAX_MEM_ALLOC_SIZE)?,
        // The driver answers in bits.
        base_alignment: (number(cl::CL_DEVICE_MEM_BASE_ADDR_ALIGN)? / 8).max(1) as usize,
        fp16: has("cl_khr_fp16"),
        fp64: has("cl_khr_fp64") || number(cl::CL_DEVICE_DOUBLE_FP_CONFIG).is_ok_and(|c| c != 0),
        unified_memory: unified,
        local_memory: number(cl::CL_DEVICE_LOCAL_MEM_SIZE)? as usize,
        max_work_group: number(cl::CL_DEVICE_MAX_WORK_GROUP_SIZE)? as usize,
    };
    let platform_text = |what| platform_bytes(platform, what).map(|b| self::text(&b)).unwrap_or_default();
    Ok(Found {
        id,
        place,
        platform,
        platform_name: platform_text(opencl3::platform::platform::CL_PLATFORM_NAME),
        platform_version: platform_text(opencl3::platform::platform::CL_PLATFORM_VERSION),
        opencl_c,
        tells_capability: has("cl_nv_device_attribute_query"),
        info,
        opened: OnceLock::new(),
        opening: Mutex::new(()),
    })
}

fn device_bytes(id: cl_device_id, what: u32) -> Result<Vec<u8>, ClError> {
    let mut n = 0;
    call!(clGetDeviceInfo(id, what, 0, ptr::null_mut(), &mut n))?;
    let mut bytes = vec![0u8; n];
    call!(clGetDeviceInfo(id, what, n, bytes.as_mut_ptr().cast::<c_void>(), ptr::null_mut()))?;
    Ok(bytes)
}

/// A number of whatever width the query has.
fn device_number(id: cl_device_id, what: u32) -> Result<u64, ClError> {
    let bytes = device_bytes(id, what)?;
    let mut wide = [0u8; 8];
    let n = bytes.len().min(8);
    wide[..n].copy_from_slice(&bytes[..n]);
    Ok(u64::from_le_bytes(wide))
}

fn platform_bytes(id: cl_platform_id, what: u32) -> Result<Vec<u8>, ClError> {
    let mut n = 0;
    call!(clGetPlatformInfo(id, what, 0, ptr::null_mut(), &mut n))?;
    let mut bytes = vec![0u8; n];
    call!(clGetPlatformInfo(id, what, n, bytes.as_mut_ptr().cast::<c_void>(), ptr::null_mut()))?;
    Ok(bytes)
}

/// A driver's string without its terminator and the blanks some pad it with.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

fn version(s: &str) -> Option<(u32, u32)> {
    let (major, rest) = s.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<((usize, usize), String)> {
        vec![
            ((1, 0), "NVIDIA H200 NVIDIA Corporation NVIDIA CUDA".into()),
            ((0, 0), "pthread-Xeon GenuineIntel Portable Computing Language".into()),
            ((0, 1), "basic GenuineIntel Portable Computing Language".into()),
        ]
    }

    #[test]
    fn choice_by_place_and_by_name() {
        let pick = |choice| select(choice, &names());
        assert_eq!(pick("").0, [0, 1, 2]);
        assert_eq!(pick(" , ").0, [0, 1, 2]);
        assert_eq!(pick("0:1").0, [2]);
        assert_eq!(pick("0:1, h200").0, [2, 0]);
        assert_eq!(pick("portable").0, [1, 2]);
        assert_eq!(pick("basic,Portable,0:0").0, [2, 1], "each device once, where it was first named");
        assert_eq!(pick("0:7,xyz,basic"), (vec![2], vec!["0:7".to_owned(), "xyz".to_owned()]));
        assert!(pick("none").0.is_empty());
    }

    #[test]
    fn discrete_before_integrated_before_cpu() {
        use DeviceKind::*;
        let mut kinds = [Cpu, Accelerator, IntegratedGpu, DiscreteGpu];
        kinds.sort_by_key(|&k| rank(k));
        assert_eq!(kinds, [DiscreteGpu, IntegratedGpu, Accelerator, Cpu]);
    }

    #[test]
    fn messages_say_what_was_looked_for_and_what_to_install() {
        for message in [no_library("cannot open", Some("/nonexistent")), no_driver("CL_PLATFORM_NOT_FOUND_KHR")] {
            for part in ["libOpenCL.so.1", "ICD", "pocl-opencl-icd", "ocl-icd-libopencl1"] {
                assert!(message.contains(part), "{message}");
            }
        }
        assert!(no_library("x", Some("/nonexistent")).contains("/nonexistent"));
    }

    #[test]
    fn drivers_strings() {
        assert_eq!(text(b"  a b \0"), "a b");
        assert_eq!(version("1.2 PoCL"), Some((1, 2)));
        assert_eq!(version("3.0"), Some((3, 0)));
        assert_eq!(version("x"), None);
    }
}
