//! Compaction: moves live blocks together, so that free memory becomes contiguous.
//!
//! A block may move while no thread holds its address, because handles are indirect. The block's slot is write-locked
//! from planning until the table is updated. Blocks are copied on the device, or through the host if the old and the
//! new segment do not fit side by side. A block that is exported, pinned or currently in use is not moved, and its
//! segment is kept. After a failure, every block keeps its contents and is in its old or new location, or on the host.
//!
//! With compaction, an allocation succeeds whenever the free memory suffices in total and the device can hold the block in one buffer.
//!
//! Within a segment, a block's destination may overlap its own source or another block's. Copies are therefore grouped into waves. Within a wave no
//! copy writes bytes that another copy reads, so a failed wave can be repeated. The next wave starts when the device has finished the previous one.
//!
//! A block that was moved through the host stays on the host if another thread took the memory that was freed for the block
//! ([`spill`](super::spill)).

use std::cmp::Reverse;
use std::sync::{Arc, RwLockWriteGuard};

use super::super::block::{Block, ReaderCount, Slot};
use super::super::driver::host_copy::{self, HostCopy};
use super::super::driver::{Failure, Memory};
use super::super::history::TraceAction;
use super::super::segment::Segment;
use super::entry::Use;
use super::events::AfterMove;
use super::heap::{Request, SegmentRecord};
use super::ladder::OomRecovery;
use super::policy::{MAX_COPIES_PER_BLOCK, MAX_TRIES, MAX_TRIES_BEFORE_LOSS, RETRY_AFTER, SizeKind};
use super::{CachingAllocator, Core};
use crate::device::{StreamId, lock, log};
use crate::{Device, Error, Result};

/// The way in which the blocks of segments are moved into a new segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyRoute {
    /// Copies on the device. The old and new segments exist at the same time.
    OnDevice,
    /// Copies page by page, and releases the pages of the old segments during the copy. Used only for host memory.
    Relocated,
    /// Copies through host memory. The old segments are released before the new segment is created.
    ThroughHost,
}

/// A block that is being moved.
pub(super) struct Move<'a> {
    pub(super) id: u32,
    /// The current location: the segment and the offset in bytes.
    pub(super) from: (Arc<Segment>, usize),
    /// The new offset in bytes.
    pub(super) to: usize,
    pub(super) size: usize,
    pub(super) slot: &'a Slot,
    /// The slot's lock, held until the table is updated.
    #[expect(dead_code, reason = "held")]
    pub(super) write_lock: RwLockWriteGuard<'a, ReaderCount>,
}

/// A plan to move the blocks of several segments into one.
pub(super) struct CompactionPlan<'a> {
    pub(super) segments: Vec<u32>,
    pub(super) moves: Vec<Move<'a>>,
    /// Table entries of the blocks that do not move, with their offsets and sizes in bytes.
    pub(super) staying: Vec<(u32, usize, usize)>,
    /// The stream that will own the free bytes.
    pub(super) stream: StreamId,
    /// Number of bytes of the new segment that are counted in `Core::bytes_being_created` in addition to the old segments.
    pub(super) bytes_being_created: u64,
}

impl CompactionPlan<'_> {
    /// Returns the total size, in bytes, of the blocks in `moves`, including blocks that keep their offset.
    pub(super) fn bytes(&self) -> usize {
        self.moves.iter().map(|m| m.size).sum()
    }

    /// Returns the total size, in bytes, of the blocks whose offset changes.
    pub(super) fn bytes_moved(&self) -> usize {
        self.moves.iter().filter(|m| m.from.1 != m.to).map(|m| m.size).sum()
    }

    /// Returns the end offset, in bytes, of the last block after the move.
    pub(super) fn end(&self) -> usize {
        let moves = self.moves.iter().map(|m| m.to + m.size);
        moves.chain(self.staying.iter().map(|&(_, offset, size)| offset + size)).max().unwrap_or(0)
    }

    /// Returns the size, in bytes, of the largest gap between the blocks after the move, in a segment of `bytes` bytes.
    fn largest_gap(&self, bytes: usize) -> usize {
        let mut blocks: Vec<(usize, usize)> = self.moves.iter().map(|m| (m.to, m.size)).collect();
        blocks.extend(self.staying.iter().map(|&(_, offset, size)| (offset, size)));
        blocks.sort_unstable();
        let (mut last, mut largest) = (bytes, 0);
        for (offset, size) in blocks.into_iter().rev() {
            largest = largest.max(last.saturating_sub(offset + size));
            last = offset;
        }
        largest.max(last)
    }
}

/// The bytes `at..at + bytes` of block `moves[index]` of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    index: usize,
    at: usize,
    bytes: usize,
}

/// One step of moving blocks down, towards the start of their segment.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Copies on the device that do not depend on each other.
    Wave(Vec<Piece>),
    /// A copy of one block, given by its index in `moves`, through the host.
    ThroughHost(usize),
}

/// Plans the steps that move blocks down within a segment. `moves` gives (source offset, destination offset, size) in ascending order of offsets.
fn steps(moves: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Step> {
    let (mut steps, mut wave, mut first_read) = (Vec::new(), Vec::new(), usize::MAX);
    let mut end_wave = |wave: &mut Vec<Piece>, then: Option<Step>| {
        let wave = std::mem::take(wave);
        steps.extend((!wave.is_empty()).then_some(Step::Wave(wave)).into_iter().chain(then));
    };
    for (index, (from, to, size)) in moves.enumerate() {
        match from - to {
            0 => {}
            down if size / down > MAX_COPIES_PER_BLOCK => end_wave(&mut wave, Some(Step::ThroughHost(index))),
            down => {
                for at in (0..size).step_by(down) {
                    let bytes = down.min(size - at);
                    if !wave.is_empty() && to + at + bytes > first_read {
                        end_wave(&mut wave, None);
                    }
                    if wave.is_empty() {
                        first_read = from + at;
                    }
                    wave.push(Piece { index, at, bytes });
                }
            }
        }
    }
    end_wave(&mut wave, None);
    steps
}

/// Adds the sentence that no block was lost to a driver error's message.
fn add_compaction_detail(error: Error) -> Error {
    add_detail(error, "compaction")
}

/// Adds to a driver error's message that no block was lost during this activity.
pub(super) fn add_detail(error: Error, activity: &str) -> Error {
    match error {
        Error::OpenCl { device, call, code, detail } => {
            let detail = format!("{detail}, during {activity}: no block was lost");
            Error::OpenCl { device, call, code, detail }
        }
        other => other,
    }
}

impl CachingAllocator {
    /// Takes the lock that excludes other compactions. Log messages are deferred until the lock is released, because a subscriber
    /// that allocates may need to compact.
    pub(super) fn lock_compaction(&self) -> impl Sized + use<'_> {
        let messages = log::defer();
        (lock(&self.compacting), messages) // dropped in this order: first the lock, then the messages
    }

    /// Frees a large enough range for a request by moving blocks: the last step of out-of-memory recovery.
    pub(super) fn compact_for(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let _compaction_lock = self.lock_compaction();
        self.compact_locked(request, recovery)
    }

    /// Like [`compact_for`](Self::compact_for), for a caller that holds the compaction lock.
    pub(super) fn compact_locked(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        let mut budget = match self.rules.config.compaction_budget {
            0 => u64::MAX,
            bytes => bytes as u64,
        };
        self.wait_for_streams(request)?;
        if let Some(block) = self.lock_with_stats().search_best_fit(self.number, request, true) {
            return Ok(Some(block)); // another thread has freed enough memory
        }
        // Blocks of private pools do not move, because a checkpoint may record their locations.
        if request.pool == 0 && self.slide_for_request(request, &mut budget)? {
            let mut core = self.lock_with_stats();
            if let Some(block) = core.search_best_fit(self.number, request, true) {
                return Ok(Some(block));
            }
        }
        loop {
            if let Some(block) = self.grow(request, true, recovery)? {
                return Ok(Some(block));
            }
            // Starts with the segment that has the most free bytes. Other threads may have freed enough memory meanwhile.
            let candidates = self.lock().compaction_candidates();
            let mut shrunk = false;
            for segment in candidates {
                if self.repack(segment, &mut budget)? {
                    shrunk = true;
                    break;
                }
            }
            if !shrunk {
                self.process_events(true)?; // frees blocks that became pending during the move
                return self.grow(request, true, recovery);
            }
        }
    }

    /// Moves all blocks of the default pool together, copying at most `budget` bytes. Returns the number of bytes released.
    pub(super) fn compact_all(&self, mut budget: u64) -> Result<u64> {
        let request = Request { bytes: 0, size: 0, kind: SizeKind::Large, pool: 0, stream: StreamId::DEFAULT };
        let _compaction_lock = self.lock_compaction();
        self.wait_for_streams(&request)?;
        let (before, unused) = {
            let mut core = self.lock();
            (core.heap.stats.reserved(), core.heap.remove_unused(0))
        };
        drop(unused);
        for kind in [SizeKind::Small, SizeKind::Large] {
            let all: Vec<(u64, bool)> = {
                let core = self.lock();
                let held = core.segments_by_free_bytes().into_iter().filter(|held| held.kind == kind);
                held.map(|held| (held.segment.id(), held.segment.is_reserved())).collect()
            };
            let fixed: Vec<u64> = all.iter().filter(|(_, grows)| !grows).map(|&(segment, _)| segment).collect();
            let together = fixed.len() > 1 && self.repack_on_device(&fixed, &mut budget, CopyRoute::OnDevice)?;
            for (segment, _) in all.into_iter().filter(|&(_, grows)| grows || !together) {
                self.repack(segment, &mut budget)?;
            }
        }
        self.free_spilled();
        let mut core = self.lock();
        core.growth.restart_warm_up();
        Ok(before.saturating_sub(core.heap.stats.reserved()))
    }

    /// Moves the blocks of one segment to its start, if that makes a large enough gap for the request.
    fn slide_for_request(&self, request: &Request, budget: &mut u64) -> Result<bool> {
        let _pages = self.lock_pages();
        let candidates = self.lock().compaction_candidates();
        for segment in candidates {
            let plan = {
                let mut core = self.lock();
                let Some(at) = core.heap.number_of(segment) else { continue };
                let fits = |held: &SegmentRecord| held.kind == request.kind && held.end.holes == 0;
                if !core.heap.segment(at).is_some_and(fits) || core.free_bytes(at) < request.size {
                    continue;
                }
                let Some(plan) = core.plan_compaction(&[segment], true, request.stream) else { continue };
                let hole = plan.largest_gap(core.segment_bytes(at));
                if hole < request.size || plan.bytes() as u64 > *budget {
                    core.cancel_plan(plan);
                    continue;
                }
                plan
            };
            *budget -= plan.bytes() as u64;
            self.slide_down(plan)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Moves the blocks of a plan within their segment. After a failure, each block is in its old or new location.
    pub(super) fn slide_down(&self, mut plan: CompactionPlan<'_>) -> Result<()> {
        let Some(target) = plan.moves.first().map(|first| Arc::clone(&first.from.0)) else {
            self.lock().cancel_plan(plan);
            return Ok(());
        };
        let (moved, stranded) = self.copy_down(&mut plan, &target);
        if moved.is_err() {
            // A copy may still be running. Copies run on the default stream, so work of the free bytes' next owner on that stream
            // runs after the copy.
            plan.stream = StreamId::DEFAULT;
        }
        let mut core = self.lock();
        self.keep_on_host(&mut core, stranded);
        let bytes = core.segment_bytes(plan.segments[0]);
        let gone = core.apply_moves(plan, &target, bytes);
        drop(core);
        drop(gone);
        moved
    }

    /// Moves a segment's blocks to its start if the segment is expandable, and into a new segment otherwise.
    fn repack(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let grows = {
            let core = self.lock();
            core.heap.number_of(segment).is_some_and(|at| core.heap.is_expandable(at))
        };
        if grows { self.pack_expandable(segment, budget) } else { self.repack_into_new_segment(&[segment], budget) }
    }

    /// Moves the blocks of an expandable segment to its start and releases the rest. Returns false if nothing was
    /// released. If the segment has holes, the blocks are instead moved to a new segment of exactly the needed size.
    pub(super) fn pack_expandable(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let Some(expandable) = &self.expandable else { return Ok(false) };
        let _page_lock = self.lock_pages();
        let plan = {
            let mut core = self.lock();
            let Some(at) = core.heap.number_of(segment) else { return Ok(false) };
            let Some(held) = core.heap.segment(at) else { return Ok(false) };
            if held.end.holes > 0 {
                drop(core);
                return self.repack_into_new_segment(&[segment], budget);
            }
            let (size, stream) = (held.size, held.stream);
            let Some(plan) = core.plan_compaction(&[segment], true, stream) else { return Ok(false) };
            let gain = size - plan.end().next_multiple_of(expandable.page).min(size);
            if gain == 0 || plan.bytes_moved() as u64 > *budget {
                core.cancel_plan(plan);
                return Ok(false);
            }
            plan
        };
        *budget -= plan.bytes_moved() as u64;
        self.slide_down(plan)?;
        let cut = {
            let mut core = self.lock();
            let Some(at) = core.heap.number_of(segment) else { return Ok(true) };
            let last = core.heap.last_block(at);
            core.heap.unmap(last, u64::MAX, 0, expandable.page)
        };
        Ok(self.decommit(cut.into_iter().collect()) > 0)
    }

    /// Moves the blocks of segments into a new segment of exactly their size: on the device if it has memory for both, and
    /// otherwise through the host.
    pub(super) fn repack_into_new_segment(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        if self.repack_on_device(segments, budget, CopyRoute::OnDevice)? {
            return Ok(true);
        }
        let is_host = {
            let core = self.lock();
            let held = segments.first().and_then(|&id| core.heap.segment(core.heap.number_of(id)?));
            held.is_some_and(|held| held.segment.memory().is_host())
        };
        // Storages on the CPU device cannot use spilled blocks, so blocks of host memory never go `ThroughHost`.
        match is_host {
            true => self.repack_on_device(segments, budget, CopyRoute::Relocated),
            false => self.repack_through_host(segments, budget),
        }
    }

    /// Plans a move into a new segment, if there is enough memory for the route and `budget` covers the bytes to copy.
    fn plan_repack(&self, segments: &[u64], budget: &mut u64, route: CopyRoute) -> Option<CompactionPlan<'_>> {
        let mut core = self.lock();
        let mut plan = core.plan_compaction(segments, false, StreamId::DEFAULT)?;
        let bytes = plan.bytes() as u64;
        let most = match route {
            CopyRoute::OnDevice => core.limits.limit(),
            // A system that cannot release single pages holds the old and the new copy in memory for a while.
            CopyRoute::Relocated if self.driver.page() == 0 => self.driver.capacity(),
            CopyRoute::Relocated | CopyRoute::ThroughHost => u64::MAX,
        };
        let room = most.saturating_sub(core.heap.stats.reserved() + core.bytes_being_created);
        let old: u64 = plan.segments.iter().map(|&s| core.heap.committed_bytes(s)).sum();
        if !plan.staying.is_empty() || bytes > *budget || bytes >= old || bytes > room {
            core.cancel_plan(plan);
            return None;
        }
        plan.bytes_being_created = match route {
            CopyRoute::OnDevice => bytes,
            CopyRoute::Relocated if self.driver.page() == 0 => bytes,
            // The new segment uses memory that the old segments release. The old segments stay counted until the blocks have arrived.
            CopyRoute::Relocated | CopyRoute::ThroughHost => 0,
        };
        core.bytes_being_created += plan.bytes_being_created;
        *budget -= bytes;
        Some(plan)
    }

    /// Moves the blocks of segments into a new segment, while the old segments still exist.
    fn repack_on_device(&self, segments: &[u64], budget: &mut u64, route: CopyRoute) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, route) else { return Ok(false) };
        let bytes = plan.bytes();
        let copied = self.create_memory(bytes).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            let copied = match route {
                CopyRoute::Relocated => {
                    let places =
                        plan.moves.iter().map(|m| ((m.from.0.memory(), m.from.1), (target.memory(), m.to), m.size));
                    // SAFETY: as in `copy_wave`. The old segments are released after the blocks have arrived.
                    unsafe { self.driver.relocate(&places.collect::<Vec<_>>()) }
                }
                _ => {
                    let whole = |(index, m): (usize, &Move<'_>)| Piece { index, at: 0, bytes: m.size };
                    let pieces: Vec<Piece> = plan.moves.iter().enumerate().map(whole).collect();
                    self.wait_for_all().and_then(|()| self.copy_wave(&plan.moves, &pieces, &target)).map(|()| true)
                }
            };
            match copied.map_err(Failure::Other)? {
                true => Ok(target),
                false => Err(Failure::TooBig),
            }
        });
        match copied {
            Ok(target) => {
                self.apply_repack(plan, &target);
                Ok(true)
            }
            Err(failure) => {
                self.cancel_repack(plan, budget);
                match failure {
                    Failure::Other(error) => Err(add_compaction_detail(error)),
                    _ => Ok(false),
                }
            }
        }
    }

    /// Like [`repack_on_device`](Self::repack_on_device), but releases the old segments before creating the new one. If
    /// the device then has no memory for some blocks, these stay on the host.
    fn repack_through_host(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        let Some(mut plan) = self.plan_repack(segments, budget, CopyRoute::ThroughHost) else { return Ok(false) };
        let bytes = plan.bytes();
        let read_to_host = |m: &Move<'_>| self.read_to_host(MAX_TRIES, m, 0, &m.from.0);
        let read = self.wait_for_all().and_then(|()| plan.moves.iter().map(read_to_host).collect::<Result<Vec<_>>>());
        let host = match read {
            Ok(host) => host,
            Err(error) => {
                self.cancel_repack(plan, budget);
                return match error {
                    Error::OutOfMemory { device: Device::Cpu, .. } => Ok(false),
                    other => Err(add_compaction_detail(other)),
                };
            }
        };
        // From this point until a new segment exists, the bytes are only on the host.
        let gone = self.lock().heap.take_old_segments(&plan.segments);
        let nowhere = Arc::new(Segment::new(Memory::released(), bytes));
        plan.moves.iter_mut().for_each(|m| m.from.0 = Arc::clone(&nowhere));
        drop(gone);
        let mut made = self.create_memory(bytes);
        for _ in 1..MAX_TRIES_BEFORE_LOSS {
            if !made.as_ref().is_err_and(|failure| failure.ran_out().is_some()) {
                break;
            }
            std::thread::sleep(RETRY_AFTER); // another thread took the memory, or the driver has not released it yet
            made = self.create_memory(bytes);
        }
        let written = made.map_err(|failure| failure.to_string()).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            let written = plan
                .moves
                .iter()
                .zip(&host)
                .try_for_each(|(m, host)| self.write_from_host(MAX_TRIES_BEFORE_LOSS, host, &target, m.to));
            written.map(|()| target).map_err(|error| error.to_string())
        });
        match written {
            Ok(target) => self.apply_repack(plan, &target),
            Err(why) => {
                let device = self.driver.device();
                log::emit(move || tracing::error!(%device, bytes, why, "moved blocks stay on the host"));
                let stranded = std::mem::take(&mut plan.moves).into_iter().zip(host.into_iter().map(HostCopy::Heap));
                let mut core = self.lock();
                self.keep_on_host(&mut core, stranded);
                core.bytes_being_created -= plan.bytes_being_created;
                let gone = core.apply_moves(plan, &nowhere, 0);
                drop(core);
                drop(gone);
                *budget = 0; // prevents further moves through the host
            }
        }
        Ok(true)
    }

    /// Updates the table after all blocks of a plan were copied to `target`.
    fn apply_repack(&self, plan: CompactionPlan<'_>, target: &Arc<Segment>) {
        let bytes = plan.bytes();
        let mut core = self.lock();
        core.bytes_being_created -= plan.bytes_being_created;
        let gone = core.apply_moves(plan, target, bytes);
        drop(core);
        drop(gone);
    }

    /// Cancels a plan whose blocks are in their old locations.
    fn cancel_repack(&self, plan: CompactionPlan<'_>, budget: &mut u64) {
        let bytes = plan.bytes() as u64;
        *budget = budget.saturating_add(bytes);
        let mut core = self.lock();
        core.bytes_being_created -= plan.bytes_being_created;
        core.cancel_plan(plan);
    }

    /// Creates memory for a segment that blocks move to.
    pub(super) fn create_memory(&self, bytes: usize) -> Result<Memory, Failure> {
        if bytes == 0 {
            return Ok(Memory::released()); // no block moves, so no memory is needed
        }
        self.driver.create(bytes)
    }

    // Copying blocks, so that no failure loses a block.

    /// Calls `f` until it succeeds, at most `tries` times, while its errors may be temporary.
    pub(super) fn retry<T>(&self, tries: u32, mut f: impl FnMut() -> Result<T>) -> Result<T> {
        let mut result = f();
        for _ in 1..tries {
            if !matches!(result, Err(Error::OpenCl { .. } | Error::OutOfMemory { .. })) {
                break;
            }
            std::thread::sleep(RETRY_AFTER);
            result = f();
        }
        result
    }

    /// Waits for the work of all streams, because threads could enqueue work on the blocks until they were locked.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        self.retry(MAX_TRIES, || self.driver.synchronize())
    }

    /// Copies the blocks of a plan down within their segment. After a failure, the destinations in the plan are changed to the
    /// blocks' actual locations. A block that is in neither its old nor its new location is removed from the plan and returned.
    pub(super) fn copy_down<'a>(
        &self,
        plan: &mut CompactionPlan<'a>,
        target: &Arc<Segment>,
    ) -> (Result<()>, Option<(Move<'a>, HostCopy)>) {
        let places = plan.moves.iter().map(|m| (m.from.1, m.to, m.size));
        let (steps, mut copied_bytes) = (steps(places), vec![0; plan.moves.len()]);
        let mut on_host = None;
        let copied = self.wait_for_all().and_then(|()| {
            steps.iter().try_for_each(|step| match step {
                Step::Wave(pieces) => {
                    self.copy_wave(&plan.moves, pieces, target)?;
                    pieces.iter().for_each(|piece| copied_bytes[piece.index] += piece.bytes);
                    Ok(())
                }
                Step::ThroughHost(index) => {
                    let m = &plan.moves[*index];
                    let bytes = self.read_to_host(MAX_TRIES, m, 0, target)?;
                    copied_bytes[*index] = m.size;
                    self.write_from_host(MAX_TRIES_BEFORE_LOSS, &bytes, target, m.to)
                        .inspect_err(|_| on_host = Some((*index, bytes)))
                }
            })
        });
        if copied.is_ok() {
            return (Ok(()), None);
        }
        // After a failed copy, one block may have been overwritten partly by its own copy.
        let is_torn =
            |(_, (m, copied_bytes)): &(usize, (&Move<'_>, &usize))| **copied_bytes > 0 && **copied_bytes < m.size;
        let torn = plan
            .moves
            .iter()
            .zip(&copied_bytes)
            .enumerate()
            .find(is_torn)
            .map(|(index, (_, copied_bytes))| (index, *copied_bytes));
        if let Some((index, done)) = torn {
            let m = &plan.moves[index];
            match self.read_to_host(MAX_TRIES_BEFORE_LOSS, m, done, target) {
                Ok(bytes) if self.write_from_host(MAX_TRIES_BEFORE_LOSS, &bytes, target, m.to).is_err() => {
                    on_host = Some((index, bytes))
                }
                Ok(_) => copied_bytes[index] = m.size,
                // Marks the device lost before the blocks are unlocked, so that no thread reads the torn block.
                Err(error) => self.driver.give_up(&format!("a block was half moved, and could not be read: {error}")),
            }
        }
        for (m, copied_bytes) in plan.moves.iter_mut().zip(copied_bytes) {
            m.to = if copied_bytes == m.size { m.to } else { m.from.1 };
        }
        let stranded = on_host.map(|(index, bytes)| (plan.moves.remove(index), HostCopy::Heap(bytes)));
        (copied.map_err(add_compaction_detail), stranded)
    }

    /// Copies pieces that do not overwrite each other's sources. Waits for the copies, because other streams may use the blocks next.
    fn copy_wave(&self, moves: &[Move<'_>], pieces: &[Piece], target: &Segment) -> Result<()> {
        let copy = |&Piece { index, at, bytes }: &Piece| {
            let m = &moves[index];
            let (from, to) = ((m.from.0.memory(), m.from.1 + at), (target.memory(), m.to + at));
            // SAFETY: the block is write-locked. The plan holds the destination: its bytes are free, or belong to
            // write-locked blocks that have moved on already.
            unsafe { self.driver.copy(StreamId::DEFAULT, from, to, bytes) }
        };
        self.retry(MAX_TRIES, || pieces.iter().try_for_each(copy).and_then(|()| self.driver.synchronize()))
    }

    /// Reads a block's bytes to the host. The first `done` bytes are already at the new location.
    pub(super) fn read_to_host(&self, tries: u32, m: &Move<'_>, done: usize, target: &Segment) -> Result<Box<[u8]>> {
        let bytes = if m.from.0.memory().has_contents() { m.size } else { 0 }; // without contents, the driver only counts the call
        let mut host = self.retry(tries, || host_copy::zeroed(bytes))?;
        let (new, old) = host.split_at_mut(done.min(bytes));
        self.retry(tries, || {
            // SAFETY: the block is write-locked until its bytes are in the new location.
            unsafe { self.driver.read((m.from.0.memory(), m.from.1 + done), old) }?;
            match done {
                0 => Ok(()),
                // SAFETY: as for the read above.
                _ => unsafe { self.driver.read((target.memory(), m.to), new) },
            }
        })?;
        Ok(host)
    }

    /// Writes host bytes to a location that no other block uses.
    pub(super) fn write_from_host(&self, tries: u32, bytes: &[u8], target: &Segment, at: usize) -> Result<()> {
        // SAFETY: the location is in a new segment or held by a plan, and its block is write-locked.
        self.retry(tries, || unsafe { self.driver.write(bytes, (target.memory(), at)) })
    }
}

impl Core {
    /// Returns the number of bytes of a segment that blocks cover.
    pub(super) fn segment_bytes(&self, segment: u32) -> usize {
        self.heap.segment(segment).map_or(0, |held| held.size)
    }

    pub(super) fn free_bytes(&self, segment: u32) -> usize {
        let entries = self.heap.blocks_of(segment).map(|id| self.heap.entry(id));
        entries.filter(|entry| entry.usage() == Use::Free).map(|entry| entry.size()).sum()
    }

    /// Returns the segments of the default pool that have free bytes, sorted by the number of free bytes, the most first.
    pub(super) fn segments_by_free_bytes(&self) -> Vec<&SegmentRecord> {
        let free =
            self.heap.segments().filter(|(_, held)| held.pool == 0).map(|(at, held)| (self.free_bytes(at), at, held));
        let mut segments: Vec<_> = free.filter(|(free, ..)| *free > 0).collect();
        segments.sort_unstable_by_key(|&(free, at, _)| (Reverse(free), at));
        segments.into_iter().map(|(.., held)| held).collect()
    }

    /// Returns the ids of [`segments_by_free_bytes`](Self::segments_by_free_bytes), for a caller that releases the lock.
    pub(super) fn compaction_candidates(&self) -> Vec<u64> {
        self.segments_by_free_bytes().into_iter().map(|held| held.segment.id()).collect()
    }

    /// Plans to move the blocks of these segments together, in order. Until the plan is applied or cancelled, no request can allocate in the
    /// segments, and their freed blocks stay live. Blocks that cannot move keep their location. With `around`, each other block moves down as
    /// far as these blocks allow; otherwise the destinations ignore them. Returns `None` if a segment is gone or has a pending block.
    pub(super) fn plan_compaction<'a>(
        &mut self,
        segments: &[u64],
        around: bool,
        stream: StreamId,
    ) -> Option<CompactionPlan<'a>> {
        let segments: Vec<u32> = segments.iter().map(|&id| self.heap.number_of(id)).collect::<Option<_>>()?;
        let is_pending = |id: u32| self.heap.entry(id).usage() == Use::Pending;
        if segments.iter().any(|&segment| self.heap.blocks_of(segment).any(is_pending)) {
            return None; // a pending block may become free during the move
        }
        let mut plan =
            CompactionPlan { segments, moves: Vec::new(), staying: Vec::new(), stream, bytes_being_created: 0 };
        let mut to = 0;
        for segment in plan.segments.clone() {
            let ids: Vec<u32> = self.heap.blocks_of(segment).collect();
            for id in ids {
                let entry = self.heap.entry(id);
                match entry.usage() {
                    Use::Free => {
                        self.heap.freeze_block(id);
                        continue;
                    }
                    Use::Unmapped => continue,
                    _ => {}
                }
                let (offset, size) = (entry.offset(), entry.size());
                self.moving.insert(id, AfterMove::Nothing);
                match self.lock_block(id).filter(|block| !block.slot.is_exported()) {
                    Some(block) => {
                        plan.moves.push(Move { to, ..block });
                        to += size;
                    }
                    None => {
                        plan.staying.push((id, offset, size));
                        to = if around { offset + size } else { to };
                    }
                }
            }
        }
        Some(plan)
    }

    /// Cancels a plan without moving anything.
    pub(super) fn cancel_plan(&mut self, plan: CompactionPlan<'_>) {
        let CompactionPlan { segments, moves, staying: stay, .. } = plan;
        for segment in segments {
            self.heap.frozen_blocks(segment).into_iter().for_each(|id| self.heap.unfreeze_block(id));
        }
        self.unlock_moved_blocks(moves, stay);
    }

    /// Updates the table after the moves: all blocks of the plan's segments are now in `target`. Returns the segments that are no
    /// longer used.
    pub(super) fn apply_moves(
        &mut self,
        plan: CompactionPlan<'_>,
        target: &Arc<Segment>,
        bytes: usize,
    ) -> Vec<Arc<Segment>> {
        let CompactionPlan { segments, moves, staying: stay, stream, .. } = plan;
        let mut layout: Vec<(u32, usize)> =
            moves.iter().map(|m| (m.id, m.to)).chain(stay.iter().map(|&(id, offset, _)| (id, offset))).collect();
        layout.sort_unstable_by_key(|&(_, offset)| offset);
        // The history records a move as a free and an allocation. A block that keeps its location or was in a thread cache gets
        // neither entry.
        let moves_away = |m: &&Move| {
            let cached = matches!(self.moving.get(&m.id), Some(AfterMove::Uncache));
            !cached && self.heap.address(m.id) != target.address() + m.to as u64
        };
        let moved: Vec<_> = moves.iter().filter(moves_away).map(|m| (m.id, m.slot.requested())).collect();
        moved.iter().for_each(|&(id, requested)| self.heap.record_free(id, requested));
        let gone = self.heap.rebuild_segment(&segments, &layout, target, bytes, stream);
        moved.iter().for_each(|&(id, requested)| _ = self.heap.record(TraceAction::Alloc, id, requested));
        for m in &moves {
            // SAFETY: the allocator keeps the segment as long as one of its blocks is live. The slot is write-locked, and the bytes
            // have been copied.
            unsafe { m.slot.set_location(target, m.to) };
        }
        self.unlock_moved_blocks(moves, stay);
        gone
    }

    /// Unlocks the blocks of a plan. Blocks that their owners freed during the move become free now.
    pub(super) fn unlock_moved_blocks<'a>(
        &mut self,
        moves: impl IntoIterator<Item = Move<'a>>,
        stay: impl IntoIterator<Item = (u32, usize, usize)>,
    ) {
        let moves: Vec<Move<'a>> = moves.into_iter().collect(); // the blocks are unlocked only after the table is updated for all of them
        for id in moves.iter().map(|m| m.id).chain(stay.into_iter().map(|(id, ..)| id)) {
            match self.moving.remove(&id) {
                Some(AfterMove::FreeBlock(requested)) => self.heap.free_block(id, requested),
                Some(AfterMove::FreeUsedBlock(requested, uses)) => self.free_used_block(id, requested, uses),
                Some(AfterMove::Uncache) => self.heap.uncache(id),
                Some(AfterMove::Nothing) | None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Executes the steps on an array, and each wave in reverse order, to test that the order within a wave does not matter.
    fn moved(moves: &[(usize, usize, usize)], bytes: usize) -> Vec<usize> {
        let mut memory: Vec<usize> = (0..bytes).collect();
        for step in steps(moves.iter().copied()) {
            let pieces = match step {
                Step::Wave(pieces) => pieces,
                Step::ThroughHost(index) => vec![Piece { index, at: 0, bytes: moves[index].2 }],
            };
            let places = |p: &Piece| (moves[p.index].0 + p.at, moves[p.index].1 + p.at);
            for read in &pieces {
                let (from, _) = places(read);
                for write in pieces.iter().filter(|_| pieces.len() > 1) {
                    let (_, to) = places(write);
                    assert!(to + write.bytes <= from || from + read.bytes <= to, "{write:?} overwrites {read:?}");
                }
            }
            for piece in pieces.iter().rev() {
                let (from, to) = places(piece);
                memory.copy_within(from..from + piece.bytes, to);
            }
        }
        memory
    }

    #[test]
    fn no_wave_writes_to_what_it_reads() {
        let mut state = 7u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..500 {
            let (mut moves, mut from, mut to) = (Vec::new(), 0, 0);
            for _ in 0..random(12) + 1 {
                let size = random(150) + 1;
                from += [0, 0, 1, random(40)][random(4)];
                moves.push((from, to, size));
                (from, to) = (from + size, to + size);
            }
            let memory = moved(&moves, from);
            for (from, to, size) in moves {
                assert!((from..from + size).eq(memory[to..to + size].iter().copied()));
            }
        }
    }
}
