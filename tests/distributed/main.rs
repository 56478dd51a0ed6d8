//! Groups of ranks. Collectives are compared with results of one process, and training on several ranks with training on one rank.

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
