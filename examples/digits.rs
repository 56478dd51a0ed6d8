//! Trains a small network to read handwritten digits: 64 pixels in, two hidden layers of 128 and 64, ten classes out.
//!
//! `cargo run --release --example digits -- --help`

mod common;

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Device, Generator, Tensor, io, no_grad};
use common::images::{self, HELD_OUT, Set};
use common::{Curve, phase};

/// Reads handwritten digits: an MLP 64-128-64-10 trained on 1,437 images, tested on 360 it never saw.
#[derive(Parser)]
struct Args {
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = common::device)]
    device: Device,
    /// How parameters and activations are stored: f32, f16 or bf16 (the optimiser keeps f32 master weights)
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Passes over the training set
    #[arg(long, default_value_t = 40)]
    epochs: usize,
    /// Images a step
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 5e-3)]
    lr: f64,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Go on from the checkpoint FILE (.safetensors) if there is one, and save to it after each epoch
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    #[command(flatten)]
    watch: common::Watch,
}

const PIXELS: usize = 64;

/// The part of a set that the network reads right.
fn accuracy(net: &Sequential, set: &Set) -> claystone::Result<f64> {
    let guess = no_grad(|| net.forward(&set.images.flatten(1, -1)?)?.argmax(1, false))?;
    let right = guess.eq(&set.labels)?.to_dtype(DType::F32)?.sum((), false)?.item::<f32>()?;
    Ok(f64::from(right) / set.len() as f64)
}

fn main() -> common::Outcome {
    let args = Args::parse();
    common::announce(args.device)?;
    let watching = args.watch.start(args.device)?;
    let (train, test) = images::digits(args.device, args.dtype)?;

    claystone::manual_seed(args.seed);
    let options = (args.dtype, args.device);
    let mut net = Sequential::new()
        .push(Linear::new(PIXELS, 128, options)?.with_activation(Activation::Relu))
        .push(Linear::new(128, 64, options)?.with_activation(Activation::Relu))
        .push(Linear::new(64, 10, options)?);
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: args.lr, ..Default::default() })?;
    // The generator has the order of the images of the epochs to come.
    let (mut epoch, mut generator) = (0, Generator::current());
    if let Some(file) = args.resume.as_ref().filter(|file| file.exists()) {
        let parts: &mut [(&str, &mut dyn io::Stateful)] =
            &mut [("model", &mut net), ("optimizer", &mut adam), ("generator", &mut generator), ("epoch", &mut epoch)];
        io::load_checkpoint(file, parts)?;
        println!("going on after epoch {epoch} of {}", file.display());
    }
    println!(
        "training on {} images in {}, {} epochs of minibatches of {}; {HELD_OUT} images held out",
        train.len(),
        args.dtype,
        args.epochs,
        args.batch
    );

    let (start, bar) = (Instant::now(), common::progress(args.epochs));
    let mut curves = ["training loss", "test error"].map(|name| Curve { name: name.into(), points: Vec::new() });
    let mut times = Vec::new();
    bar.set_position(epoch as u64);
    while epoch < args.epochs {
        epoch += 1;
        let begun = Instant::now();
        let shuffled = train.shuffled()?;
        let mut losses = Vec::new();
        for from in (0..train.len()).step_by(args.batch) {
            let batch = shuffled.batch(from, args.batch)?;
            let x = batch.images.flatten(1, -1)?;
            let loss = phase("forward", || net.forward(&x)?.cross_entropy(&batch.labels))?;
            phase("backward", || loss.backward())?;
            phase("update", || adam.step())?;
            adam.zero_grad();
            losses.push(loss.detach());
        }
        // The queue has run ahead until here: reading a number waits for the device, so it is done once an epoch.
        let losses = Tensor::stack(&losses, 0)?.to_dtype(DType::F64)?.to_vec::<f64>()?;
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        let error = 1.0 - accuracy(&net, &test)?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        curves[0].points.push((epoch as f64, mean));
        curves[1].points.push((epoch as f64, error));
        bar.set_message(format!("loss {mean:.4}  test error {:.1} %", 100.0 * error));
        bar.inc(1);
        if let Some(file) = &args.resume {
            let parts: &[(&str, &dyn io::Stateful)] =
                &[("model", &net), ("optimizer", &adam), ("generator", &generator), ("epoch", &epoch)];
            io::save_checkpoint(file, parts)?;
        }
        if epoch % 10 == 0 || epoch == args.epochs {
            bar.suspend(|| println!("epoch {epoch:3}  loss {mean:.4}  test error {:.1} %", 100.0 * error));
        }
    }
    bar.finish_and_clear();

    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    println!("trained in {:.1} s, {median:.2} ms an epoch (the median)", start.elapsed().as_secs_f64());
    let figure = common::figure("digits.png")?;
    let title = format!("handwritten digits, MLP 64-128-64-10, {} on {}", args.dtype, args.device);
    common::plot(&figure, (&title, "epoch", "loss (cross entropy), error"), &curves)?;
    println!("loss curve in {}", figure.display());
    println!("{}", args.device.memory_stats()?);
    println!("test accuracy {:.3}", accuracy(&net, &test)?);
    watching.finish()?;
    Ok(())
}
