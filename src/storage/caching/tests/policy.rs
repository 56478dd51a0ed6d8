//! Segment sizes, splitting and fits, under both policies.

use super::*;

const PYTORCH: &str = "segments:pytorch,thread_cache_kb:0";

#[test]
fn segments_have_pytorch_sizes() {
    for (request, segment) in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        ((1 << 30) - 1, 1 << 30),
    ] {
        let (sim, allocator) = device(4 << 30, PYTORCH);
        let block = take(&allocator, request);
        assert_eq!(sim.calls(), [Call::Create(segment), Call::Commit(segment)], "{request}");
        assert_eq!((block.location().offset(), allocator.stats().requested_bytes.current), (0, request as u64));
        allocator.deallocate(block);
        allocator.check();
    }
}

#[test]
fn adaptive_segments_are_a_fraction_of_the_reserved_bytes() {
    let (sim, allocator) = device(4 << 30, "");
    let blocks = [64 * MIB, 1000, MIB + 1].map(|bytes| take(&allocator, bytes));
    let third = 66 * MIB / 16;
    assert_eq!(created(&sim), [64 * MIB, 2 * MIB, third]);
    let more = take(&allocator, 2 * MIB);
    assert_eq!(created(&sim).len(), 3, "there was room left");
    allocator.check();
    free_all(&allocator, blocks.into_iter().chain([more]));
    allocator.check();
}

#[test]
fn blocks_are_split_if_the_remainder_is_large_enough() {
    let (_, allocator) = device(1 << 30, PYTORCH);
    let [a, b, c] = [1, 513, 2 * MIB - 3 * 512].map(|bytes| take(&allocator, bytes));
    let (small, large) = (place(&a).0, place(&c).0);
    assert_eq!((place(&a), place(&b), place(&c)), ((small, 0), (small, 512), (large, 0)));
    assert_ne!(small, large, "large requests live apart");
    let s = allocator.stats();
    assert_eq!((s.small_pool.allocated_bytes.current, s.small_pool.inactive_split.current), (512 + 1024, 1));
    // The remainder of a large block becomes a free block only if it has more than 1 MiB.
    let [d, e] = [9 * MIB, 8 * MIB + 3 * 512].map(|bytes| take(&allocator, bytes));
    assert_eq!((place(&d).0, place(&e).0, e.size()), (large, large, 9 * MIB + 3 * 512));
    let s = allocator.stats();
    assert_eq!((s.large_pool.inactive_split.current, s.large_pool.allocated_bytes.current), (0, 20 * MIB as u64));
    free_all(&allocator, [a, b, c, d, e]);
    allocator.check();
    let s = allocator.stats();
    assert_eq!((s.segment.current, s.inactive_split.current), (2, 0), "all merged back");
}

#[test]
fn the_best_fit_is_the_smallest_that_fits() {
    for config in ["thread_cache_kb:0", PYTORCH] {
        let (_, allocator) = device(1 << 30, config);
        let keep = take(&allocator, 64 * MIB); // so much reserved memory makes small segments large enough for several blocks
        let mut blocks: Vec<Block> = (0..7).map(|i| take(&allocator, [4096, 1][i % 2])).collect();
        let holes: Vec<_> = [4, 2, 0].into_iter().map(|i| blocks.swap_remove(i)).collect();
        let places: Vec<_> = holes.iter().map(place).collect();
        free_all(&allocator, holes);
        allocator.check();
        let inside = |block: &Block, hole: &(u64, usize)| {
            place(block).0 == hole.0 && (hole.1..hole.1 + 4096).contains(&place(block).1)
        };
        let first = take(&allocator, 3072);
        let hole = *places.iter().find(|hole| inside(&first, hole)).unwrap();
        let rest = take(&allocator, 1024);
        assert!(inside(&rest, &hole), "{config}: the remainder fits exactly");
        let other = take(&allocator, 4096);
        assert!(places.contains(&place(&other)) && place(&other) != hole, "{config}");
        free_all(&allocator, blocks.into_iter().chain([keep, first, rest, other]));
        allocator.check();
    }
}

#[test]
fn blocks_too_large_to_split_serve_requests_of_their_size() {
    for sizes in ["segments:pytorch", "segments:adaptive"] {
        let (sim, allocator) = device(1 << 30, &format!("{sizes},max_split_size_mb:20"));
        let [big, huge] = [30, 60].map(|mib| take(&allocator, mib * MIB));
        let s = allocator.stats();
        assert_eq!((s.max_split_size, s.oversize_allocations.current, s.oversize_segments.current), (20 << 20, 2, 2));
        let (big_place, huge_place) = (place(&big), place(&huge));
        free_all(&allocator, [big, huge]);
        let small = take(&allocator, 12 * MIB);
        assert!(place(&small).0 != big_place.0 && place(&small).0 != huge_place.0, "{sizes}");
        if sizes == "segments:pytorch" {
            let reused = take(&allocator, 25 * MIB);
            assert_eq!((place(&reused), reused.size()), (big_place, 30 * MIB), "whole");
            let made = created(&sim).len();
            let wasteful = take(&allocator, 21 * MIB);
            assert_eq!(created(&sim).len(), made + 1, "39 MiB would be wasted");
            free_all(&allocator, [reused, wasteful]);
        }
        allocator.deallocate(small);
        allocator.check();
        let s = allocator.stats();
        assert_eq!((s.oversize_allocations.current, s.oversize_allocations.peak), (0, 2));
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.stats().oversize_segments.current, 0);
    }
}

#[test]
fn unused_oversize_blocks_are_released_before_any_wait() {
    let (sim, allocator) = device(100 * MIB as u64, "segments:pytorch,max_split_size_mb:20");
    let [large, live] = [60, 30].map(|mib| take(&allocator, mib * MIB));
    allocator.deallocate(large);
    let before = sim.call_count();
    let block = take(&allocator, 30 * MIB);
    let calls = [Call::Release(60 * MIB), Call::Create(30 * MIB), Call::Commit(30 * MIB)];
    assert_eq!(calls_since(&sim, before), calls);
    assert_eq!(allocator.stats().num_alloc_retries, 0);
    free_all(&allocator, [live, block]);
}

#[test]
fn sizes_are_rounded_up_to_parts_of_a_power_of_two() {
    let (_, allocator) = device(1 << 30, "segments:pytorch,roundup_power2_divisions:4");
    for (bytes, size) in [(1, 512), (1200, 1536), (4 * MIB + 1, 5 * MIB), (5 * MIB, 5 * MIB), (33 * MIB, 40 * MIB)] {
        let block = take(&allocator, bytes);
        assert_eq!((block.size(), block.requested()), (size, bytes));
        allocator.deallocate(block);
        allocator.empty_cache().unwrap();
    }
}

#[test]
fn garbage_is_collected_oldest_first_and_without_waiting() {
    let config = "segments:pytorch,garbage_collection_threshold:0.5,per_process_memory_fraction:0.5,thread_cache_kb:0";
    for (request, left) in [(30, 0), (24, 1)] {
        let (sim, allocator) = device(200 * MIB as u64, config);
        let [older, younger] = [20, 22].map(|mib| take(&allocator, mib * MIB));
        allocator.deallocate(older);
        (0..10).for_each(|_| allocator.deallocate(take(&allocator, 1000)));
        if left == 0 {
            allocator.deallocate(younger);
            let block = take(&allocator, request * MIB);
            // 74 MiB would be reserved, above the threshold of 50 MiB. The older segment is released first, because it
            // has been unused for at least the average time. The younger segment is released next.
            assert_eq!(sim.committed(), (2 + 30) * MIB as u64);
            allocator.deallocate(block);
        } else {
            allocator.deallocate(younger);
            let block = take(&allocator, request * MIB);
            assert_eq!(sim.committed(), (2 + 22 + 24) * MIB as u64, "18 MiB over: the older suffices");
            allocator.deallocate(block);
        }
        let s = allocator.stats();
        assert_eq!((s.num_device_free, s.num_alloc_retries), (2 - left, 0));
        assert!(!sim.calls().contains(&Call::Synchronize));
        allocator.check();
    }
}
