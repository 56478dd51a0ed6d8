//! Tuning of kernel parameters for a device: `claystone tune`.
//!
//! A parameter has a few choices, and a default for each class of devices. [`tune`] times the choices of every parameter. Before a choice is timed,
//! its results must match the CPU's at sizes around its block boundaries, and exactly for whole numbers. A choice replaces the current value if it is
//! at least 3 % faster. The results are saved beside the cached programs, where later processes load them.
//!
//! The best value for a device is not the best for each kernel at each size. With a [`Level`] above `none`, set by [`set_level`] or the environment
//! variable `CLAYSTONE_TUNING`, ordinary launches are tuned as well. A class is a kernel with a range of sizes: all numbers of work-items with the
//! same integer logarithm to base 2. The first launches of a class try other work-group sizes, or other values of the kernel's parameter. Each launch
//! computes its result once, with one candidate, and is timed alone. These launches wait, and their sums of floats may be rounded differently from
//! later ones. A candidate is chosen if it is at least 3 % faster than the default, in the median of 15 launches that alternate with the default's.
//! The device should be otherwise idle. [`ahead`] runs these trials for usual sizes.
//!
//! Choices are kept in the same file, are part of [`Device::export_cache`], and are used at every level until [`tune`] or
//! [`forget`]. A class that has a choice is not measured again. The driver's own work-group size is not a candidate, because
//! it depends on the divisors of one size and a class has many sizes.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

pub use crate::backend::problem::tuning::{Choice, Level, Parameter};
use crate::backend::problem::tuning::{Tuning, Workload};
use crate::device::level::MAX_TIME_RATIO;
use crate::ops::Attention;
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{ConvOptions, DType, Device, Error, MaxPoolOptions, Result, Tensor, backend};

/// The maximum number of calls of one workload by [`ahead`]; trials that are still open then are abandoned.
const MAX_CALLS: usize = 2000;
/// The number of times that each choice is measured, in turns with the other choices.
const MEASUREMENT_ROUNDS: usize = 5;
/// The minimum duration of a measurement, in microseconds.
const MIN_SAMPLE_MICROS: f64 = 4000.0;

/// A parameter and the measured times of its choices.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Measured {
    /// The parameter with its new value.
    pub parameter: Parameter,
    /// The time of each choice in microseconds, in the order of [`Parameter::choices`].
    pub times: Vec<f64>,
}

/// Returns the parameters of a device's kernels with their current values.
///
/// # Errors
/// [`Error::NoDevice`] if the device does not exist; [`Error::Invalid`] for the CPU, whose loops have no parameters.
pub fn parameters(device: Device) -> Result<Vec<Parameter>> {
    Ok(backend::tuning(device)?.parameters())
}

/// Measures the choices of every parameter, sets the best, and saves them for later processes. Returns the file, or `None` if there is no cache of
/// programs. Calls `each` after every parameter. Takes one to two minutes, mostly for building kernels. The device should be otherwise idle.
///
/// # Errors
/// Errors of [`parameters`]. If a choice gives a wrong result, nothing is saved and all parameters get their previous values back.
pub fn tune(device: Device, mut each: impl FnMut(&Measured)) -> Result<Option<PathBuf>> {
    let tuning = backend::tuning(device)?;
    let before = tuning.parameters();
    let _guard = ChoicesDisabled::new(&*tuning);
    before.iter().enumerate().for_each(|(i, p)| tuning.set(i, p.default));
    for i in 0..before.len() {
        match measure_parameter(&*tuning, device, i) {
            Ok(measured) => each(&measured),
            Err(error) => {
                before.iter().enumerate().for_each(|(i, p)| tuning.set(i, p.value));
                return Err(error);
            }
        }
    }
    tuning.forget_choices(); // they were measured with other parameter values
    tuning.save().map_err(|error| save_error(&error))
}

/// Runs every choice of every parameter at the sizes that [`tune`] checks, and compares the results with the CPU's.
///
/// # Errors
/// Errors of [`tune`].
pub fn check(device: Device) -> Result<()> {
    let tuning = backend::tuning(device)?;
    let _guard = ChoicesDisabled::new(&*tuning);
    for (i, p) in tuning.parameters().iter().enumerate() {
        let checked = p.choices.iter().try_for_each(|&choice| check_choice(&*tuning, device, i, p.name, choice));
        tuning.set(i, p.value);
        checked?;
    }
    Ok(())
}

/// Returns how much tuning is done during ordinary work on the device.
///
/// # Errors
/// Errors of [`parameters`].
pub fn level(device: Device) -> Result<Level> {
    Ok(backend::tuning(device)?.level())
}

/// Sets how much tuning this process does during ordinary work on the device. The default is the value of `CLAYSTONE_TUNING`, or
/// [`Level::None`] without it.
///
/// ```
/// use claystone::{Device, tune};
/// for device in Device::all().into_iter().filter(|&device| device != Device::Cpu) {
///     tune::set_level(device, tune::Level::Fast)?;
///     assert_eq!(tune::level(device)?, tune::Level::Fast);
///     tune::set_level(device, tune::Level::None)?;
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Errors of [`parameters`].
pub fn set_level(device: Device, level: Level) -> Result<()> {
    backend::tuning(device)?.set_level(level);
    Ok(())
}

/// Returns the choices made for kernels and classes of sizes, by this process and earlier processes.
///
/// # Errors
/// Errors of [`parameters`].
pub fn choices(device: Device) -> Result<Vec<Choice>> {
    Ok(backend::tuning(device)?.choices())
}

/// Returns the number of classes whose trial has begun and has not ended. A launch that ends a trial may begin another at the next call, so a step is
/// fully tuned once this number is 0 both before and after the step.
///
/// # Errors
/// Errors of [`parameters`].
pub fn on_trial(device: Device) -> Result<usize> {
    Ok(backend::tuning(device)?.on_trial())
}

/// Enables or disables [`choices`] for this process, to compare times with and without them. While choices are disabled, the defaults are used and no
/// trials run.
///
/// # Errors
/// Errors of [`parameters`].
pub fn use_choices(device: Device, on: bool) -> Result<()> {
    backend::tuning(device)?.use_choices(on);
    Ok(())
}

/// Deletes all [`choices`], in this process and in the file. Use this after a change of the driver or the machine.
///
/// # Errors
/// Errors of [`parameters`], and an error if the file cannot be written.
pub fn forget(device: Device) -> Result<()> {
    let tuning = backend::tuning(device)?;
    tuning.forget_choices();
    tuning.save().map(drop).map_err(|error| save_error(&error))
}

/// Makes choices for sums, copies and products of many usual sizes, with as many trials as `level` says. Calls `each` after every
/// workload with the number of choices so far. Each choice is saved when it is made.
///
/// # Errors
/// Errors of [`parameters`] and of the operations.
pub fn ahead(device: Device, level: Level, mut each: impl FnMut(usize)) -> Result<()> {
    let tuning = backend::tuning(device)?;
    let before = tuning.level();
    let done = tuning.usual_workloads().into_iter().try_for_each(|workload| {
        tuning.set_level(level); // also abandons trials that the previous workload left open
        let operands = workload.operands(device)?;
        for _ in 0..MAX_CALLS {
            let begun = tuning.on_trial();
            workload.run(&operands)?;
            if begun + tuning.on_trial() == 0 {
                break;
            }
        }
        each(tuning.choices().len());
        Ok(())
    });
    tuning.set_level(before);
    done
}

fn save_error(error: &io::Error) -> Error {
    Error::invalid("tune", format!("the results cannot be saved: {error}"))
}

/// Disables choices and trials while a device's parameters are measured, and restores the previous setting when dropped.
struct ChoicesDisabled<'a> {
    tuning: &'a dyn Tuning,
    /// Whether choices were enabled before.
    were_enabled: bool,
}

impl ChoicesDisabled<'_> {
    fn new(tuning: &dyn Tuning) -> ChoicesDisabled<'_> {
        ChoicesDisabled { tuning, were_enabled: tuning.use_choices(false) }
    }
}

impl Drop for ChoicesDisabled<'_> {
    fn drop(&mut self) {
        self.tuning.use_choices(self.were_enabled);
    }
}

/// Sets a parameter. Fails if the device's results differ from the CPU's at sizes around the block boundaries of `choice`.
fn check_choice(tuning: &dyn Tuning, device: Device, i: usize, name: &str, choice: usize) -> Result<()> {
    tuning.set(i, choice);
    tuning.edge_workloads(i).into_iter().try_for_each(|workload| workload.check(device, name, choice))
}

fn measure_parameter(tuning: &dyn Tuning, device: Device, i: usize) -> Result<Measured> {
    let p = tuning.parameters().swap_remove(i);
    let workload = tuning.workload(i);
    let operands = workload.operands(device)?;
    let mut times = vec![f64::INFINITY; p.choices.len()];
    for round in 0..MEASUREMENT_ROUNDS {
        for (time, &choice) in times.iter_mut().zip(p.choices) {
            tuning.set(i, choice);
            if round == 0 {
                check_choice(tuning, device, i, p.name, choice)?;
                workload.check(device, p.name, choice)?;
            }
            *time = time.min(time_call(device, || workload.run(&operands))?);
        }
    }
    let timed = || p.choices.iter().copied().zip(times.iter().copied());
    let now = timed().find(|&(choice, _)| choice == p.value).map_or(f64::INFINITY, |(_, time)| time);
    let best = timed().min_by(|a, b| a.1.total_cmp(&b.1)).filter(|&(_, time)| time < MAX_TIME_RATIO * now);
    let value = best.map_or(p.value, |(choice, _)| choice);
    tuning.set(i, value);
    Ok(Measured { parameter: Parameter { value, ..p }, times })
}

/// Returns the time of a call in microseconds, averaged over consecutive calls.
fn time_call(device: Device, call: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let timed = |calls: usize| -> Result<f64> {
        let from = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        device.synchronize()?;
        Ok(from.elapsed().as_secs_f64() * 1e6)
    };
    let calls = (MIN_SAMPLE_MICROS / timed(1)?).ceil().clamp(1.0, 100.0) as usize;
    Ok(timed(calls)? / calls as f64)
}

impl Workload {
    fn operands(self, device: Device) -> Result<[Tensor; 2]> {
        // Small whole numbers made on the CPU, because their sums are exact.
        let make = |dims: &[usize], seed: usize, dtype: DType| -> Result<Tensor> {
            let values = (0..dims.iter().product()).map(|i: usize| ((i * i + i / 7 + seed) % 7) as f32 - 3.0);
            Tensor::from_vec(values.collect::<Vec<f32>>(), dims, Device::default())?.to_dtype(dtype)?.to_device(device)
        };
        let matrix = |rows, cols, transposed: bool, dtype| match transposed {
            true => make(&[cols, rows], rows, dtype)?.t(),
            false => make(&[rows, cols], cols, dtype),
        };
        match self {
            Workload::Add(n) => Ok([make(&[n], 0, DType::F32)?, make(&[n], 1, DType::F32)?]),
            Workload::AddUnaligned(n) => {
                let shifted = |seed| make(&[n + 1], seed, DType::F32)?.narrow(0, 1, n);
                Ok([shifted(0)?, shifted(1)?])
            }
            Workload::CopyTransposed(rows, cols, dtype) => {
                let t = matrix(rows, cols, true, dtype)?;
                Ok([t.shallow_clone(), t])
            }
            Workload::MatMul([m, n, k], [a, b], dtype) => Ok([matrix(m, k, a, dtype)?, matrix(k, n, b, dtype)?]),
            Workload::Convolution([n, c, o, side], k) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[o, c, k, k], 1, DType::F32)?])
            }
            Workload::Attention(dims) => Ok([make(&dims, 0, DType::F32)?, make(&dims, 1, DType::F32)?]),
            Workload::Depthwise([n, c, side], k) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[c, 1, k, k], 1, DType::F32)?])
            }
            Workload::Sort(dims, dtype) => {
                let lines = make(&dims, 0, dtype)?;
                Ok([lines.shallow_clone(), lines])
            }
            Workload::Pooling([n, c, side]) | Workload::AddImages([n, c, side]) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[n, c, side, side], 1, DType::F32)?])
            }
        }
    }

    fn run(self, [a, b]: &[Tensor; 2]) -> Result<Tensor> {
        // Runs in mode Auto whatever the process's mode, because choices apply to this mode.
        with_memory_mode(MemoryMode::Auto, || match self {
            Workload::Add(_) | Workload::AddUnaligned(_) | Workload::AddImages(_) => a.add(b),
            Workload::CopyTransposed(..) => a.contiguous(),
            Workload::MatMul(..) => a.matmul(b),
            Workload::Convolution(..) => a.conv2d(b, None, ConvOptions::default()),
            Workload::Pooling(_) => a.max_pool2d([2, 2], MaxPoolOptions::default()),
            Workload::Attention(_) => a.scaled_dot_product_attention(b, b, Attention::default()),
            Workload::Depthwise([_, groups, _], _) => a.conv2d(b, None, ConvOptions { groups, ..Default::default() }),
            Workload::Sort(..) => Ok(a.sort(-1, false)?.1),
        })
    }

    /// The largest accepted difference from the CPU's results: 0 for whole numbers, more for averages with rounded weights.
    fn tolerance(self) -> f32 {
        if matches!(self, Workload::Attention(_)) { 1e-5 } else { 0.0 }
    }

    /// Fails if the device's results differ from the CPU's.
    fn check(self, device: Device, name: &str, choice: usize) -> Result<()> {
        let cpu = Device::default();
        let values = |device: Device| -> Result<Vec<f32>> {
            self.run(&self.operands(device)?)?.to_device(cpu)?.to_dtype(DType::F32)?.to_vec()
        };
        let (ours, right) = (values(device)?, values(cpu)?);
        if ours.len() == right.len() && ours.iter().zip(&right).all(|(a, b)| (a - b).abs() <= self.tolerance()) {
            return Ok(());
        }
        let reason = format!("{self:?} gives a wrong result on {device} with {name} = {choice}: nothing is saved");
        Err(Error::invalid("tune", reason))
    }
}
