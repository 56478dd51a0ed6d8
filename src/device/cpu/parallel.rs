//! Work shared between the thread that asks for it and a team of helpers.
//!
//! The caller starts at once, and helpers join it as they notice: a small operation is done before they do and has waited
//! for nobody. A caller takes on pieces of its own work alone, never what else there is to do, so it may hold a lock
//! over this. A helper that has nothing to do keeps looking for a moment before it sleeps, because to be woken costs it
//! tens of microseconds and operations come one after another.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use super::threads;

/// Set in [`Shared::inside`] when the caller is through: nobody else comes in.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// How often a caller looks whether the others have finished before it goes to sleep.
const SPINS: usize = 2000;
/// How long a helper looks for work before it goes to sleep: longer than what lies between the operations of a training step.
const PATIENCE: Duration = Duration::from_micros(500);

/// The helpers and what they are asked to do.
struct Team {
    helpers: usize,
    queue: Mutex<Queue>,
    /// Calls in the queue, for helpers that look without the lock.
    waiting: AtomicUsize,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    calls: VecDeque<Arc<Shared>>,
    asleep: usize,
}

impl Team {
    /// The team: callers are threads too, so it has one less than [`threads`].
    fn get() -> &'static Team {
        static TEAM: OnceLock<&'static Team> = OnceLock::new();
        TEAM.get_or_init(|| {
            let team: &'static Team = Box::leak(Box::new(Team {
                helpers: threads() - 1,
                queue: Mutex::default(),
                waiting: AtomicUsize::new(0),
                wake: Condvar::new(),
            }));
            for i in 0..team.helpers {
                // Where one cannot be started the others, and every caller, do its part.
                let _ = Builder::new().name(format!("claystone-{i}")).spawn(move || team.help(i));
            }
            team
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, queue: &mut Queue) -> Option<Arc<Shared>> {
        let call = queue.calls.pop_front();
        self.waiting.store(queue.calls.len(), Ordering::Relaxed);
        call
    }

    /// Asks `count` helpers to join.
    fn ask(&self, count: usize, call: &Arc<Shared>) {
        let mut queue = self.queue();
        queue.calls.extend(std::iter::repeat_n(call, count).cloned());
        self.waiting.store(queue.calls.len(), Ordering::Relaxed);
        let asleep = queue.asleep.min(count);
        drop(queue);
        (0..asleep).for_each(|_| self.wake.notify_one());
    }

    /// Takes back what no helper has taken up.
    fn forget(&self, call: &Arc<Shared>) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            let mut queue = self.queue();
            queue.calls.retain(|other| !Arc::ptr_eq(other, call));
            self.waiting.store(queue.calls.len(), Ordering::Relaxed);
        }
    }

    /// What a helper does for as long as the process lives.
    fn help(&self, helper: usize) {
        loop {
            let call = self.next();
            if call.enter() {
                // SAFETY: between `enter` and `leave` the caller waits, in `for_each_index`.
                call.work(helper + 1, unsafe { &*call.work.0 });
                call.leave();
            }
        }
    }

    fn next(&self) -> Arc<Shared> {
        loop {
            if let Some(call) = self.watch() {
                return call;
            }
            let mut queue = self.queue();
            if queue.calls.is_empty() {
                queue.asleep += 1;
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.asleep -= 1;
            }
            if let Some(call) = self.take(&mut queue) {
                return call;
            }
            // Woken too late: it keeps looking, or it would be late for every call that is shorter than waking up.
        }
    }

    /// Looks for work for as long as [`PATIENCE`] says.
    fn watch(&self) -> Option<Arc<Shared>> {
        let mut since = None;
        loop {
            for _ in 0..64 {
                if self.waiting.load(Ordering::Relaxed) > 0
                    && let Some(call) = self.take(&mut self.queue())
                {
                    return Some(call);
                }
                std::hint::spin_loop();
            }
            if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return None;
            }
        }
    }
}

/// What caller and helpers have in common; it outlives the call, for helpers that come too late.
struct Shared {
    work: Work,
    count: usize,
    /// The next piece of each thread's part of them. A thread has the same part in every call, so that what it wrote in
    /// one it may find in its own cache in the next; it goes on with the others' when its own is done.
    parts: Box<[AtomicUsize]>,
    /// How many helpers are at work, and [`CLOSED`].
    inside: AtomicUsize,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

impl Shared {
    /// Does pieces until none is left, from part `first` on. A panic ends it for everybody.
    fn work(&self, first: usize, piece: &(dyn Fn(usize) + Sync)) {
        let parts = self.parts.len();
        let end = |part: usize| self.count * (part + 1) / parts;
        let mut part = first % parts;
        let mut left = parts;
        let all = || {
            while !self.panicked.load(Ordering::Relaxed) && left > 0 {
                let i = self.parts[part].fetch_add(1, Ordering::Relaxed);
                if i >= end(part) {
                    part = (part + 1) % parts;
                    left -= 1;
                    continue;
                }
                piece(i);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(all)) {
            self.panicked.store(true, Ordering::Relaxed);
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            match *first {
                None => *first = Some(panic),
                Some(_) => std::mem::forget(panic), // to drop it could panic again, past the door
            }
        }
    }

    fn enter(&self) -> bool {
        let open = |inside| (inside & CLOSED == 0).then_some(inside + 1);
        self.inside.fetch_update(Ordering::Acquire, Ordering::Relaxed, open).is_ok()
    }

    fn leave(&self) {
        // Cloned first: from the subtraction on the caller may be gone.
        let caller = self.caller.clone();
        if self.inside.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            caller.unpark();
        }
    }
}

/// A pointer to the work of a call, which helpers follow only between [`Shared::enter`] and [`Shared::leave`].
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
    share(count, threads().min(count), piece);
}

/// [`for_each_index`] where a piece may wait for those before it: they are begun in order.
pub(crate) fn for_each_in_order(count: usize, piece: impl Fn(usize) + Sync) {
    share(count, 1, piece);
}

/// Has the team do `count` pieces, cut into `parts` that threads begin with.
fn share(count: usize, parts: usize, piece: impl Fn(usize) + Sync) {
    if count <= 1 || threads() == 1 {
        return (0..count).for_each(piece);
    }
    let team = Team::get();
    let piece: &(dyn Fn(usize) + Sync + '_) = &piece;
    // SAFETY: only the lifetime changes. The pointer is followed by helpers that have entered, and this function does
    // not leave, by return or panic, before it has closed the door and everybody inside has left: `work` catches panics,
    // and nothing else between here and the end of the loop below can panic.
    let work =
        Work(unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(piece) });
    let helpers = team.helpers.min(count - 1);
    let shared = Arc::new(Shared {
        work,
        count,
        parts: (0..parts).map(|part| AtomicUsize::new(count * part / parts)).collect(),
        inside: AtomicUsize::new(0),
        panicked: AtomicBool::new(false),
        panic: Mutex::new(None),
        caller: std::thread::current(),
    });
    team.ask(helpers, &shared);
    shared.work(0, piece);
    shared.inside.fetch_or(CLOSED, Ordering::Relaxed);
    team.forget(&shared);
    let mut spins = 0;
    while shared.inside.load(Ordering::Acquire) != CLOSED {
        spins += 1;
        if spins < SPINS { std::hint::spin_loop() } else { std::thread::park() }
    }
    let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
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
    if data.len() <= size {
        if !data.is_empty() {
            f(0, data);
        }
        return;
    }
    let mut chunks: Vec<&mut [T]> = data.chunks_mut(size).collect();
    for_each(&mut chunks, |i, chunk| f(i, chunk));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_visited_once() {
        for n in [0, 1, 2, 3, 1000] {
            let mut items = vec![0usize; n];
            for_each(&mut items, |i, x| *x += i + 1);
            assert!(items.iter().enumerate().all(|(i, &x)| x == i + 1), "{n}");
        }
    }

    #[test]
    fn chunks_and_results_keep_their_order() {
        for (n, size) in [(0, 3), (1, 3), (3, 3), (4, 3), (1000, 7), (5, 0)] {
            assert_eq!(map(n, size, |i| i * i), (0..n).map(|i| i * i).collect::<Vec<_>>());
            let mut data = vec![0usize; n];
            for_each_chunk(&mut data, size.max(1), |i, part| part.fill(i));
            assert!(data.iter().enumerate().all(|(i, &x)| x == i / size.max(1)));
        }
    }

    #[test]
    fn work_inside_work() {
        let mut sums = [0usize; 64];
        for_each(&mut sums, |i, sum| {
            let mut parts = [0usize; 16];
            for_each(&mut parts, |j, part| *part = i * j);
            *sum = parts.iter().sum();
        });
        assert!(sums.iter().enumerate().all(|(i, &sum)| sum == i * 120));
    }

    /// Were a piece begun before those that it waits for, this would not end.
    #[test]
    fn pieces_may_wait_for_those_before_them() {
        let done: Vec<AtomicBool> = (0..200).map(|_| AtomicBool::new(false)).collect();
        for_each_in_order(done.len(), |i| {
            while i > 0 && !done[i - 1].load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            done[i].store(true, Ordering::Release);
        });
        assert!(done.iter().all(|d| d.load(Ordering::Acquire)));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let caught = catch_unwind(|| for_each_index(100, |i| assert!(i != 50, "inside")));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
        every_item_is_visited_once();
    }

    /// Many callers at once, each with a lock over its work: were they to do each other's, they would lock twice.
    #[test]
    fn a_lock_may_be_held_over_it() {
        let lock = Mutex::new(0usize);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let mut sum = lock.lock().unwrap();
                        let part = AtomicUsize::new(0);
                        for_each_index(20, |i| {
                            part.fetch_add(i, Ordering::Relaxed);
                        });
                        *sum += part.into_inner();
                    }
                });
            }
        });
        assert_eq!(lock.into_inner().unwrap(), 200 * 190);
    }
}
