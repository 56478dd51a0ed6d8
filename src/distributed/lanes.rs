//! Progress of a lane. A lane is one thread's share of the exchange of a slice, through its own ring buffers in shared memory.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use super::plan::{Lane, Plan};
use super::rings::{Progress, Rings};

/// The number of polls after which a lane reads the clock and yields its core to other threads.
const POLLS_PER_YIELD: usize = 256;

/// A lane during an exchange.
pub(super) struct RunningLane<'a> {
    lane: Lane<'a>,
    /// The number of the lane, and of its ring buffers.
    number: usize,
    /// The progress of each message of the current phase: first the messages to receive, then the messages to send.
    progress: Vec<Progress>,
    /// Whether any words were copied since the caller last set this field to false.
    pub moved: bool,
    /// The local rank that sent an unexpected message, and a description of the message.
    pub mismatch: Option<(usize, String)>,
}

impl<'a> RunningLane<'a> {
    pub(super) fn new(lane: Lane<'a>, number: usize) -> RunningLane<'a> {
        RunningLane { lane, number, progress: Vec::new(), moved: false, mismatch: None }
    }

    pub(super) fn is_done(&self, plan: &Plan) -> bool {
        self.lane.phase(plan).is_none()
    }

    /// Runs until the lane is done, or until nothing has arrived for `patience`. All ranks of the plan must be local ranks.
    pub(super) fn run(&mut self, rings: &Rings, context: u32, plan: &Plan, patience: Duration) {
        let mut idle_since = None;
        let mut spins = 0;
        while self.mismatch.is_none() && !self.is_done(plan) {
            if self.step(rings, context, plan) {
                idle_since = None;
                continue;
            }
            spins += 1;
            if spins % POLLS_PER_YIELD != 0 {
                spin_loop();
                continue;
            }
            if idle_since.get_or_insert_with(Instant::now).elapsed() >= patience {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Copies all words that can be sent or received now. Returns whether any words were copied.
    pub(super) fn step(&mut self, rings: &Rings, context: u32, plan: &Plan) -> bool {
        let Some(phase) = self.lane.phase(plan) else { return false };
        self.progress.resize_with(phase.receives.len() + phase.sends.len(), Progress::default);
        let (received, sent) = self.progress.split_at_mut(phase.receives.len());
        let (mut moved, mut is_complete) = (false, true);
        // Messages are sent first, because other ranks wait for them.
        for (&(to, block), progress) in phase.sends.iter().zip(sent) {
            let bytes = self.lane.block(plan, block);
            if !progress.is_complete(bytes.len()) {
                moved |= rings.send(to, self.number, context, bytes, progress);
                is_complete &= progress.is_complete(bytes.len());
            }
        }
        for (&(from, block), progress) in phase.receives.iter().zip(received) {
            let bytes = self.lane.block(plan, block);
            if !progress.is_complete(bytes.len()) {
                match rings.receive(from, self.number, context, bytes, progress) {
                    Ok(any) => moved |= any,
                    Err(what) => self.mismatch = Some((from, what)),
                }
                is_complete &= progress.is_complete(bytes.len());
            }
        }
        if is_complete {
            self.lane.end_phase(plan);
            self.progress.clear();
        }
        self.moved |= moved || is_complete;
        moved || is_complete
    }

    /// Returns the local ranks whose messages in the current phase are incomplete.
    pub(super) fn waits_for(&mut self, plan: &Plan) -> Vec<usize> {
        let Some(phase) = self.lane.phase(plan) else { return Vec::new() };
        let progress = self.progress.iter().copied().chain(std::iter::repeat(Progress::default()));
        let messages = phase.receives.iter().chain(&phase.sends).zip(progress);
        let pending =
            messages.filter(|&(&(_, block), progress)| !progress.is_complete(self.lane.block(plan, block).len()));
        pending.map(|(&(rank, _), _)| rank).collect()
    }
}
