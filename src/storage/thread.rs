//! The state of each thread: settings of the closures that run, and data of the memory history.
//!
//! No field has a destructor. So a field is read as fast as a static variable, and also while its thread ends.

use std::cell::Cell;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::config::MemoryMode;
use crate::device::OnDrop;

pub(super) struct ThreadState {
    /// The thread's [`number`]; 0 until it is assigned.
    number: Cell<usize>,
    /// True inside [`uninit`](fn@super::uninit).
    pub(super) is_uninit: Cell<bool>,
    /// The mode set by [`with_memory_mode`](super::with_memory_mode).
    pub(super) memory_mode: Cell<Option<MemoryMode>>,
    /// True inside a callback that is called because memory runs short.
    pub(super) is_in_callback: Cell<bool>,
    /// The names of the [`with_context`](super::with_context) calls in progress: a node of the tree of names.
    pub(super) names: Cell<u32>,
    /// The program's line to which allocations are attributed.
    pub(super) caller: Cell<Option<&'static Location<'static>>>,
    /// The bounds of the thread's stack; `None` until they are queried.
    pub(super) stack_bounds: Cell<Option<(usize, usize)>>,
}

thread_local!(static THREAD: ThreadState = const {
    ThreadState {
        number: Cell::new(0),
        is_uninit: Cell::new(false),
        memory_mode: Cell::new(None),
        is_in_callback: Cell::new(false),
        names: Cell::new(0),
        caller: Cell::new(None),
        stack_bounds: Cell::new(None),
    }
});

type Field<T> = fn(&ThreadState) -> &Cell<T>;

#[inline]
pub(super) fn get<T: Copy>(field: Field<T>) -> T {
    THREAD.with(|state| field(state).get())
}

/// Sets a field of the calling thread, and returns the previous value.
#[inline]
pub(super) fn replace<T>(field: Field<T>, value: T) -> T {
    THREAD.with(|state| field(state).replace(value))
}

/// Runs `f` with a field of the calling thread set to `value`. The previous value is restored also if `f` panics.
pub(super) fn with<T: Copy, R>(field: Field<T>, value: T, f: impl FnOnce() -> R) -> R {
    let outer = replace(field, value);
    let _restore = OnDrop(|| _ = replace(field, outer));
    f()
}

/// Returns the calling thread's number: 1 for the first thread that calls this function, and so on.
#[inline]
pub(super) fn number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    match get(|state| &state.number) {
        0 => {
            let number = NEXT.fetch_add(1, Relaxed);
            replace(|state| &state.number, number);
            number
        }
        number => number,
    }
}
