//! Accesses to simulated storages. Small values that the host wrote, or that the CPU device computed from such values, are known, because
//! programs depend on lengths, labels and indices. All others are zeros, and numbers that depend on them are the largest possible.

use std::ops::Range;

use super::super::absent::Uncalled;
use super::super::allocation::{Backing, Storage};
use super::super::allocator::find_allocator;
use super::super::block::Block;
use super::record::{EventRecorder, Role};
use crate::Device;
use crate::device::dry;

/// The largest size, in bytes, of a storage whose values are kept.
const MAX_KEPT_BYTES: usize = 64 << 10;

/// Returns bytes as whole words, so that elements of all types are aligned.
fn words_of(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

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
            self.recorder().into_iter().for_each(|(recorder, block)| recorder.set_role(block, role));
        }
    }

    /// Returns the recorder of the storage's block; `None` if the storage is not simulated.
    fn recorder(&self) -> Option<(&EventRecorder, &Block)> {
        let (Backing::Host(lease) | Backing::OpenCl(_, lease)) = &self.allocation().backing else { return None };
        Some((find_allocator(lease.allocator())?, &lease.block))
    }

    fn assume(&self, what: &'static str, largest: bool) {
        self.recorder().into_iter().for_each(|(recorder, _)| recorder.assume(what, largest));
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

    /// Returns the values of a simulated storage as words, if they are known.
    fn values(&self) -> Option<Vec<u64>> {
        self.recorder().and_then(|(recorder, block)| recorder.values(block, self.values_version()))
    }

    fn set_values(&self, values: Option<Vec<u64>>) {
        if let Some((recorder, block)) = self.recorder() {
            recorder.keep_values(block, self.values_version(), values);
        }
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
        let new = || (range.len() == self.nbytes()).then(|| vec![0; self.nbytes().div_ceil(8)]);
        let mut values = src.filter(|_| self.nbytes() <= MAX_KEPT_BYTES).and_then(|_| self.values().or_else(new));
        if let (Some(values), Some(src)) = (&mut values, src) {
            bytemuck::cast_slice_mut(values)[range].chunks_mut(src.len()).for_each(|to| to.copy_from_slice(src));
        }
        self.set_values(values);
    }

    /// Copies known values between storages of which at least one is simulated. Values of a real storage are not changed.
    pub(in crate::storage) fn copy_simulated(&self, to: Range<usize>, src: &Storage, from: Range<usize>) {
        let values = match src.recorder() {
            Some(_) => src.values().map(|values| bytemuck::cast_slice(&values)[from].to_vec()),
            None if from.len() > MAX_KEPT_BYTES => None,
            None => src.read_vec(from.start, from.len()).ok(),
        };
        self.write_simulated(to, values.as_deref());
    }
}

/// Calls `f` with copies of the bytes of `reads` and `writes`, and keeps what `f` writes, if all values of `reads` are known, those of
/// `writes` are known or never written, and there are few. Otherwise does not call `f`, and the values of `writes` are unknown. The storages' locks are held.
pub(in crate::storage) fn run_simulated<R: Uncalled>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> R {
    let Some([from, mut to]) = copy_operands(reads, writes) else {
        writes.iter().for_each(|storage| storage.set_values(None));
        return R::uncalled();
    };
    let from: Vec<&[u8]> =
        from.iter().zip(reads).map(|(words, s)| &bytemuck::cast_slice(words)[..s.nbytes()]).collect();
    let both = to.iter_mut().zip(writes);
    let mut into: Vec<&mut [u8]> = both.map(|(words, s)| &mut bytemuck::cast_slice_mut(words)[..s.nbytes()]).collect();
    let result = f(&from, &mut into);
    writes.iter().zip(to).for_each(|(storage, words)| storage.set_values(Some(words)));
    result
}

fn copy_operands(reads: &[&Storage], writes: &[&Storage]) -> Option<[Vec<Vec<u64>>; 2]> {
    let is_small = |s: &&&Storage| s.nbytes() <= MAX_KEPT_BYTES;
    let read = |storage: &&Storage| match storage.allocation().host_range() {
        (_, 0) if storage.nbytes() > 0 => storage.values(),
        // SAFETY: as in `with_host`, whose caller holds the lock.
        (start, len) => Some(words_of(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })),
    };
    // Bytes that exist are not changed.
    let write = |storage: &&Storage| match storage.allocation().host_range() {
        (_, 0) => storage.values().or_else(|| {
            let is_fresh = storage.recorder().is_some_and(|(recorder, block)| recorder.is_fresh(block));
            is_fresh.then(|| vec![0; storage.nbytes().div_ceil(8)])
        }),
        _ => None,
    };
    if reads.iter().chain(writes).filter(is_small).count() < reads.len() + writes.len() {
        return None;
    }
    Some([reads.iter().map(read).collect::<Option<_>>()?, writes.iter().map(write).collect::<Option<_>>()?])
}
