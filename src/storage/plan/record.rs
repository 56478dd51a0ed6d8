//! Watching one step: which blocks it asks for, in which order, and when they are given back.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::super::allocator::{Allocator, forward_to_inner};
use super::super::block::{ALIGNMENT, Block, Slot};
use super::search::Lifetime;
use crate::Result;
use crate::device::StreamId;
use crate::device::lock;

/// What a step asked for, in order, and when each block was given back.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// Sizes in bytes, rounded up to the alignment.
    pub(super) requests: Vec<Request>,
    /// The requests whose blocks were given back, in that order.
    pub(super) frees: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) size: usize,
    /// How many blocks had been given back when it was made.
    pub(super) frees: usize,
    /// Whether the block can have a place in the arena: it was given back before the step ended, and no other stream
    /// used it.
    pub(super) planned: bool,
}

impl Trace {
    /// When the planned blocks live, in order.
    pub(super) fn lifetimes(&self) -> Vec<Lifetime> {
        let mut ends = vec![0; self.requests.len()];
        for (at, &request) in self.frees.iter().enumerate() {
            ends[request] = at;
        }
        let life = |(at, request): (usize, &Request)| Lifetime {
            start: (at + request.frees) as u64,
            // Requests made before it ended come first.
            end: (self.requests.partition_point(|r| r.frees <= ends[at]) + ends[at]) as u64,
            bytes: request.size as u64,
        };
        self.requests.iter().enumerate().filter(|(_, request)| request.planned).map(life).collect()
    }
}

/// Passes everything on to another allocator and notes what is asked of one stream.
pub(super) struct Recorder {
    inner: Arc<dyn Allocator>,
    stream: StreamId,
    /// None when the step is over.
    notes: Mutex<Option<Notes>>,
}

#[derive(Default)]
struct Notes {
    trace: Trace,
    /// The requests of live blocks.
    live: HashMap<NonNull<Slot>, usize>,
    /// Requests whose blocks other streams use.
    shared: Vec<usize>,
}

// SAFETY: the pointers are only compared.
unsafe impl Send for Notes {}

impl Recorder {
    pub(super) fn new(inner: Arc<dyn Allocator>, stream: StreamId) -> Recorder {
        Recorder { inner, stream, notes: Mutex::new(Some(Notes::default())) }
    }

    /// Ends the recording.
    pub(super) fn finish(&self) -> Trace {
        let Some(Notes { mut trace, shared, .. }) = lock(&self.notes).take() else { return Trace::default() };
        trace.frees.iter().for_each(|&request| trace.requests[request].planned = true);
        shared.into_iter().for_each(|request| trace.requests[request].planned = false);
        trace
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a recording of {:?}", self.inner)
    }
}

impl Allocator for Recorder {
    forward_to_inner!();

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(bytes, stream)?;
        if let Some(notes) = lock(&self.notes).as_mut().filter(|_| bytes > 0 && stream == self.stream) {
            // A block this large exists, so rounding its size does not overflow.
            let request = Request {
                size: bytes.next_multiple_of(self.alignment().max(ALIGNMENT)),
                frees: notes.trace.frees.len(),
                planned: false,
            };
            notes.live.insert(block.slot_ptr(), notes.trace.requests.len());
            notes.trace.requests.push(request);
        }
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        if let Some(notes) = lock(&self.notes).as_mut()
            && let Some(request) = notes.live.remove(&block.slot_ptr())
        {
            notes.trace.frees.push(request);
        }
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if let Some(notes) = lock(&self.notes).as_mut().filter(|_| stream != self.stream)
            && let Some(&request) = notes.live.get(&block.slot_ptr())
        {
            notes.shared.push(request);
        }
        self.inner.record_stream(block, stream);
    }
}
