//! Measures a cached allocation: one allocate and one free on the simulated driver. Compares with the crate `offset-allocator`.
//!
//! `cargo bench --bench allocator` prints a table; with `-- --json` it prints one JSON object per line.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use claystone::device::StreamId;
use claystone::storage::{Allocator, Block, CachingAllocator, Config, HistoryOptions, Sim, SimOptions};
use claystone::{Device, Tensor};

/// The number of rounds. Printed times are medians over the rounds.
const ROUNDS: usize = 15;
/// The number of allocate/free pairs in a round.
const PAIRS: usize = 100_000;

/// A generator of sizes in bytes, log-uniform from 512 B to 16 MiB. Every allocator gets the same sequence.
struct Sizes(u64);

impl Sizes {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 11
    }

    fn size(&mut self) -> usize {
        let uniform = self.next() as f64 / (1u64 << 53) as f64;
        (512.0 * (uniform * f64::from(16 << 20 >> 9).ln()).exp()) as usize
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

fn allocator() -> Arc<CachingAllocator> {
    let sim = Sim::new(SimOptions::default());
    Arc::new(CachingAllocator::new(Arc::new(sim), Config::default()).expect("the default configuration is right"))
}

fn allocate(allocator: &CachingAllocator, bytes: usize) -> Block {
    allocator.allocate(bytes, StreamId::DEFAULT).expect("the simulated device is never full")
}

/// Returns the median time of an allocate/free pair over the rounds, in ns. `round` runs [`PAIRS`] pairs.
fn median(mut round: impl FnMut()) -> f64 {
    (0..3).for_each(|_| round());
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_nanos() as f64 / PAIRS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn pairs(allocator: &CachingAllocator, bytes: usize) -> f64 {
    median(|| {
        for _ in 0..PAIRS {
            allocator.deallocate(black_box(allocate(allocator, black_box(bytes))));
        }
    })
}

fn same_size(bytes: usize) -> f64 {
    pairs(&allocator(), bytes)
}

/// Times creating and dropping an uninitialised tensor (PyTorch's `torch.empty`), which includes the work besides the allocation.
fn tensor(bytes: usize, device: Device) -> f64 {
    median(|| {
        for _ in 0..PAIRS {
            drop(black_box(Tensor::empty(&[black_box(bytes) / 4], device)).expect("there is room"));
        }
    })
}

/// Times allocate/free pairs while the history is recorded, with call stacks if `stacks`. The caller is `depth` functions deep.
fn with_history(bytes: usize, stacks: bool, depth: usize) -> f64 {
    let allocator = allocator();
    allocator.record_memory_history(HistoryOptions::default().stacks(stacks)).expect("room for the entries");
    call_nested(depth, &|| pairs(&allocator, bytes))
}

/// Calls `f` from `depth` nested function calls.
#[inline(never)]
fn call_nested(depth: usize, f: &dyn Fn() -> f64) -> f64 {
    let result = if depth == 0 { f() } else { call_nested(depth - 1, f) };
    black_box(result) // used after the call, so that the compiler does not turn the call into a jump
}

/// Times freeing a random one of `live` blocks and allocating another block of a random size.
fn random(live: usize) -> f64 {
    let allocator = allocator();
    let mut sizes = Sizes(1);
    let mut blocks: Vec<Block> = (0..live).map(|_| allocate(&allocator, sizes.size())).collect();
    let choices: Vec<(usize, usize)> = (0..PAIRS).map(|_| (sizes.below(live), sizes.size())).collect();
    let round = || {
        for &(at, bytes) in &choices {
            allocator.deallocate(blocks.swap_remove(at));
            blocks.push(allocate(&allocator, bytes));
        }
    };
    let time = median(round);
    blocks.into_iter().for_each(|block| allocator.deallocate(block));
    time
}

fn random_offset_allocator(live: usize) -> f64 {
    let mut peer = offset_allocator::Allocator::<u32>::with_max_allocs(u32::MAX >> 1, 1 << 20);
    let mut sizes = Sizes(1);
    let units = |bytes: usize| (bytes / 512) as u32;
    let mut blocks: Vec<_> = (0..live).map(|_| peer.allocate(units(sizes.size())).expect("room")).collect();
    let choices: Vec<(usize, usize)> = (0..PAIRS).map(|_| (sizes.below(live), sizes.size())).collect();
    median(|| {
        for &(at, bytes) in &choices {
            peer.free(blocks.swap_remove(at));
            blocks.push(peer.allocate(units(bytes)).expect("room"));
        }
    })
}

/// Times the loop of [`random`] without allocator calls: choosing and moving handles, and the cache misses of both.
fn random_loop(live: usize) -> f64 {
    let mut sizes = Sizes(1);
    let mut blocks: Vec<[usize; 3]> = (0..live).map(|_| [sizes.size(), 0, 0]).collect(); // each element has the size of a Block
    let choices: Vec<(usize, usize)> = (0..PAIRS).map(|_| (sizes.below(live), sizes.size())).collect();
    median(|| {
        for &(at, bytes) in &choices {
            black_box(blocks.swap_remove(at));
            blocks.push(black_box([bytes, 0, 0]));
        }
    })
}

/// Returns the median throughput of one thread and of two threads, in millions of allocate/free pairs per second, and the median
/// two-thread/one-thread ratio of adjacent runs. Other load slows both runs alike, so the ratio is stable.
fn thread_scaling() -> (f64, f64, f64) {
    let allocator = allocator();
    let run = |threads: usize| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let allocator = &allocator;
                scope.spawn(move || {
                    for _ in 0..10 * PAIRS {
                        allocator.deallocate(black_box(allocate(allocator, black_box(4096 << thread))));
                    }
                });
            }
        });
        (threads * 10 * PAIRS) as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    let runs: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (run(1), run(2))).collect();
    let median = |of: &dyn Fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[ROUNDS / 2]
    };
    (median(&|r| r.0), median(&|r| r.1), median(&|r| r.1 / r.0))
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let mut rows: Vec<(String, f64, &str)> = Vec::new();
    for (name, bytes) in [("4 KiB", 4096), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20)] {
        rows.push((format!("same size, {name}"), same_size(bytes), "ns a pair"));
    }
    for (name, bytes) in [("4 KiB", 4096), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20)] {
        rows.push((format!("a tensor, {name}"), tensor(bytes, Device::best()), "ns a pair"));
    }
    // A pair records three events: allocated, free requested, free completed.
    rows.push(("history on, same size, 4 KiB".into(), with_history(4096, false, 0), "ns a pair"));
    for depth in [0, 20, 40] {
        let name = format!("history with stacks, {depth} calls deep, 4 KiB");
        rows.push((name, with_history(4096, true, depth), "ns a pair"));
    }
    for live in [64, 1024, 16_384] {
        rows.push((format!("random sizes, {live} live"), random(live), "ns a pair"));
        rows.push((format!("random sizes, {live} live, offset-allocator"), random_offset_allocator(live), "ns a pair"));
        rows.push((format!("random sizes, {live} live, of which the loop"), random_loop(live), "ns a pair"));
    }
    let (one, two, ratio) = thread_scaling();
    rows.push(("one thread".into(), one, "million pairs a second"));
    rows.push(("two threads".into(), two, "million pairs a second"));
    rows.push(("two threads to one".into(), ratio, "times"));
    for (name, value, unit) in rows {
        match json {
            true => println!("{{\"name\":\"{name}\",\"value\":{value:.2},\"unit\":\"{unit}\"}}"),
            false => println!("{name:<48} {value:>10.1} {unit}"),
        }
    }
}
