//! The program's lines that events carry without stacks.

use std::panic::{Location, catch_unwind};

use super::super::caller::inside;
use super::*;

#[track_caller]
fn allocate(history: &History, f: impl FnOnce()) -> u32 {
    let _caller = Caller::enter();
    history.record(TraceAction::Alloc, 0, 512, 0);
    f();
    history.record(TraceAction::Alloc, 1, 512, 0);
    history.record_free(1, 512, 0);
    Location::caller().line()
}

fn lines(history: &History) -> Vec<u32> {
    let frames = history.entries().into_iter().map(|entry| entry.frames);
    frames.map(|frames| frames.first().map_or(0, |frame| frame.line)).collect()
}

fn recorded(options: HistoryOptions) -> Result<History> {
    let history = History::new();
    history.record_memory_history(HistoryOptions { stacks: false, ..options })?;
    Ok(history)
}

#[test]
fn a_line_lasts_as_long_as_its_method() -> Result<()> {
    let history = recorded(HistoryOptions::default())?;
    let alone = || _ = history.record(TraceAction::Alloc, 2, 512, 0);
    alone();
    let line = allocate(&history, || inside(alone)); // a scope of a function of this crate inside keeps the outer line
    // A free gets no line: blocks are often freed long after their last use.
    assert_eq!(lines(&history), [0, line, line, line, 0, 0]);
    history.clear();
    inside(alone);
    alone();
    assert_eq!(lines(&history), [0, 0], "no line of the program's");

    // The program calls a method in a callback, which runs inside another method.
    history.clear();
    let mut inner = 0;
    let outer = allocate(&history, || {
        inner = allocate(&history, || {});
    });
    assert_ne!(inner, outer);
    assert_eq!(lines(&history), [outer, inner, inner, 0, 0, outer, 0, 0]);

    history.clear();
    let panics = std::panic::AssertUnwindSafe(|| allocate(&history, || panic!("of the callback")));
    assert!(catch_unwind(panics).is_err());
    alone();
    assert_eq!(lines(&history)[1..], [0]);
    Ok(())
}

#[test]
fn a_line_is_a_frame_of_its_file() -> Result<()> {
    let history = recorded(HistoryOptions::default())?;
    let line = with_context("step", || allocate(&history, || {}));
    let here = Frame { filename: file!().into(), line, name: String::new() };
    let step = Frame { filename: String::new(), line: 0, name: "step".into() };
    assert_eq!(history.entries()[0].frames[..], [here.clone(), step]);
    assert_eq!(here.to_string(), format!("{}:{line}", file!()));

    let none = recorded(HistoryOptions { context: ContextLevel::Never, ..HistoryOptions::default() })?;
    allocate(&none, || {});
    assert_eq!(lines(&none), [0; 4]);
    Ok(())
}

#[test]
fn a_line_is_added_where_debug_information_has_none() {
    let location = Location::caller();
    let frame = |filename: &str, line, name: &str| Frame { filename: filename.into(), line, name: name.into() };
    let with_line = |mut frames: Vec<Frame>| {
        super::super::caller::add_caller_line(&mut frames, location);
        frames
    };
    let (file, line) = (location.file(), location.line());
    assert_eq!(
        with_line(vec![frame("", 0, "train"), frame("", 0, "main")]),
        [frame(file, line, "train"), frame("", 0, "main")]
    );
    let known = vec![frame("net.rs", 7, "train"), frame("", 0, "main")];
    assert_eq!(with_line(known.clone()), known);
    assert_eq!(with_line(vec![]), [frame(file, line, "")]);
}
