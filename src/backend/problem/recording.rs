//! Work that is recorded once and submitted again and again.

use crate::Result;
use crate::device::StreamId;
use crate::device::capture::ReplayMode;
use crate::storage::Uses;

/// Has what this thread submits to a device recorded, as long as it lives.
pub(crate) trait Recorder {
    /// What was recorded, of commands that use what is said here.
    fn finish(self: Box<Self>, uses: Uses) -> Box<dyn Recording>;
}

/// Recorded commands. The memory that they use is kept by whoever keeps this.
pub(crate) trait Recording: Send + Sync {
    /// How many commands: kernels, fills and copies.
    fn len(&self) -> usize;
    /// Submits all of them. After [`Error::Partial`](crate::Error::Partial) some were submitted, after any other error none.
    fn replay(&self) -> Result<()>;
    /// How they are submitted, as far as that is known.
    fn mode(&self) -> ReplayMode;
    /// Has them submitted in another way.
    fn set_mode(&mut self, mode: ReplayMode) -> Result<()>;
    /// Waits until those submitted to the stream are done, or the device is lost.
    fn drain(&self, stream: StreamId);
}
