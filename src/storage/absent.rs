//! Blocks whose bytes are not where the device's kernels access them.

use super::allocation::{Allocation, Backing, Storage};
use super::allocator::find_allocator;
use super::caching::CachingAllocator;
use super::driver::MemoryKind;
use super::dry::values::run_simulated;
use crate::device::dry;
use crate::{Error, Result};

/// The reason that a block's bytes are absent.
enum Absent {
    /// The memory is simulated: a dry run counts the bytes, and there are none.
    Simulated,
    /// The bytes moved to the host, or to a file, until the block is used.
    Moved,
}

/// How often a block is brought back before its use fails, if other threads move it to the host again each time.
const MAX_TRIES: usize = 64;

/// The value that stands for the result of a closure over simulated bytes that is not called.
pub(crate) trait Uncalled {
    fn uncalled() -> Self;
}

macro_rules! uncalled {
    ($([$($t:ident: $bound:path)?] $type:ty = $value:expr;)*) => { $(impl$(<$t: $bound>)? Uncalled for $type {
        fn uncalled() -> Self {
            $value
        }
    })* };
}

uncalled! {
    [] () = ();
    [] bool = false;
    [T: Sized] Vec<T> = Vec::new();
    [T: Uncalled] Result<T> = Ok(T::uncalled());
}

impl Allocation {
    /// Returns why the bytes are absent; `None` if they are present. Valid while the slot's lock is held.
    fn absent(&self) -> Option<Absent> {
        match self.block()?.segment().memory().0 {
            MemoryKind::Sim(_) => Some(Absent::Simulated),
            MemoryKind::Spilled(_) => Some(Absent::Moved),
            _ => None,
        }
    }

    /// True if the bytes are on the CPU device, but moved out of its memory. Valid while the host lock is held.
    #[inline]
    pub(super) fn is_moved(&self) -> bool {
        self.host_range().1 != self.nbytes() && matches!(self.absent(), Some(Absent::Moved))
    }

    /// Moves the bytes back to the device's memory if they were moved out. The thread must not hold the slot's lock.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for them, and errors of the driver. The bytes then stay where they are.
    #[cold]
    pub(super) fn bring_back(&self) -> Result<()> {
        let (Backing::Host(lease) | Backing::OpenCl(_, lease)) = &self.backing else { return Ok(()) };
        if !lease.is_spilled() {
            return Ok(());
        }
        let allocator = find_allocator::<CachingAllocator>(lease.allocator());
        allocator.ok_or_else(|| Error::invalid("storage", "its bytes are on the host"))?.restore(&lease.block)
    }

    /// Calls `lock` until the bytes are present under its lock, and brings them back in between.
    #[inline]
    pub(super) fn lock_present<G>(&self, lock: impl Fn() -> Result<G>) -> Result<G> {
        for _ in 0..MAX_TRIES {
            let guard = lock()?;
            if !self.is_moved() {
                return Ok(guard);
            }
            drop(guard);
            self.bring_back()?;
        }
        let detail = "other threads need the memory of a tensor that is kept on the host".into();
        Err(Error::OutOfMemory { device: self.device(), requested: self.nbytes(), detail })
    }
}

/// Calls `f` with bytes of storages some of which are absent, as [`with_host`](super::with_host) does. The storages' locks are held.
#[cold]
pub(super) fn run_on_absent<R: Uncalled>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> Result<R> {
    match reads.iter().chain(writes).find_map(|storage| storage.allocation().absent()) {
        Some(Absent::Simulated) => Ok(run_simulated(reads, writes, f)),
        Some(Absent::Moved) | None => Err(Error::invalid("with_host", "the memory is not in the host's address space")),
    }
}

impl Storage {
    /// True if the storage's memory is simulated, by a [dry run](super::dry_run()): the storage has a size, but no bytes.
    ///
    /// ```
    /// let x = claystone::Tensor::zeros(3, claystone::Device::Cpu)?;
    /// assert!(!x.storage().is_simulated()); // outside a dry run
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[inline]
    pub fn is_simulated(&self) -> bool {
        dry::is_on() && self.has_simulated_block()
    }

    #[cold]
    fn has_simulated_block(&self) -> bool {
        let Some(block) = self.allocation().block() else { return false };
        let _location = block.location(); // keeps the block's segment
        matches!(self.allocation().absent(), Some(Absent::Simulated))
    }

    /// Returns an error if the memory is simulated, because other code would access bytes that do not exist.
    pub(super) fn check_not_simulated(&self, op: &'static str) -> Result<()> {
        let reason = "a dry run has no bytes that other code could access";
        if self.is_simulated() { Err(Error::invalid(op, reason)) } else { Ok(()) }
    }
}
