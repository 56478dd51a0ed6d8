//! Threads that share an allocator and a device.

use std::sync::Barrier;
use std::thread;

use super::super::*;
use super::ops::Random;
use crate::storage::Driver;

/// Each thread allocates (sometimes in a private pool), uses, shares between streams and frees its own blocks. The
/// device is often full and runs queued work at random. No thread may find contents of another thread in its blocks.
fn threads(config: &str) {
    let (threads, rounds) = if cfg!(miri) { (2, 30) } else { (4, 6000) };
    let options = SimOptions {
        capacity: 48 << 20,
        asynchronous: true,
        contents: true,
        check_order: true,
        ..SimOptions::default()
    };
    let sim = Sim::new(options);
    let allocator = Arc::new(CachingAllocator::new(Arc::new(sim.clone()), config.parse().unwrap()).unwrap());
    let start = Barrier::new(threads);
    let work = |thread: usize| {
        let mut random = Random(thread as u64 + 1);
        let mut live: Vec<(Block, u32, StreamId)> = Vec::new();
        let mut pool: Option<MemPool> = None;
        start.wait();
        for round in 0..rounds {
            let stream = sim.stream(random.below(3) as u32);
            let at = random.below(live.len().max(1) as u64) as usize;
            match random.below(20) {
                0..9 if live.len() < 60 => {
                    let tag = (thread * rounds + round + 1) as u32;
                    let bytes = random.size(4 << 20);
                    let allocate = || allocator.allocate(bytes, stream);
                    match pool.as_ref().filter(|_| round % 3 == 0).map_or_else(allocate, |p| use_mem_pool(p, allocate))
                    {
                        Ok(block) => {
                            sim.write_tag(stream, &block, tag).unwrap();
                            live.push((block, tag, stream));
                        }
                        Err(Error::OutOfMemory { .. }) => {
                            live.drain(..live.len() / 2).for_each(|(block, ..)| allocator.deallocate(block));
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                0..15 if !live.is_empty() => {
                    let (block, tag, own) = live.swap_remove(at);
                    sim.check_tag(own, &block, tag).unwrap();
                    allocator.deallocate(block);
                }
                15..17 if !live.is_empty() && live[at].2 != stream => {
                    let (block, tag, own) = &live[at];
                    sim.stream_waits(stream, &sim.record(*own).unwrap()).unwrap();
                    allocator.record_stream(block, stream);
                    sim.check_tag(stream, block, *tag).unwrap();
                }
                17 if random.below(20) == 0 => {
                    let options = MemPoolOptions { no_split: round % 2 == 0, use_on_oom: true };
                    pool = pool.is_none().then(|| MemPool::new(&allocator, options)); // creates a pool, or drops the pool while it has live blocks
                }
                17 if random.below(50) == 0 => allocator.empty_cache().unwrap(),
                18 if random.below(20) == 0 => _ = allocator.compact(8 << 20).unwrap(),
                19 if random.below(20) == 0 => assert!(allocator.stats().num_ooms < u64::MAX),
                _ => _ = sim.run_some(random.next()),
            }
        }
        live.into_iter().for_each(|(block, tag, own)| {
            sim.check_tag(own, &block, tag).unwrap();
            allocator.deallocate(block);
        });
    };
    thread::scope(|scope| {
        (0..threads).for_each(|thread| _ = scope.spawn(move || work(thread)));
    });
    sim.synchronize().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    allocator.check();
    allocator.empty_cache().unwrap();
    assert_eq!((sim.committed(), sim.live_segments(), allocator.stats().allocation.current), (0, 0, 0));
}

#[test]
fn threads_that_share_an_allocator_keep_their_contents() {
    threads("");
}

#[test]
fn threads_keep_their_contents_without_reuse_across_streams() {
    threads("cross_stream_reuse:False,thread_cache_kb:4096");
}
