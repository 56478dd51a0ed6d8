//! Storages over host memory that another object owns; the storage keeps the owner alive.

use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::allocation::{Backing, HostBytes, Storage};
use super::block::Block;
use super::driver::host::HostMemory;
use super::driver::opencl::{MappedHost, OpenCl};
use super::import::{ImportedBuffers, storage_of_external_block};
use super::segment::Segment;
use crate::device::capture;
use crate::{Device, Element, Result};

/// Size, in bytes, of the vectors that kernels read and write.
const VECTOR_BYTES: usize = 16;

/// An owner of memory, boxed so that memory inside the owner does not move. After its memory was taken, the owner is only dropped.
pub(super) struct HostOwner {
    owner: NonNull<dyn Send>,
    /// Whether to never drop the owner, so that its memory stays valid.
    leaked: AtomicBool,
}

// SAFETY: the owner implements `Send`, and is only dropped, by one thread.
unsafe impl Send for HostOwner {}
// SAFETY: no code ever gets a reference to the owner.
unsafe impl Sync for HostOwner {}

impl HostOwner {
    /// Prevents the owner and its memory from being dropped.
    pub(super) fn leak(&self) {
        self.leaked.store(true, Relaxed);
    }
}

impl Drop for HostOwner {
    fn drop(&mut self) {
        if !self.leaked.load(Relaxed) {
            // SAFETY: the pointer was made from a box, and only this call drops it, once.
            drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
        }
    }
}

impl fmt::Debug for HostOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory of the host")
    }
}

/// Elements together with their owner.
pub(crate) struct HostElements<T> {
    start: NonNull<T>,
    count: usize,
    owner: HostOwner,
}

impl<T: Element> HostElements<T> {
    /// Takes ownership of `memory`, and gets its elements by one call of `as_mut`.
    pub(crate) fn new<M: AsMut<[T]> + Send + 'static>(memory: M) -> HostElements<T> {
        let memory = NonNull::from(Box::leak(Box::new(memory)));
        let owner = HostOwner { owner: memory, leaked: AtomicBool::new(false) };
        // SAFETY: no other code has a pointer to `memory`, and `memory` is not accessed again until it is dropped. The elements are
        // borrowed exclusively.
        let elements = unsafe { (*memory.as_ptr()).as_mut() };
        HostElements { start: NonNull::from(&mut *elements).cast(), count: elements.len(), owner }
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Makes a storage on a device. The storage uses the memory itself and keeps the owner if the device can use the memory in
    /// place; otherwise it is a copy.
    ///
    /// # Errors
    /// If the elements have to be copied, the errors of the copy.
    pub(crate) fn into_storage(self, device: Device) -> Result<Storage> {
        let (start, bytes) = (self.start.cast::<u8>(), self.count * size_of::<T>());
        if bytes == 0 {
            return Storage::alloc(device, 0);
        }
        let Device::OpenCL(index) = device else {
            // SAFETY: the elements are initialised and valid as long as the owner lives, and no other code uses them.
            let memory = unsafe { HostMemory::owned_by(start, bytes, Box::new(self.owner), false) };
            return Ok(Storage::from_host_bytes(bytes, HostBytes::Owned(memory)));
        };
        let driver = OpenCl::open(index)?;
        if start.addr().get().is_multiple_of(VECTOR_BYTES) && bytes.is_multiple_of(VECTOR_BYTES) {
            // SAFETY: the owner is dropped after the buffer is released and all submitted commands are done, or never.
            if let Some(memory) = unsafe { driver.wrap_host_memory(start, bytes) } {
                let segment = Arc::new(Segment::new(memory, bytes));
                // SAFETY: the block covers a whole buffer, which no other code uses.
                let block = unsafe { Block::new(&segment, 0, bytes, bytes)? };
                return Ok(storage_of_external_block(driver, block, Some(self.owner)));
            }
        }
        let storage = Storage::alloc(device, bytes)?;
        // SAFETY: no other code uses the elements, which are borrowed until they are copied.
        storage.write(0, unsafe { slice::from_raw_parts(start.as_ptr(), bytes) })?;
        Ok(storage)
    }
}

impl Storage {
    /// True if the bytes are host memory that the OpenCL device uses in place, through an OpenCL buffer over that memory.
    pub(crate) fn is_host_buffer(&self) -> bool {
        let Backing::OpenCl(_, lease) = &self.allocation().backing else { return false };
        let imported = (lease.allocator() as &dyn std::any::Any).downcast_ref::<ImportedBuffers>();
        imported.is_some_and(|imported| imported.host.is_some())
    }

    /// Maps the host memory, on which this storage is the only handle, for the host. Waits for the device.
    ///
    /// # Errors
    /// If a graph is being captured, and errors of the driver.
    pub(super) fn map_host_buffer(&self) -> Result<MappedHost> {
        capture::refuse_while_capturing(self.device(), "read", "no values are computed yet that could be read")?;
        self.cl()?.map()
    }
}
