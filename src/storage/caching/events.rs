//! Blocks that streams other than their own have used, and blocks taken from other streams behind a wait on the device
//! (`take_with_wait`).
//!
//! A block that others have used, given back, is pending until the work those streams had at that moment is done. Each stream has a
//! queue of its own, so that one that is slow delays nobody else's blocks.
//!
//! Where the driver makes no marker behind that work, or cannot say whether it is reached, the block stays pending: each
//! time events are looked at another marker is asked for, which is behind that work as well. On a device that is lost such
//! a block is never reused.

use std::collections::{BTreeMap, HashMap, VecDeque};

use smallvec::SmallVec;

use super::super::block::Block;
use super::super::driver::Marker;
use super::moves::AfterMove;
use super::{CachingAllocator, Core, Request};
use crate::Result;
use crate::device::StreamId;
use std::sync::atomic::Ordering::Relaxed;

pub(super) type Streams = SmallVec<[StreamId; 2]>;
/// Streams that may still be using a block, each with a marker behind that work, or none where the driver has not yet made
/// one.
pub(super) type PendingUses = SmallVec<[(StreamId, Option<Marker>); 2]>;

/// A block that waits for a stream. Its ticket is unique, as one block may wait several times.
#[derive(Debug)]
struct Waiting {
    /// Behind the stream's work with the block. None where it has yet to be made, or its status could not be
    /// queried.
    marker: Option<Marker>,
    id: u32,
    ticket: u64,
}

/// Pending blocks, by the streams they wait for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Streams that used live blocks.
    used: HashMap<u32, Streams>,
    queues: BTreeMap<StreamId, VecDeque<Waiting>>,
    /// By waiting stream and stream waited for: how much had been submitted to the latter at the last wait.
    waited: HashMap<(StreamId, StreamId), u64>,
    /// The next ticket.
    tickets: u64,
    /// Markers each pending block still waits for.
    waiting: HashMap<u32, usize>,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Pending blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.keys().copied()
    }

    /// Other streams that used a live block.
    pub(super) fn users(&self, id: u32) -> Streams {
        self.used.get(&id).cloned().unwrap_or_default()
    }

    /// A live block's users are done.
    pub(super) fn forget(&mut self, id: u32) {
        self.used.remove(&id);
    }

    fn add(&mut self, id: u32, uses: PendingUses) {
        self.waiting.insert(id, uses.len());
        for (stream, marker) in uses {
            let waiting = Waiting { marker, id, ticket: self.tickets };
            self.tickets += 1;
            self.queues.entry(stream).or_default().push_back(waiting);
        }
    }

    /// The oldest marker of every stream, with its ticket.
    pub(super) fn heads(&self) -> Vec<(StreamId, Marker, u64)> {
        let head = |(stream, queue): (&StreamId, &VecDeque<Waiting>)| {
            queue.iter().find_map(|waiting| Some((*stream, waiting.marker.clone()?, waiting.ticket)))
        };
        self.queues.iter().filter_map(head).collect()
    }

    /// Streams of which a block waits for work that has no marker.
    fn unmarked(&self) -> Vec<StreamId> {
        let lacks_one = |queue: &VecDeque<Waiting>| queue.iter().any(|waiting| waiting.marker.is_none());
        self.queues.iter().filter(|(_, queue)| lacks_one(queue)).map(|(stream, _)| *stream).collect()
    }

    /// A marker that was made when all tickets before this one had been given: behind all work of those that have none.
    fn mark(&mut self, stream: StreamId, before: u64, marker: &Marker) {
        let queue = self.queues.get_mut(&stream).into_iter().flatten();
        for waiting in queue.filter(|waiting| waiting.marker.is_none() && waiting.ticket < before) {
            waiting.marker = Some(marker.clone());
        }
    }

    /// Forgets a marker that could not be asked.
    fn unmark(&mut self, stream: StreamId, ticket: u64) {
        let mut queue = self.queues.get_mut(&stream).into_iter().flatten();
        queue.find(|waiting| waiting.ticket == ticket).into_iter().for_each(|waiting| waiting.marker = None);
    }

    /// What waits with this ticket waits no more; gives the block if it waits for nothing else.
    fn pop(&mut self, stream: StreamId, ticket: u64) -> Option<u32> {
        let queue = self.queues.get_mut(&stream)?;
        let at = queue.iter().position(|waiting| waiting.ticket == ticket)?; // almost always the first
        let id = queue.remove(at)?.id;
        if queue.is_empty() {
            self.queues.remove(&stream);
        }
        let left = self.waiting.get_mut(&id)?;
        *left -= 1;
        (*left == 0).then(|| self.waiting.remove(&id)).flatten().map(|_| id)
    }

    /// As [`pop`](Self::pop), of all tickets before this one. Gives the blocks that wait for nothing else.
    fn pop_before(&mut self, ticket: u64) -> Vec<u32> {
        let waiting = self.queues.iter().flat_map(|(stream, queue)| queue.iter().map(|w| (*stream, w.ticket)));
        let before: Vec<_> = waiting.filter(|(_, of)| *of < ticket).collect();
        before.into_iter().filter_map(|(stream, ticket)| self.pop(stream, ticket)).collect()
    }

    /// Takes a block out, with what it still waits for.
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
    /// Remembers that `stream` uses the block.
    pub(super) fn note_stream(&self, block: &Block, stream: StreamId) {
        if block.owner != self.number {
            return; // its number means nothing here
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
        self.recorded.store(true, Relaxed);
        block.slot().recorded.store(true, Relaxed);
    }

    /// Takes back a block that other streams have used: it is pending until they are done.
    #[cold]
    #[inline(never)]
    pub(super) fn deallocate_used_by_others(&self, block: Block, requested: usize) {
        let streams = self.lock().pending.used.remove(&block.id()).unwrap_or_default();
        let uses = streams.into_iter().map(|stream| (stream, self.driver.record(stream).ok())).collect();
        self.lock_with_stats().give_back_used(block.id(), requested, uses);
    }

    /// Frees pending blocks whose streams are done; with `wait`, waits for all of them. Says whether any became free.
    ///
    /// # Errors
    /// With `wait`, what the driver reports: blocks whose streams it could not wait for stay pending.
    pub(super) fn process_events(&self, wait: bool) -> Result<bool> {
        let (mut settled, mut failed) = (false, self.mark_uses());
        loop {
            let heads = self.lock().pending.heads();
            let ask = |marker| if wait { self.driver.wait(marker).map(|()| true) } else { self.driver.is_done(marker) };
            let asked: Vec<_> = heads.iter().map(|(stream, marker, ticket)| (*stream, *ticket, ask(marker))).collect();
            if asked.iter().all(|(.., done)| matches!(done, Ok(false))) {
                return if wait { failed.map(|()| settled) } else { Ok(settled) };
            }
            let mut core = self.lock();
            for (stream, ticket, done) in asked {
                match done {
                    Ok(true) => settled |= core.pending.pop(stream, ticket).map(|id| core.settle(id)).is_some(),
                    Ok(false) => {}
                    Err(error) => {
                        core.pending.unmark(stream, ticket);
                        failed = failed.and(Err(error));
                    }
                }
            }
        }
    }

    /// Asks for the markers that pending blocks lack.
    fn mark_uses(&self) -> Result<()> {
        let (streams, before) = {
            let core = self.lock();
            (core.pending.unmarked(), core.pending.tickets)
        };
        let mark = |stream| {
            let marker = self.driver.record(stream)?;
            self.lock().pending.mark(stream, before, &marker);
            Ok(())
        };
        streams.into_iter().map(mark).fold(Ok(()), Result::and) // all are asked
    }

    /// Waits for the whole device: what was pending before is free then, even where no marker could be asked.
    pub(super) fn synchronize(&self) -> Result<()> {
        let before = self.lock().pending.tickets;
        self.driver.synchronize()?;
        let mut core = self.lock();
        core.pending.pop_before(before).into_iter().for_each(|id| core.settle(id));
        Ok(())
    }

    /// Takes free blocks of other streams, or one pending block, and has the request's stream wait on the device until the
    /// streams that may still use them are done. A block for which that wait cannot be enqueued becomes pending instead.
    pub(super) fn take_with_wait(&self, request: &Request) -> Option<Block> {
        let (block, mut uses) = {
            let mut core = self.lock_with_stats();
            if !core.heap.rules.config.cross_stream_reuse {
                return None;
            }
            core.take_from_other_streams(self.number, request).or_else(|| core.take_pending(self.number, request))?
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
                tracing::debug!(%error, "no wait for another stream: its block is not reused yet");
                self.lock_with_stats().give_back_used(block.id(), block.requested(), uses);
                None
            }
        }
    }
}

impl Core {
    /// Takes back a block that these streams may still be using; one on the move when it has arrived, since who moves
    /// blocks need not have waited for what was enqueued last.
    pub(super) fn give_back_used(&mut self, id: u32, requested: usize, uses: PendingUses) {
        match self.moving.get_mut(&id) {
            _ if uses.is_empty() => self.give_back(id, requested),
            Some(then) => *then = AfterMove::Pend(requested, uses),
            None => {
                self.heap.give_back_pending(id, requested);
                self.pending.add(id, uses);
            }
        }
    }

    /// A pending block is free.
    fn settle(&mut self, id: u32) {
        let requested = self.slots.requested(id);
        self.heap.settle(id, requested);
    }

    /// Takes free blocks that lie together, some of them other streams'; they belong to the request's stream from now on.
    fn take_from_other_streams(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
        let run = self.heap.find_run(request)?;
        let (id, mut streams) = self.heap.take_run(run, request);
        streams.sort_unstable();
        streams.dedup();
        let others = streams.into_iter().filter(|&stream| stream != request.stream);
        Some((self.block(owner, id, request.bytes), others.map(|stream| (stream, None)).collect()))
    }

    /// Takes a pending block, with what its new owner has to wait for.
    fn take_pending(&mut self, owner: u32, request: &Request) -> Option<(Block, PendingUses)> {
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
        self.heap.take_pending(id, self.slots.requested(id), request.bytes);
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        self.heap.table[id as usize].set_arena(arena);
        Some((self.block(owner, id, request.bytes), uses))
    }
}
