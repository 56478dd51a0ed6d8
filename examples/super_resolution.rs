//! Enlarges images by a factor of three, with a network that ends in a pixel shuffle (Shi et al., 2016), as in PyTorch's example
//! `super_resolution`: `cargo run --release --example super_resolution -- --help`. The images are synthetic.

mod common;

use clap::Parser;
use claystone::data::{DataLoader, DataLoaderConfig, TensorDataset};
use claystone::nn::{Activation, Conv2d, Module, PixelShuffle, Sequential, init};
use claystone::optim::{Adam, AdamConfig, Optimizer};
use claystone::{ConvOptions, Device, Interpolation, Result, Tensor, TensorOptions, no_grad};

/// The factor of enlargement; and `SIDE`, the side of the large images in pixels.
const SCALE: usize = 3;
const SIDE: usize = 36;

/// Trains a network that enlarges images three times.
#[derive(Parser)]
pub struct Args {
    /// Number of images to train on
    #[arg(long, default_value_t = 2000)]
    images: usize,
    /// Channels of the widest layers
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Images per step
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Passes over the images
    #[arg(long, default_value_t = 10)]
    epochs: usize,
    #[command(flatten)]
    run: common::Run,
}

fn network(width: usize, at: TensorOptions) -> Result<Sequential> {
    let layer = |inputs, outputs, kernel: usize, gain| {
        let options = ConvOptions { padding: (kernel / 2).into(), ..ConvOptions::default() };
        let conv = Conv2d::new(inputs, outputs, [kernel; 2], options, at)?;
        init::orthogonal_(conv.weight(), gain)?;
        Ok::<_, claystone::Error>(conv)
    };
    let (relu, gain) = (Activation::Relu, Activation::Relu.gain());
    let net =
        Sequential::new().push(layer(1, width, 5, gain)?).push(relu).push(layer(width, width, 3, gain)?).push(relu);
    let net = net.push(layer(width, width / 2, 3, gain)?).push(relu);
    Ok(net.push(layer(width / 2, SCALE * SCALE, 3, 1.0)?).push(PixelShuffle(SCALE)))
}

/// Generates images of discs with sharp edges on a background of waves, `[n, 1, SIDE, SIDE]`, in 0..1.
fn pictures(n: usize) -> Result<Tensor> {
    let at = Tensor::linspace(-1.0, 1.0, SIDE, Device::Cpu)?;
    let [x, y] = [at.reshape([1, 1, 1, SIDE])?, at.reshape([1, 1, SIDE, 1])?];
    let random = |low: f64, high: f64| Tensor::rand([n, 1, 1, 1], Device::Cpu)?.affine(high - low, low);
    let (dx, dy) = (x.sub(&random(-0.6, 0.6)?)?, y.sub(&random(-0.6, 0.6)?)?);
    let disc = dx.square()?.add(&dy.square()?)?.lt(&random(0.05, 0.4)?)?.to_dtype(at.dtype())?;
    let waves = x.mul(&random(-8.0, 8.0)?)?.add(&y.mul(&random(-8.0, 8.0)?)?)?.sin()?.affine(0.2, 0.4)?;
    waves.add(&disc.sub_scalar(0.5)?.mul(&random(-0.6, 0.6)?)?)?.clamp(0, 1)
}

/// Reduces images to a third of their size: each pixel is the mean of nine.
fn small(large: &Tensor) -> Result<Tensor> {
    large.avg_pool2d([SCALE; 2], Default::default())
}

/// Computes the peak signal-to-noise ratio, in dB, of images with pixels in 0..1.
fn psnr(got: &Tensor, want: &Tensor) -> Result<f64> {
    let error = got.to_dtype(want.dtype())?.mse_loss(want)?.item::<f32>()?;
    Ok(-10.0 * f64::from(error).log10())
}

/// Trains the network. Returns the quality in dB of the enlarged test images, and of images enlarged by bilinear interpolation.
pub fn train(args: &Args) -> std::result::Result<[f64; 2], Box<dyn std::error::Error>> {
    let watching = args.run.start()?;
    let train = TensorDataset::new(vec![pictures(args.images)?])?;
    let test = pictures(100)?.to_device(args.run.device)?;
    let config = DataLoaderConfig { batch_size: args.batch, shuffle: true, ..Default::default() };
    let loader = DataLoader::new(train, config)?.to_device(args.run.device)?;
    let mut net = network(args.width, args.run.options().into())?;
    let mut adam = Adam::new(net.parameters_mut(), AdamConfig { lr: 1e-3, ..Default::default() })?;

    let enlarged = |large: &Tensor| net.forward(&small(large)?.to_dtype(args.run.dtype)?);
    let bilinear = small(&test)?.interpolate(&[SIDE; 2], Interpolation::Linear { align_corners: false })?;
    let without = psnr(&bilinear, &test)?;
    let mut with = 0.0;
    for epoch in 0..args.epochs {
        let (bar, mut losses) = (common::progress(loader.len()), Vec::new());
        for batch in bar.wrap_iter(loader.iter()) {
            let large = &batch?[0];
            adam.zero_grad();
            let loss = enlarged(large)?.mse_loss(&large.to_dtype(args.run.dtype)?)?;
            loss.backward()?;
            adam.step()?;
            losses.push(loss.detach());
        }
        bar.finish_and_clear();
        with = psnr(&no_grad(|| enlarged(&test))?, &test)?;
        println!(
            "epoch {:3}  loss {:.5}  {with:.2} dB, interpolation {without:.2} dB",
            epoch + 1,
            common::mean(&losses)?
        );
    }
    watching.finish()?;
    Ok([with, without])
}

fn main() -> common::Outcome {
    train(&Args::parse()).map(drop)
}
