//! The allocator on the simulated device: no bytes, no files, no clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::driver::Failure;
use super::super::sim::{Call, Sim, SimMemory};
use super::super::stats::PoolStats;
use super::*;
use crate::Device;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

fn device(capacity: usize) -> (Sim, Arc<CachingAllocator<Sim>>) {
    let sim = Sim::new(capacity as u64, capacity / 2);
    (sim.clone(), Arc::new(CachingAllocator::new(sim)))
}

/// Segments made so far, by size.
fn created(sim: &Sim) -> Vec<usize> {
    let size = |call: &Call| if let Call::Create(bytes) = call { Some(*bytes) } else { None };
    sim.calls().iter().filter_map(size).collect()
}

/// What must hold whenever nobody is inside the allocator.
fn check(sim: &Sim, allocator: &CachingAllocator<Sim>) -> DeviceStats {
    allocator.check();
    let s = allocator.stats();
    assert_eq!(s.reserved_bytes.current, sim.committed(), "what is reserved is what the device has given");
    for p in [s.total, s.small_pool, s.large_pool] {
        assert!(p.requested_bytes.current <= p.allocated_bytes.current);
        assert!(p.allocated_bytes.current <= p.active_bytes.current);
        assert!(p.active_bytes.current + p.inactive_split_bytes.current <= p.reserved_bytes.current);
    }
    let stats = |p: PoolStats| {
        [
            p.allocation,
            p.segment,
            p.active,
            p.inactive_split,
            p.allocated_bytes,
            p.reserved_bytes,
            p.active_bytes,
            p.inactive_split_bytes,
            p.requested_bytes,
        ]
    };
    for (total, (small, large)) in
        stats(s.total).into_iter().zip(stats(s.small_pool).into_iter().zip(stats(s.large_pool)))
    {
        assert_eq!(total.current, small.current + large.current);
        assert!(total.peak <= small.peak + large.peak && total.peak >= total.current);
        assert_eq!(total.allocated - total.freed, total.current);
    }
    assert_eq!(s.num_device_alloc - s.num_device_free, s.segment.current);
    s
}

#[test]
fn segments_have_pytorch_sizes() {
    for (request, segment) in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (GIB - 1, GIB),
    ] {
        let (sim, allocator) = device(4 * GIB);
        let place = allocator.alloc(request).unwrap();
        assert_eq!(sim.calls(), [Call::Create(segment), Call::Commit(segment)], "{request}");
        assert_eq!((place.offset(), allocator.stats().requested_bytes.current), (0, request as u64));
        allocator.give_back(place);
        check(&sim, &allocator);
    }
}

#[test]
fn blocks_are_split_where_the_rest_is_worth_keeping() {
    let (sim, allocator) = device(GIB);
    let a = allocator.alloc(1).unwrap();
    let b = allocator.alloc(513).unwrap();
    let c = allocator.alloc(2 * MIB - 3 * 512).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((a.offset(), b.offset(), c.offset()), (0, 512, 0), "large requests live apart");
    assert_eq!((a.segment(), b.segment(), c.segment()), (0, 0, 1));
    let s = check(&sim, &allocator);
    assert_eq!(s.small_pool.allocated_bytes.current, 512 + 1024);
    assert_eq!(s.small_pool.inactive_split.current, 1);
    // what is left of a large block of 20 MiB is kept only above 1 MiB
    let d = allocator.alloc(9 * MIB).unwrap();
    let e = allocator.alloc(8 * MIB + 3 * 512).unwrap();
    assert_eq!((d.segment(), e.segment()), (1, 1));
    let s = check(&sim, &allocator);
    assert_eq!(s.large_pool.inactive_split.current, 0);
    assert_eq!(s.large_pool.allocated_bytes.current, 20 * MIB as u64);
    [a, b, c, d, e].into_iter().for_each(|p| allocator.give_back(p));
    assert_eq!(allocator.check().len(), 2, "all merged back");
}

#[test]
fn the_best_fit_is_the_smallest_then_the_oldest() {
    let (_, allocator) = device(GIB);
    let places: Vec<_> = (0..7).map(|i| allocator.alloc([4 * KIB, 1][i % 2]).unwrap()).collect();
    let offsets: Vec<_> = places.iter().map(Place::offset).collect();
    for (i, p) in places.into_iter().enumerate() {
        if i % 2 == 0 && i < 6 {
            allocator.give_back(p); // holes of 4 KiB at 0, 1 and 2
        }
    }
    let first = allocator.alloc(3 * KIB).unwrap();
    assert_eq!(first.offset(), offsets[0]);
    let rest = allocator.alloc(KIB).unwrap();
    assert_eq!(rest.offset(), offsets[0] + 3 * KIB, "the remainder fits exactly");
    assert_eq!(allocator.alloc(4 * KIB).unwrap().offset(), offsets[2]);
}

#[test]
fn running_out_releases_what_is_cached_and_tries_again() {
    let (sim, allocator) = device(80 * MIB);
    sim.set_others(40 * MIB as u64);
    let held = allocator.alloc(MIB).unwrap();
    allocator.give_back(allocator.alloc(15 * MIB).unwrap());
    allocator.give_back(allocator.alloc(17 * MIB).unwrap());
    let before = sim.calls().len();
    let large = allocator.alloc(30 * MIB).unwrap();
    let (c, k, r) = (Call::Create(30 * MIB), Call::Commit(30 * MIB), Call::Release(30 * MIB));
    let calls = sim.calls().split_off(before);
    assert_eq!(calls, [c, k, r, Call::Synchronize, Call::Release(16 * MIB), Call::Release(18 * MIB), c, k]);
    let s = check(&sim, &allocator);
    assert_eq!((s.num_alloc_retries, s.num_ooms, s.num_device_alloc, s.num_device_free), (1, 0, 4, 2));
    [held, large].into_iter().for_each(|p| allocator.give_back(p));
}

#[test]
fn what_another_thread_gives_back_while_waiting_is_found() {
    let (sim, allocator) = device(40 * MIB);
    let (theirs, ours) = (allocator.alloc(16 * MIB).unwrap(), allocator.alloc(16 * MIB).unwrap());
    let other = Arc::clone(&allocator);
    sim.at_synchronize(move || other.give_back(theirs));
    let made = created(&sim).len();
    let found = allocator.alloc(15 * MIB).unwrap();
    assert_eq!(created(&sim).len(), made, "the limit said no before the driver was asked");
    let s = check(&sim, &allocator);
    assert_eq!((s.num_alloc_retries, s.num_ooms, s.num_device_free), (1, 0, 0));
    [ours, found].into_iter().for_each(|p| allocator.give_back(p));
}

#[test]
fn a_segment_of_just_the_size_is_better_than_none() {
    let (sim, allocator) = device(8 * MIB);
    let a = allocator.alloc(3 * MIB).unwrap(); // 20 MiB are more than the largest buffer
    assert_eq!(created(&sim), [4 * MIB]);
    let b = allocator.alloc(3 * MIB + 5).unwrap();
    assert_eq!(created(&sim), [4 * MIB, 4 * MIB]);
    check(&sim, &allocator);
    [a, b].into_iter().for_each(|p| allocator.give_back(p));

    let (sim, allocator) = device(64 * MIB);
    sim.set_others(50 * MIB as u64);
    let a = allocator.alloc(3 * MIB + 5).unwrap();
    assert_eq!(created(&sim), [20 * MIB, 20 * MIB, 3 * MIB + 512]);
    assert_eq!(check(&sim, &allocator).reserved_bytes.current, (3 * MIB + 512) as u64);
    allocator.give_back(a);
}

#[test]
fn the_other_pool_lends_before_an_error() {
    let (sim, allocator) = device(40 * MIB);
    sim.set_others(20 * MIB as u64);
    let large = allocator.alloc(2 * MIB).unwrap();
    let small = allocator.alloc(100).unwrap();
    assert_eq!((large.segment(), small.segment(), small.offset()), (0, 0, 2 * MIB));
    assert_eq!(check(&sim, &allocator).large_pool.allocation.current, 2);
    [large, small].into_iter().for_each(|p| allocator.give_back(p));
    assert_eq!(allocator.check().len(), 1);
}

#[test]
fn out_of_memory_says_what_there_is() {
    let (sim, allocator) = device(64 * MIB);
    let held: Vec<_> = [100, 15 * MIB, 15 * MIB, 15 * MIB].map(|bytes| allocator.alloc(bytes).unwrap()).into();
    let Err(Error::OutOfMemory { requested, detail, .. }) = allocator.alloc(20_000_000) else { panic!("it fits?") };
    assert_eq!(requested, 20_000_000);
    for part in [48 * MIB + 512, 50 * MIB, 64 * MIB, 2 * MIB - 512] {
        assert!(detail.contains(&part.to_string()), "{part} is not in: {detail}");
    }
    let s = check(&sim, &allocator);
    assert_eq!((s.num_ooms, s.num_alloc_retries, s.allocation.current), (1, 1, 4));
    held.into_iter().for_each(|p| allocator.give_back(p));
    allocator.give_back(allocator.alloc(20_000_000).unwrap());
}

#[test]
fn absurd_sizes_never_reach_the_driver() {
    let (sim, allocator) = device(GIB);
    let cached = allocator.alloc(1).unwrap();
    let before = sim.calls();
    for bytes in [usize::MAX, usize::MAX - 510, usize::MAX - 3 * MIB, isize::MAX as usize, GIB + 1, 2 * GIB] {
        let Err(Error::OutOfMemory { requested, detail, .. }) = allocator.alloc(bytes) else { panic!("{bytes}") };
        assert_eq!(requested, bytes);
        assert!(detail.contains(&(GIB / 2).to_string()), "{detail}");
    }
    assert_eq!(sim.calls(), before);
    // Between the largest buffer promised and all there is, the driver decides: at once, the cache is kept.
    allocator.give_back(allocator.alloc(12 * MIB).unwrap());
    let Err(Error::OutOfMemory { detail, .. }) = allocator.alloc(GIB / 2 + 1) else { panic!("too big") };
    assert!(detail.contains(&(GIB / 2).to_string()), "{detail}");
    assert_eq!(sim.calls().split_off(before.len() + 2), [Call::Create(GIB / 2 + 512)]);
    allocator.give_back(cached);
    check(&sim, &allocator);
}

#[test]
fn injected_failures_surface_at_once_and_leak_nothing() {
    let lost = || Error::DeviceLost { device: Device::OpenCL(99), cause: "test".into() };
    type Inject = fn(&Sim, Failure);
    for inject in [Sim::fail_next_create as Inject, Sim::fail_next_commit as Inject] {
        let (sim, allocator) = device(GIB);
        inject(&sim, Failure::Other(lost()));
        assert!(matches!(allocator.alloc(1000), Err(Error::DeviceLost { .. })));
        assert_eq!(check(&sim, &allocator), DeviceStats::default());
        // one failure for want of memory is met by trying again, three are not
        inject(&sim, Failure::OutOfMemory);
        let place = allocator.alloc(1000).unwrap();
        assert_eq!(check(&sim, &allocator).num_alloc_retries, 1);
        (0..3).for_each(|_| inject(&sim, Failure::OutOfMemory));
        assert!(matches!(allocator.alloc(2 * MIB), Err(Error::OutOfMemory { .. })));
        let s = check(&sim, &allocator);
        assert_eq!((s.num_ooms, s.num_device_alloc, s.segment.current), (1, 1, 1));
        allocator.give_back(place);
        allocator.empty_cache();
        assert_eq!(sim.committed(), 0);
    }
}

#[test]
fn a_fraction_is_a_limit() {
    let (sim, allocator) = device(100 * MIB);
    for bad in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert!(matches!(allocator.set_memory_fraction(bad), Err(Error::Invalid { .. })));
    }
    allocator.set_memory_fraction(0.25).unwrap();
    let a = allocator.alloc(20 * MIB).unwrap();
    let before = sim.calls().len();
    let Err(Error::OutOfMemory { detail, .. }) = allocator.alloc(30 * MIB) else { panic!("over the limit") };
    assert!(detail.contains(&(25 * MIB).to_string()), "{detail}");
    assert_eq!(sim.calls().len(), before, "nothing could have helped");
    allocator.set_memory_fraction(1.0).unwrap();
    let b = allocator.alloc(30 * MIB).unwrap();
    [a, b].into_iter().for_each(|p| allocator.give_back(p));
    check(&sim, &allocator);
}

#[test]
fn peaks_and_sums_can_be_reset() {
    let (sim, allocator) = device(GIB);
    let a = allocator.alloc(100).unwrap();
    allocator.give_back(allocator.alloc(3 * MIB).unwrap());
    let s = check(&sim, &allocator);
    let bytes = s.allocated_bytes;
    assert_eq!((bytes.current, bytes.peak, bytes.allocated), (512, 3 * MIB as u64 + 512, 3 * MIB as u64 + 512));
    assert_eq!((s.allocation.peak, s.segment.peak, s.requested_bytes.freed), (2, 2, 3 * MIB as u64));
    allocator.reset_peak_stats();
    let s = check(&sim, &allocator);
    assert_eq!((s.allocated_bytes.peak, s.allocation.peak, s.segment.peak), (512, 1, 2));
    allocator.reset_accumulated_stats();
    let s = allocator.stats();
    assert_eq!((s.allocated_bytes.allocated, s.allocated_bytes.freed, s.num_device_alloc), (0, 0, 0));
    assert_eq!(s.allocated_bytes.current, 512);
    allocator.give_back(a);
    assert_eq!(allocator.stats().allocated_bytes.freed, 512);
}

#[test]
fn empty_cache_keeps_segments_in_use() {
    let (sim, allocator) = device(GIB);
    let (a, b) = (allocator.alloc(100).unwrap(), allocator.alloc(30 * MIB).unwrap());
    let c = allocator.alloc(100).unwrap();
    allocator.give_back(b);
    allocator.give_back(a);
    allocator.empty_cache();
    let s = check(&sim, &allocator);
    assert_eq!((s.segment.current, s.reserved_bytes.current, s.inactive_split.current), (1, 2 * MIB as u64, 2));
    allocator.give_back(c);
    allocator.empty_cache();
    assert_eq!((check(&sim, &allocator).reserved_bytes.current, sim.committed()), (0, 0));
    drop(allocator);
}

/// The sequence of a network's inference: every layer's output lives until the next layer is done, its workspace
/// only while it runs.
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
    let (sim, allocator) = device(GIB);
    let mut calls = Vec::new();
    for _pass in 0..4 {
        let mut live = BTreeMap::new();
        for (action, id, bytes) in inference(if cfg!(miri) { 12 } else { 60 }) {
            match action {
                'a' => drop(live.insert(id, allocator.alloc(bytes).unwrap())),
                _ => allocator.give_back(live.remove(&id).unwrap()),
            }
        }
        assert!(live.is_empty());
        check(&sim, &allocator);
        calls.push(sim.calls().len());
    }
    assert_eq!(calls[1], calls[3], "segments made in the first passes serve all later ones");
    let s = allocator.stats();
    assert_eq!((s.allocated_bytes.current, s.inactive_split.current), (0, 0));
}

#[test]
fn many_threads_share_one_allocator() {
    let (sim, allocator) = device(256 * MIB);
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let allocator = &allocator;
            scope.spawn(move || {
                let mut live = Vec::new();
                let mut x = thread * 7 + 1;
                for _ in 0..if cfg!(miri) { 10 } else { 500 } {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    match allocator.alloc(1 + (x >> 33) % (3 * MIB)) {
                        Ok(place) => live.push(place),
                        Err(e) => assert!(matches!(e, Error::OutOfMemory { .. }), "{e}"),
                    }
                    if live.len() > 6 {
                        allocator.give_back(live.swap_remove((x >> 50) % 6));
                    }
                }
                live.into_iter().for_each(|place| allocator.give_back(place));
            });
        }
    });
    let s = check(&sim, &allocator);
    assert_eq!((s.allocation.current, s.allocated_bytes.current, s.inactive_split.current), (0, 0, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(usize),
    GiveBack(usize),
    EmptyCache,
    FailCommit,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![
        4 => 1..8 * KIB,
        3 => 1..2 * MIB,
        2 => MIB..24 * MIB,
        1 => (0..22_u32, 0..3_usize).prop_map(|(log, more)| (1 << log) + more),
    ];
    let step = prop_oneof![
        12 => size.prop_map(Step::Alloc),
        10 => any::<usize>().prop_map(Step::GiveBack),
        1 => Just(Step::EmptyCache),
        1 => Just(Step::FailCommit),
    ];
    prop::collection::vec(step, 0..if cfg!(miri) { 20 } else { 200 })
}

/// A second bookkeeping, as simple as can be: which bytes of which segment are taken.
#[derive(Default)]
struct Shadow(BTreeMap<(SegmentId, usize), usize>);

impl Shadow {
    fn take(&mut self, place: &Place<SimMemory>, bytes: usize) {
        let (segment, offset) = (place.segment(), place.offset());
        assert!(offset.is_multiple_of(512));
        let before = self.0.range(..(segment, offset)).next_back();
        assert!(before.is_none_or(|(k, len)| k.0 < segment || k.1 + len <= offset), "overlaps the block before");
        let after = self.0.range((segment, offset)..).next();
        assert!(after.is_none_or(|(k, _)| k.0 > segment || offset + bytes <= k.1), "overlaps the block after");
        self.0.insert((segment, offset), bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_sequence_keeps_blocks_apart_and_merges_them_in_the_end(steps in steps()) {
        let (sim, allocator) = device(96 * MIB);
        let (mut shadow, mut live, mut requested) = (Shadow::default(), Vec::new(), 0);
        let mut commit_fails = 0;
        for step in steps {
            match step {
                Step::Alloc(bytes) => match allocator.alloc(bytes) {
                    Ok(place) => {
                        shadow.take(&place, bytes);
                        requested += bytes as u64;
                        live.push((place, bytes));
                    }
                    Err(Error::OutOfMemory { .. }) => {
                        let largest = allocator.lock().blocks.largest_free();
                        prop_assert!(largest < bytes || bytes > MIB, "a free block of {largest} would have held {bytes}");
                        let room = 96 * MIB as u64 - sim.committed();
                        prop_assert!(commit_fails > 0 || room < bytes.next_multiple_of(512) as u64);
                    }
                    Err(e) => return Err(TestCaseError::fail(e.to_string())),
                },
                Step::GiveBack(which) if !live.is_empty() => {
                    let (place, bytes) = live.swap_remove(which % live.len());
                    prop_assert_eq!(shadow.0.remove(&(place.segment(), place.offset())), Some(bytes));
                    requested -= bytes as u64;
                    allocator.give_back(place);
                }
                Step::GiveBack(_) => {}
                Step::EmptyCache => allocator.empty_cache(),
                Step::FailCommit => {
                    sim.fail_next_commit(Failure::OutOfMemory);
                    commit_fails += 1;
                }
            }
            prop_assert_eq!(check(&sim, &allocator).requested_bytes.current, requested);
        }
        for (place, _) in live {
            allocator.give_back(place);
        }
        let s = check(&sim, &allocator);
        prop_assert_eq!(allocator.check().len() as u64, s.segment.current, "a block a segment is left");
        allocator.empty_cache();
        prop_assert_eq!(sim.committed(), 0);
    }
}
