//! Blocks kept on the host: how idle blocks get there before an allocation fails, and how blocks come back.
//!
//! A block on the host has its own segment, in a pool that no request searches. The block comes back when it is next used.
//!
//! A block moves to the host for one of two reasons. Compaction leaves a block there if another thread took the memory that was freed
//! for the block. Statistics count such a block as reserved, and it also comes back when the cache is emptied. Or the configuration
//! says `spill`: before an allocation fails, idle blocks of the default pool make room, least recently used first. A block is
//! idle if no thread holds its location. The bytes of these blocks are not reserved any more. Each gets memory to come back as any
//! request does, from the bins or by out-of-memory recovery, which may move other blocks to the host.
//!
//! No byte is lost: the block's slot is write-locked from the choice until the table is updated. All work on the device is waited for
//! before the copy, and only after the copy has succeeded does the table change. Until then any failure leaves the block in its place.

use std::cmp::Reverse;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::super::allocator::Allocator;
use super::super::block::{Block, Slot};
use super::super::config::Spill;
use super::super::driver::host_copy::HostCopy;
use super::super::driver::{Failure, MemoryKind};
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::compact::{Move, Stranded, add_detail};
use super::entry::{NONE, SPILLED_POOL, Use};
use super::events::AfterMove;
use super::heap::Request;
use super::ladder::OomRecovery;
use super::policy::{MAX_RETURN_TRIES, MAX_TRIES, RETRY_AFTER};
use super::{CachingAllocator, Core};
use crate::device::{capture, log};
use crate::{Device, Error, Result};

/// Smaller blocks move to the host only if there are no others.
const MIN_SPILLED_BYTES: usize = 1 << 20;

/// A block that might move to the host, with the lock that keeps it in place.
struct Candidate<'a> {
    block: Move<'a>,
    /// Number of requests since the last use.
    age: u32,
}

/// A block that is about to come back. While the block waits for its memory, the memory is counted as allocated, and the block is not.
struct Return {
    id: u32,
    request: Request,
    /// True if the statistics counted the block on the host as reserved.
    was_counted: bool,
}

impl CachingAllocator {
    // Moving blocks to the host.

    /// Makes room for a request by moving idle blocks to the host: the step of out-of-memory recovery after compaction.
    pub(super) fn spill_for(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        let is_possible = |core: &Core| request.size as u64 <= core.limits.limit().min(self.rules.capacity);
        if !self.spills()
            || request.pool != 0
            || capture::is_capturing(self.driver.device())
            || !is_possible(&self.lock())
        {
            return Ok(None);
        }
        // A block that returns keeps its kind.
        let kinds = [request.kind, if recovery.is_return { request.kind } else { request.kind.opposite() }];
        let search = || {
            let mut core = self.lock_with_stats();
            kinds.into_iter().find_map(|kind| core.search_best_fit(self.number, &Request { kind, ..*request }, true))
        };
        let _compaction_lock = self.lock_compaction();
        for attempt in 0.. {
            self.wait_for_streams(request)?;
            if let Some(block) = search() {
                return Ok(Some(block)); // another thread has freed enough memory
            }
            let victims = self.drain_caches().choose_victims(request, recovery.is_return, attempt);
            if victims.is_empty() || !self.move_to_host(victims, request)? {
                return Ok(None);
            }
            if let Some(block) = search() {
                return Ok(Some(block));
            }
            let unused = self.lock().heap.remove_unused(0);
            drop(unused);
            self.release_pages(0, 0);
            if let Some(block) = self.grow(request, true, recovery)? {
                return Ok(Some(block));
            }
            if self.rules.config.compaction
                && let Some(block) = self.compact_locked(request, recovery)?
            {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// True if the configuration allows blocks to move to the host.
    pub(super) fn spills(&self) -> bool {
        self.rules.config.spill != Spill::Off
    }

    /// Moves blocks to the host. Returns false, with every block in its place, if the host has no room.
    fn move_to_host(&self, victims: Vec<Move<'_>>, request: &Request) -> Result<bool> {
        let copy = |m: &Move<'_>| {
            let at = (m.from.0.memory(), m.from.1);
            self.retry(MAX_TRIES, || {
                let mut copy = HostCopy::allocate(self.rules.config.spill, &*self.driver, at.0, m.size)?;
                // SAFETY: the block is write-locked, and all work on the device was waited for after it was locked.
                unsafe { copy.fill(&*self.driver, at) }.map(|()| copy)
            })
        };
        let copied = self.wait_for_all().and_then(|()| victims.iter().map(copy).collect::<Result<Vec<_>>>());
        match copied {
            Ok(copies) => {
                self.has_cross_stream_use.store(true, Relaxed);
                let mut core = self.lock_with_stats();
                for (block, copy) in victims.into_iter().zip(copies) {
                    let gap = core.spill(block, Arc::new(Segment::spilled(copy)));
                    core.heap.unfreeze_for(gap, request.stream); // the device is idle, so any stream may use the bytes
                }
                Ok(true)
            }
            Err(error) => {
                self.lock().unlock_moved_blocks(victims, []);
                match error {
                    Error::OutOfMemory { device: Device::Cpu, detail, .. } => {
                        log::emit(move || tracing::warn!(detail, "no block moves to the host"));
                        Ok(false)
                    }
                    other => Err(add_detail(other, "spilling")),
                }
            }
        }
    }

    /// Moves blocks whose bytes are only on the host into host segments. The caller must call
    /// [`count_spilled`](Core::count_spilled) for the blocks once the statistics no longer count the old memory.
    pub(super) fn keep_on_host<'a>(
        &self,
        core: &mut Core,
        stranded: impl IntoIterator<Item = Stranded<'a>>,
    ) -> Vec<u32> {
        let keep = |Stranded { block, bytes }: Stranded<'a>| {
            self.has_cross_stream_use.store(true, Relaxed);
            (block.id, core.spill(block, Arc::new(Segment::spilled(bytes)))).0
        };
        stranded.into_iter().map(keep).collect()
    }

    // Bringing blocks back.

    /// Copies a block from the host back to the device. No thread may hold the block's address.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device has no memory for the block, and errors that the driver reports while
    /// writing. The block then stays readable on the host.
    #[cold]
    pub(in crate::storage) fn restore(&self, block: &Block) -> Result<()> {
        if block.owner != self.number {
            return Err(Error::invalid("restore", format!("{block:?} is not of {self:?}")));
        }
        let begin = || {
            let begun = self.lock_with_stats().begin_return(block.id());
            begun.map_err(|InUse(size)| self.busy(size))
        };
        let Some(wanted) = self.retry(MAX_RETURN_TRIES, begin)? else { return Ok(()) };
        let place = match self.spills() {
            true => self.allocate_for_return(&wanted.request),
            false => self.allocate_without_recovery(&wanted.request).or_else(|error| {
                if !matches!(error, Error::OutOfMemory { .. }) {
                    return Err(error);
                }
                let unused = self.lock().heap.remove_unused(0);
                drop(unused);
                self.release_pages(0, 0);
                self.allocate_without_recovery(&wanted.request)
            }),
        };
        self.finish_return(&wanted, place, |place| {
            for _ in 0..MAX_RETURN_TRIES {
                let _compaction_lock = self.lock_compaction();
                match self.write_back(wanted.id, place)? {
                    Some(done) => return Ok(done),
                    None => drop(_compaction_lock),
                }
                std::thread::sleep(RETRY_AFTER);
            }
            Err(self.busy(wanted.request.size))
        })
    }

    /// Copies every block that compaction left on the host back to the device, if the device has memory for it, and frees the host
    /// copies of dropped tensors. The compaction lock must be held.
    pub(super) fn restore_all(&self) {
        self.free_spilled();
        let stranded = self.lock().stranded();
        for id in stranded {
            let Ok(Some(wanted)) = self.lock_with_stats().begin_return(id) else { continue };
            let place = self.allocate_without_recovery(&wanted.request);
            let returned = self.finish_return(&wanted, place, |place| {
                let busy = || self.busy(wanted.request.size);
                self.retry(MAX_TRIES, || self.write_back(id, place)?.ok_or_else(busy))
            });
            if let Err(error) = returned {
                // The driver failed for another reason than lack of memory, so the next block would fail as well.
                let stop = !matches!(error, Error::OutOfMemory { .. });
                let device = self.driver.device();
                log::emit(move || tracing::warn!(%device, %error, "a block stays on the host"));
                if stop {
                    break;
                }
            }
        }
    }

    /// Frees the host copies of dropped tensors.
    pub(super) fn free_spilled(&self) {
        let unused: Vec<_> = {
            let heap = &mut self.lock_with_stats().heap;
            heap.whole_blocks(SPILLED_POOL).into_iter().map(|id| heap.remove_whole(id)).collect()
        };
        drop(unused);
    }

    fn busy(&self, size: usize) -> Error {
        Error::OutOfMemory {
            device: self.driver.device(),
            requested: size,
            detail: "a tensor kept on the host is being read, and cannot return to the device now".into(),
        }
    }

    /// Allocates a block for a return as any request does, so that other blocks may move to the host.
    fn allocate_for_return(&self, request: &Request) -> Result<Block> {
        let found = self.lock_with_stats().search_best_fit(self.number, request, true);
        found.map_or_else(|| self.recover_memory_for_return(request), Ok).map_err(|error| match error {
            Error::OutOfMemory { requested, detail, .. } => self.no_memory_for_return(requested, &detail),
            other => other,
        })
    }

    /// Allocates a block for a return from the bins, or creates a segment for the block, which replaces the counted host segment.
    fn allocate_without_recovery(&self, request: &Request) -> Result<Block> {
        if let Some(block) = self.lock_with_stats().search_best_fit(self.number, request, true) {
            return Ok(block);
        }
        let memory = self.create_memory(request.size).map_err(|why| match why {
            Failure::Other(error) => error,
            full => self.no_memory_for_return(request.size, &full.to_string()),
        })?;
        let mut core = self.lock_with_stats();
        let arena = core.heap.arena(0, request.stream, request.kind);
        let id = core.heap.add_segment(Arc::new(Segment::new(memory, request.size)), request.size, arena);
        let id = core.heap.allocate_from(id, request.size, request.bytes);
        Ok(core.create_handle(self.number, id, request.bytes))
    }

    fn no_memory_for_return(&self, size: usize, why: &str) -> Error {
        Error::OutOfMemory {
            device: self.driver.device(),
            requested: size,
            detail: format!(
                "a tensor of this size was moved to the host to make room: it stays readable, and returns when the \
                 device has memory for it ({why})"
            ),
        }
    }

    /// Lets `write` copy the block to its new place. Frees the place and counts the block on the host as before if that fails or is not needed.
    fn finish_return(
        &self,
        wanted: &Return,
        place: Result<Block>,
        write: impl FnOnce(&Block) -> Result<bool>,
    ) -> Result<()> {
        let returned = place.and_then(|place| {
            let returned = write(&place);
            if !matches!(returned, Ok(true)) {
                self.deallocate(place);
            }
            returned
        });
        if !matches!(returned, Ok(true)) {
            self.lock_with_stats().cancel_return(wanted);
        }
        returned.map(drop)
    }

    /// Copies a block from the host to the bytes of another live block, and gives it that block's range. Returns false if the block is
    /// not on the host any more, and `None` if another thread reads it there. The compaction lock must be held.
    fn write_back(&self, id: u32, place: &Block) -> Result<Option<bool>> {
        let locked = self.lock().lock_spilled(id);
        let Ok(block) = locked else { return Ok(None) };
        let Some(block) = block else { return Ok(Some(false)) };
        let to = self.lock().location_of(place.id());
        let written = match &block.from.0.memory().0 {
            // Work on the block's stream may still be using the free bytes.
            MemoryKind::Spilled(copy) => self.wait_for_all().and_then(|()| {
                // SAFETY: the new range belongs to `place`, which nobody uses, and stays where it is while the compaction lock is held.
                self.retry(MAX_TRIES, || unsafe { copy.write_to(&*self.driver, (to.0.memory(), to.1)) })
            }),
            _ => Ok(()),
        };
        let mut core = self.lock_with_stats();
        let done = match written {
            Ok(()) => Ok(core.apply_return(block, place.id(), &to)),
            Err(error) => {
                core.unlock_moved_blocks([block], []);
                Err(error)
            }
        };
        drop(core);
        done.map(|gone| {
            drop(gone); // not under the lock, because a large copy takes long to free
            Some(true)
        })
    }
}

impl Core {
    /// Returns the total size, in bytes, of the idle blocks that could move to the host.
    pub(super) fn idle_bytes(&mut self) -> u64 {
        self.candidates().iter().map(|candidate| candidate.block.size as u64).sum()
    }

    /// Returns the total size, in bytes, of the blocks on the host that are not counted as reserved.
    pub(super) fn uncounted_bytes(&self) -> u64 {
        self.heap.segments().filter(|(_, held)| held.is_uncounted()).map(|(_, held)| held.size as u64).sum()
    }

    /// Returns and locks the idle blocks of the default pool, by segment and offset.
    fn candidates<'a>(&mut self) -> Vec<Candidate<'a>> {
        let live: Vec<u32> = self.heap.blocks_of_pool(0, Use::Live).collect();
        let candidate = |id: u32| {
            let slot = self.slots.get_or_create(id);
            // SAFETY: slots live as long as the allocator, which outlives the call that uses the slot.
            let slot: &'a Slot = unsafe { slot.as_ref() };
            // A block that was never used has no contents. Its owner may be about to keep it in its place.
            let age = if self.spills { slot.age()? } else { 0 };
            let write_lock =
                slot.try_lock_for_move().filter(|_| !slot.is_exported() && !self.moving.contains_key(&id))?;
            let (from, size) = (self.location_of(id), self.heap.entry(id).size());
            Some(Candidate { block: Move { id, from, to: 0, size, slot, write_lock }, age })
        };
        live.into_iter().filter_map(candidate).collect()
    }

    /// Chooses and locks blocks that make room for the request when they have moved to the host, least recently used first; large blocks
    /// come before small ones. Empty if there are none. Prefers blocks that are neighbours, so that their range serves the request. Otherwise
    /// enough blocks are chosen that the free memory suffices in total, and more with each attempt. A block that returns (`is_return`)
    /// frees its bytes on the host, so that two blocks can change places at the limit.
    fn choose_victims<'a>(&mut self, request: &Request, is_return: bool, attempt: u32) -> Vec<Move<'a>> {
        let limit =
            (self.rules.config.spill_limit as u64).saturating_add(if is_return { request.size as u64 } else { 0 });
        let mut left = limit.saturating_sub(self.heap.stats.spilled_bytes.current);
        let room = self.limits.limit().saturating_sub(self.heap.stats.reserved() + self.bytes_being_created);
        let free = self.heap.blocks_of_pool(0, Use::Free).map(|id| self.heap.entry(id).size() as u64).sum::<u64>();
        let have = if self.rules.config.compaction { room + free } else { room };
        let wanted = (request.size as u64).saturating_sub(have).max(1).saturating_mul(1 << attempt.min(20));
        let mut candidates = self.candidates();
        candidates.sort_by_key(|c| (c.block.size < MIN_SPILLED_BYTES, Reverse(c.age)));
        let (mut chosen, mut sum, mut enough) = (HashSet::new(), 0, None);
        for Candidate { block, age } in &candidates {
            if enough.as_ref().is_some_and(|(_, of): &(HashSet<u32>, u32)| age.saturating_mul(2) < *of) {
                break; // blocks that were used more recently stay
            }
            let size = block.size as u64;
            if size <= left {
                chosen.insert(block.id);
                (left, sum) = (left - size, sum + size);
                if let Some(range) = self.range_around(block.id, &chosen, request) {
                    chosen = range;
                    enough = None;
                    break;
                }
                if sum >= wanted && enough.is_none() {
                    enough = Some((chosen.clone(), *age));
                }
            }
        }
        let chosen = enough.map_or(chosen, |(first, _)| first);
        let victims = candidates.into_iter().map(|c| c.block).filter(|block| chosen.contains(&block.id)).collect();
        chosen.into_iter().for_each(|id| _ = self.moving.insert(id, AfterMove::Nothing));
        victims
    }

    /// Returns the chosen blocks next to a chosen block that make a range for the request together with the free blocks between them.
    fn range_around(&self, id: u32, chosen: &HashSet<u32>, request: &Request) -> Option<HashSet<u32>> {
        let is_part = |&id: &u32| id != NONE && (chosen.contains(&id) || self.heap.entry(id).usage() == Use::Free);
        let link = |id: u32, next: bool| if next { self.heap.entry(id).next } else { self.heap.entry(id).prev };
        let (mut range, mut bytes) = (VecDeque::from([id]), self.heap.entry(id).size());
        if self.heap.segment_of(id).kind != request.kind {
            return None;
        }
        for forward in [true, false] {
            let mut at = link(id, forward);
            while bytes < request.size && is_part(&at) {
                if forward {
                    range.push_back(at)
                } else {
                    range.push_front(at)
                }
                bytes += self.heap.entry(at).size();
                at = link(at, forward);
            }
        }
        // Blocks at the end that turn out not to be needed stay.
        while let Some(last) = range.back().filter(|&&last| bytes - self.heap.entry(last).size() >= request.size) {
            bytes -= self.heap.entry(*last).size();
            range.pop_back();
        }
        (bytes >= request.size).then(|| range.into_iter().filter(|id| chosen.contains(id)).collect())
    }

    /// Moves a locked block into its own segment on the host. Returns its old range, a frozen block.
    fn spill(&mut self, block: Move<'_>, segment: Arc<Segment>) -> u32 {
        let id = block.id;
        let cached = matches!(self.moving.get(&id), Some(AfterMove::Uncache));
        if !cached {
            self.heap.record_free(id, block.slot.requested());
        }
        let gap = self.heap.move_to_host_segment(id, Arc::clone(&segment));
        if !cached {
            self.heap.record(TraceAction::Alloc, id, block.slot.requested());
        }
        // SAFETY: the allocator keeps the segment as long as its block is live. The slot is write-locked, and the bytes are in the segment.
        unsafe { block.slot.set_location(&segment, 0) };
        block.slot.used_by_other_stream.store(true, Relaxed); // so that the freed block does not go to a thread cache
        self.unlock_moved_blocks([block], []);
        gap
    }

    /// Counts blocks that compaction left on the host as reserved, unless other blocks can make room for them when they return.
    pub(super) fn count_spilled(&mut self, blocks: impl IntoIterator<Item = u32>) {
        blocks.into_iter().filter(|_| !self.spills).for_each(|id| self.heap.count_host_segment(id));
    }

    /// Returns the live blocks that compaction left on the host.
    fn stranded(&self) -> Vec<u32> {
        let held = self.heap.segments().filter(|(_, held)| held.pool == SPILLED_POOL && !held.is_uncounted());
        held.map(|(_, held)| held.first).filter(|&id| self.heap.entry(id).usage() == Use::Live).collect()
    }

    /// Returns a block's segment and its offset in bytes.
    fn location_of(&self, id: u32) -> (Arc<Segment>, usize) {
        (Arc::clone(&self.heap.segment_of(id).segment), self.heap.entry(id).offset())
    }

    /// Begins the return of a block: describes the request for its memory, and counts that memory instead of the block. Returns `None` if
    /// the block is not on the host, and an error if the block is in use.
    fn begin_return(&mut self, id: u32) -> Result<Option<Return>, InUse> {
        match self.lock_spilled(id)? {
            Some(block) => self.unlock_moved_blocks([block], []),
            None => return Ok(None),
        }
        let held = self.heap.segment_of(id);
        let was_counted = !held.is_uncounted();
        let arena = self.heap.arena_of_block(id);
        let (stream, kind) = (arena.stream, arena.kind);
        let (bytes, size) = (self.slots.requested(id), self.heap.entry(id).size());
        self.heap.stats.correct_live(kind, [-1, -(size as i64), -(bytes as i64)]);
        if was_counted {
            self.heap.stats.record_segment_free(kind, size);
        }
        Ok(Some(Return { id, request: Request { bytes, size, kind, pool: 0, stream }, was_counted }))
    }

    /// Counts a block whose return has failed as before.
    fn cancel_return(&mut self, wanted: &Return) {
        let Request { bytes, size, kind, .. } = wanted.request;
        self.heap.stats.correct_live(kind, [1, size as i64, bytes as i64]);
        if wanted.was_counted {
            self.heap.stats.record_segment_alloc(kind, size);
        }
    }

    /// Write-locks a block that is kept on the host. Returns `None` if the block is not on the host, and an error if the block is in use.
    fn lock_spilled<'a>(&mut self, id: u32) -> Result<Option<Move<'a>>, InUse> {
        let entry = self.heap.entry(id);
        if entry.usage() != Use::Live || self.heap.segment_of(id).pool != SPILLED_POOL {
            return Ok(None);
        }
        let slot = self.slots.get_or_create(id);
        // SAFETY: slots live as long as the allocator, which outlives the call that uses the slot.
        let slot = unsafe { slot.as_ref() };
        let write_lock = slot.try_lock_for_move().ok_or(InUse(entry.size()))?;
        self.moving.insert(id, AfterMove::Nothing);
        Ok(Some(Move { id, from: self.location_of(id), to: 0, size: entry.size(), slot, write_lock }))
    }

    /// Updates the table after a block was written to the range of the live block `place`. Returns the host segment.
    fn apply_return(&mut self, block: Move<'_>, place: u32, to: &(Arc<Segment>, usize)) -> Arc<Segment> {
        let (id, requested) = (block.id, block.slot.requested());
        self.heap.trim_live(place, block.size);
        self.heap.record_free(id, requested); // the allocation of `place` is recorded already
        let gone = self.heap.return_from_host(id, place);
        // SAFETY: the slot is write-locked, the bytes were written to the new location, and its segment is kept as long as the
        // block is live.
        unsafe { block.slot.set_location(&to.0, to.1) };
        self.unlock_moved_blocks([block], []);
        gone
    }
}

/// Another thread holds the lock of a block of this size.
struct InUse(usize);
