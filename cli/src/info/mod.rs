//! `claystone info`: reports the machine, the configuration and a self-test, for bug reports.

mod report;
mod self_test;
mod text;

use std::io::{self, Write};

use report::Report;

/// Report the machine, its OpenCL drivers and devices, the configuration in force and a self-test
///
/// Paste its output into bug reports. The self-test computes on each device and compares the results with the host's. The command
/// fails if a device fails, or if an installed driver cannot be queried.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object; docs/guide/reporting-bugs.md lists its keys
    #[arg(long)]
    json: bool,
    /// Skip the self-test, for devices that hang
    #[arg(long)]
    no_self_test: bool,
}

/// Prints the report; returns false if it contains a failure.
///
/// # Errors
/// Errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let report = Report::gather(!args.no_self_test);
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&report).map_err(io::Error::other)?)?,
        false => text::write(&report, out)?,
    }
    Ok(report.is_good())
}
