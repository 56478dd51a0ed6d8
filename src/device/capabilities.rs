//! The detailed capabilities of a device.

use std::fs;

/// The result of [`Device::capabilities`](super::Device::capabilities): more detail than [`DeviceInfo`](super::DeviceInfo).
/// A property that the driver does not report is `None` or an empty list: the driver is too old, or lacks the feature.
///
/// ```
/// let capabilities = claystone::Device::best().capabilities()?;
/// if let Some(wave) = capabilities.wave_size {
///     println!("{wave} work-items run as one");
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capabilities {
    /// The name of the platform, which is the driver's name.
    pub platform: Option<String>,
    /// The device's version of OpenCL, as `OpenCL 3.0 ...`.
    pub version: Option<String>,
    /// The compiler's default version of OpenCL C, as `OpenCL C 1.2 ...`.
    pub opencl_c: Option<String>,
    /// `FULL_PROFILE` or `EMBEDDED_PROFILE`.
    pub profile: Option<String>,
    /// The maximum clock rate in MHz.
    pub clock_mhz: Option<u64>,
    /// The number of bits of an address.
    pub address_bits: Option<u64>,
    /// The size of the cache of global memory, in bytes; on the CPU, the size of the largest cache.
    pub cache: Option<u64>,
    /// The size of a cache line, in bytes.
    pub cache_line: Option<u64>,
    /// The number of work-items that run in lockstep (a warp, a wavefront); work-group sizes should be multiples of it. Reported by
    /// OpenCL 3, or by NVIDIA's and AMD's extensions.
    pub wave_size: Option<u64>,
    /// The largest work-group in each dimension, in work-items.
    pub work_item_sizes: Vec<u64>,
    /// The maximum number of sub-groups in a work-group; 0 without sub-groups.
    pub sub_groups: Option<u64>,
    /// True if local memory is dedicated memory, rather than part of global memory.
    pub local_memory_is_own: Option<bool>,
    /// The maximum size of a constant buffer, in bytes.
    pub constant_buffer: Option<u64>,
    /// The maximum size of all arguments of a kernel together, in bytes.
    pub parameter_size: Option<u64>,
    /// The preferred widths of vectors, in elements.
    pub vector_widths: VectorWidths,
    /// Arithmetic in 16-bit floats; `None` if unsupported.
    pub half: Option<FloatSupport>,
    /// Arithmetic in 32-bit floats.
    pub single: Option<FloatSupport>,
    /// Arithmetic in 64-bit floats; `None` if unsupported.
    pub double: Option<FloatSupport>,
    /// The kinds of shared virtual memory that the device supports.
    pub svm: Option<SharedVirtualMemory>,
    /// True if the device has dot products of four 8-bit integers in a 32-bit word (`cl_khr_integer_dot_product`).
    pub int8_dot_products: Option<bool>,
    /// The limits of images; `None` without images.
    pub images: Option<ImageLimits>,
    /// The resolution of profiling times, in nanoseconds.
    pub profiling_resolution_ns: Option<u64>,
    /// True if commands of one queue may run out of order.
    pub out_of_order_queues: Option<bool>,
    /// OpenCL's extensions; on the CPU, the vector instruction sets that this crate may use.
    pub extensions: Vec<String>,
}

/// The preferred widths of vectors, in elements; 0 for a type that the device does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct VectorWidths {
    /// Width for 8-bit integers.
    pub char: Option<u64>,
    /// Width for 32-bit integers.
    pub int: Option<u64>,
    /// Width for 16-bit floats.
    pub half: Option<u64>,
    /// Width for 32-bit floats.
    pub float: Option<u64>,
    /// Width for 64-bit floats.
    pub double: Option<u64>,
}

/// The properties of a device's arithmetic in one floating-point type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FloatSupport {
    /// True if subnormal numbers are kept, rather than flushed to zero.
    pub denormals: bool,
    /// True if infinities and NaN are supported.
    pub inf_nan: bool,
    /// True if results are rounded to nearest.
    pub round_to_nearest: bool,
    /// True if there is a fused multiply-add, which rounds once.
    pub fma: bool,
    /// True if division and square roots are rounded correctly.
    pub correct_division: bool,
}

/// The kinds of shared virtual memory: each field is true if the device supports that kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SharedVirtualMemory {
    /// Shared buffers that the host must map before it accesses them.
    pub coarse_grain_buffer: bool,
    /// Shared buffers that host and device may access at the same time without mapping.
    pub fine_grain_buffer: bool,
    /// All of the host's memory is shared with the device.
    pub fine_grain_system: bool,
    /// Atomic operations that synchronise host and device.
    pub atomics: bool,
}

/// The limits of a device's images, in pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ImageLimits {
    /// Maximum width and height of a two-dimensional image.
    pub size_2d: Option<[u64; 2]>,
    /// Maximum width, height and depth of a three-dimensional image.
    pub size_3d: Option<[u64; 3]>,
    /// The maximum number of pixels of an image made from a buffer.
    pub buffer: Option<u64>,
    /// The maximum number of images that one kernel can read.
    pub read_arguments: Option<u64>,
    /// The maximum number of images that one kernel can write.
    pub write_arguments: Option<u64>,
}

/// An OpenCL platform, which is a driver. A property that the driver does not report is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Platform {
    /// The platform's name.
    pub name: Option<String>,
    /// The platform's vendor.
    pub vendor: Option<String>,
    /// The version of OpenCL, followed by the platform's own version.
    pub version: Option<String>,
    /// `FULL_PROFILE` or `EMBEDDED_PROFILE`.
    pub profile: Option<String>,
    /// The extensions that all of the platform's devices have.
    pub extensions: Vec<String>,
    /// The number of devices, usable or not.
    pub devices: Option<usize>,
}

pub(super) fn cpu() -> Capabilities {
    // IEEE 754 arithmetic, which Rust guarantees.
    let ieee =
        FloatSupport { denormals: true, inf_nan: true, round_to_nearest: true, fma: true, correct_division: true };
    let (cache, cache_line) = largest_cache();
    Capabilities {
        clock_mhz: read_number("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").map(|khz| khz / 1000),
        address_bits: Some(usize::BITS.into()),
        cache,
        cache_line,
        single: Some(ieee),
        double: Some(ieee),
        extensions: super::cpu::vector_features().into_iter().map(str::to_owned).collect(),
        ..Capabilities::default()
    }
}

fn read_number(path: &str) -> Option<u64> {
    parse_number(&fs::read_to_string(path).ok()?)
}

/// Parses `64`, or `32768K` with a binary unit.
fn parse_number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_suffix('K') {
        Some(kib) => kib.parse::<u64>().ok()?.checked_mul(1024),
        None => text.parse().ok(),
    }
}

/// Returns a property of cache `index` of the first processor; `None` if Linux does not report it.
fn read_cache(index: usize, property: &str) -> Option<u64> {
    read_number(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{property}"))
}

/// Returns the size and the line size of the first processor's largest cache, in bytes; `None` if Linux does not report the size.
fn largest_cache() -> (Option<u64>, Option<u64>) {
    let caches = (0..8).filter_map(|i| Some((read_cache(i, "size")?, read_cache(i, "coherency_line_size"))));
    caches.max().map_or((None, None), |(size, line)| (Some(size), line))
}

/// Returns the size of a core's L2 cache in bytes: the first processor's, or 1 MiB if Linux does not report it.
pub(super) fn l2_bytes() -> usize {
    let l2 = (0..8).filter(|&i| read_cache(i, "level") == Some(2)).find_map(|i| read_cache(i, "size"));
    l2.and_then(|bytes| bytes.try_into().ok()).unwrap_or(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn cache_sizes_are_parsed() {
        assert_eq!(
            (parse_number("64\n"), parse_number("512K\n"), parse_number("x"), parse_number("")),
            (Some(64), Some(524_288), None, None)
        );
    }

    #[test]
    fn every_device_reports_its_capabilities() {
        for device in Device::all() {
            let capabilities = device.capabilities().unwrap();
            assert!(capabilities.single.is_some_and(|single| single.round_to_nearest), "{device}: {capabilities:?}");
            if !device.is_cpu() {
                let info = device.info().unwrap();
                assert_eq!(capabilities.work_item_sizes.len(), 3, "{device}: {capabilities:?}");
                assert!(capabilities.version.is_some_and(|version| version.starts_with("OpenCL ")), "{device}");
                assert_eq!(capabilities.double.is_some(), info.fp64, "{device}");
                assert!(capabilities.half.is_none() || info.fp16, "{device}");
                assert!(!capabilities.extensions.is_empty() && capabilities.address_bits.is_some(), "{device}");
            }
        }
        assert!(Device::OpenCL(10_000).capabilities().is_err());
    }
}
