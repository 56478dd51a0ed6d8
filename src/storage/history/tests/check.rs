//! Consistent snapshots pass; breaking each rule once is reported.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn consistent_snapshots_pass(
        steps in prop::collection::vec((any::<u8>(), any::<u32>()), 0..if cfg!(miri) { 40 } else { 400 }),
        max_entries in 1_usize..500,
    ) {
        let toy = Toy::after(max_entries, &steps)?;
        let snapshot = toy.snapshot();
        snapshot.check()?;
        prop_assert_eq!(&Snapshot::from_pickle(&snapshot.to_pickle()?)?, &snapshot);
        prop_assert_eq!(&Snapshot::from_json(&snapshot.to_json()?)?, &snapshot);
        let text = snapshot.to_string();
        // The tables of ages and of the largest blocks have at most 20 lines.
        prop_assert!(text.lines().count() >= 2 && text.lines().count() <= 24 + 20 + snapshot.segments.len());
    }

    /// A free has two entries, requested and completed. Whichever is missing, the check reports the other.
    #[test]
    fn a_missing_half_of_a_free_is_reported(steps in prop::collection::vec((0_u8..6, any::<u32>()), 20..80), n in any::<usize>()) {
        let snapshot = Toy::after(1000, &steps)?.snapshot();
        let frees = |e: &TraceEntry| matches!(e.action, TraceAction::FreeRequested | TraceAction::FreeCompleted);
        let indices: Vec<usize> = (0..snapshot.device_traces[0].len()).filter(|&i| frees(&snapshot.device_traces[0][i])).collect();
        prop_assume!(!indices.is_empty());
        let mut broken = snapshot.clone();
        broken.device_traces[0].remove(indices[n % indices.len()]);
        prop_assert!(broken.check().is_err());
    }
}

/// Returns a snapshot of two segments with blocks in every state, a reservation, a released segment, and their complete trace.
fn whole() -> Result<Snapshot> {
    let mut toy = Toy::new(1000)?;
    toy.alloc(1000, 0);
    toy.alloc(2000, 0);
    toy.alloc(3000, 0);
    toy.free(1, false);
    toy.free(1, true);
    toy.alloc(5 << 20, 1);
    toy.alloc(3 << 20, 2);
    toy.free(2, true);
    [6, 7, 7].into_iter().for_each(|kind| toy.step((kind, 0)));
    toy.step((7, 1));
    let snapshot = toy.snapshot();
    snapshot.check()?;
    Ok(snapshot)
}

fn entry(s: &mut Snapshot, action: TraceAction) -> &mut TraceEntry {
    s.device_traces[0].iter_mut().find(|e| e.action == action).expect("there is one")
}

fn extra(s: &mut Snapshot, action: TraceAction, addr: u64, size: u64) {
    let last = s.device_traces[0].last().expect("there are entries").clone();
    s.device_traces[0].push(TraceEntry { action, addr, size, ..last });
}

#[test]
fn each_fault_is_reported() -> Result<()> {
    use TraceAction::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
    type Fault = (&'static str, fn(&mut Snapshot));
    let faults: &[Fault] = &[
        // Faults that are put into segments and their blocks.
        ("not where the one before ends", |s| s.segments[0].blocks[1].address += 512),
        ("not where the one before ends", |s| s.segments[0].blocks.swap(0, 1)),
        ("not where the one before ends", |s| s.segments[0].blocks[0].size += 512),
        ("not where the one before ends", |s| _ = s.segments[0].blocks.remove(0)),
        ("its blocks end at", |s| _ = s.segments[0].blocks.pop()),
        ("its blocks end at", |s| s.segments[0].total_size -= 512),
        ("its blocks end at", |s| s.segments[0].blocks.clear()),
        ("fewer than the", |s| s.segments[0].blocks[0].requested_size = 1025),
        ("is empty", |s| {
            let next = s.segments[0].blocks[1].clone();
            s.segments[0].blocks.insert(1, BlockInfo { size: 0, requested_size: 0, ..next });
        }),
        ("it is empty", |s| s.segments[0].total_size = 0),
        ("2^53", |s| s.segments[0].address = 1 << 53),
        ("2^53", |s| s.segments[0].address = u64::MAX),
        ("overlaps the segment", |s| s.segments.push(s.segments[0].clone())),
        ("overlaps the segment", |s| {
            let mut inner = s.segments[0].clone();
            (inner.address, inner.total_size) = (inner.address + 1024, 512);
            inner.blocks = vec![BlockInfo { address: inner.address, size: 512, ..inner.blocks[2].clone() }];
            s.segments.push(inner);
        }),
        // Faults that are put into the trace, or into the state at its end.
        ("in use after it", |s| s.segments[0].blocks[1].state = BlockState::ActiveAllocated),
        ("neither pending at the end nor freed", |s| s.segments[0].blocks[1].state = BlockState::Inactive),
        ("pending at the end, but no later entry", |s| s.segments[0].blocks[0].state = BlockState::ActivePendingFree),
        ("no such block is live", |s| s.segments[0].blocks[0].state = BlockState::Inactive),
        ("no such block is live", |s| extra(s, Alloc, 512, 512)),
        ("no such block is live", |s| {
            let alloc = entry(s, Alloc).clone();
            s.device_traces[0].insert(1, alloc);
        }),
        ("it has 1000 bytes", |s| entry(s, Alloc).size = 1001),
        ("it has 999 bytes", |s| s.segments[0].blocks[0].requested_size = 999),
        ("it has 2000 bytes", |s| entry(s, FreeRequested).size = 1),
        ("no segment is live around the block", |s| extra(s, FreeCompleted, 512, 512)),
        ("no segment is live around the block", |s| entry(s, FreeCompleted).size = 4 << 20),
        ("is live there", |s| extra(s, FreeCompleted, s.segments[0].address + 512, 512)),
        ("it is empty", |s| entry(s, Alloc).size = 0),
        ("2^53", |s| entry(s, FreeCompleted).addr = u64::MAX),
        ("no such segment is live", |s| extra(s, SegmentAlloc, 4096, 4096)),
        ("it has 2097152 bytes", |s| entry(s, SegmentAlloc).size = 1 << 20),
        ("is live there", |s| s.device_traces[0].swap(0, 1)),
        ("overlaps the segment", |s| extra(s, SegmentFree, s.segments[0].address + 512, 512)),
        ("overlaps the segment", |s| extra(s, SegmentUnmap, s.segments[1].address, 512)),
        ("around the pages", |s| extra(s, SegmentMap, 4096, 4096)),
        ("is live there", |s| extra(s, SegmentMap, s.segments[0].address, 512)),
        ("around the pages", |s| s.device_traces.insert(0, s.device_traces[0].clone())),
        ("no such block is live", |s| s.segments[1].device = 1),
    ];
    let mut unnoticed = Vec::new();
    for (index, (expected, fault)) in faults.iter().enumerate() {
        let mut snapshot = whole()?;
        fault(&mut snapshot);
        let found = snapshot.check().err().map(|e| e.to_string());
        if !found.as_ref().is_some_and(|e| e.contains(expected)) {
            unnoticed.push(format!("fault {index}: expected {expected:?}, found {found:?}"));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
    Ok(())
}

#[test]
fn pages_merge_and_split() -> Result<()> {
    // Three pages are mapped and the middle page is unmapped, which leaves two segments.
    let page = |address: u64| BlockInfo {
        address,
        size: 4096,
        requested_size: 0,
        state: BlockState::Inactive,
        frames: [].into(),
    };
    let template = whole()?.segments[0].clone();
    let segment = |address| SegmentInfo { address, total_size: 4096, blocks: vec![page(address)], ..template.clone() };
    let mut snapshot = Snapshot {
        segments: vec![segment(1 << 20), segment((1 << 20) + 8192)],
        device_traces: vec![whole()?.device_traces[0][..1].to_vec()],
        ..Default::default()
    };
    snapshot.device_traces[0].clear();
    let model = &whole()?.device_traces[0][0];
    let steps = [
        (TraceAction::SegmentMap, 0, 4096),
        (TraceAction::SegmentMap, 4096, 8192),
        (TraceAction::SegmentUnmap, 4096, 4096),
    ];
    for (action, offset, size) in steps {
        snapshot.device_traces[0].push(TraceEntry { action, addr: (1 << 20) + offset, size, ..model.clone() });
    }
    snapshot.check()?;
    // Pages of different streams are not merged, so no segment contains the whole range of the second map.
    snapshot.segments[1].stream = 9;
    assert!(snapshot.check().is_err());
    Ok(())
}

#[test]
fn fragmentation_figures_are_exact() -> Result<()> {
    let snapshot = whole()?;
    let fragmentation = snapshot.fragmentation();
    // Small: 2 MiB with blocks of 1024 and 2048 bytes, of which 1000 and 2000 are requested. Large: 6 MiB with a block of 5 MiB,
    // and 2 MiB of the reservation.
    let small = fragmentation.small_pool;
    assert_eq!((small.reserved, small.requested), (2 << 20, 3000));
    assert_eq!((small.total_free, small.largest_free), ((2 << 20) - 3072, (2 << 20) - 3072));
    assert_eq!(small.index(), 0.0);
    let large = fragmentation.large_pool;
    assert_eq!((large.reserved, large.requested), (8 << 20, 5 << 20));
    assert_eq!((large.total_free, large.largest_free), (3 << 20, 2 << 20));
    assert!((large.index() - 1.0 / 3.0).abs() < 1e-12 && large.utilisation() == 0.625);
    assert_eq!(fragmentation.all.reserved, small.reserved + large.reserved);
    assert_eq!((FreeSpace::default().index(), FreeSpace::default().utilisation()), (0.0, 1.0));

    let text = snapshot.to_string();
    let map = text.lines().find(|line| line.contains("6.00 MiB at")).expect("the largest is drawn");
    let (used, free) = ("#".repeat(53), ".".repeat(10));
    assert!(map.starts_with(&format!("[{used}+{free}]")), "5 of 6 MiB are 53.3 of 64 characters: {map}");
    Ok(())
}
