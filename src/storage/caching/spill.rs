//! Blocks kept on the host, because the device had no memory when they were to be copied back.
//!
//! Compaction may move blocks through the host to make room, and another thread may take that room. Such a block gets its own segment in host memory,
//! in a pool that no request searches, and stays readable. The block returns to the device at its next use or when the cache is emptied, if there is
//! memory. Statistics count the block as reserved, so that a limit leaves room for it.

use std::sync::Arc;

use super::super::allocator::Allocator;
use super::super::block::Block;
use super::super::driver::{Failure, MemoryKind};
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::copies::{MAX_TRIES, Stranded};
use super::heap::{Arena, Entry, Heap, NONE, SPILLED_POOL, Search, SegmentRecord, Use};
use super::moves::{AfterMove, Move};
use super::{CachingAllocator, Core};
use crate::device::log;
use crate::{Error, Result};
use std::any::Any;
use std::sync::atomic::Ordering::Relaxed;

/// A reserved range of a segment for a block that returns from the host. `id` is the reservation's table entry.
struct ReservedRange {
    id: u32,
    segment: Arc<Segment>,
    offset: usize,
    /// True if the segment was created for the block, and replaces the host copy in the statistics.
    has_own_segment: bool,
}

/// Returns the caching allocator that `allocator` is or wraps, if any.
pub(in crate::storage) fn innermost_caching_allocator(mut allocator: &dyn Allocator) -> Option<&CachingAllocator> {
    loop {
        match (allocator as &dyn Any).downcast_ref() {
            Some(caching) => return Some(caching),
            None => allocator = &**allocator.inner()?,
        }
    }
}

impl CachingAllocator {
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
        let _compaction_lock = self.lock_compaction();
        self.restore_block(block.id()).or_else(|error| {
            if !matches!(error, Error::OutOfMemory { .. }) {
                return Err(error);
            }
            let unused = self.lock().heap.remove_unused(0);
            drop(unused);
            self.release_pages(0, 0);
            self.restore_block(block.id())
        })
    }

    /// Copies every block kept on the host back to the device, as far as there is memory, and frees the host copies of dropped tensors. The
    /// compaction lock must be held.
    pub(super) fn restore_all(&self) {
        self.free_spilled();
        let spilled = self.lock().spilled();
        for id in spilled {
            if let Err(error) = self.restore_block(id) {
                // Not a lack of memory: the next block would fail as well.
                let stop = !matches!(error, Error::OutOfMemory { .. });
                let device = self.driver.device();
                log::emit(move || tracing::warn!(%device, %error, "a block stays on the host"));
                if stop {
                    break;
                }
            }
        }
    }

    pub(super) fn free_spilled(&self) {
        let unused: Vec<_> = {
            let heap = &mut self.lock_with_stats().heap;
            heap.whole_blocks(SPILLED_POOL).into_iter().map(|id| heap.remove_whole(id)).collect()
        };
        drop(unused);
    }

    /// Copies one block back to the device. Does nothing if the block is not on the host.
    fn restore_block(&self, id: u32) -> Result<()> {
        let busy = |size: usize| Error::OutOfMemory {
            device: self.driver.device(),
            requested: size,
            detail: "a tensor kept on the host is being read, and cannot return to the device now".into(),
        };
        let block = self.retry(MAX_TRIES, || self.lock().lock_spilled(id).map_err(busy))?;
        let Some(block) = block else { return Ok(()) };
        let held = self.lock().reserve_range_for(id);
        let written = held.map_or_else(|| self.create_segment_for(id, block.size), Ok).and_then(|place| {
            // Work on the block's stream may still be using the free bytes.
            let MemoryKind::Spilled(bytes) = &block.from.0.memory().0 else { return Ok(place) };
            match self
                .wait_for_all()
                .and_then(|()| self.write_from_host(MAX_TRIES, bytes, &place.segment, place.offset))
            {
                Ok(()) => Ok(place),
                Err(error) => {
                    let mut core = self.lock();
                    core.heap.unfreeze_block(place.id);
                    if place.has_own_segment {
                        core.count_spilled([id]);
                    }
                    Err(error)
                }
            }
        });
        let mut core = self.lock();
        let done = match written {
            Ok(place) => Ok(core.apply_restore(block, &place)),
            Err(error) => {
                core.unlock_moved_blocks([block], []);
                Err(error)
            }
        };
        drop(core);
        done.map(drop)
    }

    /// Creates a segment for a block that is kept on the host.
    fn create_segment_for(&self, id: u32, size: usize) -> Result<ReservedRange> {
        let memory = self.create_memory(size).map_err(|why| match why {
            Failure::Other(error) => error,
            full => Error::OutOfMemory {
                device: self.driver.device(),
                requested: size,
                detail: format!(
                    "a tensor of this size was moved to the host to make room: it stays readable, and returns when the \
                     device has memory for it ({full})"
                ),
            },
        })?;
        let mut core = self.lock_with_stats();
        let home = core.home_arena(id);
        let kind = core.heap.segment_of(id).kind;
        core.heap.stats.record_segment_free(kind, size);
        let made = core.heap.add_segment(Arc::new(Segment::new(memory, size)), size, home);
        Ok(ReservedRange { has_own_segment: true, ..core.reserve_range(made, size) })
    }

    /// Moves blocks whose bytes are only on the host into host segments. The caller [counts](Core::count_spilled) them
    /// once their old memory is no longer counted.
    pub(super) fn keep_on_host<'a>(
        &self,
        core: &mut Core,
        stranded: impl IntoIterator<Item = Stranded<'a>>,
    ) -> Vec<u32> {
        let keep = |Stranded { block, bytes }: Stranded<'a>| {
            self.has_cross_stream_use.store(true, Relaxed);
            let id = block.id;
            core.spill(block, Arc::new(Segment::spilled(bytes)));
            id
        };
        stranded.into_iter().map(keep).collect()
    }
}

impl Core {
    /// Returns the live blocks that are kept on the host.
    fn spilled(&self) -> Vec<u32> {
        let held = self.heap.segments.iter().flatten().filter(|held| held.pool == SPILLED_POOL);
        held.map(|held| held.first).filter(|&id| self.heap.table[id as usize].usage() == Use::Live).collect()
    }

    /// Returns the bytes of blocks that are kept on the host.
    pub(super) fn spilled_bytes(&self) -> u64 {
        self.spilled().into_iter().map(|id| self.heap.table[id as usize].size() as u64).sum()
    }

    /// Write-locks a block that is kept on the host. Returns `None` if it is not on the host, and `Err` with its size in bytes if it is in use.
    fn lock_spilled<'a>(&mut self, id: u32) -> Result<Option<Move<'a>>, usize> {
        let entry = self.heap.table[id as usize];
        if entry.usage() != Use::Live || self.heap.segment_of(id).pool != SPILLED_POOL {
            return Ok(None);
        }
        let slot = self.slots.get_or_create(id);
        // SAFETY: slots live as long as the allocator, which outlives the call that uses this one.
        let slot = unsafe { slot.as_ref() };
        let write_lock = slot.try_lock_for_move().ok_or(entry.size())?;
        self.moving.insert(id, AfterMove::Nothing);
        Ok(Some(Move::new(id, (Arc::clone(&self.heap.segment_of(id).segment), 0), 0, entry.size(), slot, write_lock)))
    }

    /// Moves a block of a plan into its own segment on the host.
    fn spill(&mut self, block: Move<'_>, segment: Arc<Segment>) {
        let id = block.id;
        let cached = matches!(self.moving.get(&id), Some(AfterMove::Uncache));
        if !cached {
            self.heap.record_free(id, block.slot.requested());
        }
        self.heap.move_to_host_segment(id, Arc::clone(&segment));
        if !cached {
            self.heap.record(TraceAction::Alloc, id, block.slot.requested());
        }
        // SAFETY: the segment is held as long as its block is live. The slot is write-locked, and the bytes are in the segment.
        unsafe { block.slot.set_location(&segment, 0) };
        block.slot.used_by_other_stream.store(true, Relaxed); // keeps the block out of thread caches
        self.unlock_moved_blocks([block], []);
    }

    /// Counts blocks that are kept on the host as reserved.
    pub(super) fn count_spilled(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for id in blocks {
            let (kind, size) = (self.heap.segment_of(id).kind, self.heap.segment_of(id).size);
            self.heap.stats.record_segment_alloc(kind, size);
        }
    }

    /// Returns the arena to which a block kept on the host will return.
    fn home_arena(&mut self, id: u32) -> u32 {
        let Arena { stream, kind, .. } = self.heap.arenas[self.heap.table[id as usize].arena() as usize];
        self.heap.arena(0, stream, kind)
    }

    /// Reserves free bytes of the device for a block that is kept on the host.
    fn reserve_range_for(&mut self, id: u32) -> Option<ReservedRange> {
        let (home, size) = (self.home_arena(id), self.heap.table[id as usize].size());
        let found = self.heap.find_free(home, size, Search::Thorough, || usize::MAX)?;
        Some(self.reserve_range(found, size))
    }

    /// Takes the first `size` bytes of a free block out of the bins.
    fn reserve_range(&mut self, id: u32, size: usize) -> ReservedRange {
        self.heap.freeze_block(id);
        if self.heap.table[id as usize].size() > size {
            let rest = self.heap.split(id, size);
            self.heap.unfreeze_block(rest);
        }
        let (segment, offset) = (Arc::clone(&self.heap.segment_of(id).segment), self.heap.table[id as usize].offset());
        ReservedRange { id, segment, offset, has_own_segment: false }
    }

    /// Updates the table after a block was written to its reserved range. Returns the host segment.
    fn apply_restore(&mut self, block: Move<'_>, place: &ReservedRange) -> Arc<Segment> {
        let (id, requested) = (block.id, block.slot.requested());
        let (at, home) = (self.heap.table[id as usize].segment, self.home_arena(id));
        self.heap.record_free(id, requested);
        self.heap.record_released(at);
        self.heap.take_position(id, place.id);
        self.heap.table[id as usize].set_arena(home);
        self.heap.vacate(place.id);
        let gone = self.heap.segments[at as usize].take().expect("a block's segment is held");
        self.heap.vacant_segments.push(at);
        if !place.has_own_segment {
            self.heap.stats.record_segment_free(gone.kind, block.size);
        }
        self.heap.record(TraceAction::Alloc, id, requested);
        // SAFETY: as in `spill`.
        unsafe { block.slot.set_location(&place.segment, place.offset) };
        self.unlock_moved_blocks([block], []);
        gone.segment
    }
}

impl Heap {
    /// Moves a live block into its own segment in the pool of host blocks. Its old range stays reserved.
    fn move_to_host_segment(&mut self, id: u32, segment: Arc<Segment>) {
        let entry = self.table[id as usize];
        let size = entry.size();
        let gap = self.insert(Entry::new(entry.segment, entry.arena(), Use::Frozen, entry.offset(), size));
        self.take_position(gap, id);
        let Arena { stream, kind, .. } = self.arenas[entry.arena() as usize];
        let arena = self.arena(SPILLED_POOL, stream, kind);
        let at = self.vacant_segment();
        let block = &mut self.table[id as usize];
        (block.segment, block.prev, block.next) = (at, NONE, NONE);
        block.set_offset(0);
        block.set_arena(arena);
        let address = segment.address();
        let context = self.history.record(TraceAction::SegmentAlloc, address, size as u64, stream.0);
        let (idle_since, end) = ((self.ticks, self.now), super::pages::SegmentEnd::default());
        let held = SegmentRecord {
            segment,
            address,
            context,
            size,
            kind,
            pool: SPILLED_POOL,
            stream,
            first: id,
            idle_since,
            end,
        };
        self.segments[at as usize] = Some(held);
    }

    /// Moves entry `id` to the range of entry `of`, which has the same size and is left without a range.
    fn take_position(&mut self, id: u32, of: u32) {
        let Entry { segment, prev, next, .. } = self.table[of as usize];
        let offset = self.table[of as usize].offset();
        let block = &mut self.table[id as usize];
        (block.segment, block.prev, block.next) = (segment, prev, next);
        block.set_offset(offset);
        match (prev, &mut self.segments[segment as usize]) {
            (NONE, Some(held)) => held.first = id,
            (prev, _) => self.table[prev as usize].next = id,
        }
        if next != NONE {
            self.table[next as usize].prev = id;
        }
    }
}
