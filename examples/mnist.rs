//! Trains a small convolutional network to read digits: two convolutions with batch norm, max pooling, one linear layer.
//!
//! `cargo run --release --example mnist -- --data DIR` reads MNIST, or any set in its format, from a folder.
//! `cargo run --release --example mnist` takes the 8 x 8 digits of this repository and ends with `test accuracy 0.997` (PoCL).

mod common;

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use claystone::nn::{Activation, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, OneCycleLr, Optimizer, Scheduler};
use claystone::{ConvOptions, DType, Device, Tensor, no_grad};
use common::images::{self, Set};

/// Reads digits with a small convolutional network.
#[derive(Parser)]
struct Args {
    /// A folder with the four IDX files of MNIST, gzipped or not; without it the digits of this repository are taken
    #[arg(long)]
    data: Option<PathBuf>,
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = common::device)]
    device: Device,
    /// How parameters and activations are stored: f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Passes over the training set; 3 with --data, 20 without, unless said
    #[arg(long)]
    epochs: Option<usize>,
    /// Images a step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Highest learning rate of AdamW
    #[arg(long, default_value_t = 5e-3)]
    lr: f64,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    watch: common::Watch,
}

/// For images of one channel, of any size that can be halved twice.
fn network(rows: usize, columns: usize, options: (DType, Device)) -> claystone::Result<Sequential> {
    let same = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    // Batch norm takes a bias away again.
    let conv = |from, to| Conv2d::new(from, to, [3, 3], same, options).map(Conv2d::without_bias);
    Ok(Sequential::new()
        .push(conv(1, 16)?)
        .push(BatchNorm2d::new(16, options)?)
        .push(Activation::Relu)
        .push(MaxPool2d::new([2, 2]))
        .push(conv(16, 32)?)
        .push(BatchNorm2d::new(32, options)?)
        .push(Activation::Relu)
        .push(MaxPool2d::new([2, 2]))
        .push(Flatten::default())
        .push(Dropout::new(0.25)?)
        .push(Linear::new(32 * (rows / 4) * (columns / 4), 10, options)?))
}

/// The part of a set that the network reads right.
fn accuracy(net: &Sequential, set: &Set) -> claystone::Result<f64> {
    net.eval();
    let mut right = Vec::new();
    for from in (0..set.len()).step_by(1000) {
        let batch = set.batch(from, 1000)?;
        let guess = no_grad(|| net.forward(&batch.images)?.argmax(1, false))?;
        right.push(guess.eq(&batch.labels)?.to_dtype(DType::F32)?.sum((), false)?);
    }
    net.train();
    Ok(f64::from(Tensor::stack(&right, 0)?.sum((), false)?.item::<f32>()?) / set.len() as f64)
}

fn main() -> common::Outcome {
    let args = Args::parse();
    common::announce(args.device)?;
    let watching = args.watch.start(args.device)?;
    let (train, test) = match &args.data {
        Some(folder) => images::idx(folder, args.device, args.dtype)?,
        None => images::digits(args.device, args.dtype)?,
    };
    let epochs = args.epochs.unwrap_or(if args.data.is_some() { 3 } else { 20 });
    let (rows, columns) = (train.images.shape().dims()[2], train.images.shape().dims()[3]);

    claystone::manual_seed(args.seed);
    let mut net = network(rows, columns, (args.dtype, args.device))?;
    println!(
        "{} parameters; training on {} images of {rows} x {columns} in {}, {epochs} epochs of minibatches of {}",
        net.parameter_count(),
        train.len(),
        args.dtype,
        args.batch
    );
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
    let steps = epochs * train.len().div_ceil(args.batch);
    let mut scheduler = Scheduler::new(&mut adam, OneCycleLr::new(args.lr, steps))?;

    let (start, bar) = (Instant::now(), common::progress(epochs));
    for epoch in 1..=epochs {
        let shuffled = train.shuffled()?;
        let mut losses = Vec::new();
        for from in (0..train.len()).step_by(args.batch) {
            let batch = shuffled.batch(from, args.batch)?;
            let loss = net.forward(&batch.images)?.cross_entropy(&batch.labels)?;
            loss.backward()?;
            adam.step()?;
            adam.zero_grad();
            scheduler.step(&mut adam)?;
            losses.push(loss.detach());
        }
        // Reading a number waits for the device: once an epoch.
        let loss = Tensor::stack(&losses, 0)?.to_dtype(DType::F32)?.mean((), false)?.item::<f32>()?;
        let error = 1.0 - accuracy(&net, &test)?;
        bar.inc(1);
        bar.suspend(|| println!("epoch {epoch:3}  loss {loss:.4}  test error {:.1} %", 100.0 * error));
    }
    bar.finish_and_clear();
    println!("trained in {:.1} s", start.elapsed().as_secs_f64());
    println!("{}", args.device.memory_stats()?);
    println!("test accuracy {:.3}", accuracy(&net, &test)?);
    watching.finish()?;
    Ok(())
}
