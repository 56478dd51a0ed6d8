//! The trait of allocators.

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

/// What the allocator inside says, or else what one that wraps none does: every default of [`Allocator`] is this.
macro_rules! ask_inner {
    ($self:ident.$method:ident($($argument:ident),*), $otherwise:expr) => {
        match $self.inner() {
            Some(inner) => inner.$method($($argument),*),
            None => $otherwise,
        }
    };
}

/// The parts of an allocator that only hands on what another one has.
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

/// A part of a device's memory, if it is one.
pub(super) fn valid_fraction(fraction: f64) -> Result<f64> {
    let invalid = || Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1"));
    if (0.0..=1.0).contains(&fraction) { Ok(fraction) } else { Err(invalid()) }
}

/// Hands out blocks of one device's memory.
///
/// Three come with the crate: [`CachingAllocator`](super::CachingAllocator), [`PoolAllocator`](super::PoolAllocator) and
/// [`DirectAllocator`](super::DirectAllocator). One of a user's own is put in place with
/// [`set_allocator`](super::set_allocator); one that wraps another, to count or limit or log, needs no unsafe code, and says which
/// one with [`inner`](Allocator::inner): whatever it does not define itself is asked of that.
pub trait Allocator: Any + Send + Sync + fmt::Debug {
    /// The device whose memory it hands out.
    fn device(&self) -> Device;

    /// Blocks begin at multiples of this many bytes, a power of two, at least 512: its driver's.
    fn alignment(&self) -> usize {
        ask_inner!(self.alignment(), ALIGNMENT)
    }

    /// The allocator that it passes requests on to, if it wraps one.
    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        None
    }

    /// A block of at least `bytes > 0` bytes, rounded up to 16, with unspecified contents, to be used by work on `stream`.
    /// Tensors refuse one that begins elsewhere than at a multiple of 512 bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when all that could be given back has been; whatever the driver reports.
    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block>;

    /// Takes a block back. Work on its stream may still be using it: whoever gets it next on that stream comes after.
    fn deallocate(&self, block: Block);

    /// Notes that work on `stream` uses the block as well: when given back it is not reused before that work is done
    /// (`torch.Tensor.record_stream`).
    fn record_stream(&self, block: &Block, stream: StreamId);

    /// What it holds and has done.
    fn stats(&self) -> DeviceStats;
    /// Sets every peak to the current value.
    fn reset_peak_stats(&self);
    /// Sets the sums of increases and decreases and the counts of events to zero.
    fn reset_accumulated_stats(&self);

    /// Gives everything cached and unused back to the driver.
    fn empty_cache(&self) -> Result<()>;

    /// Holds at most this many bytes from now on; what it holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the allocator cannot.
    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        let cannot = || Error::invalid("set_memory_limit", format!("{self:?} cannot limit what it holds"));
        ask_inner!(self.set_memory_limit(bytes), Err(cannot()))
    }

    /// Holds at most this part, 0 to 1, of the device's memory from now on, within [`set_memory_limit`]'s bound; what it
    /// holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the fraction is outside 0 to 1, or the allocator cannot.
    ///
    /// [`set_memory_limit`]: Allocator::set_memory_limit
    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        let limit = || {
            let fraction = valid_fraction(fraction)?;
            self.set_memory_limit((driver(self.device())?.capacity() as f64 * fraction) as u64)
        };
        ask_inner!(self.set_memory_fraction(fraction), limit())
    }

    /// Has `free` called when there is no room for an allocation: it may drop what it can spare, and says whether it did
    /// (PyTorch's `FreeMemoryCallback`). The allocator looks for memory again after that. See
    /// [`CachingAllocator::add_free_memory_callback`](super::CachingAllocator::add_free_memory_callback).
    ///
    /// # Errors
    /// [`Error::Invalid`] where neither the allocator nor one inside it calls anybody.
    fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        let nobody = || Error::invalid("add_free_memory_callback", format!("{self:?} asks nobody for memory"));
        ask_inner!(self.add_free_memory_callback(free), Err(nobody()))
    }

    /// Has `observe` called when an allocation fails for want of memory, before the error is returned (PyTorch's
    /// `attachOutOfMemoryObserver`). See
    /// [`CachingAllocator::add_oom_observer`](super::CachingAllocator::add_oom_observer).
    ///
    /// # Errors
    /// [`Error::Invalid`] where neither the allocator nor one inside it tells anybody.
    fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        let nobody = || Error::invalid("add_oom_observer", format!("{self:?} tells nobody that memory ran out"));
        ask_inner!(self.add_oom_observer(observe), Err(nobody()))
    }

    /// Gives back what is unused, and asks callbacks for memory, since `bytes` bytes of the device's memory are wanted that this
    /// allocator does not hand out: images.
    fn make_room(&self, bytes: usize) -> Result<()> {
        ask_inner!(self.make_room(bytes), self.empty_cache())
    }

    /// Tells [observers](Allocator::add_oom_observer) of memory that ran out elsewhere on the device.
    fn tell_oom_observers(&self, event: &OutOfMemoryEvent) {
        ask_inner!(self.tell_oom_observers(event), ())
    }

    /// How many blocks were found to have been written around, by a debugging allocator that looks
    /// ([`GuardAllocator`](super::GuardAllocator)).
    fn guard_violations(&self) -> u64 {
        ask_inner!(self.guard_violations(), 0)
    }

    /// Gives unused memory back as long as at least `keep` bytes stay held, and says how many bytes went back. Waits for
    /// nothing: memory that streams may still be using stays.
    fn trim(&self, keep: u64) -> Result<u64> {
        ask_inner!(self.trim(keep), Ok(0))
    }

    /// Moves blocks together, copying at most `budget` bytes, and gives back what that frees; says how many bytes went
    /// back.
    fn compact(&self, budget: u64) -> Result<u64> {
        ask_inner!(self.compact(budget), Ok(0))
    }

    /// What it holds at this moment, block by block, and what its history has recorded (PyTorch's
    /// `torch.cuda.memory._snapshot`). One that cannot tell gives an empty one.
    fn snapshot(&self) -> Snapshot {
        ask_inner!(self.snapshot(), Snapshot::default())
    }

    /// Begins or ends recording what happens, for [`snapshot`](Allocator::snapshot) to show (PyTorch's
    /// `torch.cuda.memory._record_memory_history`).
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no memory for as many entries, or the allocator cannot record.
    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        let cannot = || Error::invalid("record_memory_history", format!("{self:?} does not record"));
        ask_inner!(self.record_memory_history(options), Err(cannot()))
    }
}

#[cfg(test)]
mod tests;
