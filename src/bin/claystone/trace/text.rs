//! Our own format: `a ID BYTES`, `f ID`, blank lines, and comments from `#` to the end of the line.

use super::{Builder, Fault, Trace};

/// How many characters of a line errors quote.
const QUOTED: usize = 80;

/// Whether a line looks like one of this format.
pub(super) fn is_event(line: &str) -> bool {
    matches!(line.split_whitespace().next(), Some("a" | "f"))
}

pub(super) fn read(text: &str, name: &str) -> Result<Trace, Fault> {
    let mut trace = Builder::default();
    for (line, number) in text.lines().zip(1..) {
        event(&mut trace, line).map_err(|what| Fault::at(number, what))?;
    }
    Ok(trace.finish(name)?)
}

fn event(trace: &mut Builder, line: &str) -> Result<(), String> {
    let code = line.split('#').next().unwrap_or_default();
    // One word more than an event has tells that there are too many.
    let words: Vec<&str> = code.split_whitespace().take(4).collect();
    match words[..] {
        [] => Ok(()),
        ["a", id, bytes] => {
            let size = bytes.parse().map_err(|_| format!("'{bytes:.QUOTED$}' is not a number of bytes"))?;
            trace.allocate(number(id)?, size, 0, format_args!("block {id}"))
        }
        ["f", id] => trace.free(number(id)?, format_args!("block {id}")),
        _ => Err(format!("'{:.QUOTED$}' is neither 'a ID BYTES' nor 'f ID'", code.trim())),
    }
}

fn number(id: &str) -> Result<u64, String> {
    id.parse().map_err(|_| format!("'{id:.QUOTED$}' is not the number of a block"))
}
