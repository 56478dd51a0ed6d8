//! Private memory pools: segments reserved for some allocations, which can be restored to an earlier state.
//!
//! Every arena and segment carries a pool number; 0 is the allocator's default pool. [`use_mem_pool`] selects the pool of a thread's allocations.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::super::block::Block;
use super::events::PendingUses;
use super::heap::{Heap, Use};
use super::{CachingAllocator, Core};
use crate::device::StreamId;
use crate::options::setters;
use crate::{Error, Result};

/// Options of a [`MemPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemPoolOptions {
    /// Outside the pool, allocations that would fail may take its free blocks (PyTorch's `use_on_oom`).
    pub use_on_oom: bool,
    /// Blocks are never split: each allocation gets its own segment, which is reused whole (PyTorch's `no_split`).
    pub no_split: bool,
}

setters!(MemPoolOptions { use_on_oom: bool, no_split: bool });

/// A private pool of a [`CachingAllocator`]'s memory (`torch.cuda.MemPool`). A clone is another handle of the same pool.
///
/// Segments created inside [`use_mem_pool`] serve only allocations inside it. Related data stays together, and memory used by a captured graph does
/// not move. The allocator's limits and statistics include the pool; garbage collection, decay and the allocator's `empty_cache` skip it. When the
/// last handle is dropped, the pool's memory joins the default pool; live blocks stay valid.
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

/// The pool's identity, shared by its handles.
struct Handle {
    allocator: Arc<CachingAllocator>,
    id: u32,
    is_captured_into: AtomicBool,
}

/// Grants exclusive graph capture into a pool until dropped.
pub(crate) struct CaptureGuard<'a>(&'a AtomicBool);

impl Drop for CaptureGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

/// Statistics of a memory pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemPoolStats {
    /// Number of segments.
    pub segments: u64,
    /// Bytes of all segments.
    pub reserved_bytes: u64,
    /// Number of blocks held by the user.
    pub allocations: u64,
    /// Bytes of blocks held by the user, with requests rounded up.
    pub allocated_bytes: u64,
    /// Bytes of blocks held by the user or by unfinished work.
    pub active_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free: u64,
}

/// Locations of a pool's live blocks at one moment, to which [`MemPool::restore`] returns.
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
    /// The number of live blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if no block was live.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

thread_local! {
    /// How many [`use_mem_pool`] calls this thread is inside. Almost always 0, so that `ROUTES` need not be read.
    static ROUTE_DEPTH: Cell<usize> = const { Cell::new(0) };
    /// (allocator, pool) of each call, innermost last.
    static ROUTES: RefCell<Vec<(u32, u32)>> = const { RefCell::new(Vec::new()) };
}

/// Leaves [`use_mem_pool`] when dropped, also on panic.
struct PoolRoute;

impl PoolRoute {
    /// Routes this thread's allocations from `allocator` to `pool` until the guard is dropped.
    fn enter(allocator: u32, pool: u32) -> Option<PoolRoute> {
        ROUTES.try_with(|routes| routes.borrow_mut().push((allocator, pool))).ok()?;
        ROUTE_DEPTH.set(ROUTE_DEPTH.get() + 1);
        Some(PoolRoute)
    }
}

impl Drop for PoolRoute {
    fn drop(&mut self) {
        ROUTE_DEPTH.set(ROUTE_DEPTH.get() - 1);
        let _ = ROUTES.try_with(|routes| routes.borrow_mut().pop());
    }
}

/// Returns the pool from which this thread allocates in the given allocator.
pub(super) fn routed_pool(allocator: u32) -> u32 {
    if ROUTE_DEPTH.get() == 0 {
        return 0;
    }
    let find = |routes: &RefCell<Vec<(u32, u32)>>| {
        routes.borrow().iter().rev().find(|route| route.0 == allocator).map(|route| route.1)
    };
    ROUTES.try_with(find).ok().flatten().unwrap_or(0)
}

/// Runs `f`, during which this thread's allocations from the pool's allocator come from the pool (`torch.cuda.use_mem_pool`). Calls nest: the
/// innermost pool of an allocator is used. Other threads and allocators are not affected.
pub fn use_mem_pool<R>(pool: &MemPool, f: impl FnOnce() -> R) -> R {
    let _route = PoolRoute::enter(pool.0.allocator.number, pool.0.id);
    f()
}

impl MemPool {
    /// Creates an empty pool in `allocator`.
    pub fn new(allocator: &Arc<CachingAllocator>, options: MemPoolOptions) -> MemPool {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut core = allocator.lock();
        let id = loop {
            let id = NEXT.fetch_add(1, Relaxed);
            if id != 0 && id < super::heap::SPILLED_POOL && !core.pools.contains_key(&id) {
                break id;
            }
        };
        core.pools.insert(id, options);
        if options.no_split {
            core.heap.unsplit_pools.push(id);
        }
        MemPool(Arc::new(Handle { allocator: Arc::clone(allocator), id, is_captured_into: AtomicBool::new(false) }))
    }

    /// The pool's number: unique among the live pools of the process, never 0.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// The allocator that the pool belongs to.
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
        drop(unused); // outside the lock: releasing waits for the device
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
        let _route = PoolRoute::enter(self.0.allocator.number, 0);
        f()
    }

    /// Returns the table entries of the pool's live blocks.
    pub(crate) fn live_blocks(&self) -> HashSet<u32> {
        self.0.allocator.lock().heap.blocks_of_pool(self.0.id, Use::Live).collect()
    }

    /// True if allocations outside the pool may take its free blocks.
    pub(crate) fn has_use_on_oom(&self) -> bool {
        self.0.allocator.lock().pools.get(&self.0.id).is_some_and(|options| options.use_on_oom)
    }

    /// Acquires the right to capture a graph into the pool; `None` if a capture is in progress.
    pub(crate) fn begin_capture(&self) -> Option<CaptureGuard<'_>> {
        (!self.0.is_captured_into.swap(true, Acquire)).then(|| CaptureGuard(&self.0.is_captured_into))
    }

    /// Returns a stream other than `stream` that has memory in the pool.
    pub(crate) fn other_stream(&self, stream: StreamId) -> Option<StreamId> {
        let core = self.0.allocator.lock();
        let streams = core.heap.arenas.iter().filter(|arena| arena.pool == self.0.id).map(|arena| arena.stream);
        streams.into_iter().find(|&of| of != stream)
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
        let blocks = live.into_iter().map(|id| core.checkpoint_block(id)).collect();
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
        let missing = core.blocks_to_restore(allocator.number, checkpoint, give_back)?;
        for block in give_back.drain(..) {
            core.pending.forget_users(block.id());
            core.free_block(block.id(), block.requested());
        }
        let mut waits = HashSet::new();
        let mut restored = Vec::new();
        for (segment, place) in missing {
            let (id, streams) = core.heap.allocate_checkpoint_block(segment, &place);
            let stream = core.heap.arenas[place.arena as usize].stream;
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
        core.heap.unsplit_pools.retain(|&pool| pool != self.id);
        core.heap.move_to_default_pool(self.id);
    }
}

impl CachingAllocator {
    /// Waits for the other streams that used these blocks.
    fn wait_for_users(&self, blocks: &[Block]) -> Result<()> {
        for block in
            blocks.iter().filter(|block| block.owner == self.number && block.slot().used_by_other_stream.load(Relaxed))
        {
            let streams = self.lock().pending.users(block.id());
            for stream in streams {
                self.driver.wait(&self.driver.record(stream)?)?;
            }
        }
        Ok(())
    }
}

impl Core {
    fn checkpoint_block(&mut self, id: u32) -> CheckpointBlock {
        let (entry, segment) = (self.heap.table[id as usize], self.heap.segment_of(id).segment.id());
        // SAFETY: slots of the table live as long as the allocator.
        let requested = unsafe { self.slots.get_or_create(id).as_ref() }.requested();
        CheckpointBlock { segment, offset: entry.offset(), size: entry.size(), arena: entry.arena(), requested }
    }

    /// Returns the checkpoint's blocks that will not be live after `blocks` are freed, each with its segment's
    /// number. Fails if the memory of one of them will not be available.
    fn blocks_to_restore(
        &mut self,
        owner: u32,
        checkpoint: &PoolCheckpoint,
        blocks: &[Block],
    ) -> Result<Vec<(u32, CheckpointBlock)>> {
        let fail = |reason: String| Err(Error::invalid("MemPool::restore", reason));
        let pool = checkpoint.pool;
        if let Some(block) = blocks.iter().find(|b| b.owner != owner || self.heap.segment_of(b.id()).pool != pool) {
            // Prints the size, not the location: reading the location may wait for a thread that moves the block and needs this lock.
            return fail(format!("a block of {} bytes is not of pool {pool}", block.size()));
        }
        let leaving: HashSet<u32> = blocks.iter().map(|block| block.id()).collect();
        let staying: Vec<u32> = self.heap.blocks_of_pool(pool, Use::Live).filter(|id| !leaving.contains(id)).collect();
        let mut missing: HashSet<usize> = (0..checkpoint.blocks.len()).collect();
        let index: HashMap<(u64, usize), usize> =
            checkpoint.blocks.iter().enumerate().map(|(at, p)| ((p.segment, p.offset), at)).collect();
        for id in staying {
            let place = self.checkpoint_block(id);
            match index.get(&(place.segment, place.offset)) {
                Some(at) if checkpoint.blocks[*at].size == place.size => missing.remove(at),
                _ => {
                    let (size, segment, offset) = (place.size, place.segment, place.offset);
                    return fail(format!(
                        "a live block is not in the checkpoint: {size} bytes at segment {segment} + {offset}"
                    ));
                }
            };
        }
        let segments: HashMap<u64, u32> = (self.heap.segments.iter().enumerate())
            .filter_map(|(at, held)| {
                held.as_ref().filter(|held| held.pool == pool).map(|h| (h.segment.id(), at as u32))
            })
            .collect();
        let mut found = Vec::new();
        for place in checkpoint.blocks.iter().enumerate().filter(|(at, _)| missing.contains(at)).map(|(_, place)| place)
        {
            let Some(&segment) = segments.get(&place.segment) else {
                return fail(format!("segment {} was released to the driver since the checkpoint", place.segment));
            };
            let end = place.offset + place.size;
            let busy = self.heap.blocks_of(segment).map(|id| self.heap.table[id as usize]).any(|other| {
                matches!(other.usage(), Use::Pending | Use::Unmapped)
                    && other.offset() < end
                    && place.offset < other.offset() + other.size()
            });
            if busy || self.heap.segments[segment as usize].as_ref().is_none_or(|held| held.size < end) {
                return fail(format!("segment {} is in use, or has shrunk, since the checkpoint", place.segment));
            }
            found.push((segment, *place));
        }
        Ok(found)
    }
}

impl Heap {
    /// Returns the pool's blocks with the given usage, by segment and offset.
    fn blocks_of_pool(&self, pool: u32, usage: Use) -> impl Iterator<Item = u32> + '_ {
        let held = self.segments.iter().enumerate();
        let segments = held.filter(move |(_, held)| held.as_ref().is_some_and(|held| held.pool == pool));
        let blocks = segments.flat_map(|(at, _)| self.blocks_of(at as u32));
        blocks.filter(move |&id| self.table[id as usize].usage() == usage)
    }

    pub(super) fn pool_stats(&self, pool: u32) -> MemPoolStats {
        let mut stats = MemPoolStats { largest_free: self.largest_free(pool) as u64, ..MemPoolStats::default() };
        for held in self.segments.iter().flatten().filter(|held| held.pool == pool) {
            stats.segments += 1;
            stats.reserved_bytes += held.committed() as u64;
        }
        let bytes = |id: u32| self.table[id as usize].size() as u64;
        for id in self.blocks_of_pool(pool, Use::Live) {
            stats.allocations += 1;
            stats.allocated_bytes += bytes(id);
        }
        stats.active_bytes = stats.allocated_bytes + self.blocks_of_pool(pool, Use::Pending).map(bytes).sum::<u64>();
        stats
    }

    fn move_to_default_pool(&mut self, pool: u32) {
        let mut homes = HashMap::new();
        for at in 0..self.arenas.len() as u32 {
            let (stream, kind) = (self.arenas[at as usize].stream, self.arenas[at as usize].kind);
            if self.arenas[at as usize].pool == pool {
                let home = self.arena(0, stream, kind);
                homes.insert(at, home);
                while let Some(id) = self.any_free(at) {
                    self.move_to_arena(id, home);
                }
            }
        }
        for entry in self.table.iter_mut().filter(|entry| entry.usage() != Use::Vacant) {
            entry.set_arena(homes.get(&entry.arena()).copied().unwrap_or(entry.arena()));
        }
        self.segments.iter_mut().flatten().filter(|held| held.pool == pool).for_each(|held| held.pool = 0);
        homes.into_keys().for_each(|arena| self.retire_arena(arena));
    }

    /// Allocates exactly the free bytes at `place`. Returns the block and the streams that owned the bytes.
    fn allocate_checkpoint_block(&mut self, segment: u32, place: &CheckpointBlock) -> (u32, Vec<StreamId>) {
        let end = place.offset + place.size;
        let covers = |heap: &Heap, id: u32| {
            let entry = heap.table[id as usize];
            entry.offset() < end && place.offset < entry.offset() + entry.size()
        };
        let parts: Vec<u32> = self.blocks_of(segment).filter(|&id| covers(self, id)).collect();
        self.allocate_at(&parts, (place.offset, place.size), place.arena, place.requested)
    }
}
