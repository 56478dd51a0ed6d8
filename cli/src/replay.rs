//! `claystone replay`: its arguments, and their execution.

use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use claystone::Device;
use claystone::storage::{Backend, Config, parse_bytes};
use rayon::prelude::*;

use crate::measure::{Setup, measure, min_capacity, ns_per_pair, peak_when_planned};
use crate::plan::arena;
use crate::report::{self, Planned, Row};
use crate::trace::Trace;

/// Replay allocation traces through an allocator and print the memory it reserves
#[derive(clap::Args)]
#[command(long_about = "Replays allocation traces through an allocator and prints the memory it reserves.

Without --driver the device is simulated: memory is only counted, so any trace runs on any machine.

File formats, detected by their contents:
  text      'a ID BYTES' allocates, 'f ID' frees; blank lines and # comments are skipped
  CSV       the log of RMM's logging adaptor: Thread,Time,Action,Pointer,Size,Stream
  snapshot  a pickle (or JSON) of PyTorch's torch.cuda.memory._dump_snapshot or of claystone, with its history;
            blocks older than the history are allocated first; each device with events is a separate trace
Blocks that are live at the end are then freed, so a trace can be repeated.

If every request of a trace is below 512 bytes, its sizes are assumed to be in another unit than bytes, and it is
replayed with alignment 1 unless --alignment is given.

Columns (sizes in MiB; --json has bytes):
  requested   peak of the bytes in live blocks
  reserved    peak of the bytes that the allocator reserved on the device
  used        requested / reserved
  segments    peak of the number of segments
  calls       driver calls: creation, commit and release of memory, copies, waits; on a real device only creation
              and release
  ns/pair     time of an allocation and its release, the median of many passes after the counted passes
  planned     --plan: size of an arena for all blocks if their lifetimes are known in advance, and its used share
  served      --plan: peak of reserved bytes while passes are served from the plan of a recorded pass; blocks of
              streams other than the first are served by the allocator
  capacity    --min-capacity: the smallest device on which the trace runs, also as a multiple of requested")]
#[command(after_long_help = "Examples:
  claystone replay step.trace                                   the default allocator
  claystone replay *.trace --backend all                        all three allocators side by side
  claystone replay log.csv --config segments:pytorch            with PyTorch's segment sizes
  claystone replay snapshot.pickle --plan --min-capacity        the minimum memory that it needs
  claystone replay step.trace --capacity 700MiB --passes 100    test whether it fits repeatedly
  claystone replay step.trace --driver opencl:0                 on a real device
  claystone replay *.trace --json | jq .utilisation             output for programs")]
pub struct Args {
    /// Files to replay
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// The allocator, or all of them; by default the backend of --config [default: caching]
    #[arg(long)]
    backend: Option<BackendChoice>,
    /// Settings of the allocator, as in CLAYSTONE_ALLOC_CONF
    #[arg(long, value_name = "KEY:VALUE,...", default_value = "", hide_default_value = true)]
    config: Config,
    /// The device: sim, cpu or opencl:N
    #[arg(long, default_value = "sim")]
    driver: Driver,
    /// Passes before the figures are read, and passes to survive for --min-capacity [default: 1, and 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    passes: Option<u32>,
    /// Memory of the simulated device, or limit on a real device: bytes, or with KiB, MiB or GiB [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    capacity: Option<u64>,
    /// Alignment of blocks on the simulated device, a power of two [default: 512]
    #[arg(long, value_name = "BYTES", value_parser = parse_alignment)]
    alignment: Option<usize>,
    /// Also place the blocks offline, searching for up to --plan-seconds, and serve further passes from a recorded plan
    #[arg(long)]
    plan: bool,
    /// Time limit of the search; if it suffices, the plan of a trace is the same on every machine
    #[arg(long, value_name = "SECONDS", default_value_t = 1, requires = "plan")]
    plan_seconds: u32,
    /// Also search for the smallest simulated device that survives the passes, to within 0.1 %
    #[arg(long)]
    min_capacity: bool,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// The values of `--backend`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendChoice {
    Caching,
    Pool,
    Direct,
    All,
}

impl BackendChoice {
    fn backends(self) -> &'static [Backend] {
        match self {
            BackendChoice::Caching => &[Backend::Caching],
            BackendChoice::Pool => &[Backend::Pool],
            BackendChoice::Direct => &[Backend::Direct],
            BackendChoice::All => &[Backend::Caching, Backend::Pool, Backend::Direct],
        }
    }
}

/// The driver below the allocator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    Sim,
    Real(Device),
}

impl FromStr for Driver {
    type Err = String;

    fn from_str(text: &str) -> Result<Driver, String> {
        match text {
            "sim" => Ok(Driver::Sim),
            _ => text.parse().map(Driver::Real).map_err(|_| "it must be sim, cpu or opencl:N".to_owned()),
        }
    }
}

fn parse_alignment(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n: &usize| n.is_power_of_two() && *n <= 1 << 30);
    number.ok_or_else(|| "it must be a power of two of at most 1 GiB".to_owned())
}

/// Replays everything; returns false if something failed, after reporting it on standard error.
///
/// # Errors
/// Only errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    if let Err(what) = args.check() {
        eprintln!("claystone replay: {what}");
        return Ok(false);
    }
    let opened: Vec<_> = args.traces.par_iter().map(|path| Trace::open(path)).collect();
    let mut traces = Vec::new();
    let mut good = true;
    for opened in opened {
        match opened {
            Ok(of_file) => traces.extend(of_file),
            Err(what) => {
                eprintln!("claystone replay: {what}");
                good = false;
            }
        }
    }
    let runs: Vec<_> = traces.iter().flat_map(|trace| args.backends().iter().map(move |&b| (trace, b))).collect();
    let counted: Vec<_> = match args.driver {
        Driver::Sim => runs.par_iter().map(|&(trace, backend)| args.row(trace, backend)).collect(),
        // One replay at a time, because all replays on a real device share its memory.
        Driver::Real(_) => runs.iter().map(|&(trace, backend)| args.row(trace, backend)).collect(),
    };
    let mut rows = Vec::new();
    for (&(trace, backend), counted) in runs.iter().zip(counted) {
        // One timing at a time, because concurrent replays would slow each other down.
        match counted.and_then(|row| args.with_time(trace, backend, row)) {
            Ok(row) if args.json => {
                serde_json::to_writer(&mut *out, &row)?;
                writeln!(out)?;
            }
            Ok(row) => rows.push(row),
            Err(what) => {
                eprintln!("claystone replay: {}: {}: {what}", trace.name, report::backend_name(backend));
                good = false;
            }
        }
    }
    if !rows.is_empty() {
        report::table(&rows, out)?;
    }
    Ok(good)
}

impl Args {
    /// Returns why the options contradict each other, if they do.
    fn check(&self) -> Result<(), &'static str> {
        match self.driver {
            Driver::Sim => Ok(()),
            Driver::Real(_) if self.min_capacity => {
                Err("--min-capacity needs the simulated device: leave out --driver")
            }
            Driver::Real(_) if self.alignment.is_some() => {
                Err("--alignment is the simulated device's: a real one has its own")
            }
            Driver::Real(_) => Ok(()),
        }
    }

    fn backends(&self) -> &[Backend] {
        match self.backend {
            Some(choice) => choice.backends(),
            None => std::slice::from_ref(&self.config.backend),
        }
    }

    fn setup(&self, trace: &Trace, backend: Backend) -> Setup {
        Setup {
            config: Config { backend, ..self.config.clone() },
            driver: self.driver,
            capacity: self.capacity,
            alignment: self.alignment.unwrap_or_else(|| trace.alignment()),
        }
    }

    /// Measures everything except the time for one trace and one allocator.
    fn row(&self, trace: &Trace, backend: Backend) -> Result<Row, String> {
        let setup = self.setup(trace, backend);
        let measured = measure(&setup, trace, self.passes.unwrap_or(1))?;
        let min_capacity = match self.min_capacity {
            true => Some(min_capacity(&setup, trace, self.passes.unwrap_or(3))?),
            false => None,
        };
        let planned = match self.plan {
            true => Some(Planned {
                arena: arena(trace, measured.alignment, Duration::from_secs(self.plan_seconds.into()))?,
                served: peak_when_planned(&setup, trace, self.passes.unwrap_or(1))?,
            }),
            false => None,
        };
        Ok(Row::new(trace, backend, &measured, planned, min_capacity))
    }

    fn with_time(&self, trace: &Trace, backend: Backend, mut row: Row) -> Result<Row, String> {
        row.ns_per_pair = ns_per_pair(&self.setup(trace, backend), trace, self.passes.unwrap_or(1))?;
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two() {
        assert_eq!((parse_alignment("1"), parse_alignment("512")), (Ok(1), Ok(512)));
        for bad in ["0", "3", "x", "-1", "4294967296"] {
            assert!(parse_alignment(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn drivers_are_devices_or_simulated() {
        assert!("sim".parse() == Ok(Driver::Sim) && "opencl:1".parse() == Ok(Driver::Real(Device::OpenCL(1))));
        assert!("cpu".parse() == Ok(Driver::Real(Device::Cpu)) && "cuda".parse::<Driver>().is_err());
    }
}
