use std::collections::HashMap;
use std::thread;

use super::*;
use crate::Error;
use crate::storage::{Call, Failure, ImageFormat, Sim, SimOptions, build_allocator};

const STREAM: StreamId = StreamId::DEFAULT;
const KIB: usize = 1 << 10;

fn pool_of(sim: &Sim, conf: &str) -> PoolAllocator {
    PoolAllocator::new(Arc::new(sim.clone()), conf.parse().unwrap()).unwrap()
}

fn device(capacity: usize) -> (Sim, PoolAllocator) {
    let sim = Sim::new(SimOptions { capacity: capacity as u64, record_calls: true, ..SimOptions::default() });
    let pool = pool_of(&sim, "");
    (sim, pool)
}

/// Returns a device whose streams run only on request and that checks contents, and a pool of its memory.
fn slow_device() -> (Sim, PoolAllocator) {
    let options = SimOptions { asynchronous: true, contents: true, record_calls: true, ..SimOptions::default() };
    let sim = Sim::new(options);
    let pool = pool_of(&sim, "");
    (sim, pool)
}

fn segment(block: &Block) -> u64 {
    block.location().segment().id()
}

/// Allocates and frees a block. Returns its segment.
fn allocate_and_free(pool: &PoolAllocator, bytes: usize, stream: StreamId, kind: StorageType) -> u64 {
    let block = pool.allocate_kind(bytes, stream, kind).unwrap();
    let at = segment(&block);
    pool.deallocate(block);
    at
}

fn image(width: usize, height: usize, format: ImageFormat) -> ImageDesc {
    ImageDesc { width, height, format }
}

#[test]
fn a_free_image_serves_smaller_images_of_its_format() {
    let (sim, pool) = device(1 << 30);
    let new = |w, h, format| pool.allocate_image(image(w, h, format), STREAM, StorageType::Dynamic).unwrap();
    let sizes = [(64, 8), (8, 64), (32, 32), (40, 40)];
    let blocks = sizes.map(|(w, h)| new(w, h, ImageFormat::F32));
    let [wide, high, square, larger] = blocks.each_ref().map(segment);
    let half = new(40, 40, ImageFormat::F16);
    let halves = segment(&half);
    blocks.into_iter().chain([half]).for_each(|block| pool.deallocate(block));

    // Each request reuses the image with the least excess area among the images that are large enough in both dimensions.
    let again = [(60, 3), (3, 60), (20, 20), (33, 1)].map(|(w, h)| new(w, h, ImageFormat::F32));
    assert_eq!(again.each_ref().map(segment), [wide, high, square, larger]);
    let made = pool.stats().num_device_alloc;
    let others = [new(20, 20, ImageFormat::F32), new(1, 1, ImageFormat::F16)];
    assert!(segment(&others[0]) != halves && segment(&others[1]) == halves);
    assert_eq!((pool.stats().num_device_alloc, sim.live_segments()), (made + 1, 6));
    // Buffers do not serve requests for images, nor images requests for buffers.
    pool.deallocate(pool.allocate(1 << 16, STREAM).unwrap());
    assert_eq!(sim.live_segments(), 7);
    let image = new(16, 16, ImageFormat::F32);
    assert_eq!(sim.live_segments(), 8);
    pool.deallocate(image);
    pool.deallocate(pool.allocate(16 * 16 * 16, STREAM).unwrap());
    assert_eq!(sim.live_segments(), 9);
    again.into_iter().chain(others).for_each(|block| pool.deallocate(block));
}

#[test]
fn random_images_are_never_shared_and_their_statistics_match() {
    for seed in 0..if cfg!(miri) { 2 } else { 50 } {
        let (sim, pool) = device(1 << 20);
        let mut live: Vec<(Block, ImageDesc)> = Vec::new();
        let mut known: HashMap<u64, ImageDesc> = HashMap::new();
        let mut random = fastrand(seed);
        for _ in 0..200 {
            if random(2) == 0 && !live.is_empty() {
                pool.deallocate(live.swap_remove(random(live.len() as u32) as usize).0);
                continue;
            }
            let format = [ImageFormat::F32, ImageFormat::F16][random(2) as usize];
            let desc = image(random(40) as usize + 1, random(40) as usize + 1, format);
            let kind = [StorageType::Static, StorageType::Dynamic, StorageType::DynamicSeparate][random(3) as usize];
            let stream = StreamId(random(2));
            let before = pool.stats().num_device_alloc;
            let Ok(block) = pool.allocate_image(desc, stream, kind) else { continue };
            let at = segment(&block);
            if pool.stats().num_device_alloc > before {
                assert!(known.insert(at, desc).is_none());
            }
            assert!(known[&at].serves(&desc), "{:?} for {desc:?}", known[&at]);
            assert!(live.iter().all(|(other, _)| segment(other) != at), "given twice");
            live.push((block, desc));
            let requested: usize = live.iter().map(|(_, desc)| desc.bytes()).sum();
            let stats = pool.stats();
            assert_eq!(stats.requested_bytes.current, requested as u64);
            assert!(stats.reserved_bytes.current <= 1 << 20 && stats.reserved_bytes.current == sim.committed());
            pool.snapshot().check().unwrap();
        }
        live.into_iter().for_each(|(block, _)| pool.deallocate(block));
        pool.empty_cache().unwrap();
        assert_eq!((sim.live_segments(), pool.stats().reserved_bytes.current), (0, 0));
    }
}

#[test]
fn the_smallest_buffer_that_fits_is_reused_whole() {
    let (sim, pool) = device(1 << 30);
    let blocks = [8, 4, 6, 4].map(|k| pool.allocate(k * KIB, STREAM).unwrap());
    let [eight, four, six, four_too] = blocks.each_ref().map(segment);
    blocks.into_iter().for_each(|block| pool.deallocate(block));
    let again = [5, 3, 4, 4].map(|k| pool.allocate(k * KIB, STREAM).unwrap());
    assert_eq!(again.each_ref().map(segment), [six, four, four_too, eight]);
    assert_eq!(again.each_ref().map(Block::size), [6, 4, 4, 8].map(|k| k * KIB));
    assert!(again.iter().all(|block| block.location().offset() == 0));
    let stats = pool.stats();
    assert_eq!((stats.num_device_alloc, sim.live_segments()), (4, 4));
    assert_eq!(stats.requested_bytes.current, 16 * KIB as u64);
    assert_eq!((stats.allocated_bytes.current, stats.reserved_bytes.current), (22 * KIB as u64, 22 * KIB as u64));
    again.into_iter().for_each(|block| pool.deallocate(block));
    assert_eq!((pool.stats().allocated_bytes.current, pool.stats().reserved_bytes.current), (0, 22 * KIB as u64));
    pool.empty_cache().unwrap();
    assert_eq!((pool.stats().reserved_bytes.current, sim.live_segments(), sim.committed()), (0, 0, 0));
}

#[test]
fn reuse_is_bounded_by_pool_overfit() {
    let (sim, pool) = device(1 << 30);
    let large = allocate_and_free(&pool, 64 * KIB, STREAM, StorageType::Dynamic);
    assert_eq!(allocate_and_free(&pool, 32 * KIB, STREAM, StorageType::Dynamic), large, "twice the request");
    assert_ne!(allocate_and_free(&pool, 32 * KIB - 512, STREAM, StorageType::Dynamic), large, "more than that");
    let greedy = pool_of(&sim, "pool_overfit:1000000");
    let large = allocate_and_free(&greedy, 64 * KIB, STREAM, StorageType::Dynamic);
    assert_eq!(allocate_and_free(&greedy, 1, STREAM, StorageType::Dynamic), large, "MNN's own rule");
    let exact = pool_of(&sim, "pool_overfit:1");
    let large = allocate_and_free(&exact, 64 * KIB, STREAM, StorageType::Dynamic);
    assert_ne!(allocate_and_free(&exact, 63 * KIB, STREAM, StorageType::Dynamic), large);
    assert_eq!(
        allocate_and_free(&exact, 64 * KIB - 1, STREAM, StorageType::Dynamic),
        large,
        "the same size when rounded"
    );
}

#[test]
fn storage_types_share_buffers_as_in_mnn() {
    use StorageType::*;
    let (_, pool) = device(1 << 30);
    let weights = allocate_and_free(&pool, KIB, STREAM, Static);
    let result = allocate_and_free(&pool, KIB, STREAM, Dynamic);
    assert_ne!(result, weights, "the pools are apart");
    assert_eq!(allocate_and_free(&pool, KIB, STREAM, Static), weights, "static buffers serve static requests");
    let separate = allocate_and_free(&pool, KIB, STREAM, DynamicSeparate);
    assert!(separate != result && separate != weights, "one that nobody had");
    assert_ne!(allocate_and_free(&pool, KIB, STREAM, DynamicSeparate), separate, "each time");
    let held = [0; 3].map(|_| pool.allocate(KIB, STREAM).unwrap());
    assert!(held.iter().any(|block| segment(block) == separate), "once given back it is like any other");
    assert_eq!(pool.stats().num_device_alloc, 4);
    held.into_iter().for_each(|block| pool.deallocate(block));
}

#[test]
fn release_returns_the_buffer_to_the_driver_at_once() {
    let (sim, pool) = device(1 << 30);
    let [kept, released] = [0; 2].map(|_| pool.allocate(KIB, STREAM).unwrap());
    pool.release(released);
    assert_eq!((sim.live_segments(), pool.stats().reserved_bytes.current), (1, KIB as u64));
    assert_eq!((pool.stats().num_device_free, pool.stats().allocation.current), (1, 1));
    pool.deallocate(kept);
}

#[test]
fn unused_buffers_are_released_if_the_device_runs_out() {
    let (sim, pool) = device(100 * KIB);
    let [a, b, c] = [16, 32, 48].map(|k| pool.allocate(k * KIB, STREAM).unwrap());
    [a, b, c].into_iter().for_each(|block| pool.deallocate(block));
    // The smallest free buffer, 16 KiB, is more than twice as large as the request, so the buffer is not reused
    // but released, which makes enough room.
    let small = pool.allocate(6 * KIB, STREAM).unwrap();
    assert_eq!(
        sim.calls().iter().filter(|call| matches!(call, Call::Release(_))).collect::<Vec<_>>(),
        [&Call::Release(16 * KIB)]
    );
    // No single buffer is large enough, so all are released.
    let large = pool.allocate(90 * KIB, STREAM).unwrap();
    assert_eq!((sim.live_segments(), sim.committed()), (2, 96 * KIB as u64));
    let stats = pool.stats();
    assert_eq!((stats.num_alloc_retries, stats.num_ooms), (0, 0), "without waiting for the device");
    // Nothing is left to release.
    let Error::OutOfMemory { requested, detail, .. } = pool.allocate(8 * KIB, STREAM).unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(requested, 8 * KIB);
    let both = "96.00 KiB (98304 bytes) are allocated and 96.00 KiB (98304 bytes) reserved";
    for part in [both, "a capacity of 100.00 KiB (102400 bytes)", "no room"] {
        assert!(detail.contains(part), "{detail}");
    }
    assert_eq!((pool.stats().num_alloc_retries, pool.stats().num_ooms), (1, 1));
    [small, large].into_iter().for_each(|block| pool.deallocate(block));
    pool.deallocate(pool.allocate(100 * KIB, STREAM).unwrap());
}

#[test]
fn the_error_reports_buffers_released_in_vain() {
    let (sim, pool) = device(100 * KIB);
    [16, 32].map(|k| pool.allocate(k * KIB, STREAM).unwrap()).into_iter().for_each(|block| pool.deallocate(block));
    sim.set_others(90 * KIB as u64);
    let error = pool.allocate(60 * KIB, STREAM).unwrap_err().to_string();
    assert!(
        error.contains(
            "48.00 KiB (49152 bytes) in unused buffers, the largest of 32.00 KiB (32768 bytes), were given back"
        ),
        "{error}"
    );
}

#[test]
fn out_of_memory_failures_of_every_code_are_recovered() {
    let (sim, pool) = device(1 << 30);
    for failure in [Failure::DeviceMemory, Failure::Resources, Failure::HostMemory] {
        for n in 1..=4 {
            (0..n).for_each(|_| sim.fail_next_create(failure.clone()));
            pool.release(pool.allocate(KIB, STREAM).unwrap());
            (0..n).for_each(|_| sim.fail_next_commit(failure.clone()));
            pool.release(pool.allocate(KIB, STREAM).unwrap());
        }
        (0..5).for_each(|_| sim.fail_next_create(failure.clone()));
        let error = pool.allocate(KIB, STREAM).unwrap_err().to_string();
        assert!(error.contains(failure.ran_out().unwrap()), "{error}");
    }
    sim.fail_next_commit(Failure::TooBig);
    assert!(matches!(pool.allocate(KIB, STREAM), Err(Error::OutOfMemory { .. })));
    sim.fail_next_commit(Failure::Other(Error::invalid("clEnqueue", "lost")));
    assert!(matches!(pool.allocate(KIB, STREAM), Err(Error::Invalid { .. })));
    assert!(matches!(pool.allocate(usize::MAX, STREAM), Err(Error::OutOfMemory { .. })));
    assert_eq!((pool.stats().reserved_bytes.current, sim.live_segments(), sim.committed()), (0, 0, 0));
}

#[test]
fn buffers_freed_by_others_during_the_wait_are_reused() {
    let (sim, pool) = device(10 * KIB);
    let pool = Arc::new(pool);
    let block = pool.allocate(8 * KIB, STREAM).unwrap();
    let at = segment(&block);
    let other = Arc::clone(&pool);
    sim.at_synchronize(move || other.deallocate(block));
    let block = pool.allocate(6 * KIB, STREAM).unwrap();
    assert_eq!((segment(&block), pool.stats().num_sync_all_streams), (at, 1));
    // A buffer freed during the wait is too small for the next request, but releasing it makes room.
    let other = Arc::clone(&pool);
    sim.at_synchronize(move || other.deallocate(block));
    let block = pool.allocate(10 * KIB, STREAM).unwrap();
    pool.deallocate(block);
}

#[test]
fn a_limit_is_kept() {
    let (sim, pool) = device(1 << 30);
    pool.set_memory_limit(10 * KIB as u64).unwrap();
    let block = pool.allocate(8 * KIB, STREAM).unwrap();
    let error = pool.allocate(4 * KIB, STREAM).unwrap_err().to_string();
    assert!(error.contains("10.00 KiB (10240 bytes) are allowed"), "{error}");
    pool.deallocate(block);
    let block = pool.allocate(2 * KIB, STREAM).unwrap(); // 8 KiB is too large to be reused, but is released to make room
    let block_too = pool.allocate(8 * KIB, STREAM).unwrap();
    assert_eq!(sim.committed(), 10 * KIB as u64);
    [block, block_too].into_iter().for_each(|block| pool.deallocate(block));
    let calls = sim.call_count();
    assert!(pool.allocate(11 * KIB, STREAM).is_err());
    assert_eq!(
        (sim.call_count(), pool.stats().reserved_bytes.current),
        (calls, 10 * KIB as u64),
        "nothing is given up"
    );
}

#[test]
fn a_fraction_holds_besides_the_limit() {
    let (_, pool) = device(100 * KIB);
    pool.set_memory_limit(80 * KIB as u64).unwrap();
    pool.set_memory_fraction(0.5).unwrap();
    assert!(pool.allocate(51 * KIB, STREAM).is_err());
    pool.deallocate(pool.allocate(50 * KIB, STREAM).unwrap());
    pool.set_memory_fraction(1.0).unwrap();
    assert!(pool.allocate(81 * KIB, STREAM).is_err());
    pool.deallocate(pool.allocate(80 * KIB, STREAM).unwrap());
    for bad in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(pool.set_memory_fraction(bad), Err(Error::Invalid { .. })));
    }
}

#[test]
fn another_streams_buffer_is_reused_behind_a_wait_on_the_device() {
    let (sim, pool) = slow_device();
    let (one, two) = (sim.stream(1), sim.stream(2));
    let block = pool.allocate(KIB, one).unwrap();
    let at = segment(&block);
    sim.write_tag(one, &block, 7).unwrap();
    sim.check_tag(one, &block, 7).unwrap();
    pool.deallocate(block);
    let block = pool.allocate(KIB, two).unwrap();
    assert_eq!(segment(&block), at);
    sim.write_tag(two, &block, 8).unwrap();
    assert!(!sim.step(two), "the second stream waits for the first");
    assert!(!sim.calls().iter().any(|call| matches!(call, Call::Synchronize | Call::Wait)), "and the host for nobody");
    // The buffer now belongs to the second stream, which reuses it at once.
    pool.deallocate(block);
    let calls = sim.call_count();
    let block = pool.allocate(KIB, two).unwrap();
    assert_eq!((segment(&block), sim.call_count()), (at, calls));
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
    pool.deallocate(block);
    let apart = pool_of(&sim, "cross_stream_reuse:False");
    assert_ne!(
        allocate_and_free(&apart, KIB, one, StorageType::Dynamic),
        allocate_and_free(&apart, KIB, two, StorageType::Dynamic),
        "unless streams are to be kept apart"
    );
}

#[test]
fn a_stream_prefers_its_own_buffers() {
    let (sim, pool) = slow_device();
    let (one, two) = (sim.stream(1), sim.stream(2));
    let (a, b) = (pool.allocate(2 * KIB, one).unwrap(), pool.allocate(KIB, two).unwrap());
    let own = segment(&a);
    [a, b].into_iter().for_each(|block| pool.deallocate(block));
    let calls = sim.call_count();
    assert_eq!((allocate_and_free(&pool, KIB, one, StorageType::Dynamic), sim.call_count()), (own, calls));
}

#[test]
fn recorded_streams_are_waited_for() {
    let (sim, pool) = slow_device();
    let (one, two, three) = (sim.stream(1), sim.stream(2), sim.stream(3));
    let block = pool.allocate(KIB, one).unwrap();
    let at = segment(&block);
    sim.write_tag(one, &block, 5).unwrap();
    sim.synchronize().unwrap();
    for stream in [two, three, two, one] {
        sim.check_tag(stream, &block, 5).unwrap();
        pool.record_stream(&block, stream);
    }
    pool.deallocate(block);
    let waits = || sim.calls().iter().filter(|call| **call == Call::StreamWaits).count();
    let block = pool.allocate(KIB, one).unwrap();
    assert_eq!((segment(&block), waits()), (at, 2), "both others, once each");
    sim.write_tag(one, &block, 6).unwrap();
    sim.run(one, 10); // runs until it waits for another stream
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
    pool.deallocate(block);
    pool.deallocate(pool.allocate(KIB, one).unwrap());
    assert_eq!(waits(), 2, "they have been waited for");
}

#[test]
fn trimming_releases_the_oldest_buffers() {
    let (sim, pool) = device(1 << 30);
    for block in [4, 8, 16].map(|k| pool.allocate(k * KIB, STREAM).unwrap()) {
        pool.deallocate(block);
    }
    assert_eq!(pool.trim(28 * KIB as u64).unwrap(), 0);
    assert_eq!(pool.trim(24 * KIB as u64).unwrap(), 4 * KIB as u64);
    assert_eq!(pool.trim(20 * KIB as u64).unwrap(), 8 * KIB as u64);
    assert_eq!((pool.trim(0).unwrap(), sim.live_segments()), (16 * KIB as u64, 0));
}

#[test]
fn trimming_keeps_buffers_that_queued_work_may_use() {
    let (sim, pool) = slow_device();
    let block = pool.allocate(4 * KIB, STREAM).unwrap();
    sim.write_tag(STREAM, &block, 1).unwrap();
    pool.deallocate(block);
    assert_eq!((pool.trim(0).unwrap(), sim.stalls(), sim.live_segments()), (0, 0, 1));
}

#[test]
fn statistics_add_up_under_threads() {
    let sim = Sim::new(SimOptions { capacity: 3 << 20, asynchronous: true, contents: true, ..SimOptions::default() });
    let pool = pool_of(&sim, "");
    thread::scope(|s| {
        for thread in 0..4u32 {
            let (sim, pool) = (&sim, &pool);
            s.spawn(move || {
                let mut held: Vec<(Block, u32)> = Vec::new();
                let mut random = fastrand(thread + 1);
                for i in 0..if cfg!(miri) { 10 } else { 500u32 } {
                    let stream = sim.stream(random(3));
                    if random(2) == 0 && !held.is_empty() {
                        let (block, tag) = held.swap_remove(random(held.len() as u32) as usize);
                        // Work on another stream is ordered after the write, as the user must ensure.
                        sim.stream_waits(stream, &sim.record(sim.stream(tag >> 24)).unwrap()).unwrap();
                        sim.check_tag(stream, &block, tag).unwrap();
                        pool.record_stream(&block, stream);
                        pool.deallocate(block);
                    } else if let Ok(block) = pool.allocate(1 + random(200_000) as usize, stream) {
                        let tag = (stream.index() as u32) << 24 | thread << 16 | i;
                        sim.write_tag(stream, &block, tag).unwrap();
                        held.push((block, tag));
                    }
                    sim.run_some(u64::from(i));
                }
                held.into_iter().for_each(|(block, _)| pool.deallocate(block));
            });
        }
    });
    sim.synchronize().unwrap();
    assert_eq!((sim.violations(), sim.late_commits()), (Vec::<String>::new(), 0));
    let stats = pool.stats();
    assert_eq!(stats.reserved_bytes.current, sim.committed());
    assert_eq!(stats.segment.current, sim.live_segments() as u64);
    assert_eq!(stats.num_device_alloc - stats.num_device_free, stats.segment.current);
    for (total, small, large) in [
        (stats.reserved_bytes, stats.small_pool.reserved_bytes, stats.large_pool.reserved_bytes),
        (stats.allocated_bytes, stats.small_pool.allocated_bytes, stats.large_pool.allocated_bytes),
        (stats.allocation, stats.small_pool.allocation, stats.large_pool.allocation),
    ] {
        assert_eq!(total.current, small.current + large.current);
        assert_eq!(total.allocated - total.freed, total.current);
    }
    assert_eq!((stats.allocated_bytes.current, stats.active.current, stats.requested_bytes.current), (0, 0, 0));
    assert!(stats.allocated_bytes.peak <= stats.reserved_bytes.peak && stats.reserved_bytes.peak <= 3 << 20);
    pool.empty_cache().unwrap();
    assert_eq!(sim.live_segments(), 0);
}

/// Returns a generator of random numbers below a bound.
fn fastrand(seed: u32) -> impl FnMut(u32) -> u32 {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % below
    }
}

#[test]
fn snapshots_agree_with_statistics() {
    for backend in ["direct", "pool"] {
        let sim = Sim::new(SimOptions { capacity: 64 << 20, ..SimOptions::default() });
        let config: Config = format!("backend:{backend}").parse().unwrap();
        let allocator = build_allocator(Arc::new(sim), config).unwrap();
        allocator.record_memory_history(HistoryOptions { max_entries: 50, ..HistoryOptions::default() }).unwrap();
        let mut live = Vec::new();
        for n in 1..if cfg!(miri) { 25 } else { 200 } {
            let bytes = n * 7919 % 100_000 + 1;
            live.push(allocator.allocate(bytes, StreamId(n as u32 % 2)).unwrap());
            if n % 3 > 0 {
                allocator.deallocate(live.swap_remove(n * 31 % live.len()));
            }
            let (snapshot, s) = (allocator.snapshot(), allocator.stats());
            snapshot.check().unwrap();
            let sum = |f: fn(&SegmentInfo) -> u64| snapshot.segments.iter().map(f).sum::<u64>();
            assert_eq!(sum(|g| g.total_size), s.reserved_bytes.current, "{backend}");
            assert_eq!(sum(SegmentInfo::allocated_size), s.allocated_bytes.current, "{backend}");
            assert_eq!(sum(SegmentInfo::requested_size), s.requested_bytes.current, "{backend}");
        }
        assert!(allocator.allocate(48 << 20, StreamId::DEFAULT).is_ok_and(|b| b.size() == 48 << 20), "{backend}");
        assert!(allocator.allocate(48 << 20, StreamId::DEFAULT).is_err());
        let snapshot = allocator.snapshot();
        let trace = snapshot.device_traces.last().unwrap();
        assert_eq!(trace.iter().filter(|e| e.action == TraceAction::Oom).count(), 1, "{backend}");
        live.into_iter().for_each(|block| allocator.deallocate(block));
        allocator.empty_cache().unwrap();
        let snapshot = allocator.snapshot();
        snapshot.check().unwrap();
        let blocks: Vec<_> = snapshot.segments.iter().flat_map(|g| &g.blocks).collect();
        assert!(matches!(blocks[..], [b] if b.state == BlockState::ActiveAllocated), "{backend}: {blocks:?}");
    }
}
