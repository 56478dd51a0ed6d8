//! The allocator on the simulated device, without memory contents or a clock.

mod compact;
mod decay;
mod events;
mod expand;
mod failures;
#[cfg(loom)]
mod interleavings;
mod ladder;
mod mempool;
mod policy;
mod properties;
mod sequences;
mod streams;

use super::heap::{NONE, NOWHERE, Use};
use super::*;
use crate::Error;
use crate::storage::{Call, Failure, Sim, SimOptions};

const MIB: usize = 1 << 20;

fn device(capacity: u64, config: &str) -> (Sim, CachingAllocator) {
    let options = SimOptions { capacity, record_calls: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
    (sim, allocator)
}

fn take(allocator: &CachingAllocator, bytes: usize) -> Block {
    allocator.allocate(bytes, StreamId::DEFAULT).unwrap()
}

fn free_all(allocator: &CachingAllocator, blocks: impl IntoIterator<Item = Block>) {
    blocks.into_iter().for_each(|block| allocator.deallocate(block));
}

/// The block's segment id and offset.
fn place(block: &Block) -> (u64, usize) {
    let place = block.location();
    (place.segment().id(), place.offset())
}

/// Sizes, in bytes, of the segments created so far.
fn created(sim: &Sim) -> Vec<usize> {
    let size = |call: &Call| if let Call::Create(bytes) = call { Some(*bytes) } else { None };
    sim.calls().iter().filter_map(size).collect()
}

/// The calls after the first `before` ones.
fn calls_since(sim: &Sim, before: u64) -> Vec<Call> {
    sim.calls().split_off(before as usize)
}

impl CachingAllocator {
    /// Panics unless the table is consistent: blocks cover their segments and belong to their pools, no two adjacent
    /// free blocks share an arena, the bins hold exactly the free blocks, and the statistics match.
    pub(in crate::storage) fn check(&self) {
        let core = self.drain_caches();
        let heap = &core.heap;
        let binned = properties::binned(heap);
        let (mut reserved, mut active, mut inactive, mut blocks, mut free_blocks) = (0, 0, 0, 0, 0);
        for (at, held) in heap.segments.iter().enumerate().filter_map(|(at, held)| Some((at, held.as_ref()?))) {
            let (mut offset, mut prev, mut free_arena, mut holes) = (0, NONE, NOWHERE, 0);
            for id in heap.blocks_of(at as u32) {
                let entry = heap.table[id as usize];
                assert_eq!((entry.segment, entry.prev, entry.offset()), (at as u32, prev, offset), "blocks tile");
                let arena = &heap.arenas[entry.arena() as usize];
                assert_eq!((arena.pool, arena.kind), (held.pool, held.kind), "blocks are of their segment's pool");
                assert!(entry.size() > 0 && entry.size().is_multiple_of(heap.rules.alignment));
                let free = entry.usage() == Use::Free;
                assert!(!(free && entry.arena() == free_arena), "free neighbours are merged");
                let in_bins = binned.contains(&(entry.arena(), entry.covers_segment(), id));
                assert_eq!(in_bins, free, "bins hold the free blocks");
                free_blocks += usize::from(free);
                let hole = entry.usage() == Use::Unmapped;
                active += if free || hole { 0 } else { entry.size() };
                holes += if hole { entry.size() } else { 0 };
                inactive += if free && !entry.covers_segment() { entry.size() } else { 0 };
                (offset, prev) = (offset + entry.size(), id);
                free_arena = if free { entry.arena() } else { NOWHERE };
                blocks += 1;
            }
            assert_eq!((offset, offset - holes), (held.size, held.committed()));
            reserved += held.committed();
        }
        assert_eq!(free_blocks, binned.len(), "bins hold nothing else");
        assert_eq!(blocks, heap.table.iter().filter(|entry| entry.usage() != Use::Vacant).count());
        let s = heap.stats.stats();
        assert_eq!(s.reserved_bytes.current, reserved as u64);
        assert_eq!(s.active_bytes.current, active as u64);
        assert_eq!(s.inactive_split_bytes.current, inactive as u64);
    }
}

#[test]
fn a_cached_pair_calls_no_driver() {
    let (sim, allocator) = device(1 << 30, "");
    for bytes in [1, 512, 513, MIB, MIB + 1, 30 * MIB] {
        let block = allocator.allocate(bytes, StreamId::DEFAULT).unwrap();
        assert_eq!(block.requested(), bytes);
        allocator.check();
        allocator.deallocate(block);
        let calls = sim.call_count();
        allocator.deallocate(allocator.allocate(bytes, StreamId::DEFAULT).unwrap());
        assert_eq!(sim.call_count(), calls, "{bytes}");
        allocator.check();
    }
    allocator.empty_cache().unwrap();
    assert_eq!(sim.committed(), 0);
}
