//! Memory: storages, which own the bytes of tensors, and the allocators that the bytes come from.
//!
//! A [`Storage`] is a reference-counted handle on an [`Allocation`]: a range of bytes on one device. Tensors that are
//! views of each other hold the same storage. Dropping the last handle returns the bytes to the device's allocator.
//! This module handles bytes, never shapes.
//!
//! The layers, from the bottom up:
//!
//! - A [`Driver`] creates segments, which are large buffers in a device's memory.
//! - An [`Allocator`] divides segments into [`Block`]s. [`CachingAllocator`] is the default; [`Config`] has the
//!   settings.
//! - `registry` holds one allocator per device.
//! - `allocation` defines the handles, and `access` gives the rest of the crate access to the bytes.

mod absent;
mod access;
mod allocation;
mod allocator;
mod block;
mod caching;
mod captured;
mod config;
mod counters;
mod device;
mod direct;
#[cfg(feature = "dlpack")]
mod dlpack;
pub(crate) mod driver;
mod dry;
mod exclusive_host;
mod guard;
mod history;
mod hooks;
mod host_borrow;
mod host_owner;
mod images;
mod import;
mod logging;
mod mapped;
mod memory_mode;
mod peak;
mod per_device;
pub mod plan;
mod pool;
mod registry;
mod scope;
mod segment;
#[cfg(feature = "mpi")]
mod shared_memory;
mod sidecar;
mod snapshot_on_oom;
mod stats;
#[cfg(test)]
mod tests;
mod thread;
mod uninit;

pub use crate::error::parse_bytes;
pub(crate) use access::{with_host, with_host_few};
pub use allocation::{Allocation, Storage};
pub use allocator::Allocator;
pub(crate) use block::advance_use_clock;
pub use block::{Block, BlockLocation};
pub(crate) use caching::CaptureClaim;
pub use caching::{CachingAllocator, EnteredPool, MemPool, MemPoolOptions, PoolCheckpoint, use_mem_pool};
pub(crate) use captured::{CapturedMemory, CapturedStorage, MemoryCapture, SegmentRange, StorageUses};
pub use config::{Backend, Config, ConfigKey, MemoryMode, SegmentSizes, Spill};
pub use direct::DirectAllocator;
#[cfg(feature = "dlpack")]
pub use dlpack::DlpackMemory;
pub(crate) use driver::opencl::ClBlockLocation;
pub use driver::pinned::{DurationStat, PinnedStats};
pub use driver::{
    At, Call, Driver, Failure, ImageDesc, ImageFormat, Marker, Memory, Progress, Sim, SimOptions, driver,
};
pub use dry::{Assumption, DeviceEstimate, Estimate, Role, begin_dry_run, dry_run, end_dry_run, min_capacity};
pub(crate) use exclusive_host::ExclusiveHost;
pub use guard::GuardAllocator;
pub use history::{
    Annotation, BlockInfo, BlockState, Caller, Context, ContextLevel, CsvAction, CsvEvent, CsvLog, Fragmentation,
    Frame, FreeSpace, History, HistoryOptions, LiveBlock, LiveMemory, PeakMemory, Recording, SegmentInfo, SegmentType,
    Setting, Snapshot, Stage, TraceAction, TraceEntry, annotate, annotations, set_context, with_context,
};
pub use hooks::{FreeMemory, OomObserver, OutOfMemoryEvent, Registration};
pub(crate) use host_owner::HostElements;
pub use images::Image;
pub(crate) use images::ImageKey;
pub use logging::{AllocationLog, LoggingAllocator};
pub use mapped::{MappedFile, SharedFile};
pub(crate) use memory_mode::memory_mode;
pub use memory_mode::with_memory_mode;
pub use peak::{PeakScope, ScopePeak, peak};
pub use pool::{PoolAllocator, StorageType};
pub use registry::{allocator, build_allocator, set_allocator};
pub use segment::Segment;
#[cfg(feature = "mpi")]
pub(crate) use shared_memory::SharedMemory;
pub use stats::{DeviceStats, MemPoolStats, PoolStats, Stat};
pub(crate) use uninit::is_uninit_scope;
pub use uninit::uninit;
