//! Work shared between the thread that asks for it and a team of helpers.
//!
//! Every helper has a mailbox. The caller puts its call into those of helpers that have nothing to do, starts at once, and
//! takes back what nobody has taken up when it is through: a small operation is done before helpers notice and has waited
//! for nobody. A caller takes on pieces of its own work alone, never what else there is to do, so it may hold a lock
//! over this. A helper that has nothing to do keeps looking for a moment before it sleeps, because to be woken costs it
//! tens of microseconds and operations come one after another. Nothing is taken from the heap.

#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::threads;

/// How often a caller looks whether a helper has finished before it goes to sleep.
const SPINS: usize = 2000;
/// How long a helper looks for work before it goes to sleep: longer than what lies between the operations of a training step.
const PATIENCE: Duration = Duration::from_micros(500);
/// What a mailbox holds where no call is in it: that its helper looks at it. That it sleeps is null.
const LOOKING: *mut Call = ptr::without_provenance_mut(1);
/// Of a call in a mailbox, in the lowest bits of its address: its helper is at work on it, and also the caller waits to be
/// woken when it is through.
const TAKEN: usize = 1;
const AWAITED: usize = 2;

/// Where a helper gets its calls.
#[repr(align(128))] // two cache lines, which come together
struct Mailbox {
    /// [`LOOKING`], null, or the call, tagged.
    call: AtomicPtr<Call>,
    /// None where it could not be started: then nobody takes up what is put in here, and the others do its part.
    helper: OnceLock<Thread>,
}

fn tagged(call: *mut Call, tag: usize) -> *mut Call {
    call.map_addr(|address| address | tag)
}

impl Mailbox {
    /// Puts a call in if the helper has nothing to do. It stays there, or at the helper, until [`withdraw`](Self::withdraw).
    fn offer(&self, call: *mut Call) -> bool {
        let now = self.call.load(Relaxed);
        let asleep = now.is_null();
        if !(asleep || now == LOOKING) || self.call.compare_exchange(now, call, Release, Relaxed).is_err() {
            return false;
        }
        if asleep && let Some(helper) = self.helper.get() {
            helper.unpark();
        }
        true
    }

    /// Takes a call back that was put in, or waits for the helper that has taken it up.
    fn withdraw(&self, call: *mut Call, caller: &OnceLock<Thread>) {
        if self.call.compare_exchange(call, LOOKING, Relaxed, Acquire).is_ok() {
            return;
        }
        let (taken, awaited) = (tagged(call, TAKEN), tagged(call, AWAITED));
        for spins in 0.. {
            let now = self.call.load(Acquire);
            if now != taken && now != awaited {
                return; // it may be another caller's already, which cannot have the same address meanwhile
            }
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            caller.get_or_init(std::thread::current);
            if now == awaited || self.call.compare_exchange(taken, awaited, Release, Relaxed).is_ok() {
                std::thread::park();
            }
        }
    }

    /// What the helper does for as long as the process lives.
    fn help(&self, number: usize) {
        loop {
            let Some(call) = self.look() else {
                self.sleep();
                continue;
            };
            // SAFETY: between `look`, which says that it is taken, and `leave` the caller waits, in `withdraw`.
            let taken = unsafe { &*call };
            // SAFETY: likewise: the work lives as long as the caller waits.
            taken.work(number, unsafe { &*taken.work.0 }, || ());
            self.leave(call);
        }
    }

    /// Looks for a call for as long as [`PATIENCE`] says, and takes it up.
    fn look(&self) -> Option<*mut Call> {
        let mut since = None;
        loop {
            for _ in 0..64 {
                let call = self.call.load(Relaxed);
                if call != LOOKING
                    && let Ok(call) = self.call.compare_exchange(call, tagged(call, TAKEN), Acquire, Relaxed)
                {
                    return Some(call); // it may be another than that looked at, in the same place
                }
                std::hint::spin_loop();
            }
            if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return None;
            }
        }
    }

    /// Until there is a call, or there was one and the helper is late for it: it then keeps looking, or it would be late for
    /// every call that is shorter than waking up.
    fn sleep(&self) {
        if self.call.compare_exchange(LOOKING, ptr::null_mut(), Relaxed, Relaxed).is_ok() {
            while self.call.load(Relaxed).is_null() {
                std::thread::park();
            }
        }
    }

    /// Says that the helper is through with a call.
    fn leave(&self, call: *mut Call) {
        if self.call.compare_exchange(tagged(call, TAKEN), LOOKING, Release, Acquire).is_ok() {
            return;
        }
        // SAFETY: its caller still waits, until the next line but one.
        let caller = unsafe { &*call }.caller.get().cloned();
        self.call.store(LOOKING, Release);
        if let Some(caller) = caller {
            caller.unpark();
        }
    }
}

/// The helpers, one fewer than [`threads`]: callers are threads, too.
struct Team(Box<[Mailbox]>);

impl Team {
    fn get() -> &'static Team {
        static TEAM: OnceLock<&'static Team> = OnceLock::new();
        TEAM.get_or_init(|| {
            let mailbox = |_| Mailbox { call: AtomicPtr::new(LOOKING), helper: OnceLock::new() };
            let team: &'static Team = Box::leak(Box::new(Team((1..threads()).map(mailbox).collect())));
            for (i, mailbox) in team.0.iter().enumerate() {
                let started = Builder::new().name(format!("claystone-{i}")).spawn(move || mailbox.help(i + 1));
                if let Ok(helper) = started {
                    let _ = mailbox.helper.set(helper.thread().clone());
                }
            }
            team
        })
    }

    /// Puts the call into mailboxes until `count` have it.
    fn ask<'a>(&'a self, count: usize, call: *mut Call, asked: &mut SmallVec<[&'a Mailbox; 16]>) {
        let mut mailboxes = self.0.iter();
        while asked.len() < count
            && let Some(mailbox) = mailboxes.next()
        {
            if mailbox.offer(call) {
                asked.push(mailbox);
            }
        }
    }
}

/// What caller and helpers have in common. Lives on the caller's stack, which waits for all who have taken it up.
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

/// Calls `piece` with every number below `count`, once each, on this thread and those of the team.
///
/// # Panics
/// With the panic of a piece; the others may then not have been done.
pub(crate) fn for_each_index(count: usize, piece: impl Fn(usize) + Sync) {
    share(count, threads().min(count), false, &piece);
}

/// [`for_each_index`] of `parts` parts of one length, where a piece may wait for those before it in its part: they are begun in
/// order.
pub(crate) fn for_each_in_order(count: usize, parts: usize, piece: impl Fn(usize) + Sync) {
    share(count, parts, false, &piece);
}

/// Has the team do `count` pieces, cut into `parts` that threads begin with, from the end of each where `reverse`.
fn share(count: usize, parts: usize, reverse: bool, piece: &(dyn Fn(usize) + Sync)) {
    if count <= 1 || threads() == 1 {
        return (0..count).for_each(|i| piece(if reverse { count - 1 - i } else { i }));
    }
    let team = Team::get();
    // SAFETY: only the lifetime changes. The pointer is followed by helpers that have taken up the call, and this function
    // does not leave, by return or panic, before it has taken the call back from every mailbox or seen the helper leave:
    // `work` catches panics, and nothing else before that can panic.
    let work = Work(unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync)>(piece) });
    let call = Call {
        work,
        count,
        reverse,
        panicked: AtomicBool::new(false),
        panic: Mutex::new(None),
        caller: OnceLock::new(),
        parts: (0..parts).map(|part| Part(AtomicUsize::new(count * part / parts))).collect(),
    };
    let (wanted, place) = (team.0.len().min(count - 1), ptr::from_ref(&call).cast_mut());
    let mut asked = SmallVec::new();
    team.ask(wanted, place, &mut asked);
    // Who is at another caller's work may be through with it later.
    call.work(0, piece, || team.ask(wanted, place, &mut asked));
    asked.iter().for_each(|mailbox| mailbox.withdraw(place, &call.caller));
    let panic = call.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// Calls `f` with every item and its index, on this thread and those of the team.
///
/// # Panics
/// As [`for_each_index`].
pub(crate) fn for_each<T: Send>(items: &mut [T], f: impl Fn(usize, &mut T) + Sync) {
    struct First<T>(*mut T);
    // SAFETY: each thread makes of it references to items that no other has.
    unsafe impl<T: Send> Sync for First<T> {}
    let first = First(items.as_mut_ptr());
    for_each_index(items.len(), |i| {
        let first = &first;
        // SAFETY: i < items.len(), every i comes once, and the slice is borrowed exclusively until all are done.
        f(i, unsafe { &mut *first.0.add(i) });
    });
}

/// Calls `f` with every piece of `size` elements and its index, the last one shorter, on this thread and those of the team.
///
/// # Panics
/// As [`for_each_index`]; where `size` is 0.
pub(crate) fn for_each_chunk<T: Send>(data: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    for_each_chunks(&mut [data], &[size], |i, chunks| f(i, chunks[0]));
}

/// Whether this thread's next operation had best begin at the end: every other one does. What the last one touched last is
/// then what the next one finds in the caches.
pub(crate) fn turn() -> bool {
    thread_local!(static REVERSE: Cell<bool> = const { Cell::new(true) });
    REVERSE.try_with(|reverse| reverse.replace(!reverse.get())).unwrap_or(false) // a thread that is ending has no turns
}

/// [`for_each_chunk`], from the end where `reverse`: see [`turn`].
///
/// # Panics
/// As [`for_each_chunk`].
pub(crate) fn for_each_chunk_from<T: Send>(
    data: &mut [T],
    size: usize,
    reverse: bool,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    cut(&mut [data], &[size], reverse, |i, chunks| f(i, chunks[0]));
}

/// Calls `f` with the pieces of several slices that go together and their index: `sizes[j]` elements of the `j`th slice,
/// of all of which there are equally many pieces, the last one shorter.
///
/// # Panics
/// As [`for_each_index`]; where a size is 0 or the numbers of pieces differ.
pub(crate) fn for_each_chunks<T: Send>(
    data: &mut [&mut [T]],
    sizes: &[usize],
    f: impl Fn(usize, &mut [&mut [T]]) + Sync,
) {
    cut(data, sizes, false, f);
}

fn cut<T: Send>(data: &mut [&mut [T]], sizes: &[usize], reverse: bool, f: impl Fn(usize, &mut [&mut [T]]) + Sync) {
    struct Start<T>(*mut T, usize, usize);
    // SAFETY: each thread makes of it references to elements that no other has.
    unsafe impl<T: Send> Sync for Start<T> {}
    let starts: SmallVec<[Start<T>; 2]> =
        data.iter_mut().zip(sizes).map(|(all, &size)| Start(all.as_mut_ptr(), all.len(), size)).collect();
    let mut counts = starts.iter().map(|&Start(_, len, size)| len.div_ceil(size));
    let count = counts.next().unwrap_or(0);
    assert!(
        starts.len() == data.len() && counts.all(|other| other == count),
        "slices have different numbers of pieces"
    );
    let piece = |i: usize| {
        let chunk = |&Start(start, len, size): &Start<T>| {
            // SAFETY: i < count, so that i * size is below the slice's length; every i comes once, no two have elements in
            // common, and the slices are borrowed exclusively until all are done.
            unsafe { std::slice::from_raw_parts_mut(start.add(i * size), size.min(len - i * size)) }
        };
        f(i, &mut starts.iter().map(chunk).collect::<SmallVec<[&mut [T]; 2]>>());
    };
    share(count, threads().min(count), reverse, &piece);
}

/// `f` of every number below `count`, in order, at least `group` of them to a thread at a time.
///
/// # Panics
/// As [`for_each_index`].
pub(crate) fn map<R: Send>(count: usize, group: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    if count <= group {
        return (0..count).map(f).collect();
    }
    let mut out: Vec<Option<R>> = (0..count).map(|_| None).collect();
    for_each_chunk(&mut out, group.max(1), |c, part| {
        part.iter_mut().enumerate().for_each(|(i, slot)| *slot = Some(f(c * group.max(1) + i)));
    });
    out.into_iter().flatten().collect()
}
