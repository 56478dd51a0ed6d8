//! Helpers for benches of training steps. They save the first weights and the data for PyTorch, time steps, and record losses.

use std::path::{Path, PathBuf};
use std::time::Instant;

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

/// Runs [`WARM_UP_STEPS`] steps, then `steps` timed steps. Prints the time, and writes `saved` with the losses.
pub fn run(
    device: Device,
    steps: usize,
    mut step: impl FnMut(usize) -> Result<Tensor>,
    saved: Option<(PathBuf, StateDict)>,
) -> Result<()> {
    let mut losses = (0..WARM_UP_STEPS).map(&mut step).collect::<Result<Vec<_>>>()?;
    device.synchronize()?;
    let started = Instant::now();
    for number in WARM_UP_STEPS..WARM_UP_STEPS + steps {
        losses.push(step(number)?);
    }
    device.synchronize()?;
    let ms = 1e3 * started.elapsed().as_secs_f64() / steps as f64;
    let losses = Tensor::stack(&losses.iter().collect::<Vec<_>>(), 0)?;
    let values = losses.to_vec::<f32>()?;
    println!("{ms:.3} ms a step; losses {:.4} to {:.4}", values[0], values[values.len() - 1]);
    if let Some((path, mut saved)) = saved {
        saved.insert("losses", losses);
        io::save(path, &saved)?;
    }
    Ok(())
}
