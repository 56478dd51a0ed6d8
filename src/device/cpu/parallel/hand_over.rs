//! How a caller hands a call to a helper and takes it back: one atomic pointer between two threads.
//!
//! A mailbox is vacant, or it has one helper: a job of rayon's that was spawned by whoever put a call into the vacant mailbox.
//! The helper leaves by the same atomic step by which others put calls in, so that no call is put into a mailbox that its
//! helper has left without the one who puts it in knowing. A helper that comes late, or not at all, harms nobody: callers
//! take back what it has not taken up.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use sync::Ordering::{Acquire, Relaxed, Release};
use sync::{AtomicBool, AtomicPtr, AtomicUsize, Thread, spin_loop};

/// The atomics and threads of the hand-over: std's, or loom's when it explores every interleaving.
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

/// How often a caller looks whether a helper has finished before it goes to sleep.
const SPINS: usize = if cfg!(loom) { 0 } else { 2000 };
/// How often a helper looks for a call before it looks at the clock.
const LOOKS: usize = if cfg!(loom) { 1 } else { 64 };
/// How long a helper looks for work at most before it leaves: longer than what lies between the operations of a training
/// step.
pub(super) const PATIENCE: Duration = Duration::from_micros(500);
/// How long a helper stays while work keeps coming, so that other jobs of its pool get their turn.
const TENURE: Duration = Duration::from_millis(if cfg!(loom) { 1 << 30 } else { 10 });
/// What a mailbox holds where no call is in it: that its helper looks at it, or will. A vacant one holds null.
const LOOKING: *mut Call = ptr::without_provenance_mut(1);
/// Of a call in a mailbox, in the lowest bits of its address: its helper is at work on it, and also the caller waits to be
/// woken when it is through.
const TAKEN: usize = 1;
const AWAITED: usize = 2;

/// Where a helper gets its calls.
#[repr(align(128))] // two cache lines, which come together
pub(super) struct Mailbox(AtomicPtr<Call>);

fn tagged(call: *mut Call, tag: usize) -> *mut Call {
    call.map_addr(|address| address | tag)
}

impl Mailbox {
    /// A vacant one.
    pub(super) fn new() -> Mailbox {
        Mailbox(AtomicPtr::new(ptr::null_mut()))
    }

    /// Puts a call in if the helper has nothing to do; into a vacant mailbox too, whose helper is then to `enter`. The call
    /// stays there, or at the helper, until [`withdraw`](Self::withdraw).
    fn offer(&self, call: *mut Call, enter: impl FnOnce()) -> bool {
        let now = self.0.load(Relaxed);
        let vacant = now.is_null();
        if !(vacant || now == LOOKING) || self.0.compare_exchange(now, call, Release, Relaxed).is_err() {
            return false;
        }
        if vacant {
            enter();
        }
        true
    }

    /// Takes a call back that was put in, or waits for the helper that has taken it up.
    fn withdraw(&self, call: *mut Call, caller: &OnceLock<Thread>) {
        if self.0.compare_exchange(call, LOOKING, Relaxed, Acquire).is_ok() {
            return;
        }
        let (taken, awaited) = (tagged(call, TAKEN), tagged(call, AWAITED));
        for spins in 0.. {
            let now = self.0.load(Acquire);
            if now != taken && now != awaited {
                return; // it may be another caller's already, which cannot have the same address meanwhile
            }
            if spins < SPINS {
                spin_loop();
                continue;
            }
            caller.get_or_init(sync::thread::current);
            if now == awaited || self.0.compare_exchange(taken, awaited, Release, Relaxed).is_ok() {
                sync::thread::park();
            }
        }
    }

    /// What the helper does from when it enters until it leaves: see [`look`](Self::look) for `patience`.
    pub(super) fn help(&self, number: usize, patience: Duration) {
        if patience.is_zero() && self.leave() {
            return;
        }
        let entered = Instant::now();
        loop {
            let call = self.look(entered, patience);
            if let Some(call) = call {
                // SAFETY: between `look`, which says that it is taken, and `finish` the caller waits, in `withdraw`.
                let taken = unsafe { &*call };
                // SAFETY: likewise: the work lives as long as the caller waits.
                taken.work(number, unsafe { &*taken.work.0 }, || ());
                self.finish(call);
            }
            if (call.is_none() || entered.elapsed() > TENURE) && self.leave() {
                return;
            }
        }
    }

    /// Looks for a call and takes it up: for as long as the helper has been here by now, but at least `patience` and at
    /// most [`PATIENCE`].
    fn look(&self, entered: Instant, patience: Duration) -> Option<*mut Call> {
        let mut begin = None;
        loop {
            for _ in 0..LOOKS {
                let call = self.0.load(Relaxed);
                if call != LOOKING
                    && let Ok(call) = self.0.compare_exchange(call, tagged(call, TAKEN), Acquire, Relaxed)
                {
                    return Some(call); // it may be another than that looked at, in the same place
                }
                spin_loop();
            }
            let begin = *begin.get_or_insert_with(Instant::now);
            if cfg!(loom) || begin.elapsed() >= (begin - entered).clamp(patience, PATIENCE) {
                return None;
            }
        }
    }

    /// Makes the mailbox vacant, unless a call was put in: the helper then stays for it.
    fn leave(&self) -> bool {
        self.0.compare_exchange(LOOKING, ptr::null_mut(), Relaxed, Relaxed).is_ok()
    }

    /// Says that the helper is through with a call.
    fn finish(&self, call: *mut Call) {
        if self.0.compare_exchange(tagged(call, TAKEN), LOOKING, Release, Acquire).is_ok() {
            return;
        }
        // SAFETY: its caller still waits, until the next line but one.
        let caller = unsafe { &*call }.caller.get().cloned();
        self.0.store(LOOKING, Release);
        if let Some(caller) = caller {
            caller.unpark();
        }
    }
}

/// What caller and helpers have in common. Lives on the stack of its caller, who waits for all who have taken it up.
#[repr(align(64))] // the tags' bits are free
struct Call {
    work: Work,
    count: usize,
    /// Whether every part begins with its last piece.
    reverse: bool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Set before it goes to sleep.
    caller: OnceLock<Thread>,
    /// The next piece of each thread's part of them. A thread has the same part in every call, so that what it wrote in
    /// one it may find in its own cache in the next; it goes on with the others' when its own is done.
    parts: SmallVec<[Part; 8]>,
}

#[repr(align(64))] // each in its thread's cache
struct Part(AtomicUsize);

impl Call {
    /// Does pieces until none is left, from part `first` on, and `between` before each. A panic ends it for everybody.
    fn work(&self, first: usize, piece: &(dyn Fn(usize) + Sync), mut between: impl FnMut()) {
        let parts = self.parts.len();
        let mut part = first % parts;
        let all = || {
            for _ in 0..parts {
                let (next, start) = (&self.parts[part].0, self.count * part / parts);
                let end = self.count * (part + 1) / parts;
                // Looked at first: it stays in the cache of who has it if nothing is left.
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
                Some(_) => std::mem::forget(panic), // to drop it could panic again, past the door
            }
        }
    }
}

/// A pointer to the work of a call, which helpers follow only while the caller waits for them.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: what it points to is Sync, and followed only while the caller waits for it.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

/// Does `count` pieces on this thread and those that help it, cut into `parts` that threads begin with, from the end of each
/// where `reverse`. `enter` has a helper enter a mailbox, by its index, and does not panic.
///
/// # Panics
/// With the panic of a piece; the others may then not have been done.
pub(super) fn share(
    mailboxes: &[Mailbox],
    enter: impl Fn(usize),
    count: usize,
    parts: usize,
    reverse: bool,
    piece: &(dyn Fn(usize) + Sync),
) {
    // SAFETY: only the lifetime changes. The pointer is followed by helpers that have taken up the call, and this function
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
    // Who is at another caller's work may be through with it later.
    call.work(0, piece, ask);
    asked.iter().for_each(|mailbox| mailbox.withdraw(place, &call.caller));
    if let Some(panic) = call.panic.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
        resume_unwind(panic);
    }
}
