//! Callbacks that a program registers, and that are called when memory runs short.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::thread;
use crate::Device;
use crate::device::{OnDrop, lock};

/// A callback that may free memory, and returns true if it did.
pub type FreeMemory = dyn Fn() -> bool + Send + Sync;
/// A callback that is called for each failed allocation.
pub type OomObserver = dyn Fn(&OutOfMemoryEvent) + Send + Sync;

/// An allocation that failed for lack of memory, reported just before the error is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemoryEvent {
    /// The device whose memory did not suffice.
    pub device: Device,
    /// The number of bytes requested.
    pub requested: usize,
    /// The maximum number of bytes of segments that the allocator may hold: the device's memory, or the limit if that is lower.
    pub allowed: u64,
    /// The number of bytes of the device's memory that this allocator does not hold. Other programs may hold a part of these bytes,
    /// which OpenCL does not report.
    pub device_free: u64,
}

/// Keeps a callback registered. Dropping the value removes the callback, without waiting for a call in progress.
#[must_use = "dropping it removes the callback"]
pub struct Registration(#[expect(dead_code, reason = "held")] OnDrop<Box<dyn FnMut() + Send + Sync>>);

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

/// Callbacks in the order of registration.
type CallbackList<F> = Arc<Mutex<Vec<Arc<F>>>>;

/// Adds a callback to a list until the returned value is dropped.
pub(super) fn register<F: ?Sized + Send + Sync + 'static>(list: &CallbackList<F>, hook: Arc<F>) -> Registration {
    lock(list).push(Arc::clone(&hook));
    let list = Arc::downgrade(list);
    Registration(OnDrop(Box::new(move || {
        let Some(list) = list.upgrade() else { return };
        // The callback is dropped after the lock is released, because dropping its captures may lock this list.
        let mut hooks = lock(&list);
        let removed = hooks.iter().position(|other| Arc::ptr_eq(other, &hook)).map(|at| hooks.remove(at));
        drop(hooks);
        drop(removed);
    })))
}

/// An allocator's callbacks.
#[derive(Default)]
pub(super) struct Hooks {
    pub(super) free_memory: CallbackList<FreeMemory>,
    pub(super) observers: CallbackList<OomObserver>,
}

/// Runs `f`, unless this thread is already inside a callback: allocations that fail within a callback call no callbacks.
fn run_unless_nested<R>(f: impl FnOnce() -> R) -> Option<R> {
    let is_nested = thread::get(|state| &state.is_in_callback);
    (!is_nested).then(|| thread::with(|state| &state.is_in_callback, true, f))
}

impl Hooks {
    /// Calls every free-memory callback. Returns true if any callback freed memory.
    pub(super) fn call_free_memory_callbacks(&self) -> bool {
        let callbacks = lock(&self.free_memory).clone();
        !callbacks.is_empty()
            && run_unless_nested(|| callbacks.iter().filter(|free| free()).count() > 0).unwrap_or(false)
    }

    /// Calls every observer with the event that `describe` returns.
    pub(super) fn notify_observers(&self, describe: impl FnOnce() -> OutOfMemoryEvent) {
        let observers = lock(&self.observers).clone();
        if !observers.is_empty() {
            let event = describe();
            run_unless_nested(|| observers.iter().for_each(|observe| observe(&event)));
        }
    }
}
