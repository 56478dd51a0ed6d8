//! The interface through which collectives send bytes to other ranks, implemented for MPI and for threads.

use super::plan::{Lane, Plan};
use crate::device::cpu::threads;
use crate::{Error, Result};

/// The position of a rank in its job, and numbers that its collectives share.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub rank: usize,
    pub size: usize,
    /// This rank's number among the ranks of the job on this machine.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))] // ranks in threads choose their devices
    pub local_rank: usize,
    /// The number of bytes of the slices into which collectives cut tensors. Equal on every rank.
    pub slice_bytes: usize,
    /// The lowest context that no group of this rank has used yet.
    pub next_context: u32,
}

/// Point-to-point messages. Ranks have their numbers in the job. The `context` of a [`Call`] identifies the group of a message.
pub(super) trait Transport {
    fn position(&mut self) -> &mut Position;

    /// Sends and receives these messages concurrently. Each has its peer's rank. Messages from one rank to another in the same context
    /// arrive in the order of sending, and with the size with which they were sent. Returns a [`Fault`] if a peer has left the job or does
    /// not answer before the timeout.
    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault>;

    /// Returns the lanes between `ranks`, which include this rank. `None` unless all of them run on one machine.
    fn lanes(&mut self, _ranks: &[usize]) -> Option<&mut dyn Lanes> {
        None
    }

    /// Tells the other ranks that this rank sends no more messages. `why` is the reason.
    fn leave(&mut self, why: &str);
}

/// Parallel ordered connections between the ranks of one machine (NCCL's channels). One thread of each rank serves a lane at a time.
pub(super) trait Lanes {
    /// Returns the number of lanes. Equal on every rank.
    fn count(&self) -> usize;

    /// Exchanges one slice. Each lane exchanges its own share of the slice. Fails as [`Transport::exchange`] does.
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault>;
}

/// True if `CLAYSTONE_DISTRIBUTED_DEBUG=1`.
pub(super) fn is_debug() -> bool {
    std::env::var("CLAYSTONE_DISTRIBUTED_DEBUG").is_ok_and(|value| !matches!(&*value, "" | "0" | "off"))
}

/// Returns the bytes of a slice. With one thread, a slice fits in the caches; with several, it is large enough to divide among them.
pub(super) fn default_slice_bytes() -> usize {
    if threads() == 1 { 1 << 20 } else { 4 << 20 }
}

/// The collective to which an exchange belongs.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // `op` is only printed by MPI ranks before they exit
pub(super) struct Call {
    pub op: &'static str,
    pub context: u32,
}

/// The failure of a peer: it failed, left the job, or did not answer before the timeout.
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
