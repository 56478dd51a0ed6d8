//! What a device can do, in detail.

use std::fs;

/// What [`Device::capabilities`](super::Device::capabilities) tells, beyond [`DeviceInfo`](super::DeviceInfo). What a driver
/// does not answer is `None`: it has an older version of OpenCL, or not the feature. A list is empty then.
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
    /// The name of the platform, which is the driver's.
    pub platform: Option<String>,
    /// The version of OpenCL that the device has, as `OpenCL 3.0 ...`.
    pub version: Option<String>,
    /// The OpenCL C that its compiler takes by default, as `OpenCL C 1.2 ...`.
    pub opencl_c: Option<String>,
    /// `FULL_PROFILE` or `EMBEDDED_PROFILE`.
    pub profile: Option<String>,
    /// The greatest clock rate in MHz.
    pub clock_mhz: Option<u64>,
    /// Bits of an address.
    pub address_bits: Option<u64>,
    /// The cache of global memory in bytes; the CPU's largest.
    pub cache: Option<u64>,
    /// A line of that cache in bytes.
    pub cache_line: Option<u64>,
    /// How many work-items run as one: the multiple that work-groups should have, by OpenCL 3 or by NVIDIA's and AMD's
    /// extensions (a warp, a wavefront).
    pub wave_size: Option<u64>,
    /// The largest work-group in each dimension, in work-items.
    pub work_item_sizes: Vec<u64>,
    /// The most sub-groups in a work-group; 0 where it has none.
    pub sub_groups: Option<u64>,
    /// Whether local memory is a memory of its own, rather than part of global memory.
    pub local_memory_is_own: Option<bool>,
    /// The largest constant buffer in bytes.
    pub constant_buffer: Option<u64>,
    /// All arguments of a kernel together, in bytes.
    pub parameter_size: Option<u64>,
    /// The preferred widths of vectors, in elements.
    pub vector_widths: VectorWidths,
    /// How it computes in 16-bit floats; `None` where it does not.
    pub half: Option<FloatSupport>,
    /// How it computes in 32-bit floats.
    pub single: Option<FloatSupport>,
    /// How it computes in 64-bit floats; `None` where it does not.
    pub double: Option<FloatSupport>,
    /// What shared virtual memory it has.
    pub svm: Option<SharedVirtualMemory>,
    /// Whether it has dot products of four 8-bit integers in a 32-bit word (`cl_khr_integer_dot_product`).
    pub int8_dot_products: Option<bool>,
    /// The limits of images; `None` where it has none.
    pub images: Option<ImageLimits>,
    /// What one step of the times of profiling is, in nanoseconds.
    pub profiling_resolution_ns: Option<u64>,
    /// Whether commands of one queue may run out of order.
    pub out_of_order_queues: Option<bool>,
    /// OpenCL's extensions; of the CPU its vector instructions that this crate may use.
    pub extensions: Vec<String>,
}

/// The preferred widths of vectors, in elements; 0 for a type that a device does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct VectorWidths {
    /// Of 8-bit integers.
    pub char: Option<u64>,
    /// Of 32-bit integers.
    pub int: Option<u64>,
    /// Of 16-bit floats.
    pub half: Option<u64>,
    /// Of 32-bit floats.
    pub float: Option<u64>,
    /// Of 64-bit floats.
    pub double: Option<u64>,
}

/// How a device computes with floats of a size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FloatSupport {
    /// Whether numbers below the least normal one are kept, and not made zero.
    pub denormals: bool,
    /// Whether it has infinities and NaN.
    pub inf_nan: bool,
    /// Whether it rounds to the nearest number.
    pub round_to_nearest: bool,
    /// Whether a product and a sum may be rounded once.
    pub fma: bool,
    /// Whether division and square roots are rounded correctly.
    pub correct_division: bool,
}

/// What shared virtual memory a device has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SharedVirtualMemory {
    /// Buffers that are mapped.
    pub coarse_grain_buffer: bool,
    /// Buffers that host and device use at the same time.
    pub fine_grain_buffer: bool,
    /// All of the host's memory.
    pub fine_grain_system: bool,
    /// Atomics between host and device.
    pub atomics: bool,
}

/// The limits of a device's images, in pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ImageLimits {
    /// Width and height of an image of two dimensions.
    pub size_2d: Option<[u64; 2]>,
    /// Width, height and depth of one of three.
    pub size_3d: Option<[u64; 3]>,
    /// The pixels of one made of a buffer.
    pub buffer: Option<u64>,
    /// How many a kernel may read.
    pub read_arguments: Option<u64>,
    /// How many a kernel may write.
    pub write_arguments: Option<u64>,
}

/// An OpenCL platform: a driver. What it does not answer is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Platform {
    /// Its name.
    pub name: Option<String>,
    /// Who makes it.
    pub vendor: Option<String>,
    /// The version of OpenCL that it has, and its own.
    pub version: Option<String>,
    /// `FULL_PROFILE` or `EMBEDDED_PROFILE`.
    pub profile: Option<String>,
    /// The extensions that all of its devices have.
    pub extensions: Vec<String>,
    /// How many devices it has, whether they can be used or not.
    pub devices: Option<usize>,
}

/// The CPU's.
pub(super) fn cpu() -> Capabilities {
    // In IEEE 754's arithmetic, as Rust has it.
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
    number(&fs::read_to_string(path).ok()?)
}

/// `64`, or `32768K`.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_suffix('K') {
        Some(kib) => kib.parse::<u64>().ok()?.checked_mul(1024),
        None => text.parse().ok(),
    }
}

/// The bytes of the last level that the first processor has, and of a line, where Linux tells.
fn largest_cache() -> (Option<u64>, Option<u64>) {
    let read = |index, what| read_number(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}"));
    let caches = (0..8).filter_map(|index| Some((read(index, "size")?, read(index, "coherency_line_size"))));
    caches.max().map_or((None, None), |(size, line)| (Some(size), line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn sizes_of_caches() {
        assert_eq!((number("64\n"), number("512K\n"), number("x"), number("")), (Some(64), Some(524_288), None, None));
    }

    #[test]
    fn every_device_tells() {
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
