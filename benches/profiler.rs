//! Measures the cost of recording a profile, on every device. Steps of the network of `examples/digits.rs` with and without recording
//! alternate. `cargo bench --bench profiler`
//!
//! Prints the median time of a step in microseconds, and the median ratio of adjacent turns. Starting, stopping and saving are not measured.

use std::time::Instant;

use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::profiler::{Profiler, ProfilerOptions};
use claystone::storage::annotate;
use claystone::{DType, Device, Result, Tensor};

const TURNS: usize = 60;
const STEPS: usize = 200;

fn main() -> Result<()> {
    for device in Device::all() {
        let info = device.info()?;
        let mut net = Sequential::new()
            .push(Linear::new(64, 128, (DType::F32, device))?.with_activation(Activation::Relu))
            .push(Linear::new(128, 64, (DType::F32, device))?.with_activation(Activation::Relu))
            .push(Linear::new(64, 10, (DType::F32, device))?);
        let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
        let images = Tensor::randn(&[32, 64], device)?;
        let labels = Tensor::randint(0, 10, &[32], (DType::I64, device))?;
        let mut steps = || -> Result<f64> {
            let begun = Instant::now();
            for _ in 0..STEPS {
                let loss = annotate("forward", || net.forward(&images)?.cross_entropy(&labels))?;
                annotate("backward", || loss.backward())?;
                annotate("optimizer", || adam.step())?;
                adam.zero_grad();
            }
            device.synchronize()?;
            Ok(begun.elapsed().as_secs_f64() * 1e6 / STEPS as f64)
        };
        let options = ProfilerOptions::default().copy_rate(false);
        let (mut off, mut on, mut ratios, mut events) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for _ in 0..TURNS {
            off.push(steps()?);
            let profiler = Profiler::start_with(options)?;
            on.push(steps()?);
            let profile = profiler.stop();
            events = (profile.events().len() + profile.memory().len()) / STEPS;
            ratios.push(on[on.len() - 1] / off[off.len() - 1]);
        }
        println!(
            "{device} ({}): {:.1} us a step, {:.1} us profiled with {events} events and samples, ratio {:.3}",
            info.name,
            median(off),
            median(on),
            median(ratios)
        );
    }
    Ok(())
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}
