//! Failures of the simulated device on demand.

use std::collections::VecDeque;
use std::mem::discriminant;

use super::{Call, Driver, Failure, Sim, State};
use crate::{Error, Result};

/// The failures requested, in order.
#[derive(Default)]
pub(super) struct Failures {
    pub(super) create: VecDeque<Failure>,
    pub(super) commit: VecDeque<Failure>,
    pub(super) enqueue: VecDeque<Failure>,
    /// Failures of other calls, by their kind.
    call: Vec<(Call, Failure)>,
    /// The number of calls of any kind to let pass, the number that then fail, and the failure.
    calls: Option<(u64, u64, Failure)>,
    /// Whether writing fails until further notice.
    writes: bool,
    /// Failures that enqueued copies have when they run.
    copies: VecDeque<Failure>,
    /// A failure of a command since the last wait for the device.
    pub(super) pending_failure: Option<Failure>,
}

impl Failures {
    fn remaining(&self) -> usize {
        self.copies.len() + self.calls.as_ref().map_or(0, |(_, times, _)| usize::try_from(*times).unwrap_or(usize::MAX))
    }

    pub(super) fn fails_copy(&mut self) -> bool {
        let failure = self.copies.pop_front();
        let fails = failure.is_some();
        self.pending_failure = failure.or(self.pending_failure.take());
        fails
    }

    fn failure_of_call(&mut self, call: Call) -> Option<Failure> {
        let next = self.call.iter().position(|(kind, _)| discriminant(kind) == discriminant(&call));
        if let Some(next) = next {
            return Some(self.call.remove(next).1);
        }
        if self.writes && matches!(call, Call::Write(_)) {
            return Some(Failure::Resources);
        }
        let (pass, times, failure) = self.calls.as_mut()?;
        if *pass > 0 {
            *pass -= 1;
            return None;
        }
        *times = times.checked_sub(1)?;
        Some(failure.clone())
    }
}

impl Sim {
    /// Makes the next creation fail. Calling again queues another failure; likewise for the methods below.
    pub fn fail_next_create(&self, failure: Failure) {
        self.with(|s| s.failures.create.push_back(failure));
    }

    /// Makes the next commit or extension fail.
    pub fn fail_next_commit(&self, failure: Failure) {
        self.with(|s| s.failures.commit.push_back(failure));
    }

    /// Makes the next work that touches uncommitted memory fail when it is enqueued.
    pub fn fail_next_enqueue(&self, failure: Failure) {
        self.with(|s| s.failures.enqueue.push_back(failure));
    }

    /// Makes the next call of this kind fail and do nothing, whatever its bytes. The kind is one of
    /// [`Synchronize`](Call::Synchronize), [`Record`](Call::Record), [`Query`](Call::Query), [`Wait`](Call::Wait),
    /// [`StreamWaits`](Call::StreamWaits), [`Copy`](Call::Copy), [`Read`](Call::Read) and [`Write`](Call::Write).
    pub fn fail_next_call(&self, kind: Call, failure: Failure) {
        self.with(|s| s.failures.call.push((kind, failure)));
    }

    /// Returns the number of requested failures that have not happened yet.
    pub fn failures_left(&self) -> usize {
        self.failures_lined_up().into_iter().sum::<usize>() + self.with(|s| s.failures.remaining())
    }

    /// Returns the numbers of requested failures of creation, commit, enqueueing and other calls.
    pub(crate) fn failures_lined_up(&self) -> [usize; 4] {
        self.with(|s| {
            let Failures { create, commit, enqueue, call, .. } = &s.failures;
            [create.len(), commit.len(), enqueue.len(), call.len()]
        })
    }

    /// Cancels every failure that has not happened yet.
    pub fn clear_failures(&self) {
        self.with(|s| s.failures = Failures::default());
    }

    /// Lets `pass` calls that can fail succeed; the next `times` such calls fail and do nothing. Calls that can fail
    /// are creating, committing and extending, waiting, recording, copying, reading and writing.
    pub fn fail_calls(&self, pass: u64, times: u64, failure: Failure) {
        self.with(|s| s.failures.calls = Some((pass, times, failure)));
    }

    /// Makes the next copy to run do nothing, and the wait after it fail.
    pub fn fail_next_copy(&self, failure: Failure) {
        self.with(|s| s.failures.copies.push_back(failure));
    }

    /// Makes every write from the host fail, until called with false.
    pub fn fail_writes(&self, fail: bool) {
        self.with(|s| s.failures.writes = fail);
    }

    /// Returns why the allocator declared the device lost, if it did.
    pub fn cause_of_loss(&self) -> Option<String> {
        self.with(|s| s.lost.clone())
    }

    /// Records a call, and executes the call unless a requested failure applies.
    pub(super) fn attempt<R>(
        &self,
        call: Call,
        f: impl FnOnce(&mut State) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.call(call, |s| s.failures.failure_of_call(call).map_or_else(|| f(s), Err))
    }

    /// Like [`attempt`](Self::attempt), for calls that fail as an OpenCL call does.
    pub(super) fn try_call<R>(
        &self,
        call: Call,
        name: &'static str,
        f: impl FnOnce(&mut State) -> Result<R>,
    ) -> Result<R> {
        self.call(call, |s| {
            s.failures.failure_of_call(call).map_or_else(|| f(s), |failure| Err(self.error(name, failure)))
        })
    }

    /// Converts a failure into the error that work reports.
    pub(super) fn error(&self, call: &'static str, failure: Failure) -> Error {
        let code = match failure {
            Failure::Other(error) => return error,
            Failure::DeviceMemory => "CL_MEM_OBJECT_ALLOCATION_FAILURE",
            Failure::Resources => "CL_OUT_OF_RESOURCES",
            Failure::HostMemory => "CL_OUT_OF_HOST_MEMORY",
            Failure::TooBig => "CL_INVALID_BUFFER_SIZE",
        };
        Error::OpenCl { device: self.device(), call, code, detail: String::new() }
    }
}
