//! `claystone info`: what there is, what is configured and whether it computes, to paste into a report of a bug.

mod report;
mod self_test;
mod text;

use std::io::{self, Write};

use report::Report;

/// Report the machine, its OpenCL drivers and devices, the configuration in force and a self-test
///
/// For reports of bugs: paste what it prints. The self-test computes on each device and compares with the host. It fails
/// where a device does, or where no driver could be asked although there is one.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object; docs/guide.md lists its keys
    #[arg(long)]
    json: bool,
    /// Compute nothing: for devices that hang
    #[arg(long)]
    no_self_test: bool,
}

/// Prints the report; false where something failed, which is in it.
///
/// # Errors
/// Those of writing.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let report = Report::gather(!args.no_self_test);
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&report).map_err(io::Error::other)?)?,
        false => text::write(&report, out)?,
    }
    Ok(report.is_good())
}
