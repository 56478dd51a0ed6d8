//! Training on several devices and machines: groups of ranks, what they do together, and data parallel training.
//!
//! A program's ranks are processes under `mpirun` ([`Group::world`], feature `mpi`) or threads of one process
//! ([`Group::threads`]). What they do is in [`Group`].

mod collective;
mod data_parallel;
mod engine;
mod group;
#[cfg(feature = "mpi")]
mod mpi;
mod reduce;
mod staging;
mod threads;
mod transport;

pub use data_parallel::{DataParallel, DataParallelOptions};
pub use engine::Work;
pub use group::Group;
pub use reduce::ReduceOp;
