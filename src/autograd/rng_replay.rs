//! Recording and replay of random seeds. A checkpoint draws the same random numbers twice, even if other threads draw in between.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::Tensor;
use crate::expr::philox::Seed;

/// The seed of a random operation.
#[derive(Clone)]
pub(crate) struct RandomSource {
    pub(crate) seed: Seed,
    /// For an operation captured in a graph: a number in device memory that every replay adds to the seed.
    pub(crate) base: Option<Arc<Tensor>>,
}

/// The seeds that a thread is recording or replaying.
struct Draws {
    /// The seeds drawn so far: one list for each active call of [`record_draws`] on this thread.
    lists: Vec<Vec<RandomSource>>,
    /// The seeds that [`replay_draws`] has not returned yet.
    replayed: Option<VecDeque<RandomSource>>,
}

thread_local! {
    static DRAWS: RefCell<Draws> = const { RefCell::new(Draws { lists: Vec::new(), replayed: None }) };
}

/// Returns the seed of this thread's next random operation: the next replayed seed, or else `fresh()`.
pub(crate) fn draw_seed(fresh: impl FnOnce() -> RandomSource) -> RandomSource {
    let again = DRAWS.with_borrow_mut(|draws| draws.replayed.as_mut().and_then(VecDeque::pop_front));
    let seed = again.unwrap_or_else(fresh);
    DRAWS.with_borrow_mut(|draws| draws.lists.iter_mut().for_each(|list| list.push(seed.clone())));
    seed
}

/// Runs `f`. Returns its result and the seeds drawn inside.
pub(crate) fn record_draws<R>(f: impl FnOnce() -> R) -> (R, Vec<RandomSource>) {
    struct Remove(usize);
    impl Drop for Remove {
        fn drop(&mut self) {
            DRAWS.with_borrow_mut(|draws| draws.lists.truncate(self.0));
        }
    }
    let depth = DRAWS.with_borrow_mut(|draws| {
        draws.lists.push(Vec::new());
        draws.lists.len() - 1
    });
    let _remove = Remove(depth);
    let result = f();
    (result, DRAWS.with_borrow_mut(|draws| std::mem::take(&mut draws.lists[depth])))
}

/// Runs `f`. Random operations inside draw `seeds` again, in order.
pub(crate) fn replay_draws<R>(seeds: &[RandomSource], f: impl FnOnce() -> R) -> R {
    struct Restore(Option<VecDeque<RandomSource>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            DRAWS.with_borrow_mut(|draws| draws.replayed = self.0.take());
        }
    }
    let queue = Some(seeds.iter().cloned().collect());
    let _restore = Restore(DRAWS.with_borrow_mut(|draws| std::mem::replace(&mut draws.replayed, queue)));
    f()
}
