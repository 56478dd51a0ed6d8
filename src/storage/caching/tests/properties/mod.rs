//! Thousands of random operations on a simulated device, with all invariants checked in between.
//!
//! A failing run is shrunk to the relevant operations and printed. Proptest stores its seed for the next run.

mod model;
mod ops;
mod threads;
mod unknown;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::any;
use proptest::test_runner::{Config as Cases, FileFailurePersistence, TestCaseError, TestRunner};

use model::World;
use ops::Op;
pub(super) use ops::Random;

/// The configuration of a device and of an allocator.
#[derive(Debug, Clone, Copy)]
struct Setup {
    config: &'static str,
    capacity: u64,
    asynchronous: bool,
    page: usize,
    /// Number of operations between two checks. Checks empty the thread caches, because they query the statistics.
    every: usize,
    /// Whether compaction is on.
    compacts: bool,
    /// Whether the memory history is recorded.
    history: bool,
    /// Whether the driver is of a type unknown to the crate.
    unknown: bool,
}

const SETUP: Setup = Setup {
    config: "",
    capacity: 64 << 20,
    asynchronous: true,
    page: 0,
    every: 1,
    compacts: true,
    history: false,
    unknown: false,
};

/// The number of times that each event happened, by name.
type Tally = BTreeMap<String, u64>;

/// Events that must happen for the runs to be meaningful: every operation, every recovery step, and their outcomes.
#[cfg(not(miri))]
const EXPECTED: [&str; 61] = [
    "Allocate",
    "Free",
    "Share",
    "Check",
    "Evict",
    "Run",
    "Synchronize",
    "EmptyCache",
    "Trim",
    "Compact",
    "Limit",
    "Others",
    "FailCreate",
    "FailCommit",
    "FailEnqueue",
    "FailCall",
    "ResetPeaks",
    "ResetSums",
    "MakePool",
    "DropPool",
    "EmptyPool",
    "Checkpoint",
    "Restore",
    "MarkSpare",
    "allocated",
    "allocated in a pool",
    "allocated from a lender",
    "out of memory",
    "out of memory in a pool",
    "dropped a pool with live blocks",
    "restored",
    "restored nothing",
    "could not restore",
    "shared",
    "pending",
    "events out of order",
    "compacted",
    "evicted",
    "returned",
    "creation failed with -4",
    "creation failed with -5",
    "creation failed with -6",
    "commit failed with -4",
    "commit failed with -5",
    "commit failed with -6",
    "asking failed with -4",
    "asking failed with -5",
    "asking failed with -6",
    "told of a failure",
    "step Events",
    "step ThreadCaches",
    "step OtherStreams",
    "step Collect",
    "step Grow",
    "step Callbacks",
    "step Oversize",
    "step Wait",
    "step Release",
    "step OtherKind",
    "step UseOnOomPools",
    "step Compact",
];

/// Returns the number of operations per run: 10,000, or the value of `CLAYSTONE_TEST_OPERATIONS`.
fn operations() -> usize {
    let wanted = std::env::var("CLAYSTONE_TEST_OPERATIONS").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if cfg!(miri) { 30 } else { 10_000 })
}

fn run_operations(setup: Setup, ops: &[Op]) -> Result<Tally, String> {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(setup);
        let every = if cfg!(miri) { setup.every.max(12) } else { setup.every };
        for (i, &op) in ops.iter().enumerate() {
            world.apply(op).map_err(|why| format!("operation {i}: {why}"))?;
            if i % every == 0 {
                world.check().map_err(|why| format!("after operation {i}, {op:?}: {why}"))?;
            }
        }
        world.finish().map_err(|why| format!("at the end: {why}"))
    }));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default())
    })
}

/// Strips the numbers from a failure's reason, so that shrinking does not drift to a different failure.
fn failure_kind(why: &str) -> String {
    let what = why.split_once(": ").map_or(why, |(_, what)| what);
    what.chars().filter(|c| !c.is_ascii_digit()).take(40).collect()
}

/// Runs `PROPTEST_CASES` cases, by default one. Panics with the shortest failing list of operations.
#[track_caller]
fn check_random_operations(setup: Setup) {
    let persistence = FileFailurePersistence::WithSource("regressions");
    let config = Cases {
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1),
        max_shrink_iters: 0, // the code below shrinks the operations instead of the seed
        source_file: Some(file!()),
        failure_persistence: if cfg!(miri) { None } else { Some(Box::new(persistence)) },
        ..Cases::default()
    };
    let result = TestRunner::new(config).run(&any::<u64>(), |seed| {
        let ops = ops::generate(seed, operations(), setup.capacity);
        let Err(why) = run_operations(setup, &ops) else { return Ok(()) };
        eprintln!("{why}\n{setup:?}, seed {seed}: looking for the fewest operations that fail"); // this may take minutes
        let ops = ops::shrink(ops, 600, |ops| {
            run_operations(setup, ops).is_err_and(|other| failure_kind(&other) == failure_kind(&why))
        });
        let shortest = run_operations(setup, &ops).err().unwrap_or_default();
        let list: String = ops.iter().map(|op| format!("    {op:?}\n")).collect();
        Err(TestCaseError::fail(format!(
            "{why}\nshrunk to {} operations: {shortest}\n{setup:?}, seed {seed}\n{list}",
            ops.len()
        )))
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn with_defaults() {
    check_random_operations(SETUP);
}

#[test]
fn on_a_device_that_is_always_idle() {
    check_random_operations(Setup { asynchronous: false, capacity: 256 << 20, ..SETUP });
}

#[test]
fn with_thread_caches_seldom_disturbed() {
    check_random_operations(Setup { every: 97, config: "thread_cache_kb:4096", ..SETUP });
}

#[test]
fn with_segments_as_pytorch_makes_them() {
    check_random_operations(Setup { config: "segments:pytorch", capacity: 128 << 20, ..SETUP });
}

#[test]
fn with_history() {
    check_random_operations(Setup { history: true, every: 2, ..SETUP });
    check_random_operations(Setup {
        history: true,
        every: 50,
        config: "segments:pytorch",
        capacity: 256 << 20,
        ..SETUP
    });
}

#[test]
fn without_reuse_across_streams() {
    check_random_operations(Setup { config: "cross_stream_reuse:False", ..SETUP });
}

#[test]
fn with_segments_that_grow_in_place() {
    let grows = Setup { config: "expandable_segments:True", page: 512, ..SETUP };
    check_random_operations(grows);
    check_random_operations(Setup { page: 64 << 10, every: 7, history: true, ..grows });
    let config = "expandable_segments:True,segments:pytorch,compaction:False,per_process_memory_fraction:0.75,\
                  garbage_collection_threshold:0.6";
    check_random_operations(Setup { config, page: 4096, capacity: 160 << 20, compacts: false, ..grows });
}

#[test]
fn without_compaction() {
    check_random_operations(Setup { config: "compaction:False", compacts: false, ..SETUP });
}

const COLLECTING: Setup = Setup {
    config: "per_process_memory_fraction:0.75,garbage_collection_threshold:0.6,max_split_size_mb:20,\
             roundup_power2_divisions:4",
    capacity: 160 << 20,
    ..SETUP
};

#[test]
fn with_garbage_collection_of_a_fraction_and_blocks_that_are_not_split() {
    check_random_operations(COLLECTING);
}

const SPILLING: Setup = Setup { config: "spill:host", ..SETUP };

#[test]
fn with_blocks_that_move_to_the_host() {
    check_random_operations(SPILLING);
    check_random_operations(Setup { config: "spill:host,segments:pytorch", capacity: 96 << 20, every: 7, ..SETUP });
    check_random_operations(Setup { config: "spill:host,compaction:False", compacts: false, every: 3, ..SETUP });
    check_random_operations(Setup { history: true, every: 5, config: "spill:host,spill_limit_mb:48", ..SETUP });
    let grows = "spill:host,expandable_segments:True";
    check_random_operations(Setup { config: grows, page: 64 << 10, every: 7, ..SETUP });
}

#[cfg(not(miri))]
#[test]
fn random_runs_move_blocks_to_the_host_and_back() {
    let tally = run_operations(SPILLING, &ops::generate(9, operations(), SPILLING.capacity)).unwrap();
    for event in ["step Spill", "returned", "shared", "compacted"] {
        assert!(tally.get(event).is_some_and(|&n| n > 5), "{event}: {tally:#?}");
    }
    println!("{tally:#?}");
}

/// An event that never happens in the random runs would be untested.
#[cfg(not(miri))]
#[test]
fn random_runs_reach_every_expected_event() {
    let caches = Setup { every: 97, config: "thread_cache_kb:4096", ..SETUP };
    let unsplit = Setup { config: "max_split_size_mb:20", capacity: 96 << 20, ..SETUP };
    let mut sums: Tally = EXPECTED.map(|name| (name.into(), 0)).into();
    for (seed, setup) in (1..).zip([SETUP, caches, unsplit, COLLECTING]) {
        let tally = run_operations(setup, &ops::generate(seed, operations(), setup.capacity)).unwrap();
        tally.into_iter().for_each(|(name, n)| *sums.entry(name).or_default() += n);
    }
    let never: Vec<_> = sums.iter().filter(|(_, n)| **n == 0).collect();
    assert!(never.is_empty(), "{never:?} of {sums:#?}");
    println!("{sums:#?}");
}
