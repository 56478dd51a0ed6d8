//! Dry runs: a program runs on simulated memory, and the result is how much memory it needs.
//!
//! The caching allocator and the planning of kernels are those of a real run, so its requests, block sizes and segments are too.
//! Only the last step is left out: no kernel is enqueued on OpenCL, and on the CPU no closure over a storage's bytes is called, unless
//! all its bytes are few and known.
//!
//! `CLAYSTONE_DRY_RUN` simulates a whole program, and reports on standard error when the process exits. Its value is the device
//! memory that the report compares with: `24GiB`, or `device` for the memory of each device. `CLAYSTONE_DRY_RUN_JSON` and
//! `CLAYSTONE_DRY_RUN_SNAPSHOT` name files for the report as JSON and for a snapshot (`.pickle` or `.json`) of the device with the
//! highest peak.

mod estimate;
mod record;
mod replay;
mod values;

use std::env;
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, OnceLock};

use super::allocator::Allocator;
use super::config::Config;
use super::driver::{Sim, SimOptions, driver};
use super::history::count_recording;
use super::registry::build_allocator;
use super::scope;
use crate::device::{dry, lock, profiler};
use crate::error::parse_bytes;
use crate::{Device, Error, Result};
pub use estimate::{Assumption, DeviceEstimate, Estimate};
use record::EventRecorder;
pub use record::Role;
pub use replay::min_capacity;
pub(super) use values::run_simulated;

/// The memory that a dry run is compared with.
#[derive(Clone, Copy)]
enum Capacity {
    Bytes(u64),
    OfDevice,
}

/// A simulated device, with the properties of a real one and without its limit.
#[derive(Clone)]
struct Simulation {
    device: Device,
    name: String,
    options: SimOptions,
    config: Config,
}

impl Simulation {
    /// Returns an allocator on such a device, with `capacity` bytes of memory or without a limit.
    fn allocator(&self, capacity: Option<u64>) -> Result<Arc<dyn Allocator>> {
        let options = SimOptions { capacity: capacity.unwrap_or(self.options.capacity), ..self.options };
        build_allocator(Arc::new(Sim::standing_for(self.device, options)), self.config.clone())
    }
}

/// A dry run in progress: the simulated devices that it has used.
pub(super) struct DryRun {
    capacity: Option<Capacity>,
    devices: Mutex<Vec<DryDevice>>,
}

#[derive(Clone)]
struct DryDevice {
    simulation: Simulation,
    compares: bool,
    recorder: Arc<EventRecorder>,
}

impl DryRun {
    fn new(capacity: Option<Capacity>) -> DryRun {
        if dry::begin() {
            count_recording(true); // from now on, callers' lines are recorded
        }
        DryRun { capacity, devices: Mutex::default() }
    }

    /// Returns the allocator of a simulated device, made at the first call.
    pub(super) fn allocator(&self, device: Device) -> Result<Arc<dyn Allocator>> {
        let known = |devices: &[DryDevice]| devices.iter().find(|known| known.simulation.device == device).cloned();
        if let Some(known) = known(&lock(&self.devices)) {
            return Ok(known.recorder);
        }
        let made = self.simulate(device)?; // without the lock, because this may open the device
        let mut devices = lock(&self.devices);
        let of_device = known(&devices).unwrap_or_else(|| {
            devices.push(made.clone());
            made
        });
        Ok(of_device.recorder)
    }

    fn simulate(&self, device: Device) -> Result<DryDevice> {
        let (real, config) = (driver(device)?, Config::from_env_once()?);
        let options = SimOptions {
            largest_segment: real.largest_segment(),
            alignment: real.alignment(),
            page: real.page(),
            ..SimOptions::default()
        };
        let unlimited = Config { memory_limit: usize::MAX, per_process_memory_fraction: 1.0, ..config.clone() };
        let name = device.cached_info()?.name.clone();
        let simulation = Simulation { device, name, options, config: unlimited };
        let capacity = match self.capacity {
            Some(Capacity::Bytes(bytes)) => bytes,
            Some(Capacity::OfDevice) | None => real.capacity(),
        };
        let recorder = EventRecorder::new(simulation.allocator(None)?, capacity, config.limit(capacity));
        Ok(DryDevice { simulation, compares: self.capacity.is_some(), recorder: Arc::new(recorder) })
    }

    fn estimate(&self) -> Result<Estimate> {
        let mut estimate = Estimate::default();
        for DryDevice { simulation, compares, recorder } in lock(&self.devices).clone() {
            let capacity = compares.then(|| recorder.limit());
            let (recorded, peaks) = (recorder.recorded(), recorder.peaks());
            estimate.push(DeviceEstimate::new(simulation, recorded, peaks, capacity)?);
        }
        Ok(estimate)
    }
}

/// Runs `step` on simulated memory, and returns its result and an estimate of the memory that it needs. With `capacity`, a number of
/// bytes, the estimate says whether the step fits in a device with that much memory.
///
/// Tensors that this thread makes inside `step` have no bytes, and operations on them compute only shapes; tensors made outside keep
/// their memory, which is not counted. So make the model inside. An operation with at least one simulated operand computes nothing.
/// Values that are read are zeros, except up to 64 KiB that the host wrote or the CPU device computed from such values; sizes that
/// depend on other values are the largest possible. The estimate names both. A loop that ends when a computed value is small may end
/// at once. The result may be a simulated tensor, which stays without bytes.
///
/// Environment variable `CLAYSTONE_DRY_RUN` does the same for a whole program, with all its threads and graphs.
///
/// ```
/// use claystone::nn::{Linear, Module};
/// use claystone::optim::{AdamW, AdamWConfig, Optimizer};
/// use claystone::{Device, Tensor, storage};
/// let (done, estimate) = storage::dry_run(Some(1 << 30), || {
///     let mut net = Linear::new(20_000, 20_000, Device::Cpu)?; // 1.6 GB of weights
///     let mut adamw = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
///     net.forward(&Tensor::randn([64, 20_000], Device::Cpu)?)?.square()?.mean((), false)?.backward()?;
///     adamw.step()
/// })?;
/// done?;
/// let cpu = &estimate.devices[0];
/// assert!(cpu.fits == Some(false) && cpu.smallest_device > 6 << 30);
/// println!("{estimate}"); // the peak, and the bytes at the peak by role and by source line
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Errors of the allocator other than out of memory, in the replays that search for the smallest device.
pub fn dry_run<R>(capacity: Option<u64>, step: impl FnOnce() -> R) -> Result<(R, Estimate)> {
    let run = Arc::new(DryRun::new(capacity.map(Capacity::Bytes)));
    let allocators = Arc::clone(&run);
    let result = scope::with_allocators(Box::new(move |device| allocators.allocator(device).ok()), step);
    Ok((result, run.estimate()?))
}

/// The dry run of the whole program: the process that reports it, and the files to write.
struct EnvironmentRun {
    run: DryRun,
    process: u32,
    json: Option<PathBuf>,
    snapshot: Option<PathBuf>,
}

static ENVIRONMENT_RUN: OnceLock<Result<Option<EnvironmentRun>>> = OnceLock::new();

/// Returns the dry run that `CLAYSTONE_DRY_RUN` requests, which begins at the first call. Call before a device's allocator is made.
pub(super) fn of_environment() -> Result<Option<&'static DryRun>> {
    let wanted = ENVIRONMENT_RUN.get_or_init(|| {
        let Some(text) = env::var_os("CLAYSTONE_DRY_RUN").filter(|text| !text.is_empty()) else { return Ok(None) };
        let capacity = match &*text.to_string_lossy() {
            "device" => Capacity::OfDevice,
            text => Capacity::Bytes(parse_bytes(text).map_err(|what| Error::invalid("CLAYSTONE_DRY_RUN", what))?),
        };
        let file = |name| env::var_os(name).filter(|file| !file.is_empty()).map(PathBuf::from);
        let (json, snapshot) = (file("CLAYSTONE_DRY_RUN_JSON"), file("CLAYSTONE_DRY_RUN_SNAPSHOT"));
        profiler::at_exit(report_at_exit);
        Ok(Some(EnvironmentRun { run: DryRun::new(Some(capacity)), process: process::id(), json, snapshot }))
    });
    wanted.as_ref().map(|wanted| wanted.as_ref().map(|wanted| &wanted.run)).map_err(Error::clone)
}

/// Prints the report and writes the files. Only simulated devices are used, because no driver may be called at exit.
extern "C" fn report_at_exit() {
    let Some(Ok(Some(wanted))) = ENVIRONMENT_RUN.get() else { return };
    if wanted.process != process::id() {
        return; // a forked child reports nothing
    }
    let reported = wanted.run.estimate().and_then(|estimate| {
        eprint!("{estimate}");
        if let Some(file) = &wanted.json {
            crate::file::replace(file, estimate.to_json().as_bytes())
                .map_err(|e| Error::invalid("CLAYSTONE_DRY_RUN_JSON", format!("{}: {e}", file.display())))?;
        }
        let largest = estimate.devices.iter().max_by_key(|device| device.peak_allocated);
        wanted.snapshot.iter().zip(largest).try_for_each(|(file, device)| device.snapshot()?.save(file))
    });
    if let Err(error) = reported {
        eprintln!("claystone: the dry run's report is incomplete: {error}");
    }
}
