//! Logs of RMM's `logging_resource_adaptor` or of claystone's `CsvLog`.

use claystone::storage::{CsvAction, CsvEvent};

use super::{BlockAddress, Builder, Trace, TraceError};

/// The header line of a log.
const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// True if a line is the header of a log, or an event of a log without a header.
pub(super) fn is_log(line: &str) -> bool {
    line == HEADER || line.parse::<CsvEvent>().is_ok()
}

pub(super) fn read(text: &str, name: &str) -> Result<Trace, TraceError> {
    let mut trace = Builder::default();
    for (number, parsed) in events(text) {
        parsed.and_then(|parsed| add_event(&mut trace, parsed)).map_err(|what| TraceError::at(number, what))?;
    }
    Ok(trace.finish(name)?)
}

/// Returns the events of a log with their line numbers; skips the header, blank lines and comments.
pub(super) fn events(text: &str) -> impl Iterator<Item = (usize, Result<CsvEvent, String>)> {
    let mut past_header = false;
    text.lines().map(str::trim).zip(1..).filter_map(move |(line, number)| {
        let skip = line.is_empty() || line.starts_with('#') || (!past_header && line == HEADER);
        past_header |= !skip;
        (!skip).then(|| (number, line.parse()))
    })
}

fn add_event(trace: &mut Builder, event: CsvEvent) -> Result<(), String> {
    match event.action {
        _ if event.addr == 0 => Ok(()), // a null pointer is an allocation of zero bytes
        CsvAction::Allocate => trace.allocate(event.addr, event.bytes, event.stream, BlockAddress(event.addr)),
        CsvAction::Free => trace.free(event.addr, BlockAddress(event.addr)),
        CsvAction::AllocateFailure => Ok(()),
    }
}
