//! Blocks that other streams may still be using.
//!
//! A freed block that other streams have used stays pending until those streams finish the work that was submitted to them before
//! the block was freed. Each stream has its own queue, so that a slow stream does not delay the blocks of others.
//!
//! If the driver fails to record a marker after that work, or to query the marker, the block stays pending. Each time events are
//! processed, a new marker is recorded, which is also after that work. On a lost device such a block is never reused.

use std::collections::{BTreeMap, HashMap, VecDeque};

use smallvec::SmallVec;

use super::super::driver::{Marker, Progress};
use crate::device::StreamId;

/// Streams that used a block; rarely more than two.
pub(super) type Streams = SmallVec<[StreamId; 2]>;

/// Streams that may still be using a block, each with a marker after that work. The marker is `None` until the driver has recorded one.
pub(super) type PendingUses = SmallVec<[(StreamId, Option<Marker>); 2]>;

/// A block that waits for a stream. Tickets are unique, because one block may wait for several streams.
#[derive(Debug)]
struct Waiting {
    /// A marker after the stream's work with the block. `None` if the driver failed to record or query a marker so far.
    marker: Option<Marker>,
    id: u32,
    ticket: u64,
}

/// The action for a block of a compaction plan once the plan is applied or cancelled.
#[derive(Debug)]
pub(super) enum AfterMove {
    Nothing,
    /// Free the block, because its owner freed it during the move. The value is the requested size in bytes.
    FreeBlock(usize),
    /// Free the block as for `FreeBlock`. This variant is for a block that other streams may still be using.
    FreeUsedBlock(usize, PendingUses),
    /// Free the block, because it left a thread cache during the move.
    Uncache,
}

/// Pending blocks, by the streams they wait for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Other streams that used each live block.
    used: HashMap<u32, Streams>,
    queues: BTreeMap<StreamId, VecDeque<Waiting>>,
    /// For each waiting stream and awaited stream: the number of commands submitted to the awaited stream before the last wait.
    waited: HashMap<(StreamId, StreamId), u64>,
    next_ticket: u64,
    /// The number of markers that each pending block still waits for.
    waiting: HashMap<u32, usize>,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.keys().copied()
    }

    /// Records that another stream uses a live block.
    pub(super) fn add_user(&mut self, id: u32, stream: StreamId) {
        let streams = self.used.entry(id).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Removes and returns the other streams that used a live block.
    pub(super) fn take_users(&mut self, id: u32) -> Streams {
        self.used.remove(&id).unwrap_or_default()
    }

    /// Returns the ticket of the next wait. Later waits have larger tickets.
    pub(super) fn next_ticket(&self) -> u64 {
        self.next_ticket
    }

    /// True if nothing was submitted to the second stream since the first stream last waited for the second.
    pub(super) fn has_waited(&self, streams: (StreamId, StreamId), at: Progress) -> bool {
        self.waited.get(&streams) == Some(&at.submitted)
    }

    /// Records that the first stream waits for the work that was submitted to the second stream so far.
    pub(super) fn record_wait(&mut self, streams: (StreamId, StreamId), at: Progress) {
        self.waited.insert(streams, at.submitted);
    }

    /// Returns the other streams that used a live block.
    pub(super) fn users(&self, id: u32) -> Streams {
        self.used.get(&id).cloned().unwrap_or_default()
    }

    /// Adds a pending block, which waits until the given uses end.
    pub(super) fn add(&mut self, id: u32, uses: PendingUses) {
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
    pub(super) fn streams_without_marker(&self) -> Vec<StreamId> {
        let lacks_one = |queue: &VecDeque<Waiting>| queue.iter().any(|waiting| waiting.marker.is_none());
        self.queues.iter().filter(|(_, queue)| lacks_one(queue)).map(|(stream, _)| *stream).collect()
    }

    /// Assigns a marker to the waiting blocks that have none. `marker` was recorded after all tickets below `before`
    /// were issued, so it comes after the work with those blocks.
    pub(super) fn assign_marker(&mut self, stream: StreamId, before: u64, marker: &Marker) {
        let queue = self.queues.get_mut(&stream).into_iter().flatten();
        for waiting in queue.filter(|waiting| waiting.marker.is_none() && waiting.ticket < before) {
            waiting.marker = Some(marker.clone());
        }
    }

    /// Discards a marker that could not be queried.
    pub(super) fn discard_marker(&mut self, stream: StreamId, ticket: u64) {
        let mut queue = self.queues.get_mut(&stream).into_iter().flatten();
        queue.find(|waiting| waiting.ticket == ticket).into_iter().for_each(|waiting| waiting.marker = None);
    }

    /// Ends the wait with this ticket. Returns the block if it has no other wait.
    pub(super) fn pop(&mut self, stream: StreamId, ticket: u64) -> Option<u32> {
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
    pub(super) fn pop_before(&mut self, ticket: u64) -> Vec<u32> {
        let waiting = self.queues.iter().flat_map(|(stream, queue)| queue.iter().map(|w| (*stream, w.ticket)));
        let before: Vec<_> = waiting.filter(|(_, of)| *of < ticket).collect();
        before.into_iter().filter_map(|(stream, ticket)| self.pop(stream, ticket)).collect()
    }

    /// Removes a block, and returns the uses that the block still waits for.
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
