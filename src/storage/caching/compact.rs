//! Compaction: live blocks move together, so that what is free comes in one piece.
//!
//! Handles are indirect, so a block may move while nobody holds its place: its slot is locked for writing from the choice
//! of the new place until the table says so. Moves are copies on the device; where there is no room for old and new side
//! by side, the bytes go through the host. A block that is exported or pinned, or in use at this moment, stays, and its
//! segment with it.
//!
//! With this an allocation succeeds whenever all that is free suffices and the device can hold it in one buffer.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::super::allocator::Block;
use super::super::driver::{Failure, Memory};
use super::super::segment::Segment;
use super::ladder::Climb;
use super::moves::{Move, Plan, largest_gap};
use super::{CachingAllocator, Request};
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// How often and how long to wait for memory that was given back a moment ago.
const RETRIES: u32 = 100;
const RETRY_AFTER: Duration = Duration::from_millis(10);
/// Copies for one block that moves by less than its size.
const PIECES: usize = 64;
impl CachingAllocator {
    /// The last rung: makes room for the request by moving blocks.
    pub(super) fn compact_for(&self, request: &Request, climb: &mut Climb) -> Result<Option<Block>> {
        if !self.rules.config.compaction {
            return Ok(None);
        }
        let mut budget = match self.rules.config.compaction_budget {
            0 => u64::MAX,
            bytes => bytes as u64,
        };
        let _alone = self.compacting.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait_for_streams(request)?;
        if let Some(block) = self.lock_folded().search_all(self.number, request, true) {
            return Ok(Some(block)); // somebody else has made room
        }
        // Blocks of private pools stay where they are: a checkpoint may name their places.
        if request.pool == 0 && self.slide(request, &mut budget)? {
            let mut core = self.lock_folded();
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
                self.settle_events(true)?; // of blocks given back meanwhile
                return self.grow(request, true, climb);
            }
        }
    }

    /// Moves all blocks of the default pool together, copying at most `budget` bytes. Gives the bytes given back.
    pub(super) fn compact_all(&self, mut budget: u64) -> Result<u64> {
        let request = Request { bytes: 0, size: 0, kind: super::Kind::Large, pool: 0, stream: StreamId::DEFAULT };
        let _alone = self.compacting.lock().unwrap_or_else(PoisonError::into_inner);
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
            let together = fixed.len() > 1 && self.repack_beside(&fixed, &mut budget)?;
            for (segment, _) in all.into_iter().filter(|&(_, grows)| grows || !together) {
                self.repack(segment, &mut budget)?;
            }
        }
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

    /// Moves the blocks of a plan within their segment.
    pub(super) fn slide_down(&self, plan: Plan<'_>) -> Result<()> {
        let Some(target) = plan.moves.first().map(|first| Arc::clone(&first.from.0)) else {
            self.lock().abandon(plan);
            return Ok(());
        };
        // Upwards from the start: nothing is overwritten before it has moved.
        if let Err(error) = self.copy_all(&plan, &target) {
            // Some bytes may have been overwritten by others already: nothing there can be relied on.
            // The device is lost before the blocks are unlocked: nobody reads them in between.
            self.driver.give_up(&format!("a move within a segment failed: {error}"));
            self.lock().abandon(plan);
            return Err(error);
        }
        let mut core = self.lock();
        let bytes = core.segment_bytes(plan.segments[0]);
        let gone = core.settle_moves(plan, &target, bytes);
        drop(core);
        drop(gone);
        Ok(())
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
        if self.repack_beside(segments, budget)? {
            return Ok(true);
        }
        // What the host's own memory has no room for beside, it has none for on the way either.
        if self.driver.device() == Device::Cpu {
            return Ok(false);
        }
        self.repack_through_host(segments, budget)
    }

    fn plan_repack(&self, segments: &[u64], budget: &mut u64, beside: bool) -> Option<Plan<'_>> {
        let mut core = self.lock();
        let plan = core.plan(segments, false, StreamId::DEFAULT)?;
        let bytes = plan.bytes() as u64;
        let room = core.limit().saturating_sub(core.heap.stats.reserved() + core.making);
        let largest = self.driver.largest_segment() as u64;
        let old: u64 = plan.segments.iter().map(|&s| core.committed_bytes(s) as u64).sum();
        if !plan.stay.is_empty() || bytes > *budget || bytes >= old || beside && (bytes > room || bytes > largest) {
            core.abandon(plan);
            return None;
        }
        core.making += bytes;
        *budget -= bytes;
        Some(plan)
    }

    fn repack_beside(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, true) else { return Ok(false) };
        let bytes = plan.bytes();
        let made = if bytes == 0 { Ok(Memory::gone()) } else { self.make(bytes) };
        let copied = made.map_err(Some).and_then(|memory| {
            let target = Arc::new(Segment::new(memory, bytes));
            self.copy_all(&plan, &target).map(|()| target).map_err(|e| Some(Failure::Other(e)))
        });
        let mut core = self.lock();
        core.making -= bytes as u64;
        match copied {
            Ok(target) => {
                let gone = core.settle_moves(plan, &target, bytes);
                drop(core);
                drop(gone);
                Ok(true)
            }
            Err(failure) => {
                *budget = budget.saturating_add(bytes as u64);
                core.abandon(plan);
                match failure {
                    Some(Failure::Other(error)) => Err(error),
                    _ => Ok(false),
                }
            }
        }
    }

    fn repack_through_host(&self, segments: &[u64], budget: &mut u64) -> Result<bool> {
        let Some(plan) = self.plan_repack(segments, budget, false) else { return Ok(false) };
        let bytes = plan.bytes();
        // What has no contents is only counted.
        let contents = self.driver.has_contents();
        let part = |m: &Move| if contents { m.to..m.to + m.size } else { 0..0 };
        let host_bytes = if contents { bytes } else { 0 };
        let mut host = Vec::new();
        if host.try_reserve_exact(host_bytes).is_err() {
            let mut core = self.lock();
            core.making -= bytes as u64;
            *budget = budget.saturating_add(bytes as u64);
            core.abandon(plan);
            return Ok(false);
        }
        host.resize(host_bytes, 0u8);
        let read = self.driver.synchronize().and_then(|()| {
            plan.moves.iter().try_for_each(|m| {
                let (from, to) = ((m.from.0.memory(), m.from.1), &mut host[part(m)]);
                // SAFETY: the block is locked for writing.
                unsafe { self.driver.read(from, to) }
            })
        });
        if let Err(error) = read {
            let mut core = self.lock();
            core.making -= bytes as u64;
            core.abandon(plan);
            return Err(error);
        }
        // From here on the bytes are on the host only, until there is a segment for them again.
        let gone = self.lock().let_go(&plan);
        let mut plan = plan;
        let nowhere = Arc::new(Segment::new(Memory::gone(), bytes));
        plan.moves.iter_mut().for_each(|m| m.from.0 = Arc::clone(&nowhere));
        drop(gone);
        let mut made = if bytes == 0 { Ok(Memory::gone()) } else { self.make(bytes) };
        for _ in 0..RETRIES {
            if made.is_ok() {
                break;
            }
            std::thread::sleep(RETRY_AFTER); // somebody else was faster: what is given back may take a moment
            made = self.make(bytes);
        }
        let written = made.ok().map(|memory| Arc::new(Segment::new(memory, bytes))).and_then(|target| {
            // SAFETY: the target is new, and nobody else's.
            let write = |m: &Move| unsafe { self.driver.write(&host[part(m)], (target.memory(), m.to)) };
            plan.moves.iter().try_for_each(write).ok().map(|()| target)
        });
        let mut core = self.lock();
        core.making -= bytes as u64;
        let Some(target) = written else {
            let blocks = plan.moves.len();
            drop(core);
            let cause = format!("{blocks} blocks were moved, and the memory for them was taken by another process");
            self.driver.give_up(&cause); // before the blocks are unlocked
            let gone = self.lock().settle_moves(plan, &nowhere, bytes);
            drop(gone);
            return Err(Error::DeviceLost { device: self.driver.device(), cause });
        };
        let gone = core.settle_moves(plan, &target, bytes);
        drop(core);
        drop(gone);
        Ok(true)
    }

    fn make(&self, bytes: usize) -> Result<Memory, Failure> {
        self.driver.create(bytes).and_then(|memory| self.driver.commit(memory))
    }

    fn copy_all(&self, plan: &Plan<'_>, target: &Arc<Segment>) -> Result<()> {
        self.driver.synchronize()?; // work may have been enqueued until the blocks were locked
        for m in &plan.moves {
            self.copy_one(m, target)?;
        }
        // Other streams may use the blocks next.
        self.driver.synchronize()
    }

    /// Copies a block to its new place. Drivers refuse copies that overlap: a block that moves down by less than its
    /// size goes in pieces, or over the host if those would be too many.
    fn copy_one(&self, m: &Move<'_>, target: &Arc<Segment>) -> Result<()> {
        let inside = Arc::ptr_eq(&m.from.0, target);
        let down = if inside { m.from.1 - m.to } else { m.size };
        if down == 0 {
            return Ok(());
        }
        let (from, to) = ((m.from.0.memory(), m.from.1), (target.memory(), m.to));
        if m.size / down > PIECES {
            let size = if self.driver.has_contents() { m.size } else { 0 };
            let mut host = Vec::new();
            host.try_reserve_exact(size).map_err(|_| Error::OutOfMemory {
                device: Device::Cpu,
                requested: m.size,
                detail: "the host has no room for a block that is being moved".into(),
            })?;
            host.resize(size, 0u8);
            // SAFETY: as below.
            unsafe { self.driver.read(from, &mut host) }?;
            // SAFETY: as below.
            return unsafe { self.driver.write(&host, to) };
        }
        (0..m.size).step_by(down).try_for_each(|at| {
            let bytes = down.min(m.size - at);
            // SAFETY: the block is locked for writing. Its new place is held by the plan: free, or of blocks that are
            // locked as well and have moved on.
            unsafe { self.driver.copy(StreamId::DEFAULT, (from.0, from.1 + at), (to.0, to.1 + at), bytes) }
        })
    }
}
