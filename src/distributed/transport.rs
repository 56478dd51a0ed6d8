//! The interface through which collectives send bytes to other ranks, implemented for MPI and for threads.

use super::plan::{Lane, Plan};
use crate::device::cpu::threads;
use crate::{Error, Result};

/// Point-to-point messages. Ranks are numbered in the job; the `context` of a [`Call`] identifies the group of a message.
pub(super) trait Transport {
    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Returns the rank among the ranks of the job on this machine.
    fn local_rank(&self) -> usize {
        0
    }

    /// Returns the number of bytes of the slices that collectives cut tensors into: the same on every rank.
    fn slice_bytes(&self) -> usize;

    /// Returns the smallest context that no group of this rank has used.
    fn next_context(&mut self) -> &mut u32;

    /// Sends and receives these messages concurrently, each with its peer's rank. Messages between two ranks in one context arrive in
    /// the order of sending, and with the size with which they were sent.
    ///
    /// # Errors
    /// A [`Fault`] if a peer has left the job or times out.
    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault>;

    /// Returns the lanes between these ranks, which include this rank; `None` unless all of them run on one machine.
    fn lanes(&mut self, _ranks: &[usize]) -> Option<&mut dyn Lanes> {
        None
    }

    /// Tells the other ranks that this rank sends no more messages, and why.
    fn leave(&mut self, why: &str);
}

/// Parallel ordered paths between the ranks of one machine (NCCL's channels), each served by one thread of a rank at a time.
pub(super) trait Lanes {
    /// Returns the number of lanes, the same on every rank.
    fn count(&self) -> usize;

    /// Exchanges one slice; each lane exchanges its own part of the slice.
    ///
    /// # Errors
    /// Errors of [`Transport::exchange`].
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault>;
}

/// True with `CLAYSTONE_DISTRIBUTED_DEBUG=1`.
pub(super) fn is_debug() -> bool {
    std::env::var("CLAYSTONE_DISTRIBUTED_DEBUG").is_ok_and(|value| !matches!(&*value, "" | "0" | "off"))
}

/// Returns the bytes of a slice: few enough for the caches of a process with one thread, or enough to divide among threads.
pub(super) fn default_slice_bytes() -> usize {
    if threads() == 1 { 1 << 20 } else { 4 << 20 }
}

/// The collective that an exchange belongs to.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // `op` is only printed by MPI ranks before they exit
pub(super) struct Call {
    pub op: &'static str,
    pub context: u32,
}

/// A peer that failed, left the job or timed out.
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
