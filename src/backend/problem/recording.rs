//! Commands that are recorded once and replayed many times.

use crate::Result;
use crate::device::StreamId;
use crate::device::capture::ReplayMode;
use crate::storage::Uses;

/// Records the commands that this thread submits to a device, until it is dropped.
pub(crate) trait Recorder {
    /// Ends the recording; `uses` says which storages its commands use.
    fn finish(self: Box<Self>, uses: Uses) -> Box<dyn Recording>;
}

/// Recorded commands. The caller keeps the memory that they use alive.
pub(crate) trait Recording: Send + Sync {
    /// The number of commands: kernels, fills and copies.
    fn len(&self) -> usize;
    /// Submits all of them. After [`Error::Partial`](crate::Error::Partial) some were submitted, after any other error none.
    fn replay(&self) -> Result<()>;
    /// How they are submitted.
    fn mode(&self) -> ReplayMode;
    /// Changes how they are submitted.
    fn set_mode(&mut self, mode: ReplayMode) -> Result<()>;
    /// Waits until the replays on a stream have completed, or the device is lost.
    fn drain(&self, stream: StreamId);
}
