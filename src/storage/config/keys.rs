//! The table of configuration keys.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::{Backend, CONFIG_OP, Config, MIB, MemoryMode, ROUNDUP_INTERVALS, SegmentSizes, Spill};
use crate::error::Excerpt;
use crate::{Error, Result};

const KIB: usize = 1 << 10;

/// A key of `CLAYSTONE_ALLOC_CONF`. Display prints its name, default, allowed values and description.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConfigKey {
    /// The name of the key, as written before the colon.
    pub name: &'static str,
    /// The allowed values, in words.
    pub allowed: &'static str,
    /// The key's description.
    pub doc: &'static str,
    /// Parses a value into the configuration; returns false if the value is not allowed.
    pub(super) parse: fn(&mut Config, &str) -> bool,
    /// Prints the value. Different values give different text: a value that no text parses to is printed in a form that does not parse.
    pub(super) print: fn(&Config) -> String,
}

impl ConfigKey {
    /// Returns the default value as text.
    pub fn default_value(&self) -> String {
        self.value(&Config::default())
    }

    /// Returns the value in a configuration as text.
    pub fn value(&self, config: &Config) -> String {
        (self.print)(config)
    }

    /// Parses and stores a value, or returns an error that names the key and the allowed values.
    pub(super) fn set(&self, config: &mut Config, value: &str) -> Result<()> {
        if (self.parse)(config, value) {
            return Ok(());
        }
        let given = if value.is_empty() { "has no value".into() } else { format!("cannot be '{}'", Excerpt(value)) };
        Err(Error::invalid(CONFIG_OP, format!("{} {given}: give {}", self.name, self.allowed)))
    }
}

impl fmt::Display for ConfigKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = format!("{} (default {}; {}): {}", self.name, self.default_value(), self.allowed, self.doc);
        f.pad(&line)
    }
}

/// PyTorch's keys for features that OpenCL does not have, each with the reason.
pub(super) const UNSUPPORTED_PYTORCH_KEYS: &[(&str, &str)] = &[
    ("release_lock_on_cudamalloc", "no lock is ever held while the driver allocates memory"),
    ("release_lock_on_hipmalloc", "no lock is ever held while the driver allocates memory"),
    ("graph_capture_record_stream_reuse", "OpenCL has no stream capture to record into"),
    ("pinned_use_cuda_host_register", "OpenCL cannot pin memory that it did not allocate"),
    ("pinned_use_hip_host_register", "OpenCL cannot pin memory that it did not allocate"),
    ("pinned_num_register_threads", "OpenCL cannot pin memory that it did not allocate"),
    ("pinned_max_round_threshold_mb", "pinned blocks of every size are rounded up by at most 12.5 %"),
    ("pinned_free_catch_all", "freeing pinned memory raises no errors"),
    ("throw_on_cudamalloc_oom", "requests beyond the limit always fail before the driver is asked"),
    ("expandable_segments_reserve", "a growing segment reserves addresses only, as many as the device has memory"),
    (
        "expandable_segments_reserve_by_class",
        "a growing segment reserves addresses only, as many as the device has memory",
    ),
];

/// How values of one type are parsed and printed.
pub(super) struct ValueFormat<T> {
    /// The allowed values, in words.
    pub(super) allowed: &'static str,
    pub(super) parse: fn(&str) -> Option<T>,
    pub(super) print: fn(&T) -> String,
}

/// Defines the configuration and its key table from rows of `field: type = default, "key", form, "description";`.
macro_rules! config {
    (
        $(#[$about:meta])*
        pub struct Config;

        $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr, $name:literal, $form:ident, $doc:literal;)*
    ) => {
        $(#[$about])*
        pub struct Config {
            $(
                #[doc = concat!("`", $name, "`: ", $doc, ".\n\n")]
                $(#[$field_doc])*
                pub $field: $type,
            )*
        }

        impl Default for Config {
            fn default() -> Config {
                Config { $($field: $default,)* }
            }
        }

        impl Config {
            /// Every key, in the order in which Display prints them.
            ///
            /// ```
            /// use claystone::storage::Config;
            /// for key in Config::KEYS {
            ///     println!("{key}"); // name, default, what it may be, what it does
            /// }
            /// ```
            pub const KEYS: &'static [ConfigKey] = &[$(ConfigKey {
                name: $name,
                allowed: $form.allowed,
                doc: $doc,
                parse: |config, text| ($form.parse)(text).map(|value| config.$field = value).is_some(),
                print: |config| ($form.print)(&config.$field),
            },)*];
        }
    };
}
pub(super) use config;

/// Defines one [`ValueFormat`] for each type of value.
pub(super) mod formats {
    use super::*;

    /// Returns the format of values with names. If a value has several names, the first is printed.
    macro_rules! by_name {
        ($allowed:literal, $($name:literal => $value:expr),*) => {
            ValueFormat {
                allowed: $allowed,
                parse: |text| [$(($name, $value)),*].into_iter().find(|(name, _)| *name == text).map(|(_, value)| value),
                print: |value| {
                    let name = [$(($name, $value)),*].into_iter().find(|(_, known)| known == value);
                    name.map_or(String::new(), |(name, _)| name.to_owned())
                },
            }
        };
    }

    pub(crate) const BOOLEAN: ValueFormat<bool> = by_name!("True or False", "True" => true, "False" => false);
    pub(crate) const BACKEND: ValueFormat<Backend> = by_name!(
        "caching, pool or direct (native is caching)",
        "caching" => Backend::Caching,
        "pool" => Backend::Pool,
        "direct" => Backend::Direct,
        "native" => Backend::Caching // PyTorch's name for it
    );
    pub(crate) const MEMORY_MODES: ValueFormat<MemoryMode> = by_name!(
        "buffer, image or auto (as claystone tune found)",
        "buffer" => MemoryMode::Buffer,
        "image" => MemoryMode::Image,
        "auto" => MemoryMode::Auto
    );
    pub(crate) const SEGMENTS: ValueFormat<SegmentSizes> =
        by_name!("adaptive or pytorch", "adaptive" => SegmentSizes::Adaptive, "pytorch" => SegmentSizes::PyTorch);
    pub(crate) const SPILL: ValueFormat<Spill> =
        by_name!("off, host or disk", "off" => Spill::Off, "host" => Spill::Host, "disk" => Spill::Disk);
    pub(crate) const MIB_FROM_1: ValueFormat<usize> = bytes::<MIB, 1>("a whole number of MiB, 1 or more");
    pub(crate) const MIB_FROM_20: ValueFormat<usize> = bytes::<MIB, 20>("a whole number of MiB, 20 or more");
    pub(crate) const BUDGET: ValueFormat<usize> = bytes::<MIB, 0>("a whole number of MiB, 0 for no bound");
    pub(crate) const KIB_OR_NONE: ValueFormat<usize> = bytes::<KIB, 0>("a whole number of KiB, 0 for none");
    pub(crate) const LIMIT: ValueFormat<usize> = limit::<0>("a whole number of MiB, or unlimited");
    pub(crate) const LIMIT_FROM_20: ValueFormat<usize> = limit::<20>("a whole number of MiB, 20 or more, or unlimited");
    pub(crate) const DIVISIONS: ValueFormat<[usize; ROUNDUP_INTERVALS]> = ValueFormat {
        allowed: "a power of two, or a list [64:8,256:4,>:1] of sizes in MiB, powers of two (> is all larger), and \
                  divisions, powers of two or 0",
        parse: parse_divisions,
        print: print_divisions,
    };
    pub(crate) const FRACTION: ValueFormat<f64> = ValueFormat {
        allowed: "a number from 0 to 1",
        parse: |text| parse_number(text, 0.0..=1.0),
        print: f64::to_string,
    };
    pub(crate) const INNER_FRACTION: ValueFormat<f64> = ValueFormat {
        allowed: "a number above 0 and below 1",
        parse: |text| parse_number(text, 0.0..=1.0).filter(|x| *x > 0.0 && *x < 1.0),
        print: f64::to_string,
    };
    pub(crate) const FACTOR: ValueFormat<f64> = ValueFormat {
        allowed: "a number, 1 or more",
        parse: |text| parse_number(text, 1.0..=f64::MAX),
        print: f64::to_string,
    };
    pub(crate) const MILLISECONDS: ValueFormat<Duration> = ValueFormat {
        allowed: "a whole number of milliseconds, 0 for never",
        parse: |text| parse_whole_number(text).map(Duration::from_millis),
        print: |time| match u64::try_from(time.as_millis()) {
            Ok(ms) if Duration::from_millis(ms) == *time => ms.to_string(),
            _ => format!("{time:?}"),
        },
    };
}

/// Splits a list at commas outside brackets. A trailing comma is ignored.
pub(super) fn split_list(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.split_terminator(move |c| {
        inside = c == '[' || inside && c != ']';
        c == ',' && !inside
    })
}

/// Parses a whole number that consists of digits only, without a sign.
fn parse_whole_number(value: &str) -> Option<u64> {
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

fn parse_number(value: &str, range: RangeInclusive<f64>) -> Option<f64> {
    value.parse().ok().filter(|x| range.contains(x))
}

const UNLIMITED: &str = "unlimited";

/// Returns the format of a size in whole units of `UNIT` bytes, at least `MIN_UNITS` units.
const fn bytes<const UNIT: usize, const MIN_UNITS: usize>(allowed: &'static str) -> ValueFormat<usize> {
    ValueFormat { allowed, parse: |text| parse_units(text, UNIT, MIN_UNITS), print: |bytes| print_units(*bytes, UNIT) }
}

/// Returns the format of a size in whole MiB, at least `MIN_UNITS` MiB, or of no limit.
const fn limit<const MIN_UNITS: usize>(allowed: &'static str) -> ValueFormat<usize> {
    let parse = |text: &str| if text == UNLIMITED { Some(usize::MAX) } else { parse_units(text, MIB, MIN_UNITS) };
    ValueFormat { allowed, parse, print: |bytes| print_units(*bytes, MIB) }
}

/// Parses a whole number of at least `least` units, and returns it in bytes.
fn parse_units(value: &str, unit: usize, least: usize) -> Option<usize> {
    let units = usize::try_from(parse_whole_number(value)?).ok().filter(|units| *units >= least)?;
    units.checked_mul(unit)
}

/// Prints bytes in whole units, `unlimited` for `usize::MAX`, or text that does not parse if `bytes` is not a whole number of units.
fn print_units(bytes: usize, unit: usize) -> String {
    match bytes {
        usize::MAX => UNLIMITED.to_owned(),
        _ if bytes.is_multiple_of(unit) => (bytes / unit).to_string(),
        _ => format!("{bytes} bytes"),
    }
}

/// Parses one number for all sizes, or a list. As in PyTorch, sizes below the first size in the list take its
/// divisions, and other sizes that are not in the list are not divided.
fn parse_divisions(value: &str) -> Option<[usize; ROUNDUP_INTERVALS]> {
    let power = |text: &str| usize::try_from(parse_whole_number(text)?).ok().filter(|n| n.is_power_of_two());
    let Some(items) = value.strip_prefix('[') else {
        return power(value).map(|n| [n; ROUNDUP_INTERVALS]);
    };
    let items = items.strip_suffix(']')?;
    let mut divisions = [0; ROUNDUP_INTERVALS];
    let mut last = None;
    for item in items.split(',') {
        let (size, parts) = item.split_once(':')?;
        let parts = if parse_whole_number(parts)? == 0 { 0 } else { power(parts)? };
        if size == ">" {
            divisions[last.map_or(0, |last| last + 1)..].fill(parts);
        } else {
            let interval = (power(size)?.ilog2() as usize).min(ROUNDUP_INTERVALS - 1);
            let from = if last.is_none() { 0 } else { interval };
            divisions[from..=interval].fill(parts);
            last = Some(interval);
        }
    }
    Some(divisions)
}

/// Prints divisions in the form that [`parse_divisions`] parses.
fn print_divisions(divisions: &[usize; ROUNDUP_INTERVALS]) -> String {
    let (first, last) = (divisions[0], divisions[ROUNDUP_INTERVALS - 1]);
    let same_as_first = divisions.iter().take_while(|n| **n == first).count();
    let same_as_last = divisions.iter().rev().take_while(|n| **n == last).count();
    match same_as_first {
        ROUNDUP_INTERVALS if first > 0 => first.to_string(),
        ROUNDUP_INTERVALS => "[>:0]".to_owned(),
        _ => {
            let named = same_as_first - 1..ROUNDUP_INTERVALS - same_as_last;
            let items: String = named.map(|i| format!("{}:{},", 1u32 << i, divisions[i])).collect();
            format!("[{items}>:{last}]")
        }
    }
}
