//! Memory of the host that something else owns, as storages that keep the owner.

use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::allocation::{Adopted, Backing, Bytes, Storage};
use super::block::Block;
use super::driver::opencl::{MappedHost, OpenCl};
use super::import::{Foreign, Imported, lent};
use super::segment::Segment;
use crate::device::capture;
use crate::{Device, Element, Result};

/// Kernels read and write vectors of so many bytes.
const VECTOR: usize = 16;

/// An owner of memory, on the heap so that its own parts stay where they are. Nobody looks at it again but to drop it.
pub(super) struct HostOwner {
    owner: NonNull<dyn Send>,
    leaked: AtomicBool,
}

// SAFETY: it is only dropped, by one thread, and may be sent there.
unsafe impl Send for HostOwner {}
// SAFETY: as above; nobody is given a reference to the owner.
unsafe impl Sync for HostOwner {}

impl HostOwner {
    /// Has the owner, and with it the memory, never dropped.
    pub(super) fn leak(&self) {
        self.leaked.store(true, Relaxed);
    }
}

impl Drop for HostOwner {
    fn drop(&mut self) {
        if !self.leaked.load(Relaxed) {
            // SAFETY: made from a box, and dropped here, once.
            drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
        }
    }
}

impl fmt::Debug for HostOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory of the host")
    }
}

/// Elements together with what owns them.
pub(crate) struct HostElements<T> {
    start: NonNull<T>,
    count: usize,
    owner: HostOwner,
}

impl<T: Element> HostElements<T> {
    /// The elements that `memory` gives, once.
    pub(crate) fn new<M: AsMut<[T]> + Send + 'static>(memory: M) -> HostElements<T> {
        let memory = NonNull::from(Box::leak(Box::new(memory)));
        let owner = HostOwner { owner: memory, leaked: AtomicBool::new(false) };
        // SAFETY: nobody else has it. The elements are borrowed from it exclusively, and so nobody's as long as nobody looks
        // at it, which is as long as it lives.
        let elements = unsafe { (*memory.as_ptr()).as_mut() };
        HostElements { start: NonNull::from(&mut *elements).cast(), count: elements.len(), owner }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// A storage on a device: the memory itself, kept with its owner, or a copy of it.
    ///
    /// # Errors
    /// Those of a copy.
    pub(crate) fn into_storage(self, device: Device) -> Result<Storage> {
        let (start, bytes) = (self.start.cast::<u8>(), self.count * size_of::<T>());
        if bytes == 0 {
            return Storage::alloc(device, 0);
        }
        let Device::OpenCL(index) = device else {
            let memory = Bytes::Foreign(Foreign::new(start, self.owner));
            return Ok(Storage::new(device, bytes, Backing::Adopted(Adopted::new(memory))));
        };
        let driver = OpenCl::open(index)?;
        if start.addr().get().is_multiple_of(VECTOR) && bytes.is_multiple_of(VECTOR) {
            // SAFETY: the owner is dropped when the buffer was released and what was submitted is over, or never.
            if let Some(memory) = unsafe { driver.over(start, bytes) } {
                let segment = Arc::new(Segment::new(memory, bytes));
                // SAFETY: all of a buffer that nobody else has.
                let block = unsafe { Block::new(&segment, 0, bytes, bytes)? };
                return Ok(lent(driver, block, Some(self.owner)));
            }
        }
        let storage = Storage::alloc(device, bytes)?;
        // SAFETY: elements that nobody else uses, borrowed until they are copied.
        storage.write(0, unsafe { slice::from_raw_parts(start.as_ptr(), bytes) })?;
        Ok(storage)
    }
}

impl Storage {
    /// Whether it is memory of the host that its OpenCL device works on in place, in a buffer of its own.
    pub(crate) fn is_host_buffer(&self) -> bool {
        let Backing::OpenCl(_, lease) = &self.allocation().backing else { return false };
        let imported = (lease.allocator() as &dyn std::any::Any).downcast_ref::<Imported>();
        imported.is_some_and(|imported| imported.host.is_some())
    }

    /// Maps that memory, of which this is the only handle, for the host. Waits for the device.
    ///
    /// # Errors
    /// While a graph is captured, and what the driver refuses.
    pub(super) fn map_host_buffer(&self) -> Result<MappedHost> {
        capture::refuse(self.device(), "read", "no values are computed yet that could be read")?;
        self.cl()?.map()
    }
}
