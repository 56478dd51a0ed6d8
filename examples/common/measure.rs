//! Timing, and results as JSON lines. All programs of a comparison use this format: the median of many samples of a case and, if it is
//! meaningful, the time per call when many calls are enqueued before one wait.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The work of a call, from which the rate (GB/s or GFLOP/s) is computed.
#[derive(Clone, Copy)]
pub enum Work {
    Nothing,
    /// The number of bytes read and written.
    Bytes(usize),
    /// The number of floating-point operations.
    Flops(f64),
}

/// A case to measure, which gives one line of the results.
#[derive(Clone)]
pub struct Case {
    pub peer: String,
    pub name: &'static str,
    /// The size of the case: a number of bytes, elements, or rows of a matrix or batch.
    pub n: usize,
    pub dtype: &'static str,
    pub work: Work,
}

/// How the calls of a case are sampled.
#[derive(Clone, Copy)]
pub enum Calls {
    /// Each sample is one call and a wait.
    Single,
    /// As `Single`, and additionally samples of many calls before one wait.
    Pipelined,
    /// Each sample is this number of calls before one wait. Times are per call.
    Batch(usize),
}

/// The result of a case. The caller has checked that the computed values are right.
pub struct Line {
    pub case: Case,
    pub device: String,
    pub median_us: f64,
    min_us: f64,
    /// The time per call in microseconds when many calls are enqueued before one wait. `None` if not measured.
    pipe_us: Option<f64>,
    samples: usize,
    pub note: Option<String>,
}

impl Line {
    /// Returns the rate of a call including its wait, in GB/s or GFLOP/s.
    pub fn rate(&self) -> f64 {
        let work = match self.case.work {
            Work::Nothing => 0.0,
            Work::Bytes(bytes) => bytes as f64,
            Work::Flops(flops) => flops,
        };
        work / self.median_us / 1e3
    }

    pub fn json(&self) -> Value {
        let mut line = self.case.json(&self.device);
        line["median_us"] = round(self.median_us).into();
        line["min_us"] = round(self.min_us).into();
        if let Some(us) = self.pipe_us {
            line["pipe_us"] = round(us).into();
        }
        match self.case.work {
            Work::Nothing => {}
            Work::Bytes(_) => line["gbps"] = round(self.rate()).into(),
            Work::Flops(_) => line["gflops"] = round(self.rate()).into(),
        }
        line["samples"] = self.samples.into();
        line["checked"] = true.into();
        if let Some(note) = &self.note {
            line["note"] = note.as_str().into();
        }
        line
    }
}

impl Case {
    fn json(&self, device: &str) -> Value {
        json!({ "peer": self.peer, "device": device, "case": self.name, "n": self.n, "dtype": self.dtype })
    }

    /// Returns the JSON line of a case that failed.
    pub fn failed(&self, device: &str, error: &dyn Error) -> Value {
        let mut line = self.json(device);
        line["median_us"] = Value::Null;
        line["error"] = error.to_string().into();
        line
    }
}

fn round(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// Measures each case for about the time `budget`.
pub struct Meter {
    pub budget: Duration,
    pub device: String,
}

impl Meter {
    /// Times `call` followed by `wait`.
    pub fn time<T, E>(
        &self,
        case: Case,
        calls: Calls,
        mut call: impl FnMut() -> Result<T, E>,
        wait: impl Fn() -> Result<(), Box<dyn Error>>,
    ) -> Result<Line, Box<dyn Error>>
    where
        Box<dyn Error>: From<E>,
    {
        let mut sample = |calls: usize, budget: Duration| {
            let (start, mut times) = (Instant::now(), Vec::new());
            let enough = |n: usize| n >= 5 || (n >= 3 && start.elapsed() > Duration::from_secs(8));
            while !enough(times.len()) || (start.elapsed() < budget && times.len() < 5000) {
                let from = Instant::now();
                for _ in 0..calls {
                    black_box(call()?);
                }
                wait()?;
                times.push(from.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
            times.sort_by(f64::total_cmp);
            Ok::<_, Box<dyn Error>>(times)
        };
        let batch = if let Calls::Batch(n) = calls { n } else { 1 };
        let mut times = sample(batch, self.budget / 4)?; // also warms up caches and clocks
        if times[0] < 1e6 {
            times = sample(batch, self.budget)?;
        }
        let median_us = times[times.len() / 2];
        let pipe_us = match calls {
            Calls::Pipelined => {
                let calls = ((2e5 / median_us) as usize).clamp(1, 20);
                let times = sample(calls, self.budget / 2)?;
                Some(times[times.len() / 2])
            }
            _ => None,
        };
        let (device, min_us, samples) = (self.device.clone(), times[0], times.len());
        Ok(Line { case, device, median_us, min_us, pipe_us, samples, note: None })
    }

    /// Times two calls in turns of several samples each, so that other load on the machine affects both alike.
    #[allow(dead_code)] // not used by every program
    pub fn beside(
        &self,
        cases: [Case; 2],
        mut calls: [&mut dyn FnMut() -> Result<(), Box<dyn Error>>; 2],
    ) -> Result<[Line; 2], Box<dyn Error>> {
        /// The number of consecutive samples of one call in a turn.
        const TURN_SAMPLES: usize = 25;
        let mut times = [Vec::new(), Vec::new()];
        let start = Instant::now();
        let enough = |n: usize| n >= 3 * TURN_SAMPLES && (start.elapsed() > 2 * self.budget || n >= 5000);
        while !enough(times[0].len()) {
            for (call, times) in calls.iter_mut().zip(&mut times) {
                call()?; // the first call of a turn refills the caches
                for _ in 0..TURN_SAMPLES {
                    let from = Instant::now();
                    call()?;
                    times.push(from.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        let mut lines = cases.into_iter().zip(times).map(|(case, mut times)| {
            times.sort_by(f64::total_cmp);
            let (median_us, min_us, samples) = (times[times.len() / 2], times[0], times.len());
            Line { case, device: self.device.clone(), median_us, min_us, pipe_us: None, samples, note: None }
        });
        Ok(std::array::from_fn(|_| lines.next().expect("two cases")))
    }
}
