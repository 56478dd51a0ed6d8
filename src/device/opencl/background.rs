//! Transfers that do not wait: the device carries them out while the host does something else.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use opencl3::types::cl_event;

use super::driver::{ClAt, ClEvent, call};
use super::queues::Locked;
use super::transfer::in_range;
use super::{ClDevice, ClError};
use crate::Result;
use crate::device::StreamId;
use crate::device::profiler::Kind;

/// The error for a driver that accepts a command and returns no event.
const NO_EVENT: ClError = ClError::new("clEnqueueReadBuffer", -58);

impl ClDevice {
    /// Starts reading `bytes` bytes of a buffer to the host, on a stream; they are there when the event is done. Faults
    /// are not asked about: see [`report_faults`](Self::report_faults).
    ///
    /// # Safety
    /// Until the event is done, `to..to + bytes` stays valid for writes and nobody else touches it.
    pub(crate) unsafe fn start_read(
        &self,
        stream: StreamId,
        src: ClAt<'_>,
        to: NonNull<u8>,
        bytes: usize,
    ) -> Result<ClEvent> {
        in_range("read", src, bytes)?;
        let to = to.as_ptr().cast();
        self.start(stream, |q, event| {
            q.command((Kind::Read, "clEnqueueReadBuffer", bytes), event, |q, event| {
                call!(clEnqueueReadBuffer(q, src.0.mem(), 0, src.1, bytes, to, 0, ptr::null(), event))
            })
        })
    }

    /// Starts writing `bytes` bytes from the host to a buffer, on a stream; they may be changed when the event is done.
    ///
    /// # Safety
    /// Until the event is done, `from..from + bytes` stays valid for reads and nobody writes to it.
    pub(crate) unsafe fn start_write(
        &self,
        stream: StreamId,
        from: NonNull<u8>,
        dst: ClAt<'_>,
        bytes: usize,
    ) -> Result<ClEvent> {
        in_range("write", dst, bytes)?;
        let from = from.as_ptr().cast_const().cast();
        self.start(stream, |q, event| {
            q.command((Kind::Write, "clEnqueueWriteBuffer", bytes), event, |q, event| {
                call!(clEnqueueWriteBuffer(q, dst.0.mem(), 0, dst.1, bytes, from, 0, ptr::null(), event))
            })
        })
    }

    /// Has the next wait for the stream report a transfer of it, if that fails: for whoever does not wait for its event.
    pub(crate) fn report_later(&self, stream: StreamId, call: &'static str, transfer: &Arc<ClEvent>) {
        let mut queue = self.lock_for_waits(stream);
        queue.collect_transfers();
        queue.transfers.push_back((call, Arc::clone(transfer)));
    }

    /// Submits a command that fills in the event. After an error nothing of it uses the caller's memory any more, or the
    /// device is lost.
    fn start(
        &self,
        stream: StreamId,
        submit: impl FnOnce(&mut Locked<'_>, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<ClEvent> {
        self.check_lost()?;
        let mut raw = ptr::null_mut();
        let (submitted, event) = {
            let mut queue = self.lock(stream).map_err(|e| self.error(self.settle(e)))?;
            let submitted = submit(&mut queue, &mut raw);
            let event = (!raw.is_null()).then(|| ClEvent(raw));
            let submitted = match submitted {
                Ok(()) if event.is_none() => queue.ascertain(None, NO_EVENT).and(Err(NO_EVENT)),
                // A failed flush does not take the command off the queue: what counts is how it ends.
                Ok(()) => queue.flush().or_else(|e| queue.ascertain(event.as_ref(), e)),
                Err(refused) => queue.ascertain(None, refused).and(Err(refused)),
            };
            (submitted, event)
        };
        submitted.and(event.ok_or(NO_EVENT)).map_err(|e| self.error(self.settle(e)))
    }
}
