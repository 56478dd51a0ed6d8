//! Streams that are taken and given back, each with a queue of its own.

use super::ClDevice;
use super::hints;
use super::queue::Queue;
use crate::Result;
use crate::device::hints::StreamHints;
use crate::device::stream::StreamId;
use crate::device::{lock, log};

impl ClDevice {
    /// A stream nobody holds, with a queue of its own.
    ///
    /// # Errors
    /// What the driver refuses, too many streams, or a lost device.
    pub(crate) fn take_stream(&self, wanted: StreamHints) -> Result<StreamId> {
        self.check_lost()?;
        let hints = hints::taken(self.device(), wanted);
        let _messages = log::defer(); // until the lock is free
        lock(&self.queues.ids).take(hints, |_| {
            let queue = Queue::create(self.context, self.id(), hints);
            let queue = queue.map_err(|e| self.error(self.settle(e)))?;
            if queue.hints != hints {
                hints::ignored(self.device(), hints, queue.hints);
            }
            self.queues.lock().push(queue);
            self.profile_if_on();
            Ok(())
        })
    }

    /// Takes a stream back. What it still has to do gets done.
    pub(crate) fn give_stream_back(&self, stream: StreamId) {
        let hints = {
            let mut queues = self.queues.lock();
            let queue = &mut queues[stream.index()];
            let _ = queue.flush();
            queue.hints
        };
        lock(&self.queues.ids).give_back(stream, hints);
    }
}
