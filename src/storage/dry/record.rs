//! The simulated allocator of a dry run, which records the requests and what the program does with its blocks.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::super::allocator::{Allocator, check_fraction};
use super::super::block::Block;
use super::super::config::Config;
use super::super::driver::{Sim, SimOptions, driver};
use super::super::{registry::build_allocator, thread};
use crate::device::{StreamId, lock};
use crate::{Device, Result};

/// The purpose of a block of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Role {
    /// A leaf that requires a gradient, and an optimiser's flat buffer of such leaves.
    Parameter,
    /// An accumulated gradient.
    Gradient,
    /// A state that an optimiser keeps between steps.
    OptimizerState,
    /// A result that backward needs.
    Saved,
    /// Any other block.
    #[default]
    Temporary,
}

impl Role {
    /// All roles, in the order of a report.
    pub const ALL: [Role; 5] = [Role::Parameter, Role::Gradient, Role::OptimizerState, Role::Saved, Role::Temporary];
}

/// A line of the program; `None` if unknown.
pub(super) type Site = Option<&'static Location<'static>>;

/// An event of a dry run. Blocks are numbered in the order of their allocation.
#[derive(Clone, Copy)]
pub(super) enum Event {
    /// `size` is the block's size in bytes: the request rounded up. `site` is an index into [`Recorded::sites`].
    Allocate {
        requested: u64,
        size: u64,
        site: u32,
        stream: StreamId,
    },
    Free {
        block: u32,
    },
    Role {
        block: u32,
        role: Role,
    },
}

#[derive(Default)]
pub(super) struct Recorded {
    pub(super) events: Vec<Event>,
    pub(super) sites: Vec<Site>,
    site_numbers: HashMap<Site, u32>,
    blocks: u32,
    /// The live blocks by the address of their slot.
    live: HashMap<NonZeroUsize, LiveBlock>,
    /// The highest peaks so far: allocated, reserved and requested bytes.
    peaks: [u64; 3],
    /// The values that were needed but not computed, by operation and line: how often, and whether the largest possible number was
    /// assumed instead of zeros.
    pub(super) assumed: BTreeMap<(&'static str, Site), (u64, bool)>,
}

struct LiveBlock {
    number: u32,
    role: Role,
    /// The bytes as words, if they are known, and the storage's version at the time.
    values: Option<(u64, Vec<u64>)>,
    /// True if nothing has been written to the block.
    is_fresh: bool,
}

/// An allocator on a simulated device that stands for a real one and has no limit, so that every program runs to its end.
pub(super) struct EventRecorder {
    inner: Arc<dyn Allocator>,
    pub(super) device: Device,
    options: SimOptions,
    config: Config,
    /// The memory that the program would have, in bytes, and the part of it that the program allows.
    capacity: u64,
    pub(super) limit: AtomicU64,
    pub(super) recorded: Mutex<Recorded>,
}

impl EventRecorder {
    /// Simulates the device. `capacity` replaces the size of its memory.
    pub(super) fn new(device: Device, capacity: Option<u64>) -> Result<EventRecorder> {
        let (real, config) = (driver(device)?, Config::from_env_once()?);
        let capacity = capacity.unwrap_or(real.capacity());
        let (largest_segment, alignment, page) = (real.largest_segment(), real.alignment(), real.page());
        let options = SimOptions { largest_segment, alignment, page, ..SimOptions::default() };
        let limit = AtomicU64::new(config.limit(capacity));
        let config = Config { memory_limit: usize::MAX, per_process_memory_fraction: 1.0, ..config.clone() };
        let inner = simulate(device, options, &config)?;
        Ok(EventRecorder { inner, device, options, config, capacity, limit, recorded: Mutex::default() })
    }

    /// Returns another allocator on such a device, with `capacity` bytes of memory or without a limit.
    pub(super) fn allocator(&self, capacity: Option<u64>) -> Result<Arc<dyn Allocator>> {
        let options = SimOptions { capacity: capacity.unwrap_or(self.options.capacity), ..self.options };
        simulate(self.device, options, &self.config)
    }

    /// Returns the peaks of allocated, reserved and requested bytes since the run began.
    pub(super) fn peaks(&self) -> [u64; 3] {
        let stats = self.inner.stats();
        let now = [stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes].map(|stat| stat.peak);
        let peaks = &mut lock(&self.recorded).peaks;
        peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
        *peaks
    }

    /// Counts a value that the program needs and a dry run does not compute.
    pub(super) fn assume(&self, what: &'static str, largest: bool) {
        let recorded = &mut *lock(&self.recorded);
        recorded.assumed.entry((what, thread::get(|state| &state.caller))).or_insert((0, largest)).0 += 1;
    }

    /// Gives a block a role. The roles `Saved` and `Temporary`, which end before the block does, do not replace the others.
    pub(super) fn set_role(&self, block: &Block, role: Role) {
        let Recorded { live, events, .. } = &mut *lock(&self.recorded);
        let passing = |role| matches!(role, Role::Saved | Role::Temporary);
        if let Some(live) = live.get_mut(&block.slot_ptr().addr())
            && live.role != role
            && (passing(live.role) || !passing(role))
        {
            live.role = role;
            events.push(Event::Role { block: live.number, role });
        }
    }

    /// Keeps the values of a block until the storage has another version.
    pub(super) fn keep_values(&self, block: &Block, version: u64, values: Option<Vec<u64>>) {
        if let Some(live) = lock(&self.recorded).live.get_mut(&block.slot_ptr().addr()) {
            live.values = values.map(|values| (version, values));
            live.is_fresh = false;
        }
    }

    /// True if nothing has been written to the block since its allocation.
    pub(super) fn is_fresh(&self, block: &Block) -> bool {
        lock(&self.recorded).live.get(&block.slot_ptr().addr()).is_some_and(|live| live.is_fresh)
    }

    /// Returns the block's values, if they are known.
    pub(super) fn values(&self, block: &Block, version: u64) -> Option<Vec<u64>> {
        let recorded = lock(&self.recorded);
        let (of, values) = recorded.live.get(&block.slot_ptr().addr())?.values.as_ref()?;
        (*of == version).then(|| values.clone())
    }
}

fn simulate(device: Device, options: SimOptions, config: &Config) -> Result<Arc<dyn Allocator>> {
    build_allocator(Arc::new(Sim::standing_for(Some(device), options)), config.clone())
}

impl fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a dry run of {:?}", self.inner)
    }
}

impl Allocator for EventRecorder {
    fn device(&self) -> Device {
        self.device
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, requested: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(requested, stream)?;
        let (line, recorded) = (thread::get(|state| &state.caller), &mut *lock(&self.recorded));
        let site = *recorded.site_numbers.entry(line).or_insert(recorded.sites.len() as u32);
        if site as usize == recorded.sites.len() {
            recorded.sites.push(line);
        }
        let (requested, size) = (requested as u64, block.size() as u64);
        recorded.events.push(Event::Allocate { requested, size, site, stream });
        let live = LiveBlock { number: recorded.blocks, role: Role::Temporary, values: None, is_fresh: true };
        recorded.live.insert(block.slot_ptr().addr(), live);
        recorded.blocks += 1;
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        let recorded = &mut *lock(&self.recorded); // until the block is returned, so that no other thread gets it before the event
        if let Some(live) = recorded.live.remove(&block.slot_ptr().addr()) {
            recorded.events.push(Event::Free { block: live.number });
        }
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.inner.record_stream(block, stream);
    }

    fn reset_peak_stats(&self) {
        self.peaks();
        self.inner.reset_peak_stats();
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        self.limit.store(bytes, Relaxed);
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        self.set_memory_limit((self.capacity as f64 * check_fraction(fraction)?) as u64)
    }
}
