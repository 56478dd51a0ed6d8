//! Thousands of random operations on a simulated device, with everything that must hold checked between them.
//!
//! A run that fails is shrunk to the few operations that matter and printed; proptest keeps its seed for the next run.

mod model;
mod ops;
mod threads;
mod unknown;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::any;
use proptest::test_runner::{Config as Cases, FileFailurePersistence, TestCaseError, TestRunner};

use model::World;
pub(super) use model::binned;
use ops::Op;
pub(super) use ops::Random;

/// One kind of device and allocator.
#[derive(Debug, Clone, Copy)]
struct Setup {
    config: &'static str,
    capacity: u64,
    asynchronous: bool,
    page: usize,
    /// Operations between checks: looking at statistics empties the threads' caches.
    every: usize,
    /// Whether live blocks are moved together before an allocation fails.
    compacts: bool,
    /// Whether the history records.
    history: bool,
    /// Whether the device's driver is one that the crate does not know.
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

/// How often everything happened, by name.
type Tally = BTreeMap<String, u64>;

/// What has to happen for the runs to show anything: every operation, every rung of the ladder, and what they lead to.
#[cfg(not(miri))]
const EXPECTED: [&str; 58] = [
    "Allocate",
    "Free",
    "Share",
    "Check",
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
    "Hoard",
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
    "rung Events",
    "rung ThreadCaches",
    "rung OtherStreams",
    "rung Collect",
    "rung Grow",
    "rung Callbacks",
    "rung Oversize",
    "rung Wait",
    "rung Release",
    "rung OtherKind",
    "rung Lenders",
    "rung Compact",
];

const OPERATIONS: usize = if cfg!(miri) { 30 } else { 10_000 };

fn run(setup: Setup, ops: &[Op]) -> Result<Tally, String> {
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

/// A reason without the numbers in it: shrinking is not to wander off to another failure.
fn kind(why: &str) -> String {
    let what = why.split_once(": ").map_or(why, |(_, what)| what);
    what.chars().filter(|c| !c.is_ascii_digit()).take(40).collect()
}

/// Runs a case, or `PROPTEST_CASES`; panics with the shortest list of operations that fails.
#[track_caller]
fn holds(setup: Setup) {
    let persistence = FileFailurePersistence::WithSource("regressions");
    let config = Cases {
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1),
        max_shrink_iters: 0, // seeds do not shrink: operations do, below
        source_file: Some(file!()),
        failure_persistence: if cfg!(miri) { None } else { Some(Box::new(persistence)) },
        ..Cases::default()
    };
    let result = TestRunner::new(config).run(&any::<u64>(), |seed| {
        let ops = ops::generate(seed, OPERATIONS, setup.capacity);
        let Err(why) = run(setup, &ops) else { return Ok(()) };
        let ops = ops::shrink(ops, 600, |ops| run(setup, ops).is_err_and(|other| kind(&other) == kind(&why)));
        let shortest = run(setup, &ops).err().unwrap_or_default();
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
    holds(SETUP);
}

#[test]
fn on_a_device_that_is_always_idle() {
    holds(Setup { asynchronous: false, capacity: 256 << 20, ..SETUP });
}

#[test]
fn with_thread_caches_seldom_disturbed() {
    holds(Setup { every: 97, config: "thread_cache_kb:4096", ..SETUP });
}

#[test]
fn with_segments_as_pytorch_makes_them() {
    holds(Setup { config: "segments:pytorch", capacity: 128 << 20, ..SETUP });
}

#[test]
fn with_history() {
    holds(Setup { history: true, every: 2, ..SETUP });
    holds(Setup { history: true, every: 50, config: "segments:pytorch", capacity: 256 << 20, ..SETUP });
}

#[test]
fn without_reuse_across_streams() {
    holds(Setup { config: "cross_stream_reuse:False", ..SETUP });
}

#[test]
fn with_segments_that_grow_in_place() {
    let grows = Setup { config: "expandable_segments:True", page: 512, ..SETUP };
    holds(grows);
    holds(Setup { page: 64 << 10, every: 7, history: true, ..grows });
    let config = "expandable_segments:True,segments:pytorch,compaction:False,per_process_memory_fraction:0.75,\
                  garbage_collection_threshold:0.6";
    holds(Setup { config, page: 4096, capacity: 160 << 20, compacts: false, ..grows });
}

#[test]
fn without_compaction() {
    holds(Setup { config: "compaction:False", compacts: false, ..SETUP });
}

const COLLECTING: Setup = Setup {
    config: "per_process_memory_fraction:0.75,garbage_collection_threshold:0.6,max_split_size_mb:20,\
             roundup_power2_divisions:4",
    capacity: 160 << 20,
    ..SETUP
};

#[test]
fn with_garbage_collection_of_a_fraction_and_blocks_that_are_not_split() {
    holds(COLLECTING);
}

/// A mix in which something never comes up shows nothing about it.
#[cfg(not(miri))]
#[test]
fn whatever_is_to_be_survived_happens() {
    let caches = Setup { every: 97, config: "thread_cache_kb:4096", ..SETUP };
    let unsplit = Setup { config: "max_split_size_mb:20", capacity: 96 << 20, ..SETUP };
    let mut sums: Tally = EXPECTED.map(|name| (name.into(), 0)).into();
    for (seed, setup) in (1..).zip([SETUP, caches, unsplit, COLLECTING]) {
        let tally = run(setup, &ops::generate(seed, OPERATIONS, setup.capacity)).unwrap();
        tally.into_iter().for_each(|(name, n)| *sums.entry(name).or_default() += n);
    }
    let never: Vec<_> = sums.iter().filter(|(_, n)| **n == 0).collect();
    assert!(never.is_empty(), "{never:?} of {sums:#?}");
    println!("{sums:#?}");
}
