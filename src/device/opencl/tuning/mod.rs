//! The values of a device's [`parameters`]; [`choices`] has values per kernel and size class.
//! [`tune`](crate::tune) times the values and stores the fastest in the disk cache, one file per device, for later processes. A
//! file that is damaged, or made with another driver, is not used.

mod choices;
mod level;
mod parameters;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use sha2::{Digest, Sha256};

use super::cache::{Cache, FileKind};
use crate::device::{DeviceInfo, DeviceKind, log};
use crate::error::Excerpt;
use choices::{Choices, Chosen, level_from_environment};
pub(crate) use choices::{MAX_TUNED_GROUP_ITEMS, SizeClass, Subject};
pub(super) use choices::{group_candidates, prepare_with_trials};
pub use level::Level;
pub(crate) use level::MAX_TIME_RATIO;
use parameters::{ALL, Family, Values, defaults, rows};
pub(crate) use parameters::{PARAMETERS, ParameterRow, TuningParameter};

static TIMES_TUNED: AtomicU64 = AtomicU64::new(0);

/// Returns a number that grows with every change of a parameter on any device. Earlier decisions must then not be reused.
#[inline]
pub(crate) fn times_tuned() -> u64 {
    TIMES_TUNED.load(Acquire)
}

/// Invalidates the kernels that launches on every device have selected with the earlier values.
pub(super) fn kernels_changed() {
    TIMES_TUNED.fetch_add(1, Release);
}

/// The values of a device's parameters, and the file that stores the values for later processes.
pub(crate) struct Tuning {
    pub(crate) family: Family,
    /// The device, driver and version for which the measurements hold.
    identity: String,
    /// The name of the file. The name does not depend on the driver, so that a changed driver can be reported.
    pub(super) file: String,
    pub(super) values: [AtomicUsize; PARAMETERS.len()],
    /// True if the values were set or loaded for this device, even if they equal the defaults.
    is_chosen: AtomicBool,
    pub(crate) choices: Choices,
}

pub(super) type Stored = (Values, Chosen);

impl Tuning {
    /// Creates the values of a device, and loads the stored values.
    pub(super) fn load(info: &DeviceInfo) -> Tuning {
        let family = match info.kind {
            DeviceKind::Cpu if has_32_wide_registers() => Family::WideProcessor,
            DeviceKind::Cpu => Family::Processor,
            _ => Family::Gpu,
        };
        let tuning = Tuning {
            family,
            identity: identity(info),
            file: FileKind::Tuning.name(&Sha256::digest(format!("{}\n{}\n{family:?}", info.name, info.vendor)).into()),
            values: defaults(family).map(AtomicUsize::new),
            is_chosen: AtomicBool::new(false),
            choices: Choices::new(level_from_environment()),
        };
        if let Some(stored) = Cache::of_process().and_then(|cache| tuning.stored(cache)) {
            tuning.apply(stored);
        }
        tuning
    }

    fn apply(&self, (values, chosen): Stored) {
        self.values.iter().zip(values).for_each(|(at, value)| at.store(value, Relaxed));
        self.choices.extend(chosen);
        self.is_chosen.store(true, Relaxed);
    }

    /// Makes every launch look up its parameters again.
    fn invalidate_launches(&self) {
        self.choices.update_is_on();
        kernels_changed();
    }

    /// Sets a parameter in this process.
    pub(crate) fn set(&self, knob: TuningParameter, value: usize) {
        self.values[knob as usize].store(value, Relaxed);
        self.is_chosen.store(true, Relaxed);
        self.invalidate_launches();
    }

    /// Sets all parameters in this process, and adds choices.
    pub(super) fn set_all(&self, stored: Stored) {
        self.apply(stored);
        self.invalidate_launches();
    }

    pub(super) fn is_chosen(&self) -> bool {
        self.is_chosen.load(Relaxed)
    }

    /// Sets the tuning level of this process. Trials in progress start anew.
    pub(crate) fn set_level(&self, level: Level) {
        self.choices.set_level(level);
        self.invalidate_launches();
    }

    /// Enables or disables the choices in this process, and returns whether they were enabled.
    pub(crate) fn use_choices(&self, on: bool) -> bool {
        let before = self.choices.set_enabled(on);
        self.invalidate_launches();
        before
    }

    pub(crate) fn forget_choices(&self) {
        self.choices.clear();
        self.invalidate_launches();
    }

    /// Returns the parameters of the device's kernels.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'static ParameterRow> + use<> {
        rows(self.family).map(|(_, row)| row)
    }

    /// Stores the values for other processes. Returns the file's path, or `None` if the cache is off.
    pub(crate) fn save(&self) -> io::Result<Option<PathBuf>> {
        let Some(cache) = Cache::of_process() else { return Ok(None) };
        cache.store(&self.file, self.text().as_bytes()).map(Some)
    }

    /// Stores a new choice, together with choices that other processes have stored meanwhile.
    pub(super) fn store_new_choices(&self) {
        self.is_chosen.store(true, Relaxed);
        let Some(cache) = Cache::of_process() else { return };
        let (values, mut chosen) = self.stored(cache).unwrap_or_else(|| (self.values(), Chosen::new()));
        chosen.extend(self.choices.chosen());
        if let Err(error) = cache.store(&self.file, write(&self.identity, self.family, &values, &chosen).as_bytes()) {
            log::emit(move || tracing::debug!(%error, "a tuned choice could not be stored"));
        }
    }

    /// Returns the contents of the file with the current values.
    pub(super) fn text(&self) -> String {
        write(&self.identity, self.family, &self.values(), &self.choices.chosen())
    }

    fn values(&self) -> Values {
        std::array::from_fn(|i| self.values[i].load(Relaxed))
    }

    /// Parses [`text`](Self::text). The error says that the text is invalid, or of another device, driver or version.
    pub(super) fn read(&self, text: &str) -> Result<Stored, String> {
        read(text, &self.identity, self.family)
    }

    /// Loads the file, if there is one from this driver and version.
    fn stored(&self, cache: &Cache) -> Option<Stored> {
        let read = match cache.load(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Err(error.to_string()),
            Ok(text) => self.read(&String::from_utf8_lossy(&text)),
        };
        read.inspect_err(|why| tracing::warn!(why, "stored tuning not used: run `claystone tune` again")).ok()
    }
}

/// Returns the device, driver and version for which measurements hold.
pub(super) fn identity(info: &DeviceInfo) -> String {
    format!("{}, driver {}, claystone {}", info.name, info.driver, env!("CARGO_PKG_VERSION"))
}

/// Formats a tuning file: `identity`, one line per parameter, and the choices.
fn write(identity: &str, family: Family, values: &Values, chosen: &Chosen) -> String {
    let lines: String = rows(family).map(|(i, p)| format!("{} {}\n", p.name, values[i])).collect();
    format!("{identity}\n{lines}{}", choices::write(chosen))
}

/// Parses the text of [`write`]. The error names the missing or invalid part, or another identity.
fn read(text: &str, identity: &str, family: Family) -> Result<Stored, String> {
    let text = text.strip_suffix('\n').ok_or("it is truncated")?;
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    if first != identity {
        return Err(format!("it was measured on \"{}\", and this is \"{identity}\"", Excerpt(first)));
    }
    let mut values = defaults(family);
    let mut lines = rest.lines();
    for (i, p) in rows(family) {
        let line = lines.next().unwrap_or_default();
        let value = line.strip_prefix(p.name).and_then(|value| value.strip_prefix(' ')?.parse().ok());
        let choice = value.filter(|value| p.choices.contains(value));
        values[i] = choice.ok_or_else(|| format!("\"{}\" is not a valid choice of {}", Excerpt(line), p.name))?;
    }
    Ok((values, choices::read(lines, family)?))
}

/// Checks the contents of a tuning file of any device. The error describes the fault.
pub(super) fn check(text: &str) -> Result<(), String> {
    let identity = text.split('\n').next().unwrap_or_default();
    ALL.iter().try_for_each(|&family| {
        let (values, _) = read(text, identity, family)?;
        debug_assert!(rows(family).all(|(i, p)| p.choices.contains(&values[i])), "values that are no choices");
        Ok(())
    })
}

/// True if the host has AVX-512, and so 32 vector registers of 64 bytes.
fn has_32_wide_registers() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::mutate::{self, Random, mutated};
    use super::super::tests::devices;
    use super::*;

    #[test]
    fn the_parameter_table_is_in_order_and_defaults_are_allowed() {
        for (i, p) in PARAMETERS.iter().enumerate() {
            assert_eq!(p.knob as usize, i, "{}", p.name);
            assert!(p.families.iter().all(|&family| p.choices.contains(&p.default(family))), "{}", p.name);
        }
    }

    #[test]
    fn written_tuning_reads_back_and_others_fail() {
        for family in ALL.iter().copied() {
            let mut values = defaults(family);
            rows(family).for_each(|(i, p)| values[i] = p.choices[p.choices.len() - 1]);
            let chosen = choices::tests::sample_choices(family);
            let text = write("here, driver 1", family, &values, &chosen);
            assert_eq!(read(&text, "here, driver 1", family), Ok((values, chosen)));
            assert!(read(&text, "here, driver 2", family).unwrap_err().contains("driver 1"), "of another driver");
            let cut: Vec<usize> = text.char_indices().map(|(at, _)| at).filter(|&at| at + 1 < text.len()).collect();
            assert!(cut.into_iter().all(|at| read(&text[..at], "here, driver 1", family).is_err()), "cut short");
            let (name, choice) = rows(family).map(|(_, p)| (p.name, p.choices[p.choices.len() - 1])).next().unwrap();
            let right = format!("{name} {choice}\n");
            for wrong in [format!("{name} 7\n"), format!("{name} -1\n"), format!("{name}\n"), "\u{0}\n".to_owned()] {
                let error = read(&text.replace(&right, &wrong), "here, driver 1", family).unwrap_err();
                assert!(error.contains(name), "{error}");
            }
            assert!(read(&(text + "more 1\n"), "here, driver 1", family).is_err());
        }
    }

    /// Parsing a changed file must give values that the parameters allow, or an error. `CLAYSTONE_MUTATIONS` sets the number of
    /// inputs for each family of devices.
    #[test]
    fn mutated_files_give_choices_or_errors() {
        for family in ALL.iter().copied() {
            let whole = [0, 1].map(|i| {
                let mut values = defaults(family);
                rows(family).for_each(|(row, p)| values[row] = p.choices[i % p.choices.len()]);
                let chosen = if i == 0 { choices::tests::sample_choices(family) } else { Chosen::new() };
                write("here, driver 1", family, &values, &chosen).into_bytes()
            });
            let mut random = Random(0);
            for _ in 0..mutate::count(2000) {
                let text = mutated(&mut random, &whole);
                match read(&String::from_utf8_lossy(&text), "here, driver 1", family) {
                    Ok((values, chosen)) => {
                        assert!(rows(family).all(|(i, p)| p.choices.contains(&values[i])));
                        assert!(choices::tests::are_allowed(&chosen));
                    }
                    Err(why) => assert!(why.len() < 1000, "{why}"),
                }
            }
        }
    }

    #[test]
    fn missing_or_foreign_tuning_files_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path(), 1 << 20);
        for device in devices() {
            let Tuning { family, ref identity, ref file, .. } = *device.tuning();
            let stored = || device.tuning().stored(&cache);
            assert_eq!(stored(), None);
            let mut values = defaults(family);
            rows(family).for_each(|(i, p)| values[i] = p.choices[0]);
            let chosen = choices::tests::sample_choices(family);
            let text = write(identity, family, &values, &chosen);
            let path = cache.store(file, text.as_bytes()).unwrap();
            assert_eq!(stored(), Some((values, chosen)));
            let whole = fs::read(&path).unwrap();
            for broken in [&b""[..], b"\xff\xfe", text.as_bytes(), &whole[..whole.len() - 1]] {
                fs::write(&path, broken).unwrap();
                assert_eq!(stored(), None);
            }
            for other in [&b"\xff\xfe"[..], &text.as_bytes()[..text.len() / 2], &text.as_bytes()[1..]] {
                cache.store(file, other).unwrap();
                assert_eq!(stored(), None);
            }
            // The tuning file of another device, under this device's name.
            cache.store(&FileKind::Tuning.name(&[7; 32]), text.as_bytes()).unwrap();
            fs::rename(dir.path().join(FileKind::Tuning.name(&[7; 32])), &path).unwrap();
            assert_eq!(stored(), None);
        }
    }
}
