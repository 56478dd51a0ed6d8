//! Groups of ranks: every collective against what one process computes, and training that gives what one rank gives.

#[path = "../common/mod.rs"]
mod common;

mod collectives;
mod faults;
#[cfg(feature = "mpi")]
mod mpi;
mod training;
