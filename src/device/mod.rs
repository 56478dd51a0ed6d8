//! Devices: where work runs.
//!
//! A [`Device`] is a plain name: the host's processor, or an OpenCL device by its index. The first tensor on a device opens
//! the device, which then stays open until the process ends. A machine without OpenCL is a normal case: [`Device::all`]
//! returns only the CPU, and an operation on an OpenCL device fails with an error that says what to install.
//!
//! Work on a device is asynchronous: an operation returns once its commands are submitted. Commands on the same [`Stream`]
//! run in order. Reading values, cloning and [`Device::synchronize`] wait. This module handles queues and programs, never
//! tensors.
//!
//! # Compiled kernels
//!
//! Compiled kernels, and the measurements of `claystone tune`, are stored in files for later processes. The folder is
//! `CLAYSTONE_CACHE_DIR`, else `$XDG_CACHE_HOME/claystone` (if that path is absolute), else
//! `~/.cache/claystone`, `~/Library/Caches/claystone` (macOS) or `%LOCALAPPDATA%\claystone` (Windows).
//! `CLAYSTONE_CACHE_DIR=off` stores nothing. `CLAYSTONE_CACHE_MAXSIZE` bounds the folder's size in bytes (default 256 MiB);
//! beyond the bound, the least recently used kernels are deleted. `claystone cache` prints the folder's path and size.
//! `claystone cache --clear` deletes the kernels. Files may be deleted at any time. PoCL caches the crate's own kernels
//! itself, in `POCL_CACHE_DIR`.
//!
//! `CLAYSTONE_TUNING` says how many work-group sizes and kernel parameters are timed, per kernel and size class, while the
//! program does its work: `none` (the default), `fast`, `normal`, `wide` or `heavy`. See [`tune`](crate::tune).
//!
//! A compiled kernel is code, so the folder must belong to the user and have mode 0700; claystone creates it that way. A
//! folder to which other users have access is not used, and a `tracing` warning says so once. There is one exception: if
//! other users have no write access and the folder holds nothing but cache files, the mode is set to 0700. A cache file that
//! is damaged, owned by another user, a symbolic link, or made for another kernel is ignored: the kernel is compiled again.

mod capabilities;
pub(crate) mod capture;
pub(crate) mod cpu;
pub(crate) mod dry;
mod hints;
mod info;
pub(crate) mod log;
pub(crate) mod lru;
pub(crate) mod name;
pub(crate) mod opencl;
pub(crate) mod profiler;
pub(crate) mod stream;
pub(crate) mod stream_id;
pub(crate) mod system;

use crate::error::Excerpt;
use crate::{Error, Result};

pub(crate) use crate::sync::{OnDrop, lock, read, write};
pub use capabilities::{Capabilities, FloatSupport, ImageLimits, Platform, SharedVirtualMemory, VectorWidths};
pub(crate) use capture::count_launch;
pub use capture::{ReplayMode, count_launches, total_launches};
pub use hints::{Priority, StreamHints, Throttle};
pub use info::{DeviceInfo, DeviceKind};
pub use name::Device;
#[doc(hidden)]
pub use opencl::read_cache_file;
pub use opencl::{ProgramCache, report_faults_to_any_thread, reported_faults};
pub use stream::{Event, Stream, set_stream, with_stream};
pub use stream_id::StreamId;

const NO_PROGRAMS: &str = "the CPU device has no compiled programs and no context: name an OpenCL device";

impl Device {
    /// Returns every device: the OpenCL devices in order of their index (discrete GPUs, integrated GPUs, accelerators, CPUs),
    /// then the CPU. A device keeps its index for the life of the process. If a driver still fails to list its devices after
    /// several attempts, the result is only the CPU, and the log has a warning; the next call asks the driver again.
    ///
    /// The environment variable `CLAYSTONE_DEVICES` selects and orders the OpenCL devices. It is a comma-separated list of
    /// `platform:index` (in the drivers' numbering) or of parts of names. `CLAYSTONE_DEVICES=0:1,nvidia` selects the
    /// first platform's second device, then every NVIDIA device; `CLAYSTONE_DEVICES=none` matches no name and so selects
    /// none. The variable is read once.
    pub fn all() -> Vec<Device> {
        (0..opencl::count()).map(Device::OpenCL).chain([Device::Cpu]).collect()
    }

    /// Returns the first of [`Device::all`]: the first OpenCL device if there is one, otherwise the CPU.
    ///
    /// If a driver is installed but fails to list its devices, the result is `opencl:0`, so that a program never falls back to
    /// the CPU unnoticed. The first use of `opencl:0` asks the driver again and reports the driver's error.
    pub fn best() -> Device {
        if opencl::may_have_any() { Device::OpenCL(0) } else { Device::Cpu }
    }

    /// True if the device exists and has not been lost to a fault. Does not open the device.
    pub fn is_available(&self) -> bool {
        match *self {
            Device::Cpu => true,
            Device::OpenCL(i) => opencl::is_available(i),
        }
    }

    /// Returns the device's description. Does not open the device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device, [`Error::OpenCl`] if its driver fails to answer; a later call asks again.
    pub fn info(&self) -> Result<DeviceInfo> {
        self.cached_info().cloned()
    }

    /// Returns the device's capabilities in detail, queried anew at each call. Does not open the device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device, [`Error::OpenCl`] if its driver fails to list its devices. A property
    /// that the driver refuses is `None`.
    pub fn capabilities(&self) -> Result<Capabilities> {
        match *self {
            Device::Cpu => Ok(capabilities::cpu()),
            Device::OpenCL(index) => opencl::capabilities(index),
        }
    }

    /// Writes this process's compiled programs for the device, its `claystone tune` measurements and its probe results to one
    /// file. A process that [imports](Self::import_cache) the file compiles none of these programs again, as with MNN's
    /// `setCache` and `updateCache`. Run a step first, so that the step's programs are compiled. Returns the number of programs
    /// in the file.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
    /// Tensor::ones(4, device)?.exp()?.to_vec::<f32>()?;
    /// # let folder = tempfile::tempdir().unwrap();
    /// let file = folder.path().join("kernels.cache");
    /// assert!(device.export_cache(&file)? > 0);
    /// assert!(device.import_cache(&file)? > 0); // in another process, on another machine
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for the CPU device, which has no programs, and for a file that cannot be written;
    /// [`Error::NoDevice`], and the driver's errors.
    pub fn export_cache(&self, path: impl AsRef<std::path::Path>) -> Result<usize> {
        opencl::export_cache(self.opencl("export_cache", NO_PROGRAMS)?, path.as_ref())
    }

    /// Loads a file that [`export_cache`](Self::export_cache) wrote, for this process. Programs are then taken from the file
    /// before the cache folder, and the file's tuning takes effect. Returns the number of programs in the file.
    ///
    /// Programs are code: import only a file that you trust. A checksum finds damage, not malice.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the CPU device, and for a file that cannot be read, is damaged, or was made by another device,
    /// driver or version of claystone: nothing of the file is used then. [`Error::NoDevice`], and the driver's errors.
    pub fn import_cache(&self, path: impl AsRef<std::path::Path>) -> Result<usize> {
        opencl::import_cache(self.opencl("import_cache", NO_PROGRAMS)?, path.as_ref())
    }

    /// Opens the OpenCL device. On the CPU device, returns [`Error::Invalid`] with `reason`.
    pub(crate) fn opencl(self, op: &'static str, reason: &str) -> Result<&'static opencl::ClDevice> {
        match self {
            Device::Cpu => Err(Error::invalid(op, reason)),
            Device::OpenCL(index) => opencl::open(index),
        }
    }

    /// Returns the `cl_context` of an OpenCL device, in which other code can make buffers for
    /// [`Storage::import_cl`](crate::storage::Storage::import_cl). The context lives until the process ends.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the CPU device, [`Error::NoDevice`] if there is no such device, and the driver's errors.
    pub fn cl_context(&self) -> Result<*mut std::ffi::c_void> {
        Ok(self.opencl("cl_context", NO_PROGRAMS)?.context)
    }

    /// Adds a device whose OpenCL context and queue belong to other code; the queue becomes the default stream. The new device is
    /// the last OpenCL device of [`Device::all`]. Compare ArrayFire's `afcl_add_device_context` and OpenCV's `attachContext`.
    /// Buffers of the context become tensors by [`Storage::import_cl`](crate::storage::Storage::import_cl),
    /// and kernels of the other code read tensors' buffers by [`Storage::export_cl`](crate::storage::Storage::export_cl).
    ///
    /// Commands of this crate and of the other code run in enqueue order, without a wait on the host. Other streams of the device
    /// are ordered with the queue as [`Stream`] says. [`Stream::synchronize`] and [`Device::synchronize`] promise to wait for this
    /// crate's commands only. While profiling, commands of the default stream have times if the queue was created with
    /// `CL_QUEUE_PROFILING_ENABLE`. The device has its own allocator, which does not count other memory in the context.
    ///
    /// The context and the queue are retained until the process ends: the caller may release its handles at any time.
    /// The same three handles return the same device again. A process adopts at most 64 devices.
    ///
    /// ```no_run
    /// # use std::ffi::c_void;
    /// # fn handles() -> (*mut c_void, *mut c_void, *mut c_void, *mut c_void) { ([0; 4]).map(std::ptr::without_provenance_mut).into() }
    /// use claystone::{DType, Device, Tensor, storage::Storage};
    /// let (context, device, queue, buffer) = handles(); // of the caller
    /// // SAFETY: the caller's handles, which are not released during the call.
    /// let device = unsafe { Device::adopt(context, device, queue)? };
    /// // SAFETY: the buffer is of that context, and the caller uses it on that queue alone.
    /// let x = Tensor::from_storage(unsafe { Storage::import_cl(device, buffer, 0, 4096)? }, 1024, DType::F32)?;
    /// x.mul_scalar_(2.0)?; // after the commands that the caller enqueued before this call, and before later ones
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a null handle, a device that is not in the context, a queue of another context or device, an
    /// out-of-order queue, a device that cannot run the crate's kernels, and for more than 64 devices. [`Error::OpenCl`] for
    /// the driver's errors.
    ///
    /// # Safety
    /// `context`, `device` and `queue` are a `cl_context`, a `cl_device_id` and a `cl_command_queue` that live during the call
    /// and were made by the OpenCL library that this process loads (`OPENCL_DYLIB_PATH`, else the system's) or by a driver
    /// behind the same ICD loader. If `device` is a sub-device, the caller does not release it before the process ends. Other
    /// code uses tensors' buffers only as [`Storage::export_cl`](crate::storage::Storage::export_cl) allows.
    pub unsafe fn adopt(
        context: *mut std::ffi::c_void,
        device: *mut std::ffi::c_void,
        queue: *mut std::ffi::c_void,
    ) -> Result<Device> {
        opencl::adopt(context, device, queue)
    }

    /// Returns a reference to the cached [`info`](Self::info).
    pub(crate) fn cached_info(self) -> Result<&'static DeviceInfo> {
        match self {
            Device::Cpu => Ok(info::cpu()),
            Device::OpenCL(i) => opencl::info(i),
        }
    }

    /// Measures the rate of copies within the device's memory: bytes read plus bytes written, per second. None if there is no
    /// memory for the buffers, or the driver refuses.
    pub(crate) fn copy_rate(self) -> Option<f64> {
        match self {
            Device::Cpu => Some(cpu::bulk::copy_rate()),
            Device::OpenCL(i) => opencl::open(i).ok()?.copy_rate().ok(),
        }
    }

    /// Waits until all work submitted to the device so far, on every stream, is done. Returns at once on the CPU, whose work is
    /// done when the operation returns.
    ///
    /// # Errors
    /// Invalid operands that a kernel found since the last wait (an index out of range, an integer division by zero),
    /// [`Error::DeviceLost`] after a fault, [`Error::NoDevice`] if there is no such device.
    pub fn synchronize(&self) -> Result<()> {
        match *self {
            Device::Cpu => Ok(()),
            Device::OpenCL(i) => match opencl::opened(i) {
                Some(device) => device.finish(),
                None => opencl::info(i).map(|_| ()),
            },
        }
    }
}

/// Switches command timing on all open devices to the profiler's current state. Waits for the submitted work.
///
/// # Errors
/// The error of the first device that fails; the remaining devices are switched nevertheless.
pub(crate) fn set_profiling() -> Result<()> {
    let set: Vec<Result<()>> = opened().map(|device| device.set_profiling()).collect();
    set.into_iter().collect()
}

/// Waits for all devices. Errors found by kernels stay stored for the next wait, and a lost device counts as done.
pub(crate) fn drain_all() {
    opened().for_each(|device| _ = device.drain());
}

fn opened() -> impl Iterator<Item = &'static opencl::ClDevice> {
    (0..opencl::count()).filter_map(opencl::opened)
}

/// Lists the OpenCL drivers that the loader knows, independently of the devices that `CLAYSTONE_DEVICES` selects.
///
/// ```
/// match claystone::device::platforms() {
///     Ok(platforms) => platforms.iter().for_each(|platform| println!("{:?}", platform.name)),
///     Err(error) => println!("{error}"), // what to install
/// }
/// ```
///
/// # Errors
/// [`Error::NoDevice`] if there is no driver or `CLAYSTONE_DEVICES=none`, with what to install;
/// [`Error::OpenCl`] if the loader fails to list the drivers.
pub fn platforms() -> Result<Vec<Platform>> {
    opencl::platforms()
}

/// Parses the format of Display: `cpu`, `opencl:0`. `opencl` alone means `opencl:0`, and case does not matter.
impl std::str::FromStr for Device {
    type Err = Error;

    fn from_str(s: &str) -> Result<Device> {
        let lower = s.trim().to_ascii_lowercase();
        let index = |i: &str| i.bytes().all(|b| b.is_ascii_digit()).then(|| i.parse().ok()).flatten();
        match lower.split_once(':') {
            None if lower == "cpu" => Some(Device::Cpu),
            None if lower == "opencl" => Some(Device::OpenCL(0)),
            Some(("opencl", i)) => index(i).map(Device::OpenCL),
            _ => None,
        }
        .ok_or_else(|| {
            let reason = format!("'{}' is not a device: write cpu, or opencl:0, opencl:1, ...", Excerpt(s));
            Error::invalid("device", reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_print_and_parse() {
        for device in [Device::Cpu, Device::OpenCL(0), Device::OpenCL(17)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("OpenCL:2".parse::<Device>().unwrap(), Device::OpenCL(2));
        assert_eq!("opencl".parse::<Device>().unwrap(), Device::OpenCL(0));
        assert_eq!(format!("{:>5}", Device::Cpu), "  cpu");
        for bad in ["", "gpu", "cpu:0", "opencl:", "opencl:-1", "opencl:+1", "opencl:x", "opencl:99999999999999999999"]
        {
            let error = bad.parse::<Device>().unwrap_err().to_string();
            assert!(error.contains("opencl:0"), "{bad}: {error}");
        }
    }

    #[test]
    fn launches_are_counted_per_thread_and_nest() {
        let ((_, inner), outer) = count_launches(|| {
            count_launch();
            std::thread::spawn(count_launch).join().unwrap();
            count_launches(count_launch)
        });
        assert_eq!((inner, outer), (1, 2));
    }
}
