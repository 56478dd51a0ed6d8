//! Tuning of kernel parameters for a device: `claystone tune`.
//!
//! A parameter has a few choices, and a default for each class of devices. [`tune`] times the choices of every parameter. A choice
//! is timed only if the device's results with the choice match the CPU's at sizes around the choice's block boundaries, exactly for
//! whole numbers. A choice replaces the current value if the choice is at least 3 % faster. The results are saved beside the cached
//! programs, where later processes load them.
//!
//! The best value for a device is not the best for each kernel at each size. With a [`Level`] above `none`, set by [`set_level`] or
//! the environment variable `CLAYSTONE_TUNING`, ordinary launches are tuned as well, in classes. A class is a kernel with a range
//! of sizes: all numbers of work-items whose base-2 logarithms round down to the same integer. The first launches of a class try
//! other work-group sizes, or other values of the kernel's parameter. Each launch computes its result once, with one candidate, and
//! is timed alone. Trial launches wait for the device, and may round sums of floats differently than later launches. A candidate is
//! chosen if it is at least 3 % faster than the default, in the median of 15 launches that alternate with launches of the default.
//! The device should be otherwise idle. [`ahead`] runs these trials for usual sizes.
//!
//! Choices are kept in the same file as the parameters, are part of [`Device::export_cache`], and are used at every level until a
//! call of [`tune`] or [`forget`]. A class that has a choice is not measured again. The driver's preferred work-group size is not a
//! candidate, because that size depends on the divisors of one size and a class has many sizes.

mod workloads;

use std::path::PathBuf;
use std::time::Instant;

use crate::device::opencl::ClDevice;
pub use crate::device::opencl::tuning::Level;
use crate::device::opencl::tuning::{MAX_TIME_RATIO, ParameterRow, SizeClass, Subject, Tuning};
use crate::sync::OnDrop;
use crate::{Device, Error, Result, Tensor};
use workloads::{edge_workloads, timing_workload, usual_workloads};

/// The maximum number of calls of one workload by [`ahead`]; trials that have not ended by then are abandoned.
const MAX_CALLS: usize = 2000;
/// The number of times that each choice is measured, alternating with the other choices.
const MEASUREMENT_ROUNDS: usize = 5;
/// The minimum duration of a measurement, in microseconds.
const MIN_SAMPLE_MICROS: f64 = 4000.0;

/// A tuning parameter of a device's kernels.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parameter {
    /// The parameter's name in the file of tuned parameters.
    pub name: &'static str,
    /// One line that explains the parameter.
    pub doc: &'static str,
    /// The allowed values.
    pub choices: &'static [usize],
    /// The value on a device that was not tuned.
    pub default: usize,
    /// The value on this device.
    pub value: usize,
}

/// The fastest measured value of a parameter or of a kernel's work-group size, for one class of sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// A parameter's name, or `group_` and a number for the work-group size of one kernel.
    pub name: String,
    /// The sizes of the class, each as its base-2 logarithm rounded down, padded with zeros.
    pub sizes: Vec<u32>,
    /// The fastest value.
    pub value: usize,
}

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
    let cl = open(device)?;
    Ok(cl.tuning().rows().map(|row| parameter(cl, row)).collect())
}

fn open(device: Device) -> Result<&'static ClDevice> {
    device.opencl("tune", "the CPU's loops have no parameters: name an OpenCL device")
}

fn parameter(cl: &ClDevice, row: &'static ParameterRow) -> Parameter {
    let ParameterRow { knob, name, doc, choices, .. } = *row;
    Parameter { name, doc, choices, default: row.default(cl.tuning().family), value: cl.tuned(knob) }
}

/// Measures the choices of every parameter, sets the best, and saves them for later processes. Returns the file, or `None` if there is no cache of
/// programs. Calls `each` after every parameter. Takes one to two minutes, mostly for building kernels. The device should be otherwise idle.
///
/// # Errors
/// Errors of [`parameters`]. If a choice gives a wrong result, nothing is saved and all parameters get their previous values back.
pub fn tune(device: Device, mut each: impl FnMut(&Measured)) -> Result<Option<PathBuf>> {
    let cl = open(device)?;
    let before: Vec<_> = cl.tuning().rows().map(|row| (row.knob, cl.tuned(row.knob))).collect();
    let _guard = disable_choices(cl.tuning());
    cl.tuning().rows().for_each(|row| cl.tuning().set(row.knob, row.default(cl.tuning().family)));
    for row in cl.tuning().rows() {
        match measure_parameter(cl, row) {
            Ok(measured) => each(&measured),
            Err(error) => {
                before.into_iter().for_each(|(knob, value)| cl.tuning().set(knob, value));
                return Err(error);
            }
        }
    }
    cl.tuning().forget_choices(); // choices were measured with the previous parameter values
    save(cl)
}

/// Runs every choice of every parameter at the sizes that [`tune`] checks, and compares the results with the CPU's.
///
/// # Errors
/// Errors of [`tune`].
pub fn check(device: Device) -> Result<()> {
    let cl = open(device)?;
    let _guard = disable_choices(cl.tuning());
    cl.tuning().rows().try_for_each(|row| {
        let before = cl.tuned(row.knob);
        let checked = row.choices.iter().try_for_each(|&choice| check_choice(cl, row, choice));
        cl.tuning().set(row.knob, before);
        checked
    })
}

/// Returns the level of tuning during ordinary work on the device.
///
/// # Errors
/// Errors of [`parameters`].
pub fn level(device: Device) -> Result<Level> {
    Ok(open(device)?.tuning().choices.level())
}

/// Sets this process's level of tuning during ordinary work on the device. The default is the value of `CLAYSTONE_TUNING`, or
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
    open(device)?.tuning().set_level(level);
    Ok(())
}

/// Returns the choices made for kernels and classes of sizes, by this process and earlier processes.
///
/// # Errors
/// Errors of [`parameters`].
pub fn choices(device: Device) -> Result<Vec<Choice>> {
    let chosen = open(device)?.tuning().choices.chosen().into_iter();
    let choice = |((subject, class), value): ((Subject, SizeClass), usize)| Choice {
        name: subject.name(),
        sizes: class.logarithms(),
        value,
    };
    Ok(chosen.map(choice).collect())
}

/// Returns the number of classes whose trial has begun and has not ended. When a trial ends, the next launch of the class may begin
/// another, so a step is fully tuned once this number is 0 both before and after the step.
///
/// # Errors
/// Errors of [`parameters`].
pub fn on_trial(device: Device) -> Result<usize> {
    Ok(open(device)?.tuning().choices.on_trial())
}

/// Enables or disables [`choices`] for this process, to compare times with and without them. While choices are disabled, the defaults are used and no
/// trials run.
///
/// # Errors
/// Errors of [`parameters`].
pub fn use_choices(device: Device, on: bool) -> Result<()> {
    open(device)?.tuning().use_choices(on);
    Ok(())
}

/// Deletes all [`choices`], in this process and in the file. Use this after a change of the driver or the machine.
///
/// # Errors
/// Errors of [`parameters`], and an error if the file cannot be written.
pub fn forget(device: Device) -> Result<()> {
    let cl = open(device)?;
    cl.tuning().forget_choices();
    save(cl).map(drop)
}

/// Makes choices for sums, copies and products of many usual sizes, with as many trials as `level` says. Calls `each` after every
/// workload with the number of choices so far. Each choice is saved when it is made.
///
/// # Errors
/// Errors of [`parameters`] and of the operations.
pub fn ahead(device: Device, level: Level, mut each: impl FnMut(usize)) -> Result<()> {
    let tuning = open(device)?.tuning();
    let before = tuning.choices.level();
    let done = usual_workloads().into_iter().try_for_each(|workload| {
        tuning.set_level(level); // also abandons trials that the previous workload left open
        let operands = workload.operands(device)?;
        for _ in 0..MAX_CALLS {
            let begun = tuning.choices.on_trial();
            workload.run(&operands)?;
            if begun + tuning.choices.on_trial() == 0 {
                break;
            }
        }
        each(tuning.choices.chosen().len());
        Ok(())
    });
    tuning.set_level(before);
    done
}

fn save(cl: &ClDevice) -> Result<Option<PathBuf>> {
    cl.tuning().save().map_err(|error| Error::invalid("tune", format!("the results cannot be saved: {error}")))
}

/// Disables choices and trials while a device's parameters are measured. Dropping the result restores the previous setting.
fn disable_choices(tuning: &Tuning) -> OnDrop<impl FnMut()> {
    let were_enabled = tuning.use_choices(false);
    OnDrop(move || _ = tuning.use_choices(were_enabled))
}

/// Sets a parameter to `choice`, and fails if results differ from the CPU's at sizes around the block boundaries of `choice`.
fn check_choice(cl: &ClDevice, row: &ParameterRow, choice: usize) -> Result<()> {
    cl.tuning().set(row.knob, choice);
    edge_workloads(cl, row.knob).into_iter().try_for_each(|workload| workload.check(cl.device(), row.name, choice))
}

fn measure_parameter(cl: &ClDevice, row: &'static ParameterRow) -> Result<Measured> {
    let (device, p, workload) = (cl.device(), parameter(cl, row), timing_workload(row.knob));
    let operands = workload.operands(device)?;
    let mut times = vec![f64::INFINITY; p.choices.len()];
    for round in 0..MEASUREMENT_ROUNDS {
        for (time, &choice) in times.iter_mut().zip(p.choices) {
            cl.tuning().set(row.knob, choice);
            if round == 0 {
                check_choice(cl, row, choice)?;
                workload.check(device, p.name, choice)?;
            }
            *time = time.min(time_call(device, || workload.run(&operands))?);
        }
    }
    let timed = || p.choices.iter().copied().zip(times.iter().copied());
    let now = timed().find(|&(choice, _)| choice == p.value).map_or(f64::INFINITY, |(_, time)| time);
    let best = timed().min_by(|a, b| a.1.total_cmp(&b.1)).filter(|&(_, time)| time < MAX_TIME_RATIO * now);
    let value = best.map_or(p.value, |(choice, _)| choice);
    cl.tuning().set(row.knob, value);
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
