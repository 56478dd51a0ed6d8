//! The values of a device's [`parameters`](super::parameters). [`tune`](crate::tune) measures the choices and keeps what it finds beside the programs, in a file a device;
//! every process that opens the device later has it. A file that is damaged, or of another driver, is not used.
//! These are the device's values; [`choices`](super::choices) has others for kernels and classes of sizes.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use sha2::{Digest, Sha256};

use super::ClDevice;
use super::cache::{Cache, Kind};
use super::choices::{self, Choices, Chosen, level_of_process};
use super::parameters::{ALL, Family, Knob, PARAMETERS, Values, defaults, rows};
use crate::device::{DeviceKind, log};
use crate::error::Excerpt;

/// How often a parameter of any device was set.
static TIMES_TUNED: AtomicU64 = AtomicU64::new(0);

/// A number that is another one after every change of a parameter: what was chosen before is not to be used then.
#[inline]
pub(crate) fn times_tuned() -> u64 {
    TIMES_TUNED.load(Acquire)
}

/// Has launches choose their kernels anew, on every device.
pub(super) fn kernels_changed() {
    TIMES_TUNED.fetch_add(1, Release);
}

/// A value for every row of the table.
pub(super) struct Tuning {
    values: [AtomicUsize; PARAMETERS.len()],
    /// Whether somebody chose them, for this device.
    is_chosen: AtomicBool,
    /// For kernels and classes of sizes.
    pub(super) choices: Choices,
}

/// All that a file has.
pub(super) type Stored = (Values, Chosen);

impl Tuning {
    /// Has everybody ask again.
    pub(super) fn changed(&self) {
        self.choices.note_use();
        kernels_changed();
    }
}

impl ClDevice {
    pub(crate) fn family(&self) -> Family {
        match self.info().kind {
            DeviceKind::Cpu if many_registers() => Family::WideProcessor,
            DeviceKind::Cpu => Family::Processor,
            _ => Family::Gpu,
        }
    }

    /// The value of a parameter on this device.
    pub(crate) fn tuned(&self, knob: Knob) -> usize {
        self.tuning().values[knob as usize].load(Relaxed)
    }

    /// Sets it, for this process.
    pub(crate) fn set_tuned(&self, knob: Knob, value: usize) {
        self.tuning().values[knob as usize].store(value, Relaxed);
        self.tuning().is_chosen.store(true, Relaxed);
        self.tuning().changed();
    }

    /// Sets all of them, for this process, and these choices beside those that were made.
    pub(super) fn set_all_tuned(&self, (values, chosen): Stored) {
        for (at, value) in self.tuning().values.iter().zip(values) {
            at.store(value, Relaxed);
        }
        self.tuning().choices.extend(chosen);
        self.tuning().is_chosen.store(true, Relaxed);
        self.tuning().changed();
    }

    /// Forgets the choices for kernels and classes of sizes, in this process.
    pub(crate) fn forget_choices(&self) {
        self.tuning().choices.clear();
        self.tuning().changed();
    }

    /// Keeps the values for other processes: in which file, unless there is no cache.
    pub(crate) fn save_tuning(&self) -> io::Result<Option<PathBuf>> {
        let Some(cache) = Cache::of_process() else { return Ok(None) };
        cache.store(&self.tuning_file(), self.tuning_text().as_bytes()).map(Some)
    }

    /// Keeps a choice that was just made, beside what other processes have kept meanwhile.
    pub(super) fn chosen_anew(&self) {
        self.tuning().is_chosen.store(true, Relaxed);
        let Some(cache) = Cache::of_process() else { return };
        let (values, mut chosen) = self.stored_tuning(cache).unwrap_or_else(|| (self.values(), Chosen::new()));
        chosen.extend(self.tuning().choices.chosen());
        let text = write(&self.identity(), self.family(), &values, &chosen);
        if let Err(error) = cache.store(&self.tuning_file(), text.as_bytes()) {
            log::emit(move || tracing::debug!(%error, "a choice is not kept"));
        }
    }

    /// Whether the values are others than the defaults, or were found to be these.
    pub(super) fn is_tuned(&self) -> bool {
        self.tuning().is_chosen.load(Relaxed)
    }

    /// The values as a file has them.
    pub(super) fn tuning_text(&self) -> String {
        write(&self.identity(), self.family(), &self.values(), &self.tuning().choices.chosen())
    }

    fn values(&self) -> Values {
        std::array::from_fn(|i| self.tuning().values[i].load(Relaxed))
    }

    /// The opposite; what is wrong with the text where it is not of this device, driver and version.
    pub(super) fn read_tuning(&self, text: &str) -> Result<Stored, String> {
        read(text, &self.identity(), self.family())
    }

    pub(super) fn tuning(&self) -> &Tuning {
        self.tuning.get_or_init(|| {
            let stored = Cache::of_process().and_then(|cache| self.stored_tuning(cache));
            let is_chosen = AtomicBool::new(stored.is_some());
            let (values, chosen) = stored.unwrap_or_else(|| (defaults(self.family()), Chosen::new()));
            let choices = Choices::new(level_of_process(), chosen);
            Tuning { values: values.map(AtomicUsize::new), is_chosen, choices }
        })
    }

    /// What is in the file, if it is there and of this driver and version.
    fn stored_tuning(&self, cache: &Cache) -> Option<Stored> {
        let read = match cache.load(&self.tuning_file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Err(error.to_string()),
            Ok(text) => self.read_tuning(&String::from_utf8_lossy(&text)),
        };
        read.inspect_err(|why| tracing::warn!(why, "stored tuning not used: run `claystone tune` again")).ok()
    }

    /// A file a device, whatever its driver: so that an update can be told of.
    pub(super) fn tuning_file(&self) -> String {
        let device = format!("{}\n{}\n{:?}", self.info().name, self.info().vendor, self.family());
        Kind::Tuning.name(&Sha256::digest(device).into())
    }

    /// What the times are of.
    pub(super) fn identity(&self) -> String {
        let info = self.info();
        format!("{}, driver {}, claystone {}", info.name, info.driver, env!("CARGO_PKG_VERSION"))
    }
}

/// `identity`, then a line a parameter, then the choices.
fn write(identity: &str, family: Family, values: &Values, chosen: &Chosen) -> String {
    let lines: String = rows(family).map(|(i, p)| format!("{} {}\n", p.name, values[i])).collect();
    format!("{identity}\n{lines}{}", choices::write(chosen))
}

/// The opposite; what is wrong where it is not all there, or is of something else.
fn read(text: &str, identity: &str, family: Family) -> Result<Stored, String> {
    let text = text.strip_suffix('\n').ok_or("it is cut short")?;
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    if first != identity {
        return Err(format!("it is of \"{}\", not of \"{identity}\"", Excerpt(first)));
    }
    let mut values = defaults(family);
    let mut lines = rest.lines();
    for (i, p) in rows(family) {
        let line = lines.next().unwrap_or_default();
        let value = line.strip_prefix(p.name).and_then(|value| value.strip_prefix(' ')?.parse().ok());
        let choice = value.filter(|value| p.choices.contains(value));
        values[i] = choice.ok_or_else(|| format!("\"{}\" is no choice of {}", Excerpt(line), p.name))?;
    }
    Ok((values, choices::read(lines, family)?))
}

/// What is wrong with a file's contents, for whatever device they are.
pub(super) fn check(text: &str) -> Result<(), String> {
    let identity = text.split('\n').next().unwrap_or_default();
    ALL.iter().try_for_each(|&family| {
        let (values, _) = read(text, identity, family)?;
        debug_assert!(rows(family).all(|(i, p)| p.choices.contains(&values[i])), "values that are no choices");
        Ok(())
    })
}

fn many_registers() -> bool {
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
    fn the_table_is_in_order_and_defaults_are_choices() {
        for (i, p) in PARAMETERS.iter().enumerate() {
            assert_eq!(p.knob as usize, i, "{}", p.name);
            assert!(p.families.iter().all(|&family| p.choices.contains(&p.default(family))), "{}", p.name);
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_nothing_else() {
        for family in ALL.iter().copied() {
            let mut values = defaults(family);
            rows(family).for_each(|(i, p)| values[i] = p.choices[p.choices.len() - 1]);
            let chosen = choices::tests::some(family);
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

    /// What is read from a changed file, if it is read at all, are choices that the parameters have. `CLAYSTONE_MUTATIONS`
    /// says how many inputs are tried for each family of devices.
    #[test]
    fn mutated_files_give_choices_or_errors() {
        for family in ALL.iter().copied() {
            let whole = [0, 1].map(|i| {
                let mut values = defaults(family);
                rows(family).for_each(|(row, p)| values[row] = p.choices[i % p.choices.len()]);
                let chosen = if i == 0 { choices::tests::some(family) } else { Chosen::new() };
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
    fn a_file_that_is_missing_or_of_something_else_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), 1 << 20);
        for device in devices() {
            let file = device.tuning_file();
            assert_eq!(device.stored_tuning(&cache), None);
            let mut values = defaults(device.family());
            rows(device.family()).for_each(|(i, p)| values[i] = p.choices[0]);
            let chosen = choices::tests::some(device.family());
            let text = write(&device.identity(), device.family(), &values, &chosen);
            let path = cache.store(&file, text.as_bytes()).unwrap();
            assert_eq!(device.stored_tuning(&cache), Some((values, chosen)));
            let whole = fs::read(&path).unwrap();
            for broken in [&b""[..], b"\xff\xfe", text.as_bytes(), &whole[..whole.len() - 1]] {
                fs::write(&path, broken).unwrap();
                assert_eq!(device.stored_tuning(&cache), None);
            }
            for other in [&b"\xff\xfe"[..], &text.as_bytes()[..text.len() / 2], &text.as_bytes()[1..]] {
                cache.store(&file, other).unwrap();
                assert_eq!(device.stored_tuning(&cache), None);
            }
            // That of another device, whole.
            cache.store(&Kind::Tuning.name(&[7; 32]), text.as_bytes()).unwrap();
            fs::rename(dir.path().join(Kind::Tuning.name(&[7; 32])), &path).unwrap();
            assert_eq!(device.stored_tuning(&cache), None);
        }
    }
}
