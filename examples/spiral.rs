//! Separates three interleaved spirals with a small network and draws its decision regions.
//!
//! `cargo run --release --example spiral -- --help`

mod common;

use std::f32::consts::TAU;

use clap::Parser;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{DType, Device, Tensor, no_grad};
use plotters::prelude::*;

/// Classifies points of interleaved spirals with an MLP 2-64-64-3 and draws the decision regions as a PNG.
#[derive(Parser)]
struct Args {
    /// Training steps, each on all points
    #[arg(long, default_value_t = 500)]
    steps: usize,
    /// Points on each arm
    #[arg(long, default_value_t = 200)]
    points: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 1e-2)]
    lr: f64,
    #[command(flatten)]
    run: common::Run,
}

/// The number of spirals, which is also the number of classes.
const ARMS: usize = 3;
/// The figure shows the square from -EXTENT to EXTENT in both directions, as GRID x GRID cells.
const EXTENT: f32 = 1.25;
const GRID: usize = 240;

/// Returns points and the number of the arm of each. Arm k starts at the centre in direction k / ARMS and winds outwards, with noise.
fn spirals(points: usize) -> claystone::Result<(Vec<[f32; 2]>, Vec<i64>)> {
    let noise = Tensor::randn([ARMS, points], Device::Cpu)?.to_vec::<f32>()?;
    let at = |i: usize| {
        let (arm, radius) = (i / points, (i % points) as f32 / points as f32);
        let angle = TAU * (arm as f32 / ARMS as f32 + 0.75 * radius) + 0.16 * noise[i];
        [radius * angle.cos(), radius * angle.sin()]
    };
    Ok(((0..ARMS * points).map(at).collect(), (0..ARMS * points).map(|i| (i / points) as i64).collect()))
}

/// Returns the arm that the network predicts for each point.
fn classify(net: &Sequential, points: &Tensor) -> claystone::Result<Vec<i64>> {
    no_grad(|| net.forward(points)?.argmax(1, false))?.to_vec::<i64>()
}

fn main() -> common::Outcome {
    let args = Args::parse();
    let watching = args.run.start()?;
    let (points, arms) = spirals(args.points)?;
    let x = Tensor::from_slice(points.as_flattened(), [points.len(), 2], args.run.device)?.to_dtype(args.run.dtype)?;
    let y = Tensor::from_slice(&arms, [arms.len()], args.run.device)?;

    let options = args.run.options();
    let mut net = Sequential::new()
        .push(Linear::new(2, 64, options)?.with_activation(Activation::Relu))
        .push(Linear::new(64, 64, options)?.with_activation(Activation::Relu))
        .push(Linear::new(64, ARMS, options)?);
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig { lr: args.lr, ..Default::default() })?;
    println!("{ARMS} spirals of {} points, {} steps on all of them", args.points, args.steps);

    let bar = common::progress(args.steps);
    for step in 1..=args.steps {
        let loss = net.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        adam.step()?;
        adam.zero_grad();
        if step % 100 == 0 || step == args.steps {
            let loss = loss.to_dtype(DType::F32)?.item::<f32>()?;
            bar.suspend(|| println!("step {step:4}  loss {loss:.4}"));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();

    // The network predicts the arm at the centre of every cell of the figure, in one forward pass.
    let centre = |i: usize| EXTENT * ((2 * i + 1) as f32 / GRID as f32 - 1.0);
    let cells: Vec<f32> = (0..GRID * GRID).flat_map(|i| [centre(i % GRID), centre(i / GRID)]).collect();
    let cells = Tensor::from_slice(&cells, [GRID * GRID, 2], args.run.device)?.to_dtype(args.run.dtype)?;
    let decisions = classify(&net, &cells)?;
    let figure = common::figure("spiral.svg")?;
    draw(&figure, &decisions, &points, &arms)?;
    println!("decision boundary in {}", figure.display());

    let right = classify(&net, &x)?.iter().zip(&arms).filter(|(guess, arm)| guess == arm).count();
    println!("accuracy {:.3}", right as f64 / arms.len() as f64);
    watching.finish()?;
    Ok(())
}

fn draw(path: &std::path::Path, decisions: &[i64], points: &[[f32; 2]], arms: &[i64]) -> common::Outcome {
    let area = common::canvas(path, (2 * GRID as u32, 2 * GRID as u32))?;
    let area = area.apply_coord_spec(Cartesian2d::<
        plotters::coord::types::RangedCoordf32,
        plotters::coord::types::RangedCoordf32,
    >::new(
        -EXTENT..EXTENT, EXTENT..-EXTENT, (0..2 * GRID as i32, 0..2 * GRID as i32)
    ));
    let cell = 2.0 * EXTENT / GRID as f32;
    for (i, &arm) in decisions.iter().enumerate() {
        let (x, y) = ((i % GRID) as f32 * cell - EXTENT, (i / GRID) as f32 * cell - EXTENT);
        area.draw(&Rectangle::new([(x, y), (x + cell, y + cell)], common::colour(arm as usize).mix(0.25).filled()))?;
    }
    for (&[x, y], &arm) in points.iter().zip(arms) {
        area.draw(&Circle::new((x, y), 3, common::colour(arm as usize).filled()))?;
    }
    area.present()?;
    Ok(())
}
