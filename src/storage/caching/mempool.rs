//! Private memory pools: segments reserved for some allocations, which can be restored to an earlier state.
//!
//! Every arena and segment carries a pool number; 0 is the allocator's default pool. [`use_mem_pool`] selects the pool of a thread's allocations.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::super::block::Block;
use super::super::scope::{Entered, ScopeList, enter, find_innermost, with_innermost};
use super::super::stats::MemPoolStats;
use super::entry::{SPILLED_POOL, Use};
use super::events::PendingUses;
use super::{CachingAllocator, Core};
use crate::device::StreamId;
use crate::{Error, Result};

/// Options of a [`MemPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemPoolOptions {
    /// Allocations outside the pool that would otherwise fail may use the pool's free blocks (PyTorch's `use_on_oom`).
    pub use_on_oom: bool,
    /// Blocks are never split: each allocation gets its own segment, which is reused whole (PyTorch's `no_split`).
    pub no_split: bool,
}

setters!(MemPoolOptions { use_on_oom: bool, no_split: bool });

/// A private pool of a [`CachingAllocator`]'s memory (`torch.cuda.MemPool`). A clone is another handle of the same pool.
///
/// Segments created inside [`use_mem_pool`] serve only allocations inside `use_mem_pool`. Related data stays together, and memory used by a
/// captured graph does not move. The allocator's limits and statistics include the pool; garbage collection, decay and the allocator's
/// `empty_cache` skip it. When the last handle is dropped, the pool's memory joins the default pool; live blocks stay valid.
///
/// ```
/// use std::sync::Arc;
/// use claystone::device::StreamId;
/// use claystone::storage::{Allocator, CachingAllocator, Config, MemPool, MemPoolOptions, Sim, SimOptions, use_mem_pool};
/// let sim = Sim::new(SimOptions::default());
/// let allocator = Arc::new(CachingAllocator::new(Arc::new(sim), Config::default())?);
/// let pool = MemPool::new(&allocator, MemPoolOptions::default());
/// let block = use_mem_pool(&pool, || allocator.allocate(1000, StreamId::DEFAULT))?;
/// assert_eq!((pool.stats().allocations, pool.stats().allocated_bytes), (1, 1024));
/// allocator.deallocate(block);
/// pool.empty_cache()?;
/// assert_eq!(allocator.stats().reserved_bytes.current, 0);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Clone)]
pub struct MemPool(Arc<Handle>);

/// The pool's allocator and number, shared by all handles of the pool.
struct Handle {
    allocator: Arc<CachingAllocator>,
    id: u32,
    is_captured_into: AtomicBool,
}

/// The locations of a pool's live blocks at one moment. [`MemPool::restore`] restores this state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolCheckpoint {
    allocator: u32,
    pool: u32,
    blocks: Vec<CheckpointBlock>,
}

/// A live block in a checkpoint. `segment` is the segment's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CheckpointBlock {
    segment: u64,
    offset: usize,
    size: usize,
    arena: u32,
    requested: usize,
}

impl PoolCheckpoint {
    /// Returns the number of live blocks in the checkpoint.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if the checkpoint has no live block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

thread_local! {
    /// The numbers of the allocator and the pool of each [`use_mem_pool`] call that this thread is inside.
    static ROUTES: ScopeList<(u32, u32)> = const { ScopeList::new() };
}

/// Returns the pool from which this thread allocates in the given allocator.
#[inline]
pub(super) fn routed_pool(allocator: u32) -> u32 {
    find_innermost(&ROUTES, |&(of, pool)| (of == allocator).then_some(pool)).unwrap_or(0)
}

/// Runs `f`, during which this thread's allocations from the pool's allocator come from the pool (`torch.cuda.use_mem_pool`). Calls nest: the
/// innermost pool of an allocator is used. Other threads and allocators are not affected.
pub fn use_mem_pool<R>(pool: &MemPool, f: impl FnOnce() -> R) -> R {
    with_innermost(&ROUTES, (pool.0.allocator.number, pool.0.id), f)
}

/// Routes this thread's allocations to a pool until it is dropped; returned by [`MemPool::enter`].
#[must_use = "dropping it ends the scope"]
pub struct EnteredPool(#[expect(dead_code, reason = "held")] Entered<(u32, u32)>, MemPool);

impl fmt::Debug for EnteredPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inside {:?}", self.1)
    }
}

/// The right to capture a graph into a pool, which one thread at a time has.
pub(crate) struct CaptureClaim(MemPool);

impl Drop for CaptureClaim {
    fn drop(&mut self) {
        self.0.0.is_captured_into.store(false, Release);
    }
}

impl MemPool {
    /// Creates an empty pool in `allocator`.
    pub fn new(allocator: &Arc<CachingAllocator>, options: MemPoolOptions) -> MemPool {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut core = allocator.lock();
        let id = loop {
            let id = NEXT.fetch_add(1, Relaxed);
            if id != 0 && id < SPILLED_POOL && !core.pools.contains_key(&id) {
                break id;
            }
        };
        core.pools.insert(id, options);
        core.heap.set_unsplit(id, options.no_split);
        MemPool(Arc::new(Handle { allocator: Arc::clone(allocator), id, is_captured_into: AtomicBool::new(false) }))
    }

    /// Returns the pool's number: unique among the live pools of the process, never 0.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// Returns the allocator that the pool belongs to.
    pub fn allocator(&self) -> &Arc<CachingAllocator> {
        &self.0.allocator
    }

    /// Returns the pool's current statistics.
    pub fn stats(&self) -> MemPoolStats {
        self.0.allocator.lock().heap.pool_stats(self.0.id)
    }

    /// Releases the pool's unused segments to the driver (`torch.cuda.empty_cache` inside the pool). Waits for streams that still use freed blocks.
    ///
    /// # Errors
    /// Errors that the driver reports while waiting.
    pub fn empty_cache(&self) -> Result<()> {
        self.0.allocator.process_events(true)?;
        let unused = self.0.allocator.lock().heap.remove_unused(self.0.id);
        drop(unused); // not under the lock, because releasing segments waits for the device
        self.0.allocator.release_pages(self.0.id, 0);
        Ok(())
    }

    /// True if the live block `block` belongs to this pool.
    pub(crate) fn owns(&self, block: &Block) -> bool {
        let allocator = &self.0.allocator;
        block.owner == allocator.number && allocator.lock().heap.segment_of(block.id()).pool == self.0.id
    }

    /// Runs `f`, during which this thread's allocations from the pool's allocator come from the default pool.
    pub(crate) fn run_outside<R>(&self, f: impl FnOnce() -> R) -> R {
        with_innermost(&ROUTES, (self.0.allocator.number, 0), f)
    }

    /// Returns the table entries of the pool's live blocks.
    pub(crate) fn live_blocks(&self) -> HashSet<u32> {
        self.0.allocator.lock().heap.blocks_of_pool(self.0.id, Use::Live).collect()
    }

    /// True if allocations outside the pool may use the pool's free blocks.
    pub(crate) fn has_use_on_oom(&self) -> bool {
        self.0.allocator.lock().pools.get(&self.0.id).is_some_and(|options| options.use_on_oom)
    }

    /// Like [`use_mem_pool`], until the returned value is dropped, for callers that cannot pass a closure.
    ///
    /// ```
    /// use claystone::storage::{MemPool, MemPoolOptions};
    /// use claystone::{Device, Tensor};
    /// let pool = MemPool::of_device(Device::Cpu, MemPoolOptions::default())?;
    /// let inside = pool.enter();
    /// let x = Tensor::zeros(100, Device::Cpu)?;
    /// drop(inside);
    /// assert_eq!(pool.stats().allocations, 1);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn enter(&self) -> EnteredPool {
        EnteredPool(enter(&ROUTES, (self.0.allocator.number, self.0.id)), self.clone())
    }

    /// Acquires the right to capture a graph into the pool. Returns `None` if another capture into the pool is in progress.
    pub(crate) fn claim_capture(&self) -> Option<CaptureClaim> {
        (!self.0.is_captured_into.swap(true, Acquire)).then(|| CaptureClaim(self.clone()))
    }

    /// Returns a stream other than `stream` that has memory in the pool.
    pub(crate) fn other_stream(&self, stream: StreamId) -> Option<StreamId> {
        let core = self.0.allocator.lock();
        let mut arenas = core.heap.arenas().iter().filter(|arena| arena.pool == self.0.id);
        arenas.find(|arena| arena.stream != stream).map(|arena| arena.stream)
    }

    /// True if the pool's live blocks are exactly `blocks` (PyTorch's `checkPoolLiveAllocations`).
    pub fn check_live(&self, blocks: &[&Block]) -> bool {
        let given: HashSet<u32> =
            blocks.iter().filter(|b| b.owner == self.0.allocator.number).map(|block| block.id()).collect();
        let core = self.0.allocator.lock();
        let live: HashSet<u32> = core.heap.blocks_of_pool(self.0.id, Use::Live).collect();
        given.len() == blocks.len() && given == live
    }

    /// Records the locations of the pool's live blocks (PyTorch's `getCheckpointState`).
    pub fn checkpoint(&self) -> PoolCheckpoint {
        let mut core = self.0.allocator.lock();
        let live: Vec<u32> = core.heap.blocks_of_pool(self.0.id, Use::Live).collect();
        let blocks = live.into_iter().map(|id| checkpoint_block(&mut core, id)).collect();
        PoolCheckpoint { allocator: self.0.allocator.number, pool: self.0.id, blocks }
    }

    /// Restores a checkpoint (PyTorch's `setCheckpointPoolState`). Frees the blocks in `give_back`, then reallocates
    /// each block of the checkpoint that is no longer live, at its recorded location. Returns the reallocated blocks
    /// in the order of their segments and offsets. Memory contents are not restored.
    ///
    /// # Errors
    /// [`Error::Invalid`], with nothing changed and `give_back` intact, if:
    /// - the checkpoint or a block of `give_back` belongs to another pool;
    /// - a live block is neither in `give_back` nor in the checkpoint;
    /// - a segment of the checkpoint was released or is still in use by a stream.
    ///
    /// Errors that the driver reports while waiting for streams.
    pub fn restore(&self, checkpoint: &PoolCheckpoint, give_back: &mut Vec<Block>) -> Result<Vec<Block>> {
        let (allocator, pool) = (&*self.0.allocator, self.0.id);
        if (checkpoint.allocator, checkpoint.pool) != (allocator.number, pool) {
            return Err(Error::invalid("MemPool::restore", format!("the checkpoint is not of pool {pool}")));
        }
        allocator.wait_for_users(give_back)?;
        allocator.process_events(true)?;
        let mut core = allocator.lock_with_stats();
        let missing = checkpoint.blocks_to_restore(&mut core, give_back)?;
        for block in give_back.drain(..) {
            core.pending.take_users(block.id());
            core.free_block(block.id(), block.requested());
        }
        let mut waits = HashSet::new();
        let mut restored = Vec::new();
        for (segment, place) in missing {
            let heap = &mut core.heap;
            let parts = heap.blocks_of(segment).filter(|&id| heap.entry(id).overlaps(&place.range()));
            let parts: Vec<u32> = parts.collect();
            let (id, streams) = heap.allocate_at(&parts, &place.range(), place.arena, place.requested);
            let stream = core.heap.arena_of_block(id).stream;
            let uses: PendingUses =
                streams.into_iter().filter(|&from| from != stream).map(|from| (from, None)).collect();
            waits.extend(uses.iter().map(|(from, _)| (*from, stream)));
            restored.push((core.create_handle(allocator.number, id, place.requested), uses));
        }
        drop(core);
        let waited = waits.into_iter().try_for_each(|(from, to)| {
            let marker = allocator.driver.record(from)?;
            allocator.driver.stream_waits(to, &marker)
        });
        if let Err(error) = waited.or_else(|_| allocator.driver.synchronize()) {
            let mut core = allocator.lock_with_stats();
            for (block, uses) in restored {
                core.free_used_block(block.id(), block.requested(), uses);
            }
            return Err(error);
        }
        Ok(restored.into_iter().map(|(block, _)| block).collect())
    }
}

impl fmt::Debug for MemPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory pool {} of {:?}", self.0.id, self.0.allocator)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut core = self.allocator.lock_with_stats();
        core.pools.remove(&self.id);
        core.heap.set_unsplit(self.id, false);
        core.heap.move_to_default_pool(self.id);
    }
}

impl CheckpointBlock {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.size
    }
}

fn checkpoint_block(core: &mut Core, id: u32) -> CheckpointBlock {
    let (entry, segment) = (*core.heap.entry(id), core.heap.segment_of(id).segment.id());
    let requested = core.slots.requested(id);
    CheckpointBlock { segment, offset: entry.offset(), size: entry.size(), arena: entry.arena(), requested }
}

impl PoolCheckpoint {
    /// Returns the checkpoint's blocks that will not be live after `blocks` are freed, each with its segment's number.
    /// Fails if the memory of one of these blocks will not be available.
    fn blocks_to_restore(&self, core: &mut Core, blocks: &[Block]) -> Result<Vec<(u32, CheckpointBlock)>> {
        let fail = |reason: String| Err(Error::invalid("MemPool::restore", reason));
        let pool = self.pool;
        if let Some(block) =
            blocks.iter().find(|b| b.owner != self.allocator || core.heap.segment_of(b.id()).pool != pool)
        {
            // Prints the size, not the location: reading the location may wait for a thread that moves the block and needs this lock.
            return fail(format!("a block of {} bytes is not of pool {pool}", block.size()));
        }
        let leaving: HashSet<u32> = blocks.iter().map(|block| block.id()).collect();
        let staying: Vec<u32> = core.heap.blocks_of_pool(pool, Use::Live).filter(|id| !leaving.contains(id)).collect();
        let mut missing: HashSet<usize> = (0..self.blocks.len()).collect();
        let index: HashMap<(u64, usize), usize> =
            self.blocks.iter().enumerate().map(|(at, p)| ((p.segment, p.offset), at)).collect();
        for id in staying {
            let place = checkpoint_block(core, id);
            match index.get(&(place.segment, place.offset)) {
                Some(at) if self.blocks[*at].size == place.size => missing.remove(at),
                _ => {
                    let (size, segment, offset) = (place.size, place.segment, place.offset);
                    return fail(format!(
                        "a live block is not in the checkpoint: {size} bytes at segment {segment} + {offset}"
                    ));
                }
            };
        }
        let held = core.heap.segments().filter(|(_, held)| held.pool == pool);
        let segments: HashMap<u64, u32> = held.map(|(at, held)| (held.segment.id(), at)).collect();
        let mut found = Vec::new();
        for place in self.blocks.iter().enumerate().filter(|(at, _)| missing.contains(at)).map(|(_, place)| place) {
            let Some(&segment) = segments.get(&place.segment) else {
                return fail(format!("segment {} was released to the driver since the checkpoint", place.segment));
            };
            let busy =
                core.heap.blocks_of(segment).map(|id| core.heap.entry(id)).any(|other| {
                    matches!(other.usage(), Use::Pending | Use::Unmapped) && other.overlaps(&place.range())
                });
            if busy || core.heap.segment(segment).is_none_or(|held| held.size < place.range().end) {
                return fail(format!("segment {} is in use, or has shrunk, since the checkpoint", place.segment));
            }
            found.push((segment, *place));
        }
        Ok(found)
    }
}
