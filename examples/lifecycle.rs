//! Computes `rand(3,4)[0] + rand(3,4)` step by step, and shows which tensor owns the memory and when the allocator gets it back.
//!
//! `cargo run --release --example lifecycle -- --help`

mod common;

use clap::Parser;
use claystone::{Device, Tensor};

/// Follows the memory of `rand(3,4)[0] + rand(3,4)`: a view keeps its base's storage alive, and a result outlives both.
#[derive(Parser)]
struct Args {
    /// Where to run: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = common::device)]
    device: Device,
}

/// Prints a step (a line of code), and the allocator's statistics after the step.
fn print_step(device: Device, step: &str, note: &str) -> claystone::Result<()> {
    let s = device.memory_stats()?;
    println!("{step}");
    println!(
        "    live allocations {}: {} bytes asked for, {} handed out, {} held from the driver",
        s.allocation.current, s.requested_bytes.current, s.allocated_bytes.current, s.reserved_bytes.current
    );
    println!("    {note}\n");
    Ok(())
}

fn main() -> common::Outcome {
    let device = Args::parse().device;
    common::announce(device)?;
    println!();
    let bar = common::progress(7).with_message("lifecycle");
    let step = |code: &str, note: &str| {
        bar.inc(1);
        bar.suspend(|| print_step(device, code, note))
    };

    claystone::manual_seed(7);
    step("start", "nothing yet: a device is opened by its first tensor")?;

    let base = Tensor::rand([3, 4], device)?;
    let bytes = base.storage().nbytes();
    step(
        "let base = Tensor::rand([3, 4], device)?;",
        &format!("{bytes} bytes of storage, in a block cut from a larger segment"),
    )?;

    let row = base.i(0)?;
    let shared = row.shares_storage(&base);
    step(
        "let row = base.i(0)?;",
        &format!("a view: shape {}, no allocation; shares storage with base: {shared}", row.shape()),
    )?;

    drop(base);
    let kept = row.storage().nbytes();
    step("drop(base);", &format!("the view keeps all {kept} bytes of base's storage alive"))?;

    let other = Tensor::rand([3, 4], device)?;
    step("let other = Tensor::rand([3, 4], device)?;", "a second block")?;

    let sum = &row + &other;
    let shape = sum.shape().to_string();
    step(
        "let sum = &row + &other;",
        &format!("row {} and other {} broadcast to {shape}: one block for the result", row.shape(), other.shape()),
    )?;

    drop(row);
    drop(other);
    step(
        "drop(row); drop(other);",
        "both blocks are back in the allocator's cache; the result does not depend on them",
    )?;
    bar.finish_and_clear();

    println!("{sum}\n");
    drop(sum);
    let stats = device.memory_stats()?;
    println!("peak {} bytes in {} allocations", stats.requested_bytes.peak, stats.allocation.peak);
    println!("live bytes at the end {}", stats.requested_bytes.current);
    Ok(())
}
