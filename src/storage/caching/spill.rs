//! Blocks kept on the host: how idle blocks get there before an allocation fails, and how blocks come back.
//!
//! A block on the host has its own segment, in a pool that no request searches. The block comes back when it is next used.
//!
//! A block moves to the host for one of three reasons. The configuration says `spill`: before an allocation fails, idle blocks of the
//! default pool make room, least recently used first. A block is idle if no thread holds its location. Or a storage is evicted. Or
//! compaction leaves a block there, because another thread took the memory that was freed for the block. The bytes of these blocks are
//! not reserved. Each gets memory to come back as any request does, from the bins or by out-of-memory recovery, which may move other
//! blocks to the host.
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
use super::super::driver::{At, Memory, MemoryKind};
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::compact::{Move, add_detail};
use super::entry::{NONE, SPILLED_POOL, Use};
use super::events::AfterMove;
use super::heap::{Arena, Request};
use super::ladder::OomRecovery;
use super::policy::{MAX_RETURN_TRIES, MAX_TRIES};
use super::{CachingAllocator, Core};
use crate::device::{StreamId, capture, log};
use crate::{Device, Error, Result};

/// Smaller blocks move to the host only if there are no others.
const MIN_SPILLED_BYTES: usize = 1 << 20;

/// A block that might move to the host, and its age: the number of requests since its last use.
type Candidate<'a> = (Move<'a>, u32);

/// A block that is about to come back, write-locked, and the request for its memory.
type Return<'a> = (Move<'a>, Request);

impl CachingAllocator {
    // Moving blocks to the host.

    /// Makes room for a request by moving idle blocks to the host, and after that by moving live blocks together: the last step of
    /// out-of-memory recovery.
    pub(super) fn spill_for(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        let is_possible = request.size as u64 <= self.lock().limits.limit().min(self.rules.capacity);
        if !self.may_spill_for(request) || !is_possible {
            return Ok(None);
        }
        // A block that returns keeps its kind.
        let kinds = [request.kind, if recovery.is_return { request.kind } else { request.kind.opposite() }];
        let find = |recovery: &mut OomRecovery| -> Result<Option<Block>> {
            self.wait_for_streams(request)?;
            self.free_spilled();
            let mut core = self.lock_with_stats();
            let mut search = |kind| core.search_best_fit(self.number, &Request { kind, ..*request }, true);
            if let Some(block) = kinds.into_iter().find_map(&mut search) {
                return Ok(Some(block)); // moved blocks or another thread have freed enough memory
            }
            let unused = core.heap.remove_unused(0);
            drop(core);
            drop(unused);
            self.release_pages(0, 0);
            self.grow(request, true, recovery)
        };
        let _compaction_lock = self.lock_compaction();
        for attempt in 0.. {
            if let Some(block) = find(recovery)? {
                return Ok(Some(block));
            }
            let victims = self.drain_caches().choose_victims(request, recovery.is_return, attempt);
            if victims.is_empty() || !self.move_to_host(victims, request.stream)? {
                break;
            }
        }
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let found = self.compact_locked(request, recovery)?;
        found.map_or_else(|| find(recovery), |block| Ok(Some(block)))
    }

    /// True if idle blocks may move to the host to make room for a request. They do so before live blocks move together, which copies
    /// more bytes, because most blocks change segments.
    pub(super) fn may_spill_for(&self, request: &Request) -> bool {
        let is_on = self.rules.config.spill != Spill::Off && request.pool == 0;
        is_on && !capture::is_capturing(self.driver.device())
    }

    /// Moves a block to the host now, whether the configuration says `spill` or not. Returns false if the block is there already or has
    /// to stay: it is in use, exported or of a private pool, a graph is being captured, or the limit or the host leaves no room.
    pub(in crate::storage) fn evict(&self, block: &Block) -> Result<bool> {
        if block.owner != self.number || capture::is_capturing(self.driver.device()) {
            return Ok(false);
        }
        let _compaction_lock = self.lock_compaction();
        self.free_spilled();
        let mut core = self.lock_with_stats();
        let fits = core.heap.segment_of(block.id()).pool == 0 && block.size() as u64 <= core.spill_room(0);
        let stream = core.heap.arena_of_block(block.id()).stream;
        let Some(victim) = fits.then(|| core.lock_idle(block.id())).flatten() else { return Ok(false) };
        core.moving.insert(victim.id, AfterMove::Nothing);
        drop(core);
        self.move_to_host(vec![victim], stream)
    }

    /// Moves blocks to the host until the host has no room, and gives the freed memory to a stream. The other blocks stay. Returns whether
    /// any block has moved.
    fn move_to_host(&self, mut victims: Vec<Move<'_>>, stream: StreamId) -> Result<bool> {
        let copy = |m: &Move<'_>| {
            let at = (m.from.0.memory(), m.from.1);
            self.retry(MAX_TRIES, || {
                let mut copy = HostCopy::allocate(self.rules.config.spill, &*self.driver, at.0, m.size)?;
                // SAFETY: the block is write-locked, and all work on the device was waited for after it was locked.
                unsafe { copy.fill(&*self.driver, at) }.map(|()| copy)
            })
        };
        let mut copies = Vec::new();
        let mut copy_all = || victims.iter().try_for_each(|m| copy(m).map(|copy| copies.push(copy)));
        let copied = self.wait_for_all().and_then(|()| copy_all());
        let (staying, any) = (victims.split_off(copies.len()), !copies.is_empty());
        let mut core = self.lock_with_stats();
        for gap in self.keep_on_host(&mut core, victims.into_iter().zip(copies)) {
            core.heap.unfreeze_for(gap, stream); // the device is idle, so any stream may use the bytes
        }
        core.unlock_moved_blocks(staying, []);
        drop(core);
        self.free_spilled(); // the blocks that their owners freed during the copies
        match copied {
            Err(Error::OutOfMemory { device: Device::Cpu, detail, .. }) => {
                log::emit(move || tracing::warn!(detail, "not all blocks move to the host"));
                Ok(any)
            }
            other => other.map(|()| any).map_err(|error| add_detail(error, "spilling")),
        }
    }

    /// Moves blocks, whose bytes were copied, into host segments. Returns their old ranges, frozen blocks.
    pub(super) fn keep_on_host<'a>(
        &self,
        core: &mut Core,
        blocks: impl IntoIterator<Item = (Move<'a>, HostCopy)>,
    ) -> Vec<u32> {
        self.has_cross_stream_use.store(true, Relaxed); // see `Core::spill`
        blocks.into_iter().map(|(block, copy)| core.spill(block, copy)).collect()
    }

    // Bringing blocks back.

    /// Copies a block from the host back to the device. Returns false if the block is not on the host. No thread may hold the block's
    /// address.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device has no memory for the block, and errors that the driver reports while
    /// writing. The block then stays readable on the host.
    #[cold]
    pub(in crate::storage) fn restore(&self, block: &Block) -> Result<bool> {
        if !matches!(block.location().segment().memory().0, MemoryKind::Spilled(_)) {
            return Ok(false);
        }
        if block.owner != self.number {
            return Err(Error::invalid("restore", format!("{block:?} is not of {self:?}")));
        }
        let busy = |requested| Error::OutOfMemory {
            device: self.driver.device(),
            requested,
            detail: "a tensor kept on the host is being read, and cannot return to the device now".into(),
        };
        let begin = || self.lock_with_stats().begin_return(block.id()).map_err(busy);
        match self.retry(MAX_RETURN_TRIES, begin)? {
            Some(wanted) => self.bring_back(wanted, true),
            None => Ok(false),
        }
    }

    /// Like [`restore`](Self::restore), but does nothing and returns false if the device has no memory for the block now, or the block
    /// is in use.
    pub(in crate::storage) fn prefetch(&self, block: &Block) -> Result<bool> {
        if block.owner != self.number {
            return Ok(false);
        }
        let wanted = self.lock_with_stats().begin_return(block.id());
        wanted.ok().flatten().map_or(Ok(false), |wanted| self.bring_back(wanted, false))
    }

    /// Copies a block from the host to memory allocated for it as for any request. Unless `recovers`, the call returns false if the
    /// device has no memory now.
    fn bring_back(&self, (block, request): Return<'_>, recovers: bool) -> Result<bool> {
        let _messages = log::defer(); // until the block is unlocked, because a subscriber may use it
        let found = self.lock_with_stats().search_best_fit(self.number, &request, true);
        let place = match found {
            Some(place) => Ok(Some(place)),
            None if recovers => self.recover_memory(&request, OomRecovery::for_return()).map(Some),
            None => self.grow(&request, true, &mut OomRecovery::default()),
        };
        // Compactions by other threads leave an exported block alone. The flag is cleared when the entry serves another request.
        let place = place.inspect(|place| place.iter().for_each(Block::export)).map_err(|error| match error {
            Error::OutOfMemory { device, detail, .. } => Error::OutOfMemory {
                device,
                requested: request.size,
                detail: format!(
                    "a tensor of this size was moved to the host to make room: it stays readable, and returns when the \
                     device has memory for it ({detail})"
                ),
            },
            other => other,
        });
        // Until the table is updated, no compaction may plan with the place.
        let _compaction_lock = self.lock_compaction();
        let written = place.and_then(|place| {
            let Some(place) = place else { return Ok(None) };
            let to = self.lock().location_of(place.id());
            match self.write_back(&block, request.stream, (to.0.memory(), to.1)) {
                Ok(()) => Ok(Some((place, to))),
                Err(error) => {
                    self.deallocate(place);
                    Err(error)
                }
            }
        });
        let mut core = self.lock_with_stats();
        let Ok(Some((place, to))) = written else {
            core.cancel_return((block, request));
            return written.map(|_| false);
        };
        let gone = core.apply_return(block, place.id(), &to);
        drop(core);
        drop(gone); // not under the lock, because a large copy takes long to free
        Ok(true)
    }

    /// Copies a block from the host to memory that belongs to a stream.
    fn write_back(&self, block: &Move<'_>, stream: StreamId, to: At<'_>) -> Result<()> {
        let MemoryKind::Spilled(copy) = &block.from.0.memory().0 else { return Ok(()) };
        self.retry(MAX_TRIES, || {
            self.driver.wait(&self.driver.record(stream)?)?; // the stream's work may still be using the free bytes
            // SAFETY: the bytes belong to the caller, and no work uses them any more.
            unsafe { copy.write_to(&*self.driver, to) }
        })
    }

    /// Frees the host copies of dropped tensors.
    pub(super) fn free_spilled(&self) {
        let unused: Vec<_> = {
            let heap = &mut self.lock_with_stats().heap;
            heap.whole_blocks(SPILLED_POOL).into_iter().map(|id| heap.remove_whole(id)).collect()
        };
        drop(unused);
    }
}

impl Core {
    /// Returns the total size, in bytes, of the idle blocks that could move to the host.
    pub(super) fn idle_bytes(&mut self) -> u64 {
        self.candidates().iter().map(|(block, _)| block.size as u64).sum()
    }

    /// Returns and locks the idle blocks of the default pool, by segment and offset.
    fn candidates<'a>(&mut self) -> Vec<Candidate<'a>> {
        let live: Vec<u32> = self.heap.blocks_of_pool(0, Use::Live).collect();
        let candidate = |id: u32| {
            // A thread's cache may keep a freed block of this size, and hand it out while it moves.
            if self.heap.entry(id).arena() == 0 && self.heap.entry(id).size() <= self.largest_cached {
                return None;
            }
            let block = self.lock_idle(id)?;
            // A block that was never used has no contents. Its owner may be about to keep it in its place.
            let age = if self.spills { block.slot.age()? } else { 0 };
            Some((block, age))
        };
        live.into_iter().filter_map(candidate).collect()
    }

    /// Write-locks a live block. Returns `None` if the block is in use or has to stay in its place.
    fn lock_idle<'a>(&mut self, id: u32) -> Option<Move<'a>> {
        self.lock_block(id).filter(|block| !block.slot.is_exported() && !self.moving.contains_key(&id))
    }

    /// Write-locks a live block. Returns `None` if the block is in use.
    pub(super) fn lock_block<'a>(&mut self, id: u32) -> Option<Move<'a>> {
        let slot = self.slots.get_or_create(id);
        // SAFETY: slots live as long as the allocator, which outlives the call that uses the slot.
        let slot: &'a Slot = unsafe { slot.as_ref() };
        let write_lock = slot.try_lock_for_move()?;
        Some(Move { id, from: self.location_of(id), to: 0, size: self.heap.entry(id).size(), slot, write_lock })
    }

    /// Returns the number of bytes that the limit leaves for new segments.
    fn room_for_segments(&self) -> u64 {
        self.limits.limit().saturating_sub(self.heap.stats.reserved() + self.bytes_being_created)
    }

    /// Returns how many more bytes may move to the host, `extra` bytes beyond the limit.
    fn spill_room(&self, extra: usize) -> u64 {
        let limit = (self.rules.config.spill_limit as u64).saturating_add(extra as u64);
        limit.saturating_sub(self.heap.stats.spilled_bytes.current)
    }

    /// Chooses and locks blocks that make room for the request when they have moved to the host, least recently used first; large blocks
    /// come before small ones. Empty if there are none. Prefers blocks that are neighbours, so that their range serves the request. Otherwise
    /// enough blocks are chosen that the free memory suffices in total, and more with each attempt. A block that returns (`is_return`)
    /// frees its bytes on the host, so that two blocks can change places at the limit.
    fn choose_victims<'a>(&mut self, request: &Request, is_return: bool, attempt: u32) -> Vec<Move<'a>> {
        let mut left = self.spill_room(if is_return { request.size } else { 0 });
        let have = self.room_for_segments();
        let wanted = (request.size as u64).saturating_sub(have).max(1).saturating_mul(1 << attempt.min(20));
        let mut candidates = self.candidates();
        candidates.sort_by_key(|(block, age)| (block.size < MIN_SPILLED_BYTES, Reverse(*age)));
        let (mut chosen, mut sum, mut enough) = (HashSet::new(), 0, None);
        for (block, age) in &candidates {
            if enough.as_ref().is_some_and(|(_, of): &(HashSet<u32>, u32)| age.saturating_mul(2) < *of) {
                break; // blocks that were used more recently stay
            }
            let size = block.size as u64;
            if size <= left {
                chosen.insert(block.id);
                (left, sum) = (left - size, sum + size);
                if let Some(range) = self.range_around(block.id, &chosen, request) {
                    (chosen, enough) = (range, None);
                    break;
                }
                if sum >= wanted && enough.is_none() {
                    enough = Some((chosen.clone(), *age));
                }
            }
        }
        let chosen = enough.map_or(chosen, |(first, _)| first);
        self.moving.extend(chosen.iter().map(|&id| (id, AfterMove::Nothing)));
        candidates.into_iter().map(|(block, _)| block).filter(|block| chosen.contains(&block.id)).collect()
    }

    /// Returns the chosen blocks next to a chosen block that make a range for the request together with the free blocks between them.
    fn range_around(&self, id: u32, chosen: &HashSet<u32>, request: &Request) -> Option<HashSet<u32>> {
        if self.heap.segment_of(id).kind != request.kind {
            return None;
        }
        let size = |id: u32| self.heap.entry(id).size();
        let is_part = |id: u32| id != NONE && (chosen.contains(&id) || self.heap.entry(id).usage() == Use::Free);
        let (mut range, mut bytes) = (VecDeque::from([id]), size(id));
        for forward in [true, false] {
            let link = |id: u32| if forward { self.heap.entry(id).next } else { self.heap.entry(id).prev };
            let mut at = link(id);
            while bytes < request.size && is_part(at) {
                if forward {
                    range.push_back(at)
                } else {
                    range.push_front(at)
                }
                (bytes, at) = (bytes + size(at), link(at));
            }
        }
        // Blocks at the end that turn out not to be needed stay.
        while let Some(&last) = range.back().filter(|&&last| bytes - size(last) >= request.size) {
            bytes -= size(last);
            range.pop_back();
        }
        (bytes >= request.size).then(|| range.into_iter().filter(|id| chosen.contains(id)).collect())
    }

    /// Moves a locked block into its own segment on the host. Returns its old range, a frozen block.
    fn spill(&mut self, block: Move<'_>, copy: HostCopy) -> u32 {
        let id = block.id;
        let segment = Arc::new(Segment::new(Memory(MemoryKind::Spilled(Box::new(copy))), block.size));
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

    /// Returns a block's segment and its offset in bytes.
    fn location_of(&self, id: u32) -> (Arc<Segment>, usize) {
        (Arc::clone(&self.heap.segment_of(id).segment), self.heap.entry(id).offset())
    }

    /// Write-locks a block on the host to bring it back: describes the request for its memory, and counts that memory instead of the
    /// block. Returns `None` if the block is not on the host, and its size as an error if it is in use.
    fn begin_return<'a>(&mut self, id: u32) -> Result<Option<Return<'a>>, usize> {
        let entry = self.heap.entry(id);
        if entry.usage() != Use::Live || self.heap.segment_of(id).pool != SPILLED_POOL {
            return Ok(None);
        }
        let size = entry.size();
        let block = self.lock_block(id).ok_or(size)?;
        self.moving.insert(id, AfterMove::Nothing);
        let Arena { stream, kind, .. } = *self.heap.arena_of_block(id);
        let bytes = self.slots.requested(id);
        self.heap.stats.correct_live(kind, [-1, -(size as i64), -(bytes as i64)]);
        Ok(Some((block, Request { bytes, size, kind, pool: 0, stream })))
    }

    /// Unlocks a block whose return has failed, and counts it as before.
    fn cancel_return(&mut self, (block, Request { bytes, size, kind, .. }): Return<'_>) {
        self.heap.stats.correct_live(kind, [1, size as i64, bytes as i64]);
        self.unlock_moved_blocks([block], []);
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
