//! Allocators that wrap others: the methods that a wrapper does not define call the inner allocator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::guard::guard_violations;
use super::super::scope::with_allocator;
use super::super::{CachingAllocator, GuardAllocator, LoggingAllocator, Sim, SimOptions, TraceAction};
use super::*;

/// A user's wrapper that defines only the required methods.
#[derive(Debug)]
struct MinimalWrapper(Arc<dyn Allocator>);

impl Allocator for MinimalWrapper {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.0)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.0.allocate(bytes, stream)
    }

    fn deallocate(&self, block: Block) {
        self.0.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.0.record_stream(block, stream);
    }
}

/// Returns the source text of each default method of the trait, by name.
fn defaults() -> BTreeMap<String, String> {
    let source = include_str!("../allocator.rs");
    let (_, all) = source.split_once("pub trait Allocator").unwrap();
    let (all, _) = all.split_once("\n}\n").unwrap();
    let methods = all.split("\n    fn ").skip(1).filter_map(|method| {
        let (name, rest) = method.split_once('(')?;
        let (head, body) = rest.split_once(['{', ';'])?;
        rest[head.len()..].starts_with('{').then(|| (name.to_owned(), body.to_owned()))
    });
    methods.collect()
}

#[test]
fn every_default_method_calls_the_inner_allocator() {
    let mut defaults = defaults();
    assert!(defaults.remove("inner").is_some_and(|body| body.contains("None")));
    assert!(defaults.len() >= 10, "{:?}", defaults.keys());
    for (name, body) in defaults {
        let asks = body.contains("self.inner()") && body.contains(&format!("inner.{name}("));
        assert!(asks, "{name} does not ask the allocator inside");
    }
}

#[test]
fn a_wrapper_behaves_like_the_wrapped_allocator() {
    const MIB: usize = 1 << 20;
    type Wrap = fn(Arc<dyn Allocator>, &Sim) -> Arc<dyn Allocator>;
    let wraps: [Wrap; 4] = [
        |inner, _| Arc::new(MinimalWrapper(inner)),
        |inner, _| Arc::new(MinimalWrapper(Arc::new(MinimalWrapper(inner)))),
        |inner, _| Arc::new(LoggingAllocator::new(inner, std::io::sink()).unwrap()),
        |inner, sim| Arc::new(GuardAllocator::new(inner, Arc::new(sim.clone()))),
    ];
    for wrap in wraps {
        let sim = Sim::new(SimOptions { capacity: 64 * MIB as u64, alignment: 1024, ..SimOptions::default() });
        let caching = CachingAllocator::new(Arc::new(sim.clone()), "segments:pytorch".parse().unwrap()).unwrap();
        let inner: Arc<dyn Allocator> = Arc::new(caching);
        let outer = wrap(Arc::clone(&inner), &sim);
        let take = |mib: usize| outer.allocate(mib * MIB, StreamId::DEFAULT);
        assert_eq!((outer.device(), outer.alignment()), (inner.device(), 1024));

        let history = HistoryOptions { max_entries: 100, ..HistoryOptions::default() };
        outer.record_memory_history(history).unwrap();
        let [a, b] = [3, 18].map(|mib| take(mib).unwrap());
        outer.deallocate(a);
        let snapshot = outer.snapshot();
        snapshot.check().unwrap();
        assert_eq!(snapshot.segments.len(), 2);
        let trace = snapshot.device_traces.last().unwrap();
        assert_eq!(trace.iter().filter(|entry| entry.action == TraceAction::Alloc).count(), 2);
        assert_eq!(snapshot.segments, inner.snapshot().segments);

        assert_eq!(outer.trim(0).unwrap(), 20 * MIB as u64);
        let c = take(4).unwrap();
        let [d, e] = [2, 2].map(|mib| take(mib).unwrap());
        outer.deallocate(c);
        let could_move = !format!("{outer:?}").contains("guarded"); // a guarded block cannot move
        assert_eq!(outer.compact(u64::MAX).unwrap() > 0, could_move);

        let told = Arc::new(AtomicU64::new(0));
        let [asked, seen] = [Arc::clone(&told), Arc::clone(&told)];
        let caching = find_allocator::<CachingAllocator>(&*outer).unwrap();
        let _asked = caching.add_free_memory_callback(Box::new(move || asked.fetch_add(1, Relaxed) == u64::MAX));
        let _seen = caching.add_oom_observer(Box::new(move |_| _ = seen.fetch_add(100, Relaxed)));
        outer.set_memory_limit(16 * MIB as u64).unwrap();
        assert!(take(14).is_err());
        assert_eq!(told.load(Relaxed), 101);
        outer.set_memory_limit(u64::MAX).unwrap();
        outer.set_memory_fraction(0.25).unwrap();
        assert!(take(14).is_err() && outer.set_memory_fraction(2.0).is_err());
        outer.set_memory_fraction(1.0).unwrap();
        let f = take(14).unwrap();

        [b, d, e, f].into_iter().for_each(|block| outer.deallocate(block));
        outer.reset_peak_stats();
        outer.reset_accumulated_stats();
        assert_eq!((outer.stats(), outer.stats().num_ooms), (inner.stats(), 0));
        outer.empty_cache().unwrap();
        assert_eq!(sim.committed(), 0);
    }
}

/// A wrapper without the method `inner`.
#[derive(Debug)]
struct Hiding(CachingAllocator);

impl Allocator for Hiding {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.0.allocate(bytes, stream)
    }

    fn deallocate(&self, block: Block) {
        self.0.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.0.record_stream(block, stream);
    }
}

#[test]
fn a_block_stays_in_place_if_its_caching_allocator_is_hidden() {
    let caching = || CachingAllocator::new(driver(Device::Cpu).unwrap(), "spill:disk".parse().unwrap()).unwrap();
    let zeros = |allocator: Arc<dyn Allocator>| {
        with_allocator(Device::Cpu, allocator, || crate::Tensor::zeros(1000, Device::Cpu)).unwrap()
    };
    let [hidden, wrapped] = [zeros(Arc::new(Hiding(caching()))), zeros(Arc::new(MinimalWrapper(Arc::new(caching()))))];
    assert_eq!([&hidden, &wrapped].map(|x| x.storage().evict().unwrap()), [false, true]);
    assert_eq!(
        [&hidden, &wrapped].map(|x| x.storage().allocation().block().unwrap().slot().is_exported()),
        [true, false]
    );
}

#[test]
fn a_wrapper_reports_the_violations_of_an_inner_guard() {
    let sim = Sim::new(SimOptions { contents: true, ..SimOptions::default() });
    let caching = CachingAllocator::new(Arc::new(sim.clone()), "".parse().unwrap()).unwrap();
    let guarded = MinimalWrapper(Arc::new(GuardAllocator::new(Arc::new(caching), Arc::new(sim.clone()))));
    let block = guarded.allocate(1000, StreamId::DEFAULT).unwrap();
    let place = block.location();
    let at = (place.segment().memory(), place.offset() + block.size());
    sim.write_tag_at(StreamId::DEFAULT, at, 512, 1).unwrap();
    drop(place);
    guarded.deallocate(block);
    assert_eq!(guard_violations(&guarded), 1);
}
