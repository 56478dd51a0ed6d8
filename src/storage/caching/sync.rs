//! Locks and atomics of the hot path: this crate's spin lock and std's atomics, or under loom its replacements, to explore all
//! interleavings.

#[cfg(loom)]
pub(super) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

#[cfg(not(loom))]
pub(super) type Mutex<T> = lock_api::Mutex<spin::Spin, T>;
#[cfg(not(loom))]
pub(super) type MutexGuard<'a, T> = lock_api::MutexGuard<'a, spin::Spin, T>;

/// Locks a mutex, even if a panic of another thread poisoned it.
#[inline]
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(not(loom))]
    return mutex.lock();
    #[cfg(loom)]
    return mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
}

#[cfg(not(loom))]
mod spin {
    use std::hint;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    /// After this many failed attempts, a thread yields the processor between attempts instead of spinning.
    const SPINS_BEFORE_YIELD: u32 = 100;
    /// After this many failed attempts, a thread sleeps between attempts.
    const ATTEMPTS_BEFORE_SLEEP: u32 = 120;
    const SLEEP_TIME: Duration = Duration::from_micros(50);

    /// A lock for short critical sections without driver calls, waits or large allocations. An uncontended lock and unlock need one
    /// atomic read-modify-write, half the cost of a lock that can wake waiters. Threads that wait for the lock poll it.
    #[derive(Debug)]
    pub(in super::super) struct Spin(AtomicBool);

    // SAFETY: `lock`, and a `try_lock` that returns true, return only after this thread changed the flag from false to true. Only `unlock`, which the
    // owner calls, resets the flag, so at most one thread owns the lock at a time. Acquire and Release order the owners' accesses.
    unsafe impl lock_api::RawMutex for Spin {
        const INIT: Spin = Spin(AtomicBool::new(false));
        type GuardMarker = lock_api::GuardSend;

        #[inline]
        fn lock(&self) {
            if !self.try_lock() {
                self.wait();
            }
        }

        #[inline]
        fn try_lock(&self) -> bool {
            !self.0.swap(true, Ordering::Acquire)
        }

        #[inline]
        unsafe fn unlock(&self) {
            self.0.store(false, Ordering::Release);
        }
    }

    impl Spin {
        #[cold]
        fn wait(&self) {
            for turn in 0u32.. {
                match turn {
                    0..SPINS_BEFORE_YIELD => hint::spin_loop(),
                    SPINS_BEFORE_YIELD..ATTEMPTS_BEFORE_SLEEP => thread::yield_now(),
                    _ => thread::sleep(SLEEP_TIME),
                }
                // The flag is read before it is written, so that waiting threads do not take the cache line from the owner of the lock.
                if !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Acquire) {
                    return;
                }
            }
        }
    }
}
