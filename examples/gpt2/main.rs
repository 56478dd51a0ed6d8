//! Generates text with GPT-2: `cargo run --release --example gpt2 -- --model DIR --prompt "Once upon a time"`.
//!
//! The folder is a copy of `openai-community/gpt2`, `gpt2-medium` and so on from the Hugging Face hub: `model.safetensors`, and
//! `vocab.json` with `merges.txt` for text. Without a folder the weights are random, and only the speed is meaningful.

#[path = "../common/mod.rs"]
mod common;
pub mod model;
pub mod tokenizer;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use claystone::nn::{Forward, Module};
use claystone::{DType, Result, Tensor, no_grad};
use model::{Gpt2, Sizes};
use tokenizer::Tokenizer;

/// Generates text with GPT-2 and prints the number of tokens per second.
#[derive(Parser)]
pub struct Args {
    /// A folder with `model.safetensors`, `vocab.json` and `merges.txt`
    #[arg(long)]
    model: Option<PathBuf>,
    /// Beginning of the text; without a vocabulary, numbers of tokens such as "464 3290"
    #[arg(long, default_value = "464")]
    prompt: String,
    /// Number of tokens to generate
    #[arg(long, default_value_t = 100)]
    tokens: usize,
    /// Number of texts to generate in parallel
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Divisor of the logits; with 0 the most likely token is taken
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Number of most likely tokens to sample from
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Number of layers of a model with random weights
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Width of a model with random weights
    #[arg(long, default_value_t = 768)]
    width: usize,
    /// Number of heads; with --model only needed if they are not 64 wide [default: width / 64]
    #[arg(long)]
    heads: Option<usize>,
    #[command(flatten)]
    run: common::Run,
}

/// Samples one token for each row of logits. Returns `[batch, 1]`.
fn sample(logits: &Tensor, args: &Args) -> Result<Tensor> {
    if args.temperature == 0.0 {
        return logits.argmax(-1, true);
    }
    let top_k = args.top_k.clamp(1, logits.shape().dims()[1]);
    let (top, tokens) = logits.to_dtype(DType::F32)?.topk(top_k, -1, true)?;
    let drawn = top.div_scalar(args.temperature)?.softmax(-1)?.multinomial(1, true)?;
    tokens.gather(1, &drawn)
}

/// Generates the tokens that follow the prompt.
pub fn write(args: &Args) -> std::result::Result<Vec<Vec<i64>>, Box<dyn Error>> {
    let watching = args.run.start()?;
    let at = args.run.options();
    let tokenizer = match &args.model {
        Some(folder) if folder.join("vocab.json").exists() => Some(Tokenizer::load(folder)?),
        _ => None,
    };
    let gpt = match &args.model {
        Some(folder) => Gpt2::load(&folder.join("model.safetensors"), args.heads, at)?,
        None => {
            let heads = args.heads.unwrap_or(args.width.div_ceil(64));
            let sizes = Sizes { vocabulary: 50257, context: 1024, width: args.width, layers: args.layers, heads };
            Gpt2::new(sizes, at)?
        }
    };
    println!("{} parameters in {}", gpt.parameter_count(), args.run.dtype);
    let prompt: Vec<i64> = match &tokenizer {
        Some(tokenizer) => tokenizer.encode(&args.prompt)?,
        None => args.prompt.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?,
    };
    if prompt.is_empty() || prompt.len() + args.tokens > gpt.sizes.context {
        let (given, wanted, most) = (prompt.len(), args.tokens, gpt.sizes.context);
        return Err(format!("{given} tokens of the prompt and {wanted} more are not 1 to {most}").into());
    }

    let device = args.run.device;
    device.synchronize()?; // the time to load the weights is not measured
    let (bar, begin) = (common::progress(args.tokens), Instant::now());
    let written = no_grad(|| {
        let prompt = Tensor::from_slice(&prompt, [1, prompt.len()], device)?.expand([args.batch, prompt.len()])?;
        let mut cache = gpt.cache(args.batch)?;
        let mut written = vec![sample(&gpt.call((&prompt, &mut cache))?, args)?];
        device.synchronize()?;
        let (read, begin) = (begin.elapsed().as_secs_f64(), Instant::now());
        for _ in bar.wrap_iter(1..args.tokens) {
            // Tokens stay on the device, so the device need not wait for the host.
            let next = sample(&gpt.call((&written[written.len() - 1], &mut cache))?, args)?;
            written.push(next);
        }
        device.synchronize()?;
        let rate = (args.batch * (args.tokens - 1)) as f64 / begin.elapsed().as_secs_f64();
        bar.finish_and_clear();
        println!("prompt of {} tokens in {:.1} ms, then {rate:.1} tokens/s", prompt.numel(), 1e3 * read);
        Tensor::cat(&written, 1)
    })?;
    let written: Vec<Vec<i64>> = written.to_vec::<i64>()?.chunks(args.tokens).map(<[i64]>::to_vec).collect();
    for tokens in &written {
        match &tokenizer {
            Some(tokenizer) => println!("{}{}", args.prompt, tokenizer.decode(tokens)),
            None => println!("{tokens:?}"),
        }
    }
    println!("{}", device.memory_stats()?);
    watching.finish()?;
    Ok(written)
}

fn main() -> common::Outcome {
    write(&Args::parse()).map(drop)
}
