//! Tests that explore, with loom, every interleaving of callers and helpers that enter and leave: run by `scripts/loom`.

use ::loom::cell::UnsafeCell;
use ::loom::sync::Arc;
use ::loom::{model::Builder, thread};

use super::hand_over::{MAX_POLL_TIME, Mailbox, share_pieces};

/// The results of pieces. Loom reports if two threads access a result at the same time.
struct Results([UnsafeCell<usize>; 2]);

// SAFETY: loom itself reports unordered accesses.
unsafe impl Sync for Results {}

/// Shares two pieces, and checks that each was done by exactly one thread.
fn call(mailboxes: &Arc<[Mailbox; 1]>, patient: bool) {
    let results = Results(std::array::from_fn(|_| UnsafeCell::new(0)));
    let enter = |i: usize| {
        let mailboxes = Arc::clone(mailboxes);
        let patience = if patient { MAX_POLL_TIME } else { std::time::Duration::ZERO };
        thread::spawn(move || mailboxes[i].run_helper(i + 1, patience));
    };
    let results = &results;
    // SAFETY: loom reports any other access at the same time.
    let piece = |i: usize| results.0[i].with_mut(|done| unsafe { *done += 1 });
    share_pieces(&mailboxes[..], enter, 2, 2, false, &piece);
    // SAFETY: as above.
    results.0.iter().for_each(|done| assert_eq!(done.with(|done| unsafe { *done }), 1));
}

/// Runs `f` under loom in every interleaving with at most three preemptions.
fn explore(f: impl Fn(Arc<[Mailbox; 1]>) + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || f(Arc::new([Mailbox::new()])));
}

/// The helper of the first call serves the second call too, or leaves and another helper enters, or starts too late for both calls.
#[test]
fn loom_calls_are_done_in_every_interleaving() {
    for patient in [true, false] {
        explore(move |mailboxes| (0..2).for_each(|_| call(&mailboxes, patient)));
    }
}

#[test]
fn loom_concurrent_callers_share_a_helper() {
    explore(|mailboxes| {
        let other = {
            let mailboxes = Arc::clone(&mailboxes);
            thread::spawn(move || call(&mailboxes, true))
        };
        call(&mailboxes, true);
        other.join().unwrap();
    });
}
