//! Idle blocks that move to the host before an allocation fails, and return when they are used.

use super::*;
use crate::storage::BlockState;
use crate::storage::driver::MemoryKind;

const HOME: StreamId = StreamId::DEFAULT;

/// A device of some MiB, whose granules are 1 MiB, and an allocator that spills.
fn spilling(mib: usize, config: &str) -> (Sim, CachingAllocator) {
    let options = SimOptions {
        capacity: (mib * MIB) as u64,
        alignment: MIB,
        contents: true,
        asynchronous: true,
        check_order: true,
        ..SimOptions::default()
    };
    let sim = Sim::new(options);
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
    (sim, allocator)
}

fn is_on_host(block: &Block) -> bool {
    matches!(block.segment().memory().0, MemoryKind::Spilled(_))
}

/// Allocates blocks of these sizes in MiB and writes the tags 1, 2, ... to them, in this order.
fn tagged(sim: &Sim, allocator: &CachingAllocator, mib: &[usize]) -> Vec<Block> {
    let tag = |(mib, tag): (&usize, u32)| {
        let block = take(allocator, mib * MIB);
        sim.write_tag(HOME, &block, tag).unwrap();
        block
    };
    mib.iter().zip(1..).map(tag).collect()
}

/// Checks the tags, and returns which blocks are on the host.
#[track_caller]
fn check(sim: &Sim, allocator: &CachingAllocator, blocks: &[Block]) -> Vec<bool> {
    allocator.check();
    let on_host: Vec<bool> = blocks.iter().map(is_on_host).collect();
    for (block, tag) in blocks.iter().zip(1u32..) {
        match &block.segment().memory().0 {
            MemoryKind::Spilled(copy) => {
                let mut bytes = vec![0; block.size()];
                copy.read(0, &mut bytes).unwrap();
                assert!(bytes.chunks(4).all(|chunk| chunk == tag.to_le_bytes()), "block {tag}");
            }
            _ => sim.check_tag_at(HOME, (block.segment().memory(), block.offset()), block.size(), tag).unwrap(),
        }
    }
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    let s = allocator.stats();
    assert!(s.active_bytes.current <= s.reserved_bytes.current + s.spilled_bytes.current, "{s}");
    assert_eq!((s.reserved_bytes.current, s.segment.current), (sim.committed(), sim.live_segments() as u64), "{s}");
    let spilled: usize = blocks.iter().filter(|block| is_on_host(block)).map(Block::size).sum();
    assert_eq!(s.spilled_bytes.current, spilled as u64);
    allocator.snapshot().check().unwrap();
    on_host
}

#[test]
fn the_least_recently_used_block_makes_room_and_returns_when_it_is_used() {
    for config in ["spill:host", "spill:disk", "spill:host,segments:pytorch", "spill:host,compaction:False"] {
        let (sim, allocator) = spilling(64, config);
        let mut blocks = tagged(&sim, &allocator, &[16, 16, 16, 16]);
        assert_eq!(check(&sim, &allocator, &blocks), [false; 4]);
        sim.check_tag(HOME, &blocks[0], 1).unwrap(); // now block 2 is the least recently used one
        blocks.push(take(&allocator, 16 * MIB));
        sim.write_tag(HOME, &blocks[4], 5).unwrap();
        assert_eq!(check(&sim, &allocator, &blocks), [false, true, false, false, false], "{config}");
        allocator.restore(&blocks[1]).unwrap();
        allocator.restore(&blocks[1]).unwrap();
        assert_eq!(check(&sim, &allocator, &blocks), [false, false, true, false, false], "{config}");
        let s = allocator.stats();
        assert_eq!((s.num_spills, s.num_returns, s.spilled_bytes.peak), (2, 1, 32 << 20));
        assert_eq!((s.allocated_bytes.peak, s.allocation.peak), (80 << 20, 5), "a return allocates nothing");
        assert_eq!((s.allocated_bytes.allocated, s.allocation.allocated, s.num_ooms), (80 << 20, 5, 0));
        free_all(&allocator, blocks);
        allocator.empty_cache().unwrap();
        let s = allocator.stats();
        assert_eq!((s.spilled_bytes.current, s.allocated_bytes.current, sim.committed()), (0, 0, 0));
        assert_eq!(allocator.lock().heap.segments().count(), 0);
        allocator.reset_peak_stats();
        allocator.raise_peaks(&s);
        assert_eq!(allocator.stats().spilled_bytes.peak, 32 << 20);
    }
}

#[test]
fn blocks_are_evicted_and_prefetched_whatever_the_configuration_says() {
    for config in ["", "spill:host", "spill:disk", "expandable_segments:False,compaction:False"] {
        let (sim, allocator) = spilling(64, config);
        let blocks = tagged(&sim, &allocator, &[16, 8, 4]);
        assert!(!allocator.restore(&blocks[1]).unwrap(), "the block is on the device");
        assert_eq!([1, 1].map(|at| allocator.evict(&blocks[at]).unwrap()), [true, false]);
        assert_eq!(check(&sim, &allocator, &blocks), [false, true, false], "{config}");
        let operand = blocks[0].location();
        blocks[2].export();
        assert_eq!([0, 2].map(|at| allocator.evict(&blocks[at]).unwrap()), [false; 2], "{config}");
        drop(operand);
        let other = CachingAllocator::new(Arc::new(sim.clone()), Config::default()).unwrap();
        assert!(!other.evict(&blocks[0]).unwrap(), "another allocator's block");
        let operand = blocks[0].location();
        let rest: Vec<Block> = std::iter::from_fn(|| allocator.allocate(4 * MIB, HOME).ok()).collect();
        assert!(!allocator.prefetch(&blocks[1]).unwrap(), "no memory");
        drop(operand);
        assert_eq!(check(&sim, &allocator, &blocks), [false, true, false], "{config}");
        free_all(&allocator, rest);
        allocator.empty_cache().unwrap(); // `prefetch` releases no segments
        assert_eq!([1, 1].map(|at| allocator.prefetch(&blocks[at]).unwrap()), [true, false]);
        assert_eq!(check(&sim, &allocator, &blocks), [false; 3], "{config}");
        let s = allocator.stats();
        assert_eq!((s.num_spills, s.num_returns), (1, 1));
        assert!(allocator.evict(&blocks[0]).unwrap());
        free_all(&allocator, blocks);
        assert_eq!(allocator.stats().spilled_bytes.current, 0, "freed at once");
        allocator.empty_cache().unwrap();
        assert_eq!(sim.committed(), 0);
    }
    let (sim, allocator) = spilling(64, "spill_limit_mb:20");
    let blocks = tagged(&sim, &allocator, &[16, 16]);
    assert_eq!([0, 1].map(|at| allocator.evict(&blocks[at]).unwrap()), [true, false]);
    allocator.empty_cache().unwrap();
    assert_eq!(check(&sim, &allocator, &blocks), [true, false]);
    free_all(&allocator, blocks);
}

#[test]
fn without_the_key_the_error_says_what_could_move() {
    let (sim, allocator) = spilling(64, "");
    let blocks = tagged(&sim, &allocator, &[32, 32]);
    let error = allocator.allocate(16 * MIB, HOME).unwrap_err().to_string();
    assert!(
        error.contains("64.00 MiB (67108864 bytes) of idle tensors could move to the host: set spill:host"),
        "{error}"
    );
    let held = blocks[0].location();
    let error = allocator.allocate(16 * MIB, HOME).unwrap_err().to_string();
    assert!(error.contains("32.00 MiB (33554432 bytes) of idle tensors could move"), "{error}");
    drop(held);
    assert_eq!(check(&sim, &allocator, &blocks), [false; 2]);
    free_all(&allocator, blocks);
}

#[test]
fn blocks_in_use_exported_unused_or_of_private_pools_stay() {
    let (sim, allocator) = spilling(64, "spill:host");
    let allocator = Arc::new(allocator);
    let blocks = tagged(&sim, &allocator, &[12, 12]);
    let unused = take(&allocator, 12 * MIB); // no operation has used this block yet
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let private = use_mem_pool(&pool, || tagged(&sim, &allocator, &[12])).remove(0);
    let exported = take(&allocator, 12 * MIB);
    exported.export();
    let operand = blocks[0].location();
    let large = take(&allocator, 8 * MIB);
    assert!(allocator.allocate(20 * MIB, HOME).is_err());
    drop(operand);
    let [first, second] = [12, 12].map(|mib| allocator.allocate(mib * MIB, HOME));
    assert!(first.is_ok() && second.is_err(), "{second:?}");
    assert!(![&unused, &private, &exported].into_iter().any(is_on_host));
    free_all(&allocator, blocks.into_iter().chain([unused, private, exported, large]).chain(first.ok()));
    drop(pool);
    allocator.empty_cache().unwrap();
    assert_eq!(sim.committed(), 0);
}

#[test]
fn the_limit_bounds_the_spilled_bytes_and_the_error_names_it() {
    let (sim, allocator) = spilling(64, "spill:host,spill_limit_mb:20");
    let mut blocks = tagged(&sim, &allocator, &[16, 16, 16, 16]);
    blocks.push(take(&allocator, 16 * MIB));
    sim.write_tag(HOME, &blocks[4], 5).unwrap();
    let error = allocator.allocate(16 * MIB, HOME).unwrap_err().to_string();
    assert!(error.contains("spill_limit_mb is reached: 16.00 MiB (16777216 bytes) of 20.00 MiB"), "{error}");
    assert_eq!(check(&sim, &allocator, &blocks), [true, false, false, false, false]);
    // Emptying the cache brings no block back, because that would only make the next allocation spill again.
    free_all(&allocator, [blocks.pop().unwrap()]);
    allocator.empty_cache().unwrap();
    assert_eq!(check(&sim, &allocator, &blocks), [true, false, false, false]);
    allocator.restore(&blocks[0]).unwrap();
    assert_eq!(check(&sim, &allocator, &blocks), [false; 4]);
    free_all(&allocator, blocks);
}

#[test]
fn host_copies_of_freed_blocks_do_not_count_towards_the_limit() {
    let (sim, allocator) = spilling(64, "spill:host,spill_limit_mb:20");
    let mut blocks = tagged(&sim, &allocator, &[16, 16, 16, 16]);
    let freed = blocks.pop().unwrap();
    assert!(allocator.evict(&freed).unwrap());
    sim.check_tag(sim.stream(1), &blocks[0], 1).unwrap();
    allocator.record_stream(&freed, sim.stream(1));
    allocator.deallocate(freed); // pending, because the other stream is not done
    blocks.push(take(&allocator, 16 * MIB));
    sim.write_tag(HOME, &blocks[3], 4).unwrap();
    blocks.push(take(&allocator, 16 * MIB));
    sim.write_tag(HOME, &blocks[4], 5).unwrap();
    assert_eq!(check(&sim, &allocator, &blocks).into_iter().filter(|&on_host| on_host).count(), 1);
    free_all(&allocator, blocks);
}

#[test]
fn blocks_that_thread_caches_would_keep_move_only_if_they_are_evicted() {
    let (sim, allocator) = spilling(8, "spill:host,thread_cache_kb:16384"); // keeps blocks of up to 1 MiB
    let blocks = tagged(&sim, &allocator, &[1, 1, 4]);
    assert!(allocator.allocate(7 * MIB, HOME).is_err());
    assert_eq!(check(&sim, &allocator, &blocks)[..2], [false; 2]);
    assert!(allocator.evict(&blocks[0]).unwrap());
    assert_eq!(check(&sim, &allocator, &blocks)[..2], [true, false]);
    free_all(&allocator, blocks);
}

#[test]
fn a_memory_limit_holds_on_the_way_out_and_back() {
    for config in ["spill:host", "spill:host,segments:pytorch,max_split_size_mb:20"] {
        let (sim, allocator) = spilling(1024, config);
        allocator.set_memory_limit(60 << 20).unwrap();
        let mut random = properties::Random(5);
        let mut blocks = Vec::new();
        for tag in 1..=24 {
            let block = take(&allocator, (1 + random.below(20) as usize) * MIB);
            sim.write_tag(HOME, &block, tag).unwrap();
            blocks.push(block);
        }
        for _ in 0..60 {
            let at = random.below(24) as usize;
            allocator.restore(&blocks[at]).unwrap();
            sim.check_tag(HOME, &blocks[at], at as u32 + 1).unwrap();
            assert!(sim.committed() <= 60 << 20);
        }
        check(&sim, &allocator, &blocks);
        let s = allocator.stats();
        assert!(s.reserved_bytes.peak <= 60 << 20 && s.num_returns > 20, "{s}");
        free_all(&allocator, blocks);
        allocator.empty_cache().unwrap();
        assert_eq!((sim.committed(), allocator.stats().spilled_bytes.current), (0, 0));
    }
}

#[test]
fn snapshots_and_histories_show_blocks_on_the_host() {
    let (sim, allocator) = spilling(32, "spill:host");
    allocator.record_memory_history(crate::storage::HistoryOptions::default()).unwrap();
    let mut blocks = tagged(&sim, &allocator, &[16, 16]);
    blocks.push(take(&allocator, 16 * MIB));
    sim.write_tag(HOME, &blocks[2], 3).unwrap();
    check(&sim, &allocator, &blocks);
    let snapshot = allocator.snapshot();
    let host: Vec<_> = snapshot.segments.iter().filter(|segment| segment.segment_pool_id == (2, 0)).collect();
    assert_eq!((host.len(), host[0].total_size, host[0].blocks[0].state), (1, 16 << 20, BlockState::ActiveAllocated));
    allocator.restore(&blocks[0]).unwrap();
    check(&sim, &allocator, &blocks);
    free_all(&allocator, blocks);
    allocator.empty_cache().unwrap();
    allocator.snapshot().check().unwrap();
}

#[test]
fn threads_share_a_device_that_holds_a_third_of_their_blocks() {
    const THREADS: u32 = 3;
    let (sim, allocator) = spilling(24, "spill:host");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (sim, allocator) = (&sim, &allocator);
            scope.spawn(move || {
                let stream = sim.stream(thread);
                let mut random = properties::Random(thread.into());
                let mut live: Vec<(Block, u32)> = Vec::new();
                for round in 0..if cfg!(miri) { 8 } else { 150 } {
                    if live.len() < 6 {
                        let block = allocator.allocate((1 + random.below(5) as usize) * MIB, stream);
                        let Ok(block) = block else { continue };
                        let tag = 1 + round * THREADS + thread;
                        sim.write_tag(stream, &block, tag).unwrap();
                        live.push((block, tag));
                    }
                    let at = random.below(live.len() as u64) as usize;
                    // Other threads may need the memory at the same time, or move the block away again before it is used.
                    if allocator.restore(&live[at].0).is_ok() {
                        let place = live[at].0.location();
                        let memory = place.segment().memory();
                        if matches!(memory.0, MemoryKind::Sim(_)) {
                            sim.check_tag_at(stream, (memory, place.offset()), live[at].0.size(), live[at].1).unwrap();
                        }
                    }
                    if random.below(4) == 0 {
                        allocator.deallocate(live.swap_remove(at).0);
                    }
                }
                free_all(allocator, live.into_iter().map(|(block, _)| block));
            });
        }
    });
    allocator.empty_cache().unwrap();
    allocator.check();
    assert_eq!(sim.violations(), [""; 0]);
    assert_eq!(sim.committed(), 0);
    let s = allocator.stats();
    assert_eq!((s.spilled_bytes.current, s.allocated_bytes.current, s.reserved_bytes.current), (0, 0, 0));
    assert!(cfg!(miri) || s.num_returns > 0, "{s}");
}
