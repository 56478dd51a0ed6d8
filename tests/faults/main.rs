//! Failing driver calls. With any call, error code and number of failures, nothing may abort, hang, leak or give a wrong value. A
//! device may be lost only after at least three failures.
//!
//! `CLAYSTONE_FAULTS=N` runs every N-th injection, and `CLAYSTONE_FAULTS=1` runs all. The default is every 307th.
//! `CLAYSTONE_FAULTS_STEP` selects the steps whose name contains the given text.

#[path = "../stand_in/mod.rs"]
mod stand_in;

mod clones;
mod compaction;
mod driver;
mod graphs;
mod hints;
mod host_memory;
mod indices;
mod inject;
mod large_buffers;
mod library;
mod limits;
mod non_blocking;
mod numbers;
mod parts;
mod spill;
mod steps;
mod trials;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use claystone::Device;
use inject::{Injection, Outcome};
use stand_in::{Faults, Kind};
use steps::STEPS;
use tempfile::NamedTempFile;

const TEST: &str = "no_failing_call_corrupts_leaks_or_hangs";
/// The default of `CLAYSTONE_FAULTS`: every 307th injection is run.
const DEFAULT_STRIDE: usize = 307;

/// The outcomes of all injections into one step.
#[derive(Default)]
struct Report {
    /// The number of driver calls in the step.
    calls: u64,
    outcomes: Vec<(Injection, Outcome)>,
    /// The descriptions of violations, including processes that ended early.
    wrong: Vec<String>,
}

const OUTCOMES: [&str; 5] = ["absorbed", "failed", "lost", "missed", "wrong"];

/// Returns the number of injections per outcome, in the order of [`OUTCOMES`].
fn count<'a>(outcomes: impl Iterator<Item = &'a (Injection, Outcome)>) -> [usize; 5] {
    let mut counts = [0; 5];
    outcomes.for_each(|(_, outcome)| counts[OUTCOMES.iter().position(|&n| n == outcome.name()).unwrap()] += 1);
    counts
}

/// Adds a row to a table.
fn row(table: &mut String, head: &str, counts: &[usize]) {
    let cells: Vec<String> = counts.iter().map(usize::to_string).collect();
    writeln!(table, "| {head} | {} |", cells.join(" | ")).unwrap();
}

/// The plan of the injections into one step, and the settings of its child processes.
struct Sweep {
    step: usize,
    kind: Kind,
    plan: NamedTempFile,
    /// Every `stride`-th injection of the step is run, starting at number `offset`.
    stride: usize,
    offset: usize,
    /// The names of all devices.
    devices: String,
    /// The worker's own cache directory for PoCL.
    cache: Option<PathBuf>,
}

impl Sweep {
    /// Runs a child process from line `from` of the plan. Returns its output, and a description of the failure if it did not succeed.
    fn child(&self, from: usize) -> (String, Option<String>) {
        let results = NamedTempFile::new().unwrap();
        let [step, from, stride, offset] = [self.step, from, self.stride, self.offset].map(|n| n.to_string());
        let mut variables = vec![
            ("FAULTS_STEP", step.as_str()),
            ("FAULTS_PLAN", self.plan.path().to_str().unwrap()),
            ("FAULTS_FROM", from.as_str()),
            ("FAULTS_STRIDE", stride.as_str()),
            ("FAULTS_OFFSET", offset.as_str()),
            ("FAULTS_RESULTS", results.path().to_str().unwrap()),
            ("FAULTS_DEVICES", self.devices.as_str()),
            ("CLAYSTONE_ALLOC_CONF", STEPS[self.step].conf),
        ];
        variables.extend(STEPS[self.step].cache.map(|cache| ("CLAYSTONE_CACHE_DIR", cache)));
        variables.extend(self.cache.as_ref().map(|cache| ("POCL_CACHE_DIR", cache.to_str().unwrap())));
        let ended = stand_in::run(TEST, self.kind, &variables, Duration::from_secs(24 * 3600));
        let text = std::fs::read_to_string(results.path()).unwrap();
        let well = ended.status.is_some_and(|s| s.success());
        (text, (!well).then(|| format!("{:?}: {}", ended.status, ended.text)))
    }

    /// Runs all injections of the step. If a child process ends early, a new one continues after the injection that ended it.
    fn run(&self) -> Report {
        let (mut report, mut from, mut plan) = (Report::default(), 0, Vec::new());
        loop {
            let (text, failed) = self.child(from);
            if plan.is_empty() {
                let text = std::fs::read_to_string(self.plan.path()).unwrap();
                plan = text.lines().map(Injection::parse).collect();
            }
            let (mut running, known) = (None, from);
            for line in text.lines() {
                match line.split_once(' ').unwrap() {
                    ("calls", n) => report.calls = n.parse().unwrap(),
                    ("run", i) => running = Some(i.parse::<usize>().unwrap()),
                    (_, rest) => {
                        let (i, outcome) = rest.split_once(' ').unwrap();
                        from = i.parse::<usize>().unwrap() + 1;
                        running = None;
                        report.add(&plan[from - 1], Outcome::parse(outcome));
                    }
                }
            }
            match (running, failed) {
                (None, None) => {}
                (None, Some(failed)) => {
                    report.wrong.push(format!("before injection {from}: {failed}"));
                    if from == known {
                        break;
                    }
                }
                (Some(i), failed) => {
                    report.add(&plan[i], Outcome::Wrong(failed.unwrap_or_else(|| "the process ended".into())));
                    from = i + 1;
                }
            }
            if from >= plan.len() {
                break;
            }
        }
        report
    }
}

impl Report {
    fn add(&mut self, injection: &Injection, outcome: Outcome) {
        if let Outcome::Wrong(what) = &outcome {
            self.wrong.push(format!("{injection}: {what}"));
        }
        self.outcomes.push((injection.clone(), outcome));
    }

    fn merge(&mut self, other: Report) {
        self.calls = self.calls.max(other.calls);
        self.outcomes.extend(other.outcomes);
        self.wrong.extend(other.wrong);
    }
}

#[test]
fn no_failing_call_corrupts_leaks_or_hangs() {
    if let Some(faults) = Faults::here() {
        return inject::child(&faults);
    }
    let stride = std::env::var("CLAYSTONE_FAULTS").map_or(DEFAULT_STRIDE, |n| n.parse().expect("a number"));
    let only = std::env::var("CLAYSTONE_FAULTS_STEP").unwrap_or_default();
    let workers = thread::available_parallelism().map_or(2, |n| n.get());
    // The injections of one step are divided among several workers.
    let parts = (workers / stride).max(1);
    let steps = (0..STEPS.len()).filter(|&i| STEPS[i].name.contains(&only));
    let work =
        steps.flat_map(|i| (0..parts).flat_map(move |part| [(i, Kind::Real, part), (i, Kind::DiscreteGpu, part)]));
    let (work, begin) = (Mutex::new(work.collect::<VecDeque<_>>()), Instant::now());
    let reports = Mutex::new(BTreeMap::<_, Report>::new());
    let devices: Vec<String> = Device::all().iter().map(|d| d.info().unwrap().name).collect();
    let devices = devices.join(", ");
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                // PoCL fails or aborts if two processes build the same program at the same time in one cache.
                let own = (parts > 1).then(|| tempfile::tempdir().unwrap());
                while let Some((step, kind, part)) = { work.lock().unwrap_or_else(PoisonError::into_inner).pop_front() }
                {
                    let (plan, devices) = (NamedTempFile::new().unwrap(), devices.clone());
                    let offset = step % stride + part * stride;
                    let cache = own.as_ref().map(|own| own.path().to_owned());
                    let report = Sweep { step, kind, plan, stride: stride * parts, offset, devices, cache }.run();
                    report.wrong.iter().for_each(|what| eprintln!("{} on {kind:?}: {what}", STEPS[step].name));
                    let key = (step, if kind == Kind::DiscreteGpu { "discrete GPU" } else { "processor" });
                    reports.lock().unwrap().entry(key).or_default().merge(report);
                }
            });
        }
    });
    let reports = reports.into_inner().unwrap();
    let (mut table, mut wrong) = (String::new(), String::new());
    let heads = OUTCOMES.join(" | ");
    writeln!(table, "| step | device | calls | {heads} |\n|---|---|{}", "---:|".repeat(OUTCOMES.len() + 1)).unwrap();
    for ((step, device), report) in &reports {
        let counts: Vec<usize> = [report.calls as usize].into_iter().chain(count(report.outcomes.iter())).collect();
        row(&mut table, &format!("{} | {device}", STEPS[*step].name), &counts);
        report.wrong.iter().for_each(|what| writeln!(wrong, "{}, {device}: {what}", STEPS[*step].name).unwrap());
    }
    let mut by_fault = BTreeMap::<_, Vec<_>>::new();
    let all = || reports.values().flat_map(|report| &report.outcomes);
    all().for_each(|one| {
        by_fault.entry((-one.0.code, one.0.late, one.0.times, one.0.run_label())).or_default().push(one)
    });
    writeln!(table, "\n| code | failures | {heads} |\n|---|---|{}", "---:|".repeat(OUTCOMES.len())).unwrap();
    for ((code, .., run), outcomes) in by_fault {
        row(&mut table, &format!("-{code} | {run}"), &count(outcomes.into_iter()));
    }
    row(&mut table, "all | ", &count(all()));
    println!("{table}\n{} injections in {:.0} s", all().count(), begin.elapsed().as_secs_f64());
    assert!(all().count() > 0, "no step is called {only}");
    assert!(wrong.is_empty(), "{wrong}");
}
