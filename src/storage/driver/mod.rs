//! The interface between allocators and a device's memory.
//!
//! A [`Driver`] creates and releases segments, makes streams wait for each other, and moves bytes. The crate has three
//! drivers: host memory, OpenCL memory, and [`Sim`], a simulated device for testing allocators. An allocator holds none
//! of its locks while it calls a driver.

/// Safe versions of a driver's unsafe methods, for tests in which no other thread uses the memory.
#[cfg(test)]
macro_rules! safe_methods {
    ($driver:ident) => {
        impl $driver {
            fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
                // SAFETY: no other thread uses the memory.
                unsafe { Driver::copy(self, stream, from, to, bytes) }
            }

            fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
                // SAFETY: no other thread uses the memory.
                unsafe { Driver::read(self, from, to) }
            }

            fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
                // SAFETY: no other thread uses the memory.
                unsafe { Driver::write(self, from, to) }
            }

            fn shrink(&self, memory: &Memory, from: usize, to: usize) {
                // SAFETY: no other thread uses the memory.
                unsafe { Driver::shrink(self, memory, from, to) }
            }
        }
    };
}

pub(crate) mod host;
pub(super) mod host_copy;
pub(crate) mod opencl;
pub(super) mod pinned;
mod registry;
mod sim;
pub(super) mod staging;

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::StreamId;
use crate::device::opencl::{ClBuffer, ClEvent, ClImage};
pub use crate::storage::images::{ImageDesc, ImageFormat};
use crate::{Device, Error, Result};
use host::HostMemory;
pub use registry::driver;
pub use sim::{Call, Sim, SimOptions};
use sim::{SimMarker, SimMemory};

/// Alignment of tensors' blocks, in bytes: with it, kernels can convert byte offsets to indices of elements and vectors of every dtype.
pub(crate) const ALIGNMENT: usize = 512;

/// The reason that a driver could not create or commit a segment. The variants correspond to OpenCL error codes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Failure {
    /// The device's memory is full (`CL_MEM_OBJECT_ALLOCATION_FAILURE`, -4): releasing memory may help.
    DeviceMemory,
    /// The device lacks some resource (`CL_OUT_OF_RESOURCES`, -5), usually memory: releasing memory may help.
    Resources,
    /// The host's memory is full (`CL_OUT_OF_HOST_MEMORY`, -6): releasing memory may help.
    HostMemory,
    /// No segment can be that large, even on an empty device (`CL_INVALID_BUFFER_SIZE`, -61).
    TooBig,
    /// Any other error, passed on to the caller unchanged.
    Other(Error),
}

impl Failure {
    /// Returns the resource that ran out, for messages; `None` if releasing memory cannot help.
    pub fn ran_out(&self) -> Option<&'static str> {
        match self {
            Failure::DeviceMemory => Some("the device's memory (-4)"),
            Failure::Resources => Some("the device's resources (-5)"),
            Failure::HostMemory => Some("the host's memory (-6)"),
            Failure::TooBig | Failure::Other(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.ran_out()) {
            (_, Some(what)) => write!(f, "the driver ran out of {what}"),
            (Failure::Other(error), _) => fmt::Display::fmt(error, f),
            _ => f.write_str("the driver cannot create a segment that large (-61)"),
        }
    }
}

/// An owned range of a device's memory. The memory is released on drop; errors of the release are ignored.
pub struct Memory(pub(crate) MemoryKind);

/// The bytes of a block outside its device.
pub(crate) trait SpilledBytes: Send + Sync {
    /// True if the bytes are of simulated memory without contents.
    fn is_simulated(&self) -> bool;

    /// Copies the bytes from `at` on to the slice.
    fn read(&self, at: usize, to: &mut [u8]) -> Result<()>;

    /// Writes the bytes to the device, and waits.
    ///
    /// # Safety
    /// The conditions of [`Driver::write`] hold for `to` and the number of bytes. All work on them is done.
    unsafe fn write_to(&self, driver: &dyn Driver, to: At<'_>) -> Result<()>;
}

pub(crate) enum MemoryKind {
    Host(HostMemory),
    OpenCl(ClBuffer),
    Image(ClImage),
    Sim(SimMemory),
    /// Memory of a user's driver.
    Custom(Box<dyn Any + Send + Sync>),
    /// A block's bytes, spilled to the host until the device has memory for them.
    Spilled(Box<dyn SpilledBytes>),
    /// No memory any more: the segment was released while its blocks were spilled.
    Released,
}

impl Memory {
    /// Wraps memory of your own driver. `owner` is the driver's handle on the memory, and is dropped to release it.
    ///
    /// ```
    /// use claystone::storage::Memory;
    /// struct Buffer(u64); // a handle of some other system
    /// let memory = Memory::new(Buffer(7));
    /// assert_eq!(memory.get::<Buffer>().map(|buffer| buffer.0), Some(7));
    /// ```
    pub fn new(owner: impl Any + Send + Sync) -> Memory {
        Memory(MemoryKind::Custom(Box::new(owner)))
    }

    /// Wraps host memory of your own driver: `bytes` bytes starting at `start`, released by dropping `owner`. Tensors
    /// of the CPU device can be stored in such memory. See the test `tests/allocator/custom_driver.rs`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `start` is not a multiple of 512 bytes.
    ///
    /// # Safety
    /// As long as `owner` lives, the bytes are initialised, may be read and written, and are used by no other code.
    pub unsafe fn of_host(start: NonNull<u8>, bytes: usize, owner: impl Any + Send + Sync) -> Result<Memory> {
        if !start.addr().get().is_multiple_of(ALIGNMENT) {
            return Err(Error::invalid("Memory::of_host", format!("{start:?} is not at a multiple of 512 bytes")));
        }
        // SAFETY: the caller promises what `owned_by` requires.
        Ok(Memory(MemoryKind::Host(unsafe { HostMemory::owned_by(start, bytes, Box::new(owner), true) })))
    }

    /// Returns the value given to [`new`](Self::new) or [`of_host`](Self::of_host), or `None` if the value does not have type `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        let owner = match &self.0 {
            MemoryKind::Custom(owner) => &**owner,
            MemoryKind::Host(memory) => memory.owner()?,
            _ => return None,
        };
        owner.downcast_ref()
    }

    /// True if the memory is host memory that the host's code may access by address.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.0, MemoryKind::Host(_))
    }

    /// True if the memory has contents, which must be copied when a block moves.
    pub(super) fn has_contents(&self) -> bool {
        !matches!(&self.0, MemoryKind::Sim(memory) if !memory.has_contents())
    }

    pub(crate) fn released() -> Memory {
        Memory(MemoryKind::Released)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            MemoryKind::Host(_) => "host memory",
            MemoryKind::OpenCl(_) => "an OpenCL buffer",
            MemoryKind::Image(_) => "an OpenCL image",
            MemoryKind::Sim(_) => "simulated memory",
            MemoryKind::Custom(_) => "memory of another driver",
            MemoryKind::Spilled(_) => "bytes kept on the host",
            MemoryKind::Released => "no memory",
        })
    }
}

/// A handle on a point in a stream's work that can be queried and waited for.
#[derive(Clone)]
pub struct Marker(pub(crate) MarkerKind);

#[derive(Clone)]
pub(crate) enum MarkerKind {
    /// The work before the marker is already done.
    Done,
    OpenCl(Arc<ClEvent>),
    Sim(SimMarker),
    /// A marker of a user's driver.
    Custom(Arc<dyn Any + Send + Sync>),
}

impl Marker {
    /// Makes a marker of work that is already done, for drivers whose calls return when their work is done.
    pub fn done() -> Marker {
        Marker(MarkerKind::Done)
    }

    /// Wraps a marker of your own driver. `event` is the driver's handle on the marker.
    pub fn new(event: impl Any + Send + Sync) -> Marker {
        Marker(MarkerKind::Custom(Arc::new(event)))
    }

    /// Returns the value given to [`new`](Self::new), or `None` if the value does not have type `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        match &self.0 {
            MarkerKind::Custom(event) => event.downcast_ref(),
            _ => None,
        }
    }
}

impl fmt::Debug for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Marker")
    }
}

/// The progress of a stream: the number of commands submitted to it, and the number known to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Grows with every submitted command except markers.
    pub submitted: u64,
    /// At most `submitted`. The device may have finished more commands than the host knows of.
    pub finished: u64,
}

impl Progress {
    /// True if every submitted command is known to be done.
    pub fn is_finished(self) -> bool {
        self.finished >= self.submitted
    }
}

/// A location in memory: the memory, and an offset in bytes.
pub type At<'a> = (&'a Memory, usize);

/// A device's memory as allocators see it. The crate's own drivers are [`storage::driver`](crate::storage::driver()) and [`Sim`].
///
/// Implement the trait to put the crate's allocators over other memory ([`Memory::new`], [`Memory::of_host`]).
/// [`build_allocator`](crate::storage::build_allocator) makes the allocator, and
/// [`set_allocator`](crate::storage::set_allocator) makes it the allocator of a device. The repository has an example
/// over a mapped file in `tests/allocator/custom_driver.rs`.
///
/// # Safety
/// Allocators rely on a driver's promises about memory, and tensors on the blocks that allocators hand out:
/// * A segment from [`create`](Driver::create) or [`reserve`](Driver::reserve) has as many bytes as requested, and is
///   used by no other code until it is dropped. The segment begins at a multiple of [`alignment`](Driver::alignment),
///   which is at least 512 for host memory ([`Memory::of_host`]).
/// * Only [`copy`](Driver::copy), [`relocate`](Driver::relocate) and [`write`](Driver::write) write bytes, and only
///   within the given ranges. (The owners of blocks also write bytes, through queued work.) [`shrink`](Driver::shrink)
///   releases no bytes outside its range.
/// * Work before a [marker](Driver::record) is done if [`is_done`](Driver::is_done) or [`wait`](Driver::wait) reports it as done.
///   All work of a stream is done if [`is_idle`](Driver::is_idle) or [`progress`](Driver::progress) reports it as done.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// Returns the device whose memory this is. If the crate cannot compute on this memory, return an OpenCL device
    /// that does not exist: [`Sim`] returns `opencl:99`.
    fn device(&self) -> Device;
    /// Returns the size of the device's memory in bytes.
    fn capacity(&self) -> u64;
    /// Returns the largest segment the driver promises, in bytes. Creating larger segments may succeed: some OpenCL drivers state a
    /// quarter of the real limit.
    fn largest_segment(&self) -> usize;
    /// Returns the alignment of blocks in bytes, a power of two.
    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    /// Creates a segment with unspecified contents. The device must allocate the memory during this call, so that
    /// running out of memory is reported here and not at a later launch.
    fn create(&self, bytes: usize) -> Result<Memory, Failure>;
    /// Creates an image of at most [`bytes`](ImageDesc::bytes) bytes for the device's kernels to read. In all other respects this
    /// method is like [`create`](Driver::create).
    fn create_image(&self, _image: ImageDesc) -> Result<Memory, Failure> {
        Err(Failure::TooBig)
    }

    /// Returns the page size in bytes, a power of two: the unit of committing and releasing reserved memory. 0 if the device cannot
    /// reserve addresses.
    fn page(&self) -> usize {
        0
    }
    /// Reserves addresses for a segment that grows in place, none of which is committed. Returns `None` if the device cannot
    /// reserve addresses.
    fn reserve(&self, _bytes: usize) -> Option<Memory> {
        None
    }
    /// Commits bytes `from..to` of reserved memory.
    fn extend(&self, _memory: &Memory, _from: usize, _to: usize) -> Result<(), Failure> {
        Err(Failure::TooBig)
    }
    /// Releases bytes `from..to` of reserved memory, once the queued work that uses the bytes is done. The addresses stay reserved.
    ///
    /// # Safety
    /// No block contains the bytes, and nothing else on the host uses them.
    unsafe fn shrink(&self, _memory: &Memory, _from: usize, _to: usize) {}

    /// Reports that bytes of live blocks are lost, so that nothing on the device can be relied on any more.
    fn give_up(&self, _cause: &str) {}

    /// Waits for all work of all streams. Does not report faults that kernels found in their operands.
    ///
    /// This method and the six that follow have defaults for a driver whose calls return when their work is done. Any
    /// other driver has to implement all of them.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Records a marker after all work submitted to the stream so far, and flushes the stream.
    fn record(&self, _stream: StreamId) -> Result<Marker> {
        Ok(Marker::done())
    }
    /// True if the work before the marker is done, or has failed. Returns an error if the state is unknown, as on a lost device.
    fn is_done(&self, _marker: &Marker) -> Result<bool> {
        Ok(true)
    }
    /// True if all work submitted to the stream is done. Queries the device.
    fn is_idle(&self, _stream: StreamId) -> Result<bool> {
        Ok(true)
    }
    /// Returns the stream's progress as far as the host knows it without a query of the device. An allocator may call this method
    /// under its lock.
    fn progress(&self, _stream: StreamId) -> Progress {
        Progress::default()
    }
    /// Waits until the work before the marker is done.
    fn wait(&self, _marker: &Marker) -> Result<()> {
        Ok(())
    }
    /// Makes work submitted to `stream` from now on wait for the marker, on the device.
    fn stream_waits(&self, _stream: StreamId, _marker: &Marker) -> Result<()> {
        Ok(())
    }

    /// Copies bytes in the order of `stream`. The ranges must not overlap.
    ///
    /// # Safety
    /// Until the call returns, nothing on the host writes to the bytes of `from`, or reads or writes the bytes of `to`:
    /// both ranges are free, or in blocks that the caller has locked.
    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()>;
    /// Moves ranges of bytes in the order given, each from one location to another. The source memory is released
    /// during the copy, so that at most a few MiB exist twice. Returns false, with nothing done, if the driver does not
    /// support this. If the call fails, nothing was copied.
    ///
    /// # Safety
    /// The conditions of [`copy`](Driver::copy) hold, and the source bytes are not used again.
    unsafe fn relocate(&self, _moves: &[(At<'_>, At<'_>, usize)]) -> Result<bool> {
        Ok(false)
    }
    /// Reads bytes to the host, after all work of the default stream, and waits for the read.
    ///
    /// # Safety
    /// Until the call returns, nothing else on the host writes to the bytes.
    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()>;
    /// Writes bytes from the host, and waits for the write.
    ///
    /// # Safety
    /// Until the call returns, nothing else on the host reads or writes the bytes.
    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()>;
}
