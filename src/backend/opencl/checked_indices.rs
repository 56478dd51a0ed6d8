//! Remembers indices that passed a range check. A kernel records the first index that is out of range, and the next wait must read that record from
//! the device. The read is skipped if the same indices passed the same check before and have not changed since.

use crate::Tensor;
use crate::device::capture::is_capturing;
use crate::device::opencl::ClDevice;

/// Hashes the values that identify a check into a check number, for kernels without a cached plan.
pub(crate) fn hash_check(parts: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |hash: u64, part: u64| (hash.rotate_left(29) ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    parts.into_iter().fold(1, mix)
}

/// The hash under which the indices of a launch will be remembered, or `None` during a capture. The hash is computed before the launch,
/// because another thread may read the kernel's record as soon as the kernel runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingCheck(Option<u64>);

/// Returns None if the indices are known to pass check number `check`. During a capture the result is never None, because each replay checks its
/// indices.
pub(crate) fn begin_check(device: &ClDevice, index: &Tensor, check: u64) -> Option<PendingCheck> {
    if is_capturing(index.device()) {
        return Some(PendingCheck(None));
    }
    let (reads, known) = (device.fault_reads(), index.storage.stamp());
    let (version, offset, dtype) = (index.storage.version(), index.layout.offset as u64, index.dtype as u64);
    let hash = hash_check([check, version, offset, dtype, reads.slot, reads.found]);
    let hash = (hash ^ hash >> 32) & !BEGUN_READS_MASK;
    // The indices are known if the check's hash matches and a read that began after the launch found no faults. Read counts are compared modulo 2^16.
    let is_known = known & !BEGUN_READS_MASK == hash && (reads.clean.wrapping_sub(known) as u16 as i16) > 0;
    (!is_known).then_some(PendingCheck(Some(hash)))
}

/// Records that the kernel was launched: the indices become known when the next read finds no faults.
pub(crate) fn note_launch(device: &ClDevice, index: &Tensor, unknown: PendingCheck) {
    if let PendingCheck(Some(hash)) = unknown {
        index.storage.set_stamp(hash | device.fault_reads().begun & BEGUN_READS_MASK);
    }
}

/// The bits for the number of reads that had begun when the kernel was launched. The other bits hold the hash.
const BEGUN_READS_MASK: u64 = u16::MAX as u64;
