//! Trains a small convolutional network to classify digits: two convolutions with batch norm and max pooling, one linear layer.
//!
//! `cargo run --release --example mnist -- --data DIR` reads MNIST, or another data set in its format, from a folder.
//! `cargo run --release --example mnist` uses this repository's 8 x 8 digits and ends with `test accuracy 0.997` (PoCL).
//! Built with `--features mpi`, `mpirun -n 2 target/release/examples/mnist --distributed` trains on two devices or processes.

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use claystone::distributed::{DataParallel, DataParallelOptions};
use claystone::nn::{Activation, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, OneCycleLr, Optimizer, Scheduler};
use claystone::{ConvOptions, DType, Device};
use common::images::{self, accuracy};

/// Classifies digits with a small convolutional network.
#[derive(Parser)]
pub struct Args {
    /// A folder with the four IDX files of MNIST, gzipped or not [default: the digits of this repository]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Passes over the training set [default: 3 with --data, else 20]
    #[arg(long)]
    epochs: Option<usize>,
    /// Images per step, on every rank
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Highest learning rate of AdamW
    #[arg(long, default_value_t = 5e-3)]
    lr: f64,
    #[command(flatten)]
    ranks: common::Ranks,
    #[command(flatten)]
    run: common::Run,
}

/// Builds the network for images of one channel, of any size that can be halved twice.
fn network(rows: usize, columns: usize, options: (DType, Device)) -> claystone::Result<Sequential> {
    let same = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    // The convolutions have no bias, because the batch norm after them would cancel it.
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

pub fn run(mut args: Args) -> common::Outcome {
    let group = args.ranks.join(&mut args.run)?;
    let watching = args.run.start()?;
    let (train, test) = match &args.data {
        Some(folder) => images::idx(folder, args.run.device, args.run.dtype)?,
        None => images::digits(args.run.device, args.run.dtype)?,
    };
    let epochs = args.epochs.unwrap_or(if args.data.is_some() { 3 } else { 20 });
    let (rows, columns) = (train.images.shape().dims()[2], train.images.shape().dims()[3]);

    let net = network(rows, columns, args.run.options())?;
    let mut net = DataParallel::new(net, &group, DataParallelOptions::default())?;
    args.run.print(format_args!(
        "{} ranks, {} parameters; training on {} images of {rows} x {columns} in {}, {epochs} epochs of minibatches of {}",
        group.size(),
        net.parameter_count(),
        train.len(),
        args.run.dtype,
        args.batch
    ));
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
    let batches = || images::batches(train.len(), args.batch, &group);
    let steps = epochs * batches().count();
    let mut scheduler = Scheduler::new(&mut adam, OneCycleLr::new(args.lr, steps))?;

    let (start, bar) = (Instant::now(), args.run.progress(epochs));
    let mut training = Duration::ZERO;
    for epoch in 1..=epochs {
        let begun = Instant::now();
        let shuffled = train.shuffled()?; // the same order on every rank, because of the common seed
        let mut losses = Vec::new();
        for from in batches() {
            let batch = shuffled.batch(from, args.batch)?;
            let loss = net.forward(&batch.images)?.cross_entropy(&batch.labels)?;
            loss.backward()?;
            adam.step()?;
            adam.zero_grad();
            scheduler.step(&mut adam)?;
            losses.push(loss.detach());
        }
        // Reading a number waits for the device, so it is done only once per epoch.
        let loss = common::mean(&losses)?;
        training += begun.elapsed();
        let error = 1.0 - accuracy(&net, &test, |x| Ok(x.shallow_clone()))?;
        bar.inc(1);
        bar.suspend(|| {
            args.run.print(format_args!("epoch {epoch:3}  loss {loss:.4}  test error {:.1} %", 100.0 * error))
        });
    }
    bar.finish_and_clear();
    let images = (steps * args.batch * group.size()) as f64;
    args.run.print(format_args!(
        "trained in {:.1} s, {:.0} images a second without the tests",
        start.elapsed().as_secs_f64(),
        images / training.as_secs_f64()
    ));
    args.run.print(args.run.device.memory_stats()?);
    let accuracy = accuracy(&net, &test, |x| Ok(x.shallow_clone()))?;
    args.run.print(format_args!("test accuracy {accuracy:.3}"));
    watching.finish()?;
    Ok(())
}

fn main() -> common::Outcome {
    run(Args::parse())
}
