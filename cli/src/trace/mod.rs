//! Traces: sequences of allocations and frees, read from any of three file formats.

mod rmm;
mod snapshot;
#[cfg(test)]
mod tests;
mod text;

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::path::Path;

use claystone::storage::plan::Lifetime;
use claystone::storage::{CsvEvent, Snapshot};

/// The supported formats, for error messages.
const FORMATS: &str = "lines 'a ID BYTES' and 'f ID', RMM's CSV log, or a memory snapshot (PyTorch's or claystone's, \
                       pickle or JSON)";

/// One step of a trace. Blocks are numbered from 0 in the order in which they are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Allocate { block: usize, bytes: usize, stream: usize },
    Free { block: usize },
}

/// A valid sequence of events: every block is allocated once, with at least one byte, and freed at most once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    pub name: String,
    pub events: Vec<Event>,
    pub blocks: usize,
    /// Maximum number of bytes that are live at a time.
    pub peak_requested: u64,
    /// Size of the largest request in bytes.
    pub largest: usize,
    /// Number of streams; events have the index of their stream.
    pub streams: usize,
}

/// The first byte of a pickle of protocol 2 or later.
pub const PICKLE: u8 = 0x80;

impl Trace {
    /// Reads the traces in a file: one, or one for each device of a snapshot. Errors name the file and the line.
    pub fn open(path: &Path) -> Result<Vec<Trace>, String> {
        let name = path.display().to_string();
        let bytes = claystone::file::read(path).map_err(|error| format!("{name}: {error}"))?;
        Trace::read(&bytes, &name).map_err(|fault| fault.in_file(&name))
    }

    /// Detects the format of a file's bytes and reads the traces.
    pub fn read(bytes: &[u8], name: &str) -> Result<Vec<Trace>, TraceError> {
        let unknown = || format!("not a trace: the supported formats are {FORMATS}");
        let bad = |error: claystone::Error| TraceError::from(error.to_string());
        if bytes.first() == Some(&PICKLE) {
            return snapshot::read(&Snapshot::from_pickle(bytes).map_err(bad)?, name);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| unknown())?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        match first_content_line(text) {
            Some((line, _)) if line.starts_with('{') => snapshot::read(&Snapshot::from_json(text).map_err(bad)?, name),
            Some((line, _)) if rmm::is_log(line) => Ok(vec![rmm::read(text, name)?]),
            Some((line, _)) if text::is_event(line) => Ok(vec![text::read(text, name)?]),
            Some((_, number)) => Err(TraceError::at(number, unknown())),
            None => Err(TraceError::from(unknown())),
        }
    }

    /// Reads the events of an RMM log with their times and addresses; `None` for files of other formats.
    pub fn rmm_events(bytes: &[u8]) -> Option<Result<Vec<CsvEvent>, TraceError>> {
        let text = std::str::from_utf8(bytes).ok()?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        first_content_line(text).filter(|(line, _)| rmm::is_log(line))?;
        let event = |(number, event): (usize, Result<_, String>)| event.map_err(|what| TraceError::at(number, what));
        Some(rmm::events(text).map(event).collect())
    }

    /// Returns the lifetime of each block, in indices of events.
    pub fn lifetimes(&self) -> Vec<Lifetime> {
        let mut lives = Vec::with_capacity(self.blocks);
        for (now, event) in (0..).zip(&self.events) {
            match *event {
                Event::Allocate { bytes, .. } => {
                    lives.push(Lifetime { start: now, end: self.events.len() as u64, bytes: bytes as u64 });
                }
                Event::Free { block } => lives[block].end = now,
            }
        }
        lives
    }

    /// Returns the alignment for a replay: 512 bytes, or 1 if every request is below 512, because such sizes are in some unit other
    /// than bytes.
    pub fn alignment(&self) -> usize {
        if self.largest < 512 { 1 } else { 512 }
    }
}

/// Returns the first line that is neither blank nor a comment, and its number.
fn first_content_line(text: &str) -> Option<(&str, usize)> {
    text.lines().map(str::trim).zip(1..).find(|(line, _)| !line.is_empty() && !line.starts_with('#'))
}

/// An error in a trace, and the number of its line (0 if it belongs to no line).
#[derive(Debug, PartialEq, Eq)]
pub struct TraceError {
    pub line: usize,
    pub what: String,
}

impl TraceError {
    /// Formats the error with the name of the file.
    pub fn in_file(&self, name: &str) -> String {
        match self.line {
            0 => format!("{name}: {}", self.what),
            line => format!("{name}:{line}: {}", self.what),
        }
    }
}

impl TraceError {
    fn at(line: usize, what: impl Into<String>) -> TraceError {
        TraceError { line, what: what.into() }
    }
}

impl From<String> for TraceError {
    fn from(what: String) -> TraceError {
        TraceError { line: 0, what }
    }
}

/// Maximum number of live bytes: the capacity of the simulated device.
const MAX_LIVE_BYTES: u64 = 1 << 50;

/// Formats an address for error messages.
struct BlockAddress(u64);

impl Display for BlockAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {:#x}", self.0)
    }
}

/// Builds a trace event by event. A file may reuse a block's name after the block is freed.
#[derive(Default)]
struct Builder {
    events: Vec<Event>,
    names: HashMap<u64, NameState>,
    streams: HashMap<u64, usize>,
    blocks: usize,
    /// Total bytes of the live blocks.
    live: u64,
    peak: u64,
    largest: usize,
}

/// The state of a block's name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NameState {
    Live {
        block: usize,
        bytes: usize,
    },
    /// Allocated with zero bytes; such a block is not part of the trace.
    Empty,
    Freed,
}

impl Builder {
    /// True if a block currently has this name.
    fn is_live(&self, name: u64) -> bool {
        !matches!(self.names.get(&name), None | Some(NameState::Freed))
    }

    /// Adds an allocation. `shown` is the name in the file's own notation, for errors.
    fn allocate(&mut self, name: u64, bytes: u64, stream: u64, shown: impl Display) -> Result<(), String> {
        if self.is_live(name) {
            return Err(format!("{shown} is allocated again, though it was not freed"));
        }
        if bytes == 0 {
            self.names.insert(name, NameState::Empty);
            return Ok(());
        }
        let (live, size) = (self.live.checked_add(bytes), usize::try_from(bytes));
        let (Some(live @ ..=MAX_LIVE_BYTES), Ok(bytes)) = (live, size) else {
            return Err(format!("{shown} has {bytes} bytes: no device has that much memory"));
        };
        self.live = live;
        self.peak = self.peak.max(self.live);
        self.largest = self.largest.max(bytes);
        let streams = self.streams.len();
        let stream = *self.streams.entry(stream).or_insert(streams);
        self.names.insert(name, NameState::Live { block: self.blocks, bytes });
        self.events.push(Event::Allocate { block: self.blocks, bytes, stream });
        self.blocks += 1;
        Ok(())
    }

    fn free(&mut self, name: u64, shown: impl Display) -> Result<(), String> {
        match self.names.insert(name, NameState::Freed) {
            Some(NameState::Live { block, bytes }) => {
                self.live -= bytes as u64;
                self.events.push(Event::Free { block });
            }
            Some(NameState::Empty) => {}
            Some(NameState::Freed) => return Err(format!("{shown} is freed twice")),
            None => return Err(format!("{shown} is freed, but was never allocated")),
        }
        Ok(())
    }

    fn finish(self, name: &str) -> Result<Trace, String> {
        if self.blocks == 0 {
            return Err("it has no allocations".to_owned());
        }
        Ok(Trace {
            name: name.to_owned(),
            events: self.events,
            blocks: self.blocks,
            peak_requested: self.peak,
            largest: self.largest,
            streams: self.streams.len(),
        })
    }
}
