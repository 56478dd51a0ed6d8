//! What carries bytes between the ranks of a job.

use super::plan::{Lane, Plan};
use crate::device::cpu::threads;
use crate::{Error, Result};

/// Bytes between ranks, all at once. Ranks are those of the whole job; `context` tells the groups apart that it is split into.
pub(super) trait Transport {
    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Bytes of tensors that travel at a time, on every rank.
    fn slice(&self) -> usize;

    /// The least context that this rank has used in no group.
    fn next_context(&mut self) -> &mut u32;

    /// Sends and receives what is given, each with its rank, in whatever order it goes. What two ranks send each other in a
    /// context is received in the order in which it was sent, in pieces of the sizes in which it was sent.
    ///
    /// # Errors
    /// A [`Fault`] where a rank that it waits for has left the job, or does not come.
    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault>;

    /// What exchanges with these ranks, of which this one is one, on several threads; none unless all are of one machine.
    fn lanes(&mut self, _ranks: &[usize]) -> Option<&mut dyn Lanes> {
        None
    }

    /// Tells the others that this rank sends nothing any more, and why.
    fn leave(&mut self, why: &str);
}

/// Ranks of one machine that exchange on several threads. What two ranks send each other in a context on a lane is received in
/// the order in which it was sent.
pub(super) trait Lanes {
    /// How many there are, on every rank.
    fn count(&self) -> usize;

    /// Exchanges a slice.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault>;
}

/// The slice that suits this process: with one thread little enough to stay in a processor's caches, with more enough for all.
pub(super) fn suitable_slice() -> usize {
    if threads() == 1 { 1 << 20 } else { 4 << 20 }
}

/// Which collective asks.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // `op` is for the sentence with which a process ends
pub(super) struct Call {
    pub op: &'static str,
    pub context: u32,
}

/// A rank of the job did not do its part.
#[derive(Debug)]
pub(super) struct Fault {
    pub rank: usize,
    pub reason: String,
}

impl Fault {
    pub(super) fn into_error(self, op: &'static str) -> Error {
        Error::Rank { op, rank: self.rank, reason: self.reason }
    }
}
