//! Faults of the driver: whichever call fails, with whatever code and however often, nothing aborts, hangs, leaks or gives a
//! wrong value, and a device is not lost after fewer than three failures.
//!
//! Unless `CLAYSTONE_FAULTS` says otherwise every 307th injection is run, spread over all of them; 1 is all.
//! `CLAYSTONE_FAULTS_STEP` chooses steps by a part of their name.

#[path = "../stand_in/mod.rs"]
mod stand_in;

mod inject;
mod steps;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use claystone::Device;
use inject::{Injection, Outcome};
use stand_in::{Faults, Kind};
use steps::STEPS;
use tempfile::NamedTempFile;

const TEST: &str = "no_failing_call_corrupts_leaks_or_hangs";
/// Of the injections every so-manieth is run in the gate.
const USUAL: usize = 307;

/// What came of a step's injections.
#[derive(Default)]
struct Report {
    calls: u64,
    outcomes: BTreeMap<&'static str, usize>,
    wrong: Vec<String>,
}

/// The plan and the results of a step's children.
struct Sweep {
    step: usize,
    kind: Kind,
    plan: NamedTempFile,
    stride: String,
    /// The names of all devices.
    devices: String,
}

impl Sweep {
    /// Runs a child. Gives what it wrote, and how it ended where that was not as it should.
    fn child(&self, from: usize) -> (String, Option<String>) {
        let results = NamedTempFile::new().unwrap();
        let (step, from) = (self.step.to_string(), from.to_string());
        let mut variables = vec![
            ("FAULTS_STEP", step.as_str()),
            ("FAULTS_PLAN", self.plan.path().to_str().unwrap()),
            ("FAULTS_FROM", from.as_str()),
            ("FAULTS_STRIDE", self.stride.as_str()),
            ("FAULTS_RESULTS", results.path().to_str().unwrap()),
            ("FAULTS_DEVICES", self.devices.as_str()),
            ("CLAYSTONE_ALLOC_CONF", STEPS[self.step].conf),
        ];
        variables.extend(STEPS[self.step].cache.map(|cache| ("CLAYSTONE_CACHE_DIR", cache)));
        let ended = stand_in::run(TEST, self.kind, &variables, Duration::from_secs(24 * 3600));
        let text = std::fs::read_to_string(results.path()).unwrap();
        let well = ended.status.is_some_and(|s| s.success());
        (text, (!well).then(|| format!("{:?}: {}", ended.status, ended.text)))
    }

    /// Runs a step's injections.
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
        let name = match &outcome {
            Outcome::Missed => "missed",
            Outcome::Absorbed => "absorbed",
            Outcome::Failed => "failed",
            Outcome::Lost => "lost",
            Outcome::Wrong(_) => "wrong",
        };
        *self.outcomes.entry(name).or_default() += 1;
        if let Outcome::Wrong(what) = outcome {
            self.wrong.push(format!("{injection}: {what}"));
        }
    }
}

#[test]
fn no_failing_call_corrupts_leaks_or_hangs() {
    if let Some(faults) = Faults::here() {
        return inject::child(&faults);
    }
    let stride = std::env::var("CLAYSTONE_FAULTS").map_or(USUAL, |n| n.parse().expect("a number"));
    let only = std::env::var("CLAYSTONE_FAULTS_STEP").unwrap_or_default();
    let steps = (0..STEPS.len()).filter(|&i| STEPS[i].name.contains(&only));
    let work: VecDeque<(usize, Kind)> = steps.flat_map(|i| [(i, Kind::Real), (i, Kind::DiscreteGpu)]).collect();
    let (work, reports, begin) = (Mutex::new(work), Mutex::new(BTreeMap::new()), Instant::now());
    let devices: Vec<String> = Device::all().iter().map(|d| d.info().unwrap().name).collect();
    let devices = devices.join(", ");
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                while let Some((step, kind)) = { work.lock().unwrap_or_else(PoisonError::into_inner).pop_front() } {
                    let plan = NamedTempFile::new().unwrap();
                    let sweep = Sweep { step, kind, plan, stride: stride.to_string(), devices: devices.clone() };
                    let report = sweep.run();
                    report.wrong.iter().for_each(|what| eprintln!("{} on {kind:?}: {what}", STEPS[step].name));
                    reports.lock().unwrap().insert((step, kind == Kind::DiscreteGpu), report);
                }
            });
        }
    });
    let reports = reports.into_inner().unwrap();
    let names = ["absorbed", "failed", "lost", "missed", "wrong"];
    let (mut table, mut wrong) = (String::new(), String::new());
    writeln!(table, "| step | device | calls | {} |", names.join(" | ")).unwrap();
    writeln!(table, "|---|---|{}", "---:|".repeat(names.len() + 1)).unwrap();
    let mut totals = [0; 6];
    for ((step, discrete), report) in &reports {
        let (step, device) = (STEPS[*step].name, if *discrete { "discrete GPU" } else { "processor" });
        let counts = names.map(|name| report.outcomes.get(name).copied().unwrap_or(0));
        let all: Vec<usize> = [report.calls as usize].into_iter().chain(counts).collect();
        totals.iter_mut().zip(&all).for_each(|(total, n)| *total += n);
        let cells: Vec<String> = all.iter().map(usize::to_string).collect();
        writeln!(table, "| {step} | {device} | {} |", cells.join(" | ")).unwrap();
        report.wrong.iter().for_each(|what| writeln!(wrong, "{step}, {device}: {what}").unwrap());
    }
    writeln!(table, "| all | | {} |", totals.map(|n| n.to_string()).join(" | ")).unwrap();
    println!("{table}\n{} injections in {:.0} s", totals[1..].iter().sum::<usize>(), begin.elapsed().as_secs_f64());
    assert!(totals[1..].iter().sum::<usize>() > 0, "no step is called {only}");
    assert!(wrong.is_empty(), "{wrong}");
}
