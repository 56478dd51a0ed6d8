//! The simulated allocator of a dry run, which records the requests and what the program does with its blocks.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use indexmap::IndexSet;
use serde::Serialize;

use super::super::allocator::{Allocator, check_fraction};
use super::super::block::Block;
use super::super::config::Config;
use super::super::driver::{Sim, SimOptions, driver};
use super::super::registry::{DeviceEntry, build_allocator};
use super::super::{per_device, thread};
use crate::device::{StreamId, lock};
use crate::{Device, Result};

/// The purpose of a block of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
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

    /// True if the role does not end before the block does.
    pub(super) fn is_lasting(self) -> bool {
        !matches!(self, Role::Saved | Role::Temporary)
    }
}

/// A line of the program; `None` if unknown.
pub(super) type Site = Option<&'static Location<'static>>;

/// An event of a dry run. A live block has a number, which is used again after the block's free.
#[derive(Clone, Copy)]
pub(super) enum Event {
    /// `size` is the block's size in bytes: the request rounded up. `site` is an index into [`Recorded::sites`].
    Allocate {
        block: u32,
        requested: u64,
        size: u64,
        site: u32,
        stream: StreamId,
    },
    Free {
        block: u32,
        size: u64,
    },
    Role {
        block: u32,
        role: Role,
    },
}

#[derive(Default)]
pub(super) struct Recorded {
    pub(super) events: Vec<Event>,
    pub(super) sites: IndexSet<Site>,
    /// The live blocks by the address of their slot.
    pub(super) live: HashMap<NonZeroUsize, LiveBlock>,
    /// The numbers of blocks that were freed.
    unused: Vec<u32>,
    /// The highest peaks so far: allocated, reserved and requested bytes.
    peaks: [u64; 3],
    /// The values that were needed but not computed, by operation and line: how often, and whether the largest possible number was
    /// assumed instead of zeros.
    pub(super) assumed: BTreeMap<(&'static str, Site), (u64, bool)>,
}

pub(super) struct LiveBlock {
    number: u32,
    role: Role,
    /// The storage's version and its bytes as words, if they are known. Missing words are zeros.
    pub(super) values: Option<(u64, Vec<u64>)>,
}

impl Recorded {
    /// Returns the largest number of blocks that were live at once. Their numbers are below.
    pub(super) fn numbers(&self) -> usize {
        self.live.len() + self.unused.len()
    }

    /// Counts a value that the program needs and a dry run does not compute.
    pub(super) fn assume(&mut self, what: &'static str, largest: bool) {
        self.assumed.entry((what, thread::get(|state| &state.caller))).or_insert((0, largest)).0 += 1;
    }

    /// Gives a block a role. The roles `Saved` and `Temporary`, which end before the block does, do not replace the others.
    pub(super) fn set_role(&mut self, slot: NonZeroUsize, role: Role) {
        if let Some(live) = self.live.get_mut(&slot)
            && live.role != role
            && (role.is_lasting() || !live.role.is_lasting())
        {
            live.role = role;
            self.events.push(Event::Role { block: live.number, role });
        }
    }
}

/// An allocator on a simulated device that stands for a real one and has no limit, so that every program runs to its end.
pub(super) struct EventRecorder {
    inner: Arc<dyn Allocator>,
    /// The device's allocator before the run, if any.
    replaced: Option<Arc<dyn Allocator>>,
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
        let replaced = per_device::get::<DeviceEntry>(device).map(|entry| Arc::clone(&entry.allocator));
        Ok(EventRecorder { inner, replaced, device, options, config, capacity, limit, recorded: Mutex::default() })
    }

    /// Returns another allocator on such a device, with `capacity` bytes of memory or without a limit.
    pub(super) fn allocator(&self, capacity: Option<u64>) -> Result<Arc<dyn Allocator>> {
        let options = SimOptions { capacity: capacity.unwrap_or(self.options.capacity), ..self.options };
        simulate(self.device, options, &self.config)
    }

    /// Returns the allocator that the device has without the run.
    pub(super) fn real_allocator(&self) -> Result<Arc<dyn Allocator>> {
        let build = || build_allocator(driver(self.device)?, Config::from_env_once()?.clone());
        self.replaced.clone().map_or_else(build, Ok)
    }

    /// Returns the peaks of allocated, reserved and requested bytes since the run began.
    pub(super) fn peaks(&self) -> [u64; 3] {
        let stats = self.inner.stats();
        let now = [stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes].map(|stat| stat.peak);
        let peaks = &mut lock(&self.recorded).peaks;
        peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
        *peaks
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
        let recorded = &mut *lock(&self.recorded);
        let site = recorded.sites.insert_full(thread::get(|state| &state.caller)).0 as u32;
        let number = recorded.unused.pop().unwrap_or(recorded.live.len() as u32);
        let (requested, size) = (requested as u64, block.size() as u64);
        recorded.events.push(Event::Allocate { block: number, requested, size, site, stream });
        // On the CPU device, new memory counts as zeros.
        let values = (self.device == Device::Cpu).then(Default::default);
        recorded.live.insert(block.slot_ptr().addr(), LiveBlock { number, role: Role::Temporary, values });
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        let recorded = &mut *lock(&self.recorded); // until the block is returned, so that no other thread gets it before the event
        if let Some(live) = recorded.live.remove(&block.slot_ptr().addr()) {
            recorded.events.push(Event::Free { block: live.number, size: block.size() as u64 });
            recorded.unused.push(live.number);
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
