//! A lane under way: one thread's part of the exchange of a slice, through rings of its own.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use super::plan::{Lane, Plan};
use super::rings::{Progress, Rings};

/// How often a lane looks for words of others before it looks at the clock and lets other threads of its core go on.
const LOOKS: usize = 256;

pub(super) struct Running<'a> {
    lane: Lane<'a>,
    /// Of its rings.
    number: usize,
    /// How far the messages of the current phase have come: those received, then those sent.
    progress: Vec<Progress>,
    /// Whether anything has come since this was reset.
    pub moved: bool,
    /// A rank that sends something else than expected, and what.
    pub wrong: Option<(usize, String)>,
}

impl<'a> Running<'a> {
    pub(super) fn new(lane: Lane<'a>, number: usize) -> Running<'a> {
        Running { lane, number, progress: Vec::new(), moved: false, wrong: None }
    }

    pub(super) fn is_through(&self, plan: &Plan) -> bool {
        self.lane.phase(plan).is_none()
    }

    /// Goes on until it is through, or nothing has come for so long. The ranks of the plan are numbers on the machine.
    pub(super) fn go_on(&mut self, rings: &Rings, context: u32, plan: &Plan, patience: Duration) {
        let mut waits_since = None;
        let mut looks = 0;
        while self.wrong.is_none() && !self.is_through(plan) {
            if self.step(rings, context, plan) {
                waits_since = None;
                continue;
            }
            looks += 1;
            if looks % LOOKS != 0 {
                spin_loop();
                continue;
            }
            if waits_since.get_or_insert_with(Instant::now).elapsed() >= patience {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Copies whatever can be sent or received now, and returns whether anything moved.
    pub(super) fn step(&mut self, rings: &Rings, context: u32, plan: &Plan) -> bool {
        let Some(phase) = self.lane.phase(plan) else { return false };
        self.progress.resize_with(phase.receives.len() + phase.sends.len(), Progress::default);
        let (received, sent) = self.progress.split_at_mut(phase.receives.len());
        let (mut moved, mut is_whole) = (false, true);
        // First what the others wait for.
        for (&(to, block), progress) in phase.sends.iter().zip(sent) {
            let bytes = self.lane.block(plan, block);
            if !progress.is_whole(bytes.len()) {
                moved |= rings.send(to, self.number, context, bytes, progress);
                is_whole &= progress.is_whole(bytes.len());
            }
        }
        for (&(from, block), progress) in phase.receives.iter().zip(received) {
            let bytes = self.lane.block(plan, block);
            if !progress.is_whole(bytes.len()) {
                match rings.receive(from, self.number, context, bytes, progress) {
                    Ok(any) => moved |= any,
                    Err(what) => self.wrong = Some((from, what)),
                }
                is_whole &= progress.is_whole(bytes.len());
            }
        }
        if is_whole {
            self.lane.end_phase(plan);
            self.progress.clear();
        }
        self.moved |= moved || is_whole;
        moved || is_whole
    }

    /// The numbers of the ranks whose messages it waits for.
    pub(super) fn waits_for(&mut self, plan: &Plan) -> Vec<usize> {
        let Some(phase) = self.lane.phase(plan) else { return Vec::new() };
        let progress = self.progress.iter().copied().chain(std::iter::repeat(Progress::default()));
        let messages = phase.receives.iter().chain(&phase.sends).zip(progress);
        let pending =
            messages.filter(|&(&(_, block), progress)| !progress.is_whole(self.lane.block(plan, block).len()));
        pending.map(|(&(rank, _), _)| rank).collect()
    }
}
