//! An opened device: its context, its memory objects, and whether the device is lost.
//!
//! Buffers may exceed the driver's promised maximum (`CL_DEVICE_MAX_MEM_ALLOC_SIZE`): NVIDIA's driver promises a quarter of the
//! memory and grants all of it. Intel's and Qualcomm's drivers need a special flag or property.

use std::ffi::c_void;
use std::mem::{self, ManuallyDrop};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use opencl_sys::{self as cl, cl_command_queue, cl_context, cl_device_id, cl_mem_flags};

use super::description::{DeviceDescription, LargeBuffers, notify, text};
use super::driver::{ClBuffer, ClImage, ClKernel, call, create, info, send_and_sync, value};
use super::errors::{ClError, Class};
use super::exit;
use super::fault::{FaultSlots, FaultWords, NO_FAULT};
use super::probe::{self, TensorCores};
use super::program::{self, Programs};
use super::queues::{Queues, SERVICE_STREAM};
use super::retry::{PAUSES, Probed, retry};
use super::tuning::{self, Tuning};
use crate::device::stream_id::{MAX_STREAMS, StreamId};
use crate::device::{Device, DeviceInfo, DeviceKind, log};
use crate::{Error, Result};

/// The number of counters per stream in [`ClDevice::arrival_counters`].
pub(crate) const ARRIVAL_COUNTERS: usize = 256;

const CL_MEM_ALLOW_UNRESTRICTED_SIZE_INTEL: cl_mem_flags = 1 << 23;
/// The size in bytes above which offsets need more than 32 bits.
const FOUR_GIB: u64 = 4 << 30;
/// The property `CL_LARGE_BUFFER_QCOM` of the extension `cl_qcom_large_buffer`, switched on.
const LARGE_BUFFER_QCOM: [u64; 3] = [0x41A6, 1, 0];
/// The width of the vectors that kernels read and write, in bytes.
const VECTOR_BYTES: usize = 16;

/// The part of an error message that says that commands may never end.
const UNFINISHED: &str =
    "; the operation's commands may still be using memory of the host, which is therefore never released";

/// An open OpenCL device: one context, and one in-order queue per stream. Lives until the process ends.
pub(crate) struct ClDevice {
    device: Device,
    pub(super) description: &'static DeviceDescription,
    pub(crate) context: cl_context,
    pub(super) queues: Queues,
    pub(super) programs: Programs,
    pub(super) faults: FaultSlots,
    tensor_cores: Probed<TensorCores>,
    tuning: OnceLock<Tuning>,
    image_limits: OnceLock<Option<[usize; 2]>>,
    arrival_counters: OnceLock<ClBuffer>,
    dry_buffer: OnceLock<ClBuffer>,
    /// `fill` and `copy` of `kernels/memory.cl`, then both with [wide offsets](Self::has_wide_offsets).
    pub(super) memory_kernels: [Probed<Option<ClKernel>>; 4],
    wide_offsets: AtomicBool,
    lost: OnceLock<String>,
}

send_and_sync!(ClDevice);

impl ClDevice {
    /// Creates the context, the first queues and the first fault slot. After a failure, the created objects are released, and
    /// the creation is retried a few times.
    pub(super) fn open(index: usize, description: &'static DeviceDescription) -> Result<ClDevice> {
        let device = Device::OpenCL(index);
        let create = || {
            let properties = [cl::CL_CONTEXT_PLATFORM, description.platform as isize, 0];
            let user = ptr::from_ref(&description.driver_text).cast_mut().cast();
            let context = create!(clCreateContext(properties.as_ptr(), 1, &description.id, Some(notify), user))?;
            ClDevice::in_context(device, description, context, None)
        };
        let opened = retry(create).map_err(|e| Error::OpenCl {
            device,
            call: e.call,
            code: e.name(),
            detail: description.driver_text.detail(&e) + ": the device could not be opened; the next use tries again",
        })?;
        log::emit(move || tracing::debug!(%device, name = description.info.name, "opened"));
        Ok(opened)
    }

    /// Opens the device in a context, and takes ownership of the context. `queue` of other code, if any, becomes the default stream.
    pub(super) fn in_context(
        device: Device,
        description: &'static DeviceDescription,
        context: cl_context,
        queue: Option<cl_command_queue>,
    ) -> Result<ClDevice, ClError> {
        let parts =
            Queues::new(context, description.id, queue).and_then(|queues| Ok((queues, FaultSlots::new(context)?)));
        let (queues, faults) = parts.inspect_err(|_| _ = call!(clReleaseContext(context)))?;
        Ok(ClDevice {
            device,
            description,
            context,
            queues,
            programs: Programs::default(),
            faults,
            tensor_cores: Probed::default(),
            tuning: OnceLock::new(),
            image_limits: OnceLock::new(),
            arrival_counters: OnceLock::new(),
            dry_buffer: OnceLock::new(),
            memory_kernels: Default::default(),
            wide_offsets: AtomicBool::new(false),
            lost: OnceLock::new(),
        })
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.description.info
    }

    pub(super) fn id(&self) -> cl_device_id {
        self.description.id
    }

    /// Returns the kernel `entry` of the program in `source`, built unless a program with the same key is loaded or cached.
    /// `HAS_F64` is defined if the device has doubles, `IS_CPU` if it is a processor. Every call makes a new kernel object, so
    /// callers keep the kernel. [`Error::Build`] has the compiler's log and `name`.
    pub(crate) fn build(&self, name: &'static str, source: &str, entry: &str) -> Result<ClKernel> {
        program::build(self, name, source, entry)
    }

    /// Returns the tensor core features. Unless cached, the first call builds and runs small kernels, if the device may have tensor
    /// cores. If a driver call fails, the result is none for now, and a later call probes again.
    pub(crate) fn tensor_cores(&self) -> TensorCores {
        self.tensor_cores.get(|| probe::probe(self)).copied().unwrap_or_default()
    }

    /// Returns the values of the kernels' parameters, loaded at the first call.
    pub(crate) fn tuning(&self) -> &Tuning {
        self.tuning.get_or_init(|| Tuning::load(self.info()))
    }

    /// True if kernels may use FENCE, with which a launch's last work-group can read the results of the other work-groups. True on
    /// devices that accept PTX, and on processors that imitate such a device in tests.
    pub(crate) fn has_fence(&self) -> bool {
        self.imitates_fence_device() || self.tensor_cores().local > 0
    }

    /// True for a processor that runs a GPU's kernels in tests, with `CLAYSTONE_KERNELS=gpu+fence`.
    pub(super) fn imitates_fence_device(&self) -> bool {
        let kernels = || std::env::var("CLAYSTONE_KERNELS").is_ok_and(|k| k == "gpu+fence");
        self.info().kind == DeviceKind::Accelerator && kernels()
    }

    /// Returns the maximum width and height of images, in pixels; `None` if the device has no images, or has no function to create
    /// them, as before OpenCL 1.2.
    pub(crate) fn image_limits(&self) -> Option<[usize; 2]> {
        *self.image_limits.get_or_init(|| {
            let id = self.id();
            let number = |what| value!(clGetDeviceInfo(id, what) as usize).unwrap_or(0);
            let version = text(&info!(clGetDeviceInfo(id, cl::CL_DEVICE_VERSION)).unwrap_or_default());
            let is_old = ["OpenCL 1.0", "OpenCL 1.1"].iter().any(|old| version.starts_with(old));
            let has_images = value!(clGetDeviceInfo(id, cl::CL_DEVICE_IMAGE_SUPPORT) as u32).is_ok_and(|has| has != 0);
            let limits = [number(cl::CL_DEVICE_IMAGE2D_MAX_WIDTH), number(cl::CL_DEVICE_IMAGE2D_MAX_HEIGHT)];
            (has_images && !is_old && !limits.contains(&0)).then_some(limits)
        })
    }

    /// Creates a buffer of `bytes` (not zero). The driver may allocate the memory only at the buffer's first use: see
    /// [`commit`](Self::commit).
    pub(crate) fn create_buffer(&self, bytes: usize) -> Result<ClBuffer, ClError> {
        self.check_alive("clCreateBuffer")?; // returns before `detect_loss`, which would test a lost device again
        self.new_buffer(cl::CL_MEM_READ_WRITE, bytes, ptr::null_mut()).map_err(|e| self.detect_loss(e))
    }

    /// Creates a buffer with these flags, over the host memory at `host` unless null.
    fn new_buffer(&self, flags: cl_mem_flags, bytes: usize, host: *mut c_void) -> Result<ClBuffer, ClError> {
        self.check_alive("clCreateBuffer")?;
        let (promised, how) = (self.info().largest_buffer, self.description.large_buffers);
        let is_beyond = promised > 0 && bytes as u64 > promised;
        let plain = |flags| exit::call(|| create!(clCreateBuffer(self.context, flags, bytes, host)));
        let asked = match how {
            LargeBuffers::Intel if is_beyond => plain(flags | CL_MEM_ALLOW_UNRESTRICTED_SIZE_INTEL),
            LargeBuffers::Qualcomm if is_beyond => {
                let properties = LARGE_BUFFER_QCOM.as_ptr();
                exit::call(|| create!(clCreateBufferWithProperties(self.context, properties, flags, bytes, host)))
            }
            _ => plain(flags),
        };
        let mem = match asked {
            // The flag and the property may be unknown to another driver of the device.
            Err(e) if is_beyond && how != LargeBuffers::Plain && e.classify() == Class::Other => plain(flags),
            asked => asked,
        }?;
        self.note_buffer(bytes, is_beyond);
        Ok(ClBuffer::new(mem, bytes))
    }

    /// Makes later builds of programs use 64-bit offsets if a buffer of this size requires them.
    fn note_buffer(&self, bytes: usize, is_beyond: bool) {
        let is_wide = self.description.large_buffers == LargeBuffers::Intel && (is_beyond || bytes as u64 > FOUR_GIB);
        if is_wide && !self.wide_offsets.swap(true, Relaxed) {
            tuning::kernels_changed();
        }
    }

    /// True if programs need 64-bit offsets, and so differ from programs built before.
    pub(crate) fn has_wide_offsets(&self) -> bool {
        self.wide_offsets.load(Relaxed)
    }

    /// Makes the driver allocate the buffer's memory now, so that a lack of memory is an error here. The buffer's contents become
    /// unspecified.
    pub(crate) fn commit(&self, buffer: &ClBuffer) -> Result<(), ClError> {
        self.check_alive("clEnqueueMigrateMemObjects")?;
        let mem = buffer.mem();
        let undefined = cl::CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
        let migrated = self.submit_and_wait(SERVICE_STREAM, (), |q, (), event| {
            call!(clEnqueueMigrateMemObjects(q.raw, 1, &mem, undefined, 0, ptr::null(), event))
        });
        match migrated {
            // OpenCL 1.1 drivers lack clEnqueueMigrateMemObjects: a write makes them allocate as well.
            Err(e) if e.is_missing() => self.submit_and_wait(SERVICE_STREAM, (), |q, (), event| {
                let from = NO_FAULT.as_ptr().cast();
                call!(clEnqueueWriteBuffer(q.raw, mem, 0, 0, 1, from, 0, ptr::null(), event))
            }),
            other => other,
        }
    }

    /// Creates an image of `width` x `height` pixels with four halves or four floats each (`CL_RGBA`). The driver may allocate
    /// the memory only at the image's first use: see [`commit`](Self::commit).
    pub(crate) fn create_image(&self, [width, height]: [usize; 2], half: bool) -> Result<ClImage, ClError> {
        self.check_alive("clCreateImage")?;
        let channel = if half { cl::CL_HALF_FLOAT } else { cl::CL_FLOAT };
        let format = cl::cl_image_format { image_channel_order: cl::CL_RGBA, image_channel_data_type: channel };
        // SAFETY: the fields are numbers, and a pointer that may be null.
        let zeros: cl::cl_image_desc = unsafe { mem::zeroed() };
        let desc = cl::cl_image_desc {
            image_type: cl::CL_MEM_OBJECT_IMAGE2D,
            image_width: width,
            image_height: height,
            ..zeros
        };
        let create = || create!(clCreateImage(self.context, cl::CL_MEM_READ_WRITE, &format, &desc, ptr::null_mut()));
        let bytes = width * height * if half { 8 } else { 16 };
        exit::call(create).map(|mem| ClImage(ClBuffer::new(mem, bytes))).map_err(|e| self.detect_loss(e))
    }

    /// Retains a buffer of the device's context that kernels and the host may read and write.
    pub(crate) fn import_buffer(&self, op: &'static str, mem: *mut c_void) -> Result<ClBuffer> {
        self.check_lost()?;
        let to_error = |e| self.failed(e);
        let kind = value!(clGetMemObjectInfo(mem, cl::CL_MEM_TYPE) as u32).map_err(to_error)?;
        invalid!(op if kind != cl::CL_MEM_OBJECT_BUFFER,
            "the memory object is of type {kind:#x}: give a buffer, type {:#x}", cl::CL_MEM_OBJECT_BUFFER);
        let context = value!(clGetMemObjectInfo(mem, cl::CL_MEM_CONTEXT) as usize).map_err(to_error)?;
        invalid!(op if context != self.context.addr(),
            "the buffer is of another context: create it in that of {}.cl_context()", self.device());
        let flags = value!(clGetMemObjectInfo(mem, cl::CL_MEM_FLAGS) as u64).map_err(to_error)?;
        let partly = [
            (cl::CL_MEM_READ_ONLY, "CL_MEM_READ_ONLY"),
            (cl::CL_MEM_WRITE_ONLY, "CL_MEM_WRITE_ONLY"),
            (cl::CL_MEM_HOST_READ_ONLY, "CL_MEM_HOST_READ_ONLY"),
            (cl::CL_MEM_HOST_WRITE_ONLY, "CL_MEM_HOST_WRITE_ONLY"),
            (cl::CL_MEM_HOST_NO_ACCESS, "CL_MEM_HOST_NO_ACCESS"),
        ];
        invalid!(op if let Some((_, name)) = partly.into_iter().find(|(flag, _)| flags & flag != 0),
            "the buffer was created with {name}: tensors are read and written, by the host as well");
        if flags & cl::CL_MEM_USE_HOST_PTR != 0 {
            let start = value!(clGetMemObjectInfo(mem, cl::CL_MEM_HOST_PTR) as usize).map_err(to_error)?;
            invalid!(op if !start.is_multiple_of(VECTOR_BYTES),
                "the buffer's host memory begins at {start:#x}, which is not a multiple of {VECTOR_BYTES}");
        }
        let bytes = value!(clGetMemObjectInfo(mem, cl::CL_MEM_SIZE) as usize).map_err(to_error)?;
        call!(clRetainMemObject(mem)).map_err(to_error)?;
        self.note_buffer(bytes, false);
        Ok(ClBuffer::new(mem, bytes))
    }

    /// Unmaps all mapped ranges, and waits for all work, so that the caller can release a buffer's host memory.
    pub(crate) fn finish_host_memory(&self) -> Result<()> {
        drop(self.lock(StreamId::DEFAULT).map_err(|e| self.failed(e))?);
        self.drain()
    }

    /// Creates a buffer over bytes of the host (`CL_MEM_USE_HOST_PTR`).
    ///
    /// # Safety
    /// The bytes are valid, and no other code uses them, until the buffer is released and every command that uses it is over.
    pub(crate) unsafe fn buffer_over(&self, start: NonNull<u8>, bytes: usize) -> Result<ClBuffer, ClError> {
        self.new_buffer(cl::CL_MEM_READ_WRITE | cl::CL_MEM_USE_HOST_PTR, bytes, start.as_ptr().cast())
    }

    /// Maps all of a buffer for reading and writing. The caller must own the buffer's only handle. Waits for the device.
    ///
    /// # Errors
    /// The driver's errors, and a fault recorded by a kernel of this thread.
    pub(crate) fn map(&'static self, buffer: &ClBuffer) -> Result<MappedBuffer> {
        self.check_lost()?;
        let (buffer, stream) = (buffer.retain().map_err(|e| self.failed(e))?, self.current_stream());
        let (readings, at) = self
            .while_idle(stream, (Vec::new(), ptr::null_mut()), |q, (readings, at)| {
                q.read_faults(readings, &[self.slot()], false)?;
                let (mem, bytes) = (buffer.mem(), buffer.bytes());
                let (flags, unasked) = (cl::CL_MAP_READ | cl::CL_MAP_WRITE, ptr::null_mut());
                *at = create!(clEnqueueMapBuffer(q.raw, mem, 1, flags, 0, bytes, 0, ptr::null(), unasked))?;
                Ok(())
            })
            .map_err(|e| self.error(e))?;
        let mapped = MappedBuffer::new(self, buffer, StreamId::DEFAULT, at);
        let mapped = mapped.ok_or_else(|| Error::invalid("map", "the driver gave no address"))?;
        self.take_failed(stream)?;
        self.report(readings).map(|()| mapped)
    }

    /// Allocates `bytes` (not zero) of pinned host memory, which the device reads and writes without the driver's staging copy: a
    /// mapped buffer that the driver allocates in host memory, with unspecified contents. Slow (NVIDIA: 25 ms for 64 MiB), so
    /// callers keep the memory.
    ///
    /// # Errors
    /// The driver's errors; out of memory refers to the host's memory.
    pub(crate) fn create_pinned(&'static self, bytes: usize) -> Result<MappedBuffer, ClError> {
        self.check_alive("clCreateBuffer")?;
        let created = ClBuffer::create(self.context, cl::CL_MEM_READ_WRITE | cl::CL_MEM_ALLOC_HOST_PTR, bytes);
        let buffer = created.map_err(|e| self.detect_loss(e))?;
        let (mem, map, mut at) = (buffer.mem(), cl::CL_MAP_READ | cl::CL_MAP_WRITE, ptr::null_mut());
        let done = self.submit_and_wait(SERVICE_STREAM, (), |q, (), event| {
            at = create!(clEnqueueMapBuffer(q.raw, mem, 0, map, 0, bytes, 0, ptr::null(), event))?;
            Ok(())
        });
        match MappedBuffer::new(self, buffer, SERVICE_STREAM, at) {
            None => Err(done.err().unwrap_or(ClError::new("clEnqueueMapBuffer", -12))),
            Some(mapped) => done.map(|()| mapped), // unmapped on drop, also after an error
        }
    }

    /// Returns a buffer with [`ARRIVAL_COUNTERS`] counters per stream, zero while no kernel runs on the stream. A kernel counts its
    /// finished work-groups in a counter to detect the last work-group, and resets the counter.
    pub(crate) fn arrival_counters(&self) -> Result<&ClBuffer> {
        if let Some(buffer) = self.arrival_counters.get() {
            return Ok(buffer);
        }
        let zeros = vec![0u8; MAX_STREAMS * ARRIVAL_COUNTERS * size_of::<u32>()];
        let buffer = self.create_buffer(zeros.len()).map_err(|e| self.error(e))?;
        self.write(&zeros, (&buffer, 0))?;
        Ok(self.arrival_counters.get_or_init(|| buffer))
    }

    /// Returns the buffer that stands for all simulated memory. Launches with this buffer as an argument do nothing.
    pub(crate) fn dry_buffer(&self) -> Result<&ClBuffer> {
        if let Some(buffer) = self.dry_buffer.get() {
            return Ok(buffer);
        }
        let buffer = self.create_buffer(VECTOR_BYTES).map_err(|e| self.error(e))?;
        Ok(self.dry_buffer.get_or_init(|| buffer.into_dry()))
    }

    /// True if the device has faulted: every call except drops then gives [`Error::DeviceLost`].
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Marks the device as lost, because the contents of its memory can no longer be relied on.
    pub(crate) fn mark_lost(&self, cause: &str) {
        self.mark_lost_silently(cause);
        let (device, cause) = (self.device, cause.to_owned());
        log::emit(move || tracing::error!(%device, cause, "device given up"));
    }

    pub(super) fn mark_lost_silently(&self, cause: &str) {
        self.lost.get_or_init(|| cause.to_owned());
    }

    /// Converts a driver error into the public error, with the code's name and the driver's last message.
    pub(crate) fn error(&self, e: ClError) -> Error {
        let detail = || self.description.driver_text.detail(&e);
        if e.classify() == Class::Lost {
            let cause = self.lost.get_or_init(|| format!("{}: {}{}", e.call, e.name(), detail())).clone();
            return Error::DeviceLost { device: self.device, cause };
        }
        Error::OpenCl { device: self.device, call: e.call, code: e.name(), detail: detail() }
    }

    /// Converts the error of a failed call, after deciding whether the device is lost. Not to be called under the queues' lock.
    pub(crate) fn failed(&self, e: ClError) -> Error {
        self.error(self.detect_loss(e))
    }

    pub(crate) fn check_lost(&self) -> Result<()> {
        let lost = |cause: &String| Err(Error::DeviceLost { device: self.device, cause: cause.clone() });
        self.lost.get().map_or(Ok(()), lost)
    }

    /// Returns an error if the device is lost, like [`check_lost`](Self::check_lost), but as a [`ClError`].
    pub(super) fn check_alive(&self, call: &'static str) -> Result<(), ClError> {
        if self.is_lost() { Err(ClError { lost: true, ..ClError::new(call, -36) }) } else { Ok(()) }
    }

    /// Decides whether a failed call means that the device is lost. Not to be called under the queues' lock.
    pub(super) fn detect_loss(&self, mut e: ClError) -> ClError {
        e.lost = e.unfinished || e.is_fatal() || e.is_suspicious() && !self.responds();
        if e.lost {
            let kept = if e.unfinished { UNFINISHED } else { "" };
            let detail = self.description.driver_text.detail(&e);
            self.lost.get_or_init(|| format!("{}: {}{detail}{kept}", e.call, e.name()));
            let device = self.device;
            log::emit(move || tracing::error!(%device, call = e.call, code = e.name(), "device lost"));
        }
        e
    }

    /// True if sixteen bytes can still be read, by a read command or by mapping. A device that only ran out of a resource recovers
    /// within the pauses between attempts; a dead device does not.
    fn responds(&self) -> bool {
        self.test_read()
            || PAUSES.iter().any(|&pause| {
                thread::sleep(pause); // without the queues' lock
                self.test_read()
            })
    }

    fn test_read(&self) -> bool {
        let (mut queue, to) = (self.lock_for_waits(SERVICE_STREAM), self.faults.discard_memory.get().cast());
        let (buffer, n, none) = (&self.faults.shared.buffer, size_of::<FaultWords>(), ptr::null_mut());
        let mem = buffer.mem();
        call!(clEnqueueReadBuffer(queue.raw, mem, 1, 0, n, to, 0, ptr::null(), none)).is_ok()
            || create!(clEnqueueMapBuffer(queue.raw, mem, 1, cl::CL_MAP_READ, 0, n, 0, ptr::null(), none))
                .is_ok_and(|at| queue.unmap(buffer, at).is_ok())
    }
}

/// Runs only if opening the device failed. The context itself lives until all objects made in it are released.
impl Drop for ClDevice {
    fn drop(&mut self) {
        let _ = call!(clReleaseContext(self.context));
    }
}

/// A buffer whose bytes the host reads and writes until the drop, which unmaps and releases the buffer. On a lost device
/// transfers may use the memory forever, so the memory is leaked.
pub(crate) struct MappedBuffer {
    device: &'static ClDevice,
    buffer: ManuallyDrop<ClBuffer>,
    /// The stream that unmaps the buffer.
    stream: StreamId,
    start: NonNull<u8>,
}

send_and_sync!(MappedBuffer);

impl MappedBuffer {
    /// Takes ownership of a buffer mapped at `start`; `None` if the address is null.
    fn new(device: &'static ClDevice, buffer: ClBuffer, stream: StreamId, start: *mut c_void) -> Option<MappedBuffer> {
        let start = NonNull::new(start.cast())?;
        Some(MappedBuffer { device, buffer: ManuallyDrop::new(buffer), stream, start })
    }

    /// Returns the address of the first byte. Callers must synchronise their accesses.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        if self.device.is_lost() {
            return;
        }
        let at = self.start.as_ptr().cast();
        let mut queue = self.device.lock_for_waits(self.stream);
        // No kernel uses memory that the service stream maps, so a refused unmap does no harm, and nothing has to wait.
        if self.stream == SERVICE_STREAM {
            queue.begin_unmap(&self.buffer, at);
            drop(queue);
        } else {
            // A refused unmap is repeated before the next command that uses a buffer; otherwise the device is lost.
            let unmapped = queue.unmap(&self.buffer, at);
            drop(queue);
            if let Err(e) = unmapped {
                self.device.detect_loss(e);
            }
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}
