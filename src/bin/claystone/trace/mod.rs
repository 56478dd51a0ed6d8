//! Traces: what a program allocated and freed, in order, read from any of three kinds of file.

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

/// What the program reads, for error messages.
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
    /// How many blocks it allocates.
    pub blocks: usize,
    /// The most bytes that were live at a time.
    pub peak_requested: u64,
    /// The largest request.
    pub largest: usize,
    /// How many streams it names; events have their index.
    pub streams: usize,
}

/// The first byte of a pickle of protocol 2 or later.
pub const PICKLE: u8 = 0x80;

impl Trace {
    /// The traces in a file: one, or one a device of a snapshot. The error says which file, and where in it.
    pub fn open(path: &Path) -> Result<Vec<Trace>, String> {
        let name = path.display().to_string();
        let bytes = claystone::file::read(path).map_err(|error| format!("{name}: {error}"))?;
        Trace::read(&bytes, &name).map_err(|fault| fault.of_file(&name))
    }

    /// Reads a file's bytes, whatever their format.
    pub fn read(bytes: &[u8], name: &str) -> Result<Vec<Trace>, Fault> {
        let unknown = || format!("not a trace: those are {FORMATS}");
        let bad = |error: claystone::Error| Fault::from(error.to_string());
        if bytes.first() == Some(&PICKLE) {
            return snapshot::read(&Snapshot::from_pickle(bytes).map_err(bad)?, name);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| unknown())?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        match first(text) {
            Some((line, _)) if line.starts_with('{') => snapshot::read(&Snapshot::from_json(text).map_err(bad)?, name),
            Some((line, _)) if rmm::is_log(line) => Ok(vec![rmm::read(text, name)?]),
            Some((line, _)) if text::is_event(line) => Ok(vec![text::read(text, name)?]),
            Some((_, number)) => Err(Fault::at(number, unknown())),
            None => Err(Fault::from(unknown())),
        }
    }

    /// The events of a log of RMM, with their times and addresses; `None` of another file.
    pub fn rmm_events(bytes: &[u8]) -> Option<Result<Vec<CsvEvent>, Fault>> {
        let text = std::str::from_utf8(bytes).ok()?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        first(text).filter(|(line, _)| rmm::is_log(line))?;
        let event = |(number, event): (usize, Result<_, String>)| event.map_err(|what| Fault::at(number, what));
        Some(rmm::events(text).map(event).collect())
    }

    /// When each block is live, in indices of events.
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

    /// The smallest block that it was made for: 512 bytes, as everywhere, or 1 if every request is less, as then its
    /// sizes are not bytes but some unit of their own.
    pub fn alignment(&self) -> usize {
        if self.largest < 512 { 1 } else { 512 }
    }
}

/// The first line with more than a comment, and its number.
fn first(text: &str) -> Option<(&str, usize)> {
    text.lines().map(str::trim).zip(1..).find(|(line, _)| !line.is_empty() && !line.starts_with('#'))
}

/// What is wrong with a trace, and in which line (0: none in particular).
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    pub line: usize,
    pub what: String,
}

impl Fault {
    /// With the name of the file.
    pub fn of_file(&self, name: &str) -> String {
        match self.line {
            0 => format!("{name}: {}", self.what),
            line => format!("{name}:{line}: {}", self.what),
        }
    }
}

impl Fault {
    fn at(line: usize, what: impl Into<String>) -> Fault {
        Fault { line, what: what.into() }
    }
}

impl From<String> for Fault {
    fn from(what: String) -> Fault {
        Fault { line: 0, what }
    }
}

/// The most bytes that may be live: what the simulated device has.
const MOST: u64 = 1 << 50;

/// An address as errors show it.
struct Hex(u64);

impl Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {:#x}", self.0)
    }
}

/// Builds a trace, event by event, from names of blocks that are free to be used again once the block is freed.
#[derive(Default)]
struct Builder {
    events: Vec<Event>,
    /// What became of each name.
    names: HashMap<u64, State>,
    streams: HashMap<u64, usize>,
    blocks: usize,
    /// Bytes of the live blocks.
    live: u64,
    peak: u64,
    largest: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Live {
        block: usize,
        bytes: usize,
    },
    /// Allocated with no bytes: no allocator need know.
    Empty,
    Freed,
}

impl Builder {
    /// Whether a block has this name now.
    fn is_live(&self, name: u64) -> bool {
        !matches!(self.names.get(&name), None | Some(State::Freed))
    }

    /// `shown` is the name as the file has it.
    fn allocate(&mut self, name: u64, bytes: u64, stream: u64, shown: impl Display) -> Result<(), String> {
        if self.is_live(name) {
            return Err(format!("{shown} is allocated again, though it was not freed"));
        }
        if bytes == 0 {
            self.names.insert(name, State::Empty);
            return Ok(());
        }
        let (live, size) = (self.live.checked_add(bytes), usize::try_from(bytes));
        let (Some(live @ ..=MOST), Ok(bytes)) = (live, size) else {
            return Err(format!("{shown} has {bytes} bytes: no device has that much memory"));
        };
        self.live = live;
        self.peak = self.peak.max(self.live);
        self.largest = self.largest.max(bytes);
        let streams = self.streams.len();
        let stream = *self.streams.entry(stream).or_insert(streams);
        self.names.insert(name, State::Live { block: self.blocks, bytes });
        self.events.push(Event::Allocate { block: self.blocks, bytes, stream });
        self.blocks += 1;
        Ok(())
    }

    fn free(&mut self, name: u64, shown: impl Display) -> Result<(), String> {
        match self.names.insert(name, State::Freed) {
            Some(State::Live { block, bytes }) => {
                self.live -= bytes as u64;
                self.events.push(Event::Free { block });
            }
            Some(State::Empty) => {}
            Some(State::Freed) => return Err(format!("{shown} is freed twice")),
            None => return Err(format!("{shown} is freed, but was never allocated")),
        }
        Ok(())
    }

    fn finish(self, name: &str) -> Result<Trace, String> {
        if self.blocks == 0 {
            return Err("nothing is allocated in it".to_owned());
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
