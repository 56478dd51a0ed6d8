//! Segments that grow in place (PyTorch's `expandable_segments`), where the driver can reserve addresses.
//!
//! An arena has one such segment: a run of addresses longer than the device's memory, committed where blocks need it. What
//! does not fit fills a hole or extends the end, where a free block there counts towards the request. What is free goes
//! back by whole pages, at the end or between live blocks, and leaves a hole of addresses without memory; when nothing is
//! left the addresses go too.
//!
//! Memory is committed and given back by one thread at a time, who holds a lock for that alone. Blocks come and go
//! meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::block::Block;
use super::super::config::Config;
use super::super::driver::{Driver, Failure};
use super::super::segment::Segment;
use super::heap::Held;
use super::ladder::Climb;
use super::pages::{Cut, Extension};
use super::{CachingAllocator, Core, Request};
use crate::{Error, Result};

/// Addresses for each segment: this many eighths of the device's memory (PyTorch's 1.125), and never more than `MOST`,
/// which leaves room for many in a process.
const EIGHTHS: u64 = 9;
const MOST: u64 = 1 << 40;

/// What an allocator needs whose segments grow.
#[derive(Debug)]
pub(super) struct Expandable {
    /// Memory is committed and given back in multiples of this.
    pub(super) page: usize,
    /// Bytes to reserve for a segment.
    bytes: usize,
    /// Held by who commits memory or gives it back.
    pages: Mutex<()>,
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
                Ok(Some(Expandable { page, bytes: bytes.next_multiple_of(page), pages: Mutex::new(()) }))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn down(&self, bytes: usize) -> usize {
        bytes & !(self.page - 1)
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

/// What to do about a request that nothing free serves.
enum Plan {
    Extend(Extension),
    Full,
    Elsewhere,
}

impl CachingAllocator {
    /// Grows the segment of the request's arena and hands out a block of it. An `exact` extension is no larger than the
    /// request needs.
    pub(super) fn expand(&self, request: &Request, exact: bool, climb: &mut Climb) -> Result<Grown> {
        let Some(expandable) = &self.expandable else { return Ok(Grown::Elsewhere) };
        if request.size > expandable.bytes {
            return Ok(Grown::Elsewhere);
        }
        let _alone = expandable.lock();
        loop {
            let (extension, cuts) = {
                let mut core = self.lock_with_stats();
                // The whole segment may be free, or somebody else has just extended it.
                if let Some(block) = core.search_all(self.number, request, true) {
                    return Ok(Grown::Block(block));
                }
                let cuts = if exact { Vec::new() } else { core.recycle_pages(expandable, request) };
                match core.plan_extension(expandable, request, exact) {
                    Plan::Extend(extension) => {
                        core.making += extension.bytes();
                        (Ok(extension), cuts)
                    }
                    Plan::Full => (Err(Grown::Full), cuts),
                    Plan::Elsewhere => (Err(Grown::Elsewhere), cuts),
                }
            };
            self.decommit(cuts);
            let extension = match extension {
                Ok(extension) => extension,
                Err(grown) => return Ok(grown),
            };
            let bytes = extension.bytes();
            let segment = extension.segment.as_ref().map(|(_, segment)| Arc::clone(segment)).or_else(|| {
                let memory = self.driver.reserve(expandable.bytes)?;
                Some(Arc::new(Segment::reserved(memory, expandable.bytes)))
            });
            let Some(segment) = segment else {
                self.lock().making -= bytes;
                return Ok(Grown::Elsewhere); // no addresses left
            };
            if let Err(why) = self.commit_all(&segment, &extension) {
                self.lock().making -= bytes;
                return match why {
                    Failure::Other(error) => Err(error),
                    other => {
                        climb.failure = Some(other);
                        Ok(Grown::Full)
                    }
                };
            }
            let mut guard = self.lock_with_stats();
            let core = &mut *guard;
            core.making -= bytes;
            core.heap.now = self.now();
            let arena = core.heap.arena(request.pool, request.stream, request.kind);
            match &extension.segment {
                None => _ = core.heap.add_segment(segment, extension.end.len(), arena),
                Some((at, _)) if core.heap.is_segment(*at, &segment) => core.heap.extend(*at, &extension, arena),
                Some(_) => {
                    drop(guard); // all of it was given back meanwhile: what was committed goes with it
                    continue;
                }
            }
            core.growth.raise(core.heap.stats.reserved());
            core.decay.regrown(core.heap.now);
            // Somebody may have taken from what was free at the end before: then again.
            if let Some(block) = core.search_all(self.number, request, true) {
                climb.made = Some(("segment extended", bytes));
                return Ok(Grown::Block(block));
            }
        }
    }

    /// Commits all of an extension or nothing.
    fn commit_all(&self, segment: &Segment, extension: &Extension) -> Result<(), Failure> {
        for (done, range) in extension.ranges().enumerate() {
            if let Err(why) = self.driver.extend(segment.memory(), range.start, range.end) {
                for range in extension.ranges().take(done) {
                    // SAFETY: committed just now; the table does not have it yet.
                    unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
                }
                return Err(why);
            }
        }
        Ok(())
    }

    /// Keeps what is committed as it is, but for what this thread does.
    pub(super) fn hold_pages(&self) -> Option<MutexGuard<'_, ()>> {
        self.expandable.as_ref().map(Expandable::lock)
    }

    /// Gives free pages of a pool's segments back, the longest runs first, as long as at least `keep` bytes stay held.
    /// Says how many bytes went back.
    pub(super) fn release_pages(&self, pool: u32, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _alone = expandable.lock();
        let cuts = {
            let mut core = self.lock();
            let spare = core.heap.stats.reserved().saturating_sub(keep);
            core.heap.unmap_free(pool, spare, &[], expandable)
        };
        self.decommit(cuts)
    }

    /// As [`release_pages`](Self::release_pages), of the ends that have been unused at all of decay's last looks.
    pub(super) fn release_old_ends(&self, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _alone = expandable.lock();
        let cuts = {
            let mut core = self.lock();
            let heap = &mut core.heap;
            let segments: Vec<u32> = (0..heap.segments.len() as u32).filter(|&at| heap.grows(at)).collect();
            let cut = |at: u32| {
                let held = heap.segments[at as usize].as_ref().filter(|held| held.pool == 0)?;
                let floor = held.end.last_used();
                let spare = heap.stats.reserved().saturating_sub(keep);
                let last = heap.last_block(at);
                heap.unmap(last, spare, floor, expandable)
            };
            segments.into_iter().filter_map(cut).collect()
        };
        self.decommit(cuts)
    }

    /// Whoever cut these off still holds the pages.
    fn decommit(&self, cuts: Vec<Cut>) -> u64 {
        let decommit = |(segment, range): Cut| {
            // SAFETY: in no block, and in none that is made before the pages are let go.
            unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
            range.len() as u64
        };
        cuts.into_iter().map(decommit).sum()
    }

    /// Moves the blocks of a segment that grows to its start, and gives what is then free back; false where that is
    /// nothing. Where there are holes the blocks move to a segment of just their size.
    pub(super) fn pack(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let Some(expandable) = &self.expandable else { return Ok(false) };
        let _alone = expandable.lock();
        let plan = {
            let mut core = self.lock();
            let Some(at) = core.heap.number_of(segment) else { return Ok(false) };
            let Some(held) = core.heap.segments[at as usize].as_ref() else { return Ok(false) };
            if held.end.holes > 0 {
                drop(core);
                return self.repack_apart(&[segment], budget);
            }
            let (size, stream) = (held.size, held.stream);
            let Some(plan) = core.plan(&[segment], true, stream) else { return Ok(false) };
            let gain = size - plan.end().next_multiple_of(expandable.page).min(size);
            if gain == 0 || plan.bytes_moved() as u64 > *budget {
                core.abandon(plan);
                return Ok(false);
            }
            plan
        };
        *budget -= plan.bytes_moved() as u64;
        self.slide_down(plan)?;
        let cut = {
            let mut core = self.lock();
            let Some(at) = core.heap.number_of(segment) else { return Ok(true) };
            let last = core.heap.last_block(at);
            core.heap.unmap(last, u64::MAX, 0, expandable)
        };
        Ok(self.decommit(cut.into_iter().collect()) > 0)
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
        let best = own.into_iter().find_map(|at| {
            let found = self.heap.runs(at, arena, request.size, expandable);
            found.into_iter().min_by_key(Extension::bytes)
        });
        let new = || Extension {
            segment: None,
            holes: Vec::new(),
            end: 0..request.size.next_multiple_of(expandable.page),
            spared: Vec::new(),
        };
        let mut extension = best.unwrap_or_else(new);
        let all = extension.segment.as_ref().map_or(expandable.bytes, |(_, segment)| segment.bytes());
        if extension.end.end > all {
            return Plan::Elsewhere;
        }
        let held = self.heap.stats.reserved() + self.making;
        let (least, room) = (extension.bytes(), self.limit().saturating_sub(held));
        if least > room {
            return Plan::Full;
        }
        if !exact && !extension.end.is_empty() {
            let Range { start, end } = extension.end;
            let more = self.heap.rules.extension(request.kind, start, end - start, held).saturating_sub(end - start);
            let more = more.min(usize::try_from(room - least).unwrap_or(usize::MAX)).min(all - end);
            extension.end = start..end + expandable.down(more);
        }
        Plan::Extend(extension)
    }

    /// Takes free pages out of the table, so that extending for the request does not make more be held than the target.
    fn recycle_pages(&mut self, expandable: &Expandable, request: &Request) -> Vec<Cut> {
        if !self.heap.rules.is_adaptive() {
            return Vec::new();
        }
        let Plan::Extend(extension) = self.plan_extension(expandable, request, true) else { return Vec::new() };
        let held = self.heap.stats.reserved() + self.making;
        match self.growth.excess(held, extension.bytes()) {
            0 => Vec::new(),
            excess => {
                let excess = excess.next_multiple_of(expandable.page as u64);
                let cuts = self.heap.unmap_free(0, excess, &extension.spared, expandable);
                cuts.first().into_iter().for_each(|(_, range)| self.growth.note_recycled(range.len()));
                cuts
            }
        }
    }
}
