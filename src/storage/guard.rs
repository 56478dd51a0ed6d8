//! An allocator for debugging, which puts guard bytes around every block and poisons freed blocks.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::allocator::{Allocator, find_allocator};
use super::block::{Block, next_owner_number};
use super::config::JUNK_BYTE;
use super::driver::{Driver, Memory, MemoryKind};
use crate::device::StreamId;
use crate::device::lock;
use crate::{Device, Error, Result};

const GUARD_BYTE: u8 = 0xFD;
/// The guard after a block begins at a multiple of this many bytes, because the crate's own stores may fill a block up to there.
const GUARD_START_ALIGNMENT: usize = 16;
/// Number of guard or poison bytes that one driver call writes.
const WRITE_CHUNK_BYTES: usize = 1 << 20;

/// Wraps another allocator to detect writes beyond a block's bounds. Every block has guard bytes before and after it,
/// which are checked when the block is freed. Freed bytes are poisoned, so that reads after a free are visible.
///
/// Overwritten guards are reported as an error to `tracing`, and counted. Each call waits for the device, and blocks
/// cannot move, so this is for debugging only. The configuration key `guard_bytes` wraps any backend in this allocator.
///
/// The statistics are the inner allocator's, which count guards as requested bytes.
///
/// ```
/// use std::sync::Arc;
/// use claystone::Device;
/// use claystone::device::StreamId;
/// use claystone::storage::{self, Allocator, Config, DirectAllocator, GuardAllocator};
/// let driver = storage::driver(Device::Cpu)?;
/// let inner = Arc::new(DirectAllocator::new(driver.clone(), Config::default())?);
/// let guarded = GuardAllocator::new(inner, driver.clone());
/// let block = guarded.allocate(100, StreamId::DEFAULT)?;
/// let place = block.location();
/// // SAFETY: nobody else uses the block or its guards.
/// unsafe { driver.write(&[0; 120], (place.segment().memory(), place.offset()))? }; // 8 more than it has when rounded
/// drop(place);
/// guarded.deallocate(block);
/// assert_eq!(guarded.guard_violations(), 1);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct GuardAllocator {
    inner: Arc<dyn Allocator>,
    driver: Arc<dyn Driver>,
    number: u32,
    violations: AtomicU64,
    state: Mutex<State>,
}

/// The streams in use and a deferred error, guarded by the allocator's lock.
#[derive(Default)]
struct State {
    /// Every stream that has used a block.
    streams: BTreeSet<StreamId>,
    /// A device error that occurred while a block was freed. The next allocation returns it.
    deferred_error: Option<Error>,
}

impl GuardAllocator {
    /// Wraps `inner`, whose memory must come from `driver`.
    pub fn new(inner: Arc<dyn Allocator>, driver: Arc<dyn Driver>) -> GuardAllocator {
        let (number, violations, state) = (next_owner_number(), AtomicU64::new(0), Mutex::default());
        GuardAllocator { inner, driver, number, violations, state }
    }

    /// Returns the number of blocks whose guard bytes were found overwritten, by this allocator and by guard allocators that it wraps.
    pub fn guard_violations(&self) -> u64 {
        self.violations.load(Relaxed) + guard_violations(&*self.inner)
    }

    /// Returns the byte ranges of the guards before and after `block`, in the memory of `whole`, which contains `block`.
    fn guard_ranges(&self, block: &Block, whole: &Block) -> [Range<usize>; 2] {
        let (start, begin) = (block.offset(), whole.offset());
        [begin..start, start + block.size()..begin + whole.size()]
    }

    /// Fills a range, which must be a guard or a freed block.
    fn fill(&self, memory: &Memory, range: Range<usize>, byte: u8) -> Result<()> {
        let bytes = vec![byte; range.len().min(WRITE_CHUNK_BYTES)];
        let mut pieces = range.clone().step_by(WRITE_CHUNK_BYTES);
        // SAFETY: the range belongs to a block that this allocator got from the inner one, and no user accesses the range.
        pieces.try_for_each(|at| unsafe {
            self.driver.write(&bytes[..WRITE_CHUNK_BYTES.min(range.end - at)], (memory, at))
        })
    }

    /// Waits for all work that may use blocks, checks a block's guards, and poisons the block.
    fn check_and_poison(&self, block: &Block, whole: &Block) -> Result<()> {
        let streams: Vec<StreamId> = lock(&self.state).streams.iter().copied().collect();
        for stream in streams {
            self.driver.wait(&self.driver.record(stream)?)?;
        }
        let memory = block.segment().memory();
        for guard in self.guard_ranges(block, whole) {
            let mut bytes = vec![0; guard.len()];
            // SAFETY: the guards belong to a freed block, so no other code uses them.
            let mut read = || unsafe { self.driver.read((memory, guard.start), &mut bytes) };
            if let Err(error) = read() {
                // A read also reports earlier kernel faults of this thread, once. These faults have nothing to do with the guard.
                lock(&self.state).deferred_error.get_or_insert(error);
                read()?;
            }
            let changed = |byte: &u8| *byte != GUARD_BYTE;
            let Some(first) = bytes.iter().position(changed) else { continue };
            self.violations.fetch_add(1, Relaxed);
            let (count, first) = (bytes.iter().filter(|byte| changed(byte)).count(), guard.start + first);
            let from_start = first as i64 - block.offset() as i64;
            tracing::error!(
                ?block,
                requested = block.requested(),
                "{count} guard bytes were overwritten, the first {from_start} bytes from the start of a block"
            );
        }
        self.fill(memory, block.offset()..block.offset() + block.size(), JUNK_BYTE)
    }
}

impl fmt::Debug for GuardAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, guarded", self.inner)
    }
}

/// Returns the number of overwritten guards that the allocator and the allocators it wraps have found.
pub(super) fn guard_violations(allocator: &dyn Allocator) -> u64 {
    find_allocator::<GuardAllocator>(allocator).map_or(0, GuardAllocator::guard_violations)
}

impl Allocator for GuardAllocator {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        if let Some(error) = lock(&self.state).deferred_error.take() {
            return Err(error);
        }
        let before = self.driver.alignment(); // one alignment unit of guard bytes keeps the block aligned
        let total = bytes.checked_add(2 * before).and_then(|total| total.checked_next_multiple_of(before));
        let Some(total) = total else { return self.inner.allocate(bytes, stream) }; // the inner allocator rejects the size
        let whole = self.inner.allocate(total, stream).map_err(|error| match error {
            Error::OutOfMemory { device, detail, .. } => Error::OutOfMemory { device, requested: bytes, detail },
            other => other,
        })?;
        whole.export(); // before its memory is looked at, because a block may move after its first use
        // The simulated device writes only whole granules.
        let unit = if matches!(whole.location().segment().memory().0, MemoryKind::Sim(_)) {
            before
        } else {
            GUARD_START_ALIGNMENT
        };
        let mut block = whole.into_part(before, bytes.next_multiple_of(unit), bytes)?;
        block.owner = self.number;
        lock(&self.state).streams.insert(stream);
        let memory = block.segment().memory();
        let guards = block.parent_block().map(|whole| self.guard_ranges(&block, whole)).into_iter().flatten();
        if let Err(error) = guards.into_iter().try_for_each(|guard| self.fill(memory, guard, GUARD_BYTE)) {
            block.into_parent_block().into_iter().for_each(|whole| self.inner.deallocate(whole));
            return Err(error);
        }
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        if let Some(whole) = block.parent_block()
            && let Err(error) = self.check_and_poison(&block, whole)
        {
            tracing::error!(?block, %error, "the guard bytes of a block could not be read");
            lock(&self.state).deferred_error.get_or_insert(error);
        }
        if let Some(whole) = block.into_parent_block() {
            self.inner.deallocate(whole);
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        lock(&self.state).streams.insert(stream);
        if let Some(whole) = block.parent_block() {
            self.inner.record_stream(whole, stream);
        }
    }
}

#[cfg(test)]
mod tests;
