//! Where work runs.
//!
//! A [`Device`] is a plain name: the host's processor, or an OpenCL device by its index. Naming one opens nothing; the
//! first tensor on it does, and it stays open as long as the process lives. No OpenCL at all is a normal state:
//! [`Device::all`] is then just the CPU, and asking for an OpenCL device gives an error that says what to install.
//!
//! Work on a device is asynchronous: an operation returns when it is submitted, in order with everything before it on
//! the same [`Stream`]. Reading values, cloning and [`Device::synchronize`] wait. This room knows queues and programs,
//! never tensors.
//!
//! # Compiled kernels
//!
//! What is compiled for a device, and what `claystone tune` measures on it, is kept in files for later processes: in the
//! folder `CLAYSTONE_CACHE_DIR`, else in `$XDG_CACHE_HOME/claystone` (where that is an absolute path), else in
//! `~/.cache/claystone`, `~/Library/Caches/claystone` (macOS) or `%LOCALAPPDATA%\claystone` (Windows).
//! `CLAYSTONE_CACHE_DIR=off` keeps none. Kernels may take `CLAYSTONE_CACHE_MAXSIZE` bytes, 256 MiB
//! unless set; beyond that those go that were not used for longest. `claystone cache` prints where they are and how large,
//! `claystone cache --clear` removes them; so may anybody, at any time. PoCL keeps the crate's own kernels itself, in
//! `POCL_CACHE_DIR`.
//!
//! `CLAYSTONE_TUNING` says how much is tried to find out which sizes of work-groups and parameters suit each kernel at each
//! class of sizes, while it does its work: `none` (the default), `fast`, `normal`, `wide` or `heavy`. See
//! [`tune`](crate::tune).
//!
//! As a compiled kernel is code, the folder has to be the user's own with mode 0700, as which it is made. One that others
//! may enter is not used, and a warning (through `tracing`) says so once; but if others could only read, and nothing else
//! is in there, it is closed to them. What a file holds that is damaged, another user's, a link or the file of another
//! kernel is compiled anew.

mod capabilities;
pub(crate) mod capture;
pub(crate) mod cpu;
mod hints;
mod info;
mod launches;
pub(crate) mod level;
mod lock;
pub(crate) mod log;
pub(crate) mod lru;
mod name;
pub(crate) mod opencl;
pub(crate) mod profiler;
pub(crate) mod stream;
pub(crate) mod system;

use crate::error::Excerpt;
use crate::{Error, Result};

pub use capabilities::{Capabilities, FloatSupport, ImageLimits, Platform, SharedVirtualMemory, VectorWidths};
pub use capture::ReplayMode;
pub use hints::{Priority, StreamHints, Throttle};
pub use info::{DeviceInfo, DeviceKind};
pub(crate) use launches::count_launch;
pub use launches::count_launches;
pub(crate) use lock::lock;
pub use name::Device;
#[doc(hidden)]
pub use opencl::read_cache_file;
pub use opencl::{ProgramCache, report_faults_to_any_thread, reported_faults};
pub use stream::{Event, Stream, StreamId, set_stream, with_stream};

impl Device {
    /// Every device: the OpenCL devices in order of their index (discrete GPUs, integrated GPUs, accelerators, CPUs),
    /// then the CPU. A device keeps its index as long as the process lives. Where a driver fails to tell which devices it
    /// has, after several attempts, there is only the CPU and a warning in the log; the next call asks again.
    ///
    /// The environment variable `CLAYSTONE_DEVICES` chooses and orders the OpenCL devices: a list, separated by commas,
    /// of `platform:index` (as the drivers count them) or of parts of names. `CLAYSTONE_DEVICES=0:1,nvidia` takes the
    /// first platform's second device, then everything by NVIDIA; `CLAYSTONE_DEVICES=none`, as nothing has that name,
    /// takes none. It is read once.
    pub fn all() -> Vec<Device> {
        (0..opencl::count()).map(Device::OpenCL).chain([Device::Cpu]).collect()
    }

    /// The first of [`Device::all`]: the first OpenCL device where there is one, otherwise the CPU. Where a driver is there
    /// but fails to tell which devices it has, `opencl:0`, so that nobody computes on the CPU without knowing: the first
    /// use asks the driver again, and what it then fails with is the error of that use.
    pub fn best() -> Device {
        if opencl::may_have_any() { Device::OpenCL(0) } else { Device::Cpu }
    }

    /// Whether the device exists and has not been lost to a fault. Opens nothing.
    pub fn is_available(&self) -> bool {
        match *self {
            Device::Cpu => true,
            Device::OpenCL(i) => opencl::is_available(i),
        }
    }

    /// What the device is and has. Opens nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if it is not there, [`Error::OpenCl`] where its driver fails to tell; a later call asks again.
    pub fn info(&self) -> Result<DeviceInfo> {
        self.known().cloned()
    }

    /// What the device can do in detail: it is asked anew each time. Opens nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if it is not there, [`Error::OpenCl`] where its driver fails to tell which devices it has. What it
    /// refuses of a single property is `None`.
    pub fn capabilities(&self) -> Result<Capabilities> {
        match *self {
            Device::Cpu => Ok(capabilities::cpu()),
            Device::OpenCL(index) => opencl::capabilities(index),
        }
    }

    /// Writes what this process has compiled and found out for the device to one file: its programs, what `claystone tune`
    /// measured, and answers of the device to probes. A process that [imports](Self::import_cache) it compiles none of these
    /// programs again: MNN's `setCache` and `updateCache`. Run a step first, so that its programs are there. Says how many
    /// programs the file has.
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
    /// [`Error::NoDevice`], and what the driver refuses.
    pub fn export_cache(&self, path: impl AsRef<std::path::Path>) -> Result<usize> {
        self.opencl("export_cache")?.export_cache(path.as_ref())
    }

    /// Takes over what [`export_cache`](Self::export_cache) wrote, for this process: programs come from there before they come
    /// from the cache's folder, and the tuning is in force from now on. Says how many programs the file has.
    ///
    /// Programs are code: import only a file that you trust. A checksum finds damage, not malice.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the CPU device, and for a file that cannot be read, is damaged, or is of another device, driver or
    /// version of claystone: nothing of it is used then. [`Error::NoDevice`], and what the driver refuses.
    pub fn import_cache(&self, path: impl AsRef<std::path::Path>) -> Result<usize> {
        self.opencl("import_cache")?.import_cache(path.as_ref())
    }

    fn opencl(self, op: &'static str) -> Result<&'static opencl::ClDevice> {
        match self {
            Device::Cpu => {
                let reason = "the CPU device has no compiled programs and no context: name an OpenCL device";
                Err(Error::invalid(op, reason))
            }
            Device::OpenCL(index) => opencl::open(index),
        }
    }

    /// The `cl_context` of an OpenCL device, for other code that makes buffers for
    /// [`Storage::import_cl`](crate::storage::Storage::import_cl). It lives until the process ends.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the CPU device, [`Error::NoDevice`] if the device is not there, and what the driver refuses.
    pub fn cl_context(&self) -> Result<*mut std::ffi::c_void> {
        Ok(self.opencl("cl_context")?.context())
    }

    /// A device of an OpenCL context of other code, whose default stream is a queue of that code: a new device, the last
    /// OpenCL device of [`Device::all`], for programs that use OpenCL already (ArrayFire's `afcl_add_device_context`, OpenCV's
    /// `attachContext`). Buffers of the context become tensors by [`Storage::import_cl`](crate::storage::Storage::import_cl),
    /// and kernels of the other code take tensors' buffers ([`Storage::export_cl`](crate::storage::Storage::export_cl)).
    ///
    /// Commands of both sides run in the order in which they were enqueued, without a wait of the host; other streams of the
    /// device are ordered with the queue as [`Stream`] says. [`Stream::synchronize`] and [`Device::synchronize`] promise to wait
    /// for this crate's commands only. While something is profiled, commands of the default stream have times if the queue was
    /// created with `CL_QUEUE_PROFILING_ENABLE`. The device has an allocator of its own, which knows nothing of other memory in
    /// the context.
    ///
    /// The context and the queue are retained as long as the process lives: the caller may release its handles at any time.
    /// The same three give the same device again. A process adopts up to 64.
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
    /// [`Error::Invalid`] for a null handle, a device that is not of the context, a queue of another context or device or one
    /// that runs commands out of order, a device that kernels cannot run on, and for more than 64; [`Error::OpenCl`] for what
    /// the driver refuses.
    ///
    /// # Safety
    /// `context`, `device` and `queue` are a `cl_context`, a `cl_device_id` and a `cl_command_queue` that live during the call
    /// and were made by the OpenCL library that this process loads (`OPENCL_DYLIB_PATH`, else the system's) or by a driver
    /// behind the same ICD loader. A device that is a sub-device is not released before the process ends. What other code does
    /// to tensors' buffers follows the rules of [`Storage::export_cl`](crate::storage::Storage::export_cl).
    pub unsafe fn adopt(
        context: *mut std::ffi::c_void,
        device: *mut std::ffi::c_void,
        queue: *mut std::ffi::c_void,
    ) -> Result<Device> {
        opencl::adopt(context, device, queue)
    }

    /// [`info`](Self::info), which is kept.
    pub(crate) fn known(self) -> Result<&'static DeviceInfo> {
        match self {
            Device::Cpu => Ok(info::cpu()),
            Device::OpenCL(i) => opencl::info(i),
        }
    }

    /// How fast it copies within its memory, in bytes read and written a second: measured here. None where there is no memory
    /// for it, or the driver refuses.
    pub(crate) fn copy_rate(self) -> Option<f64> {
        match self {
            Device::Cpu => Some(cpu::bulk::copy_rate()),
            Device::OpenCL(i) => opencl::open(i).ok()?.copy_rate().ok(),
        }
    }

    /// Waits until everything submitted to the device so far, on every stream, is done. The CPU is never behind.
    ///
    /// # Errors
    /// What a kernel found wrong with its operands meanwhile (an index out of range, an integer division by zero),
    /// [`Error::DeviceLost`] after a fault, [`Error::NoDevice`] if the device is not there.
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

/// Has the commands of all devices that are open timed from now on, or no longer. Waits for what was submitted.
///
/// # Errors
/// That of the first device that fails; the others are tried all the same.
pub(crate) fn set_profiling() -> Result<()> {
    let set: Vec<Result<()>> = opened().map(|device| device.set_profiling()).collect();
    set.into_iter().collect()
}

/// Waits for what every device has to do. What kernels found wrong is left for who waits next; a lost device is done.
pub(crate) fn drain_all() {
    opened().for_each(|device| _ = device.drain());
}

fn opened() -> impl Iterator<Item = &'static opencl::ClDevice> {
    (0..opencl::count()).filter_map(opencl::opened)
}

/// The OpenCL drivers that the loader knows, whichever devices `CLAYSTONE_DEVICES` takes.
///
/// ```
/// match claystone::device::platforms() {
///     Ok(platforms) => platforms.iter().for_each(|platform| println!("{:?}", platform.name)),
///     Err(error) => println!("{error}"), // what to install
/// }
/// ```
///
/// # Errors
/// [`Error::NoDevice`] where there is none or `CLAYSTONE_DEVICES=none`, with what to install;
/// [`Error::OpenCl`] where the loader fails to tell.
pub fn platforms() -> Result<Vec<Platform>> {
    opencl::platforms()
}

/// Reads what Display prints: `cpu`, `opencl:0`; `opencl` alone is `opencl:0`. Case does not matter.
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
            let reason = format!("'{}' is no device: write cpu, or opencl:0, opencl:1, ...", Excerpt(s));
            Error::invalid("device", reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
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
    fn launches_are_counted_by_thread_and_nest() {
        let ((_, inner), outer) = count_launches(|| {
            count_launch();
            std::thread::spawn(count_launch).join().unwrap();
            count_launches(count_launch)
        });
        assert_eq!((inner, outer), (1, 2));
    }
}
