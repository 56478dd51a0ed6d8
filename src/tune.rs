//! Finding out which parameters of kernels suit a device: `claystone tune`.
//!
//! Each parameter that depends on the device has a few choices and a default for each class of devices. [`tune`] tries
//! them one after another: a choice has to give the CPU's results, to the last bit of whole numbers, at sizes around the edges
//! that it makes, before it is timed. It becomes the device's where it is at least 3 % faster than what was; the result
//! is kept beside the cached programs, and later processes have it.
//!
//! What suits a device on the whole need not suit each kernel at each size. With a [`Level`] above `none`, by [`set_level`] or
//! the environment variable `CLAYSTONE_TUNING`, the first launches of a kernel over about so many work-items (a class: sizes
//! with the same power of two below them) try other work-groups, and those of a parameter's kernels its other values. Each
//! launch does its work once, with a candidate, and is timed alone: the first launches wait, and sums of floats may be
//! rounded otherwise in them than later. A candidate is chosen if it is at least 3 % faster than the default, in the median of
//! 15 launches in turns with it. The device should have nothing else to do meanwhile. [`ahead`] does that for usual sizes.
//! Choices are kept in the same file, are in what [`Device::export_cache`] writes, and are used at every level, until [`tune`]
//! or [`forget`]; a class that is chosen for is not measured again. The driver's own choice of a group is not a candidate: it
//! follows from the divisors of one size, and a class has many.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

pub use crate::backend::problem::tuning::{Choice, Level, Parameter};
use crate::backend::problem::tuning::{Tuning, Workload};
use crate::device::level::WORTH;
use crate::ops::Attention;
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{ConvOptions, DType, Device, Error, MaxPoolOptions, Result, Tensor, backend};

/// Calls of a workload after which it is left as it is: what is on trial then is not measured by it.
const CALLS: usize = 2000;
/// Times that a choice is measured, in turns with the others.
const ROUNDS: usize = 5;
/// Microseconds that a measurement takes at least.
const SAMPLE: f64 = 4000.0;

/// A parameter with what its choices take.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Measured {
    /// With the value that was chosen.
    pub parameter: Parameter,
    /// Microseconds of each choice.
    pub times: Vec<f64>,
}

/// The parameters of a device's kernels, as they are now.
///
/// # Errors
/// [`Error::NoDevice`] if it is not there; [`Error::Invalid`] for the CPU, whose loops have none.
pub fn parameters(device: Device) -> Result<Vec<Parameter>> {
    Ok(backend::of(device).tuning(device)?.parameters())
}

/// Measures every parameter's choices, sets the best, and keeps them for later processes: gives the file, unless there is no
/// cache of programs. `each` is told of every parameter as it is done. Takes a minute or two, most of it for building
/// kernels; the device should have nothing else to do.
///
/// # Errors
/// As [`parameters`]; where a choice gives a wrong result, nothing is kept, and all parameters are what they were.
pub fn tune(device: Device, mut each: impl FnMut(&Measured)) -> Result<Option<PathBuf>> {
    let tuning = backend::of(device).tuning(device)?;
    let before = tuning.parameters();
    let _alone = Alone::new(&*tuning);
    before.iter().enumerate().for_each(|(i, p)| tuning.set(i, p.default));
    for i in 0..before.len() {
        match measure(&*tuning, device, i) {
            Ok(measured) => each(&measured),
            Err(error) => {
                before.iter().enumerate().for_each(|(i, p)| tuning.set(i, p.value));
                return Err(error);
            }
        }
    }
    tuning.forget_choices(); // they were made beside other values
    tuning.save().map_err(|error| not_kept(&error))
}

/// Runs every choice of every parameter at the sizes that [`tune`] checks, and compares the results with the CPU's.
///
/// # Errors
/// As [`tune`].
pub fn check(device: Device) -> Result<()> {
    let tuning = backend::of(device).tuning(device)?;
    let _alone = Alone::new(&*tuning);
    for (i, p) in tuning.parameters().iter().enumerate() {
        let checked = p.choices.iter().try_for_each(|&choice| check_choice(&*tuning, device, i, p.name, choice));
        tuning.set(i, p.value);
        checked?;
    }
    Ok(())
}

/// How much is tried in ordinary work on the device.
///
/// # Errors
/// As [`parameters`].
pub fn level(device: Device) -> Result<Level> {
    Ok(backend::of(device).tuning(device)?.level())
}

/// Has more or less tried, in this process from now on. Without this it is what `CLAYSTONE_TUNING` says, else
/// [`Level::None`].
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
/// As [`parameters`].
pub fn set_level(device: Device, level: Level) -> Result<()> {
    backend::of(device).tuning(device)?.set_level(level);
    Ok(())
}

/// What was chosen for kernels and classes of sizes, by this process and those before.
///
/// # Errors
/// As [`parameters`].
pub fn choices(device: Device) -> Result<Vec<Choice>> {
    Ok(backend::of(device).tuning(device)?.choices())
}

/// How many choices have been begun and are not made yet. A call that makes one may begin another the next time: once there
/// is none before a step and none after it, the step has nothing left to choose.
///
/// # Errors
/// As [`parameters`].
pub fn on_trial(device: Device) -> Result<usize> {
    Ok(backend::of(device).tuning(device)?.on_trial())
}

/// Whether [`choices`] are used, in this process from now on: to compare times with and without them. The defaults are used
/// otherwise, and nothing is tried.
///
/// # Errors
/// As [`parameters`].
pub fn use_choices(device: Device, on: bool) -> Result<()> {
    backend::of(device).tuning(device)?.use_choices(on);
    Ok(())
}

/// Forgets [`choices`], and the file has none: for a driver or a machine that has changed.
///
/// # Errors
/// As [`parameters`], and where the file cannot be written.
pub fn forget(device: Device) -> Result<()> {
    let tuning = backend::of(device).tuning(device)?;
    tuning.forget_choices();
    tuning.save().map(drop).map_err(|error| not_kept(&error))
}

/// Makes choices for sums, copies and products of many usual sizes, trying as much as the level says, and calls `each` after
/// every one with how many choices there are. They are kept as they are made.
///
/// # Errors
/// As [`parameters`], and those of the operations.
pub fn ahead(device: Device, level: Level, mut each: impl FnMut(usize)) -> Result<()> {
    let tuning = backend::of(device).tuning(device)?;
    let before = tuning.level();
    let done = tuning.ordinary().into_iter().try_for_each(|workload| {
        tuning.set_level(level); // and what another workload left on trial is not any more
        let operands = workload.operands(device)?;
        for _ in 0..CALLS {
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

fn not_kept(error: &io::Error) -> Error {
    Error::invalid("tune", format!("the results cannot be kept: {error}"))
}

/// Measures a device's parameters as if there were no choices, and tries nothing meanwhile.
struct Alone<'a> {
    tuning: &'a dyn Tuning,
    /// Whether choices were used before.
    used: bool,
}

impl Alone<'_> {
    fn new(tuning: &dyn Tuning) -> Alone<'_> {
        Alone { tuning, used: tuning.use_choices(false) }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.tuning.use_choices(self.used);
    }
}

/// Sets a parameter, and fails where the device does not compute what the CPU does around the edges that this makes.
fn check_choice(tuning: &dyn Tuning, device: Device, i: usize, name: &str, choice: usize) -> Result<()> {
    tuning.set(i, choice);
    tuning.edges(i).into_iter().try_for_each(|workload| workload.check(device, name, choice))
}

fn measure(tuning: &dyn Tuning, device: Device, i: usize) -> Result<Measured> {
    let p = tuning.parameters().swap_remove(i);
    let workload = tuning.workload(i);
    let operands = workload.operands(device)?;
    let mut times = vec![f64::INFINITY; p.choices.len()];
    for round in 0..ROUNDS {
        for (time, &choice) in times.iter_mut().zip(p.choices) {
            tuning.set(i, choice);
            if round == 0 {
                check_choice(tuning, device, i, p.name, choice)?;
                workload.check(device, p.name, choice)?;
            }
            *time = time.min(sample(device, || workload.run(&operands))?);
        }
    }
    let timed = || p.choices.iter().copied().zip(times.iter().copied());
    let now = timed().find(|&(choice, _)| choice == p.value).map_or(f64::INFINITY, |(_, time)| time);
    let best = timed().min_by(|a, b| a.1.total_cmp(&b.1)).filter(|&(_, time)| time < WORTH * now);
    let value = best.map_or(p.value, |(choice, _)| choice);
    tuning.set(i, value);
    Ok(Measured { parameter: Parameter { value, ..p }, times })
}

/// Microseconds of a call among several in a row.
fn sample(device: Device, call: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let timed = |calls: usize| -> Result<f64> {
        let from = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        device.synchronize()?;
        Ok(from.elapsed().as_secs_f64() * 1e6)
    };
    let calls = (SAMPLE / timed(1)?).ceil().clamp(1.0, 100.0) as usize;
    Ok(timed(calls)? / calls as f64)
}

impl Workload {
    fn operands(self, device: Device) -> Result<[Tensor; 2]> {
        // Small whole numbers, made on the CPU: no sum of them is rounded.
        let make = |dims: &[usize], seed: usize, dtype: DType| -> Result<Tensor> {
            let values = (0..dims.iter().product()).map(|i: usize| ((i * i + i / 7 + seed) % 7) as f32 - 3.0);
            Tensor::from_vec(values.collect::<Vec<f32>>(), dims, Device::default())?.to_dtype(dtype)?.to_device(device)
        };
        let matrix = |rows, cols, transposed: bool, dtype| match transposed {
            true => make(&[cols, rows], rows, dtype)?.t(),
            false => make(&[rows, cols], cols, dtype),
        };
        match self {
            Workload::Sum(n) => Ok([make(&[n], 0, DType::F32)?, make(&[n], 1, DType::F32)?]),
            Workload::Shifted(n) => {
                let shifted = |seed| make(&[n + 1], seed, DType::F32)?.narrow(0, 1, n);
                Ok([shifted(0)?, shifted(1)?])
            }
            Workload::Transposed(rows, cols, dtype) => {
                let t = matrix(rows, cols, true, dtype)?;
                Ok([t.shallow_clone(), t])
            }
            Workload::Product([m, n, k], [a, b], dtype) => Ok([matrix(m, k, a, dtype)?, matrix(k, n, b, dtype)?]),
            Workload::Convolution([n, c, o, side], k) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[o, c, k, k], 1, DType::F32)?])
            }
            Workload::Attention(dims) => Ok([make(&dims, 0, DType::F32)?, make(&dims, 1, DType::F32)?]),
            Workload::Depthwise([n, c, side], k) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[c, 1, k, k], 1, DType::F32)?])
            }
            Workload::Sorted(dims, dtype) => {
                let lines = make(&dims, 0, dtype)?;
                Ok([lines.shallow_clone(), lines])
            }
            Workload::Pooling([n, c, side]) | Workload::Added([n, c, side]) => {
                Ok([make(&[n, c, side, side], 0, DType::F32)?, make(&[n, c, side, side], 1, DType::F32)?])
            }
        }
    }

    fn run(self, [a, b]: &[Tensor; 2]) -> Result<Tensor> {
        // Whatever the process has: what is chosen is for this mode.
        with_memory_mode(MemoryMode::Auto, || match self {
            Workload::Sum(_) | Workload::Shifted(_) | Workload::Added(_) => a.add(b),
            Workload::Transposed(..) => a.contiguous(),
            Workload::Product(..) => a.matmul(b),
            Workload::Convolution(..) => a.conv2d(b, None, ConvOptions::default()),
            Workload::Pooling(_) => a.max_pool2d([2, 2], MaxPoolOptions::default()),
            Workload::Attention(_) => a.scaled_dot_product_attention(b, b, Attention::default()),
            Workload::Depthwise([_, groups, _], _) => a.conv2d(b, None, ConvOptions { groups, ..Default::default() }),
            Workload::Sorted(..) => Ok(a.sort(-1, false)?.1),
        })
    }

    /// How far results may be from the CPU's: whole numbers are the same, averages with rounded weights are not.
    fn tolerance(self) -> f32 {
        if matches!(self, Workload::Attention(_)) { 1e-5 } else { 0.0 }
    }

    /// Fails where the device does not compute what the CPU does.
    fn check(self, device: Device, name: &str, choice: usize) -> Result<()> {
        let cpu = Device::default();
        let values = |device: Device| -> Result<Vec<f32>> {
            self.run(&self.operands(device)?)?.to_device(cpu)?.to_dtype(DType::F32)?.to_vec()
        };
        let (ours, right) = (values(device)?, values(cpu)?);
        if ours.len() == right.len() && ours.iter().zip(&right).all(|(a, b)| (a - b).abs() <= self.tolerance()) {
            return Ok(());
        }
        let reason = format!("{self:?} is wrong on {device} where {name} is {choice}: nothing is kept");
        Err(Error::invalid("tune", reason))
    }
}
