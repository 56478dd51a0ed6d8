//! Tests of how streams reuse free memory of other streams.

use super::properties::Random;
use super::*;

/// Runs a program whose blocks are distributed over `streams` streams: 40 blocks a step, with varying sizes and
/// lifetimes. Returns the peak reserved bytes, the peak requested bytes, and the bytes reserved after the program.
fn run_program(config: &str, streams: u32, asynchronous: bool) -> (u64, u64, u64) {
    let sim = Sim::new(SimOptions { asynchronous, ..SimOptions::default() });
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
    let mut random = Random(5);
    let mut live: Vec<(Block, usize)> = Vec::new();
    let mut random_run = Random(6);
    let steps = if cfg!(miri) { 2 } else { 200 };
    for step in 0..steps {
        for i in 0..40 {
            let bytes = random.size(12 * MIB).max(4096);
            let ends = step * 40 + i + 1 + random.below(30) as usize;
            let stream = sim.stream((i as u32 + random.below(2) as u32) % streams);
            live.push((allocator.allocate(bytes, stream).unwrap(), ends));
            let (over, left): (Vec<_>, Vec<_>) = live.into_iter().partition(|(_, ends)| *ends <= step * 40 + i);
            over.into_iter().for_each(|(block, _)| allocator.deallocate(block));
            live = left;
        }
        if asynchronous {
            (0..20).for_each(|_| _ = sim.run_some(random_run.next()));
        }
    }
    live.into_iter().for_each(|(block, _)| allocator.deallocate(block));
    allocator.check();
    sim.synchronize().unwrap();
    let s = allocator.stats();
    for _ in 0..if cfg!(miri) { 20 } else { 400 } {
        allocator.clock.ahead.fetch_add(20, Relaxed);
        (0..64).for_each(|_| allocator.deallocate(take(&allocator, MIB)));
    }
    allocator.check();
    (s.reserved_bytes.peak, s.requested_bytes.peak, sim.committed())
}

#[test]
fn more_streams_need_little_more_memory() {
    for config in ["", "segments:pytorch"] {
        for asynchronous in [false, true] {
            let (one, used, _) = run_program(config, 1, asynchronous);
            for (streams, most) in [(1, 1.0), (2, 1.25), (4, 1.5), (8, 1.5)] {
                let (reserved, same, _) = run_program(config, streams, asynchronous);
                let [mib, of] = [reserved, used].map(|bytes| bytes as f64 / MIB as f64);
                println!("{config:20} {streams} streams, asynchronous {asynchronous}: {mib:.1} MiB for {of:.1}");
                assert_eq!(same, used, "the work is the same");
                let enough = cfg!(miri) || reserved as f64 <= most * one as f64;
                assert!(enough, "{config}: {reserved} on {streams} streams, {one} on one");
            }
        }
    }
}

#[test]
fn memory_freed_by_all_streams_is_released() {
    for config in ["decay_ms:20", "decay_ms:20,segments:pytorch"] {
        for streams in [1, 2, 8] {
            let (reserved, _, left) = run_program(config, streams, true);
            assert!(left <= 2 * MIB as u64, "{config}: of {reserved} on {streams} streams {left} are left");
        }
    }
}

/// Returns an idle or busy device, whose allocator has an unused segment of 8 MiB in two parts freed by two streams.
fn two_parts(config: &str, asynchronous: bool) -> (Sim, CachingAllocator, [StreamId; 2]) {
    let alignment = if cfg!(miri) { 64 << 10 } else { 512 };
    let options = SimOptions {
        asynchronous,
        contents: true,
        check_order: true,
        alignment,
        record_calls: true,
        ..SimOptions::default()
    };
    let sim = Sim::new(options);
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
    let streams = [sim.stream(1), sim.stream(2)];
    allocator.deallocate(allocator.allocate(8 * MIB, streams[0]).unwrap());
    let blocks = [(11, streams[0]), (5, streams[1])].map(|(n, of)| (allocator.allocate(n * MIB / 2, of).unwrap(), of));
    assert_eq!(sim.live_segments(), 1);
    for (block, stream) in blocks {
        sim.write_tag(stream, &block, 7).unwrap();
        allocator.deallocate(block);
    }
    allocator.check();
    (sim, allocator, streams)
}

const PLAIN: &str = "thread_cache_kb:0,decay_ms:1000";

#[test]
fn adjacent_blocks_of_several_streams_serve_one_request() {
    for asynchronous in [false, true] {
        for who in [1, 2, 3] {
            let (sim, allocator, _) = two_parts(PLAIN, asynchronous);
            let stream = sim.stream(who);
            let block = allocator.allocate(7 * MIB, stream).unwrap();
            assert_eq!(sim.live_segments(), 1, "in both parts");
            sim.write_tag(stream, &block, 8).unwrap();
            sim.run(stream, 100);
            sim.check_tag(stream, &block, 8).unwrap();
            allocator.check();
            allocator.deallocate(block);
            sim.synchronize().unwrap();
            assert_eq!(sim.violations(), [""; 0]);
        }
    }
}

#[test]
fn a_wait_counts_until_more_is_submitted() {
    let (sim, allocator, [one, _]) = two_parts(PLAIN, true);
    let waits = || sim.calls().iter().filter(|call| **call == Call::StreamWaits).count();
    let before = waits();
    let take = || allocator.allocate(MIB + 64 * 1024, sim.stream(3)).unwrap();
    let mut blocks: Vec<Block> = (0..4).map(|_| take()).collect();
    assert_eq!(waits() - before, 2, "one for each stream");
    let other = allocator.allocate(20 * MIB, one).unwrap();
    sim.write_tag(one, &other, 1).unwrap();
    blocks.push(take());
    assert_eq!((waits() - before, sim.live_segments()), (3, 2));
    blocks.iter().for_each(|block| sim.write_tag(sim.stream(3), block, 2).unwrap());
    assert_eq!(sim.violations(), [""; 0]);
    allocator.check();
    allocator.deallocate(other);
    free_all(&allocator, blocks);
}

#[test]
fn a_segment_freed_by_several_streams_is_released() {
    for asynchronous in [false, true] {
        let (sim, allocator, _) = two_parts("thread_cache_kb:0,decay_ms:1000,segments:pytorch", asynchronous);
        let pass = |milliseconds: u64| {
            let step = if cfg!(miri) { 1000 } else { 100 };
            for _ in 0..milliseconds.div_ceil(step) {
                allocator.clock.ahead.fetch_add(step, Relaxed);
                (0..64).for_each(|_| allocator.deallocate(take(&allocator, 512)));
            }
        };
        pass(6000);
        let busy = asynchronous;
        assert_eq!(sim.committed() >= 20 * MIB as u64, busy, "only when the streams are done");
        sim.synchronize().unwrap();
        pass(6000);
        assert_eq!(sim.committed(), 2 * MIB as u64, "what the small ones are in");
        assert_eq!((sim.stalls(), sim.violations()), (0, vec![]));
        allocator.check();
    }
}

#[test]
fn a_limit_or_a_larger_request_releases_segments_freed_by_several_streams() {
    let (sim, allocator, _) = two_parts(PLAIN, false);
    allocator.set_memory_limit(4 * MIB as u64).unwrap();
    allocator.deallocate(take(&allocator, 512));
    assert!(sim.committed() < MIB as u64, "shed");
    let (sim, allocator, _) = two_parts(PLAIN, false);
    allocator.deallocate(take(&allocator, 9 * MIB));
    assert_eq!(sim.committed(), 9 * MIB as u64, "recycled before more was held than needed");
}
