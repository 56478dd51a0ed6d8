//! Callbacks of programs, for when memory runs short.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::Device;
use crate::device::lock;

/// What may free memory, and says whether it did.
pub type FreeMemory = dyn Fn() -> bool + Send + Sync;
/// What is told that memory ran out.
pub type OomObserver = dyn Fn(&OutOfMemoryEvent) + Send + Sync;

/// An allocation that failed for want of memory, as observers see it: just before the error is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemoryEvent {
    /// The device that is full.
    pub device: Device,
    /// Bytes asked for.
    pub requested: usize,
    /// Bytes of segments the allocator may hold in all: the device's memory, or its limit.
    pub allowed: u64,
    /// Bytes of the device's memory that this allocator has not taken. Others may have: OpenCL cannot tell.
    pub device_free: u64,
}

/// Keeps a callback in place. Dropping it removes the callback; a call under way is not waited for.
#[must_use = "dropping it removes the callback"]
pub struct Registration(Option<Box<dyn FnOnce() + Send + Sync>>);

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(remove) = self.0.take() {
            remove();
        }
    }
}

/// Callbacks in the order in which they were added.
struct List<F: ?Sized>(Arc<Mutex<Vec<Arc<F>>>>);

impl<F: ?Sized> Default for List<F> {
    fn default() -> List<F> {
        List(Arc::default())
    }
}

impl<F: ?Sized + Send + Sync + 'static> List<F> {
    fn add(&self, hook: Arc<F>) -> Registration {
        lock(&self.0).push(Arc::clone(&hook));
        let list = Arc::downgrade(&self.0);
        Registration(Some(Box::new(move || {
            let Some(list) = list.upgrade() else { return };
            // Dropped after the lock: what a callback holds may want this list when it goes.
            let mut hooks = lock(&list);
            let removed = hooks.iter().position(|other| Arc::ptr_eq(other, &hook)).map(|at| hooks.remove(at));
            drop(hooks);
            drop((removed, hook));
        })))
    }

    fn all(&self) -> Vec<Arc<F>> {
        lock(&self.0).clone()
    }
}

/// The callbacks of one allocator.
#[derive(Default)]
pub(super) struct Hooks {
    free_memory: List<FreeMemory>,
    observers: List<OomObserver>,
}

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });

/// Runs `f`, unless this thread is inside of such a call already: a callback that allocates, and fails, calls none.
fn outermost<R>(f: impl FnOnce() -> R) -> Option<R> {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            INSIDE.set(false);
        }
    }
    if INSIDE.replace(true) {
        return None;
    }
    let _reset = Reset;
    Some(f())
}

impl Hooks {
    pub(super) fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Registration {
        self.free_memory.add(Arc::from(free))
    }

    pub(super) fn add_oom_observer(&self, observe: Box<OomObserver>) -> Registration {
        self.observers.add(Arc::from(observe))
    }

    /// Calls every free-memory callback; says whether any freed something.
    pub(super) fn ask_for_memory(&self) -> bool {
        let callbacks = self.free_memory.all();
        !callbacks.is_empty() && outermost(|| callbacks.iter().filter(|free| free()).count() > 0).unwrap_or(false)
    }

    /// Calls every observer, if there are any, with the event that `describe` gives.
    pub(super) fn tell_observers(&self, describe: impl FnOnce() -> OutOfMemoryEvent) {
        let observers = self.observers.all();
        if !observers.is_empty() {
            let event = describe();
            outermost(|| observers.iter().for_each(|observe| observe(&event)));
        }
    }
}
