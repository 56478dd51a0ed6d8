//! The log of RMM's `logging_resource_adaptor`: CSV with the columns `Thread,Time,Action,Pointer,Size,Stream`.

use csv::{ReaderBuilder, StringRecord, Trim};

use super::{Builder, Fault, Trace};

/// Whether a line is the header of such a log. Columns may come in any order; those not named here are not read.
pub(super) fn is_header(line: &str) -> bool {
    ["Action", "Pointer", "Size"].iter().all(|column| line.split(',').any(|cell| cell.trim() == *column))
}

struct Columns {
    action: usize,
    pointer: usize,
    size: usize,
    stream: Option<usize>,
}

pub(super) fn read(text: &str, name: &str) -> Result<Trace, Fault> {
    let fault = |error: csv::Error| {
        let line = error.position().map_or(0, |position| position.line() as usize);
        Fault::at(line, format!("not CSV: {error}"))
    };
    let mut reader = ReaderBuilder::new().flexible(true).trim(Trim::All).comment(Some(b'#')).from_reader(text.as_bytes());
    let header = reader.headers().map_err(fault)?;
    let column = |name| header.iter().position(|cell| cell == name);
    let needed = |name| column(name).ok_or_else(|| format!("the header has no column {name}"));
    let columns = Columns {
        action: needed("Action")?,
        pointer: needed("Pointer")?,
        size: needed("Size")?,
        stream: column("Stream"),
    };
    let mut trace = Builder::default();
    for record in reader.records() {
        let record = record.map_err(fault)?;
        let line = record.position().map_or(0, |position| position.line() as usize);
        event(&mut trace, &columns, &record).map_err(|what| Fault::at(line, what))?;
    }
    Ok(trace.finish(name)?)
}

fn event(trace: &mut Builder, columns: &Columns, record: &StringRecord) -> Result<(), String> {
    let cell = |index: usize, name| record.get(index).ok_or_else(|| format!("the row has no column {name}"));
    let action = cell(columns.action, "Action")?;
    if action == "allocate failure" {
        return Ok(());
    }
    let shown = cell(columns.pointer, "Pointer")?;
    let pointer = pointer(shown)?;
    if pointer == 0 {
        return Ok(()); // the null pointer stands for no bytes
    }
    match action {
        "allocate" => {
            let bytes = cell(columns.size, "Size")?;
            let bytes = bytes.parse().map_err(|_| format!("'{bytes}' is not a number of bytes"))?;
            let stream = columns.stream.and_then(|index| record.get(index)).unwrap_or_default();
            trace.allocate(pointer, bytes, stream, shown)
        }
        "free" => trace.free(pointer, shown),
        _ => Err(format!("'{action}' is not an action: those are allocate, free and allocate failure")),
    }
}

/// Pointers are hexadecimal, with 0x or without; glibc prints the null pointer as `(nil)`.
fn pointer(text: &str) -> Result<u64, String> {
    if text == "(nil)" {
        return Ok(0);
    }
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).map_err(|_| format!("'{text}' is not a pointer"))
}
