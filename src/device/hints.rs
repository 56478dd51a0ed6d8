//! What drivers are told about the work of a stream.

/// How urgent a stream's work is, beside other streams and other programs on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Priority {
    /// Before other work.
    High,
    /// As the driver has it unless told otherwise.
    #[default]
    Normal,
    /// When nothing else is to be done.
    Low,
}

/// How much power a device may take for a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Throttle {
    /// The fastest, whatever it takes.
    High,
    /// As the driver has it unless told otherwise.
    #[default]
    Normal,
    /// The least energy, however long it takes.
    Low,
}

/// What a driver is told about a stream's work when its queue is created. Drivers may do nothing about it.
///
/// ```
/// use claystone::device::{Priority, StreamHints, Throttle};
/// let background = StreamHints { priority: Priority::Low, throttle: Throttle::Low };
/// assert_ne!(background, StreamHints::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StreamHints {
    /// The extension `cl_khr_priority_hints`.
    pub priority: Priority,
    /// The extension `cl_khr_throttle_hints`.
    pub throttle: Throttle,
}
