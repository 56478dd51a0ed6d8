//! The allocator trait.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::block::{ALIGNMENT, Block};
use super::driver::driver;
use super::history::{HistoryOptions, Snapshot};
use super::hooks::{FreeMemory, OomObserver, OutOfMemoryEvent, Registration};
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// Calls the inner allocator, or evaluates `$otherwise` if there is none. Every default method of [`Allocator`] uses this.
macro_rules! ask_inner {
    ($self:ident.$method:ident($($argument:ident),*), $otherwise:expr) => {
        match $self.inner() {
            Some(inner) => inner.$method($($argument),*),
            None => $otherwise,
        }
    };
}

/// Implements the methods that a wrapping allocator only forwards to its `inner` field.
macro_rules! forward_to_inner {
    () => {
        fn device(&self) -> crate::Device {
            self.inner.device()
        }
        fn inner(&self) -> Option<&std::sync::Arc<dyn crate::storage::Allocator>> {
            Some(&self.inner)
        }
        fn stats(&self) -> crate::storage::DeviceStats {
            self.inner.stats()
        }
        fn reset_peak_stats(&self) {
            self.inner.reset_peak_stats();
        }
        fn reset_accumulated_stats(&self) {
            self.inner.reset_accumulated_stats();
        }
        fn empty_cache(&self) -> crate::Result<()> {
            self.inner.empty_cache()
        }
    };
}
pub(super) use forward_to_inner;

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
    /// The device whose memory this allocator hands out.
    fn device(&self) -> Device;

    /// The alignment of blocks in bytes, which is the driver's: a power of two, at least 512.
    fn alignment(&self) -> usize {
        ask_inner!(self.alignment(), ALIGNMENT)
    }

    /// The wrapped allocator, if there is one.
    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        None
    }

    /// Allocates at least `bytes > 0` bytes, rounded up to 16, with unspecified contents, for work on `stream`.
    /// Tensors reject a block whose offset is not a multiple of 512 bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no room after releasing all unused memory; errors that the driver reports.
    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block>;

    /// Frees a block. Work on its stream may still use the block, because its next owner on that stream runs later.
    fn deallocate(&self, block: Block);

    /// Records that work on `stream` also uses the block. Once freed, the block is not reused before that work is
    /// done (`torch.Tensor.record_stream`).
    fn record_stream(&self, block: &Block, stream: StreamId);

    /// Returns the memory statistics.
    fn stats(&self) -> DeviceStats;
    /// Sets every peak to the current value.
    fn reset_peak_stats(&self);
    /// Resets the accumulated sums and event counts to zero.
    fn reset_accumulated_stats(&self);

    /// Releases all cached, unused memory to the driver.
    fn empty_cache(&self) -> Result<()>;

    /// Limits the reserved bytes from now on. Memory that is already reserved stays.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the allocator does not support a limit.
    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        let cannot = || Error::invalid("set_memory_limit", format!("{self:?} does not support a memory limit"));
        ask_inner!(self.set_memory_limit(bytes), Err(cannot()))
    }

    /// Limits the reserved bytes to a fraction, 0 to 1, of the device's memory, within [`set_memory_limit`]'s bound.
    /// Memory that is already reserved stays.
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
        ask_inner!(self.set_memory_fraction(fraction), limit())
    }

    /// Registers `free`, which is called when there is no room for an allocation. `free` may drop memory it can
    /// spare, and returns whether it did (PyTorch's `FreeMemoryCallback`). The allocator then searches again. See
    /// [`CachingAllocator::add_free_memory_callback`](super::CachingAllocator::add_free_memory_callback).
    ///
    /// # Errors
    /// [`Error::Invalid`] if neither the allocator nor an inner one supports callbacks.
    fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        let unsupported =
            || Error::invalid("add_free_memory_callback", format!("{self:?} has no free-memory callbacks"));
        ask_inner!(self.add_free_memory_callback(free), Err(unsupported()))
    }

    /// Registers `observe`, which is called when an allocation fails for lack of memory, before the error is returned (PyTorch's
    /// `attachOutOfMemoryObserver`). See [`CachingAllocator::add_oom_observer`](super::CachingAllocator::add_oom_observer).
    ///
    /// # Errors
    /// [`Error::Invalid`] if neither the allocator nor an inner one supports observers.
    fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        let unsupported = || Error::invalid("add_oom_observer", format!("{self:?} has no out-of-memory observers"));
        ask_inner!(self.add_oom_observer(observe), Err(unsupported()))
    }

    /// Releases unused memory and calls the free-memory callbacks, because `bytes` bytes of the device are needed for
    /// images, which this allocator does not hand out.
    fn make_room(&self, bytes: usize) -> Result<()> {
        ask_inner!(self.make_room(bytes), self.empty_cache())
    }

    /// Notifies [observers](Allocator::add_oom_observer) that another allocator of the device ran out of memory.
    fn tell_oom_observers(&self, event: &OutOfMemoryEvent) {
        ask_inner!(self.tell_oom_observers(event), ())
    }

    /// The number of blocks whose guard bytes were overwritten, for a debugging allocator that checks them
    /// ([`GuardAllocator`](super::GuardAllocator)).
    fn guard_violations(&self) -> u64 {
        ask_inner!(self.guard_violations(), 0)
    }

    /// Releases unused memory while at least `keep` bytes stay reserved. Returns the bytes released. Never waits:
    /// memory that streams may still be using stays.
    fn trim(&self, keep: u64) -> Result<u64> {
        ask_inner!(self.trim(keep), Ok(0))
    }

    /// Moves live blocks together, copying at most `budget` bytes, and releases the memory this frees. Returns the bytes released.
    fn compact(&self, budget: u64) -> Result<u64> {
        ask_inner!(self.compact(budget), Ok(0))
    }

    /// Returns the current segments and blocks, and the recorded history (`torch.cuda.memory._snapshot`). Empty if
    /// the allocator does not support snapshots.
    fn snapshot(&self) -> Snapshot {
        ask_inner!(self.snapshot(), Snapshot::default())
    }

    /// Starts or stops recording the memory history for [`snapshot`](Allocator::snapshot) (`torch.cuda.memory._record_memory_history`).
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no memory for that many entries, or the allocator does not support recording.
    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        let cannot = || Error::invalid("record_memory_history", format!("{self:?} does not record memory history"));
        ask_inner!(self.record_memory_history(options), Err(cannot()))
    }
}

#[cfg(test)]
mod tests;
