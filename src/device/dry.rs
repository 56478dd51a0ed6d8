//! Whether this process simulates memory. Kernels do not run on simulated memory, so operations compute only shapes.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// True once any memory is simulated. Never reset: the flag only opens branches that then look at the memory.
static IS_ON: AtomicBool = AtomicBool::new(false);

#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Relaxed)
}

/// Switches the simulation on; returns true at the first call.
pub(crate) fn begin() -> bool {
    !IS_ON.swap(true, Relaxed)
}
