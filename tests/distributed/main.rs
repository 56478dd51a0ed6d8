//! Groups of ranks: collectives against results of one process, and training on several ranks against one rank.

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod collectives;
mod faults;
#[cfg(feature = "mpi")]
mod mpi;
mod sampler;
mod sync_batch_norm;
mod training;
mod zero;
