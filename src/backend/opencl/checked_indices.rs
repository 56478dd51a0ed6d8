//! Remembers which indices are known to be in range. A kernel checks its indices and records the first that is out of range, and the next wait
//! has to read that record from the device. Where a kernel gets indices that passed the same check before and were not changed since, the read
//! is saved.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Tensor;
use crate::device::capture::is_capturing;
use crate::device::opencl::{ClDevice, FaultReads};

/// A unique number for a check.
pub(crate) fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A number for a check that these values identify, for kernels without a cached plan.
pub(crate) fn number_of(parts: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |hash: u64, part: u64| (hash.rotate_left(29) ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    parts.into_iter().fold(1, mix)
}

/// The hash under which indices that a kernel is about to check are remembered. It is computed before the launch, because another thread
/// may read the kernel's record as soon as it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unknown(Option<u64>);

/// None where indices are known to pass the check of this number. During a capture they never are: each replay checks them.
pub(crate) fn unknown(device: &ClDevice, index: &Tensor, check: u64) -> Option<Unknown> {
    if is_capturing(index.device()) {
        return Some(Unknown(None));
    }
    let (reads, known) = (device.fault_reads(), index.storage.checked());
    let hash = of(index, check, reads);
    // A read without faults began after the launch. The low bits are compared modulo 2^16.
    let is_known = known & !BEGUN == hash && (reads.clean.wrapping_sub(known) as u16 as i16) > 0;
    (!is_known).then_some(Unknown(Some(hash)))
}

/// Notes that the kernel was launched: the next read without faults makes the indices known.
pub(crate) fn launched(device: &ClDevice, index: &Tensor, unknown: Unknown) {
    if let Unknown(Some(hash)) = unknown {
        index.storage.set_checked(hash | device.fault_reads().begun & BEGUN);
    }
}

/// The bits for the number of reads that had begun when the kernel was launched.
const BEGUN: u64 = u16::MAX as u64;

/// The other bits: a hash of everything that the outcome of the check depends on.
fn of(index: &Tensor, check: u64, reads: FaultReads) -> u64 {
    let (version, offset, dtype) = (index.storage.version(), index.layout.offset as u64, index.dtype as u64);
    let hash = number_of([check, version, offset, dtype, reads.slot, reads.found]);
    (hash ^ hash >> 32) & !BEGUN
}
