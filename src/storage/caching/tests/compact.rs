//! Concurrent frees and allocations during compaction.

use std::sync::Mutex;

use super::*;
use crate::storage::driver::host::Host;

#[test]
fn blocks_freed_during_a_move_wait_for_the_streams_that_use_them() {
    let sim = Sim::new(SimOptions { asynchronous: true, contents: true, ..SimOptions::default() });
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), "segments:pytorch".parse().unwrap()).unwrap();
    let (home, side) = (StreamId::DEFAULT, sim.stream(1));
    let [moves, stays] = [3 * MIB, 4 * MIB].map(|bytes| take(&allocator, bytes));
    let segment = place(&moves).0;
    // Compaction has not waited for this work. One command is enqueued before `moves` is locked, the other after `stays` was found in use.
    sim.write_tag(side, &moves, 7).unwrap();
    allocator.record_stream(&moves, side);
    let in_use = stays.location();
    let plan = allocator.lock().plan_compaction(&[segment], true, home).unwrap();
    drop(in_use);
    assert_eq!((plan.moves.len(), plan.staying.len()), (1, 1));
    sim.write_tag(side, &stays, 7).unwrap();
    allocator.record_stream(&stays, side);
    free_all(&allocator, [moves, stays]);
    allocator.lock().cancel_plan(plan);
    allocator.check();
    let again = [3 * MIB, 4 * MIB].map(|bytes| take(&allocator, bytes));
    again.iter().for_each(|block| sim.write_tag(home, block, 8).unwrap());
    sim.run(home, 10);
    sim.run(side, 10);
    again.iter().for_each(|block| sim.check_tag(home, block, 8).unwrap());
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    free_all(&allocator, again);
    allocator.empty_cache().unwrap();
    assert_eq!(sim.committed(), 0, "what was pending is free");
    allocator.check();
}

#[test]
fn a_private_segment_that_reuses_a_released_number_does_not_move() {
    let (sim, allocator) = device(1 << 30, "segments:pytorch");
    let allocator = Arc::new(allocator);
    let number = |allocator: &CachingAllocator, block: &Block| allocator.lock().heap.entry(block.id()).segment;
    // Once `a` and `b` are freed, the three segments have 18, 2 and 11 MiB free.
    let [first, a, b, second, c, third] = [2, 9, 9, 9, 9, 9].map(|mib| take(&allocator, mib * MIB));
    free_all(&allocator, [a, b]);
    let was = number(&allocator, &third);
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let block_in_pool = Arc::new(Mutex::new(None));
    // While the first segment's block moves, the third segment is released and the pool reuses the third segment's number.
    let hook = {
        let (allocator, pool, block_in_pool) = (Arc::clone(&allocator), pool.clone(), Arc::clone(&block_in_pool));
        move || {
            allocator.deallocate(third);
            allocator.empty_cache().unwrap();
            let [hole, block] = use_mem_pool(&pool, || [5 * MIB; 2].map(|bytes| take(&allocator, bytes)));
            allocator.deallocate(hole);
            *block_in_pool.lock().unwrap() = Some((place(&block), pool.checkpoint(), block));
        }
    };
    let moves = sim.clone();
    sim.at_synchronize(move || moves.at_synchronize(hook)); // the second wait, because the first one happens before any plan is made
    let in_use = second.location(); // prevents a plan that moves all three segments together
    let freed = allocator.compact(u64::MAX).unwrap();
    drop(in_use);
    let (place_then, checkpoint, block) = block_in_pool.lock().unwrap().take().unwrap();
    assert_eq!(number(&allocator, &block), was, "the number is in use again");
    assert_eq!((place(&block), freed > 0), (place_then, true));
    let restored = pool.restore(&checkpoint, &mut vec![block]).unwrap();
    assert_eq!(restored.iter().map(place).collect::<Vec<_>>(), [place_then]);
    free_all(&allocator, restored.into_iter().chain([first, second, c]));
    allocator.check();
}

#[test]
fn compaction_joins_free_memory_on_the_cpu_too() {
    let driver = Arc::new(Host::new(&Config::default()));
    for config in ["", "segments:pytorch", "expandable_segments:True"] {
        let config = format!("memory_limit_mb:40,{config}");
        if config.contains("True") && driver.page() == 0 {
            continue;
        }
        let allocator = CachingAllocator::new(driver.clone(), config.parse().unwrap()).unwrap();
        let blocks: Vec<Block> = (0..19).map(|_| take(&allocator, 2 * MIB)).collect();
        let (mut live, mut given_back) = (Vec::new(), Vec::new());
        for (n, block) in blocks.into_iter().enumerate() {
            let place = block.location();
            // SAFETY: no other code uses the block.
            unsafe { driver.write(&vec![n as u8; block.size()], (place.segment().memory(), place.offset())) }.unwrap();
            drop(place);
            if n % 2 == 0 { live.push((n, block)) } else { given_back.push(block) }
        }
        free_all(&allocator, given_back);
        // 20 MiB are live and 20 MiB are free, with no free range longer than 2 MiB.
        let large = take(&allocator, 19 * MIB);
        assert!(allocator.stats().reserved_bytes.peak <= 40 * MIB as u64, "{config}");
        for (n, block) in &live {
            let (place, mut bytes) = (block.location(), vec![0; block.size()]);
            // SAFETY: no other code uses the block.
            unsafe { driver.read((place.segment().memory(), place.offset()), &mut bytes) }.unwrap();
            assert!(bytes == vec![*n as u8; block.size()], "{config}");
        }
        allocator.check();
        free_all(&allocator, live.into_iter().map(|(_, block)| block).chain([large]));
        allocator.check();
    }
}
