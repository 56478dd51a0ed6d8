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
fn slices_that_go_together_are_cut_together() {
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
fn from_either_end() {
    for n in [0, 1, 4, 5, 100, 1003] {
        for reverse in [false, true] {
            let mut data = vec![0usize; n];
            for_each_chunk_from(&mut data, 4, reverse, |i, part| part.iter_mut().for_each(|x| *x += i + 1));
            assert!(data.iter().enumerate().all(|(at, &x)| x == at / 4 + 1), "{n}");
            let seen = Mutex::new(Vec::new());
            share(n, 1, reverse, &|i| seen.lock().unwrap().push(i));
            let mut seen = seen.into_inner().unwrap();
            assert!(threads() > 1 || seen.is_sorted_by(|a, b| (a < b) != reverse), "{n}");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..n), "{n}");
        }
    }
    assert_ne!(turn(), turn());
}

/// Helpers that sleep, and callers that go to sleep waiting for them, are woken.
#[test]
fn nobody_sleeps_on() {
    for pause in [Duration::ZERO, 2 * PATIENCE] {
        std::thread::sleep(pause);
        let ran = AtomicUsize::new(0);
        let slow = |_| {
            std::thread::sleep(Duration::from_millis(1));
            ran.fetch_add(1, Relaxed);
        };
        share(5, 2, false, &slow);
        assert_eq!(ran.into_inner(), 5);
    }
}

/// What callers at once put into the mailboxes is theirs: nobody does another's piece, or one twice.
#[test]
fn callers_at_once() {
    let all = if cfg!(miri) { 20 } else { 20_000 };
    std::thread::scope(|scope| {
        for caller in 0..3 {
            scope.spawn(move || {
                for round in 0..all {
                    let count = 2 + round % 5;
                    let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    share(count, threads().min(count), round % 2 == 0, &|i| {
                        done[i].fetch_add(caller + 1, Relaxed);
                    });
                    assert!(done.iter().all(|done| done.load(Relaxed) == caller + 1), "{caller} {round}");
                }
            });
        }
    });
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

/// Were a piece begun before those that it waits for, this would not end.
#[test]
fn pieces_may_wait_for_those_before_them() {
    let done: Vec<AtomicBool> = (0..200).map(|_| AtomicBool::new(false)).collect();
    for_each_in_order(done.len(), 1, |i| {
        while i > 0 && !done[i - 1].load(Acquire) {
            std::thread::yield_now();
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
                        part.fetch_add(i, Relaxed);
                    });
                    *sum += part.into_inner();
                }
            });
        }
    });
    assert_eq!(lock.into_inner().unwrap(), 200 * 190);
}
