//! Trains a variational autoencoder on handwritten digits and draws new ones.
//!
//! `cargo run --release --example vae -- --help`

mod common;

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Parser;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Generator, Interpolation, LossReduction, PadMode, Result, Tensor, TensorOptions, no_grad};
use common::{Outcome, images};

/// Trains a variational autoencoder on handwritten digits and draws new ones.
#[derive(Parser)]
pub struct Args {
    /// A folder with the four IDX files of MNIST, gzipped or not [default: the digits of this repository]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Folder of the pictures: samples after each epoch that is a multiple of --every, and after the last epoch
    #[arg(long, default_value = "target/vae")]
    pictures: PathBuf,
    /// Epochs between pictures
    #[arg(long, default_value_t = 20)]
    every: usize,
    /// Size of the latent code of an image
    #[arg(long, default_value_t = 8)]
    latent: usize,
    /// Images per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    #[command(flatten)]
    training: common::Training<60>,
    #[command(flatten)]
    run: common::Run,
}

/// The encoder with two heads (mean and log variance of the code), and the decoder.
struct Vae {
    encoder: Sequential,
    mean: Linear,
    log_variance: Linear,
    decoder: Sequential,
}

impl Vae {
    fn new(pixels: usize, latent: usize, at: TensorOptions) -> Result<Vae> {
        let layer = |from, to| Ok(Linear::new(from, to, at)?.with_activation(Activation::Relu));
        Ok(Vae {
            encoder: Sequential::new().push(layer(pixels, 256)?).push(layer(256, 128)?),
            mean: Linear::new(128, latent, at)?,
            log_variance: Linear::new(128, latent, at)?,
            decoder: Sequential::new()
                .push(layer(latent, 128)?)
                .push(layer(128, 256)?)
                .push(Linear::new(256, pixels, at)?),
        })
    }

    /// Returns the negative evidence lower bound per image: reconstruction loss plus divergence of the codes from the normal distribution.
    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.encoder.forward(x)?;
        let (mean, log_variance) = (self.mean.forward(&h)?, self.log_variance.forward(&h)?);
        let noise = mean.detach().randn_like()?;
        let code = Tensor::map(&[&mean, &log_variance, &noise], |e| &e[0] + (&e[1] * 0.5).exp() * &e[2])?;
        let logits = self.decoder.forward(&code)?;
        let reconstruction = logits.binary_cross_entropy_with_logits(x, None, None, LossReduction::Sum)?;
        let divergence = Tensor::map(&[&mean, &log_variance], |e| (&e[0] * &e[0] + e[1].exp() - &e[1] - 1.0) * 0.5)?;
        reconstruction.add(&divergence.sum((), false)?)?.div_scalar(x.shape().dims()[0] as f64)
    }
}

impl Module for Vae {
    claystone::parts!(encoder, mean, log_variance, decoder);

    /// Decodes latent codes to images.
    fn forward(&self, code: &Tensor) -> Result<Tensor> {
        self.decoder.forward(code)?.sigmoid()
    }
}

/// Draws images `[n, rows * columns]` with pixels in 0..1 as a PNG: ten per row, with a border, each at least 64 pixels high.
fn draw(path: &Path, images: &Tensor, [rows, columns]: [usize; 2]) -> Outcome {
    let zoom = 64usize.div_ceil(rows);
    let (across, down) = (10, images.shape().dims()[0] / 10);
    let (height, width) = (down * (rows + 2), across * (columns + 2));
    let tiles = images.view([down, across, rows, columns])?.pad(&[1, 1, 1, 1], PadMode::Constant(0.into()))?;
    let sheet = tiles.transpose(1, 2)?.reshape([1, 1, height, width])?.to_dtype(DType::F32)?;
    let large = sheet.interpolate(&[height * zoom, width * zoom], Interpolation::Nearest)?;
    let bytes = large.mul_scalar(255)?.round()?.to_dtype(DType::U8)?.to_vec::<u8>()?;
    let mut encoder = png::Encoder::new(File::create(path)?, (width * zoom) as u32, (height * zoom) as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header()?.write_image_data(&bytes)?;
    Ok(())
}

/// Trains the autoencoder. Returns the mean loss of the test images.
pub fn train(args: &Args) -> std::result::Result<f64, Box<dyn Error>> {
    let watching = args.run.start()?;
    let (train, test) = match &args.data {
        Some(folder) => images::idx(folder, args.run.device, args.run.dtype)?,
        None => images::digits(args.run.device, args.run.dtype)?,
    };
    let [_, _, rows, columns] = *train.images.shape().dims() else { unreachable!("images, channels, rows, columns") };
    std::fs::create_dir_all(&args.pictures)?;
    let mut vae = Vae::new(rows * columns, args.latent, args.run.options().into())?;
    let mut adam = AdamW::new(vae.parameters_mut(), AdamWConfig { lr: 2e-3, ..Default::default() })?;
    // The codes are drawn once, so that pictures of different epochs can be compared.
    let mut codes = Tensor::randn([100, args.latent], args.run.options())?;
    let (mut epoch, mut random) = (0, Generator::current());
    args.training.resume(&mut [
        ("vae", &mut vae),
        ("adam", &mut adam),
        ("codes", &mut codes),
        ("random", &mut random),
        ("epoch", &mut epoch),
    ])?;

    let bar = common::progress(args.training.epochs).with_position(epoch as u64);
    while epoch < args.training.epochs {
        epoch += 1;
        let (shuffled, mut losses) = (train.shuffled()?, Vec::new());
        for from in (0..train.len()).step_by(args.batch) {
            let loss = vae.loss(&shuffled.batch(from, args.batch)?.images.flatten(1, -1)?)?;
            adam.zero_grad();
            loss.backward()?;
            adam.step()?;
            losses.push(loss.detach());
        }
        bar.inc(1);
        let loss = common::mean(&losses)?;
        bar.set_message(format!("loss {loss:.3}"));
        if epoch % args.every.max(1) == 0 || epoch == args.training.epochs {
            let picture = args.pictures.join(format!("epoch-{epoch:03}.png"));
            draw(&picture, &no_grad(|| vae.forward(&codes))?, [rows, columns])?;
            bar.suspend(|| println!("epoch {epoch:3}  loss {loss:.3}  {}", picture.display()));
        }
        args.training.save(&[
            ("vae", &vae),
            ("adam", &adam),
            ("codes", &codes),
            ("random", &random),
            ("epoch", &epoch),
        ])?;
    }
    bar.finish_and_clear();
    let loss = common::mean(&[no_grad(|| vae.loss(&test.images.flatten(1, -1)?))?])?;
    println!("loss of images that were not trained on {loss:.3}");
    watching.finish()?;
    Ok(loss)
}

fn main() -> Outcome {
    train(&Args::parse()).map(drop)
}
