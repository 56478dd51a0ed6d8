//! `claystone estimate`: runs a program without device memory, and prints how much it needs.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use claystone::storage::parse_bytes;

/// Run a program on simulated memory and print how much device memory it needs
#[derive(clap::Args)]
#[command(
    long_about = "Runs a program that uses claystone on simulated memory, and prints how much device memory it needs.

The program runs unchanged, with the allocator and the kernels' workspaces of a real run, but tensors have no bytes and no kernel
runs. Let it do a few steps: all steps of a training need the same memory. The report on standard error has the peaks of allocated
and reserved bytes, the smallest device on which the program runs, and the bytes at the peak by role and by source line.

Computed values are zeros, so a loop that waits for a small loss ends at once. The report names the lines that read such values,
and the operations whose result has the largest possible size (nonzero, masked_select, unique).",
    after_long_help = "Examples:
  claystone estimate --capacity 24GiB -- target/release/train --steps 2     does it fit?
  claystone estimate --json -- ./train | jq .devices[0].smallest_device     the program's own output goes to standard error
  claystone estimate --snapshot memory.pickle -- ./train                    then: claystone view memory.pickle

Without this program: CLAYSTONE_DRY_RUN=24GiB ./train, with CLAYSTONE_DRY_RUN_JSON and CLAYSTONE_DRY_RUN_SNAPSHOT for the files."
)]
pub struct Args {
    /// Device memory to compare with: bytes, or with KiB, MiB or GiB [default: the memory of the program's device]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    capacity: Option<u64>,
    /// Print the report as a JSON object on standard output
    #[arg(long)]
    json: bool,
    /// Write a snapshot of the memory and its history to FILE (.pickle or .json, for claystone snapshot and view)
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// The program and its arguments, after --
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// Runs the program; returns false if it fails or makes no tensor, after reporting this on standard error.
///
/// # Errors
/// Errors of writing to `out`, and of creating the temporary file for the report.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let report = tempfile::NamedTempFile::new()?;
    let mut command = Command::new(&args.program[0]);
    command.args(&args.program[1..]).env("CLAYSTONE_DRY_RUN_JSON", report.path());
    command.env("CLAYSTONE_DRY_RUN", args.capacity.map_or("device".to_owned(), |bytes| bytes.to_string()));
    command.env("CLAYSTONE_DRY_RUN_SNAPSHOT", args.snapshot.as_deref().unwrap_or("".as_ref()));
    if args.json {
        command.stdout(Stdio::from(io::stderr()));
    }
    let ended = match command.status() {
        Ok(ended) => ended,
        Err(error) => {
            eprintln!("claystone estimate: {}: {error}", args.program[0]);
            return Ok(false);
        }
    };
    let json = std::fs::read_to_string(report.path())?;
    if json.is_empty() {
        eprintln!("claystone estimate: the program made no tensor with claystone, or it was killed");
    } else if args.json {
        writeln!(out, "{json}")?;
    }
    if !ended.success() {
        eprintln!("claystone estimate: the program ended with {ended}");
    }
    Ok(ended.success() && !json.is_empty())
}
