//! Streams: queues of work that run in order each, and side by side.

/// Names a stream of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The stream every device has, where work goes unless told otherwise.
    pub const DEFAULT: StreamId = StreamId(0);

    /// Its number: small, 0 for the default stream.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
