//! `claystone profile`: a profile as a table.

use std::io::{self, Write};
use std::path::PathBuf;

use claystone::profiler::{Profile, SortBy};

/// Print the table of a profile: what took how long, on the host and on devices
#[derive(clap::Args)]
#[command(
    long_about = "Prints profiles that Profile::save, CLAYSTONE_PROFILE=trace.json or an example's --profile wrote, or
another program's trace in Chrome's format, such as PyTorch's: a row for each operation, kernel, copy and wait, with

  on             the device
  calls          how often it happened
  host self      the host's time, without that of what is nested inside
  host           the host's time
  device         time on the device; of an operation that of its kernels
  share          of all time on devices
  average        of a call, on the device if it ran there
  GB/s, copy     bytes read and written a second, and as a share of how fast the device copies memory
  GFLOP/s        of products and convolutions

and below for each device how busy it was, the gaps between launches, waits, and programs that were compiled."
)]
pub struct Args {
    /// Profiles to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Sort by time on devices, time of the host, calls, bytes or name: device, host, calls, bytes, name
    #[arg(long, default_value = "device")]
    sort: SortBy,
    /// Print at most so many rows
    #[arg(long, default_value_t = 40, value_name = "ROWS")]
    limit: usize,
    /// A row for each combination of shapes
    #[arg(long)]
    shapes: bool,
    /// Print every command's times instead: how long it was queued, submitted and running
    #[arg(long, conflicts_with_all = ["sort", "limit", "shapes"])]
    timings: bool,
}

/// Prints every file's table; false where one is no profile, of which standard error tells.
///
/// # Errors
/// Only those of writing.
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
