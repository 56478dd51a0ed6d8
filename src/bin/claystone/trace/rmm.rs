//! The log of RMM's `logging_resource_adaptor`, or of claystone's `CsvLog`.

use claystone::storage::{CsvAction, CsvEvent};

use super::{Builder, Fault, Hex, Trace};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// Whether a line is the header of such a log, or where that was cut off, a line of it.
pub(super) fn is_log(line: &str) -> bool {
    line == HEADER || line.parse::<CsvEvent>().is_ok()
}

pub(super) fn read(text: &str, name: &str) -> Result<Trace, Fault> {
    let mut trace = Builder::default();
    for (number, parsed) in events(text) {
        parsed.and_then(|parsed| event(&mut trace, parsed)).map_err(|what| Fault::at(number, what))?;
    }
    Ok(trace.finish(name)?)
}

/// The events of a log, each with the number of its line; without the header, blank lines and comments.
pub(super) fn events(text: &str) -> impl Iterator<Item = (usize, Result<CsvEvent, String>)> {
    let mut begun = false;
    text.lines().map(str::trim).zip(1..).filter_map(move |(line, number)| {
        let skip = line.is_empty() || line.starts_with('#') || (!begun && line == HEADER);
        begun |= !skip;
        (!skip).then(|| (number, line.parse()))
    })
}

fn event(trace: &mut Builder, event: CsvEvent) -> Result<(), String> {
    match event.action {
        _ if event.addr == 0 => Ok(()), // the null pointer stands for no bytes
        CsvAction::Allocate => trace.allocate(event.addr, event.bytes, event.stream, Hex(event.addr)),
        CsvAction::Free => trace.free(event.addr, Hex(event.addr)),
        CsvAction::AllocateFailure => Ok(()),
    }
}
