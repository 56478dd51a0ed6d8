//! Private memory pools: segments that only some allocations use, and that can be set back to an earlier state.
//!
//! A pool is a number that every arena and segment carries; 0 is the allocator's own. A thread says which pool its
//! allocations come from ([`use_mem_pool`]). When the last handle on a pool is gone, its memory becomes the allocator's
//! own: what is free serves everybody, what is live goes on living.

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
use crate::{Error, Result};

/// How a [`MemPool`] differs from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemPoolOptions {
    /// Allocations outside the pool may take its free blocks before they fail (PyTorch's `use_on_oom`).
    pub use_on_oom: bool,
    /// Its blocks are never split: each allocation has a segment of its own, reused whole (PyTorch's `no_split`).
    pub no_split: bool,
}

/// A private pool of a [`CachingAllocator`]'s memory (`torch.cuda.MemPool`). Cloning makes another handle on it.
///
/// Segments made inside [`use_mem_pool`] serve only allocations inside it, so that what belongs together lies together,
/// and what a recorded sequence of work uses stays in place. Memory limits and statistics of the allocator include them;
/// garbage collection, decay and the emptying of caches leave them alone. When the last handle is dropped, its memory
/// becomes the allocator's own; blocks still live stay valid.
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

struct Handle {
    allocator: Arc<CachingAllocator>,
    id: u32,
    is_captured_into: AtomicBool,
}

/// As long as it lives, nobody else captures into the pool.
pub(crate) struct Capturing<'a>(&'a AtomicBool);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

/// What a pool holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemPoolStats {
    /// Segments.
    pub segments: u64,
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// Blocks held by the user.
    pub allocations: u64,
    /// Bytes of blocks held by the user: requests rounded up.
    pub allocated_bytes: u64,
    /// Bytes of blocks held by the user or by work not yet done.
    pub active_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free: u64,
}

/// Where a pool's live blocks were at some moment: what [`MemPool::restore`] goes back to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolCheckpoint {
    allocator: u32,
    pool: u32,
    places: Vec<Place>,
}

/// A live block of a checkpoint: its segment's number, and the rest of what its entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    segment: u64,
    offset: usize,
    size: usize,
    arena: u32,
    requested: usize,
}

impl PoolCheckpoint {
    /// The number of live blocks.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing was live.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

thread_local! {
    /// How many routes this thread is inside of: almost always none, and then nothing else is looked at.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// (allocator, pool), innermost last.
    static ROUTES: RefCell<Vec<(u32, u32)>> = const { RefCell::new(Vec::new()) };
}

/// Ends a route, on panics as well.
struct Route;

impl Route {
    fn enter(allocator: u32, pool: u32) -> Option<Route> {
        ROUTES.try_with(|routes| routes.borrow_mut().push((allocator, pool))).ok()?;
        DEPTH.set(DEPTH.get() + 1);
        Some(Route)
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        let _ = ROUTES.try_with(|routes| routes.borrow_mut().pop());
    }
}

/// The pool that this thread's allocations of an allocator come from.
pub(super) fn routed(allocator: u32) -> u32 {
    if DEPTH.get() == 0 {
        return 0;
    }
    let find = |routes: &RefCell<Vec<(u32, u32)>>| {
        routes.borrow().iter().rev().find(|route| route.0 == allocator).map(|route| route.1)
    };
    ROUTES.try_with(find).ok().flatten().unwrap_or(0)
}

/// Runs `f`: what this thread allocates inside from the pool's allocator comes from the pool (`torch.cuda.use_mem_pool`).
/// Nests: the innermost pool of an allocator counts. Other threads and allocators are not affected.
pub fn use_mem_pool<R>(pool: &MemPool, f: impl FnOnce() -> R) -> R {
    let _route = Route::enter(pool.0.allocator.number, pool.0.id);
    f()
}

impl MemPool {
    /// A new pool of this allocator, empty.
    pub fn new(allocator: &Arc<CachingAllocator>, options: MemPoolOptions) -> MemPool {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut core = allocator.lock();
        let id = loop {
            let id = NEXT.fetch_add(1, Relaxed);
            if id != 0 && id < super::heap::SPILLED && !core.pools.contains_key(&id) {
                break id;
            }
        };
        core.pools.insert(id, options);
        if options.no_split {
            core.heap.unsplit_pools.push(id);
        }
        MemPool(Arc::new(Handle { allocator: Arc::clone(allocator), id, is_captured_into: AtomicBool::new(false) }))
    }

    /// Its number: unique among the living pools of the process, never 0.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// The allocator it is part of.
    pub fn allocator(&self) -> &Arc<CachingAllocator> {
        &self.0.allocator
    }

    /// What it holds now.
    pub fn stats(&self) -> MemPoolStats {
        self.0.allocator.lock().heap.pool_stats(self.0.id)
    }

    /// Gives its unused segments back to the driver (`torch.cuda.empty_cache` inside the pool). Waits for the streams
    /// that still use blocks given back.
    ///
    /// # Errors
    /// What the driver reports while waiting.
    pub fn empty_cache(&self) -> Result<()> {
        self.0.allocator.process_events(true)?;
        let unused = self.0.allocator.lock().heap.remove_unused(self.0.id);
        drop(unused); // outside the lock: releasing waits for the device
        self.0.allocator.release_pages(self.0.id, 0);
        Ok(())
    }

    /// Whether a live block is one of its own.
    pub(crate) fn owns(&self, block: &Block) -> bool {
        let allocator = &self.0.allocator;
        block.owner == allocator.number && allocator.lock().heap.held(block.id()).pool == self.0.id
    }

    /// Runs `f`, inside of [`use_mem_pool`]: what this thread allocates there from the pool's allocator is of no pool.
    pub(crate) fn leave<R>(&self, f: impl FnOnce() -> R) -> R {
        let _route = Route::enter(self.0.allocator.number, 0);
        f()
    }

    /// The numbers of its live blocks.
    pub(crate) fn live(&self) -> HashSet<u32> {
        self.0.allocator.lock().heap.blocks_of_pool(self.0.id, Use::Live).collect()
    }

    /// Whether others may be given its free blocks.
    pub(crate) fn lends(&self) -> bool {
        self.0.allocator.lock().pools.get(&self.0.id).is_some_and(|options| options.use_on_oom)
    }

    /// The right to capture a graph into it, which one thread has at a time.
    pub(crate) fn begin_capture(&self) -> Option<Capturing<'_>> {
        (!self.0.is_captured_into.swap(true, Acquire)).then(|| Capturing(&self.0.is_captured_into))
    }

    /// A stream other than this one that has memory of it.
    pub(crate) fn other_stream(&self, stream: StreamId) -> Option<StreamId> {
        let core = self.0.allocator.lock();
        let streams = core.heap.arenas.iter().filter(|arena| arena.pool == self.0.id).map(|arena| arena.stream);
        streams.into_iter().find(|&of| of != stream)
    }

    /// Whether these are all of its live blocks, and it has no other (PyTorch's `checkPoolLiveAllocations`).
    pub fn check_live(&self, blocks: &[&Block]) -> bool {
        let given: HashSet<u32> =
            blocks.iter().filter(|b| b.owner == self.0.allocator.number).map(|block| block.id()).collect();
        let core = self.0.allocator.lock();
        let live: HashSet<u32> = core.heap.blocks_of_pool(self.0.id, Use::Live).collect();
        given.len() == blocks.len() && given == live
    }

    /// Where its live blocks are now (PyTorch's `getCheckpointState`).
    pub fn checkpoint(&self) -> PoolCheckpoint {
        let mut core = self.0.allocator.lock();
        let live: Vec<u32> = core.heap.blocks_of_pool(self.0.id, Use::Live).collect();
        let places = live.into_iter().map(|id| core.place(id)).collect();
        PoolCheckpoint { allocator: self.0.allocator.number, pool: self.0.id, places }
    }

    /// Goes back to a checkpoint (PyTorch's `setCheckpointPoolState`): takes the blocks of `give_back`, and allocates
    /// those of the checkpoint that are then not live again, each at exactly its place. Returns them in the order of their
    /// segments and offsets. Contents are what they are.
    ///
    /// # Errors
    /// [`Error::Invalid`], with nothing changed and `give_back` as it was, where the checkpoint is another pool's, a
    /// block to give back is, a live block is neither given back nor part of the checkpoint, or a segment of the
    /// checkpoint is gone or still in use by a stream; what the driver reports while streams are waited for.
    pub fn restore(&self, checkpoint: &PoolCheckpoint, give_back: &mut Vec<Block>) -> Result<Vec<Block>> {
        let (allocator, pool) = (&*self.0.allocator, self.0.id);
        if (checkpoint.allocator, checkpoint.pool) != (allocator.number, pool) {
            return Err(Error::invalid("MemPool::restore", format!("the checkpoint is not of pool {pool}")));
        }
        allocator.wait_for_users(give_back)?;
        allocator.process_events(true)?;
        let mut core = allocator.lock_with_stats();
        let missing = core.missing_of(allocator.number, checkpoint, give_back)?;
        for block in give_back.drain(..) {
            core.pending.forget(block.id());
            core.give_back(block.id(), block.requested());
        }
        let mut waits = HashSet::new();
        let mut restored = Vec::new();
        for (segment, place) in missing {
            let (id, streams) = core.heap.claim(segment, &place);
            let stream = core.heap.arenas[place.arena as usize].stream;
            let uses: PendingUses =
                streams.into_iter().filter(|&from| from != stream).map(|from| (from, None)).collect();
            waits.extend(uses.iter().map(|(from, _)| (*from, stream)));
            restored.push((core.block(allocator.number, id, place.requested), uses));
        }
        drop(core);
        let waited = waits.into_iter().try_for_each(|(from, to)| {
            let marker = allocator.driver.record(from)?;
            allocator.driver.stream_waits(to, &marker)
        });
        if let Err(error) = waited.or_else(|_| allocator.driver.synchronize()) {
            let mut core = allocator.lock_with_stats();
            for (block, uses) in restored {
                core.give_back_used(block.id(), block.requested(), uses);
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
        core.heap.dissolve(self.id);
    }
}

impl CachingAllocator {
    /// Waits until the other streams that used these blocks are done.
    fn wait_for_users(&self, blocks: &[Block]) -> Result<()> {
        for block in blocks.iter().filter(|block| block.owner == self.number && block.slot().recorded.load(Relaxed)) {
            let streams = self.lock().pending.users(block.id());
            for stream in streams {
                self.driver.wait(&self.driver.record(stream)?)?;
            }
        }
        Ok(())
    }
}

impl Core {
    fn place(&mut self, id: u32) -> Place {
        let (entry, segment) = (self.heap.table[id as usize], self.heap.held(id).segment.id());
        // SAFETY: slots of the table live as long as the allocator.
        let requested = unsafe { self.slots.of(id).as_ref() }.requested();
        Place { segment, offset: entry.offset(), size: entry.size(), arena: entry.arena(), requested }
    }

    /// The places of a checkpoint that will not be live once these blocks are given back, with the number of their held
    /// segment; an error if they could not be had then.
    fn missing_of(&mut self, owner: u32, checkpoint: &PoolCheckpoint, blocks: &[Block]) -> Result<Vec<(u32, Place)>> {
        let fail = |reason: String| Err(Error::invalid("MemPool::restore", reason));
        let pool = checkpoint.pool;
        if let Some(block) = blocks.iter().find(|b| b.owner != owner || self.heap.held(b.id()).pool != pool) {
            // Not its place: under the lock nobody waits for who moves it.
            return fail(format!("a block of {} bytes is not of pool {pool}", block.size()));
        }
        let leaving: HashSet<u32> = blocks.iter().map(|block| block.id()).collect();
        let staying: Vec<u32> = self.heap.blocks_of_pool(pool, Use::Live).filter(|id| !leaving.contains(id)).collect();
        let mut missing: HashSet<usize> = (0..checkpoint.places.len()).collect();
        let index: HashMap<(u64, usize), usize> =
            checkpoint.places.iter().enumerate().map(|(at, p)| ((p.segment, p.offset), at)).collect();
        for id in staying {
            let place = self.place(id);
            match index.get(&(place.segment, place.offset)) {
                Some(at) if checkpoint.places[*at].size == place.size => missing.remove(at),
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
        for place in checkpoint.places.iter().enumerate().filter(|(at, _)| missing.contains(at)).map(|(_, place)| place)
        {
            let Some(&segment) = segments.get(&place.segment) else {
                return fail(format!("segment {} has gone back to the driver since the checkpoint", place.segment));
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
    /// Blocks of a pool that are used so, by segment and offset.
    fn blocks_of_pool(&self, pool: u32, usage: Use) -> impl Iterator<Item = u32> + '_ {
        let held = self.segments.iter().enumerate();
        let segments = held.filter(move |(_, held)| held.as_ref().is_some_and(|held| held.pool == pool));
        let blocks = segments.flat_map(|(at, _)| self.blocks_of(at as u32));
        blocks.filter(move |&id| self.table[id as usize].usage() == usage)
    }

    /// What a pool holds.
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

    /// Makes a pool's memory the default pool's.
    fn dissolve(&mut self, pool: u32) {
        let mut homes = HashMap::new();
        for at in 0..self.arenas.len() as u32 {
            let (stream, kind) = (self.arenas[at as usize].stream, self.arenas[at as usize].kind);
            if self.arenas[at as usize].pool == pool {
                let home = self.arena(0, stream, kind);
                homes.insert(at, home);
                while let Some(id) = self.any_free(at) {
                    self.rehome(id, home);
                }
            }
        }
        for entry in self.table.iter_mut().filter(|entry| entry.usage() != Use::Vacant) {
            entry.set_arena(homes.get(&entry.arena()).copied().unwrap_or(entry.arena()));
        }
        self.segments.iter_mut().flatten().filter(|held| held.pool == pool).for_each(|held| held.pool = 0);
        homes.into_keys().for_each(|arena| self.retire_arena(arena));
    }

    /// Takes exactly these bytes, which are free, out of the blocks that have them. Gives the streams those belonged to.
    fn claim(&mut self, segment: u32, place: &Place) -> (u32, Vec<StreamId>) {
        let end = place.offset + place.size;
        let covers = |heap: &Heap, id: u32| {
            let entry = heap.table[id as usize];
            entry.offset() < end && place.offset < entry.offset() + entry.size()
        };
        let parts: Vec<u32> = self.blocks_of(segment).filter(|&id| covers(self, id)).collect();
        self.take_at(&parts, (place.offset, place.size), place.arena, place.requested)
    }
}
