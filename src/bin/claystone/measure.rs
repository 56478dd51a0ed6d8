//! Replays one trace against one allocator and counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use claystone::Error;
use claystone::device::{Stream, StreamId};
use claystone::storage::plan::Plan;
use claystone::storage::{self, Allocator, Block, Config, HistoryOptions, Sim, SimOptions, Snapshot};

use crate::replay::Driver;
use crate::trace::{Event, Trace};

/// What to replay against.
pub struct Setup {
    pub config: Config,
    pub driver: Driver,
    /// Bytes; `None` is no limit.
    pub capacity: Option<u64>,
    /// Of the simulated device.
    pub alignment: usize,
}

/// What a replay took.
pub struct Measured {
    pub peak_reserved: u64,
    /// The most at a time.
    pub segments: u64,
    pub driver_calls: u64,
    /// Of the device that it ran on.
    pub alignment: usize,
}

/// Alignments that make a page of the simulated device, for segments that grow in place.
const PAGE: usize = 8;
/// How long, and in how many passes at most, the time of a pair is measured.
const TIMED: Duration = Duration::from_millis(30);
const TIMED_PASSES: usize = 1000;

/// The figures after `passes` passes.
pub fn measure(setup: &Setup, trace: &Trace, passes: u32) -> Result<Measured, String> {
    let mut run = Run::new(setup, trace).map_err(|error| error.to_string())?;
    run.passes(passes).map_err(|failed| failed.to_string())?;
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

/// Nanoseconds of an allocation and its release after `passes` passes; `None` where memory ran out later than in these.
pub fn ns_per_pair(setup: &Setup, trace: &Trace, passes: u32) -> Result<Option<f64>, String> {
    let mut run = Run::new(setup, trace).map_err(|error| error.to_string())?;
    run.passes(passes).map_err(|failed| failed.to_string())?;
    Ok(run.ns_per_pair())
}

/// Whether a simulated device of this capacity survives so many passes, and what was reserved there.
///
/// # Errors
/// When something else than memory is wanting.
pub fn survives(setup: &Setup, trace: &Trace, passes: u32, capacity: Option<u64>) -> Result<Option<u64>, String> {
    let setup = Setup { config: setup.config.clone(), capacity, ..*setup };
    let mut run = Run::new(&setup, trace).map_err(|error| error.to_string())?;
    match run.passes(passes) {
        Ok(()) => Ok(Some(run.allocator.stats().reserved_bytes.peak)),
        Err(Failed { error: Error::OutOfMemory { .. }, .. }) => Ok(None),
        Err(failed) => Err(failed.to_string()),
    }
}

/// The most that is reserved while passes are served from the plan of one before them.
///
/// # Errors
/// When memory runs out.
pub fn served(setup: &Setup, trace: &Trace, passes: u32) -> Result<u64, String> {
    let mut run = Run::new(setup, trace).map_err(|error| error.to_string())?;
    run.planned_passes(passes).map_err(|failed| failed.to_string())?;
    Ok(run.allocator.stats().reserved_bytes.peak)
}

/// What the allocator has done when the trace's last event has happened, with its history.
///
/// # Errors
/// When memory runs out, or there is none for the history.
pub fn recorded(setup: &Setup, trace: &Trace) -> Result<Snapshot, String> {
    let mut run = Run::new(setup, trace).map_err(|error| error.to_string())?;
    // A block's allocation and release are three events, and a segment's two, of which a block needs one at most.
    let max_entries = 3 * trace.events.len() + 1000;
    let options = HistoryOptions { max_entries, ..HistoryOptions::default() };
    run.allocator.record_memory_history(options).map_err(|error| error.to_string())?;
    let allocator = Arc::clone(&run.allocator);
    let done = run.events_through(&*allocator);
    let snapshot = allocator.snapshot();
    run.free_all(&*allocator);
    done.map(|()| snapshot).map_err(|(block, error)| Failed { pass: 0, block, error }.to_string())
}

/// An allocator on a device, and a trace to run through it.
struct Run<'a> {
    trace: &'a Trace,
    /// The blocks that are live.
    blocks: Vec<Option<Block>>,
    streams: Vec<StreamId>,
    /// Which of them exist as long as these do.
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

impl<'a> Run<'a> {
    fn new(setup: &Setup, trace: &'a Trace) -> Result<Run<'a>, Error> {
        let mut config = setup.config.clone();
        let (mut sim, mut own) = (None, Vec::new());
        let (driver, streams): (Arc<dyn storage::Driver>, _) = match setup.driver {
            Driver::Sim => {
                let default = SimOptions {
                    alignment: setup.alignment,
                    page: PAGE * setup.alignment, // as the host's, if the alignment is a device's
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
        Ok(Run { trace, blocks, streams, _streams: own, allocator, sim, alignment })
    }

    fn passes(&mut self, passes: u32) -> Result<(), Failed> {
        (0..passes).try_for_each(|pass| self.pass().map_err(|(block, error)| Failed { pass, block, error }))
    }

    /// Records a pass, and serves so many further ones from the plan of it. What the first took is given back.
    fn planned_passes(&mut self, passes: u32) -> Result<(), Failed> {
        let failed = |pass| move |(block, error)| Failed { pass, block, error };
        let (first, allocator) = (self.streams[0], Arc::clone(&self.allocator));
        let (recorded, mut plan) = Plan::record_on(allocator, first, |recorder| self.pass_through(&**recorder));
        recorded.map_err(failed(0))?;
        self.allocator.empty_cache().map_err(|error| Failed { pass: 0, block: 0, error })?;
        self.allocator.reset_peak_stats();
        (1..=passes).try_for_each(|pass| plan.run_on(|server| self.pass_through(&**server)).map_err(failed(pass)))
    }

    fn pass(&mut self) -> Result<(), (usize, Error)> {
        self.pass_through(&*Arc::clone(&self.allocator))
    }

    /// Once through the trace. What is live at the end is freed, also when an allocation, which is named, fails.
    fn pass_through(&mut self, allocator: &dyn Allocator) -> Result<(), (usize, Error)> {
        let done = self.events_through(allocator);
        self.free_all(allocator);
        done
    }

    fn events_through(&mut self, allocator: &dyn Allocator) -> Result<(), (usize, Error)> {
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

    /// Nanoseconds of an allocation and a release: the median of passes.
    fn ns_per_pair(&mut self) -> Option<f64> {
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || (begin.elapsed() < TIMED && times.len() < TIMED_PASSES) {
            let start = Instant::now();
            self.pass().ok()?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        Some(times[times.len() / 2].as_nanos() as f64 / self.trace.blocks as f64)
    }
}
