//! Accesses to simulated storages. Small values that the host wrote or the CPU computed from such values are known. All others are
//! zeros, and numbers that depend on them are the largest possible.

use std::ops::Range;
use std::slice;

use super::super::absent::Uncalled;
use super::super::allocation::{Allocation, Backing, Storage};
use super::super::allocator::find_allocator;
use super::super::block::Block;
use super::super::driver::host::HostMemory;
use super::record::{EventRecorder, MAX_KEPT_BYTES, Role};
use crate::device::dry;
use crate::{Device, Result};

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

    /// Returns `largest` in place of a number that depends on values of a simulated storage that are not known. The report names `what`.
    pub(crate) fn simulated_count(&self, what: &'static str, largest: usize) -> Option<usize> {
        (self.is_simulated() && self.with_values(|_| ()).is_none()).then(|| {
            self.assume(what, true);
            largest
        })
    }

    fn assume(&self, what: &'static str, largest: bool) {
        recorder_of(self.allocation()).into_iter().for_each(|(recorder, _)| recorder.assume(what, largest));
    }

    /// Returns the version that kept values must have. On the CPU every write passes through this module, so there is none.
    fn values_version(&self) -> u64 {
        if self.device() == Device::Cpu { 0 } else { self.version() }
    }

    /// Calls `f` with the bytes of a simulated storage, if they are known: small values that the host wrote or the CPU computed.
    fn with_values<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (recorder, block) = recorder_of(self.allocation())?;
        recorder.with_values(block, self.values_version(), f)
    }

    /// Makes these the known bytes of a simulated storage; `None` if its bytes are not known, or too many.
    fn set_values(&self, values: Option<&[u8]>) {
        if let Some((recorder, block)) = recorder_of(self.allocation()) {
            let small = values.filter(|values| values.len() <= MAX_KEPT_BYTES);
            recorder.keep_values(block, self.values_version(), small);
        }
    }

    /// Reads known bytes. Others are zeros, which the report counts.
    pub(in crate::storage) fn read_simulated(&self, range: Range<usize>, dst: &mut [u8]) -> Result<()> {
        if self.with_values(|values| dst.copy_from_slice(&values[range])).is_none() {
            dst.fill(0);
            self.assume(if dst.len() <= 8 { "item" } else { "to_vec" }, false);
        }
        Ok(())
    }

    /// Repeats `src` over the range. Keeps small values, because programs depend on lengths, labels and indices.
    pub(in crate::storage) fn write_simulated(&self, range: Range<usize>, src: &[u8]) {
        let is_whole = range == (0..self.nbytes());
        let mut values = match self.nbytes() <= MAX_KEPT_BYTES {
            true if is_whole => Some(vec![0; range.len()]),
            true => self.with_values(<[u8]>::to_vec),
            false => None,
        };
        if let Some(values) = &mut values {
            values[range].chunks_mut(src.len()).for_each(|to| to.copy_from_slice(src));
        }
        self.set_values(values.as_deref());
    }

    /// Copies known bytes. The others stay unknown.
    pub(in crate::storage) fn copy_simulated(&self, to: Range<usize>, src: &Storage, from: Range<usize>) -> Result<()> {
        let mut values = vec![0; if from.len() <= MAX_KEPT_BYTES { from.len() } else { 0 }];
        let known = !values.is_empty()
            && match src.is_simulated() {
                true => src.with_values(|all| values.copy_from_slice(&all[from])).is_some(),
                false => src.read(from.start, &mut values).is_ok(),
            };
        match known {
            true => self.write(to.start, &values)?,
            false if self.is_simulated() => self.set_values(None),
            false => {}
        }
        Ok(())
    }
}

/// A copy of a small storage's bytes, as aligned as a block.
struct AlignedCopy(HostMemory, usize);

impl AlignedCopy {
    /// Copies the bytes, which are zeros if they are not known. Returns `None` for many bytes, or if there is no memory.
    fn new(len: usize, bytes: Option<&[u8]>) -> Option<AlignedCopy> {
        let memory = HostMemory::zeroed(len).filter(|_| len <= MAX_KEPT_BYTES)?;
        let mut copy = AlignedCopy(memory, len);
        bytes.into_iter().for_each(|bytes| copy.bytes_mut().copy_from_slice(bytes));
        Some(copy)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `zeroed` made `self.1` initialised bytes, which only this value uses, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.0.start().as_ptr(), self.1) }
    }
}

/// Calls `f` with copies of the bytes of `reads` and `writes`, and keeps what `f` writes, if all bytes of `reads` are known and few.
/// Otherwise does not call `f`, and the bytes of `writes` are no longer known. The storages' locks are held.
pub(in crate::storage) fn run_simulated<R: Uncalled>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> R {
    let Some([mut from, mut to]) = copy_operands(reads, writes) else {
        writes.iter().for_each(|storage| storage.set_values(None));
        return R::uncalled();
    };
    let from: Vec<&[u8]> = from.iter_mut().map(|copy| &*copy.bytes_mut()).collect();
    let result = f(&from, &mut to.iter_mut().map(AlignedCopy::bytes_mut).collect::<Vec<_>>());
    writes.iter().zip(&mut to).for_each(|(storage, copy)| storage.set_values(Some(copy.bytes_mut())));
    result
}

fn copy_operands(reads: &[&Storage], writes: &[&Storage]) -> Option<[Vec<AlignedCopy>; 2]> {
    let copy_of_read = |storage: &&Storage| match storage.allocation().host_range() {
        (_, 0) if storage.nbytes() > 0 => {
            storage.with_values(|values| AlignedCopy::new(storage.nbytes(), Some(values)))?
        }
        // SAFETY: as in `with_host`, whose caller holds the lock.
        (start, len) => AlignedCopy::new(len, Some(unsafe { slice::from_raw_parts(start.as_ptr(), len) })),
    };
    let copy_of_write = |storage: &&Storage| match storage.allocation().host_range() {
        (_, 0) => {
            let known = storage.with_values(|values| AlignedCopy::new(storage.nbytes(), Some(values)));
            known.unwrap_or_else(|| AlignedCopy::new(storage.nbytes(), None))
        }
        _ => None, // bytes that exist are not changed
    };
    Some([
        reads.iter().map(copy_of_read).collect::<Option<_>>()?,
        writes.iter().map(copy_of_write).collect::<Option<_>>()?,
    ])
}
