//! Limits on the bytes that an allocator may reserve.

use super::Core;

/// The memory limits of an allocator. Both bounds, `fraction` and `bytes`, apply.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) fraction: u64,
    pub(super) bytes: u64,
    /// Bytes that other allocators of this device held when a request last found no memory.
    pub(super) elsewhere: u64,
    /// True if a bound was lowered below the bytes then reserved.
    pub(super) is_exceeded: bool,
}

impl Limits {
    /// The most bytes that all allocators of the device may reserve together.
    pub(super) fn allowed(&self) -> u64 {
        self.fraction.min(self.bytes)
    }
}

impl Core {
    /// The most bytes of segments that this allocator may reserve.
    pub(super) fn limit(&self) -> u64 {
        self.limits.allowed().saturating_sub(self.limits.elsewhere)
    }

    /// Changes the limits, and notes whether the reserved bytes now exceed them.
    pub(super) fn set_limits(&mut self, set: impl FnOnce(&mut Limits)) {
        set(&mut self.limits);
        self.limits.is_exceeded = self.heap.stats.reserved() > self.limit();
    }
}

/// Returns a fraction of a device's memory in bytes. The fraction 1 gives `capacity` exactly.
pub(super) fn fraction_of(capacity: u64, fraction: f64) -> u64 {
    if fraction == 1.0 { capacity } else { (capacity as f64 * fraction) as u64 }
}
