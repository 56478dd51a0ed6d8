//! Groups of ranks: every collective against what one process computes, and training that gives what one rank gives.

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
