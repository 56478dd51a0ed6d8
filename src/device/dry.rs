//! Whether this process simulates memory. Kernels do not run on simulated memory, so operations compute only shapes.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// True once any memory of the process is simulated. Never reset: the flag only opens branches that then look at the memory.
static DRY: AtomicBool = AtomicBool::new(false);

#[inline]
pub(crate) fn is_on() -> bool {
    DRY.load(Relaxed)
}

/// Switches the simulation on; returns true at the first call.
pub(crate) fn begin() -> bool {
    !DRY.swap(true, Relaxed)
}
