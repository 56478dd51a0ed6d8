//! What must be so, whatever happened: a shadow of the allocator that knows only what was asked of it.

use std::collections::{BTreeMap, HashSet};

use super::super::super::heap::Use;
use super::super::*;
use super::Setup;
use super::ops::Op;
use crate::storage::{BlockState, Driver, Failure, HistoryOptions, SegmentInfo, Stat};

/// Fails the run with a sentence unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// A block in use.
struct Live {
    block: Block,
    requested: usize,
    stream: u32,
    tag: u32,
    /// Streams that have waited for its own.
    users: Vec<u32>,
}

/// An allocator, its device, and what they should be like.
pub(super) struct World {
    setup: Setup,
    sim: Sim,
    allocator: CachingAllocator,
    live: Vec<Live>,
    next_tag: u32,
    /// The most to hold by the fraction, and with the limit.
    fraction: u64,
    limit: u64,
    others: u64,
    /// The greatest allocation count, allocated and requested bytes since the last reset, as the user sees them.
    peaks: [u64; 3],
    /// What was current when the sums were last set to zero.
    bases: Vec<u64>,
    /// As last looked at.
    stats: DeviceStats,
    checks: usize,
}

fn failure(code: i32) -> Failure {
    match code {
        -4 => Failure::DeviceMemory,
        -5 => Failure::Resources,
        _ => Failure::HostMemory,
    }
}

/// The nine quantities of each pool, and of both.
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
            page: setup.page,
            ..SimOptions::default()
        };
        let sim = Sim::new(options);
        let config: Config = setup.config.parse().unwrap();
        let fraction = (setup.capacity as f64 * config.per_process_memory_fraction) as u64;
        let limit = fraction.min(config.memory_limit as u64);
        let allocator = CachingAllocator::new(Arc::new(sim.clone()), config).unwrap();
        let stats = allocator.stats();
        if setup.history {
            // Few enough that the ring is written over many times.
            let options = HistoryOptions { max_entries: 500, ..HistoryOptions::default() };
            allocator.record_memory_history(options).unwrap();
        }
        World {
            setup,
            sim,
            allocator,
            live: Vec::new(),
            next_tag: 1,
            fraction,
            limit,
            others: 0,
            peaks: [0; 3],
            bases: vec![0; 27],
            stats,
            checks: 0,
        }
    }

    /// Lets an operation happen.
    pub(super) fn apply(&mut self, op: Op) -> Result<(), String> {
        let say = |error: Error| format!("{op:?} reported: {error}");
        match op {
            Op::Allocate { bytes, stream } => self.allocate(bytes, stream)?,
            Op::Free { block } => {
                if !self.live.is_empty() {
                    let live = self.live.swap_remove(block % self.live.len());
                    self.sim.check_tag(self.sim.stream(live.stream), &live.block, live.tag).map_err(say)?;
                    self.allocator.deallocate(live.block);
                }
            }
            Op::Share { block, stream } => self.share(block, stream).map_err(say)?,
            Op::Check { block } => {
                if let Some(live) = self.live.get(block % self.live.len().max(1)) {
                    self.sim.check_tag(self.sim.stream(live.stream), &live.block, live.tag).map_err(say)?;
                }
            }
            Op::Run { seed } => _ = self.sim.run_some(seed),
            Op::Synchronize => self.sim.synchronize().map_err(say)?,
            Op::EmptyCache => {
                self.allocator.empty_cache().map_err(say)?;
                ensure!(self.unused_segments() == 0, "an emptied cache holds unused segments");
            }
            Op::Trim { keep } => {
                let before = self.sim.committed();
                let freed = self.allocator.trim(keep).map_err(say)?;
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
                self.others = bytes.min(self.setup.capacity - self.sim.committed()); // what is taken stays ours
                self.sim.set_others(self.others);
            }
            Op::FailCreate { code } => self.sim.fail_next_create(failure(code)),
            Op::FailCommit { code } => self.sim.fail_next_commit(failure(code)),
            Op::FailEnqueue { code } => self.sim.fail_next_enqueue(failure(code)),
            Op::ResetPeaks => {
                self.allocator.reset_peak_stats();
                self.peaks = [0; 3];
            }
            Op::ResetSums => {
                self.allocator.reset_accumulated_stats();
                self.bases = currents(&self.allocator.stats());
            }
        }
        let now = self.totals();
        self.peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
        Ok(())
    }

    fn allocate(&mut self, bytes: usize, stream: u32) -> Result<(), String> {
        let (failures, held) = (self.sim.failures_left(), self.sim.committed());
        let id = self.sim.stream(stream);
        match self.allocator.allocate(bytes, id) {
            Ok(block) => {
                ensure!(block.requested() == bytes && block.size() >= bytes, "{block:?} is not for {bytes} bytes");
                ensure!(self.sim.committed() <= held.max(self.limit), "more is held than the limit {}", self.limit);
                let tag = self.next_tag;
                self.next_tag += 1;
                let written = self.sim.write_tag(id, &block, tag);
                self.live.push(Live { block, requested: bytes, stream, tag, users: Vec::new() });
                written.map_err(|error| format!("the first use of a block reported: {error}"))
            }
            Err(Error::OutOfMemory { requested, .. }) => {
                ensure!(requested == bytes, "an error says {requested} for {bytes} bytes");
                // After a failure that was made up, the next call may well succeed.
                if failures == self.sim.failures_left() { self.check_out_of_memory(bytes, id) } else { Ok(()) }
            }
            Err(other) => Err(format!("allocating {bytes} bytes reported: {other}")),
        }
    }

    fn share(&mut self, block: usize, stream: u32) -> Result<()> {
        let n = self.live.len();
        let Some(live) = self.live.get_mut(block % n.max(1)).filter(|live| live.stream != stream) else {
            return Ok(());
        };
        let (own, other) = (self.sim.stream(live.stream), self.sim.stream(stream));
        if !live.users.contains(&stream) {
            // Once is enough: should the block move, that is for the allocator to order.
            self.sim.stream_waits(other, &self.sim.record(own)?)?;
            live.users.push(stream);
        }
        self.allocator.record_stream(&live.block, other);
        self.sim.check_tag(other, &live.block, live.tag)
    }

    fn compact(&mut self, budget: u64) -> Result<(), String> {
        let (before, copied) = (self.sim.committed(), self.sim.bytes_copied());
        let freed = self.allocator.compact(budget).map_err(|error| format!("compact reported: {error}"))?;
        let after = self.sim.committed();
        ensure!(before == after + freed, "compact says {freed} bytes, but {before} became {after}");
        let copied = self.sim.bytes_copied() - copied;
        ensure!(copied <= budget, "compact copied {copied} bytes on a budget of {budget}");
        Ok(())
    }

    /// Allocation count, allocated bytes and requested bytes.
    fn totals(&self) -> [u64; 3] {
        let sum = |f: fn(&Live) -> usize| self.live.iter().map(f).sum::<usize>() as u64;
        [self.live.len() as u64, sum(|l| l.block.size()), sum(|l| l.requested)]
    }

    fn unused_segments(&self) -> usize {
        let core = self.allocator.lock();
        core.heap.table.iter().filter(|e| e.usage == Use::Free && e.is_whole()).count()
    }

    /// An allocation failed though nothing was made to fail: then nothing would have served it.
    fn check_out_of_memory(&self, bytes: usize, stream: StreamId) -> Result<(), String> {
        let rules = &self.allocator.rules;
        let size = rules.round_size(bytes).unwrap_or(usize::MAX);
        {
            let core = self.allocator.lock();
            let heap = &core.heap;
            let fits = |entry: &&heap::Entry| {
                matches!(entry.usage, Use::Free | Use::Pending) && entry.size >= size && {
                    let arena = &heap.arenas[entry.arena as usize];
                    arena.pool == 0 && rules.may_serve(arena.kind, entry.size, size)
                }
            };
            let fitting = heap.table.iter().find(fits);
            ensure!(fitting.is_none(), "no memory for {size} bytes, and there is {:?}", fitting);
        }
        ensure!(self.unused_segments() == 0, "no memory for {size} bytes, and there are unused segments");
        let again = self.allocator.allocate(bytes, stream);
        ensure!(again.is_err(), "no memory for {size} bytes, but the second call found {again:?}");
        let room = self.limit.min(self.setup.capacity - self.others);
        let allocated = self.totals()[1];
        // Segments that grow hold whole pages: of three streams, small and large.
        let slack = if rules.config.expandable_segments { 6 * (self.setup.page as u64 - 512) } else { 0 };
        if self.setup.compacts && allocated + size as u64 + slack <= room {
            return Err(format!("no memory for {size} bytes with {allocated} allocated of {room}"));
        }
        Ok(())
    }

    /// Everything that must be so between two operations.
    pub(super) fn check(&mut self) -> Result<(), String> {
        let violations = self.sim.violations();
        ensure!(violations.is_empty(), "{violations:?}");
        ensure!(self.sim.late_commits() == 0, "a launch had to commit memory");
        self.allocator.check();
        self.check_places()?;
        let s = self.allocator.stats();
        self.stats = s;
        let [count, allocated, requested] = self.totals();
        let told = [s.allocation.current, s.allocated_bytes.current, s.requested_bytes.current];
        ensure!(told == [count, allocated, requested], "{:?} are live, statistics say {told:?}", self.totals());
        let peaks = [s.allocation.peak, s.allocated_bytes.peak, s.requested_bytes.peak];
        ensure!(peaks == self.peaks, "peaks were {:?}, statistics say {peaks:?}", self.peaks);
        let (active, reserved) = (s.active_bytes.current, s.reserved_bytes.current);
        ensure!(requested <= allocated && allocated <= active && active <= reserved, "no order in {s}");
        ensure!(active + s.inactive_split_bytes.current <= reserved, "no room for the split blocks in {s}");
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
        self.checks += 1;
        if self.setup.history || self.checks.is_multiple_of(100) { self.check_snapshot() } else { Ok(()) }
    }

    /// The snapshot is consistent with its trace, and its sums are those of the statistics and of what is live.
    fn check_snapshot(&self) -> Result<(), String> {
        let snapshot = self.allocator.snapshot();
        snapshot.check().map_err(|error| error.to_string())?;
        let s = &self.stats;
        let sum = |f: fn(&SegmentInfo) -> u64| snapshot.segments.iter().map(f).sum::<u64>();
        let sums = [sum(|g| g.total_size), sum(SegmentInfo::allocated_size), sum(SegmentInfo::active_size)];
        let told = [s.reserved_bytes.current, s.allocated_bytes.current, s.active_bytes.current];
        ensure!(sums == told, "a snapshot's sums are {sums:?}, statistics say {told:?}");
        let blocks = || snapshot.segments.iter().flat_map(|g| &g.blocks);
        let shown: HashSet<_> = blocks()
            .filter(|b| b.state == BlockState::ActiveAllocated)
            .map(|b| (b.address, b.size, b.requested_size))
            .collect();
        let live = self.live.iter().map(|live| {
            let place = live.block.place();
            (place.segment().address() + place.offset() as u64, live.block.size() as u64, live.requested as u64)
        });
        ensure!(shown == live.collect(), "a snapshot shows other blocks than are live");
        let pending = blocks().filter(|b| b.state == BlockState::ActivePendingFree).count() as u64;
        ensure!(s.active.current == s.allocation.current + pending, "a snapshot shows {pending} pending blocks: {s}");
        Ok(())
    }

    /// No two blocks share a byte, and each is inside its segment.
    fn check_places(&self) -> Result<(), String> {
        let mut ends: BTreeMap<(u64, usize), usize> = BTreeMap::new();
        for live in &self.live {
            let place = live.block.place();
            let (segment, start, size) = (place.segment(), place.offset(), live.block.size());
            ensure!(start.is_multiple_of(512) && start + size <= segment.bytes(), "{:?} is outside", live.block);
            ensure!(ends.insert((segment.id(), start), start + size).is_none(), "two blocks at {:?}", live.block);
        }
        for ((at, end), (next, _)) in ends.iter().zip(ends.iter().skip(1)) {
            ensure!(at.0 != next.0 || *end <= next.1, "blocks at {at:?} to {end} and at {next:?} overlap");
        }
        Ok(())
    }

    /// Gives everything back: nothing is left.
    pub(super) fn finish(mut self) -> Result<(), String> {
        self.sim.clear_failures();
        while !self.live.is_empty() {
            self.apply(Op::Free { block: 0 })?;
        }
        self.apply(Op::EmptyCache)?;
        self.apply(Op::Synchronize)?;
        self.check()?;
        let left = (self.sim.committed(), self.sim.live_segments(), currents(&self.stats));
        ensure!(left.0 == 0 && left.1 == 0 && left.2.iter().all(|&n| n == 0), "left over: {left:?}");
        let entries = self.allocator.lock().heap.table.iter().filter(|e| e.usage != Use::Vacant).count();
        ensure!(entries == 0, "{entries} blocks are left in the table");
        Ok(())
    }
}

fn currents(s: &DeviceStats) -> Vec<u64> {
    quantities(s).into_iter().flat_map(|(_, stats)| stats.map(|stat| stat.current)).collect()
}

/// The blocks in all bins, with their arena and whether they are among the whole segments.
pub(in super::super) fn binned(heap: &heap::Heap) -> HashSet<(u32, bool, u32)> {
    let mut all = HashSet::new();
    for (arena, bins) in heap.arenas.iter().enumerate() {
        for (whole, bins) in [(false, &bins.partial), (true, &bins.whole)] {
            for id in bins.blocks(&heap.table) {
                assert!(all.insert((arena as u32, whole, id)), "block {id} is in bins twice");
            }
        }
    }
    all
}
