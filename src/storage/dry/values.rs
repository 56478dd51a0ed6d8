//! Accesses to simulated storages. Small values that the host wrote, or that the CPU device computed from such values, are known, because
//! programs depend on lengths, labels and indices. All others are zeros, and numbers that depend on them are the largest possible.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::super::absent::Uncalled;
use super::super::allocation::{Backing, Storage};
use super::super::allocator::find_allocator;
use super::record::{EventRecorder, Recorded, Role};
use crate::Device;
use crate::device::{dry, lock};

/// The largest size, in bytes, of a storage whose values are kept.
const MAX_KEPT_BYTES: usize = 64 << 10;

impl Storage {
    /// Sets the role of the bytes in the [`Estimate`](super::estimate::Estimate) of a dry run; does nothing in other runs. Optimisers and autograd
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
            self.with_record(|recorded, slot| recorded.set_role(slot, role));
        }
    }

    /// Calls `f` with the record of a dry run and the address of the slot of the storage's block; returns `None` if the storage is not
    /// simulated.
    fn with_record<R>(&self, f: impl FnOnce(&mut Recorded, NonZeroUsize) -> R) -> Option<R> {
        let (Backing::Host(lease) | Backing::OpenCl(_, lease)) = &self.allocation().backing else { return None };
        let recorder: &EventRecorder = find_allocator(lease.allocator())?;
        Some(f(&mut lock(&recorder.recorded), lease.block.slot_ptr().addr()))
    }

    fn assume(&self, what: &'static str, largest: bool) {
        self.with_record(|recorded, _| recorded.assume(what, largest));
    }

    /// Returns `largest` in place of a number that depends on values of a simulated storage that are not known. The report names `what`.
    pub(crate) fn simulated_count(&self, what: &'static str, largest: usize) -> Option<usize> {
        let unknown = self.is_simulated() && self.values().is_none();
        unknown.then(|| self.assume(what, true)).map(|()| largest)
    }

    /// Returns the version that known values have. On the CPU every write passes through this module, so there is only one.
    fn values_version(&self) -> u64 {
        if self.device() == Device::Cpu { 0 } else { self.version() }
    }

    /// Returns the bytes of a small simulated storage as words, which are aligned for all types, if they are known.
    fn values(&self) -> Option<Vec<u64>> {
        let known = |recorded: &mut Recorded, slot| recorded.live.get(&slot)?.values.clone();
        let (version, mut words) = self.with_record(known).filter(|_| self.nbytes() <= MAX_KEPT_BYTES)??;
        words.resize(self.nbytes().div_ceil(8), 0);
        (version == self.values_version()).then_some(words)
    }

    /// Keeps the values of a simulated storage until the storage has another version.
    fn set_values(&self, values: Option<Vec<u64>>) {
        let values = values.map(|values| (self.values_version(), values));
        self.with_record(|recorded, slot| recorded.live.get_mut(&slot).map(|live| live.values = values));
    }

    /// Reads known values. Others are zeros, which the report counts.
    pub(in crate::storage) fn read_simulated(&self, range: Range<usize>, dst: &mut [u8]) {
        match self.values() {
            Some(values) => dst.copy_from_slice(&bytemuck::cast_slice(&values)[range]),
            None => {
                dst.fill(0);
                self.assume(if dst.len() <= 8 { "item" } else { "to_vec" }, false);
            }
        }
    }

    /// Writes `src`, repeated over the range; `None` for unknown values.
    pub(in crate::storage) fn write_simulated(&self, range: Range<usize>, src: Option<&[u8]>) {
        let is_whole = range.len() == self.nbytes() && range.len() <= MAX_KEPT_BYTES;
        let new = || is_whole.then(|| vec![0; range.len().div_ceil(8)]);
        let values = src.zip(self.values().or_else(new)).map(|(src, mut values)| {
            bytemuck::cast_slice_mut(&mut values)[range.clone()]
                .chunks_mut(src.len())
                .for_each(|to| to.copy_from_slice(src));
            values
        });
        self.set_values(values);
    }

    /// Copies known values between storages of which at least one is simulated. Values of a real storage are not changed.
    pub(in crate::storage) fn copy_simulated(&self, to: Range<usize>, src: &Storage, from: Range<usize>) {
        let values = match src.is_simulated() {
            true => src.values().map(|values| bytemuck::cast_slice(&values)[from].to_vec()),
            false if from.len() > MAX_KEPT_BYTES => None,
            false => src.read_vec(from.start, from.len()).ok(),
        };
        self.write_simulated(to, values.as_deref());
    }
}

/// Calls `f` with copies of the bytes of `reads` and `writes`, and keeps what `f` writes, if all storages are small and their values are
/// known. Otherwise does not call `f`, and the values of `writes` are unknown. Values of a real storage are not changed. The storages'
/// locks are held.
pub(in crate::storage) fn run_simulated<R: Uncalled>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> R {
    let read = |storage: &&Storage| match storage.allocation().host_range() {
        (_, 0) if storage.nbytes() > 0 => storage.values(),
        (_, size) if size > MAX_KEPT_BYTES => None,
        (start, size) => {
            let mut words = vec![0; size.div_ceil(8)];
            // SAFETY: as in `with_host`, whose caller holds the lock.
            let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), size) };
            bytemuck::cast_slice_mut(&mut words)[..size].copy_from_slice(bytes);
            Some(words)
        }
    };
    let read: Option<Vec<Vec<u64>>> = reads.iter().map(read).collect();
    let written: Option<Vec<Vec<u64>>> = writes.iter().map(|storage| storage.values()).collect();
    let Some((read, mut written)) = read.zip(written) else {
        writes.iter().for_each(|storage| storage.set_values(None));
        return R::uncalled();
    };
    let from: Vec<&[u8]> =
        read.iter().zip(reads).map(|(words, s)| &bytemuck::cast_slice(words)[..s.nbytes()]).collect();
    let both = written.iter_mut().zip(writes);
    let mut to: Vec<&mut [u8]> = both.map(|(words, s)| &mut bytemuck::cast_slice_mut(words)[..s.nbytes()]).collect();
    let result = f(&from, &mut to);
    writes.iter().zip(written).for_each(|(storage, words)| storage.set_values(Some(words)));
    result
}
