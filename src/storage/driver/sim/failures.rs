//! Failures on demand.

use std::collections::VecDeque;
use std::mem::discriminant;

use super::{Call, Driver, Failure, Sim, State};
use crate::{Error, Result};

/// Failures that are lined up, the next one first.
#[derive(Default)]
pub(super) struct Failures {
    pub(super) create: VecDeque<Failure>,
    pub(super) commit: VecDeque<Failure>,
    pub(super) enqueue: VecDeque<Failure>,
    /// Those of other calls, by their kind.
    call: Vec<(Call, Failure)>,
    /// Calls of all kinds to let pass, and how many then fail so.
    calls: Option<(u64, u64, Failure)>,
    /// Whether writing fails until further notice.
    writes: bool,
    /// Of copies that are enqueued, when they run.
    copies: VecDeque<Failure>,
    /// What a command met since the last wait for the device.
    pub(super) met: Option<Failure>,
}

impl Failures {
    fn left(&self) -> usize {
        self.copies.len() + self.calls.as_ref().map_or(0, |(_, times, _)| usize::try_from(*times).unwrap_or(usize::MAX))
    }

    /// Whether the copy that runs now fails.
    pub(super) fn fails_copy(&mut self) -> bool {
        let failure = self.copies.pop_front();
        let fails = failure.is_some();
        self.met = failure.or(self.met.take());
        fails
    }

    /// What the call made now fails with.
    fn of_call(&mut self, call: Call) -> Option<Failure> {
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
    /// The next creation fails so; calling again lines up another failure, here and below.
    pub fn fail_next_create(&self, failure: Failure) {
        self.with(|s| s.failures.create.push_back(failure));
    }

    /// The next commit or extension fails so.
    pub fn fail_next_commit(&self, failure: Failure) {
        self.with(|s| s.failures.commit.push_back(failure));
    }

    /// The next work that touches memory not yet committed fails so when it is enqueued.
    pub fn fail_next_enqueue(&self, failure: Failure) {
        self.with(|s| s.failures.enqueue.push_back(failure));
    }

    /// The next call of this kind, whatever its bytes, fails so and does nothing: one of those that
    /// [`Synchronize`](Call::Synchronize), [`Record`](Call::Record), [`Query`](Call::Query), [`Wait`](Call::Wait),
    /// [`StreamWaits`](Call::StreamWaits), [`Copy`](Call::Copy), [`Read`](Call::Read) and [`Write`](Call::Write) stand for.
    pub fn fail_next_call(&self, kind: Call, failure: Failure) {
        self.with(|s| s.failures.call.push((kind, failure)));
    }

    /// Failures lined up that have not happened yet.
    pub fn failures_left(&self) -> usize {
        self.failures_lined_up().into_iter().sum::<usize>() + self.with(|s| s.failures.left())
    }

    /// Those of creation, commit, enqueueing and other calls.
    pub(crate) fn failures_lined_up(&self) -> [usize; 4] {
        self.with(|s| {
            let Failures { create, commit, enqueue, call, .. } = &s.failures;
            [create.len(), commit.len(), enqueue.len(), call.len()]
        })
    }

    /// Takes back every failure that has not happened yet.
    pub fn clear_failures(&self) {
        self.with(|s| s.failures = Failures::default());
    }

    /// Lets `pass` calls that can fail succeed; the next `times` fail so and do nothing. Those are creating, committing and
    /// extending, waiting, recording, copying, reading and writing.
    pub fn fail_calls(&self, pass: u64, times: u64, failure: Failure) {
        self.with(|s| s.failures.calls = Some((pass, times, failure)));
    }

    /// The next copy that is enqueued, or waits in its stream, does nothing when it runs, and the wait after that fails so.
    pub fn fail_next_copy(&self, failure: Failure) {
        self.with(|s| s.failures.copies.push_back(failure));
    }

    /// Whether writing from the host fails, until told otherwise.
    pub fn fail_writes(&self, fail: bool) {
        self.with(|s| s.failures.writes = fail);
    }

    /// Why the allocator gave the device up, if it did.
    pub fn cause_of_loss(&self) -> Option<String> {
        self.with(|s| s.lost.clone())
    }

    /// Notes a call, and does it unless it is to fail.
    pub(super) fn attempt<R>(
        &self,
        call: Call,
        f: impl FnOnce(&mut State) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.call(call, |s| s.failures.of_call(call).map_or_else(|| f(s), Err))
    }

    /// As [`attempt`](Self::attempt), for what fails as a call of OpenCL does.
    pub(super) fn try_call<R>(
        &self,
        call: Call,
        name: &'static str,
        f: impl FnOnce(&mut State) -> Result<R>,
    ) -> Result<R> {
        self.call(call, |s| s.failures.of_call(call).map_or_else(|| f(s), |failure| Err(self.error(name, failure))))
    }

    /// A failure as work reports it.
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
