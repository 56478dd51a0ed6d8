//! Times training steps of ResNet-50 on random images, with channels-last images and weights. Prints ms per step, after ten untimed steps. `--save
//! FILE` saves weights, images, labels and losses for `benches/resnet50_torch.py`, which starts from the same weights.

mod steps;

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use claystone::nn::{
    Activation, AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential,
};
use claystone::ops::{ConvOptions, MaxPoolOptions};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, MemoryFormat, Result, Tensor, autocast, manual_seed};

/// The number of different batches. Steps use them in turn.
const BATCHES: usize = 4;
const CLASSES: i64 = 1000;

#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = Device::best())]
    device: Device,
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Rows and columns of an image
    #[arg(long, default_value_t = 224)]
    side: usize,
    /// f32, or the dtype of autocast
    #[arg(long, default_value_t = DType::BF16)]
    dtype: DType,
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Write the first weights, the data and the losses to FILE (safetensors)
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[command(flatten)]
    memory: steps::Memory,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Returns a convolution followed by a batch norm.
fn conv(from: usize, to: usize, kernel: usize, stride: usize, device: Device) -> Result<Sequential> {
    let options = ConvOptions { stride: [stride; 2], padding: (kernel / 2).into(), ..ConvOptions::default() };
    let conv = Conv2d::new(from, to, [kernel; 2], options, device)?.without_bias();
    Ok(Sequential::new().push(conv).push(BatchNorm2d::new(to, device)?))
}

struct Bottleneck {
    residual: Sequential,
    shortcut: Sequential,
}

impl Bottleneck {
    fn new(from: usize, width: usize, stride: usize, device: Device) -> Result<Bottleneck> {
        let to = 4 * width;
        let residual = conv(from, width, 1, 1, device)?
            .push(Activation::Relu)
            .push(conv(width, width, 3, stride, device)?)
            .push(Activation::Relu)
            .push(conv(width, to, 1, 1, device)?);
        let shortcut = if from == to { Sequential::new() } else { conv(from, to, 1, stride, device)? };
        Ok(Bottleneck { residual, shortcut })
    }
}

impl Module for Bottleneck {
    claystone::parts!(residual, shortcut);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.residual.forward(x)?.add(&self.shortcut.forward(x)?)?.relu()
    }
}

/// Builds the network of "Deep Residual Learning for Image Recognition" (2015), with the strides in the 3 x 3 convolutions as in torchvision.
fn resnet50(device: Device) -> Result<Sequential> {
    let options = MaxPoolOptions { stride: Some([2, 2]), padding: 1.into(), ..MaxPoolOptions::default() };
    let pool = MaxPool2d { options, ..MaxPool2d::new([3, 3]) };
    let mut net = conv(3, 64, 7, 2, device)?.push(Activation::Relu).push(pool);
    let mut from = 64;
    for (width, blocks, stride) in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)] {
        for block in 0..blocks {
            net = net.push(Bottleneck::new(from, width, if block == 0 { stride } else { 1 }, device)?);
            from = 4 * width;
        }
    }
    Ok(net.push(AdaptiveAvgPool2d([1, 1])).push(Flatten::default()).push(Linear::new(from, CLASSES as usize, device)?))
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let Args { device, batch, side, dtype, steps: count, save, memory, .. } = Args::parse();
    manual_seed(1);
    let mut net = resnet50(device)?;
    net.to_memory_format(MemoryFormat::ChannelsLast)?;
    let images = Tensor::randn(&[BATCHES, batch, side, side, 3], device)?;
    let labels = Tensor::randint(0, CLASSES, &[BATCHES, batch], (DType::I64, device))?;
    let saved = steps::copy_first_state(save, &net, &[("images", &images), ("labels", &labels)]);
    let mut optimizer = Sgd::new(net.parameters_mut(), SgdConfig { lr: 1e-4, momentum: 0.9, ..Default::default() })?;
    let half = (dtype != DType::F32).then_some(dtype);
    let step = |number: usize| -> Result<Tensor> {
        let at = (number % BATCHES) as isize;
        let x = images.select(0, at)?.permute(&[0, 3, 1, 2])?;
        optimizer.zero_grad();
        let loss = autocast(half, || net.forward(&x)?.cross_entropy(&labels.select(0, at)?))?;
        loss.backward()?;
        optimizer.step()?;
        Ok(loss.detach())
    };
    steps::run(device, count, step, saved, &memory)?;
    Ok(())
}
