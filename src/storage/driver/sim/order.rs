//! The order of work on the simulated device, and a check for unordered uses of the same bytes.
//!
//! Work is ordered by its stream, by streams' waits for each other's markers, and by the work that the host knows to be
//! done. Two unordered uses of the same bytes, at least one of them a write, are a violation even if they happen to run in the right
//! order, because a real device may run them in the other order.

use std::collections::BTreeMap;

use super::Progress;
use super::queue::{Command, Span};
use crate::device::StreamId;

/// A vector clock: for each stream, the number of its commands that are included.
pub(super) type VectorClock = BTreeMap<StreamId, u64>;

fn raise(clock: &mut VectorClock, stream: StreamId, to: u64) {
    let at = clock.entry(stream).or_default();
    *at = to.max(*at);
}

fn includes(clock: &VectorClock, used: &MemoryUse) -> bool {
    clock.get(&used.stream).is_some_and(|&at| used.at <= at)
}

/// A use of memory that later uses may have to be ordered after.
struct MemoryUse {
    span: Span,
    writes: bool,
    stream: StreamId,
    at: u64,
}

/// The order of all submitted commands.
#[derive(Default)]
pub(super) struct Order {
    /// Whether uses are recorded and checked.
    pub(super) checks: bool,
    progress: BTreeMap<StreamId, Progress>,
    /// For each stream, the work that is done before the next submitted command runs.
    before: BTreeMap<StreamId, VectorClock>,
    /// The work that the host knows to be done.
    known: VectorClock,
    uses: Vec<MemoryUse>,
}

impl Order {
    /// Returns a stream's progress, which the host knows from now on.
    pub(super) fn progress(&mut self, stream: StreamId) -> Progress {
        let progress = self.progress.get(&stream).copied().unwrap_or_default();
        raise(&mut self.known, stream, progress.finished);
        if progress.is_finished()
            && let Some(before) = self.before.get(&stream)
        {
            // The work that the stream waited for is done as well.
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
            marker.before().iter().for_each(|(&other, &at)| raise(before, other, at));
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

    /// Forgets the uses of released bytes, which do not matter to their next owner.
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
