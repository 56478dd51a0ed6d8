//! The exchange of a call between a caller and a helper, through one atomic pointer.
//!
//! A mailbox is vacant, or it has one helper: a rayon job spawned by the caller that put a call into the vacant mailbox. A helper
//! leaves by a compare-and-exchange on the same pointer through which callers offer calls, so a caller always knows whether the
//! mailbox that gets its call has a helper. A helper may start late or never: callers take back calls that no helper has taken.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use sync::Ordering::{Acquire, Relaxed, Release};
use sync::{AtomicBool, AtomicPtr, AtomicUsize, Thread, spin_loop};

/// The atomics and threads of this module: those of std, or of loom, which explores every interleaving.
mod sync {
    #[cfg(loom)]
    pub(super) use loom::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
        thread::{self, Thread},
    };
    #[cfg(not(loom))]
    pub(super) use std::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
        thread::{self, Thread},
    };
}

/// The number of times a caller polls for a helper's completion before it parks.
const POLLS_BEFORE_PARK: usize = if cfg!(loom) { 0 } else { 2000 };
/// The number of times a helper polls for a call between two readings of the clock.
const POLLS_PER_CLOCK_READ: usize = if cfg!(loom) { 1 } else { 64 };
/// The maximum time for which a helper polls before it leaves: longer than the pauses between the operations of a training step.
pub(super) const MAX_POLL_TIME: Duration = Duration::from_micros(500);
/// The maximum time for which a helper stays while calls keep coming, so that other jobs of the pool get to run.
const MAX_HELPER_TIME: Duration = Duration::from_millis(if cfg!(loom) { 1 << 30 } else { 10 });
/// The pointer in a mailbox whose helper polls, or will poll, for calls. A vacant mailbox holds null.
const POLLING: *mut Call = ptr::without_provenance_mut(1);
/// A tag in the lowest bits of a call's address: the helper works on the call.
const TAKEN: usize = 1;
/// A tag in the lowest bits of a call's address: the helper works on the call, and must wake the caller when done.
const AWAITED: usize = 2;

/// The pointer through which a helper gets its calls.
#[repr(align(128))] // two cache lines, which processors fetch together
pub(super) struct Mailbox(AtomicPtr<Call>);

fn tagged(call: *mut Call, tag: usize) -> *mut Call {
    call.map_addr(|address| address | tag)
}

impl Mailbox {
    pub(super) fn new() -> Mailbox {
        Mailbox(AtomicPtr::new(ptr::null_mut()))
    }

    /// Offers a call to the mailbox's idle helper, or puts the call into the vacant mailbox and calls `enter` to start a helper.
    /// Returns false if the helper is busy or another thread changed the mailbox first. The call must stay alive until
    /// [`withdraw`](Self::withdraw) returns.
    fn offer(&self, call: *mut Call, enter: impl FnOnce()) -> bool {
        let now = self.0.load(Relaxed);
        let vacant = now.is_null();
        if !(vacant || now == POLLING) || self.0.compare_exchange(now, call, Release, Relaxed).is_err() {
            return false;
        }
        if vacant {
            enter();
        }
        true
    }

    /// Takes back a call that was offered, or waits for the helper that has taken it.
    fn withdraw(&self, call: *mut Call, caller: &OnceLock<Thread>) {
        if self.0.compare_exchange(call, POLLING, Relaxed, Acquire).is_ok() {
            return;
        }
        let (taken, awaited) = (tagged(call, TAKEN), tagged(call, AWAITED));
        for spins in 0.. {
            let now = self.0.load(Acquire);
            if now != taken && now != awaited {
                return; // the mailbox may hold another caller's call, which has another address
            }
            if spins < POLLS_BEFORE_PARK {
                spin_loop();
                continue;
            }
            caller.get_or_init(sync::thread::current);
            if now == awaited || self.0.compare_exchange(taken, awaited, Release, Relaxed).is_ok() {
                sync::thread::park();
            }
        }
    }

    /// Runs a helper until the helper leaves the mailbox; [`poll`](Self::poll) explains `patience`.
    pub(super) fn run_helper(&self, number: usize, patience: Duration) {
        if patience.is_zero() && self.leave() {
            return;
        }
        let entered = Instant::now();
        loop {
            let call = self.poll(entered, patience);
            if let Some(call) = call {
                // SAFETY: between `poll`, which has marked the call as taken, and `finish`, the caller waits in `withdraw`.
                let taken = unsafe { &*call };
                // SAFETY: likewise: the work lives as long as the caller waits.
                taken.work(number, unsafe { &*taken.work.0 }, || ());
                self.finish(call);
            }
            if (call.is_none() || entered.elapsed() > MAX_HELPER_TIME) && self.leave() {
                return;
            }
        }
    }

    /// Polls for a call and takes it. Polls for as long as the helper has served this mailbox already, but at least `patience` and
    /// at most [`MAX_POLL_TIME`].
    fn poll(&self, entered: Instant, patience: Duration) -> Option<*mut Call> {
        let mut begin = None;
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                let call = self.0.load(Relaxed);
                if call != POLLING
                    && let Ok(call) = self.0.compare_exchange(call, tagged(call, TAKEN), Acquire, Relaxed)
                {
                    return Some(call); // perhaps not the call that was loaded, but a later call at its address
                }
                spin_loop();
            }
            let begin = *begin.get_or_insert_with(Instant::now);
            if cfg!(loom) || begin.elapsed() >= (begin - entered).clamp(patience, MAX_POLL_TIME) {
                return None;
            }
        }
    }

    /// Makes the mailbox vacant, unless a call was offered: the helper then stays for that call.
    fn leave(&self) -> bool {
        self.0.compare_exchange(POLLING, ptr::null_mut(), Relaxed, Relaxed).is_ok()
    }

    /// Marks a call as done, and wakes its caller if necessary.
    fn finish(&self, call: *mut Call) {
        if self.0.compare_exchange(tagged(call, TAKEN), POLLING, Release, Acquire).is_ok() {
            return;
        }
        // SAFETY: the call's caller still waits, until the store below.
        let caller = unsafe { &*call }.caller.get().cloned();
        self.0.store(POLLING, Release);
        if let Some(caller) = caller {
            caller.unpark();
        }
    }
}

/// The shared state of a call. It is on the stack of the caller, who waits for all helpers that have taken the call.
#[repr(align(64))] // leaves the tags' bits of the address free
struct Call {
    work: Work,
    count: usize,
    /// True if every part starts with its last piece.
    reverse: bool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The calling thread, set before it parks.
    caller: OnceLock<Thread>,
    /// The next piece of each part. A thread starts with the same part in every call, because the part's data may still be in its
    /// cache, and then helps with the other parts.
    parts: SmallVec<[Part; 8]>,
}

/// The index of a part's next piece.
#[repr(align(64))] // one cache line each, because threads change them
struct Part(AtomicUsize);

impl Call {
    /// Does pieces until no piece is left, from part `first` on, calling `between` before each. A panic ends the call for all
    /// threads.
    fn work(&self, first: usize, piece: &(dyn Fn(usize) + Sync), mut between: impl FnMut()) {
        let parts = self.parts.len();
        let mut part = first % parts;
        let all = || {
            for _ in 0..parts {
                let (next, start) = (&self.parts[part].0, self.count * part / parts);
                let end = self.count * (part + 1) / parts;
                // Load before `fetch_add`, which would take the cache line from other threads even if no piece is left.
                while next.load(Relaxed) < end && !self.panicked.load(Relaxed) {
                    between();
                    let i = next.fetch_add(1, Relaxed);
                    if i < end {
                        piece(if self.reverse { start + (end - 1 - i) } else { i });
                    }
                }
                part = (part + 1) % parts;
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(all)) {
            self.panicked.store(true, Relaxed);
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            match *first {
                None => *first = Some(panic),
                Some(_) => std::mem::forget(panic), // a drop could panic again, outside of catch_unwind
            }
        }
    }
}

/// A pointer to the work of a call, which helpers dereference only while the caller waits for them.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: the pointer's target is Sync, and dereferenced only while the caller waits.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

/// Does `count` pieces on this thread and its helpers. Each thread starts with its own of `parts` parts, from the part's end if
/// `reverse`. `enter(i)` starts a helper for mailbox `i`, and must not panic.
///
/// # Panics
/// With the panic of a piece; the other pieces may then not have been done.
pub(super) fn share_pieces(
    mailboxes: &[Mailbox],
    enter: impl Fn(usize),
    count: usize,
    parts: usize,
    reverse: bool,
    piece: &(dyn Fn(usize) + Sync),
) {
    // SAFETY: only the lifetime changes. The pointer is dereferenced by helpers that have taken the call, and this function
    // does not leave, by return or panic, before it has taken the call back from every mailbox or seen the helper finish:
    // `work` catches panics, and nothing else before that can panic.
    let work = Work(unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync)>(piece) });
    let mut call = Call {
        work,
        count,
        reverse,
        panicked: AtomicBool::new(false),
        panic: Mutex::new(None),
        caller: OnceLock::new(),
        parts: (0..parts).map(|part| Part(AtomicUsize::new(count * part / parts))).collect(),
    };
    let (wanted, place) = (mailboxes.len().min(count - 1), ptr::from_ref(&call).cast_mut());
    let mut asked: SmallVec<[&Mailbox; 16]> = SmallVec::new();
    let mut ask = || {
        let mut others = mailboxes.iter().enumerate();
        while asked.len() < wanted
            && let Some((i, mailbox)) = others.next()
        {
            if mailbox.offer(place, || enter(i)) {
                asked.push(mailbox);
            }
        }
    };
    ask();
    // A helper that is busy with another caller's work may become idle later, so offer the call again between pieces.
    call.work(0, piece, ask);
    asked.iter().for_each(|mailbox| mailbox.withdraw(place, &call.caller));
    if let Some(panic) = call.panic.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
        resume_unwind(panic);
    }
}
