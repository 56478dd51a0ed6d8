//! Recording a step: which blocks it requests, in which order, and when they are freed.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::super::allocator::Allocator;
use super::super::block::{ALIGNMENT, Block, Slot};
use super::search::Lifetime;
use crate::device::StreamId;
use crate::device::lock;
use crate::{Device, Result};

/// The requests and frees of a step, in order.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// The requests, with sizes in bytes rounded up to the alignment.
    pub(super) requests: Vec<Request>,
    /// The requests whose blocks were freed, in the order of the frees.
    pub(super) frees: Vec<usize>,
}

/// A recorded request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) size: usize,
    /// The number of blocks that had been freed when the request was made.
    pub(super) frees: usize,
    /// True if the block can be in the arena: it was freed before the step ended, and no other stream used it.
    pub(super) planned: bool,
}

impl Trace {
    /// Returns the lifetimes of the planned blocks, in the order of their requests.
    pub(super) fn lifetimes(&self) -> Vec<Lifetime> {
        let mut ends = vec![0; self.requests.len()];
        for (at, &request) in self.frees.iter().enumerate() {
            ends[request] = at;
        }
        let life = |(at, request): (usize, &Request)| Lifetime {
            start: (at + request.frees) as u64,
            // The time of a free is the number of requests made before it plus the number of earlier frees.
            end: (self.requests.partition_point(|r| r.frees <= ends[at]) + ends[at]) as u64,
            bytes: request.size as u64,
        };
        self.requests.iter().enumerate().filter(|(_, request)| request.planned).map(life).collect()
    }
}

/// An allocator that forwards all calls to another allocator, and records the requests on one stream.
pub(super) struct Recorder {
    inner: Arc<dyn Allocator>,
    stream: StreamId,
    /// `None` after the step has ended.
    recording: Mutex<Option<Recording>>,
}

/// The recording in progress.
#[derive(Default)]
struct Recording {
    trace: Trace,
    /// Maps the slots of live blocks to their requests.
    live: HashMap<NonNull<Slot>, usize>,
    /// Requests whose blocks other streams use.
    used_by_other_streams: Vec<usize>,
}

// SAFETY: the pointers are only compared, never dereferenced.
unsafe impl Send for Recording {}

impl Recorder {
    pub(super) fn new(inner: Arc<dyn Allocator>, stream: StreamId) -> Recorder {
        Recorder { inner, stream, recording: Mutex::new(Some(Recording::default())) }
    }

    /// Ends the recording and returns the trace.
    pub(super) fn finish(&self) -> Trace {
        let Some(Recording { mut trace, used_by_other_streams, .. }) = lock(&self.recording).take() else {
            return Trace::default();
        };
        trace.frees.iter().for_each(|&request| trace.requests[request].planned = true);
        used_by_other_streams.into_iter().for_each(|request| trace.requests[request].planned = false);
        trace
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a recording of {:?}", self.inner)
    }
}

impl Allocator for Recorder {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(bytes, stream)?;
        if let Some(recording) = lock(&self.recording).as_mut().filter(|_| bytes > 0 && stream == self.stream) {
            // Rounding cannot overflow, because a block of this size exists.
            let request = Request {
                size: bytes.next_multiple_of(self.alignment().max(ALIGNMENT)),
                frees: recording.trace.frees.len(),
                planned: false,
            };
            recording.live.insert(block.slot_ptr(), recording.trace.requests.len());
            recording.trace.requests.push(request);
        }
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        if let Some(recording) = lock(&self.recording).as_mut()
            && let Some(request) = recording.live.remove(&block.slot_ptr())
        {
            recording.trace.frees.push(request);
        }
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if let Some(recording) = lock(&self.recording).as_mut().filter(|_| stream != self.stream)
            && let Some(&request) = recording.live.get(&block.slot_ptr())
        {
            recording.used_by_other_streams.push(request);
        }
        self.inner.record_stream(block, stream);
    }
}
