//! Plans: placing the blocks of a recorded step offline, knowing when each one lives.
//!
//! An allocator that serves requests one by one cannot know which block will be freed next to which. A step that
//! repeats tells: [`place`] takes the lifetimes of all its blocks and finds offsets for them in one arena that is as
//! small as a search of under a second makes it, often exactly the peak of live bytes. A [`Plan`] records a step, has it
//! placed, and serves its repetitions.
//!
//! PyTorch has nothing like it outside of CUDA graphs' private pools. Recording and serving follow STAlloc
//! ([arXiv 2507.16274](https://arxiv.org/abs/2507.16274)), the search MiniMalloc
//! ([ASPLOS 2023](https://doi.org/10.1145/3623278.3624752)).

mod exact;
mod greedy;
mod orders;
mod record;
mod search;
mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::allocator::Allocator;
use super::{registry, scope};
use crate::device::StreamId;
use crate::{Device, Result};
use record::Recorder;
pub use search::{Lifetime, Placement, place};
use serve::{Schedule, Server};

/// How long the search for offsets may take.
const BUDGET: Duration = Duration::from_secs(1);

/// A recorded step: where each of its blocks goes in one arena, and how its repetitions fared.
///
/// A plan is for steps that ask for the same sizes in the same order, as training does once it is warm: record the
/// second step or a later one, when optimiser state and gradients exist. Planned are the blocks that the step makes and
/// drops on one stream. What outlives it (its result), or is used by other streams, is left to the allocator.
///
/// A step may deviate. A request that is not where the plan expects it goes to the allocator, and the plan looks for the
/// next that is; a block kept longer than in the recording keeps its place. Results are the same in every case.
///
/// The arena is one block of the underlying allocator, taken at the first run, counted in its statistics, and given back
/// once the plan and the last of its blocks are dropped. It is never moved. Histories and snapshots show it as one block
/// with the context `plan`, whatever is in it: as with CUDA graphs, a repetition is no event.
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
    server: Arc<Server>,
    lower_bound: u64,
}

/// What a plan has served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanStats {
    /// Steps run.
    pub runs: u64,
    /// Requests served from the arena.
    pub hits: u64,
    /// Requests of the plan's stream that should have been, or that the recording does not have: the allocator served
    /// them. Results that outlive the step are in neither number.
    pub misses: u64,
}

impl Plan {
    /// Runs `step`, and plans the blocks that this thread asks for meanwhile on `device` and its current stream. Takes up
    /// to a second after the step.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there: the step is not run.
    pub fn record<R>(device: Device, step: impl FnOnce() -> R) -> Result<(R, Plan)> {
        let allocator = registry::allocator(device)?;
        let planned = |recorder: &Arc<dyn Allocator>| scope::with_allocator(device, Arc::clone(recorder), step);
        Ok(Plan::record_on(allocator, scope::home_stream(device), planned))
    }

    /// As [`record`](Plan::record), of what `step` asks the allocator that it is given for on `stream`. That one passes
    /// everything on to `allocator`.
    pub fn record_on<R>(
        allocator: Arc<dyn Allocator>,
        stream: StreamId,
        step: impl FnOnce(&Arc<dyn Allocator>) -> R,
    ) -> (R, Plan) {
        let recorder = Arc::new(Recorder::new(Arc::clone(&allocator), stream));
        let result = step(&(Arc::clone(&recorder) as Arc<dyn Allocator>));
        let trace = recorder.finish();
        let placement = place(&trace.lifetimes(), allocator.alignment() as u64, BUDGET);
        let schedule = Schedule::new(trace, &placement.offsets, placement.arena);
        let server = Arc::new(Server::new(allocator, stream, schedule));
        (result, Plan { server, lower_bound: placement.lower_bound })
    }

    /// Runs `step`, serving what this thread asks for on the plan's device and stream from the plan. Inside another
    /// plan's run, this one serves.
    pub fn run<R>(&mut self, step: impl FnOnce() -> R) -> R {
        let device = self.server.device();
        self.run_on(|server| scope::with_allocator(device, Arc::clone(server), step))
    }

    /// As [`run`](Plan::run), of what `step` asks the allocator that it is given for. Blocks go back to that one.
    pub fn run_on<R>(&mut self, step: impl FnOnce(&Arc<dyn Allocator>) -> R) -> R {
        struct End<'a>(&'a Server);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.end();
            }
        }
        self.server.begin();
        let _end = End(&self.server);
        step(&(Arc::clone(&self.server) as Arc<dyn Allocator>))
    }

    /// Planned blocks.
    pub fn blocks(&self) -> usize {
        self.server.schedule.planned
    }

    /// Bytes of the arena.
    pub fn arena(&self) -> u64 {
        self.server.schedule.arena as u64
    }

    /// Peak of the bytes that planned blocks have live at once: no arena can be smaller.
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// What it has served.
    pub fn stats(&self) -> PlanStats {
        self.server.stats()
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        self.server.close();
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Plan {
    /// One line: blocks, arena, peak and utilisation (peak by arena), runs, hits and misses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, arena, peak) = (self.blocks(), self.arena(), self.lower_bound);
        let utilisation = if arena == 0 { 100.0 } else { 100.0 * peak as f64 / arena as f64 };
        let PlanStats { runs, hits, misses } = self.stats();
        write!(f, "plan of {}: {blocks} blocks in {arena} bytes, ", self.server.device())?;
        write!(f, "peak {peak} ({utilisation:.1} %); {runs} runs, {hits} hits, {misses} misses")
    }
}
