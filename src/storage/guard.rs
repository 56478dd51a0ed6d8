//! Debugging: guard bytes around every block, and poison in freed ones.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::allocator::Allocator;
use super::allocator::forward_to_inner;
use super::block::{Block, owner_number};
use super::config::JUNK;
use super::driver::{Driver, Memory, MemoryKind};
use crate::device::StreamId;
use crate::device::lock;
use crate::{Error, Result};

/// What guards are made of.
const GUARD: u8 = 0xFD;
/// A block's guard begins at the next multiple of this: the crate's own stores may fill a block up to there.
const UNIT: usize = 16;
/// Bytes written at a time.
const PIECE: usize = 1 << 20;

/// Wraps another allocator to find writes beyond a block's bounds: every block has guard bytes before and behind, which
/// are looked at when it is given back, and freed bytes are poisoned, so that using them shows.
///
/// A block that was written around is reported as an error to `tracing`, and counted. Each call waits for the device, and
/// blocks no longer move: for debugging only. The configuration's `guard_bytes` puts one in front of any backend.
///
/// Statistics are those of the allocator inside: guards count as requested.
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
/// let place = block.place();
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

#[derive(Default)]
struct State {
    /// Every stream that has used a block.
    streams: BTreeSet<StreamId>,
    /// What the device reported while a block was given back, for the next call that can say so.
    unsaid: Option<Error>,
}

impl GuardAllocator {
    /// An allocator around this one, whose memory is this driver's.
    pub fn new(inner: Arc<dyn Allocator>, driver: Arc<dyn Driver>) -> GuardAllocator {
        let (number, violations, state) = (owner_number(), AtomicU64::new(0), Mutex::default());
        GuardAllocator { inner, driver, number, violations, state }
    }

    /// Bytes before a block: as many as keep it aligned.
    fn before(&self) -> usize {
        self.driver.alignment()
    }

    /// Where the guards are in the memory that the whole of `block` lies in.
    fn guards(&self, block: &Block, whole: &Block) -> [Range<usize>; 2] {
        let (start, begin) = (block.offset(), whole.offset());
        [begin..start, start + block.size()..begin + whole.size()]
    }

    /// Only for what is no user's: guards, and blocks that are given back.
    fn fill(&self, memory: &Memory, range: Range<usize>, byte: u8) -> Result<()> {
        let bytes = vec![byte; range.len().min(PIECE)];
        let mut pieces = range.clone().step_by(PIECE);
        // SAFETY: the bytes are of a block of the allocator inside that this one has, and no user's.
        pieces.try_for_each(|at| unsafe { self.driver.write(&bytes[..PIECE.min(range.end - at)], (memory, at)) })
    }

    /// Waits for all work that may use blocks, looks at a block's guards and poisons it.
    fn inspect(&self, block: &Block, whole: &Block) -> Result<()> {
        let streams: Vec<StreamId> = lock(&self.state).streams.iter().copied().collect();
        for stream in streams {
            self.driver.wait(&self.driver.record(stream)?)?;
        }
        let memory = block.segment().memory();
        for guard in self.guards(block, whole) {
            let mut bytes = vec![0; guard.len()];
            // SAFETY: the guards of a block that was given back: nobody else uses them.
            let mut read = || unsafe { self.driver.read((memory, guard.start), &mut bytes) };
            if let Err(error) = read() {
                // Reading reports what kernels of this thread found wrong, which is not about the guard, once.
                lock(&self.state).unsaid.get_or_insert(error);
                read()?;
            }
            let changed = |byte: &u8| *byte != GUARD;
            let Some(first) = bytes.iter().position(changed) else { continue };
            self.violations.fetch_add(1, Relaxed);
            let (count, first) = (bytes.iter().filter(|byte| changed(byte)).count(), guard.start + first);
            let from_start = first as i64 - block.offset() as i64;
            tracing::error!(
                ?block,
                requested = block.requested(),
                "{count} guard bytes were written over, the first {from_start} bytes from the start of a block"
            );
        }
        self.fill(memory, block.offset()..block.offset() + block.size(), JUNK)
    }
}

impl fmt::Debug for GuardAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, guarded", self.inner)
    }
}

impl Allocator for GuardAllocator {
    forward_to_inner!();

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        if let Some(error) = lock(&self.state).unsaid.take() {
            return Err(error);
        }
        let before = self.before();
        let total = bytes.checked_add(2 * before).and_then(|total| total.checked_next_multiple_of(before));
        let Some(total) = total else { return self.inner.allocate(bytes, stream) }; // which says it is too much
        let whole = self.inner.allocate(total, stream).map_err(|error| match error {
            Error::OutOfMemory { device, detail, .. } => Error::OutOfMemory { device, requested: bytes, detail },
            other => other,
        })?;
        // The simulated device writes granules only.
        let unit = if matches!(whole.place().segment().memory().0, MemoryKind::Sim(_)) { before } else { UNIT };
        let mut block = whole.into_part(before, bytes.next_multiple_of(unit), bytes)?;
        block.owner = self.number;
        lock(&self.state).streams.insert(stream);
        let memory = block.segment().memory();
        let guards = block.whole().map(|whole| self.guards(&block, whole)).into_iter().flatten();
        if let Err(error) = guards.into_iter().try_for_each(|guard| self.fill(memory, guard, GUARD)) {
            block.into_whole().into_iter().for_each(|whole| self.inner.deallocate(whole));
            return Err(error);
        }
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        if block.is_foreign(self, self.number) {
            return;
        }
        if let Some(whole) = block.whole()
            && let Err(error) = self.inspect(&block, whole)
        {
            tracing::error!(?block, %error, "the guard bytes of a block could not be looked at");
            lock(&self.state).unsaid.get_or_insert(error);
        }
        if let Some(whole) = block.into_whole() {
            self.inner.deallocate(whole);
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        lock(&self.state).streams.insert(stream);
        if let Some(whole) = block.whole() {
            self.inner.record_stream(whole, stream);
        }
    }

    fn guard_violations(&self) -> u64 {
        self.violations.load(Relaxed) + self.inner.guard_violations()
    }
}

#[cfg(test)]
mod tests;
