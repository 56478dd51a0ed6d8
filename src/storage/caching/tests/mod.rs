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
mod spill;
mod streams;

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

/// Returns the block's segment id and offset.
fn place(block: &Block) -> (u64, usize) {
    let place = block.location();
    (place.segment().id(), place.offset())
}

/// Returns the sizes, in bytes, of all segments created so far.
fn created(sim: &Sim) -> Vec<usize> {
    let size = |call: &Call| if let Call::Create(bytes) = call { Some(*bytes) } else { None };
    sim.calls().iter().filter_map(size).collect()
}

/// Returns the recorded calls, except the first `before` calls.
fn calls_since(sim: &Sim, before: u64) -> Vec<Call> {
    sim.calls().split_off(before as usize)
}

impl CachingAllocator {
    /// Panics unless the table is consistent, with the thread caches emptied.
    pub(in crate::storage) fn check(&self) {
        self.drain_caches().heap.check();
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
