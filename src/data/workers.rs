//! Worker threads that compute results in advance. The results are returned in order.

use std::collections::BTreeMap;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::internal::lock;
use crate::{Error, Result};

/// A function that computes the result with the given number.
pub(super) type MakeFn<T> = Arc<dyn Fn(usize) -> Result<T> + Send + Sync>;

/// Worker threads that compute the results 0, 1, 2 and so on. They stop when this handle is dropped.
pub(super) struct Workers<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

/// The queue that workers and the caller share.
struct Shared<T> {
    queue: Mutex<Queue<T>>,
    /// Notified after a result was computed.
    made: Condvar,
    /// Notified after a result was taken, because workers may then compute one more.
    taken: Condvar,
}

/// The state of the queue.
struct Queue<T> {
    /// The number of the next result that a worker will compute.
    next: usize,
    end: usize,
    /// The number of the result that the caller gets next.
    next_result: usize,
    /// The maximum number of results that are being computed or are stored at a time.
    ahead: usize,
    made: BTreeMap<usize, Result<T>>,
}

impl<T> Shared<T> {
    /// Takes the next number to compute. Waits until there is room for one more result. `None` after the last number.
    fn claim(&self) -> Option<usize> {
        let is_full = |q: &mut Queue<T>| q.next < q.end && q.next >= q.next_result.saturating_add(q.ahead);
        let mut queue = self.taken.wait_while(lock(&self.queue), is_full).unwrap_or_else(PoisonError::into_inner);
        let number = queue.next;
        (number < queue.end).then(|| {
            queue.next += 1;
            number
        })
    }
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `count` threads that compute `end` results with `make`. Each thread computes up to `ahead` results in advance.
    pub(super) fn start(count: usize, ahead: usize, end: usize, make: &MakeFn<T>) -> Result<Workers<T>> {
        let ahead = count.saturating_mul(ahead.max(1));
        let queue = Mutex::new(Queue { next: 0, end, next_result: 0, ahead, made: BTreeMap::new() });
        let shared = Arc::new(Shared { queue, made: Condvar::new(), taken: Condvar::new() });
        let mut workers = Workers { shared, threads: Vec::new() };
        for i in 0..count.min(end) {
            let (shared, make) = (workers.shared.clone(), make.clone());
            let work = move || {
                while let Some(number) = shared.claim() {
                    let made = make_catching_panics(&make, number);
                    lock(&shared.queue).made.insert(number, made);
                    shared.made.notify_all();
                }
            };
            let thread = std::thread::Builder::new().name(format!("claystone-data-{i}")).spawn(work);
            let failed = |e| Error::invalid("DataLoader", format!("a worker thread cannot be started: {e}"));
            workers.threads.push(thread.map_err(failed)?);
        }
        Ok(workers)
    }

    /// Waits for the next result and returns it.
    pub(super) fn next(&mut self) -> Result<T> {
        let is_missing = |q: &mut Queue<T>| !q.made.contains_key(&q.next_result);
        let mut queue =
            self.shared.made.wait_while(lock(&self.shared.queue), is_missing).unwrap_or_else(PoisonError::into_inner);
        let next_result = queue.next_result;
        queue.next_result += 1;
        self.shared.taken.notify_all();
        queue.made.remove(&next_result).expect("it was waited for")
    }
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        // With an end of 0 no number is left to compute, so each thread ends after its current result.
        lock(&self.shared.queue).end = 0;
        self.shared.taken.notify_all();
        mem::take(&mut self.threads).into_iter().for_each(|thread| _ = thread.join());
    }
}

/// Calls `make`. Turns a panic into an error that has the panic's message.
pub(super) fn make_catching_panics<T>(make: &MakeFn<T>, number: usize) -> Result<T> {
    catch_unwind(AssertUnwindSafe(|| make(number))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(|text| &text[..]);
        let message = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
        invalid!("DataLoader", "the data set panicked in batch {number}: {message}")
    })
}
