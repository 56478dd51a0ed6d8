//! Trains ResNet-18 on CIFAR-10, or on synthetic images of the same shape: `cargo run --release --example resnet -- --help`

mod common;

use clap::Parser;
use claystone::data::{DataLoader, DataLoaderConfig};
use claystone::nn::{Activation, AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, Module, Sequential};
use claystone::optim::{OneCycleLr, Optimizer, Scheduler, Sgd, SgdConfig};
use claystone::{ConvOptions, Generator, Result, Tensor, TensorOptions};
use common::images::{self, Augmented, accuracy, normalised};

/// Trains ResNet-18 on CIFAR-10, or on synthetic images of its shape.
#[derive(Parser)]
pub struct Args {
    /// A folder with the binary version of CIFAR-10
    #[arg(long)]
    data: Option<std::path::PathBuf>,
    /// Number of synthetic images to train on if there is no folder
    #[arg(long, default_value_t = 2000)]
    images: usize,
    /// Channels of the first layer
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Images per step
    #[arg(long, default_value_t = 128)]
    batch: usize,
    #[command(flatten)]
    training: common::Training<20>,
    #[command(flatten)]
    run: common::Run,
}

/// A convolution followed by batch norm.
fn conv(from: usize, to: usize, kernel: usize, stride: usize, at: TensorOptions) -> Result<Sequential> {
    let options = ConvOptions { stride: [stride; 2], padding: (kernel / 2).into(), ..ConvOptions::default() };
    let conv = Conv2d::new(from, to, [kernel; 2], options, at)?.without_bias();
    Ok(Sequential::new().push(conv).push(BatchNorm2d::new(to, at)?))
}

/// Two convolutions with a shortcut around them.
struct BasicBlock {
    residual: Sequential,
    shortcut: Sequential,
}

impl Module for BasicBlock {
    claystone::parts!(residual, shortcut);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.residual.forward(x)?.add(&self.shortcut.forward(x)?)?.relu()
    }
}

pub fn resnet18(width: usize, classes: usize, at: TensorOptions) -> Result<Sequential> {
    let mut net = conv(3, width, 3, 1, at)?.push(Activation::Relu);
    for (from, to) in [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8)] {
        let (from, to, stride) = (from * width, to * width, to / from);
        let residual = conv(from, to, 3, stride, at)?.push(Activation::Relu).push(conv(to, to, 3, 1, at)?);
        let shortcut = if from == to { Sequential::new() } else { conv(from, to, 1, stride, at)? };
        net = net.push(BasicBlock { residual, shortcut });
    }
    Ok(net.push(AdaptiveAvgPool2d([1, 1])).push(Flatten::default()).push(Linear::new(8 * width, classes, at)?))
}

/// Trains the network and returns the accuracy on the test images.
pub fn train(args: &Args) -> std::result::Result<f64, Box<dyn std::error::Error>> {
    let watching = args.run.start()?;
    let (train, test) = args.data.as_deref().map_or_else(|| images::patterns(args.images), images::cifar10)?;
    let config = DataLoaderConfig { batch_size: args.batch, shuffle: true, num_workers: 2, ..Default::default() };
    let loader = DataLoader::new(Augmented(train), config)?.to_device(args.run.device)?;
    let test = test.to_device(args.run.device)?;
    let mut net = resnet18(args.width, 10, args.run.options().into())?;
    let config = SgdConfig { momentum: 0.9, weight_decay: 5e-4, nesterov: true, ..Default::default() };
    let mut sgd = Sgd::new(net.parameters_mut(), config)?;
    let mut rate = Scheduler::new(&mut sgd, OneCycleLr::new(0.1, args.training.epochs * loader.len()))?;
    let mut random = Generator::current();
    args.training.resume(&mut [("net", &mut net), ("sgd", &mut sgd), ("rate", &mut rate), ("random", &mut random)])?;
    let mut right = 0.0;
    for epoch in rate.last_step() / loader.len()..args.training.epochs {
        let (bar, mut losses) = (common::progress(loader.len()), Vec::new());
        for batch in bar.wrap_iter(loader.iter()) {
            let (images, labels) = batch?;
            let loss = net.forward(&normalised(&images, args.run.dtype)?)?.cross_entropy(&labels)?;
            sgd.zero_grad();
            loss.backward()?;
            sgd.step()?;
            rate.step(&mut sgd)?;
            losses.push(loss.detach());
        }
        bar.finish_and_clear();
        right = accuracy(&net, &test, |images| normalised(images, args.run.dtype))?;
        println!("epoch {:3}  loss {:.4}  test accuracy {right:.3}", epoch + 1, common::mean(&losses)?);
        args.training.save(&[("net", &net), ("sgd", &sgd), ("rate", &rate), ("random", &random)])?;
    }
    watching.finish()?;
    Ok(right)
}

fn main() -> common::Outcome {
    train(&Args::parse()).map(drop)
}
