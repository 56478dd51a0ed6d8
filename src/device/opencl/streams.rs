//! Creation and reuse of streams, each with its own queue.

use super::ClDevice;
use super::hints;
use super::queue::Queue;
use crate::Result;
use crate::device::hints::StreamHints;
use crate::device::stream::StreamId;
use crate::device::{lock, log};

impl ClDevice {
    /// Takes an unused stream, with its own queue.
    ///
    /// # Errors
    /// The driver's errors, too many streams, or a lost device.
    pub(crate) fn acquire_stream(&self, wanted: StreamHints) -> Result<StreamId> {
        self.check_lost()?;
        let hints = hints::supported(self.device(), wanted);
        let _messages = log::defer(); // until the lock is released
        lock(&self.queues.ids).acquire(hints, |_| {
            let queue = Queue::create(self.context, self.id(), hints);
            let queue = queue.map_err(|e| self.error(self.detect_loss(e)))?;
            if queue.hints != hints {
                hints::log_ignored(self.device(), hints, queue.hints);
            }
            self.queues.lock().push(queue);
            self.profile_if_on();
            Ok(())
        })
    }

    /// Releases a stream for reuse. Its submitted work still runs.
    pub(crate) fn release_stream(&self, stream: StreamId) {
        let hints = {
            let mut queues = self.queues.lock();
            let queue = &mut queues[stream.index()];
            let _ = queue.flush();
            queue.hints
        };
        lock(&self.queues.ids).release(stream, hints);
    }
}
