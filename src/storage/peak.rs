//! The most memory in use within a scope.

use super::allocator::Allocator;
use super::pool::existing_image_pool;
use super::registry;
use super::stats::DeviceStats;
use crate::{Device, Result};

/// The most bytes of a device in use at once within a scope. The three peaks may have been at different times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScopePeak {
    /// The bytes of blocks: requests rounded up, including blocks that were in use before the scope.
    pub allocated: u64,
    /// The bytes of segments held from the driver.
    pub reserved: u64,
    /// The bytes requested by the program.
    pub requested: u64,
}

/// Runs `f`, and returns its result and the most memory of the device in use meanwhile.
///
/// Peaks of enclosing scopes and of [`Device::memory_stats`] are as without the call. Memory that other threads use meanwhile is
/// included. Only one chain of nested scopes may be open for a device: a scope that another thread opens restarts the measurement.
///
/// ```
/// use claystone::{Device, Tensor, storage};
/// let device = Device::Cpu;
/// let (sum, peak) = storage::peak(device, || Tensor::ones(&[1 << 20], device)?.sum((), false)?.item::<f32>())?;
/// assert_eq!(sum?, 1048576.0);
/// assert!(peak.requested >= 4 << 20 && peak.allocated <= peak.reserved);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist; `f` is not called then.
pub fn peak<R>(device: Device, f: impl FnOnce() -> R) -> Result<(R, ScopePeak)> {
    let scope = PeakScope::begin(device)?;
    let result = f();
    Ok((result, scope.peak()?))
}

/// A scope of [`peak`] that ends when the value is dropped. Of two scopes of a device, the inner must end first.
///
/// ```
/// let scope = claystone::storage::PeakScope::begin(claystone::Device::Cpu)?;
/// println!("{} bytes", scope.peak()?.reserved);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when it is dropped"]
pub struct PeakScope {
    device: Device,
    /// The statistics of the allocator and of its images when the scope began.
    before: [DeviceStats; 2],
}

impl PeakScope {
    /// Begins a scope.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist.
    pub fn begin(device: Device) -> Result<PeakScope> {
        let before = [registry::device_allocator(device)?.stats(), device.image_memory_stats()?];
        device.reset_peak_stats()?;
        Ok(PeakScope { device, before })
    }

    /// Returns the peaks since the scope began.
    ///
    /// # Errors
    /// As [`Device::memory_stats`].
    pub fn peak(&self) -> Result<ScopePeak> {
        let stats = self.device.memory_stats()?;
        let [allocated, reserved, requested] =
            [stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes].map(|stat| stat.peak);
        Ok(ScopePeak { allocated, reserved, requested })
    }
}

impl Drop for PeakScope {
    fn drop(&mut self) {
        let [memory, images] = &self.before;
        registry::device_allocator(self.device).into_iter().for_each(|allocator| allocator.raise_peaks(memory));
        existing_image_pool(self.device).inspect(|pool| pool.raise_peaks(images));
    }
}
