//! Helpers for benches of training steps. They save the first weights and the data for PyTorch, time steps, record losses, and repeat the
//! steps in less memory.

use std::path::{Path, PathBuf};
use std::time::Instant;

use claystone::autograd::{StepUses, memory_budget};
use claystone::io::{self, StateDict};
use claystone::nn::Module;
use claystone::{Device, Result, Tensor};

/// The number of steps that are not timed. In these steps kernels are compiled and memory is allocated.
pub const WARM_UP_STEPS: usize = 10;

/// Copies the first weights and the data. `run` writes them to `path` after the steps.
pub fn copy_first_state(
    path: Option<PathBuf>,
    net: &impl Module,
    data: &[(&str, &Tensor)],
) -> Option<(PathBuf, StateDict)> {
    // `cargo bench` starts programs in benches/, but a relative path is meant relative to the repository.
    let repository = std::env::var_os("CARGO_MANIFEST_DIR").map(|benches| Path::new(&benches).join(".."));
    let path = repository.unwrap_or_default().join(path?);
    // The weights are copied: an optimiser cannot update parameters whose storage is shared in one launch.
    let mut first: StateDict = net.state_dict().iter().map(|(name, t)| (name.to_owned(), t.clone())).collect();
    data.iter().for_each(|(name, t)| first.insert(*name, t.shallow_clone()));
    Some((path, first))
}

/// Repetitions of the timed steps in less memory. The allocator has to spill: `CLAYSTONE_ALLOC_CONF=spill:host`.
#[derive(clap::Args)]
pub struct Memory {
    /// Repeat the steps with these parts of the peak as the memory limit (0.75,0.5,0.35)
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    limits: Vec<f64>,
    /// Repeat the steps with these parts of the peak as the budget of `memory_budget`
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    budgets: Vec<f64>,
}

/// Runs [`WARM_UP_STEPS`] steps, then `steps` timed steps. Prints the time, and writes `saved` with the losses. Then repeats the timed
/// steps, on the weights that training has reached, as `memory` says.
pub fn run(
    device: Device,
    steps: usize,
    mut step: impl FnMut(usize) -> Result<Tensor>,
    saved: Option<(PathBuf, StateDict)>,
    memory: &Memory,
) -> Result<()> {
    let mut losses = (0..WARM_UP_STEPS).map(&mut step).collect::<Result<Vec<_>>>()?;
    let ms = time(device, steps, |number| {
        losses.push(step(number)?);
        Ok(())
    })?;
    let losses = Tensor::stack(&losses.iter().collect::<Vec<_>>(), 0)?;
    let values = losses.to_vec::<f32>()?;
    let stats = device.memory_stats()?;
    let (peak, reserved) = (stats.allocated_bytes.peak, stats.reserved_bytes.peak);
    println!("{ms:.3} ms a step; losses {:.4} to {:.4}", values[0], values[values.len() - 1]);
    println!("at most {peak} bytes allocated, {reserved} reserved");
    if let Some((path, mut saved)) = saved {
        saved.insert("losses", losses);
        io::save(path, &saved)?;
    }
    let report = |kind: &str, part: f64, repeated: f64| -> Result<()> {
        let stats = device.memory_stats()?;
        let (percent, ratio, moved) = (1e2 * part, repeated / ms, stats.num_spills / steps as u64);
        print!("{kind} of {percent:.0} % of the peak: {repeated:.3} ms a step, {ratio:.3} of the time without; ");
        println!("at most {} bytes reserved, {moved} blocks moved a step", stats.reserved_bytes.peak);
        Ok(())
    };
    let warm_up = 3.min(steps);
    for &part in &memory.limits {
        device.empty_cache()?;
        device.set_memory_limit((peak as f64 * part) as u64)?;
        let mut repeat = |steps| time(device, steps, |number| step(number).map(drop));
        match repeat(warm_up).and_then(|_| reset(device)).and_then(|()| repeat(steps)) {
            Ok(repeated) => report("limit", part, repeated)?,
            Err(error) => println!("limit of {:.0} % of the peak: {error}", 1e2 * part),
        }
    }
    device.set_memory_limit(u64::MAX)?;
    if !memory.budgets.is_empty() {
        let (recorded, uses) = StepUses::record(device, || step(WARM_UP_STEPS))?;
        recorded?;
        for &part in &memory.budgets {
            let budget = match memory_budget(&uses, (uses.peak() as f64 * part) as u64) {
                Ok(budget) => budget,
                Err(error) => {
                    println!("budget of {:.0} %: {error}", 1e2 * part);
                    continue;
                }
            };
            println!("{budget}");
            device.empty_cache()?;
            time(device, warm_up, |number| budget.run(|| step(number)).map(drop))?;
            reset(device)?;
            report("budget", part, time(device, steps, |number| budget.run(|| step(number)).map(drop))?)?;
        }
    }
    Ok(())
}

fn reset(device: Device) -> Result<()> {
    device.reset_peak_stats()?;
    device.reset_accumulated_stats()
}

/// Returns the mean time, in milliseconds, of `steps` steps after the untimed ones.
fn time(device: Device, steps: usize, step: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    device.synchronize()?;
    let started = Instant::now();
    (WARM_UP_STEPS..WARM_UP_STEPS + steps).try_for_each(step)?;
    device.synchronize()?;
    Ok(1e3 * started.elapsed().as_secs_f64() / steps as f64)
}
