//! The allocator's clock.

use std::time::Instant;

/// The time since it was made; tests turn it forward.
#[derive(Debug)]
pub(super) struct Clock {
    started: Instant,
    #[cfg(test)]
    pub(super) ahead: std::sync::atomic::AtomicU64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock {
            started: Instant::now(),
            #[cfg(test)]
            ahead: std::sync::atomic::AtomicU64::new(0),
        }
    }
}

impl Clock {
    pub(super) fn milliseconds(&self) -> u64 {
        let elapsed = self.started.elapsed().as_millis() as u64;
        #[cfg(test)] // Miri is slow: there, time passes only where tests say so
        let elapsed = if cfg!(miri) { 0 } else { elapsed } + self.ahead.load(std::sync::atomic::Ordering::Relaxed);
        elapsed
    }
}
