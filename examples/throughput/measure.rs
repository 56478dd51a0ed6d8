//! Timing: many samples of a case, their median, and the line that reports it.

use std::error::Error;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Outcome;

/// What a case is called and how its rate is counted.
#[derive(Clone)]
pub struct Case {
    /// `claystone`, `driver` (bare OpenCL calls) or `host`.
    pub peer: &'static str,
    pub name: &'static str,
    /// Bytes of the tensor.
    pub size: usize,
    /// Bytes read and written by a call.
    pub moved: usize,
}

/// A measured case.
pub struct Line {
    pub case: Case,
    pub device: String,
    pub median_us: f64,
    min_us: f64,
    /// A call when many are enqueued before one wait.
    pipe_us: Option<f64>,
    samples: usize,
}

impl Line {
    /// GB/s of a call and its wait.
    pub fn rate(&self) -> f64 {
        self.case.moved as f64 / self.median_us / 1e3
    }

    /// The line as JSON; every case was checked before it was measured.
    pub fn json(&self) -> Value {
        // A transposition is counted in elements, everything else in bytes.
        let n = if self.case.name == "transpose_copy" { self.case.size / 4 } else { self.case.size };
        let mut line = json!({
            "peer": self.case.peer, "device": self.device, "case": self.case.name, "n": n, "dtype": "f32",
            "median_us": round(self.median_us), "min_us": round(self.min_us),
        });
        if let Some(us) = self.pipe_us {
            line["pipe_us"] = round(us).into();
        }
        line["gbps"] = round(self.rate()).into();
        line["samples"] = self.samples.into();
        line["checked"] = true.into();
        line
    }
}

fn round(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// Measures for about `budget` a case.
pub struct Meter {
    pub budget: Duration,
    pub device: String,
}

impl Meter {
    /// Times `call` followed by `wait`; where `pipeline`, also many calls before one wait.
    pub fn time<T, E>(
        &self,
        case: Case,
        pipeline: bool,
        mut call: impl FnMut() -> Result<T, E>,
        wait: impl Fn() -> Outcome<()>,
    ) -> Outcome<Line>
    where
        Box<dyn Error>: From<E>,
    {
        let mut sample = |calls: usize, budget: Duration| {
            let (start, mut times) = (Instant::now(), Vec::new());
            while times.len() < 3 || (start.elapsed() < budget && times.len() < 5000) {
                let from = Instant::now();
                for _ in 0..calls {
                    call()?;
                }
                wait()?;
                times.push(from.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
            times.sort_by(f64::total_cmp);
            Outcome::Ok(times)
        };
        sample(1, self.budget / 4)?; // warms caches and clocks
        let times = sample(1, self.budget)?;
        let median_us = times[times.len() / 2];
        let pipe_us = if pipeline {
            let calls = ((2e5 / median_us) as usize).clamp(1, 20);
            let times = sample(calls, self.budget / 2)?;
            Some(times[times.len() / 2])
        } else {
            None
        };
        Ok(Line { case, device: self.device.clone(), median_us, min_us: times[0], pipe_us, samples: times.len() })
    }
}
