//! Profiling of a device: times of its commands, and how fast it copies.

use std::time::Instant;

use super::queue::times;
use super::{ClDevice, ClEvent};
use crate::device::{log, profiler};
use crate::{Error, Result};

impl ClDevice {
    /// Has every stream's commands timed from now on if something is profiled, and no longer if nothing is: asked under the
    /// queues' lock, so that of several calls the last finds what holds. Waits for what was submitted. A lost device has
    /// nothing to time.
    ///
    /// # Errors
    /// What the driver refuses; then some streams' commands are timed and others' not.
    pub(crate) fn set_profiling(&self) -> Result<()> {
        if self.is_lost() {
            return Ok(());
        }
        let set = self.queues.each(|stream, queue| {
            queue.set_profiling(profiler::is_on(), (self.context, self.id()), (self.device(), stream.0))
        });
        set.map_err(|e| self.error(self.settle(e)))
    }

    /// [`set_profiling`](Self::set_profiling) for a device or a stream that is new, which works without times as well.
    pub(crate) fn profile_if_on(&self) {
        if profiler::is_on()
            && let Err(error) = self.set_profiling()
        {
            log::emit(move || tracing::warn!(%error, "commands are not timed"));
        }
    }
}

impl ClDevice {
    /// When the event of [`record_timed`](Self::record_timed), which was waited for, was done: nanoseconds of the device's clock.
    ///
    /// # Errors
    /// A driver that does not tell.
    pub(crate) fn done_at(&self, event: &ClEvent) -> Result<u64> {
        let [.., end] = times(event).ok_or_else(|| {
            Error::invalid("elapsed_time", format!("the driver of {} gives no time of an event", self.device()))
        })?;
        Ok(end)
    }
}

/// Bytes that are copied to find out how fast a device copies, at most, and how often.
const COPIED: usize = 256 << 20;
const COPIES: u32 = 8;

impl ClDevice {
    /// How many bytes a second the device reads and writes as it copies from one buffer to another. Neither recorded by a
    /// graph that this thread captures, nor told what kernels found wrong before: that is for who waits for them.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(crate) fn copy_rate(&self) -> Result<f64> {
        let (memory, largest) = (self.info().memory as usize, self.info().largest_buffer as usize);
        let bytes = COPIED.min(memory / 16).min(largest).max(1 << 20);
        let buffer = || self.create_buffer(bytes).map_err(|e| self.error(e));
        let (from, to) = (buffer()?, buffer()?);
        let stream = self.current_stream();
        let copies = |n: u32| (0..n).try_for_each(|_| self.copy_on(stream, (&from, 0), (&to, 0), bytes));
        copies(2)?; // which gives the buffers their memory
        self.drain_stream(stream)?;
        let began = Instant::now();
        copies(COPIES)?;
        self.drain_stream(stream)?;
        Ok(2.0 * bytes as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64())
    }
}
