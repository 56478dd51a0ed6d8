//! The simulated device's memory: the committed pages and the tags.

use std::collections::HashMap;
use std::ops::Range;

use super::queue::Span;
use super::{Call, Failure, Memory, MemoryKind, Sim, SimOptions, State};
use crate::{Error, Result};

/// A segment of the simulated device, as an allocator gets it from the driver.
pub(crate) struct SimMemory {
    pub(super) id: u64,
    pub(super) size: usize,
    pub(super) sim: Sim,
}

impl SimMemory {
    /// True if the memory has tags.
    pub(in crate::storage::driver) fn has_contents(&self) -> bool {
        self.sim.0.options.contents
    }

    pub(super) fn check_pages(&self, op: &'static str, page: usize, from: usize, to: usize) -> Result<()> {
        let whole = |at: usize| at == self.size || at.checked_rem(page) == Some(0);
        if from <= to && to <= self.size && whole(from) && whole(to) {
            return Ok(());
        }
        let all = self.size;
        Err(Error::invalid(op, format!("{from}..{to} are not whole pages of {page} in a reservation of {all} bytes")))
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.sim.call(Call::Release(self.size), |s| {
            s.finish_uses(Span { piece: self.id, first: 0, end: usize::MAX });
            s.pieces.release(self.id);
        });
    }
}

impl Sim {
    /// Creates memory, none of it committed.
    pub(super) fn make_memory(&self, s: &mut State, size: usize, reserved: bool) -> Memory {
        let SimOptions { page, contents, alignment, .. } = self.0.options;
        let page = if reserved { page } else { size.max(1) };
        let tags = if contents { size.div_ceil(alignment) } else { 0 };
        let piece = SimSegment { size, page, reserved, committed: Vec::new(), tags: vec![0; tags] };
        Memory(MemoryKind::Sim(SimMemory { id: s.pieces.add(piece), size, sim: self.clone() }))
    }

    pub(super) fn commit_range(&self, s: &mut State, m: &SimMemory, from: usize, to: usize) -> Result<(), Failure> {
        let room = self.commit_limit(s);
        s.failures.commit.pop_front().map_or_else(|| s.pieces.commit(m.id, &(from..to), room), Err)
    }
}

/// All segments, by number.
#[derive(Default)]
pub(super) struct SimSegments {
    pub(super) pieces: HashMap<u64, SimSegment>,
    next: u64,
    pub(super) committed: u64,
    pub(super) late_commits: u64,
}

/// A segment. It consists of one page, or of many pages if the segment was reserved.
pub(super) struct SimSegment {
    size: usize,
    page: usize,
    /// True if the segment was reserved: its pages are committed only by `extend`.
    pub(super) reserved: bool,
    /// Whether each page is committed, up to the last page that was ever committed.
    committed: Vec<bool>,
    /// One tag per granule; empty if contents are not kept.
    tags: Vec<u32>,
}

impl SimSegment {
    fn pages(&self, range: &Range<usize>) -> Range<usize> {
        let end = if range.is_empty() { 0 } else { range.end.min(self.size).div_ceil(self.page) };
        (range.start / self.page).min(end)..end
    }

    fn bytes(&self, pages: &Range<usize>) -> u64 {
        ((pages.end * self.page).min(self.size) - (pages.start * self.page).min(self.size)) as u64
    }

    fn committed_bytes(&self, pages: &Range<usize>) -> u64 {
        let known = pages.start.min(self.committed.len())..pages.end.min(self.committed.len());
        let committed = self.committed[known].iter().filter(|&&committed| committed).count() * self.page;
        let last = self.size / self.page; // the last page may be shorter
        let short = pages.contains(&last) && self.committed.get(last) == Some(&true);
        (committed - if short { self.page - self.size % self.page } else { 0 }) as u64
    }
}

impl SimSegments {
    fn add(&mut self, piece: SimSegment) -> u64 {
        self.next += 1;
        self.pieces.insert(self.next, piece);
        self.next
    }

    fn release(&mut self, id: u64) {
        self.decommit(id, &(0..usize::MAX), usize::MAX);
        self.pieces.remove(&id);
    }

    pub(super) fn missing(&self, id: u64, range: &Range<usize>) -> u64 {
        let piece = &self.pieces[&id];
        let pages = piece.pages(range);
        piece.bytes(&pages) - piece.committed_bytes(&pages)
    }

    /// Commits the range's pages, unless more than `room` bytes would then be committed in total.
    fn commit(&mut self, id: u64, range: &Range<usize>, room: u64) -> Result<(), Failure> {
        let missing = self.missing(id, range);
        if missing > 0 && self.committed + missing > room {
            return Err(Failure::DeviceMemory);
        }
        let Some(piece) = self.pieces.get_mut(&id) else { return Ok(()) };
        let pages = piece.pages(range);
        piece.committed.resize(piece.committed.len().max(pages.end), false);
        piece.committed[pages].fill(true);
        self.committed += missing;
        Ok(())
    }

    pub(super) fn commit_late(&mut self, id: u64, range: &Range<usize>, room: u64) -> Result<(), Failure> {
        self.commit(id, range, room)?;
        self.late_commits += 1;
        Ok(())
    }

    /// Decommits the range's pages and clears their tags.
    pub(super) fn decommit(&mut self, id: u64, range: &Range<usize>, granule: usize) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let pages = piece.pages(range);
        self.committed -= piece.committed_bytes(&pages);
        let known = pages.start.min(piece.committed.len())..pages.end.min(piece.committed.len());
        piece.committed[known].fill(false);
        let (first, end) = (range.start / granule, range.end.div_ceil(granule).min(piece.tags.len()));
        piece.tags[first.min(end)..end].fill(0);
    }

    /// Returns the tags of a span; empty if contents are not kept.
    pub(super) fn tags(&self, span: Span) -> &[u32] {
        let tags = &self.pieces[&span.piece].tags;
        &tags[span.first.min(tags.len())..span.end.min(tags.len())]
    }

    pub(super) fn tags_mut(&mut self, span: Span) -> &mut [u32] {
        let tags = self.pieces.get_mut(&span.piece).map_or(&mut [][..], |piece| &mut piece.tags);
        let n = tags.len();
        &mut tags[span.first.min(n)..span.end.min(n)]
    }

    pub(super) fn read(&self, span: Span, granule: usize, to: &mut [u8]) {
        for (bytes, tag) in to.chunks_mut(granule).zip(self.tags(span)) {
            let mut done = bytes.len().min(4);
            bytes[..done].copy_from_slice(&tag.to_le_bytes()[..done]);
            while done < bytes.len() {
                let more = done.min(bytes.len() - done); // doubles the copied part: copying byte by byte takes seconds for large blocks
                bytes.copy_within(..more, done);
                done += more;
            }
        }
    }

    pub(super) fn write(&mut self, span: Span, granule: usize, from: &[u8]) {
        for (bytes, tag) in from.chunks(granule).zip(self.tags_mut(span)) {
            let mut le = tag.to_le_bytes(); // a partial granule keeps the bytes that are not written
            le.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            *tag = u32::from_le_bytes(le);
        }
    }
}
