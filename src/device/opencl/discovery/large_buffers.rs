//! How to request a buffer larger than the driver's promised maximum.

use crate::device::{DeviceInfo, DeviceKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum LargeBuffers {
    /// Like any other buffer.
    Plain,
    /// With Intel's flag; programs are then built with 64-bit offsets.
    Intel,
    /// With Qualcomm's property.
    Qualcomm,
}

impl LargeBuffers {
    /// Returns the method for a device, from its vendor and extensions.
    pub(super) fn for_device(info: &DeviceInfo, extensions: &str) -> LargeBuffers {
        match info.kind {
            _ if extensions.split_whitespace().any(|e| e == "cl_qcom_large_buffer") => LargeBuffers::Qualcomm,
            // Processors are excluded: their drivers refuse the flag, and "GenuineIntel" is the vendor of processors.
            DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu if info.vendor.contains("Intel") => LargeBuffers::Intel,
            _ => LargeBuffers::Plain,
        }
    }
}
