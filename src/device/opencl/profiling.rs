//! Profiling of a device: times of its commands, and how fast it copies.

use std::time::Instant;

use super::ClDevice;
use crate::Result;

impl ClDevice {
    /// Has every stream's commands timed from now on, or no longer. Waits for what was submitted.
    ///
    /// # Errors
    /// What the driver refuses; then some streams' commands are timed and others' not.
    pub(crate) fn set_profiling(&self, on: bool) -> Result<()> {
        self.check_lost()?;
        let set = self
            .queues
            .each(|stream, queue| queue.set_profiling(on, (self.context, self.id()), (self.device(), stream.0)));
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
