//! Finding out which parameters of kernels suit a device: `claystone tune`.
//!
//! Each parameter that depends on the device has a few choices and a default for each class of devices. [`tune`] tries
//! them one after another: a choice has to give the CPU's results, to the last bit of whole numbers, at sizes around the edges
//! that it makes, before it is timed. It becomes the device's where it is at least 3 % faster than what was; the result
//! is kept beside the cached programs, and later processes have it.

use std::path::PathBuf;
use std::time::Instant;

pub use crate::backend::problem::tuning::Parameter;
use crate::backend::problem::tuning::{Tuning, Workload};
use crate::{DType, Device, Error, Result, Tensor, backend};

/// A faster choice is taken if it takes less than this part of the time.
const WORTH: f64 = 0.97;
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
    tuning.save().map_err(|error| Error::invalid("tune", format!("the results cannot be kept: {error}")))
}

/// Runs every choice of every parameter at the sizes that [`tune`] checks, and compares the results with the CPU's.
///
/// # Errors
/// As [`tune`].
pub fn check(device: Device) -> Result<()> {
    let tuning = backend::of(device).tuning(device)?;
    for (i, p) in tuning.parameters().iter().enumerate() {
        let checked = p.choices.iter().try_for_each(|&choice| check_choice(&*tuning, device, i, p.name, choice));
        tuning.set(i, p.value);
        checked?;
    }
    Ok(())
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
        }
    }

    fn run(self, [a, b]: &[Tensor; 2]) -> Result<Tensor> {
        match self {
            Workload::Sum(_) | Workload::Shifted(_) => a.add(b),
            Workload::Transposed(..) => a.contiguous(),
            Workload::Product(..) => a.matmul(b),
        }
    }

    /// Fails where the device does not compute what the CPU does.
    fn check(self, device: Device, name: &str, choice: usize) -> Result<()> {
        let cpu = Device::default();
        let values = |device: Device| -> Result<Vec<f32>> {
            self.run(&self.operands(device)?)?.to_device(cpu)?.to_dtype(DType::F32)?.to_vec()
        };
        if values(device)? == values(cpu)? {
            return Ok(());
        }
        let reason = format!("{self:?} is wrong on {device} where {name} is {choice}: nothing is kept");
        Err(Error::invalid("tune", reason))
    }
}
