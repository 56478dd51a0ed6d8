//! Tests with the requests of whole programs: repetitive, multi-threaded, and with several streams.

use std::collections::BTreeMap;

use super::*;

const CONFIGS: [&str; 2] = ["segments:adaptive", "segments:pytorch"];

/// Returns the requests of a network's inference: a layer's output lives until the next layer is done, its workspace only while the
/// layer runs.
fn inference(layers: usize) -> Vec<(char, usize, usize)> {
    let mut events = Vec::new();
    for layer in 0..layers {
        let (output, workspace) = (4096 + (layer * 7919 * 613) % (6 * MIB), 1 + (layer * 104_729) % (24 * MIB));
        events.extend([('a', 2 * layer, output), ('a', 2 * layer + 1, workspace), ('f', 2 * layer + 1, 0)]);
        if layer > 0 {
            events.push(('f', 2 * (layer - 1), 0));
        }
    }
    events.push(('f', 2 * (layers - 1), 0));
    events
}

#[test]
fn a_repeated_sequence_soon_needs_no_driver() {
    for config in CONFIGS {
        let (sim, allocator) = device(1 << 30, config);
        let mut calls = Vec::new();
        for _pass in 0..if cfg!(miri) { 10 } else { 30 } {
            let mut live = BTreeMap::new();
            for (action, id, bytes) in inference(if cfg!(miri) { 4 } else { 60 }) {
                match action {
                    'a' => drop(live.insert(id, take(&allocator, bytes))),
                    _ => allocator.deallocate(live.remove(&id).unwrap()),
                }
            }
            assert!(live.is_empty());
            allocator.check();
            calls.push(sim.call_count());
        }
        assert_eq!(calls[calls.len() - 2], calls[calls.len() - 1], "{config}: {calls:?}");
        let s = allocator.stats();
        assert_eq!((s.allocated_bytes.current, s.inactive_split.current), (0, 0));
    }
}

#[test]
fn many_threads_share_one_allocator() {
    for config in CONFIGS {
        let (sim, allocator) = device(256 * MIB as u64, config);
        std::thread::scope(|scope| {
            for thread in 0..if cfg!(miri) { 3 } else { 8_usize } {
                let allocator = &allocator;
                scope.spawn(move || {
                    let mut live = Vec::new();
                    let mut x = thread * 7 + 1;
                    for _ in 0..if cfg!(miri) { 10 } else { 500 } {
                        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        match allocator.allocate(1 + (x >> 33) % (3 * MIB), StreamId((x >> 20) as u32 % 2)) {
                            Ok(block) => live.push(block),
                            Err(e) => assert!(matches!(e, Error::OutOfMemory { .. }), "{e}"),
                        }
                        if live.len() > 6 {
                            allocator.deallocate(live.swap_remove((x >> 50) % 6));
                        }
                    }
                    free_all(allocator, live);
                });
            }
        });
        allocator.check();
        let s = allocator.stats();
        assert_eq!((s.allocation.current, s.allocated_bytes.current, s.requested_bytes.current), (0, 0, 0));
        allocator.empty_cache().unwrap();
        assert_eq!(sim.committed(), 0);
    }
}

#[test]
fn peaks_and_sums_can_be_reset() {
    let (_, allocator) = device(1 << 30, "segments:pytorch");
    let a = take(&allocator, 100);
    allocator.deallocate(take(&allocator, 3 * MIB));
    let s = allocator.stats();
    let (bytes, most) = (s.allocated_bytes, 3 * MIB as u64 + 512);
    assert_eq!((bytes.current, bytes.peak, bytes.allocated), (512, most, most));
    assert_eq!((s.allocation.peak, s.segment.peak, s.requested_bytes.freed), (2, 2, 3 * MIB as u64));
    allocator.reset_peak_stats();
    let s = allocator.stats();
    assert_eq!((s.allocated_bytes.peak, s.allocation.peak, s.segment.peak), (512, 1, 2));
    allocator.reset_accumulated_stats();
    let s = allocator.stats();
    assert_eq!((s.allocated_bytes.allocated, s.allocated_bytes.freed, s.num_device_alloc), (0, 0, 0));
    assert_eq!(s.allocated_bytes.current, 512);
    allocator.deallocate(a);
    assert_eq!(allocator.stats().allocated_bytes.freed, 512);
}

#[test]
fn empty_cache_keeps_segments_in_use() {
    let (sim, allocator) = device(1 << 30, "segments:pytorch");
    let [a, b, c] = [100, 30 * MIB, 100].map(|bytes| take(&allocator, bytes));
    free_all(&allocator, [b, a]);
    allocator.empty_cache().unwrap();
    let s = allocator.stats();
    assert_eq!((s.segment.current, s.reserved_bytes.current, s.inactive_split.current), (1, 2 * MIB as u64, 2));
    allocator.check();
    allocator.deallocate(c);
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.stats().reserved_bytes.current, sim.committed()), (0, 0));
}

#[test]
fn another_stream_takes_a_free_block_behind_a_wait_on_the_device() {
    for config in CONFIGS {
        for reuse in [true, false] {
            let setting = if reuse { "True" } else { "False" };
            let (sim, allocator) = device(1 << 30, &format!("{config},cross_stream_reuse:{setting}"));
            let (one, two) = (sim.stream(1), sim.stream(2));
            let a = allocator.allocate(3 * MIB, one).unwrap();
            let was = place(&a);
            allocator.deallocate(a);
            let before = sim.call_count();
            let b = allocator.allocate(3 * MIB, two).unwrap();
            assert_eq!(place(&b) == was, reuse, "{config}");
            if reuse {
                let calls = calls_since(&sim, before);
                assert!(calls.iter().all(|call| matches!(call, Call::Record | Call::StreamWaits)), "{calls:?}");
            }
            allocator.deallocate(b);
            allocator.check();
        }
    }
}

#[test]
fn a_pending_block_is_active_and_reused_behind_a_wait_or_when_its_stream_is_done() {
    for config in CONFIGS {
        for (reuse, syncs) in [("True", 0), ("False", 1)] {
            let sim = Sim::new(SimOptions {
                capacity: 24 * MIB as u64,
                alignment: if cfg!(miri) { 64 << 10 } else { 512 }, // larger under Miri, because each granule has a tag
                asynchronous: true,
                contents: true,
                ..SimOptions::default()
            });
            let config: Config = format!("{config},cross_stream_reuse:{reuse}").parse().unwrap();
            let allocator = CachingAllocator::new(Arc::new(sim.clone()), config).unwrap();
            let (home, side) = (StreamId::DEFAULT, sim.stream(1));
            let block = take(&allocator, 20 * MIB);
            allocator.record_stream(&block, side);
            sim.write_tag(side, &block, 1).unwrap();
            sim.check_tag(side, &block, 1).unwrap();
            let was = place(&block);
            allocator.deallocate(block);
            let s = allocator.stats();
            assert_eq!((s.allocated_bytes.current, s.active_bytes.current), (0, 20 * MIB as u64));
            let again = take(&allocator, 20 * MIB);
            assert_eq!(place(&again), was);
            assert_eq!((allocator.stats().num_sync_all_streams, allocator.stats().num_device_free), (syncs, 0));
            sim.write_tag(home, &again, 2).unwrap();
            sim.run(home, 100);
            sim.synchronize().unwrap();
            assert_eq!(sim.violations(), [""; 0]);
            allocator.deallocate(again);
            allocator.check();
        }
    }
}
