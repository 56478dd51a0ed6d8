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
        self.failures_lined_up().into_iter().sum()
    }

    /// Those of creation, commit, enqueueing and other calls.
    pub(crate) fn failures_lined_up(&self) -> [usize; 4] {
        self.with(|s| {
            let Failures { create, commit, enqueue, call } = &s.failures;
            [create.len(), commit.len(), enqueue.len(), call.len()]
        })
    }

    /// Takes back every failure that has not happened yet.
    pub fn clear_failures(&self) {
        self.with(|s| s.failures = Failures::default());
    }

    /// As [`call`](Self::call), unless it is to fail.
    pub(super) fn try_call<R>(
        &self,
        call: Call,
        name: &'static str,
        f: impl FnOnce(&mut State) -> Result<R>,
    ) -> Result<R> {
        self.call(call, |s| {
            let next = s.failures.call.iter().position(|(kind, _)| discriminant(kind) == discriminant(&call));
            match next.map(|at| s.failures.call.remove(at)) {
                Some((_, failure)) => Err(self.error(name, failure)),
                None => f(s),
            }
        })
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
