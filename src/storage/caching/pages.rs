//! Page bookkeeping of expandable segments: which pages are committed, and which blocks are on them.
//!
//! Like [`heap`](super::heap), this module makes no driver calls. A hole is a block that no request can take.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::Split;
use super::expand::Expandable;
use super::heap::{Entry, Heap, NONE, SegmentRecord, Use};

/// The smallest hole between blocks, in bytes. Operating systems limit the number of mappings.
const MIN_HOLE_BYTES: usize = 64 << 10;
/// Past ends of use that are kept: one per recent check of decay, together one interval.
const REMEMBERED_ENDS: usize = 5;

/// Bookkeeping of an expandable segment's end and holes.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentEnd {
    /// The last block or one of its predecessors, from which the search for the last block starts.
    hint: u32,
    /// Offset up to which blocks were in use at decay's recent checks. `usize::MAX` for checks before the segment last grew.
    used: [usize; REMEMBERED_ENDS],
    /// Bytes of uncommitted holes before the end.
    pub(super) holes: usize,
}

impl Default for SegmentEnd {
    fn default() -> SegmentEnd {
        SegmentEnd { hint: NONE, used: [usize::MAX; REMEMBERED_ENDS], holes: 0 }
    }
}

/// Memory about to be committed to a segment.
pub(super) struct Extension {
    /// The segment and its number in the table; `None` for a new segment.
    pub(super) segment: Option<(u32, Arc<Segment>)>,
    /// Holes to fill, with the range to commit at the start of each.
    pub(super) holes: Vec<(u32, Range<usize>)>,
    /// The range from the segment's current end to its new end.
    pub(super) end: Range<usize>,
    /// Adjacent free blocks whose bytes count towards the request.
    pub(super) spared: Vec<u32>,
}

impl Extension {
    /// The ranges to commit.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.holes.iter().map(|(_, range)| range).chain([&self.end]).filter(|range| !range.is_empty())
    }

    /// The number of bytes to commit.
    pub(super) fn bytes(&self) -> u64 {
        self.ranges().map(|range| range.len() as u64).sum()
    }
}

/// Pages removed from the table, to be decommitted.
pub(super) type UnmappedPages = (Arc<Segment>, Range<usize>);

impl Segment {
    pub(super) fn creation_action(&self) -> TraceAction {
        if self.is_reserved() { TraceAction::SegmentMap } else { TraceAction::SegmentAlloc }
    }
}

impl SegmentEnd {
    /// The highest offset in use at any of the recent checks.
    pub(super) fn last_used(&self) -> usize {
        self.used.into_iter().max().unwrap_or(usize::MAX)
    }
}

impl SegmentRecord {
    pub(super) fn committed(&self) -> usize {
        self.size - self.end.holes
    }
}

impl Heap {
    /// True if the table still has this segment under its number.
    pub(super) fn is_segment(&self, at: u32, segment: &Arc<Segment>) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| Arc::ptr_eq(&held.segment, segment))
    }

    pub(super) fn is_expandable(&self, at: u32) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| held.segment.is_reserved())
    }

    pub(super) fn has_holes(&self, at: u32) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| held.end.holes > 0)
    }

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

    /// Returns the ways to commit memory for a request of `size` bytes: runs of holes and free blocks of the arena, and the end of the segment.
    pub(super) fn possible_extensions(
        &mut self,
        at: u32,
        arena: u32,
        size: usize,
        expandable: &Expandable,
    ) -> Vec<Extension> {
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
        // The last block is never a hole, because holes at the end are removed.
        let need = size.saturating_sub(have).next_multiple_of(expandable.page);
        if need > 0 && need <= held.segment.bytes() - held.size {
            found.push(made(spared, holes, held.size..held.size + need));
        }
        found
    }

    /// Adds newly committed memory to a segment, as free blocks of the arena.
    pub(super) fn extend(&mut self, at: u32, extension: &Extension, arena: u32) {
        let Some(held) = &mut self.segments[at as usize] else { return };
        let (kind, stream, address) = (held.kind, held.stream, held.address);
        held.end.holes -= extension.holes.iter().map(|(_, range)| range.len()).sum::<usize>();
        if !extension.end.is_empty() {
            held.end.used = SegmentEnd::default().used;
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
            let made = Entry::new(at, arena, Use::Frozen, offset, size);
            let mut split = Split::default();
            let is_free = self.table[last as usize].usage() == Use::Free;
            if is_free {
                self.remove_free(last, &mut split); // before growing, this block may cover its whole segment
            }
            let made = self.insert(made);
            self.table[made as usize].prev = last;
            self.table[last as usize].next = made;
            if is_free {
                self.insert_free(last, &mut split);
            }
            self.stats.record_split_change(kind, split);
            free.push(made);
        }
        for id in free {
            self.table[id as usize].set_arena(arena);
            let split = self.free_and_merge(id);
            self.stats.record_split_change(kind, split);
        }
        for range in extension.ranges() {
            self.stats.record_segment_growth(kind, range.len());
            self.history.record(TraceAction::SegmentMap, address + range.start as u64, range.len() as u64, stream.0);
        }
    }

    /// Removes free pages of a pool from the table, up to `most` bytes and none of the `spared` blocks. The longest
    /// runs go first. The caller decommits the pages.
    pub(super) fn unmap_free_pages(
        &mut self,
        pool: u32,
        most: u64,
        spared: &[u32],
        expandable: &Expandable,
    ) -> Vec<UnmappedPages> {
        let (mut left, mut unmapped) = (most, Vec::new());
        loop {
            let before = unmapped.len();
            for id in self.free_with_pages(pool, spared, expandable) {
                if left > 0
                    && let Some((segment, range)) = self.unmap(id, left, 0, expandable)
                {
                    left -= range.len() as u64;
                    unmapped.push((segment, range));
                }
            }
            // A block that was too short to become a hole may be at its segment's end now.
            if left == 0 || unmapped.len() == before {
                return unmapped;
            }
        }
    }

    /// Returns a pool's free blocks of a page or more in expandable segments, except the `spared` ones, the largest first.
    fn free_with_pages(&self, pool: u32, spared: &[u32], expandable: &Expandable) -> Vec<u32> {
        let arenas = self.arenas.iter().filter(|arena| arena.pool == pool);
        let free =
            arenas.flat_map(|arena| arena.partial.blocks(&self.table).chain(arena.whole_segments.blocks(&self.table)));
        let mut free: Vec<u32> = free
            .filter(|&id| self.table[id as usize].size() >= expandable.page)
            .filter(|&id| self.segment_of(id).segment.is_reserved() && !spared.contains(&id))
            .collect();
        free.sort_unstable_by_key(|&id| (Reverse(self.table[id as usize].size()), id));
        free
    }

    /// Removes up to `most` bytes of a free block from the table, in whole pages at or above offset `floor`. A hole
    /// at the end of a segment is cut off. A segment left with only a hole is removed.
    pub(super) fn unmap(&mut self, id: u32, most: u64, floor: usize, expandable: &Expandable) -> Option<UnmappedPages> {
        let entry = self.table[id as usize];
        let Entry { segment: at, next, .. } = entry;
        let (offset, size, usage) = (entry.offset(), entry.size(), entry.usage());
        let page = expandable.page;
        let end = expandable.round_down_to_page(offset + size);
        let most = expandable.round_down_to_page(usize::try_from(most).unwrap_or(usize::MAX));
        let start = offset.max(floor.min(end)).next_multiple_of(page).max(end.saturating_sub(most));
        let held = self.segments[at as usize].as_mut()?;
        if usage != Use::Free || start >= end || next != NONE && end - start < MIN_HOLE_BYTES {
            return None;
        }
        let (segment, kind, stream, address) = (Arc::clone(&held.segment), held.kind, held.stream, held.address);
        held.end.holes += end - start;
        let mut split = Split::default();
        self.remove_free(id, &mut split);
        let mut hole = id;
        if offset < start {
            hole = self.split(id, start - offset);
            self.insert_free(id, &mut split);
        }
        if end < offset + size {
            let rest = self.split(hole, end - start);
            self.insert_free(rest, &mut split);
        }
        self.table[hole as usize].set_usage(Use::Unmapped);
        let Entry { prev, next, .. } = self.table[hole as usize];
        if next != NONE && self.table[next as usize].usage() == Use::Unmapped {
            self.merge_next(hole);
        }
        if prev != NONE && self.table[prev as usize].usage() == Use::Unmapped {
            self.merge_next(prev);
            hole = prev;
        }
        self.stats.record_segment_shrink(kind, end - start);
        self.history.record(TraceAction::SegmentUnmap, address + start as u64, (end - start) as u64, stream.0);
        if self.table[hole as usize].next == NONE {
            self.remove_trailing_hole(hole, &mut split);
        }
        self.stats.record_split_change(kind, split);
        Some((segment, start..end))
    }

    /// Removes the hole at the end of a segment from the table.
    fn remove_trailing_hole(&mut self, hole: u32, split: &mut Split) {
        let Entry { segment: at, prev, .. } = self.table[hole as usize];
        let size = self.table[hole as usize].size();
        if prev == NONE {
            self.remove_segment(at); // the caller keeps the segment alive
            return;
        }
        let before = Some(prev).filter(|&id| self.table[id as usize].usage() == Use::Free);
        before.into_iter().for_each(|id| self.remove_free(id, split)); // without the hole, this block may cover its whole segment
        self.vacate(hole);
        self.table[prev as usize].next = NONE;
        before.into_iter().for_each(|id| self.insert_free(id, split));
        if let Some(held) = &mut self.segments[at as usize] {
            held.size -= size;
            held.end.holes -= size;
            held.end.hint = prev;
        }
    }

    /// Records the release of a segment in the history. For an expandable segment, records its committed ranges.
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

    /// Returns the committed ranges of a segment, between its holes.
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

    /// Records the offset up to which each expandable segment is in use.
    pub(super) fn record_segment_ends(&mut self) {
        for at in 0..self.segments.len() as u32 {
            if !self.is_expandable(at) {
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

    /// True if decay has an unused segment end to release.
    pub(super) fn has_unused_ends(&self, expandable: Option<&Expandable>) -> bool {
        let Some(expandable) = expandable else { return false };
        let held = self.segments.iter().flatten().filter(|held| held.pool == 0 && held.segment.is_reserved());
        held.map(|held| (held.size, held.end.last_used()))
            .any(|(size, used)| used.checked_next_multiple_of(expandable.page).is_some_and(|end| end < size))
    }
}
