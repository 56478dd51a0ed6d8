//! Blocks used by several streams, and blocks taken from other streams behind a device-side wait (`take_with_wait`).
//!
//! A freed block that other streams have used stays pending until those streams finish the work they had then. Each
//! stream has its own queue, so that a slow stream does not delay the blocks of others.
//!
//! If the driver cannot record a marker behind that work, or cannot query the marker, the block stays pending. A new marker, which is also behind
//! that work, is recorded each time events are processed. On a lost device such a block is never reused.

use std::collections::{BTreeMap, HashMap, VecDeque};

use smallvec::SmallVec;

use super::super::block::Block;
use super::super::driver::Marker;
use super::moves::AfterMove;
use super::{CachingAllocator, Core, Request};
use crate::Result;
use crate::device::StreamId;
use std::sync::atomic::Ordering::Relaxed;

/// Streams that used a block; rarely more than two.
pub(super) type Streams = SmallVec<[StreamId; 2]>;
/// Streams that may still be using a block, each with a marker behind that work. The marker is `None` until the driver has recorded one.
pub(super) type PendingUses = SmallVec<[(StreamId, Option<Marker>); 2]>;

/// A block that waits for a stream. Tickets are unique, because one block may wait several times.
#[derive(Debug)]
struct Waiting {
    /// A marker behind the stream's work with the block. `None` if it could not be recorded or queried yet.
    marker: Option<Marker>,
    id: u32,
    ticket: u64,
}

/// Pending blocks, by the streams they wait for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Other streams that used each live block.
    used: HashMap<u32, Streams>,
    queues: BTreeMap<StreamId, VecDeque<Waiting>>,
    /// By waiting stream and awaited stream: how much work the awaited stream had submitted at the last wait.
    waited: HashMap<(StreamId, StreamId), u64>,
    next_ticket: u64,
    /// How many markers each pending block still waits for.
    waiting: HashMap<u32, usize>,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.keys().copied()
    }

    /// Returns the other streams that used a live block.
    pub(super) fn users(&self, id: u32) -> Streams {
        self.used.get(&id).cloned().unwrap_or_default()
    }

    /// Forgets the other streams of a live block, which have finished.
    pub(super) fn forget_users(&mut self, id: u32) {
        self.used.remove(&id);
    }

    /// Makes a block wait for the given uses.
    fn add(&mut self, id: u32, uses: PendingUses) {
        self.waiting.insert(id, uses.len());
        for (stream, marker) in uses {
            let waiting = Waiting { marker, id, ticket: self.next_ticket };
            self.next_ticket += 1;
            self.queues.entry(stream).or_default().push_back(waiting);
        }
    }

    /// Returns the oldest marker of every stream, with its ticket.
    pub(super) fn oldest_markers(&self) -> Vec<(StreamId, Marker, u64)> {
        let head = |(stream, queue): (&StreamId, &VecDeque<Waiting>)| {
            queue.iter().find_map(|waiting| Some((*stream, waiting.marker.clone()?, waiting.ticket)))
        };
        self.queues.iter().filter_map(head).collect()
    }

    /// Returns the streams for which some block waits without a marker.
    fn streams_without_marker(&self) -> Vec<StreamId> {
        let lacks_one = |queue: &VecDeque<Waiting>| queue.iter().any(|waiting| waiting.marker.is_none());
        self.queues.iter().filter(|(_, queue)| lacks_one(queue)).map(|(stream, _)| *stream).collect()
    }

    /// Assigns a marker to the waiting blocks that have none. `marker` was recorded after all tickets below `before`
    /// were issued, so it is behind the work of those blocks.
    fn assign_marker(&mut self, stream: StreamId, before: u64, marker: &Marker) {
        let queue = self.queues.get_mut(&stream).into_iter().flatten();
        for waiting in queue.filter(|waiting| waiting.marker.is_none() && waiting.ticket < before) {
            waiting.marker = Some(marker.clone());
        }
    }

    /// Discards a marker that could not be queried.
    fn discard_marker(&mut self, stream: StreamId, ticket: u64) {
        let mut queue = self.queues.get_mut(&stream).into_iter().flatten();
        queue.find(|waiting| waiting.ticket == ticket).into_iter().for_each(|waiting| waiting.marker = None);
    }

    /// Ends the wait with this ticket. Returns the block if it has no other wait.
    fn pop(&mut self, stream: StreamId, ticket: u64) -> Option<u32> {
        let queue = self.queues.get_mut(&stream)?;
        let at = queue.iter().position(|waiting| waiting.ticket == ticket)?; // almost always at the front
        let id = queue.remove(at)?.id;
        if queue.is_empty() {
            self.queues.remove(&stream);
        }
        let left = self.waiting.get_mut(&id)?;
        *left -= 1;
        (*left == 0).then(|| self.waiting.remove(&id)).flatten().map(|_| id)
    }

    /// Like [`pop`](Self::pop), for all tickets below this one. Returns the blocks that have no other wait.
    fn pop_before(&mut self, ticket: u64) -> Vec<u32> {
        let waiting = self.queues.iter().flat_map(|(stream, queue)| queue.iter().map(|w| (*stream, w.ticket)));
        let before: Vec<_> = waiting.filter(|(_, of)| *of < ticket).collect();
        before.into_iter().filter_map(|(stream, ticket)| self.pop(stream, ticket)).collect()
    }

    /// Removes a block, and returns the uses it still waits for.
    pub(super) fn take(&mut self, id: u32) -> PendingUses {
        self.waiting.remove(&id);
        let mut uses = PendingUses::new();
        for (stream, queue) in &mut self.queues {
            queue.retain(|waiting| {
                if waiting.id == id {
                    uses.push((*stream, waiting.marker.clone()));
                }
                waiting.id != id
            });
        }
        self.queues.retain(|_, queue| !queue.is_empty());
        uses
    }
}

impl CachingAllocator {
    /// Records that `stream` uses the block.
    pub(super) fn record_stream_use(&self, block: &Block, stream: StreamId) {
        if block.owner != self.number {
            return; // the block's number is meaningful only to its owner
        }
        let mut core = self.lock();
        let home = core.heap.arenas[core.heap.table[block.id() as usize].arena() as usize].stream;
        if stream == home {
            return;
        }
        let streams = core.pending.used.entry(block.id()).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        self.has_cross_stream_use.store(true, Relaxed);
        block.slot().used_by_other_stream.store(true, Relaxed);
    }

    /// Frees a block that other streams have used. The block is pending until those streams finish.
    #[cold]
    #[inline(never)]
    pub(super) fn deallocate_used_by_others(&self, block: Block, requested: usize) {
        let streams = self.lock().pending.used.remove(&block.id()).unwrap_or_default();
        let uses = streams.into_iter().map(|stream| (stream, self.driver.record(stream).ok())).collect();
        self.lock_with_stats().free_used_block(block.id(), requested, uses);
    }

    /// Frees pending blocks whose streams have finished; with `wait`, waits for all of them. Returns whether any became free.
    ///
    /// # Errors
    /// With `wait`, the errors that the driver reports. Blocks whose streams could not be waited for stay pending.
    pub(super) fn process_events(&self, wait: bool) -> Result<bool> {
        let (mut settled, mut failed) = (false, self.record_missing_markers());
        loop {
            let heads = self.lock().pending.oldest_markers();
            let ask = |marker| if wait { self.driver.wait(marker).map(|()| true) } else { self.driver.is_done(marker) };
            let asked: Vec<_> = heads.iter().map(|(stream, marker, ticket)| (*stream, *ticket, ask(marker))).collect();
            if asked.iter().all(|(.., done)| matches!(done, Ok(false))) {
                return if wait { failed.map(|()| settled) } else { Ok(settled) };
            }
            let mut core = self.lock();
            for (stream, ticket, done) in asked {
                match done {
                    Ok(true) => settled |= core.pending.pop(stream, ticket).map(|id| core.free_pending(id)).is_some(),
                    Ok(false) => {}
                    Err(error) => {
                        core.pending.discard_marker(stream, ticket);
                        failed = failed.and(Err(error));
                    }
                }
            }
        }
    }

    /// Records the markers that pending blocks lack.
    fn record_missing_markers(&self) -> Result<()> {
        let (streams, before) = {
            let core = self.lock();
            (core.pending.streams_without_marker(), core.pending.next_ticket)
        };
        let mark = |stream| {
            let marker = self.driver.record(stream)?;
            self.lock().pending.assign_marker(stream, before, &marker);
            Ok(())
        };
        streams.into_iter().map(mark).fold(Ok(()), Result::and) // records on every stream, even after an error
    }

    /// Waits for the whole device. Frees all blocks that were pending before, even those without a marker.
    pub(super) fn synchronize(&self) -> Result<()> {
        let before = self.lock().pending.next_ticket;
        self.driver.synchronize()?;
        let mut core = self.lock();
        core.pending.pop_before(before).into_iter().for_each(|id| core.free_pending(id));
        Ok(())
    }

    /// Takes free blocks of other streams, or one pending block. The request's stream waits on the device until the streams that may still use the
    /// memory have finished. If that wait cannot be enqueued, the block becomes pending instead.
    pub(super) fn take_with_wait(&self, request: &Request) -> Option<Block> {
        let (block, mut uses) = {
            let mut core = self.lock_with_stats();
            if !core.heap.rules.config.cross_stream_reuse {
                return None;
            }
            core.take_from_other_streams(self.number, request).or_else(|| core.reuse_pending(self.number, request))?
        };
        let wait = |(stream, marker): &mut (StreamId, Option<Marker>)| {
            if let Some(marker) = marker {
                return self.driver.stream_waits(request.stream, marker);
            }
            let (streams, at) = ((request.stream, *stream), self.driver.progress(*stream));
            if at.is_finished() || self.lock().pending.waited.get(&streams) == Some(&at.submitted) {
                return Ok(()); // done, or nothing was submitted since the last wait
            }
            self.driver.stream_waits(request.stream, marker.insert(self.driver.record(*stream)?))?;
            self.lock().pending.waited.insert(streams, at.submitted);
            Ok(())
        };
        match uses.iter_mut().try_for_each(wait) {
            Ok(()) => Some(block),
            Err(error) => {
                tracing::debug!(%error, "could not wait for another stream: its block is not reused yet");
                self.lock_with_stats().free_used_block(block.id(), block.requested(), uses);
                None
            }
        }
    }
}

impl Core {
    /// Frees a block that these streams may still be using. A block that is being moved is freed after its copy,
    /// because the move may not have waited for the latest work.
    pub(super) fn free_used_block(&mut self, id: u32, requested: usize, uses: PendingUses) {
        match self.moving.get_mut(&id) {
            _ if uses.is_empty() => self.free_block(id, requested),
            Some(then) => *then = AfterMove::FreeUsedBlock(requested, uses),
            None => {
                self.heap.mark_pending(id, requested);
                self.pending.add(id, uses);
            }
        }
    }

    /// Frees a pending block whose streams have finished.
    fn free_pending(&mut self, id: u32) {
        let requested = self.slots.requested(id);
        self.heap.free_pending(id, requested);
    }

    /// Allocates from adjacent free blocks, some of which belong to other streams. The result belongs to the request's stream.
    fn take_from_other_streams(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
        let run = self.heap.find_run(request)?;
        let (id, mut streams) = self.heap.allocate_from_run(run, request);
        streams.sort_unstable();
        streams.dedup();
        let others = streams.into_iter().filter(|&stream| stream != request.stream);
        Some((self.create_handle(owner, id, request.bytes), others.map(|stream| (stream, None)).collect()))
    }

    /// Takes a pending block. Returns it with the uses that its new owner must wait for.
    fn reuse_pending(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
        let heap = &self.heap;
        let fits = |&id: &u32| {
            let entry = heap.table[id as usize];
            let arena = &heap.arenas[entry.arena() as usize];
            let same = arena.pool == request.pool && arena.kind == request.kind && entry.size() >= request.size;
            same && heap.rules.may_serve(request.kind, entry.size(), request.size)
        };
        let id = self.pending.blocks().filter(fits).min_by_key(|&id| (heap.table[id as usize].size(), id))?;
        let from = heap.arenas[heap.table[id as usize].arena() as usize].stream;
        let mut uses = self.pending.take(id);
        if from != request.stream {
            uses.push((from, None));
        }
        self.heap.reuse_pending(id, self.slots.requested(id), request.bytes);
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        self.heap.table[id as usize].set_arena(arena);
        Some((self.create_handle(owner, id, request.bytes), uses))
    }
}
