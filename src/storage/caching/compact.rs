//! Compaction: live blocks move together, so that what is free comes in one piece.
//!
//! Handles are indirect, so a block may move while nobody holds its place: its slot is locked for writing from the choice
//! of the new place until the table says so. Moves are copies on the device; where there is no room for old and new side
//! by side, the bytes go through the host. A block that is exported or pinned, or in use at this moment, stays, and its
//! segment with it. A failure on the way leaves every block where it was or where it arrived ([`copies`](super::copies)),
//! or on the host ([`spill`](super::spill)), with its contents.
//!
//! With this an allocation succeeds whenever all that is free suffices and the device can hold it in one buffer.

use std::sync::{Arc, PoisonError};

use super::super::block::Block;
use super::super::driver::{Failure, Memory};
use super::super::segment::Segment;
use super::copies::{RETRIES, RETRY_AFTER, Stranded, TRIES, while_moving};
use super::ladder::Climb;
use super::moves::{Move, Plan, largest_gap};
use super::{CachingAllocator, Request};
use crate::device::{StreamId, log};
use crate::{Device, Error, Result};

/// How the blocks of segments get into a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// By copies on the device: old and new segments exist at the same time.
    Beside,
    /// By copies, while the old ones give their pages back as the new one fills: on the CPU device only.
    Relocated,
    /// With the old ones given back before the new one is made.
    ThroughHost,
}

impl CachingAllocator {
    /// Lets nobody else compact meanwhile. A subscriber that allocates may have to: messages wait.
    pub(super) fn compact_alone(&self) -> impl Sized + use<'_> {
        let messages = log::defer();
        (self.compacting.lock().unwrap_or_else(PoisonError::into_inner), messages) // dropped in this order
    }

    /// The last rung: makes room for the request by moving blocks.
    pub(super) fn compact_for(&self, request: &Request, climb: &mut Climb) -> Result<Option<Block>> {
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let mut budget = match self.rules.config.compaction_budget {
            0 => u64::MAX,
            bytes => bytes as u64,
        };
        let _alone = self.compact_alone();
        self.wait_for_streams(request)?;
        if let Some(block) = self.lock_with_stats().search_all(self.number, request, true) {
            return Ok(Some(block)); // somebody else has made room
        }
        // Blocks of private pools stay where they are: a checkpoint may name their places.
        if request.pool == 0 && self.slide(request, &mut budget)? {
            let mut core = self.lock_with_stats();
            if let Some(block) = core.search_all(self.number, request, true) {
                return Ok(Some(block));
            }
        }
        loop {
            if let Some(block) = self.grow(request, true, climb)? {
                return Ok(Some(block));
            }
            // The segment with the most to give; the request may have become possible by what others gave back.
            let candidates = self.lock().candidates();
            let mut shrunk = false;
            for segment in candidates {
                if self.repack(segment, &mut budget)? {
                    shrunk = true;
                    break;
                }
            }
            if !shrunk {
                self.process_events(true)?; // of blocks given back meanwhile
                return self.grow(request, true, climb);
            }
        }
    }

    /// Moves all blocks of the default pool together, copying at most `budget` bytes. Gives the bytes given back.
    pub(super) fn compact_all(&self, mut budget: u64) -> Result<u64> {
        let request = Request { bytes: 0, size: 0, kind: super::Kind::Large, pool: 0, stream: StreamId::DEFAULT };
        let _alone = self.compact_alone();
        self.wait_for_streams(&request)?;
        let (before, unused) = {
            let mut core = self.lock();
            (core.heap.stats.reserved(), core.heap.remove_unused(0))
        };
        drop(unused);
        for kind in [super::Kind::Small, super::Kind::Large] {
            let all: Vec<(u64, bool)> = {
                let core = self.lock();
                let held = core.most_free().into_iter().filter(|held| held.kind == kind);
                held.map(|held| (held.segment.id(), held.segment.is_reserved())).collect()
            };
            let fixed: Vec<u64> = all.iter().filter(|(_, grows)| !grows).map(|&(segment, _)| segment).collect();
            let together = fixed.len() > 1 && self.repack_beside(&fixed, &mut budget, Route::Beside)?;
            for (segment, _) in all.into_iter().filter(|&(_, grows)| grows || !together) {
                self.repack(segment, &mut budget)?;
            }
        }
        self.restore_all();
        let mut core = self.lock();
        core.growth.forget();
        Ok(before.saturating_sub(core.heap.stats.reserved()))
    }

    /// Moves the blocks of one segment to its start, if that makes a hole for the request.
    fn slide(&self, request: &Request, budget: &mut u64) -> Result<bool> {
        let _pages = self.hold_pages();
        let candidates = self.lock().candidates();
        for segment in candidates {
            let plan = {
                let mut core = self.lock();
                let Some(at) = core.heap.number_of(segment) else { continue };
                let fits = core.heap.segments[at as usize].as_ref().is_some_and(|held| held.kind == request.kind);
                if !fits || core.free_bytes(at) < request.size || core.heap.has_holes(at) {
                    continue;
                }
                let Some(plan) = core.plan(&[segment], true, request.stream) else { continue };
                let hole = largest_gap(&plan, core.segment_bytes(at));
                if hole < request.size || plan.bytes() as u64 > *budget {
                    core.abandon(plan);
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

    /// Moves the blocks of a plan within their segment. Where that fails, each is in its old or in its new place.
    pub(super) fn slide_down(&self, mut plan: Plan<'_>) -> Result<()> {
        let Some(target) = plan.moves.first().map(|first| Arc::clone(&first.from.0)) else {
            self.lock().abandon(plan);
            return Ok(());
        };
        let (moved, stranded) = self.copy_down(&mut plan, &target);
        if moved.is_err() {
            // A copy may still be under way: whoever gets what it writes to comes after it.
            plan.stream = StreamId::DEFAULT;
        }
        let mut core = self.lock();
        let kept = self.keep_on_host(&mut core, stranded);
        let bytes = core.segment_bytes(plan.segments[0]);
        let gone = core.settle_moves(plan, &target, bytes);
        core.count_kept(kept);
        drop(core);
        drop(gone);
        moved
    }

    /// Moves the blocks of a segment together: to its start if it grows, else as [`repack_apart`](Self::repack_apart).
    fn repack(&self, segment: u64, budget: &mut u64) -> Result<bool> {
        let grows = {
            let core = self.lock();
            core.heap.number_of(segment).is_some_and(|at| core.heap.grows(at))
        };
        if grows { self.pack(segment, budget) } else { self.repack_apart(&[segment], budget) }
    }

    /// Moves the blocks of segments into a new one of just their size, beside the old ones or else through the host.
    pub(super) fn repack_apart(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        if self.repack_beside(segments, budget, Route::Beside)? {
            return Ok(true);
        }
        if self.driver.relocates() {
            self.repack_beside(segments, budget, Route::Relocated)
        } else if self.driver.device().is_cpu() {
            Ok(false) // only storages of OpenCL devices find blocks that had to stay behind on the host
        } else {
            self.repack_through_host(segments, budget)
        }
    }

    fn plan_repack(&self, segments: &[u64], budget: &mut u64, route: Route) -> Option<Plan<'_>> {
        let mut core = self.lock();
        let mut plan = core.plan(segments, false, StreamId::DEFAULT)?;
        let bytes = plan.bytes() as u64;
        let most = match route {
            Route::Beside => core.limit(),
            // A system that cannot take pages back has both in memory for a while.
            Route::Relocated if self.driver.page() == 0 => self.driver.capacity(),
            Route::Relocated | Route::ThroughHost => u64::MAX,
        };
        let room = most.saturating_sub(core.heap.stats.reserved() + core.making);
        let old: u64 = plan.segments.iter().map(|&s| core.committed_bytes(s) as u64).sum();
        if !plan.stay.is_empty() || bytes > *budget || bytes >= old || bytes > room {
            core.abandon(plan);
            return None;
        }
        plan.making = match route {
            Route::Beside => bytes,
            Route::Relocated if self.driver.page() == 0 => bytes,
            // Made of what the old ones give back, which are counted until the blocks have arrived.
            Route::Relocated | Route::ThroughHost => 0,
        };
        core.making += plan.making;
        *budget -= bytes;
        Some(plan)
    }

    fn repack_beside(&self, segments: &[u64], budget: &mut u64, route: Route) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, route) else { return Ok(false) };
        let bytes = plan.bytes();
        let copied = self.make(bytes).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            let copied = match route {
                Route::Relocated => self.relocate(&plan, &target),
                _ => self.copy_beside(&plan, &target),
            };
            copied.map(|()| target).map_err(Failure::Other)
        });
        match copied {
            Ok(target) => {
                self.settle_repacked(plan, &target);
                Ok(true)
            }
            Err(failure) => {
                self.abandon_repack(plan, budget);
                match failure {
                    Failure::Other(error) => Err(while_moving(error)),
                    _ => Ok(false),
                }
            }
        }
    }

    /// As [`repack_beside`](Self::repack_beside), giving the old segments back in between. What the device then has no
    /// memory for is kept on the host.
    fn repack_through_host(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        let Some(mut plan) = self.plan_repack(segments, budget, Route::ThroughHost) else { return Ok(false) };
        let bytes = plan.bytes();
        let fetch = |m: &Move<'_>| self.fetch(TRIES, m, 0, &m.from.0);
        let read = self.wait_for_all().and_then(|()| plan.moves.iter().map(fetch).collect::<Result<Vec<_>>>());
        let host = match read {
            Ok(host) => host,
            Err(error) => {
                self.abandon_repack(plan, budget);
                return match error {
                    Error::OutOfMemory { device: Device::Cpu, .. } => Ok(false),
                    other => Err(while_moving(other)),
                };
            }
        };
        // From here on the bytes are on the host only, until there is a segment for them again.
        let gone = self.lock().let_go(&plan);
        let nowhere = Arc::new(Segment::new(Memory::gone(), bytes));
        plan.moves.iter_mut().for_each(|m| m.from.0 = Arc::clone(&nowhere));
        drop(gone);
        let mut made = self.make(bytes);
        for _ in 1..RETRIES {
            if !made.as_ref().is_err_and(|failure| failure.ran_out().is_some()) {
                break;
            }
            std::thread::sleep(RETRY_AFTER); // somebody else was faster: what is given back may take a moment
            made = self.make(bytes);
        }
        let written = made.map_err(|failure| failure.to_string()).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            let written = plan.moves.iter().zip(&host).try_for_each(|(m, host)| self.put(RETRIES, host, &target, m.to));
            written.map(|()| target).map_err(|error| error.to_string())
        });
        match written {
            Ok(target) => self.settle_repacked(plan, &target),
            Err(why) => {
                let device = self.driver.device();
                log::emit(move || tracing::error!(%device, bytes, why, "blocks that were moved stay on the host"));
                let stranded = std::mem::take(&mut plan.moves).into_iter().zip(host);
                let mut core = self.lock();
                let kept = self.keep_on_host(&mut core, stranded.map(|(block, bytes)| Stranded { block, bytes }));
                core.making -= plan.making;
                let gone = core.settle_moves(plan, &nowhere, 0);
                core.count_kept(kept);
                drop(core);
                drop(gone);
                self.restore_all(); // one by one there may be room
                *budget = 0; // no others follow them
            }
        }
        Ok(true)
    }

    /// The blocks of a plan have arrived.
    fn settle_repacked(&self, plan: Plan<'_>, target: &Arc<Segment>) {
        let bytes = plan.bytes();
        let mut core = self.lock();
        core.making -= plan.making;
        let gone = core.settle_moves(plan, target, bytes);
        drop(core);
        drop(gone);
    }

    /// The blocks of a plan are where they were.
    fn abandon_repack(&self, plan: Plan<'_>, budget: &mut u64) {
        let bytes = plan.bytes() as u64;
        *budget = budget.saturating_add(bytes);
        let mut core = self.lock();
        core.making -= plan.making;
        core.abandon(plan);
    }

    /// A segment of so many bytes, for blocks to move to.
    pub(super) fn make(&self, bytes: usize) -> Result<Memory, Failure> {
        if bytes == 0 {
            return Ok(Memory::gone()); // there is nothing to move
        }
        self.driver.create(bytes).and_then(|memory| self.driver.commit(memory))
    }
}
