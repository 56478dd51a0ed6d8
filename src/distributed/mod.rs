//! Training on several devices and machines: groups of ranks, collectives, and data parallel training.
//!
//! A program's ranks are processes under `mpirun` ([`Group::world`], feature `mpi`) or threads of one process
//! ([`Group::threads`]). Collectives are methods of [`Group`].

mod checkpoint;
mod collective;
mod data_parallel;
mod engine;
mod group;
#[cfg(feature = "mpi")]
mod lanes;
#[cfg(feature = "mpi")]
mod mpi;
mod plan;
mod reduce;
#[cfg(feature = "mpi")]
mod rings;
mod sampler;
mod staging;
mod sync_batch_norm;
mod threads;
mod transport;
mod zero;

pub use checkpoint::{load_checkpoint, save_checkpoint, save_sharded_checkpoint};
pub use data_parallel::{DataParallel, DataParallelOptions};
pub use engine::Work;
pub use group::Group;
pub use reduce::ReduceOp;
pub use sampler::{DistributedSampler, DistributedSamplerConfig};
pub use sync_batch_norm::SyncBatchNorm;
pub use zero::ZeroRedundancyOptimizer;
