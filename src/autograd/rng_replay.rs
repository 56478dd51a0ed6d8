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

/// The seeds that a thread records and replays.
struct Draws {
    /// The seeds drawn so far, a list for each [`record_draws`] call that this thread is in.
    lists: Vec<Vec<RandomSource>>,
    /// The seeds that [`replay_draws`] has yet to return.
    replayed: Option<VecDeque<RandomSource>>,
}

thread_local! {
    static DRAWS: RefCell<Draws> = const { RefCell::new(Draws { lists: Vec::new(), replayed: None }) };
}

/// Returns the seed of this thread's next random operation: `fresh`, unless a seed is being replayed.
pub(crate) fn draw_seed(fresh: impl FnOnce() -> RandomSource) -> RandomSource {
    let again = DRAWS.with_borrow_mut(|draws| draws.replayed.as_mut().and_then(VecDeque::pop_front));
    let seed = again.unwrap_or_else(fresh);
    DRAWS.with_borrow_mut(|draws| draws.lists.iter_mut().for_each(|list| list.push(seed.clone())));
    seed
}

/// Runs `f`, and returns its result and the seeds that it drew.
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

/// Runs `f`, which draws `seeds` again, in order.
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
