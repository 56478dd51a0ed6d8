//! Tests of the release of unused memory by decay and by `trim`.

use super::*;

const CONFIGS: [&str; 2] = ["decay_ms:1000,thread_cache_kb:0", "decay_ms:1000,thread_cache_kb:0,segments:pytorch"];

/// Advances the clock while small blocks are allocated and freed.
fn advance_clock(allocator: &CachingAllocator, milliseconds: u64) {
    let step = if cfg!(miri) { 300 } else { 100 };
    for _ in 0..milliseconds.div_ceil(step) {
        allocator.clock.ahead.fetch_add(step, Relaxed);
        (0..64).for_each(|_| allocator.deallocate(take(allocator, 512)));
    }
}

#[test]
fn segments_unused_for_long_are_released() {
    for config in CONFIGS {
        let (sim, allocator) = device(1 << 30, config);
        let [live, burst, small] = [12 * MIB, 40 * MIB, 512].map(|bytes| take(&allocator, bytes));
        allocator.deallocate(burst);
        advance_clock(&allocator, 900);
        assert!(sim.committed() >= 52 * MIB as u64, "{config}: not yet");
        advance_clock(&allocator, 3000);
        assert!(sim.committed() < 20 * MIB as u64, "{config}: {}", sim.committed());
        assert!(!sim.calls().contains(&Call::Synchronize));
        allocator.check();
        let released = sim.calls().len();
        advance_clock(&allocator, 5000);
        assert!(calls_since(&sim, released as u64).iter().all(|call| matches!(call, Call::Record | Call::Query)));
        free_all(&allocator, [live, small]);
    }
}

#[test]
fn segments_needed_in_each_interval_are_kept() {
    for config in CONFIGS {
        let (sim, allocator) = device(1 << 30, config);
        for _ in 0..3 {
            allocator.deallocate(take(&allocator, 40 * MIB));
            advance_clock(&allocator, 900);
        }
        let made = created(&sim).len();
        for _ in 0..if cfg!(miri) { 3 } else { 20 } {
            allocator.deallocate(take(&allocator, 40 * MIB));
            advance_clock(&allocator, 900);
        }
        assert_eq!(created(&sim).len(), made, "{config}");
    }
}

#[test]
fn without_decay_nothing_is_released() {
    let (sim, allocator) = device(1 << 30, "decay_ms:0,thread_cache_kb:0");
    let [burst, small] = [40 * MIB, 512].map(|bytes| take(&allocator, bytes));
    allocator.deallocate(burst);
    advance_clock(&allocator, if cfg!(miri) { 3000 } else { 100_000 });
    assert!(sim.committed() >= 40 * MIB as u64);
    allocator.deallocate(small);
}

#[test]
fn nothing_is_released_while_the_device_works() {
    let options = SimOptions { asynchronous: true, contents: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let config: Config = CONFIGS[0].parse().unwrap();
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), config).unwrap();
    let [burst, small] = [40 * MIB, 512].map(|bytes| take(&allocator, bytes));
    sim.write_tag(StreamId::DEFAULT, &burst, 1).unwrap();
    allocator.deallocate(burst);
    let held = sim.committed();
    advance_clock(&allocator, 5000);
    assert_eq!(allocator.trim(0).unwrap(), 0);
    assert!(sim.committed() >= held);
    assert_eq!((sim.stalls(), sim.violations()), (0, vec![]));
    allocator.deallocate(small);
}

#[test]
fn trimming_keeps_at_least_the_given_bytes() {
    for config in ["", "segments:pytorch"] {
        let (sim, allocator) = device(1 << 30, config);
        let blocks = [20, 40, 10, 12].map(|mib| take(&allocator, mib * MIB));
        let mut blocks = Vec::from(blocks);
        let live = blocks.pop().unwrap();
        free_all(&allocator, blocks);
        let mib = |bytes: u64| bytes / MIB as u64;
        assert_eq!(mib(sim.committed()), 82);
        assert_eq!(mib(allocator.trim(100 * MIB as u64).unwrap()), 0);
        assert_eq!((mib(allocator.trim(30 * MIB as u64).unwrap()), mib(sim.committed())), (50, 32), "{config}");
        assert_eq!((mib(allocator.trim(0).unwrap()), mib(sim.committed())), (20, 12));
        assert!(!sim.calls().contains(&Call::Synchronize));
        allocator.check();
        allocator.deallocate(live);
    }
}
