//! Memory plans: offsets for the blocks of a recorded step, computed offline from the blocks' lifetimes.
//!
//! An allocator that serves requests one by one does not know how long each block will live. A step that repeats reveals the lifetimes of
//! all its blocks. [`place`] assigns the blocks offsets in one arena, and searches for the smallest arena in under a second. Often the
//! arena is as small as the peak of live bytes. A [`Plan`] records a step, computes its offsets, and serves repetitions of the step.
//!
//! The closest feature of PyTorch is the private pools of CUDA graphs. Recording and serving follow STAlloc ([arXiv
//! 2507.16274](https://arxiv.org/abs/2507.16274)); the search follows MiniMalloc ([ASPLOS 2023](https://doi.org/10.1145/3623278.3624752)).

mod exact;
mod record;
mod search;
mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::allocator::Allocator;
use super::{registry, scope};
use crate::device::{OnDrop, StreamId};
use crate::{Device, Result};
use record::Recorder;
pub use search::{Lifetime, Placement, place};
use serve::{PlanServer, Schedule};

/// Time limit of the search for offsets.
const SEARCH_TIME_LIMIT: Duration = Duration::from_secs(1);

/// A recorded step: the offset of each block in one arena, and statistics of its repetitions.
///
/// Use a plan for steps that request the same sizes in the same order, as training does after the first step. Record the second
/// step or a later one, when optimiser state and gradients exist. The plan covers the blocks that the step allocates and frees on
/// one stream. Blocks that outlive the step (its result) or are used by other streams come from the allocator.
///
/// A step may deviate from its plan. An unexpected request goes to the allocator, and the plan resumes at the next request that matches. A
/// block that lives longer than in the recording keeps its memory. The step computes the same results whether or not it deviates.
///
/// The arena is one block of the underlying allocator, and counts in its statistics. The arena is allocated at the first run, never moves, and is
/// freed after the plan and the last of its blocks are dropped. Histories and snapshots show the arena as one block with the context `plan`; like the
/// replay of a CUDA graph, a repetition records no events.
///
/// ```
/// use claystone::{Device, Tensor, storage::plan::Plan};
/// let w = Tensor::ones(&[64, 64], Device::Cpu)?;
/// let step = || w.matmul(&w)?.exp()?.mul_scalar(2)?.sum((), false)?.item::<f32>();
/// let (first, mut plan) = Plan::record(Device::Cpu, step)?;
/// for _ in 0..3 {
///     assert_eq!(plan.run(step)?, first.clone()?);
/// }
/// assert_eq!(plan.stats().misses, 0);
/// println!("{plan}"); // blocks, arena, peak, hits
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Plan {
    server: Arc<PlanServer>,
    lower_bound: u64,
}

/// How many requests a plan has served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanStats {
    /// Number of runs.
    pub runs: u64,
    /// Requests served from the arena.
    pub hits: u64,
    /// Requests on the plan's stream that the allocator served, because the requests deviated from the recording or
    /// their ranges of the arena were not free. Results that outlive the step count neither as hits nor as misses.
    pub misses: u64,
}

impl Plan {
    /// Runs `step`, and plans the blocks that this thread allocates during it on `device` and its current stream. The
    /// search takes up to a second after the step.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist; the step is not run.
    pub fn record<R>(device: Device, step: impl FnOnce() -> R) -> Result<(R, Plan)> {
        let of_device = registry::allocator(device)?;
        let allocator = scope::allocator(device).unwrap_or(of_device);
        let planned = |recorder: &Arc<dyn Allocator>| scope::with_allocator(device, Arc::clone(recorder), step);
        Ok(Plan::record_on(allocator, scope::home_stream(device), planned))
    }

    /// Like [`record`](Plan::record), for the requests on `stream` to the allocator that is passed to `step`, which forwards them to `allocator`.
    pub fn record_on<R>(
        allocator: Arc<dyn Allocator>,
        stream: StreamId,
        step: impl FnOnce(&Arc<dyn Allocator>) -> R,
    ) -> (R, Plan) {
        let recorder = Arc::new(Recorder::new(Arc::clone(&allocator), stream));
        let result = step(&(Arc::clone(&recorder) as Arc<dyn Allocator>));
        let trace = recorder.finish();
        let placement = place(&trace.lifetimes(), allocator.alignment() as u64, SEARCH_TIME_LIMIT);
        let schedule = Schedule::new(trace, &placement.offsets, placement.arena);
        let server = Arc::new(PlanServer::new(allocator, stream, schedule));
        (result, Plan { server, lower_bound: placement.lower_bound })
    }

    /// Runs `step`, serving this thread's requests on the plan's device and stream from the plan. If runs of plans are nested, the
    /// inner plan serves the requests.
    pub fn run<R>(&mut self, step: impl FnOnce() -> R) -> R {
        let device = self.server.device();
        self.run_on(|server| scope::with_allocator(device, Arc::clone(server), step))
    }

    /// Like [`run`](Plan::run), for the requests to the allocator that is passed to `step`. Blocks must be freed to that allocator.
    pub fn run_on<R>(&mut self, step: impl FnOnce(&Arc<dyn Allocator>) -> R) -> R {
        self.server.begin();
        let _end = OnDrop(|| self.server.end());
        step(&(Arc::clone(&self.server) as Arc<dyn Allocator>))
    }

    /// Returns the number of planned blocks.
    pub fn blocks(&self) -> usize {
        self.server.schedule.planned
    }

    /// Returns the size of the arena in bytes.
    pub fn arena(&self) -> u64 {
        self.server.schedule.arena as u64
    }

    /// Returns the peak of the planned blocks' live bytes: no arena can be smaller.
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// Returns the hits and misses so far.
    pub fn stats(&self) -> PlanStats {
        self.server.stats()
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        self.server.mark_plan_dropped();
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Plan {
    /// Prints one line: blocks, arena, peak, utilisation (peak divided by arena), runs, hits and misses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, arena, peak) = (self.blocks(), self.arena(), self.lower_bound);
        let utilisation = if arena == 0 { 100.0 } else { 100.0 * peak as f64 / arena as f64 };
        let PlanStats { runs, hits, misses } = self.stats();
        write!(f, "plan of {}: {blocks} blocks in {arena} bytes, ", self.server.device())?;
        write!(f, "peak {peak} ({utilisation:.1} %); {runs} runs, {hits} hits, {misses} misses")
    }
}
