//! What suits a kernel at a class of sizes, found out while it does its ordinary work.
//!
//! A choice that is not made yet is on trial: every launch that depends on it takes another candidate and is timed, from the
//! moment the stream is idle until it is idle again. Nothing is launched twice, so that this is right for every kernel, in
//! place or not. One choice is on trial in a launch; others are what they were. After [`ROUNDS`] in turns the best one
//! meets the default in a [`FINAL`], and is chosen where it is faster by as much as [`WORTH`] says.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use super::parameters::{Family, PARAMETERS, Tunable};
use crate::Error;
use crate::device::level::{Level, WORTH};
use crate::device::lru::Lru;
use crate::device::{lock, log};
use crate::error::Excerpt;

/// Times that each candidate is measured, in turns; and that the best and the default are after that. The first launch of a
/// candidate does not count: drivers compile for it.
const ROUNDS: usize = 4;
const FINAL: usize = 15;
/// The largest groups that are tried: kernels that count in 32 bits leave room for as many positions past the end.
pub(crate) const LARGEST_GROUP: usize = 1024;
/// Sizes of a class at most.
const SIZES: usize = 8;

/// What a choice is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Subject {
    /// A parameter, by its place in the table.
    Knob(usize),
    /// The work-items a group of the kernel that has this number in every process.
    Group(u64),
}

/// Sizes that are near each other: the powers of two below them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SizeClass([u8; SIZES]);

impl SizeClass {
    /// That of these sizes, eight at most.
    pub(crate) fn of<const N: usize>(sizes: [usize; N]) -> SizeClass {
        const { assert!(N <= SIZES) };
        let mut class = [0; SIZES];
        class.iter_mut().zip(sizes).for_each(|(log, size)| *log = size.max(1).ilog2() as u8);
        SizeClass(class)
    }

    pub(super) fn logarithms(self) -> Vec<u32> {
        self.0.iter().map(|&log| u32::from(log)).collect()
    }
}

pub(super) type Chosen = BTreeMap<(Subject, SizeClass), usize>;

/// The choices of a device.
#[derive(Default)]
pub(super) struct Choices {
    level: AtomicU8,
    /// Whether there is anything to look up.
    is_on: AtomicBool,
    /// Somebody compares with what is where nothing was chosen.
    ignored: AtomicBool,
    table: Mutex<Table>,
}

struct Table {
    chosen: Lru<(Subject, SizeClass), usize>,
    trials: Lru<(Subject, SizeClass), Trial>,
}

/// The most choices kept, and the most under trial: formulas have kernels of their own, and there is no end of formulas.
const MAX_CHOSEN: usize = 8192;
const MAX_TRIALS: usize = 1024;

impl Default for Table {
    fn default() -> Table {
        Table { chosen: Lru::new(MAX_CHOSEN), trials: Lru::new(MAX_TRIALS) }
    }
}

/// Candidates, the default first, with the microseconds of launches.
#[derive(Debug)]
struct Trial {
    candidates: Vec<(usize, Vec<f64>)>,
    is_final: bool,
}

/// A launch with a candidate.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct OnTrial {
    of: (Subject, SizeClass),
    value: usize,
    /// Whether it is to be timed. One that a graph records is not: it has the default, and others are tried later.
    pub(super) is_timed: bool,
}

/// Whether what this thread prepares may have something on trial.
#[derive(Clone, Copy)]
enum Preparing {
    Nothing,
    Launch,
    Trial(OnTrial),
}

thread_local! {
    static PREPARING: Cell<Preparing> = const { Cell::new(Preparing::Nothing) };
}

/// Prepares a launch, for which something may be on trial: the launch is then timed where the trial says so, and what was prepared
/// not to be kept.
pub(super) fn preparing<T>(prepare: impl FnOnce() -> T) -> (T, Option<OnTrial>) {
    struct Restored(Preparing);
    impl Drop for Restored {
        fn drop(&mut self) {
            PREPARING.set(self.0);
        }
    }
    let _restored = Restored(PREPARING.replace(Preparing::Launch));
    let prepared = prepare();
    match PREPARING.get() {
        Preparing::Trial(trial) => (prepared, Some(trial)),
        _ => (prepared, None),
    }
}

impl Table {
    /// Notes a choice, which ends its trial.
    fn choose(&mut self, of: (Subject, SizeClass), value: usize) {
        self.trials.remove(&of);
        *self.chosen.get_or_insert(of, || value).0 = value;
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

    /// The candidate whose turn it is.
    fn next(&self) -> usize {
        self.candidates.iter().min_by_key(|(_, times)| times.len()).map_or(0, |&(value, _)| value)
    }

    /// Notes what a launch took; gives the choice once it is made.
    fn note(&mut self, value: usize, micros: f64) -> Option<usize> {
        let noted = self.candidates.iter_mut().find(|(candidate, _)| *candidate == value)?;
        noted.1.push(micros);
        let enough = 1 + if self.is_final { FINAL } else { ROUNDS };
        if self.candidates.iter().any(|(_, times)| times.len() < enough) {
            return None;
        }
        let medians = self.candidates.iter().map(|(value, times)| (*value, median(&times[1..])));
        let (best, time) = medians.clone().min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (default, now) = medians.clone().next()?;
        if best == default || time >= WORTH * now {
            return Some(default);
        }
        if self.is_final {
            return Some(best);
        }
        *self = Trial { is_final: true, ..Trial::new(default, vec![best]) };
        None
    }
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

impl Choices {
    pub(super) fn new(level: Level, chosen: Chosen) -> Choices {
        let choices = Choices { level: AtomicU8::new(level as u8), ..Choices::default() };
        choices.extend(chosen);
        choices
    }

    /// What was chosen; else what is on trial in the launch that this thread prepares, as what is asked for may be from then
    /// on; else the default.
    pub(super) fn choice(
        &self,
        of: (Subject, SizeClass),
        default: usize,
        may_try: impl FnOnce() -> bool,
        candidates: impl FnOnce(Level) -> Vec<usize>,
    ) -> usize {
        if !self.is_on.load(Relaxed) {
            return default;
        }
        let mut table = lock(&self.table);
        if let Some(&chosen) = table.chosen.get(&of) {
            return chosen;
        }
        match (self.level(), PREPARING.get()) {
            (_, Preparing::Trial(trial)) if trial.of == of => trial.value,
            (Level::None, _) | (_, Preparing::Nothing | Preparing::Trial(_)) => default,
            (level, Preparing::Launch) if may_try() => {
                let (trial, _) = table.trials.get_or_insert(of, || Trial::new(default, candidates(level)));
                if let [_] = trial.candidates[..] {
                    table.choose(of, default);
                    return default;
                }
                let value = trial.next();
                PREPARING.set(Preparing::Trial(OnTrial { of, value, is_timed: true }));
                value
            }
            (_, Preparing::Launch) => {
                PREPARING.set(Preparing::Trial(OnTrial { of, value: default, is_timed: false }));
                default
            }
        }
    }

    /// Notes what a launch took; whether a choice is made by that. While somebody compares with what is where nothing was chosen, the
    /// parameters are not those that count.
    pub(super) fn note(&self, OnTrial { of, value, .. }: OnTrial, micros: f64) -> bool {
        if self.ignored.load(Relaxed) {
            return false;
        }
        let mut table = lock(&self.table);
        let chosen = table.trials.get_mut(&of).and_then(|trial| trial.note(value, micros));
        if let Some(chosen) = chosen {
            table.choose(of, chosen);
        }
        chosen.is_some()
    }

    pub(super) fn level(&self) -> Level {
        Level::ALL[usize::from(self.level.load(Relaxed))]
    }

    pub(super) fn set_level(&self, level: Level) {
        self.level.store(level as u8, Relaxed);
        lock(&self.table).trials = Table::default().trials;
    }

    /// Whether they are used from now on; gives whether they were.
    pub(super) fn use_them(&self, on: bool) -> bool {
        !self.ignored.swap(!on, Relaxed)
    }

    pub(super) fn on_trial(&self) -> usize {
        lock(&self.table).trials.iter().count()
    }

    /// What was chosen.
    pub(super) fn chosen(&self) -> Chosen {
        lock(&self.table).chosen.iter().map(|(&of, &value)| (of, value)).collect()
    }

    /// These as well.
    pub(super) fn extend(&self, chosen: Chosen) {
        let mut table = lock(&self.table);
        chosen.into_iter().for_each(|(of, value)| table.choose(of, value));
        drop(table);
        self.note_use();
    }

    /// Forgets all.
    pub(super) fn clear(&self) {
        *lock(&self.table) = Table::default();
        self.note_use();
    }

    /// Notes whether there is anything to look up.
    pub(super) fn note_use(&self) {
        let any = self.level.load(Relaxed) != 0 || lock(&self.table).chosen.iter().next().is_some();
        self.is_on.store(any && !self.ignored.load(Relaxed), Relaxed);
    }
}

/// Sizes of groups to try besides the default.
pub(super) fn groups(level: Level, default: usize) -> Vec<usize> {
    let powers = |from: u32| (from..=LARGEST_GROUP.ilog2()).map(|log| 1 << log);
    let mut groups: Vec<usize> = match level {
        Level::None => Vec::new(),
        Level::Fast => vec![default / 4, default / 2, 2 * default, 4 * default],
        Level::Normal => powers(5).collect(),
        Level::Wide => powers(3).flat_map(|group| [group, group + group / 2]).collect(),
        Level::Heavy => groups(Level::Wide, default).into_iter().chain((32..=LARGEST_GROUP).step_by(32)).collect(),
    };
    groups.retain(|group| (1..=LARGEST_GROUP).contains(group));
    groups
}

/// The level that the environment asks for.
pub(super) fn level_of_process() -> Level {
    let asked = std::env::var("CLAYSTONE_TUNING").unwrap_or_default();
    let level = if asked.is_empty() { Ok(Level::None) } else { asked.trim().parse() };
    level.unwrap_or_else(|error: Error| {
        log::emit(move || tracing::warn!("CLAYSTONE_TUNING: {error}; nothing is measured"));
        Level::None
    })
}

const GROUP: &str = "group_";

impl Subject {
    /// As files have it.
    pub(super) fn name(self) -> String {
        match self {
            Subject::Knob(knob) => PARAMETERS[knob].name.to_owned(),
            Subject::Group(id) => format!("{GROUP}{id:016x}"),
        }
    }

    fn named(name: &str, has: impl Fn(&Tunable) -> bool) -> Option<Subject> {
        match name.strip_prefix(GROUP) {
            Some(id) => hex(id).map(Subject::Group),
            None => PARAMETERS.iter().position(|row| row.name == name && has(row)).map(Subject::Knob),
        }
    }

    fn allows(self, value: usize) -> bool {
        match self {
            Subject::Knob(knob) => PARAMETERS[knob].choices.contains(&value),
            Subject::Group(_) => (1..=LARGEST_GROUP).contains(&value),
        }
    }
}

/// Sixteen digits, as they are written.
fn hex(digits: &str) -> Option<u64> {
    let number = u64::from_str_radix(digits, 16).ok()?;
    (format!("{number:016x}") == digits).then_some(number)
}

/// How many there are, and a line each.
pub(super) fn write(chosen: &Chosen) -> String {
    let mut text = format!("choices {}\n", chosen.len());
    for ((subject, SizeClass(class)), value) in chosen {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{} {:016x} {value}", subject.name(), u64::from_be_bytes(*class));
    }
    text
}

fn read_line(line: &str, family: Family) -> Option<((Subject, SizeClass), usize)> {
    let mut words = line.split(' ');
    let subject = Subject::named(words.next()?, |row| row.families.contains(&family))?;
    let class = SizeClass(hex(words.next()?)?.to_be_bytes());
    let value = words.next()?.parse().ok().filter(|&value| subject.allows(value))?;
    words.next().is_none().then_some(((subject, class), value))
}

/// The opposite; what is wrong where it is not all there or says what cannot be.
pub(super) fn read<'a>(mut lines: impl Iterator<Item = &'a str>, family: Family) -> Result<Chosen, String> {
    let first = lines.next().unwrap_or_default();
    let count = first.strip_prefix("choices ").and_then(|n| n.parse::<usize>().ok());
    let count = count.ok_or_else(|| format!("\"{}\" is no number of choices", Excerpt(first)))?;
    let mut chosen = Chosen::new();
    for line in lines.by_ref().take(count) {
        let choice = read_line(line, family).filter(|(of, _)| !chosen.contains_key(of));
        let (of, value) = choice.ok_or_else(|| format!("\"{}\" is no choice", Excerpt(line)))?;
        chosen.insert(of, value);
    }
    if chosen.len() < count {
        return Err(format!("it has {} choices, not {count}", chosen.len()));
    }
    lines.next().map_or(Ok(chosen), |line| Err(format!("\"{}\" is one line too many", Excerpt(line))))
}

#[cfg(test)]
pub(super) mod tests;
