//! Trains a small network to classify handwritten digits: 64 pixels, hidden layers of 128 and 64, ten classes.
//!
//! `cargo run --release --example digits -- --help`; on two devices, or as two processes on one device:
//! `cargo build --release --features mpi --example digits && mpirun -n 2 target/release/examples/digits --distributed`

mod common;

use std::time::Instant;

use clap::Parser;
use claystone::Generator;
use claystone::distributed::{DataParallel, DataParallelOptions};
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use common::images::{self, HELD_OUT, accuracy};
use common::{Curve, phase};

/// Classifies handwritten digits: an MLP 64-128-64-10 trained on 1,437 images, tested on 360 others.
#[derive(Parser)]
pub struct Args {
    /// Images per step, on every rank
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 5e-3)]
    lr: f64,
    #[command(flatten)]
    training: common::Training<40>,
    #[command(flatten)]
    ranks: common::Ranks,
    #[command(flatten)]
    run: common::Run,
}

/// The number of pixels of an image.
const PIXELS: usize = 64;

pub fn run(mut args: Args) -> common::Outcome {
    let group = args.ranks.join(&mut args.run)?;
    let epochs = args.training.epochs;
    let watching = args.run.start()?;
    let (train, test) = images::digits(args.run.device, args.run.dtype)?;

    let options = args.run.options();
    let net = Sequential::new()
        .push(Linear::new(PIXELS, 128, options)?.with_activation(Activation::Relu))
        .push(Linear::new(128, 64, options)?.with_activation(Activation::Relu))
        .push(Linear::new(64, 10, options)?);
    let mut net = DataParallel::new(net, &group, DataParallelOptions::default())?;
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: args.lr, ..Default::default() })?;
    // The state of the generator determines the order of the images in later epochs, so the checkpoint includes it.
    let (mut epoch, mut generator) = (0, Generator::current());
    args.training.resume(&mut [
        ("model", &mut net),
        ("optimizer", &mut adam),
        ("generator", &mut generator),
        ("epoch", &mut epoch),
    ])?;
    args.run.print(format_args!(
        "{} ranks training on {} images in {}, {epochs} epochs of minibatches of {}; {HELD_OUT} images held out",
        group.size(),
        train.len(),
        args.run.dtype,
        args.batch
    ));

    let (start, bar) = (Instant::now(), args.run.progress(epochs));
    let mut curves = ["training loss", "test error"].map(|name| Curve { name: name.into(), points: Vec::new() });
    let mut times = Vec::new();
    bar.set_position(epoch as u64);
    while epoch < epochs {
        epoch += 1;
        let begun = Instant::now();
        let shuffled = train.shuffled()?; // the same order on every rank, because of the common seed
        let mut losses = Vec::new();
        for from in images::batches(train.len(), args.batch, &group) {
            let batch = shuffled.batch(from, args.batch)?;
            let x = batch.images.flatten(1, -1)?;
            let loss = phase("forward", || net.forward(&x)?.cross_entropy(&batch.labels))?;
            phase("backward", || loss.backward())?;
            phase("update", || adam.step())?;
            adam.zero_grad();
            losses.push(loss.detach());
        }
        // Until here the host does not wait for the device. Reading a number waits, so it is done only once per epoch.
        let mean = common::mean(&losses)?;
        let error = 1.0 - accuracy(&net, &test, |x| x.flatten(1, -1))?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        curves[0].points.push((epoch as f64, mean));
        curves[1].points.push((epoch as f64, error));
        bar.set_message(format!("loss {mean:.4}  test error {:.1} %", 100.0 * error));
        bar.inc(1);
        if group.rank() == 0 {
            args.training.save(&[
                ("model", &net),
                ("optimizer", &adam),
                ("generator", &generator),
                ("epoch", &epoch),
            ])?;
        }
        if epoch % 10 == 0 || epoch == epochs {
            bar.suspend(|| {
                args.run.print(format_args!("epoch {epoch:3}  loss {mean:.4}  test error {:.1} %", 100.0 * error))
            });
        }
    }
    bar.finish_and_clear();

    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    let seconds = start.elapsed().as_secs_f64();
    args.run.print(format_args!("trained in {seconds:.1} s, {median:.2} ms an epoch (the median)"));
    if group.rank() == 0 {
        let figure = common::figure("digits.svg")?;
        let title = format!("handwritten digits, MLP 64-128-64-10, {} on {}", args.run.dtype, args.run.device);
        common::plot(&figure, (&title, "epoch", "loss (cross entropy), error"), &curves)?;
        println!("loss curve in {}", figure.display());
    }
    args.run.print(args.run.device.memory_stats()?);
    let accuracy = accuracy(&net, &test, |x| x.flatten(1, -1))?;
    args.run.print(format_args!("test accuracy {accuracy:.3}"));
    watching.finish()?;
    Ok(())
}

fn main() -> common::Outcome {
    run(Args::parse())
}
