//! Retries of calls that may succeed later: after a pause, or after a number of skipped requests.

use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use super::errors::ClError;
use crate::device::log;

/// The pauses between attempts, in which a driver may recover from a shortage.
pub(super) const PAUSES: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(100)];
/// The number of requests that are skipped after the first refusal.
const FIRST_SKIPPED_REQUESTS: u32 = 16;
/// The maximum number of requests that are skipped after a refusal.
const MAX_SKIPPED_REQUESTS: u32 = 4096;

/// Calls `f` until it succeeds or fails with a final error, at most four times.
pub(super) fn retry<T>(f: impl FnMut() -> Result<T, ClError>) -> Result<T, ClError> {
    retry_if(ClError::is_transient, f)
}

/// Calls `f` like [`retry`], with another type of error; `is_transient` decides whether `f` is called again.
pub(super) fn retry_if<T, E: Debug + 'static>(
    is_transient: impl Fn(&E) -> bool,
    mut f: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for pause in PAUSES {
        match f() {
            Err(error) if is_transient(&error) => {
                log::emit(move || tracing::debug!(?error, ?pause, "tried again after a pause"));
                thread::sleep(pause);
            }
            answer => return answer,
        }
    }
    f()
}

/// Decides when to repeat a refused request: after a number of skipped requests, which doubles with every refusal. Asking the
/// driver at every request would cost more than the result gains.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// The number of requests that are still to be skipped.
    rest: AtomicU32,
    /// The number of requests to skip after the last refusal.
    last: AtomicU32,
}

impl Backoff {
    /// True if this request should be made rather than skipped.
    pub(crate) fn is_due(&self) -> bool {
        self.rest.load(Relaxed) == 0 || self.rest.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_err()
    }

    pub(crate) fn refused(&self) {
        let rest = (2 * self.last.load(Relaxed)).clamp(FIRST_SKIPPED_REQUESTS, MAX_SKIPPED_REQUESTS);
        self.last.store(rest, Relaxed);
        self.rest.store(rest, Relaxed);
    }

    /// Makes the next request due: after a success, or if the next request is likely to succeed.
    pub(crate) fn reset(&self) {
        self.last.store(0, Relaxed);
        self.rest.store(0, Relaxed);
    }
}

/// A lazily probed property of a device. A probe that fails leaves the property unknown, and is repeated later.
#[derive(Debug, Default)]
pub(super) struct Probed<T> {
    known: OnceLock<T>,
    backoff: Backoff,
}

impl<T> Probed<T> {
    /// Returns the result of `probe` in this call or an earlier call; `None` if no probe has succeeded yet.
    pub(super) fn get(&self, probe: impl FnOnce() -> Option<T>) -> Option<&T> {
        if self.known.get().is_none() && self.backoff.is_due() {
            match probe() {
                Some(found) => return Some(self.known.get_or_init(|| found)),
                None => self.backoff.refused(),
            }
        }
        self.known.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_failures_are_retried_and_answers_are_not() {
        for (fails, code, calls, succeeds) in
            [(0, -5, 1, true), (2, -6, 3, true), (3, -36, 4, true), (4, -5, 4, false), (1, -1001, 1, false)]
        {
            let mut called = 0;
            let result = retry(|| {
                called += 1;
                if called <= fails { Err(ClError::new("clGetPlatformIDs", code)) } else { Ok(()) }
            });
            assert_eq!((called, result.is_ok()), (calls, succeeds), "{fails} times {code}");
        }
    }

    #[test]
    fn failed_probes_are_not_remembered() {
        let probed = Probed::default();
        assert_eq!(probed.get(|| None), None::<&u32>);
        (0..FIRST_SKIPPED_REQUESTS).for_each(|_| assert_eq!(probed.get(|| unreachable!()), None));
        assert_eq!(probed.get(|| Some(7)), Some(&7));
        assert_eq!(probed.get(|| unreachable!()), Some(&7));
    }

    #[test]
    fn refused_requests_back_off_but_never_stop() {
        let backoff = Backoff::default();
        let rests: Vec<usize> = (0..12)
            .map(|_| {
                assert!(backoff.is_due());
                backoff.refused();
                (0..).take_while(|_| !backoff.is_due()).count()
            })
            .collect();
        assert_eq!(rests, [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096, 4096]);
        backoff.refused();
        backoff.reset();
        assert!(backoff.is_due());
        backoff.refused();
        assert_eq!((0..).take_while(|_| !backoff.is_due()).count(), 16, "as at first");
    }
}
