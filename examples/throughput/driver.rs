//! Driver calls without claystone on the same device, as a baseline of the measurements.

use std::ptr::null_mut;

use cl3::ext::{CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE};
use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::device::{CL_DEVICE_TYPE_ALL, Device};
use opencl3::memory::Buffer;
use opencl3::platform::get_platforms;
use opencl3::types::{CL_TRUE, cl_int};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A context and an in-order queue.
pub struct Driver {
    queue: CommandQueue,
    context: Context,
}

impl Driver {
    /// Opens the `nth` device with this name.
    pub fn open(name: &str, nth: usize) -> Result<Driver> {
        let mut found = Vec::new();
        for platform in get_platforms()? {
            // A platform without devices returns an error, which counts as no devices.
            found.extend(platform.get_devices(CL_DEVICE_TYPE_ALL).unwrap_or_default().into_iter().map(Device::new));
        }
        let mut named = found.into_iter().filter(|d| d.name().is_ok_and(|n| n.trim() == name.trim()));
        let device = named.nth(nth).ok_or_else(|| format!("the driver has no device {name}"))?;
        let context = Context::from_device(&device)?;
        // SAFETY: the device id is the one the context was made for.
        let queue = unsafe { CommandQueue::create(&context, device.id(), 0)? };
        Ok(Driver { queue, context })
    }

    pub fn buffer(&self, bytes: usize) -> Result<Buffer<u8>> {
        // SAFETY: no host pointer is passed.
        Ok(unsafe { Buffer::create(&self.context, CL_MEM_READ_WRITE, bytes, null_mut())? })
    }

    /// Calls clEnqueueCopyBuffer without an event.
    pub fn copy(&self, src: &Buffer<u8>, dst: &Buffer<u8>, bytes: usize) -> Result<()> {
        use opencl3::memory::ClMem;
        let table = cl3::load_library().as_ref().map_err(|e| e.to_string())?;
        let (queue, none) = (self.queue.get(), null_mut());
        let code = table.clEnqueueCopyBuffer(queue, src.get(), dst.get(), 0, 0, bytes, 0, none, none);
        check("clEnqueueCopyBuffer", code)
    }

    /// Writes `src` to the start of `dst`, and waits for the transfer.
    pub fn write(&self, src: &[u8], dst: &mut Buffer<u8>) -> Result<()> {
        // SAFETY: the call blocks, so `src` outlives the transfer; `dst` holds at least as many bytes.
        unsafe { self.queue.enqueue_write_buffer(dst, CL_TRUE, 0, src, &[])? };
        Ok(())
    }

    /// Reads from the start of `src` into `dst`, and waits for the transfer.
    pub fn read(&self, src: &Buffer<u8>, dst: &mut [u8]) -> Result<()> {
        // SAFETY: the call blocks, so `dst` outlives the transfer; `src` holds at least as many bytes.
        unsafe { self.queue.enqueue_read_buffer(src, CL_TRUE, 0, dst, &[])? };
        Ok(())
    }

    /// Waits for all enqueued commands.
    pub fn finish(&self) -> Result<()> {
        Ok(self.queue.finish()?)
    }

    /// Allocates host memory that the driver can access directly: a CL_MEM_ALLOC_HOST_PTR buffer that stays mapped until it is dropped.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut mapping = null_mut();
        // SAFETY: no host pointer is passed; the mapping covers exactly the buffer.
        let buffer = unsafe {
            let flags = CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR;
            let buffer = Buffer::<u8>::create(&self.context, flags, bytes, null_mut())?;
            self.queue.enqueue_map_buffer(&buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, bytes, &mut mapping, &[])?;
            buffer
        };
        Ok(Pinned { mapping: mapping.cast(), bytes, _buffer: buffer })
    }
}

/// Page-locked (pinned) host memory.
pub struct Pinned {
    mapping: *mut u8,
    bytes: usize,
    _buffer: Buffer<u8>,
}

impl Pinned {
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `mapping` points to the driver's mapping of the buffer's `bytes` bytes, which stay mapped until the buffer is
        // released on drop; `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.mapping, self.bytes) }
    }
}

fn check(call: &str, code: Option<cl_int>) -> Result<()> {
    match code {
        Some(0) => Ok(()),
        Some(code) => Err(format!("{call}: {}", opencl3::error_codes::error_text(code)).into()),
        None => Err(format!("the driver has no {call}").into()),
    }
}
