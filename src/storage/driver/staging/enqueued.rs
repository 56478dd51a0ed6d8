//! Transfers that return when they are enqueued, from and to pinned memory.

use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{PinnedBytes, bytes, pool, start_of};
use crate::Result;
use crate::device::cpu::bulk::copy;
use crate::device::opencl::{ClAt, ClDevice, ClEvent};
use crate::device::{StreamId, lock};

/// Larger transfers from ordinary memory wait: copying them to pinned memory as a whole would take as long.
const COPIED: usize = 16 << 20;

/// A transfer under way that uses bytes of a tensor in pinned memory.
pub(super) struct Flight {
    pub(super) event: Arc<ClEvent>,
    stream: StreamId,
    range: Range<usize>,
    /// Whether it writes the bytes, or only reads them.
    written: bool,
}

impl Flight {
    /// Whether it is known to have ended, well or not.
    fn is_over(&self) -> bool {
        self.event.is_over().unwrap_or(false)
    }
}

impl PinnedBytes {
    /// Enqueues a transfer of the current stream between `n` of the bytes, from `start` on, and a buffer of the device that they are
    /// pinned for: to the buffer, or `written` from it. To be called under the tensor's lock, the exclusive one where they are
    /// written. Whoever gets at the bytes after that waits for it: [`check`](Self::check). A failure is told at the stream's next
    /// wait.
    pub(in crate::storage) fn enqueue(
        &self,
        start: NonNull<u8>,
        n: usize,
        place: ClAt<'_>,
        written: bool,
    ) -> Result<()> {
        let (device, stream) = (self.opened, self.opened.current_stream());
        let lent = self.lend(device, start.as_ptr(), n, written);
        let first = start.addr().get() - self.start().addr().get();
        let range = first..first + n;
        let mut flights = lock(&self.flights);
        flights.retain(|flight| !flight.is_over());
        let meets = |other: &&Flight| {
            let overlap = other.range.start < range.end && range.start < other.range.end;
            other.stream != stream && overlap && (written || other.written)
        };
        flights.iter().filter(meets).try_for_each(|other| device.stream_waits(stream, &other.event))?;
        // SAFETY: `n` bytes of this block, which `lend` checks, and which nobody else uses under the tensor's lock. After that
        // whoever gets at them waits for the event, and on drop the pool gets the block with it.
        let started = unsafe {
            match written {
                true => device.start_read(stream, place, start, n),
                false => device.start_write(stream, start, place, n),
            }
        };
        let event = match started {
            Ok(event) => Arc::new(event),
            Err(error) => {
                if device.is_lost() {
                    mem::forget(lent); // it may be under way for good
                }
                return Err(error);
            }
        };
        let call = if written { "an earlier clEnqueueReadBuffer" } else { "an earlier clEnqueueWriteBuffer" };
        device.report_later(stream, call, &event);
        flights.push(Flight { event, stream, range, written });
        Ok(())
    }

    /// Waits for transfers under way that write the bytes, and where they are to be `written` also for those that read them.
    pub(super) fn settle(&self, written: bool) -> Result<()> {
        let conflicting = |flight: &&Flight| written || flight.written;
        let events: Vec<_> = lock(&self.flights).iter().filter(conflicting).map(|f| Arc::clone(&f.event)).collect();
        if events.is_empty() {
            return Ok(());
        }
        let waited = events.iter().try_for_each(|event| self.opened.wait(event));
        lock(&self.flights).retain(|flight| !flight.is_over());
        waited
    }
}

/// Enqueues a write of bytes from the host on the current stream, through pinned memory: `src` may be reused when it returns. A
/// failure is told at the stream's next wait. False, with nothing done, where there is not enough pinned memory to be worth it.
pub(in crate::storage) fn start_write(device: &'static ClDevice, src: &[u8], dst: ClAt<'_>) -> Result<bool> {
    if src.len() > COPIED {
        return Ok(false);
    }
    let Some(block) = pool(device).alloc(src.len()) else { return Ok(false) };
    let (start, stream) = (start_of(&block), device.current_stream());
    // SAFETY: the block has so many bytes, and is nobody else's.
    unsafe { bytes(src.as_ptr(), start.as_ptr(), src.len(), copy) };
    // SAFETY: as above, and the pool gives it to others when the event is done.
    match unsafe { device.start_write(stream, start, dst, src.len()) } {
        Ok(event) => {
            let event = Arc::new(event);
            device.report_later(stream, "an earlier clEnqueueWriteBuffer", &event);
            block.release_after(vec![event]);
            Ok(true)
        }
        Err(error) => {
            if device.is_lost() {
                mem::forget(block); // it may be under way for good
            }
            Err(error)
        }
    }
}
