//! Where the time goes: what the host and the devices did, when, and for how long.
//!
//! [`profile`] watches a closure, [`Profiler`] what happens between two calls, and the environment variable
//! `CLAYSTONE_PROFILE=trace.json` the whole of any program. Out comes a [`Profile`]: every kernel launch, copy, fill and
//! transfer with the times that the device's driver tells, every operation, wait, compilation and driver call for memory
//! with the host's. [`Profile::save`] writes it for Perfetto and `chrome://tracing`, [`Profile::key_averages`] sums it up as
//! `torch.profiler` does, and the program `claystone profile` does that for a file.
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
//! While nothing is profiled, a launch costs one relaxed load more. While something is, each command has an event of the
//! driver's, which is released with others when 64 more commands were launched, and the latest
//! [`ProfilerOptions::max_events`] are kept.
//! Kernels that a [`Graph`](crate::Graph) replays are recorded without their operations' shapes.

mod averages;
mod build;
mod copy_rate;
mod environment;
mod report;
mod trace;

use std::sync::Arc;

use crate::device::profiler::{self as recorder, Recorded};
use crate::device::{drain_all, set_profiling};
use crate::{DType, Device, Error, Result};

pub use averages::{Average, Averages, SortBy};
pub(crate) use environment::{begin, first_use};
pub use report::{Gaps, Timings};

/// What an [`Event`] is about: the category in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Category {
    /// An operation on the host: while it is submitted to an OpenCL device, or while the CPU device computes it.
    Operation,
    /// The gradient of an operation, on the host.
    Backward,
    /// A span named by [`annotate`](crate::storage::annotate).
    Annotation,
    /// A call of the driver that submits a command.
    Launch,
    /// The host waits for a device.
    Wait,
    /// A device is opened at its first use: the driver creates a context and a queue.
    Open,
    /// The driver makes or releases memory.
    Segment,
    /// A program is compiled.
    Compile,
    /// A compiled program is loaded from the cache.
    Load,
    /// A kernel on a device.
    Kernel,
    /// Bytes are copied within a device.
    Copy,
    /// Bytes are filled on a device.
    Fill,
    /// Bytes go from a device to the host.
    Read,
    /// Bytes go from the host to a device.
    Write,
    /// Anything else that another program's trace has.
    Other,
}

impl Category {
    /// The name in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Category::Operation => "operation",
            Category::Backward => "backward",
            Category::Annotation => "annotation",
            Category::Launch => "launch",
            Category::Wait => "wait",
            Category::Open => "open",
            Category::Segment => "segment",
            Category::Compile => "compile",
            Category::Load => "load",
            Category::Kernel => "kernel",
            Category::Copy => "copy",
            Category::Fill => "fill",
            Category::Read => "read",
            Category::Write => "write",
            Category::Other => "other",
        }
    }

    /// Whether it is work of a device, rather than of the host.
    pub fn is_command(self) -> bool {
        matches!(self, Category::Kernel | Category::Copy | Category::Fill | Category::Read | Category::Write)
    }
}

/// Where an [`Event`] happened: a line of the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A thread of the host, by the number in [`Profile::threads`].
    Thread(u32),
    /// A stream of an OpenCL device, by its index; 0 is the default stream.
    Stream(Device, u32),
}

/// An operation, as the events that belong to it tell of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationInfo {
    /// PyTorch's name for it.
    pub name: Arc<str>,
    /// Shapes of the operands, then of the results.
    pub shapes: Vec<Vec<usize>>,
    /// Of the first operand.
    pub dtype: Option<DType>,
}

/// Something that took time. Times are in microseconds since the profile began.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// What it is.
    pub category: Category,
    /// Of an operation PyTorch's name, of a kernel its program's, of other commands and calls the driver's.
    pub name: Arc<str>,
    /// The device that works, or that the host works for.
    pub device: Option<Device>,
    /// Where it happened.
    pub lane: Lane,
    /// When it began: on a device, when the driver says that the command started.
    pub start_us: f64,
    /// For how long it ran.
    pub duration_us: f64,
    /// When a command was queued and when it was submitted to the device.
    pub queued_us: Option<[f64; 2]>,
    /// Bytes of a copy, fill, transfer or segment. Of an operation, and of a kernel that is its only one, what it reads and
    /// writes, where what broadcasting repeats counts once.
    pub bytes: u64,
    /// Floating-point operations, as for `bytes`; 0 where the number is not known: products and convolutions have one.
    pub flops: u64,
    /// The annotations in force, the outermost first, joined by slashes; empty for none.
    pub annotation: Arc<str>,
    /// The operation that it is, or is part of.
    pub operation: Option<Arc<OperationInfo>>,
    /// What a launch on the host and its command on the device have in common; 0 for other events.
    pub launch: u64,
}

/// How much of a device's memory was in use at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct MemorySample {
    /// The device.
    pub device: Device,
    /// Microseconds since the profile began.
    pub time_us: f64,
    /// Bytes of the blocks that tensors have of the device's allocator: neither pinned tensors nor vectors that tensors took over.
    pub allocated: u64,
    /// Bytes that the allocator has of the driver.
    pub reserved: u64,
}

/// A device that took part in a profile.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ProfiledDevice {
    /// Which one.
    pub device: Device,
    /// The driver's name for it.
    pub name: String,
    /// How fast it copies within its memory, in bytes read and written a second: what the rates of kernels are compared
    /// with. None where it was not measured.
    pub copy_bytes_per_s: Option<f64>,
}

/// What was recorded between [`Profiler::start`] and [`Profiler::stop`], or read from a file.
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
    /// Everything that took time, in the order in which it began.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Memory in use, in the order of time: a sample for each allocation and release.
    pub fn memory(&self) -> &[MemorySample] {
        &self.memory
    }

    /// The devices that took part.
    pub fn devices(&self) -> &[ProfiledDevice] {
        &self.devices
    }

    /// Numbers and names of the threads that took part.
    pub fn threads(&self) -> &[(u32, String)] {
        &self.threads
    }

    /// Microseconds from start to stop, by the host's clock.
    pub fn duration_us(&self) -> f64 {
        self.duration_us
    }

    /// How many older commands and spans had to make place for later ones.
    pub fn dropped_events(&self) -> u64 {
        self.dropped_events
    }
}

/// How to profile.
///
/// ```
/// use claystone::profiler::{Profiler, ProfilerOptions};
/// let profiler = Profiler::start_with(ProfilerOptions { max_events: 1000, ..ProfilerOptions::default() })?;
/// let profile = profiler.stop();
/// assert_eq!(profile.dropped_events(), 0);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfilerOptions {
    /// How many of the latest commands and spans are kept while recording, of some 150 bytes each, and as many samples of
    /// memory, of 40 bytes each; 1,000,000 unless said. Each command of an OpenCL device becomes two events, its launch and
    /// itself, of some 200 bytes.
    pub max_events: usize,
    /// Whether [`Profiler::stop`] measures how fast the devices copy, once a process, which takes some tens of
    /// milliseconds and memory of the device for two buffers. True unless said.
    pub copy_rate: bool,
}

impl Default for ProfilerOptions {
    fn default() -> ProfilerOptions {
        ProfilerOptions { max_events: 1_000_000, copy_rate: true }
    }
}

/// Records what the process does until it is stopped. Dropped without that, it forgets what it recorded.
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
#[must_use = "dropping it forgets what was recorded: call `stop`"]
pub struct Profiler {
    options: ProfilerOptions,
    began: u64,
    stopped: bool,
}

impl Profiler {
    /// Begins to record. Waits for what devices have to do, as their queues are exchanged for others that tell times.
    ///
    /// # Errors
    /// [`Error::Invalid`] where something is being profiled already: one profiler at a time sees the whole process. What a
    /// driver refuses.
    pub fn start() -> Result<Profiler> {
        Profiler::start_with(ProfilerOptions::default())
    }

    /// [`start`](Self::start) with options.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(options: ProfilerOptions) -> Result<Profiler> {
        if !recorder::begin(options.max_events) {
            let reason = "something is being profiled already: stop that first, or unset CLAYSTONE_PROFILE";
            return Err(Error::invalid("Profiler::start", reason));
        }
        let mut profiler = Profiler { options, began: 0, stopped: false };
        set_profiling()?; // a failure drops the profiler, which ends the recording
        profiler.began = recorder::begin_again();
        Ok(profiler)
    }

    /// Ends the recording. Waits for what devices have to do; what kernels found wrong with their operands is left for who
    /// waits next, and where a driver fails, the profile is of what was recorded until then.
    pub fn stop(mut self) -> Profile {
        let (recorded, ended) = self.end();
        let mut profile = build::profile(recorded, self.began, ended);
        for device in &mut profile.devices {
            device.copy_bytes_per_s = copy_rate::known(device.device)
                .or_else(|| if self.options.copy_rate { copy_rate::measure(device.device) } else { None });
        }
        profile
    }

    fn end(&mut self) -> (Recorded, u64) {
        self.stopped = true;
        drain_all();
        recorder::pause();
        let ended = recorder::now();
        // Records the last commands.
        if let Err(error) = set_profiling() {
            tracing::warn!(%error, "the driver did not tell when the last commands ran");
        }
        (recorder::take(), ended)
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        if !self.stopped {
            let _ = self.end();
        }
    }
}

/// Whether something is being profiled: by a [`Profiler`], or because `CLAYSTONE_PROFILE` is set.
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

/// Runs `f` and gives what it gives, with the profile of everything that the process did meanwhile; at the end devices are
/// waited for, as in [`Profiler::stop`]. The example is [above](self).
///
/// # Errors
/// Those of [`Profiler::start`].
pub fn profile<R>(f: impl FnOnce() -> R) -> Result<(R, Profile)> {
    let profiler = Profiler::start()?;
    let result = f();
    Ok((result, profiler.stop()))
}
