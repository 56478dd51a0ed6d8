//! Private pools: their contents and checkpoints.

use std::ops::Range;

use super::super::ops::Random;
use super::*;
use crate::storage::Snapshot;

/// Maximum number of pools at a time. It is small, because memory in a pool is unavailable to other allocations.
const POOLS: usize = 3;

/// A private pool and one of its checkpoints.
#[derive(Clone)]
pub(super) struct Pool {
    pub(super) handle: MemPool,
    options: MemPoolOptions,
    checkpoint: Option<(PoolCheckpoint, Places)>,
}

/// The size, the requested size and the stream of each block, by segment id and offset.
type Places = BTreeMap<(u64, usize), (usize, usize, u32)>;

impl World {
    pub(super) fn make_pool(&mut self, no_split: bool, use_on_oom: bool) {
        if self.pools.len() < POOLS {
            let options = MemPoolOptions { no_split, use_on_oom };
            self.pools.push(Pool { handle: MemPool::new(&self.allocator, options), options, checkpoint: None });
        }
    }

    fn pick(&mut self, pool: usize) -> Option<&mut Pool> {
        let n = self.pools.len().max(1);
        self.pools.get_mut(pool % n)
    }

    /// Drops the last handle of a pool. Its live blocks then belong to the default pool.
    pub(super) fn drop_pool(&mut self, pool: usize) {
        let Some(id) = self.pick(pool).map(|pool| pool.handle.id()) else { return };
        self.unmark_spare_blocks(|live| live.pool == id);
        self.pools.retain(|pool| pool.handle.id() != id);
        let mut orphans = 0;
        for live in self.live.iter_mut().filter(|live| live.pool == id) {
            live.pool = 0;
            orphans += 1;
        }
        if orphans > 0 {
            self.note("dropped a pool with live blocks");
        }
    }

    pub(super) fn empty_pool(&mut self, pool: usize) -> Result<(), String> {
        let Some(handle) = self.pick(pool).map(|pool| pool.handle.clone()) else { return Ok(()) };
        if self.allow_injected_failure(|_| handle.empty_cache())?.is_none() {
            return Ok(());
        }
        let id = handle.id();
        let unused = self.allocator.lock().heap.unused_segments(id).len();
        ensure!(unused == 0, "an emptied pool holds {unused} unused segments");
        Ok(())
    }

    pub(super) fn checkpoint(&mut self, pool: usize) -> Result<(), String> {
        let Some(id) = self.pick(pool).map(|pool| pool.handle.id()) else { return Ok(()) };
        self.unmark_spare_blocks(|live| live.pool == id);
        let places: Places = self.live.iter().filter(|live| live.pool == id).map(Live::place).collect();
        let Some(pool) = self.pick(pool) else { return Ok(()) };
        let checkpoint = pool.handle.checkpoint();
        let (told, n) = (checkpoint.len(), places.len());
        ensure!(told == n, "a checkpoint has {told} blocks of {n}");
        pool.checkpoint = Some((checkpoint, places));
        Ok(())
    }

    /// Restores a checkpoint. The call must fail if and only if needed memory was released, and must change nothing if it fails.
    pub(super) fn restore(&mut self, pool: usize, seed: u64) -> Result<(), String> {
        let Some(Pool { handle, checkpoint: Some((checkpoint, mut missing)), .. }) = self.pick(pool).cloned() else {
            return Ok(());
        };
        self.unmark_spare_blocks(|live| live.pool == handle.id());
        let mut random = Random(seed);
        let (mut leaving, mut blocks) = (Vec::new(), Vec::new());
        for live in std::mem::take(&mut self.live) {
            let (place, (size, ..)) = live.place();
            let in_place = missing.get(&place).is_some_and(|saved| saved.0 == size);
            if live.pool != handle.id() || in_place && random.below(2) == 0 {
                if live.pool == handle.id() {
                    missing.remove(&place);
                }
                self.live.push(live);
            } else {
                let checked = self.sim.check_tag(self.sim.stream(live.stream), &live.block, live.tag);
                checked.map_err(|error| format!("a check reported: {error}"))?;
                let Live { block, requested, stream, pool, tag, users } = live;
                blocks.push(block);
                leaving.push(move |block| Live { block, requested, stream, pool, tag, users });
            }
        }
        // The committed ranges of each segment.
        let segments: BTreeMap<u64, Vec<Range<usize>>> = {
            let core = self.allocator.lock();
            let held = core.heap.segments();
            let held = held.filter(|(_, held)| held.pool == handle.id());
            held.map(|(at, held)| (held.segment.id(), core.heap.mapped(at))).collect()
        };
        let possible = missing.iter().all(|((segment, offset), (size, ..))| {
            let inside = |part: &Range<usize>| part.start <= *offset && offset + size <= part.end;
            segments.get(segment).is_some_and(|parts| parts.iter().any(inside))
        });
        let failures = self.sim.failures_left();
        match handle.restore(&checkpoint, &mut blocks) {
            Ok(restored) => {
                ensure!(possible && blocks.is_empty(), "restored what was gone, or left blocks");
                let stream = |at: &(u64, usize)| missing.get(at).map_or(u32::MAX, |saved| saved.2);
                let told = restored.iter().map(|block| (place(block), (block.size(), block.requested())));
                let places: Places = told.map(|(at, (size, asked))| (at, (size, asked, stream(&at)))).collect();
                ensure!(places == missing, "{missing:?} were to be restored, not {places:?}");
                for block in restored {
                    let stream = missing[&place(&block)].2;
                    self.add(block, stream, handle.id())?;
                }
                self.note(if missing.is_empty() { "restored nothing" } else { "restored" });
            }
            Err(_) if failures != self.sim.failures_left() => {
                // After an error, either nothing has changed, or all blocks were freed.
                ensure!(blocks.is_empty() || blocks.len() == leaving.len(), "some blocks went, and others not");
                self.live.extend(leaving.into_iter().zip(blocks).map(|(live, block)| live(block)));
                self.accept_peaks()?;
                self.note("told of a failure");
            }
            Err(error) => {
                let error = error.to_string();
                let why = error.contains("was released") || error.contains("has shrunk");
                ensure!(!possible && why, "restoring {missing:?} reported: {error}");
                ensure!(blocks.len() == leaving.len(), "blocks went in a restoration that failed");
                self.live.extend(leaving.into_iter().zip(blocks).map(|(live, block)| live(block)));
                self.note("could not restore");
            }
        }
        Ok(())
    }

    /// Moves the spare blocks for which `which` is true, which a callback would free, back to the ordinary live blocks.
    pub(super) fn unmark_spare_blocks(&mut self, which: impl Fn(&Live) -> bool) {
        let mut spare_blocks = self.spare_blocks.lock().unwrap();
        let (back, stays) = std::mem::take(&mut *spare_blocks).into_iter().partition::<Vec<_>, _>(which);
        *spare_blocks = stays;
        self.live.extend(back);
    }

    /// Returns the private pool of a block's segment; 0 if none.
    pub(super) fn pool_of(&self, block: &Block) -> u32 {
        self.allocator.lock().heap.segment_of(block.id()).pool
    }

    /// True if the pool exists and has `use_on_oom`.
    pub(super) fn has_use_on_oom(&self, id: u32) -> bool {
        self.pools.iter().any(|pool| pool.handle.id() == id && pool.options.use_on_oom)
    }

    /// Checks that blocks belong to the pools and streams they were allocated for, and that the pools' statistics match.
    pub(super) fn check_pools(&self) -> Result<(), String> {
        for live in self.live.iter().chain(&*self.spare_blocks.lock().unwrap()) {
            let core = self.allocator.lock();
            let arena = core.heap.arena_of_block(live.block.id());
            let (pool, stream, held) = (arena.pool, arena.stream.0, core.heap.segment_of(live.block.id()).pool);
            let (block, told) = (&live.block, (if pool == SPILLED_POOL { pool } else { live.pool }, live.stream));
            ensure!((pool, stream) == told && held == pool, "{block:?} of {told:?} is in pool {pool}, stream {stream}");
        }
        for Pool { handle, options, .. } in &self.pools {
            let (id, stats) = (handle.id(), handle.stats());
            let [count, allocated, _] = self.totals_of(|live| live.pool == id);
            let told = (stats.allocations, stats.allocated_bytes);
            ensure!(told == (count, allocated), "pool {id} says {stats:?}, and has {count} blocks of {allocated}");
            let sums = [allocated, stats.active_bytes, stats.reserved_bytes];
            ensure!(sums.is_sorted(), "no order in {stats:?}");
            if options.no_split {
                let core = self.allocator.lock();
                let split = core
                    .heap
                    .blocks()
                    .find(|entry| core.heap.arenas()[entry.arena() as usize].pool == id && !entry.covers_segment());
                ensure!(split.is_none(), "a block of a pool without splitting is not a segment: {split:?}");
            }
        }
        Ok(())
    }

    /// Checks that a snapshot's segments belong to existing pools, and add up to the pools' statistics.
    pub(super) fn check_pools_of(&self, snapshot: &Snapshot) -> Result<(), String> {
        let mut pools = BTreeMap::from([(0, None)]);
        pools.extend(self.pools.iter().map(|pool| (i64::from(pool.handle.id()), Some(pool.handle.stats()))));
        for segment in &snapshot.segments {
            ensure!(pools.contains_key(&segment.segment_pool_id.1), "a segment of no pool: {segment:?}");
        }
        for (id, stats) in pools.into_iter().filter_map(|(id, stats)| Some((id, stats?))) {
            let of_pool = || snapshot.segments.iter().filter(|segment| segment.segment_pool_id == (0, id));
            let sum = |f: fn(&SegmentInfo) -> u64| of_pool().map(f).sum::<u64>();
            // An expandable segment is shown as the parts between its holes.
            let grows = of_pool().any(|segment| segment.is_expandable);
            let shown = of_pool().count() as u64;
            let segments = if grows && shown > stats.segments { stats.segments } else { shown };
            let sums = [segments, sum(|g| g.total_size), sum(SegmentInfo::allocated_size)];
            let told = [stats.segments, stats.reserved_bytes, stats.allocated_bytes];
            ensure!(sums == told, "a snapshot's sums for pool {id} are {sums:?}, the pool says {told:?}");
            let active = sum(SegmentInfo::active_size);
            ensure!(active == stats.active_bytes, "a snapshot has {active} active bytes in pool {id}: {stats:?}");
        }
        Ok(())
    }
}

impl Live {
    /// Returns the block's segment id and offset, and its size, requested size and stream.
    fn place(&self) -> ((u64, usize), (usize, usize, u32)) {
        (place(&self.block), (self.block.size(), self.requested, self.stream))
    }
}
