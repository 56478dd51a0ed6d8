//! The names of devices.

use std::fmt;

/// A device that stores tensors and runs work. The value is only a name: the device is opened at its first use.
///
/// ```
/// use claystone::Device;
/// let device: Device = "opencl:1".parse()?;
/// assert_eq!(device, Device::OpenCL(1));
/// assert_eq!(Device::Cpu.to_string(), "cpu");
/// assert!(Device::all().contains(&Device::Cpu));
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// With the feature `serde`, a device is serialised in the format of Display: `"opencl:1"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The host's processor and memory. This is the [`Default`], as in PyTorch.
    #[default]
    Cpu,
    /// The OpenCL device with this index in [`Device::all`].
    OpenCL(usize),
}

impl Device {
    /// The device whose memory is the host's.
    pub(crate) const HOST: Device = Device::Cpu;

    /// Returns a number that is unique to the device.
    pub(crate) fn number(self) -> u64 {
        match self {
            Device::Cpu => u64::MAX,
            Device::OpenCL(index) => index as u64,
        }
    }

    /// True for the CPU. Modules above the backends test a property instead, such as [`is_host`](Self::is_host).
    pub(crate) fn is_cpu(self) -> bool {
        self == Device::Cpu
    }

    /// True if the device's memory is the host's, so that the host reads and writes values in place.
    pub(crate) fn is_host(self) -> bool {
        self == Device::HOST
    }

    /// True if work is submitted to queues, and runs while the host continues.
    pub(crate) fn has_queues(self) -> bool {
        self != Device::Cpu
    }
}

/// The kind of device that an [`Implementation`](crate::ops::Implementation) runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// [`Device::Cpu`].
    Cpu,
    /// Every [`Device::OpenCL`].
    OpenCL,
}

impl From<Device> for Backend {
    fn from(device: Device) -> Backend {
        if device.is_cpu() { Backend::Cpu } else { Backend::OpenCL }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.pad("cpu"),
            Device::OpenCL(i) => f.pad(&format!("opencl:{i}")),
        }
    }
}

crate::error::serde_as_text!(Device);
