//! Segments that grow in place (PyTorch's `expandable_segments`), where the driver can reserve addresses.
//!
//! An arena has one such segment: a run of addresses longer than the device's memory, committed from its start as far as
//! blocks need it. What does not fit extends its end, where a free block there counts towards the request, so that growing
//! leaves no holes between segments; what is free at its end goes back, and when nothing is left all of it. Only the end
//! goes back: a free run between live blocks waits for them to move together.
//!
//! The end is moved by one thread at a time, who holds a lock for that alone. Blocks come and go meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::allocator::{Block, Segment};
use super::super::config::Config;
use super::super::driver::{Driver, Failure};
use super::super::history::TraceAction;
use super::heap::{Entry, Heap, Held, NONE, Search, Use};
use super::sync::lock;
use super::{CachingAllocator, Core, Request, Split};
use crate::{Error, Result};

/// Addresses for each segment: this many eighths of the device's memory (PyTorch's 1.125), and never more than `MOST`,
/// which leaves room for many in a process.
const EIGHTHS: u64 = 9;
const MOST: u64 = 1 << 44;
/// Past ends that are remembered: as many as decay's looks at the clock span an interval.
const LOOKS: usize = 5;

/// What an allocator needs whose segments grow.
#[derive(Debug)]
pub(super) struct Expandable {
    /// Memory is committed and given back in multiples of this.
    page: usize,
    /// Bytes to reserve for a segment.
    bytes: usize,
    /// Held by who moves the end of a segment.
    ends: Mutex<()>,
}

impl Expandable {
    /// None where the key is off.
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> Result<Option<Expandable>> {
        let fail = |reason: String| Err(Error::invalid("expandable_segments", reason));
        let page = driver.page().max(driver.alignment());
        match config.expandable_segments {
            false => Ok(None),
            true if driver.page() == 0 => fail(format!(
                "the driver of {} cannot reserve addresses: leave it False, and compaction joins what is free",
                driver.device()
            )),
            true if config.max_split_size < usize::MAX => {
                fail("segments that grow are always split: leave max_split_size_mb out, or this one False".to_owned())
            }
            true => {
                let bytes = (driver.capacity() / 8).saturating_mul(EIGHTHS).clamp(page as u64, MOST) as usize;
                Ok(Some(Expandable { page, bytes: bytes.next_multiple_of(page), ends: Mutex::new(()) }))
            }
        }
    }

    fn down(&self, bytes: usize) -> usize {
        bytes & !(self.page - 1)
    }
}

/// What is known of the end of a segment that grows.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// The last block, or one of its predecessors: where to begin looking for it.
    hint: u32,
    /// Up to where blocks were in use at decay's last looks; everything, for looks from before it last grew.
    used: [usize; LOOKS],
}

impl Default for End {
    fn default() -> End {
        End { hint: NONE, used: [usize::MAX; LOOKS] }
    }
}

/// What became of a request for more.
pub(super) enum Grown {
    Block(Block),
    /// The limit or the device has no room.
    Full,
    /// No segment that grows can hold it: it needs one of its own.
    Elsewhere,
}

/// An end about to be moved up, with the segment's number in the table; a new segment has none.
struct Extension {
    segment: Option<(u32, Arc<Segment>)>,
    range: Range<usize>,
}

enum Plan {
    Extend(Extension),
    Full,
    Elsewhere,
}

/// A part that was cut off a segment's end, to be decommitted.
type Cut = (Arc<Segment>, Range<usize>);

impl CachingAllocator {
    /// Grows the segment of the request's arena and hands out a block of it. An `exact` extension is no larger than the
    /// request needs.
    pub(super) fn expand(&self, request: &Request, exact: bool, failure: &mut Option<Failure>) -> Result<Grown> {
        let Some(expandable) = &self.expandable else { return Ok(Grown::Elsewhere) };
        let _alone = lock(&expandable.ends);
        loop {
            let Extension { segment, range } = {
                let mut core = self.lock_folded();
                // The whole segment may be free, or somebody else has just extended it.
                if let Some(block) = core.search(self.number, request, Search::Thorough, true) {
                    return Ok(Grown::Block(block));
                }
                match core.plan_extension(expandable, request, exact) {
                    Plan::Extend(extension) => {
                        core.making += extension.range.len() as u64;
                        extension
                    }
                    Plan::Full => return Ok(Grown::Full),
                    Plan::Elsewhere => return Ok(Grown::Elsewhere),
                }
            };
            let old = segment.as_ref().map(|(at, _)| *at);
            let segment = segment.map(|(_, segment)| segment).or_else(|| {
                let memory = self.driver.reserve(expandable.bytes)?;
                Some(Arc::new(Segment::reserved(memory, expandable.bytes)))
            });
            let Some(segment) = segment else {
                self.lock().making -= range.len() as u64;
                return Ok(Grown::Elsewhere); // no addresses left
            };
            if let Err(why) = self.driver.extend(segment.memory(), range.start, range.end) {
                self.lock().making -= range.len() as u64;
                return match why {
                    Failure::Other(error) => Err(error),
                    other => {
                        *failure = Some(other);
                        Ok(Grown::Full)
                    }
                };
            }
            let mut guard = self.lock_folded();
            let core = &mut *guard;
            core.making -= range.len() as u64;
            core.heap.now = self.now();
            let arena = core.heap.arena(request.pool, request.stream, request.kind);
            match old {
                None => _ = core.heap.add_segment(segment, range.len(), arena),
                Some(at) if core.heap.is_segment(at, &segment) => core.heap.extend_end(at, range.len(), arena),
                Some(_) => {
                    drop(guard); // all of it was given back meanwhile: what was committed goes with it
                    continue;
                }
            }
            core.growth.raise(core.heap.stats.reserved_bytes.current);
            core.decay.regrown(core.heap.now);
            // Somebody may have taken from what was free at the end before: then again.
            if let Some(block) = core.search(self.number, request, Search::Thorough, true) {
                drop(guard);
                tracing::debug!(device = %self.driver.device(), bytes = range.len(), "segment extended");
                return Ok(Grown::Block(block));
            }
        }
    }

    /// Keeps the ends of all segments where they are, but for what this thread does.
    pub(super) fn hold_ends(&self) -> Option<MutexGuard<'_, ()>> {
        self.expandable.as_ref().map(|expandable| lock(&expandable.ends))
    }

    /// Gives what is free at the ends of a pool's segments back, the longest first, as long as at least `keep` bytes stay
    /// held. Says how many bytes went back.
    pub(super) fn release_ends(&self, pool: u32, keep: u64) -> u64 {
        self.release_ends_down_to(pool, keep, |_| 0)
    }

    /// As [`release_ends`](Self::release_ends), of what has been unused at all of decay's last looks.
    pub(super) fn release_old_ends(&self, keep: u64) -> u64 {
        self.release_ends_down_to(0, keep, End::last_used)
    }

    fn release_ends_down_to(&self, pool: u32, keep: u64, floor: impl Fn(&End) -> usize) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _alone = lock(&expandable.ends);
        let cuts = {
            let mut core = self.lock();
            let mut ends = core.heap.free_ends(pool);
            ends.sort_unstable_by_key(|&(at, bytes)| (std::cmp::Reverse(bytes), at));
            let cut = |(at, _)| {
                let spare = core.heap.stats.reserved_bytes.current.saturating_sub(keep);
                let floor = core.heap.end(at).map_or(0, &floor);
                core.heap.cut_end(at, usize::try_from(spare).unwrap_or(usize::MAX), floor, expandable)
            };
            ends.into_iter().filter_map(cut).collect()
        };
        self.decommit(cuts)
    }

    /// What is cut off is in no block any more, and whoever cut it still holds the ends.
    fn decommit(&self, cuts: Vec<Cut>) -> u64 {
        let decommit = |(segment, range): Cut| {
            // SAFETY: in no block, and in none that is made before the ends are let go.
            unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
            range.len() as u64
        };
        cuts.into_iter().map(decommit).sum()
    }

    /// Moves the blocks of a segment that grows to its start, and gives what is then free at its end back; false where
    /// that is nothing.
    pub(super) fn pack(&self, segment: u32, budget: &mut u64) -> Result<bool> {
        let Some(expandable) = &self.expandable else { return Ok(false) };
        let _alone = lock(&expandable.ends);
        let plan = {
            let mut core = self.lock();
            let Some(held) = core.heap.segments[segment as usize].as_ref() else { return Ok(false) };
            let (size, stream) = (held.size, held.stream);
            let Some(plan) = core.plan(vec![segment], true, stream) else { return Ok(false) };
            let gain = size - plan.end().next_multiple_of(expandable.page).min(size);
            if gain == 0 || plan.bytes_moved() as u64 > *budget {
                core.abandon(plan);
                return Ok(false);
            }
            plan
        };
        *budget -= plan.bytes_moved() as u64;
        self.slide_down(plan)?;
        let cut = self.lock().heap.cut_end(segment, usize::MAX, 0, expandable);
        Ok(self.decommit(cut.into_iter().collect()) > 0)
    }
}

impl Segment {
    /// What the history calls it when it is made.
    pub(super) fn made(&self) -> TraceAction {
        if self.is_reserved() { TraceAction::SegmentMap } else { TraceAction::SegmentAlloc }
    }

    /// What the history calls it when it goes back.
    pub(super) fn released(&self) -> TraceAction {
        if self.is_reserved() { TraceAction::SegmentUnmap } else { TraceAction::SegmentFree }
    }
}

impl End {
    /// Up to where the segment was in use at any of the last looks.
    fn last_used(&self) -> usize {
        self.used.into_iter().max().unwrap_or(usize::MAX)
    }
}

impl Core {
    /// Where to grow for the request, which nothing free serves.
    fn plan_extension(&mut self, expandable: &Expandable, request: &Request, exact: bool) -> Plan {
        if self.heap.unsplit_pools.contains(&request.pool) {
            return Plan::Elsewhere; // each of its blocks is a segment
        }
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let of_arena = |held: &Held| {
            held.segment.is_reserved()
                && (held.pool, held.stream, held.kind) == (request.pool, request.stream, request.kind)
        };
        let own: Vec<u32> = (0u32..)
            .zip(&self.heap.segments)
            .filter(|(_, held)| held.as_ref().is_some_and(of_arena))
            .map(|(at, _)| at)
            .collect();
        let (mut segment, mut from, mut least) = (None, 0, request.size);
        let mut reserved = expandable.bytes;
        for at in own {
            let last = self.heap.last_block(at);
            let Entry { usage, arena: owner, size, .. } = self.heap.table[last as usize];
            let Some(held) = &self.heap.segments[at as usize] else { continue };
            let free = if usage == Use::Free && owner == arena { size } else { 0 };
            let need = request.size.saturating_sub(free).max(1).next_multiple_of(expandable.page);
            if need <= held.segment.bytes() - held.size {
                (segment, from, least) = (Some((at, Arc::clone(&held.segment))), held.size, need);
                reserved = held.segment.bytes();
                break;
            }
        }
        let least = least.next_multiple_of(expandable.page);
        if least > reserved - from {
            return Plan::Elsewhere;
        }
        let held = self.heap.stats.reserved_bytes.current + self.making;
        let room = expandable.down(usize::try_from(self.limit().saturating_sub(held)).unwrap_or(usize::MAX));
        if least > room {
            return Plan::Full;
        }
        let usual = if exact { least } else { self.heap.rules.extension(request.kind, from, least, held) };
        let bytes = expandable.down(usual).min(room).min(reserved - from).max(least);
        Plan::Extend(Extension { segment, range: from..from + bytes })
    }
}

impl Heap {
    /// Whether the table still has this segment at its number.
    fn is_segment(&self, at: u32, segment: &Arc<Segment>) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| Arc::ptr_eq(&held.segment, segment))
    }

    pub(super) fn grows(&self, at: u32) -> bool {
        self.segments[at as usize].as_ref().is_some_and(|held| held.segment.is_reserved())
    }

    fn end(&self, at: u32) -> Option<&End> {
        self.segments[at as usize].as_ref().map(|held| &held.end)
    }

    /// The last block of a segment.
    fn last_block(&mut self, at: u32) -> u32 {
        let Some(held) = &self.segments[at as usize] else { return NONE };
        let is_of = |id: &u32| {
            let hinted = self.table.get(*id as usize);
            hinted.is_some_and(|entry| entry.segment == at && entry.usage != Use::Vacant)
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

    /// Adds bytes that were committed to the end of a segment, as free ones of the arena.
    fn extend_end(&mut self, at: u32, bytes: usize, arena: u32) {
        let last = self.last_block(at);
        let Some(held) = &mut self.segments[at as usize] else { return };
        let (offset, kind, stream) = (held.size, held.kind, held.stream);
        let address = held.address + offset as u64;
        held.size += bytes;
        held.end = End { hint: held.end.hint, ..End::default() };
        let mut split = Split::default();
        let entry = self.table[last as usize];
        if entry.usage == Use::Free {
            self.take_free(last, &mut split);
        }
        if entry.usage == Use::Free && entry.arena == arena {
            self.table[last as usize].size += bytes;
        } else {
            let made = Entry { segment: at, arena, prev: last, offset, size: bytes, usage: Use::Free, ..Entry::VACANT };
            let made = self.insert(made);
            self.table[last as usize].next = made;
            self.put_free(made, &mut split);
        }
        if entry.usage == Use::Free {
            self.put_free(last, &mut split);
        }
        self.stats.split_changed(kind, split);
        self.stats.segment_extended(kind, bytes);
        self.history.record(TraceAction::SegmentMap, address, bytes as u64, stream.0);
    }

    /// Segments of a pool that end in free bytes, and how many.
    fn free_ends(&mut self, pool: u32) -> Vec<(u32, usize)> {
        let all = 0..self.segments.len() as u32;
        let of_pool = |heap: &Heap, at| heap.segments[at as usize].as_ref().is_some_and(|held| held.pool == pool);
        let growing: Vec<u32> = all.filter(|&at| self.grows(at) && of_pool(self, at)).collect();
        let free = |at| {
            let last = self.last_block(at);
            let entry = self.table[last as usize];
            (entry.usage == Use::Free).then_some((at, entry.size))
        };
        growing.into_iter().filter_map(free).collect()
    }

    /// Takes up to `most` bytes, whole pages, that are free at the end of a segment and not below `floor` out of the
    /// table: they are the caller's to decommit. A segment of which nothing is left goes as a whole.
    fn cut_end(&mut self, at: u32, most: usize, floor: usize, expandable: &Expandable) -> Option<Cut> {
        let held = self.segments[at as usize].as_ref()?;
        let (segment, size) = (Arc::clone(&held.segment), held.size);
        let (kind, stream, address) = (held.kind, held.stream, held.address);
        let mut last = self.last_block(at);
        let mut free = size;
        let mut parts = last;
        while parts != NONE && self.table[parts as usize].usage == Use::Free {
            free = self.table[parts as usize].offset; // several streams' free blocks are not merged
            parts = self.table[parts as usize].prev;
        }
        let end = free.max(floor.min(size)).next_multiple_of(expandable.page);
        let end = end.max(size - expandable.down(most.min(size)));
        if end >= size {
            return None;
        }
        if end == 0 {
            self.remove_segment(at);
            return Some((segment, 0..size));
        }
        let mut split = Split::default();
        loop {
            let Entry { offset, prev, .. } = self.table[last as usize];
            self.take_free(last, &mut split);
            if offset < end {
                self.table[last as usize].size = end - offset;
                self.put_free(last, &mut split);
                break;
            }
            // Alone it may be all of its segment.
            let before = Some(prev).filter(|&id| self.table[id as usize].usage == Use::Free);
            before.into_iter().for_each(|id| self.take_free(id, &mut split));
            self.vacate(last);
            self.table[prev as usize].next = NONE;
            before.into_iter().for_each(|id| self.put_free(id, &mut split));
            last = prev;
            if offset == end {
                break;
            }
        }
        if let Some(held) = &mut self.segments[at as usize] {
            held.size = end;
            held.end.hint = last;
        }
        self.stats.split_changed(kind, split);
        self.stats.segment_shrunk(kind, size - end);
        self.history.record(TraceAction::SegmentUnmap, address + end as u64, (size - end) as u64, stream.0);
        Some((segment, end..size))
    }

    /// Notes up to where segments are in use.
    pub(super) fn look_at_ends(&mut self) {
        for at in 0..self.segments.len() as u32 {
            if !self.grows(at) {
                continue;
            }
            let last = self.last_block(at);
            let Entry { usage, offset, size, .. } = self.table[last as usize];
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
