//! Graph capture: commands that are recorded once and replayed many times.

use crate::Result;
use crate::device::StreamId;
use crate::device::capture::ReplayMode;
use crate::storage::StorageUses;

/// Records the commands that this thread submits to a device, until it is dropped.
pub(crate) trait Recorder {
    /// Ends the recording. `uses` lists the storages that the recorded commands use.
    fn finish(self: Box<Self>, uses: StorageUses) -> Box<dyn Recording>;
}

/// Recorded commands. The caller keeps the memory that the commands use alive.
pub(crate) trait Recording: Send + Sync {
    /// The number of commands: kernels, fills and copies.
    fn len(&self) -> usize;
    /// Submits all commands. After [`Error::Partial`](crate::Error::Partial) some commands were submitted, after any other error none.
    fn replay(&self) -> Result<()>;
    /// How the commands are submitted.
    fn mode(&self) -> ReplayMode;
    /// Changes how the commands are submitted.
    fn set_mode(&mut self, mode: ReplayMode) -> Result<()>;
    /// Waits until all replays on a stream have completed, or the device is lost.
    fn drain(&self, stream: StreamId);
}
