//! Who owns the bytes.
//!
//! A [`Storage`] is a handle on an [`Allocation`]: a run of bytes on one device, which goes back to that device's
//! caching allocator when the last handle is dropped. Tensors that are views of each other hold the same storage. This
//! room knows bytes, never shapes.
//!
//! From the ground up: a driver gives out segments of a device's memory (`driver`; `host` and `opencl` are the two that
//! run, a third simulates a device for tests). `blocks` cuts segments into blocks and merges them again. `caching` is
//! the allocator over both: it decides when to ask the driver, what to do when there is no more, and counts everything
//! ([`DeviceStats`]). `registry` has one allocator a device. `access` lets the rest of the crate at the bytes.

mod access;
mod blocks;
mod caching;
mod driver;
mod host;
mod opencl;
mod registry;
#[cfg(test)]
mod sim;
mod stats;
#[cfg(test)]
mod tests;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

pub(crate) use access::with_host;
pub(crate) use opencl::ClPlace;
pub use stats::{DeviceStats, PoolStats, Stat};

use crate::{Device, Element, Error, Result};
use caching::{CachingAllocator, Place};
use driver::Driver;
use host::{Host, HostMemory};
use opencl::OpenCl;

/// A handle on bytes of one device. Cloning makes another handle on the same bytes.
///
/// ```
/// use claystone::{Device, Tensor};
/// let a = Tensor::zeros(&[3, 4], Device::Cpu)?;
/// assert_eq!(a.storage().nbytes(), 48);
/// assert!(a.t()?.storage().ptr_eq(a.storage()));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Clone)]
pub struct Storage(Arc<Allocation>);

impl Storage {
    /// The device the bytes are on.
    pub fn device(&self) -> Device {
        self.0.device()
    }

    /// The size in bytes, as asked for.
    pub fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// Whether both are handles on the same allocation.
    pub fn ptr_eq(&self, other: &Storage) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The allocation that owns the bytes.
    pub fn allocation(&self) -> &Allocation {
        &self.0
    }

    /// `bytes` bytes with unspecified (but initialised) contents. Zero bytes touch no driver.
    pub(crate) fn alloc(device: Device, bytes: usize) -> Result<Storage> {
        let home = match device {
            _ if bytes == 0 => Home::Empty,
            Device::Cpu => Home::Host(HostHome::lease(registry::host(), bytes)?),
            Device::OpenCL(index) => Home::OpenCl(Lease::new(registry::opencl(index)?, bytes)?),
        };
        Ok(Storage::new(device, bytes, home))
    }

    /// `bytes` zero bytes.
    pub(crate) fn alloc_zeroed(device: Device, bytes: usize) -> Result<Storage> {
        let storage = Storage::alloc(device, bytes)?;
        storage.fill(0, bytes, &[0])?;
        Ok(storage)
    }

    /// A storage on the CPU device that owns the vector's elements where they are. The allocator does not count it.
    pub(crate) fn adopt<T: Element>(v: Vec<T>) -> Storage {
        let bytes = size_of_val(v.as_slice());
        let home = match bytes {
            0 => Home::Empty,
            _ => Home::Host(HostHome::adopt(HostMemory::from_vec(v))),
        };
        Storage::new(Device::Cpu, bytes, home)
    }

    /// The buffer and the offset to enqueue work on. Empty storages have none, nor need it: callers launch nothing.
    pub(crate) fn cl(&self) -> Result<ClPlace<'_>> {
        match &self.0.home {
            Home::OpenCl(lease) => Ok(ClPlace {
                device: lease.allocator.driver().cl(),
                buffer: lease.place.memory(),
                offset: lease.place.offset(),
            }),
            _ => Err(Error::invalid("storage", format!("{self:?} are not in OpenCL memory"))),
        }
    }

    fn new(device: Device, size: usize, home: Home) -> Storage {
        Storage(Arc::new(Allocation { device, size, version: AtomicU64::new(0), home }))
    }

    /// Whether this is the only handle, so that nobody would notice a change.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// How often the contents have been changed in place, shared by all views: autograd compares it.
    pub(crate) fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// To be called by every in-place operation. Transfers do not call it.
    pub(crate) fn bump_version(&self) {
        self.0.version.fetch_add(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A run of bytes on a device. Dropping it gives its block back to the device's allocator.
pub struct Allocation {
    device: Device,
    size: usize,
    version: AtomicU64,
    home: Home,
}

/// Where an allocation's bytes are.
enum Home {
    /// Nowhere: there are none.
    Empty,
    Host(HostHome),
    OpenCl(Lease<OpenCl>),
}

impl Allocation {
    /// The device the bytes are on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The size in bytes, as asked for.
    pub fn nbytes(&self) -> usize {
        self.size
    }

    /// The allocator's number of the segment the block lies in; `None` for an empty allocation and for one that was
    /// taken over from the host.
    pub fn segment(&self) -> Option<u64> {
        self.place().map(|(segment, _)| segment)
    }

    /// Where in the segment the block begins, in bytes; 0 where there is no segment.
    pub fn offset(&self) -> usize {
        self.place().map_or(0, |(_, offset)| offset)
    }

    fn place(&self) -> Option<(u64, usize)> {
        match &self.home {
            Home::Empty => None,
            Home::Host(home) => match &home.owner {
                Owner::Allocator(lease) => Some((lease.place.segment(), lease.place.offset())),
                Owner::Adopted(_) => None,
            },
            Home::OpenCl(lease) => Some((lease.place.segment(), lease.place.offset())),
        }
    }

    /// The first byte and the number of bytes in host memory; no bytes, aligned all the same, elsewhere.
    fn host_range(&self) -> (NonNull<u8>, usize) {
        match &self.home {
            Home::Host(home) => (home.start, self.size),
            _ => (NonNull::<Aligned>::dangling().cast(), 0),
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on {}", self.size, self.device)?;
        match self.place() {
            Some((segment, offset)) => write!(f, " at segment {segment} + {offset}"),
            None => Ok(()),
        }
    }
}

/// Makes empty slices as aligned as any others: casting them to elements must not fail.
#[repr(align(512))]
struct Aligned;

/// Bytes in host memory. The lock is held while slices of them exist: safe code may read and write views of one
/// storage from many threads.
struct HostHome {
    lock: RwLock<()>,
    start: NonNull<u8>,
    owner: Owner,
}

enum Owner {
    Allocator(Lease<Host>),
    Adopted(#[expect(dead_code, reason = "kept alive")] HostMemory),
}

// SAFETY: the bytes `start` points to are owned through `owner`, which is Send and Sync; references to them are made
// only with `lock` held.
unsafe impl Send for HostHome {}
// SAFETY: as above.
unsafe impl Sync for HostHome {}

impl HostHome {
    fn lease(allocator: &'static CachingAllocator<Host>, bytes: usize) -> Result<HostHome> {
        let lease = Lease::new(allocator, bytes)?;
        // SAFETY: the allocator's blocks lie inside their segment.
        let start = unsafe { lease.place.memory().start().add(lease.place.offset()) };
        Ok(HostHome { lock: RwLock::new(()), start, owner: Owner::Allocator(lease) })
    }

    fn adopt(memory: HostMemory) -> HostHome {
        HostHome { lock: RwLock::new(()), start: memory.start(), owner: Owner::Adopted(memory) }
    }
}

/// A block that goes back to its allocator on drop.
struct Lease<D: Driver + 'static> {
    place: ManuallyDrop<Place<D::Memory>>,
    allocator: &'static CachingAllocator<D>,
}

impl<D: Driver> Lease<D> {
    fn new(allocator: &'static CachingAllocator<D>, bytes: usize) -> Result<Lease<D>> {
        Ok(Lease { place: ManuallyDrop::new(allocator.alloc(bytes)?), allocator })
    }
}

impl<D: Driver> Drop for Lease<D> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used again.
        let place = unsafe { ManuallyDrop::take(&mut self.place) };
        self.allocator.give_back(place);
    }
}
