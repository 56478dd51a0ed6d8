//! The program's line that requested memory, for blocks without a call stack.

use std::marker::PhantomData;
use std::panic::Location;

use super::super::thread;
use super::{Frame, context};

/// Attributes this thread's allocations to the line that called the current method, until the value is dropped. Methods
/// that return tensors make a `Caller` first, which costs one relaxed load if no history is recording.
///
/// A function that calls such methods outside closures needs only `#[track_caller]`: the allocations are then attributed to the
/// function's caller.
///
/// ```
/// use claystone::storage::{Caller, History, HistoryOptions, TraceAction};
/// #[track_caller]
/// fn allocate(history: &History) {
///     let _caller = Caller::enter();
///     history.record(TraceAction::Alloc, 0, 512, 0);
/// }
/// let history = History::new();
/// history.record_memory_history(HistoryOptions::default().stacks(false))?;
/// allocate(&history);
/// println!("{:?}", history.entries()[0].frames); // the file and the line of that call
/// # Ok::<(), claystone::Error>(())
/// ```
#[must_use = "it ends when it is dropped"]
pub struct Caller {
    /// The previous line, if this value replaced it.
    outer: Option<Option<&'static Location<'static>>>,
    of_this_thread: PhantomData<*const ()>,
}

impl Caller {
    /// Starts a scope in a function that is `#[track_caller]`. If the caller is a function of this crate, the previous
    /// line stays. If the caller is the program, its line replaces the previous line even within another scope, as in a
    /// hook called by a backward pass.
    #[track_caller]
    #[inline(always)]
    pub fn enter() -> Caller {
        let outer = if context::is_recording() { replace_line(Location::caller()) } else { None };
        Caller { outer, of_this_thread: PhantomData }
    }
}

impl Drop for Caller {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(outer) = self.outer {
            restore_line(outer);
        }
    }
}

/// Sets the thread's line, and returns the previous line. Returns `None`, and changes nothing, if the location is in this crate.
#[cold]
fn replace_line(location: &'static Location<'static>) -> Option<Option<&'static Location<'static>>> {
    (!is_crate_source(location.file())).then(|| thread::replace(|state| &state.caller, Some(location)))
}

#[cold]
fn restore_line(outer: Option<&'static Location<'static>>) {
    thread::replace(|state| &state.caller, outer);
}

/// Adds the line to a stack's frames: as the line of the innermost frame if debug information gave none, or as a new frame if there
/// are no frames.
pub(in crate::storage) fn add_caller_line(frames: &mut Vec<Frame>, location: &Location<'_>) {
    let (filename, line) = (location.file().to_owned(), location.line());
    match frames.first_mut() {
        Some(frame) if frame.filename.is_empty() => (frame.filename, frame.line) = (filename, line),
        Some(_) => {}
        None => frames.push(Frame { filename, line, name: String::new() }),
    }
}

/// True if the file belongs to this crate. The crate's tests count as the program.
fn is_crate_source(file: &str) -> bool {
    const HERE: &str = "storage/history/caller.rs";
    let sources = &file!()[..file!().len() - HERE.len()];
    file.starts_with(sources) && !file.contains("tests")
}

/// Runs `f` inside a [`Caller`] scope, as a method of this crate does.
#[cfg(test)]
pub(super) fn inside(f: impl FnOnce()) {
    let _caller = Caller::enter();
    f();
}
