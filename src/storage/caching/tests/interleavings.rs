//! Tests with all interleavings of threads that use the thread caches, explored by loom. `scripts/loom` runs these
//! tests. Under loom all threads share one cache, which has room for one block per size.

use std::ptr::NonNull;

use ::loom::sync::Arc;
use ::loom::{model, thread};

use super::super::cache::{CachedBlock, PutOutcome, ThreadCaches};

const SIZE: usize = 512;

/// Returns caches for two threads and a third thread that drains them. The cache that the two threads share already exists.
fn caches() -> Arc<ThreadCaches> {
    let caches = ThreadCaches::new(1 << 20, SIZE);
    caches.create_for_this_thread();
    assert!(put(&caches, 0));
    assert_eq!(caches.drain().0, [0]);
    Arc::new(caches)
}

/// Offers a block to the cache; true if the cache keeps the block. Only the block's number is used.
fn put(caches: &ThreadCaches, id: u32) -> bool {
    let own = caches.of_this_thread().unwrap();
    caches.put(own, CachedBlock { slot: NonNull::dangling(), id }, SIZE, SIZE) == PutOutcome::Kept
}

fn get(caches: &ThreadCaches) -> Option<u32> {
    caches.get(caches.of_this_thread().unwrap(), SIZE, SIZE).map(|cached| cached.id)
}

/// Drains the caches into `out`, and adds up their deltas.
fn drain(caches: &ThreadCaches, out: &mut Vec<u32>, live: &mut i64) {
    let (ids, deltas) = caches.drain();
    out.extend(ids);
    deltas.iter().for_each(|deltas| *live += deltas.change[0]);
}

/// Frees a block and allocates one. Returns the blocks that the thread then owns, which include a refused block.
fn free_and_allocate(caches: &ThreadCaches, id: u32) -> Vec<u32> {
    let refused = (!put(caches, id)).then_some(id);
    refused.into_iter().chain(get(caches)).collect()
}

#[test]
fn loom_no_block_is_lost_or_handed_out_twice() {
    model(|| {
        let caches = caches();
        let mut live = 2;
        let spawn = |id| {
            let caches = Arc::clone(&caches);
            thread::spawn(move || free_and_allocate(&caches, id))
        };
        let threads = [1, 2].map(spawn);
        let mut drained = Vec::new();
        drain(&caches, &mut drained, &mut live);
        let held: Vec<u32> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        drain(&caches, &mut drained, &mut live);
        assert_eq!(live, held.len() as i64, "what the caches did sums up");
        let mut all: Vec<u32> = held.into_iter().chain(drained).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
    });
}

#[test]
fn loom_caches_that_were_turned_off_and_emptied_stay_empty() {
    model(|| {
        let caches = caches();
        let giver = {
            let caches = Arc::clone(&caches);
            thread::spawn(move || put(&caches, 1))
        };
        let mut drained = Vec::new();
        caches.set_capacity(0);
        drain(&caches, &mut drained, &mut 1);
        let kept = giver.join().unwrap();
        assert_eq!(drained.len(), usize::from(kept));
        assert_eq!(caches.drain().0, [0; 0], "kept after it was emptied");
    });
}
