//! Measures the host's time for an operation: `launch [--device D] [--only CASE] [--rounds N]`. Runs many operations on small tensors
//! without waiting, and prints nanoseconds per call. On the CPU, the case `hand-over` also compares the crate's own way of dividing a loop
//! among threads with plain rayon; the two alternate.
//!
//! With a driver whose clSetKernelArg and clEnqueueNDRangeKernel do nothing (see docs/notebook/launches.md), this measures only claystone.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::time::Instant;

use claystone::optim::{AdamW, AdamWConfig, Fused, Optimizer, Rule, Sgd, SgdConfig};
use claystone::{Device, Tensor};
use rayon::prelude::*;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let value = |option: &str| args.iter().position(|a| a == option).map(|i| args.get(i + 1).ok_or("it needs a value"));
    let device: Device = value("--device").transpose()?.map_or(Ok(Device::best()), |name| name.parse())?;
    let only = value("--only").transpose()?;
    let rounds = value("--rounds").transpose()?.map_or(Ok(60), |n| n.parse())?;
    let x = Tensor::rand(&[64, 64], device)?;
    let (y, row) = (Tensor::rand(&[64, 64], device)?, Tensor::rand(&[64], device)?);
    let labels = Tensor::from_slice(&(0..64).map(|i| i * 7 % 64).collect::<Vec<i64>>(), 64, device)?;
    let mut weight = x.try_clone()?.requires_grad_(true)?;
    let sgd = Sgd::new(vec![&mut weight], SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
    weight.sum((), false)?.backward()?;
    let sgd = RefCell::new(sgd);
    let momentum = SgdConfig { momentum: 0.9, ..SgdConfig::default() };
    let (six, adamw): (Sgd, AdamW) =
        (optimizer_of_six(momentum, device)?, optimizer_of_six(AdamWConfig::default(), device)?);
    let (six, adamw) = (RefCell::new(six), RefCell::new(adamw));
    type Case<'a> = (&'a str, Box<dyn Fn() -> claystone::Result<()> + 'a>);
    let rate = Cell::new(0.1);
    let cases: [Case; 21] = [
        ("empty", Box::new(|| Tensor::empty(&[64, 64], device).map(drop))),
        ("add", Box::new(|| x.add(&y).map(drop))),
        ("add_", Box::new(|| y.add_(&x).map(drop))),
        ("relu", Box::new(|| x.relu().map(drop))),
        ("map", Box::new(|| Tensor::map(&[&x], |e| (&e[0] * 0.3).tanh()).map(drop))),
        (
            "map, new number",
            Box::new(|| {
                rate.set(rate.get() * 0.999_99);
                Tensor::map(&[&x], |e| (&e[0] * rate.get()).tanh()).map(drop)
            }),
        ),
        ("add a row", Box::new(|| x.add(&row).map(drop))),
        ("sum of rows", Box::new(|| x.sum(1, false).map(drop))),
        ("sum of columns", Box::new(|| x.sum(0, false).map(drop))),
        ("sum", Box::new(|| x.sum((), false).map(drop))),
        ("softmax", Box::new(|| x.softmax(1).map(drop))),
        ("layer_norm", Box::new(|| x.layer_norm(&[64], Some(&row), Some(&row), 1e-5).map(drop))),
        ("cross_entropy", Box::new(|| x.cross_entropy(&labels).map(drop))),
        ("matmul", Box::new(|| x.matmul(&y).map(drop))),
        ("linear", Box::new(|| x.linear(&y, Some(&row)).map(drop))),
        ("embedding", Box::new(|| x.embedding(&labels).map(drop))),
        ("sgd", Box::new(|| sgd.borrow_mut().step())),
        ("sgd of six", Box::new(|| six.borrow_mut().step())),
        ("adamw of six", Box::new(|| adamw.borrow_mut().step())),
        ("clone", Box::new(|| x.try_clone().map(drop))),
        ("transposed copy", Box::new(|| x.t()?.contiguous().map(drop))),
    ];
    for (name, op) in cases.iter().filter(|(name, _)| only.is_none_or(|only| only == name)) {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let from = Instant::now();
            for _ in 0..200 {
                op()?;
            }
            times.push(from.elapsed().as_secs_f64() * 1e9 / 200.0);
            device.synchronize()?;
        }
        println!("{name:16} {:8.0} ns", median(times));
    }
    match device == Device::Cpu && only.is_none_or(|only| only == "hand-over") {
        true => hand_over(rounds),
        false => Ok(()),
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Compares `relu_` of a few elements with the same loop on one thread, and on rayon's threads with equal pieces.
fn hand_over(rounds: usize) -> Result<(), Box<dyn Error>> {
    const PIECE: usize = 16 << 10;
    let relu = |x: &mut [f32]| x.iter_mut().for_each(|x| *x = x.max(0.0));
    for n in [32 << 10, 64 << 10, 256 << 10] {
        let (tensor, mut host) = (Tensor::rand(&[n], Device::Cpu)?, vec![0.5f32; n]);
        type Arm<'a> = (&'a str, Box<dyn FnMut() + 'a>);
        let (mut one, mut chunks) = (host.clone(), host.clone());
        let mut arms: [Arm; 4] = [
            ("ours", Box::new(|| _ = tensor.relu_().expect("relu_ runs"))),
            ("one thread", Box::new(|| relu(&mut one))),
            ("par_chunks_mut", Box::new(|| chunks.par_chunks_mut(PIECE).for_each(relu))),
            (
                "scope",
                Box::new(|| {
                    let pieces = host.chunks_mut(PIECE);
                    rayon::scope(|scope| pieces.for_each(|piece| scope.spawn(move |_| relu(piece))));
                }),
            ),
        ];
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..rounds {
            for ((_, call), times) in arms.iter_mut().zip(&mut times) {
                let from = Instant::now();
                (0..200).for_each(|_| call());
                times.push(from.elapsed().as_secs_f64() * 1e9 / 200.0);
            }
        }
        for ((name, _), times) in arms.iter().zip(times) {
            println!("hand-over {:3} Ki {name:14} {:8.0} ns", n >> 10, median(times));
        }
    }
    Ok(())
}

/// Returns an optimiser of six parameters with gradients, as a small network has.
fn optimizer_of_six<R: Rule>(rule: R, device: Device) -> claystone::Result<Fused<R>> {
    let leaf = |i: usize| Tensor::rand(&[8, [8, 1][i % 2]], device)?.requires_grad_(true);
    let mut parameters = (0..6).map(leaf).collect::<claystone::Result<Vec<Tensor>>>()?;
    let optimizer = Fused::new(parameters.iter_mut().collect(), rule)?;
    parameters.iter().try_for_each(|p| p.sum((), false)?.backward())?;
    Ok(optimizer)
}
