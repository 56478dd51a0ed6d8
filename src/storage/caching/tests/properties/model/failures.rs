//! Injected failures and their effects.

use super::*;

/// Calls that query or order streams.
pub(super) const ASKING: [Call; 5] = [Call::Record, Call::Query, Call::Wait, Call::StreamWaits, Call::Synchronize];

/// Repeats a driver call, made by the test and not by the allocator, until it succeeds.
pub(super) fn retry_until_ok<T>(call: impl Fn() -> Result<T>) -> T {
    (0..).find_map(|_| call().ok()).expect("failures come to an end")
}

pub(super) fn failure(code: i32) -> Failure {
    match code {
        -4 => Failure::DeviceMemory,
        -5 => Failure::Resources,
        _ => Failure::HostMemory,
    }
}

impl World {
    /// Runs an operation and returns its result. Returns `None` if the operation fails, which is allowed only after an injected failure.
    pub(super) fn allow_injected_failure<T>(
        &mut self,
        operation: impl FnOnce(&World) -> Result<T>,
    ) -> Result<Option<T>, String> {
        let failures = self.sim.failures_left();
        match operation(self) {
            Ok(value) => Ok(Some(value)),
            Err(_) if failures != self.sim.failures_left() => {
                self.note("told of a failure");
                Ok(None)
            }
            Err(error) => Err(format!("reported: {error}")),
        }
    }

    /// Accepts higher peaks after an injected failure: the statistics include blocks that were allocated and freed at
    /// once, because no wait between the streams could be enqueued.
    pub(super) fn accept_peaks(&mut self) -> Result<(), String> {
        let s = self.allocator.stats();
        let peaks = [s.allocation.peak, s.allocated_bytes.peak, s.requested_bytes.peak];
        let less = peaks.iter().zip(&self.peaks).any(|(now, before)| now < before);
        ensure!(!less, "peaks were {:?}, statistics say {peaks:?}", self.peaks);
        self.peaks = peaks;
        Ok(())
    }

    /// Counts the injected failures that have occurred. None may occur when work is enqueued, because memory must be committed before that.
    pub(super) fn note_failures(&mut self) -> Result<(), String> {
        let left = self.sim.failures_lined_up();
        for (at, name) in ["creation", "commit", "enqueueing", "asking"].into_iter().enumerate() {
            while self.failures[at].len() > left[at] {
                ensure!(at != 2, "a launch met a failure that was meant for uncommitted memory");
                let code = self.failures[at].pop_front();
                self.note(format!("{name} failed with {}", code.unwrap_or_default()));
            }
        }
        Ok(())
    }
}
