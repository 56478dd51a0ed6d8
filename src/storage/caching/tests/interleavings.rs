//! Every interleaving of threads at the caches, explored by loom: `scripts/loom` runs these. Loom's threads all use one
//! cache, which has room for one block of a size.

use std::ptr::NonNull;

use ::loom::sync::Arc;
use ::loom::{model, thread};

use super::super::cache::{Cached, Put, ThreadCaches};

const SIZE: usize = 512;

/// Caches seen by two threads and by who empties them. That of these threads is there already.
fn caches() -> Arc<ThreadCaches> {
    let caches = ThreadCaches::new(1 << 20, SIZE);
    caches.make_own();
    assert!(put(&caches, 0));
    assert_eq!(caches.drain().0, [0]);
    Arc::new(caches)
}

/// Whether the cache keeps a block, of which nobody looks at more than its number.
fn put(caches: &ThreadCaches, id: u32) -> bool {
    let own = caches.own().unwrap();
    caches.put(own, Cached { slot: NonNull::dangling(), id }, SIZE, SIZE) == Put::Kept
}

fn get(caches: &ThreadCaches) -> Option<u32> {
    caches.get(caches.own().unwrap(), SIZE, SIZE).map(|cached| cached.id)
}

/// Empties the caches into `out`, and counts what they did.
fn drain(caches: &ThreadCaches, out: &mut Vec<u32>, live: &mut i64) {
    let (ids, deltas) = caches.drain();
    out.extend(ids);
    deltas.iter().for_each(|deltas| *live += deltas.change[0]);
}

/// A thread gives its block back, and asks for one. Says what it holds then: a block that was refused is still its own.
fn give_and_take(caches: &ThreadCaches, id: u32) -> Vec<u32> {
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
            thread::spawn(move || give_and_take(&caches, id))
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
        caches.set_most(0);
        drain(&caches, &mut drained, &mut 1);
        let kept = giver.join().unwrap();
        assert_eq!(drained.len(), usize::from(kept));
        assert_eq!(caches.drain().0, [0; 0], "kept after it was emptied");
    });
}
