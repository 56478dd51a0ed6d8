//! The line of the program that asked for memory, without its stack.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;

use super::{Frame, context};

thread_local! {
    static CALLER: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// As long as it lives, blocks that this thread allocates are of the line that called the method which made it. Methods that
/// give tensors begin with one. Without a history that records it costs one relaxed load. Functions that call such methods, and not
/// from closures, need only be `#[track_caller]` to pass their callers' lines on.
///
/// ```
/// use claystone::storage::{Caller, History, HistoryOptions, TraceAction};
/// #[track_caller]
/// fn allocate(history: &History) {
///     let _caller = Caller::enter();
///     history.record(TraceAction::Alloc, 0, 512, 0);
/// }
/// let history = History::new();
/// history.record_memory_history(HistoryOptions { stacks: false, ..Default::default() })?;
/// allocate(&history);
/// println!("{:?}", history.entries()[0].frames); // the file and the line of that call
/// # Ok::<(), claystone::Error>(())
/// ```
#[must_use = "it ends when it is dropped"]
pub struct Caller {
    /// What was around it, where it has changed that.
    outer: Option<Option<&'static Location<'static>>>,
    of_this_thread: PhantomData<*const ()>,
}

impl Caller {
    /// From here to the end of a function that is `#[track_caller]`. Where the caller is a function of this crate the line
    /// around it stays; a line of the program counts also inside of another's, as in a hook that a backward pass calls.
    #[track_caller]
    #[inline(always)]
    pub fn enter() -> Caller {
        let outer = if context::is_recording() { replace(Location::caller()) } else { None };
        Caller { outer, of_this_thread: PhantomData }
    }
}

impl Drop for Caller {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(outer) = self.outer {
            restore(outer);
        }
    }
}

#[cold]
fn replace(location: &'static Location<'static>) -> Option<Option<&'static Location<'static>>> {
    if is_inner(location.file()) {
        return None;
    }
    CALLER.try_with(|caller| caller.replace(Some(location))).ok() // destructors of thread-locals come after it
}

#[cold]
fn restore(outer: Option<&'static Location<'static>>) {
    _ = CALLER.try_with(|caller| caller.set(outer));
}

/// This thread's line.
pub(super) fn current() -> Option<&'static Location<'static>> {
    CALLER.try_with(Cell::get).ok().flatten()
}

/// Adds the line to the frames of a stack: to the innermost, where debug information did not tell it, or as the only one.
pub(super) fn add_to(frames: &mut Vec<Frame>, location: &Location<'_>) {
    let (filename, line) = (location.file().to_owned(), location.line());
    match frames.first_mut() {
        Some(frame) if frame.filename.is_empty() => (frame.filename, frame.line) = (filename, line),
        Some(_) => {}
        None => frames.push(Frame { filename, line, name: String::new() }),
    }
}

/// Whether a file is one of this crate's, whose tests are users of it.
fn is_inner(file: &str) -> bool {
    const HERE: &str = "storage/history/caller.rs";
    let sources = &file!()[..file!().len() - HERE.len()];
    file.starts_with(sources) && !file.contains("tests")
}

/// Runs `f` as a function of this crate would that began with a line of its own.
#[cfg(test)]
pub(super) fn inside(f: impl FnOnce()) {
    let _caller = Caller::enter();
    f();
}
