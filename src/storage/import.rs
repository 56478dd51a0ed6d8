//! Storages over memory that other code owns.

use std::any::Any;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::allocation::{AllocatorRef, Backing, HostBytes, Lease, Storage};
use super::allocator::Allocator;
use super::block::Block;
use super::driver::host::HostMemory;
use super::driver::opencl::OpenCl;
use super::host_owner::HostOwner;
use super::segment::Segment;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// Number of bytes that kernels access together at the end of a storage: kernels write the last 16 bytes whole, and read vectors of
/// 16 bytes.
const TAIL_VECTOR_BYTES: usize = 16;

impl Storage {
    /// Makes a storage of `bytes` bytes at `offset` in an OpenCL buffer that other code created: the counterpart of
    /// [`export_cl`](Self::export_cl). The buffer must belong to the device's own context ([`Device::cl_context`]), and
    /// is retained while the storage lives. Allocators do not count the buffer.
    ///
    /// Queues of other code are not ordered with streams of this crate, unless the queues were
    /// [adopted](Device::adopt). Finish the queues before this crate uses the bytes, and call
    /// [`Stream::synchronize`](crate::Stream::synchronize) before other code uses them again.
    ///
    /// ```
    /// use claystone::storage::Storage;
    /// use claystone::{DType, Device, Tensor};
    /// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
    /// let x = Tensor::ones(8, device)?; // a buffer that other code might have made
    /// let (buffer, offset) = x.storage().export_cl()?;
    /// // SAFETY: x owns the bytes, is not changed, and its stream is the one that reads them.
    /// let storage = unsafe { Storage::import_cl(device, buffer, offset, 32)? };
    /// assert_eq!(Tensor::from_storage(storage, 8, DType::F32)?.to_vec::<f32>()?, [1.0; 8]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`]
    /// - for the CPU device;
    /// - if `buffer` is not a buffer of the device's context that kernels and the host may read and write;
    /// - if the buffer uses host memory at an address that is not a multiple of 16;
    /// - if the range is not inside the buffer, does not begin at a multiple of 16 bytes, or leaves no room to write
    ///   its last 16 bytes whole (kernels write up to 15 bytes behind the range).
    ///
    /// Also errors of the driver.
    ///
    /// # Safety
    /// `buffer` is a `cl_mem` that lives during the call, and is acquired if it is shared with a graphics library. While the
    /// storage lives, no other code writes to its bytes, or to the bytes from its end to the next multiple of 16, while this crate
    /// uses the storage. No other code relies on the contents of the bytes between the storage's end and that multiple.
    pub unsafe fn import_cl(device: Device, buffer: *mut c_void, offset: usize, bytes: usize) -> Result<Storage> {
        let fail = |reason: String| Err(Error::invalid("import_cl", reason));
        let Device::OpenCL(index) = device else {
            return fail(
                "the CPU device has no OpenCL buffers: Storage::from_host_memory takes the host's memory".into(),
            );
        };
        if buffer.is_null() {
            return fail("the buffer is null".into());
        }
        let driver = OpenCl::open(index)?;
        let (memory, size) = driver.import_buffer("import_cl", buffer)?;
        let whole = bytes.checked_next_multiple_of(TAIL_VECTOR_BYTES);
        if !offset.is_multiple_of(TAIL_VECTOR_BYTES)
            || whole.and_then(|whole| whole.checked_add(offset)).is_none_or(|end| end > size)
        {
            return fail(format!(
                "{bytes} bytes at {offset} of a buffer of {size}: begin at a multiple of {TAIL_VECTOR_BYTES}, and leave room for the last \
                 {TAIL_VECTOR_BYTES} bytes, which kernels write whole"
            ));
        }
        if bytes == 0 {
            return Storage::alloc(device, 0);
        }
        let segment = Arc::new(Segment::new(memory, size));
        // SAFETY: the driver reported the size; the caller promises that the bytes belong to nobody else.
        let block = unsafe { Block::new(&segment, offset, whole.unwrap_or(bytes), bytes)? };
        Ok(storage_of_external_block(driver, block, None))
    }

    /// Makes a storage on the CPU device of `bytes` bytes of host memory, without a copy (PyTorch's `torch.from_blob`).
    /// `owner` keeps the memory alive, and is dropped with the last handle. Allocators do not count the bytes.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// use claystone::storage::Storage;
    /// use claystone::{DType, Tensor};
    /// let mut values = vec![1f64, 2.0, 3.0, 4.0]; // which another library might have made
    /// let start = NonNull::new(values.as_mut_ptr().cast()).expect("not empty");
    /// // SAFETY: the vector owns 32 bytes, is the storage's alone from now on, and its values stay where they are.
    /// let storage = unsafe { Storage::from_host_memory(start, 32, values)? };
    /// assert_eq!(Tensor::from_storage(storage, [2, 2], DType::F64)?.sum((), false)?.item::<f64>()?, 10.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address is not a multiple of 8, as elements of 8 bytes need.
    ///
    /// # Safety
    /// The `bytes` bytes starting at `start` are initialised, readable and writable until `owner` is dropped, and
    /// no other code reads or writes them until then.
    pub unsafe fn from_host_memory(start: NonNull<u8>, bytes: usize, owner: impl Any + Send + Sync) -> Result<Storage> {
        if !start.addr().get().is_multiple_of(8) {
            let reason = format!("the address {start:p} is not a multiple of 8: copy with Tensor::from_slice instead");
            return Err(Error::invalid("from_host_memory", reason));
        }
        // SAFETY: the caller promises what `owned_by` requires.
        let memory = unsafe { HostMemory::owned_by(start, bytes, Box::new(owner), false) };
        Ok(Storage::from_host_bytes(bytes, HostBytes::Owned(memory)))
    }

    /// Allocates `bytes` bytes of host memory as a storage on the CPU device, pinned for transfers to and from `device`, and
    /// returns its address. Another library can fill the memory there; [`Tensor::pin_memory`](crate::Tensor::pin_memory) is the
    /// counterpart for tensors. For the CPU device, and if no pinned memory is left, the memory is ordinary host memory, which does
    /// not move either. The contents are unspecified.
    ///
    /// Code that reads or writes at the address must keep the storage alive. No operation on the storage, and no
    /// [enqueued](crate::Tensor::copy_non_blocking_) copy, may run while that code reads or writes.
    ///
    /// ```
    /// use claystone::storage::Storage;
    /// use claystone::{DType, Device, Tensor};
    /// let (storage, start) = Storage::pinned_host_memory(Device::best(), 8)?;
    /// // SAFETY: 8 bytes, aligned to 64, of a storage that lives and that no operation uses.
    /// unsafe { start.cast::<[f32; 2]>().write([1.0, 2.0]) };
    /// let x = Tensor::from_storage(storage, 2, DType::F32)?.to_device(Device::best())?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist, [`Error::Invalid`] for more bytes than the host has, and device failures.
    pub fn pinned_host_memory(device: Device, bytes: usize) -> Result<(Storage, NonNull<u8>)> {
        device.info()?;
        let too_many = || Error::invalid("pinned_host_memory", format!("the host has no {bytes} bytes"));
        let storage = match Storage::pinned(device, bytes)? {
            Some(storage) => storage,
            None => {
                let memory = HostMemory::zeroed(bytes).ok_or_else(too_many)?;
                Storage::from_host_bytes(bytes, HostBytes::Owned(memory))
            }
        };
        let (start, _) = storage.allocation().host_range();
        Ok((storage, start))
    }
}

/// Makes a storage of a block that no allocator handed out.
pub(super) fn storage_of_external_block(driver: OpenCl, block: Block, host: Option<HostOwner>) -> Storage {
    let (device, bytes) = (driver.device.device(), block.requested());
    let owner = AllocatorRef::Scope(Arc::new(ImportedBuffers { driver, host }));
    Storage::new(device, bytes, Backing::OpenCl(driver, Lease { block: ManuallyDrop::new(block), owner }))
}

/// The allocator of imported buffers: allocates nothing, and releases a buffer when the buffer's block is returned.
#[derive(Debug)]
pub(super) struct ImportedBuffers {
    driver: OpenCl,
    /// The owner of the host memory that the buffer uses. This owner is dropped after the buffer is released.
    pub(super) host: Option<HostOwner>,
}

impl Allocator for ImportedBuffers {
    fn device(&self) -> Device {
        self.driver.device.device()
    }

    fn allocate(&self, bytes: usize, _: StreamId) -> Result<Block> {
        Err(Error::invalid("allocate", format!("imported memory cannot allocate {bytes} bytes")))
    }

    fn deallocate(&self, block: Block) {
        if let Some(host) = &self.host
            && self.driver.device.finish_host_memory().is_err()
        {
            host.leak(); // commands of a lost device may use the memory and never end
        }
        let none = block.into_parent_block(); // consumes the block, which drops its handle on the segment
        debug_assert!(none.is_none());
    }

    /// Does nothing: the driver keeps a buffer until the commands that use it are done.
    fn record_stream(&self, _: &Block, _: StreamId) {}
}
