//! The numbers of streams, and which stream a thread uses.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use super::hints::StreamHints;
use crate::{Device, Result};

/// The maximum number of streams of a device at a time.
pub(super) const MAX_STREAMS: usize = 1024;

/// The number of a stream on its device. A block of memory stores the id of the stream that owns the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The default stream, which every device has.
    pub const DEFAULT: StreamId = StreamId(0);

    /// Returns the stream with this number, for memory of a user-defined [`Driver`](crate::storage::Driver).
    pub fn new(index: u32) -> StreamId {
        StreamId(index)
    }

    /// Returns a small number: 0 for the default stream. The numbers of dropped streams are reused.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Allocates stream ids. The id released last is reused first, so that memory cached for the stream is reused soon.
#[derive(Debug)]
pub(super) struct StreamIds {
    next: u32,
    idle: Vec<(StreamId, StreamHints)>,
}

impl StreamIds {
    /// Creates an allocator of ids from `first` on.
    pub(super) const fn from(first: u32) -> StreamIds {
        StreamIds { next: first, idle: Vec::new() }
    }

    /// Returns an unused id, preferably of a stream with these hints. `make` creates the queue of an id used for the first time.
    pub(super) fn acquire(
        &mut self,
        hints: StreamHints,
        make: impl FnOnce(StreamId) -> Result<()>,
    ) -> Result<StreamId> {
        let fits = |(_, of): &(StreamId, StreamHints)| *of == hints;
        // If no stream can be added, a stream with other hints is better than an error.
        let any = (self.next as usize >= MAX_STREAMS).then(|| self.idle.len().checked_sub(1)).flatten();
        if let Some(at) = self.idle.iter().rposition(fits).or(any) {
            return Ok(self.idle.remove(at).0);
        }
        let id = StreamId(self.next);
        invalid!("Stream::new" if id.index() >= MAX_STREAMS,
            "a device has at most {MAX_STREAMS} streams at a time: drop some, or share them");
        make(id)?;
        self.next += 1;
        Ok(id)
    }

    pub(super) fn release(&mut self, id: StreamId, hints: StreamHints) {
        self.idle.push((id, hints));
    }
}

/// A current stream of a thread.
pub(super) struct CurrentStream {
    pub(super) device: Device,
    pub(super) id: StreamId,
    /// The stream's handle, which keeps the stream from being reused.
    pub(super) handle: Arc<dyn Any + Send + Sync>,
}

thread_local! {
    /// This thread's current streams: streams of `set_stream` at the bottom, streams of enclosing `with_stream`s above.
    pub(super) static CURRENT_STREAMS: RefCell<Vec<CurrentStream>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with this thread's current stream of the device; returns `None` for the default stream, without a call.
pub(super) fn with_current<R>(device: Device, f: impl FnOnce(&CurrentStream) -> R) -> Option<R> {
    let find = |stack: &RefCell<Vec<CurrentStream>>| stack.borrow().iter().rev().find(|s| s.device == device).map(f);
    CURRENT_STREAMS.try_with(find).ok().flatten()
}

/// Returns the id of this thread's current stream on the device. Every allocation calls this function, which takes a few ns.
pub(crate) fn current_id(device: Device) -> StreamId {
    with_current(device, |current| current.id).unwrap_or(StreamId::DEFAULT)
}
