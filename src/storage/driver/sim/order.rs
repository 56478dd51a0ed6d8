//! What is ordered behind what: by streams themselves, by their waits for each other's markers, and by what the host knows
//! to be done. Two uses of the same bytes, one of which writes, that nothing orders are a violation in whatever order they
//! happen to run: a real device may run them in the other.

use std::collections::BTreeMap;

use super::Progress;
use super::queue::{Command, Span};
use crate::device::StreamId;

/// Work of several streams: of each all up to a count.
pub(super) type Clock = BTreeMap<StreamId, u64>;

fn raise(clock: &mut Clock, stream: StreamId, to: u64) {
    let at = clock.entry(stream).or_default();
    *at = to.max(*at);
}

fn includes(clock: &Clock, used: &Used) -> bool {
    clock.get(&used.stream).is_some_and(|&at| used.at <= at)
}

/// A use of memory that something may still have to be ordered behind.
struct Used {
    span: Span,
    writes: bool,
    stream: StreamId,
    at: u64,
}

#[derive(Default)]
pub(super) struct Order {
    /// Whether uses are noted and looked at.
    pub(super) checks: bool,
    progress: BTreeMap<StreamId, Progress>,
    /// What is before whatever is submitted next to each stream.
    before: BTreeMap<StreamId, Clock>,
    /// What the host knows to be done.
    known: Clock,
    uses: Vec<Used>,
}

impl Order {
    /// How far a stream is: the host knows from now on.
    pub(super) fn progress(&mut self, stream: StreamId) -> Progress {
        let progress = self.progress.get(&stream).copied().unwrap_or_default();
        raise(&mut self.known, stream, progress.finished);
        if progress.is_finished()
            && let Some(before) = self.before.get(&stream)
        {
            // Its waits are over as well.
            before.iter().for_each(|(&other, &at)| raise(&mut self.known, other, at));
        }
        progress
    }

    /// What is done when a marker is that is recorded now.
    pub(super) fn now(&self, stream: StreamId) -> Clock {
        let mut clock = self.before.get(&stream).cloned().unwrap_or_default();
        raise(&mut clock, stream, self.progress.get(&stream).map_or(0, |progress| progress.submitted));
        clock
    }

    pub(super) fn know(&mut self, done: &Clock) {
        done.iter().for_each(|(&stream, &at)| raise(&mut self.known, stream, at));
    }

    pub(super) fn know_all(&mut self) {
        self.progress.iter().for_each(|(&stream, progress)| raise(&mut self.known, stream, progress.finished));
        self.uses.clear();
    }

    pub(super) fn ran(&mut self, stream: StreamId, command: &Command) {
        if !matches!(command, Command::Mark(_)) {
            self.progress.entry(stream).or_default().finished += 1;
        }
    }

    /// Notes a command; says what it should have been ordered behind and is not.
    pub(super) fn submit(&mut self, stream: StreamId, command: &Command) -> Option<String> {
        let mut unordered = None;
        if !matches!(command, Command::Mark(_)) {
            let progress = self.progress.entry(stream).or_default();
            progress.submitted += 1;
            let at = progress.submitted;
            let (reads, writes) = command.spans();
            for (span, writes) in reads.map(|span| (span, false)).into_iter().chain(writes.map(|span| (span, true))) {
                unordered = unordered.or(self.use_by(Some(stream), span, writes));
                self.uses.extend(self.checks.then_some(Used { span, writes, stream, at }));
            }
        }
        if let Command::Wait(marker) = command {
            let before = self.before.entry(stream).or_default();
            marker.before().iter().for_each(|(&other, &at)| raise(before, other, at));
        }
        unordered
    }

    /// The host uses these bytes, when the default stream is done.
    pub(super) fn use_by_host(&mut self, span: Span, writes: bool) -> Option<String> {
        let done = self.now(StreamId::DEFAULT);
        self.know(&done);
        self.use_by(None, span, writes)
    }

    fn use_by(&mut self, stream: Option<StreamId>, span: Span, writes: bool) -> Option<String> {
        let Order { before, known, uses, .. } = self;
        uses.retain(|used| !includes(known, used));
        let before = stream.and_then(|stream| before.get(&stream));
        let is_before =
            |used: &Used| Some(used.stream) == stream || before.is_some_and(|before| includes(before, used));
        let conflicts = |used: &&Used| (used.writes || writes) && used.span.overlaps(&span);
        let late = uses.iter().filter(conflicts).find(|used| !is_before(used));
        let unordered = late.map(|used| {
            let who = stream.map_or("the host".into(), |stream| format!("stream {}", stream.index()));
            format!("{who} uses {span:?} and waits for no use by stream {} of {:?}", used.stream.index(), used.span)
        });
        if writes {
            // Whoever is ordered behind this use is ordered behind those as well.
            uses.retain(|used| !(span.covers(&used.span) && is_before(used)));
        }
        unordered
    }

    /// These bytes are given back: what used them does not matter to who gets them next.
    pub(super) fn forget(&mut self, gone: Span) {
        let (apart, cut): (Vec<_>, Vec<_>) = self.uses.drain(..).partition(|used| !used.span.overlaps(&gone));
        self.uses = apart;
        for used in cut {
            let (before, behind) = (used.span.first..gone.first, gone.end..used.span.end);
            let parts = [before, behind].into_iter().filter(|part| !part.is_empty());
            self.uses.extend(
                parts.map(|part| Used { span: Span { first: part.start, end: part.end, ..used.span }, ..used }),
            );
        }
    }
}
