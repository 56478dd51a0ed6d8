//! Finding out which parameters of kernels suit a device: `claystone tune`.
//!
//! Each parameter that depends on the device has a few choices and a default for each class of devices. [`tune`] tries
//! them one after another: a choice has to give the CPU's results, to the last bit of whole numbers, at sizes around the edges
//! that it makes, before it is timed. It becomes the device's where it is at least 3 % faster than what was; the result
//! is kept beside the cached programs, and later processes have it.

use std::path::PathBuf;
use std::time::Instant;

use crate::device::opencl::{self, ClDevice, Knob, PARAMETERS, Tunable};
use crate::{DType, Device, Error, Result, Tensor};

/// A faster choice is taken if it takes less than this part of the time.
const WORTH: f64 = 0.97;
/// Times that a choice is measured, in turns with the others.
const ROUNDS: usize = 5;
/// Microseconds that a measurement takes at least.
const SAMPLE: f64 = 4000.0;

/// A parameter of a device's kernels.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parameter {
    /// As it is called in the file.
    pub name: &'static str,
    /// What it is.
    pub doc: &'static str,
    /// What it may be.
    pub choices: &'static [usize],
    /// What it is where nobody has measured.
    pub default: usize,
    /// What it is on this device.
    pub value: usize,
}

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
    let cl = opened(device)?;
    Ok(rows(cl).map(|row| parameter(cl, row)).collect())
}

/// Measures every parameter's choices, sets the best, and keeps them for later processes: gives the file, unless there is no
/// cache of programs. `each` is told of every parameter as it is done. Takes a minute or two, most of it for building
/// kernels; the device should have nothing else to do.
///
/// # Errors
/// As [`parameters`]; where a choice gives a wrong result, nothing is kept, and all parameters are what they were.
pub fn tune(device: Device, mut each: impl FnMut(&Measured)) -> Result<Option<PathBuf>> {
    let cl = opened(device)?;
    let before: Vec<usize> = rows(cl).map(|row| cl.tuned(row.knob)).collect();
    rows(cl).for_each(|row| cl.set_tuned(row.knob, row.default(cl.family())));
    for row in rows(cl) {
        match measure(cl, row) {
            Ok(measured) => each(&measured),
            Err(error) => {
                rows(cl).zip(before).for_each(|(row, value)| cl.set_tuned(row.knob, value));
                return Err(error);
            }
        }
    }
    cl.save_tuning().map_err(|error| Error::invalid("tune", format!("the results cannot be kept: {error}")))
}

/// Runs every choice of every parameter at the sizes that [`tune`] checks, and compares the results with the CPU's.
///
/// # Errors
/// As [`tune`].
pub fn check(device: Device) -> Result<()> {
    let cl = opened(device)?;
    for row in rows(cl) {
        let before = cl.tuned(row.knob);
        let checked = row.choices.iter().try_for_each(|&choice| {
            cl.set_tuned(row.knob, choice);
            edges(cl, row.knob).iter().try_for_each(|problem| problem.check(device, row, choice))
        });
        cl.set_tuned(row.knob, before);
        checked?;
    }
    Ok(())
}

fn opened(device: Device) -> Result<&'static ClDevice> {
    match device {
        Device::OpenCL(index) => opencl::open(index),
        Device::Cpu => Err(Error::invalid("tune", "the CPU's loops have no parameters: name an OpenCL device")),
    }
}

fn rows(cl: &ClDevice) -> impl Iterator<Item = &'static Tunable> {
    let family = cl.family();
    PARAMETERS.iter().filter(move |row| row.families.contains(&family))
}

fn parameter(cl: &ClDevice, row: &'static Tunable) -> Parameter {
    let Tunable { knob, name, doc, choices, .. } = *row;
    Parameter { name, doc, choices, default: row.default(cl.family()), value: cl.tuned(knob) }
}

fn measure(cl: &'static ClDevice, row: &'static Tunable) -> Result<Measured> {
    let (device, before) = (cl.device(), cl.tuned(row.knob));
    let problem = large(row.knob);
    let operands = problem.operands(device)?;
    let mut times = vec![f64::INFINITY; row.choices.len()];
    for round in 0..ROUNDS {
        for (time, &choice) in times.iter_mut().zip(row.choices) {
            cl.set_tuned(row.knob, choice);
            if round == 0 {
                edges(cl, row.knob).iter().try_for_each(|problem| problem.check(device, row, choice))?;
                problem.check(device, row, choice)?;
            }
            *time = time.min(sample(device, || problem.run(&operands))?);
        }
    }
    let timed = || row.choices.iter().copied().zip(times.iter().copied());
    let now = timed().find(|&(choice, _)| choice == before).map_or(f64::INFINITY, |(_, time)| time);
    let best = timed().min_by(|a, b| a.1.total_cmp(&b.1)).filter(|&(_, time)| time < WORTH * now);
    cl.set_tuned(row.knob, best.map_or(before, |(choice, _)| choice));
    Ok(Measured { parameter: parameter(cl, row), times })
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

/// Something to compute whose kernel has the parameter.
#[derive(Debug, Clone, Copy)]
enum Problem {
    /// A sum of so many elements.
    Sum(usize),
    /// The same, of elements that do not begin where a vector does.
    Shifted(usize),
    /// A matrix of so many rows and columns, transposed.
    Transposed(usize, usize, DType),
    /// `[m, k]` times `[k, n]`, the matrices transposed in memory or not.
    Product([usize; 3], [bool; 2], DType),
}

impl Problem {
    fn operands(self, device: Device) -> Result<[Tensor; 2]> {
        // Small whole numbers: no sum of them is rounded.
        let make = |dims: &[usize], seed: usize, dtype: DType| -> Result<Tensor> {
            let values = (0..dims.iter().product()).map(|i: usize| ((i * i + i / 7 + seed) % 7) as f32 - 3.0);
            Tensor::from_vec(values.collect::<Vec<f32>>(), dims, Device::Cpu)?.to_dtype(dtype)?.to_device(device)
        };
        let matrix = |rows, cols, transposed: bool, dtype| match transposed {
            true => make(&[cols, rows], rows, dtype)?.t(),
            false => make(&[rows, cols], cols, dtype),
        };
        match self {
            Problem::Sum(n) => Ok([make(&[n], 0, DType::F32)?, make(&[n], 1, DType::F32)?]),
            Problem::Shifted(n) => {
                let shifted = |seed| make(&[n + 1], seed, DType::F32)?.narrow(0, 1, n);
                Ok([shifted(0)?, shifted(1)?])
            }
            Problem::Transposed(rows, cols, dtype) => {
                let t = matrix(rows, cols, true, dtype)?;
                Ok([t.shallow_clone(), t])
            }
            Problem::Product([m, n, k], [a, b], dtype) => Ok([matrix(m, k, a, dtype)?, matrix(k, n, b, dtype)?]),
        }
    }

    fn run(self, [a, b]: &[Tensor; 2]) -> Result<Tensor> {
        match self {
            Problem::Sum(_) | Problem::Shifted(_) => a.add(b),
            Problem::Transposed(..) => a.contiguous(),
            Problem::Product(..) => a.matmul(b),
        }
    }

    /// Fails where the device does not compute what the CPU does.
    fn check(self, device: Device, row: &Tunable, choice: usize) -> Result<()> {
        let values = |device: Device| -> Result<Vec<f32>> {
            self.run(&self.operands(device)?)?.to_device(Device::Cpu)?.to_dtype(DType::F32)?.to_vec()
        };
        if values(device)? == values(Device::Cpu)? {
            return Ok(());
        }
        let reason = format!("{self:?} is wrong on {device} where {} is {choice}: nothing is kept", row.name);
        Err(Error::invalid("tune", reason))
    }
}

/// What the choices are timed with.
fn large(knob: Knob) -> Problem {
    match knob {
        Knob::MapGroup => Problem::Sum(1 << 22),
        Knob::MapLoads => Problem::Shifted(1 << 22),
        Knob::TurnTile | Knob::TurnLine => Problem::Transposed(4096, 4096, DType::F32),
        Knob::PanelRows | Knob::PanelVectors | Knob::PanelDepth | Knob::PanelBlock => {
            Problem::Product([1024; 3], [false; 2], DType::F32)
        }
        Knob::DotSide => Problem::Product([512; 3], [false, true], DType::F32),
        // Less deep than tensor cores take.
        Knob::Tile => Problem::Product([2048, 2048, 64], [false; 2], DType::F32),
    }
}

/// Sizes around the edges that the parameter makes with its present value.
fn edges(cl: &ClDevice, knob: Knob) -> Vec<Problem> {
    let value = cl.tuned(knob);
    match knob {
        // Four elements a work-item.
        Knob::MapGroup => [1, value, 4 * value - 1, 4 * value, 4 * value + 1].map(Problem::Sum).into(),
        Knob::MapLoads => [1, 255 * value, 256 * value, 256 * value + 1].map(Problem::Shifted).into(),
        Knob::TurnTile | Knob::TurnLine => {
            let side = value;
            let sizes = [(side, side), (side - 1, side + 1), (2 * side, side), (2 * side + 1, 3 * side - 1)];
            let all = sizes.into_iter().flat_map(|(r, c)| [DType::F32, DType::BF16].map(|t| (r, c, t)));
            all.map(|(rows, cols, dtype)| Problem::Transposed(rows, cols, dtype)).collect()
        }
        Knob::PanelRows | Knob::PanelVectors | Knob::PanelDepth | Knob::PanelBlock => {
            let [r, v, d, b] =
                [Knob::PanelRows, Knob::PanelVectors, Knob::PanelDepth, Knob::PanelBlock].map(|knob| cl.tuned(knob));
            let w = 16 * v;
            let sizes = [[1, w, d], [r, w, d + 1], [r + 1, w + 1, d - 1], [b + 1, 2 * w - 1, 2 * d + 1], [b, 3, 9]];
            let transposed = [false, true].map(|a| sizes.map(|size| Problem::Product(size, [a, false], DType::F32)));
            let half = Problem::Product([b - 1, 8 * w + 3, d], [false; 2], DType::F16);
            transposed.into_iter().flatten().chain([half]).collect()
        }
        Knob::DotSide => [[1, value + 1, 17], [value, value, 16], [2 * value - 1, value + 1, 33]]
            .map(|size| Problem::Product(size, [false, true], DType::F32))
            .into(),
        Knob::Tile => {
            let sizes = [[value, value, 32], [value - 1, value + 1, 33], [2 * value + 1, value, 65]];
            let turns = [[false, false], [true, true]];
            sizes.into_iter().flat_map(|s| turns.map(|t| Problem::Product(s, t, DType::F32))).collect()
        }
    }
}
