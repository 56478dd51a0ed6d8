//! Where work runs.

use std::fmt;

pub mod cpu;
pub(crate) mod opencl;

/// A place where tensors live and work runs. A plain name: nothing is opened until it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's processor and memory.
    Cpu,
    /// The OpenCL device of this index in [`Device::all`].
    OpenCL(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.pad("cpu"),
            Device::OpenCL(i) => f.pad(&format!("opencl:{i}")),
        }
    }
}
