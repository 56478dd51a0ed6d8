use std::thread;

use super::*;
use crate::Error;
use crate::storage::{Call, DeviceStats, Failure, PoolStats, Sim, SimOptions};

const STREAM: StreamId = StreamId::DEFAULT;

fn device(capacity: u64) -> (Sim, DirectAllocator) {
    let sim = Sim::new(SimOptions { capacity, record_calls: true, ..SimOptions::default() });
    let allocator = DirectAllocator::new(Arc::new(sim.clone()), Config::default()).unwrap();
    (sim, allocator)
}

#[test]
fn each_allocation_creates_a_buffer_and_each_free_releases_it() {
    let (sim, direct) = device(1 << 20);
    let blocks = [1, 512, 513].map(|bytes| direct.allocate(bytes, STREAM).unwrap());
    assert_eq!(blocks.each_ref().map(Block::size), [512, 512, 1024]);
    assert_eq!(blocks.each_ref().map(Block::requested), [1, 512, 513]);
    assert!(
        blocks.iter().all(|block| block.location().offset() == 0 && block.location().segment().bytes() == block.size())
    );
    let stats = direct.stats();
    assert_eq!((stats.allocated_bytes.current, stats.reserved_bytes.current, sim.committed()), (2048, 2048, 2048));
    assert_eq!((stats.requested_bytes.current, stats.segment.current, stats.num_device_alloc), (1026, 3, 3));
    blocks.into_iter().for_each(|block| direct.deallocate(block));
    let stats = direct.stats();
    assert_eq!((stats.reserved_bytes.current, stats.active.current, sim.live_segments()), (0, 0, 0));
    assert_eq!((stats.reserved_bytes.peak, stats.allocation.freed, stats.num_device_free), (2048, 3, 3));
    let expected = [512, 512, 1024].map(|n| [Call::Create(n), Call::Commit(n)]).into_iter().flatten();
    assert_eq!(sim.calls(), expected.chain([512, 512, 1024].map(Call::Release)).collect::<Vec<_>>());
    assert_eq!(
        (stats.oversize_allocations.peak, stats.oversize_segments.peak),
        (0, 0),
        "no size is too large to split"
    );
    direct.reset_accumulated_stats();
    direct.reset_peak_stats();
    assert_eq!(direct.stats(), DeviceStats { max_split_size: u64::MAX, ..DeviceStats::default() });
}

#[test]
fn running_out_of_memory_waits_once_and_retries() {
    let (sim, direct) = device(1 << 20);
    for failure in [Failure::DeviceMemory, Failure::Resources, Failure::HostMemory] {
        sim.fail_next_create(failure.clone());
        direct.deallocate(direct.allocate(1000, STREAM).unwrap());
        sim.fail_next_commit(failure);
        direct.deallocate(direct.allocate(1000, STREAM).unwrap());
    }
    let stats = direct.stats();
    assert_eq!((stats.num_alloc_retries, stats.num_sync_all_streams, stats.num_ooms), (6, 6, 0));
    let most = direct.allocate(1 << 19, STREAM).unwrap();
    let Error::OutOfMemory { requested, detail, .. } = direct.allocate((1 << 19) + 1, STREAM).unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(requested, (1 << 19) + 1);
    assert!(detail.contains("512.00 KiB (524288 bytes) are allocated") && detail.contains("no room"), "{detail}");
    assert_eq!((direct.stats().num_ooms, sim.committed()), (1, 1 << 19));
    direct.deallocate(most);
    direct.deallocate(direct.allocate(1 << 20, STREAM).unwrap());
    assert_eq!(direct.stats().reserved_bytes.current, 0);
}

#[test]
fn unrecoverable_failures_are_not_retried() {
    let (sim, direct) = device(1 << 20);
    sim.fail_next_create(Failure::TooBig);
    assert!(matches!(direct.allocate(1000, STREAM), Err(Error::OutOfMemory { requested: 1000, .. })));
    sim.fail_next_create(Failure::Other(Error::invalid("clCreateBuffer", "lost")));
    assert!(matches!(direct.allocate(1000, STREAM), Err(Error::Invalid { .. })));
    for bytes in [(1 << 20) + 1, usize::MAX] {
        assert!(matches!(direct.allocate(bytes, STREAM), Err(Error::OutOfMemory { .. })));
    }
    assert!(!sim.calls().contains(&Call::Synchronize));
    assert_eq!((direct.stats().num_alloc_retries, direct.stats().reserved_bytes.current), (0, 0));
}

#[test]
fn a_limit_includes_buffers_being_created() {
    let (sim, direct) = device(1 << 30);
    direct.set_memory_limit(10 << 10).unwrap();
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..if cfg!(miri) { 10 } else { 200 } {
                    match direct.allocate(4 << 10, STREAM) {
                        Ok(block) => {
                            assert!(sim.committed() <= 8 << 10);
                            direct.deallocate(block);
                        }
                        Err(error) => {
                            assert!(error.to_string().contains("10.00 KiB (10240 bytes) are allowed"), "{error}")
                        }
                    }
                }
            });
        }
    });
    let stats = direct.stats();
    assert!(stats.reserved_bytes.peak <= 8 << 10);
    assert_eq!((stats.reserved_bytes.current, sim.live_segments()), (0, 0));
    assert_eq!(stats.num_device_alloc, stats.num_device_free);
}

#[test]
fn blocks_of_other_allocators_are_ignored() {
    let (sim, direct) = device(1 << 20);
    let other = DirectAllocator::new(Arc::new(sim.clone()), Config::default()).unwrap();
    let block = other.allocate(512, STREAM).unwrap();
    direct.deallocate(block);
    assert_eq!((direct.stats().total, other.stats().allocation.current), (PoolStats::default(), 1));
}
