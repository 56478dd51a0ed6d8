//! Ranks that are threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::transport::{Call, Fault, Transport, suitable_slice};

/// Messages that a rank sends another before the first is received.
const AHEAD: usize = 4;

/// What was sent and not received yet.
#[derive(Default)]
struct Mail {
    /// By sender, receiver and context.
    messages: HashMap<(usize, usize, u32), VecDeque<Vec<u8>>>,
    /// The ranks that have left, and why.
    left: HashMap<usize, String>,
}

#[derive(Default)]
struct PostOffice {
    mail: Mutex<Mail>,
    changed: Condvar,
}

impl PostOffice {
    /// What a panicking thread leaves is whole: nothing under the lock panics.
    fn lock(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank's end.
#[derive(Clone)]
pub(super) struct Threads {
    rank: usize,
    size: usize,
    office: Arc<PostOffice>,
    next_context: u32,
    timeout: Duration,
}

impl Threads {
    /// The ends of so many ranks.
    pub(super) fn new(size: usize, timeout: Duration) -> Vec<Threads> {
        let office = Arc::new(PostOffice::default());
        (0..size).map(|rank| Threads { rank, size, office: Arc::clone(&office), next_context: 1, timeout }).collect()
    }

    /// Waits for another rank until `ready` gives something.
    fn wait<R>(&self, peer: usize, mut ready: impl FnMut(&mut Mail) -> Option<R>) -> Result<R, Fault> {
        let deadline = Instant::now() + self.timeout;
        let mut mail = self.office.lock();
        loop {
            if let Some(result) = ready(&mut mail) {
                drop(mail);
                self.office.changed.notify_all();
                return Ok(result);
            }
            if let Some(why) = mail.left.get(&peer) {
                return Err(Fault { rank: peer, reason: why.clone() });
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(Fault { rank: peer, reason: did_not_come(self.timeout) });
            };
            mail = self.office.changed.wait_timeout(mail, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, call: Call, to: usize, bytes: &[u8]) -> Result<(), Fault> {
        let mut message = Some(bytes.to_vec());
        self.wait(to, |mail| {
            let queue = mail.messages.entry((self.rank, to, call.context)).or_default();
            (queue.len() < AHEAD).then(|| queue.extend(message.take()))
        })
    }

    fn receive(&self, call: Call, from: usize, into: &mut [u8]) -> Result<(), Fault> {
        let key = (from, self.rank, call.context);
        let message = self.wait(from, |mail| mail.messages.get_mut(&key).and_then(VecDeque::pop_front))?;
        if message.len() != into.len() {
            let reason = format!("sends {} bytes where {} are expected: {SAME_CALLS}", message.len(), into.len());
            return Err(Fault { rank: from, reason });
        }
        into.copy_from_slice(&message);
        Ok(())
    }
}

/// What to do about ranks that do not agree.
pub(super) const SAME_CALLS: &str = "all ranks make the same calls with the same shapes and dtypes in the same order";

pub(super) fn did_not_come(timeout: Duration) -> String {
    format!(
        "did not come within {} seconds: {SAME_CALLS} (CLAYSTONE_DISTRIBUTED_DEBUG=1 tells which)",
        timeout.as_secs()
    )
}

impl Transport for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn slice(&self) -> usize {
        suitable_slice()
    }

    fn next_context(&mut self) -> &mut u32 {
        &mut self.next_context
    }

    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault> {
        if let Some(why) = self.office.lock().left.get(&self.rank) {
            return Err(Fault { rank: self.rank, reason: why.clone() });
        }
        sends.iter().try_for_each(|(to, bytes)| self.send(call, *to, bytes))?;
        receives.iter_mut().try_for_each(|(from, into)| self.receive(call, *from, into))
    }

    fn leave(&mut self, why: &str) {
        self.office.lock().left.entry(self.rank).or_insert_with(|| why.into());
        self.office.changed.notify_all();
    }
}
