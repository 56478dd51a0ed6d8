//! The thread that runs a rank's collectives one after another, in the order of the calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::transport::{Position, Transport};
use crate::device::cpu::threads;
use crate::internal::lock;
use crate::{Error, Result};

/// How long a thread spins before it blocks: about the time it takes to wake a thread. With a single core, threads do not spin.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// Receives from a channel. Spins for [`SPIN_TIME`] before it blocks.
pub(super) fn recv_spinning<T>(from: &Receiver<T>) -> std::result::Result<T, RecvError> {
    if threads() == 1 {
        return from.recv();
    }
    let begun = Instant::now();
    while begun.elapsed() < SPIN_TIME {
        match from.try_recv() {
            Ok(received) => return Ok(received),
            Err(TryRecvError::Disconnected) => return Err(RecvError),
            Err(TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
    from.recv()
}

/// A function that the thread runs. It gets the transport.
type Job = Box<dyn FnOnce(&mut dyn Transport) + Send>;

/// A handle on the thread of a rank's collectives. The thread ends when the last handle is dropped.
pub(super) struct Engine {
    /// `None` after [`Engine::end`].
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Makes the rank leave the job for the given reason. Any thread may call it while the engine waits for other ranks.
    pub(super) leave: Box<dyn Fn(&str) + Send + Sync>,
    /// The rank's position when the engine was started.
    pub(super) position: Position,
}

impl Engine {
    /// Starts the thread, which calls `make` to create its transport. `leave` is stored in [`leave`](Self::leave).
    pub(super) fn start<T: Transport>(
        op: &'static str,
        make: impl FnOnce() -> Result<T> + Send + 'static,
        leave: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Arc<Engine>> {
        let (jobs, todo) = channel::<Job>();
        let (made, is_made) = channel();
        let body = move || {
            let mut transport = match make() {
                Ok(transport) => transport,
                Err(e) => return drop(made.send(Err(e))),
            };
            let _ = made.send(Ok(*transport.position()));
            while let Ok(job) = recv_spinning(&todo) {
                if catch_unwind(AssertUnwindSafe(|| job(&mut transport))).is_err() {
                    return transport.leave("panicked in a collective");
                }
            }
            transport.leave("has left the group: it made fewer calls than the others, or ended with an error");
        };
        let thread = Builder::new().name("claystone-ranks".into()).spawn(body);
        let thread = thread.map_err(|e| Error::invalid(op, format!("no thread can be started: {e}")))?;
        let position = is_made.recv().map_err(|_| Error::invalid(op, "the thread of the group ended"))??;
        let (jobs, thread) = (Mutex::new(Some(jobs)), Mutex::new(Some(thread)));
        Ok(Arc::new(Engine { jobs, thread, leave: Box::new(leave), position }))
    }

    /// Runs `f` on the thread, after all functions submitted before.
    pub(super) fn submit<R: Send + 'static>(
        &self,
        op: &'static str,
        f: impl FnOnce(&mut dyn Transport) -> Result<R> + Send + 'static,
    ) -> Work<R> {
        let (done, result) = channel();
        let job: Job = Box::new(move |transport| drop(done.send(f(transport))));
        if let Some(jobs) = &*lock(&self.jobs) {
            let _ = jobs.send(job); // fails if the thread has ended; then `Work::wait` returns the error
        }
        Work { op, result }
    }

    /// Lets the thread finish all functions submitted so far, then ends it. Functions submitted later fail.
    pub(super) fn end(&self) {
        lock(&self.jobs).take();
        let thread = lock(&self.thread).take();
        // The thread may itself be the one that exits the process; a thread cannot join itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join(); // the panic message has already been printed
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end();
    }
}

/// A running collective (PyTorch's `Work`). Dropping it does not cancel the collective.
#[must_use = "call wait(): until then the tensors hold neither the old values nor the new values"]
pub struct Work<R = ()> {
    op: &'static str,
    result: Receiver<Result<R>>,
}

impl<R> Work<R> {
    pub(super) fn done(op: &'static str, value: R) -> Work<R> {
        let (done, result) = channel();
        let _ = done.send(Ok(value)); // cannot fail: the receiver exists
        Work { op, result }
    }

    /// Waits for the collective and returns its result. Commands enqueued afterwards read the new values.
    ///
    /// # Errors
    /// [`Error::Rank`] if another rank failed or did not make the call. Errors of transfers. After an error, the tensors to which the
    /// collective writes have undefined values.
    pub fn wait(self) -> Result<R> {
        let ended = |_| Error::invalid(self.op, "the thread of the group ended: a collective panicked");
        recv_spinning(&self.result).map_err(ended)?
    }
}
