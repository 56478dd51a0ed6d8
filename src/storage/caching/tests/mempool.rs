//! Tests of private memory pools.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::storage::MemPoolStats;

fn shared(capacity: u64, config: &str) -> (Sim, Arc<CachingAllocator>) {
    let (sim, allocator) = device(capacity, config);
    (sim, Arc::new(allocator))
}

fn segment(block: &Block) -> u64 {
    place(block).0
}

#[test]
fn allocations_inside_come_from_the_pool_and_nothing_else_does() {
    let (_, allocator) = shared(1 << 30, "");
    let (_, other) = shared(1 << 30, "");
    let outside = take(&allocator, 1000);
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let second = MemPool::new(&allocator, MemPoolOptions::default());
    assert!(pool.id() != second.id() && pool.id() != 0);
    let (a, b, c, d, elsewhere) = use_mem_pool(&pool, || {
        let a = take(&allocator, 1000);
        let b = use_mem_pool(&second, || take(&allocator, 1000));
        let c = take(&allocator, 3 * MIB);
        let elsewhere = take(&other, 1000);
        let d = std::thread::scope(|s| s.spawn(|| take(&allocator, 1000)).join().unwrap());
        (a, b, c, d, elsewhere)
    });
    // The pool's statistics exclude allocations by another thread or in another allocator.
    assert_eq!((pool.stats().allocations, pool.stats().allocated_bytes), (2, 1024 + 3 * MIB as u64));
    assert_eq!((second.stats().allocations, second.stats().segments), (1, 1));
    assert_eq!(allocator.stats().allocation.current, 5);
    assert!(segment(&a) != segment(&outside) && segment(&b) != segment(&a));
    allocator.check();
    let was = place(&a);
    allocator.deallocate(a);
    let e = take(&allocator, 1000);
    assert!(place(&e) != was, "what the pool has free is the pool's");
    let f = use_mem_pool(&pool, || take(&allocator, 1000));
    assert_eq!(place(&f), was);
    [outside, b, c, d, e, f].into_iter().for_each(|block| allocator.deallocate(block));
    other.deallocate(elsewhere);
    allocator.check();
}

#[test]
fn entered_pools_are_left_in_any_order() {
    let (_, allocator) = shared(1 << 30, "");
    let [a, b, c] = [(); 3].map(|()| MemPool::new(&allocator, MemPoolOptions::default()));
    let used = || {
        let block = take(&allocator, 1000);
        let live = [&a, &b, &c].map(|pool| pool.stats().allocations);
        allocator.deallocate(block);
        live
    };
    let (first, second) = (a.enter(), b.enter());
    assert_eq!(used(), [0, 1, 0]);
    use_mem_pool(&c, || {
        drop(first);
        assert_eq!(used(), [0, 0, 1]);
        drop(second);
        assert_eq!(used(), [0, 0, 1]);
    });
    assert_eq!(used(), [0; 3]);
    let late = use_mem_pool(&c, || a.enter()); // the end of the call leaves the pool
    assert_eq!(used(), [0; 3]);
    drop(late);
    assert_eq!(used(), [0; 3]);
}

#[test]
fn a_panic_leaves_the_pool() {
    let (_, allocator) = shared(1 << 30, "");
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let caught = catch_unwind(AssertUnwindSafe(|| use_mem_pool(&pool, || panic!("inside"))));
    assert!(caught.is_err());
    let block = take(&allocator, 1000);
    assert_eq!(pool.stats(), MemPoolStats::default());
    allocator.deallocate(block);
}

#[test]
fn emptying_the_cache_leaves_pools_alone_until_their_last_handle_is_gone() {
    let (sim, allocator) = shared(1 << 30, "");
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let (small, large, live) =
        use_mem_pool(&pool, || (take(&allocator, 1000), take(&allocator, 30 * MIB), take(&allocator, 50 * MIB)));
    [small, large].into_iter().for_each(|block| allocator.deallocate(block));
    allocator.empty_cache().unwrap();
    assert_eq!((pool.stats().segments, sim.live_segments()), (3, 3));
    let mut stats = pool.stats();
    assert_eq!(stats.largest_free, 30 * MIB as u64);
    let handle = pool.clone();
    drop(pool);
    stats.segments = 3;
    assert_eq!(handle.stats(), stats);
    drop(handle);
    allocator.check();
    let calls = sim.call_count();
    let reused = take(&allocator, 30 * MIB);
    assert_eq!(sim.call_count(), calls, "what is free serves everybody");
    [reused, live].into_iter().for_each(|block| allocator.deallocate(block));
    allocator.check();
    allocator.empty_cache().unwrap();
    assert_eq!(sim.committed(), 0);
    // The arena numbers of dropped pools are reused, so the table of arenas does not grow.
    let arenas = allocator.lock().heap.arenas().len();
    for _ in 0..3 {
        let pool = MemPool::new(&allocator, MemPoolOptions::default());
        let block = use_mem_pool(&pool, || take(&allocator, 1000));
        drop(pool);
        allocator.deallocate(block);
        allocator.check();
    }
    assert_eq!(allocator.lock().heap.arenas().len(), arenas);
}

#[test]
fn a_pool_releases_its_own_cache() {
    let (sim, allocator) = shared(1 << 30, "");
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let block = use_mem_pool(&pool, || take(&allocator, 30 * MIB));
    let cached = take(&allocator, 20 * MIB);
    [block, cached].into_iter().for_each(|block| allocator.deallocate(block));
    pool.empty_cache().unwrap();
    assert_eq!((sim.committed(), pool.stats().segments), (20 * MIB as u64, 0));
    allocator.check();
}

#[test]
fn blocks_of_a_pool_without_splitting_are_whole_segments() {
    for (config, segments) in [("", [1024, 3 * MIB]), ("segments:pytorch", [2 * MIB, 20 * MIB])] {
        let (_, allocator) = shared(1 << 30, config);
        let pool = MemPool::new(&allocator, MemPoolOptions { no_split: true, ..MemPoolOptions::default() });
        for (bytes, segment) in [1000, 3 * MIB].into_iter().zip(segments) {
            let (a, b) = use_mem_pool(&pool, || (take(&allocator, bytes), take(&allocator, bytes)));
            assert_eq!((a.size(), b.size()), (segment, segment), "{config}");
            let was = place(&a);
            allocator.deallocate(a);
            let c = use_mem_pool(&pool, || take(&allocator, bytes - 100));
            assert_eq!((place(&c), c.size()), (was, segment), "{config}: reused whole");
            [b, c].into_iter().for_each(|block| allocator.deallocate(block));
            allocator.check();
        }
    }
}

#[test]
fn a_pool_with_use_on_oom_serves_others_before_an_allocation_fails() {
    for lends in [false, true] {
        for bytes in [20 * MIB, MIB / 2] {
            let (_, allocator) = shared(32 * MIB as u64, "");
            let pool = MemPool::new(&allocator, MemPoolOptions { use_on_oom: lends, ..MemPoolOptions::default() });
            let inside = use_mem_pool(&pool, || take(&allocator, 32 * MIB));
            let was = place(&inside);
            allocator.deallocate(inside);
            match allocator.allocate(bytes, StreamId::DEFAULT) {
                Ok(block) => {
                    assert!(lends);
                    assert_eq!((place(&block), pool.stats().allocations), (was, 1));
                    allocator.deallocate(block);
                    assert_eq!(pool.stats().largest_free, 32 * MIB as u64);
                }
                Err(error) => {
                    assert!(!lends);
                    let text = error.to_string();
                    assert!(
                        text.contains(&format!("Memory pool {} has a free block of 32.00 MiB", pool.id())),
                        "{text}"
                    );
                }
            }
            allocator.check();
        }
    }
}

#[test]
fn live_blocks_are_checked_by_identity() {
    let (_, allocator) = shared(1 << 30, "");
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let (a, b) = use_mem_pool(&pool, || (take(&allocator, 1000), take(&allocator, 1000)));
    let outside = take(&allocator, 1000);
    assert!(pool.check_live(&[&a, &b]) && pool.check_live(&[&b, &a]));
    for wrong in [&[&a][..], &[], &[&a, &a], &[&a, &outside], &[&a, &b, &outside]] {
        assert!(!pool.check_live(wrong), "{wrong:?}");
    }
    allocator.deallocate(b);
    assert!(pool.check_live(&[&a]));
    [a, outside].into_iter().for_each(|block| allocator.deallocate(block));
}

#[test]
fn a_pool_is_restored_to_a_checkpoint() {
    for config in ["", "segments:pytorch"] {
        let (_, allocator) = shared(1 << 30, config);
        let pool = MemPool::new(&allocator, MemPoolOptions::default());
        let inside = |bytes| use_mem_pool(&pool, || take(&allocator, bytes));
        let sizes = [1000, 5000, 700, 2 * MIB, 3 * MIB, 40 * MIB];
        let mut blocks: Vec<Block> = sizes.map(inside).into();
        let kept = blocks.pop().unwrap();
        let checkpoint = pool.checkpoint();
        assert_eq!(checkpoint.len(), 6);
        let mut places: Vec<_> = blocks.iter().map(place).collect();
        places.sort_unstable();
        blocks.into_iter().for_each(|block| allocator.deallocate(block));
        // The new blocks divide the pool's memory differently.
        let mut later: Vec<Block> = [2048, 300, 9000, 4 * MIB, MIB + 1].map(inside).into();
        let restored = pool.restore(&checkpoint, &mut later).unwrap();
        assert!(later.is_empty());
        let mut found: Vec<_> = restored.iter().map(place).collect();
        found.sort_unstable();
        assert_eq!(found, places, "{config}");
        assert_eq!(restored.iter().map(Block::requested).sum::<usize>(), sizes[..5].iter().sum::<usize>());
        allocator.check();
        assert_eq!(pool.checkpoint(), checkpoint);
        let mut all: Vec<&Block> = restored.iter().collect();
        all.push(&kept);
        assert!(pool.check_live(&all));
        // Blocks of the checkpoint may be passed to `restore` too, which frees and then reallocates them.
        let mut again = restored;
        let restored = pool.restore(&checkpoint, &mut again).unwrap();
        assert_eq!(restored.len(), 5);
        restored.into_iter().chain([kept]).for_each(|block| allocator.deallocate(block));
        allocator.check();
    }
}

#[test]
fn an_impossible_restore_changes_nothing() {
    let (_, allocator) = shared(1 << 30, "");
    let (pool, other) =
        (MemPool::new(&allocator, MemPoolOptions::default()), MemPool::new(&allocator, MemPoolOptions::default()));
    let first = use_mem_pool(&pool, || take(&allocator, 30 * MIB));
    let checkpoint = pool.checkpoint();
    let (stranger, late) = (take(&allocator, 1000), use_mem_pool(&pool, || take(&allocator, 1000)));
    let refused = |blocks: Vec<Block>, pool: &MemPool, why: &str| {
        let mut given = blocks;
        let (before, n) = (allocator.stats(), given.len());
        let error = pool.restore(&checkpoint, &mut given).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!((allocator.stats(), given.len()), (before, n));
        allocator.check();
        given
    };
    refused(vec![], &other, "not of pool");
    refused(vec![], &pool, "not in the checkpoint");
    let mut back = refused(vec![late, stranger], &pool, "is not of pool");
    allocator.deallocate(back.pop().unwrap());
    allocator.deallocate(first);
    pool.empty_cache().unwrap();
    let back = refused(back, &pool, "was released to the driver");
    back.into_iter().for_each(|block| allocator.deallocate(block));
}

#[test]
fn a_restored_block_waits_for_the_streams_that_had_its_memory() {
    let options = SimOptions { asynchronous: true, contents: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let allocator = Arc::new(CachingAllocator::new(Arc::new(sim.clone()), Config::default()).unwrap());
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let (home, side) = (StreamId::DEFAULT, sim.stream(1));
    let first = use_mem_pool(&pool, || allocator.allocate(MIB, home).unwrap());
    let (was, checkpoint) = (place(&first), pool.checkpoint());
    allocator.deallocate(first);
    let borrowed = use_mem_pool(&pool, || allocator.allocate(MIB, side).unwrap());
    assert_eq!(place(&borrowed), was);
    sim.write_tag(side, &borrowed, 7).unwrap();
    sim.check_tag(side, &borrowed, 7).unwrap();
    let restored = pool.restore(&checkpoint, &mut vec![borrowed]).unwrap().pop().unwrap();
    sim.write_tag(home, &restored, 8).unwrap();
    sim.run(home, 100); // runs until it waits for the other stream
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    allocator.record_stream(&restored, side);
    sim.check_tag(side, &restored, 8).unwrap();
    let restored = pool.restore(&checkpoint, &mut vec![restored]).unwrap().pop().unwrap();
    sim.write_tag(home, &restored, 9).unwrap();
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    allocator.deallocate(restored);
    allocator.check();
}

#[test]
#[cfg_attr(miri, ignore = "looks for OpenCL")]
fn a_pool_of_a_device_without_a_caching_allocator_is_an_error() {
    assert!(MemPool::of_device(Device::Cpu, MemPoolOptions::default()).is_ok());
    let missing = MemPool::of_device(Device::OpenCL(usize::MAX), MemPoolOptions::default());
    assert!(matches!(missing, Err(Error::NoDevice { .. })));
}
