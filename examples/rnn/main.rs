//! Classifies sequences of different lengths with a bidirectional LSTM: which symbol comes behind the marker?
//!
//! `cargo run --release --example rnn -- --help`

#[path = "../common/mod.rs"]
mod common;
mod model;

use clap::Parser;
use claystone::nn::Module;
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Device, no_grad};
use model::{Batch, Classifier, SYMBOLS};

/// Trains on random sequences, each new, and counts how many of others it classifies right.
#[derive(Parser)]
struct Args {
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = common::device)]
    device: Device,
    /// How parameters and activations are stored: f32, f16 or bf16 (the optimiser keeps f32 master weights)
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Training steps
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Sequences a step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Seed of the initial weights and of the sequences
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    watch: common::Watch,
}

/// Symbols of the longest sequences.
const LONGEST: usize = 20;

fn main() -> common::Outcome {
    let args = Args::parse();
    common::announce(args.device)?;
    let watching = args.watch.start(args.device)?;
    claystone::manual_seed(args.seed);
    let mut net = Classifier::new(32, (args.dtype, args.device))?;
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: 1e-2, ..Default::default() })?;
    println!("sequences of 3 to {LONGEST} symbols, {} a step, {SYMBOLS} classes", args.batch);

    let bar = common::progress(args.steps);
    for step in 1..=args.steps {
        let Batch(symbols, lengths, classes) = Batch::random(args.batch, LONGEST, args.device)?;
        let loss = net.classify(&symbols, &lengths)?.cross_entropy(&classes)?;
        loss.backward()?;
        adam.step()?;
        adam.zero_grad();
        if step % 50 == 0 || step == args.steps {
            let loss = loss.to_dtype(DType::F32)?.item::<f32>()?;
            bar.suspend(|| println!("step {step:4}  loss {loss:.4}"));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();

    let Batch(symbols, lengths, classes) = Batch::random(1000, LONGEST, args.device)?;
    let guess = no_grad(|| net.classify(&symbols, &lengths)?.argmax(1, false))?;
    let right = guess.eq(&classes)?.to_dtype(DType::F32)?.mean((), false)?.item::<f32>()?;
    println!("accuracy {right:.3}");
    watching.finish()?;
    Ok(())
}
