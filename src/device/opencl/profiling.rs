//! Profiling of commands: their events are kept until the device has run them.
//!
//! A queue gives times only if it was created to, so that while something is profiled each stream has a second queue. Neither
//! is released: threads wait for queues outside the lock. Events are released in batches, as soon as their commands are
//! over, because drivers slow down when there are thousands of them.

use std::collections::VecDeque;
use std::mem;
use std::ptr;
use std::time::Instant;

use opencl3::command_queue::CL_QUEUE_PROFILING_ENABLE;
use opencl3::event::{
    CL_PROFILING_COMMAND_END, CL_PROFILING_COMMAND_QUEUED, CL_PROFILING_COMMAND_START, CL_PROFILING_COMMAND_SUBMIT,
};
use opencl3::types::{cl_command_queue, cl_event};

use super::driver::{ClEvent, call, value};
use super::errors::ClError;
use super::exit;
use super::queue::Queue;
use super::{ClDevice, opened};
use crate::Result;
use crate::device::profiler::{self, Kind, Record};
use crate::device::{Device, StreamId};

/// Commands after which those that are over are looked for.
const BATCH: usize = 64;

/// The commands of a queue whose times are not known yet, in order.
pub(super) struct Profiled {
    device: Device,
    stream: StreamId,
    pending: VecDeque<(ClEvent, Record)>,
}

impl Profiled {
    /// Records the commands that are over, and releases their events.
    fn collect(&mut self) {
        while self.pending.front().is_some_and(|(event, _)| event.is_over().unwrap_or(true)) {
            if let Some((event, mut record)) = self.pending.pop_front() {
                record.device_times = times(&event);
                profiler::push(record);
            }
        }
    }
}

/// When a command was queued, submitted, started and ended; None where the driver does not tell.
fn times(event: &ClEvent) -> Option<[u64; 4]> {
    let time = |which| exit::call(|| value!(clGetEventProfilingInfo(event.0, which) as u64)).ok();
    Some([
        time(CL_PROFILING_COMMAND_QUEUED)?,
        time(CL_PROFILING_COMMAND_SUBMIT)?,
        time(CL_PROFILING_COMMAND_START)?,
        time(CL_PROFILING_COMMAND_END)?,
    ])
}

impl Queue {
    /// Enqueues a command with `enqueue`, which is given the queue and where the command's event goes: to `event`, unless
    /// that is null, and to the profiler while something is profiled.
    #[inline]
    pub(super) fn command(
        &mut self,
        (kind, name, bytes): (Kind, &'static str, usize),
        event: *mut cl_event,
        enqueue: impl FnOnce(cl_command_queue, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<(), ClError> {
        let Some(profiled) = &mut self.profiled else { return enqueue(self.raw, event) };
        let record = Record::begin(kind, name, profiled.device).on_stream(profiled.stream).with_bytes(bytes);
        let mut raw = ptr::null_mut();
        enqueue(self.raw, &mut raw)?;
        let record = record.ended();
        if !event.is_null() && !raw.is_null() {
            // SAFETY: the caller's place for an event, which a driver would write to as well.
            unsafe { *event = raw };
            if call!(clRetainEvent(raw)).is_err() {
                profiler::push(record); // the event is the caller's alone
                return Ok(());
            }
        }
        match raw.is_null() {
            true => profiler::push(record),
            false => profiled.pending.push_back((ClEvent(raw), record)),
        }
        if profiled.pending.len() % BATCH == 0 {
            profiled.collect();
        }
        Ok(())
    }

    /// Goes on with a queue that gives times, or with one that does not. What was submitted is over then.
    fn set_profiling(&mut self, on: bool, device: &ClDevice, stream: StreamId) -> Result<(), ClError> {
        if self.profiled.is_some() == on {
            return Ok(());
        }
        let other = match self.other {
            Some(other) => other,
            None => Queue::create_raw(device.context, device.id(), if on { CL_QUEUE_PROFILING_ENABLE } else { 0 })?,
        };
        self.other = Some(other);
        self.finish()?;
        self.unflushed = 0;
        self.collect_profiled();
        self.other = Some(mem::replace(&mut self.raw, other));
        self.profiled =
            on.then(|| Profiled { device: device.device(), stream, pending: VecDeque::with_capacity(2 * BATCH) });
        Ok(())
    }

    /// Records the commands that are over.
    pub(super) fn collect_profiled(&mut self) {
        self.profiled.iter_mut().for_each(Profiled::collect);
    }
}

impl ClDevice {
    /// Has every stream's commands timed from now on, or no longer. Waits for what was submitted.
    ///
    /// # Errors
    /// What the driver refuses; then some streams' commands are timed and others' not.
    pub(crate) fn set_profiling(&self, on: bool) -> Result<()> {
        self.check_lost()?;
        let set = self.queues.each(|stream, queue| queue.set_profiling(on, self, stream));
        set.map_err(|e| self.error(self.settle(e)))
    }
}

/// Bytes that are copied to find out how fast a device copies, at most, and how often.
const COPIED: usize = 256 << 20;
const COPIES: u32 = 8;

impl ClDevice {
    /// How many bytes a second the device reads and writes as it copies from one buffer to another.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(crate) fn copy_rate(&self) -> Result<f64> {
        let (memory, largest) = (self.info().memory as usize, self.info().largest_buffer as usize);
        let bytes = COPIED.min(memory / 16).min(largest).max(1 << 20);
        let buffer = || self.create_buffer(bytes).map_err(|e| self.error(e));
        let (from, to) = (buffer()?, buffer()?);
        let copy = |blocking| self.copy((&from, 0), (&to, 0), bytes, blocking);
        copy(false)?; // gives the buffers their memory, and may build a kernel
        copy(true)?;
        let began = Instant::now();
        (1..COPIES).try_for_each(|_| copy(false))?;
        copy(true)?;
        Ok(2.0 * bytes as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64())
    }
}

/// [`ClDevice::set_profiling`] for all devices that are open.
///
/// # Errors
/// The first device's that fails; the others are tried all the same.
pub(crate) fn set_profiling(on: bool) -> Result<()> {
    let devices = (0..super::count()).filter_map(opened);
    devices.fold(Ok(()), |done, device| done.and(device.set_profiling(on)))
}
