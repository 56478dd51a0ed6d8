use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::*;

/// A fake source: its memory is only an id and a size, and its transfers are done when a test says so.
#[derive(Clone, Default)]
struct Fake(Arc<FakeState>);

#[derive(Default)]
struct FakeState {
    next: AtomicUsize,
    live: AtomicUsize,
    /// Creations fail that would exceed this many live bytes; `None` for no limit.
    room: Option<usize>,
    /// The number of creations that will fail from now on.
    refuses: AtomicUsize,
    calls: AtomicUsize,
    lost: AtomicBool,
    /// Called whenever the source is called.
    spy: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct FakeMemory {
    id: usize,
    bytes: usize,
    home: Fake,
    held: AtomicBool,
}

type FakeEvent = Arc<AtomicBool>;

impl Fake {
    fn with_room(room: usize) -> Fake {
        Fake(Arc::new(FakeState { room: Some(room), ..FakeState::default() }))
    }

    fn record_call(&self) {
        self.0.calls.fetch_add(1, Relaxed);
        self.0.spy.get().inspect(|spy| spy());
    }

    fn live(&self) -> usize {
        self.0.live.load(Relaxed)
    }
}

impl PinnedSource for Fake {
    type Memory = FakeMemory;
    type Event = FakeEvent;

    fn create(&self, bytes: usize) -> Result<FakeMemory, Failure> {
        self.record_call();
        if self.0.refuses.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok() {
            return Err(Failure::HostMemory);
        }
        if self.0.room.is_some_and(|room| self.live() + bytes > room) {
            return Err(Failure::HostMemory);
        }
        self.0.live.fetch_add(bytes, Relaxed);
        let id = self.0.next.fetch_add(1, Relaxed);
        Ok(FakeMemory { id, bytes, home: self.clone(), held: AtomicBool::new(false) })
    }

    fn is_done(&self, event: &FakeEvent) -> bool {
        self.record_call();
        event.load(Relaxed)
    }

    fn is_lost(&self) -> bool {
        self.0.lost.load(Relaxed)
    }
}

impl Drop for FakeMemory {
    fn drop(&mut self) {
        self.home.record_call();
        self.home.0.live.fetch_sub(self.bytes, Relaxed);
    }
}

fn pool(source: &Fake) -> PinnedPool<Fake> {
    PinnedPool::new(source.clone(), 0, Budget::new(1 << 30))
}

fn id(block: &Pinned<'_, Fake>) -> usize {
    block.memory().0.id
}

fn event() -> FakeEvent {
    Arc::new(AtomicBool::new(false))
}

#[test]
fn size_classes_are_exact_and_increasing() {
    let sizes: Vec<usize> = (0..=size_class(1 << 40).unwrap()).map(class_size).collect();
    assert_eq!(sizes[..10], [4096, 4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192, 9216]);
    assert!(sizes.is_sorted_by(|a, b| a < b));
    for (class, size) in sizes.iter().enumerate() {
        assert_eq!((size_class(*size), size_class(size + 1)), (Some(class), Some(class + 1)), "{size}");
    }
    assert_eq!((size_class(0), size_class(1)), (Some(0), Some(0)));
    let largest = 1usize << (usize::BITS - 2);
    assert_eq!(size_class(largest).map(class_size), Some(largest));
    assert_eq!((size_class(largest + 1), size_class(usize::MAX)), (None, None));
}

/// Memory that a lost device keeps pinned still counts: other devices must not pin that amount in addition.
#[test]
fn a_lost_source_releases_nothing() {
    let (source, budget) = (Fake::default(), Budget::new(3 * PAGE_BYTES));
    let pool = |source: &Fake| PinnedPool::new(source.clone(), 0, Arc::clone(&budget));
    let (lost, other) = (pool(&source), pool(&Fake::default()));
    drop([lost.alloc(PAGE_BYTES), lost.alloc(PAGE_BYTES)].map(Option::unwrap));
    source.0.lost.store(true, Relaxed);
    lost.empty_cache();
    assert_eq!((lost.stats().allocated_bytes.current, lost.stats().num_host_free), (2 * PAGE_BYTES as u64, 0));
    assert!(other.alloc(2 * PAGE_BYTES).is_none() && other.alloc(PAGE_BYTES).is_some());
    source.0.lost.store(false, Relaxed);
    lost.empty_cache();
    assert_eq!((lost.stats().allocated_bytes.current, lost.stats().num_host_free), (0, 2));
    other.empty_cache();
    assert!(other.alloc(2 * PAGE_BYTES).is_some());
}

#[test]
fn blocks_above_the_cached_size_are_released_when_freed() {
    let source = Fake::default();
    let pool = pool(&source).with_max_cached_bytes(2 * PAGE_BYTES);
    drop(pool.alloc(2 * PAGE_BYTES).unwrap());
    assert_eq!(source.live(), 2 * PAGE_BYTES);
    drop(pool.alloc(2 * PAGE_BYTES + 1).unwrap());
    assert_eq!(source.live(), 2 * PAGE_BYTES);
    let done = event();
    pool.alloc(4 * PAGE_BYTES).unwrap().release_after(Arc::clone(&done));
    assert!(pool.free_finished() && source.live() == 6 * PAGE_BYTES);
    done.store(true, Relaxed);
    assert!(!pool.free_finished() && source.live() == 2 * PAGE_BYTES);
    assert_eq!((pool.stats().allocated_bytes.current, pool.stats().active_bytes.current), (2 * PAGE_BYTES as u64, 0));
}

#[test]
fn a_block_is_reused_within_its_class() {
    let source = Fake::default();
    let pool = pool(&source);
    let a = pool.alloc(10_000).unwrap();
    assert_eq!((id(&a), a.bytes()), (0, 10_240));
    drop(a);
    let again = pool.alloc(10_240).unwrap();
    let other = pool.alloc(10_241).unwrap();
    let third = pool.alloc(9_300).unwrap();
    assert_eq!([id(&again), id(&other), id(&third)], [0, 1, 2]);
    let stats = pool.stats();
    assert_eq!((stats.active_requests.current, stats.active_requests.allocated), (3, 4));
    assert_eq!(stats.active_bytes.current, 10_240 + 11_264 + 10_240);
    assert_eq!((stats.num_host_alloc, stats.host_alloc_time.count, stats.num_host_free), (3, 3, 0));
    drop((again, other, third));
    assert_eq!(source.live(), 31_744);
    pool.empty_cache();
    let stats = pool.stats();
    assert_eq!((source.live(), stats.allocated_bytes.current, stats.allocated_bytes.peak), (0, 0, 31_744));
    assert_eq!((stats.num_host_free, stats.host_free_time.count, stats.active_bytes.current), (3, 3, 0));
    pool.reset_peak_stats();
    pool.reset_accumulated_stats();
    assert_eq!(pool.stats(), PinnedStats::default());
}

/// A block with a late transfer does not delay other blocks of its class. Its own size is subtracted from the active
/// bytes. (PyTorch 2.11 adds one byte instead.)
#[test]
fn a_late_transfer_does_not_delay_other_blocks() {
    let source = Fake::default();
    let pool = pool(&source);
    let (late, early) = (event(), event());
    let (a, b) = (pool.alloc(1 << 20).unwrap(), pool.alloc(1 << 20).unwrap());
    let (a_id, b_id) = (id(&a), id(&b));
    a.release_after(Arc::clone(&late));
    b.release_after(Arc::clone(&early));
    assert_eq!(pool.stats().active_bytes.current, 2 << 20);
    assert!(pool.free_finished());
    early.store(true, Relaxed);
    let c = pool.alloc(1 << 20).unwrap();
    assert_eq!(id(&c), b_id, "the second in the queue, whose transfer is done");
    assert_eq!(pool.stats().active_requests.current, 2);
    let d = pool.alloc(1 << 20).unwrap();
    assert_eq!(id(&d), 2, "nothing is done: a new one");
    pool.empty_cache();
    assert_eq!(source.live(), 3 << 20, "in_flight blocks are not released");
    late.store(true, Relaxed);
    assert!(!pool.free_finished());
    assert_eq!(pool.stats().active_bytes.current, 2 << 20);
    assert_eq!(id(&pool.alloc(1 << 20).unwrap()), a_id);
    drop((c, d));
    assert_eq!((pool.stats().active_requests.current, pool.stats().active_bytes.current), (0, 0));
    pool.empty_cache();
    assert_eq!(source.live(), 0);
}

#[test]
fn the_budget_is_shared_and_kept() {
    let budget = Budget::new(1 << 20);
    let source = Fake::default();
    let first = PinnedPool::new(source.clone(), 0, Arc::clone(&budget));
    let second = PinnedPool::new(source.clone(), 0, Arc::clone(&budget));
    let a = first.alloc(768 << 10).unwrap();
    assert!(second.alloc(512 << 10).is_none(), "the other pool has it");
    assert!(second.alloc((1 << 20) + 1).is_none(), "more than there is");
    assert!(second.alloc(usize::MAX).is_none());
    drop(a);
    assert!(first.alloc(512 << 10).is_some(), "what is cached in another class makes room");
    assert_eq!(source.live(), 512 << 10);
    drop(first);
    assert!(second.alloc(1 << 20).is_some(), "a pool that is gone holds nothing");
}

#[test]
fn a_refusing_source_is_not_asked_at_every_request() {
    let source = Fake::with_room(1 << 20);
    let pool = pool(&source);
    drop(pool.alloc(600 << 10).unwrap());
    let a = pool.alloc(800 << 10).expect("after what was cached is released");
    assert!(pool.alloc(800 << 10).is_none());
    let calls = source.0.calls.load(Relaxed);
    assert!(pool.alloc(800 << 10).is_none());
    assert_eq!(source.0.calls.load(Relaxed), calls);
    drop(a);
    assert!(pool.alloc(800 << 10).is_some(), "what is cached still serves");
    pool.empty_cache();
    assert!(pool.alloc(1 << 20).is_some());
}

#[test]
fn a_source_that_refused_is_asked_again_later() {
    let source = Fake::default();
    let pool = pool(&source);
    source.0.refuses.store(2, Relaxed); // the first try of the request, and its retry after unused blocks were released
    assert!(pool.alloc(1 << 20).is_none());
    assert_eq!(pool.stats(), PinnedStats::default(), "a refusal counts nowhere");
    let skipped = (0..1000).take_while(|_| pool.alloc(1 << 20).is_none()).count();
    assert!((1..100).contains(&skipped), "asked again after {skipped} requests");
    let stats = pool.stats();
    assert_eq!((stats.num_host_alloc, stats.active_requests.allocated), (1, 1));

    source.0.refuses.store(usize::MAX, Relaxed);
    let calls = source.0.calls.load(Relaxed);
    let held: Vec<_> = (0..10_000).map(|_| pool.alloc(1 << 20)).collect();
    assert_eq!(held.iter().flatten().count(), 1, "what is cached still serves");
    assert!(source.0.calls.load(Relaxed) - calls < 40, "asked ever less often");
}

#[test]
fn the_reserve_is_divided_and_never_released() {
    let source = Fake::default();
    let pool = PinnedPool::new(source.clone(), 64 << 10, Budget::new(1 << 20));
    let blocks: Vec<_> = (0..5).map(|_| pool.alloc(13_000).unwrap()).collect();
    let places: Vec<_> = blocks.iter().map(|b| (id(b), b.memory().1)).collect();
    assert_eq!(places, [(0, 0), (0, 16384), (0, 32768), (0, 49152), (1, 0)]);
    let stats = pool.stats();
    assert_eq!((stats.num_host_alloc, stats.allocated_bytes.current), (2, (64 << 10) + 13_312));
    assert_eq!(stats.active_bytes.current, 5 * 13_312);
    drop(blocks);
    pool.empty_cache();
    assert_eq!((source.live(), pool.stats().num_host_free), (64 << 10, 1));
    assert_eq!(id(&pool.alloc(13_312).unwrap()), 0);
    drop(pool);
    assert_eq!(source.live(), 0);

    let poor = PinnedPool::new(Fake::with_room(0), 64 << 10, Budget::new(1 << 20));
    assert!(poor.alloc(1).is_none());
}

/// A reserve that was refused once is created later; meanwhile blocks are allocated without it.
#[test]
fn a_refused_reserve_is_requested_again() {
    let source = Fake::default();
    source.0.refuses.store(2, Relaxed); // the first try of the request, and its retry after unused blocks were released
    let pool = PinnedPool::new(source.clone(), 64 << 10, Budget::new(1 << 20));
    assert_eq!(source.live(), 0);
    assert_eq!(pool.alloc(5000).unwrap().bytes(), 5120);
    let blocks: Vec<_> = (0..100).map(|_| pool.alloc(4096).unwrap()).collect();
    assert!(blocks.iter().any(|b| b.memory().0.bytes == 64 << 10), "the reserve is there");
    drop(blocks);
    pool.empty_cache();
    assert_eq!(source.live(), 64 << 10);
    assert_eq!(pool.stats().allocated_bytes.current, 64 << 10);

    // Blocks are created even if the reserve is larger than the memory that the source has.
    let small = PinnedPool::new(Fake::with_room(60_000), 64 << 10, Budget::new(1 << 20));
    let blocks: Vec<_> = (0..10).map(|_| small.alloc(4096).unwrap()).collect();
    assert_eq!(small.stats().allocated_bytes.current, 10 * blocks[0].bytes() as u64);
}

#[test]
fn the_source_is_never_called_under_a_lock() {
    let source = Fake::default();
    let pool: &'static PinnedPool<Fake> = Box::leak(Box::new(pool(&source)));
    let spy = || assert!(pool.classes.iter().all(|class| class.try_lock().is_ok()), "a class is locked");
    assert!(source.0.spy.set(Box::new(spy)).is_ok());
    let done = event();
    for round in 0..3 {
        let blocks: Vec<_> = (0..4).map(|i| pool.alloc(i << 12).unwrap()).collect();
        blocks.into_iter().for_each(|b| b.release_after(Arc::clone(&done)));
        done.store(round > 0, Relaxed);
        drop(pool.alloc(1));
        pool.empty_cache();
    }
    assert!(source.0.calls.load(Relaxed) > 16);
    assert_eq!(source.live(), 0);
}

#[test]
fn threads_never_share_a_block() {
    let (threads, rounds) = if cfg!(miri) { (3, 20) } else { (8, 2_000) };
    let source = Fake::default();
    let pool = pool(&source);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..rounds {
                    let block = pool.alloc((thread + round) % 5 * 1000 + 3000).unwrap();
                    let memory = block.memory().0;
                    assert!(!memory.held.swap(true, Relaxed), "held twice");
                    assert!(memory.bytes >= block.bytes());
                    memory.held.store(false, Relaxed);
                    if round % 3 == 0 {
                        let later = event();
                        block.release_after(Arc::clone(&later));
                        later.store(true, Relaxed);
                    }
                    if round % 97 == 0 {
                        pool.empty_cache();
                    }
                }
            });
        }
    });
    assert!(!pool.free_finished());
    let stats = pool.stats();
    assert_eq!(stats.active_requests.allocated, (threads * rounds) as u64);
    assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0));
    assert_eq!(stats.allocated_bytes.current, source.live() as u64);
}

#[derive(Debug, Clone)]
enum Op {
    Alloc(usize),
    /// Returns one of the live blocks, at once or when an event is done.
    Free(usize, bool),
    /// Completes one of the events.
    Done(usize),
    EmptyCache,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1..200_000usize).prop_map(Op::Alloc),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, later)| Op::Free(which, later)),
        3 => any::<usize>().prop_map(Op::Done),
        1 => Just(Op::EmptyCache),
    ]
}

proptest! {
    #[test]
    fn a_block_wastes_at_most_an_eighth(bytes in PAGE_BYTES..1usize << 50) {
        let size = class_size(size_class(bytes).unwrap());
        prop_assert!(size >= bytes && size - bytes <= bytes / 8);
    }

    /// The pool agrees with a model that knows which memory is in use and the value of every statistic.
    #[test]
    fn counts_are_right_after_every_operation(ops in prop::collection::vec(op(), 1..300)) {
        let source = Fake::default();
        let pool = PinnedPool::new(source.clone(), 0, Budget::new(4 << 20));
        let mut live: Vec<Pinned<'_, Fake>> = Vec::new();
        let mut in_flight: Vec<(FakeEvent, usize, usize)> = Vec::new();
        for op in ops {
            match op {
                Op::Alloc(bytes) => match pool.alloc(bytes) {
                    Some(block) => {
                        prop_assert!(block.bytes() >= bytes);
                        prop_assert!(live.iter().all(|b| id(b) != id(&block)));
                        prop_assert!(in_flight.iter().all(|f| f.1 != id(&block)));
                        live.push(block);
                    }
                    None => {
                        let used: usize = live.iter().map(Pinned::bytes).chain(in_flight.iter().map(|f| f.2)).sum();
                        prop_assert!(used + bytes * 9 / 8 + PAGE_BYTES > 4 << 20, "there was room");
                    }
                },
                Op::Free(which, later) if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    if later {
                        let event = event();
                        in_flight.push((Arc::clone(&event), id(&block), block.bytes()));
                        block.release_after(event);
                    }
                }
                Op::Done(which) if !in_flight.is_empty() => {
                    in_flight.swap_remove(which % in_flight.len()).0.store(true, Relaxed);
                }
                Op::EmptyCache => pool.empty_cache(),
                _ => {}
            }
            pool.free_finished();
            let sizes: HashMap<usize, usize> = (live.iter().map(|b| (id(b), b.bytes())))
                .chain(in_flight.iter().map(|f| (f.1, f.2)))
                .collect();
            let stats = pool.stats();
            prop_assert_eq!(stats.active_requests.current, sizes.len() as u64);
            prop_assert_eq!(stats.active_bytes.current, sizes.values().sum::<usize>() as u64);
            prop_assert_eq!(stats.allocated_bytes.current, source.live() as u64);
            prop_assert!(stats.allocated_bytes.peak <= 4 << 20);
            for stat in [stats.active_requests, stats.active_bytes, stats.allocations, stats.allocated_bytes] {
                prop_assert_eq!(stat.allocated - stat.freed, stat.current);
            }
            prop_assert_eq!(stats.num_host_alloc - stats.num_host_free, stats.allocations.current);
        }
    }
}
