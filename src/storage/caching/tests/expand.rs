//! Tests of expandable segments.

use super::*;
use crate::storage::{HistoryOptions, TraceAction};

const PAGE: usize = 64 << 10;

/// Returns a device that can reserve addresses, and an allocator with expandable segments.
fn expandable_device(capacity: u64, config: &str) -> (Sim, CachingAllocator) {
    expandable_device_with_page(PAGE, capacity, config)
}

fn expandable_device_with_page(page: usize, capacity: u64, config: &str) -> (Sim, CachingAllocator) {
    let options = SimOptions { capacity, page, record_calls: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let config: Config = format!("expandable_segments:True,thread_cache_kb:0,{config}").parse().unwrap();
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config).unwrap();
    (sim, allocator)
}

fn count(sim: &Sim, which: fn(&Call) -> bool) -> usize {
    sim.calls().iter().filter(|call| which(call)).count()
}

#[test]
fn an_expandable_segment_grows_in_place_and_no_other_is_created() {
    for config in ["", "segments:pytorch"] {
        let (sim, allocator) = expandable_device(1 << 30, config);
        let blocks: Vec<Block> = (1..20).map(|i| take(&allocator, i * 2 * MIB)).collect();
        let mut end = 0;
        for block in &blocks {
            assert_eq!(place(block), (place(&blocks[0]).0, end), "{config}");
            end += block.size();
        }
        let s = allocator.stats();
        assert_eq!((s.segment.current, sim.live_segments(), s.reserved_bytes.current), (1, 1, sim.committed()));
        assert!(sim.committed() < (end + 20 * MIB) as u64, "{config}: {} for {end}", sim.committed());
        assert_eq!(count(&sim, |call| matches!(call, Call::Create(_))), 0);
        allocator.check();
        free_all(&allocator, blocks);
        // The freed blocks are merged into one range, which serves smaller requests without a driver call.
        let calls = sim.call_count();
        let all = take(&allocator, end);
        assert_eq!(sim.call_count(), calls);
        allocator.deallocate(all);
        allocator.empty_cache().unwrap();
        assert_eq!((sim.committed(), sim.live_segments()), (0, 0));
    }
}

#[test]
fn a_free_block_at_the_end_counts_towards_the_request() {
    let (sim, allocator) = expandable_device(1 << 30, "");
    let [a, b] = [4 * MIB, 8 * MIB].map(|bytes| take(&allocator, bytes));
    allocator.deallocate(b);
    let before = sim.committed();
    let c = take(&allocator, 10 * MIB);
    assert_eq!((place(&c).1, sim.committed()), (4 * MIB, before + 2 * MIB as u64));
    free_all(&allocator, [a, c]);
    allocator.check();
}

#[test]
fn segments_grow_in_pytorchs_steps() {
    let (sim, allocator) = expandable_device(1 << 30, "segments:pytorch");
    let extended = |sim: &Sim| -> Vec<usize> {
        let bytes = |call: &Call| if let Call::Extend(bytes) = call { Some(*bytes) } else { None };
        sim.calls().iter().filter_map(bytes).collect()
    };
    let small = take(&allocator, 1000);
    let [a, b] = [3 * MIB, 30 * MIB].map(|bytes| take(&allocator, bytes));
    assert_eq!(extended(&sim), [2 * MIB, 20 * MIB, 20 * MIB]);
    free_all(&allocator, [small, a, b]);
}

#[test]
fn free_pages_are_released_anywhere_and_committed_again() {
    let (sim, allocator) = expandable_device(1 << 30, "");
    let [a, b, c, d] = [3, 5, 7, 9].map(|mib| take(&allocator, mib * MIB));
    let segment = place(&a).0;
    free_all(&allocator, [b, d]);
    allocator.check();
    assert_eq!(allocator.trim(20 * MIB as u64).unwrap(), 4 * MIB as u64, "as much as may go, of the longest run");
    assert_eq!(sim.committed(), 20 * MIB as u64);
    allocator.check();
    allocator.empty_cache().unwrap();
    allocator.check();
    let s = allocator.stats();
    assert_eq!((sim.committed(), s.reserved_bytes.current), (10 * MIB as u64, 10 * MIB as u64));
    assert_eq!((s.segment.current, s.segment.freed, s.inactive_split_bytes.current), (1, 0, 0));
    // A request that fits fills the hole, and a larger one extends the end. The rest of a partly filled hole stays a hole.
    let [e, f] = [6, 2].map(|mib| take(&allocator, mib * MIB));
    assert_eq!((place(&e), place(&f)), ((segment, 15 * MIB), (segment, 3 * MIB)));
    assert_eq!(sim.committed(), 18 * MIB as u64);
    allocator.check();
    let g = take(&allocator, 3 * MIB);
    assert_eq!((place(&g), sim.committed()), ((segment, 5 * MIB), 21 * MIB as u64));
    allocator.check();
    // Adjacent holes and free blocks are committed together.
    free_all(&allocator, [f, g]);
    allocator.empty_cache().unwrap();
    let h = take(&allocator, 2 * MIB);
    allocator.deallocate(h);
    let h = take(&allocator, 5 * MIB);
    assert_eq!((place(&h), sim.committed()), ((segment, 3 * MIB), 21 * MIB as u64));
    allocator.check();
    free_all(&allocator, [a, c, e, h]);
    allocator.empty_cache().unwrap();
    assert_eq!((sim.committed(), sim.live_segments(), allocator.stats().segment.current), (0, 0, 0));
}

#[test]
fn free_blocks_of_several_streams_at_the_end_are_released() {
    let (sim, allocator) = expandable_device_with_page(4096, 1 << 30, "segments:pytorch");
    let stream = sim.stream(1);
    let blocks = [MIB, MIB - (48 << 10)].map(|bytes| take(&allocator, bytes));
    let other = allocator.allocate(32 << 10, stream).unwrap();
    assert_eq!(place(&other), (place(&blocks[0]).0, 2 * MIB - (48 << 10)), "what the first stream has left");
    allocator.deallocate(other);
    // The free block of 32 KiB is shorter than the smallest hole, so it is released only after the 16 KiB that follow it.
    allocator.empty_cache().unwrap();
    assert_eq!(sim.committed(), (2 * MIB - (48 << 10)) as u64);
    allocator.check();
    free_all(&allocator, blocks);
}

#[test]
fn released_holes_make_room_for_a_larger_request_without_copies() {
    let (sim, allocator) = expandable_device(64 * MIB as u64, "compaction:False");
    let mut blocks: Vec<_> = (0..32).map(|_| Some(take(&allocator, 2 * MIB))).collect();
    (0..32).filter(|i| i % 2 == 0).for_each(|i| allocator.deallocate(blocks[i].take().unwrap()));
    let large = take(&allocator, 32 * MIB);
    assert_eq!((sim.committed(), count(&sim, |call| matches!(call, Call::Copy(_)))), (64 * MIB as u64, 0));
    allocator.check();
    allocator.deallocate(large);
    free_all(&allocator, blocks.into_iter().flatten());
}

#[test]
fn pages_are_recycled_so_that_reserved_bytes_follow_the_peak() {
    let (sim, allocator) = expandable_device(1 << 30, "");
    let mut peak = 0;
    for round in 1..if cfg!(miri) { 5 } else { 20 } {
        let blocks: Vec<_> = (0..8).map(|i| take(&allocator, (round + i % 3) * 300_000)).collect();
        let (even, odd): (Vec<_>, Vec<_>) = (0..).zip(blocks).partition(|(i, _)| i % 2 == 0);
        free_all(&allocator, even.into_iter().map(|(_, block)| block));
        let larger = take(&allocator, (round + 4) * 300_000);
        free_all(&allocator, odd.into_iter().map(|(_, block)| block).chain([larger]));
        let s = allocator.stats();
        peak = peak.max(s.active_bytes.peak);
        assert!(s.reserved_bytes.peak <= peak + peak / 8 + 4 * PAGE as u64, "round {round}: {s}");
    }
    assert_eq!(allocator.stats().reserved_bytes.current, sim.committed());
    allocator.check();
}

#[test]
fn a_segment_end_unused_for_long_is_released() {
    let (sim, allocator) = expandable_device(1 << 30, "decay_ms:1000");
    let pass = |milliseconds: u64| {
        let step = if cfg!(miri) { 400 } else { 100 };
        for _ in 0..milliseconds.div_ceil(step) {
            allocator.clock.ahead.fetch_add(step, Relaxed);
            (0..64).for_each(|_| allocator.deallocate(take(&allocator, 2 * MIB)));
        }
    };
    let [live, burst] = [12 * MIB, 40 * MIB].map(|bytes| take(&allocator, bytes));
    allocator.deallocate(burst);
    pass(800);
    assert_eq!(sim.committed(), 52 * MIB as u64, "not yet");
    pass(4000);
    assert_eq!(sim.committed(), 14 * MIB as u64, "what each interval needs is kept");
    let calls = sim.call_count();
    pass(5000);
    assert!(calls_since(&sim, calls).iter().all(|call| matches!(call, Call::Record | Call::Query)));
    allocator.check();
    allocator.deallocate(live);
}

#[test]
fn lowering_the_limit_releases_the_end_of_a_segment() {
    let (sim, allocator) = expandable_device(1 << 30, "memory_limit_mb:64,compaction:False");
    let [a, b] = [40 * MIB, 24 * MIB].map(|bytes| take(&allocator, bytes));
    assert!(matches!(allocator.allocate(2 * MIB, StreamId::DEFAULT), Err(Error::OutOfMemory { .. })));
    assert_eq!(sim.committed(), 64 * MIB as u64);
    allocator.deallocate(b);
    allocator.set_memory_limit(50 * MIB as u64).unwrap();
    let c = take(&allocator, 3 * MIB);
    assert_eq!(sim.committed(), 50 * MIB as u64);
    // The segment of small blocks needs memory that the segment of large blocks does not use.
    let small = take(&allocator, MIB);
    let d = take(&allocator, 6 * MIB);
    assert_eq!(sim.committed(), 50 * MIB as u64);
    allocator.check();
    free_all(&allocator, [a, c, d, small]);
}

#[test]
fn a_failed_extension_is_recovered_or_reported() {
    for failure in [Failure::DeviceMemory, Failure::Resources, Failure::HostMemory] {
        let (sim, allocator) = expandable_device(1 << 30, "");
        let a = take(&allocator, 5 * MIB);
        sim.fail_next_commit(failure.clone());
        let b = take(&allocator, 7 * MIB); // after a failure, the allocator extends by exactly the requested size
        assert_eq!((place(&b).0, place(&b).1), (place(&a).0, 5 * MIB));
        for _ in 0..20 {
            sim.fail_next_commit(failure.clone());
        }
        let error = allocator.allocate(9 * MIB, StreamId::DEFAULT).unwrap_err().to_string();
        assert!(error.contains(failure.ran_out().unwrap()), "{error}");
        sim.clear_failures();
        allocator.check();
        assert_eq!(allocator.stats().reserved_bytes.current, sim.committed());
        free_all(&allocator, [a, b]);
        sim.fail_next_commit(failure);
        allocator.empty_cache().unwrap();
        allocator.deallocate(take(&allocator, MIB)); // the first extension of a new segment
        sim.fail_next_commit(Failure::Other(Error::invalid("test", "no")));
        assert!(matches!(allocator.allocate(9 * MIB, StreamId::DEFAULT), Err(Error::Invalid { .. })));
        allocator.check();
    }
}

#[test]
fn compaction_moves_blocks_down_and_releases_the_end() {
    let options = SimOptions {
        capacity: 64 * MIB as u64,
        page: PAGE,
        contents: true,
        asynchronous: true,
        ..SimOptions::default()
    };
    let sim = Sim::new(options);
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), "expandable_segments:True".parse().unwrap()).unwrap();
    let mut blocks: Vec<Option<Block>> = (0..32).map(|_| Some(take(&allocator, 2 * MIB))).collect();
    for (tag, block) in (1..).zip(&blocks) {
        sim.write_tag(StreamId::DEFAULT, block.as_ref().unwrap(), tag).unwrap();
    }
    let exported = blocks[2].as_ref().unwrap();
    exported.export();
    let stays = place(exported);
    (0..32).filter(|i| i % 4 != 2).for_each(|i| allocator.deallocate(blocks[i].take().unwrap()));
    allocator.check();
    assert_eq!(allocator.compact(u64::MAX).unwrap(), 64 * MIB as u64 - sim.committed());
    assert_eq!((sim.committed(), sim.live_segments()), (20 * MIB as u64, 1), "16 live, 4 before the one that stays");
    assert_eq!(place(blocks[2].as_ref().unwrap()), stays);
    for (tag, block) in (1..).zip(&blocks) {
        block.iter().for_each(|block| sim.check_tag(StreamId::DEFAULT, block, tag).unwrap());
    }
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    allocator.check();
    free_all(&allocator, blocks.into_iter().flatten());
}

#[test]
fn streams_and_pools_have_segments_of_their_own() {
    let (sim, allocator) = expandable_device(1 << 30, "");
    let allocator = Arc::new(allocator);
    let [pool, whole] = [false, true]
        .map(|no_split| MemPool::new(&allocator, MemPoolOptions { no_split, ..MemPoolOptions::default() }));
    let (own, other) = (take(&allocator, 2 * MIB), allocator.allocate(2 * MIB, sim.stream(1)).unwrap());
    let inside = use_mem_pool(&pool, || [3, 4].map(|mib| take(&allocator, mib * MIB)));
    let unsplit = use_mem_pool(&whole, || [5, 6].map(|mib| take(&allocator, mib * MIB)));
    let segments = |blocks: &[Block]| blocks.iter().map(|block| place(block).0).collect::<Vec<_>>();
    assert_eq!(segments(&inside)[0], segments(&inside)[1]);
    assert_ne!(segments(&unsplit)[0], segments(&unsplit)[1]);
    assert_eq!((sim.live_segments(), created(&sim)), (5, vec![5 * MIB, 6 * MIB]));
    // A pool keeps the unused end of its segment until its `empty_cache` is called, and can be restored.
    let checkpoint = pool.checkpoint();
    let [a, b] = inside;
    allocator.deallocate(b);
    let held = pool.stats().reserved_bytes;
    allocator.empty_cache().unwrap();
    assert_eq!(pool.stats().reserved_bytes, held);
    let mut leaving = vec![a];
    let restored = pool.restore(&checkpoint, &mut leaving).unwrap();
    assert_eq!(restored.len(), 2);
    let mut restored = restored.into_iter();
    let a = restored.next().unwrap();
    restored.for_each(|block| allocator.deallocate(block));
    pool.empty_cache().unwrap();
    assert_eq!((pool.stats().reserved_bytes, pool.stats().segments), (3 * MIB as u64, 1));
    let error = pool.restore(&checkpoint, &mut vec![]).unwrap_err();
    assert!(error.to_string().contains("shrunk"), "{error}");
    allocator.check();
    drop((pool, whole)); // live blocks stay valid in the default pool
    allocator.check();
    allocator.deallocate(a);
    free_all(&allocator, unsplit);
    free_all(&allocator, [own, other]);
    allocator.empty_cache().unwrap();
    assert_eq!((sim.committed(), sim.live_segments()), (0, 0));
}

#[test]
fn snapshots_and_the_history_show_committed_ranges() {
    let (_, allocator) = expandable_device(1 << 30, "");
    allocator.record_memory_history(HistoryOptions::default()).unwrap();
    let [a, b] = [3 * MIB, 5 * MIB].map(|bytes| take(&allocator, bytes));
    let c = take(&allocator, 2 * MIB);
    allocator.deallocate(b);
    allocator.empty_cache().unwrap();
    let snapshot = allocator.snapshot();
    snapshot.check().unwrap();
    // As in PyTorch, each committed part is shown as a segment.
    let [first, second] = &snapshot.segments[..] else { panic!("two parts") };
    assert_eq!((first.is_expandable, first.total_size, first.blocks.len()), (true, 3 * MIB as u64, 1));
    assert_eq!((second.is_expandable, second.total_size, second.blocks.len()), (true, 2 * MIB as u64, 1));
    assert_eq!(second.address - first.address, 8 * MIB as u64);
    free_all(&allocator, [a, c]);
    allocator.empty_cache().unwrap();
    let snapshot = allocator.snapshot();
    snapshot.check().unwrap();
    assert!(snapshot.segments.is_empty());
    let actions: Vec<_> = (snapshot.device_traces.iter().flatten())
        .filter(|e| matches!(e.action, TraceAction::SegmentMap | TraceAction::SegmentUnmap))
        .map(|e| (e.action, e.size / MIB as u64))
        .collect();
    use TraceAction::{SegmentMap, SegmentUnmap};
    let want =
        [(SegmentMap, 3), (SegmentMap, 5), (SegmentMap, 2), (SegmentUnmap, 5), (SegmentUnmap, 3), (SegmentUnmap, 2)];
    assert_eq!(actions, want);
    assert!(snapshot.device_traces.iter().flatten().all(|e| e.action != TraceAction::SegmentAlloc));
}

#[test]
fn a_request_larger_than_the_reserved_addresses_gets_its_own_segment() {
    let (sim, allocator) = expandable_device(1 << 50, "compaction:False");
    let small = take(&allocator, 3 * MIB);
    let huge = take(&allocator, 3 << 39);
    assert_eq!((created(&sim), sim.live_segments()), (vec![3 << 39], 2));
    free_all(&allocator, [small, huge]);
    allocator.check();
}

#[test]
fn expandable_segments_need_a_driver_that_reserves_addresses() {
    let config: Config = "expandable_segments:True".parse().unwrap();
    let error = CachingAllocator::new(Arc::new(Sim::new(SimOptions::default())), config.clone()).unwrap_err();
    for part in ["expandable_segments", "cannot reserve", "leave it False", "compaction"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let sim = Sim::new(SimOptions { page: PAGE, ..SimOptions::default() });
    let both = Config { max_split_size: 64 << 20, ..config };
    let error = CachingAllocator::new(Arc::new(sim), both).unwrap_err().to_string();
    assert!(error.contains("max_split_size_mb"), "{error}");
}

#[test]
fn expandable_segments_are_advised_only_if_possible() {
    let advised = |page: usize, config: &str| {
        let sim = Sim::new(SimOptions { capacity: 40 * MIB as u64, page, ..SimOptions::default() });
        let config: Config = format!("segments:pytorch,compaction:False,{config}").parse().unwrap();
        let allocator = CachingAllocator::new(Arc::new(sim), config).unwrap();
        let [a, b, c, d] = [8 * MIB; 4].map(|bytes| take(&allocator, bytes));
        free_all(&allocator, [b, d]);
        let large = allocator.allocate(20 * MIB, StreamId::DEFAULT);
        free_all(&allocator, [a, c]);
        let error = large.map(|large| allocator.deallocate(large)).err()?.to_string();
        Some(error.contains("expandable_segments:True"))
    };
    assert_eq!(advised(0, ""), Some(false));
    assert_eq!(advised(PAGE, ""), Some(true));
    assert_eq!(advised(PAGE, "expandable_segments:True"), None, "and it does help");
}

#[test]
fn threads_that_grow_one_segment_get_disjoint_blocks() {
    let (sim, allocator) = expandable_device(1 << 30, "");
    let (threads, rounds) = if cfg!(miri) { (2, 20) } else { (4, 400) };
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let allocator = &allocator;
            scope.spawn(move || {
                let mut live = Vec::new();
                for round in 0..rounds {
                    live.push(take(allocator, ((round * 7 + thread * 3) % 11 + 1) * 400_000));
                    if round % 3 == thread % 3 {
                        free_all(allocator, live.drain(..live.len() / 2));
                    }
                    match round % 50 {
                        17 => allocator.empty_cache().unwrap(),
                        31 => _ = allocator.compact(u64::MAX).unwrap(),
                        47 => _ = allocator.trim(8 * MIB as u64).unwrap(),
                        _ => {}
                    }
                    if live.len() > 40 {
                        free_all(allocator, live.drain(..));
                    }
                }
                free_all(allocator, live);
            });
        }
    });
    allocator.check();
    allocator.empty_cache().unwrap();
    assert_eq!((sim.committed(), sim.live_segments(), sim.violations()), (0, 0, vec![]));
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn the_hosts_memory_grows_and_keeps_its_contents() {
    let config: Config = "expandable_segments:True,thread_cache_kb:0".parse().unwrap();
    let driver = crate::storage::driver(Device::Cpu).unwrap();
    let allocator = CachingAllocator::new(Arc::clone(&driver), config).unwrap();
    let mut blocks: Vec<(u8, Block)> = Vec::new();
    for i in 0..40_u8 {
        let block = take(&allocator, 100_000 * (usize::from(i) + 1));
        let place = block.location();
        // SAFETY: no other code uses the block.
        unsafe { driver.write(&vec![i; block.size()], (place.segment().memory(), place.offset())) }.unwrap();
        drop(place);
        blocks.push((i, block));
    }
    assert_eq!(allocator.stats().segment.current, 2, "small and large");
    let (blocks, freed): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|(i, _)| i % 3 == 0);
    free_all(&allocator, freed.into_iter().map(|(_, block)| block));
    let held = allocator.stats().reserved_bytes.current;
    let freed = allocator.compact(u64::MAX).unwrap();
    assert!(freed > held / 2, "{freed} of {held}");
    allocator.check();
    assert!(blocks.iter().all(|(i, block)| {
        let (place, mut bytes) = (block.location(), vec![0; block.size()]);
        // SAFETY: no other code uses the block.
        unsafe { driver.read((place.segment().memory(), place.offset()), &mut bytes) }.unwrap();
        bytes.iter().all(|byte| byte == i)
    }));
    free_all(&allocator, blocks.into_iter().map(|(_, block)| block));
}
