//! Blocks whose bytes are not where the device's kernels access them.

use super::allocation::{Allocation, Storage};
use super::driver::MemoryKind;
use crate::device::dry;
use crate::{Error, Result};

/// The reason that a block's bytes are absent.
pub(super) enum Absent {
    /// The memory is simulated: a dry run counts the bytes, and there are none.
    Simulated,
}

/// The value that stands for the result of a closure over absent bytes, which is not called.
pub(crate) trait Uncalled {
    fn uncalled() -> Self;
}

/// Implements [`Uncalled`] by the type's default value.
macro_rules! uncalled_default {
    ($($type:ty),*) => { $(impl Uncalled for $type {
        fn uncalled() -> Self {
            Self::default()
        }
    })* };
}
uncalled_default!((), bool);

impl<T> Uncalled for Vec<T> {
    fn uncalled() -> Vec<T> {
        Vec::new()
    }
}

impl<T: Uncalled> Uncalled for Result<T> {
    fn uncalled() -> Result<T> {
        Ok(T::uncalled())
    }
}

impl Allocation {
    /// Returns why the bytes are absent; `None` if they are present. Valid while the slot's lock is held.
    fn absent(&self) -> Option<Absent> {
        match self.block()?.segment().memory().0 {
            MemoryKind::Sim(_) => Some(Absent::Simulated),
            _ => None,
        }
    }
}

/// Returns the result of a closure over the bytes of these storages, some of which are absent. The storages' locks are held.
#[cold]
pub(super) fn skip_closure<'a, R: Uncalled>(storages: impl Iterator<Item = &'a Storage>) -> Result<R> {
    match storages.filter_map(|storage| storage.allocation().absent()).next() {
        Some(Absent::Simulated) => Ok(R::uncalled()),
        None => Err(Error::invalid("with_host", "the memory is not in the host's address space")),
    }
}

impl Storage {
    /// True if the storage's memory is simulated, by a [dry run](super::dry_run()): the storage has a size, but no bytes.
    ///
    /// ```
    /// use claystone::{Device, Tensor, storage};
    /// let (simulated, _) = storage::dry_run(None, || {
    ///     Ok::<_, claystone::Error>(Tensor::zeros([1 << 20, 1 << 20], Device::Cpu)?.storage().is_simulated())
    /// })?;
    /// assert!(simulated? && !Tensor::zeros(3, Device::Cpu)?.storage().is_simulated());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[inline]
    pub fn is_simulated(&self) -> bool {
        dry::is_on() && self.has_simulated_block()
    }

    /// Returns an error if the memory is simulated, because other code would access bytes that do not exist.
    pub(super) fn check_not_simulated(&self, op: &'static str) -> Result<()> {
        match self.is_simulated() {
            true => Err(Error::invalid(op, "a dry run has no bytes that other code could access")),
            false => Ok(()),
        }
    }

    #[cold]
    fn has_simulated_block(&self) -> bool {
        let Some(block) = self.allocation().block() else { return false };
        let _location = block.location(); // keeps the block's segment
        matches!(self.allocation().absent(), Some(Absent::Simulated))
    }
}
