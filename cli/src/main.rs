//! The `claystone` program: replays traces through allocators, shows snapshots and profiles, lists and tunes devices.

mod cache;
mod devices;
mod estimate;
mod info;
mod measure;
mod plan;
mod profile;
mod replay;
mod report;
mod snapshot;
mod trace;
mod tune;
mod view;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Inspects memory and devices: replays allocation traces, shows snapshots and profiles, lists and tunes devices
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:
  claystone replay step.trace                  replay a trace through the default allocator
  claystone replay --help                      supported formats, and the printed columns
  claystone estimate -- program args           how much device memory a program needs, without using it
  claystone snapshot memory.pickle             summarise the memory in use in a snapshot
  claystone profile trace.json                 print a table of times: see CLAYSTONE_PROFILE
  claystone view memory.pickle                 write a page that shows it in a browser
  claystone devices                            list the devices
  claystone info                               describe this machine, for a bug report
  claystone tune                               measure which kernel parameters suit opencl:0"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(Box<replay::Args>),
    Estimate(estimate::Args),
    Snapshot(snapshot::Args),
    Profile(profile::Args),
    View(view::Args),
    /// List the devices, with their memory and driver
    Devices,
    Info(info::Args),
    Tune(tune::Args),
    Cache(cache::Args),
    /// Print the tables of all operations: docs/operations.md
    Operations,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Replay(args) => replay::run(&args, &mut io::stdout()),
        Command::Estimate(args) => estimate::run(&args, &mut io::stdout()),
        Command::Snapshot(args) => snapshot::run(&args, &mut io::stdout()),
        Command::Profile(args) => profile::run(&args, &mut io::stdout()),
        Command::View(args) => view::run(&args, &mut io::stdout()),
        Command::Devices => devices::run(&mut io::stdout()),
        Command::Info(args) => info::run(&args, &mut io::stdout()),
        Command::Tune(args) => tune::run(&args, &mut io::stdout()),
        Command::Cache(args) => cache::run(&args, &mut io::stdout()),
        Command::Operations => write!(io::stdout(), "{}", claystone::ops::operations_markdown()).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE, // failures have already been reported
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS, // the reader closed the pipe
        Err(error) => {
            eprintln!("claystone: {error}");
            ExitCode::FAILURE
        }
    }
}
