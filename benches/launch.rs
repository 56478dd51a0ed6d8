//! What an operation costs the host: `launch [--device D] [--only CASE] [--rounds N]`. Small tensors, many operations in a
//! row, nanoseconds a call.
//!
//! Over a driver whose clSetKernelArg and clEnqueueNDRangeKernel do nothing (see docs/performance.md) it is our own part.

use std::error::Error;
use std::time::Instant;

use claystone::{Device, Tensor};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let value = |option: &str| args.iter().position(|a| a == option).map(|i| args.get(i + 1).ok_or("it needs a value"));
    let device: Device = value("--device").transpose()?.map_or(Ok(Device::best()), |name| name.parse())?;
    let only = value("--only").transpose()?;
    let rounds = value("--rounds").transpose()?.map_or(Ok(60), |n| n.parse())?;
    let x = Tensor::rand(&[64, 64], device)?;
    let (y, row) = (Tensor::rand(&[64, 64], device)?, Tensor::rand(&[64], device)?);
    type Case<'a> = (&'a str, Box<dyn Fn() -> claystone::Result<()> + 'a>);
    let cases: [Case; 9] = [
        ("empty", Box::new(|| Tensor::empty(&[64, 64], device).map(drop))),
        ("add", Box::new(|| x.add(&y).map(drop))),
        ("add_", Box::new(|| y.add_(&x).map(drop))),
        ("relu", Box::new(|| x.relu().map(drop))),
        ("add a row", Box::new(|| x.add(&row).map(drop))),
        ("sum of rows", Box::new(|| x.sum(1, false).map(drop))),
        ("softmax", Box::new(|| x.softmax(1).map(drop))),
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
        times.sort_by(f64::total_cmp);
        println!("{name:16} {:8.0} ns", times[times.len() / 2]);
    }
    Ok(())
}
