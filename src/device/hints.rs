//! Hints to the driver about a stream's work.

/// The urgency of a stream's work, relative to other streams and other programs on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Priority {
    /// Runs before other work.
    High,
    /// The driver's default.
    #[default]
    Normal,
    /// Runs when there is no other work.
    Low,
}

/// The power that a device may use for a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Throttle {
    /// Fastest, at any power.
    High,
    /// The driver's default.
    #[default]
    Normal,
    /// Least energy, at any speed.
    Low,
}

/// Hints with which a stream's queue is created. Drivers may ignore hints.
///
/// ```
/// use claystone::device::{Priority, StreamHints, Throttle};
/// let background = StreamHints { priority: Priority::Low, throttle: Throttle::Low };
/// assert_ne!(background, StreamHints::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StreamHints {
    /// Passed by the extension `cl_khr_priority_hints`.
    pub priority: Priority,
    /// Passed by the extension `cl_khr_throttle_hints`.
    pub throttle: Throttle,
}
