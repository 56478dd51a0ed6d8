use super::*;

/// A lock that this thread owns, where locks can have owners at all: whatever became of others in this process.
fn owned() -> Option<Biased> {
    let lock = Biased::new();
    lock.give();
    lock.barred.store(false, Relaxed);
    sync::is_possible().then_some(lock)
}

#[cfg(not(loom))]
mod threads {
    use std::cell::UnsafeCell;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn is_own(hold: &Hold<'_>) -> bool {
        matches!(hold, Hold::Own(..))
    }

    #[test]
    fn the_owner_takes_it_by_itself_until_another_thread_does() {
        let Some(lock) = owned() else { return };
        assert!(is_own(&lock.write()) && is_own(&lock.read()));
        let writing = lock.write();
        assert!(lock.own_read().is_none() && lock.own_write().is_none());
        drop(writing);
        let both = [lock.read(), lock.read()];
        assert!(both.iter().all(is_own) && lock.held.load(Relaxed) == 2);
        drop(both);
        assert_eq!(lock.held.load(Relaxed), 0);
        thread::scope(|s| s.spawn(|| assert!(!is_own(&lock.read()))).join().unwrap());
        assert!(!is_own(&lock.read()) && !is_own(&lock.write()));
        let other = thread::scope(|s| s.spawn(|| lock.owner.load(Relaxed) != sync::me()).join().unwrap());
        assert!(other && lock.is_own());
    }

    #[test]
    fn others_wait_for_the_owner_and_it_for_them() {
        let Some(lock) = owned() else { return };
        for owner_writes in [false, true] {
            lock.barred.store(false, Relaxed);
            let (said, done) = channel();
            let held = if owner_writes { lock.write() } else { lock.read() };
            assert!(is_own(&held));
            thread::scope(|s| {
                s.spawn(|| {
                    let _written = lock.write();
                    said.send(()).unwrap();
                });
                assert!(done.recv_timeout(Duration::from_millis(30)).is_err());
                drop(held);
                done.recv_timeout(Duration::from_secs(60)).unwrap();
                assert!(!is_own(&lock.write()));
            });
        }
    }

    #[test]
    fn a_claim_bars_the_owner_and_leaves_it_the_lock() {
        let Some(lock) = owned() else { return };
        let held = lock.read();
        thread::scope(|s| {
            let claimed = || {
                let claim = lock.try_claim().expect("the owner alone has it");
                barrier();
                (claim.bars(), claim.is_alone())
            };
            assert_eq!(s.spawn(claimed).join().unwrap(), (true, false));
            drop(held);
            assert_eq!(s.spawn(claimed).join().unwrap(), (true, true));
        });
        let claim = lock.claim();
        assert!(claim.is_alone() && lock.own_read().is_none() && lock.try_claim().is_none());
        drop(claim);
        assert!(is_own(&lock.write()));
        let shared = thread::scope(|s| s.spawn(|| drop(lock.write())).join());
        assert!(shared.is_ok() && !lock.claim().bars());
        lock.give();
        assert!(is_own(&lock.read()) || !sync::has_owners());
    }

    /// Numbers that only the lock keeps alike.
    struct Shared(Biased, UnsafeCell<[u64; 2]>);

    // SAFETY: the numbers are looked at under the lock.
    unsafe impl Sync for Shared {}

    impl Shared {
        /// For who holds the lock alone.
        fn count(&self) {
            // SAFETY: the caller's.
            let numbers = unsafe { &mut *self.1.get() };
            assert_eq!(numbers[0], numbers[1]);
            numbers[0] += 1;
            std::hint::black_box(&mut *numbers)[1] += 1;
        }

        fn write(&self) {
            let _held = self.0.write();
            self.count();
        }

        fn read(&self) {
            let _held = self.0.read();
            // SAFETY: nobody writes meanwhile.
            let numbers = unsafe { &*self.1.get() };
            assert_eq!(numbers[0], numbers[1]);
        }

        /// How often it counted.
        fn claim(&self, turns: u64) -> u64 {
            let mut counted = 0;
            for i in 0..turns {
                let claim = if i % 2 == 0 { Some(self.0.claim()) } else { self.0.try_claim() };
                barrier();
                if let Some(claim) = claim.filter(|claim| i % 4 == 0 || claim.is_alone()) {
                    claim.wait();
                    self.count();
                    counted += 1;
                }
            }
            counted
        }
    }

    #[test]
    fn nobody_is_there_beside_who_writes() {
        let Some(lock) = owned() else { return };
        let (shared, turns) = (Shared(lock, UnsafeCell::new([0; 2])), if cfg!(miri) { 60 } else { 30_000 });
        // The owner beside one who claims, then beside one who writes and takes the lock from it.
        let claimed = thread::scope(|s| {
            let other = s.spawn(|| shared.claim(turns / 10));
            (0..turns).for_each(|_| shared.write());
            (0..turns).for_each(|_| shared.read());
            other.join().unwrap()
        });
        thread::scope(|s| {
            s.spawn(|| (0..turns).for_each(|_| shared.write()));
            (0..turns).for_each(|_| shared.write());
        });
        assert_eq!(shared.1.into_inner(), [3 * turns + claimed; 2]);
    }
}

/// Every interleaving, explored by loom: `scripts/loom` runs these.
#[cfg(loom)]
mod interleavings {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::{model, thread};

    use super::*;

    struct Shared(Biased, UnsafeCell<u32>);

    // SAFETY: the number is looked at under the lock, which is what loom is asked to find out.
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    unsafe impl Send for Shared {}

    impl Shared {
        fn new() -> Arc<Shared> {
            Arc::new(Shared(owned().unwrap(), UnsafeCell::new(0)))
        }

        fn add(&self) {
            let _held = self.0.write();
            self.count();
        }

        fn count(&self) {
            // SAFETY: the caller has the lock to itself.
            self.1.with_mut(|n| unsafe { *n += 1 });
        }

        fn read(&self) -> u32 {
            let _held = self.0.read();
            // SAFETY: nobody writes as long as the lock is held.
            self.1.with(|n| unsafe { *n })
        }
    }

    #[test]
    fn loom_the_owner_and_another_thread_write() {
        model(|| {
            let shared = Shared::new();
            let other = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.add())
            };
            shared.add();
            shared.read();
            other.join().unwrap();
            assert_eq!(shared.read(), 2);
        });
    }

    #[test]
    fn loom_the_owner_writes_and_others_read() {
        model(|| {
            let shared = Shared::new();
            let read = || {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.read())
            };
            let others = [read(), read()];
            shared.add();
            others.into_iter().for_each(|other| assert!(other.join().unwrap() <= 1));
        });
    }

    #[test]
    fn loom_the_owner_and_one_who_claims() {
        model(|| {
            let shared = Shared::new();
            let other = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let claim = shared.0.claim();
                    barrier();
                    if claim.is_alone() {
                        shared.count();
                    }
                })
            };
            shared.add();
            shared.add();
            other.join().unwrap();
            assert!((2..=3).contains(&shared.read()));
        });
    }
}
