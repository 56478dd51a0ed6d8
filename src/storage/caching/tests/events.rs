//! Blocks used by several streams, on a device whose calls may fail.

use super::*;

const CONFIGS: [&str; 4] =
    ["", "segments:pytorch", "cross_stream_reuse:False", "cross_stream_reuse:False,segments:pytorch"];

/// Returns a device whose streams run only on request, and an allocator of its memory.
fn device(config: &str) -> (Sim, CachingAllocator) {
    let sim = Sim::new(SimOptions {
        capacity: 48 * MIB as u64,
        alignment: if cfg!(miri) { 64 << 10 } else { 512 }, // larger under Miri, because each granule has a tag
        asynchronous: true,
        contents: true,
        ..SimOptions::default()
    });
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
    (sim, allocator)
}

/// Makes the next `times` calls of each kind fail.
fn fail(sim: &Sim, times: usize, kinds: &[Call]) {
    kinds.iter().for_each(|&kind| (0..times).for_each(|_| sim.fail_next_call(kind, Failure::Resources)));
}

/// Returns the number of pending blocks.
fn pending(allocator: &CachingAllocator) -> usize {
    let core = allocator.lock();
    core.pending.blocks().count()
}

/// Allocates a block and overwrites it before the previously queued work has run.
fn overwrite(sim: &Sim, allocator: &CachingAllocator, stream: StreamId, bytes: usize) {
    if let Ok(block) = allocator.allocate(bytes, stream) {
        sim.write_tag(stream, &block, 99).unwrap();
        sim.run(stream, 1000);
        allocator.deallocate(block);
    }
}

#[test]
fn a_block_whose_stream_cannot_be_queried_is_not_reused() {
    let side = StreamId(1);
    for config in CONFIGS {
        for times in [1, 2, 5] {
            let (sim, allocator) = device(config);
            let block = take(&allocator, 20 * MIB);
            allocator.record_stream(&block, side);
            sim.write_tag(side, &block, 1).unwrap();
            sim.check_tag(side, &block, 1).unwrap();
            fail(&sim, times, &[Call::Record, Call::Query, Call::Wait, Call::StreamWaits, Call::Synchronize]);
            allocator.deallocate(block);
            assert_eq!((pending(&allocator), allocator.stats().active.current), (1, 1), "{config}");
            for _ in 0..3 {
                // Only the pending block could serve these requests, and must not serve them before its stream is done.
                overwrite(&sim, &allocator, StreamId::DEFAULT, 30 * MIB);
                overwrite(&sim, &allocator, StreamId::DEFAULT, 20 * MIB);
            }
            sim.synchronize().unwrap_or(());
            assert_eq!(sim.violations(), [""; 0], "{config} {times}");
            // Once the device's calls succeed again, the block becomes free.
            sim.clear_failures();
            sim.synchronize().unwrap();
            allocator.empty_cache().unwrap();
            assert_eq!((pending(&allocator), sim.committed()), (0, 0), "{config} {times}");
            allocator.check();
        }
    }
}

#[test]
fn a_block_that_the_next_stream_cannot_wait_for_is_not_reused() {
    let (one, two) = (StreamId(1), StreamId(2));
    for config in &CONFIGS[..2] {
        for failing in [Call::Record, Call::StreamWaits] {
            for shared in [false, true] {
                let (sim, allocator) = device(config);
                let block = allocator.allocate(20 * MIB, one).unwrap();
                sim.write_tag(one, &block, 1).unwrap();
                sim.check_tag(one, &block, 1).unwrap();
                if shared {
                    allocator.record_stream(&block, two);
                }
                allocator.deallocate(block);
                fail(&sim, 1, &[failing, Call::Synchronize]);
                overwrite(&sim, &allocator, two, 20 * MIB);
                sim.clear_failures();
                overwrite(&sim, &allocator, two, 20 * MIB);
                sim.synchronize().unwrap();
                assert_eq!(sim.violations(), [""; 0], "{config} {failing:?} {shared}");
                allocator.empty_cache().unwrap();
                assert_eq!(pending(&allocator), 0);
                allocator.check();
            }
        }
    }
}

#[test]
fn a_marker_that_cannot_be_queried_is_replaced_by_a_later_one() {
    let (sim, allocator) = device("");
    let side = StreamId(1);
    let blocks = [MIB, 2 * MIB, 3 * MIB].map(|bytes| take(&allocator, bytes));
    blocks.iter().for_each(|block| allocator.record_stream(block, side));
    let [first, second, third] = blocks;
    allocator.deallocate(first);
    fail(&sim, 1, &[Call::Record]);
    allocator.deallocate(second);
    allocator.deallocate(third);
    assert_eq!(pending(&allocator), 3);
    fail(&sim, 1, &[Call::Query]);
    assert!(!allocator.process_events(false).unwrap(), "nothing has run");
    assert!(!allocator.process_events(false).unwrap(), "another marker is asked");
    sim.run(side, 100);
    assert!(allocator.process_events(false).unwrap());
    assert_eq!(pending(&allocator), 0);
    // A blocking call returns the device's error, and the block stays pending until the next call.
    let block = take(&allocator, MIB);
    allocator.record_stream(&block, side);
    allocator.deallocate(block);
    fail(&sim, 1, &[Call::Wait]);
    assert!(allocator.empty_cache().is_err());
    assert_eq!(pending(&allocator), 1);
    allocator.empty_cache().unwrap();
    assert_eq!((pending(&allocator), sim.committed()), (0, 0));
}

#[test]
fn on_a_lost_device_pending_blocks_stay() {
    let (sim, allocator) = device("");
    let side = StreamId(1);
    let block = take(&allocator, 20 * MIB);
    allocator.record_stream(&block, side);
    sim.check_tag(side, &block, 0).unwrap();
    fail(&sim, 1000, &[Call::Record, Call::Query, Call::Wait, Call::StreamWaits, Call::Synchronize]);
    let was = place(&block);
    allocator.deallocate(block);
    for _ in 0..5 {
        let other = allocator.allocate(20 * MIB, StreamId::DEFAULT).unwrap();
        assert_ne!(place(&other), was);
        allocator.deallocate(other);
    }
    assert!(allocator.empty_cache().is_err() && pending(&allocator) == 1);
}

#[test]
fn a_restore_whose_wait_fails_returns_no_blocks() {
    let (one, two) = (StreamId(1), StreamId(2));
    let (sim, allocator) = device("");
    let allocator = Arc::new(allocator);
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let of_pool = |stream| use_mem_pool(&pool, || allocator.allocate(8 * MIB, stream)).unwrap();
    let block = of_pool(one);
    let checkpoint = pool.checkpoint();
    allocator.deallocate(block);
    let block = of_pool(two); // served after a wait; the block now belongs to stream two
    sim.write_tag(two, &block, 1).unwrap();
    sim.check_tag(two, &block, 1).unwrap();
    fail(&sim, 1, &[Call::StreamWaits, Call::Synchronize]);
    assert!(pool.restore(&checkpoint, &mut vec![block]).is_err());
    sim.clear_failures();
    let block = of_pool(one);
    sim.write_tag(one, &block, 2).unwrap();
    sim.run(one, 1000);
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    allocator.deallocate(block);
    allocator.check();
}
