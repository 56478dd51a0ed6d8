//! The table of keys.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::{Backend, Config, INTERVALS, MIB, OP, SegmentSizes};
use crate::error::Excerpt;
use crate::{Error, Result};

const KIB: usize = 1 << 10;

/// A key of `CLAYSTONE_ALLOC_CONF`. Display prints its name, default, what it may be and what it does.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConfigKey {
    /// As written before the colon.
    pub name: &'static str,
    /// What may be written after it.
    pub allowed: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// Reads a value into the configuration; false if it is none.
    parse: fn(&mut Config, &str) -> bool,
    /// Prints the value, injectively: what cannot be written as text is printed as something that does not parse.
    print: fn(&Config) -> String,
}

impl ConfigKey {
    /// The value that holds where the key is not given.
    pub fn default_value(&self) -> String {
        self.value(&Config::default())
    }

    /// The value in a configuration.
    pub fn value(&self, config: &Config) -> String {
        (self.print)(config)
    }

    pub(super) fn set(&self, config: &mut Config, value: &str) -> Result<()> {
        if (self.parse)(config, value) {
            return Ok(());
        }
        let given = if value.is_empty() { "has no value".into() } else { format!("cannot be '{}'", Excerpt(value)) };
        Err(Error::invalid(OP, format!("{} {given}: give {}", self.name, self.allowed)))
    }
}

impl fmt::Display for ConfigKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = format!("{} (default {}; {}): {}", self.name, self.default_value(), self.allowed, self.doc);
        f.pad(&line)
    }
}

/// PyTorch's keys for what an OpenCL device does not have, and why.
pub(super) const NO_MEANING: &[(&str, &str)] = &[
    ("release_lock_on_cudamalloc", "no lock is ever held while the driver makes memory"),
    ("release_lock_on_hipmalloc", "no lock is ever held while the driver makes memory"),
    ("graph_capture_record_stream_reuse", "OpenCL has no stream capture to record into"),
    ("pinned_use_cuda_host_register", "OpenCL cannot pin memory that it did not make"),
    ("pinned_use_hip_host_register", "OpenCL cannot pin memory that it did not make"),
    ("pinned_num_register_threads", "OpenCL cannot pin memory that it did not make"),
];

const BOOL: &str = "True or False";
const BACKENDS: &[(&str, Backend)] = &[
    ("caching", Backend::Caching),
    ("pool", Backend::Pool),
    ("direct", Backend::Direct),
    ("native", Backend::Caching), // PyTorch's name for it
];
const SEGMENTS: &[(&str, SegmentSizes)] = &[("adaptive", SegmentSizes::Adaptive), ("pytorch", SegmentSizes::PyTorch)];

pub(super) const KEYS: &[ConfigKey] = &[
    ConfigKey {
        name: "backend",
        allowed: "caching, pool or direct (native is caching)",
        doc: "which allocator",
        parse: |c, v| put(&mut c.backend, by_name(BACKENDS, v)),
        print: |c| name_of(BACKENDS, c.backend),
    },
    ConfigKey {
        name: "max_split_size_mb",
        allowed: "a whole number of MiB, 20 or more, or unlimited",
        doc: "blocks of at least this size are never split",
        parse: |c, v| put(&mut c.max_split_size, limit(v, 20)),
        print: |c| show(c.max_split_size, MIB),
    },
    ConfigKey {
        name: "max_non_split_rounding_mb",
        allowed: "a whole number of MiB, 20 or more",
        doc: "how much larger a cached block may be that serves a request of at least max_split_size_mb",
        parse: |c, v| put(&mut c.max_non_split_rounding, bytes(v, MIB, 20)),
        print: |c| show(c.max_non_split_rounding, MIB),
    },
    ConfigKey {
        name: "large_segment_size_mb",
        allowed: "a whole number of MiB, 20 or more",
        doc: "size of a segment for requests between 1 and 10 MiB",
        parse: |c, v| put(&mut c.large_segment_size, bytes(v, MIB, 20)),
        print: |c| show(c.large_segment_size, MIB),
    },
    ConfigKey {
        name: "roundup_power2_divisions",
        allowed: "a power of two, or a list [64:8,256:4,>:1] of sizes in MiB, powers of two (> is all larger), and \
                  divisions, powers of two or 0",
        doc: "sizes are rounded up to one of so many parts of a power of two",
        parse: |c, v| put(&mut c.roundup_power2_divisions, divisions(v)),
        print: |c| show_divisions(&c.roundup_power2_divisions),
    },
    ConfigKey {
        name: "garbage_collection_threshold",
        allowed: "a number above 0 and below 1",
        doc: "above this part of the allowed memory unused segments go back (needs a fraction or a limit)",
        parse: |c, v| put(&mut c.garbage_collection_threshold, number(v, 0.0..=1.0).filter(|x| *x > 0.0 && *x < 1.0)),
        print: |c| c.garbage_collection_threshold.to_string(),
    },
    ConfigKey {
        name: "per_process_memory_fraction",
        allowed: "a number from 0 to 1",
        doc: "the part of the device's memory that segments may take",
        parse: |c, v| put(&mut c.per_process_memory_fraction, number(v, 0.0..=1.0)),
        print: |c| c.per_process_memory_fraction.to_string(),
    },
    ConfigKey {
        name: "expandable_segments",
        allowed: BOOL,
        doc: "segments grow in place, where the driver can reserve addresses (the CPU on Linux); elsewhere True is an error",
        parse: |c, v| put(&mut c.expandable_segments, boolean(v)),
        print: |c| show_bool(c.expandable_segments),
    },
    ConfigKey {
        name: "pinned_use_background_threads",
        allowed: BOOL,
        doc: "a thread of its own asks whether transfers from pinned memory are done",
        parse: |c, v| put(&mut c.pinned_use_background_threads, boolean(v)),
        print: |c| show_bool(c.pinned_use_background_threads),
    },
    ConfigKey {
        name: "pinned_reserve_segment_size_mb",
        allowed: "a whole number of MiB, 1 or more",
        doc: "pinned memory taken once and never given back",
        parse: |c, v| put(&mut c.pinned_reserve_segment_size, bytes(v, MIB, 1)),
        print: |c| show(c.pinned_reserve_segment_size, MIB),
    },
    ConfigKey {
        name: "memory_limit_mb",
        allowed: "a whole number of MiB, or unlimited",
        doc: "the most that segments may take, whatever the fraction says",
        parse: |c, v| put(&mut c.memory_limit, limit(v, 0)),
        print: |c| show(c.memory_limit, MIB),
    },
    ConfigKey {
        name: "segments",
        allowed: "adaptive or pytorch",
        doc: "how large new segments are: by what was asked for so far, or as in PyTorch",
        parse: |c, v| put(&mut c.segments, by_name(SEGMENTS, v)),
        print: |c| name_of(SEGMENTS, c.segments),
    },
    ConfigKey {
        name: "cross_stream_reuse",
        allowed: BOOL,
        doc: "a block freed on one stream may serve another, which waits for the first on the device",
        parse: |c, v| put(&mut c.cross_stream_reuse, boolean(v)),
        print: |c| show_bool(c.cross_stream_reuse),
    },
    ConfigKey {
        name: "compaction",
        allowed: BOOL,
        doc: "live blocks are moved together before an allocation fails",
        parse: |c, v| put(&mut c.compaction, boolean(v)),
        print: |c| show_bool(c.compaction),
    },
    ConfigKey {
        name: "compaction_budget_mb",
        allowed: "a whole number of MiB, 0 for no bound",
        doc: "the most to move at a time",
        parse: |c, v| put(&mut c.compaction_budget, bytes(v, MIB, 0)),
        print: |c| show(c.compaction_budget, MIB),
    },
    ConfigKey {
        name: "thread_cache_kb",
        allowed: "a whole number of KiB, 0 for none",
        doc: "what a thread keeps for itself of small sizes",
        parse: |c, v| put(&mut c.thread_cache, bytes(v, KIB, 0)),
        print: |c| show(c.thread_cache, KIB),
    },
    ConfigKey {
        name: "decay_ms",
        allowed: "a whole number of milliseconds, 0 for never",
        doc: "segments unused for this long go back to the driver",
        parse: |c, v| put(&mut c.decay, whole(v).map(Duration::from_millis)),
        print: |c| match u64::try_from(c.decay.as_millis()) {
            Ok(ms) if Duration::from_millis(ms) == c.decay => ms.to_string(),
            _ => format!("{:?}", c.decay),
        },
    },
    ConfigKey {
        name: "zero_fill",
        allowed: BOOL,
        doc: "new allocations are all zeros",
        parse: |c, v| put(&mut c.zero_fill, boolean(v)),
        print: |c| show_bool(c.zero_fill),
    },
    ConfigKey {
        name: "junk_fill",
        allowed: BOOL,
        doc: "new allocations are filled with junk",
        parse: |c, v| put(&mut c.junk_fill, boolean(v)),
        print: |c| show_bool(c.junk_fill),
    },
    ConfigKey {
        name: "guard_bytes",
        allowed: BOOL,
        doc: "debugging: guard bytes around every block, looked at when it is freed, and poison in freed ones",
        parse: |c, v| put(&mut c.guard_bytes, boolean(v)),
        print: |c| show_bool(c.guard_bytes),
    },
    ConfigKey {
        name: "pool_overfit",
        allowed: "a number, 1 or more",
        doc: "the pool backend reuses a buffer of at most this many times the request",
        parse: |c, v| put(&mut c.pool_overfit, number(v, 1.0..=f64::MAX)),
        print: |c| c.pool_overfit.to_string(),
    },
    ConfigKey {
        name: "numa_local",
        allowed: BOOL,
        doc: "the CPU device's large segments prefer the NUMA node that asks for them, on Linux",
        parse: |c, v| put(&mut c.numa_local, boolean(v)),
        print: |c| show_bool(c.numa_local),
    },
];

/// The items of a list: parted by commas that no bracket encloses, a last comma ignored.
pub(super) fn list(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.split_terminator(move |c| {
        inside = c == '[' || inside && c != ']';
        c == ',' && !inside
    })
}

fn put<T>(field: &mut T, value: Option<T>) -> bool {
    value.map(|value| *field = value).is_some()
}

fn by_name<T: Copy>(names: &[(&str, T)], value: &str) -> Option<T> {
    names.iter().find(|(name, _)| *name == value).map(|(_, of)| *of)
}

fn name_of<T: PartialEq>(names: &[(&str, T)], value: T) -> String {
    names.iter().find(|(_, of)| *of == value).map_or(String::new(), |(name, _)| (*name).to_owned())
}

fn boolean(value: &str) -> Option<bool> {
    match value {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

fn show_bool(value: bool) -> String {
    if value { "True" } else { "False" }.to_owned()
}

/// Digits only: no sign, no fraction.
fn whole(value: &str) -> Option<u64> {
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

fn number(value: &str, range: RangeInclusive<f64>) -> Option<f64> {
    value.parse().ok().filter(|x| range.contains(x))
}

fn bytes(value: &str, unit: usize, least: usize) -> Option<usize> {
    let units = usize::try_from(whole(value)?).ok().filter(|units| *units >= least)?;
    units.checked_mul(unit)
}

fn limit(value: &str, least: usize) -> Option<usize> {
    if value == UNLIMITED { Some(usize::MAX) } else { bytes(value, MIB, least) }
}

const UNLIMITED: &str = "unlimited";

fn show(bytes: usize, unit: usize) -> String {
    match bytes {
        usize::MAX => UNLIMITED.to_owned(),
        _ if bytes.is_multiple_of(unit) => (bytes / unit).to_string(),
        _ => format!("{bytes} bytes"),
    }
}

/// One number for all sizes, or a list. What a list does not name below its first size is as that, everything else it
/// does not name is not divided: PyTorch's reading.
fn divisions(value: &str) -> Option<[usize; INTERVALS]> {
    let power = |text: &str| usize::try_from(whole(text)?).ok().filter(|n| n.is_power_of_two());
    let Some(items) = value.strip_prefix('[') else {
        return power(value).map(|n| [n; INTERVALS]);
    };
    let items = items.strip_suffix(']')?;
    let mut divisions = [0; INTERVALS];
    let mut last = None;
    for item in items.split(',') {
        let (size, parts) = item.split_once(':')?;
        let parts = if whole(parts)? == 0 { 0 } else { power(parts)? };
        if size == ">" {
            divisions[last.map_or(0, |last| last + 1)..].fill(parts);
        } else {
            let interval = (power(size)?.ilog2() as usize).min(INTERVALS - 1);
            let from = if last.is_none() { 0 } else { interval };
            divisions[from..=interval].fill(parts);
            last = Some(interval);
        }
    }
    Some(divisions)
}

fn show_divisions(divisions: &[usize; INTERVALS]) -> String {
    let (first, last) = (divisions[0], divisions[INTERVALS - 1]);
    let same_as_first = divisions.iter().take_while(|n| **n == first).count();
    let same_as_last = divisions.iter().rev().take_while(|n| **n == last).count();
    match same_as_first {
        INTERVALS if first > 0 => first.to_string(),
        INTERVALS => "[>:0]".to_owned(),
        _ => {
            let named = same_as_first - 1..INTERVALS - same_as_last;
            let items: String = named.map(|i| format!("{}:{},", 1u32 << i, divisions[i])).collect();
            format!("[{items}>:{last}]")
        }
    }
}
