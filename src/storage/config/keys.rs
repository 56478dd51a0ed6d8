//! The table of keys.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::{Backend, Config, INTERVALS, MIB, MemoryMode, OP, SegmentSizes};
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
    pub(super) parse: fn(&mut Config, &str) -> bool,
    /// Prints the value, injectively: what cannot be written as text is printed as something that does not parse.
    pub(super) print: fn(&Config) -> String,
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

/// How the values of some keys are written.
pub(super) struct Form<T> {
    /// What may be written.
    pub(super) allowed: &'static str,
    pub(super) parse: fn(&str) -> Option<T>,
    pub(super) print: fn(&T) -> String,
}

/// Defines the configuration and its table of keys from rows of `field: type = default, "key", form, "what it does";`.
macro_rules! config {
    (
        $(#[$about:meta])*
        pub struct Config;

        $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr, $name:literal, $form:ident, $doc:literal;)*
    ) => {
        $(#[$about])*
        pub struct Config {
            $($(#[$field_doc])* pub $field: $type,)*
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

/// The forms of values.
pub(super) mod forms {
    use super::*;

    pub(crate) const SWITCH: Form<bool> = Form {
        allowed: "True or False",
        parse: |text| by_name(&[("True", true), ("False", false)], text),
        print: |on| if *on { "True" } else { "False" }.to_owned(),
    };
    const BACKENDS: &[(&str, Backend)] = &[
        ("caching", Backend::Caching),
        ("pool", Backend::Pool),
        ("direct", Backend::Direct),
        ("native", Backend::Caching), // PyTorch's name for it
    ];
    pub(crate) const BACKEND: Form<Backend> = Form {
        allowed: "caching, pool or direct (native is caching)",
        parse: |text| by_name(BACKENDS, text),
        print: |backend| name_of(BACKENDS, backend),
    };
    const MODES: &[(&str, MemoryMode)] =
        &[("buffer", MemoryMode::Buffer), ("image", MemoryMode::Image), ("auto", MemoryMode::Auto)];
    pub(crate) const MEMORY_MODES: Form<MemoryMode> = Form {
        allowed: "buffer, image or auto (as claystone tune found)",
        parse: |text| by_name(MODES, text),
        print: |mode| name_of(MODES, mode),
    };
    const SIZES: &[(&str, SegmentSizes)] = &[("adaptive", SegmentSizes::Adaptive), ("pytorch", SegmentSizes::PyTorch)];
    pub(crate) const SEGMENTS: Form<SegmentSizes> = Form {
        allowed: "adaptive or pytorch",
        parse: |text| by_name(SIZES, text),
        print: |sizes| name_of(SIZES, sizes),
    };
    pub(crate) const MIB_FROM_1: Form<usize> = bytes::<MIB, 1>("a whole number of MiB, 1 or more");
    pub(crate) const MIB_FROM_20: Form<usize> = bytes::<MIB, 20>("a whole number of MiB, 20 or more");
    pub(crate) const BUDGET: Form<usize> = bytes::<MIB, 0>("a whole number of MiB, 0 for no bound");
    pub(crate) const KIB_OR_NONE: Form<usize> = bytes::<KIB, 0>("a whole number of KiB, 0 for none");
    pub(crate) const LIMIT: Form<usize> = limit::<0>("a whole number of MiB, or unlimited");
    pub(crate) const LIMIT_FROM_20: Form<usize> = limit::<20>("a whole number of MiB, 20 or more, or unlimited");
    pub(crate) const DIVISIONS: Form<[usize; INTERVALS]> = Form {
        allowed: "a power of two, or a list [64:8,256:4,>:1] of sizes in MiB, powers of two (> is all larger), and \
                  divisions, powers of two or 0",
        parse: divisions,
        print: show_divisions,
    };
    pub(crate) const FRACTION: Form<f64> =
        Form { allowed: "a number from 0 to 1", parse: |text| number(text, 0.0..=1.0), print: f64::to_string };
    pub(crate) const INNER_FRACTION: Form<f64> = Form {
        allowed: "a number above 0 and below 1",
        parse: |text| number(text, 0.0..=1.0).filter(|x| *x > 0.0 && *x < 1.0),
        print: f64::to_string,
    };
    pub(crate) const FACTOR: Form<f64> =
        Form { allowed: "a number, 1 or more", parse: |text| number(text, 1.0..=f64::MAX), print: f64::to_string };
    pub(crate) const MILLISECONDS: Form<Duration> = Form {
        allowed: "a whole number of milliseconds, 0 for never",
        parse: |text| whole(text).map(Duration::from_millis),
        print: |time| match u64::try_from(time.as_millis()) {
            Ok(ms) if Duration::from_millis(ms) == *time => ms.to_string(),
            _ => format!("{time:?}"),
        },
    };
}

/// The items of a list: parted by commas that no bracket encloses, a last comma ignored.
pub(super) fn list(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.split_terminator(move |c| {
        inside = c == '[' || inside && c != ']';
        c == ',' && !inside
    })
}

fn by_name<T: Copy>(names: &[(&str, T)], value: &str) -> Option<T> {
    names.iter().find(|(name, _)| *name == value).map(|(_, of)| *of)
}

fn name_of<T: PartialEq>(names: &[(&str, T)], value: &T) -> String {
    names.iter().find(|(_, of)| of == value).map_or(String::new(), |(name, _)| (*name).to_owned())
}

/// Digits only: no sign, no fraction.
fn whole(value: &str) -> Option<u64> {
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

fn number(value: &str, range: RangeInclusive<f64>) -> Option<f64> {
    value.parse().ok().filter(|x| range.contains(x))
}

const UNLIMITED: &str = "unlimited";

/// Whole numbers of a unit of bytes.
const fn bytes<const UNIT: usize, const LEAST: usize>(allowed: &'static str) -> Form<usize> {
    Form { allowed, parse: |text| units(text, UNIT, LEAST), print: |bytes| show(*bytes, UNIT) }
}

/// Likewise of MiB, or no limit.
const fn limit<const LEAST: usize>(allowed: &'static str) -> Form<usize> {
    let parse = |text: &str| if text == UNLIMITED { Some(usize::MAX) } else { units(text, MIB, LEAST) };
    Form { allowed, parse, print: |bytes| show(*bytes, MIB) }
}

fn units(value: &str, unit: usize, least: usize) -> Option<usize> {
    let units = usize::try_from(whole(value)?).ok().filter(|units| *units >= least)?;
    units.checked_mul(unit)
}

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
