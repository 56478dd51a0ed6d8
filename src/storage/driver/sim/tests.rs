//! Tests that the simulated device behaves like a real device, and reports errors that a real device would not report.

use std::sync::Arc;

use super::*;
use crate::storage::{Block, Segment};

safe_methods!(Sim);

const GRANULE: usize = 512;

fn asynchronous() -> Sim {
    Sim::new(SimOptions { asynchronous: true, contents: true, capacity: 1 << 20, ..SimOptions::default() })
}

fn committed(sim: &Sim, bytes: usize) -> Memory {
    sim.create_lazily(bytes).and_then(|memory| sim.commit(memory)).unwrap()
}

#[test]
fn memory_is_lazy_counted_and_released() {
    let sim = Sim::new(SimOptions { capacity: 10 << 10, largest_segment: 8 << 10, ..SimOptions::default() });
    let a = sim.create_lazily(8 << 10).unwrap();
    assert_eq!((sim.committed(), sim.live_segments()), (0, 1));
    let a = sim.commit(a).unwrap();
    let a = sim.commit(a).unwrap(); // memory that is committed twice is counted once
    assert_eq!(sim.committed(), 8 << 10);
    let make = || sim.create_lazily(4 << 10).unwrap(); // creating commits no memory
    assert!(matches!(sim.commit(make()), Err(Failure::DeviceMemory)));
    assert!(matches!(sim.create_lazily((8 << 10) + 1), Err(Failure::TooBig)));
    drop(a);
    sim.set_others(7 << 10);
    assert!(sim.commit(make()).is_err());
    sim.set_others(6 << 10);
    let b = sim.commit(make()).unwrap();
    assert_eq!((sim.committed(), sim.live_segments(), sim.late_commits()), (4 << 10, 1, 0));
    drop(b);
    assert_eq!((sim.committed(), sim.live_segments()), (0, 0));
}

#[test]
fn work_on_uncommitted_memory_fails_at_enqueue() {
    let sim = asynchronous();
    let (a, b) = (sim.create_lazily(1 << 20).unwrap(), sim.create_lazily(GRANULE).unwrap());
    sim.fail_next_enqueue(Failure::Resources);
    drop(sim.commit(b).unwrap());
    let work = |at| sim.write_tag_at(StreamId::DEFAULT, at, GRANULE, 1);
    let error = work((&a, 0)).unwrap_err();
    assert!(error.to_string().contains("CL_OUT_OF_RESOURCES"), "{error}");
    work((&a, 0)).unwrap();
    assert_eq!((sim.committed(), sim.late_commits()), (1 << 20, 1));
    let c = sim.create_lazily(GRANULE).unwrap();
    let error = sim.copy(StreamId::DEFAULT, (&a, 0), (&c, 0), GRANULE).unwrap_err();
    assert!(error.to_string().contains("CL_MEM_OBJECT_ALLOCATION_FAILURE"), "{error}");
}

#[test]
fn failures_come_in_the_order_they_were_asked_for() {
    let sim = asynchronous();
    sim.fail_next_create(Failure::HostMemory);
    sim.fail_next_create(Failure::Resources);
    sim.fail_next_commit(Failure::DeviceMemory);
    assert!(matches!(sim.create_lazily(1), Err(Failure::HostMemory)));
    assert!(matches!(sim.create_lazily(1), Err(Failure::Resources)));
    let commit = || sim.create_lazily(1).and_then(|memory| sim.commit(memory));
    assert!(matches!(commit(), Err(Failure::DeviceMemory)));
    sim.fail_next_commit(Failure::DeviceMemory);
    sim.clear_failures();
    commit().unwrap();
}

#[test]
fn streams_run_in_order_each_and_independently_of_each_other() {
    let sim = asynchronous();
    let (a, b) = (committed(&sim, 4 * GRANULE), committed(&sim, 4 * GRANULE));
    let (s0, s1) = (sim.stream(0), sim.stream(1));
    sim.write_tag_at(s0, (&a, 0), 4 * GRANULE, 7).unwrap();
    let m0 = sim.record(s0).unwrap();
    sim.write_tag_at(s1, (&b, 0), GRANULE, 8).unwrap();
    let m1 = sim.record(s1).unwrap();
    assert_eq!(sim.queued(), 4);
    assert_eq!(sim.run(s1, 10), 2);
    assert!(sim.is_done(&m1).unwrap() && !sim.is_done(&m0).unwrap());
    sim.stream_waits(s1, &m0).unwrap();
    sim.check_tag_at(s1, (&a, GRANULE), 2 * GRANULE, 7).unwrap();
    assert!(!sim.step(s1));
    assert!(sim.step(s0) && !sim.step(s1) && sim.step(s0) && sim.step(s1) && sim.step(s1) && !sim.step(s1));
    assert_eq!((sim.queued(), sim.violations().len()), (0, 0));
}

#[test]
fn a_wait_runs_only_the_commands_it_needs() {
    let sim = asynchronous();
    let a = committed(&sim, GRANULE);
    let streams: Vec<StreamId> = (0..4).map(|i| sim.stream(i)).collect();
    let mut last = sim.record(streams[0]).unwrap();
    for &stream in &streams[1..3] {
        sim.stream_waits(stream, &last).unwrap();
        last = sim.record(stream).unwrap();
        sim.write_tag_at(stream, (&a, 0), GRANULE, 3).unwrap();
    }
    let other = sim.record(streams[3]).unwrap();
    sim.wait(&last).unwrap();
    assert!(sim.is_done(&last).unwrap() && !sim.is_done(&other).unwrap());
    assert_eq!(sim.queued(), 3); // the writes after the markers, and the command of stream 3
    sim.synchronize().unwrap();
    assert!(sim.is_done(&other).unwrap());
    assert_eq!(sim.queued(), 0);
}

#[test]
#[should_panic(expected = "deadlock: nothing on stream 2")]
fn waiting_for_an_unreachable_marker_panics() {
    let (sim, other) = (asynchronous(), asynchronous());
    let foreign = other.record(other.stream(2)).unwrap();
    sim.stream_waits(StreamId::DEFAULT, &foreign).unwrap();
    sim.synchronize().unwrap();
}

#[test]
fn bytes_reused_too_early_are_a_violation() {
    let sim = asynchronous();
    let a = committed(&sim, 8 * GRANULE);
    let (s0, s1) = (sim.stream(0), sim.stream(1));
    sim.write_tag_at(s0, (&a, 0), 4 * GRANULE, 1).unwrap();
    sim.check_tag_at(s0, (&a, 0), 4 * GRANULE, 1).unwrap();
    sim.step(s0);
    sim.write_tag_at(s1, (&a, 3 * GRANULE), 2 * GRANULE, 2).unwrap();
    sim.step(s1);
    sim.synchronize().unwrap();
    let violations = sim.violations();
    assert_eq!(violations.len(), 1);
    assert!(violations[0].contains("granule 3 has tag 2, not 1"), "{violations:?}");
}

#[test]
fn copies_move_tags_in_the_order_of_their_stream() {
    let sim = asynchronous();
    let a = committed(&sim, 8 * GRANULE);
    let s = sim.stream(1);
    sim.write_tag_at(s, (&a, 0), GRANULE, 1).unwrap();
    sim.write_tag_at(s, (&a, GRANULE), GRANULE, 2).unwrap();
    sim.copy(s, (&a, 0), (&a, 4 * GRANULE), GRANULE + 1).unwrap(); // a partial granule counts as a whole one
    sim.write_tag_at(s, (&a, 0), 2 * GRANULE, 3).unwrap();
    sim.check_tag_at(s, (&a, 4 * GRANULE), GRANULE, 1).unwrap();
    sim.check_tag_at(s, (&a, 5 * GRANULE), GRANULE, 2).unwrap();
    sim.check_tag_at(s, (&a, 6 * GRANULE), GRANULE, 0).unwrap();
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    assert!(sim.copy(s, (&a, 0), (&a, GRANULE), 2 * GRANULE).is_err()); // the ranges overlap
    assert!(sim.copy(s, (&a, 0), (&a, 7 * GRANULE), 2 * GRANULE).is_err()); // the destination exceeds the segment
    assert!(sim.copy(s, (&a, 1), (&a, 4 * GRANULE), 1).is_err()); // the source does not begin at a granule
    assert!(asynchronous().copy(s, (&a, 0), (&a, 4 * GRANULE), 1).is_err()); // the memory belongs to another device
}

#[test]
fn tags_survive_a_copy_through_the_host() {
    let sim = asynchronous();
    let (a, b) = (committed(&sim, 3 * GRANULE), committed(&sim, 4 * GRANULE));
    for (i, tag) in [0xDEAD_BEEF, 2, 3].into_iter().enumerate() {
        sim.write_tag_at(StreamId::DEFAULT, (&a, i * GRANULE), GRANULE, tag).unwrap();
    }
    let mut host = vec![0; 2 * GRANULE + 2];
    sim.read((&a, 0), &mut host).unwrap(); // after all work of the default stream
    assert_eq!(host[GRANULE - 4..GRANULE], 0xDEAD_BEEF_u32.to_le_bytes());
    sim.write_tag_at(StreamId::DEFAULT, (&b, 3 * GRANULE), GRANULE, 0x0705_0000).unwrap();
    sim.write(&host, (&b, GRANULE)).unwrap();
    for (i, tag) in [0, 0xDEAD_BEEF, 2, 0x0705_0003].into_iter().enumerate() {
        sim.check_tag_at(StreamId::DEFAULT, (&b, i * GRANULE), GRANULE, tag).unwrap();
    }
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
}

#[test]
fn reserved_memory_grows_and_shrinks_by_pages() {
    let page = 2 * GRANULE;
    let sim = Sim::new(SimOptions { page, contents: true, capacity: 4 * page as u64, ..SimOptions::default() });
    assert!(asynchronous().reserve(page).is_none());
    let a = sim.reserve(9 * page + GRANULE).unwrap(); // more than the device has
    assert_eq!(sim.committed(), 0);
    sim.extend(&a, 0, 2 * page).unwrap();
    sim.extend(&a, page, 3 * page).unwrap(); // pages already committed are not counted twice
    assert_eq!(sim.committed(), 3 * page as u64);
    assert!(matches!(sim.extend(&a, 3 * page, 5 * page), Err(Failure::DeviceMemory)));
    assert!(matches!(sim.extend(&a, 1, page), Err(Failure::Other(_))));
    assert!(matches!(sim.extend(&a, 9 * page, 10 * page), Err(Failure::Other(_))));
    sim.extend(&a, 9 * page, 9 * page + GRANULE).unwrap(); // the last page is shorter
    assert_eq!(sim.committed(), 3 * page as u64 + GRANULE as u64);
    let (tag, check) = (
        |offset| sim.write_tag_at(StreamId::DEFAULT, (&a, offset), GRANULE, 5),
        |offset, tag| sim.check_tag_at(StreamId::DEFAULT, (&a, offset), GRANULE, tag).unwrap(),
    );
    tag(page).unwrap();
    tag(2 * page).unwrap();
    sim.shrink(&a, 0, 2 * page);
    assert_eq!(sim.committed(), page as u64 + GRANULE as u64);
    sim.extend(&a, page, 2 * page).unwrap();
    check(page, 0); // released pages lose their contents
    check(2 * page, 5); // the other pages keep their contents
    assert_eq!(sim.violations(), [""; 0]);
    assert!(tag(0).is_err()); // reserved memory is never committed late
    assert_eq!((sim.violations().len(), sim.late_commits()), (1, 0));
    sim.shrink(&a, 0, page + 1);
    assert_eq!(sim.violations().len(), 2);
    drop(a);
    assert_eq!(sim.committed(), 0);
}

#[test]
fn releasing_memory_in_use_stalls() {
    let sim = asynchronous();
    let (a, b) = (committed(&sim, GRANULE), committed(&sim, GRANULE));
    let (s0, s1) = (sim.stream(0), sim.stream(1));
    let marker = sim.record(s1).unwrap();
    sim.stream_waits(s0, &marker).unwrap();
    sim.write_tag_at(s0, (&a, 0), GRANULE, 1).unwrap();
    sim.write_tag_at(s0, (&b, 0), GRANULE, 2).unwrap();
    drop(a);
    assert_eq!((sim.stalls(), sim.queued()), (1, 1));
    sim.run(s0, 1);
    drop(b);
    assert_eq!((sim.stalls(), sim.queued(), sim.committed()), (1, 0, 0));
}

#[test]
fn the_same_seed_runs_the_same_commands() {
    let ran = |seed: u64| {
        let sim = asynchronous();
        let markers: Vec<Marker> = (0..60).map(|i| sim.record(sim.stream(i % 3)).unwrap()).collect();
        let n = (0..4).map(|i| sim.run_some(seed + i)).sum::<usize>();
        let done: Vec<bool> = markers.iter().map(|marker| sim.is_done(marker).unwrap()).collect();
        assert_eq!((n, done.iter().filter(|&&done| done).count()), (n, n));
        done
    };
    assert_eq!(ran(1), ran(1));
    assert!((2..20).any(|seed| ran(seed) != ran(1)));
}

#[test]
fn calls_are_counted_and_recorded_when_asked_for() {
    for record_calls in [false, true] {
        let options = SimOptions { record_calls, asynchronous: true, page: 512, ..SimOptions::default() };
        let sim = Sim::new(options);
        let a = committed(&sim, 1024);
        sim.copy(StreamId::DEFAULT, (&a, 0), (&a, 512), 512).unwrap();
        let marker = sim.record(StreamId::DEFAULT).unwrap();
        assert!(!sim.is_done(&marker).unwrap());
        sim.wait(&marker).unwrap();
        sim.stream_waits(StreamId::DEFAULT, &marker).unwrap();
        sim.read((&a, 0), &mut [0; 3]).unwrap();
        sim.write(&[0; 4], (&a, 0)).unwrap();
        drop(a);
        let b = sim.reserve(2048).unwrap();
        sim.extend(&b, 0, 1024).unwrap();
        sim.shrink(&b, 512, 1024);
        sim.synchronize().unwrap();
        let calls = [
            Call::Create(1024),
            Call::Commit(1024),
            Call::Copy(512),
            Call::Record,
            Call::Query,
            Call::Wait,
            Call::StreamWaits,
            Call::Read(3),
            Call::Write(4),
            Call::Release(1024),
            Call::Reserve(2048),
            Call::Extend(1024),
            Call::Shrink(512),
            Call::Synchronize,
        ];
        assert_eq!(sim.call_count(), calls.len() as u64);
        assert_eq!(sim.calls(), if record_calls { &calls[..] } else { &[] });
    }
}

#[test]
fn a_hook_during_a_wait_may_use_the_device() {
    let sim = asynchronous();
    let marker = sim.record(StreamId::DEFAULT).unwrap();
    let inside = sim.clone();
    sim.at_synchronize(move || drop(committed(&inside, 512)));
    sim.synchronize().unwrap();
    assert!(sim.is_done(&marker).unwrap() && sim.call_count() == 6);
}

#[test]
fn blocks_carry_tags() {
    let sim = Sim::new(SimOptions { contents: true, ..SimOptions::default() });
    let segment = Arc::new(Segment::new(committed(&sim, 4096), 4096));
    // SAFETY: this is the only block of the segment.
    let block = unsafe { Block::new(&segment, 1024, 1024, 1000) }.unwrap();
    sim.write_tag(StreamId::DEFAULT, &block, 9).unwrap();
    sim.check_tag(StreamId::DEFAULT, &block, 9).unwrap();
    sim.check_tag_at(StreamId::DEFAULT, (segment.memory(), 512), 512, 0).unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    sim.check_tag(StreamId::DEFAULT, &block, 8).unwrap();
    assert_eq!(sim.violations().len(), 1);
}
