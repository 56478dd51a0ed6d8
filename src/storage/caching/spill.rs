//! Blocks that are kept on the host, because the device had no memory for them when they were to come back.
//!
//! Compaction may send blocks through the host to make room, and somebody else may take that room. Each then has a
//! segment of its own, in host memory and in a pool that no request searches: it can be read, and comes back to the device
//! when it is next used or the cache is emptied, as soon as there is memory. Statistics count it as reserved, so that a
//! limit leaves room for it.

use std::sync::Arc;

use super::super::allocator::Allocator;
use super::super::block::Block;
use super::super::driver::{Failure, MemoryKind};
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::copies::{Stranded, TRIES};
use super::heap::{Arena, Entry, Heap, Held, NONE, SPILLED, Search, Use};
use super::moves::{AfterMove, Move};
use super::{CachingAllocator, Core};
use crate::device::log;
use crate::{Error, Result};
use std::any::Any;
use std::sync::atomic::Ordering::Relaxed;

/// A reserved range of a segment for a block that comes back; `id` is the reservation's entry in the table.
struct Room {
    id: u32,
    segment: Arc<Segment>,
    offset: usize,
    /// Whether the segment was made for the block, and counts in the statistics in place of what is kept on the host.
    counts: bool,
}

/// The caching allocator that hands out what `allocator` does, if there is one inside.
pub(in crate::storage) fn caching_inside(mut allocator: &dyn Allocator) -> Option<&CachingAllocator> {
    loop {
        match (allocator as &dyn Any).downcast_ref() {
            Some(caching) => return Some(caching),
            None => allocator = &**allocator.inner()?,
        }
    }
}

impl CachingAllocator {
    /// Brings a block that is kept on the host back to the device. Nobody holds its place.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the device has no memory for it, and what the driver reports when it is written: it stays
    /// readable where it is.
    #[cold]
    pub(in crate::storage) fn restore(&self, block: &Block) -> Result<()> {
        if block.owner != self.number {
            return Err(Error::invalid("restore", format!("{block:?} is not of {self:?}")));
        }
        let _alone = self.compact_alone();
        self.bring_back(block.id()).or_else(|error| {
            if !matches!(error, Error::OutOfMemory { .. }) {
                return Err(error);
            }
            let unused = self.lock().heap.remove_unused(0);
            drop(unused);
            self.release_pages(0, 0);
            self.bring_back(block.id())
        })
    }

    /// Brings back every block that is kept on the host, if there is memory; called by compaction. Host copies of
    /// tensors that were dropped are freed as well.
    pub(super) fn restore_all(&self) {
        self.drop_spilled();
        let spilled = self.lock().spilled();
        for id in spilled {
            if let Err(error) = self.bring_back(id) {
                // No matter of memory: the next one would fail as well.
                let stop = !matches!(error, Error::OutOfMemory { .. });
                let device = self.driver.device();
                log::emit(move || tracing::warn!(%device, %error, "a block stays on the host"));
                if stop {
                    break;
                }
            }
        }
    }

    /// Drops what the host keeps of blocks that were given back.
    pub(super) fn drop_spilled(&self) {
        let unused: Vec<_> = {
            let heap = &mut self.lock_with_stats().heap;
            heap.whole_blocks(SPILLED).into_iter().map(|id| heap.remove_whole(id)).collect()
        };
        drop(unused);
    }

    fn bring_back(&self, id: u32) -> Result<()> {
        let busy = |size: usize| Error::OutOfMemory {
            device: self.driver.device(),
            requested: size,
            detail: "a tensor that is kept on the host is being read, and cannot come back to the device now".into(),
        };
        let block = self.persist(TRIES, || self.lock().lock_spilled(id).map_err(busy))?;
        let Some(block) = block else { return Ok(()) };
        let held = self.lock().hold_for(id);
        let written = held.map_or_else(|| self.make_for(id, block.size), Ok).and_then(|place| {
            // Work on the block's stream may still be using what is free there.
            let MemoryKind::Spilled(bytes) = &block.from.0.memory().0 else { return Ok(place) };
            match self.wait_for_all().and_then(|()| self.put(TRIES, bytes, &place.segment, place.offset)) {
                Ok(()) => Ok(place),
                Err(error) => {
                    let mut core = self.lock();
                    core.heap.unhold(place.id);
                    if place.counts {
                        core.count_kept([id]);
                    }
                    Err(error)
                }
            }
        });
        let mut core = self.lock();
        let done = match written {
            Ok(place) => Ok(core.settle_restored(block, &place)),
            Err(error) => {
                core.finish([block], []);
                Err(error)
            }
        };
        drop(core);
        done.map(drop)
    }

    /// Room for a block that is kept on the host, in a segment of its own.
    fn make_for(&self, id: u32, size: usize) -> Result<Room> {
        let memory = self.make(size).map_err(|why| match why {
            Failure::Other(error) => error,
            full => Error::OutOfMemory {
                device: self.driver.device(),
                requested: size,
                detail: format!(
                    "a tensor of that size is kept on the host since it had to make room: it can be read, and comes back when \
                     the device has memory for it ({full})"
                ),
            },
        })?;
        let mut core = self.lock_with_stats();
        let home = core.home(id);
        let kind = core.heap.held(id).kind;
        core.heap.stats.segment_released(kind, size);
        let made = core.heap.add_segment(Arc::new(Segment::new(memory, size)), size, home);
        Ok(Room { counts: true, ..core.hold(made, size) })
    }

    /// What becomes of blocks whose bytes are on the host only: they are to be [counted](Core::count_kept) when what
    /// they leave no longer is.
    pub(super) fn keep_on_host<'a>(
        &self,
        core: &mut Core,
        stranded: impl IntoIterator<Item = Stranded<'a>>,
    ) -> Vec<u32> {
        let keep = |Stranded { block, bytes }: Stranded<'a>| {
            self.recorded.store(true, Relaxed);
            let id = block.id;
            core.spill(block, Arc::new(Segment::spilled(bytes)));
            id
        };
        stranded.into_iter().map(keep).collect()
    }
}

impl Core {
    /// Blocks in use that are kept on the host.
    fn spilled(&self) -> Vec<u32> {
        let held = self.heap.segments.iter().flatten().filter(|held| held.pool == SPILLED);
        held.map(|held| held.first).filter(|&id| self.heap.table[id as usize].usage() == Use::Live).collect()
    }

    /// Bytes of blocks that are kept on the host.
    pub(super) fn spilled_bytes(&self) -> u64 {
        self.spilled().into_iter().map(|id| self.heap.table[id as usize].size() as u64).sum()
    }

    /// Locks a block that is kept on the host for moving. `None` if it is not there, `Err` with its size if it is in use now.
    fn lock_spilled<'a>(&mut self, id: u32) -> Result<Option<Move<'a>>, usize> {
        let entry = self.heap.table[id as usize];
        if entry.usage() != Use::Live || self.heap.held(id).pool != SPILLED {
            return Ok(None);
        }
        let slot = self.slots.of(id);
        // SAFETY: slots live as long as the allocator, which outlives the call that this is for.
        let slot = unsafe { slot.as_ref() };
        let still = slot.try_write().ok_or(entry.size())?;
        self.moving.insert(id, AfterMove::Stay);
        Ok(Some(Move::new(id, (Arc::clone(&self.heap.held(id).segment), 0), 0, entry.size(), slot, still)))
    }

    /// Puts a block of a plan into a segment of its own, on the host.
    fn spill(&mut self, block: Move<'_>, segment: Arc<Segment>) {
        let id = block.id;
        let cached = matches!(self.moving.get(&id), Some(AfterMove::Uncache));
        if !cached {
            self.heap.record_free(id, block.slot.requested());
        }
        self.heap.move_out(id, Arc::clone(&segment));
        if !cached {
            self.heap.record(TraceAction::Alloc, id, block.slot.requested());
        }
        // SAFETY: the segment is held as long as its block is live; the slot is locked for writing, and the bytes are there.
        unsafe { block.slot.set_place(&segment, 0) };
        block.slot.recorded.store(true, Relaxed); // threads' caches must not hand it out again
        self.finish([block], []);
    }

    /// Counts blocks that are kept on the host as reserved.
    pub(super) fn count_kept(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for id in blocks {
            let (kind, size) = (self.heap.held(id).kind, self.heap.held(id).size);
            self.heap.stats.segment_made(kind, size);
        }
    }

    /// The arena that a block kept on the host is to come back to.
    fn home(&mut self, id: u32) -> u32 {
        let Arena { stream, kind, .. } = self.heap.arenas[self.heap.table[id as usize].arena() as usize];
        self.heap.arena(0, stream, kind)
    }

    /// Free bytes for a block that is kept on the host.
    fn hold_for(&mut self, id: u32) -> Option<Room> {
        let (home, size) = (self.home(id), self.heap.table[id as usize].size());
        let found = self.heap.find(home, size, Search::Thorough, || usize::MAX)?;
        Some(self.hold(found, size))
    }

    /// Takes the first bytes of a free block out of the bins.
    fn hold(&mut self, id: u32, size: usize) -> Room {
        self.heap.hold(id);
        if self.heap.table[id as usize].size() > size {
            let rest = self.heap.split(id, size);
            self.heap.unhold(rest);
        }
        let (segment, offset) = (Arc::clone(&self.heap.held(id).segment), self.heap.table[id as usize].offset());
        Room { id, segment, offset, counts: false }
    }

    /// A block that was kept on the host has been written to the place that was held for it.
    fn settle_restored(&mut self, block: Move<'_>, place: &Room) -> Arc<Segment> {
        let (id, requested) = (block.id, block.slot.requested());
        let (at, home) = (self.heap.table[id as usize].segment, self.home(id));
        self.heap.record_free(id, requested);
        self.heap.record_released(at);
        self.heap.take_place(id, place.id);
        self.heap.table[id as usize].set_arena(home);
        self.heap.vacate(place.id);
        let gone = self.heap.segments[at as usize].take().expect("a block's segment is held");
        self.heap.vacant_segments.push(at);
        if !place.counts {
            self.heap.stats.segment_released(gone.kind, block.size);
        }
        self.heap.record(TraceAction::Alloc, id, requested);
        // SAFETY: as in `spill`.
        unsafe { block.slot.set_place(&place.segment, place.offset) };
        self.finish([block], []);
        gone.segment
    }
}

impl Heap {
    /// Moves a live block out of its segment into one of its own, in the pool of those on the host. Its old place stays reserved.
    fn move_out(&mut self, id: u32, segment: Arc<Segment>) {
        let entry = self.table[id as usize];
        let size = entry.size();
        let gap = self.insert(Entry::new(entry.segment, entry.arena(), Use::Held, entry.offset(), size));
        self.take_place(gap, id);
        let Arena { stream, kind, .. } = self.arenas[entry.arena() as usize];
        let arena = self.arena(SPILLED, stream, kind);
        let at = self.vacant_segment();
        let block = &mut self.table[id as usize];
        (block.segment, block.prev, block.next) = (at, NONE, NONE);
        block.set_offset(0);
        block.set_arena(arena);
        let address = segment.address();
        let context = self.history.record(TraceAction::SegmentAlloc, address, size as u64, stream.0);
        let (idle_since, end) = ((self.ticks, self.now), super::pages::End::default());
        let held = Held { segment, address, context, size, kind, pool: SPILLED, stream, first: id, idle_since, end };
        self.segments[at as usize] = Some(held);
    }

    /// Gives entry `id` the place of entry `of`, which has the same size and is left without one.
    fn take_place(&mut self, id: u32, of: u32) {
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
