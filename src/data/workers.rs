//! Threads that make a few things ahead, handed out in order.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::{Error, Result};

/// Makes the thing of a number.
pub(super) type Make<T> = Arc<dyn Fn(usize) -> Result<T> + Send + Sync>;

/// What worker threads make of the numbers from 0 on, in order. They stop when this is dropped.
pub(super) struct Workers<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    /// Something was made.
    made: Condvar,
    /// Something was taken, so that more may be made.
    taken: Condvar,
}

struct Queue<T> {
    /// What nobody makes yet.
    next: usize,
    /// How many there are in all.
    end: usize,
    /// What is handed out next.
    wanted: usize,
    /// How many may be made or kept ahead of that.
    ahead: usize,
    made: BTreeMap<usize, Result<T>>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next number to make something of, once there is room for it; none at the end.
    fn claim(&self) -> Option<usize> {
        let is_full = |q: &mut Queue<T>| q.next < q.end && q.next >= q.wanted.saturating_add(q.ahead);
        let mut queue = self.taken.wait_while(self.lock(), is_full).unwrap_or_else(PoisonError::into_inner);
        let number = queue.next;
        (number < queue.end).then(|| {
            queue.next += 1;
            number
        })
    }
}

impl<T: Send + 'static> Workers<T> {
    /// `count` threads, which make `end` things with `make`, each thread `ahead` in advance.
    pub(super) fn start(count: usize, ahead: usize, end: usize, make: &Make<T>) -> Result<Workers<T>> {
        let ahead = count.saturating_mul(ahead.max(1));
        let queue = Mutex::new(Queue { next: 0, end, wanted: 0, ahead, made: BTreeMap::new() });
        let shared = Arc::new(Shared { queue, made: Condvar::new(), taken: Condvar::new() });
        let mut workers = Workers { shared, threads: Vec::new() };
        for i in 0..count.min(end) {
            let (shared, make) = (workers.shared.clone(), make.clone());
            let work = move || {
                while let Some(number) = shared.claim() {
                    let made = attempt(&make, number);
                    shared.lock().made.insert(number, made);
                    shared.made.notify_all();
                }
            };
            let thread = std::thread::Builder::new().name(format!("claystone-data-{i}")).spawn(work);
            workers
                .threads
                .push(thread.map_err(|e| Error::invalid("DataLoader", format!("no thread for a worker: {e}")))?);
        }
        Ok(workers)
    }

    /// What was made of the next number; waits for it.
    pub(super) fn next(&mut self) -> Result<T> {
        let is_missing = |q: &mut Queue<T>| !q.made.contains_key(&q.wanted);
        let mut queue =
            self.shared.made.wait_while(self.shared.lock(), is_missing).unwrap_or_else(PoisonError::into_inner);
        let wanted = queue.wanted;
        queue.wanted += 1;
        self.shared.taken.notify_all();
        queue.made.remove(&wanted).expect("it was waited for")
    }
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        // Nothing is left to claim, so that each thread ends after what it is at.
        self.shared.lock().end = 0;
        self.shared.taken.notify_all();
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// What `make` makes, or an error with the message it panicked with.
pub(super) fn attempt<T>(make: &Make<T>, number: usize) -> Result<T> {
    catch_unwind(AssertUnwindSafe(|| make(number))).unwrap_or_else(|panic| {
        let message = message(&*panic);
        Err(Error::invalid("DataLoader", format!("the data set panicked in batch {number}: {message}")))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(|s| &s[..]);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
