//! LoRA on all-MiniLM-L6-v2. Adapters of the query and value projections learn to distinguish questions from statements. Only the adapters
//! are saved. `cargo run --release --example lora -- --model DIR`, with the same folder as for the example minilm.

#[allow(dead_code)]
#[path = "minilm/main.rs"]
mod minilm;

use clap::Parser;
use claystone::nn::{Identity, Linear, Module, StateDict, init};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Device, Result, Tensor, io};
use std::{error::Error, path::Path};

/// Computes `base(x) + b(a(x))`. Between `a` and `b` there are only four features (Hu et al., 2021).
struct Lora {
    base: Box<dyn Module>,
    lora_a: Linear,
    lora_b: Linear,
}
impl Module for Lora {
    claystone::parts!(base as "", lora_a, lora_b);
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.base.forward(x)?.add(&self.lora_b.forward(&self.lora_a.forward(x)?)?)
    }
}
/// Trains the adapters for 20 steps. Returns the loss of each step.
pub fn train(folder: &Path, device: Device) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut model = minilm::MiniLm::load(folder, device)?;
    model.requires_grad_(false)?;
    let width = model.norm.weight().numel();
    let linear = |inputs, outputs| Linear::new(inputs, outputs, device).map(Linear::without_bias);
    let adapted = |layer: &mut Box<dyn Module>| -> Result<()> {
        let (lora_a, lora_b) = (linear(width, 4)?, linear(4, width)?);
        init::constant_(lora_b.weight(), 0.0)?; // with weights of 0 the adapter adds nothing at first
        *layer = Box::new(Lora { base: std::mem::replace(layer, Box::new(Identity)), lora_a, lora_b });
        Ok(())
    };
    model.layers.iter_mut().flat_map(|layer| [&mut layer.query, &mut layer.value]).try_for_each(adapted)?;
    let mut adam = AdamW::new(model.trainable_parameters_mut(), AdamWConfig { lr: 3e-3, ..AdamWConfig::default() })?;
    let questions = ["Is the food ready?", "Where do cheetahs live?", "Who won the race?"];
    let sentences = [questions, ["The food is ready.", "Cheetahs live in Africa.", "Our team won the race."]].concat();
    let kind = Tensor::arange(0, 6, 1, device)?.ge_scalar(3)?.unsqueeze(0)?;
    let alike = kind.eq(&kind.t()?)?.to_dtype(DType::F32)?;
    let step = |_| {
        let x = model.embed(&sentences)?;
        let loss = x.matmul(&x.t()?)?.mse_loss(&alike)?;
        adam.zero_grad();
        loss.backward()?;
        adam.step()?;
        loss.item()
    };
    let losses = (0..20).map(step).collect::<Result<_>>()?;
    let adapters: StateDict = model.state_dict().into_iter().filter(|(name, _)| name.contains("lora_")).collect();
    io::save(folder.join("lora.safetensors"), &adapters)?;
    Ok(losses)
}
fn main() -> Result<(), Box<dyn Error>> {
    println!("losses {:.4?}", train(&minilm::Args::parse().model.ok_or(minilm::MODEL_ADVICE)?, Device::best())?);
    Ok(())
}
