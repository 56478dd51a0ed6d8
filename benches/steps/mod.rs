//! What benches of training steps share: the first weights and the data for PyTorch's side, and the time and the losses of steps.

use std::path::PathBuf;
use std::time::Instant;

use claystone::io::{self, StateDict};
use claystone::nn::Module;
use claystone::{Device, Result, Tensor};

/// Steps that are not timed: kernels are compiled, and memory is allocated.
pub const WARM: usize = 10;

/// The weights as they are now, and the data, to be written to `path` after the steps.
pub fn first(path: Option<PathBuf>, net: &impl Module, data: &[(&str, &Tensor)]) -> Option<(PathBuf, StateDict)> {
    let path = path?;
    // Copies: parameters whose storage others hold are not updated all at once.
    let mut first: StateDict = net.state_dict().iter().map(|(name, t)| (name.to_owned(), t.clone())).collect();
    data.iter().for_each(|(name, t)| first.insert(*name, t.shallow_clone()));
    Some((path, first))
}

/// Takes [`WARM`] steps and `steps` more, of which it prints the time, and writes what was to be saved, with the losses.
pub fn run(
    device: Device,
    steps: usize,
    mut step: impl FnMut(usize) -> Result<Tensor>,
    saved: Option<(PathBuf, StateDict)>,
) -> Result<()> {
    let mut losses = (0..WARM).map(&mut step).collect::<Result<Vec<_>>>()?;
    device.synchronize()?;
    let started = Instant::now();
    for number in WARM..WARM + steps {
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
