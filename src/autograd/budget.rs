//! Budgets: which saved tensors of a recorded step move to the host, so that the step fits in a number of bytes.
//!
//! Time in a step is counted in events. An event is the saving of a tensor, or a use of a saved tensor in backward. A recording
//! measures the peak of allocated bytes between events, and for each storage the longest time without a use between two of its events.
//! [`memory_budget`] moves storages in one fixed order until the peak fits. A smaller budget thus moves all that a larger one moves.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::{fmt, mem, ptr};

use super::modes::with_flag;
use super::node::{Saved, SavedHook, WatchSaved};
use crate::device::capture::is_capturing;
use crate::storage::{Block, PeakScope, Storage, advance_use_clock};
use crate::sync::{OnDrop, lock};
use crate::{Device, Error, Result};

/// Smaller storages move only if larger ones do not suffice: moving them costs time and frees little.
const MIN_MOVED_BYTES: u64 = 64 << 10;

/// Maximum number of events by which a storage comes back ahead of its use.
const MAX_LEAD_EVENTS: usize = 16;

thread_local! {
    /// The innermost recording or run of a budget on this thread.
    static WATCH: RefCell<Option<Arc<Mutex<Watch>>>> = const { RefCell::new(None) };
}

/// The time in which a storage can be on the host: after event `from`, until event `until`.
#[derive(Debug, Clone, Copy)]
struct Move {
    /// The number of storages that the step saved before this one.
    ordinal: usize,
    /// The size of the storage's block.
    bytes: u64,
    from: usize,
    until: usize,
}

/// The memory that a step uses over time, and the times in which the tensors that it saves for backward are not used.
///
/// Record the second step of a training loop or a later one, when gradients and optimiser state exist. Parameters, tensors that hooks
/// pack, and tensors saved inside [`disable_saved_tensors_hooks`](super::disable_saved_tensors_hooks) are not recorded.
#[derive(Debug)]
pub struct StepUses {
    device: Device,
    /// The peak of allocated bytes before each event, and after the last one.
    curve: Vec<u64>,
    /// The storages whose moving can lower the peak, in the order in which budgets move them.
    candidates: Vec<Move>,
    smallest: u64,
    /// The bytes of all recorded storages.
    saved: u64,
}

impl StepUses {
    /// Runs `step`, which includes backward, and records the tensors on `device` that its operations save on this thread.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist; the step is not run.
    pub fn record<R>(device: Device, step: impl FnOnce() -> R) -> Result<(R, StepUses)> {
        let scopes = vec![PeakScope::begin(device)?];
        let (result, watch) = Watch { device, scopes, ..Watch::default() }.observe(step);
        let mut watch = lock(&watch);
        watch.end_interval();
        watch.scopes.clear();
        Ok((result, StepUses::new(device, mem::take(&mut watch.curve), mem::take(&mut watch.idle))))
    }

    fn new(device: Device, curve: Vec<u64>, mut candidates: Vec<Move>) -> StepUses {
        let mut without = curve.clone();
        candidates.iter().for_each(|m| m.remove_from(&mut without));
        let (smallest, saved) = (peak_of(&without), candidates.iter().map(|m| m.bytes).sum());
        candidates.retain(|m| curve[m.from + 1..=m.until].iter().any(|&bytes| bytes > smallest));
        candidates.sort_by_key(|m| (m.bytes < MIN_MOVED_BYTES, Reverse(m.until - m.from), m.ordinal));
        StepUses { device, curve, candidates, smallest, saved }
    }

    /// Returns the step's peak of allocated bytes, with all saved tensors on the device.
    pub fn peak(&self) -> u64 {
        peak_of(&self.curve)
    }

    /// Returns the smallest budget, in bytes, that [`memory_budget`] accepts: the peak if all saved tensors move.
    pub fn smallest_budget(&self) -> u64 {
        self.smallest
    }
}

/// Decides which of a step's saved tensors move to the host, so that at most `bytes` bytes of the device are allocated at once.
///
/// A tensor moves after its last use in the forward pass and comes back ahead of its use in backward. Smaller budgets move the
/// tensors that larger budgets move, and further ones. A budget of [`StepUses::peak`] moves none.
///
/// ```
/// use claystone::autograd::{StepUses, memory_budget};
/// use claystone::{Device, Result, Tensor};
/// let w = Tensor::ones(&[64, 64], Device::Cpu)?.requires_grad_(true)?;
/// let step = || -> Result<f32> {
///     let loss = (0..8).try_fold(w.shallow_clone(), |x, _| x.sin())?.mean((), false)?;
///     loss.backward()?;
///     loss.item()
/// };
/// let (first, uses) = StepUses::record(Device::Cpu, step)?;
/// let budget = memory_budget(&uses, (uses.peak() + uses.smallest_budget()) / 2)?;
/// println!("{budget}"); // how many bytes move, how many stay, and the expected peak
/// assert_eq!(budget.run(step)?, first?);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] if `bytes` is less than [`StepUses::smallest_budget`]; the message has both sizes.
pub fn memory_budget(uses: &StepUses, bytes: u64) -> Result<Budget> {
    if bytes < uses.smallest {
        let (all, none) = (format!("all {} bytes of saved tensors move", uses.saved), uses.peak());
        let reason =
            format!("{bytes} bytes are less than {} bytes, the peak if {all} ({none} bytes if none)", uses.smallest);
        return Err(Error::invalid("memory_budget", reason));
    }
    let (mut curve, mut moves) = (uses.curve.clone(), Vec::new());
    let mut candidates = uses.candidates.iter();
    while peak_of(&curve) > bytes
        && let Some(candidate) = candidates.next()
    {
        candidate.remove_from(&mut curve);
        moves.push(*candidate);
    }
    let (expected_peak, moved_bytes) = (peak_of(&curve), moves.iter().map(|m: &Move| m.bytes).sum::<u64>());
    // Storages come back ahead of their use where that does not raise the peak.
    moves.sort_by_key(|m| m.until);
    for m in &mut moves {
        let first = m.until.saturating_sub(MAX_LEAD_EVENTS).max(m.from + 1);
        while m.until > first && curve[m.until] + m.bytes <= expected_peak {
            curve[m.until] += m.bytes;
            m.until -= 1;
        }
    }
    moves.sort_by_key(|m| m.from);
    Ok(Budget { device: uses.device, moves, bytes, moved_bytes, kept_bytes: uses.saved - moved_bytes, expected_peak })
}

/// The tensors of a recorded step that move to the host, from [`memory_budget`].
///
/// The bytes go to host memory, or to a file with the setting `spill:disk`. Losses and gradients are the same to the bit. A budget is a
/// plan, and [`Device::set_memory_limit`] a limit: a step that deviates from the recorded step computes the right values, but may need
/// more memory, and may wait for tensors to come back. Blocks of a [`Plan`](crate::storage::plan::Plan) do not move.
#[derive(Debug)]
#[non_exhaustive]
pub struct Budget {
    device: Device,
    /// The moves, by `from`.
    moves: Vec<Move>,
    /// The budget in bytes.
    pub bytes: u64,
    /// The bytes of saved tensors that move to the host and back in each run.
    pub moved_bytes: u64,
    /// The bytes of saved tensors that stay on the device.
    pub kept_bytes: u64,
    /// The expected peak of allocated bytes that are on the device: at most the budget.
    pub expected_peak: u64,
}

impl Budget {
    /// Runs `step`. Tensors that its operations save on this thread move as decided, until backward has used them.
    pub fn run<R>(&self, step: impl FnOnce() -> R) -> R {
        let moves = self.moves.iter().map(|&m| (m, false)).collect();
        Watch { device: self.device, moves, ..Watch::default() }.observe(step).0
    }
}

impl fmt::Display for Budget {
    /// Prints one line: the bytes of saved tensors that move and that stay, and the expected peak.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { device, bytes, moves, moved_bytes, kept_bytes, expected_peak } = self;
        write!(f, "budget of {bytes} bytes on {device}: {} saved storages of {moved_bytes} bytes move, ", moves.len())?;
        write!(f, "{kept_bytes} bytes stay; expected peak {expected_peak} bytes")
    }
}

impl Move {
    /// Removes the storage from the curve of a step's memory, while the storage is on the host.
    fn remove_from(&self, curve: &mut [u64]) {
        curve[self.from + 1..=self.until].iter_mut().for_each(|bytes| *bytes = bytes.saturating_sub(self.bytes));
    }
}

fn peak_of(curve: &[u64]) -> u64 {
    curve.iter().copied().max().unwrap_or(0)
}

/// Returns the number of bytes of the storage's block; 0 if the storage has none.
fn block_bytes(storage: &Storage) -> u64 {
    storage.allocation().block().map_or(0, Block::size) as u64
}

/// Observes the storages that operations on a thread save, while a step is recorded or runs in a budget.
#[derive(Default)]
struct Watch {
    device: Device,
    /// Number of events so far.
    events: usize,
    /// The saved storages by ordinal, and by address.
    storages: Vec<Weak<Watched>>,
    by_address: HashMap<usize, Weak<Watched>>,
    /// For a run, the moves that are not complete, by `from`, and whether the storage has left the device.
    moves: Vec<(Move, bool)>,
    /// For a recording, a scope for each interval between events. Dropping them restores the peaks of enclosing scopes.
    scopes: Vec<PeakScope>,
    /// The peak of each interval, and the time of each event on the clock of blocks' uses.
    curve: Vec<u64>,
    times: Vec<u32>,
    /// The longest idle time of each storage so far.
    idle: Vec<Move>,
}

/// A storage that is saved for backward and observed.
struct Watched {
    /// Keeps the storage, but no node of the graph, as long as a saved handle does.
    handle: Saved,
    ordinal: usize,
    /// The storage's first event.
    first: usize,
    watch: Arc<Mutex<Watch>>,
}

/// Lets the innermost watch on this thread observe a saved tensor, unless the tensor is a parameter or a view of one.
pub(super) fn watch(saved: &mut Saved) {
    let Some(watch) = WATCH.with_borrow(Clone::clone) else { return };
    let tensor = &saved.tensor;
    let is_parameter = tensor.made_by.as_ref().is_some_and(|node| node.base(&tensor.layout).0.is_leaf());
    let mut state = lock(&watch);
    if is_parameter || tensor.device() != state.device || block_bytes(&tensor.storage) == 0 {
        return;
    }
    let address = ptr::from_ref(tensor.storage.allocation()).addr();
    let watched = state.by_address.get(&address).and_then(Weak::upgrade).unwrap_or_else(|| {
        let handle = Saved::of(tensor.detach(), 0, None, None);
        let (ordinal, first) = (state.storages.len(), state.events);
        let watched = Arc::new(Watched { handle, ordinal, first, watch: Arc::clone(&watch) });
        state.storages.push(Arc::downgrade(&watched));
        state.by_address.insert(address, Arc::downgrade(&watched));
        watched
    });
    drop(state);
    watched.note_event();
    saved.hook = Some(Arc::new(SavedHook::Watched(watched)));
}

impl Watch {
    /// Runs `step` with this watch as the innermost one on the thread. Returns the watch, too.
    fn observe<R>(self, step: impl FnOnce() -> R) -> (R, Arc<Mutex<Watch>>) {
        let watch = Arc::new(Mutex::new(self));
        let mut outer = WATCH.replace(Some(Arc::clone(&watch)));
        let _restore = OnDrop(|| drop(WATCH.replace(outer.take())));
        (with_flag(|modes| &mut modes.saved_hooks, true, step), watch)
    }

    /// Adds the peak of allocated bytes since the last event to the curve.
    fn end_interval(&mut self) {
        let peak = self.scopes.last().and_then(|scope| scope.peak().ok());
        self.curve.push(peak.map_or(0, |peak| peak.allocated));
        self.scopes.extend(PeakScope::begin(self.device));
    }

    /// Records an event of a storage.
    fn record(&mut self, watched: &Watched, now: usize) {
        self.end_interval();
        let storage = &watched.handle.tensor.storage;
        let (age, time) = (storage.age(), advance_use_clock());
        let last_used = age.map_or(0, |age| time.wrapping_sub(1).wrapping_sub(age));
        self.times.push(time);
        let from = self.times.partition_point(|&time| time <= last_used).clamp(watched.first, now); // after the last use
        let idle = Move { ordinal: watched.ordinal, bytes: block_bytes(storage), from, until: now };
        match self.idle.get_mut(watched.ordinal) {
            None => self.idle.push(idle),
            Some(longest) if now - from > longest.until - longest.from => *longest = idle,
            Some(_) => {}
        }
    }
}

impl WatchSaved for Watched {
    /// Counts an event. Carries out the moves that are due.
    #[cold]
    fn note_event(&self) {
        let mut watch = lock(&self.watch);
        let now = watch.events;
        watch.events += 1;
        if !watch.scopes.is_empty() {
            return watch.record(self, now);
        }
        if watch.moves.is_empty() || is_capturing(watch.device) {
            return; // no move is left, or another call carries them out
        }
        let mut moves = mem::take(&mut watch.moves);
        drop(watch); // out-of-memory recovery may call users' code
        self.carry_out(&mut moves, now);
        lock(&self.watch).moves = moves;
    }
}

impl Watched {
    /// Starts the moves that are due at event `now`. A block that cannot move now is tried again at the next event.
    fn carry_out(&self, moves: &mut Vec<(Move, bool)>, now: usize) {
        let begin = |m: &Move, start: fn(&Storage) -> Result<bool>| {
            let watched = lock(&self.watch).storages.get(m.ordinal).and_then(Weak::upgrade);
            let Some(watched) = watched else { return false };
            let storage = &watched.handle.tensor.storage;
            block_bytes(storage) == m.bytes
                && start(storage).unwrap_or_else(|error| {
                    tracing::warn!(%error, "a saved tensor could not be moved");
                    true // is not tried again
                })
        };
        // Blocks leave before others come back.
        let begun = moves.partition_point(|(m, _)| m.from <= now);
        let leaving = moves[..begun].iter_mut().filter(|(m, is_away)| !is_away && now < m.until);
        leaving.for_each(|(m, is_away)| *is_away = begin(m, Storage::evict));
        moves.extract_if(..begun, |(m, _)| m.until <= now).for_each(|(m, _)| _ = begin(&m, Storage::prefetch));
    }
}

#[cfg(test)]
mod tests;
