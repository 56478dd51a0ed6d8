//! Times training steps of the GPT of `examples/char_transformer` on random tokens, with small numbers more frequent than large ones. Prints ms per
//! step, after ten untimed steps. `--save FILE` saves weights, tokens and losses for `benches/gpt_torch.py`, which starts from the same weights.

#[allow(dead_code)]
#[path = "../examples/char_transformer/model.rs"]
mod model;

mod steps;

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use claystone::nn::Module;
use claystone::optim::{AdamW, AdamWConfig, Optimizer, clip_grad_norm_};
use claystone::{DType, Device, Result, Tensor, manual_seed};
use model::{Gpt, Sizes};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = Device::best())]
    device: Device,
    #[arg(long, default_value_t = 768)]
    width: usize,
    #[arg(long, default_value_t = 12)]
    layers: usize,
    #[arg(long, default_value_t = 12)]
    heads: usize,
    #[arg(long, default_value_t = 1024)]
    context: usize,
    #[arg(long, default_value_t = 8)]
    batch: usize,
    #[arg(long, default_value_t = 50257)]
    vocabulary: usize,
    /// f32, or the dtype of autocast
    #[arg(long, default_value_t = DType::BF16)]
    dtype: DType,
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Write the first weights, the tokens and the losses to FILE (safetensors)
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[command(flatten)]
    memory: steps::Memory,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let Args { device, width, layers, heads, context, batch, vocabulary, dtype, steps: count, save, memory, .. } =
        Args::parse();
    manual_seed(1);
    let mut gpt = Gpt::new(Sizes { vocabulary, context, width, layers, heads, tied: false, dropout: 0.0 }, device)?;
    let drawn = Tensor::rand(&[steps::WARM_UP_STEPS + count, batch, context + 1], device)?;
    let windows =
        drawn.pow_scalar(3)?.mul_scalar(vocabulary as f64)?.to_dtype(DType::I64)?.clamp_max(vocabulary - 1)?;
    let saved = steps::copy_first_state(save, &gpt, &[("windows", &windows)]);
    let mut optimizer = AdamW::new(gpt.parameters_mut(), AdamWConfig { lr: 3e-4, ..Default::default() })?;
    let step = |number: usize| -> Result<Tensor> {
        optimizer.zero_grad();
        let loss = gpt.loss(&windows.select(0, number as isize)?, dtype)?;
        loss.backward()?;
        clip_grad_norm_(gpt.parameters(), 1.0, 2.0)?;
        optimizer.step()?;
        Ok(loss.detach())
    };
    steps::run(device, count, step, saved, &memory)?;
    Ok(())
}
