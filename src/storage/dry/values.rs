//! Accesses to simulated storages: reads give zeros or what the host wrote, and numbers that depend on values are the largest possible.

use std::ops::Range;

use super::super::allocation::{Allocation, Backing, Storage};
use super::super::allocator::find_allocator;
use super::super::block::Block;
use super::record::{EventRecorder, MAX_KEPT_BYTES, Role};
use crate::Result;
use crate::device::dry;

/// Returns the recorder of the allocation's block; `None` outside a dry run.
fn recorder_of(allocation: &Allocation) -> Option<(&EventRecorder, &Block)> {
    let (Backing::Host(lease) | Backing::OpenCl(_, lease)) = &allocation.backing else { return None };
    Some((find_allocator(lease.allocator())?, &lease.block))
}

impl Storage {
    /// Sets the role of the bytes in the [`Estimate`](super::Estimate) of a dry run; does nothing in other runs. Optimisers and autograd
    /// call this method for their own memory. [`Role::Saved`] and [`Role::Temporary`] do not replace the other roles.
    ///
    /// ```
    /// use claystone::storage::{self, Role};
    /// use claystone::{Device, Tensor};
    /// let (cache, estimate) = storage::dry_run(None, || {
    ///     Tensor::zeros(1 << 20, Device::Cpu).inspect(|cache| cache.storage().set_role(Role::OptimizerState))
    /// })?;
    /// assert_eq!(estimate.devices[0].roles[2], (Role::OptimizerState, 4 << 20));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[inline]
    pub fn set_role(&self, role: Role) {
        if dry::is_on() {
            recorder_of(self.allocation()).into_iter().for_each(|(recorder, block)| recorder.set_role(block, role));
        }
    }

    /// Returns `largest` in place of a number that depends on values, if the storage is simulated. The report names `what`.
    pub(crate) fn simulated_count(&self, what: &'static str, largest: usize) -> Option<usize> {
        self.is_simulated().then(|| {
            self.assume(what, true);
            largest
        })
    }

    fn assume(&self, what: &'static str, largest: bool) {
        recorder_of(self.allocation()).into_iter().for_each(|(recorder, _)| recorder.assume(what, largest));
    }

    /// Copies the bytes in `range` to `dst` if the host wrote them and nothing changed them since. Returns false if they are not known.
    fn read_kept(&self, range: Range<usize>, dst: &mut [u8]) -> bool {
        let kept = recorder_of(self.allocation()).and_then(|(recorder, block)| {
            recorder.with_values(block, self.version(), |values| dst.copy_from_slice(&values[range]))
        });
        kept.is_some()
    }

    /// Reads what the host wrote. Computed values are zeros, which the report counts.
    pub(in crate::storage) fn read_simulated(&self, range: Range<usize>, dst: &mut [u8]) -> Result<()> {
        if !self.read_kept(range, dst) {
            dst.fill(0);
            self.assume(if dst.len() <= 8 { "item" } else { "to_vec" }, false);
        }
        Ok(())
    }

    /// Keeps small values that the host writes to the whole storage, because programs depend on lengths, labels and indices.
    pub(in crate::storage) fn write_simulated(&self, range: Range<usize>, src: &[u8]) {
        let kept = range == (0..self.nbytes()) && src.len() <= MAX_KEPT_BYTES;
        if let Some((recorder, block)) = recorder_of(self.allocation()) {
            recorder.keep_values(block, self.version(), kept.then_some(src));
        }
    }

    /// Copies values that the host wrote. Other values stay unknown.
    pub(in crate::storage) fn copy_simulated(&self, to: Range<usize>, src: &Storage, from: Range<usize>) -> Result<()> {
        let mut values = vec![0; if from.len() <= MAX_KEPT_BYTES { from.len() } else { 0 }];
        let known = !values.is_empty()
            && match src.is_simulated() {
                true => src.read_kept(from, &mut values),
                false => src.read(from.start, &mut values).is_ok(),
            };
        match (known, self.is_simulated()) {
            (true, _) => self.write(to.start, &values),
            (false, true) => {
                self.write_simulated(to, &[]);
                Ok(())
            }
            (false, false) => Ok(()),
        }
    }
}
