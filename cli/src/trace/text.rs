//! The text format: `a ID BYTES`, `f ID`, blank lines, and comments from `#` to the end of the line.

use super::{Builder, Trace, TraceError};

/// Maximum number of characters of a line that error messages quote.
const MAX_QUOTED_CHARS: usize = 80;

/// True if a line looks like an event of this format.
pub(super) fn is_event(line: &str) -> bool {
    matches!(line.split_whitespace().next(), Some("a" | "f"))
}

pub(super) fn read(text: &str, name: &str) -> Result<Trace, TraceError> {
    let mut trace = Builder::default();
    for (line, number) in text.lines().zip(1..) {
        add_event(&mut trace, line).map_err(|what| TraceError::at(number, what))?;
    }
    Ok(trace.finish(name)?)
}

/// Parses a line and adds its event; text after `#` is a comment.
fn add_event(trace: &mut Builder, line: &str) -> Result<(), String> {
    let code = line.split('#').next().unwrap_or_default();
    // An event has at most three words, so a fourth word is enough to detect too many.
    let words: Vec<&str> = code.split_whitespace().take(4).collect();
    match words[..] {
        [] => Ok(()),
        ["a", id, bytes] => {
            let size = bytes.parse().map_err(|_| format!("'{bytes:.MAX_QUOTED_CHARS$}' is not a number of bytes"))?;
            trace.allocate(parse_id(id)?, size, 0, format_args!("block {id}"))
        }
        ["f", id] => trace.free(parse_id(id)?, format_args!("block {id}")),
        _ => Err(format!("'{:.MAX_QUOTED_CHARS$}' is neither 'a ID BYTES' nor 'f ID'", code.trim())),
    }
}

fn parse_id(id: &str) -> Result<u64, String> {
    id.parse().map_err(|_| format!("'{id:.MAX_QUOTED_CHARS$}' is not the number of a block"))
}
