//! The thread of a rank that talks to the others: collectives run there one after another, in the order of the calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::transport::Transport;
use crate::device::cpu::threads;
use crate::{Error, Result};

/// How long a thread looks for what it waits for before it sleeps, where it has a core to itself: about as long as it takes to be woken.
const PATIENCE: Duration = Duration::from_micros(100);

/// Receives what comes, at once where it comes soon.
pub(super) fn receive_soon<T>(from: &Receiver<T>) -> std::result::Result<T, RecvError> {
    if threads() == 1 {
        return from.recv();
    }
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        match from.try_recv() {
            Ok(received) => return Ok(received),
            Err(TryRecvError::Disconnected) => return Err(RecvError),
            Err(TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
    from.recv()
}

type Job = Box<dyn FnOnce(&mut dyn Transport) + Send>;

/// The thread, which ends with the last handle on it.
pub(super) struct Engine {
    /// Gone when it ends.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Has the rank told the others why it leaves, also from another thread while the engine waits for them.
    pub(super) leave: Box<dyn Fn(&str) + Send + Sync>,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Engine {
    /// Starts the thread, which makes its own transport. `leave` is what another thread calls for this rank to give up.
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
            let _ = made.send(Ok((transport.rank(), transport.size())));
            while let Ok(job) = receive_soon(&todo) {
                if catch_unwind(AssertUnwindSafe(|| job(&mut transport))).is_err() {
                    return transport.leave("panicked in a collective");
                }
            }
            transport.leave("has left the group: it made fewer calls than the others, or ended with an error");
        };
        let thread = Builder::new().name("claystone-ranks".into()).spawn(body);
        let thread = thread.map_err(|e| Error::invalid(op, format!("no thread can be started: {e}")))?;
        let (rank, size) = is_made.recv().map_err(|_| Error::invalid(op, "the thread of the group ended"))??;
        let (jobs, thread) = (Mutex::new(Some(jobs)), Mutex::new(Some(thread)));
        Ok(Arc::new(Engine { jobs, thread, leave: Box::new(leave), rank, size }))
    }

    /// Runs `f` on the thread, after everything submitted before.
    pub(super) fn submit<R: Send + 'static>(
        &self,
        op: &'static str,
        f: impl FnOnce(&mut dyn Transport) -> Result<R> + Send + 'static,
    ) -> Work<R> {
        let (done, result) = channel();
        let job: Job = Box::new(move |transport| drop(done.send(f(transport))));
        if let Some(jobs) = &*self.jobs.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = jobs.send(job); // where the thread has ended, the work's wait says so
        }
        Work { op, result }
    }
}

impl Engine {
    /// Ends the thread once it has done what was submitted. Whatever is submitted later fails.
    pub(super) fn end(&self) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It may be the one that ends the process.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join(); // its panic has been printed
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end();
    }
}

/// A collective under way (PyTorch's `Work`). Dropped, it goes on.
#[must_use = "wait for it: before, its tensors hold neither the old values nor the new ones"]
pub struct Work<R = ()> {
    op: &'static str,
    result: Receiver<Result<R>>,
}

impl<R> Work<R> {
    /// One that needed nothing of other ranks.
    pub(super) fn done(op: &'static str, value: R) -> Work<R> {
        let (done, result) = channel();
        let _ = done.send(Ok(value)); // its receiver is here
        Work { op, result }
    }

    /// Waits until it is done: its result, where it has one. What is submitted to a device from now on sees it.
    ///
    /// # Errors
    /// [`Error::Rank`] where another rank did not do its part; those of the transfers. What the collective writes to has to be
    /// set anew then.
    pub fn wait(self) -> Result<R> {
        let ended = |_| Error::invalid(self.op, "the thread of the group ended: a collective panicked");
        receive_soon(&self.result).map_err(ended)?
    }
}
