//! Work shared between the thread that asks for it and a team of helpers, which are threads of rayon's pool.
//!
//! Every helper has a mailbox. The caller puts its call into those of helpers that have nothing to do, starts at once, and
//! takes back what nobody has taken up when it is through: a small operation is done before helpers notice and has waited
//! for nobody. A caller takes on pieces of its own work alone, never what else there is to do, so it may hold a lock
//! over this, which it could not over rayon's own `join`. A helper that has nothing to do keeps looking for a moment before
//! it gives its thread back to the pool, because to be woken costs tens of microseconds and operations come one after
//! another. Whoever then finds its mailbox vacant spawns a job for it, which alone takes memory from the heap.
//!
//! Pieces may share work in turn, but must not enter rayon: its waits take up other jobs, and a caller's locks may be held.

mod hand_over;
#[cfg(all(test, loom))]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hand_over::{Mailbox, PATIENCE};
use smallvec::SmallVec;

use super::threads;

/// The least that a helper looks for work of callers in a pool: its thread may be in the middle of a `join`, whose other half
/// is done meanwhile.
const NESTED: Duration = Duration::from_micros(50);

/// The mailboxes of one of rayon's pools, one fewer than it has [`threads`]: callers are threads, too.
struct Team {
    mailboxes: Box<[Mailbox]>,
    age: usize,
}

thread_local! {
    /// Of a thread of a pool, its team. Rayon does not say which pool a thread is of: helpers learn of the team from the
    /// job by which they enter. Teams that threads of one pool made at the same time give way to the oldest.
    static TEAM: RefCell<Option<Arc<Team>>> = const { RefCell::new(None) };
}

impl Team {
    /// That of this thread's pool, without helpers yet; the lower `age`, the older it is.
    fn new(age: usize) -> Arc<Team> {
        Arc::new(Team { mailboxes: (1..threads()).map(|_| Mailbox::new()).collect(), age })
    }

    /// That of this thread's pool; of the global one for threads that are of none. None for a thread that is ending.
    fn current() -> Option<Arc<Team>> {
        static GLOBAL: OnceLock<Arc<Team>> = OnceLock::new();
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        if rayon::current_thread_index().is_none() {
            return Some(Arc::clone(GLOBAL.get_or_init(|| Team::new(0))));
        }
        let own = |team: &RefCell<Option<Arc<Team>>>| {
            Arc::clone(team.borrow_mut().get_or_insert_with(|| Team::new(NEXT.fetch_add(1, Relaxed))))
        };
        TEAM.try_with(own).ok()
    }

    /// Has this thread, of a pool, be of this team from now on, unless it is of an older one.
    fn join(self: &Arc<Team>) {
        let _ = TEAM.try_with(|team| {
            let mut team = team.borrow_mut();
            if team.as_ref().is_none_or(|own| self.age < own.age) {
                *team = Some(Arc::clone(self));
            }
        });
    }

    /// Has a thread of the current pool become the helper of a mailbox.
    fn enter(self: Arc<Team>, i: usize) {
        let asked_by = rayon::current_thread_index();
        rayon::spawn(move || {
            self.join();
            let patience = match asked_by {
                None => PATIENCE,
                // Nobody took the job up while the caller was at work, who now has other jobs to go on with.
                Some(_) if asked_by == rayon::current_thread_index() => Duration::ZERO,
                Some(_) => NESTED,
            };
            self.mailboxes[i].help(i + 1, patience);
        });
    }
}

/// Calls `piece` with every number below `count`, once each, on this thread and those of its team.
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
    let team = if count <= 1 || threads() == 1 { None } else { Team::current() };
    let Some(team) = team else {
        return (0..count).for_each(|i| piece(if reverse { count - 1 - i } else { i }));
    };
    hand_over::share(&team.mailboxes, |i| Arc::clone(&team).enter(i), count, parts, reverse, piece);
}

/// Calls `f` with every item and its index, on this thread and those of its team.
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

/// Calls `f` with every piece of `size` elements and its index, the last one shorter, on this thread and those of its team.
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
