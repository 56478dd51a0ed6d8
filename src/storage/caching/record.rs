//! Events and snapshots for the caching allocator's memory history.

use std::ops::Range;

use super::super::history::{
    BlockInfo, BlockState, Context, HistoryOptions, Recording, SegmentInfo, SegmentType, SegmentWithContexts, Snapshot,
    TraceAction, device_number,
};
use super::heap::{Heap, SegmentRecord, Use};
use super::moves::AfterMove;
use super::{CachingAllocator, Core, Request, SizeKind};
use crate::Result;

impl Heap {
    /// Returns the address that snapshots show for a block.
    pub(super) fn address(&self, id: u32) -> u64 {
        self.segment_of(id).address + self.table[id as usize].offset() as u64
    }

    /// Records an event of a block that was allocated for `requested` bytes.
    #[inline]
    pub(super) fn record(&self, action: TraceAction, id: u32, requested: usize) -> Context {
        if !self.history.is_on() {
            return Context::NONE;
        }
        self.history.record(action, self.address(id), requested as u64, self.stream_of(id))
    }

    fn stream_of(&self, id: u32) -> u32 {
        self.arenas[self.table[id as usize].arena() as usize].stream.0
    }

    /// Records that a block is free and no stream uses it any more.
    #[inline(always)]
    pub(super) fn record_free(&self, id: u32, requested: usize) {
        if self.history.is_on() {
            self.history.record_free(self.address(id), requested as u64, self.stream_of(id));
        }
    }

    /// Records that a block is allocated, with its call stack.
    #[inline]
    pub(super) fn record_alloc(&mut self, id: u32, requested: usize) {
        if self.history.is_on() {
            let context = self.record(TraceAction::Alloc, id, requested);
            self.contexts.insert(id, context);
        }
    }

    pub(super) fn record_oom(&self, request: &Request, capacity: u64) {
        let free = capacity.saturating_sub(self.stats.reserved()).min(i64::MAX as u64); // the trace format stores an `i64`
        self.history.record(TraceAction::Oom, free, request.bytes as u64, request.stream.0);
    }
}

impl CachingAllocator {
    /// Runs `f` under the lock with all thread caches drained into the table and the statistics. The caches stay
    /// empty until the lock is released, and off while history is recorded, because they would bypass the recording.
    fn with_exact_state<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let mut core = self.lock();
        self.caches.set_capacity(0);
        core.free_drained_blocks(self.caches.drain());
        let result = f(&mut core);
        self.caches.set_capacity(if core.heap.history.is_on() { 0 } else { self.rules.config.thread_cache });
        result
    }

    pub(super) fn record_history(&self, options: HistoryOptions) -> Result<()> {
        // As in PyTorch, turning recording off also clears the trace, which would otherwise miss later events.
        let ends = options.enabled == Recording::Off;
        let options = HistoryOptions { clear_history: options.clear_history || ends, ..options };
        self.with_exact_state(|core| {
            core.heap.history.record_memory_history(options)?;
            if !core.heap.history.is_on() {
                core.heap.contexts.clear();
            }
            Ok(())
        })
    }

    pub(super) fn take_snapshot(&self) -> Snapshot {
        let device = device_number(self.driver.device());
        let (segments, history) = self.with_exact_state(|core| {
            core.heap.history.record(TraceAction::Snapshot, 0, core.heap.stats.active_bytes(), 0);
            (core.segments(device), core.heap.history.copy())
        });
        Snapshot::of_device(device, segments, history, &self.rules.config)
    }
}

impl Core {
    fn segments(&self, device: u32) -> Vec<SegmentWithContexts> {
        let held = (0..).zip(&self.heap.segments).filter_map(|(at, held)| Some((at, held.as_ref()?)));
        held.flat_map(|(at, held)| self.mapped_parts(at, held, device)).collect()
    }

    /// Describes a segment. As in PyTorch, an expandable segment is shown as the parts between its holes.
    fn mapped_parts(&self, at: u32, held: &SegmentRecord, device: u32) -> Vec<SegmentWithContexts> {
        self.heap.mapped(at).into_iter().map(|part| self.segment(at, held, part, device)).collect()
    }

    fn segment(&self, at: u32, held: &SegmentRecord, part: Range<usize>, device: u32) -> SegmentWithContexts {
        let inside = |id: &u32| part.contains(&self.heap.table[*id as usize].offset());
        let blocks = self.heap.blocks_of(at).filter(inside).map(|id| self.block_info(id));
        let (blocks, contexts) = blocks.unzip();
        let segment = SegmentInfo {
            device,
            address: held.address + part.start as u64,
            total_size: part.len() as u64,
            stream: held.stream.0.into(),
            segment_type: match held.kind {
                SizeKind::Small => SegmentType::Small,
                SizeKind::Large => SegmentType::Large,
            },
            segment_pool_id: (0, held.pool.into()),
            is_expandable: held.segment.is_reserved(),
            frames: [].into(),
            blocks,
        };
        SegmentWithContexts { segment, context: held.context, contexts }
    }

    /// Describes a block, with the call stack of its allocation.
    fn block_info(&self, id: u32) -> (BlockInfo, Context) {
        let entry = self.heap.table[id as usize];
        let state = match entry.usage() {
            Use::Live if matches!(self.moving.get(&id), Some(AfterMove::Uncache)) => BlockState::Inactive,
            Use::Live => BlockState::ActiveAllocated,
            Use::Pending => BlockState::ActivePendingFree,
            Use::Free | Use::Frozen | Use::Unmapped | Use::Vacant => BlockState::Inactive,
        };
        let live = state != BlockState::Inactive;
        let context = self.heap.contexts.get(&id).filter(|_| live).copied().unwrap_or(Context::NONE);
        let block = BlockInfo {
            address: self.heap.address(id),
            size: entry.size() as u64,
            requested_size: if live { self.slots.requested(id) as u64 } else { 0 },
            state,
            frames: [].into(),
        };
        (block, context)
    }
}
