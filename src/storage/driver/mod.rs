//! What an allocator asks of a device's memory.
//!
//! A [`Driver`] makes segments, commits and releases them, orders streams after one another, and moves bytes. Three
//! exist here: the host's memory, an OpenCL device's, and [`Sim`], a device without bytes on which every property of an
//! allocator can be shown. Allocators never hold a lock of theirs over a call of a driver.

/// What is safe in tests of a driver, where no other thread uses the memory.
#[cfg(test)]
macro_rules! safe_methods {
    ($driver:ident) => {
        impl $driver {
            fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
                // SAFETY: as above.
                unsafe { Driver::copy(self, stream, from, to, bytes) }
            }

            fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
                // SAFETY: as above.
                unsafe { Driver::read(self, from, to) }
            }

            fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
                // SAFETY: as above.
                unsafe { Driver::write(self, from, to) }
            }

            fn shrink(&self, memory: &Memory, from: usize, to: usize) {
                // SAFETY: as above.
                unsafe { Driver::shrink(self, memory, from, to) }
            }
        }
    };
}

pub(crate) mod host;
pub(super) mod image;
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
use crate::{Device, Error, Result};
use host::HostMemory;
pub use image::{ImageDesc, ImageFormat};
pub use registry::driver;
pub use sim::{Call, Sim, SimOptions};
use sim::{SimMarker, SimMemory};

/// Why a driver could not make or commit a segment: OpenCL's codes, told apart.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Failure {
    /// The device's memory is full (`CL_MEM_OBJECT_ALLOCATION_FAILURE`, -4): giving something back may help.
    DeviceMemory,
    /// The device lacks some resource (`CL_OUT_OF_RESOURCES`, -5), usually memory: giving something back may help.
    Resources,
    /// The host's memory is full (`CL_OUT_OF_HOST_MEMORY`, -6): giving something back may help.
    HostMemory,
    /// No segment can be that large, however empty the device is (`CL_INVALID_BUFFER_SIZE`, -61).
    TooBig,
    /// Anything else: goes to the caller as it is.
    Other(Error),
}

impl Failure {
    /// What ran out, for messages; `None` for what giving memory back cannot mend.
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
            _ => f.write_str("the driver makes no segment that large (-61)"),
        }
    }
}

/// An owned piece of a device's memory. Released on drop, ignoring errors.
pub struct Memory(pub(crate) MemoryKind);

pub(crate) enum MemoryKind {
    Host(HostMemory),
    OpenCl(ClBuffer),
    Image(ClImage),
    Sim(SimMemory),
    /// Of a driver that this crate does not know.
    Custom(Box<dyn Any + Send + Sync>),
    /// A block's bytes, on the host until the device has memory for them again.
    Spilled(Box<[u8]>),
    /// Given back while its blocks were elsewhere.
    Gone,
}

impl Memory {
    /// A piece of memory of your own driver. `owner` is the driver's handle on it, and is dropped to release it.
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

    /// A piece of the host's memory of your own driver, `bytes` bytes from `start` on, which is released by dropping `owner`.
    /// Tensors of the CPU device can be in it. See the test `tests/allocator/custom_driver.rs`.
    ///
    /// # Errors
    /// [`Error::Invalid`] where `start` is not at a multiple of 512 bytes.
    ///
    /// # Safety
    /// As long as `owner` lives the bytes are initialised, may be read and written, and are not used by anybody else.
    pub unsafe fn of_host(start: NonNull<u8>, bytes: usize, owner: impl Any + Send + Sync) -> Result<Memory> {
        if !start.addr().get().is_multiple_of(crate::storage::block::ALIGNMENT) {
            return Err(Error::invalid("Memory::of_host", format!("{start:?} is not at a multiple of 512 bytes")));
        }
        // SAFETY: the caller's promise.
        Ok(Memory(MemoryKind::Host(unsafe { HostMemory::owned_by(start, bytes, Box::new(owner)) })))
    }

    /// What was given to [`new`](Self::new) or [`of_host`](Self::of_host), if it has this type.
    pub fn get<T: Any>(&self) -> Option<&T> {
        let owner = match &self.0 {
            MemoryKind::Custom(owner) => &**owner,
            MemoryKind::Host(memory) => memory.owner()?,
            _ => return None,
        };
        owner.downcast_ref()
    }

    pub(crate) fn gone() -> Memory {
        Memory(MemoryKind::Gone)
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
            MemoryKind::Gone => "no memory",
        })
    }
}

/// A point in a stream's work that can be asked about and waited for. Cloning makes another handle on it.
#[derive(Clone)]
pub struct Marker(pub(crate) MarkerKind);

#[derive(Clone)]
pub(crate) enum MarkerKind {
    /// Nothing to wait for.
    Done,
    OpenCl(Arc<ClEvent>),
    Sim(SimMarker),
    /// Of a driver that this crate does not know.
    Custom(Arc<dyn Any + Send + Sync>),
}

impl Marker {
    /// One that there is nothing to wait for: of a driver whose work is done when its calls return.
    pub fn done() -> Marker {
        Marker(MarkerKind::Done)
    }

    /// A marker of your own driver. `event` is the driver's handle on it.
    pub fn new(event: impl Any + Send + Sync) -> Marker {
        Marker(MarkerKind::Custom(Arc::new(event)))
    }

    /// What was given to [`new`](Self::new), if it has this type.
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

/// How far a stream is: what was submitted to it so far, counted, and up to what count that is known to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Grows with everything that is submitted, markers aside.
    pub submitted: u64,
    /// At most `submitted`; the device may be further than anybody has asked.
    pub finished: u64,
}

impl Progress {
    /// Whether everything submitted is known to be done.
    pub fn is_finished(self) -> bool {
        self.finished >= self.submitted
    }
}

/// A place in a piece of memory: bytes from its start.
pub type At<'a> = (&'a Memory, usize);

/// A device's memory as allocators see it. The crate's own drivers are [`storage::driver`](crate::storage::driver()) and
/// [`Sim`]. One of your own puts the allocators over memory that this crate does not know ([`Memory::new`],
/// [`Memory::of_host`]): [`build_allocator`](crate::storage::build_allocator) makes the allocator,
/// [`set_allocator`](crate::storage::set_allocator) makes it a device's. An example, over a mapped file, is
/// `tests/allocator/custom_driver.rs` in the repository.
///
/// # Safety
/// Allocators rely on what a driver says of memory, and tensors on what allocators give out:
/// * a segment from [`create`](Driver::create) or [`reserve`](Driver::reserve) has the bytes that were asked for, none of
///   them anybody else's, until it is dropped, and begins at a multiple of [`alignment`](Driver::alignment), which is at least
///   512 for memory that the host uses ([`Memory::of_host`]);
/// * [`commit`](Driver::commit) returns the segment that it was given;
/// * bytes are written by nothing but [`copy`](Driver::copy), [`relocate`](Driver::relocate) and [`write`](Driver::write),
///   within the ranges that they are given, and the work of those who have the blocks; [`shrink`](Driver::shrink) takes no
///   others than it is told to;
/// * work before a [marker](Driver::record) is done where [`is_done`](Driver::is_done) or [`wait`](Driver::wait) says so, and
///   all of a stream's where [`is_idle`](Driver::is_idle) or [`progress`](Driver::progress) does.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// The device whose memory this is; for memory of no device that the crate computes on, an OpenCL device that is not
    /// there, as [`Sim`] is `opencl:99`.
    fn device(&self) -> Device;
    /// Bytes the device has.
    fn capacity(&self) -> u64;
    /// The largest segment it promises, in bytes. It may give larger ones: some state a quarter of what they can.
    fn largest_segment(&self) -> usize;
    /// Blocks begin at multiples of this many bytes, a power of two.
    fn alignment(&self) -> usize {
        512
    }

    /// Whether memory has contents, which have to be copied where a block moves.
    fn has_contents(&self) -> bool {
        true
    }

    /// Makes a segment. The device may be lazy: nothing is promised before [`commit`](Driver::commit).
    fn create(&self, bytes: usize) -> Result<Memory, Failure>;
    /// Makes an image that the device's kernels read, of [`bytes`](ImageDesc::bytes) bytes at most. Like
    /// [`create`](Driver::create) otherwise.
    fn create_image(&self, _image: ImageDesc) -> Result<Memory, Failure> {
        Err(Failure::TooBig)
    }
    /// Makes the device find the memory now, so that running out is reported here and not at some later launch. What it
    /// contains is unspecified: it has to be nobody's yet, and is given back where that fails.
    fn commit(&self, memory: Memory) -> Result<Memory, Failure>;

    /// Reserved memory is committed and given back in multiples of this many bytes, a power of two; 0 where the device
    /// cannot reserve.
    fn page(&self) -> usize {
        0
    }
    /// Reserves addresses for a segment that grows in place, all of it uncommitted; `None` where the device cannot.
    fn reserve(&self, _bytes: usize) -> Option<Memory> {
        None
    }
    /// Commits bytes `from..to` of reserved memory.
    fn extend(&self, _memory: &Memory, _from: usize, _to: usize) -> Result<(), Failure> {
        Err(Failure::TooBig)
    }
    /// Gives bytes `from..to` of reserved memory back, after work already queued that uses them; the addresses stay
    /// reserved.
    ///
    /// # Safety
    /// They are no block's, nor does anything else on the host use them.
    unsafe fn shrink(&self, _memory: &Memory, _from: usize, _to: usize) {}

    /// Bytes of the device's memory that others hold for this process, which count towards the limits of allocators: images
    /// where these are segments, and the other way round.
    fn held_elsewhere(&self) -> u64 {
        0
    }
    /// Has these others give back what they do not use, since there is no room for `bytes` bytes more; says whether there may be
    /// room now.
    fn make_room_elsewhere(&self, _bytes: usize) -> Result<bool> {
        Ok(false)
    }

    /// Bytes that live blocks had are lost: nothing on the device can be relied on any more.
    fn give_up(&self, _cause: &str) {}

    /// Waits for all work of all streams. What a kernel found wrong with its operands is not told here. This and the six below
    /// are written for a driver whose work is done when its calls return; any other has to write all of them.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// A marker after everything submitted to the stream so far, which is flushed.
    fn record(&self, _stream: StreamId) -> Result<Marker> {
        Ok(Marker::done())
    }
    /// Whether the work before the marker is done, or has failed for good; an error where that cannot be known, as on a
    /// device that is lost.
    fn is_done(&self, _marker: &Marker) -> Result<bool> {
        Ok(true)
    }
    /// Whether all work submitted to the stream is done; asks the device.
    fn is_idle(&self, _stream: StreamId) -> Result<bool> {
        Ok(true)
    }
    /// How far the stream is, as far as that is known without asking the device: an allocator may call this one under its
    /// lock.
    fn progress(&self, _stream: StreamId) -> Progress {
        Progress::default()
    }
    /// Blocks until the work before the marker is done.
    fn wait(&self, _marker: &Marker) -> Result<()> {
        Ok(())
    }
    /// Makes what is submitted to `stream` from now on wait, on the device, for the marker.
    fn stream_waits(&self, _stream: StreamId, _marker: &Marker) -> Result<()> {
        Ok(())
    }

    /// Copies bytes in the order of `stream`. The ranges must not overlap.
    ///
    /// # Safety
    /// Until it returns, nothing on the host writes to the bytes of `from`, nor reads or writes those of `to`: they are
    /// free, or of blocks that the caller has locked.
    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()>;
    /// Whether [`relocate`](Driver::relocate) can be asked for: the memory is the host's.
    fn relocates(&self) -> bool {
        false
    }
    /// Copies runs of bytes, each from a place to another, in the order given, that nobody needs at their old places any
    /// more: memory there is given back as it goes, so that no more than a few MiB are taken twice. For devices whose memory
    /// is the host's. Where it fails nothing was copied.
    ///
    /// # Safety
    /// As [`copy`](Driver::copy); and the bytes at the old places are not used again.
    unsafe fn relocate(&self, _moves: &[(At<'_>, At<'_>, usize)]) -> Result<()> {
        Err(Error::invalid("relocate", format!("{self:?} has memory of its own")))
    }
    /// Reads bytes to the host, after all work of the default stream. Waits.
    ///
    /// # Safety
    /// Until it returns, nothing else on the host writes to them.
    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()>;
    /// Writes bytes from the host. Waits.
    ///
    /// # Safety
    /// Until it returns, nothing else on the host reads or writes them.
    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()>;
}

/// The driver of a device, shared.
pub type DynDriver = Arc<dyn Driver>;
