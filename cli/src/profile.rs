//! `claystone profile`: prints a profile as a table.

use std::io::{self, Write};
use std::path::PathBuf;

use claystone::profiler::{Profile, SortBy};

/// Print the table of a profile: the time of operations, kernels and copies, on the host and on devices
#[derive(clap::Args)]
#[command(
    long_about = "Prints profiles of Profile::save, CLAYSTONE_PROFILE=trace.json or an example's --profile, or traces of other
programs in Chrome's format, such as PyTorch's. There is a row for each operation, kernel, copy and wait, with

  on             the device
  calls          the number of calls
  host self      time on the host, without nested calls
  host           time on the host
  device         time on the device; for an operation, the time of its kernels
  share          share of the time on all devices
  average        time per call, on the device if the call ran there
  GB/s, copy     bytes read and written per second, absolute and relative to the device's rate of copies
  GFLOP/s        rate of matrix products and convolutions

followed by the utilisation of each device, the gaps between launches, waits, and compiled programs."
)]
pub struct Args {
    /// Profiles to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Sort by time on devices, time of the host, calls, bytes or name: device, host, calls, bytes, name
    #[arg(long, default_value = "device")]
    sort: SortBy,
    /// Print at most this many rows
    #[arg(long, default_value_t = 40, value_name = "ROWS")]
    limit: usize,
    /// Print a row for each combination of shapes
    #[arg(long)]
    shapes: bool,
    /// Print every command's times instead: how long it was queued, submitted and running
    #[arg(long, conflicts_with_all = ["sort", "limit", "shapes"])]
    timings: bool,
}

/// Prints every file's table; returns false if a file is not a profile, after reporting it on standard error.
///
/// # Errors
/// Only errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let mut good = true;
    for file in &args.files {
        let profile = match Profile::load(file) {
            Ok(profile) => profile,
            Err(error) => {
                eprintln!("claystone profile: {error}");
                good = false;
                continue;
            }
        };
        if args.files.len() > 1 {
            writeln!(out, "{}:", file.display())?;
        }
        if args.timings {
            write!(out, "{}", profile.timings())?;
        } else {
            let averages = if args.shapes { profile.key_averages_by_shape() } else { profile.key_averages() };
            write!(out, "{}", averages.sorted_by(args.sort).limited_to(args.limit))?;
        }
    }
    Ok(good)
}
