//! What a graph uses of a device's memory, and how it keeps it.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::allocation::{Backing, Lease, Storage};
use super::block::Block;
use super::caching::{MemPool, use_mem_pool};
use super::driver::opencl::OpenCl;
use super::import::lent;
use super::segment::Segment;
use crate::Result;
use crate::device::capture;

/// The memory of a graph: its pool, and what it uses of what was there before.
pub(crate) struct Captured {
    /// Buffers that commands name. Dropped before the storages: one of them may own the host memory that a buffer is over.
    segments: Vec<Arc<Segment>>,
    outside: Vec<Used>,
    /// Blocks of the pool that were there before.
    before: HashSet<u32>,
    pool: MemPool,
    uses: Uses,
    /// How often all that it allocated was written again.
    replays: Replays,
}

/// A count that the storages of a graph share with it.
pub(super) type Replays = Arc<AtomicU64>;

/// Which commands of a capture use which storages.
#[derive(Default)]
pub(crate) struct Uses {
    /// In the order of the commands. What one command uses is there as many times as its place was asked for.
    pub(crate) uses: Vec<Use>,
    /// The numbers of storages that nobody has a handle on any more.
    pub(crate) dropped: HashSet<u64>,
}

/// That a command reads or writes a storage.
pub(crate) struct Use {
    /// How many commands were recorded before it.
    pub(crate) command: usize,
    /// The [number](CapturedStorage::number) of the storage.
    pub(crate) number: u64,
    pub(crate) bytes: Bytes,
}

/// Bytes of a segment, by its address: a capture keeps its segments.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Bytes {
    segment: usize,
    pub(crate) range: Range<usize>,
}

impl Bytes {
    pub(crate) fn overlap(&self, other: &Bytes) -> bool {
        self.segment == other.segment && self.range.start < other.range.end && other.range.start < self.range.end
    }

    /// Those from `range.start` to `range.end` of them.
    pub(crate) fn part(&self, range: Range<usize>) -> Bytes {
        let start = self.range.start;
        Bytes { segment: self.segment, range: start + range.start..start + range.end }
    }
}

/// A storage that a command of a capture uses, which may be gone: the memory stays the graph's.
pub(crate) struct CapturedStorage {
    driver: OpenCl,
    segment: Arc<Segment>,
    offset: usize,
    size: usize,
    requested: usize,
    number: u64,
}

impl CapturedStorage {
    /// None for what is not in a device's memory.
    pub(crate) fn of(storage: &Storage) -> Option<CapturedStorage> {
        let Backing::OpenCl(driver, lease) = &storage.0.backing else { return None };
        let segment = lease.block.export_segment();
        let offset = lease.block.place().offset();
        let (size, requested, number) = (lease.block.size(), lease.block.requested(), storage.0.attachment.number());
        Some(CapturedStorage { driver: *driver, segment, offset, size, requested, number })
    }

    /// What tells it from other storages, also from those that have had, or will have, the same memory.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn bytes(&self) -> Bytes {
        Bytes { segment: Arc::as_ptr(&self.segment).addr(), range: self.offset..self.offset + self.size }
    }

    /// A handle on the memory, to record commands with.
    pub(crate) fn again(&self) -> Result<Storage> {
        // SAFETY: the memory belongs to the graph. Who has the handle records commands that take the place of others on the same
        // bytes, in an order in which they read and write the same, and drops it.
        let block = unsafe { Block::new(&self.segment, self.offset, self.size, self.requested)? };
        Ok(lent(self.driver, block, None))
    }
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
        CAPTURED.set(Some(Captured {
            outside,
            before: pool.live(),
            segments,
            pool: pool.clone(),
            uses: Uses::default(),
            replays: Replays::default(),
        }));
        let _end = End;
        let result = use_mem_pool(&pool, f);
        let captured = CAPTURED.take().expect("set above");
        if result.is_err() {
            captured.outside.iter().for_each(|used| used.count(|n| n.wrapping_sub(used.changes)));
        }
        result.map(|result| (captured, result))
    }

    /// Which commands use which storages.
    pub(crate) fn take_uses(&mut self) -> Uses {
        std::mem::take(&mut self.uses)
    }

    /// Counts what every replay changes as changed once more.
    pub(crate) fn replayed(&self) {
        self.replays.fetch_add(1, Ordering::AcqRel);
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

    fn allocated(&self, lease: &Lease) -> bool {
        self.pool.owns(&lease.block) && !self.before.contains(&lease.block.id())
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
        let (start, size) = (lease.block.place().offset(), lease.block.size());
        let bytes = Bytes { segment: Arc::as_ptr(&segment).addr(), range: start..start + size };
        if !captured.segments.iter().any(|known| Arc::ptr_eq(known, &segment)) {
            captured.segments.push(segment);
        }
        captured.uses.uses.push(Use { command: capture::commands(), number: storage.0.attachment.number(), bytes });
        let known = || captured.outside.iter().any(|used| used.storage.ptr_eq(storage));
        if !captured.allocated(lease) && !known() {
            captured.outside.push(Used { storage: storage.clone(), changes: 0 });
        }
    });
}

/// Notes that the last handle on a storage that captures know by this number was dropped.
#[cold]
pub(super) fn dropped(number: u64) {
    let _ = CAPTURED.try_with(|captured| {
        if let Ok(mut captured) = captured.try_borrow_mut()
            && let Some(captured) = &mut *captured
        {
            captured.uses.dropped.insert(number);
        }
    });
}

/// Notes that a capture of this thread counted a storage as changed.
pub(super) fn changed(storage: &Storage) {
    CAPTURED.with_borrow_mut(|captured| {
        let Some(captured) = captured else { return };
        if let Some(used) = captured.outside.iter_mut().find(|used| used.storage.ptr_eq(storage)) {
            used.changes += 1;
        }
        if let Backing::OpenCl(_, lease) = &storage.0.backing
            && captured.allocated(lease)
        {
            storage.0.attachment.rewritten_by(&captured.replays);
        }
    });
}
