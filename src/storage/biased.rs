//! A lock for readers and writers whose owner takes it without an atomic operation, which costs more than all else that a
//! small operation does to its tensors: almost always the thread that made a block is the only one that looks at it.
//!
//! The owner stores that it holds the lock, and looks whether it is barred; others bar it, and look whether it holds the
//! lock. Of the two at least one sees the other, if neither looks before its store is seen. The owner has nothing but the
//! compiler kept from reordering the two; others have the kernel interrupt every thread of the process in between
//! (membarrier): an owner that looked before that has been seen to hold the lock, one that looks after it sees that it is
//! barred. Then it takes, as all others do, a lock of the ordinary kind, under which alone `barred` is ever written.
//!
//! To interrupt threads costs microseconds. When 64 locks were taken from their owners, [`Claim`]s not counted, a process gives
//! no more of them to owners. Nor does it where there is no such barrier.

#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::{PoisonError, TryLockError};

use sync::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub(super) use sync::{barrier, pause};

/// What is held by an owner that writes; less is how often it reads.
const WRITER: u32 = 1 << 31;

#[derive(Debug)]
pub(crate) struct Biased {
    others: RwLock<()>,
    /// Who need not take `others`: the thread that was last given the lock.
    owner: AtomicUsize,
    /// What the owner holds without `others`. Written by it alone.
    held: AtomicU32,
    barred: AtomicBool,
}

/// The lock, held for reading or for writing.
#[must_use]
pub(crate) enum Hold<'a> {
    Own(#[expect(dead_code, reason = "held")] Own<'a>),
    Read(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, ()>),
    Write(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'a, ()>),
}

/// The lock, held by its owner.
#[must_use]
pub(crate) struct Own<'a> {
    lock: &'a Biased,
    amount: u32,
    _here: PhantomData<*mut ()>, // not to be sent to another thread
}

impl Drop for Own<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(self.lock.held.load(Relaxed) - self.amount, Release);
    }
}

impl Biased {
    /// A lock without an owner.
    pub(crate) fn new() -> Biased {
        let (owner, held) = (AtomicUsize::new(0), AtomicU32::new(0));
        Biased { others: RwLock::new(()), owner, held, barred: AtomicBool::new(false) }
    }

    /// Makes this thread the owner. To be called before others may hold the lock, or after all have let go of it: who does
    /// so must come after them by other means. Claims may be about.
    #[inline]
    pub(crate) fn give(&self) {
        if self.barred.load(Relaxed) != sync::has_owners() {
            self.owner.store(sync::me(), Relaxed);
        } else {
            self.give_anew();
        }
    }

    #[cold]
    fn give_anew(&self) {
        // A claim keeps it barred for as long as it lives.
        if let Ok(_others) = self.others.try_write() {
            self.barred.store(!sync::may_have_owners(), Release);
        }
        self.owner.store(sync::me(), Relaxed);
    }

    /// Holds the lock beside other readers. A thread that holds it does so again only as long as nobody waits to write.
    #[inline]
    pub(crate) fn read(&self) -> Hold<'_> {
        self.own_read().map_or_else(|| self.read_as_others(), Hold::Own)
    }

    /// Holds the lock alone.
    #[inline]
    pub(crate) fn write(&self) -> Hold<'_> {
        self.own_write().map_or_else(|| self.write_as_others(), Hold::Own)
    }

    /// As [`read`](Biased::read) for the owner, which never waits: who takes several locks like this may do so in any order.
    /// None for others, and where it is barred.
    #[inline(always)]
    pub(crate) fn own_read(&self) -> Option<Own<'_>> {
        self.take(1)
    }

    /// As [`write`](Biased::write), likewise; none where this thread holds the lock already, too.
    #[inline(always)]
    pub(crate) fn own_write(&self) -> Option<Own<'_>> {
        self.take(WRITER)
    }

    #[inline(always)]
    fn take(&self, amount: u32) -> Option<Own<'_>> {
        let held = self.held.load(Relaxed);
        if self.owner.load(Relaxed) != sync::me() || (held > 0 && held.max(amount) >= WRITER) {
            return None;
        }
        self.held.store(held + amount, Relaxed);
        sync::light_barrier();
        // Who holds the lock already has been seen, and is waited for.
        if held == 0 && self.barred.load(Acquire) {
            self.held.store(0, Release);
            return None;
        }
        Some(Own { lock: self, amount, _here: PhantomData })
    }

    #[cold]
    #[inline(never)]
    fn read_as_others(&self) -> Hold<'_> {
        loop {
            let guard = self.others.read().unwrap_or_else(PoisonError::into_inner);
            if self.barred.load(Relaxed) {
                return Hold::Read(guard);
            }
            drop(guard);
            drop(self.write_as_others());
        }
    }

    #[cold]
    #[inline(never)]
    fn write_as_others(&self) -> Hold<'_> {
        let guard = self.others.write().unwrap_or_else(PoisonError::into_inner);
        if !self.barred.load(Relaxed) {
            self.barred.store(true, Relaxed);
            sync::barrier();
            self.wait();
            sync::count_lost();
        }
        Hold::Write(guard)
    }

    /// Until the owner, which is barred, has let go.
    fn wait(&self) {
        let mut turns = 0u32;
        while self.held.load(Acquire) > 0 {
            turns += 1;
            sync::pause(turns);
        }
    }

    /// Whether this thread was given the lock last. Only where it was given once, before others saw it.
    pub(crate) fn is_own(&self) -> bool {
        self.owner.load(Relaxed) == sync::me()
    }

    /// Bars the owner and all others for a while; it may hold the lock still, see [`Claim`].
    pub(crate) fn claim(&self) -> Claim<'_> {
        Claim::new(self, self.others.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`claim`](Biased::claim), unless somebody else than the owner holds the lock.
    pub(crate) fn try_claim(&self) -> Option<Claim<'_>> {
        match self.others.try_write() {
            Ok(others) => Some(Claim::new(self, others)),
            Err(TryLockError::Poisoned(others)) => Some(Claim::new(self, others.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A lock that nobody can take any more. Many are claimed, then [`barrier`] is called once, then is seen which owners still
/// hold theirs. Owners that were barred by this keep their locks when it is dropped.
pub(crate) struct Claim<'a> {
    lock: &'a Biased,
    barred_before: bool,
    _others: RwLockWriteGuard<'a, ()>,
}

impl<'a> Claim<'a> {
    fn new(lock: &'a Biased, others: RwLockWriteGuard<'a, ()>) -> Claim<'a> {
        let barred_before = lock.barred.load(Relaxed);
        lock.barred.store(true, Relaxed);
        Claim { lock, barred_before, _others: others }
    }

    /// Whether it is this that bars the owner, if there is one.
    pub(crate) fn bars(&self) -> bool {
        !self.barred_before
    }

    /// Whether the owner holds the lock no more: it is now held alone. To be asked after the barrier.
    pub(crate) fn is_alone(&self) -> bool {
        self.lock.held.load(Acquire) == 0
    }

    /// Waits until it is held alone. To be called after the barrier.
    pub(crate) fn wait(&self) {
        self.lock.wait();
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.lock.barred.store(self.barred_before, Release);
    }
}

#[cfg(not(loom))]
mod sync {
    use std::cell::Cell;
    use std::hint;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
    use std::sync::atomic::{Ordering::*, compiler_fence, fence};
    pub(super) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
    use std::thread;
    use std::time::Duration;

    /// Owners that lose their locks to other threads before no lock has one.
    const FEW: u32 = 64;
    const UNKNOWN: u32 = u32::MAX;
    /// How many of them are left.
    static LEFT: AtomicU32 = AtomicU32::new(UNKNOWN);

    /// Whether locks that are given have owners from now on; false also where nobody has asked.
    #[inline(always)]
    pub(super) fn has_owners() -> bool {
        (1..=FEW).contains(&LEFT.load(Relaxed))
    }

    pub(super) fn may_have_owners() -> bool {
        if LEFT.load(Relaxed) == UNKNOWN {
            let left = if kernel::has_barrier() { FEW } else { 0 };
            let _ = LEFT.compare_exchange(UNKNOWN, left, Relaxed, Relaxed);
        }
        has_owners()
    }

    #[cfg(test)]
    pub(super) fn is_possible() -> bool {
        kernel::has_barrier()
    }

    pub(super) fn count_lost() {
        let _ = LEFT.fetch_update(Relaxed, Relaxed, |left| (1..=FEW).contains(&left).then(|| left - 1));
    }

    /// What no other thread of this process has.
    #[inline(always)]
    pub(super) fn me() -> usize {
        thread_local!(static ME: Cell<u8> = const { Cell::new(0) });
        ME.with(|me| std::ptr::from_ref(me).addr())
    }

    /// What an owner stored before is seen by who calls [`barrier`], or what that one stored before is seen after this.
    #[inline(always)]
    pub(super) fn light_barrier() {
        if cfg!(miri) { fence(SeqCst) } else { compiler_fence(SeqCst) }
    }

    /// The other side of [`light_barrier`], for all owners at once.
    pub(in super::super) fn barrier() {
        fence(SeqCst);
        kernel::barrier();
    }

    /// The turn of who waits for another thread: at first it looks again at once.
    pub(in super::super) fn pause(turn: u32) {
        match turn {
            0..100 => hint::spin_loop(),
            100..120 => thread::yield_now(),
            _ => thread::sleep(Duration::from_micros(50)),
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    mod kernel {
        use std::io::{Error, ErrorKind::OutOfMemory};
        use std::sync::OnceLock;

        const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
        const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

        fn membarrier(command: libc::c_int) -> Result<(), Error> {
            // SAFETY: takes three numbers, and touches no memory.
            match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
                0 => Ok(()),
                _ => Err(Error::last_os_error()),
            }
        }

        /// Whether this process has such a barrier from now on.
        pub(super) fn has_barrier() -> bool {
            static THERE: OnceLock<bool> = OnceLock::new();
            let ask = || membarrier(REGISTER_PRIVATE_EXPEDITED).and_then(|()| membarrier(PRIVATE_EXPEDITED)).is_ok();
            *THERE.get_or_init(ask)
        }

        pub(super) fn barrier() {
            // Where there is none, there are no owners.
            while has_barrier()
                && let Err(error) = membarrier(PRIVATE_EXPEDITED)
            {
                if error.kind() != OutOfMemory && membarrier(REGISTER_PRIVATE_EXPEDITED).is_err() {
                    // Forbidden since: nobody may go on as if it had been done.
                    tracing::error!(%error, "membarrier");
                    std::process::abort();
                }
                std::thread::yield_now();
            }
        }
    }

    /// Under Miri both sides have fences; elsewhere nobody is an owner.
    #[cfg(not(all(target_os = "linux", not(miri))))]
    mod kernel {
        pub(super) fn has_barrier() -> bool {
            cfg!(miri)
        }

        pub(super) fn barrier() {}
    }
}

/// For loom, which knows fences, and explores what comes of them.
#[cfg(loom)]
mod sync {
    use std::sync::atomic::{AtomicUsize as Counter, Ordering::*};

    use loom::sync::atomic::fence;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
    pub(super) use loom::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

    pub(super) fn has_owners() -> bool {
        true
    }

    pub(super) fn may_have_owners() -> bool {
        true
    }

    pub(super) fn is_possible() -> bool {
        true
    }

    pub(super) fn count_lost() {}

    pub(super) fn me() -> usize {
        static NEXT: Counter = Counter::new(1);
        loom::thread_local!(static ME: usize = NEXT.fetch_add(1, Relaxed));
        ME.with(|&me| me)
    }

    pub(super) fn light_barrier() {
        fence(SeqCst);
    }

    pub(in super::super) fn barrier() {
        fence(SeqCst);
    }

    pub(in super::super) fn pause(_: u32) {
        loom::thread::yield_now();
    }
}
