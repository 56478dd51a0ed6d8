//! Invariants of the allocator, checked against a shadow model that knows only the requests made.

/// Returns an error with this message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

mod failures;
mod pools;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Mutex;

use super::super::super::entry::{Entry, Use};
use super::super::super::ladder;
use super::super::*;
use super::ops::Op;
use super::unknown::Unknown;
use super::{Setup, Tally};
use crate::storage::driver::MemoryKind;
use crate::storage::{BlockState, Driver, Failure, HistoryOptions, Registration, SegmentInfo, Stat};
use failures::{ASKING, failure, retry_until_ok};
use pools::Pool;

/// A live block and what the model knows of it.
struct Live {
    block: Block,
    requested: usize,
    stream: u32,
    /// The private pool of the block's segment; 0 if none.
    pool: u32,
    tag: u32,
    /// The streams that have used the block, after a wait for the block's own stream.
    users: Vec<u32>,
}

/// An allocator, its device, and the state that both should have.
pub(super) struct World {
    setup: Setup,
    sim: Sim,
    allocator: Arc<CachingAllocator>,
    live: Vec<Live>,
    /// More live blocks, which a callback frees when memory runs short.
    spare_blocks: Arc<Mutex<Vec<Live>>>,
    _callback: Registration,
    pools: Vec<Pool>,
    next_tag: u32,
    /// Bounds on the reserved bytes: by the memory fraction alone, and by the fraction and the limit together.
    fraction: u64,
    limit: u64,
    others: u64,
    /// Peaks of the allocation count, allocated bytes and requested bytes since the last reset, computed from the live blocks.
    peaks: [u64; 3],
    /// The current value of each statistic when its accumulated sums were last reset.
    bases: Vec<u64>,
    /// The statistics as last queried.
    stats: DeviceStats,
    /// Failures injected for creation, commit, enqueueing and other calls, in order.
    failures: [VecDeque<i32>; 4],
    tally: Tally,
}

/// Returns the nine quantities of the statistics, each in total and for both size kinds.
fn quantities(s: &DeviceStats) -> Vec<(&'static str, [Stat; 3])> {
    let of = |f: fn(&crate::storage::PoolStats) -> Stat| [f(&s.total), f(&s.small_pool), f(&s.large_pool)];
    vec![
        ("allocation", of(|p| p.allocation)),
        ("segment", of(|p| p.segment)),
        ("active", of(|p| p.active)),
        ("inactive_split", of(|p| p.inactive_split)),
        ("allocated_bytes", of(|p| p.allocated_bytes)),
        ("reserved_bytes", of(|p| p.reserved_bytes)),
        ("active_bytes", of(|p| p.active_bytes)),
        ("inactive_split_bytes", of(|p| p.inactive_split_bytes)),
        ("requested_bytes", of(|p| p.requested_bytes)),
    ]
}

impl World {
    pub(super) fn new(setup: Setup) -> World {
        let options = SimOptions {
            capacity: setup.capacity,
            largest_segment: setup.capacity as usize,
            asynchronous: setup.asynchronous,
            contents: true,
            check_order: true,
            page: setup.page,
            ..SimOptions::default()
        };
        let sim = Sim::new(options);
        let config: Config = setup.config.parse().unwrap();
        let fraction = (setup.capacity as f64 * config.per_process_memory_fraction) as u64;
        let limit = fraction.min(config.memory_limit as u64);
        let driver: Arc<dyn Driver> =
            if setup.unknown { Arc::new(Unknown(sim.clone())) } else { Arc::new(sim.clone()) };
        let allocator = Arc::new(CachingAllocator::new(driver, config).unwrap());
        let spare_blocks: Arc<Mutex<Vec<Live>>> = Arc::default();
        let callback = {
            let (owner, sim, spare_blocks) = (Arc::downgrade(&allocator), sim.clone(), Arc::clone(&spare_blocks));
            allocator.add_free_memory_callback(Box::new(move || {
                let (Some(owner), given) = (owner.upgrade(), std::mem::take(&mut *spare_blocks.lock().unwrap())) else {
                    return false;
                };
                let any = !given.is_empty();
                for live in given {
                    // A callback runs while memory is short, so a block on the host is checked there.
                    check_where_it_is(&sim, sim.stream(live.stream), &live);
                    owner.deallocate(live.block);
                }
                any
            }))
        };
        ladder::SERVED_BY_STEP.take(); // discards the counts of an earlier run on this thread
        let stats = allocator.stats();
        if setup.history {
            // The ring buffer is small, so that it is overwritten many times.
            let options = HistoryOptions { max_entries: 500, ..HistoryOptions::default() };
            allocator.record_memory_history(options).unwrap();
        }
        World {
            setup,
            sim,
            allocator,
            live: Vec::new(),
            spare_blocks,
            _callback: callback,
            pools: Vec::new(),
            next_tag: 1,
            fraction,
            limit,
            others: 0,
            peaks: [0; 3],
            bases: vec![0; 27],
            stats,
            failures: Default::default(),
            tally: Tally::new(),
        }
    }

    /// Applies an operation to the allocator and the model.
    pub(super) fn apply(&mut self, op: Op) -> Result<(), String> {
        self.note(op.name());
        let say = |error: Error| format!("{op:?} reported: {error}");
        match op {
            Op::Allocate { bytes, stream, pool } => self.allocate(bytes, stream, pool)?,
            Op::Free { block } => {
                if !self.live.is_empty() {
                    let live = self.live.swap_remove(block % self.live.len());
                    check_where_it_is(&self.sim, self.sim.stream(live.stream), &live);
                    self.allocator.deallocate(live.block);
                }
            }
            Op::Share { block, stream } => {
                let returned = self.live.is_empty() || self.bring_back(block % self.live.len())?;
                if returned {
                    self.share(block, stream).map_err(say)?;
                }
            }
            Op::Check { block } => {
                if !self.live.is_empty() {
                    self.bring_back(block % self.live.len())?;
                    let live = &self.live[block % self.live.len()];
                    check_where_it_is(&self.sim, self.sim.stream(live.stream), live);
                }
            }
            Op::Evict { block } => self.evict(block % self.live.len().max(1))?,
            Op::Run { seed } => _ = self.sim.run_some(seed),
            Op::Synchronize => retry_until_ok(|| self.sim.synchronize()),
            Op::EmptyCache => {
                if self.allow_injected_failure(|world| world.allocator.empty_cache())?.is_some() {
                    ensure!(self.unused_segments() == 0, "an emptied cache holds unused segments");
                }
            }
            Op::Trim { keep } => {
                let before = self.sim.committed();
                let Some(freed) = self.allow_injected_failure(|world| world.allocator.trim(keep))? else {
                    return self.note_failures();
                };
                let after = self.sim.committed();
                ensure!(before == after + freed, "trim says {freed} bytes, but {before} became {after}");
                ensure!(after >= keep.min(before), "trimmed to {after}, below what was to be kept");
            }
            Op::Compact { budget } => self.compact(budget)?,
            Op::Limit { bytes } => {
                self.limit = bytes.min(self.fraction);
                self.allocator.set_memory_limit(bytes).map_err(say)?;
            }
            Op::Others { bytes } => {
                self.others = bytes.min(self.setup.capacity - self.sim.committed()); // other programs cannot take memory that is already reserved
                self.sim.set_others(self.others);
            }
            Op::FailCreate { code } => {
                self.sim.fail_next_create(failure(code));
                self.failures[0].push_back(code);
            }
            Op::FailCommit { code } => {
                self.sim.fail_next_commit(failure(code));
                self.failures[1].push_back(code);
            }
            Op::FailEnqueue { code } => {
                self.sim.fail_next_enqueue(failure(code));
                self.failures[2].push_back(code);
            }
            Op::FailCall { kind, code } => {
                let kind = if self.setup.compacts { kind % 4 } else { kind };
                self.sim.fail_next_call(ASKING[kind], failure(code));
                self.failures[3].push_back(code);
            }
            Op::ResetPeaks => {
                self.allocator.reset_peak_stats();
                self.peaks = [0; 3];
            }
            Op::ResetSums => {
                self.allocator.reset_accumulated_stats();
                self.bases = currents(&self.allocator.stats());
            }
            Op::MakePool { no_split, use_on_oom } => self.make_pool(no_split, use_on_oom),
            Op::DropPool { pool } => self.drop_pool(pool),
            Op::EmptyPool { pool } => self.empty_pool(pool)?,
            Op::Checkpoint { pool } => self.checkpoint(pool)?,
            Op::Restore { pool, seed } => self.restore(pool, seed)?,
            Op::MarkSpare { block } => {
                if !self.live.is_empty() {
                    let live = self.live.swap_remove(block % self.live.len());
                    self.spare_blocks.lock().unwrap().push(live);
                }
            }
        }
        self.note_failures()?;
        let now = self.totals();
        self.peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
        Ok(())
    }

    fn allocate(&mut self, bytes: usize, stream: u32, pool: usize) -> Result<(), String> {
        let (failures, held) = (self.sim.failures_left(), self.sim.committed());
        let id = self.sim.stream(stream);
        let handle = self.pools.get(pool.wrapping_sub(1)).map(|pool| pool.handle.clone());
        let pool = handle.as_ref().map_or(0, MemPool::id);
        let allocator = Arc::clone(&self.allocator);
        let allocate = || match &handle {
            Some(handle) => use_mem_pool(handle, || allocator.allocate(bytes, id)),
            None => allocator.allocate(bytes, id),
        };
        let allocated = allocate();
        if failures != self.sim.failures_left() {
            self.accept_peaks()?;
        }
        match allocated {
            Ok(block) => {
                ensure!(block.requested() == bytes && block.size() >= bytes, "{block:?} is not for {bytes} bytes");
                ensure!(self.sim.committed() <= held.max(self.limit), "more is held than the limit {}", self.limit);
                let from = self.pool_of(&block);
                ensure!(from == pool || self.has_use_on_oom(from), "{block:?} of pool {from} was handed out in {pool}");
                self.note(if from == pool && pool == 0 {
                    "allocated"
                } else if from == pool {
                    "allocated in a pool"
                } else {
                    "allocated from a lender"
                });
                self.add(block, stream, from)
            }
            Err(Error::OutOfMemory { requested, .. }) => {
                ensure!(requested == bytes, "an error says {requested} for {bytes} bytes");
                // After an injected failure, the next call may succeed.
                if failures != self.sim.failures_left() {
                    return Ok(());
                }
                self.check_out_of_memory(bytes, pool)?;
                let again = allocate();
                ensure!(again.is_err(), "no memory for {bytes} bytes, but the second call found {again:?}");
                self.note(if pool == 0 { "out of memory" } else { "out of memory in a pool" });
                Ok(())
            }
            Err(_) if failures != self.sim.failures_left() => Ok(()),
            Err(other) => Err(format!("allocating {bytes} bytes reported: {other}")),
        }
    }

    /// Adds a newly allocated block, and writes to it.
    fn add(&mut self, block: Block, stream: u32, pool: u32) -> Result<(), String> {
        let tag = self.next_tag;
        self.next_tag += 1;
        let written = self.sim.write_tag(self.sim.stream(stream), &block, tag);
        let requested = block.requested();
        self.live.push(Live { block, requested, stream, pool, tag, users: Vec::new() });
        written.map_err(|error| format!("the first use of a block reported: {error}"))
    }

    /// Brings a block back from the host, as its next use does. Returns whether the block is on the device. The return may only fail
    /// after an injected failure, or if the memory that cannot move leaves no room.
    fn bring_back(&mut self, index: usize) -> Result<bool, String> {
        let (failures, held, block) = (self.sim.failures_left(), self.sim.committed(), &self.live[index].block);
        if !is_on_host(block) {
            return Ok(true);
        }
        let returned = self.allocator.restore(block);
        let (is_back, size) = (!is_on_host(block), block.size() as u64);
        ensure!(returned.is_ok() == is_back, "{returned:?}, but on the device: {is_back}");
        ensure!(self.sim.committed() <= self.limit.max(held), "a return exceeds the limit {}", self.limit);
        let private = {
            let core = self.allocator.lock();
            core.heap.segments().filter(|(_, held)| held.pool > 0).map(|(_, held)| held.committed() as u64).sum::<u64>()
        };
        let room = self.limit.min(self.setup.capacity - self.others);
        let slack = 4 * (self.setup.page as u64).saturating_sub(512);
        let is_bound = !self.setup.compacts || self.setup.config.contains("spill_limit");
        if !is_back && failures == self.sim.failures_left() && !is_bound {
            // If other blocks may move to the host, those of sizes that thread caches keep stay on the device.
            let spills = self.setup.config.contains("spill");
            let cached = self.allocator.lock().largest_cached;
            let stays = self.bytes_on_device(|live| !spills || live.stream == 0 && live.block.size() <= cached);
            ensure!(
                private + stays + size + slack > room,
                "no return of {size} bytes, with {private} private and {stays} others of {room}: {returned:?}"
            );
        }
        self.note(if is_back { "returned" } else { "could not return" });
        self.accept_peaks()?; // the range for the block may have been longer until its end was freed
        Ok(is_back)
    }

    /// Returns the number of bytes of these blocks of the default pool that are on the device.
    fn bytes_on_device(&self, which: impl Fn(&Live) -> bool) -> u64 {
        self.totals_of(|live| live.pool == 0 && !is_on_host(&live.block) && which(live))[1]
    }

    /// Moves a block to the host, which only changes its location.
    fn evict(&mut self, index: usize) -> Result<(), String> {
        let Some(was_on_host) = self.live.get(index).map(|live| is_on_host(&live.block)) else { return Ok(()) };
        let evicted = self.allow_injected_failure(|world| world.allocator.evict(&world.live[index].block))?;
        let (evicted, Live { block, pool, .. }) = (evicted.unwrap_or(false), &self.live[index]);
        ensure!(is_on_host(block) == (was_on_host || evicted), "evicted: {evicted}, but {block:?}");
        ensure!(!evicted || !was_on_host && *pool == 0, "{block:?} of pool {pool} left");
        if evicted {
            self.note("evicted");
        }
        Ok(())
    }

    fn share(&mut self, block: usize, stream: u32) -> Result<()> {
        let n = self.live.len();
        let Some(live) = self.live.get_mut(block % n.max(1)).filter(|live| live.stream != stream) else {
            return Ok(());
        };
        let (own, other) = (self.sim.stream(live.stream), self.sim.stream(stream));
        if !live.users.contains(&stream) {
            // One wait is enough: if the block moves later, the allocator must order the move.
            let marker = retry_until_ok(|| self.sim.record(own));
            retry_until_ok(|| self.sim.stream_waits(other, &marker));
            live.users.push(stream);
            *self.tally.entry("shared".into()).or_default() += 1;
        }
        self.allocator.record_stream(&live.block, other);
        self.sim.check_tag(other, &live.block, live.tag)
    }

    fn compact(&mut self, budget: u64) -> Result<(), String> {
        let (before, copied) = (self.sim.committed(), self.sim.bytes_copied());
        let Some(freed) = self.allow_injected_failure(|world| world.allocator.compact(budget))? else { return Ok(()) };
        let after = self.sim.committed();
        ensure!(before == after + freed, "compact says {freed} bytes, but {before} became {after}");
        let copied = self.sim.bytes_copied() - copied;
        ensure!(copied <= budget, "compact copied {copied} bytes on a budget of {budget}");
        if copied > 0 {
            self.note("compacted");
        }
        Ok(())
    }

    /// Returns the allocation count, allocated bytes and requested bytes.
    fn totals(&self) -> [u64; 3] {
        self.totals_of(|_| true)
    }

    fn totals_of(&self, which: impl Fn(&Live) -> bool) -> [u64; 3] {
        let spare_blocks = self.spare_blocks.lock().unwrap();
        let live = self.live.iter().chain(&*spare_blocks).filter(|live| which(live));
        live.fold([0; 3], |[n, size, asked], l| [n + 1, size + l.block.size() as u64, asked + l.requested as u64])
    }

    fn unused_segments(&self) -> usize {
        let core = self.allocator.lock();
        core.heap.unused_segments(0).len()
    }

    /// Checks an allocation that failed without an injected failure: fails if free memory could have served it.
    fn check_out_of_memory(&self, bytes: usize, pool: u32) -> Result<(), String> {
        let rules = &self.allocator.rules;
        let size = rules.round_size(bytes).unwrap_or(usize::MAX);
        let (private, growing) = {
            let core = self.allocator.lock();
            let heap = &core.heap;
            let fits = |entry: &&Entry| {
                matches!(entry.usage(), Use::Free | Use::Pending) && entry.size() >= size && {
                    let arena = &heap.arenas()[entry.arena() as usize];
                    (arena.pool == pool || self.has_use_on_oom(arena.pool))
                        && rules.may_serve(arena.kind, entry.size(), size)
                }
            };
            let fitting = heap.blocks().find(fits);
            ensure!(fitting.is_none(), "no memory for {size} bytes, and there is {:?}", fitting);
            let private = heap.segments().filter(|(_, held)| held.pool > 0);
            let growing = heap.segments().filter(|(_, held)| held.segment.is_reserved()).count() as u64;
            (private.map(|(_, held)| held.committed() as u64).sum::<u64>(), growing)
        };
        ensure!(self.unused_segments() == 0, "no memory for {size} bytes, and there are unused segments");
        let room = self.limit.min(self.setup.capacity - self.others);
        let [_, allocated, _] = self.totals_of(|live| live.pool == 0);
        // Each expandable segment, also a new one, may hold up to a page more than its blocks need.
        let slack = (growing + 1) * (self.setup.page as u64).saturating_sub(512);
        if self.setup.compacts && private + allocated + size as u64 + slack <= room {
            let held = format!("{allocated} allocated and {private} private of {room}");
            return Err(format!("no memory for {size} bytes with {held}"));
        }
        Ok(())
    }

    /// Checks all invariants.
    pub(super) fn check(&mut self) -> Result<(), String> {
        let violations = self.sim.violations();
        ensure!(violations.is_empty(), "{violations:?}");
        ensure!(self.sim.late_commits() == 0, "a launch had to commit memory");
        self.allocator.check();
        self.check_places()?;
        self.check_pools()?;
        self.note_events();
        let s = self.allocator.stats();
        self.stats = s;
        let [count, allocated, requested] = self.totals();
        let told = [s.allocation.current, s.allocated_bytes.current, s.requested_bytes.current];
        ensure!(told == [count, allocated, requested], "{:?} are live, statistics say {told:?}", self.totals());
        let peaks = [s.allocation.peak, s.allocated_bytes.peak, s.requested_bytes.peak];
        ensure!(peaks == self.peaks, "peaks were {:?}, statistics say {peaks:?}", self.peaks);
        let (active, reserved) = (s.active_bytes.current, s.reserved_bytes.current);
        let held = reserved + s.spilled_bytes.current;
        ensure!(requested <= allocated && allocated <= active && active <= held, "no order in {s}");
        ensure!(active + s.inactive_split_bytes.current <= held, "no room for the split blocks in {s}");
        let held = (self.sim.committed(), self.sim.live_segments() as u64);
        ensure!(held == (reserved, s.segment.current), "the device holds {held:?}, statistics say otherwise: {s}");
        let pending = self.allocator.lock().pending.blocks().count() as u64;
        ensure!(s.active.current == s.allocation.current + pending, "{pending} blocks are pending, but {s}");
        for (i, (name, stats)) in quantities(&s).into_iter().enumerate() {
            let [all, small, large] = stats;
            for (stat, base) in stats.iter().zip(&self.bases[3 * i..]) {
                ensure!(stat.peak >= stat.current, "{name}: the peak is below {stat:?}");
                ensure!(base + stat.allocated == stat.current + stat.freed, "{name}: from {base}, sums are {stat:?}");
            }
            ensure!(all.current == small.current + large.current, "{name}: pools do not add up: {stats:?}");
            ensure!(all.allocated == small.allocated + large.allocated, "{name}: sums do not add up: {stats:?}");
            ensure!(all.freed == small.freed + large.freed, "{name}: sums do not add up: {stats:?}");
        }
        self.check_snapshot()
    }

    /// Checks that the snapshot is consistent with its trace, and that its sums match the statistics and the live blocks.
    fn check_snapshot(&self) -> Result<(), String> {
        let snapshot = self.allocator.snapshot();
        snapshot.check().map_err(|error| error.to_string())?;
        let s = &self.stats;
        let sum = |f: fn(&SegmentInfo) -> u64| snapshot.segments.iter().map(f).sum::<u64>();
        let on_device = |g: &SegmentInfo| if g.segment_pool_id == (2, 0) { 0 } else { g.total_size };
        let sums = [sum(on_device), sum(SegmentInfo::allocated_size), sum(SegmentInfo::active_size)];
        let told = [s.reserved_bytes.current, s.allocated_bytes.current, s.active_bytes.current];
        ensure!(sums == told, "a snapshot's sums are {sums:?}, statistics say {told:?}");
        let blocks = || snapshot.segments.iter().flat_map(|g| &g.blocks);
        let shown: HashSet<_> = blocks()
            .filter(|b| b.state == BlockState::ActiveAllocated)
            .map(|b| (b.address, b.size, b.requested_size))
            .collect();
        let spare_blocks = self.spare_blocks.lock().unwrap();
        let live = self.live.iter().chain(&*spare_blocks).map(|live| {
            let place = live.block.location();
            (place.segment().address() + place.offset() as u64, live.block.size() as u64, live.requested as u64)
        });
        ensure!(shown == live.collect(), "a snapshot shows other blocks than are live");
        let pending = blocks().filter(|b| b.state == BlockState::ActivePendingFree).count() as u64;
        ensure!(s.active.current == s.allocation.current + pending, "a snapshot shows {pending} pending blocks: {s}");
        self.check_pools_of(&snapshot)
    }

    /// Checks that no two blocks overlap, and that each block is inside its segment.
    fn check_places(&self) -> Result<(), String> {
        let mut ends: BTreeMap<(u64, usize), usize> = BTreeMap::new();
        for live in self.live.iter().chain(&*self.spare_blocks.lock().unwrap()) {
            let place = live.block.location();
            let (segment, start, size) = (place.segment(), place.offset(), live.block.size());
            ensure!(start.is_multiple_of(512) && start + size <= segment.bytes(), "{:?} is outside", live.block);
            ensure!(ends.insert((segment.id(), start), start + size).is_none(), "two blocks at {:?}", live.block);
        }
        for ((at, end), (next, _)) in ends.iter().zip(ends.iter().skip(1)) {
            ensure!(at.0 != next.0 || *end <= next.1, "blocks at {at:?} to {end} and at {next:?} overlap");
        }
        Ok(())
    }

    fn note(&mut self, what: impl Into<String>) {
        *self.tally.entry(what.into()).or_default() += 1;
    }

    /// Counts how many checks found pending blocks, and the checks at which a later marker was reached before an earlier one.
    fn note_events(&mut self) {
        let heads = self.allocator.lock().pending.oldest_markers();
        if !heads.is_empty() {
            self.note("pending");
        }
        if !self.failures[3].is_empty() {
            return; // the query below would fail
        }
        let done = |marker| self.sim.is_done(marker).unwrap();
        if heads.iter().any(|a| !done(&a.1) && heads.iter().any(|b| b.2 > a.2 && done(&b.1))) {
            self.note("events out of order");
        }
    }

    /// Frees everything, and checks that nothing is left. Returns how often each event happened.
    pub(super) fn finish(mut self) -> Result<Tally, String> {
        self.sim.clear_failures();
        self.failures = Default::default();
        self.unmark_spare_blocks(|_| true);
        while !self.live.is_empty() {
            self.apply(Op::Free { block: 0 })?;
        }
        self.pools.clear();
        self.apply(Op::EmptyCache)?;
        self.apply(Op::Synchronize)?;
        self.check()?;
        let left = (self.sim.committed(), self.sim.live_segments(), currents(&self.stats));
        ensure!(left.0 == 0 && left.1 == 0 && left.2.iter().all(|&n| n == 0), "left over: {left:?}");
        let entries = self.allocator.lock().heap.blocks().count();
        ensure!(entries == 0, "{entries} blocks are left in the table");
        self.tally.extend(ladder::SERVED_BY_STEP.take().into_iter().map(|(rung, n)| (format!("step {rung}"), n)));
        Ok(self.tally)
    }
}

fn is_on_host(block: &Block) -> bool {
    matches!(block.segment().memory().0, MemoryKind::Spilled(_))
}

/// Checks a block's tag on the device or, if the block was spilled, on the host.
fn check_where_it_is(sim: &Sim, stream: StreamId, live: &Live) {
    let place = live.block.location();
    match &place.segment().memory().0 {
        MemoryKind::Spilled(copy) => {
            let mut bytes = vec![0; live.block.size()];
            copy.read(place.offset(), &mut bytes).unwrap();
            assert!(bytes.chunks(4).all(|bytes| bytes == live.tag.to_le_bytes()), "{} bytes changed", bytes.len());
        }
        _ => {
            let at = (place.segment().memory(), place.offset());
            sim.check_tag_at(stream, at, live.block.size(), live.tag).unwrap();
        }
    }
}

fn currents(s: &DeviceStats) -> Vec<u64> {
    quantities(s).into_iter().flat_map(|(_, stats)| stats.map(|stat| stat.current)).collect()
}
