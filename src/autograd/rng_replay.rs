//! Seeds drawn again: what lets a checkpoint compute the same random numbers twice, whatever other threads draw meanwhile.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::Tensor;
use crate::expr::philox::Seed;

/// What the numbers of a random operation come from.
#[derive(Clone)]
pub(crate) struct Drawn {
    pub(crate) seed: Seed,
    /// Of a draw that a graph captured: in device memory, what every replay adds to the seed.
    pub(crate) base: Option<Arc<Tensor>>,
}

thread_local! {
    /// One list for each [`recorded`] that this thread is in.
    static LISTS: RefCell<Vec<Vec<Drawn>>> = const { RefCell::new(Vec::new()) };
    /// What [`replayed`] has left to give.
    static AGAIN: RefCell<Option<VecDeque<Drawn>>> = const { RefCell::new(None) };
}

/// The seed of the next random operation of this thread: `fresh`, unless one is to be drawn again.
pub(crate) fn draw(fresh: impl FnOnce() -> Drawn) -> Drawn {
    let again = AGAIN.with_borrow_mut(|again| again.as_mut().and_then(VecDeque::pop_front));
    let seed = again.unwrap_or_else(fresh);
    LISTS.with_borrow_mut(|lists| lists.iter_mut().for_each(|list| list.push(seed.clone())));
    seed
}

/// What `f` gives, and the seeds that it drew.
pub(crate) fn recorded<R>(f: impl FnOnce() -> R) -> (R, Vec<Drawn>) {
    struct Remove(usize);
    impl Drop for Remove {
        fn drop(&mut self) {
            LISTS.with_borrow_mut(|lists| lists.truncate(self.0));
        }
    }
    let depth = LISTS.with_borrow_mut(|lists| {
        lists.push(Vec::new());
        lists.len() - 1
    });
    let _remove = Remove(depth);
    let result = f();
    (result, LISTS.with_borrow_mut(|lists| std::mem::take(&mut lists[depth])))
}

/// Runs `f` drawing `seeds` again, in order.
pub(crate) fn replayed<R>(seeds: &[Drawn], f: impl FnOnce() -> R) -> R {
    struct Restore(Option<VecDeque<Drawn>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            AGAIN.set(self.0.take());
        }
    }
    let _restore = Restore(AGAIN.replace(Some(seeds.iter().cloned().collect())));
    f()
}
