//! `claystone view`: a page to look at, made of a file.

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

use super::measure::{Setup, recorded};
use super::replay::Driver;
use super::trace::{self, Trace};
use blob::Blob;
use page::Page;

/// Write a page to look at in a browser, of a memory snapshot, an RMM log, a trace or a profile
#[derive(clap::Args)]
#[command(long_about = "Writes one HTML page that shows a file and needs nothing else: no server, no network.

Files, told apart by their contents:
  snapshot  a pickle (or JSON) of PyTorch's torch.cuda.memory._dump_snapshot or of claystone: memory over time, each
            allocation with its annotation and stack, segments and blocks at any moment
  CSV       the log of RMM's logging adaptor: its allocations over time
  text      a trace of 'claystone replay': what the default allocator makes of it on a simulated device
  profile   Chrome's trace events in JSON, as CLAYSTONE_PROFILE, PyTorch's profiler and others write them: a timeline of
            threads and streams, and a table of what took how long")]
pub struct Args {
    /// File to show
    file: PathBuf,
    /// Page to write [default: FILE with .html added]
    #[arg(short, long, value_name = "PAGE")]
    output: Option<PathBuf>,
}

/// Writes the page; false where the file cannot be shown or the page not written, of which standard error tells.
///
/// # Errors
/// Only those of writing to `out`.
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

/// What tells a snapshot from a profile.
#[derive(Deserialize)]
struct Keys {
    segments: Option<IgnoredAny>,
}

/// The page of a file's bytes, whatever their format; the error begins with `name` and a line where it has one.
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
            if serde_json::from_str(json).is_ok_and(|Keys { segments }| segments.is_some()) {
                return of_snapshot(&Snapshot::from_json(json).map_err(|error| fault(&error))?, true);
            }
            return Ok((&page::PROFILE, profile::blob(json).map_err(|error| fault(&error))?));
        }
        _ => {}
    }
    // What a log says in itself: pointers and times are of the program that wrote it.
    if let Some(events) = Trace::rmm_events(bytes) {
        return of_snapshot(&logged(&events.map_err(|fault| fault.of_file(name))?), true);
    }
    let traces = Trace::read(bytes, name).map_err(|fault| fault.of_file(name))?;
    let Some(trace) = traces.first() else { return Err(format!("{name}: there is no trace in it")) };
    let setup = Setup { config: Config::default(), driver: Driver::Sim, capacity: None, alignment: trace.alignment() };
    let snapshot = recorded(&setup, trace).map_err(|what| format!("{name}: {what}"))?;
    of_snapshot(&snapshot, false) // its times are those of the replay
}

const DAY_US: u64 = 24 * 3600 * 1_000_000;

/// A log as the history of device 0, which has no segments.
fn logged(events: &[CsvEvent]) -> Snapshot {
    let (mut days, mut last) = (0, 0);
    let mut entries = Vec::new();
    for event in events {
        // Times are of the day; threads' lines may be out of order by a little.
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
        entries.extend(actions.iter().map(|&action| TraceEntry {
            action,
            addr,
            size,
            stream,
            time_us: days + time_us,
            frames: [].into(),
            compile_context: String::new(),
        }));
    }
    Snapshot { device_traces: vec![entries], ..Snapshot::default() }
}
