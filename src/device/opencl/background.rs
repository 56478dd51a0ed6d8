//! Asynchronous transfers: the device copies while the host does other work.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use opencl3::types::cl_event;

use super::driver::{ClAt, ClEvent, call};
use super::queues::LockedQueue;
use super::transfer::check_range;
use super::{ClDevice, ClError};
use crate::Result;
use crate::device::StreamId;
use crate::device::profiler::RecordKind;

/// The error for a driver that accepts a command and returns no event.
const NO_EVENT: ClError = ClError::new("clEnqueueReadBuffer", -58);

impl ClDevice {
    /// Starts to read `bytes` bytes of a buffer to the host on a stream. The read is complete when the event is done. Faults of
    /// kernels are not reported: see [`report_faults`](Self::report_faults).
    ///
    /// # Safety
    /// Until the event is done, `to..to + bytes` stays valid for writes and no other code accesses it.
    pub(crate) unsafe fn start_read(
        &self,
        stream: StreamId,
        src: ClAt<'_>,
        to: NonNull<u8>,
        bytes: usize,
    ) -> Result<ClEvent> {
        check_range("read", src, bytes)?;
        let to = to.as_ptr().cast();
        self.submit_async(stream, |q, event| {
            q.command((RecordKind::Read, "clEnqueueReadBuffer", bytes), event, |q, event| {
                call!(clEnqueueReadBuffer(q, src.0.mem(), 0, src.1, bytes, to, 0, ptr::null(), event))
            })
        })
    }

    /// Starts to write `bytes` bytes from the host to a buffer on a stream. The host may change its bytes when the event is done.
    ///
    /// # Safety
    /// Until the event is done, `from..from + bytes` stays valid for reads and no code writes to it.
    pub(crate) unsafe fn start_write(
        &self,
        stream: StreamId,
        from: NonNull<u8>,
        dst: ClAt<'_>,
        bytes: usize,
    ) -> Result<ClEvent> {
        check_range("write", dst, bytes)?;
        let from = from.as_ptr().cast_const().cast();
        self.submit_async(stream, |q, event| {
            q.command((RecordKind::Write, "clEnqueueWriteBuffer", bytes), event, |q, event| {
                call!(clEnqueueWriteBuffer(q, dst.0.mem(), 0, dst.1, bytes, from, 0, ptr::null(), event))
            })
        })
    }

    /// Makes the next wait for the stream report the transfer if it failed, because no caller waits for the transfer's event.
    pub(crate) fn report_at_next_wait(&self, stream: StreamId, call: &'static str, transfer: &Arc<ClEvent>) {
        let mut queue = self.lock_for_waits(stream);
        queue.collect_transfers();
        queue.transfers.push_back((call, Arc::clone(transfer)));
    }

    /// Submits a command that sets the event. After an error, no command uses the caller's memory any more, or the device is
    /// lost.
    fn submit_async(
        &self,
        stream: StreamId,
        submit: impl FnOnce(&mut LockedQueue<'_>, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<ClEvent> {
        self.check_lost()?;
        let mut raw = ptr::null_mut();
        let (submitted, event) = {
            let mut queue = self.lock(stream).map_err(|e| self.error(self.detect_loss(e)))?;
            let submitted = submit(&mut queue, &mut raw);
            let event = (!raw.is_null()).then(|| ClEvent(raw));
            let submitted = match submitted {
                Ok(()) if event.is_none() => queue.wait_until_over(None, NO_EVENT).and(Err(NO_EVENT)),
                // A failed flush leaves the command on the queue: how the command ends decides.
                Ok(()) => queue.flush().or_else(|e| queue.wait_until_over(event.as_ref(), e)),
                Err(refused) => queue.wait_until_over(None, refused).and(Err(refused)),
            };
            (submitted, event)
        };
        submitted.and(event.ok_or(NO_EVENT)).map_err(|e| self.error(self.detect_loss(e)))
    }
}
