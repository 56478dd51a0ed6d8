//! OpenCL memory: a segment is one buffer, a block an offset into it.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::image::{ImageDesc, ImageFormat, elsewhere};
use super::{At, Driver, Failure, Marker, MarkerKind, Memory, MemoryKind, Progress};
use crate::device::opencl::{self, ClAt, ClBuffer, ClDevice, ClError, ClEvent, ClImage, Class, MappedBuffer};
use crate::device::{StreamId, profiler};
use crate::storage::block::{Block, Place};
use crate::{Device, Error, Result};

/// An OpenCL device's driver.
#[derive(Clone, Copy)]
pub(crate) struct OpenCl {
    pub(crate) device: &'static ClDevice,
}

/// Where a block's bytes are in OpenCL memory. They stay there as long as this lives: until the work is enqueued.
pub(crate) struct ClPlace<'a> {
    /// The open device.
    pub(crate) device: &'static ClDevice,
    buffer: &'a ClBuffer,
    place: Place<'a>,
}

impl ClPlace<'_> {
    /// The segment. Borrowed from the place, so that what uses it cannot outlive the hold.
    pub(crate) fn buffer(&self) -> &ClBuffer {
        self.buffer
    }

    /// The block's first byte in it: a multiple of 512.
    pub(crate) fn offset(&self) -> usize {
        self.place.offset()
    }

    /// A byte of the block's.
    pub(crate) fn at(&self, byte: usize) -> ClAt<'_> {
        (self.buffer, self.place.offset() + byte)
    }
}

impl ClPlace<'_> {
    /// Maps the segment, a buffer over memory of the host of which this is the only block's. Waits for the device.
    ///
    /// # Errors
    /// Those of [`ClDevice::map`](crate::device::opencl::ClDevice::map).
    pub(crate) fn map(&self) -> Result<MappedHost> {
        self.device.map(self.buffer).map(MappedHost)
    }
}

/// Memory of the host that a device works on, which is the host's until this is dropped.
pub(crate) struct MappedHost(MappedBuffer);

// What a panic leaves is bytes, which are never half a value.
impl std::panic::UnwindSafe for MappedHost {}
impl std::panic::RefUnwindSafe for MappedHost {}

impl MappedHost {
    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.start()
    }
}

impl fmt::Debug for OpenCl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}'s memory", self.device.device())
    }
}

impl OpenCl {
    /// The driver of the device of this index, which it opens.
    pub(crate) fn open(index: usize) -> Result<OpenCl> {
        Ok(OpenCl { device: opencl::open(index)? })
    }

    /// Where a block is; `None` where it is in other memory.
    #[inline(always)] // part of every launch
    pub(crate) fn place(self, block: &Block) -> Option<ClPlace<'_>> {
        let place = block.place();
        match &block.segment().memory().0 {
            MemoryKind::OpenCl(buffer) => Some(ClPlace { device: self.device, buffer, place }),
            _ => None,
        }
    }

    /// The image that a block of the device's image pool is.
    pub(crate) fn image(block: &Block) -> Option<&ClImage> {
        match &block.segment().memory().0 {
            MemoryKind::Image(image) => Some(image),
            _ => None,
        }
    }

    /// Another handle on a buffer that other code made, and its bytes.
    ///
    /// # Errors
    /// Those of [`ClDevice::import_buffer`](crate::device::opencl::ClDevice::import_buffer).
    pub(crate) fn import(self, op: &'static str, buffer: *mut c_void) -> Result<(Memory, usize)> {
        let buffer = self.device.import_buffer(op, buffer)?;
        let bytes = buffer.bytes();
        Ok((Memory(MemoryKind::OpenCl(buffer)), bytes))
    }

    /// A buffer over bytes of the host; none where the device does not work on them in place, or the driver refuses.
    ///
    /// # Safety
    /// As for [`ClDevice::buffer_over`].
    pub(crate) unsafe fn over(self, start: NonNull<u8>, bytes: usize) -> Option<Memory> {
        // SAFETY: what the caller promises.
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

// SAFETY: segments are buffers of the size asked for, which nobody else has.
unsafe impl Driver for OpenCl {
    fn device(&self) -> Device {
        self.device.device()
    }

    fn capacity(&self) -> u64 {
        known(self.device.info().memory)
    }

    fn largest_segment(&self) -> usize {
        usize::try_from(known(self.device.info().largest_buffer)).unwrap_or(usize::MAX)
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let _recorded = profiler::segment("clCreateBuffer", Some(self.device()), bytes);
        let buffer = self.device.create_buffer(bytes).map_err(|e| self.failure(e))?;
        Ok(Memory(MemoryKind::OpenCl(buffer)))
    }

    fn create_image(&self, image: ImageDesc) -> Result<Memory, Failure> {
        let ImageDesc { width, height, format } = image;
        let _recorded = profiler::segment("clCreateImage", Some(self.device()), image.bytes());
        let made = self.device.create_image([width, height], format == ImageFormat::F16);
        made.map(|image| Memory(MemoryKind::Image(image))).map_err(|e| self.failure(e))
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        if let MemoryKind::Image(image) = &memory.0 {
            self.device.commit_image(image).map_err(|e| self.failure(e))?;
            return Ok(memory);
        }
        let buffer = at((&memory, 0)).map_err(Failure::Other)?.0;
        let _recorded = profiler::segment("commit", Some(self.device()), buffer.bytes());
        self.device.commit(buffer).map_err(|e| self.failure(e))?;
        Ok(memory)
    }

    fn held_elsewhere(&self) -> u64 {
        elsewhere(self.device()).map_or(0, |other| other.held())
    }

    fn make_room_elsewhere(&self, _bytes: usize) -> Result<bool> {
        elsewhere(self.device()).map_or(Ok(false), |other| other.make_room())
    }

    fn give_up(&self, cause: &str) {
        self.device.give_up(cause);
    }

    fn synchronize(&self) -> Result<()> {
        self.device.drain()
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        // Nothing was ever submitted to a stream of some other device.
        if !self.device.has_stream(stream) {
            return Ok(Marker::done());
        }
        let event = self.device.record(stream)?;
        Ok(Marker(MarkerKind::OpenCl(Arc::new(event))))
    }

    fn is_done(&self, marker: &Marker) -> Result<bool> {
        // A marker that failed does not say that what was submitted before it is over: an error, after which a new one is asked.
        event(marker).map_or(Ok(true), |event| self.device.query(event))
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        if self.device.has_stream(stream) { self.device.is_idle(stream) } else { Ok(true) }
    }

    fn progress(&self, stream: StreamId) -> Progress {
        let (submitted, finished) = self.device.progress(stream);
        Progress { submitted, finished }
    }

    fn wait(&self, marker: &Marker) -> Result<()> {
        event(marker).map_or(Ok(()), |event| self.device.wait(event))
    }

    fn stream_waits(&self, stream: StreamId, marker: &Marker) -> Result<()> {
        match event(marker).filter(|_| self.device.has_stream(stream)) {
            Some(event) => self.device.stream_waits(stream, event),
            None => Ok(()),
        }
    }

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        self.device.copy_on(stream, at(from)?, at(to)?, bytes)
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        self.device.read_quietly(at(from)?, to)
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        self.device.write(from, at(to)?)
    }
}

fn at<'a>((memory, offset): At<'a>) -> Result<ClAt<'a>> {
    match &memory.0 {
        MemoryKind::OpenCl(buffer) => Ok((buffer, offset)),
        _ => Err(Error::invalid("driver", format!("{memory:?} is not an OpenCL buffer"))),
    }
}

fn event(marker: &Marker) -> Option<&ClEvent> {
    match &marker.0 {
        MarkerKind::OpenCl(event) => Some(event),
        _ => None,
    }
}

/// Devices that cannot tell say 0.
fn known(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}
