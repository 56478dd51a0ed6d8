//! OpenCL devices.
//!
//! [`discovery`] lists the devices and opens them, [`description`] has their properties, [`adopt`] adds a device of other code. A
//! device is an object in three parts: its [`context`] with its memory objects, its [`queues`] with all waits, and its [`commands`].
//! Every stream has one in-order queue. Work is submitted under the device's only lock and waited for outside the lock, so a
//! waiting thread never stops another thread from submitting.
//!
//! Kernels: [`program`] builds kernels, [`cache`] stores their binaries on disk, [`carry`] in a file for other machines. [`fault`]
//! has the memory in which kernels record invalid operands. [`capture`] records launches instead, and replays them. [`probe`]
//! finds out which features kernels can use.
//!
//! Tuning: [`tuning`] has the numbers compiled into kernels, and values per kernel and size class.
//!
//! [`host_memory`] keeps the host's side of a transfer alive until the transfer is over. [`driver`] has the calls of the driver
//! and the types that own its handles. [`exit`] stops all work before the process ends.

mod adopt;
mod cache;
mod capabilities;
pub(crate) mod capture;
mod carry;
mod commands;
mod context;
mod description;
mod discovery;
mod driver;
mod errors;
mod exit;
mod fault;
mod functions;
mod hints;
mod host_memory;
mod launch;
#[cfg(test)]
#[path = "../../../tests/readers/mutate.rs"]
mod mutate;
mod probe;
mod program;
mod queue;
mod queues;
mod retry;
#[cfg(test)]
mod tests;
pub(crate) mod tuning;
pub(crate) mod user_kernel;

pub(crate) use adopt::adopt;
pub use cache::ProgramCache;
pub(crate) use capabilities::{capabilities, platforms};
pub use carry::read_cache_file;
pub(crate) use carry::{export_cache, import_cache};
pub(crate) use commands::MapRegion;
pub(crate) use context::{ARRIVAL_COUNTERS, ClDevice, MappedBuffer};
pub(crate) use discovery::{count, info, is_available, may_have_any, open, open_device, opened};
pub(crate) use driver::{ClAt, ClBuffer, ClEvent, ClImage, ClKernel};
pub(crate) use errors::{ClError, Class};
pub(crate) use fault::{Fault, index_fault};
pub use fault::{report_faults_to_any_thread, reported_faults};
pub(crate) use host_memory::HostMemory;
pub(crate) use launch::Arg;
pub(crate) use probe::TensorCores;
pub(crate) use program::{FAST_DIVISION, MOST_REGISTERS, SM_90A};
pub(crate) use retry::Backoff;
pub(crate) use tuning::{MAX_TUNED_GROUP_ITEMS, SizeClass, TuningParameter, times_tuned};
pub(crate) use user_kernel::{Argument as KernelArgument, KernelBuffer, KernelTensor};
