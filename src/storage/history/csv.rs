//! RMM's log of allocations, in the format that RMM's `logging_resource_adaptor` writes and its replay benchmark reads.

use std::fmt::Display;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::str::FromStr;
use std::sync::Mutex;

use super::super::thread;
use super::now_us;
use crate::device::lock;
use crate::error::Excerpt;
use crate::{Error, Result};

/// The first line of a log.
const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";
const COLUMNS: usize = 6;
/// The longest line of a log, in bytes, so that a file without line breaks is rejected early.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// An action, in RMM's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CsvAction {
    /// `allocate`
    Allocate,
    /// `free`
    Free,
    /// `allocate failure`: no memory was allocated, so the line has no pointer.
    AllocateFailure,
}

impl CsvAction {
    const ALL: [CsvAction; 3] = [CsvAction::Allocate, CsvAction::Free, CsvAction::AllocateFailure];

    /// Returns the word for the action in the file.
    pub fn name(self) -> &'static str {
        match self {
            CsvAction::Allocate => "allocate",
            CsvAction::Free => "free",
            CsvAction::AllocateFailure => "allocate failure",
        }
    }
}

/// A line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvEvent {
    /// The number of the thread that logged the event.
    pub thread: u64,
    /// Microseconds since midnight, UTC.
    pub time_us: u64,
    /// The logged action.
    pub action: CsvAction,
    /// The address of the block.
    pub addr: u64,
    /// The block's size in bytes.
    pub bytes: u64,
    /// The number of the stream.
    pub stream: u64,
}

/// Writes events in RMM's format. Lines are buffered, and written at the latest when the log is dropped.
///
/// ```
/// use claystone::storage::{CsvAction, CsvLog};
/// let log = CsvLog::new(std::io::stdout())?;
/// log.log(CsvAction::Allocate, 0x20_0000, 512, 0)?;
/// log.log(CsvAction::Free, 0x20_0000, 512, 0)?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct CsvLog<W: Write + Send>(Mutex<BufWriter<W>>);

impl<W: Write + Send> CsvLog<W> {
    /// Starts a log with the line of column names.
    ///
    /// # Errors
    /// If `writer` fails.
    pub fn new(writer: W) -> Result<CsvLog<W>> {
        let mut writer = BufWriter::new(writer);
        writeln!(writer, "{HEADER}").map_err(write_error)?;
        Ok(CsvLog(Mutex::new(writer)))
    }

    /// Writes an event of the calling thread with the current time. Lines are in the order of the calls.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn log(&self, action: CsvAction, addr: u64, bytes: u64, stream: u32) -> Result<()> {
        let mut writer = lock(&self.0);
        let (thread, us) = (thread::number(), now_us());
        let (s, us) = (us / 1_000_000, us % 1_000_000);
        let (h, m, s) = (s / 3600 % 24, s / 60 % 60, s % 60);
        let action = action.name();
        writeln!(writer, "{thread},{h:02}:{m:02}:{s:02}.{us:06},{action},{addr:#x},{bytes},{stream:#x}")
            .map_err(write_error)
    }

    /// Writes the buffered lines to the writer.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn flush(&self) -> Result<()> {
        lock(&self.0).flush().map_err(write_error)
    }
}

fn write_error(e: std::io::Error) -> Error {
    Error::invalid("csv log", format!("it cannot be written: {e}"))
}

impl CsvEvent {
    /// Reads a log of [`CsvLog`] or of RMM.
    ///
    /// # Errors
    /// If reading fails, or a line does not have this format; the message names the line.
    pub fn read_all(reader: impl Read) -> Result<Vec<CsvEvent>> {
        let mut events = Vec::new();
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        for number in 1.. {
            let fault = |what: &dyn Display| Error::invalid("csv log", format!("line {number}: {what}"));
            line.clear();
            let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line);
            match read.map_err(|e| fault(&e))? {
                0 => break,
                long if long as u64 > MAX_LINE_BYTES => return Err(fault(&"it is longer than any event")),
                _ => {}
            }
            match std::str::from_utf8(&line).map_err(|e| fault(&e))?.trim() {
                "" => (),
                header if number == 1 && header == HEADER => (),
                line => events.push(line.parse().map_err(|what: String| fault(&what))?),
            }
        }
        Ok(events)
    }
}

impl FromStr for CsvEvent {
    type Err = String;

    /// Parses a line. The error describes the problem in the line.
    fn from_str(line: &str) -> Result<CsvEvent, String> {
        let columns: Vec<&str> = line.split(',').map(str::trim).take(COLUMNS + 1).collect();
        let &[thread, time, action, addr, bytes, stream] = columns.as_slice() else {
            return Err(format!("it has {} columns, not the {COLUMNS} of {HEADER}", line.split(',').count()));
        };
        let wrong = |what, column, wanted| format!("{what} \"{}\" is not {wanted}", Excerpt(column));
        let known = CsvAction::ALL.into_iter().find(|a| a.name() == action);
        Ok(CsvEvent {
            thread: thread.parse().map_err(|_| wrong("thread", thread, "a number"))?,
            time_us: microseconds(time).ok_or_else(|| wrong("time", time, "like 23:59:59.999999"))?,
            action: known.ok_or_else(|| wrong("action", action, "one of allocate, free, allocate failure"))?,
            addr: hexadecimal(addr).ok_or_else(|| wrong("pointer", addr, "a hexadecimal number"))?,
            bytes: bytes.parse().map_err(|_| wrong("size", bytes, "a number"))?,
            stream: hexadecimal(stream).ok_or_else(|| wrong("stream", stream, "a hexadecimal number"))?,
        })
    }
}

/// Parses a number with or without 0x, as RMM's own reader does. glibc prints the null pointer as (nil).
fn hexadecimal(text: &str) -> Option<u64> {
    match text {
        "(nil)" => Some(0),
        _ => u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok(),
    }
}

/// Converts a time of day to microseconds. RMM separates the microseconds by a point or a colon, depending on its version.
fn microseconds(text: &str) -> Option<u64> {
    let parts: Vec<u64> = text.split([':', '.']).take(5).map(|part| part.parse().ok()).collect::<Option<_>>()?;
    match parts[..] {
        [h @ 0..24, m @ 0..60, s @ 0..=60, us @ 0..1_000_000] => Some(((h * 60 + m) * 60 + s) * 1_000_000 + us),
        _ => None,
    }
}
