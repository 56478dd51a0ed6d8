//! The description of a device.

use std::fmt;
use std::sync::OnceLock;

use crate::error::Size;

/// The kind of a device. [`Device::all`](crate::Device::all) lists OpenCL devices with dedicated memory before GPUs
/// that share the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DeviceKind {
    /// A processor: the host itself, or an OpenCL device on the host's processor, such as PoCL's.
    Cpu,
    /// A GPU with dedicated memory.
    DiscreteGpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// Any other device that computes.
    Accelerator,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DeviceKind::Cpu => "processor",
            DeviceKind::DiscreteGpu => "discrete GPU",
            DeviceKind::IntegratedGpu => "integrated GPU",
            DeviceKind::Accelerator => "accelerator",
        })
    }
}

/// The result of [`Device::info`](crate::Device::info). Display prints a small table.
///
/// ```
/// let info = claystone::Device::best().info()?;
/// println!("{info}");
/// assert!(info.compute_units > 0);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The model's name.
    pub name: String,
    /// The vendor's name.
    pub vendor: String,
    /// The driver's version.
    pub driver: String,
    /// The kind of device.
    pub kind: DeviceKind,
    /// Compute units: multiprocessors of a GPU, threads of a processor.
    pub compute_units: usize,
    /// The size of the memory, in bytes; 0 if unknown.
    pub memory: u64,
    /// The maximum size of a buffer, in bytes, that the driver promises (`CL_DEVICE_MAX_MEM_ALLOC_SIZE`). The allocator requests
    /// larger buffers nevertheless: NVIDIA's driver promises a quarter of the memory and grants all of it.
    pub largest_buffer: u64,
    /// Alignment of the start of a buffer, in bytes.
    pub base_alignment: usize,
    /// True if kernels can compute in 16-bit floats (`cl_khr_fp16`). Tensors of f16 do not need this.
    pub fp16: bool,
    /// True if kernels can compute in 64-bit floats.
    pub fp64: bool,
    /// True if the device shares the host's memory.
    pub unified_memory: bool,
    /// The size of a work-group's local memory, in bytes.
    pub local_memory: usize,
    /// The largest work-group, in work-items.
    pub max_work_group: usize,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |b: bool| if b { "yes" } else { "no" };
        writeln!(f, "{} ({})", self.name, self.kind)?;
        writeln!(f, "  vendor          {}", self.vendor)?;
        writeln!(f, "  driver          {}", self.driver)?;
        writeln!(f, "  compute units   {}", self.compute_units)?;
        writeln!(f, "  memory          {:.1}", Size(self.memory))?;
        writeln!(f, "  largest buffer  {:.1}", Size(self.largest_buffer))?;
        writeln!(f, "  base alignment  {} bytes", self.base_alignment)?;
        writeln!(f, "  local memory    {:.1}", Size(self.local_memory as u64))?;
        writeln!(f, "  work-group      {} work-items", self.max_work_group)?;
        let (fp16, fp64, unified) = (yes(self.fp16), yes(self.fp64), yes(self.unified_memory));
        write!(f, "  fp16 {fp16}, fp64 {fp64}, unified memory {unified}")
    }
}

pub(super) fn cpu() -> &'static DeviceInfo {
    static INFO: OnceLock<DeviceInfo> = OnceLock::new();
    INFO.get_or_init(|| {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let (cpuinfo, memory) = (read("/proc/cpuinfo"), super::system::total_memory().unwrap_or(0));
        DeviceInfo {
            name: field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            vendor: field(&cpuinfo, "vendor_id").unwrap_or("unknown").to_owned(),
            driver: concat!("claystone ", env!("CARGO_PKG_VERSION")).to_owned(),
            kind: DeviceKind::Cpu,
            compute_units: super::cpu::threads(),
            memory,
            largest_buffer: memory,
            base_alignment: 64,
            fp16: false,
            fp64: true,
            unified_memory: true,
            local_memory: 0,
            max_work_group: 1,
        }
    })
}

/// Returns the value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|l| l.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).filter(|v| !v.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_describes_itself() {
        let text = cpu().to_string();
        for part in ["processor", "compute units", "fp64 yes"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(field("a : 1\nb\t: two words\n", "b"), Some("two words"));
        assert_eq!(field("a : 1\n", "c"), None);
    }
}
