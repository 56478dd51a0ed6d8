//! Tuned values for a kernel and a size class, found while the kernel does its ordinary work.
//!
//! A choice without a value is on trial: every launch that depends on the choice uses the next candidate, and is timed from
//! an idle stream to an idle stream. No launch is repeated, so trials are safe for every kernel, in place or not. A launch has
//! at most one choice on trial. After [`TRIAL_ROUNDS`] rounds, the best candidate and the default run [`FINAL_LAUNCHES`] more
//! launches each. The best candidate wins if its time is below [`MAX_TIME_RATIO`] times the default's time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use super::level::{Level, MAX_TIME_RATIO};
use super::parameters::{Family, PARAMETERS, ParameterRow};
use crate::Error;
use crate::device::lru::Lru;
use crate::device::{OnDrop, lock, log};
use crate::error::Excerpt;

/// The number of timed launches of each candidate. A candidate's first launch does not count, because drivers may compile then.
const TRIAL_ROUNDS: usize = 4;
/// The number of timed launches of the best candidate and of the default in the final comparison.
const FINAL_LAUNCHES: usize = 15;
/// The largest work-group that is tried, in work-items: kernels with 32-bit indices reserve this number of indices past the end.
pub(crate) const MAX_TUNED_GROUP_ITEMS: usize = 1024;
const MAX_CLASS_SIZES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Subject {
    /// A parameter, by the index of its row in the table of parameters.
    TuningParameter(usize),
    /// The work-group size of a kernel, by the kernel's id, which is the same in every process.
    Group(u64),
}

/// A class of sizes: the base-2 logarithm of each size, rounded down to an integer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SizeClass([u8; MAX_CLASS_SIZES]);

impl SizeClass {
    /// Returns the class of at most eight sizes.
    pub(crate) fn from_sizes<const N: usize>(sizes: [usize; N]) -> SizeClass {
        const { assert!(N <= MAX_CLASS_SIZES) };
        let mut class = [0; MAX_CLASS_SIZES];
        class.iter_mut().zip(sizes).for_each(|(log, size)| *log = size.max(1).ilog2() as u8);
        SizeClass(class)
    }

    pub(crate) fn logarithms(self) -> Vec<u32> {
        self.0.iter().map(|&log| u32::from(log)).collect()
    }
}

/// The values chosen, by subject (a parameter or a kernel's work-group size) and size class.
pub(crate) type Chosen = BTreeMap<(Subject, SizeClass), usize>;

#[derive(Default)]
pub(crate) struct Choices {
    level: AtomicU8,
    /// True if launches look up choices, because choices were made or may be tried.
    is_on: AtomicBool,
    /// True while a comparison with the defaults is in progress: all choices are ignored.
    is_ignored: AtomicBool,
    table: Mutex<Table>,
}

struct Table {
    chosen: Lru<(Subject, SizeClass), usize>,
    trials: Lru<(Subject, SizeClass), Trial>,
}

/// The maximum number of choices kept. Every formula has its own kernel, and the number of formulas is unbounded.
const MAX_CHOSEN: usize = 8192;
const MAX_TRIALS: usize = 1024;

impl Default for Table {
    fn default() -> Table {
        Table { chosen: Lru::new(MAX_CHOSEN), trials: Lru::new(MAX_TRIALS) }
    }
}

/// A trial: its candidates, the default first, each with the times of its launches in microseconds.
#[derive(Debug)]
struct Trial {
    candidates: Vec<(usize, Vec<f64>)>,
    is_final: bool,
}

/// A launch that runs with one of a trial's candidates.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct TrialLaunch {
    key: (Subject, SizeClass),
    value: usize,
    /// True if the launch is timed. A launch recorded by a graph is not timed: it uses the default, and the trial goes on later.
    pub(crate) is_timed: bool,
}

/// The kind of launch that this thread prepares: none, a launch that may put a choice on trial, or a launch with a choice on trial.
#[derive(Clone, Copy)]
enum LaunchPreparation {
    Nothing,
    Launch,
    Trial(TrialLaunch),
}

thread_local! {
    /// The launch that this thread prepares.
    static LAUNCH_PREPARATION: Cell<LaunchPreparation> = const { Cell::new(LaunchPreparation::Nothing) };
}

/// Prepares a launch, which may put one choice on trial. A launch on trial must not be cached, and must be timed if
/// [`TrialLaunch::is_timed`].
pub(crate) fn prepare_with_trials<T>(prepare: impl FnOnce() -> T) -> (T, Option<TrialLaunch>) {
    let outer = LAUNCH_PREPARATION.replace(LaunchPreparation::Launch);
    let _restore = OnDrop(|| LAUNCH_PREPARATION.set(outer));
    let prepared = prepare();
    match LAUNCH_PREPARATION.get() {
        LaunchPreparation::Trial(trial) => (prepared, Some(trial)),
        _ => (prepared, None),
    }
}

impl Table {
    fn choose(&mut self, key: (Subject, SizeClass), value: usize) {
        self.trials.remove(&key);
        *self.chosen.get_or_insert(key, || value).0 = value;
    }
}

impl Trial {
    fn new(default: usize, mut others: Vec<usize>) -> Trial {
        others.retain(|&other| other != default);
        others.sort_unstable();
        others.dedup();
        let candidates = [default].into_iter().chain(others).map(|value| (value, Vec::new())).collect();
        Trial { candidates, is_final: false }
    }

    /// Returns the candidate with the fewest launches.
    fn next(&self) -> usize {
        self.candidates.iter().min_by_key(|(_, times)| times.len()).map_or(0, |&(value, _)| value)
    }

    /// Adds the time of a launch; returns the choice once it is decided.
    fn record_time(&mut self, value: usize, micros: f64) -> Option<usize> {
        let noted = self.candidates.iter_mut().find(|(candidate, _)| *candidate == value)?;
        noted.1.push(micros);
        let enough = 1 + if self.is_final { FINAL_LAUNCHES } else { TRIAL_ROUNDS };
        if self.candidates.iter().any(|(_, times)| times.len() < enough) {
            return None;
        }
        let medians = self.candidates.iter().map(|(value, times)| (*value, median(&times[1..])));
        let (best, time) = medians.clone().min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (default, now) = medians.clone().next()?;
        if best == default || time >= MAX_TIME_RATIO * now {
            return Some(default);
        }
        if self.is_final {
            return Some(best);
        }
        *self = Trial { is_final: true, ..Trial::new(default, vec![best]) };
        None
    }
}

/// Returns the median; for an even number of times, the upper one.
fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

impl Choices {
    pub(super) fn new(level: Level) -> Choices {
        let choices = Choices { level: AtomicU8::new(level as u8), ..Choices::default() };
        choices.update_is_on();
        choices
    }

    /// Returns the choice that was made; else the candidate on trial in this thread's launch, starting a trial if possible; else the
    /// default.
    pub(crate) fn choice(
        &self,
        key: (Subject, SizeClass),
        default: usize,
        may_try: impl FnOnce() -> bool,
        candidates: impl FnOnce(Level) -> Vec<usize>,
    ) -> usize {
        if !self.is_on.load(Relaxed) {
            return default;
        }
        let mut table = lock(&self.table);
        if let Some(&chosen) = table.chosen.get(&key) {
            return chosen;
        }
        match (self.level(), LAUNCH_PREPARATION.get()) {
            (_, LaunchPreparation::Trial(trial)) if trial.key == key => trial.value,
            (Level::None, _) | (_, LaunchPreparation::Nothing | LaunchPreparation::Trial(_)) => default,
            (level, LaunchPreparation::Launch) if may_try() => {
                let (trial, _) = table.trials.get_or_insert(key, || Trial::new(default, candidates(level)));
                if let [_] = trial.candidates[..] {
                    table.choose(key, default);
                    return default;
                }
                let value = trial.next();
                LAUNCH_PREPARATION.set(LaunchPreparation::Trial(TrialLaunch { key, value, is_timed: true }));
                value
            }
            (_, LaunchPreparation::Launch) => {
                LAUNCH_PREPARATION.set(LaunchPreparation::Trial(TrialLaunch { key, value: default, is_timed: false }));
                default
            }
        }
    }

    /// Adds the time of a launch on trial; returns true if the time decides the choice. While choices are ignored, times are
    /// dropped: launches then run with other parameters.
    pub(crate) fn record_time(&self, TrialLaunch { key, value, .. }: TrialLaunch, micros: f64) -> bool {
        if self.is_ignored.load(Relaxed) {
            return false;
        }
        let mut table = lock(&self.table);
        let chosen = table.trials.get_mut(&key).and_then(|trial| trial.record_time(value, micros));
        if let Some(chosen) = chosen {
            table.choose(key, chosen);
        }
        chosen.is_some()
    }

    pub(crate) fn level(&self) -> Level {
        Level::ALL[usize::from(self.level.load(Relaxed))]
    }

    pub(super) fn set_level(&self, level: Level) {
        self.level.store(level as u8, Relaxed);
        lock(&self.table).trials = Table::default().trials;
    }

    /// Enables or disables all choices, and returns whether they were enabled.
    pub(super) fn set_enabled(&self, on: bool) -> bool {
        !self.is_ignored.swap(!on, Relaxed)
    }

    /// Returns the number of choices that are still on trial.
    pub(crate) fn on_trial(&self) -> usize {
        lock(&self.table).trials.iter().count()
    }

    pub(crate) fn chosen(&self) -> Chosen {
        lock(&self.table).chosen.iter().map(|(&key, &value)| (key, value)).collect()
    }

    pub(super) fn extend(&self, chosen: Chosen) {
        let mut table = lock(&self.table);
        chosen.into_iter().for_each(|(key, value)| table.choose(key, value));
        drop(table);
        self.update_is_on();
    }

    pub(super) fn clear(&self) {
        *lock(&self.table) = Table::default();
        self.update_is_on();
    }

    /// Updates [`is_on`](Self::is_on), which launches check first.
    pub(super) fn update_is_on(&self) {
        let any = self.level.load(Relaxed) != 0 || lock(&self.table).chosen.iter().next().is_some();
        self.is_on.store(any && !self.is_ignored.load(Relaxed), Relaxed);
    }
}

/// Returns the work-group sizes to try besides the default.
pub(crate) fn group_candidates(level: Level, default: usize) -> Vec<usize> {
    let powers = |from: u32| (from..=MAX_TUNED_GROUP_ITEMS.ilog2()).map(|log| 1 << log);
    let mut groups: Vec<usize> = match level {
        Level::None => Vec::new(),
        Level::Fast => vec![default / 4, default / 2, 2 * default, 4 * default],
        Level::Normal => powers(5).collect(),
        Level::Wide => powers(3).flat_map(|group| [group, group + group / 2]).collect(),
        Level::Heavy => {
            group_candidates(Level::Wide, default).into_iter().chain((32..=MAX_TUNED_GROUP_ITEMS).step_by(32)).collect()
        }
    };
    groups.retain(|group| (1..=MAX_TUNED_GROUP_ITEMS).contains(group));
    groups
}

/// Returns the level in the environment variable `CLAYSTONE_TUNING`.
pub(super) fn level_from_environment() -> Level {
    let asked = std::env::var("CLAYSTONE_TUNING").unwrap_or_default();
    let level = if asked.is_empty() { Ok(Level::None) } else { asked.trim().parse() };
    level.unwrap_or_else(|error: Error| {
        log::emit(move || tracing::warn!("CLAYSTONE_TUNING: {error}; nothing is measured"));
        Level::None
    })
}

/// The prefix of the names of work-group sizes in files.
const GROUP: &str = "group_";

impl Subject {
    /// Returns the subject's name in tuning files.
    pub(crate) fn name(self) -> String {
        match self {
            Subject::TuningParameter(knob) => PARAMETERS[knob].name.to_owned(),
            Subject::Group(id) => format!("{GROUP}{id:016x}"),
        }
    }

    /// Parses the result of [`name`](Self::name). `has` says whether the device has a parameter.
    fn from_name(name: &str, has: impl Fn(&ParameterRow) -> bool) -> Option<Subject> {
        match name.strip_prefix(GROUP) {
            Some(id) => hex(id).map(Subject::Group),
            None => PARAMETERS.iter().position(|row| row.name == name && has(row)).map(Subject::TuningParameter),
        }
    }

    /// True if the value is allowed for the subject.
    fn allows(self, value: usize) -> bool {
        match self {
            Subject::TuningParameter(knob) => PARAMETERS[knob].choices.contains(&value),
            Subject::Group(_) => (1..=MAX_TUNED_GROUP_ITEMS).contains(&value),
        }
    }
}

/// Parses sixteen hexadecimal digits in lower case.
fn hex(digits: &str) -> Option<u64> {
    let number = u64::from_str_radix(digits, 16).ok()?;
    (format!("{number:016x}") == digits).then_some(number)
}

/// Formats choices for a file: their number, then one line each.
pub(super) fn write(chosen: &Chosen) -> String {
    let mut text = format!("choices {}\n", chosen.len());
    for ((subject, SizeClass(class)), value) in chosen {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{} {:016x} {value}", subject.name(), u64::from_be_bytes(*class));
    }
    text
}

/// Parses a line of [`write`].
fn read_line(line: &str, family: Family) -> Option<((Subject, SizeClass), usize)> {
    let mut words = line.split(' ');
    let subject = Subject::from_name(words.next()?, |row| row.families.contains(&family))?;
    let class = SizeClass(hex(words.next()?)?.to_be_bytes());
    let value = words.next()?.parse().ok().filter(|&value| subject.allows(value))?;
    words.next().is_none().then_some(((subject, class), value))
}

/// Parses the text of [`write`]. The error names the missing or invalid part.
pub(super) fn read<'a>(mut lines: impl Iterator<Item = &'a str>, family: Family) -> Result<Chosen, String> {
    let first = lines.next().unwrap_or_default();
    let count = first.strip_prefix("choices ").and_then(|n| n.parse::<usize>().ok());
    let count = count.ok_or_else(|| format!("\"{}\" is not a number of choices", Excerpt(first)))?;
    let mut chosen = Chosen::new();
    for line in lines.by_ref().take(count) {
        let choice = read_line(line, family).filter(|(key, _)| !chosen.contains_key(key));
        let (key, value) = choice.ok_or_else(|| format!("\"{}\" is not a valid choice", Excerpt(line)))?;
        chosen.insert(key, value);
    }
    if chosen.len() < count {
        return Err(format!("it has {} choices, not {count}", chosen.len()));
    }
    lines.next().map_or(Ok(chosen), |line| Err(format!("\"{}\" is a line too many", Excerpt(line))))
}

#[cfg(test)]
pub(super) mod tests;
