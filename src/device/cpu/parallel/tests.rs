use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Barrier, Mutex};
use std::thread::{self, ThreadId};
use std::time::Instant;

use rayon::prelude::*;

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
fn slices_are_split_into_corresponding_chunks() {
    for n in [0, 1, 4, 5, 100, 1003] {
        let (mut one, mut two) = (vec![0usize; n], vec![0usize; 2 * n]);
        for_each_chunks(&mut [&mut one, &mut two], &[4, 8], |i, parts| {
            assert_eq!(parts[1].len(), 2 * parts[0].len());
            parts.iter_mut().for_each(|part| part.fill(i));
        });
        assert!(one.iter().enumerate().all(|(at, &i)| i == at / 4), "{n}");
        assert!(two.iter().enumerate().all(|(at, &i)| i == at / 8), "{n}");
    }
    let unequal = || for_each_chunks(&mut [&mut [0u8; 4][..], &mut [0; 4]], &[1, 2], |_, _| ());
    assert!(catch_unwind(unequal).is_err());
}

#[test]
fn chunks_run_from_either_end() {
    for n in [0, 1, 4, 5, 100, 1003] {
        for reverse in [false, true] {
            let mut data = vec![0usize; n];
            for_each_chunk_from(&mut data, 4, reverse, |i, part| part.iter_mut().for_each(|x| *x += i + 1));
            assert!(data.iter().enumerate().all(|(at, &x)| x == at / 4 + 1), "{n}");
            let seen = Mutex::new(Vec::new());
            share_pieces(n, 1, reverse, &|i| seen.lock().unwrap().push(i));
            let mut seen = seen.into_inner().unwrap();
            assert!(threads() > 1 || seen.is_sorted_by(|a, b| (a < b) != reverse), "{n}");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..n), "{n}");
        }
    }
    assert_ne!(alternate_direction(), alternate_direction());
}

/// Parked helpers must be woken, and so must callers that park while they wait for helpers.
#[test]
fn parked_threads_are_woken() {
    for pause in [Duration::ZERO, 2 * MAX_POLL_TIME] {
        thread::sleep(pause);
        let ran = AtomicUsize::new(0);
        let slow = |_| {
            thread::sleep(Duration::from_millis(1));
            ran.fetch_add(1, Relaxed);
        };
        share_pieces(5, 2, false, &slow);
        assert_eq!(ran.into_inner(), 5);
    }
}

/// Concurrent callers' calls must not mix: every piece is done once, for its own caller.
#[test]
fn concurrent_callers_do_only_their_own_pieces() {
    let all = if cfg!(miri) { 20 } else { 20_000 };
    thread::scope(|scope| {
        for caller in 0..3 {
            scope.spawn(move || {
                for round in 0..all {
                    let count = 2 + round % 5;
                    let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    share_pieces(count, threads().min(count), round % 2 == 0, &|i| {
                        done[i].fetch_add(caller + 1, Relaxed);
                    });
                    assert!(done.iter().all(|done| done.load(Relaxed) == caller + 1), "{caller} {round}");
                }
            });
        }
    });
}

/// Tests mailboxes directly, with helpers on threads of the test: for Miri, which does not know when rayon's threads end.
#[test]
fn calls_are_done_while_helpers_come_and_go() {
    let mailboxes: Arc<[Mailbox; 2]> = Arc::new(std::array::from_fn(|_| Mailbox::new()));
    let helpers = Mutex::new(Vec::new());
    let rounds = if cfg!(miri) { 10 } else { 300 };
    thread::scope(|scope| {
        for caller in 0..2 {
            let (mailboxes, helpers) = (&mailboxes, &helpers);
            scope.spawn(move || {
                for round in 0..rounds {
                    let done: [Mutex<usize>; 5] = std::array::from_fn(|_| Mutex::new(0));
                    let enter = |i: usize| {
                        let (mailboxes, patience) = (Arc::clone(mailboxes), [MAX_POLL_TIME, Duration::ZERO][round % 2]);
                        let helper = thread::spawn(move || mailboxes[i].run_helper(i + 1, patience));
                        helpers.lock().unwrap().push(helper);
                    };
                    let piece = |i: usize| *done[i].try_lock().unwrap() += i + caller;
                    hand_over::share_pieces(&mailboxes[..], enter, 5, 2, round % 3 == 0, &piece);
                    assert_eq!(done.map(|x| x.into_inner().unwrap()), std::array::from_fn(|i| i + caller));
                }
            });
        }
    });
    helpers.into_inner().unwrap().into_iter().for_each(|helper| helper.join().unwrap());
}

#[test]
fn pieces_may_share_work() {
    let mut sums = [0usize; 64];
    for_each(&mut sums, |i, sum| {
        let mut parts = [0usize; 16];
        for_each(&mut parts, |j, part| *part = i * j);
        *sum = parts.iter().sum();
    });
    assert!(sums.iter().enumerate().all(|(i, &sum)| sum == i * 120));
}

/// If a piece were started before the earlier pieces for which it waits, this test would never end.
#[test]
fn pieces_may_wait_for_earlier_pieces() {
    let done: Vec<AtomicBool> = (0..200).map(|_| AtomicBool::new(false)).collect();
    for_each_in_order(done.len(), 1, |i| {
        while i > 0 && !done[i - 1].load(Acquire) {
            thread::yield_now();
        }
        done[i].store(true, Release);
    });
    assert!(done.iter().all(|d| d.load(Acquire)));
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_lives_on() {
    let caught = catch_unwind(|| for_each_index(100, |i| assert!(i != 50, "inside")));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
    every_item_is_visited_once();
    // A piece panics on a helper: the barrier makes the caller and a helper do one piece each.
    let (pool, all) = (pool(2), Barrier::new(2));
    let call = || {
        let caller = thread::current().id();
        for_each_index(2, |_| {
            all.wait();
            assert!(thread::current().id() == caller, "of a helper");
        });
    };
    let caught = catch_unwind(AssertUnwindSafe(|| pool.install(call)));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"of a helper"));
    assert_eq!(pool.install(|| sum_of(1000)), 499_500);
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Returns the threads that do pieces, over many calls, some of which have slow pieces.
fn threads_of_pieces() -> HashSet<ThreadId> {
    let seen = Mutex::new(HashSet::new());
    for round in 0..200 {
        for_each_index(8, |_| {
            seen.lock().unwrap().insert(thread::current().id());
            if round % 50 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
    }
    seen.into_inner().unwrap()
}

/// If each piece waits for the others, all threads of the pool must work at the same time. No thread of another pool may ever work.
#[test]
fn only_threads_of_the_installed_pool_work() {
    for n in 1..=4 {
        let pool = pool(n);
        let own: HashSet<ThreadId> = pool.broadcast(|_| thread::current().id()).into_iter().collect();
        let (all, begun) = (Barrier::new(n), Mutex::new(HashSet::new()));
        pool.install(|| {
            assert_eq!(threads(), n);
            for_each_index(n, |_| {
                all.wait();
                begun.lock().unwrap().insert(thread::current().id());
            });
        });
        assert_eq!(begun.into_inner().unwrap(), own);
        assert!(pool.install(threads_of_pieces).is_subset(&own), "{n}");
        let nested = pool.install(|| rayon::join(threads_of_pieces, threads_of_pieces));
        assert!(nested.0.is_subset(&own) && nested.1.is_subset(&own), "{n}");
    }
}

/// With `RAYON_NUM_THREADS=1`, set for a child process, no other thread may do a piece.
#[test]
fn with_one_thread_the_caller_does_all_pieces() {
    const NAME: &str = "device::cpu::parallel::tests::with_one_thread_the_caller_does_all_pieces";
    if std::env::var("RAYON_NUM_THREADS").as_deref() == Ok("1") {
        assert_eq!(threads(), 1);
        assert_eq!(threads_of_pieces(), HashSet::from([thread::current().id()]));
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args([NAME, "--exact"]).env("RAYON_NUM_THREADS", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn sum_of(n: usize) -> usize {
    let mut values = vec![0usize; n];
    for_each(&mut values, |i, x| *x = i);
    values.into_iter().sum()
}

/// Callers inside rayon's jobs must make progress, whether the pool's threads are idle, run the same calls, or all are callers.
#[test]
fn work_is_shared_inside_rayon_jobs() {
    let check = || {
        let (a, b) = rayon::join(|| sum_of(1000), || rayon::join(|| sum_of(10), || sum_of(100)));
        assert_eq!((a, b), (499_500, (45, 4950)));
        let sums: Vec<usize> = (0..200usize).into_par_iter().map(sum_of).collect();
        assert!(sums.iter().enumerate().all(|(n, &sum)| sum == n * n.saturating_sub(1) / 2));
    };
    check();
    let pools: Vec<_> = (1..=4).map(pool).collect();
    pools.iter().for_each(|pool| pool.install(check));
    // Calls from all pools, from a pool inside another pool, and from outside of pools, at the same time.
    thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(|| (0..5).for_each(|_| pool.install(check)));
            scope.spawn(|| (0..5).for_each(|_| check()));
        }
        scope.spawn(|| pools[1].install(|| pools[2].install(check)));
    });
}

/// If all threads of a pool wait for something else, no helper comes: the caller must do all pieces.
#[test]
fn a_busy_pool_is_not_waited_for() {
    let pool = pool(3);
    let (ready, done) = (Barrier::new(3), Barrier::new(3));
    let seen = Mutex::new(HashSet::new());
    pool.in_place_scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|_| {
                ready.wait();
                done.wait();
            });
        }
        scope.spawn(|_| {
            ready.wait();
            *seen.lock().unwrap() = threads_of_pieces();
            done.wait();
        });
    });
    assert_eq!(seen.into_inner().unwrap().len(), 1);
}

/// Helpers must return their threads to rayon: for other jobs while calls keep coming, and for good when the pool is dropped.
#[test]
fn helpers_return_their_threads() {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ended);
    let exit = move |_| _ = count.fetch_add(1, Release);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).exit_handler(exit).build().unwrap();
    let other = Arc::new(AtomicBool::new(false));
    pool.install(|| {
        let begin = Instant::now();
        threads_of_pieces();
        (0..4).for_each(|_| {
            let other = Arc::clone(&other);
            rayon::spawn(move || other.store(true, Release));
        });
        while !other.load(Acquire) {
            for_each_index(8, |_| ());
            assert!(begin.elapsed() < Duration::from_secs(60), "helpers keep the pool");
        }
    });
    drop(pool);
    let begin = Instant::now();
    while ended.load(Acquire) < 4 {
        assert!(begin.elapsed() < Duration::from_secs(10), "{ended:?} of 4 threads have ended");
        thread::yield_now();
    }
}

/// Many concurrent callers hold a lock while they share work. If a caller did a piece of another caller, it would lock twice.
#[test]
fn callers_may_hold_a_lock_while_sharing_work() {
    let lock = Mutex::new(0usize);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut sum = lock.lock().unwrap();
                    let part = AtomicUsize::new(0);
                    for_each_index(20, |i| {
                        part.fetch_add(i, Relaxed);
                    });
                    *sum += part.into_inner();
                }
            });
        }
    });
    assert_eq!(lock.into_inner().unwrap(), 200 * 190);
}
