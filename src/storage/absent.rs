//! Blocks whose bytes are not where the device's kernels access them.

use super::allocation::{Allocation, Storage};
use super::driver::MemoryKind;
use super::dry::values::run_simulated;
use crate::device::dry;
use crate::{Error, Result};

/// The reason that a block's bytes are absent.
enum Absent {
    /// The memory is simulated: a dry run counts the bytes, and there are none.
    Simulated,
}

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
        matches!(self.block()?.segment().memory().0, MemoryKind::Sim(_)).then_some(Absent::Simulated)
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
        None => Err(Error::invalid("with_host", "the memory is not in the host's address space")),
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
