//! Calls that fail and may succeed a moment later: asked again at once, or after a while.

use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use super::errors::ClError;
use crate::device::log;

/// Between attempts: what a driver is short of for a moment is there again at one of them.
pub(super) const PAUSES: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(100)];
/// Requests after the first refusal that are not passed on, and the most after any.
const FIRST_REST: u32 = 16;
const LONGEST_REST: u32 = 4096;

/// Calls `f` until it succeeds or is given an answer that asking again would not change, at most four times.
pub(super) fn retry<T>(f: impl FnMut() -> Result<T, ClError>) -> Result<T, ClError> {
    retry_if(ClError::is_transient, f)
}

/// [`retry`] with errors of another type, of which `is_transient` tells those after which `f` is called again.
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

/// When to ask again for what was refused: after some requests, after twice as many each time it is refused again. Asking
/// for every request would cost more than doing without.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Requests still to be skipped.
    rest: AtomicU32,
    /// How many there were after the last refusal.
    last: AtomicU32,
}

impl Backoff {
    /// Whether this request is to be passed on.
    pub(crate) fn is_due(&self) -> bool {
        self.rest.load(Relaxed) == 0 || self.rest.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_err()
    }

    /// It was refused.
    pub(crate) fn refused(&self) {
        let rest = (2 * self.last.load(Relaxed)).clamp(FIRST_REST, LONGEST_REST);
        self.last.store(rest, Relaxed);
        self.rest.store(rest, Relaxed);
    }

    /// It was granted, or there is reason to think that the next one is.
    pub(crate) fn reset(&self) {
        self.last.store(0, Relaxed);
        self.rest.store(0, Relaxed);
    }
}

/// A property of a device that is found out by trying. A try that a failing call ended leaves it unknown, and is repeated later.
#[derive(Debug)]
pub(super) struct Probed<T> {
    known: OnceLock<T>,
    backoff: Backoff,
}

impl<T> Default for Probed<T> {
    fn default() -> Probed<T> {
        Probed { known: OnceLock::new(), backoff: Backoff::default() }
    }
}

impl<T> Probed<T> {
    /// What `probe` found out, at this request or an earlier one; `None` where it could not yet.
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
    fn what_may_succeed_later_is_asked_again_and_an_answer_is_not() {
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
    fn only_what_was_found_out_is_remembered() {
        let probed = Probed::default();
        assert_eq!(probed.get(|| None), None::<&u32>);
        (0..FIRST_REST).for_each(|_| assert_eq!(probed.get(|| unreachable!()), None));
        assert_eq!(probed.get(|| Some(7)), Some(&7));
        assert_eq!(probed.get(|| unreachable!()), Some(&7));
    }

    #[test]
    fn what_is_refused_is_asked_for_less_and_less_often_and_never_given_up() {
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
