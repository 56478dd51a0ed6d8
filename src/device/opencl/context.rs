//! An opened device: its context, queues, compiled programs and probe results.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{mem, ptr, thread};

use opencl_sys::{CL_FLOAT, CL_HALF_FLOAT, CL_MEM_OBJECT_IMAGE2D, CL_RGBA, cl_image_desc, cl_image_format};
use opencl3::device::{
    CL_DEVICE_IMAGE_SUPPORT, CL_DEVICE_IMAGE2D_MAX_HEIGHT, CL_DEVICE_IMAGE2D_MAX_WIDTH, CL_DEVICE_VERSION,
};
use opencl3::memory::{CL_MAP_READ, CL_MEM_READ_WRITE, CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED};
use opencl3::types::{cl_command_queue, cl_context, cl_device_id, cl_event};

use super::blob::ImportedEntries;
use super::discovery::{DeviceDescription, text};
use super::driver::{ClBuffer, ClImage, ClKernel, call, create, info, value};
use super::errors::{ClError, Class};
use super::exit;
use super::fault::{FaultSlot, FaultSlots, FaultWords, NO_FAULT, Readings};
use super::probe::TensorCores;
use super::program::Programs;
use super::queues::{LockedQueue, Queues, SERVICE_STREAM};
use super::retry::{PAUSES, Probed, retry};
use super::tuning::Tuning;
use crate::device::lock;
use crate::device::stream::MAX_STREAMS;
use crate::device::{Device, DeviceInfo, DeviceKind, StreamId, log};
use crate::{Error, Result};

/// The number of counters per stream in [`ClDevice::arrival_counters`].
pub(crate) const ARRIVAL_COUNTERS: usize = 256;

/// The part of an error message that says that commands may never end.
const UNFINISHED: &str =
    "; the operation's commands may still be using memory of the host, which is therefore never released";

/// An open OpenCL device: one context, and one in-order queue per stream. Lives until the process ends.
pub(crate) struct ClDevice {
    device: Device,
    pub(super) description: &'static DeviceDescription,
    pub(super) context: cl_context,
    pub(super) queues: Queues,
    pub(super) programs: Programs,
    pub(super) imported: ImportedEntries,
    pub(super) faults: FaultSlots,
    pub(super) tensor_cores: Probed<TensorCores>,
    pub(super) tuning: OnceLock<Tuning>,
    pub(super) image_limits: OnceLock<Option<[usize; 2]>>,
    arrival_counters: OnceLock<ClBuffer>,
    /// `fill` and `copy` of `kernels/memory.cl`, then both with [wide offsets](Self::has_wide_offsets).
    pub(super) memory_kernels: [Probed<Option<ClKernel>>; 4],
    pub(super) wide_offsets: AtomicBool,
    lost: OnceLock<String>,
}

// SAFETY: a context is a process-wide object that OpenCL's thread-safe functions take; it is released with the device.
unsafe impl Send for ClDevice {}
// SAFETY: as above.
unsafe impl Sync for ClDevice {}

/// Messages that the driver passes to the callback of a context. The driver calls the callback at any time, also inside a
/// call made under one of this crate's locks. A `tracing` subscriber must not run there, so the messages are logged later.
#[derive(Default)]
pub(super) struct DriverText {
    messages: Mutex<Messages>,
    is_unlogged: AtomicBool,
}

/// The driver's last message, for the next error, and the messages to log.
#[derive(Default)]
struct Messages {
    last: String,
    unlogged: Vec<String>,
}

impl DriverText {
    /// The maximum number of messages that wait to be logged.
    const MAX_UNLOGGED: usize = 64;

    fn messages(&self) -> MutexGuard<'_, Messages> {
        lock(&self.messages)
    }

    fn push(&self, text: String) {
        let mut messages = self.messages();
        if messages.unlogged.len() < Self::MAX_UNLOGGED {
            messages.unlogged.push(text.clone());
        }
        messages.last = text;
        self.is_unlogged.store(true, Release);
    }

    /// Logs the messages since the last call. Not to be called under a queue's lock.
    pub(super) fn log(&self) {
        if self.is_unlogged.load(Relaxed) && self.is_unlogged.swap(false, Acquire) {
            let unlogged = mem::take(&mut self.messages().unlogged);
            unlogged.into_iter().for_each(|text| log::emit(move || tracing::warn!(text, "OpenCL driver")));
        }
    }

    fn take(&self) -> String {
        self.log();
        mem::take(&mut self.messages().last)
    }
}

/// The callback of a context, which the driver calls with messages.
extern "C" fn notify(text: *const c_char, _: *const c_void, _: usize, user: *mut c_void) {
    if text.is_null() || user.is_null() {
        return;
    }
    // SAFETY: `user` is the DriverText given at clCreateContext, which is never released; `text` is a string that lives
    // during the call.
    let (driver_text, text) = unsafe { (&*user.cast::<DriverText>(), CStr::from_ptr(text)) };
    driver_text.push(text.to_string_lossy().into_owned());
}

impl ClDevice {
    /// Creates the context, the first queues and the first fault slot. After a failure, the created objects are released, and
    /// the creation is retried a few times.
    pub(super) fn open(index: usize, description: &'static DeviceDescription) -> Result<ClDevice> {
        let device = Device::OpenCL(index);
        let opened = retry(|| ClDevice::create(device, description)).map_err(|e| Error::OpenCl {
            device,
            call: e.call,
            code: e.name(),
            detail: detail(&e, &description.driver_text) + ": the device could not be opened; the next use tries again",
        })?;
        log::emit(move || tracing::debug!(%device, name = description.info.name, "opened"));
        Ok(opened)
    }

    fn create(device: Device, description: &'static DeviceDescription) -> Result<ClDevice, ClError> {
        let properties = [opencl3::context::context::CL_CONTEXT_PLATFORM, description.platform as isize, 0];
        let user = ptr::from_ref(&description.driver_text).cast_mut().cast();
        let context = create!(clCreateContext(properties.as_ptr(), 1, &description.id, Some(notify), user))?;
        ClDevice::in_context(device, description, context, None)
    }

    /// Opens a device in a context of other code, with the in-order `queue` as the default stream.
    pub(super) fn adopt(
        device: Device,
        description: &'static DeviceDescription,
        context: cl_context,
        queue: cl_command_queue,
    ) -> Result<ClDevice, ClError> {
        call!(clRetainContext(context))?;
        ClDevice::in_context(device, description, context, Some(queue))
    }

    /// Opens the device in a context, and takes ownership of the context.
    fn in_context(
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
            imported: ImportedEntries::default(),
            faults,
            tensor_cores: Probed::default(),
            tuning: OnceLock::new(),
            image_limits: OnceLock::new(),
            arrival_counters: OnceLock::new(),
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

    /// Makes the driver allocate the buffer's memory now, so that a lack of memory is an error here. The buffer's contents become
    /// unspecified.
    pub(crate) fn commit(&self, buffer: &ClBuffer) -> Result<(), ClError> {
        self.check_alive("clEnqueueMigrateMemObjects")?;
        let mem = buffer.mem();
        let undefined = CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
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
    /// the memory only at the image's first use: see [`commit_image`](Self::commit_image).
    pub(crate) fn create_image(&self, [width, height]: [usize; 2], half: bool) -> Result<ClImage, ClError> {
        self.check_alive("clCreateImage")?;
        let channel = if half { CL_HALF_FLOAT } else { CL_FLOAT };
        let format = cl_image_format { image_channel_order: CL_RGBA, image_channel_data_type: channel };
        let desc = cl_image_desc {
            image_type: CL_MEM_OBJECT_IMAGE2D,
            image_width: width,
            image_height: height,
            image_depth: 0,
            image_array_size: 0,
            image_row_pitch: 0,
            image_slice_pitch: 0,
            num_mip_levels: 0,
            num_samples: 0,
            buffer: ptr::null_mut(),
        };
        let create = || create!(clCreateImage(self.context, CL_MEM_READ_WRITE, &format, &desc, ptr::null_mut()));
        let bytes = width * height * if half { 8 } else { 16 };
        exit::call(create).map(|mem| ClImage(ClBuffer::new(mem, bytes))).map_err(|e| self.detect_loss(e))
    }

    /// Calls [`commit`](Self::commit) for an image.
    pub(crate) fn commit_image(&self, image: &ClImage) -> Result<(), ClError> {
        self.commit(&image.0)
    }

    /// Returns the maximum width and height of images, in pixels; `None` if the device has no images, or has no function to create
    /// them, as before OpenCL 1.2.
    pub(crate) fn image_limits(&self) -> Option<[usize; 2]> {
        *self.image_limits.get_or_init(|| {
            let id = self.id();
            let number = |what| value!(clGetDeviceInfo(id, what) as usize).unwrap_or(0);
            let version = text(&info!(clGetDeviceInfo(id, CL_DEVICE_VERSION)).unwrap_or_default());
            let is_old = ["OpenCL 1.0", "OpenCL 1.1"].iter().any(|old| version.starts_with(old));
            let has_images = value!(clGetDeviceInfo(id, CL_DEVICE_IMAGE_SUPPORT) as u32).is_ok_and(|has| has != 0);
            let limits = [number(CL_DEVICE_IMAGE2D_MAX_WIDTH), number(CL_DEVICE_IMAGE2D_MAX_HEIGHT)];
            (has_images && !is_old && !limits.contains(&0)).then_some(limits)
        })
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

    /// Waits for the work submitted to the stream so far, and reports the faults in these slots. The driver is called only if
    /// there is work to wait for.
    pub(super) fn wait_and_report(&self, stream: StreamId, slots: &[&'static FaultSlot]) -> Result<()> {
        if self.queues.is_finished(stream) && !slots.iter().any(|slot| slot.is_pending()) {
            return self.check_lost().and_then(|()| self.take_failed(stream));
        }
        self.submit_and_report(stream, slots, (), self.submit_nothing())
    }

    /// Calls [`submit_and_wait`](Self::submit_and_wait), and reports the faults that earlier kernels recorded in these slots.
    pub(super) fn submit_and_report<M>(
        &self,
        stream: StreamId,
        slots: &[&'static FaultSlot],
        memory: M,
        submit: impl FnOnce(&mut LockedQueue<'_>, &mut M, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<M> {
        self.check_lost()?;
        let readings = Readings::default();
        let done = match self.info().kind {
            // NVIDIA's driver reads the fault words in 9 us once the kernels are done, and in 14 to 40 us behind running kernels.
            DeviceKind::DiscreteGpu => self.submit_and_wait(stream, memory, submit).and_then(|memory| {
                if !slots.iter().any(|slot| slot.is_pending()) {
                    return Ok((readings, memory));
                }
                // A blocking read under the lock is allowed only if the wait is short.
                let ready = || {
                    self.queues.is_only_submission(stream)
                        && slots.iter().all(|slot| slot.is_pending_on_no_other(stream))
                };
                let read = self.submit_and_wait(stream, readings, |q, readings, _| readings.enqueue(q, slots, ready()));
                read.map(|readings| (readings, memory))
            }),
            // The fault words are read first, because the event must be that of the last command.
            _ => self.submit_and_wait(stream, (readings, memory), |q, (readings, memory), event| {
                readings.enqueue(q, slots, false)?;
                submit(q, memory, event)
            }),
        };
        let (readings, memory) = done.map_err(|e| self.error(e))?;
        self.take_failed(stream)?;
        self.report(readings).map(|()| memory)
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
        if e.classify() == Class::Lost {
            let cause = self
                .lost
                .get_or_init(|| format!("{}: {}{}", e.call, e.name(), detail(&e, &self.description.driver_text)));
            return Error::DeviceLost { device: self.device, cause: cause.clone() };
        }
        Error::OpenCl {
            device: self.device,
            call: e.call,
            code: e.name(),
            detail: detail(&e, &self.description.driver_text),
        }
    }

    pub(crate) fn check_lost(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(cause) => Err(Error::DeviceLost { device: self.device, cause: cause.clone() }),
        }
    }

    /// Like [`check_lost`](Self::check_lost), for functions that return a [`ClError`].
    pub(super) fn check_alive(&self, call: &'static str) -> Result<(), ClError> {
        if self.is_lost() { Err(ClError { lost: true, ..ClError::new(call, -36) }) } else { Ok(()) }
    }

    /// Decides whether a failed call means that the device is lost. Not to be called under the queue lock.
    pub(super) fn detect_loss(&self, mut e: ClError) -> ClError {
        e.lost = e.unfinished || e.is_fatal() || e.is_suspicious() && !self.responds();
        if e.lost {
            let (kept, detail) =
                (if e.unfinished { UNFINISHED } else { "" }, detail(&e, &self.description.driver_text));
            self.lost.get_or_init(|| format!("{}: {}{detail}{kept}", e.call, e.name()));
            let device = self.device;
            log::emit(move || tracing::error!(%device, call = e.call, code = e.name(), "device lost"));
        }
        e
    }

    /// True if sixteen bytes can still be read, by a read command or by mapping. A device that only ran out of a resource recovers
    /// within the pauses; a dead device does not.
    fn responds(&self) -> bool {
        self.test_read()
            || PAUSES.iter().any(|&pause| {
                thread::sleep(pause); // outside the lock
                self.test_read()
            })
    }

    fn test_read(&self) -> bool {
        let (mut queue, to) = (self.lock_for_waits(SERVICE_STREAM), self.faults.discard_memory());
        let (buffer, n, none) = (self.faults.shared().buffer(), size_of::<FaultWords>(), ptr::null_mut());
        let mem = buffer.mem();
        call!(clEnqueueReadBuffer(queue.raw, mem, 1, 0, n, to, 0, ptr::null(), none)).is_ok()
            || create!(clEnqueueMapBuffer(queue.raw, mem, 1, CL_MAP_READ, 0, n, 0, ptr::null(), none))
                .is_ok_and(|at| queue.unmap(buffer, at).is_ok())
    }
}

/// Runs only if opening the device failed. The context itself lives until all objects made in it are released.
impl Drop for ClDevice {
    fn drop(&mut self) {
        let _ = call!(clReleaseContext(self.context));
    }
}

/// Creates a small buffer in a context, before the device exists.
pub(super) fn create_buffer(context: cl_context, bytes: usize) -> Result<ClBuffer, ClError> {
    let mem = exit::call(|| create!(clCreateBuffer(context, CL_MEM_READ_WRITE, bytes, ptr::null_mut())))?;
    Ok(ClBuffer::new(mem, bytes))
}

/// Returns the end of an error message: the number of an unnamed code, and the driver's last message.
fn detail(e: &ClError, text: &DriverText) -> String {
    let text = text.take();
    let mut detail = String::new();
    if e.name() == "UNKNOWN_ERROR" {
        detail = format!(" ({})", e.code);
    }
    if !text.is_empty() {
        detail = format!("{detail}: {}", text.trim());
    }
    detail
}
