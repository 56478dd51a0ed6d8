//! Trains a small GPT on text, character by character, and generates text.
//!
//! `cargo run --release --example char_transformer` reads this crate's own sources. On two CPU cores (PoCL) the default 300 steps take two
//! or three minutes. The loss on held-out text falls from 4.8 (uniform distribution) to 2.12 nats per character.
//! `--dtype bf16` trains in mixed precision. Other text: `cargo run --release --example char_transformer -- shakespeare.txt --steps 2000`.
//! With `--graph` each step on an OpenCL device is one replay of a captured graph. Built with `--features mpi`,
//! `mpirun -n 2 target/release/examples/char_transformer --distributed` trains on two devices or processes.

#[path = "../common/mod.rs"]
mod common;
mod model;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use claystone::distributed::{DataParallel, DataParallelOptions};
use claystone::nn::Module;
use claystone::optim::{AdamW, AdamWConfig, Optimizer, clip_grad_norm_};
use claystone::{DType, Device, Graph, Result, Tensor, manual_seed, no_grad};
use common::{Outcome, phase};
use model::{Gpt, Sizes, Text, windows};

/// Trains a small GPT on text and generates text; f16 and bf16 use autocast.
#[derive(Parser)]
pub struct Args {
    /// Text files, and folders of Rust sources [default: this crate's own sources]
    text: Vec<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 300)]
    steps: usize,
    /// Windows per step, on every rank
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Length of the context in characters
    #[arg(long, default_value_t = 64)]
    context: usize,
    /// Width: the number of features of a character inside the model
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Number of blocks
    #[arg(long, default_value_t = 3)]
    layers: usize,
    /// Attention heads
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Use the embedding as the projection onto the vocabulary, too
    #[arg(long)]
    tied: bool,
    /// Dropout probability of the features that a block adds
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Capture a step as a graph, which an OpenCL device then replays
    #[arg(long, conflicts_with = "distributed")]
    graph: bool,
    /// Initial learning rate of AdamW; it falls to a tenth along a cosine
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Number of characters to generate at the end
    #[arg(long, default_value_t = 400)]
    sample: usize,
    #[command(flatten)]
    ranks: common::Ranks,
    #[command(flatten)]
    run: common::Run,
}

/// Appends the text of a file, or of all Rust sources in a folder, sorted by name.
fn read(path: &Path, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    if path.is_dir() {
        let mut inside: Vec<PathBuf> = fs::read_dir(path)?.map(|e| Ok(e?.path())).collect::<std::io::Result<_>>()?;
        inside.sort();
        inside.iter().filter(|p| p.is_dir() || p.extension().is_some_and(|e| e == "rs")).try_for_each(|p| read(p, text))
    } else {
        text.push_str(&fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?);
        Ok(())
    }
}

/// Generates `count` characters after `numbers`, one at a time.
fn write(gpt: &Gpt, numbers: &[i64], count: usize, device: Device) -> Result<Vec<i64>> {
    const TEMPERATURE: f64 = 0.7;
    let mut numbers = numbers.to_vec();
    let start = numbers.len();
    while numbers.len() < start + count {
        let logits = gpt.next(&numbers, device)?;
        // The argmax of logits plus Gumbel noise is a sample from the softmax of the logits.
        let uniform = Tensor::rand(logits.shape(), device)?;
        let noisy = Tensor::map(&[&logits, &uniform], |e| &e[0] * (1.0 / TEMPERATURE) - (-(&e[1] + 1e-9).log()).log())?;
        numbers.push(noisy.argmax(1, false)?.item::<i64>()?);
    }
    Ok(numbers.split_off(start))
}

pub fn run(mut args: Args) -> Outcome {
    let group = args.ranks.join(&mut args.run)?;
    let watching = args.run.start()?;
    let mut text = String::new();
    let own = [Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("src")];
    for path in if args.text.is_empty() { &own[..] } else { &args.text } {
        read(path, &mut text)?;
    }
    let text = Text::new(&text);
    let length = args.context + 1;
    // The last twentieth of the text is held out for testing.
    let (train, held) = text.numbers.split_at(text.numbers.len() - text.numbers.len() / 20);
    if held.len() < length {
        return Err(format!("{} characters are too few for a context of {}", text.numbers.len(), args.context).into());
    }
    let on_device = |numbers: &[i64]| Tensor::from_slice(numbers, numbers.len(), args.run.device);
    let (train, held_out) = (on_device(train)?, on_device(held)?);

    let sizes = Sizes {
        vocabulary: text.characters.len(),
        context: args.context,
        width: args.width,
        layers: args.layers,
        heads: args.heads,
        tied: args.tied,
        dropout: args.dropout,
    };
    // Gradients are sent in the dtype in which they were computed.
    let gradient_dtype = (args.run.dtype == DType::BF16).then_some(DType::BF16);
    let options = DataParallelOptions { gradient_dtype, ..DataParallelOptions::default() };
    let mut gpt = DataParallel::new(Gpt::new(sizes, args.run.device)?, &group, options)?;
    args.run.print(format_args!(
        "{} ranks; {} characters, {} different ones; {} parameters; {}",
        group.size(),
        text.numbers.len(),
        text.characters.len(),
        gpt.parameter_count(),
        args.run.dtype
    ));
    if group.rank() > 0 {
        manual_seed(args.run.seed + group.rank() as u64); // every rank draws different windows
    }
    let mut optimizer = AdamW::new(gpt.parameters_mut(), AdamWConfig { lr: args.lr, ..Default::default() })?;
    let bar = args.run.progress(args.steps);
    let step = |optimizer: &mut AdamW| {
        optimizer.zero_grad();
        let windows = phase("data", || windows(&train, args.batch, length))?;
        let loss = phase("forward", || gpt.module().loss(&windows, args.run.dtype))?;
        phase("backward", || loss.backward())?;
        phase("update", || {
            clip_grad_norm_(gpt.parameters(), 1.0, 2.0)?;
            optimizer.step()
        })?;
        Ok(loss)
    };
    // Each replay draws other windows, and uses the learning rate at that time.
    let graph = args.graph.then(|| Graph::capture(args.run.device, || step(&mut optimizer))).transpose()?;
    let started = Instant::now();
    for number in 1..=args.steps {
        let progress = number as f64 / args.steps as f64;
        let lr = args.lr * (0.55 + 0.45 * (std::f64::consts::PI * progress).cos()) * (number as f64 / 20.0).min(1.0);
        optimizer.set_learning_rates(&[lr])?;
        let made;
        let loss = match &graph {
            Some((graph, loss)) => {
                phase("replay", || graph.replay())?;
                loss
            }
            None => {
                made = step(&mut optimizer)?;
                &made
            }
        };
        if number % 20 == 0 || number == 1 {
            let loss: f32 = loss.item()?;
            bar.set_message(format!("loss {loss:.3}"));
            bar.println(format!("step {number:>5}  loss {loss:.4}"));
        }
        bar.inc(1);
    }
    args.run.device.synchronize()?;
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let gpt = gpt.module();
    gpt.eval();
    let mut total = 0.0;
    /// The number of batches of held-out text over which the final loss is averaged.
    const BATCHES: usize = 10;
    for _ in 0..BATCHES {
        total +=
            f64::from(no_grad(|| gpt.loss(&windows(&held_out, args.batch, length)?, args.run.dtype)?.item::<f32>())?);
    }
    args.run.print(format_args!(
        "{:.1} ms a step, {:.0} characters a second; loss on text held out {:.3}",
        1e3 * seconds / args.steps as f64,
        (args.steps * args.batch * args.context * group.size()) as f64 / seconds,
        total / BATCHES as f64
    ));
    let written = no_grad(|| write(gpt, &held[..args.context.min(held.len())], args.sample, args.run.device))?;
    args.run.print(written.iter().map(|&n| text.characters[n as usize]).collect::<String>());
    watching.finish()?;
    Ok(())
}

fn main() -> Outcome {
    run(Args::parse())
}
