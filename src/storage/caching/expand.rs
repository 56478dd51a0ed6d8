//! Segments that grow in place (PyTorch's `expandable_segments`), for drivers that can reserve addresses.
//!
//! Each arena has one such segment: an address range larger than the device's memory, in which only used pages are committed. A request that does not
//! fit fills a hole or extends the end, together with adjacent free bytes. Free memory is released in whole pages, which leaves a hole (addresses
//! without memory) between live blocks. When no block is left, the addresses are released too.
//!
//! A dedicated lock lets one thread at a time commit or release pages. Blocks are allocated and freed meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::block::Block;
use super::super::config::Config;
use super::super::driver::{Driver, Failure};
use super::super::segment::Segment;
use super::heap::SegmentRecord;
use super::ladder::OomRecovery;
use super::pages::{Extension, UnmappedPages};
use super::{CachingAllocator, Core, Request};
use crate::sync;
use crate::{Error, Result};

/// Addresses reserved per segment, in eighths of the device's memory (PyTorch's factor 1.125).
const RESERVED_EIGHTHS: u64 = 9;
/// Upper bound on the addresses reserved per segment, in bytes, so that many segments fit into a process.
const MAX_RESERVED_BYTES: u64 = 1 << 40;

/// State of an allocator with expandable segments.
#[derive(Debug)]
pub(super) struct Expandable {
    /// The unit, in bytes, in which memory is committed and released.
    pub(super) page: usize,
    /// Addresses to reserve for a segment, in bytes.
    bytes: usize,
    /// Locked while committing or releasing pages.
    pages: Mutex<()>,
}

impl Expandable {
    /// Checks the configuration against the driver. Returns `None` if `expandable_segments` is off.
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> Result<Option<Expandable>> {
        let fail = |reason: String| Err(Error::invalid("expandable_segments", reason));
        let page = driver.page().max(driver.alignment());
        match config.expandable_segments {
            false => Ok(None),
            true if driver.page() == 0 => fail(format!(
                "the driver of {} cannot reserve addresses: leave it False, and rely on compaction",
                driver.device()
            )),
            true if config.max_split_size < usize::MAX => {
                fail("expandable segments are always split: leave max_split_size_mb out, or this key False".to_owned())
            }
            true => {
                let bytes = (driver.capacity() / 8)
                    .saturating_mul(RESERVED_EIGHTHS)
                    .clamp(page as u64, MAX_RESERVED_BYTES) as usize;
                Ok(Some(Expandable { page, bytes: bytes.next_multiple_of(page), pages: Mutex::new(()) }))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        sync::lock(&self.pages)
    }

    pub(super) fn round_down_to_page(&self, bytes: usize) -> usize {
        bytes & !(self.page - 1)
    }
}

pub(super) enum ExpandOutcome {
    Block(Block),
    /// The limit or the device has no room.
    Full,
    /// No expandable segment can serve the request, so it needs an ordinary segment.
    NeedsOwnSegment,
}

/// How to serve a request that no free block serves.
enum ExtensionDecision {
    Extend(Extension),
    Full,
    NeedsOwnSegment,
}

impl CachingAllocator {
    /// Grows the segment of the request's arena and allocates a block from it. If `exact`, commits no more than the request needs.
    pub(super) fn expand(&self, request: &Request, exact: bool, recovery: &mut OomRecovery) -> Result<ExpandOutcome> {
        let Some(expandable) = &self.expandable else { return Ok(ExpandOutcome::NeedsOwnSegment) };
        if request.size > expandable.bytes {
            return Ok(ExpandOutcome::NeedsOwnSegment);
        }
        let _page_lock = expandable.lock();
        loop {
            let (extension, unmapped) = {
                let mut core = self.lock_with_stats();
                // The whole segment may be free, or another thread has just extended it.
                if let Some(block) = core.search_best_fit(self.number, request, true) {
                    return Ok(ExpandOutcome::Block(block));
                }
                let unmapped = if exact { Vec::new() } else { core.recycle_pages(expandable, request) };
                match core.plan_extension(expandable, request, exact) {
                    ExtensionDecision::Extend(extension) => {
                        core.bytes_being_created += extension.bytes();
                        (Ok(extension), unmapped)
                    }
                    ExtensionDecision::Full => (Err(ExpandOutcome::Full), unmapped),
                    ExtensionDecision::NeedsOwnSegment => (Err(ExpandOutcome::NeedsOwnSegment), unmapped),
                }
            };
            self.decommit(unmapped);
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
                self.lock().bytes_being_created -= bytes;
                return Ok(ExpandOutcome::NeedsOwnSegment); // no addresses left
            };
            if let Err(why) = self.commit_all(&segment, &extension) {
                self.lock().bytes_being_created -= bytes;
                return match why {
                    Failure::Other(error) => Err(error),
                    other => {
                        recovery.failure = Some(other);
                        Ok(ExpandOutcome::Full)
                    }
                };
            }
            let mut guard = self.lock_with_stats();
            let core = &mut *guard;
            core.bytes_being_created -= bytes;
            core.heap.now = self.now();
            let arena = core.heap.arena(request.pool, request.stream, request.kind);
            match &extension.segment {
                None => _ = core.heap.add_segment(segment, extension.end.len(), arena),
                Some((at, _)) if core.heap.is_segment(*at, &segment) => core.heap.extend(*at, &extension, arena),
                Some(_) => {
                    drop(guard); // the segment was released meanwhile, together with the newly committed pages
                    continue;
                }
            }
            core.growth.raise_target(core.heap.stats.reserved());
            core.decay.record_segment_created(core.heap.now);
            // Another thread may have taken the free bytes that the extension relied on; if so, try again.
            if let Some(block) = core.search_best_fit(self.number, request, true) {
                recovery.growth_message = Some(("segment extended", bytes));
                return Ok(ExpandOutcome::Block(block));
            }
        }
    }

    /// Commits all ranges of an extension, or none.
    fn commit_all(&self, segment: &Segment, extension: &Extension) -> Result<(), Failure> {
        for (done, range) in extension.ranges().enumerate() {
            if let Err(why) = self.driver.extend(segment.memory(), range.start, range.end) {
                for range in extension.ranges().take(done) {
                    // SAFETY: these pages were committed just now, and the table does not contain them yet.
                    unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
                }
                return Err(why);
            }
        }
        Ok(())
    }

    /// Locks the page state: until the guard is dropped, only this thread commits or releases pages.
    pub(super) fn lock_pages(&self) -> Option<MutexGuard<'_, ()>> {
        self.expandable.as_ref().map(Expandable::lock)
    }

    /// Releases free pages of a pool's segments, the longest runs first, while at least `keep` bytes stay reserved. Returns the bytes released.
    pub(super) fn release_pages(&self, pool: u32, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _page_lock = expandable.lock();
        let unmapped = {
            let mut core = self.lock();
            let spare = core.heap.stats.reserved().saturating_sub(keep);
            core.heap.unmap_free_pages(pool, spare, &[], expandable)
        };
        self.decommit(unmapped)
    }

    /// Like [`release_pages`](Self::release_pages), for the segment ends that were unused at all of decay's recent checks.
    pub(super) fn release_unused_ends(&self, keep: u64) -> u64 {
        let Some(expandable) = &self.expandable else { return 0 };
        let _page_lock = expandable.lock();
        let unmapped = {
            let mut core = self.lock();
            let heap = &mut core.heap;
            let segments: Vec<u32> = (0..heap.segments.len() as u32).filter(|&at| heap.is_expandable(at)).collect();
            let cut = |at: u32| {
                let held = heap.segments[at as usize].as_ref().filter(|held| held.pool == 0)?;
                let floor = held.end.last_used();
                let spare = heap.stats.reserved().saturating_sub(keep);
                let last = heap.last_block(at);
                heap.unmap(last, spare, floor, expandable)
            };
            segments.into_iter().filter_map(cut).collect()
        };
        self.decommit(unmapped)
    }

    /// Decommits pages that were removed from the table. The caller must hold the page lock. Returns the bytes released.
    fn decommit(&self, unmapped: Vec<UnmappedPages>) -> u64 {
        let decommit = |(segment, range): UnmappedPages| {
            // SAFETY: the pages are in no block, and no block can be created on them before the page lock is released.
            unsafe { self.driver.shrink(segment.memory(), range.start, range.end) };
            range.len() as u64
        };
        unmapped.into_iter().map(decommit).sum()
    }

    /// Moves the blocks of an expandable segment to its start and releases the rest. Returns false if nothing was
    /// released. A segment with holes is moved to a new segment of exactly the needed size instead.
    pub(super) fn pack_expandable(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let Some(expandable) = &self.expandable else { return Ok(false) };
        let _page_lock = expandable.lock();
        let plan = {
            let mut core = self.lock();
            let Some(at) = core.heap.number_of(segment) else { return Ok(false) };
            let Some(held) = core.heap.segments[at as usize].as_ref() else { return Ok(false) };
            if held.end.holes > 0 {
                drop(core);
                return self.repack_into_new_segment(&[segment], budget);
            }
            let (size, stream) = (held.size, held.stream);
            let Some(plan) = core.plan_compaction(&[segment], true, stream) else { return Ok(false) };
            let gain = size - plan.end().next_multiple_of(expandable.page).min(size);
            if gain == 0 || plan.bytes_moved() as u64 > *budget {
                core.cancel_plan(plan);
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
    /// Chooses where to grow for a request that no free block serves.
    fn plan_extension(&mut self, expandable: &Expandable, request: &Request, exact: bool) -> ExtensionDecision {
        if self.heap.unsplit_pools.contains(&request.pool) {
            return ExtensionDecision::NeedsOwnSegment; // each block of an unsplit pool is a segment of its own
        }
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        let of_arena = |held: &SegmentRecord| {
            held.segment.is_reserved()
                && (held.pool, held.stream, held.kind) == (request.pool, request.stream, request.kind)
        };
        let own: Vec<u32> = (0u32..)
            .zip(&self.heap.segments)
            .filter(|(_, held)| held.as_ref().is_some_and(of_arena))
            .map(|(at, _)| at)
            .collect();
        let best = own.into_iter().find_map(|at| {
            let found = self.heap.possible_extensions(at, arena, request.size, expandable);
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
            return ExtensionDecision::NeedsOwnSegment;
        }
        let held = self.heap.stats.reserved() + self.bytes_being_created;
        let (least, room) = (extension.bytes(), self.limit().saturating_sub(held));
        if least > room {
            return ExtensionDecision::Full;
        }
        if !exact && !extension.end.is_empty() {
            let Range { start, end } = extension.end;
            let more = self.heap.rules.extension(request.kind, start, end - start, held).saturating_sub(end - start);
            let more = more.min(usize::try_from(room - least).unwrap_or(usize::MAX)).min(all - end);
            extension.end = start..end + expandable.round_down_to_page(more);
        }
        ExtensionDecision::Extend(extension)
    }

    /// Removes free pages from the table, so that the request's extension does not exceed the target of reserved bytes.
    fn recycle_pages(&mut self, expandable: &Expandable, request: &Request) -> Vec<UnmappedPages> {
        if !self.heap.rules.is_adaptive() {
            return Vec::new();
        }
        let ExtensionDecision::Extend(extension) = self.plan_extension(expandable, request, true) else {
            return Vec::new();
        };
        let held = self.heap.stats.reserved() + self.bytes_being_created;
        match self.growth.bytes_to_release(held, extension.bytes()) {
            0 => Vec::new(),
            excess => {
                let excess = excess.next_multiple_of(expandable.page as u64);
                let unmapped = self.heap.unmap_free_pages(0, excess, &extension.spared, expandable);
                unmapped.first().into_iter().for_each(|(_, range)| self.growth.record_recycled(range.len()));
                unmapped
            }
        }
    }
}
