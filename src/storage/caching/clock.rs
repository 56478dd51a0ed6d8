//! The allocator's clock.

use std::time::Instant;

/// Measures milliseconds since the allocator was created. Tests can advance the clock.
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
        #[cfg(test)] // Miri is slow, so under Miri only tests advance the clock
        let elapsed = if cfg!(miri) { 0 } else { elapsed } + self.ahead.load(std::sync::atomic::Ordering::Relaxed);
        elapsed
    }
}
