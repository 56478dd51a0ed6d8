//! Blocks that streams other than their own have used.
//!
//! Such a block, given back, is pending until the work those streams had at that moment is done. Each stream has a
//! queue of its own, so that one that is slow delays nobody else's blocks.

use std::collections::{BTreeMap, HashMap, VecDeque};

use smallvec::SmallVec;

use super::super::allocator::Block;
use super::super::driver::Marker;
use super::heap::{Heap, Search};
use super::moves::Then;
use super::{CachingAllocator, Core, Request};
use crate::Result;
use crate::device::StreamId;
use std::sync::atomic::Ordering::Relaxed;

pub(super) type Streams = SmallVec<[StreamId; 2]>;
pub(super) type Markers = SmallVec<[(StreamId, Marker); 2]>;

/// A block that waits for a marker. The ticket is never given twice: the block may settle, be reused and wait again.
#[derive(Debug)]
struct Waiting {
    marker: Marker,
    id: u32,
    ticket: u64,
}

/// Pending blocks, by the streams they wait for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Streams that used live blocks.
    used: HashMap<u32, Streams>,
    queues: BTreeMap<StreamId, VecDeque<Waiting>>,
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

    fn add(&mut self, id: u32, markers: &[(StreamId, Marker)]) {
        self.waiting.insert(id, markers.len());
        for (stream, marker) in markers {
            let waiting = Waiting { marker: marker.clone(), id, ticket: self.tickets };
            self.tickets += 1;
            self.queues.entry(*stream).or_default().push_back(waiting);
        }
    }

    /// The oldest marker of every stream, with its ticket.
    pub(super) fn heads(&self) -> Vec<(StreamId, Marker, u64)> {
        let head = |(stream, queue): (&StreamId, &VecDeque<Waiting>)| {
            queue.front().map(|head| (*stream, head.marker.clone(), head.ticket))
        };
        self.queues.iter().filter_map(head).collect()
    }

    /// Removes a stream's oldest marker, if it is still that of this ticket; gives the block if it waits for no more.
    fn pop(&mut self, stream: StreamId, ticket: u64) -> Option<u32> {
        let queue = self.queues.get_mut(&stream)?;
        let id = queue.front().filter(|head| head.ticket == ticket)?.id;
        queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&stream);
        }
        let left = self.waiting.get_mut(&id)?;
        *left -= 1;
        (*left == 0).then(|| self.waiting.remove(&id)).flatten().map(|_| id)
    }

    /// Takes a block out, with the markers it still waits for.
    pub(super) fn take(&mut self, id: u32) -> Vec<Marker> {
        self.waiting.remove(&id);
        let mut markers = Vec::new();
        for queue in self.queues.values_mut() {
            queue.retain(|waiting| {
                if waiting.id == id {
                    markers.push(waiting.marker.clone());
                }
                waiting.id != id
            });
        }
        self.queues.retain(|_, queue| !queue.is_empty());
        markers
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
    pub(super) fn deallocate_recorded(&self, block: Block, requested: usize) {
        let streams = self.lock().pending.used.remove(&block.id()).unwrap_or_default();
        let marker = |stream: StreamId| Some((stream, self.driver.record(stream).ok()?));
        let markers: Option<Markers> = streams.into_iter().map(marker).collect();
        let markers = match markers {
            Some(markers) => markers,
            None => {
                // A stream that takes no commands: the device is lost, or wait for all of it.
                let _ = self.driver.synchronize();
                Markers::new()
            }
        };
        let mut core = self.lock_folded();
        match markers.is_empty() {
            true => core.give_back(block.id(), requested),
            false => core.give_back_pending(block.id(), requested, markers),
        }
    }

    /// Frees pending blocks whose streams are done; with `wait`, waits for all of them. Says whether any became free.
    pub(super) fn settle_events(&self, wait: bool) -> Result<bool> {
        let mut settled = false;
        loop {
            let heads = self.lock().pending.heads();
            let done: Vec<_> = heads
                .into_iter()
                .map(|(stream, marker, ticket)| {
                    let done =
                        if wait { self.driver.wait(&marker).map(|()| true)? } else { self.driver.is_done(&marker) };
                    Ok((stream, ticket, done))
                })
                .collect::<Result<_>>()?;
            let done: Vec<_> = done.into_iter().filter(|(_, _, done)| *done).collect();
            if done.is_empty() {
                return Ok(settled);
            }
            let mut core = self.lock();
            for (stream, ticket, _) in done {
                if let Some(id) = core.pending.pop(stream, ticket) {
                    let requested = core.slots.requested(id);
                    core.heap.settle(id, requested);
                    settled = true;
                }
            }
        }
    }

    /// Reuses a block that another stream, or a pending one that any stream, may still be using, behind a wait on the
    /// device.
    pub(super) fn take_with_wait(&self, request: &Request) -> Result<Option<Block>> {
        let (block, markers, streams) = {
            let mut core = self.lock_folded();
            if !core.heap.rules.config.cross_stream_reuse {
                return Ok(None);
            }
            if let Some((block, from)) = core.take_from_other_stream(self.number, request) {
                (block, Vec::new(), vec![from])
            } else if let Some((block, markers, from)) = core.take_pending(self.number, request) {
                let streams = if from == request.stream { vec![] } else { vec![from] };
                (block, markers, streams)
            } else {
                return Ok(None);
            }
        };
        let waits = || -> Result<()> {
            for marker in markers {
                self.driver.stream_waits(request.stream, &marker)?;
            }
            for stream in streams {
                self.driver.stream_waits(request.stream, &self.driver.record(stream)?)?;
            }
            Ok(())
        };
        if let Err(error) = waits() {
            // Not waited for: free only when the whole device is done, which a lost one is at once.
            let _ = self.driver.synchronize();
            let requested = block.requested();
            self.lock_folded().give_back(block.id(), requested); // it may be on the move
            return Err(error);
        }
        Ok(Some(block))
    }
}

impl Core {
    /// Takes back a block that streams may be using until these markers; one on the move when it has arrived, since who
    /// moves blocks need not have waited for what was enqueued last.
    pub(super) fn give_back_pending(&mut self, id: u32, requested: usize, markers: Markers) {
        match self.moving.get_mut(&id) {
            Some(then) => *then = Then::Pend(requested, markers),
            None => {
                self.heap.give_back_pending(id, requested);
                self.pending.add(id, &markers);
            }
        }
    }

    /// Takes a free block of another stream's; it belongs to the request's stream from now on.
    fn take_from_other_stream(&mut self, owner: u32, request: &Request) -> Option<(Block, StreamId)> {
        let others = |heap: &Heap, arena: &u32| {
            let arena = &heap.arenas[*arena as usize];
            arena.pool == request.pool && arena.kind == request.kind && arena.stream != request.stream
        };
        let arenas = (0..self.heap.arenas.len() as u32).filter(|arena| others(&self.heap, arena));
        let candidates =
            arenas.filter_map(|arena| self.heap.find(arena, request.size, Search::Thorough, || usize::MAX));
        let id = candidates.min_by_key(|&id| self.heap.table[id as usize].size())?;
        let from = self.heap.arenas[self.heap.table[id as usize].arena() as usize].stream;
        let id = self.heap.take(id, request.size, request.bytes);
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        self.heap.table[id as usize].set_arena(arena);
        Some((self.block(owner, id, request.bytes), from))
    }

    /// Takes a pending block, with the markers that its new owner has to wait for and the stream it belonged to.
    fn take_pending(&mut self, owner: u32, request: &Request) -> Option<(Block, Vec<Marker>, StreamId)> {
        let heap = &self.heap;
        let fits = |&id: &u32| {
            let entry = heap.table[id as usize];
            let arena = &heap.arenas[entry.arena() as usize];
            let same = arena.pool == request.pool && arena.kind == request.kind && entry.size() >= request.size;
            same && heap.rules.may_serve(request.kind, entry.size(), request.size)
        };
        let id = self.pending.blocks().filter(fits).min_by_key(|&id| (heap.table[id as usize].size(), id))?;
        let from = heap.arenas[heap.table[id as usize].arena() as usize].stream;
        let markers = self.pending.take(id);
        self.heap.take_pending(id, self.slots.requested(id), request.bytes);
        let arena = self.heap.arena(request.pool, request.stream, request.kind);
        self.heap.table[id as usize].set_arena(arena);
        Some((self.block(owner, id, request.bytes), markers, from))
    }
}
