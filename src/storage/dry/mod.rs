//! Dry runs: a program runs on simulated memory, and the result is how much memory it needs.
//!
//! The caching allocator and the planning of kernels are those of a real run, so its requests, block sizes and segments are too.
//! Only the last step is left out: no kernel is enqueued on OpenCL, and on the CPU no closure over a storage's bytes is called, unless
//! all its bytes are few and known.

mod estimate;
mod record;
mod replay;
pub(super) mod values;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::{env, process};

use super::allocator::{Allocator, find_allocator};
use super::registry::{self, DeviceEntry};
use super::{history, per_device, scope};
use crate::device::{dry, lock, profiler};
use crate::{Device, Error, Result, error};
pub use estimate::{Assumption, DeviceEstimate, Estimate};
use record::EventRecorder;
pub use record::Role;
pub use replay::min_capacity;

/// A dry run in progress.
pub(super) struct DryRun {
    /// The memory in bytes that the report compares with; `u64::MAX` for each device's own memory.
    capacity: Option<u64>,
    recorders: Mutex<Vec<Arc<EventRecorder>>>,
    /// The first error of making a simulated device.
    failed: Mutex<Option<Error>>,
    /// The id of the process that began the run.
    process: u32,
}

impl Drop for DryRun {
    fn drop(&mut self) {
        history::count_recording(false);
        dry::end();
    }
}

impl DryRun {
    fn new(capacity: Option<u64>) -> Arc<DryRun> {
        dry::begin();
        history::count_recording(true); // for the lines of callers
        Arc::new(DryRun { capacity, recorders: Mutex::default(), failed: Mutex::default(), process: process::id() })
    }

    /// Returns the allocator of a simulated device, made at the first call.
    pub(super) fn allocator(&self, device: Device) -> Result<Arc<dyn Allocator>> {
        let find = |all: &[Arc<EventRecorder>]| all.iter().find(|known| known.device == device).cloned();
        if let Some(known) = find(&lock(&self.recorders)) {
            return Ok(known);
        }
        let capacity = self.capacity.filter(|&bytes| bytes < u64::MAX);
        let made = Arc::new(EventRecorder::new(device, capacity)?); // without the lock, because this may open the device
        let mut recorders = lock(&self.recorders);
        if let Some(known) = find(&recorders) {
            return Ok(known);
        }
        recorders.push(Arc::clone(&made));
        Ok(made)
    }

    fn estimate(&self) -> Result<Estimate> {
        let (mut estimate, recorders) = (Estimate::default(), lock(&self.recorders).clone());
        recorders.iter().try_for_each(|recorder| estimate.push(recorder, self.capacity.is_some()))?;
        Ok(estimate)
    }
}

/// Runs `step` on simulated memory, and returns its result and an estimate of the memory that it needs. With `capacity`, a number of
/// bytes, the estimate says whether the step fits in a device with that much memory.
///
/// Tensors that this thread makes inside `step` have no bytes, and operations on them compute only shapes. Tensors made outside keep
/// their memory, which is not counted, so make the model inside. Values that are read are zeros, except up to 64 KiB that the host
/// wrote or the CPU device computed from such values. Sizes that depend on other values are the largest possible. The estimate names
/// both. A loop that ends when a computed value is small may end at once. A simulated tensor stays without bytes after the call.
/// Statistics of a device inside `step` are those of the real device. The line of the program's first tensor may be unknown, because lines
/// are recorded from the first simulated device on.
///
/// The environment variable `CLAYSTONE_DRY_RUN` does the same for a whole program, with all its threads and graphs, and prints the
/// report on standard error when the process exits. Its value is the capacity, such as `24GiB`, or `device` for each device's own
/// memory. `CLAYSTONE_DRY_RUN_JSON` and `CLAYSTONE_DRY_RUN_SNAPSHOT` name files for the report as JSON, and for a
/// [snapshot](DeviceEstimate::snapshot) of the device with the highest peak.
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
/// assert!(cpu.fits == Some(false) && cpu.smallest_device > 5 << 30);
/// println!("{estimate}"); // the peak, and the bytes at the peak by role and by source line
/// assert!(estimate.to_json().contains("\"fits\":false") && cpu.snapshot()?.peak_memory()[0].bytes > 5 << 30);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Errors of making a simulated device, and errors of the allocator other than out of memory in the replays that search for the smallest
/// device.
pub fn dry_run<R>(capacity: Option<u64>, step: impl FnOnce() -> R) -> Result<(R, Estimate)> {
    let run = DryRun::new(capacity);
    let allocators = Arc::clone(&run);
    let allocator_of = move |device| {
        let failed = |error| _ = lock(&allocators.failed).get_or_insert(error);
        allocators.allocator(device).map_err(failed).ok()
    };
    let result = scope::with_allocators(Box::new(allocator_of), step);
    match lock(&run.failed).take() {
        Some(error) => Err(error),
        None => Ok((result, run.estimate()?)),
    }
}

/// True if this thread's new storages on the device are simulated.
pub(super) fn is_simulating(device: Device) -> bool {
    let current = || scope::allocator(device).or_else(|| registry::allocator(device).ok());
    dry::is_on() && current().is_some_and(|allocator| find_allocator::<EventRecorder>(&*allocator).is_some())
}

/// The dry run of the whole process.
static PROCESS_RUN: Mutex<Option<Arc<DryRun>>> = Mutex::new(None);

/// Begins a dry run of all threads and devices, as `CLAYSTONE_DRY_RUN` does, until [`end_dry_run`] is called. [`dry_run`] is simpler for a
/// step of one thread. `capacity` is a number of bytes to compare with, or `u64::MAX` for each device's own memory.
///
/// ```
/// use claystone::{Device, Tensor, storage};
/// storage::begin_dry_run(Some(24 << 30))?;
/// let made = std::thread::spawn(|| Tensor::zeros([1 << 18, 1 << 20], Device::Cpu)); // 1 TiB
/// let x = made.join().expect("the thread does not panic")?;
/// let estimate = storage::end_dry_run()?;
/// assert!(x.storage().is_simulated() && estimate.devices[0].fits == Some(false));
/// assert!(storage::end_dry_run().is_err() && !Tensor::zeros(3, Device::Cpu)?.storage().is_simulated());
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// If a dry run of the process is in progress, or a device has tensors, because they would not be counted.
pub fn begin_dry_run(capacity: Option<u64>) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid("begin_dry_run", reason));
    let is_used = |device: &Device| per_device::get::<DeviceEntry>(*device).is_some();
    let used: Vec<Device> = Device::all().into_iter().filter(is_used).collect();
    for &device in &used {
        let bytes = registry::allocator(device)?.stats().allocated_bytes.current;
        if bytes > 0 {
            return invalid(format!(
                "{device} has tensors of {bytes} bytes, but a dry run begins before the first one"
            ));
        }
    }
    of_process()?;
    let (run, mut running) = (DryRun::new(capacity), lock(&PROCESS_RUN));
    if running.is_some() {
        return invalid("a dry run of the process is in progress".into());
    }
    *running = Some(Arc::clone(&run));
    drop(running);
    let begun = used.into_iter().try_for_each(|device| registry::set_allocator(device, run.allocator(device)?));
    begun.inspect_err(|_| drop(end_dry_run())) // the devices have their own allocators again
}

/// Ends the dry run that [`begin_dry_run`] began, and returns an estimate of the memory that the program needs. Tensors that were made
/// meanwhile stay without bytes.
///
/// # Errors
/// If no dry run of the process is in progress; otherwise as [`dry_run`].
pub fn end_dry_run() -> Result<Estimate> {
    let none = || Error::invalid("end_dry_run", "no dry run of the process is in progress");
    let run = lock(&PROCESS_RUN).take().ok_or_else(none)?;
    let recorders = lock(&run.recorders).clone();
    recorders.iter().try_for_each(|recorder| registry::set_allocator(recorder.device, recorder.real_allocator()?))?;
    run.estimate()
}

/// Returns the dry run of the process. The first call begins the run that `CLAYSTONE_DRY_RUN` requests. Call before a device's allocator is made.
pub(super) fn of_process() -> Result<Option<Arc<DryRun>>> {
    static FROM_ENVIRONMENT: OnceLock<Result<()>> = OnceLock::new();
    let begin = || {
        let Some(text) = env::var_os("CLAYSTONE_DRY_RUN").filter(|text| !text.is_empty()) else { return Ok(()) };
        let capacity = match &*text.to_string_lossy() {
            "device" => Ok(u64::MAX),
            text => error::parse_bytes(text).map_err(|what| Error::invalid("CLAYSTONE_DRY_RUN", what)),
        }?;
        profiler::at_exit(report_at_exit);
        *lock(&PROCESS_RUN) = Some(DryRun::new(Some(capacity)));
        Ok(())
    };
    FROM_ENVIRONMENT.get_or_init(begin).clone()?;
    Ok(lock(&PROCESS_RUN).clone())
}

/// Prints the report and writes the files, unless this is a forked child. Uses only simulated devices, because no driver may be called
/// at exit.
extern "C" fn report_at_exit() {
    let run = PROCESS_RUN.try_lock().ok().and_then(|run| run.clone());
    let Some(run) = run.filter(|run| run.process == process::id()) else { return };
    let file = |name| env::var_os(name).filter(|file| !file.is_empty()).map(PathBuf::from);
    let reported = run.estimate().and_then(|estimate| {
        eprint!("{estimate}");
        if let Some(file) = file("CLAYSTONE_DRY_RUN_JSON") {
            let failed = |e| Error::invalid("CLAYSTONE_DRY_RUN_JSON", format!("{}: {e}", file.display()));
            crate::file::replace(&file, estimate.to_json().as_bytes()).map_err(failed)?;
        }
        let largest = estimate.devices.iter().max_by_key(|device| device.peak_allocated);
        let snapshot = file("CLAYSTONE_DRY_RUN_SNAPSHOT").zip(largest);
        snapshot.map_or(Ok(()), |(file, device)| device.snapshot()?.save(file))
    });
    if let Err(error) = reported {
        eprintln!("claystone: the dry run's report is incomplete: {error}");
    }
}
