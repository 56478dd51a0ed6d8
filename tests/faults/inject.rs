//! The child processes of the sweep. Each runs one step repeatedly, with a different fault each time.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use claystone::{Device, Error, Result, Tensor};

use crate::stand_in::{ALWAYS, Faults};
use crate::steps::{Kept, Run, STEPS, Step, Values, is_wrong};

const CODES: [i32; 8] = [-4, -5, -6, -11, -14, -36, -58, -61];

/// One fault to inject into the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// The name of the driver function, or `any`.
    pub name: String,
    /// The number (from 1) of the first failing call within the step, and the number of consecutive failures.
    pub nth: u64,
    pub times: u64,
    pub code: i32,
    /// Whether the call itself succeeds and its command fails later.
    pub late: bool,
}

impl Injection {
    pub fn line(&self) -> String {
        format!("{} {} {} {} {}", self.name, self.nth, self.times, self.code, u8::from(self.late))
    }

    fn arm(&self, faults: &Faults) {
        match self.late {
            true => faults.fail_command(&self.name, self.nth, self.times, self.code),
            false => faults.fail(&self.name, self.nth, self.times, self.code),
        }
    }

    /// Returns the label for the tables: the number of failures, or `command` for late failures.
    pub fn run_label(&self) -> &'static str {
        match (self.late, self.times) {
            (true, _) => "command",
            (false, 1) => "once",
            (false, 2) => "twice",
            (false, ALWAYS) => "from then on",
            (false, _) => "five times",
        }
    }

    pub fn parse(line: &str) -> Injection {
        let fields: Vec<&str> = line.split(' ').collect();
        let [name, nth, times, code, late] = fields[..] else { panic!("not an injection: {line}") };
        let number = |s: &str| s.parse().unwrap();
        let code = code.parse().unwrap();
        Injection { name: name.into(), nth: number(nth), times: number(times), code, late: late == "1" }
    }
}

impl std::fmt::Display for Injection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{} {} {}", self.name, self.nth, self.run_label(), self.code)
    }
}

/// The result of an injection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The step made fewer calls than the injection needs.
    Missed,
    /// The step succeeded despite the fault.
    Absorbed,
    /// The step returned an error, and succeeded when repeated.
    Failed,
    /// The device was lost after at least three failures.
    Lost,
    /// A violation: a wrong value, a panic, a leak or a hang.
    Wrong(String),
}

impl Outcome {
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::Missed => "missed",
            Outcome::Absorbed => "absorbed",
            Outcome::Failed => "failed",
            Outcome::Lost => "lost",
            Outcome::Wrong(_) => "wrong",
        }
    }

    fn line(&self) -> String {
        match self {
            Outcome::Wrong(what) => format!("wrong {}", what.replace('\n', " ")),
            other => other.name().into(),
        }
    }

    pub fn parse(text: &str) -> Outcome {
        match text {
            "missed" => Outcome::Missed,
            "absorbed" => Outcome::Absorbed,
            "failed" => Outcome::Failed,
            "lost" => Outcome::Lost,
            other => Outcome::Wrong(other.trim_start_matches("wrong ").into()),
        }
    }
}

/// The resources that a step must release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeldResources {
    /// The bytes of device tensors.
    bytes: u64,
    /// The bytes of pinned memory in use, without cached blocks.
    pinned: u64,
    /// The number of buffers, without buffers that stay mapped as pinned memory.
    buffers: i64,
    events: i64,
}

/// The number of events that may remain: markers that queues keep to query whether they are idle, and markers of cached pinned memory.
const MAX_KEPT_EVENTS: i64 = 6;
/// The bytes of pinned memory that may remain until their marker is complete.
const MAX_KEPT_PINNED_BYTES: u64 = 16 << 20;

impl HeldResources {
    fn now(device: Device, faults: &Faults) -> Result<HeldResources> {
        device.synchronize()?;
        device.empty_cache()?;
        let bytes = device.memory_stats()?.allocated_bytes.current;
        let pinned = device.pinned_memory_stats()?.active_bytes.current;
        let buffers = faults.live_buffers() - faults.live_mappings();
        Ok(HeldResources { bytes, pinned, buffers, events: faults.live_events() })
    }

    /// True if more is held than in `base`, apart from the events and pinned bytes that may remain.
    fn is_leak(self, base: HeldResources) -> bool {
        let more = self.events > base.events + MAX_KEPT_EVENTS || self.pinned > base.pinned + MAX_KEPT_PINNED_BYTES;
        more || (self.bytes, self.buffers) != (base.bytes, base.buffers)
    }
}

fn run_step(step: &Step, device: Device) -> (Vec<Kept>, thread::Result<Result<Values>>) {
    let mut run = Run { device, kept: Vec::new() };
    let result = catch_unwind(AssertUnwindSafe(|| (step.run)(&mut run)));
    (run.kept, result)
}

/// Compares values bit by bit, so that a NaN equals the same NaN.
fn bits_equal(a: &Values, b: &Values) -> bool {
    let bits = |v: &Values| -> Vec<Vec<u32>> { v.iter().map(|v| v.iter().map(|x| x.to_bits()).collect()).collect() };
    a.len() == b.len() && bits(a) == bits(b)
}

/// The entry point of a child process of the sweep. `FAULTS_STEP` is the step's index, `FAULTS_PLAN` a file with one injection per line,
/// `FAULTS_FROM` the first line to run, and `FAULTS_RESULTS` the file for outcomes. If the plan is empty, the child writes the plan: every
/// `FAULTS_STRIDE`-th injection of the step, starting at number `FAULTS_OFFSET`.
pub fn child(faults: &Faults) {
    let variable = |name| std::env::var(name).unwrap();
    let number = |name| variable(name).parse::<usize>().unwrap();
    let text = std::fs::read_to_string(variable("FAULTS_PLAN")).unwrap();
    let mut plan: Vec<Injection> = text.lines().map(Injection::parse).collect();
    let mut results = OpenOptions::new().append(true).open(variable("FAULTS_RESULTS")).unwrap();
    let (step, device) = (&STEPS[number("FAULTS_STEP")], Device::OpenCL(0));
    start_watchdog();
    if step.first && !plan.is_empty() {
        let i = number("FAULTS_FROM");
        write_line(&mut results, format_args!("run {i}"));
        let outcome = inject_first(faults, &plan[i], step, device);
        return write_line(&mut results, format_args!("done {i} {}", outcome.line()));
    }
    let plainly =
        || run_step(step, device).1.expect("no panic").unwrap_or_else(|e| panic!("{} without a fault: {e}", step.name));
    // These tensors exist before every step, and must keep their values.
    let witness = |values: Vec<f32>| Kept {
        tensor: Tensor::from_slice(&values, [values.len()], device).unwrap(),
        either: vec![values],
    };
    let witnesses = || [witness((0..3000).map(|i| i as f32 * 0.5).collect()), witness(vec![9.0; 100_000])];
    let (mut want, mut base, mut kept) = (Values::new(), None, None);
    if !step.first {
        kept = Some(witnesses());
        want = plainly(); // compiles the kernels
        assert!(bits_equal(&want, &plainly()), "{} gives the same each time", step.name);
        base = Some(HeldResources::now(device, faults).unwrap());
    }
    if plan.is_empty() {
        let before: Vec<u64> = faults.names().map(|name| faults.calls(name)).collect();
        plainly();
        let calls = faults.names().zip(before).map(|(name, before)| (name, faults.calls(name) - before));
        let calls: Vec<(&str, u64)> = calls.collect();
        write_line(&mut results, format_args!("calls {}", calls.iter().map(|(_, calls)| calls).sum::<u64>()));
        let stride = number("FAULTS_STRIDE");
        plan = injections(&calls);
        plan = plan.into_iter().skip(number("FAULTS_OFFSET")).step_by(stride).collect();
        let lines: String = plan.iter().map(|i| i.line() + "\n").collect();
        std::fs::write(variable("FAULTS_PLAN"), lines).unwrap();
    }
    let (Some(mut base), Some(kept)) = (base, kept) else { return };
    let now = HeldResources::now(device, faults).unwrap();
    assert!(!now.is_leak(base), "{} leaves something behind without a fault: {base:?}, {now:?}", step.name);
    for (i, injection) in plan.iter().enumerate().skip(number("FAULTS_FROM")) {
        write_line(&mut results, format_args!("run {i}"));
        let (outcome, after) = inject(faults, injection, step, device, &want, &kept, base);
        write_line(&mut results, format_args!("done {i} {}", outcome.line()));
        match after {
            Some(after) => base = after,
            None => return,
        }
    }
}

/// Returns all injections for a step. `calls` has the number of calls per driver function.
fn injections(calls: &[(&str, u64)]) -> Vec<Injection> {
    let mut all = Vec::new();
    let mut add =
        |name: &str, nth, times, code, late| all.push(Injection { name: name.into(), nth, times, code, late });
    for &(name, calls) in calls {
        for nth in 1..=calls {
            for code in CODES {
                [1, 2, 5, ALWAYS].into_iter().for_each(|times| add(name, nth, times, code, false));
                // Markers do not fail late, because PoCL hangs in a barrier that waits for a failed marker.
                if name.starts_with("clEnqueue")
                    && !["clEnqueueMapBuffer", "clEnqueueMarkerWithWaitList"].contains(&name)
                {
                    add(name, nth, 1, code, true);
                }
            }
        }
    }
    for nth in 1..=calls.iter().map(|(_, calls)| calls).sum() {
        for code in CODES {
            [2, 5].into_iter().for_each(|times| add("any", nth, times, code, false));
        }
    }
    all
}

/// Runs a step with the fault in a process without earlier driver calls. Afterwards every device must have its usual number.
fn inject_first(faults: &Faults, injection: &Injection, step: &Step, device: Device) -> Outcome {
    injection.arm(faults);
    let result = run_step(step, device).1;
    faults.clear();
    let injected = faults.injected("any");
    let mut wrong = Vec::new();
    let text = match &result {
        Err(_) => "a panic".into(),
        Ok(Err(error)) => error.to_string(),
        Ok(Ok(_)) => String::new(),
    };
    if result.is_err() || matches!(&result, Ok(Err(error)) if is_wrong(error) || injected == 0) {
        wrong.push(text.clone());
    }
    let lost = matches!(&result, Ok(Err(Error::DeviceLost { .. }))) && !device.is_available();
    if lost && injected < 3 {
        wrong.push(format!("device lost after {injected} failures"));
    }
    if !lost {
        let names: Vec<String> =
            Device::all().iter().map(|d| d.info().map_or_else(|e| e.to_string(), |i| i.name)).collect();
        let known = std::env::var("FAULTS_DEVICES").unwrap();
        let known: Vec<&str> = known.split(", ").collect();
        if names != known {
            wrong.push(format!("the devices are {names:?} and not {known:?}"));
        }
        match run_step(step, device).1 {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => wrong.push(format!("trying again failed: {error}")),
            Err(_) => wrong.push("trying again panicked".into()),
        }
    }
    match (wrong.is_empty(), lost, result) {
        (false, ..) => Outcome::Wrong(format!("{} (the step said: {text})", wrong.join("; "))),
        (_, true, _) => Outcome::Lost,
        _ if injected == 0 => Outcome::Missed,
        (.., Ok(Ok(_))) => Outcome::Absorbed,
        _ => Outcome::Failed,
    }
}

fn write_line(to: &mut File, line: std::fmt::Arguments<'_>) {
    PROGRESS.fetch_add(1, Relaxed);
    to.write_all(format!("{line}\n").as_bytes()).unwrap();
}

static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// Starts a thread that ends the process if one injection takes too long. PoCL needs 40 seconds for the kernels of a step, and several
/// times that on a busy machine.
fn start_watchdog() {
    thread::spawn(|| {
        loop {
            let before = PROGRESS.load(Relaxed);
            thread::sleep(Duration::from_secs(240));
            if PROGRESS.load(Relaxed) == before {
                println!("hangs");
                std::process::abort();
            }
        }
    });
}

/// Runs the step with the fault. Returns the outcome, and the resources held afterwards (`None` if the device is lost).
fn inject(
    faults: &Faults,
    injection: &Injection,
    step: &Step,
    device: Device,
    want: &Values,
    witness: &[Kept],
    base: HeldResources,
) -> (Outcome, Option<HeldResources>) {
    let before = faults.injected("any");
    injection.arm(faults);
    let (kept, result) = run_step(step, device);
    faults.clear();
    let injected = faults.injected("any") - before;

    let mut wrong = Vec::new();
    let (failed, text) = match &result {
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            wrong.push(format!("panic: {}", text.unwrap_or_else(|| format!("{:?}", panic.downcast_ref::<&str>()))));
            (true, String::new())
        }
        Ok(Ok(values)) => {
            if !bits_equal(values, want) {
                wrong.push("Ok with wrong values".into());
            }
            (false, String::new())
        }
        Ok(Err(error)) => {
            if is_wrong(error) {
                wrong.push(error.to_string());
            }
            if injected == 0 {
                wrong.push(format!("without a fault: {error}"));
            }
            (true, format!(" (the step said: {error})"))
        }
    };
    drop(result);
    let outcome = |wrong: Vec<String>, right| match wrong.is_empty() {
        true => right,
        false => Outcome::Wrong(format!("{}{text}", wrong.join("; "))),
    };
    if !device.is_available() {
        if injected < 3 {
            wrong.push(format!("device lost after {injected} failures"));
        }
        return (outcome(wrong, Outcome::Lost), None);
    }
    // If the step did not receive a kernel's fault, the next wait reports it.
    match device.synchronize() {
        Ok(()) | Err(Error::IndexOutOfRange { .. }) => {}
        Err(error) => wrong.push(format!("synchronize failed afterwards: {error}")),
    }
    for (i, kept) in kept.iter().chain(witness).enumerate() {
        match kept.tensor.to_vec::<f32>() {
            Ok(values) if kept.either.contains(&values) => {}
            Ok(_) => wrong.push(format!("tensor {i} lost its values")),
            Err(error) => wrong.push(format!("tensor {i} cannot be read: {error}")),
        }
    }
    drop(kept);
    match run_step(step, device).1 {
        Ok(Ok(values)) if bits_equal(&values, want) => {}
        Ok(Ok(_)) => wrong.push("trying again gave wrong values".into()),
        Ok(Err(error)) => wrong.push(format!("trying again failed: {error}")),
        Err(_) => wrong.push("trying again panicked".into()),
    }
    let after = match HeldResources::now(device, faults) {
        Ok(after) if !after.is_leak(base) => Some(base),
        Ok(after) => {
            wrong.push(format!("leak: {base:?} became {after:?}"));
            Some(after)
        }
        Err(error) => {
            wrong.push(format!("synchronize or empty_cache failed afterwards: {error}"));
            None
        }
    };
    let right = match (injected, failed) {
        (0, _) => Outcome::Missed,
        (_, true) => Outcome::Failed,
        (_, false) => Outcome::Absorbed,
    };
    (outcome(wrong, right), after)
}
