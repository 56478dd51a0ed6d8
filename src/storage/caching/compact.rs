//! Compaction: moves live blocks together, so that free memory becomes contiguous.
//!
//! A block may move while no thread holds its address, because handles are indirect. Its slot is write-locked from the plan until the table is
//! updated. Blocks are copied on the device, or through the host if the old and the new segment do not fit side by side. A block that is exported,
//! pinned or currently in use stays, and its segment with it. After a failure, every block keeps its contents and is in its old or new location
//! ([`copies`](super::copies)), or on the host ([`spill`](super::spill)).
//!
//! With compaction, an allocation succeeds whenever the free memory suffices in total and the device can hold the block in one buffer.

use std::sync::Arc;

use super::super::block::Block;
use super::super::driver::{Failure, Memory};
use super::super::segment::Segment;
use super::copies::{MAX_TRIES, MAX_TRIES_BEFORE_LOSS, RETRY_AFTER, Stranded, add_compaction_detail};
use super::ladder::OomRecovery;
use super::moves::{CompactionPlan, Move, largest_gap};
use super::{CachingAllocator, Request};
use crate::device::{StreamId, log};
use crate::sync;
use crate::{Device, Error, Result};

/// How the blocks of segments are moved into a new segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyRoute {
    /// Copies on the device. The old and new segments exist at the same time.
    OnDevice,
    /// Copies while the old segments release their pages as the new one fills. CPU device only.
    Relocated,
    /// The old segments are released before the new one is created.
    ThroughHost,
}

impl CachingAllocator {
    /// Locks out other compactions. Log messages are deferred, because a subscriber that allocates may need to compact.
    pub(super) fn lock_compaction(&self) -> impl Sized + use<'_> {
        let messages = log::defer();
        (sync::lock(&self.compacting), messages) // dropped in this order
    }

    /// Makes room for a request by moving blocks: the last step of out-of-memory recovery.
    pub(super) fn compact_for(&self, request: &Request, recovery: &mut OomRecovery) -> Result<Option<Block>> {
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let mut budget = match self.rules.config.compaction_budget {
            0 => u64::MAX,
            bytes => bytes as u64,
        };
        let _compaction_lock = self.lock_compaction();
        self.wait_for_streams(request)?;
        if let Some(block) = self.lock_with_stats().search_best_fit(self.number, request, true) {
            return Ok(Some(block)); // another thread has made room
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
                self.process_events(true)?; // for blocks freed meanwhile
                return self.grow(request, true, recovery);
            }
        }
    }

    /// Moves all blocks of the default pool together, copying at most `budget` bytes. Returns the bytes released.
    pub(super) fn compact_all(&self, mut budget: u64) -> Result<u64> {
        let request = Request { bytes: 0, size: 0, kind: super::SizeKind::Large, pool: 0, stream: StreamId::DEFAULT };
        let _compaction_lock = self.lock_compaction();
        self.wait_for_streams(&request)?;
        let (before, unused) = {
            let mut core = self.lock();
            (core.heap.stats.reserved(), core.heap.remove_unused(0))
        };
        drop(unused);
        for kind in [super::SizeKind::Small, super::SizeKind::Large] {
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
        self.restore_all();
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
                let fits = core.heap.segments[at as usize].as_ref().is_some_and(|held| held.kind == request.kind);
                if !fits || core.free_bytes(at) < request.size || core.heap.has_holes(at) {
                    continue;
                }
                let Some(plan) = core.plan_compaction(&[segment], true, request.stream) else { continue };
                let hole = largest_gap(&plan, core.segment_bytes(at));
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
            // A copy may still be running. On the default stream, the next owner's work runs after that copy.
            plan.stream = StreamId::DEFAULT;
        }
        let mut core = self.lock();
        let kept = self.keep_on_host(&mut core, stranded);
        let bytes = core.segment_bytes(plan.segments[0]);
        let gone = core.apply_moves(plan, &target, bytes);
        core.count_spilled(kept);
        drop(core);
        drop(gone);
        moved
    }

    /// Moves a segment's blocks to its start if the segment is expandable, and otherwise into a new segment.
    fn repack(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let grows = {
            let core = self.lock();
            core.heap.number_of(segment).is_some_and(|at| core.heap.is_expandable(at))
        };
        if grows { self.pack_expandable(segment, budget) } else { self.repack_into_new_segment(&[segment], budget) }
    }

    /// Moves the blocks of segments into a new segment of exactly their size: on the device if both fit, else through the host.
    pub(super) fn repack_into_new_segment(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        if self.repack_on_device(segments, budget, CopyRoute::OnDevice)? {
            return Ok(true);
        }
        if self.driver.relocates() {
            self.repack_on_device(segments, budget, CopyRoute::Relocated)
        } else if self.driver.device().is_cpu() {
            Ok(false) // only storages of OpenCL devices handle blocks left on the host
        } else {
            self.repack_through_host(segments, budget)
        }
    }

    /// Plans a move into a new segment, if the route has room and the budget suffices.
    fn plan_repack(&self, segments: &[u64], budget: &mut u64, route: CopyRoute) -> Option<CompactionPlan<'_>> {
        let mut core = self.lock();
        let mut plan = core.plan_compaction(segments, false, StreamId::DEFAULT)?;
        let bytes = plan.bytes() as u64;
        let most = match route {
            CopyRoute::OnDevice => core.limit(),
            // A system that cannot release single pages has both copies in memory for a while.
            CopyRoute::Relocated if self.driver.page() == 0 => self.driver.capacity(),
            CopyRoute::Relocated | CopyRoute::ThroughHost => u64::MAX,
        };
        let room = most.saturating_sub(core.heap.stats.reserved() + core.bytes_being_created);
        let old: u64 = plan.segments.iter().map(|&s| core.committed_bytes(s) as u64).sum();
        if !plan.staying.is_empty() || bytes > *budget || bytes >= old || bytes > room {
            core.cancel_plan(plan);
            return None;
        }
        plan.bytes_being_created = match route {
            CopyRoute::OnDevice => bytes,
            CopyRoute::Relocated if self.driver.page() == 0 => bytes,
            // Uses memory that the old segments release. The old segments stay counted until the blocks have arrived.
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
                CopyRoute::Relocated => self.relocate(&plan, &target),
                _ => self.copy_to_new_segment(&plan, &target),
            };
            copied.map(|()| target).map_err(Failure::Other)
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

    /// Like [`repack_on_device`](Self::repack_on_device), but releases the old segments before creating the new one. Blocks
    /// for which the device then has no memory stay on the host.
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
        // From here until a new segment exists, the bytes are only on the host.
        let gone = self.lock().take_old_segments(&plan);
        let nowhere = Arc::new(Segment::new(Memory::released(), bytes));
        plan.moves.iter_mut().for_each(|m| m.from.0 = Arc::clone(&nowhere));
        drop(gone);
        let mut made = self.create_memory(bytes);
        for _ in 1..MAX_TRIES_BEFORE_LOSS {
            if !made.as_ref().is_err_and(|failure| failure.ran_out().is_some()) {
                break;
            }
            std::thread::sleep(RETRY_AFTER); // another thread took the memory; a release may take a moment
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
                let stranded = std::mem::take(&mut plan.moves).into_iter().zip(host);
                let mut core = self.lock();
                let kept = self.keep_on_host(&mut core, stranded.map(|(block, bytes)| Stranded { block, bytes }));
                core.bytes_being_created -= plan.bytes_being_created;
                let gone = core.apply_moves(plan, &nowhere, 0);
                core.count_spilled(kept);
                drop(core);
                drop(gone);
                self.restore_all(); // single blocks may still fit
                *budget = 0; // no other segments are moved this way
            }
        }
        Ok(true)
    }

    /// Records that the blocks of a plan are in `target`.
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
            return Ok(Memory::released()); // there is nothing to move
        }
        self.driver.create(bytes).and_then(|memory| self.driver.commit(memory))
    }
}
