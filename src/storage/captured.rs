//! The device memory that a captured graph uses and keeps alive.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::allocation::{Backing, Lease, Storage};
use super::block::Block;
use super::caching::{EnteredPool, MemPool};
use super::driver::opencl::OpenCl;
use super::import::storage_of_external_block;
use super::segment::Segment;
use crate::Result;
use crate::device::capture;

/// The memory of a graph: the graph's own pool, and the storages from before the capture that the graph uses.
pub(crate) struct CapturedMemory {
    /// The segments that commands use. This field is dropped before the storages, because a storage may own the host memory that a
    /// segment's buffer uses.
    segments: Vec<Arc<Segment>>,
    /// Storages created before the capture.
    outside: Vec<OutsideStorage>,
    /// Blocks of the pool that existed before the capture.
    blocks_before: HashSet<u32>,
    pool: MemPool,
    pub(crate) uses: StorageUses,
    /// Counts the replays, which change the storages that the graph allocated.
    replays: Replays,
}

/// A replay counter shared between a graph and its storages.
pub(super) type Replays = Arc<AtomicU64>;

/// The uses of storages by the commands of a capture.
#[derive(Default)]
pub(crate) struct StorageUses {
    /// The uses in the order of the commands: one entry for each time that a command asked for a storage's buffer.
    pub(crate) uses: Vec<StorageUse>,
    /// The numbers of storages whose last handle was dropped.
    pub(crate) dropped: HashSet<u64>,
}

/// A use of a storage by a command, for reading or writing.
pub(crate) struct StorageUse {
    /// The number of commands recorded before this use.
    pub(crate) command: usize,
    pub(crate) number: u64,
    pub(crate) bytes: SegmentRange,
}

/// A byte range of a segment. The segment is identified by its address, because a capture keeps its segments alive.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct SegmentRange {
    segment: usize,
    pub(crate) range: Range<usize>,
}

impl SegmentRange {
    pub(crate) fn overlap(&self, other: &SegmentRange) -> bool {
        self.segment == other.segment && self.range.start < other.range.end && other.range.start < self.range.end
    }

    /// Returns a part of this range; `range` counts bytes from this range's start.
    pub(crate) fn part(&self, range: Range<usize>) -> SegmentRange {
        let start = self.range.start;
        SegmentRange { segment: self.segment, range: start + range.start..start + range.end }
    }
}

/// A storage that a command of a capture uses. Its handles may be dropped; the graph still owns the storage's memory.
pub(crate) struct CapturedStorage {
    driver: OpenCl,
    segment: Arc<Segment>,
    offset: usize,
    size: usize,
    requested: usize,
    number: u64,
}

impl CapturedStorage {
    /// Describes a storage; `None` if the storage is not in a device's memory.
    pub(crate) fn from_storage(storage: &Storage) -> Option<CapturedStorage> {
        let Backing::OpenCl(driver, lease) = &storage.0.backing else { return None };
        storage.allocation().export_present().ok()?;
        let segment = lease.block.export_segment();
        let offset = lease.block.location().offset();
        let (size, requested, number) =
            (lease.block.size(), lease.block.requested(), storage.0.sidecar.capture_number());
        Some(CapturedStorage { driver: *driver, segment, offset, size, requested, number })
    }

    /// Returns the storage's number, unique even among storages that use the same memory at different times.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn bytes(&self) -> SegmentRange {
        SegmentRange { segment: Arc::as_ptr(&self.segment).addr(), range: self.offset..self.offset + self.size }
    }

    /// Makes a storage handle on the same memory, so that new commands can be recorded that use it.
    pub(crate) fn new_handle(&self) -> Result<Storage> {
        // SAFETY: the memory belongs to the graph. The user of the handle records commands that replace others on the same bytes,
        // with the same order of reads and writes, and then drops the handle.
        let block = unsafe { Block::new(&self.segment, self.offset, self.size, self.requested)? };
        Ok(storage_of_external_block(self.driver, block, None))
    }
}

/// A storage created before the capture, and the number of its changes that the capture counted.
struct OutsideStorage {
    storage: Storage,
    changes: u64,
}

thread_local! {
    /// The memory of the capture in progress on this thread, if any.
    static CURRENT_CAPTURE: RefCell<Option<CapturedMemory>> = const { RefCell::new(None) };
}

impl CapturedMemory {
    /// Takes this thread's allocations on the pool's device from the pool until the capture ends. Storages that are used meanwhile do
    /// not move any more.
    pub(crate) fn capture(pool: &MemPool) -> MemoryCapture {
        let (outside, segments) = (Vec::new(), Vec::new());
        CURRENT_CAPTURE.set(Some(CapturedMemory {
            outside,
            blocks_before: pool.live_blocks(),
            segments,
            pool: pool.clone(),
            uses: StorageUses::default(),
            replays: Replays::default(),
        }));
        MemoryCapture { _inside: pool.enter() }
    }

    /// Increments the version of every storage that a replay of the graph changes.
    pub(crate) fn count_replay(&self) {
        self.replays.fetch_add(1, Ordering::AcqRel);
        self.outside.iter().filter(|used| used.changes > 0).for_each(|used| used.update_version(|n| n.wrapping_add(1)));
    }

    /// Runs `f` with this thread's allocations outside the graph's pool if a capture is in progress on this thread; otherwise just
    /// runs `f`.
    pub(crate) fn run_outside_pool<R>(f: impl FnOnce() -> R) -> R {
        match CURRENT_CAPTURE.with_borrow(|captured| captured.as_ref().map(|captured| captured.pool.clone())) {
            Some(pool) => pool.run_outside(f),
            None => f(),
        }
    }

    pub(crate) fn pool(&self) -> &MemPool {
        &self.pool
    }

    fn was_allocated_inside(&self, lease: &Lease) -> bool {
        self.pool.owns(&lease.block) && !self.blocks_before.contains(&lease.block.id())
    }
}

/// A capture of memory in progress on this thread. Dropping the value takes back the changes that were counted for storages.
pub(crate) struct MemoryCapture {
    _inside: EnteredPool,
}

impl MemoryCapture {
    pub(crate) fn finish(self) -> CapturedMemory {
        CURRENT_CAPTURE.take().expect("set at the capture's begin")
    }
}

impl Drop for MemoryCapture {
    fn drop(&mut self) {
        if let Some(captured) = CURRENT_CAPTURE.take() {
            captured.outside.iter().for_each(|used| used.update_version(|n| n.wrapping_sub(used.changes)));
        }
    }
}

impl OutsideStorage {
    fn update_version(&self, change: impl Fn(u64) -> u64) {
        let _ = self.storage.0.version.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| Some(change(n)));
    }
}

/// Records that the capture on this thread uses a storage. The storage then no longer moves, and is kept alive unless the capture
/// allocated it.
pub(super) fn note_use(storage: &Storage, lease: &Lease) {
    CURRENT_CAPTURE.with_borrow_mut(|captured| {
        let Some(captured) = captured else { return };
        let segment = lease.block.export_segment();
        let (start, size) = (lease.block.location().offset(), lease.block.size());
        let bytes = SegmentRange { segment: Arc::as_ptr(&segment).addr(), range: start..start + size };
        if !captured.segments.iter().any(|known| Arc::ptr_eq(known, &segment)) {
            captured.segments.push(segment);
        }
        captured.uses.uses.push(StorageUse {
            command: capture::command_count(),
            number: storage.0.sidecar.capture_number(),
            bytes,
        });
        let known = || captured.outside.iter().any(|used| used.storage.ptr_eq(storage));
        if !captured.was_allocated_inside(lease) && !known() {
            captured.outside.push(OutsideStorage { storage: storage.clone(), changes: 0 });
        }
    });
}

/// Records that the last handle on the storage with this number was dropped.
#[cold]
pub(super) fn note_drop(number: u64) {
    let _ = CURRENT_CAPTURE.try_with(|captured| {
        if let Ok(mut captured) = captured.try_borrow_mut()
            && let Some(captured) = &mut *captured
        {
            captured.uses.dropped.insert(number);
        }
    });
}

/// Records that a capture on this thread counted a storage as changed.
pub(super) fn note_change(storage: &Storage) {
    CURRENT_CAPTURE.with_borrow_mut(|captured| {
        let Some(captured) = captured else { return };
        if let Some(used) = captured.outside.iter_mut().find(|used| used.storage.ptr_eq(storage)) {
            used.changes += 1;
        }
        if let Backing::OpenCl(_, lease) = &storage.0.backing
            && captured.was_allocated_inside(lease)
        {
            storage.0.sidecar.set_replay_counter(&captured.replays);
        }
    });
}
