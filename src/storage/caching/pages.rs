//! The pages of segments that grow in place: which are committed, and what blocks lie on them.
//!
//! As [`heap`](super::heap), pure bookkeeping. A hole is a block that nothing can find; there is none at the end of a
//! segment, which ends where it begins.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::Split;
use super::expand::Expandable;
use super::heap::{Entry, Heap, Held, NONE, Use};

/// The shortest hole made between blocks: systems bound how many there may be.
const LEAST_HOLE: usize = 64 << 10;
/// Past ends that are remembered: as many as decay's looks at the clock span an interval.
const LOOKS: usize = 5;

/// What is known of the end of a segment that grows.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// The last block, or one of its predecessors: where to begin looking for it.
    hint: u32,
    /// Up to where blocks were in use at decay's last looks; everything, for looks from before it last grew.
    used: [usize; LOOKS],
    /// Bytes before the end that are not committed.
    pub(super) holes: usize,
}

impl Default for End {
    fn default() -> End {
        End { hint: NONE, used: [usize::MAX; LOOKS], holes: 0 }
    }
}

/// Memory about to be committed.
pub(super) struct Extension {
    /// Its number in the table; a new one has none yet.
    pub(super) segment: Option<(u32, Arc<Segment>)>,
    /// Holes, and the first bytes of each.
    pub(super) holes: Vec<(u32, Range<usize>)>,
    /// From the segment's end to the new one.
    pub(super) end: Range<usize>,
    /// Free blocks that count towards the request.
    pub(super) spared: Vec<u32>,
}

impl Extension {
    pub(super) fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.holes.iter().map(|(_, range)| range).chain([&self.end]).filter(|range| !range.is_empty())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.ranges().map(|range| range.len() as u64).sum()
    }
}

/// Pages that are in no block any more, to be decommitted.
pub(super) type Cut = (Arc<Segment>, Range<usize>);

impl Segment {
    /// What the history calls it when it is made.
    pub(super) fn made(&self) -> TraceAction {
        if self.is_reserved() { TraceAction::SegmentMap } else { TraceAction::SegmentAlloc }
    }
}

impl End {
    /// Up to where the segment was in use at any of the last looks.
    pub(super) fn last_used(&self) -> usize {
        self.used.into_iter().max().unwrap_or(usize::MAX)
    }
}

impl Held {
    /// Bytes that are committed.
    pub(super) fn committed(&self) -> usize {
        self.size - self.end.holes
    }
}

impl Heap {
    /// Whether the table still has this segment at its number.
    pub(super) fn is_segment(&self, at: u32, segment: &Arc<Segment>) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| Arc::ptr_eq(&held.segment, segment))
    }

    pub(super) fn grows(&self, at: u32) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| held.segment.is_reserved())
    }

    pub(super) fn has_holes(&self, at: u32) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| held.end.holes > 0)
    }

    /// The last block of a segment.
    pub(super) fn last_block(&mut self, at: u32) -> u32 {
        let Some(held) = &self.segments[at as usize] else { return NONE };
        let is_of = |id: &u32| {
            let hinted = self.table.get(*id as usize);
            hinted.is_some_and(|entry| entry.segment == at && entry.usage() != Use::Vacant)
        };
        let mut last = Some(held.end.hint).filter(is_of).unwrap_or(held.first);
        while self.table[last as usize].next != NONE {
            last = self.table[last as usize].next;
        }
        if let Some(held) = &mut self.segments[at as usize] {
            held.end.hint = last;
        }
        last
    }

    /// Where a segment could be committed for a request of `size` bytes: runs of holes and of the arena's free blocks, and
    /// the end.
    pub(super) fn runs(&mut self, at: u32, arena: u32, size: usize, expandable: &Expandable) -> Vec<Extension> {
        let last = self.last_block(at);
        let mut found = Vec::new();
        let Some(held) = &self.segments[at as usize] else { return found };
        let made = |spared: Vec<u32>, holes, end| {
            let segment = Some((at, Arc::clone(&held.segment)));
            Extension { segment, holes, end, spared }
        };
        let (mut spared, mut holes, mut have) = (Vec::new(), Vec::new(), 0);
        let ids: Vec<u32> = if held.end.holes > 0 { self.blocks_of(at).collect() } else { vec![last] };
        for id in ids {
            let entry = self.table[id as usize];
            match entry.usage() {
                Use::Free if entry.arena() == arena => {
                    spared.push(id);
                    have += entry.size();
                }
                Use::Unmapped => {
                    let bytes = (size - have).next_multiple_of(expandable.page).min(entry.size());
                    holes.push((id, entry.offset()..entry.offset() + bytes));
                    have += bytes;
                }
                _ => (spared, holes, have) = (Vec::new(), Vec::new(), 0),
            }
            if have >= size {
                found.push(made(std::mem::take(&mut spared), std::mem::take(&mut holes), held.size..held.size));
                have = 0;
            }
        }
        // The last block is no hole: those at the end are cut off.
        let need = size.saturating_sub(have).next_multiple_of(expandable.page);
        if need > 0 && need <= held.segment.bytes() - held.size {
            found.push(made(spared, holes, held.size..held.size + need));
        }
        found
    }

    /// Adds memory that was committed to a segment, as free blocks of the arena.
    pub(super) fn extend(&mut self, at: u32, extension: &Extension, arena: u32) {
        let Some(held) = &mut self.segments[at as usize] else { return };
        let (kind, stream, address) = (held.kind, held.stream, held.address);
        held.end.holes -= extension.holes.iter().map(|(_, range)| range.len()).sum::<usize>();
        if !extension.end.is_empty() {
            held.end.used = End::default().used;
            held.size += extension.end.len();
        }
        let mut free: Vec<u32> = Vec::new();
        for (id, range) in &extension.holes {
            if self.table[*id as usize].size() > range.len() {
                let rest = self.split(*id, range.len());
                self.table[rest as usize].set_usage(Use::Unmapped);
            }
            free.push(*id);
        }
        if !extension.end.is_empty() {
            let last = self.last_block(at);
            let (offset, size) = (extension.end.start, extension.end.len());
            let made = Entry::new(at, arena, Use::Held, offset, size);
            let mut split = Split::default();
            let is_free = self.table[last as usize].usage() == Use::Free;
            if is_free {
                self.take_free(last, &mut split); // it may be all of its segment so far
            }
            let made = self.insert(made);
            self.table[made as usize].prev = last;
            self.table[last as usize].next = made;
            if is_free {
                self.put_free(last, &mut split);
            }
            self.stats.split_changed(kind, split);
            free.push(made);
        }
        for id in free {
            self.table[id as usize].set_arena(arena);
            let split = self.set_free(id);
            self.stats.split_changed(kind, split);
        }
        for range in extension.ranges() {
            self.stats.segment_extended(kind, range.len());
            self.history.record(TraceAction::SegmentMap, address + range.start as u64, range.len() as u64, stream.0);
        }
    }

    /// Takes free pages of a pool, up to `most` bytes but no `spared` blocks', out of the table: they are the caller's to
    /// decommit. The longest runs go first.
    pub(super) fn unmap_free(&mut self, pool: u32, most: u64, spared: &[u32], expandable: &Expandable) -> Vec<Cut> {
        let (mut left, mut cuts) = (most, Vec::new());
        loop {
            let before = cuts.len();
            for id in self.free_with_pages(pool, spared, expandable) {
                if left > 0
                    && let Some((segment, range)) = self.unmap(id, left, 0, expandable)
                {
                    left -= range.len() as u64;
                    cuts.push((segment, range));
                }
            }
            // A block that was too short to be a hole may be at its segment's end now.
            if left == 0 || cuts.len() == before {
                return cuts;
            }
        }
    }

    /// A pool's free blocks of a page or more in segments that grow, but no `spared` ones; the largest first.
    fn free_with_pages(&self, pool: u32, spared: &[u32], expandable: &Expandable) -> Vec<u32> {
        let arenas = self.arenas.iter().filter(|arena| arena.pool == pool);
        let free = arenas.flat_map(|arena| arena.partial.blocks(&self.table).chain(arena.whole.blocks(&self.table)));
        let mut free: Vec<u32> = free
            .filter(|&id| self.table[id as usize].size() >= expandable.page)
            .filter(|&id| self.held(id).segment.is_reserved() && !spared.contains(&id))
            .collect();
        free.sort_unstable_by_key(|&id| (Reverse(self.table[id as usize].size()), id));
        free
    }

    /// Takes up to `most` bytes of a free block, whole pages not below `floor`, out of the table. A hole at the end of a
    /// segment is cut off it; one of which nothing else is left goes as a whole.
    pub(super) fn unmap(&mut self, id: u32, most: u64, floor: usize, expandable: &Expandable) -> Option<Cut> {
        let entry = self.table[id as usize];
        let Entry { segment: at, next, .. } = entry;
        let (offset, size, usage) = (entry.offset(), entry.size(), entry.usage());
        let page = expandable.page;
        let end = expandable.down(offset + size);
        let most = expandable.down(usize::try_from(most).unwrap_or(usize::MAX));
        let start = offset.max(floor.min(end)).next_multiple_of(page).max(end.saturating_sub(most));
        let held = self.segments[at as usize].as_mut()?;
        if usage != Use::Free || start >= end || next != NONE && end - start < LEAST_HOLE {
            return None;
        }
        let (segment, kind, stream, address) = (Arc::clone(&held.segment), held.kind, held.stream, held.address);
        held.end.holes += end - start;
        let mut split = Split::default();
        self.take_free(id, &mut split);
        let mut hole = id;
        if offset < start {
            hole = self.split(id, start - offset);
            self.put_free(id, &mut split);
        }
        if end < offset + size {
            let rest = self.split(hole, end - start);
            self.put_free(rest, &mut split);
        }
        self.table[hole as usize].set_usage(Use::Unmapped);
        let Entry { prev, next, .. } = self.table[hole as usize];
        if next != NONE && self.table[next as usize].usage() == Use::Unmapped {
            self.absorb_next(hole);
        }
        if prev != NONE && self.table[prev as usize].usage() == Use::Unmapped {
            self.absorb_next(prev);
            hole = prev;
        }
        self.stats.segment_shrunk(kind, end - start);
        self.history.record(TraceAction::SegmentUnmap, address + start as u64, (end - start) as u64, stream.0);
        if self.table[hole as usize].next == NONE {
            self.cut_off(hole, &mut split);
        }
        self.stats.split_changed(kind, split);
        Some((segment, start..end))
    }

    /// Takes a hole at the end of a segment out of the table.
    fn cut_off(&mut self, hole: u32, split: &mut Split) {
        let Entry { segment: at, prev, .. } = self.table[hole as usize];
        let size = self.table[hole as usize].size();
        if prev == NONE {
            self.remove_segment(at); // the caller holds on to it
            return;
        }
        let before = Some(prev).filter(|&id| self.table[id as usize].usage() == Use::Free);
        before.into_iter().for_each(|id| self.take_free(id, split)); // alone it is all of its segment
        self.vacate(hole);
        self.table[prev as usize].next = NONE;
        before.into_iter().for_each(|id| self.put_free(id, split));
        if let Some(held) = &mut self.segments[at as usize] {
            held.size -= size;
            held.end.holes -= size;
            held.end.hint = prev;
        }
    }

    /// Records what goes back with a segment: of one that grows, what is committed.
    pub(super) fn record_released(&self, at: u32) {
        let Some(held) = &self.segments[at as usize] else { return };
        if !held.segment.is_reserved() {
            self.history.record(TraceAction::SegmentFree, held.address, held.size as u64, held.stream.0);
            return;
        }
        for range in self.mapped(at) {
            let (address, bytes) = (held.address + range.start as u64, range.len() as u64);
            self.history.record(TraceAction::SegmentUnmap, address, bytes, held.stream.0);
        }
    }

    /// The committed bytes of a segment, between its holes.
    pub(super) fn mapped(&self, at: u32) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for id in self.blocks_of(at) {
            let entry = self.table[id as usize];
            let (usage, offset, size) = (entry.usage(), entry.offset(), entry.size());
            match ranges.last_mut() {
                _ if usage == Use::Unmapped => {}
                Some(range) if range.end == offset => range.end += size,
                _ => ranges.push(offset..offset + size),
            }
        }
        ranges
    }

    /// Notes up to where segments are in use.
    pub(super) fn look_at_ends(&mut self) {
        for at in 0..self.segments.len() as u32 {
            if !self.grows(at) {
                continue;
            }
            let last = self.last_block(at);
            let entry = self.table[last as usize];
            let (usage, offset, size) = (entry.usage(), entry.offset(), entry.size());
            let used = if usage == Use::Free { offset } else { offset + size };
            if let Some(held) = &mut self.segments[at as usize] {
                held.end.used.rotate_right(1);
                held.end.used[0] = used;
            }
        }
    }

    /// Whether decay has an end to give back.
    pub(super) fn has_old_ends(&self, expandable: Option<&Expandable>) -> bool {
        let Some(expandable) = expandable else { return false };
        let held = self.segments.iter().flatten().filter(|held| held.pool == 0 && held.segment.is_reserved());
        held.map(|held| (held.size, held.end.last_used()))
            .any(|(size, used)| used.checked_next_multiple_of(expandable.page).is_some_and(|end| end < size))
    }
}
