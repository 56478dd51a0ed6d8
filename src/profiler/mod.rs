//! Profiles of the host's and the devices' work: which events happened, when, and how long they took.
//!
//! [`profile`] records while a closure runs, [`Profiler`] records between two calls, and the environment variable
//! `CLAYSTONE_PROFILE=trace.json` records a whole program. The result is a [`Profile`]. It contains every kernel launch, copy, fill and
//! transfer with the times of the device's driver. It also contains every operation, wait, compilation and memory call to the driver
//! with the host's times. [`Profile::save`] writes a trace for Perfetto and `chrome://tracing`, and [`Profile::key_averages`] sums
//! events up as `torch.profiler` does. The program `claystone profile` sums up a saved trace.
//!
//! ```
//! use claystone::profiler::{SortBy, profile};
//! use claystone::{Device, Tensor};
//! let (sum, profile) = profile(|| {
//!     let x = Tensor::ones(&[64, 64], Device::Cpu)?;
//!     x.matmul(&x)?.sum((), false)?.item::<f32>()
//! })?;
//! assert_eq!(sum?, 262_144.0);
//! println!("{}", profile.key_averages().sorted_by(SortBy::DeviceTime));
//! let product = profile.events().iter().find(|event| &*event.name == "matmul").unwrap();
//! assert_eq!(product.flops, 2 * 64 * 64 * 64);
//! # Ok::<(), claystone::Error>(())
//! ```
//!
//! While profiling is off, a launch costs one additional relaxed load. While profiling is on, each command has a driver event.
//! Events are released in batches, after 64 more commands. The latest [`ProfilerOptions::max_events`] are kept.
//! Kernels that a [`Graph`](crate::Graph) replays are recorded without their operations' shapes.

mod averages;
mod build;
mod environment;
mod report;
mod trace;

use std::sync::{Arc, Mutex};

pub use crate::device::profiler::RecordKind as Category;
use crate::device::profiler::{self as recorder, Ring};
use crate::device::{drain_all, lock, set_profiling};
use crate::{DType, Device, Error, Result};

pub use averages::{Average, Averages, SortBy};
pub(crate) use environment::{begin_from_environment, measure_at_first_use};
pub use report::{Gaps, Timings};

/// The row of the timeline on which an [`Event`] is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A thread of the host, by the number in [`Profile::threads`].
    Thread(u32),
    /// A stream of an OpenCL device, by its index; 0 is the default stream.
    Stream(Device, u32),
}

/// The operation that an event belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationInfo {
    /// The operation's name in PyTorch.
    pub name: Arc<str>,
    /// Shapes of the operands, then of the results.
    pub shapes: Vec<Vec<usize>>,
    /// The dtype of the first operand.
    pub dtype: Option<DType>,
}

/// A span of time in a profile. Times are in microseconds since the profile began.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// The event's kind.
    pub category: Category,
    /// PyTorch's name for an operation, the program's name for a kernel, and the driver's name for other commands and calls.
    pub name: Arc<str>,
    /// The device that works, or for which the host works.
    pub device: Option<Device>,
    /// The thread or stream.
    pub lane: Lane,
    /// The start time; for a command on a device, the start time reported by the driver.
    pub start_us: f64,
    /// The duration.
    pub duration_us: f64,
    /// The times at which a command was queued and submitted to the device; `None` for other events.
    pub queued_us: Option<[f64; 2]>,
    /// The number of bytes of a copy, fill, transfer or segment. For an operation, and for a kernel that is the operation's only
    /// kernel: the bytes read and written, with broadcast operands counted once.
    pub bytes: u64,
    /// Floating-point operations, counted like `bytes`. Known for products and convolutions, otherwise 0.
    pub flops: u64,
    /// The active annotations, outermost first, joined by slashes; empty for none.
    pub annotation: Arc<str>,
    /// The operation that this event is or belongs to.
    pub operation: Option<Arc<OperationInfo>>,
    /// A number that a launch on the host shares with its command on the device; 0 for other events.
    pub launch: u64,
}

/// The memory in use on a device at one time.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct MemorySample {
    /// The device whose memory was sampled.
    pub device: Device,
    /// Microseconds since the profile began.
    pub time_us: f64,
    /// Bytes of blocks that tensors use in the device's allocator, without pinned tensors and without vectors that became tensors.
    pub allocated: u64,
    /// Bytes that the allocator has reserved from the driver.
    pub reserved: u64,
}

/// A device that appears in a profile.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ProfiledDevice {
    /// The device.
    pub device: Device,
    /// The driver's name for the device.
    pub name: String,
    /// The rate at which the device copies within its memory, in bytes read and written per second, for comparison with the rates
    /// of kernels. `None` if the rate was not measured.
    pub copy_bytes_per_s: Option<f64>,
}

/// The events recorded between [`Profiler::start`] and [`Profiler::stop`], or read from a file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Profile {
    events: Vec<Event>,
    memory: Vec<MemorySample>,
    devices: Vec<ProfiledDevice>,
    threads: Vec<(u32, String)>,
    duration_us: f64,
    dropped_events: u64,
}

impl Profile {
    /// Returns all events, in order of their start.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the memory in use in order of time, with a sample for each allocation and release.
    pub fn memory(&self) -> &[MemorySample] {
        &self.memory
    }

    /// Returns the devices that appear in the profile.
    pub fn devices(&self) -> &[ProfiledDevice] {
        &self.devices
    }

    /// Returns the numbers and names of the threads that appear in the profile.
    pub fn threads(&self) -> &[(u32, String)] {
        &self.threads
    }

    /// Returns the microseconds from start to stop, by the host's clock.
    pub fn duration_us(&self) -> f64 {
        self.duration_us
    }

    /// Returns the number of older commands and spans that were dropped to make room for later ones.
    pub fn dropped_events(&self) -> u64 {
        self.dropped_events
    }
}

/// Options of a [`Profiler`].
///
/// ```
/// use claystone::profiler::{Profiler, ProfilerOptions};
/// let profiler = Profiler::start_with(ProfilerOptions::default().max_events(1000))?;
/// let profile = profiler.stop();
/// assert_eq!(profile.dropped_events(), 0);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfilerOptions {
    /// The number of the latest commands and spans that are kept, about 150 bytes each, and of memory samples, 40 bytes each.
    /// 1,000,000 by default. Each command of an OpenCL device becomes two events of about 200 bytes: its launch and the command.
    pub max_events: usize,
    /// Whether [`Profiler::stop`] measures how fast the devices copy. True by default. A process measures each device once, which takes some tens of
    /// milliseconds and device memory for two buffers.
    pub copy_rate: bool,
}

impl Default for ProfilerOptions {
    fn default() -> ProfilerOptions {
        ProfilerOptions { max_events: 1_000_000, copy_rate: true }
    }
}

setters!(ProfilerOptions { max_events: usize, copy_rate: bool });

/// Records the work of the process until [`stop`](Self::stop). Dropping a profiler discards the recording.
///
/// ```
/// use claystone::profiler::{Category, Profiler};
/// use claystone::{Device, Tensor};
/// let profiler = Profiler::start()?;
/// let x = Tensor::arange(0, 10, 1, Device::Cpu)?.add_scalar(1)?;
/// let profile = profiler.stop();
/// assert!(profile.events().iter().any(|e| e.category == Category::Operation && &*e.name == "add_scalar"));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping a profiler discards its recording: call `stop`"]
pub struct Profiler {
    options: ProfilerOptions,
    began: u64,
    stopped: bool,
}

impl Profiler {
    /// Begins to record. Waits for all devices to finish their work, because their queues are replaced by queues with profiling.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a profile is already being recorded, because a profiler records the whole process. Errors of the driver.
    pub fn start() -> Result<Profiler> {
        Profiler::start_with(ProfilerOptions::default())
    }

    /// Begins to record like [`start`](Self::start), with options.
    ///
    /// # Errors
    /// Errors of [`start`](Self::start).
    pub fn start_with(options: ProfilerOptions) -> Result<Profiler> {
        if !recorder::begin(options.max_events) {
            let reason = "a profile is already being recorded: stop it first, or unset CLAYSTONE_PROFILE";
            return Err(Error::invalid("Profiler::start", reason));
        }
        let mut profiler = Profiler { options, began: 0, stopped: false };
        set_profiling()?; // a failure drops the profiler, which ends the recording
        profiler.began = recorder::restart();
        Ok(profiler)
    }

    /// Ends the recording, after all devices have finished their work. Faults that kernels recorded are left for the next call that
    /// waits. If a driver fails, the profile contains the events until then.
    pub fn stop(mut self) -> Profile {
        let (recorded, ended) = self.end_recording();
        let mut profile = build::build_profile(recorded, self.began, ended);
        for device in &mut profile.devices {
            device.copy_bytes_per_s = measured_rate(device.device)
                .or_else(|| if self.options.copy_rate { measure_rate(device.device) } else { None });
        }
        profile
    }

    fn end_recording(&mut self) -> (Ring, u64) {
        self.stopped = true;
        drain_all();
        recorder::pause();
        let ended = recorder::now();
        // Records the last commands.
        if let Err(error) = set_profiling() {
            tracing::warn!(%error, "the driver did not report the times of the last commands");
        }
        (recorder::take(), ended)
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        if !self.stopped {
            let _ = self.end_recording();
        }
    }
}

/// True while a profile is recorded, by a [`Profiler`] or because `CLAYSTONE_PROFILE` is set.
///
/// ```
/// use claystone::profiler::{is_profiling, profile};
/// let (inside, _) = profile(is_profiling)?;
/// assert!(inside && !is_profiling());
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn is_profiling() -> bool {
    recorder::is_on()
}

/// Runs `f`, and returns its result with a profile of everything that the process did meanwhile. Waits for the devices at the end, like
/// [`Profiler::stop`]. The [module docs](self) have an example.
///
/// # Errors
/// Errors of [`Profiler::start`].
pub fn profile<R>(f: impl FnOnce() -> R) -> Result<(R, Profile)> {
    let profiler = Profiler::start()?;
    let result = f();
    Ok((result, profiler.stop()))
}

/// The measured rates at which devices copy within their memory, in bytes read and written per second.
static RATES: Mutex<Vec<(Device, f64)>> = Mutex::new(Vec::new());

fn measured_rate(device: Device) -> Option<f64> {
    lock(&RATES).iter().find(|(of, _)| *of == device).map(|&(_, rate)| rate)
}

/// Measures the device's copy rate and stores it in [`RATES`]. Returns `None` if there is not enough memory or the driver refuses.
fn measure_rate(device: Device) -> Option<f64> {
    device.copy_rate().inspect(|&rate| lock(&RATES).push((device, rate)))
}
