//! Ways of asking a driver for a buffer that is larger than it promises.

use crate::device::{DeviceInfo, DeviceKind};

/// How a driver is asked for a buffer that is larger than it promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum LargeBuffers {
    /// As for any other buffer.
    Plain,
    /// With Intel's flag; programs are then built with 64-bit offsets.
    Intel,
    /// With Qualcomm's property.
    Qualcomm,
}

impl LargeBuffers {
    /// How this device's driver is asked.
    pub(super) fn of(info: &DeviceInfo, extensions: &str) -> LargeBuffers {
        match info.kind {
            _ if extensions.split_whitespace().any(|e| e == "cl_qcom_large_buffer") => LargeBuffers::Qualcomm,
            // A processor's driver refuses the flag, and "GenuineIntel" is the vendor of processors.
            DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu if info.vendor.contains("Intel") => LargeBuffers::Intel,
            _ => LargeBuffers::Plain,
        }
    }
}
