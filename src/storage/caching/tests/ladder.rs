//! Out-of-memory recovery, free-memory callbacks, and the error text.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::storage::OutOfMemoryEvent;

fn out_of_memory(allocator: &CachingAllocator, bytes: usize) -> String {
    match allocator.allocate(bytes, StreamId::DEFAULT) {
        Err(error @ Error::OutOfMemory { requested, .. }) => {
            assert_eq!(requested, bytes);
            error.to_string()
        }
        other => panic!("{bytes} bytes: {other:?}"),
    }
}

#[test]
fn running_out_of_memory_releases_the_cache_and_retries() {
    let (sim, allocator) = device(80 * MIB as u64, "segments:pytorch,compaction:False");
    sim.set_others(40 * MIB as u64);
    let blocks = [MIB, 15 * MIB, 17 * MIB].map(|bytes| take(&allocator, bytes));
    let [held, a, b] = blocks;
    free_all(&allocator, [a, b]);
    let before = sim.call_count();
    let large = take(&allocator, 30 * MIB);
    let (c, k, r) = (Call::Create(30 * MIB), Call::Commit(30 * MIB), Call::Release(30 * MIB));
    let calls = calls_since(&sim, before);
    assert_eq!(calls[..4], [c, k, r, Call::Synchronize]);
    assert_eq!(calls[calls.len() - 2..], [c, k]);
    assert!(calls.contains(&Call::Release(16 * MIB)) && calls.contains(&Call::Release(18 * MIB)));
    let s = allocator.stats();
    assert_eq!((s.num_alloc_retries, s.num_ooms, s.num_device_alloc, s.num_device_free), (1, 0, 4, 2));
    free_all(&allocator, [held, large]);
    allocator.check();
}

#[test]
fn blocks_freed_by_another_thread_during_the_wait_are_reused() {
    let (sim, allocator) = device(40 * MIB as u64, "segments:pytorch,compaction:False");
    let allocator = Arc::new(allocator);
    let [theirs, ours] = [16 * MIB, 16 * MIB].map(|bytes| take(&allocator, bytes));
    let other = Arc::clone(&allocator);
    sim.at_synchronize(move || other.deallocate(theirs));
    let made = created(&sim).len();
    let found = take(&allocator, 15 * MIB);
    assert_eq!(created(&sim).len(), made, "the limit said no before the driver was asked");
    let s = allocator.stats();
    assert_eq!((s.num_alloc_retries, s.num_ooms, s.num_device_free), (1, 0, 0));
    free_all(&allocator, [ours, found]);
    allocator.check();
}

#[test]
fn if_the_usual_segment_fails_an_exact_one_is_created() {
    let (sim, allocator) = device(64 * MIB as u64, "segments:pytorch");
    sim.set_others(50 * MIB as u64);
    let block = take(&allocator, 3 * MIB + 5);
    assert_eq!(created(&sim), [20 * MIB, 3 * MIB + 512]);
    allocator.deallocate(block);
    allocator.check();
}

#[test]
fn free_memory_of_the_other_size_kind_is_used_before_an_error() {
    let (sim, allocator) = device(20 * MIB as u64, "segments:pytorch");
    let [large, small] = [2 * MIB, 100].map(|bytes| take(&allocator, bytes));
    assert_eq!((place(&small).0, place(&small).1), (place(&large).0, 2 * MIB));
    assert_eq!((allocator.stats().large_pool.allocation.current, sim.live_segments()), (2, 1));
    free_all(&allocator, [large, small]);
    allocator.check();
    assert_eq!(allocator.stats().inactive_split.current, 0);
}

#[test]
fn absurd_sizes_never_reach_the_driver() {
    const GIB: usize = 1 << 30;
    let options =
        SimOptions { capacity: GIB as u64, largest_segment: GIB / 2, record_calls: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let allocator = CachingAllocator::new(Arc::new(sim.clone()), "segments:pytorch".parse().unwrap()).unwrap();
    let cached = take(&allocator, 1);
    let before = sim.calls();
    for bytes in [usize::MAX, usize::MAX - 510, usize::MAX - 3 * MIB, isize::MAX as usize, GIB + 1, 2 * GIB] {
        assert!(out_of_memory(&allocator, bytes).contains(&(GIB / 2).to_string()));
    }
    assert_eq!(sim.calls(), before);
    // For sizes between the largest guaranteed buffer and the capacity, only the driver knows whether a request can succeed. If it
    // refuses, the cache is kept, because releasing it could not help.
    allocator.deallocate(take(&allocator, 12 * MIB));
    let held = sim.committed();
    assert!(out_of_memory(&allocator, GIB / 2 + 1).contains(&(GIB / 2).to_string()));
    assert_eq!((sim.committed(), created(&sim).last()), (held, Some(&(GIB / 2 + 512))));
    allocator.deallocate(cached);
    allocator.check();
}

#[test]
fn injected_failures_are_recovered_or_reported_at_once() {
    let lost = || Error::DeviceLost { device: Device::OpenCL(99), cause: "test".into() };
    type Inject = fn(&Sim, Failure);
    for inject in [Sim::fail_next_create as Inject, Sim::fail_next_commit as Inject] {
        for (failure, code) in
            [(Failure::DeviceMemory, "(-4)"), (Failure::Resources, "(-5)"), (Failure::HostMemory, "(-6)")]
        {
            let (sim, allocator) = device(1 << 30, "compaction:False");
            inject(&sim, Failure::Other(lost()));
            assert!(matches!(allocator.allocate(1000, StreamId::DEFAULT), Err(Error::DeviceLost { .. })));
            let s = allocator.stats();
            assert_eq!((s.segment.current, s.num_ooms, sim.live_segments()), (0, 0, 0));
            // If the driver is out of memory once, the allocator's retry succeeds. If it is twice in a row, the allocation fails.
            inject(&sim, failure.clone());
            let block = take(&allocator, 1000);
            assert_eq!(allocator.stats().num_alloc_retries, 1);
            (0..2).for_each(|_| inject(&sim, failure.clone()));
            let detail = out_of_memory(&allocator, 2 * MIB);
            assert!(detail.contains(code), "{detail}");
            let s = allocator.stats();
            assert_eq!((s.num_ooms, s.num_device_alloc, s.segment.current), (1, 1, 1));
            allocator.deallocate(block);
            allocator.check();
            allocator.empty_cache().unwrap();
            assert_eq!(sim.committed(), 0);
        }
    }
}

#[test]
fn a_fraction_and_a_limit_both_hold() {
    for config in ["segments:adaptive", "segments:pytorch"] {
        let (sim, allocator) = device(100 * MIB as u64, config);
        for bad in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(matches!(allocator.set_memory_fraction(bad), Err(Error::Invalid { .. })));
        }
        for (fraction, limit, most) in [(0.25, 80, 25), (1.0, 25, 25), (0.5, 25, 25)] {
            allocator.set_memory_fraction(fraction).unwrap();
            allocator.set_memory_limit(limit * MIB as u64).unwrap();
            let block = take(&allocator, 20 * MIB);
            let detail = out_of_memory(&allocator, 30 * MIB);
            assert!(detail.contains(&(most * MIB).to_string()) && detail.contains("limit"), "{detail}");
            allocator.deallocate(block);
        }
        allocator.set_memory_limit(u64::MAX).unwrap();
        allocator.set_memory_fraction(1.0).unwrap();
        let blocks = [20, 30].map(|mib| take(&allocator, mib * MIB));
        free_all(&allocator, blocks);
        allocator.empty_cache().unwrap();
        // After the limit is lowered below the reserved bytes, the next allocation releases unused segments.
        let [unused, live] = [20, 10].map(|mib| take(&allocator, mib * MIB));
        allocator.deallocate(unused);
        allocator.set_memory_limit(16 * MIB as u64).unwrap();
        assert_eq!(sim.committed(), 30 * MIB as u64);
        let block = take(&allocator, 1000);
        assert!(sim.committed() <= 12 * MIB as u64, "{config}");
        free_all(&allocator, [live, block]);
        allocator.check();
    }
}

#[test]
fn callbacks_are_asked_for_memory_when_there_is_none() {
    let (sim, allocator) = device(32 * MIB as u64, "segments:pytorch,compaction:False");
    let allocator = Arc::new(allocator);
    let spare = Arc::new(Mutex::new(Some(take(&allocator, 20 * MIB))));
    let calls = Arc::new(AtomicUsize::new(0));
    let callback = {
        let (allocator, spare, calls) = (Arc::downgrade(&allocator), Arc::clone(&spare), Arc::clone(&calls));
        move || {
            calls.fetch_add(1, Relaxed);
            let allocator = allocator.upgrade().unwrap();
            // The allocation fails, and the callback is not called again.
            assert!(allocator.allocate(31 * MIB, StreamId::DEFAULT).is_err());
            spare.lock().unwrap().take().map(|block| allocator.deallocate(block)).is_some()
        }
    };
    let registration = allocator.add_free_memory_callback(Box::new(callback));
    let small = take(&allocator, 1000);
    assert_eq!(calls.load(Relaxed), 0, "there was room");
    let made = created(&sim).len();
    let block = take(&allocator, 20 * MIB);
    assert_eq!((calls.load(Relaxed), created(&sim).len()), (1, made));
    assert_eq!(allocator.stats().num_ooms, 1, "the callback's own");
    out_of_memory(&allocator, 20 * MIB);
    assert_eq!(calls.load(Relaxed), 2);
    drop(registration);
    out_of_memory(&allocator, 20 * MIB);
    assert_eq!(calls.load(Relaxed), 2);
    free_all(&allocator, [small, block]);
}

#[test]
fn observers_are_told_before_the_error_and_may_allocate() {
    let (_, allocator) = device(32 * MIB as u64, "segments:pytorch,per_process_memory_fraction:0.75");
    let allocator = Arc::new(allocator);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = {
        let (allocator, seen) = (Arc::downgrade(&allocator), Arc::clone(&seen));
        move |event: &OutOfMemoryEvent| {
            let allocator = allocator.upgrade().unwrap();
            assert_eq!(allocator.stats().num_ooms, 1);
            allocator.deallocate(take(&allocator, 1000));
            assert!(allocator.allocate(31 * MIB, StreamId::DEFAULT).is_err());
            seen.lock().unwrap().push(*event);
        }
    };
    let registration = allocator.add_oom_observer(Box::new(observer));
    let block = take(&allocator, 20 * MIB);
    out_of_memory(&allocator, 21 * MIB);
    let event = OutOfMemoryEvent {
        device: Device::OpenCL(99),
        requested: 21 * MIB,
        allowed: 24 * MIB as u64,
        device_free: 12 * MIB as u64,
    };
    assert_eq!(*seen.lock().unwrap(), [event]);
    drop(registration);
    out_of_memory(&allocator, 21 * MIB);
    assert_eq!(seen.lock().unwrap().len(), 1);
    allocator.deallocate(block);
}

#[test]
fn the_error_reports_memory_use() {
    let (_, allocator) = device(64 * MIB as u64, "segments:pytorch,compaction:False");
    let held = [100, 15 * MIB, 15 * MIB, 15 * MIB].map(|bytes| take(&allocator, bytes));
    let detail = out_of_memory(&allocator, 20_000_000);
    for part in [48 * MIB + 512, 50 * MIB, 64 * MIB, 2 * MIB - 512] {
        assert!(detail.contains(&part.to_string()), "{part} is not in: {detail}");
    }
    for part in ["19.07 MiB", "64.00 MiB", "50.00 MiB"] {
        assert!(detail.contains(part), "{part} is not in: {detail}");
    }
    assert_eq!(detail.matches("CLAYSTONE_ALLOC_CONF").count(), 1, "only spilling would help: {detail}");
    assert!(detail.contains("idle tensors could move to the host: set spill:host"), "{detail}");
    let s = allocator.stats();
    assert_eq!((s.num_ooms, s.num_alloc_retries, s.allocation.current), (1, 1, 4));
    free_all(&allocator, held);
    allocator.deallocate(take(&allocator, 20_000_000));
}

#[test]
fn the_error_reports_the_largest_possible_buffer() {
    let (_, allocator) = device(8 << 40, "");
    let detail = out_of_memory(&allocator, 3 << 40);
    for part in ["3.00 TiB", "the device has 8.00 TiB", "promises buffers of at most 2.00 TiB"] {
        assert!(detail.contains(part), "{part} is not in: {detail}");
    }
    let detail = out_of_memory(&device(64 * MIB as u64, "").1, usize::MAX);
    assert!(detail.contains("more than usize::MAX bytes") && detail.contains("has 64.00 MiB"), "{detail}");
}

#[test]
fn the_error_reports_each_private_pool() {
    let (_, allocator) = device(64 * MIB as u64, "segments:pytorch");
    let allocator = Arc::new(allocator);
    let pool = MemPool::new(&allocator, MemPoolOptions::default());
    let inside = use_mem_pool(&pool, || take(&allocator, 5 * MIB));
    let detail = out_of_memory(&allocator, 60 * MIB);
    let want = format!("pool {}: 5.00 MiB (5242880 bytes) of 20.00 MiB (20971520 bytes)", pool.id());
    assert!(detail.contains(&want), "{detail}");
    let detail = use_mem_pool(&pool, || out_of_memory(&allocator, 60 * MIB));
    assert!(detail.contains(&format!("in memory pool {}", pool.id())), "{detail}");
    allocator.deallocate(inside);
}

#[test]
fn advice_is_given_only_where_it_applies() {
    let fragmented = |config: &str| {
        let sim = Sim::new(SimOptions { capacity: 40 * MIB as u64, ..SimOptions::default() });
        let config: Config = format!("segments:pytorch,compaction:False,{config}").parse().unwrap();
        let allocator = CachingAllocator::new(Arc::new(sim), config).unwrap();
        let [a, b, c, d] = [8 * MIB; 4].map(|bytes| take(&allocator, bytes));
        free_all(&allocator, [b, d]);
        let detail = out_of_memory(&allocator, 20 * MIB);
        free_all(&allocator, [a, c]);
        detail
    };
    for (config, max_split) in [("", true), ("max_split_size_mb:100", false)] {
        let detail = fragmented(config);
        assert!(detail.contains("compaction:True"), "{detail}");
        assert!(!detail.contains("expandable_segments"), "{detail}");
        assert_eq!(detail.contains("max_split_size_mb"), max_split, "{detail}");
        assert!(!detail.contains("The memory limit is exhausted"), "{detail}");
    }
}
