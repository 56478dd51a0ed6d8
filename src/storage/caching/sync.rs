//! Locks and atomics of the hot path: our own and std's, or loom's when it explores every interleaving.

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

    /// Turns before giving the processor away, and before sleeping.
    const TURNS: u32 = 100;
    const YIELDS: u32 = 120;
    const NAP: Duration = Duration::from_micros(50);

    /// A lock for moments: nothing is called, waited for or allocated much under it. It costs one atomic operation, where
    /// one that can wake who waits needs two: half of what an uncontended pair costs. Who waits looks again by itself.
    #[derive(Debug)]
    pub(in super::super) struct Spin(AtomicBool);

    // SAFETY: `lock` and a `try_lock` that says true return with the flag turned from false to true by this thread, and
    // only `unlock`, which its owner calls, turns it back: one owner at a time. Acquire and Release order what they did.
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
                    0..TURNS => hint::spin_loop(),
                    TURNS..YIELDS => thread::yield_now(),
                    _ => thread::sleep(NAP),
                }
                // Looking first leaves the line with its owner.
                if !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Acquire) {
                    return;
                }
            }
        }
    }
}
