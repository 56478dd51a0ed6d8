//! Other allocators in place of a device's own.

use std::collections::{BTreeMap, btree_map::Entry};
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use claystone::storage::{
    Allocator, At, Backend, Config, DirectAllocator, Driver, Failure, Memory, allocator, build_allocator, driver,
    set_allocator,
};
use claystone::{Device, Result};

use crate::device::device;
use crate::pointers::borrow;
use crate::status::{ClaystoneStatus, Fault, guard};

/// The allocators of the devices whose caching was switched off once: the device's own, and one that caches nothing.
static SWITCHED: Mutex<BTreeMap<i32, [Arc<dyn Allocator>; 2]>> = Mutex::new(BTreeMap::new());

/// Enables or disables the caching of a device's freed memory. With `enable` false, every new allocation is one of the driver's, and is
/// returned to the driver when it is freed. Statistics are those of the allocator in use; memory that is live keeps its allocator.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_enable_caching(number: i32, enable: bool) -> ClaystoneStatus {
    guard("claystone_memory_enable_caching", || {
        let device = device(number)?;
        let mut switched = SWITCHED.lock().unwrap_or_else(PoisonError::into_inner);
        let both = match switched.entry(number) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(_) if enable => return Ok(()),
            Entry::Vacant(entry) => {
                let config = Config { backend: Backend::Direct, ..Config::from_env()? };
                let direct = DirectAllocator::new(driver(device)?, config)?;
                entry.insert([allocator(device)?, Arc::new(direct)])
            }
        };
        Ok(set_allocator(device, Arc::clone(&both[usize::from(!enable)]))?)
    })
}

/// Functions that allocate host memory. Any thread may call them, several at a time. No function may be left by an exception or a jump.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAllocator {
    /// Returns `nbytes` bytes at any address; null if there is no memory.
    pub allocate: Option<unsafe extern "C" fn(data: *mut c_void, nbytes: usize) -> *mut c_void>,
    /// Frees memory that `allocate` returned for `nbytes` bytes.
    pub free: Option<unsafe extern "C" fn(data: *mut c_void, memory: *mut c_void, nbytes: usize)>,
    /// Passed to the functions. Valid until the process ends.
    pub data: *mut c_void,
}

// SAFETY: the C program promises that any thread may call the functions with the data.
unsafe impl Send for ClaystoneAllocator {}
// SAFETY: as above.
unsafe impl Sync for ClaystoneAllocator {}

/// The CPU device's memory, whose segments are allocated by functions of the program.
struct PluggedDriver {
    functions: ClaystoneAllocator,
    own: Arc<dyn Driver>,
}

/// A piece of memory that `allocate` returned.
struct Piece {
    functions: ClaystoneAllocator,
    memory: NonNull<c_void>,
    nbytes: usize,
}

// SAFETY: the C program promises that any thread may free the memory.
unsafe impl Send for Piece {}
// SAFETY: shared references give no access to the memory.
unsafe impl Sync for Piece {}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(free) = self.functions.free {
            // SAFETY: the C program promises a function that may be called with its data and a piece that `allocate` returned.
            unsafe { free(self.functions.data, self.memory.as_ptr(), self.nbytes) }
        }
    }
}

impl fmt::Debug for PluggedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of the program's allocator on {}", self.device())
    }
}

// SAFETY: the C program promises memory of `nbytes` bytes that nothing else uses until it is freed. Bytes are only moved by the CPU
// device's own driver, whose calls return when their work is done.
unsafe impl Driver for PluggedDriver {
    fn device(&self) -> Device {
        self.own.device()
    }

    fn capacity(&self) -> u64 {
        self.own.capacity()
    }

    fn largest_segment(&self) -> usize {
        self.own.largest_segment()
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let (alignment, allocate) = (self.alignment(), self.functions.allocate.ok_or(Failure::HostMemory)?);
        let nbytes = bytes.checked_add(alignment).ok_or(Failure::TooBig)?;
        // SAFETY: the C program promises a function that may be called with its data.
        let memory = NonNull::new(unsafe { allocate(self.functions.data, nbytes) }).ok_or(Failure::HostMemory)?;
        let piece = Piece { functions: self.functions, memory, nbytes };
        let skipped = memory.cast::<u8>().align_offset(alignment);
        // SAFETY: at most `alignment` bytes are skipped, so that `bytes` bytes of the piece remain. They count as initialised, like all
        // memory that C passes, and the C program promises that nothing else uses them.
        unsafe { Memory::of_host(memory.cast().add(skipped), bytes, piece) }.map_err(Failure::Other)
    }

    // SAFETY: the caller upholds the contract of the trait's method, which is that of the driver below.
    unsafe fn copy(&self, stream: claystone::device::StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.own.copy(stream, from, to, bytes) }
    }

    // SAFETY: as for `copy`.
    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.own.read(from, to) }
    }

    // SAFETY: as for `copy`.
    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.own.write(from, to) }
    }
}

/// Takes the segments of the CPU device from functions of the program from now on. Segments are cached and divided as configured, but do not
/// grow in place, because a function allocates a segment as a whole. Memory that is live stays with the earlier allocator. An error for OpenCL devices, whose memory is a `cl_mem` and not an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_set_allocator(
    number: i32,
    functions: *const ClaystoneAllocator,
) -> ClaystoneStatus {
    guard("claystone_memory_set_allocator", || {
        // SAFETY: the caller promises a pointer that is null or valid for reading.
        let functions = *unsafe { borrow(functions, "functions")? };
        let device = device(number)?;
        if device != Device::Cpu {
            let why = "memory of an OpenCL device is a cl_mem, and no address that an allocator could return";
            return Err(Fault::Argument(why.into()));
        }
        if functions.allocate.is_none() || functions.free.is_none() {
            return Err(Fault::Argument("allocate or free is null".into()));
        }
        let plugged = Arc::new(PluggedDriver { functions, own: driver(device)? });
        let config = Config { expandable_segments: false, ..Config::from_env()? };
        let allocator = build_allocator(plugged, config)?;
        let mut switched = SWITCHED.lock().unwrap_or_else(PoisonError::into_inner);
        set_allocator(device, allocator)?;
        switched.remove(&number);
        Ok(())
    })
}
