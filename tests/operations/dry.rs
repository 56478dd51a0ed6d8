//! Dry runs of every operation of the catalogue: results have the shapes of a real run, and the estimate is its peak.

use claystone::ops::{self, Generator};
use claystone::{DType, Device, Result, Tensor, storage};

use crate::bad_input::rows;
use crate::common::{in_own_process, opencl};
use crate::harness::Case;

/// The shape and the dtype of each result.
type Described = Vec<(Vec<usize>, DType)>;

/// Operations whose results' sizes depend on values. In a dry run the results have the largest possible sizes.
const SIZES_OF_VALUES: [&str; 9] = [
    "argwhere",
    "index",
    "masked_select",
    "nonzero",
    "unique",
    "unique_all",
    "unique_consecutive",
    "unique_counts",
    "unique_inverse",
];

/// Runs a case. With `unknown`, its tensors are parts of large storages, whose values a dry run does not know.
fn run(case: &Case, choice: usize, device: Device, unknown: bool) -> Result<Described> {
    let (mut tensors, arguments) = case.parts(choice, device)?;
    if unknown {
        let in_large_storage = |x: &Tensor| -> Result<Tensor> {
            let large = Tensor::empty(x.numel() + (64 << 10), (x.dtype(), x.device()))?;
            large.slice(0, None, Some(x.numel() as isize), 1)?.reshape(x.shape().dims())
        };
        tensors = tensors.iter().map(in_large_storage).collect::<Result<_>>()?;
    }
    let call = || ops::call(case.op.name, &case.slots(&tensors), &arguments);
    let results = ops::with_generator(&Generator::new(7), call)?;
    Ok(results.iter().map(|x| (x.shape().dims().to_vec(), x.dtype())).collect())
}

/// Compares a dry run with a real run. Returns a message if they differ.
fn compare(case: &Case, choice: usize, device: Device, unknown: bool, real: &Result<Described>) -> Option<String> {
    let name = case.op.name;
    let (dry, estimate) = storage::dry_run(None, || run(case, choice, device, unknown)).unwrap();
    _ = estimate.to_string();
    let is_larger = |real: &Described, dry: &Described| {
        let dims = real.iter().zip(dry).flat_map(|((real, _), (dry, _))| real.iter().zip(dry));
        real.len() == dry.len() && dims.into_iter().all(|(real, dry)| real <= dry)
    };
    match (real, dry) {
        (Ok(real), Ok(dry)) if *real == dry => None,
        (Ok(real), Ok(dry)) if SIZES_OF_VALUES.contains(&name) && is_larger(real, &dry) => None,
        (Ok(_), Err(error)) if error.to_string().contains("a dry run does not compute the repetitions") => None,
        // Errors that depend on values, such as a division by zero, are not found.
        (Err(_), _) => None,
        (real, dry) => {
            Some(format!("{name} on {device}, unknown {unknown}: {dry:?} in a dry run, {real:?} in a real run"))
        }
    }
}

fn cases() -> impl Iterator<Item = (usize, Case)> {
    crate::all_cases().into_iter().chain(rows()).enumerate()
}

#[test]
fn dry_runs_have_the_shapes_of_real_runs() {
    let mut wrong = Vec::new();
    for (k, case) in cases() {
        let real = run(&case, k, Device::Cpu, false);
        wrong.extend([false, true].into_iter().filter_map(|unknown| compare(&case, k, Device::Cpu, unknown, &real)));
        // All elementwise formulas take the same path through a backend.
        let device = opencl().next().filter(|_| case.op.row().is_none() || k % 16 == 0);
        wrong.extend(device.and_then(|device| compare(&case, k, device, false, &real)));
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn dry_runs_have_the_peaks_of_real_runs() {
    if !in_own_process("dry::dry_runs_have_the_peaks_of_real_runs") {
        return;
    }
    let mut wrong = Vec::new();
    for (k, case) in cases() {
        let call = || run(&case, k, Device::Cpu, false);
        let (_, estimate) = storage::dry_run(None, call).unwrap();
        let dry = estimate.devices.first().map_or(0, |cpu| cpu.peak_allocated);
        let before = Device::Cpu.memory_stats().unwrap().allocated_bytes.current;
        let (real, peak) = storage::peak(Device::Cpu, call).unwrap();
        let peak = peak.allocated - before;
        if real.is_ok() && dry != peak {
            wrong.push(format!("{}: {dry} bytes in a dry run, {peak} in a real run", case.op.name));
        }
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}
