//! The simulated device's streams: queues of commands that run in order. Commands of different streams run in any order.
//!
//! Work is ordered by its stream, by streams' waits for each other's markers, and after work that the host knows to be
//! done. Two unordered uses of the same bytes, at least one of them a write, are a violation even if they happen to run
//! in the right order, because a real device may run them in the other order.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{Progress, State};
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

/// A point in a stream. Its fields are accessed only under the device's lock.
#[derive(Clone)]
pub(crate) struct SimMarker {
    stream: StreamId,
    done: Arc<AtomicBool>,
    /// For all streams, the work that is done when this marker is done.
    pub(super) before: Arc<VectorClock>,
}

impl SimMarker {
    pub(super) fn new(stream: StreamId, before: VectorClock) -> SimMarker {
        SimMarker { stream, done: Arc::default(), before: Arc::new(before) }
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
            Command::Wait(_) => {} // nothing to do: `step` has checked that the marker is done
        }
    }

    /// Returns the marker that the stream's next command waits for.
    fn blocked_on(&self, stream: StreamId) -> Option<&SimMarker> {
        match self.streams.get(&stream)?.front()? {
            Command::Wait(marker) if !marker.is_done() => Some(marker),
            _ => None,
        }
    }

    /// Runs a stream's next command. Returns false if no command is queued, or if the next command waits for another stream.
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

    /// Runs all commands that precede the marker.
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

    /// Runs the queued commands up to the last use of these bytes. Counts a stall if any command has to run.
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

/// A vector clock: for each stream, the clock includes this many of the stream's first commands.
type VectorClock = BTreeMap<StreamId, u64>;

fn raise(clock: &mut VectorClock, stream: StreamId, to: u64) {
    let at = clock.entry(stream).or_default();
    *at = to.max(*at);
}

fn includes(clock: &VectorClock, used: &MemoryUse) -> bool {
    clock.get(&used.stream).is_some_and(|&at| used.at <= at)
}

/// A use of memory. Later uses of the same bytes may have to be ordered after it.
struct MemoryUse {
    span: Span,
    writes: bool,
    stream: StreamId,
    at: u64,
}

/// The order in which submitted commands must run.
#[derive(Default)]
pub(super) struct Order {
    /// Whether uses of memory are recorded and checked for conflicts.
    pub(super) checks: bool,
    progress: BTreeMap<StreamId, Progress>,
    /// For each stream, the work that is done before the next submitted command runs.
    before: BTreeMap<StreamId, VectorClock>,
    /// The work that the host knows to be done.
    known: VectorClock,
    uses: Vec<MemoryUse>,
}

impl Order {
    /// Returns a stream's progress, and records that the host knows it.
    pub(super) fn progress(&mut self, stream: StreamId) -> Progress {
        let progress = self.progress.get(&stream).copied().unwrap_or_default();
        raise(&mut self.known, stream, progress.finished);
        if progress.is_finished()
            && let Some(before) = self.before.get(&stream)
        {
            // If a stream's work is done, the work that the stream waited for is done as well.
            before.iter().for_each(|(&other, &at)| raise(&mut self.known, other, at));
        }
        progress
    }

    /// Returns the work that is done when a marker recorded now is done.
    pub(super) fn clock_after(&self, stream: StreamId) -> VectorClock {
        let mut clock = self.before.get(&stream).cloned().unwrap_or_default();
        raise(&mut clock, stream, self.progress.get(&stream).map_or(0, |progress| progress.submitted));
        clock
    }

    pub(super) fn mark_known(&mut self, done: &VectorClock) {
        done.iter().for_each(|(&stream, &at)| raise(&mut self.known, stream, at));
    }

    /// Records that the host knows all finished work to be done, after a wait for the device.
    pub(super) fn mark_all_known(&mut self) {
        self.progress.iter().for_each(|(&stream, progress)| raise(&mut self.known, stream, progress.finished));
        self.uses.clear();
    }

    pub(super) fn count_finished(&mut self, stream: StreamId, command: &Command) {
        if !matches!(command, Command::Mark(_)) {
            self.progress.entry(stream).or_default().finished += 1;
        }
    }

    /// Records a command. Returns a description of a conflicting use that the command is not ordered after, if any.
    pub(super) fn submit(&mut self, stream: StreamId, command: &Command) -> Option<String> {
        let mut unordered = None;
        if !matches!(command, Command::Mark(_)) {
            let progress = self.progress.entry(stream).or_default();
            progress.submitted += 1;
            let at = progress.submitted;
            let (reads, writes) = command.spans();
            for (span, writes) in reads.map(|span| (span, false)).into_iter().chain(writes.map(|span| (span, true))) {
                unordered = unordered.or(self.check_use(Some(stream), span, writes));
                self.uses.extend(self.checks.then_some(MemoryUse { span, writes, stream, at }));
            }
        }
        if let Command::Wait(marker) = command {
            let before = self.before.entry(stream).or_default();
            marker.before.iter().for_each(|(&other, &at)| raise(before, other, at));
        }
        unordered
    }

    /// Records a use of these bytes by the host, after the work of the default stream.
    pub(super) fn use_by_host(&mut self, span: Span, writes: bool) -> Option<String> {
        let done = self.clock_after(StreamId::DEFAULT);
        self.mark_known(&done);
        self.check_use(None, span, writes)
    }

    /// Checks a use by a stream, or by the host, against earlier uses. Returns a description of a conflict, if any.
    fn check_use(&mut self, stream: Option<StreamId>, span: Span, writes: bool) -> Option<String> {
        let Order { before, known, uses, .. } = self;
        uses.retain(|used| !includes(known, used));
        let before = stream.and_then(|stream| before.get(&stream));
        let is_before =
            |used: &MemoryUse| Some(used.stream) == stream || before.is_some_and(|before| includes(before, used));
        let conflicts = |used: &&MemoryUse| (used.writes || writes) && used.span.overlaps(&span);
        let late = uses.iter().filter(conflicts).find(|used| !is_before(used));
        let unordered = late.map(|used| {
            let who = stream.map_or("the host".into(), |stream| format!("stream {}", stream.index()));
            format!("{who} uses {span:?} and waits for no use by stream {} of {:?}", used.stream.index(), used.span)
        });
        if writes {
            // Work ordered after this use is also ordered after the earlier uses that this use covers.
            uses.retain(|used| !(span.covers(&used.span) && is_before(used)));
        }
        unordered
    }

    /// Forgets the uses of released bytes: work of the bytes' next owner need not be ordered after these uses.
    pub(super) fn forget(&mut self, gone: Span) {
        let (apart, cut): (Vec<_>, Vec<_>) = self.uses.drain(..).partition(|used| !used.span.overlaps(&gone));
        self.uses = apart;
        for used in cut {
            let (before, behind) = (used.span.first..gone.first, gone.end..used.span.end);
            let parts = [before, behind].into_iter().filter(|part| !part.is_empty());
            self.uses.extend(
                parts.map(|part| MemoryUse { span: Span { first: part.start, end: part.end, ..used.span }, ..used }),
            );
        }
    }
}
