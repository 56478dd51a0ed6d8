//! An opened device: its context, its queues and what it remembers.

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

use super::blob::Imported;
use super::discovery::{Found, text};
use super::driver::{ClBuffer, ClImage, ClKernel, call, create, info, value};
use super::errors::{ClError, Class};
use super::exit;
use super::fault::{Readings, Slot, Slots, Words, ZEROS};
use super::probe::TensorCores;
use super::program::Programs;
use super::queues::{Locked, Queues, SERVICE};
use super::retry::{PAUSES, Probed, retry};
use super::tuning::Tuning;
use crate::device::lock;
use crate::device::stream::MAX_STREAMS;
use crate::device::{Device, DeviceInfo, DeviceKind, StreamId, log};
use crate::{Error, Result};

/// Counters of a stream that a kernel may use; see [`ClDevice::arrivals`].
pub(crate) const ARRIVALS: usize = 256;

/// What a message says where commands may never end.
const UNFINISHED: &str =
    "; the operation's commands may still be using memory of the host, which is therefore never released";

/// An open OpenCL device: one context, one in-order queue a stream. Lives as long as the process.
pub(crate) struct ClDevice {
    device: Device,
    pub(super) found: &'static Found,
    pub(super) context: cl_context,
    pub(super) queues: Queues,
    pub(super) programs: Programs,
    pub(super) imported: Imported,
    pub(super) faults: Slots,
    pub(super) tensor_cores: Probed<TensorCores>,
    pub(super) tuning: OnceLock<Tuning>,
    /// See [`image_limits`](Self::image_limits).
    pub(super) image_limits: OnceLock<Option<[usize; 2]>>,
    /// See [`arrivals`](Self::arrivals).
    arrivals: OnceLock<ClBuffer>,
    /// `fill` and `copy` of `kernels/memory.cl`, where they are used; then both with [wide offsets](Self::has_wide_offsets).
    pub(super) memory_kernels: [Probed<Option<ClKernel>>; 4],
    /// Whether a buffer was made that needs 64-bit offsets; see [`has_wide_offsets`](Self::has_wide_offsets).
    pub(super) wide_offsets: AtomicBool,
    lost: OnceLock<String>,
}

// SAFETY: a context is a process-wide object that OpenCL's thread-safe functions take; it is released with the device.
unsafe impl Send for ClDevice {}
// SAFETY: as above.
unsafe impl Sync for ClDevice {}

/// What the driver says through the callback of a context. It calls that when it likes, also inside another call and so under
/// a lock of ours, where a `tracing` subscriber must not be called: the messages are logged later.
#[derive(Default)]
pub(super) struct DriverText {
    messages: Mutex<Messages>,
    is_unlogged: AtomicBool,
}

#[derive(Default)]
struct Messages {
    last: String,
    unlogged: Vec<String>,
}

impl DriverText {
    /// How many messages wait to be logged at most.
    const UNLOGGED: usize = 64;

    fn messages(&self) -> MutexGuard<'_, Messages> {
        lock(&self.messages)
    }

    fn say(&self, text: String) {
        let mut messages = self.messages();
        if messages.unlogged.len() < Self::UNLOGGED {
            messages.unlogged.push(text.clone());
        }
        messages.last = text;
        self.is_unlogged.store(true, Release);
    }

    /// Logs what was said since the last time. Not under a queue's lock.
    pub(super) fn log(&self) {
        if self.is_unlogged.load(Relaxed) && self.is_unlogged.swap(false, Acquire) {
            let unlogged = mem::take(&mut self.messages().unlogged);
            unlogged.into_iter().for_each(|text| log::emit(move || tracing::warn!(text, "OpenCL driver")));
        }
    }

    /// The last thing that was said, once.
    fn take(&self) -> String {
        self.log();
        mem::take(&mut self.messages().last)
    }
}

extern "C" fn notify(text: *const c_char, _: *const c_void, _: usize, user: *mut c_void) {
    if text.is_null() || user.is_null() {
        return;
    }
    // SAFETY: `user` is the DriverText given at clCreateContext, which is never released, `text` a string that lives
    // during the call.
    let (driver_text, text) = unsafe { (&*user.cast::<DriverText>(), CStr::from_ptr(text)) };
    driver_text.say(text.to_string_lossy().into_owned());
}

impl ClDevice {
    /// Creates the context, the first queues and the first fault slot. What was created before a failure is released, and
    /// tried again a few times.
    pub(super) fn open(index: usize, found: &'static Found) -> Result<ClDevice> {
        let device = Device::OpenCL(index);
        let opened = retry(|| ClDevice::create(device, found)).map_err(|e| Error::OpenCl {
            device,
            call: e.call,
            code: e.name(),
            detail: detail(&e, &found.driver_text) + ": the device could not be opened; the next use tries again",
        })?;
        log::emit(move || tracing::debug!(%device, name = found.info.name, "opened"));
        Ok(opened)
    }

    fn create(device: Device, found: &'static Found) -> Result<ClDevice, ClError> {
        let properties = [opencl3::context::context::CL_CONTEXT_PLATFORM, found.platform as isize, 0];
        let user = ptr::from_ref(&found.driver_text).cast_mut().cast();
        let context = create!(clCreateContext(properties.as_ptr(), 1, &found.id, Some(notify), user))?;
        ClDevice::in_context(device, found, context, None)
    }

    /// A device in another's context, whose default stream is the queue, which is in order.
    pub(super) fn adopt(
        device: Device,
        found: &'static Found,
        context: cl_context,
        queue: cl_command_queue,
    ) -> Result<ClDevice, ClError> {
        call!(clRetainContext(context))?;
        ClDevice::in_context(device, found, context, Some(queue))
    }

    /// Takes over the context.
    fn in_context(
        device: Device,
        found: &'static Found,
        context: cl_context,
        queue: Option<cl_command_queue>,
    ) -> Result<ClDevice, ClError> {
        let parts = Queues::new(context, found.id, queue).and_then(|queues| Ok((queues, Slots::new(context)?)));
        let (queues, faults) = parts.inspect_err(|_| _ = call!(clReleaseContext(context)))?;
        Ok(ClDevice {
            device,
            found,
            context,
            queues,
            programs: Programs::default(),
            imported: Imported::default(),
            faults,
            tensor_cores: Probed::default(),
            tuning: OnceLock::new(),
            image_limits: OnceLock::new(),
            arrivals: OnceLock::new(),
            memory_kernels: Default::default(),
            wide_offsets: AtomicBool::new(false),
            lost: OnceLock::new(),
        })
    }

    /// Its name in the public interface.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// What the driver says it is.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.found.info
    }

    pub(super) fn id(&self) -> cl_device_id {
        self.found.id
    }

    /// Makes the driver give the buffer its memory now, so that running out shows here. What it contains afterwards is
    /// unspecified.
    pub(crate) fn commit(&self, buffer: &ClBuffer) -> Result<(), ClError> {
        self.alive("clEnqueueMigrateMemObjects")?;
        let mem = buffer.mem();
        let undefined = CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED;
        let migrated = self.submit_and_wait(SERVICE, (), |q, (), event| {
            call!(clEnqueueMigrateMemObjects(q.raw, 1, &mem, undefined, 0, ptr::null(), event))
        });
        match migrated {
            // An OpenCL 1.1 driver has no such function: a write touches the buffer as well.
            Err(e) if e.is_missing() => self.submit_and_wait(SERVICE, (), |q, (), event| {
                let from = ZEROS.as_ptr().cast();
                call!(clEnqueueWriteBuffer(q.raw, mem, 0, 0, 1, from, 0, ptr::null(), event))
            }),
            other => other,
        }
    }

    /// An image of so many pixels in width and height, of four halves or four floats each (`CL_RGBA`). The driver may give it
    /// memory only when it is first used: see [`commit_image`](Self::commit_image).
    pub(crate) fn create_image(&self, [width, height]: [usize; 2], half: bool) -> Result<ClImage, ClError> {
        self.alive("clCreateImage")?;
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
        exit::call(create).map(|mem| ClImage(ClBuffer::new(mem, bytes))).map_err(|e| self.settle(e))
    }

    /// [`commit`](Self::commit) of an image.
    pub(crate) fn commit_image(&self, image: &ClImage) -> Result<(), ClError> {
        self.commit(&image.0)
    }

    /// The greatest width and height of images, in pixels; `None` where the device has no images, or no function that makes them,
    /// as before OpenCL 1.2.
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

    /// [`ARRIVALS`] counters for each stream, zero when no kernel runs there: a kernel counts with them which of its
    /// work-groups comes last, and sets them back.
    pub(crate) fn arrivals(&self) -> Result<&ClBuffer> {
        if let Some(buffer) = self.arrivals.get() {
            return Ok(buffer);
        }
        let zeros = vec![0u8; MAX_STREAMS * ARRIVALS * size_of::<u32>()];
        let buffer = self.create_buffer(zeros.len()).map_err(|e| self.error(e))?;
        self.write(&zeros, (&buffer, 0))?;
        Ok(self.arrivals.get_or_init(|| buffer))
    }

    /// Waits for everything submitted to the stream so far, and reports the faults in these slots. The driver is asked only
    /// where there is something to wait for.
    pub(super) fn wait_and_report(&self, stream: StreamId, slots: &[&'static Slot]) -> Result<()> {
        if self.queues.is_finished(stream) && !slots.iter().any(|slot| slot.is_pending()) {
            return self.check_lost().and_then(|()| self.take_failed(stream));
        }
        self.submit_and_report(stream, slots, (), self.wait_only())
    }

    /// [`submit_and_wait`](Self::submit_and_wait), and reports the faults that kernels submitted before recorded in these
    /// slots.
    pub(super) fn submit_and_report<M>(
        &self,
        stream: StreamId,
        slots: &[&'static Slot],
        memory: M,
        submit: impl FnOnce(&mut Locked<'_>, &mut M, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<M> {
        self.check_lost()?;
        let readings = Readings::default();
        let done = match self.info().kind {
            // NVIDIA's driver takes 9 us for words that are read once kernels are done, 14 to 40 behind them.
            DeviceKind::DiscreteGpu => self.submit_and_wait(stream, memory, submit).and_then(|memory| {
                if !slots.iter().any(|slot| slot.is_pending()) {
                    return Ok((readings, memory));
                }
                // Under the lock nothing is waited for that takes long.
                let ready =
                    || self.queues.is_first(stream) && slots.iter().all(|slot| slot.is_pending_on_no_other(stream));
                let read = self.submit_and_wait(stream, readings, |q, readings, _| readings.enqueue(q, slots, ready()));
                read.map(|readings| (readings, memory))
            }),
            // The faults first: the event is that of the last command.
            _ => self.submit_and_wait(stream, (readings, memory), |q, (readings, memory), event| {
                readings.enqueue(q, slots, false)?;
                submit(q, memory, event)
            }),
        };
        let (readings, memory) = done.map_err(|e| self.error(e))?;
        self.take_failed(stream)?;
        self.report(readings).map(|()| memory)
    }

    /// Whether the device has faulted: everything but dropping gives [`Error::DeviceLost`] then.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Makes the device lost: what its memory holds can no longer be relied on.
    pub(crate) fn give_up(&self, cause: &str) {
        self.end(cause);
        let (device, cause) = (self.device, cause.to_owned());
        log::emit(move || tracing::error!(%device, cause, "device given up"));
    }

    /// [`give_up`](Self::give_up) without a word.
    pub(super) fn end(&self, cause: &str) {
        self.lost.get_or_init(|| cause.to_owned());
    }

    /// An error for the caller, with the code's name and what the driver had to say.
    pub(crate) fn error(&self, e: ClError) -> Error {
        if e.classify() == Class::Lost {
            let cause =
                self.lost.get_or_init(|| format!("{}: {}{}", e.call, e.name(), detail(&e, &self.found.driver_text)));
            return Error::DeviceLost { device: self.device, cause: cause.clone() };
        }
        Error::OpenCl { device: self.device, call: e.call, code: e.name(), detail: detail(&e, &self.found.driver_text) }
    }

    /// An error once the device is lost.
    pub(crate) fn check_lost(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(cause) => Err(Error::DeviceLost { device: self.device, cause: cause.clone() }),
        }
    }

    /// [`check_lost`](Self::check_lost) for the calls that return a [`ClError`].
    pub(super) fn alive(&self, call: &'static str) -> Result<(), ClError> {
        if self.is_lost() { Err(ClError { lost: true, ..ClError::new(call, -36) }) } else { Ok(()) }
    }

    /// Decides whether a failure means that the device is lost. Not under the queue lock.
    pub(super) fn settle(&self, mut e: ClError) -> ClError {
        e.lost = e.unfinished || e.is_fatal() || e.is_suspicious() && !self.answers();
        if e.lost {
            let (kept, detail) = (if e.unfinished { UNFINISHED } else { "" }, detail(&e, &self.found.driver_text));
            self.lost.get_or_init(|| format!("{}: {}{detail}{kept}", e.call, e.name()));
            let device = self.device;
            log::emit(move || tracing::error!(%device, call = e.call, code = e.name(), "device lost"));
        }
        e
    }

    /// Whether sixteen bytes can still be read, in one way or another. A device that has only run out of something answers
    /// sooner or later, a dead one never.
    fn answers(&self) -> bool {
        self.reads()
            || PAUSES.iter().any(|&pause| {
                thread::sleep(pause); // not under the lock
                self.reads()
            })
    }

    fn reads(&self) -> bool {
        let (mut queue, to) = (self.lock_for_waits(SERVICE), self.faults.unread());
        let (buffer, n, none) = (self.faults.shared().buffer(), size_of::<Words>(), ptr::null_mut());
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

pub(super) fn create_buffer(context: cl_context, bytes: usize) -> Result<ClBuffer, ClError> {
    let mem = exit::call(|| create!(clCreateBuffer(context, CL_MEM_READ_WRITE, bytes, ptr::null_mut())))?;
    Ok(ClBuffer::new(mem, bytes))
}

/// What follows the code's name in a message: the number where it has no name, and the driver's own words.
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
