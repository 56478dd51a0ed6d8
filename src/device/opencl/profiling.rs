//! Profiling of a device: times of commands, and the rate of copies.

use std::time::Instant;

use super::queue::command_times;
use super::{ClDevice, ClEvent};
use crate::device::{log, profiler};
use crate::{Error, Result};

impl ClDevice {
    /// Switches the timing of all streams' commands to the profiler's state, which is read under the queues' lock, so that the last of
    /// concurrent calls uses the current state. Waits for the submitted work. Does nothing on a lost device.
    ///
    /// # Errors
    /// The driver's errors; the commands of only some streams are then timed.
    pub(crate) fn set_profiling(&self) -> Result<()> {
        if self.is_lost() {
            return Ok(());
        }
        let set = self.queues.try_for_each(|stream, queue| {
            queue.set_profiling(profiler::is_on(), (self.context, self.id()), (self.device(), stream.0))
        });
        set.map_err(|e| self.error(self.detect_loss(e)))
    }

    /// Calls [`set_profiling`](Self::set_profiling) for a new device or stream; on failure the device works without times.
    pub(crate) fn profile_if_on(&self) {
        if profiler::is_on()
            && let Err(error) = self.set_profiling()
        {
            log::emit(move || tracing::warn!(%error, "commands are not timed"));
        }
    }

    /// Returns the time at which an event of [`record_timed`](Self::record_timed) was done, in nanoseconds of the device's clock. Call
    /// after waiting for the event.
    ///
    /// # Errors
    /// The driver reports no times.
    pub(crate) fn done_at(&self, event: &ClEvent) -> Result<u64> {
        let [.., end] = command_times(event).ok_or_else(|| {
            Error::invalid("elapsed_time", format!("the driver of {} reports no times of events", self.device()))
        })?;
        Ok(end)
    }
}

/// The maximum size of the buffers of the copy measurement, in bytes.
const MAX_COPIED_BYTES: usize = 256 << 20;
const COPIES: u32 = 8;

impl ClDevice {
    /// Measures the rate of copies between two buffers of the device: bytes read plus bytes written, per second. The copies are not
    /// captured by a graph of this thread, and earlier faults of kernels are not reported here.
    ///
    /// # Errors
    /// The driver's errors.
    pub(crate) fn copy_rate(&self) -> Result<f64> {
        let (memory, largest) = (self.info().memory as usize, self.info().largest_buffer as usize);
        let bytes = MAX_COPIED_BYTES.min(memory / 16).min(largest).max(1 << 20);
        let buffer = || self.create_buffer(bytes).map_err(|e| self.error(e));
        let (from, to) = (buffer()?, buffer()?);
        let stream = self.current_stream();
        let copies = |n: u32| (0..n).try_for_each(|_| self.copy_on(stream, (&from, 0), (&to, 0), bytes));
        copies(2)?; // makes the driver allocate the buffers
        self.drain_stream(stream)?;
        let began = Instant::now();
        copies(COPIES)?;
        self.drain_stream(stream)?;
        Ok(2.0 * bytes as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64())
    }
}
