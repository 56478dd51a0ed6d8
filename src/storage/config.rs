//! What the allocators can be told: every key of `CLAYSTONE_ALLOC_CONF`.
//!
//! [`Config::KEYS`] is the one table of keys: parsing, printing, checking and the list in error messages all come from
//! its rows. Keys that PyTorch has keep PyTorch's name, default, range and syntax (`PYTORCH_ALLOC_CONF`).

mod keys;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

pub use keys::ConfigKey;
use keys::{NO_MEANING, forms::*, list};

use super::memory_mode::MemoryMode;
use crate::error::Excerpt;
use crate::{Error, Result};

/// What errors call the place of a mistake.
const OP: &str = "CLAYSTONE_ALLOC_CONF";

/// What junk is made of: as floats of any kind not a number, as integers -1.
pub(super) const JUNK: u8 = 0xFF;

/// Sizes from 1 MiB to 64 GiB, a power of two each, can be rounded differently.
const INTERVALS: usize = 16;
const MIB: usize = 1 << 20;

/// Which allocator a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Backend {
    /// Segments cut into blocks, and everything this crate knows about reusing them (PyTorch's `native`).
    #[default]
    Caching,
    /// Whole buffers kept and reused by size, never split, as MNN does.
    Pool,
    /// One buffer from the driver an allocation.
    Direct,
}

/// How large the caching allocator makes a new segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SegmentSizes {
    /// By what has been asked for so far: few bytes are left over and few segments are made.
    #[default]
    Adaptive,
    /// As PyTorch: 2 MiB for requests up to 1 MiB, [`Config::large_segment_size`] below 10 MiB, beyond that the
    /// request rounded up to 2 MiB.
    PyTorch,
}

keys::config! {
    /// Everything that can be set about a device's allocator, parsed from text or written as a struct.
    ///
    /// The text is `key:value,key:value`, as in PyTorch's `PYTORCH_ALLOC_CONF`: whitespace is dropped, booleans are exactly
    /// `True` or `False`, sizes are whole numbers in the unit that the key's name ends in. [`Config::KEYS`] lists the keys.
    /// Display prints what differs from the default, in a form that parses back to the same. Inside, sizes are bytes, and
    /// `usize::MAX` stands for no limit.
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
    /// With the feature `serde` it is written as that text.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Config;

    /// Which allocator.
    backend: Backend = Backend::Caching,
        "backend", BACKEND, "which allocator";
    /// Blocks of at least this many bytes are never split (PyTorch's `max_split_size_mb`).
    max_split_size: usize = usize::MAX,
        "max_split_size_mb", LIMIT_FROM_20, "blocks of at least this size are never split";
    /// A request of at least [`max_split_size`](Config::max_split_size) takes a cached block that is at most this many
    /// bytes larger (PyTorch's `max_non_split_rounding_mb`).
    max_non_split_rounding: usize = 20 * MIB,
        "max_non_split_rounding_mb", MIB_FROM_20,
        "how much larger a cached block may be that serves a request of at least max_split_size_mb";
    /// Bytes of a segment for requests between 1 and 10 MiB (PyTorch's `large_segment_size_mb`).
    large_segment_size: usize = 20 * MIB,
        "large_segment_size_mb", MIB_FROM_20, "size of a segment for requests between 1 and 10 MiB";
    /// Into how many parts each power of two is divided to round sizes up to; 0 and 1 round to the alignment only.
    /// Entry `i` is for sizes from `1 << i` MiB to the next power of two; the first serves all smaller sizes as well,
    /// the last all larger ones (PyTorch's `roundup_power2_divisions`).
    roundup_power2_divisions: [usize; INTERVALS] = [0; INTERVALS],
        "roundup_power2_divisions", DIVISIONS, "sizes are rounded up to one of so many parts of a power of two";
    /// Above this part of the allowed memory, unused segments are given back oldest first; 0 is off. Needs a memory
    /// fraction below 1 or a memory limit (PyTorch's `garbage_collection_threshold`).
    garbage_collection_threshold: f64 = 0.0,
        "garbage_collection_threshold", INNER_FRACTION,
        "above this part of the allowed memory unused segments go back (needs a fraction or a limit)";
    /// The part, 0 to 1, of the device's memory that segments may take (PyTorch's `per_process_memory_fraction`).
    per_process_memory_fraction: f64 = 1.0,
        "per_process_memory_fraction", FRACTION, "the part of the device's memory that segments may take";
    /// Segments grow in place (PyTorch's `expandable_segments`). The caching allocator of a device whose driver cannot
    /// reserve addresses refuses it, and so does one with a `max_split_size`.
    expandable_segments: bool = false,
        "expandable_segments", SWITCH,
        "segments grow in place, where the driver can reserve addresses (the CPU on Linux); elsewhere True is an error";
    /// A thread of its own asks whether transfers from pinned memory are done (PyTorch's
    /// `pinned_use_background_threads`).
    pinned_use_background_threads: bool = false,
        "pinned_use_background_threads", SWITCH,
        "a thread of its own asks whether transfers from pinned memory are done";
    /// Bytes of pinned memory taken once and never given back; 0 is none (PyTorch's `pinned_reserve_segment_size_mb`).
    pinned_reserve_segment_size: usize = 0,
        "pinned_reserve_segment_size_mb", MIB_FROM_1, "pinned memory taken once and never given back";
    /// The most bytes that segments may take, whatever the fraction says.
    memory_limit: usize = usize::MAX,
        "memory_limit_mb", LIMIT, "the most that segments may take, whatever the fraction says";
    /// How large new segments are.
    segments: SegmentSizes = SegmentSizes::Adaptive,
        "segments", SEGMENTS, "how large new segments are: by what was asked for so far, or as in PyTorch";
    /// A block freed on one stream may serve another, which waits for the first on the device.
    cross_stream_reuse: bool = true,
        "cross_stream_reuse", SWITCH,
        "a block freed on one stream may serve another, which waits for the first on the device";
    /// Live blocks are moved together before an allocation fails.
    compaction: bool = true,
        "compaction", SWITCH, "live blocks are moved together before an allocation fails";
    /// The most bytes to move at a time; 0 is no bound.
    compaction_budget: usize = 0,
        "compaction_budget_mb", BUDGET, "the most to move at a time";
    /// Bytes of small sizes that a thread keeps for itself; 0 is off.
    thread_cache: usize = MIB,
        "thread_cache_kb", KIB_OR_NONE, "what a thread keeps for itself of small sizes";
    /// Segments unused for this long go back to the driver; zero is off.
    decay: Duration = Duration::from_secs(10),
        "decay_ms", MILLISECONDS, "segments unused for this long go back to the driver";
    /// New allocations are all zeros.
    zero_fill: bool = false,
        "zero_fill", SWITCH, "new allocations are all zeros";
    /// New allocations are filled with junk, so that reading what was never written shows.
    junk_fill: bool = false,
        "junk_fill", SWITCH, "new allocations are filled with junk";
    /// Debugging: guard bytes around every block, looked at when it is freed, and poison in freed ones.
    guard_bytes: bool = false,
        "guard_bytes", SWITCH,
        "debugging: guard bytes around every block, looked at when it is freed, and poison in freed ones";
    /// The pool backend reuses a buffer of at most this many times the request; 1 or more.
    pool_overfit: f64 = 2.0,
        "pool_overfit", FACTOR, "the pool backend reuses a buffer of at most this many times the request";
    /// Whether kernels that can read either read buffers or images (MNN's `BackendConfig::MemoryMode` of its OpenCL backend).
    memory: MemoryMode = MemoryMode::Auto,
        "memory", MEMORY_MODES, "what convolutions, pooling, products and elementwise kernels of OpenCL devices read";
    /// The CPU device's large segments prefer the memory of the NUMA node whose thread asks for them, on Linux.
    numa_local: bool = true,
        "numa_local", SWITCH, "the CPU device's large segments prefer the NUMA node that asks for them, on Linux";
}

impl Config {
    /// What the environment says: `CLAYSTONE_ALLOC_CONF`, and `CLAYSTONE_NO_CACHING=1`, which makes the backend
    /// `direct` whatever the former says (PyTorch's `PYTORCH_NO_CUDA_MEMORY_CACHING`).
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the key, the value and what is allowed.
    pub fn from_env() -> Result<Config> {
        let read = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Config::from_vars(read(OP).as_deref(), read("CLAYSTONE_NO_CACHING").as_deref())
    }

    /// [`from_env`](Config::from_env), read when the first device is used.
    pub(super) fn of_process() -> Result<&'static Config> {
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

    /// Whether a configuration written as a struct could also have been written as text: every value in its range, and
    /// a whole number of the key's unit. Parsed ones are.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the key, the value and what is allowed.
    pub fn check(&self) -> Result<()> {
        Config::KEYS.iter().filter(|key| key.value(self) != key.default_value()).try_for_each(|key| {
            let mut read = self.clone();
            key.set(&mut read, &key.value(self))
        })
    }

    /// The most bytes of segments to hold of a device that has so many.
    pub(super) fn limit(&self, capacity: u64) -> u64 {
        let fraction = (capacity as f64 * self.per_process_memory_fraction) as u64;
        capacity.min(fraction).min(self.memory_limit as u64)
    }

    /// The byte that new storages are filled with, if any.
    pub(super) fn fill_byte(&self) -> Option<u8> {
        match self {
            Config { zero_fill: true, .. } => Some(0),
            Config { junk_fill: true, .. } => Some(JUNK),
            _ => None,
        }
    }

    /// The size of the block that serves a request: at least `alignment` bytes and a multiple of it (a power of two),
    /// and where [`roundup_power2_divisions`](Config::roundup_power2_divisions) divides the request's power of two, a
    /// whole number of those parts. `None` where that is beyond `usize`. PyTorch's `round_size`.
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
        let interval = (log2.saturating_sub(MIB.ilog2()) as usize).min(INTERVALS - 1);
        let divisions = self.roundup_power2_divisions[interval];
        let rounded = match divisions {
            0 | 1 => bytes,
            _ if bytes <= alignment.saturating_mul(divisions) => bytes,
            _ => bytes.checked_next_multiple_of((1 << log2) / divisions)?,
        };
        rounded.checked_next_multiple_of(alignment)
    }
}

/// Prints what differs from the default; nothing at all for the default.
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
        for item in list(&text) {
            let Some((name, value)) = item.split_once(':') else {
                return Err(Error::invalid(OP, format!("'{}' has no value: write key:value,key:value", Excerpt(item))));
            };
            if let Some((_, why)) = NO_MEANING.iter().find(|(key, _)| *key == name) {
                return Err(Error::invalid(OP, format!("{name} has no meaning here, as {why}: leave it out")));
            }
            let Some(key) = Config::KEYS.iter().find(|key| key.name == name) else {
                let known: Vec<&str> = Config::KEYS.iter().map(|key| key.name).collect();
                let reason = format!("unknown key '{}': the keys are {}", Excerpt(name), known.join(", "));
                return Err(Error::invalid(OP, reason));
            };
            if seen.contains(&name) {
                let reason = format!("{name} is there twice, again as '{}': give it once", Excerpt(value));
                return Err(Error::invalid(OP, reason));
            }
            seen.push(name);
            key.set(&mut config, value)?;
        }
        Ok(config)
    }
}

crate::error::serde_as_text!(Config);
