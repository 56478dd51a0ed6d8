//! Measures the host's time for a replayed training step: `graph [--device D] [--batch N] [--rounds N] [--layers N] [--width N]`.
//!
//! The graphs are twelve kernels of 64 elements, an MLP 784-256-128-10 with cross-entropy and SGD, and the GPT of the example
//! `char_transformer` with dropout, clipping and AdamW. Replays by the host and by command buffers alternate. Prints the time of
//! a call, the time per step when many steps are submitted before one wait, and the number of launches of the step without a graph.

#[allow(dead_code)]
#[path = "../examples/char_transformer/model.rs"]
mod model;

use std::error::Error;
use std::time::Instant;

use claystone::device::{ReplayMode, count_launches};
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig, clip_grad_norm_};
use claystone::{DType, Device, Graph, Result, Tensor};
use model::{Gpt, Sizes};

/// The number of replays that are submitted before the host waits.
const STEPS: u32 = 20;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let value = |option: &str| args.iter().position(|a| a == option).map(|i| args.get(i + 1).ok_or("it needs a value"));
    let device: Device = value("--device").transpose()?.map_or(Ok(Device::OpenCL(0)), |name| name.parse())?;
    let batch: usize = value("--batch").transpose()?.map_or(Ok(64), |n| n.parse())?;
    let rounds: usize = value("--rounds").transpose()?.map_or(Ok(100), |n| n.parse())?;
    println!("{:24} {:>8} {:16} {:>10} {:>10}", "us, medians", "commands", "", "the call", "a step");
    let x = Tensor::rand(&[64], device)?;
    let twelve = || (0..12).try_for_each(|_| x.softmax(0).map(drop)); // softmax instead of formulas, which would be fused into one launch
    compare("12 small kernels", &mut Graph::capture(device, twelve)?.0, rounds)?;
    let mut training = Training::new(batch, device)?;
    let (_, launches) = count_launches(|| training.step());
    let name = format!("MLP, {launches} as calls");
    compare(&name, &mut Graph::capture(device, || training.step())?.0, rounds)?;
    let layers: usize = value("--layers").transpose()?.map_or(Ok(3), |n| n.parse())?;
    let width: usize = value("--width").transpose()?.map_or(Ok(64), |n| n.parse())?;
    for dtype in [DType::F32, DType::BF16] {
        let mut step = gpt_step(layers, width, dtype, device)?;
        step()?;
        let (_, launches) = count_launches(&mut step);
        let name = format!("GPT {dtype}, {launches} as calls");
        compare(&name, &mut Graph::capture(device, &mut step)?.0, rounds.div_ceil(10))?;
    }
    Ok(())
}

/// Returns a function that makes a training step of a GPT on two windows of 32 characters.
fn gpt_step(layers: usize, width: usize, dtype: DType, device: Device) -> Result<impl FnMut() -> Result<()>> {
    let sizes =
        Sizes { vocabulary: 96, context: 32, width, layers, heads: width.div_ceil(64), tied: false, dropout: 0.1 };
    let mut gpt = Gpt::new(sizes, device)?;
    let mut adamw = AdamW::new(gpt.parameters_mut(), AdamWConfig::default())?;
    let windows = Tensor::randint(0, 96, [2, 33], (DType::I64, device))?;
    Ok(move || {
        adamw.zero_grad();
        gpt.loss(&windows, dtype)?.backward()?;
        clip_grad_norm_(gpt.parameters(), 1.0, 2.0)?;
        adamw.step()
    })
}

/// Measures a graph in every replay mode that the device supports.
fn compare(name: &str, graph: &mut Graph, rounds: usize) -> std::result::Result<(), Box<dyn Error>> {
    let modes = [ReplayMode::Host, ReplayMode::CommandBuffer];
    let mut times = [const { (Vec::new(), Vec::new()) }; 2];
    for _ in 0..rounds {
        for (mode, (calls, steps)) in modes.iter().zip(&mut times) {
            if graph.set_replay_mode(*mode).is_err() {
                continue;
            }
            graph.replay()?; // the driver sets up its command buffers in the first replay
            graph.stream().synchronize()?;
            let begun = Instant::now();
            for _ in 0..STEPS {
                let from = Instant::now();
                graph.replay()?;
                calls.push(from.elapsed().as_secs_f64() * 1e6);
            }
            graph.stream().synchronize()?;
            steps.push(begun.elapsed().as_secs_f64() * 1e6 / f64::from(STEPS));
        }
    }
    for (mode, (calls, steps)) in modes.iter().zip(times) {
        let commands = graph.commands();
        match calls.is_empty() {
            true => println!("{name:24} {commands:8} {mode:16} the device has none"),
            false => println!("{name:24} {commands:8} {mode:16} {:10.1} {:10.1}", median(calls), median(steps)),
        }
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Training {
    net: Sequential,
    sgd: Sgd,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn new(batch: usize, device: Device) -> Result<Training> {
        let mut net = Sequential::new()
            .push(Linear::new(784, 256, device)?.with_activation(Activation::Relu))
            .push(Linear::new(256, 128, device)?.with_activation(Activation::Relu))
            .push(Linear::new(128, 10, device)?);
        let sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.05, momentum: 0.9, ..Default::default() })?;
        let labels: Vec<i64> = (0..batch as i64).map(|i| i * 7 % 10).collect();
        let x = Tensor::rand(&[batch, 784], device)?;
        Ok(Training { net, sgd, x, y: Tensor::from_slice(&labels, [batch], device)? })
    }

    fn step(&mut self) -> Result<Tensor> {
        self.sgd.zero_grad();
        let loss = self.net.forward(&self.x)?.cross_entropy(&self.y)?;
        loss.backward()?;
        self.sgd.step()?;
        Ok(loss)
    }
}
