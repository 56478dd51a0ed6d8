//! `claystone tune`: measures which kernel parameters suit a device.

use std::io::{self, Write};
use std::time::Instant;

use claystone::tune::{self, Level, Parameter};
use claystone::{Device, Result};

/// Measure which kernel parameters suit a device, and store them beside the cached programs
///
/// The results of each candidate are compared with the CPU's before it is timed. Later processes that open the device use the
/// fastest; without tuning they use defaults for its class. The device should be idle otherwise.
#[derive(clap::Args)]
pub struct Args {
    /// The device: opencl:0, opencl:1, ...
    #[arg(long, default_value_t = Device::OpenCL(0))]
    device: Device,
    /// Also choose for each kernel and class of sizes; the level sets the number of candidates: none, fast, normal, wide or heavy
    #[arg(long, default_value_t = Level::None)]
    level: Level,
    /// Measure nothing: print the parameters in use
    #[arg(long, conflicts_with = "check")]
    show: bool,
    /// Measure nothing: only compare the results of every candidate
    #[arg(long)]
    check: bool,
}

/// Prints the results; returns false after an error, which is reported on standard error.
///
/// # Errors
/// Errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let mut lines = Ok(());
    let done = run_tuning(args, |line| {
        if lines.is_ok() {
            lines = writeln!(out, "{line}").and_then(|()| out.flush());
        }
    });
    lines?;
    if let Err(error) = &done {
        eprintln!("claystone tune: {error}");
    }
    Ok(done.is_ok())
}

fn run_tuning(args: &Args, mut print: impl FnMut(String)) -> Result<()> {
    let device = args.device;
    if args.show {
        tune::parameters(device)?.iter().for_each(|p| print(format_parameter(p)));
        for choice in tune::choices(device)? {
            let sizes: Vec<String> = choice.sizes.iter().map(u32::to_string).collect();
            print(format!("{} {} at sizes of 2^({})", choice.name, choice.value, sizes.join(" ")));
        }
        return Ok(());
    }
    if args.check {
        return tune::check(device).map(|()| print(format!("{device}: every choice gives the CPU's results")));
    }
    let file = tune::tune(device, |measured| {
        let p = &measured.parameter;
        print(format_parameter(p));
        for (choice, time) in p.choices.iter().zip(&measured.times) {
            print(format!("    {choice:>6} {time:>12.1} us{}", if *choice == p.value { "  <" } else { "" }));
        }
    })?;
    if args.level != Level::None {
        let from = Instant::now();
        tune::ahead(device, args.level, |_| {})?;
        let (made, took) = (tune::choices(device)?.len(), from.elapsed().as_secs_f64());
        print(format!("{made} choices by kernel and size at level {} in {took:.1} s", args.level));
    }
    print(match file {
        Some(file) => format!("saved to {}", file.display()),
        None => "not saved: CLAYSTONE_CACHE_DIR is off".to_owned(),
    });
    Ok(())
}

fn format_parameter(p: &Parameter) -> String {
    let default = if p.value == p.default { String::new() } else { format!(" (default {})", p.default) };
    format!("{} {}{default}: {}", p.name, p.value, p.doc)
}
