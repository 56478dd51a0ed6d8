//! Work shared between the calling thread and a team of helpers, which are threads of rayon's pool.
//!
//! Every helper has a mailbox. The caller puts its call into the mailboxes of idle helpers and starts to work at once. When it is
//! done, it takes back the calls that no helper has taken: a small operation is done before helpers notice, and waits for none. A
//! caller works only on its own pieces, never on other jobs, so it may hold a lock meanwhile. With rayon's own `join` it could
//! not. An idle helper keeps polling for a moment before it returns its thread to the pool, because waking a thread costs tens of
//! microseconds and operations follow each other closely. A caller that finds a mailbox without a helper spawns a job for it,
//! which is the only step that allocates.
//!
//! A piece may itself share work with these functions, but must not enter rayon: rayon's waits run other jobs, and the caller may
//! hold locks that these jobs need.

mod hand_over;
#[cfg(all(test, loom))]
#[path = "parallel/tests/interleavings.rs"]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hand_over::{MAX_POLL_TIME, Mailbox};
use smallvec::SmallVec;

use super::threads;

/// The minimum time for which a helper polls if the caller is a thread of the pool. Short, because the helper's thread may itself
/// be inside a `join` that is ready to continue.
const NESTED_MIN_POLL: Duration = Duration::from_micros(50);

/// The mailboxes of one of rayon's pools, one fewer than its [`threads`], because the caller works as well.
struct Team {
    mailboxes: Box<[Mailbox]>,
    /// The order of creation: 0 for the global pool's team.
    creation_index: usize,
}

thread_local! {
    /// The team of this thread's pool. Rayon does not say to which pool a thread belongs, so a helper gets the team from the job
    /// that starts it. If threads of one pool have created several teams at the same time, the oldest team replaces the others.
    static TEAM: RefCell<Option<Arc<Team>>> = const { RefCell::new(None) };
}

impl Team {
    /// Makes a team for this thread's pool, without helpers yet.
    fn new(creation_index: usize) -> Arc<Team> {
        Arc::new(Team { mailboxes: (1..threads()).map(|_| Mailbox::new()).collect(), creation_index })
    }

    /// Returns the team of this thread's pool, or of the global pool for other threads. `None` for a thread that is ending.
    fn current() -> Option<Arc<Team>> {
        /// The global pool's team, and the creation index of the next team.
        static TEAMS: (OnceLock<Arc<Team>>, AtomicUsize) = (OnceLock::new(), AtomicUsize::new(1));
        if rayon::current_thread_index().is_none() {
            return Some(Arc::clone(TEAMS.0.get_or_init(|| Team::new(0))));
        }
        let own = |team: &RefCell<Option<Arc<Team>>>| {
            Arc::clone(team.borrow_mut().get_or_insert_with(|| Team::new(TEAMS.1.fetch_add(1, Relaxed))))
        };
        TEAM.try_with(own).ok()
    }

    /// Makes this thread of a pool a member of the team, unless the thread belongs to an older team.
    fn adopt_team(self: &Arc<Team>) {
        let _ = TEAM.try_with(|team| {
            let mut team = team.borrow_mut();
            if team.as_ref().is_none_or(|own| self.creation_index < own.creation_index) {
                *team = Some(Arc::clone(self));
            }
        });
    }

    /// Makes a thread of the current pool the helper of a mailbox.
    fn spawn_helper(self: Arc<Team>, i: usize) {
        let asked_by = rayon::current_thread_index();
        rayon::spawn(move || {
            self.adopt_team();
            let patience = match asked_by {
                None => MAX_POLL_TIME,
                // The job runs on the caller's thread, so the call is over, and this thread has other jobs to run.
                Some(_) if asked_by == rayon::current_thread_index() => Duration::ZERO,
                Some(_) => NESTED_MIN_POLL,
            };
            self.mailboxes[i].run_helper(i + 1, patience);
        });
    }
}

/// A pointer to elements that threads share: each thread makes references only to elements that no other thread accesses.
pub(crate) struct SharedPtr<T>(pub(crate) *mut T);

// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedPtr<T> {}

/// Calls `piece` with every number below `count`, once each, on this thread and on its team.
///
/// # Panics
/// With the panic of a piece; the other pieces may then not have been done.
pub(crate) fn for_each_index(count: usize, piece: impl Fn(usize) + Sync) {
    share_pieces(count, threads().min(count), false, &piece);
}

/// Calls pieces like [`for_each_index`], in `parts` parts of equal length. The pieces of a part are started in order, so that a piece
/// may wait for earlier pieces of its part.
pub(crate) fn for_each_in_order(count: usize, parts: usize, piece: impl Fn(usize) + Sync) {
    share_pieces(count, parts, false, &piece);
}

/// Shares `count` pieces with the team. Each thread starts with its own of `parts` parts, from the part's end if `reverse`.
fn share_pieces(count: usize, parts: usize, reverse: bool, piece: &(dyn Fn(usize) + Sync)) {
    let team = if count <= 1 || threads() == 1 { None } else { Team::current() };
    let Some(team) = team else {
        return (0..count).for_each(|i| piece(if reverse { count - 1 - i } else { i }));
    };
    hand_over::share_pieces(&team.mailboxes, |i| Arc::clone(&team).spawn_helper(i), count, parts, reverse, piece);
}

/// Calls `f` with every item and its index, on this thread and on its team.
///
/// # Panics
/// As [`for_each_index`].
pub(crate) fn for_each<T: Send>(items: &mut [T], f: impl Fn(usize, &mut T) + Sync) {
    let first = SharedPtr(items.as_mut_ptr());
    for_each_index(items.len(), |i| {
        let first = &first;
        // SAFETY: i < items.len(), every i occurs once, and the slice is borrowed exclusively until all are done.
        f(i, unsafe { &mut *first.0.add(i) });
    });
}

/// Calls `f` with every chunk of `size` elements and its index, on this thread and on its team. The last chunk may be shorter.
///
/// # Panics
/// As [`for_each_index`]; if `size` is 0.
pub(crate) fn for_each_chunk<T: Send>(data: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    for_each_chunks(&mut [data], &[size], |i, chunks| f(i, chunks[0]));
}

/// Returns whether this thread's next operation should start at the end. The answer alternates, so that an operation starts with the
/// data that the last operation left in the caches: an addition of 10^4 or 10^6 elements then takes 10 % less time
/// (docs/notebook/cpu_device.md).
pub(crate) fn alternate_direction() -> bool {
    thread_local!(static REVERSE: Cell<bool> = const { Cell::new(true) });
    REVERSE.try_with(|reverse| reverse.replace(!reverse.get())).unwrap_or(false) // false in a thread that is ending
}

/// Calls `f` like [`for_each_chunk`], from the last chunk on if `reverse`: see [`alternate_direction`].
///
/// # Panics
/// As [`for_each_chunk`].
pub(crate) fn for_each_chunk_from<T: Send>(
    data: &mut [T],
    size: usize,
    reverse: bool,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    split_chunks(&mut [data], &[size], reverse, |i, chunks| f(i, chunks[0]));
}

/// Calls `f` with corresponding chunks of several slices and their index: `sizes[j]` elements of the `j`th slice. All slices must
/// have the same number of chunks; the last chunk of each may be shorter.
///
/// # Panics
/// As [`for_each_index`]; if a size is 0 or the numbers of chunks differ.
pub(crate) fn for_each_chunks<T: Send>(
    data: &mut [&mut [T]],
    sizes: &[usize],
    f: impl Fn(usize, &mut [&mut [T]]) + Sync,
) {
    split_chunks(data, sizes, false, f);
}

/// Splits slices into corresponding chunks and calls `f` with them.
fn split_chunks<T: Send>(
    data: &mut [&mut [T]],
    sizes: &[usize],
    reverse: bool,
    f: impl Fn(usize, &mut [&mut [T]]) + Sync,
) {
    let starts: SmallVec<[(SharedPtr<T>, usize, usize); 2]> =
        data.iter_mut().zip(sizes).map(|(all, &size)| (SharedPtr(all.as_mut_ptr()), all.len(), size)).collect();
    let mut counts = starts.iter().map(|&(_, len, size)| len.div_ceil(size));
    let count = counts.next().unwrap_or(0);
    assert!(
        starts.len() == data.len() && counts.all(|other| other == count),
        "slices have different numbers of pieces"
    );
    let piece = |i: usize| {
        let chunk = |(start, len, size): &(SharedPtr<T>, usize, usize)| {
            // SAFETY: i < count, so i * size is below the slice's length; every i occurs once, chunks have no elements in
            // common, and the slices are borrowed exclusively until all are done.
            unsafe { std::slice::from_raw_parts_mut(start.0.add(i * size), *size.min(&(len - i * size))) }
        };
        f(i, &mut starts.iter().map(chunk).collect::<SmallVec<[&mut [T]; 2]>>());
    };
    share_pieces(count, threads().min(count), reverse, &piece);
}

/// Returns the results of `f` for every number below `count`, in order; a thread computes `group` results at a time.
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
