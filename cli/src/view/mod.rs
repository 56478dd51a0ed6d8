//! `claystone view`: writes an HTML page that shows a file.

mod blob;
mod memory;
mod page;
mod profile;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use claystone::file::NewFile;
use claystone::storage::{Config, CsvAction, CsvEvent, Snapshot, TraceAction, TraceEntry};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::measure::{Setup, record_snapshot};
use super::replay::Driver;
use super::trace::{self, Trace};
use blob::Blob;
use page::Page;

/// Write an HTML page that shows a memory snapshot, an RMM log, a trace or a profile
#[derive(clap::Args)]
#[command(long_about = "Writes one HTML page that shows a file and needs nothing else: no server, no network.

File formats, detected by their contents:
  snapshot  a pickle (or JSON) of PyTorch's torch.cuda.memory._dump_snapshot or of claystone: memory over time, each
            allocation with its annotation and stack, segments and blocks at any time
  CSV       the log of RMM's logging adaptor: its allocations over time
  text      a trace of 'claystone replay', replayed through the default allocator on a simulated device
  profile   Chrome's trace events in JSON, as written by CLAYSTONE_PROFILE, PyTorch's profiler and others: a timeline of
            threads and streams, and a table of times")]
pub struct Args {
    /// File to show
    file: PathBuf,
    /// Page to write [default: FILE with .html added]
    #[arg(short, long, value_name = "PAGE")]
    output: Option<PathBuf>,
}

/// Writes the page; returns false if the file cannot be shown or the page cannot be written, after reporting it.
///
/// # Errors
/// Only errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let output = args.output.clone().unwrap_or_else(|| {
        let mut name = args.file.clone().into_os_string();
        name.push(".html");
        name.into()
    });
    let name = args.file.display().to_string();
    let bytes = claystone::file::read(&args.file).map_err(|error| format!("{name}: {error}"));
    let done = bytes.and_then(|bytes| read(&bytes, &name)).and_then(|(page, mut blob)| {
        let name = args.file.file_name().unwrap_or(args.file.as_os_str());
        blob.set("name", &*name.to_string_lossy());
        write(page, blob, &output).map_err(|error| format!("{} cannot be written: {error}", output.display()))
    });
    match done {
        Ok(()) => writeln!(out, "{}", output.display()).map(|()| true),
        Err(what) => {
            eprintln!("claystone view: {what}");
            Ok(false)
        }
    }
}

fn write(page: &Page, blob: Blob, path: &Path) -> io::Result<()> {
    let mut file = BufWriter::new(NewFile::create(path)?);
    page.write(blob, &mut file)?;
    file.into_inner().map_err(|error| error.into_error())?.commit()
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The key that distinguishes a snapshot from a profile.
#[derive(Deserialize)]
struct SnapshotKeys {
    segments: Option<IgnoredAny>,
}

/// Detects the format of a file's bytes and builds its page. Errors begin with `name`, and the line if there is one.
fn read(bytes: &[u8], name: &str) -> Result<(&'static Page, Blob), String> {
    let of_snapshot = |snapshot: &Snapshot, clock| {
        let blob = memory::blob(snapshot, clock).map_err(|what| format!("{name}: {what}"))?;
        Ok((&page::MEMORY, blob))
    };
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii_start();
    let fault = |error: &dyn Display| format!("{name}: {error}");
    match text.first() {
        Some(&trace::PICKLE) => {
            return of_snapshot(&Snapshot::from_pickle(text).map_err(|error| fault(&error))?, true);
        }
        Some(b'{' | b'[') => {
            let json = std::str::from_utf8(text).map_err(|error| fault(&error))?;
            if serde_json::from_str(json).is_ok_and(|SnapshotKeys { segments }| segments.is_some()) {
                return of_snapshot(&Snapshot::from_json(json).map_err(|error| fault(&error))?, true);
            }
            return Ok((&page::PROFILE, profile::blob(json).map_err(|error| fault(&error))?));
        }
        _ => {}
    }
    // Logs are shown as recorded, because their pointers and times are those of the program that wrote them.
    if let Some(events) = Trace::rmm_events(bytes) {
        return of_snapshot(&log_to_snapshot(&events.map_err(|fault| fault.in_file(name))?), true);
    }
    let traces = Trace::read(bytes, name).map_err(|fault| fault.in_file(name))?;
    let Some(trace) = traces.first() else { return Err(format!("{name}: there is no trace in it")) };
    let setup = Setup { config: Config::default(), driver: Driver::Sim, capacity: None, alignment: trace.alignment() };
    let snapshot = record_snapshot(&setup, trace).map_err(|what| format!("{name}: {what}"))?;
    of_snapshot(&snapshot, false) // false, because a replay's times are not the program's
}

const DAY_US: u64 = 24 * 3600 * 1_000_000;

/// Converts a log to the history of device 0, without segments.
fn log_to_snapshot(events: &[CsvEvent]) -> Snapshot {
    let (mut days, mut last) = (0, 0);
    let mut entries = Vec::new();
    for event in events {
        // Times are times of day, and lines of different threads may be slightly out of order.
        if event.time_us + DAY_US / 2 < last {
            days += DAY_US;
        }
        last = event.time_us;
        let &CsvEvent { addr, bytes: size, stream, time_us, .. } = event;
        let actions: &[TraceAction] = match event.action {
            CsvAction::AllocateFailure => &[TraceAction::Oom],
            _ if addr == 0 || size == 0 => &[],
            CsvAction::Allocate => &[TraceAction::Alloc],
            CsvAction::Free => &[TraceAction::FreeRequested, TraceAction::FreeCompleted],
        };
        entries.extend(actions.iter().map(|&action| {
            let mut entry = TraceEntry::new(action, addr, size);
            (entry.stream, entry.time_us) = (stream, days + time_us);
            entry
        }));
    }
    Snapshot::new(vec![], vec![entries])
}
