//! What a graph uses of a device's memory, and how it keeps it.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::allocation::{Lease, Storage};
use super::caching::{MemPool, use_mem_pool};
use super::segment::Segment;
use crate::Result;

/// The memory of a graph: its pool, and what it uses of what was there before.
pub(crate) struct Captured {
    /// Buffers that commands name. Dropped before the storages: one of them may own the host memory that a buffer is over.
    segments: Vec<Arc<Segment>>,
    outside: Vec<Used>,
    /// Blocks of the pool that were there before.
    before: HashSet<u32>,
    pool: MemPool,
}

/// A storage that was there before the capture, and how often a capture counted it as changed.
struct Used {
    storage: Storage,
    changes: u64,
}

thread_local! {
    static CAPTURED: RefCell<Option<Captured>> = const { RefCell::new(None) };
}

impl Captured {
    /// Runs `f`: what this thread allocates on the pool's device is of the pool, and what it uses stays where it is.
    ///
    /// # Errors
    /// Those of `f`, after which nothing counts as changed.
    pub(crate) fn during<R>(pool: MemPool, f: impl FnOnce() -> Result<R>) -> Result<(Captured, R)> {
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                drop(CAPTURED.take());
            }
        }
        let (outside, segments) = (Vec::new(), Vec::new());
        CAPTURED.set(Some(Captured { outside, before: pool.live(), segments, pool: pool.clone() }));
        let _end = End;
        let result = use_mem_pool(&pool, f);
        let captured = CAPTURED.take().expect("set above");
        if result.is_err() {
            captured.outside.iter().for_each(|used| used.count(|n| n.wrapping_sub(used.changes)));
        }
        result.map(|result| (captured, result))
    }

    /// Counts what every replay changes as changed once more.
    pub(crate) fn replayed(&self) {
        self.outside.iter().filter(|used| used.changes > 0).for_each(|used| used.count(|n| n.wrapping_add(1)));
    }

    /// Runs `f`: in a capture, what this thread allocates is not of the graph's pool.
    pub(crate) fn outside<R>(f: impl FnOnce() -> R) -> R {
        match CAPTURED.with_borrow(|captured| captured.as_ref().map(|captured| captured.pool.clone())) {
            Some(pool) => pool.leave(f),
            None => f(),
        }
    }

    /// Where what was allocated inside is.
    pub(crate) fn pool(&self) -> &MemPool {
        &self.pool
    }
}

impl Used {
    fn count(&self, change: impl Fn(u64) -> u64) {
        let _ = self.storage.0.version.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| Some(change(n)));
    }
}

/// Notes that a capture of this thread uses a storage: it will not move, and is kept unless the capture allocated it.
pub(super) fn used(storage: &Storage, lease: &Lease) {
    CAPTURED.with_borrow_mut(|captured| {
        let Some(captured) = captured else { return };
        let segment = lease.block.export_segment();
        if !captured.segments.iter().any(|known| Arc::ptr_eq(known, &segment)) {
            captured.segments.push(segment);
        }
        let known = || captured.outside.iter().any(|used| used.storage.ptr_eq(storage));
        let is_inside = captured.pool.owns(&lease.block) && !captured.before.contains(&lease.block.id());
        if !is_inside && !known() {
            captured.outside.push(Used { storage: storage.clone(), changes: 0 });
        }
    });
}

/// Notes that a capture of this thread counted a storage as changed.
pub(super) fn changed(storage: &Storage) {
    CAPTURED.with_borrow_mut(|captured| {
        let outside = captured.as_mut().and_then(|c| c.outside.iter_mut().find(|used| used.storage.ptr_eq(storage)));
        if let Some(used) = outside {
            used.changes += 1;
        }
    });
}
