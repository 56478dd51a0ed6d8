//! The simulated device's streams: queues of commands that run in order. Commands of different streams run in any order.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::State;
use super::order::VectorClock;
use crate::device::StreamId;

/// Granules `first..end` of a segment.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) piece: u64,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl Span {
    pub(super) fn overlaps(&self, other: &Span) -> bool {
        self.piece == other.piece && self.first < other.end && other.first < self.end
    }

    pub(super) fn covers(&self, other: &Span) -> bool {
        self.piece == other.piece && self.first <= other.first && other.end <= self.end
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory {} granules {}..{}", self.piece, self.first, self.end)
    }
}

/// A point in a stream. Accesses are ordered by the device's lock.
#[derive(Clone)]
pub(crate) struct SimMarker {
    stream: StreamId,
    done: Arc<AtomicBool>,
    before: Arc<VectorClock>,
}

impl SimMarker {
    pub(super) fn new(stream: StreamId, before: VectorClock) -> SimMarker {
        SimMarker { stream, done: Arc::default(), before: Arc::new(before) }
    }

    /// Returns the work of all streams that is done when this marker is done.
    pub(super) fn before(&self) -> &VectorClock {
        &self.before
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Relaxed)
    }
}

pub(super) enum Command {
    Write(Span, u32),
    Check(Span, u32),
    Copy(Span, Span),
    Mark(SimMarker),
    Wait(SimMarker),
}

impl Command {
    pub(super) fn spans(&self) -> (Option<Span>, Option<Span>) {
        match self {
            Command::Write(at, _) => (None, Some(*at)),
            Command::Check(at, _) => (Some(*at), None),
            Command::Copy(from, to) => (Some(*from), Some(*to)),
            Command::Mark(_) | Command::Wait(_) => (None, None),
        }
    }

    fn uses(&self, span: &Span) -> bool {
        let (reads, writes) = self.spans();
        reads.into_iter().chain(writes).any(|at| at.overlaps(span))
    }
}

impl State {
    pub(super) fn execute(&mut self, stream: StreamId, command: Command) {
        match command {
            Command::Write(span, tag) => self.pieces.tags_mut(span).fill(tag),
            Command::Check(span, want) => {
                if let Some((i, found)) = self.pieces.tags(span).iter().enumerate().find(|&(_, &tag)| tag != want) {
                    let at = span.first + i;
                    let index = stream.index();
                    self.violations.push(format!("stream {index}, {span:?}: granule {at} has tag {found}, not {want}"));
                }
            }
            Command::Copy(..) if self.failures.fails_copy() => {}
            Command::Copy(from, to) => {
                let tags = self.pieces.tags(from).to_vec();
                self.pieces.tags_mut(to).copy_from_slice(&tags);
            }
            Command::Mark(marker) => marker.done.store(true, Relaxed),
            Command::Wait(_) => {} // `step` has checked the marker
        }
    }

    /// Returns the marker that the stream's next command waits for.
    fn blocked_on(&self, stream: StreamId) -> Option<&SimMarker> {
        match self.streams.get(&stream)?.front()? {
            Command::Wait(marker) if !marker.is_done() => Some(marker),
            _ => None,
        }
    }

    /// Runs a stream's next command. Returns false if there is none, or if it waits for another stream.
    pub(super) fn step(&mut self, stream: StreamId) -> bool {
        if self.blocked_on(stream).is_some() {
            return false;
        }
        match self.streams.get_mut(&stream).and_then(|queue| queue.pop_front()) {
            Some(command) => {
                self.order.count_finished(stream, &command);
                self.execute(stream, command);
            }
            None => return false,
        }
        true
    }

    /// Runs a stream's next command, after the commands it waits for.
    fn step_unblocked(&mut self, stream: StreamId) -> bool {
        if let Some(marker) = self.blocked_on(stream) {
            let marker = marker.clone();
            self.finish(marker);
        }
        self.step(stream)
    }

    /// Runs everything before the marker.
    ///
    /// # Panics
    /// If streams wait for each other in a cycle, or for a marker of another device.
    pub(super) fn finish(&mut self, marker: SimMarker) {
        let mut needed = vec![marker];
        while let Some(marker) = needed.last() {
            if marker.is_done() {
                needed.pop();
                continue;
            }
            let stream = marker.stream;
            if let Some(next) = self.blocked_on(stream) {
                let circle = needed.iter().any(|marker| Arc::ptr_eq(&marker.done, &next.done));
                assert!(!circle, "deadlock: streams of the simulated device wait for each other");
                let next = next.clone();
                needed.push(next);
            } else {
                let ran = self.step(stream);
                assert!(ran, "deadlock: nothing on stream {} will reach the marker waited for", stream.index());
            }
        }
    }

    pub(super) fn finish_stream(&mut self, stream: StreamId) {
        while self.step_unblocked(stream) {}
    }

    /// Runs all commands of the default stream, so that the host can read or write these bytes.
    pub(super) fn finish_default(&mut self, span: Span, writes: bool) {
        self.finish_stream(StreamId::DEFAULT);
        let unordered = self.order.use_by_host(span, writes);
        self.violations.extend(unordered);
    }

    pub(super) fn finish_all(&mut self) {
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.finish_stream(stream));
    }

    /// Runs the queued commands up to the last use of these bytes. Counts a stall if there are any.
    pub(super) fn finish_uses(&mut self, span: Span) {
        let uses = |queue: &VecDeque<Command>| queue.iter().rev().any(|command| command.uses(&span));
        let streams: Vec<StreamId> =
            self.streams.iter().filter(|(_, queue)| uses(queue)).map(|(&stream, _)| stream).collect();
        self.stalls += u64::from(!streams.is_empty());
        for stream in streams {
            while self.streams.get(&stream).is_some_and(uses) && self.step_unblocked(stream) {}
        }
        self.order.forget(span);
    }

    /// Runs up to 16 commands of streams chosen by `seed` (splitmix64).
    pub(super) fn run_some(&mut self, seed: u64) -> usize {
        let mut state = seed;
        let mut random = |n: usize| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) % n as u64) as usize
        };
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        let tries = if streams.is_empty() { 0 } else { random(17) };
        (0..tries).filter(|_| self.step(streams[random(streams.len())])).count()
    }
}
