//! Replay of random seeds. A checkpoint computes the same random numbers twice, whatever other threads draw meanwhile.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::Tensor;
use crate::expr::philox::Seed;

/// The source of a random operation's numbers.
#[derive(Clone)]
pub(crate) struct RandomSource {
    pub(crate) seed: Seed,
    /// For a draw captured in a graph: the number in device memory that every replay adds to the seed.
    pub(crate) base: Option<Arc<Tensor>>,
}

thread_local! {
    /// The seeds drawn so far, a list for each [`record_draws`] call that this thread is in.
    static DRAW_LISTS: RefCell<Vec<Vec<RandomSource>>> = const { RefCell::new(Vec::new()) };
    /// The seeds that [`replay_draws`] has yet to return.
    static REPLAY_QUEUE: RefCell<Option<VecDeque<RandomSource>>> = const { RefCell::new(None) };
}

/// Returns the seed of this thread's next random operation: `fresh`, unless a seed is being replayed.
pub(crate) fn draw_seed(fresh: impl FnOnce() -> RandomSource) -> RandomSource {
    let again = REPLAY_QUEUE.with_borrow_mut(|again| again.as_mut().and_then(VecDeque::pop_front));
    let seed = again.unwrap_or_else(fresh);
    DRAW_LISTS.with_borrow_mut(|lists| lists.iter_mut().for_each(|list| list.push(seed.clone())));
    seed
}

/// Runs `f`, and returns its result and the seeds that it drew.
pub(crate) fn record_draws<R>(f: impl FnOnce() -> R) -> (R, Vec<RandomSource>) {
    struct Remove(usize);
    impl Drop for Remove {
        fn drop(&mut self) {
            DRAW_LISTS.with_borrow_mut(|lists| lists.truncate(self.0));
        }
    }
    let depth = DRAW_LISTS.with_borrow_mut(|lists| {
        lists.push(Vec::new());
        lists.len() - 1
    });
    let _remove = Remove(depth);
    let result = f();
    (result, DRAW_LISTS.with_borrow_mut(|lists| std::mem::take(&mut lists[depth])))
}

/// Runs `f`, which draws `seeds` again, in order.
pub(crate) fn replay_draws<R>(seeds: &[RandomSource], f: impl FnOnce() -> R) -> R {
    struct Restore(Option<VecDeque<RandomSource>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            REPLAY_QUEUE.set(self.0.take());
        }
    }
    let _restore = Restore(REPLAY_QUEUE.replace(Some(seeds.iter().cloned().collect())));
    f()
}
