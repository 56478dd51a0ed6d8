//! Memory that other code owns, as storages.

use std::any::Any;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::allocation::{Adopted, Backing, Bytes, Lease, Owner, Storage};
use super::allocator::Allocator;
use super::block::Block;
use super::driver::opencl::OpenCl;
use super::host_owner::HostOwner;
use super::segment::Segment;
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// Kernels write the last sixteen bytes of a storage whole, and read vectors of as many.
const WHOLE: usize = 16;

/// Where memory begins that programs for the CPU use as they like.
const ALIGNED: usize = 64;

impl Storage {
    /// `bytes` bytes of an OpenCL buffer that other code made, from `offset` on: the counterpart of
    /// [`export_cl`](Self::export_cl). The buffer is of the device's own context ([`Device::cl_context`]), and is retained
    /// while the storage lives. Allocators do not count it.
    ///
    /// Queues of other code are ordered with nothing here, unless they were [adopted](Device::adopt): finish them before the
    /// bytes are used here, and [`Stream::synchronize`](crate::Stream::synchronize) before they use them again.
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
    /// [`Error::Invalid`] for the CPU device, for what is no buffer of the device's context that kernels and the host may read and
    /// write, for one over host memory that is not at a multiple of 16, and for a range that is not inside, begins elsewhere than at a multiple of 16 bytes, or whose last 16 bytes are
    /// not: kernels write up to 15 bytes behind the range. What the driver refuses.
    ///
    /// # Safety
    /// `buffer` is a `cl_mem` that lives during the call, and is acquired where it is shared with a graphics library. While the storage lives, nobody else writes to the bytes, up to the
    /// multiple of 16 behind them, while they are used here, and nobody relies on what is in those behind them.
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
        let (memory, size) = driver.import("import_cl", buffer)?;
        let whole = bytes.checked_next_multiple_of(WHOLE);
        if !offset.is_multiple_of(WHOLE)
            || whole.and_then(|whole| whole.checked_add(offset)).is_none_or(|end| end > size)
        {
            return fail(format!(
                "{bytes} bytes at {offset} of a buffer of {size}: begin at a multiple of {WHOLE}, and leave room for the last \
                 {WHOLE} bytes, which kernels write whole"
            ));
        }
        if bytes == 0 {
            return Ok(Storage::new(device, 0, Backing::Empty));
        }
        let segment = Arc::new(Segment::new(memory, size));
        // SAFETY: the driver said how many bytes there are; that they are nobody else's is the caller's promise.
        let block = unsafe { Block::new(&segment, offset, whole.unwrap_or(bytes), bytes)? };
        Ok(lent(driver, block, None))
    }

    /// `bytes` bytes of the host's memory as a storage of the CPU device, without a copy (PyTorch's `torch.from_blob`).
    /// `owner` keeps them, and is dropped with the last handle. Allocators do not count them.
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
    /// [`Error::Invalid`] for an address that is no multiple of 8, as elements of 8 bytes need.
    ///
    /// # Safety
    /// `bytes` initialised bytes from `start` on are readable and writable until `owner` is dropped, and nobody else reads or
    /// writes them until then.
    pub unsafe fn from_host_memory(start: NonNull<u8>, bytes: usize, owner: impl Any + Send + Sync) -> Result<Storage> {
        if !start.addr().get().is_multiple_of(8) {
            let reason = format!("the address {start:p} is no multiple of 8: copy with Tensor::from_slice instead");
            return Err(Error::invalid("from_host_memory", reason));
        }
        let backing = match bytes {
            0 => Backing::Empty,
            _ => Backing::Adopted(Adopted::new(Bytes::Foreign(Foreign::new(start, owner)))),
        };
        Ok(Storage::new(Device::Cpu, bytes, backing))
    }

    /// `bytes` bytes of the host's memory as a storage of the CPU device, pinned for transfers to and from `device`, and where they
    /// are: for another library that fills them there, as [`Tensor::pin_memory`](crate::Tensor::pin_memory) is for tensors. For the
    /// CPU device, and where none is left, it is ordinary memory, which stays where it is as well. Contents are unspecified.
    ///
    /// Whoever reads or writes at the address sees to it that the storage lives, and that no operation on it runs meanwhile, nor a copy
    /// that was [enqueued](crate::Tensor::copy_non_blocking_).
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
    /// [`Error::NoDevice`], device failures, [`Error::Invalid`] for more bytes than the host has.
    pub fn pinned_host_memory(device: Device, bytes: usize) -> Result<(Storage, NonNull<u8>)> {
        device.info()?;
        let storage = match Storage::pinned(device, bytes)? {
            Some(storage) => storage,
            None => ordinary(bytes)?,
        };
        let (start, _) = storage.allocation().host_range();
        Ok((storage, start))
    }
}

/// Bytes of the host's memory, aligned as the CPU's vectors are, that stay where they are.
fn ordinary(bytes: usize) -> Result<Storage> {
    if bytes == 0 {
        return Ok(Storage::new(Device::Cpu, 0, Backing::Empty));
    }
    let too_many = || Error::invalid("pinned_host_memory", format!("the host has no {bytes} bytes"));
    let mut memory: Vec<u8> = Vec::new();
    let whole = bytes.checked_add(ALIGNED).ok_or_else(too_many)?;
    memory.try_reserve_exact(whole).map_err(|_| too_many())?;
    memory.resize(whole, 0);
    let offset = memory.as_ptr().align_offset(ALIGNED);
    let start = NonNull::from(&mut memory[offset..]).cast();
    Ok(Storage::new(Device::Cpu, bytes, Backing::Adopted(Adopted::new(Bytes::Foreign(Foreign::new(start, memory))))))
}

/// Memory that somebody else owns.
pub(super) struct Foreign {
    start: NonNull<u8>,
    /// Dropped when nobody uses the bytes any more.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the bytes are the storage's alone as long as it uses them, as `from_host_memory` is promised.
unsafe impl Send for Foreign {}
// SAFETY: as above; the storage's lock guards them.
unsafe impl Sync for Foreign {}

impl Foreign {
    pub(super) fn new(start: NonNull<u8>, owner: impl Any + Send + Sync) -> Foreign {
        Foreign { start, _owner: Box::new(owner) }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

/// A storage of a block that no allocator has made.
pub(super) fn lent(driver: OpenCl, block: Block, host: Option<HostOwner>) -> Storage {
    let (device, bytes) = (driver.device.device(), block.requested());
    let owner = Owner::Scope(Arc::new(Imported { driver, host }));
    Storage::new(device, bytes, Backing::OpenCl(driver, Lease { block: ManuallyDrop::new(block), owner }))
}

/// Stands for the owner of imported buffers: it allocates nothing, and releases what it is given back.
#[derive(Debug)]
pub(super) struct Imported {
    driver: OpenCl,
    /// What owns the memory of the host that the buffer is over. Dropped after the buffer was released.
    pub(super) host: Option<HostOwner>,
}

impl Allocator for Imported {
    fn device(&self) -> Device {
        self.driver.device.device()
    }

    fn allocate(&self, bytes: usize, _: StreamId) -> Result<Block> {
        Err(Error::invalid("allocate", format!("{bytes} bytes of imported memory: there is only what was imported")))
    }

    fn deallocate(&self, block: Block) {
        if let Some(host) = &self.host
            && self.driver.device.finish_host_memory().is_err()
        {
            host.leak(); // commands may be using the memory for ever
        }
        let none = block.into_whole(); // which drops the handle on the segment
        debug_assert!(none.is_none());
    }

    /// The driver keeps a buffer until the commands that use it are done.
    fn record_stream(&self, _: &Block, _: StreamId) {}

    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }

    fn reset_peak_stats(&self) {}
    fn reset_accumulated_stats(&self) {}

    fn empty_cache(&self) -> Result<()> {
        Ok(())
    }
}
