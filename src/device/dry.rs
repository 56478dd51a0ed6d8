//! Whether this process simulates memory. Kernels do not run on simulated memory, so operations compute only shapes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// True once any memory is simulated. Never reset: the flag only opens branches that then look at the memory.
static IS_ON: AtomicBool = AtomicBool::new(false);

#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Relaxed)
}

/// The number of dry runs in progress.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// True while a dry run is in progress in this process. Its launches are not timed.
pub(crate) fn is_running() -> bool {
    RUNNING.load(Relaxed) > 0
}

/// Begins a dry run. From the first call on, memory may be simulated.
pub(crate) fn begin() {
    IS_ON.store(true, Relaxed);
    RUNNING.fetch_add(1, Relaxed);
}

/// Ends a dry run. Its tensors stay simulated.
pub(crate) fn end() {
    RUNNING.fetch_sub(1, Relaxed);
}
