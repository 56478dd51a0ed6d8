//! Ranks that are threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::transport::{Call, Fault, Position, Transport, default_slice_bytes};
use crate::internal::lock;

/// The capacity of a queue, in messages. A rank that sends more messages waits until the first message is received.
const QUEUE_CAPACITY: usize = 4;

/// The pending messages, and the ranks that have left the job.
#[derive(Default)]
struct Queues {
    /// Messages that were sent and not received yet. The key is (sender, receiver, context).
    messages: HashMap<(usize, usize, u32), VecDeque<Vec<u8>>>,
    /// The ranks that have left the job, with their reasons.
    left: HashMap<usize, String>,
}

/// The queues, and a condition variable that is notified when they change.
#[derive(Default)]
struct Shared {
    queues: Mutex<Queues>,
    changed: Condvar,
}

/// The transport of one rank.
#[derive(Clone)]
pub(super) struct Threads {
    position: Position,
    shared: Arc<Shared>,
    timeout: Duration,
}

impl Threads {
    pub(super) fn new(size: usize, timeout: Duration) -> Vec<Threads> {
        let shared = Arc::new(Shared::default());
        let slice_bytes = default_slice_bytes();
        let position = |rank| Position { rank, size, local_rank: 0, slice_bytes, next_context: 1 };
        (0..size).map(|rank| Threads { position: position(rank), shared: Arc::clone(&shared), timeout }).collect()
    }

    /// Waits until `ready` returns a result. Fails if the peer has left the job or does not answer before the timeout.
    fn wait<R>(&self, peer: usize, mut ready: impl FnMut(&mut Queues) -> Option<R>) -> Result<R, Fault> {
        let deadline = Instant::now() + self.timeout;
        let mut queues = lock(&self.shared.queues);
        loop {
            if let Some(result) = ready(&mut queues) {
                drop(queues);
                self.shared.changed.notify_all();
                return Ok(result);
            }
            if let Some(why) = queues.left.get(&peer) {
                return Err(Fault { rank: peer, reason: why.clone() });
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(Fault { rank: peer, reason: timeout_reason(self.timeout) });
            };
            queues = self.shared.changed.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, call: Call, to: usize, bytes: &[u8]) -> Result<(), Fault> {
        let mut message = Some(bytes.to_vec());
        self.wait(to, |queues| {
            let queue = queues.messages.entry((self.position.rank, to, call.context)).or_default();
            (queue.len() < QUEUE_CAPACITY).then(|| queue.extend(message.take()))
        })
    }

    fn receive(&self, call: Call, from: usize, into: &mut [u8]) -> Result<(), Fault> {
        let key = (from, self.position.rank, call.context);
        let message = self.wait(from, |queues| queues.messages.get_mut(&key).and_then(VecDeque::pop_front))?;
        if message.len() != into.len() {
            let reason =
                format!("sends {} bytes where {} are expected: {SAME_CALLS_ADVICE}", message.len(), into.len());
            return Err(Fault { rank: from, reason });
        }
        into.copy_from_slice(&message);
        Ok(())
    }
}

/// The advice in error messages about mismatched calls.
pub(super) const SAME_CALLS_ADVICE: &str =
    "all ranks must make the same calls with the same shapes and dtypes in the same order";

pub(super) fn timeout_reason(timeout: Duration) -> String {
    format!(
        "did not make the call within {} seconds: {SAME_CALLS_ADVICE} (CLAYSTONE_DISTRIBUTED_DEBUG=1 tells which)",
        timeout.as_secs()
    )
}

impl Transport for Threads {
    fn position(&mut self) -> &mut Position {
        &mut self.position
    }

    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault> {
        if let Some(why) = lock(&self.shared.queues).left.get(&self.position.rank) {
            return Err(Fault { rank: self.position.rank, reason: why.clone() });
        }
        sends.iter().try_for_each(|(to, bytes)| self.send(call, *to, bytes))?;
        receives.iter_mut().try_for_each(|(from, into)| self.receive(call, *from, into))
    }

    fn leave(&mut self, why: &str) {
        lock(&self.shared.queues).left.entry(self.position.rank).or_insert_with(|| why.into());
        self.shared.changed.notify_all();
    }
}
