//! OpenCL memory: a segment is a buffer, and a block is an offset into the buffer.

use std::ffi::c_void;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{At, Driver, Failure, ImageDesc, ImageFormat, Marker, MarkerKind, Memory, MemoryKind, Progress, staging};
use crate::device::opencl::{self, ClAt, ClBuffer, ClDevice, ClError, ClEvent, ClImage, Class, MappedBuffer};
use crate::device::{StreamId, profiler};
use crate::storage::block::{Block, BlockLocation};
use crate::{Device, Error, Result};

/// The driver of an OpenCL device's buffers and images.
#[derive(Clone, Copy)]
pub(crate) struct OpenCl {
    pub(crate) device: &'static ClDevice,
}

/// The location of a block's bytes in OpenCL memory. Keep the value until the commands are enqueued: while the value lives, the
/// block cannot move.
pub(crate) struct ClBlockLocation<'a> {
    pub(crate) device: &'static ClDevice,
    buffer: &'a ClBuffer,
    location: BlockLocation<'a>,
}

impl ClBlockLocation<'_> {
    /// Returns the segment's buffer. The borrow from `self` prevents use of the buffer after the block may move.
    pub(crate) fn buffer(&self) -> &ClBuffer {
        self.buffer
    }

    /// Returns the block's offset in the buffer in bytes, which is a multiple of 512.
    pub(crate) fn offset(&self) -> usize {
        self.location.offset()
    }

    /// Returns the location of byte `byte` of the block.
    pub(crate) fn at(&self, byte: usize) -> ClAt<'_> {
        (self.buffer, self.location.offset() + byte)
    }

    /// Maps the segment for the host. The segment must be a buffer over host memory and have no other block. Waits for the device.
    ///
    /// # Errors
    /// Errors of [`ClDevice::map`](crate::device::opencl::ClDevice::map).
    pub(crate) fn map(&self) -> Result<MappedHost> {
        self.device.map(self.buffer).map(AssertUnwindSafe)
    }
}

/// Host memory that a device works on in place, mapped for the host until the value is dropped. A panic cannot break the bytes, which
/// may have any value.
pub(crate) type MappedHost = AssertUnwindSafe<MappedBuffer>;

impl fmt::Debug for OpenCl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}'s memory", self.device.device())
    }
}

impl OpenCl {
    /// Opens the device with this index and returns its driver.
    pub(crate) fn open(index: usize) -> Result<OpenCl> {
        Ok(OpenCl { device: opencl::open(index)? })
    }

    /// Returns the location of a block; `None` if the block is not in OpenCL memory.
    #[inline(always)] // called at every launch
    pub(crate) fn location(self, block: &Block) -> Option<ClBlockLocation<'_>> {
        let location = block.location();
        match &block.segment().memory().0 {
            MemoryKind::OpenCl(buffer) => Some(ClBlockLocation { device: self.device, buffer, location }),
            _ => None,
        }
    }

    /// Returns a location for the block if its memory is simulated. Commands that use the location are not enqueued.
    pub(crate) fn simulated_location(self, block: &Block) -> Result<Option<ClBlockLocation<'_>>> {
        let location = block.location();
        match &block.segment().memory().0 {
            MemoryKind::Sim(_) => {
                Ok(Some(ClBlockLocation { device: self.device, buffer: self.device.dry_buffer()?, location }))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn image_of_block(block: &Block) -> Option<&ClImage> {
        match &block.segment().memory().0 {
            MemoryKind::Image(image) => Some(image),
            _ => None,
        }
    }

    /// Makes another handle on a buffer that other code created. Also returns its size in bytes.
    ///
    /// # Errors
    /// Errors of [`ClDevice::import_buffer`](crate::device::opencl::ClDevice::import_buffer).
    pub(crate) fn import_buffer(self, op: &'static str, buffer: *mut c_void) -> Result<(Memory, usize)> {
        let buffer = self.device.import_buffer(op, buffer)?;
        let bytes = buffer.bytes();
        Ok((Memory(MemoryKind::OpenCl(buffer)), bytes))
    }

    /// Creates a buffer over host memory. Returns `None` if the device does not work on host memory in place, or if the driver refuses.
    ///
    /// # Safety
    /// The conditions of [`ClDevice::buffer_over`] hold.
    pub(crate) unsafe fn wrap_host_memory(self, start: NonNull<u8>, bytes: usize) -> Option<Memory> {
        // SAFETY: the caller promises what `buffer_over` requires.
        let buffer =
            self.device.info().unified_memory.then(|| unsafe { self.device.buffer_over(start, bytes) })?.ok()?;
        Some(Memory(MemoryKind::OpenCl(buffer)))
    }

    fn failure(&self, error: ClError) -> Failure {
        match error.classify() {
            Class::OutOfMemory => match error.code {
                -4 => Failure::DeviceMemory,
                -6 => Failure::HostMemory,
                _ => Failure::Resources,
            },
            Class::TooBig => Failure::TooBig,
            Class::Lost | Class::Other => Failure::Other(self.device.error(error)),
        }
    }
}

// SAFETY: segments are buffers or images of the requested size, which no other code uses.
unsafe impl Driver for OpenCl {
    fn device(&self) -> Device {
        self.device.device()
    }

    fn capacity(&self) -> u64 {
        known_or_max(self.device.info().memory)
    }

    fn largest_segment(&self) -> usize {
        usize::try_from(known_or_max(self.device.info().largest_buffer)).unwrap_or(usize::MAX)
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let recorded = profiler::segment_span("clCreateBuffer", Some(self.device()), bytes);
        let buffer = self.device.create_buffer(bytes).map_err(|e| self.failure(e))?;
        drop(recorded);
        let _recorded = profiler::segment_span("commit", Some(self.device()), bytes);
        self.device.commit(&buffer).map_err(|e| self.failure(e))?;
        Ok(Memory(MemoryKind::OpenCl(buffer)))
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        let ImageDesc { width, height, format } = image;
        let _recorded = profiler::segment_span("clCreateImage", Some(self.device()), image.bytes());
        let made = self.device.create_image([width, height], format == ImageFormat::F16);
        let image = made.map_err(|e| self.failure(e))?;
        self.device.commit(&image.0).map_err(|e| self.failure(e))?;
        Ok(Memory(MemoryKind::Image(image)))
    }

    fn give_up(&self, cause: &str) {
        self.device.mark_lost(cause);
    }

    fn synchronize(&self) -> Result<()> {
        self.device.drain()
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        // Nothing was ever submitted to a stream of another device.
        if !self.device.has_stream(stream) {
            return Ok(Marker::done());
        }
        let event = self.device.record(stream)?;
        Ok(Marker(MarkerKind::OpenCl(Arc::new(event))))
    }

    fn is_done(&self, marker: &Marker) -> Result<bool> {
        // A failed marker does not prove that earlier work is done. So the error is reported, and the caller records a new marker.
        marker_event(marker).map_or(Ok(true), |event| self.device.query(event))
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        if self.device.has_stream(stream) { self.device.is_idle(stream) } else { Ok(true) }
    }

    fn progress(&self, stream: StreamId) -> Progress {
        let (submitted, finished) = self.device.progress(stream);
        Progress { submitted, finished }
    }

    fn wait(&self, marker: &Marker) -> Result<()> {
        marker_event(marker).map_or(Ok(()), |event| self.device.wait(event))
    }

    fn stream_waits(&self, stream: StreamId, marker: &Marker) -> Result<()> {
        match marker_event(marker).filter(|_| self.device.has_stream(stream)) {
            Some(event) => self.device.stream_waits(stream, event),
            None => Ok(()),
        }
    }

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        self.device.copy_on(stream, buffer_at(from)?, buffer_at(to)?, bytes)
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        staging::read_block(self.device, buffer_at(from)?, to)
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        staging::write_block(self.device, from, buffer_at(to)?)
    }
}

/// Returns the location as a buffer and an offset; an error if the memory is not a buffer.
fn buffer_at<'a>((memory, offset): At<'a>) -> Result<ClAt<'a>> {
    match &memory.0 {
        MemoryKind::OpenCl(buffer) => Ok((buffer, offset)),
        _ => Err(Error::invalid("driver", format!("{memory:?} is not an OpenCL buffer"))),
    }
}

fn marker_event(marker: &Marker) -> Option<&ClEvent> {
    match &marker.0 {
        MarkerKind::OpenCl(event) => Some(event),
        _ => None,
    }
}

/// Turns 0, which devices report for an unknown size, into the maximum.
fn known_or_max(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}
