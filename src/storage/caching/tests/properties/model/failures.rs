//! Failures that were made up: what becomes of them.

use super::*;

/// Calls by which an allocator learns how far streams are.
pub(super) const ASKING: [Call; 5] = [Call::Record, Call::Query, Call::Wait, Call::StreamWaits, Call::Synchronize];

/// What is not the allocator's does not fail: it is tried again.
pub(super) fn insist<T>(call: impl Fn() -> Result<T>) -> T {
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
    /// What an operation gives; none where it reports an error, which it may only after a failure that was made up.
    pub(super) fn told<T>(&mut self, operation: impl FnOnce(&World) -> Result<T>) -> Result<Option<T>, String> {
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

    /// After a failure that was made up: blocks that could not be ordered were handed out and taken back at once, and
    /// statistics have seen them.
    pub(super) fn accept_peaks(&mut self) -> Result<(), String> {
        let s = self.allocator.stats();
        let peaks = [s.allocation.peak, s.allocated_bytes.peak, s.requested_bytes.peak];
        let less = peaks.iter().zip(&self.peaks).any(|(now, before)| now < before);
        ensure!(!less, "peaks were {:?}, statistics say {peaks:?}", self.peaks);
        self.peaks = peaks;
        Ok(())
    }

    /// Counts the failures that have happened by now. None is met when work is enqueued: memory was committed before.
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
