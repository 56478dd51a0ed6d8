//! Budgets: which saved tensors of a recorded step are computed again or move to the host, so that the step fits in a number of bytes.
//!
//! Time in a step is counted in events. An event is the saving of a tensor, or a use of a saved tensor in backward. A recording
//! measures the peak of allocated bytes between events, and for each storage the longest time without a use between two of its events.
//! [`memory_budget`] drops or moves storages in one fixed order until the peak fits. A smaller budget thus drops and moves all that a
//! larger one does. Storages that have a recipe are dropped and computed again, all others move.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::{fmt, mem};

use super::modes::with_flag;
use super::node::{Packed, Saved, SavedHook, WatchSaved};
use super::recompute::Recipe;
use crate::device::capture::is_capturing;
use crate::storage::{Block, PeakScope, Storage, advance_use_clock};
use crate::sync::{OnDrop, lock};
use crate::{Device, Error, Result, Tensor};

/// Smaller storages move only if larger ones do not suffice, and are not computed again: that costs time and frees little.
const MIN_MOVED_BYTES: u64 = 64 << 10;

/// Maximum number of events by which a storage comes back ahead of its use.
const MAX_LEAD_EVENTS: usize = 16;

/// Maximum length of a chain of dropped storages: computing the last storage of a chain brings back the whole chain.
const MAX_CHAIN_LEN: usize = 4;

thread_local! {
    /// The innermost recording or run of a budget on this thread.
    static WATCH: RefCell<Option<Arc<Mutex<Watch>>>> = const { RefCell::new(None) };
}

/// The time in which a storage can be dropped or on the host: after event `from`, until event `until`.
#[derive(Debug, Clone, Copy)]
struct Move {
    /// The number of storages that the step saved before this one.
    ordinal: usize,
    /// The size of the storage's block.
    bytes: u64,
    from: usize,
    until: usize,
    /// The cost of computing the storage again; `None` if it moves.
    again: Option<Cost>,
}

/// The cost of computing a storage again.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// The bytes that the operations read and write, for each KiB of the result.
    traffic: u64,
    /// The bytes of intermediate results.
    temporary: u64,
}

/// The memory that a step uses over time, and the times in which the tensors that it saves for backward are not used.
///
/// Record the second step of a training loop or a later one, when gradients and optimiser state exist. Parameters, tensors that hooks
/// pack, and tensors saved inside [`disable_saved_tensors_hooks`](super::disable_saved_tensors_hooks) are not recorded.
#[derive(Debug)]
pub struct StepUses {
    device: Device,
    peak: u64,
    /// The peak of allocated bytes before each event, and after the last one, if temporary memory is needed to compute storages again.
    curve: Vec<u64>,
    /// The storages whose dropping or moving can lower the peak, in the order in which budgets choose them.
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
        Ok((result, StepUses::new(device, mem::take(&mut watch.curve), mem::take(&mut watch.idle), &watch.reads)))
    }

    /// Plans with the candidates, by ordinal. `reads` has pairs of ordinals, sorted by the first: a storage with a recipe, and a storage
    /// that the recipe reads.
    fn new(device: Device, mut curve: Vec<u64>, mut candidates: Vec<Move>, reads: &[(usize, usize)]) -> StepUses {
        // A storage is back when another one is computed from it.
        for &(user, read) in reads.iter().rev() {
            let (user, read) = (candidates[user], &mut candidates[read]);
            if user.again.is_some() && (read.from + 1..read.until).contains(&user.until) {
                read.until = user.until;
            }
        }
        let (peak, recorded) = (peak_of(&curve), curve.clone());
        for (m, cost) in candidates.iter().filter_map(|m| Some((m, m.again?))) {
            curve[m.until + 1] = curve[m.until + 1].max(recorded[m.until + 1] + cost.temporary);
        }
        let mut without = curve.clone();
        candidates.iter().for_each(|m| m.remove_from(&mut without));
        let (smallest, saved) = (peak_of(&without).min(peak), candidates.iter().map(|m| m.bytes).sum());
        candidates.retain(|m| curve[m.from + 1..=m.until].iter().any(|&bytes| bytes > smallest));
        candidates.sort_by_key(|m| {
            let cost = m.again.map_or(u64::MAX, |cost| cost.traffic);
            (m.bytes < MIN_MOVED_BYTES, cost, Reverse(m.until - m.from), m.ordinal)
        });
        StepUses { device, peak, curve, candidates, smallest, saved }
    }

    /// Returns the step's peak of allocated bytes, with all saved tensors on the device.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// Returns the smallest budget, in bytes, that [`memory_budget`] accepts: the peak if all saved tensors are dropped or move.
    pub fn smallest_budget(&self) -> u64 {
        self.smallest
    }
}

/// Decides which of a step's saved tensors are computed again in backward and which move to the host, so that at most `bytes` bytes of
/// the device are allocated at once.
///
/// Results of elementwise formulas, conversions of dtype, norms and linear layers are dropped after their last use in the forward pass and
/// computed again, to the same bits, before their use in backward, if a few such operations compute them from parameters and saved
/// tensors, and nothing else holds them. The cheapest are dropped first. All other tensors move after their last use in the forward pass
/// and come back ahead of their use in backward. Smaller budgets drop and move the tensors that larger budgets do, and further ones. A
/// budget of [`StepUses::peak`] drops and moves none.
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
/// println!("{budget}"); // how many bytes are computed again, move and stay, and the expected peak
/// assert_eq!(budget.run(step)?, first?);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] if `bytes` is less than [`StepUses::smallest_budget`]; the message has both sizes.
pub fn memory_budget(uses: &StepUses, bytes: u64) -> Result<Budget> {
    if bytes < uses.smallest {
        let (all, none) = (format!("all {} bytes of saved tensors are dropped or move", uses.saved), uses.peak());
        let reason =
            format!("{bytes} bytes are less than {} bytes, the peak if {all} ({none} bytes if none)", uses.smallest);
        return Err(Error::invalid("memory_budget", reason));
    }
    let (mut curve, mut chosen) = (uses.curve.clone(), Vec::new());
    let mut candidates = uses.candidates.iter();
    while bytes < uses.peak
        && peak_of(&curve) > bytes
        && let Some(candidate) = candidates.next()
    {
        candidate.remove_from(&mut curve);
        chosen.push(*candidate);
    }
    let sum = |moves: &[Move]| moves.iter().map(|m| m.bytes).sum::<u64>();
    let (drops, mut moves): (Vec<Move>, Vec<Move>) = chosen.into_iter().partition(|m| m.again.is_some());
    let (expected_peak, moved_bytes, recomputed_bytes) = (peak_of(&curve).min(uses.peak), sum(&moves), sum(&drops));
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
    let (kept_bytes, drops) = (uses.saved - moved_bytes - recomputed_bytes, drops.iter().map(|m| (m.ordinal, m.bytes)));
    let (device, drops) = (uses.device, Arc::new(drops.collect()));
    Ok(Budget { device, drops, moves, bytes, recomputed_bytes, moved_bytes, kept_bytes, expected_peak })
}

/// The tensors of a recorded step that are computed again or move to the host, from [`memory_budget`].
///
/// Moved bytes go to host memory, or to a file with the setting `spill:disk`. Losses and gradients are the same to the bit. A budget is a
/// plan, and [`Device::set_memory_limit`] a limit: a step that deviates from the recorded step computes the right values, but may need
/// more memory, and may wait for tensors to come back. Blocks of a [`Plan`](crate::storage::plan::Plan) do not move. Backward fails if an
/// operand of a dropped tensor, such as a parameter, was changed in place after the forward pass.
#[derive(Debug)]
#[non_exhaustive]
pub struct Budget {
    device: Device,
    /// The ordinals and sizes of the storages to drop.
    drops: Arc<HashMap<usize, u64>>,
    /// The moves, by `from`.
    moves: Vec<Move>,
    /// The budget in bytes.
    pub bytes: u64,
    /// The bytes of saved tensors that are dropped and computed again in each run.
    pub recomputed_bytes: u64,
    /// The bytes of saved tensors that move to the host and back in each run.
    pub moved_bytes: u64,
    /// The bytes of saved tensors that stay on the device.
    pub kept_bytes: u64,
    /// The expected peak of allocated bytes that are on the device: at most the budget.
    pub expected_peak: u64,
}

impl Budget {
    /// Runs `step`. Tensors that its operations save on this thread are dropped or move as decided, until backward has used them.
    pub fn run<R>(&self, step: impl FnOnce() -> R) -> R {
        let moves = self.moves.iter().map(|&m| (m, false)).collect();
        Watch { device: self.device, moves, drops: Arc::clone(&self.drops), ..Watch::default() }.observe(step).0
    }
}

impl fmt::Display for Budget {
    /// Prints one line: the bytes of saved tensors that are computed again, that move and that stay, and the expected peak.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { device, bytes, drops, moves, recomputed_bytes, moved_bytes, kept_bytes, expected_peak } = self;
        let (drops, moves) = (drops.len(), moves.len());
        write!(f, "budget of {bytes} bytes on {device}: {drops} saved storages of {recomputed_bytes} bytes ")?;
        write!(f, "are computed again, {moves} of {moved_bytes} bytes move, {kept_bytes} bytes stay; ")?;
        write!(f, "expected peak {expected_peak} bytes")
    }
}

impl Move {
    /// Removes the storage from the curve of a step's memory, while the storage is dropped or on the host.
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
    /// The saved storages by ordinal, and by [number](Storage::number).
    storages: Vec<Weak<Watched>>,
    by_number: HashMap<u64, Weak<Watched>>,
    /// For a run, the ordinals and sizes of the storages to drop.
    drops: Arc<HashMap<usize, u64>>,
    /// For a run, the moves that are not complete, by `from`, and whether the storage has left the device.
    moves: Vec<(Move, bool)>,
    /// For a recording, a scope for each interval between events. Dropping them restores the peaks of enclosing scopes.
    scopes: Vec<PeakScope>,
    /// The peak of each interval, and the time of each event on the clock of blocks' uses.
    curve: Vec<u64>,
    times: Vec<u32>,
    /// The longest idle time of each storage so far. For a storage with a recipe, the time before its first use in backward.
    idle: Vec<Move>,
    /// The ordinals of storages with recipes and of storages that they read.
    reads: Vec<(usize, usize)>,
}

/// A storage that is saved for backward and observed.
pub(super) struct Watched {
    /// Keeps the storage, but no node of the graph, as long as a saved handle does. Empty if the storage is dropped.
    kept: OnceLock<Saved>,
    /// For a dropped storage, its recipe and the storages that the recipe reads.
    dropped: Option<(Arc<Recipe>, Vec<Arc<Watched>>)>,
    /// The version of the elements that were saved first.
    version: u64,
    /// The length of the chain of dropped storages up to this storage; in a recording, as if all storages with recipes were dropped.
    chain_len: usize,
    /// In a recording, the cost of computing the storage again if it has a recipe.
    again: Option<Cost>,
    is_used: AtomicBool,
    ordinal: usize,
    /// The storage's first event.
    first: usize,
    watch: Arc<Mutex<Watch>>,
}

/// True if the tensor is a leaf, or a view of one.
pub(super) fn is_parameter(tensor: &Tensor) -> bool {
    tensor.made_by.as_ref().is_some_and(|node| node.base(&tensor.layout).0.is_leaf())
}

/// Returns the saved storage that has the elements of `tensor`, if the innermost watch on this thread observes one.
pub(super) fn find_watched(tensor: &Tensor) -> Option<Arc<Watched>> {
    let watch = WATCH.with_borrow(Clone::clone)?;
    let watched = lock(&watch).by_number.get(&tensor.storage.number())?.upgrade()?;
    (watched.version == tensor.storage.version()).then_some(watched)
}

/// Lets the innermost watch on this thread observe a saved tensor, unless the tensor is a parameter or a view of one. Drops the tensor
/// if the budget says so.
pub(super) fn watch(saved: &mut Saved) {
    let Some(watch) = WATCH.with_borrow(Clone::clone) else { return };
    let tensor = &saved.tensor;
    if is_parameter(tensor) || tensor.device() != lock(&watch).device || block_bytes(&tensor.storage) == 0 {
        return;
    }
    let known = lock(&watch).by_number.get(&tensor.storage.number()).and_then(Weak::upgrade);
    let watched = known.unwrap_or_else(|| Watched::new(&watch, tensor));
    watched.note_event(false);
    if watched.dropped.is_none() || watched.version != tensor.storage.version() {
        saved.hook = Some(Arc::new(SavedHook::Watched(watched)));
        return;
    }
    let (again, layout, dtype) = (Arc::clone(&watched), tensor.layout.clone(), tensor.dtype);
    let packed = Packed::new(move || Ok(Tensor::new(again.tensor()?.storage, layout.clone(), dtype)));
    saved.replace(SavedHook::Dropped(Box::new(packed), watched));
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

    /// Records an event of a storage: it is saved, or used in backward.
    fn record(&mut self, watched: &Watched, now: usize, is_use: bool) {
        self.end_interval();
        let Some(Saved { tensor: Tensor { storage, .. }, .. }) = watched.kept.get() else { return };
        let (age, time) = (storage.age(), advance_use_clock());
        let last_used = age.map_or(0, |age| time.wrapping_sub(1).wrapping_sub(age));
        self.times.push(time);
        let from = self.times.partition_point(|&time| time <= last_used).clamp(watched.first, now); // after the last use
        // Dropping the saved handles frees the storage if there are no others.
        let is_first_use = is_use && !watched.is_used.swap(true, Ordering::Relaxed);
        let again = watched.again.filter(|_| is_first_use && storage.is_only_saved());
        let idle = Move { ordinal: watched.ordinal, bytes: block_bytes(storage), from, until: now, again };
        match self.idle.get_mut(watched.ordinal) {
            None => self.idle.push(idle),
            Some(known) if known.again.is_some() => {}
            Some(longest) if again.is_some() || now - from > longest.until - longest.from => *longest = idle,
            Some(_) => {}
        }
    }
}

impl WatchSaved for Watched {
    fn note_use(&self) {
        self.note_event(true);
    }
}

impl Watched {
    /// Observes a new storage, and decides whether to drop it.
    fn new(watch: &Arc<Mutex<Watch>>, tensor: &Tensor) -> Arc<Watched> {
        let (bytes, mut reads) = (block_bytes(&tensor.storage), Vec::new());
        let recipe = Recipe::of(tensor).filter(|recipe| recipe.reads(&mut reads).is_some());
        let chain_len = 1 + reads.iter().map(|read| read.chain_len).max().unwrap_or(0);
        let recipe = recipe.filter(|_| {
            chain_len <= MAX_CHAIN_LEN
                && reads.iter().all(|read| Arc::ptr_eq(&read.watch, watch))
                && !is_capturing(tensor.device())
        });
        let mut state = lock(watch);
        let (ordinal, first, is_recording) = (state.storages.len(), state.events, !state.scopes.is_empty());
        let cost = |recipe: &Arc<Recipe>| Cost {
            traffic: recipe.traffic.saturating_mul(1 << 10) / bytes,
            temporary: recipe.temporary,
        };
        let again = recipe.as_ref().filter(|_| is_recording && bytes >= MIN_MOVED_BYTES).map(cost);
        if again.is_some() {
            state.reads.extend(reads.iter().map(|read| (ordinal, read.ordinal)));
        }
        let dropped = recipe.filter(|_| state.drops.get(&ordinal) == Some(&bytes)).map(|recipe| (recipe, reads));
        let kept = OnceLock::new();
        if dropped.is_none() {
            kept.get_or_init(|| Saved::without_hooks(&tensor.detach()));
        }
        let chain_len = if again.is_some() || dropped.is_some() { chain_len } else { 0 };
        let (version, is_used, watch) = (tensor.storage.version(), AtomicBool::new(false), Arc::clone(watch));
        let watched = Arc::new(Watched { kept, dropped, version, chain_len, again, is_used, ordinal, first, watch });
        state.storages.push(Arc::downgrade(&watched));
        state.by_number.insert(tensor.storage.number(), Arc::downgrade(&watched));
        watched.dropped.iter().for_each(|(recipe, _)| recipe.set_dropped(&watched));
        watched
    }

    /// Returns a tensor on the storage, which is computed again if it is dropped. Fails if the storage was changed in place.
    pub(super) fn tensor(self: &Arc<Watched>) -> Result<Tensor> {
        if let (None, Some((recipe, _))) = (self.kept.get(), &self.dropped) {
            for (index, (made, watched)) in recipe.run()?.iter().zip(recipe.dropped()).enumerate() {
                let watched = if index == recipe.index { Some(Arc::clone(self)) } else { watched.upgrade() };
                let Some(watched) = watched else { continue };
                lock(&watched.watch).by_number.insert(made.storage.number(), Arc::downgrade(&watched));
                watched.kept.get_or_init(|| Saved::without_hooks(made));
            }
        }
        self.kept.get().expect("the storage is kept or computed").unpack("memory_budget")
    }

    /// Counts an event: the storage is saved, or used in backward. Carries out the moves that are due.
    #[cold]
    fn note_event(&self, is_use: bool) {
        let mut watch = lock(&self.watch);
        let now = watch.events;
        watch.events += 1;
        if !watch.scopes.is_empty() {
            return watch.record(self, now, is_use);
        }
        if watch.moves.is_empty() || is_capturing(watch.device) {
            return; // no move is left, or another call carries them out
        }
        let mut moves = mem::take(&mut watch.moves);
        drop(watch); // out-of-memory recovery may call users' code
        self.carry_out(&mut moves, now);
        lock(&self.watch).moves = moves;
    }

    /// Starts the moves that are due at event `now`. A block that cannot move now is tried again at the next event.
    fn carry_out(&self, moves: &mut Vec<(Move, bool)>, now: usize) {
        let begin = |m: &Move, start: fn(&Storage) -> Result<bool>| {
            let watched = lock(&self.watch).storages.get(m.ordinal).and_then(Weak::upgrade);
            let Some(kept) = watched.as_ref().and_then(|watched| watched.kept.get()) else { return false };
            let storage = &kept.tensor.storage;
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
