//! What the allocator asks of a device's memory.

use crate::{Device, Error};

/// Why a driver could not make or commit a segment.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// Out of memory: giving something back may help.
    OutOfMemory,
    /// No segment can be that large, however empty the device is.
    TooBig,
    /// Anything else: goes to the caller as it is.
    Other(Error),
}

/// A device's memory as the allocator sees it: segments made, committed and released, nothing else.
///
/// Three implementations: [`Host`](super::host::Host), [`OpenCl`](super::opencl::OpenCl) and, in tests, a simulated
/// device. `Memory` releases itself on drop, ignoring errors; the allocator drops it only when no block of it is live.
pub(crate) trait Driver: Send + Sync {
    /// An owned segment.
    type Memory: Send + Sync;

    /// The device whose memory this is.
    fn device(&self) -> Device;
    /// Bytes the device has.
    fn capacity(&self) -> u64;
    /// The largest segment it promises. It may give larger ones: some drivers state a quarter of what they can.
    fn largest_segment(&self) -> usize;
    /// Makes a segment. The device may be lazy: nothing is promised before [`commit`](Driver::commit).
    fn create(&self, bytes: usize) -> Result<Self::Memory, Failure>;
    /// Makes the device find the memory now, so that running out is reported here and not at some later launch.
    fn commit(&self, memory: &Self::Memory) -> Result<(), Failure>;
    /// Waits until work that uses released memory is done.
    fn synchronize(&self) -> crate::Result<()>;
}
