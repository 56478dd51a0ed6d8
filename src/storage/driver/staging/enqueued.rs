//! Transfers from and to pinned memory that return when they are enqueued.

use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{PinnedBytes, block_start, copy_raw, pool};
use crate::Result;
use crate::device::cpu::bulk::copy;
use crate::device::opencl::{ClAt, ClDevice, ClEvent};
use crate::device::{StreamId, lock};

/// The largest transfer from ordinary memory, in bytes, that is enqueued. For more bytes, copying them to pinned memory would take
/// as long as the transfer itself.
const MAX_ENQUEUED_COPY_BYTES: usize = 16 << 20;

/// An enqueued transfer that uses bytes of a tensor in pinned memory.
pub(super) struct EnqueuedTransfer {
    pub(super) event: Arc<ClEvent>,
    stream: StreamId,
    range: Range<usize>,
    /// True if the transfer writes the pinned bytes, false if it reads them.
    written: bool,
}

impl EnqueuedTransfer {
    /// True if the transfer is known to have ended, successfully or not.
    fn is_over(&self) -> bool {
        self.event.is_over().unwrap_or(false)
    }
}

impl PinnedBytes {
    /// Enqueues a transfer of the `n` bytes at `start` on the current stream: from the device's buffer if `written`,
    /// otherwise to the buffer. The buffer belongs to the device that the bytes are pinned for.
    ///
    /// Call this method while holding the tensor's lock, exclusively if the bytes are written. Later accesses to the bytes wait for
    /// the transfer in [`wait_and_check`](Self::wait_and_check). A failure is reported at the stream's next wait.
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
        let mut enqueued_transfers = lock(&self.enqueued_transfers);
        enqueued_transfers.retain(|transfer| !transfer.is_over());
        let conflicts = |other: &&EnqueuedTransfer| {
            let overlap = other.range.start < range.end && range.start < other.range.end;
            other.stream != stream && overlap && (written || other.written)
        };
        enqueued_transfers.iter().filter(conflicts).try_for_each(|other| device.stream_waits(stream, &other.event))?;
        // SAFETY: the range is `n` bytes of this block, as `lend` checks, and no other code uses the bytes while the tensor's lock
        // is held. Later accesses wait for the event, and on drop the pool gets the block together with the event.
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
                    mem::forget(lent); // the transfer may never end, so the bytes stay lent
                }
                return Err(error);
            }
        };
        let call = if written { "an earlier clEnqueueReadBuffer" } else { "an earlier clEnqueueWriteBuffer" };
        device.report_at_next_wait(stream, call, &event);
        enqueued_transfers.push(EnqueuedTransfer { event, stream, range, written });
        Ok(())
    }

    /// Transfers the first `n` bytes like [`enqueue`](Self::enqueue), but waits, and reports a failure only to the caller. Afterwards the
    /// transfer is over, or the device is lost.
    pub(in crate::storage) fn transfer(&self, n: usize, place: ClAt<'_>, written: bool) -> Result<()> {
        let (device, stream, start) = (self.opened, self.opened.current_stream(), self.start());
        assert!(n <= self.block.bytes(), "bytes of other memory");
        // SAFETY: the range is `n` bytes of this block, which only the caller uses. The bytes stay valid until the transfer is over,
        // because they are never freed if the device is lost.
        let started = unsafe {
            match written {
                true => device.start_read(stream, place, start, n),
                false => device.start_write(stream, start, place, n),
            }
        };
        started.and_then(|event| device.wait(&event)).inspect_err(|_| _ = device.drain_stream(stream))
    }

    /// Waits for enqueued transfers that write the bytes and, before the caller writes the bytes (`written`), for transfers that read them.
    pub(super) fn wait_for_enqueued(&self, written: bool) -> Result<()> {
        let conflicting = |transfer: &&EnqueuedTransfer| written || transfer.written;
        let events: Vec<_> =
            lock(&self.enqueued_transfers).iter().filter(conflicting).map(|f| Arc::clone(&f.event)).collect();
        if events.is_empty() {
            return Ok(());
        }
        let waited = events.iter().try_for_each(|event| self.opened.wait(event));
        lock(&self.enqueued_transfers).retain(|transfer| !transfer.is_over());
        waited
    }
}

/// Enqueues a write of bytes from the host on the current stream, through pinned memory. The caller may reuse `src` when the call returns;
/// the stream's next wait reports a failure. Returns false, with nothing done, if `src` is too large or there is too little pinned memory.
pub(in crate::storage) fn start_write(device: &'static ClDevice, src: &[u8], dst: ClAt<'_>) -> Result<bool> {
    if src.len() > MAX_ENQUEUED_COPY_BYTES {
        return Ok(false);
    }
    let Some(block) = pool(device).alloc(src.len()) else { return Ok(false) };
    let (start, stream) = (block_start(&block), device.current_stream());
    // SAFETY: the block has at least `src.len()` bytes, and no other code uses the block.
    unsafe { copy_raw(src.as_ptr(), start.as_ptr(), src.len(), copy) };
    // SAFETY: as above, and the pool hands the block out again only when the event is done.
    match unsafe { device.start_write(stream, start, dst, src.len()) } {
        Ok(event) => {
            let event = Arc::new(event);
            device.report_at_next_wait(stream, "an earlier clEnqueueWriteBuffer", &event);
            block.release_after(vec![event]);
            Ok(true)
        }
        Err(error) => {
            if device.is_lost() {
                mem::forget(block); // the transfer may never end, so the block is leaked
            }
            Err(error)
        }
    }
}
