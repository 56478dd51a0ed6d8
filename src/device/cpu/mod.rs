//! The CPU as a device: worker pool and vectorised math.
//!
//! Operations share their work with a team of threads, in [`parallel`]. Large transfers to and from other devices have a
//! rayon pool of the crate's own. A thread that waits inside a rayon pool meanwhile takes on other work of that pool, which
//! may need the very lock that it holds; a caller of [`run`] therefore only sleeps until its work is done, whichever pool
//! it may itself belong to.

pub(crate) mod gemm;
pub(crate) mod math;
pub(crate) mod parallel;
pub(crate) mod streaming;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

thread_local! {
    static IN_POOL: Cell<bool> = const { Cell::new(false) };
}

/// The pool, or nothing where no thread could be started: work then runs where it is asked for.
fn pool() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let start = || {
        ThreadPoolBuilder::new()
            .num_threads(threads())
            .thread_name(|i| format!("claystone-transfer-{i}"))
            .start_handler(|_| IN_POOL.set(true))
            .build()
            .ok()
    };
    POOL.get_or_init(start).as_ref()
}

/// Threads that work together on one operation: as many as the machine runs at once, or `RAYON_NUM_THREADS`.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    let asked = || std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok().filter(|&n| n > 0);
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    *THREADS.get_or_init(|| asked().unwrap_or_else(all))
}

/// Runs `f` in the pool, where rayon's iterators use all of it, and sleeps until it is done; inside the pool, calls it.
/// A lock may be held over this. Handing over costs some microseconds: small work is better done in place.
///
/// # Panics
/// With `f`'s panic, if it panics.
pub(crate) fn run<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let Some(pool) = pool().filter(|_| !IN_POOL.get()) else { return f() };
    let done = Arc::new((Mutex::new(None), Condvar::new()));
    let job: Box<dyn FnOnce() + Send + '_> = Box::new({
        let done = Arc::clone(&done);
        move || {
            let result = catch_unwind(AssertUnwindSafe(f));
            let (slot, wake) = &*done;
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            wake.notify_one();
        }
    });
    // SAFETY: only the lifetime changes. What the job borrows is in `f` and in its result: `f` is gone when the slot is
    // filled, and this thread waits below until it is and then takes the result out. Nothing from here to there
    // returns or unwinds: spawn queues the job, and the wait ignores poison.
    let job: Box<dyn FnOnce() + Send + 'static> = unsafe { std::mem::transmute(job) };
    pool.spawn(job);
    let (slot, wake) = &*done;
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    let result = loop {
        match slot.take() {
            Some(result) => break result,
            None => slot = wake.wait(slot).unwrap_or_else(PoisonError::into_inner),
        }
    };
    drop(slot);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn runs_in_the_pool_and_returns() {
        let name = run(|| std::thread::current().name().map(str::to_owned)).unwrap();
        assert!(name.starts_with("claystone-"), "{name}");
        let data = vec![1u64; 10_000];
        assert_eq!(run(|| data.par_iter().sum::<u64>()), 10_000);
        assert_eq!(run(|| run(|| 7)), 7);
        assert!(threads() >= 1);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let caught = catch_unwind(|| run(|| panic!("inside")));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
        assert_eq!(run(|| 1), 1);
    }

    /// Workers of another pool that hold one lock over `run`: were they to steal while they wait, one would take up a
    /// sibling that wants the lock it holds itself.
    #[test]
    fn a_lock_may_be_held_over_it() {
        let lock = Mutex::new(0u64);
        let foreign = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        foreign.install(|| {
            (0..64u64).into_par_iter().for_each(|_| {
                let mut sum = lock.lock().unwrap();
                *sum += run(|| (0..100u64).into_par_iter().sum::<u64>());
            });
        });
        assert_eq!(*lock.lock().unwrap(), 64 * 4950);
    }
}
