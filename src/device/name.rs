//! The names of devices.

use std::fmt;

/// A place where tensors live and work runs. A plain name: nothing is opened until it is used.
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
/// With the feature `serde` it is written as what Display prints: `"opencl:1"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's processor and memory: what [`Default`] gives, as in PyTorch.
    #[default]
    Cpu,
    /// The OpenCL device of this index in [`Device::all`].
    OpenCL(usize),
}

impl Device {
    /// The device whose memory is the host's.
    pub(crate) const HOST: Device = Device::Cpu;

    /// A number that tells it from every other device.
    pub(crate) fn number(self) -> u64 {
        match self {
            Device::Cpu => u64::MAX,
            Device::OpenCL(index) => index as u64,
        }
    }

    /// Whether it is the CPU device.
    pub(crate) fn is_cpu(self) -> bool {
        self == Device::Cpu
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
