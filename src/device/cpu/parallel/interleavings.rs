//! Every interleaving of callers and helpers that enter and leave, explored by loom: `scripts/loom` runs these.

use ::loom::cell::UnsafeCell;
use ::loom::sync::Arc;
use ::loom::{model::Builder, thread};

use super::hand_over::{Mailbox, PATIENCE, share};

/// Results of pieces, each written by whoever does it. Loom tells if two threads come to one at a time.
struct Results([UnsafeCell<usize>; 2]);

// SAFETY: loom itself finds accesses that are not ordered.
unsafe impl Sync for Results {}

/// Shares two pieces out, and looks at once whether each was done, and by one thread.
fn call(mailboxes: &Arc<[Mailbox; 1]>, patient: bool) {
    let results = Results(std::array::from_fn(|_| UnsafeCell::new(0)));
    let enter = |i: usize| {
        let mailboxes = Arc::clone(mailboxes);
        let patience = if patient { PATIENCE } else { std::time::Duration::ZERO };
        thread::spawn(move || mailboxes[i].help(i + 1, patience));
    };
    let results = &results;
    // SAFETY: loom tells if anybody else is there.
    let piece = |i: usize| results.0[i].with_mut(|done| unsafe { *done += 1 });
    share(&mailboxes[..], enter, 2, 2, false, &piece);
    // SAFETY: as above.
    results.0.iter().for_each(|done| assert_eq!(done.with(|done| unsafe { *done }), 1));
}

fn explore(f: impl Fn(Arc<[Mailbox; 1]>) + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || f(Arc::new([Mailbox::new()])));
}

/// The helper of the first call stays for the second, or leaves and another one enters, or comes for neither.
#[test]
fn loom_calls_are_done_whoever_enters_and_leaves() {
    for patient in [true, false] {
        explore(move |mailboxes| (0..2).for_each(|_| call(&mailboxes, patient)));
    }
}

#[test]
fn loom_callers_at_once_share_a_helper() {
    explore(|mailboxes| {
        let other = {
            let mailboxes = Arc::clone(&mailboxes);
            thread::spawn(move || call(&mailboxes, true))
        };
        call(&mailboxes, true);
        other.join().unwrap();
    });
}
