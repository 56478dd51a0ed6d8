//! Measures the throughput of clones and transfers of tensors of many sizes. Compares with memcpy and with driver calls.
//!
//! `cargo run --release --example throughput -- --help`

#[path = "../common/mod.rs"]
mod common;
mod driver;
mod report;

use std::error::Error;
use std::time::Duration;

use clap::Parser;
use claystone::{Device, Tensor};
use common::measure::{Calls, Case, Line, Meter, Work};
use driver::Driver;

/// Measures deep clones, copies, transfers and strided copies of f32 tensors of 4 KiB and more, on each device.
#[derive(Parser)]
struct Args {
    /// Where to run: cpu, opencl:N, best or all
    #[arg(long, default_value = "all", value_parser = devices)]
    device: Devices,
    /// The largest size, such as 4K, 64M or 1G; reduced if memory does not allow it
    #[arg(long, default_value = "1G", value_parser = size)]
    max: usize,
    /// Seconds of sampling per case
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// Print one JSON line per measurement instead of tables and plots
    #[arg(long)]
    json: bool,
}

/// The devices of `--device`.
#[derive(Clone)]
struct Devices(Vec<Device>);

fn devices(name: &str) -> Result<Devices, claystone::Error> {
    if name == "all" { Ok(Devices(Device::all())) } else { common::device(name).map(|d| Devices(vec![d])) }
}

fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = text.split_at(text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len());
    let shift = match unit {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err(format!("'{unit}' is not K, M or G")),
    };
    let number: usize = digits.parse().map_err(|_| format!("'{text}' is not a size such as 64M"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too much"))
}

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Returns the value of element `i`, the same in all measured tensors.
fn value(i: usize) -> f32 {
    (i % 1009) as f32 / 1009.0 - 0.5
}

/// Returns an error unless `get(i)` is the expected value of element `i`, at a few indices.
fn check(
    case: &str,
    len: usize,
    mut get: impl FnMut(usize) -> Outcome<f32>,
    want: impl Fn(usize) -> f32,
) -> Outcome<()> {
    for i in [0, len / 3, len / 2, len - 1] {
        let (got, want) = (get(i)?, want(i));
        if got != want {
            return Err(format!("{case}: element {i} of {len} is {got}, not {want}").into());
        }
    }
    Ok(())
}

fn element(tensor: &Tensor, i: usize) -> Outcome<f32> {
    Ok(tensor.flatten(0, -1)?.narrow(0, i, 1)?.item::<f32>()?)
}

fn case(peer: &str, name: &'static str, n: usize, moved: usize) -> Case {
    Case { peer: peer.into(), name, n, dtype: "f32", work: Work::Bytes(moved) }
}

/// Measures deep clones. They alternate with the driver's copy of the same number of bytes between two existing buffers.
fn clones(meter: &Meter, a: &Tensor, driver: Option<&Driver>) -> Outcome<Vec<Line>> {
    let size = a.numel() * a.dtype().size();
    let mine = case("claystone", "clone", size, 2 * size);
    let Some(driver) = driver else {
        return Ok(vec![meter.time(mine, Calls::Single, || a.try_clone(), || Ok(()))?]);
    };
    let (from, to) = (driver.buffer(size)?, driver.buffer(size)?);
    let mut clone = || a.try_clone().map(drop).map_err(Into::into);
    let mut copy = || driver.copy(&from, &to, size).and_then(|()| driver.finish());
    let cases = [mine, case("driver", "clone_raw", size, 2 * size)];
    Ok(meter.beside(cases, [&mut clone, &mut copy])?.into())
}

/// Measures claystone's cases on one device. Clones are also compared with the driver's copy.
fn measure_library(meter: &Meter, device: Device, driver: Option<&Driver>, host: &[f32]) -> Outcome<Vec<Line>> {
    let (len, size) = (host.len(), size_of_val(host));
    let case = |name, moved| case("claystone", name, size, moved);
    let (wait, done) = (|| Ok(device.synchronize()?), || Ok(())); // clones and copies to the host have already waited, so they use `done`
    let mut lines = Vec::new();

    let a = Tensor::from_slice(host, [len], device)?;
    let copy = a.try_clone()?;
    check("clone", len, |i| element(&copy, i), value)?;
    assert!(!copy.shares_storage(&a), "a clone has its own storage");
    lines.extend(clones(meter, &a, driver)?);

    copy.zero_()?;
    copy.copy_(&a)?;
    check("clone_into", len, |i| element(&copy, i), value)?;
    lines.push(meter.time(case("clone_into", 2 * size), Calls::Pipelined, || copy.copy_(&a), wait)?);
    drop(copy);

    let side = len.isqrt();
    let transposed = a.reshape([side, side])?.t()?;
    check("transpose_copy", len, |i| element(&transposed.contiguous()?, i), |i| value(i % side * side + i / side))?;
    let transpose = Case { n: len, ..case("transpose_copy", 2 * size) }; // the size is a number of elements; in other cases, of bytes
    lines.push(meter.time(transpose, Calls::Pipelined, || transposed.contiguous(), wait)?);
    drop(transposed);

    if device != Device::Cpu {
        let here = Tensor::from_slice(host, [len], Device::Cpu)?;
        check("h2d", len, |i| element(&here.to_device(device)?, i), value)?;
        lines.push(meter.time(case("h2d", size), Calls::Single, || here.to_device(device), wait)?);
        check("d2h", len, |i| element(&a.to_device(Device::Cpu)?, i), value)?;
        lines.push(meter.time(case("d2h", size), Calls::Single, || a.to_device(Device::Cpu), done)?);
    }
    Ok(lines)
}

/// Measures driver calls on the same device: a copy between two existing buffers, and transfers from and to host memory, both pageable
/// and pinned.
fn measure_driver(meter: &Meter, driver: &Driver, host: &[f32]) -> Outcome<Vec<Line>> {
    let (len, size) = (host.len(), size_of_val(host));
    let case = |name, moved| case("driver", name, size, moved);
    let bytes: &[u8] = bytemuck::cast_slice(host);
    let float = |bytes: &[u8], i: usize| Ok(f32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into()?));
    let done = || Ok(());
    let mut lines = Vec::new();
    let (mut a, mut b) = (driver.buffer(size)?, driver.buffer(size)?);
    let mut back = vec![0u8; size];

    lines.push(meter.time(case("h2d", size), Calls::Single, || driver.write(bytes, &mut a), done)?);
    driver.copy(&a, &b, size)?;
    driver.read(&b, &mut back)?;
    check("driver", len, |i| float(&back, i), value)?;
    lines.push(meter.time(case("d2h", size), Calls::Single, || driver.read(&a, &mut back), done)?);

    let mut pinned = driver.pinned(size)?;
    pinned.bytes().copy_from_slice(bytes);
    lines.push(meter.time(case("h2d_pinned", size), Calls::Single, || driver.write(pinned.bytes(), &mut b), done)?);
    lines.push(meter.time(case("d2h_pinned", size), Calls::Single, || driver.read(&b, pinned.bytes()), done)?);
    check("pinned", len, |i| float(pinned.bytes(), i), value)?;
    Ok(lines)
}

/// Measures memcpy on one host thread.
fn memcpy(meter: &Meter, host: &[f32]) -> Outcome<Line> {
    let mut to = vec![0f32; host.len()];
    let case = case("host", "memcpy", size_of_val(host), 2 * size_of_val(host));
    let copy = || {
        to.copy_from_slice(host);
        std::hint::black_box(&mut to);
        Outcome::Ok(())
    };
    meter.time(case, Calls::Single, copy, || Ok(()))
}

/// Measures all cases of one size.
fn measure(meter: &Meter, device: Device, driver: Option<&Driver>, size: usize) -> Outcome<Vec<Line>> {
    let host: Vec<f32> = (0..size / 4).map(value).collect();
    let mut lines = measure_library(meter, device, driver, &host)?;
    device.empty_cache()?;
    Device::Cpu.empty_cache()?;
    if let Some(driver) = driver {
        lines.extend(measure_driver(meter, driver, &host)?);
    }
    lines.push(memcpy(meter, &host)?);
    Ok(lines)
}

fn main() -> common::Outcome {
    let args = Args::parse();
    let names = Device::all().into_iter().map(|d| Ok((d, d.info()?.name))).collect::<claystone::Result<Vec<_>>>()?;
    for &device in &args.device.0 {
        let info = device.info()?;
        let driver = if device == Device::Cpu {
            None
        } else {
            // Devices with the same name are distinguished by their order.
            let before = names.iter().take_while(|(d, _)| *d != device).filter(|(_, name)| *name == info.name).count();
            Some(Driver::open(&info.name, before)?)
        };
        // The measured tensors, their copies, the driver's buffers and the host's data together take at most eight times the size.
        let room = info.memory.min(Device::Cpu.info()?.memory) / 8;
        let largest = args.max.min(room as usize).min(info.largest_buffer as usize);
        let sizes: Vec<usize> = (0..10).map(|i| 4096 << (2 * i)).take_while(|&s| s <= largest).collect();
        let meter = Meter { budget: Duration::from_secs_f64(args.seconds), device: info.name.trim().to_owned() };
        if !args.json {
            common::announce(device)?;
        }
        let bar = common::progress(sizes.len());
        let mut lines = Vec::new();
        for &size in &sizes {
            bar.set_message(report::bytes(size));
            let measured = measure(&meter, device, driver.as_ref(), size)?;
            if args.json {
                bar.suspend(|| measured.iter().for_each(|line| println!("{}", line.json())));
            }
            lines.extend(measured.into_iter().map(|line| (size, line)));
            bar.inc(1);
        }
        bar.finish_and_clear();
        if !args.json {
            report::table(device, &sizes, &lines);
            report::draw(device, &meter.device, &sizes, &lines)?;
            report::summary(&sizes, &lines);
        }
    }
    Ok(())
}
