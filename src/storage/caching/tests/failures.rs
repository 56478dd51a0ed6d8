//! Tests that each block keeps its contents during compaction if any driver call fails, once or several times in a row.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::super::entry::SPILLED_POOL;
use super::*;
use crate::storage::driver::MemoryKind;

/// Number of bytes per tag. It is large, so that the test needs few tags.
const GRANULE: usize = MIB;
const ALWAYS: u64 = u64::MAX;

/// True if the block is kept on the host.
fn is_on_host(block: &Block) -> bool {
    matches!(block.location().segment().memory().0, MemoryKind::Spilled(_))
}

/// The blocks of one segment in order: size in MiB, and whether the block is freed.
type Layout = &'static [(usize, bool)];

/// A full device with live blocks, whose contents are known, and free ranges between them.
struct FullDevice {
    sim: Sim,
    allocator: Arc<CachingAllocator>,
    live: Vec<(Block, u32)>,
}

impl FullDevice {
    /// Creates segments with these layouts. The device has no memory beyond these segments.
    fn new(asynchronous: bool, segments: &[Layout]) -> FullDevice {
        FullDevice::with_config(asynchronous, segments, "segments:pytorch")
    }

    fn with_config(asynchronous: bool, segments: &[Layout], config: &str) -> FullDevice {
        let capacity = segments.iter().flat_map(|blocks| *blocks).map(|(mib, _)| mib * MIB).sum::<usize>() as u64;
        let options =
            SimOptions { alignment: GRANULE, contents: true, asynchronous, capacity, ..SimOptions::default() };
        let sim = Sim::new(options);
        let allocator = CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap();
        let allocator = Arc::new(allocator);
        let whole = |blocks: &&Layout| take(&allocator, blocks.iter().map(|(mib, _)| mib * MIB).sum());
        let all: Vec<Block> = segments.iter().map(|blocks| whole(&blocks)).collect();
        free_all(&allocator, all);
        let mut full = FullDevice { sim, allocator, live: Vec::new() };
        let mut given_back = Vec::new();
        for &(mib, free) in segments.iter().flat_map(|blocks| *blocks) {
            let (block, tag) = (take(&full.allocator, mib * MIB), 1 + 10_000 * full.live.len() as u32);
            if free {
                given_back.push(block);
                continue;
            }
            let place = block.location();
            for n in 0..block.size() / GRANULE {
                let at = (place.segment().memory(), place.offset() + n * GRANULE);
                full.sim.write_tag_at(StreamId::DEFAULT, at, GRANULE, tag + n as u32).unwrap();
            }
            drop(place);
            full.live.push((block, tag));
        }
        free_all(&full.allocator, given_back);
        full
    }

    /// Checks the contents of every block. Returns how many blocks are on the host.
    fn check(&self, what: &str) -> usize {
        let mut on_host = 0;
        for (block, tag) in &self.live {
            let place = block.location();
            for n in 0..block.size() / GRANULE {
                let (at, tag) = (place.offset() + n * GRANULE, tag + n as u32);
                match &place.segment().memory().0 {
                    MemoryKind::Spilled(copy) => {
                        let mut bytes = [0; 4];
                        copy.read(at, &mut bytes).unwrap();
                        assert_eq!(bytes, tag.to_le_bytes(), "{what}");
                    }
                    _ => {
                        let at = (place.segment().memory(), at);
                        self.sim.check_tag_at(StreamId::DEFAULT, at, GRANULE, tag).unwrap();
                    }
                }
            }
            drop(place);
            on_host += usize::from(is_on_host(block));
        }
        self.sim.synchronize().unwrap();
        assert_eq!(self.sim.violations(), [""; 0], "{what}");
        self.allocator.check();
        on_host
    }

    fn free_all_and_check(self) {
        free_all(&self.allocator, self.live.into_iter().map(|(block, _)| block));
        self.allocator.empty_cache().unwrap();
        assert_eq!(self.sim.committed(), 0);
        assert_eq!(self.allocator.stats().reserved_bytes.current, 0);
        self.allocator.check();
    }
}

/// Blocks of which some move down by more than their size, and some by less.
const SLIDES: Layout = &[(2, true), (11, false), (3, true), (4, false), (70, false), (20, true), (6, false), (4, true)];
/// A block that would need too many copies on the device, so it goes through the host.
const OVER_HOST: Layout = &[(2, true), (140, false), (20, true), (10, false), (20, false), (8, true)];
/// The layout of each of two segments: neither has room for the request, and the device has no memory for a third segment.
const THROUGH_HOST: Layout = &[(4, false), (4, true), (8, false), (4, true)];

/// The layouts of segments, and the size in MiB of a request that can be served only by moving blocks.
const CASES: [(&[Layout], usize); 3] = [(&[SLIDES], 29), (&[OVER_HOST], 30), (&[THROUGH_HOST, THROUGH_HOST], 14)];

// Miri runs only a part of the next two tests, because all of the first takes more than 45 minutes under Miri.
const ASYNCHRONOUS: &[bool] = if cfg!(miri) { &[true] } else { &[false, true] };
const FIRST_CASE: usize = if cfg!(miri) { 2 } else { 0 };
const CASE_STEP: usize = if cfg!(miri) { 5 } else { 1 };

#[test]
fn a_failed_call_loses_neither_blocks_nor_the_device() {
    for &asynchronous in ASYNCHRONOUS {
        for &(segments, mib) in &CASES[FIRST_CASE..] {
            for times in [1, 2, 5, ALWAYS].into_iter().step_by(CASE_STEP) {
                for pass in (0..).step_by(CASE_STEP) {
                    let full = FullDevice::new(asynchronous, segments);
                    full.sim.fail_calls(pass, times, Failure::Resources);
                    let result = full.allocator.allocate(mib * MIB, StreamId::DEFAULT);
                    let reached = full.sim.failures_left() as u64 != times;
                    full.sim.clear_failures();
                    let what = format!("{times} from call {pass} on: {result:?}");
                    if times == ALWAYS && full.sim.cause_of_loss().is_some() {
                        continue; // a block was half moved, so the allocator declared the device lost
                    }
                    assert_eq!(full.sim.cause_of_loss(), None, "{what}");
                    full.check(&what);
                    if !reached {
                        assert!(result.is_ok(), "{what}");
                    }
                    free_all(&full.allocator, result.ok());
                    // A second attempt, without failures, succeeds.
                    let block = full.allocator.allocate(mib * MIB, StreamId::DEFAULT).expect(&what);
                    full.check(&what);
                    free_all(&full.allocator, [block]);
                    full.free_all_and_check();
                    if !reached {
                        assert!(pass > 5, "a compaction has more calls");
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn a_copy_that_fails_on_the_device_is_repeated() {
    for &asynchronous in ASYNCHRONOUS {
        for &(segments, mib) in &CASES[FIRST_CASE..] {
            for failures in [1, 2, 5].into_iter().step_by(CASE_STEP) {
                let full = FullDevice::new(asynchronous, segments);
                (0..failures).for_each(|_| full.sim.fail_next_copy(Failure::Resources));
                let block = take(&full.allocator, mib * MIB);
                full.check("copies failed");
                free_all(&full.allocator, [block]);
                full.free_all_and_check();
            }
        }
    }
}

#[test]
fn blocks_stay_on_the_host_until_the_device_has_memory() {
    for gives_back in [false, true] {
        let mut full = FullDevice::new(true, &[THROUGH_HOST, THROUGH_HOST]);
        // From the first move on, another program takes all released memory.
        (0..1000).for_each(|_| full.sim.fail_next_commit(Failure::DeviceMemory));
        let error = full.allocator.allocate(14 * MIB, StreamId::DEFAULT).unwrap_err().to_string();
        assert!(error.contains("kept on the host"), "{error}");
        assert_eq!(full.sim.cause_of_loss(), None);
        assert_eq!(full.allocator.stats().reserved_bytes.peak, 40 * MIB as u64, "nothing was counted twice");
        assert_eq!(full.check("no memory"), 2); // the blocks of one segment
        // The other segment has room for the larger block, once its own blocks have moved together.
        let larger = full.live.iter().find(|(block, _)| is_on_host(block) && block.size() == 8 * MIB).unwrap();
        assert!(full.allocator.restore(&larger.0).unwrap());
        assert_eq!(full.check("no new memory"), 1);
        let at = full.live.iter().position(|(block, _)| is_on_host(block)).unwrap();
        let (block, tag) = full.live.remove(at);
        let error = full.allocator.restore(&block).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == block.size()), "{error}");
        full.sim.clear_failures();
        if gives_back {
            full.allocator.deallocate(block);
            full.allocator.empty_cache().unwrap();
            assert_eq!(full.allocator.lock().heap.blocks_of_pool(SPILLED_POOL, Use::Live).count(), 0);
        } else {
            let place = block.location();
            assert!(full.allocator.restore(&block).unwrap_err().to_string().contains("is being read"));
            drop(place);
            full.allocator.reset_peak_stats();
            let before = full.allocator.stats();
            assert!(full.allocator.restore(&block).unwrap());
            assert!(!full.allocator.restore(&block).unwrap());
            let after = full.allocator.stats();
            assert_eq!(after.allocated_bytes.peak, before.allocated_bytes.peak, "nor on the way back");
            assert_eq!(after.spilled_bytes.current, before.spilled_bytes.current - 4 * MIB as u64);
            full.live.push((block, tag));
        }
        assert_eq!(full.check("memory"), 0);
        full.free_all_and_check();
    }
}

/// A subscriber that counts messages, and on each one attempts an allocation too large for the device.
struct Allocating(Arc<CachingAllocator>, Arc<AtomicUsize>);

impl tracing::Subscriber for Allocating {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        assert!(self.0.compacting.try_lock().is_ok(), "a message while others have to wait");
        assert!(self.0.allocate(300 * MIB, StreamId::DEFAULT).is_err());
        self.1.fetch_add(1, Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_log_subscriber_may_allocate_during_a_compaction() {
    let full = FullDevice::new(false, &[THROUGH_HOST, THROUGH_HOST]);
    let messages = Arc::new(AtomicUsize::new(0));
    // While one subscriber exists, tracing asks the current thread's alone whether it wants a new message, and keeps the answer for all
    // threads: another test would answer for this one.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = Allocating(Arc::clone(&full.allocator), Arc::clone(&messages));
    (0..1000).for_each(|_| full.sim.fail_next_commit(Failure::DeviceMemory));
    let told = tracing::subscriber::with_default(subscriber, || full.allocator.allocate(14 * MIB, StreamId::DEFAULT));
    assert!(told.is_err() && messages.load(Relaxed) >= 1, "{told:?}, {messages:?}");
    full.sim.clear_failures();
    full.check("told");
    full.free_all_and_check();
}

#[test]
fn a_block_that_cannot_be_written_back_stays_on_the_host() {
    let full = FullDevice::new(false, &[OVER_HOST]);
    full.sim.fail_writes(true);
    let error = full.allocator.allocate(30 * MIB, StreamId::DEFAULT).unwrap_err().to_string();
    assert!(error.contains("clEnqueueWriteBuffer") && error.contains("no block was lost"), "{error}");
    assert_eq!(full.check("no writes"), 1);
    full.sim.fail_writes(false);
    full.allocator.restore(&full.live[0].0).unwrap();
    assert_eq!(full.check("writes"), 0);
    full.free_all_and_check();
}

#[test]
fn a_failed_call_while_spilling_leaves_every_block_where_it_was_or_on_the_host() {
    const SPILLS: Layout = &[(3, false), (1, true), (4, false), (1, true), (3, false)];
    let fails: &[u64] = if cfg!(miri) { &[2] } else { &[1, 2, 5, 20, ALWAYS] };
    let (mut spilled, mut failed) = (0, 0);
    for config in ["spill:host,segments:pytorch", "spill:disk,segments:pytorch,compaction:False"] {
        for &asynchronous in ASYNCHRONOUS {
            for &times in fails {
                for pass in (0..).step_by(CASE_STEP) {
                    let full = FullDevice::with_config(asynchronous, &[SPILLS], config);
                    let what = format!("{config}, {times} from call {pass} on");
                    full.sim.fail_calls(pass, times, Failure::Resources);
                    let result = full.allocator.allocate(6 * MIB, StreamId::DEFAULT);
                    let mut left = full.sim.failures_left() as u64;
                    full.sim.clear_failures();
                    if times == ALWAYS && full.sim.cause_of_loss().is_some() {
                        continue; // compaction had half moved a block
                    }
                    let on_host = full.check(&what);
                    spilled += u64::from(on_host > 0);
                    failed += u64::from(result.is_err());
                    assert!(result.is_err() || on_host > 0, "{what}");
                    free_all(&full.allocator, result.ok());
                    // The way back fails in the same manner, and then succeeds.
                    full.sim.fail_calls(pass, times, Failure::Resources);
                    let returned: Vec<_> = full.live.iter().map(|(block, _)| full.allocator.restore(block)).collect();
                    left = left.min(full.sim.failures_left() as u64);
                    full.sim.clear_failures();
                    if times == ALWAYS && full.sim.cause_of_loss().is_some() {
                        continue;
                    }
                    full.check(&format!("{what}: {returned:?}"));
                    let block = full.allocator.allocate(6 * MIB, StreamId::DEFAULT).expect(&what);
                    assert!(full.check(&what) > 0, "{what}");
                    free_all(&full.allocator, [block]);
                    full.live.iter().for_each(|(block, _)| _ = full.allocator.restore(block).unwrap());
                    assert_eq!((full.check(&what), full.sim.cause_of_loss()), (0, None), "{what}");
                    assert_eq!(full.allocator.stats().spilled_bytes.current, 0);
                    full.free_all_and_check();
                    if left == times {
                        assert!(pass > 2, "spilling has more calls");
                        break;
                    }
                }
            }
        }
    }
    assert!(cfg!(miri) || spilled > 30 && failed > 20, "{spilled} {failed}");
}
