//! The requests of a dry run: which blocks the program allocates and frees, at which line, and what for.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::super::allocator::{Allocator, check_fraction};
use super::super::block::Block;
use super::super::history::current_line;
use crate::device::{StreamId, lock};
use crate::{Device, Result};

/// The largest size, in bytes, of a block whose values are kept, such as lengths, labels and indices.
pub(super) const MAX_KEPT_BYTES: usize = 64 << 10;

/// What a block of memory is used for.
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

    /// Returns the plural name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Role::Parameter => "parameters",
            Role::Gradient => "gradients",
            Role::OptimizerState => "optimizer_state",
            Role::Saved => "saved",
            Role::Temporary => "temporaries",
        }
    }

    /// True if the role ends before the block does.
    fn is_passing(self) -> bool {
        matches!(self, Role::Saved | Role::Temporary)
    }
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
    EmptyCache,
}

/// The events of a device, and what the device assumed about values that a dry run does not compute.
#[derive(Default, Clone)]
pub(super) struct Recorded {
    pub(super) events: Vec<Event>,
    pub(super) sites: Vec<Site>,
    /// For each kind of value and line: how often it was needed, and whether the largest possible number was assumed instead of zeros.
    pub(super) assumed: BTreeMap<(&'static str, Site), (u64, bool)>,
}

#[derive(Default)]
struct State {
    recorded: Recorded,
    site_numbers: HashMap<Site, u32>,
    blocks: u32,
    /// The live blocks by the address of their slot.
    live: HashMap<NonZeroUsize, LiveBlock>,
    /// The highest peaks before the program reset them: allocated, reserved and requested bytes.
    peaks: [u64; 3],
}

struct LiveBlock {
    number: u32,
    role: Role,
    /// The values, if they are known, with the storage's version at the time.
    values: Option<(u64, Box<[u8]>)>,
}

/// An allocator over simulated memory that forwards all calls to another allocator, and records them.
pub(super) struct EventRecorder {
    inner: Arc<dyn Allocator>,
    capacity: u64,
    /// The number of bytes that the program allows. The simulated device has no limit, so that every program runs to its end.
    limit: AtomicU64,
    state: Mutex<State>,
}

impl fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a dry run of {:?}", self.inner)
    }
}

impl Allocator for EventRecorder {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(bytes, stream)?;
        lock(&self.state).record_allocation(&block, bytes as u64, stream);
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        lock(&self.state).record_free(&block); // before another thread can get the block
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.inner.record_stream(block, stream);
    }

    fn reset_peak_stats(&self) {
        self.peaks();
        self.inner.reset_peak_stats();
    }

    fn empty_cache(&self) -> Result<()> {
        lock(&self.state).recorded.events.push(Event::EmptyCache);
        self.inner.empty_cache()
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        self.limit.store(bytes, Relaxed);
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        self.set_memory_limit((self.capacity as f64 * check_fraction(fraction)?) as u64)
    }
}

impl EventRecorder {
    /// Records the calls of `inner`, whose device has `capacity` bytes of memory, of which `limit` are allowed.
    pub(super) fn new(inner: Arc<dyn Allocator>, capacity: u64, limit: u64) -> EventRecorder {
        EventRecorder { inner, capacity, limit: AtomicU64::new(limit), state: Mutex::default() }
    }

    /// Returns the number of bytes that the program allows.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Returns the peaks of allocated, reserved and requested bytes since the run began.
    pub(super) fn peaks(&self) -> [u64; 3] {
        let stats = self.inner.stats();
        let now = [stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes].map(|stat| stat.peak);
        let peaks = &mut lock(&self.state).peaks;
        peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
        *peaks
    }

    /// Returns a copy of the events so far.
    pub(super) fn recorded(&self) -> Recorded {
        lock(&self.state).recorded.clone()
    }

    /// Counts a value that the program needs on the host and a dry run does not compute.
    pub(super) fn assume(&self, what: &'static str, largest: bool) {
        let assumed = &mut lock(&self.state).recorded.assumed;
        let (count, is_largest) = assumed.entry((what, current_line())).or_default();
        (*count, *is_largest) = (*count + 1, largest);
    }

    /// Gives a block a role. The roles `Saved` and `Temporary` do not replace the others.
    pub(super) fn set_role(&self, block: &Block, role: Role) {
        let state = &mut *lock(&self.state);
        let Some(live) = state.live.get_mut(&block.slot_ptr().addr()) else { return };
        if live.role != role && (live.role.is_passing() || !role.is_passing()) {
            live.role = role;
            state.recorded.events.push(Event::Role { block: live.number, role });
        }
    }

    /// Keeps the values of the whole block, until the storage has another version.
    pub(super) fn keep_values(&self, block: &Block, version: u64, values: Option<&[u8]>) {
        if let Some(live) = lock(&self.state).live.get_mut(&block.slot_ptr().addr()) {
            live.values = values.map(|values| (version, values.into()));
        }
    }

    /// Calls `f` with the block's values; returns `None` if they are not known.
    pub(super) fn with_values<R>(&self, block: &Block, version: u64, f: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let state = lock(&self.state);
        let (of, values) = state.live.get(&block.slot_ptr().addr())?.values.as_ref()?;
        (*of == version).then(|| f(values))
    }
}

impl State {
    fn record_allocation(&mut self, block: &Block, requested: u64, stream: StreamId) {
        let line = current_line();
        let recorded = &mut self.recorded;
        let site = *self.site_numbers.entry(line).or_insert_with(|| {
            recorded.sites.push(line);
            recorded.sites.len() as u32 - 1
        });
        recorded.events.push(Event::Allocate { requested, size: block.size() as u64, site, stream });
        let live = LiveBlock { number: self.blocks, role: Role::Temporary, values: None };
        self.live.insert(block.slot_ptr().addr(), live);
        self.blocks += 1;
    }

    fn record_free(&mut self, block: &Block) {
        if let Some(live) = self.live.remove(&block.slot_ptr().addr()) {
            self.recorded.events.push(Event::Free { block: live.number });
        }
    }
}
