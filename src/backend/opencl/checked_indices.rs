//! Which indices kernels have found to be in range already. Each kernel checks those that it uses, and records the first that is out of range for
//! the next wait, which has to read that record. A kernel that gets the same indices again, of a tensor that has not been changed since, finds
//! the same: for its sake nothing is read.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Tensor;
use crate::device::capture::is_capturing;
use crate::device::opencl::{ClDevice, FaultReads};

/// A number that no other check has.
pub(crate) fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A number for a check of indices that these tell from others, for kernels that no plan is kept of.
pub(crate) fn number_of(parts: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |hash: u64, part: u64| (hash.rotate_left(29) ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    parts.into_iter().fold(1, mix)
}

/// Indices that a kernel is about to check: the hash that they are remembered by. It is of before the launch, for another thread may read
/// what the kernel finds as soon as it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unknown(Option<u64>);

/// None where a kernel with a check of this number found all of these indices in range. What a capture records is checked in each replay.
pub(crate) fn unknown(device: &ClDevice, index: &Tensor, check: u64) -> Option<Unknown> {
    if is_capturing(index.device()) {
        return Some(Unknown(None));
    }
    let (reads, known) = (device.fault_reads(), index.storage.checked());
    let hash = of(index, check, reads);
    // Later by less than half of what the low bits count.
    let is_known = known & !BEGUN == hash && (reads.clean.wrapping_sub(known) as u16 as i16) > 0;
    (!is_known).then_some(Unknown(Some(hash)))
}

/// Notes that the kernel was launched, so that the next read that finds no fault makes the indices known.
pub(crate) fn launched(device: &ClDevice, index: &Tensor, unknown: Unknown) {
    if let Unknown(Some(hash)) = unknown {
        index.storage.set_checked(hash | device.fault_reads().begun & BEGUN);
    }
}

/// The bits that say how many reads had begun when the kernel was launched.
const BEGUN: u64 = u16::MAX as u64;

/// The other bits: those of a hash of all that another outcome could come from.
fn of(index: &Tensor, check: u64, reads: FaultReads) -> u64 {
    let (version, offset, dtype) = (index.storage.version(), index.layout.offset as u64, index.dtype as u64);
    let hash = number_of([check, version, offset, dtype, reads.slot, reads.found]);
    (hash ^ hash >> 32) & !BEGUN
}
