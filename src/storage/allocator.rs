//! The allocator trait.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::block::{ALIGNMENT, Block};
use super::driver::driver;
use super::history::{HistoryOptions, Snapshot};
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// Follows the chain of wrappers from `allocator` inwards, and returns the first allocator of type `T`.
pub(super) fn find_allocator<T: Allocator>(mut allocator: &dyn Allocator) -> Option<&T> {
    loop {
        match (allocator as &dyn Any).downcast_ref() {
            Some(found) => return Some(found),
            None => allocator = &**allocator.inner()?,
        }
    }
}

pub(super) fn check_fraction(fraction: f64) -> Result<f64> {
    let invalid = || Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1"));
    if (0.0..=1.0).contains(&fraction) { Ok(fraction) } else { Err(invalid()) }
}

/// Allocates blocks of one device's memory.
///
/// The crate provides [`CachingAllocator`](super::CachingAllocator), [`PoolAllocator`](super::PoolAllocator) and
/// [`DirectAllocator`](super::DirectAllocator). A user's own allocator is installed with [`set_allocator`](super::set_allocator). A wrapper that
/// counts, limits or logs needs no unsafe code: the default methods call the allocator that [`inner`](Allocator::inner) returns.
pub trait Allocator: Any + Send + Sync + fmt::Debug {
    /// Returns the device whose memory this allocator hands out.
    fn device(&self) -> Device;

    /// Returns the alignment of blocks in bytes: the driver's alignment, a power of two of at least 512.
    fn alignment(&self) -> usize {
        self.inner().map_or(ALIGNMENT, |inner| inner.alignment())
    }

    /// Returns the wrapped allocator, or `None` if this allocator wraps none.
    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        None
    }

    /// Allocates at least `bytes` bytes (not 0), rounded up to a multiple of 16, with unspecified contents, for work on
    /// `stream`. Tensors reject a block whose offset is not a multiple of 512 bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if memory does not suffice even after all unused memory was released; errors that the driver reports.
    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block>;

    /// Frees a block. Queued work on the block's stream may still use the block, because work of the next owner on that stream runs later.
    fn deallocate(&self, block: Block);

    /// Records that work on `stream` also uses the block. After the block is freed, it is not reused before that work
    /// is done (`torch.Tensor.record_stream`).
    fn record_stream(&self, block: &Block, stream: StreamId);

    /// Returns the memory statistics.
    fn stats(&self) -> DeviceStats {
        self.inner().map_or_else(DeviceStats::default, |inner| inner.stats())
    }

    /// Sets the peak of every statistic to the current value.
    fn reset_peak_stats(&self) {
        self.inner().into_iter().for_each(|inner| inner.reset_peak_stats());
    }

    /// Raises the peak of every statistic to at least the peak in `to`. [`peak`](super::peak) undoes a reset with it.
    fn raise_peaks(&self, to: &DeviceStats) {
        self.inner().into_iter().for_each(|inner| inner.raise_peaks(to));
    }

    /// Resets the accumulated sums and event counts to zero.
    fn reset_accumulated_stats(&self) {
        self.inner().into_iter().for_each(|inner| inner.reset_accumulated_stats());
    }

    /// Returns all cached, unused memory to the driver.
    fn empty_cache(&self) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.empty_cache())
    }

    /// Limits the reserved bytes from now on. Memory that is already reserved stays reserved.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the allocator does not support a limit.
    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        let cannot = || Err(Error::invalid("set_memory_limit", format!("{self:?} does not support a memory limit")));
        self.inner().map_or_else(cannot, |inner| inner.set_memory_limit(bytes))
    }

    /// Limits the reserved bytes to a fraction, 0 to 1, of the device's memory, within [`set_memory_limit`]'s bound.
    /// Memory that is already reserved stays reserved.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the fraction is outside 0 to 1, or the allocator does not support a limit.
    ///
    /// [`set_memory_limit`]: Allocator::set_memory_limit
    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        let limit = || {
            let fraction = check_fraction(fraction)?;
            self.set_memory_limit((driver(self.device())?.capacity() as f64 * fraction) as u64)
        };
        self.inner().map_or_else(limit, |inner| inner.set_memory_fraction(fraction))
    }

    /// Releases unused memory while at least `keep` bytes stay reserved. Returns the number of bytes released. Never
    /// waits: memory that streams may still be using is kept.
    fn trim(&self, keep: u64) -> Result<u64> {
        self.inner().map_or(Ok(0), |inner| inner.trim(keep))
    }

    /// Moves live blocks together, copying at most `budget` bytes, and releases the memory that becomes free. Returns the number of
    /// bytes released.
    fn compact(&self, budget: u64) -> Result<u64> {
        self.inner().map_or(Ok(0), |inner| inner.compact(budget))
    }

    /// Returns the current segments and blocks, and the recorded history (`torch.cuda.memory._snapshot`). The snapshot
    /// is empty if the allocator does not support snapshots.
    fn snapshot(&self) -> Snapshot {
        self.inner().map_or_else(Snapshot::default, |inner| inner.snapshot())
    }

    /// Starts or stops recording the memory history for [`snapshot`](Allocator::snapshot) (`torch.cuda.memory._record_memory_history`).
    ///
    /// # Errors
    /// [`Error::Invalid`] if the host has no memory for the requested number of entries, or the allocator does not support recording.
    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        let cannot =
            || Err(Error::invalid("record_memory_history", format!("{self:?} does not record memory history")));
        self.inner().map_or_else(cannot, |inner| inner.record_memory_history(options))
    }
}

#[cfg(test)]
mod tests;
