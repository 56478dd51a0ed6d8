//! Replays one trace through one allocator and measures the result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use claystone::Error;
use claystone::device::{Stream, StreamId};
use claystone::storage::plan::Plan;
use claystone::storage::{self, Allocator, Block, Config, HistoryOptions, Sim, SimOptions, Snapshot};

use crate::replay::Driver;
use crate::trace::{Event, Trace};

/// The allocator and the device of a replay.
pub struct Setup {
    pub config: Config,
    pub driver: Driver,
    /// Capacity in bytes; `None` for no limit.
    pub capacity: Option<u64>,
    /// Block alignment of the simulated device, in bytes.
    pub alignment: usize,
}

/// The figures of a replay.
pub struct Measured {
    pub peak_reserved: u64,
    /// Maximum number of segments at a time.
    pub segments: u64,
    pub driver_calls: u64,
    /// The block alignment of the device that was used.
    pub alignment: usize,
}

/// Page size of the simulated device as a multiple of the block alignment. Expandable segments grow by whole pages.
const PAGE_ALIGNMENTS: usize = 8;
/// Time limit and maximum number of passes for measuring the time of one allocation and its release.
const TIMING_BUDGET: Duration = Duration::from_millis(30);
const MAX_TIMED_PASSES: usize = 1000;

pub fn measure(setup: &Setup, trace: &Trace, passes: u32) -> Result<Measured, String> {
    let mut run = Replay::new(setup, trace).map_err(|error| error.to_string())?;
    run.run_passes(passes).map_err(|failed| failed.to_string())?;
    let stats = run.allocator.stats();
    let driver_calls = match &run.sim {
        Some(sim) => sim.call_count(),
        None => stats.num_device_alloc + stats.num_device_free,
    };
    Ok(Measured {
        peak_reserved: stats.reserved_bytes.peak,
        segments: stats.segment.peak,
        driver_calls,
        alignment: run.alignment,
    })
}

/// Measures the nanoseconds of one allocation and its release, after `passes` passes. `None` if a timed pass runs out of memory.
pub fn ns_per_pair(setup: &Setup, trace: &Trace, passes: u32) -> Result<Option<f64>, String> {
    let mut run = Replay::new(setup, trace).map_err(|error| error.to_string())?;
    run.run_passes(passes).map_err(|failed| failed.to_string())?;
    Ok(run.ns_per_pair())
}

/// Returns the bytes reserved after `passes` passes on a simulated device of this capacity; `None` if the device runs out of memory.
///
/// # Errors
/// Every failure other than out of memory.
fn peak_with_capacity(setup: &Setup, trace: &Trace, passes: u32, capacity: Option<u64>) -> Result<Option<u64>, String> {
    let setup = Setup { config: setup.config.clone(), capacity, ..*setup };
    let mut run = Replay::new(&setup, trace).map_err(|error| error.to_string())?;
    match run.run_passes(passes) {
        Ok(()) => Ok(Some(run.allocator.stats().reserved_bytes.peak)),
        Err(Failed { error: Error::OutOfMemory { .. }, .. }) => Ok(None),
        Err(failed) => Err(failed.to_string()),
    }
}

/// Returns the smallest capacity of a simulated device that survives `passes` passes, to within 0.1 % of the requested peak.
pub fn min_capacity(setup: &Setup, trace: &Trace, passes: u32) -> Result<u64, String> {
    let survives = |capacity| Ok::<bool, String>(peak_with_capacity(setup, trace, passes, Some(capacity))?.is_some());
    let too_small = || "no device is large enough".to_owned();
    let enough = peak_with_capacity(setup, trace, passes, None)?.ok_or_else(too_small)?;
    storage::min_capacity(trace.peak_requested, enough, survives)?.ok_or_else(too_small)
}

/// Returns the peak of reserved bytes while passes are served from the plan of a recorded first pass.
///
/// # Errors
/// Out of memory.
pub fn peak_when_planned(setup: &Setup, trace: &Trace, passes: u32) -> Result<u64, String> {
    let mut run = Replay::new(setup, trace).map_err(|error| error.to_string())?;
    run.run_planned_passes(passes).map_err(|failed| failed.to_string())?;
    Ok(run.allocator.stats().reserved_bytes.peak)
}

/// Replays the trace with a recorded history and returns the snapshot after the last event, before live blocks are freed.
///
/// # Errors
/// Out of memory, also for the history.
pub fn record_snapshot(setup: &Setup, trace: &Trace) -> Result<Snapshot, String> {
    let mut run = Replay::new(setup, trace).map_err(|error| error.to_string())?;
    // Each block records up to three events and each segment two, and a trace needs at most one segment per block.
    let max_entries = 3 * trace.events.len() + 1000;
    let options = HistoryOptions::default().max_entries(max_entries);
    run.allocator.record_memory_history(options).map_err(|error| error.to_string())?;
    let allocator = Arc::clone(&run.allocator);
    let done = run.run_events(&*allocator);
    let snapshot = allocator.snapshot();
    run.free_all(&*allocator);
    done.map(|()| snapshot).map_err(|(block, error)| Failed { pass: 0, block, error }.to_string())
}

/// An allocator on a device, and the trace to replay through it.
struct Replay<'a> {
    trace: &'a Trace,
    blocks: Vec<Option<Block>>,
    streams: Vec<StreamId>,
    /// Keeps the streams of a real device alive.
    _streams: Vec<Stream>,
    allocator: Arc<dyn Allocator>,
    sim: Option<Sim>,
    alignment: usize,
}

/// An allocation that failed.
struct Failed {
    pass: u32,
    block: usize,
    error: Error,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "allocation {} of pass {} failed: {}", self.block + 1, self.pass + 1, self.error)
    }
}

impl<'a> Replay<'a> {
    fn new(setup: &Setup, trace: &'a Trace) -> Result<Replay<'a>, Error> {
        let mut config = setup.config.clone();
        let (mut sim, mut own) = (None, Vec::new());
        let (driver, streams): (Arc<dyn storage::Driver>, _) = match setup.driver {
            Driver::Sim => {
                let default = SimOptions {
                    alignment: setup.alignment,
                    page: PAGE_ALIGNMENTS * setup.alignment, // as on a host with 4096-byte pages and 512-byte alignment
                    ..SimOptions::default()
                };
                let capacity = setup.capacity.unwrap_or(default.capacity);
                let device = sim.insert(Sim::new(SimOptions { capacity, ..default }));
                (Arc::new(device.clone()), (0..trace.streams as u32).map(|index| device.stream(index)).collect())
            }
            Driver::Real(device) => {
                own.push(Stream::default_stream(device)?);
                for _ in 1..trace.streams {
                    own.push(Stream::new(device)?);
                }
                let limit = setup.capacity.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
                config.memory_limit = config.memory_limit.min(limit);
                (storage::driver(device)?, own.iter().map(Stream::id).collect())
            }
        };
        let alignment = driver.alignment();
        let allocator = storage::build_allocator(driver, config)?;
        let blocks = std::iter::repeat_with(|| None).take(trace.blocks).collect();
        Ok(Replay { trace, blocks, streams, _streams: own, allocator, sim, alignment })
    }

    fn run_passes(&mut self, passes: u32) -> Result<(), Failed> {
        (0..passes).try_for_each(|pass| self.run_pass().map_err(|(block, error)| Failed { pass, block, error }))
    }

    /// Records one pass and serves `passes` further passes from its plan. The memory of the first pass is released in between.
    fn run_planned_passes(&mut self, passes: u32) -> Result<(), Failed> {
        let failed = |pass| move |(block, error)| Failed { pass, block, error };
        let (first, allocator) = (self.streams[0], Arc::clone(&self.allocator));
        let (recorded, mut plan) = Plan::record_on(allocator, first, |recorder| self.run_pass_through(&**recorder));
        recorded.map_err(failed(0))?;
        self.allocator.empty_cache().map_err(|error| Failed { pass: 0, block: 0, error })?;
        self.allocator.reset_peak_stats();
        (1..=passes).try_for_each(|pass| plan.run_on(|server| self.run_pass_through(&**server)).map_err(failed(pass)))
    }

    fn run_pass(&mut self) -> Result<(), (usize, Error)> {
        self.run_pass_through(&*Arc::clone(&self.allocator))
    }

    /// Replays the trace once. Blocks that are live at the end, or when an allocation fails, are freed. Errors name the block.
    fn run_pass_through(&mut self, allocator: &dyn Allocator) -> Result<(), (usize, Error)> {
        let done = self.run_events(allocator);
        self.free_all(allocator);
        done
    }

    /// Replays the events once. If an allocation fails, returns the block and the error.
    fn run_events(&mut self, allocator: &dyn Allocator) -> Result<(), (usize, Error)> {
        let trace = self.trace;
        trace.events.iter().try_for_each(|event| match *event {
            Event::Allocate { block, bytes, stream } => {
                let made = allocator.allocate(bytes, self.streams[stream]);
                made.map(|made| self.blocks[block] = Some(made)).map_err(|error| (block, error))
            }
            Event::Free { block } => {
                if let Some(block) = self.blocks[block].take() {
                    allocator.deallocate(block);
                }
                Ok(())
            }
        })
    }

    fn free_all(&mut self, allocator: &dyn Allocator) {
        self.blocks.iter_mut().filter_map(Option::take).for_each(|block| allocator.deallocate(block));
    }

    /// Returns the median time of one allocation and its release, in nanoseconds; `None` if a pass runs out of memory.
    fn ns_per_pair(&mut self) -> Option<f64> {
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || (begin.elapsed() < TIMING_BUDGET && times.len() < MAX_TIMED_PASSES) {
            let start = Instant::now();
            self.run_pass().ok()?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        Some(times[times.len() / 2].as_nanos() as f64 / self.trace.blocks as f64)
    }
}
