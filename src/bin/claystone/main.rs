//! The `claystone` program: what allocators do with a trace, what devices there are and which parameters suit them.

mod cache;
mod devices;
mod info;
mod measure;
mod min_capacity;
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

/// Looks at memory and devices: replays what a program allocated, shows snapshots, lists devices, tunes and keeps their kernels
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:
  claystone replay step.trace                  what the default allocator makes of a trace
  claystone replay --help                      the formats it reads, the columns it prints
  claystone snapshot memory.pickle             what held which memory when a snapshot was taken
  claystone profile trace.json                 what took how long: see CLAYSTONE_PROFILE
  claystone view memory.pickle                 a page to look at it in a browser
  claystone devices                            what there is to run on
  claystone info                               all about this machine, for a report of a bug
  claystone tune                               measure which parameters of kernels suit opencl:0"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(Box<replay::Args>),
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
        Ok(false) => ExitCode::FAILURE, // each failure has been reported
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS, // whoever reads has seen enough
        Err(error) => {
            eprintln!("claystone: {error}");
            ExitCode::FAILURE
        }
    }
}
