//! OpenCL memory: a segment is one buffer, a block an offset into it.

use super::driver::{Driver, Failure};
use crate::Device;
use crate::device::opencl::{ClBuffer, ClDevice, ClError, Class};

/// An OpenCL device's driver.
pub(crate) struct OpenCl {
    device: &'static ClDevice,
}

/// Where a storage's bytes are now: looked up when work is enqueued.
#[derive(Clone, Copy)]
pub(crate) struct ClPlace<'a> {
    /// The open device.
    pub(crate) device: &'static ClDevice,
    /// The segment.
    pub(crate) buffer: &'a ClBuffer,
    /// The block's first byte in it: a multiple of 512.
    pub(crate) offset: usize,
}

impl OpenCl {
    pub(crate) fn new(device: &'static ClDevice) -> OpenCl {
        OpenCl { device }
    }

    pub(crate) fn cl(&self) -> &'static ClDevice {
        self.device
    }

    fn failure(&self, error: ClError) -> Failure {
        match error.classify() {
            Class::OutOfMemory => Failure::OutOfMemory,
            Class::TooBig => Failure::TooBig,
            Class::Lost | Class::Other => Failure::Other(self.device.error(error)),
        }
    }
}

impl Driver for OpenCl {
    type Memory = ClBuffer;

    fn device(&self) -> Device {
        self.device.device()
    }

    fn capacity(&self) -> u64 {
        known(self.device.info().memory)
    }

    fn largest_segment(&self) -> usize {
        usize::try_from(known(self.device.info().largest_buffer)).unwrap_or(usize::MAX)
    }

    fn create(&self, bytes: usize) -> Result<ClBuffer, Failure> {
        self.device.create_buffer(bytes).map_err(|e| self.failure(e))
    }

    fn commit(&self, memory: &ClBuffer) -> Result<(), Failure> {
        self.device.commit(memory).map_err(|e| self.failure(e))
    }

    fn synchronize(&self) -> crate::Result<()> {
        self.device.finish()
    }
}

/// Devices that cannot tell say 0.
fn known(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}
