//! Configuration of the allocators: every key of `CLAYSTONE_ALLOC_CONF`.
//!
//! [`Config::KEYS`] is the table of keys from which parsing, printing, checking and the lists in error messages are
//! derived. Keys that PyTorch also has keep PyTorch's name, default, range and syntax (`PYTORCH_ALLOC_CONF`).

mod keys;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

pub use keys::ConfigKey;
use keys::{UNSUPPORTED_PYTORCH_KEYS, formats::*, split_list};

use crate::error::Excerpt;
use crate::{Error, Result};

/// The operation name in errors about the configuration.
const CONFIG_OP: &str = "CLAYSTONE_ALLOC_CONF";

/// The junk fill byte: NaN for every float type, -1 for integers.
pub(super) const JUNK_BYTE: u8 = 0xFF;

/// Number of size intervals with their own rounding: one per power of two, from 1 MiB to 64 GiB.
const ROUNDUP_INTERVALS: usize = 16;
const MIB: usize = 1 << 20;

/// The kind of allocator that a device uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Backend {
    /// Splits segments into blocks and caches freed blocks (PyTorch's `native`).
    #[default]
    Caching,
    /// Keeps whole buffers and reuses them by size without splitting, as MNN does.
    Pool,
    /// Allocates one buffer from the driver per request.
    Direct,
}

/// How the caching allocator sizes a new segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SegmentSizes {
    /// Adapts the size to the requests so far, so that few bytes are wasted and few segments are created.
    #[default]
    Adaptive,
    /// Uses PyTorch's sizes: 2 MiB for requests up to 1 MiB, [`Config::large_segment_size`] below 10 MiB, and above that the
    /// request rounded up to 2 MiB.
    PyTorch,
}

/// The memory to which the caching allocator moves idle blocks before an allocation fails.
///
/// ```
/// use claystone::storage::{Config, Spill};
/// let config: Config = "spill:host,spill_limit_mb:4096".parse()?;
/// assert_eq!((config.spill, config.spill_limit), (Spill::Host, 4 << 30));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Spill {
    /// Blocks stay in the device's memory.
    #[default]
    Off,
    /// Host memory, pinned if the device has memory of its own.
    Host,
    /// A file without a name in the directory `CLAYSTONE_SPILL_DIR`, or in the system's directory for temporary files.
    Disk,
}

/// The operand type for kernels that can read both buffers and images (MNN's memory modes). The key `memory` of
/// `CLAYSTONE_ALLOC_CONF` sets the mode of the process, and [`with_memory_mode`](super::with_memory_mode) sets the mode of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryMode {
    /// Buffers.
    Buffer,
    /// Images, if the device has them and the operands fit. Tensors are converted first.
    Image,
    /// The faster of the two, as measured by `claystone tune` on the device. Buffers if the device was not measured.
    #[default]
    Auto,
}

keys::config! {
    /// Configuration of a device's allocator, parsed from text or written as a struct.
    ///
    /// The text is `key:value,key:value`, as in PyTorch's `PYTORCH_ALLOC_CONF`. Whitespace is dropped, booleans are exactly `True` or `False`, and
    /// sizes are whole numbers in the unit that the key's name ends in. [`Config::KEYS`] lists the keys. Display prints the keys that differ from the
    /// default, in a form that parses back to the same value. The fields hold sizes in bytes, and `usize::MAX` means no limit.
    ///
    /// ```
    /// use claystone::storage::{Backend, Config};
    /// let config: Config = "backend:caching, max_split_size_mb:128, expandable_segments:True".parse()?;
    /// assert_eq!(config.max_split_size, 128 << 20);
    /// assert_eq!(config.to_string(), "max_split_size_mb:128,expandable_segments:True");
    /// assert_eq!(Config { backend: Backend::Direct, ..Config::default() }.to_string(), "backend:direct");
    ///
    /// let error = "max_split_size_mb:2".parse::<Config>().unwrap_err().to_string();
    /// assert!(error.contains("max_split_size_mb") && error.contains("20 or more"));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// With the feature `serde`, a configuration is serialized as that text.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Config;

    backend: Backend = Backend::Caching,
        "backend", BACKEND, "the kind of allocator";
    /// PyTorch's `max_split_size_mb`.
    max_split_size: usize = usize::MAX,
        "max_split_size_mb", LIMIT_FROM_20, "blocks of at least this size are never split";
    /// PyTorch's `max_non_split_rounding_mb`.
    max_non_split_rounding: usize = 20 * MIB,
        "max_non_split_rounding_mb", MIB_FROM_20,
        "a request of at least max_split_size_mb takes a cached block at most this much larger";
    /// PyTorch's `large_segment_size_mb`.
    large_segment_size: usize = 20 * MIB,
        "large_segment_size_mb", MIB_FROM_20, "size of a segment for requests between 1 and 10 MiB";
    /// PyTorch's `roundup_power2_divisions`. With 0 and 1, sizes are rounded up to the alignment only. Entry `i` applies to sizes
    /// from `1 << i` MiB to the next power of two. The first entry also applies to all smaller sizes, the last to all larger ones.
    roundup_power2_divisions: [usize; ROUNDUP_INTERVALS] = [0; ROUNDUP_INTERVALS],
        "roundup_power2_divisions", DIVISIONS, "sizes are rounded up to a multiple of their power of two divided by this";
    /// PyTorch's `garbage_collection_threshold`: the fraction of the limit above which unused segments are released, oldest first;
    /// 0 is off.
    garbage_collection_threshold: f64 = 0.0,
        "garbage_collection_threshold", INNER_FRACTION,
        "above this fraction of the allowed memory, unused segments are released (needs a fraction or a limit)";
    /// PyTorch's `per_process_memory_fraction`.
    per_process_memory_fraction: f64 = 1.0,
        "per_process_memory_fraction", FRACTION, "the fraction of the device's memory that segments may take";
    /// PyTorch's `expandable_segments`. An error if `max_split_size` is set too.
    expandable_segments: bool = false,
        "expandable_segments", BOOLEAN,
        "segments grow in place, where the driver can reserve addresses (the CPU on Linux); elsewhere True is an error";
    /// PyTorch's `pinned_use_background_threads`.
    pinned_use_background_threads: bool = false,
        "pinned_use_background_threads", BOOLEAN,
        "a background thread polls transfers from pinned memory for completion";
    /// PyTorch's `pinned_reserve_segment_size_mb`; 0 is none.
    pinned_reserve_segment_size: usize = 0,
        "pinned_reserve_segment_size_mb", MIB_FROM_1, "pinned memory that is reserved once and never released";
    /// PyTorch's `pinned_max_cached_size_mb`.
    pinned_max_cached_size: usize = usize::MAX,
        "pinned_max_cached_size_mb", LIMIT, "larger pinned blocks are released to the driver when they are freed";
    memory_limit: usize = usize::MAX,
        "memory_limit_mb", LIMIT, "the most that segments may take, whatever the fraction says";
    segments: SegmentSizes = SegmentSizes::Adaptive,
        "segments", SEGMENTS, "how new segments are sized: by the requests so far, or as in PyTorch";
    cross_stream_reuse: bool = true,
        "cross_stream_reuse", BOOLEAN,
        "a block freed on one stream may serve another stream, which waits for the first on the device";
    compaction: bool = true,
        "compaction", BOOLEAN, "live blocks are moved together before an allocation fails";
    compaction_budget: usize = 0,
        "compaction_budget_mb", BUDGET, "the most to move at a time";
    spill: Spill = Spill::Off,
        "spill", SPILL, "idle blocks move to this memory before an allocation fails, least recently used first";
    /// While a block returns, the blocks that make room for it may take its size more.
    spill_limit: usize = usize::MAX,
        "spill_limit_mb", LIMIT, "the most that spilled blocks may take";
    thread_cache: usize = MIB,
        "thread_cache_kb", KIB_OR_NONE, "the capacity of each thread's cache of small blocks";
    decay: Duration = Duration::from_secs(10),
        "decay_ms", MILLISECONDS, "segments unused for this long are released to the driver";
    zero_fill: bool = false,
        "zero_fill", BOOLEAN, "new allocations are all zeros";
    junk_fill: bool = false,
        "junk_fill", BOOLEAN, "new allocations are filled with junk, to expose reads of unwritten memory";
    guard_bytes: bool = false,
        "guard_bytes", BOOLEAN,
        "debugging: guard bytes around every block, checked when it is freed, and poison in freed blocks";
    pool_overfit: f64 = 2.0,
        "pool_overfit", FACTOR, "the pool backend reuses a buffer of at most this many times the request";
    /// `BackendConfig::MemoryMode` of MNN's OpenCL backend.
    memory: MemoryMode = MemoryMode::Auto,
        "memory", MEMORY_MODES, "whether convolution, pooling, matrix product and elementwise kernels on OpenCL read buffers or images";
    numa_local: bool = true,
        "numa_local", BOOLEAN, "the CPU device's large segments prefer the NUMA node that asks for them, on Linux";
}

impl Config {
    /// Reads `CLAYSTONE_ALLOC_CONF` and `CLAYSTONE_NO_CACHING`. `CLAYSTONE_NO_CACHING=1` overrides the backend with
    /// `direct` (PyTorch's `PYTORCH_NO_CUDA_MEMORY_CACHING`).
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the key, the value and the allowed values.
    pub fn from_env() -> Result<Config> {
        let read = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Config::from_vars(read(CONFIG_OP).as_deref(), read("CLAYSTONE_NO_CACHING").as_deref())
    }

    /// Returns the result of [`from_env`](Config::from_env), which is called once, when the first device is used.
    pub(super) fn from_env_once() -> Result<&'static Config> {
        static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
        CONFIG.get_or_init(Config::from_env).as_ref().map_err(Error::clone)
    }

    fn from_vars(conf: Option<&str>, no_caching: Option<&str>) -> Result<Config> {
        let mut config: Config = conf.unwrap_or_default().parse()?;
        match no_caching {
            None | Some("" | "0") => {}
            Some("1") => config.backend = Backend::Direct,
            Some(other) => {
                return Err(Error::invalid("CLAYSTONE_NO_CACHING", format!("'{}' is neither 0 nor 1", Excerpt(other))));
            }
        }
        Ok(config)
    }

    /// Checks that a configuration written as a struct could also be written as text: every value is in its range and a
    /// whole number of the key's unit. Parsed configurations always pass this check.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the key, the value and the allowed values.
    pub fn check(&self) -> Result<()> {
        Config::KEYS.iter().filter(|key| key.value(self) != key.default_value()).try_for_each(|key| {
            let mut parsed = self.clone();
            key.set(&mut parsed, &key.value(self))
        })
    }

    /// Returns the maximum number of bytes to reserve on a device with `capacity` bytes of memory.
    pub(super) fn limit(&self, capacity: u64) -> u64 {
        let fraction = (capacity as f64 * self.per_process_memory_fraction) as u64;
        capacity.min(fraction).min(self.memory_limit as u64)
    }

    /// Returns the byte with which new storages are filled; `None` if their contents are unspecified.
    pub(super) fn fill_byte(&self) -> Option<u8> {
        match self {
            Config { zero_fill: true, .. } => Some(0),
            Config { junk_fill: true, .. } => Some(JUNK_BYTE),
            _ => None,
        }
    }

    /// Returns the block size in bytes for a request: the request rounded up to a multiple of `alignment` (a power of two). With
    /// [`roundup_power2_divisions`](Config::roundup_power2_divisions) = N, the size is also a multiple of 1/N of the largest power of two
    /// that does not exceed the request, if that is more than `alignment`. `None` if the size exceeds `usize`. PyTorch's `round_size`.
    ///
    /// ```
    /// use claystone::storage::Config;
    /// let plain = Config::default();
    /// assert_eq!((plain.round_size(1, 512), plain.round_size(1200, 512)), (Some(512), Some(1536)));
    /// // Quarters of 4 MiB are a MiB; those of 1024 bytes would be less than the alignment.
    /// let quarters: Config = "roundup_power2_divisions:4".parse()?;
    /// assert_eq!(quarters.round_size(1200, 512), Some(1536));
    /// assert_eq!(quarters.round_size((4 << 20) + 1, 512), Some(5 << 20));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn round_size(&self, bytes: usize, alignment: usize) -> Option<usize> {
        if bytes < alignment {
            return Some(alignment);
        }
        let log2 = bytes.checked_ilog2()?;
        let interval = (log2.saturating_sub(MIB.ilog2()) as usize).min(ROUNDUP_INTERVALS - 1);
        let divisions = self.roundup_power2_divisions[interval];
        let rounded = match divisions {
            0 | 1 => bytes,
            _ if bytes <= alignment.saturating_mul(divisions) => bytes,
            _ => bytes.checked_next_multiple_of((1 << log2) / divisions)?,
        };
        rounded.checked_next_multiple_of(alignment)
    }
}

/// Prints the keys that differ from the default; nothing for the default configuration.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changed: Vec<String> = (Config::KEYS.iter())
            .map(|key| (key, key.value(self)))
            .filter(|(key, value)| *value != key.default_value())
            .map(|(key, value)| format!("{}:{value}", key.name))
            .collect();
        f.pad(&changed.join(","))
    }
}

impl FromStr for Config {
    type Err = Error;

    fn from_str(text: &str) -> Result<Config> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut config = Config::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in split_list(&text) {
            let Some((name, value)) = item.split_once(':') else {
                return Err(Error::invalid(
                    CONFIG_OP,
                    format!("'{}' has no value: write key:value,key:value", Excerpt(item)),
                ));
            };
            if let Some((_, why)) = UNSUPPORTED_PYTORCH_KEYS.iter().find(|(key, _)| *key == name) {
                return Err(Error::invalid(CONFIG_OP, format!("{name} has no meaning here, as {why}: leave it out")));
            }
            let Some(key) = Config::KEYS.iter().find(|key| key.name == name) else {
                let known: Vec<&str> = Config::KEYS.iter().map(|key| key.name).collect();
                let reason = format!("unknown key '{}': the keys are {}", Excerpt(name), known.join(", "));
                return Err(Error::invalid(CONFIG_OP, reason));
            };
            if seen.contains(&name) {
                let reason = format!("{name} is given twice, the second time as '{}': give it once", Excerpt(value));
                return Err(Error::invalid(CONFIG_OP, reason));
            }
            seen.push(name);
            key.set(&mut config, value)?;
        }
        Ok(config)
    }
}

crate::error::serde_as_text!(Config);
