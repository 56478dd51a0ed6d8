//! Work shared between the thread that asks for it and those of the pool.
//!
//! The caller starts at once, and threads of the pool join it as they wake up: a small operation is done before they
//! do and has waited for nobody. A caller takes on pieces of its own work alone, never what else the pool has to do,
//! so it may hold a lock over this.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

use super::{pool, threads};

/// Set in [`Shared::inside`] when the caller is through: nobody else comes in.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// How often a caller looks whether the others have finished before it goes to sleep.
const SPINS: usize = 2000;

/// What caller and helpers have in common; it outlives the call, for helpers that come too late.
struct Shared {
    next: AtomicUsize,
    count: usize,
    /// How many helpers are at work, and [`CLOSED`].
    inside: AtomicUsize,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

impl Shared {
    /// Does pieces until none is left. A panic ends it for everybody.
    fn work(&self, piece: &(dyn Fn(usize) + Sync)) {
        let all = || {
            while !self.panicked.load(Ordering::Relaxed) {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= self.count {
                    break;
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

/// Calls `piece` with every number below `count`, once each, on this thread and those of the pool.
///
/// # Panics
/// With the panic of a piece; the others may then not have been done.
pub(crate) fn for_each_index(count: usize, piece: impl Fn(usize) + Sync) {
    let helpers = threads().min(count).saturating_sub(1);
    let Some(pool) = pool().filter(|_| helpers > 0) else { return (0..count).for_each(piece) };
    let shared = Arc::new(Shared {
        next: AtomicUsize::new(0),
        count,
        inside: AtomicUsize::new(0),
        panicked: AtomicBool::new(false),
        panic: Mutex::new(None),
        caller: std::thread::current(),
    });
    let piece: &(dyn Fn(usize) + Sync + '_) = &piece;
    // SAFETY: only the lifetime changes. The pointer is followed by helpers that have entered, and this function does
    // not leave, by return or panic, before it has closed the door and everybody inside has left: `work` catches panics,
    // and nothing else between here and the end of the loop below can panic.
    let work =
        Work(unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(piece) });
    for _ in 0..helpers {
        let shared = Arc::clone(&shared);
        pool.spawn(move || {
            let work = work;
            if shared.enter() {
                // SAFETY: see above: the caller waits until `leave`.
                shared.work(unsafe { &*work.0 });
                shared.leave();
            }
        });
    }
    shared.work(piece);
    shared.inside.fetch_or(CLOSED, Ordering::Relaxed);
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

/// Calls `f` with every item and its index, on this thread and those of the pool.
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

/// Calls `f` with every piece of `size` elements and its index, the last one shorter, on this thread and those of the pool.
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

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
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
