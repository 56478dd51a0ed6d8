//! Classifies sequences of different lengths with a bidirectional LSTM: which symbol follows the marker?
//!
//! `cargo run --release --example rnn -- --help`

#[path = "../common/mod.rs"]
mod common;
mod model;

use clap::Parser;
use claystone::nn::Module;
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, no_grad};
use model::{Batch, Classifier, SYMBOLS};

/// Trains on random sequences, new ones in each step, and prints the accuracy on other sequences.
#[derive(Parser)]
pub struct Args {
    /// Training steps
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Sequences per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    #[command(flatten)]
    run: common::Run,
}

/// The maximum length of a sequence, in symbols.
const MAX_LENGTH: usize = 20;

pub fn run(args: &Args) -> common::Outcome {
    let watching = args.run.start()?;
    let mut net = Classifier::new(32, args.run.options())?;
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: 1e-2, ..Default::default() })?;
    println!("sequences of 3 to {MAX_LENGTH} symbols, {} a step, {SYMBOLS} classes", args.batch);

    let bar = common::progress(args.steps);
    for step in 1..=args.steps {
        let Batch(symbols, lengths, classes) = Batch::random(args.batch, MAX_LENGTH, args.run.device)?;
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

    let Batch(symbols, lengths, classes) = Batch::random(1000, MAX_LENGTH, args.run.device)?;
    let guess = no_grad(|| net.classify(&symbols, &lengths)?.argmax(1, false))?;
    let right = guess.eq(&classes)?.to_dtype(DType::F32)?.mean((), false)?.item::<f32>()?;
    println!("accuracy {right:.3}");
    watching.finish()?;
    Ok(())
}

fn main() -> common::Outcome {
    run(&Args::parse())
}
