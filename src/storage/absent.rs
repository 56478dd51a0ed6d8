//! Blocks whose bytes are not where the device's kernels access them.

use super::allocation::{Allocation, Backing, Storage};
use super::allocator::find_allocator;
use super::block::Block;
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
pub(super) const MAX_TRIES: usize = 64;

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

    /// Moves the bytes back to the device's memory if they were moved out, and returns whether they were. The thread must not hold the
    /// slot's lock.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for them, and errors of the driver. The bytes then stay where they are.
    #[cold]
    pub(super) fn bring_back(&self) -> Result<bool> {
        self.with_caching_allocator(|allocator, block| allocator.restore(block))
    }

    /// Brings the bytes back, and keeps the block from ever moving again.
    ///
    /// # Errors
    /// Errors of [`bring_back`](Self::bring_back). Even then the block never moves again once the bytes are back, because another thread
    /// may have exported it meanwhile.
    pub(super) fn export_present(&self) -> Result<()> {
        self.block().into_iter().for_each(Block::export); // first, so that the block does not move to the host again
        self.bring_back().map(drop)
    }

    /// Calls `f` with the block and its allocator. Returns false, without a call, if the block is not of the caching allocator.
    fn with_caching_allocator(&self, f: impl FnOnce(&CachingAllocator, &Block) -> Result<bool>) -> Result<bool> {
        let (Backing::Host(lease) | Backing::OpenCl(_, lease)) = &self.backing else { return Ok(false) };
        match find_allocator(lease.allocator()) {
            Some(allocator) => f(allocator, &lease.block),
            None if lease.is_spilled() => {
                Err(Error::invalid("storage", "no Allocator::inner returns the allocator that keeps it on the host"))
            }
            None => Ok(false),
        }
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
        Err(self.moved_again_error())
    }

    /// The error after [`MAX_TRIES`] tries to bring the bytes back.
    #[cold]
    pub(super) fn moved_again_error(&self) -> Error {
        let detail = "other threads need the memory of a tensor that is kept on the host".into();
        Error::OutOfMemory { device: self.device(), requested: self.nbytes(), detail }
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
    /// Moves the bytes to the host now, until their next use. Returns false if they are there already or have to stay: they are in use,
    /// exported, of a private pool, or not of the caching allocator; a graph is being captured; or the host has no room.
    ///
    /// # Errors
    /// Errors of the driver. The bytes then stay in the device's memory.
    pub(crate) fn evict(&self) -> Result<bool> {
        self.allocation().with_caching_allocator(CachingAllocator::evict)
    }

    /// Moves the bytes back to the device's memory now. Returns false if they are there already, or have to stay on the host for now.
    ///
    /// # Errors
    /// Errors of the driver. The bytes then stay on the host.
    pub(crate) fn prefetch(&self) -> Result<bool> {
        self.allocation().with_caching_allocator(CachingAllocator::prefetch)
    }

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
        match &block.location().segment().memory().0 {
            MemoryKind::Sim(_) => true,
            MemoryKind::Spilled(copy) => copy.is_simulated(),
            _ => false,
        }
    }

    /// Returns the time since the last use of the bytes, by [`advance_use_clock`](super::advance_use_clock); `None` if they were not used.
    pub(crate) fn age(&self) -> Option<u32> {
        self.allocation().block()?.slot().age()
    }

    /// Returns an error if the memory is simulated, because other code would access bytes that do not exist.
    pub(super) fn check_not_simulated(&self, op: &'static str) -> Result<()> {
        let reason = "a dry run has no bytes that other code could access";
        if self.is_simulated() { Err(Error::invalid(op, reason)) } else { Ok(()) }
    }
}
