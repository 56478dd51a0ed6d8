//! How much to hold at most.

use super::Core;

/// The most bytes of segments to hold: each bound holds whatever the other says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) fraction: u64,
    pub(super) bytes: u64,
    /// What was held elsewhere when a request last found no memory.
    pub(super) elsewhere: u64,
    /// A bound was lowered below what was held then.
    pub(super) exceeded: bool,
}

impl Limits {
    /// The most bytes to hold, those held elsewhere among them.
    pub(super) fn allowed(&self) -> u64 {
        self.fraction.min(self.bytes)
    }
}

impl Core {
    /// The most bytes of segments to hold.
    pub(super) fn limit(&self) -> u64 {
        self.limits.allowed().saturating_sub(self.limits.elsewhere)
    }

    pub(super) fn set_limits(&mut self, set: impl FnOnce(&mut Limits)) {
        set(&mut self.limits);
        self.limits.exceeded = self.heap.stats.reserved() > self.limit();
    }
}

/// A fraction of a device's memory; all of it, exactly, for 1.
pub(super) fn part_of(capacity: u64, fraction: f64) -> u64 {
    if fraction == 1.0 { capacity } else { (capacity as f64 * fraction) as u64 }
}
