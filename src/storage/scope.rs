//! The allocator scopes of a thread, which temporarily replace a device's allocator, and the thread's current stream.

use std::cell::RefCell;
use std::sync::Arc;

use super::allocator::Allocator;
use crate::Device;
use crate::device::stream_id::current_id;
use crate::device::{OnDrop, StreamId};

thread_local! {
    /// The allocators in scope on this thread, the innermost last.
    static SCOPES: RefCell<Vec<(Device, Arc<dyn Allocator>)>> = const { RefCell::new(Vec::new()) };
}

/// Returns the innermost allocator in scope on this thread for the device. Takes only a few ns if no scope is active, because every
/// allocation calls this function.
pub(super) fn allocator(device: Device) -> Option<Arc<dyn Allocator>> {
    let find = |scopes: &RefCell<Vec<(Device, Arc<dyn Allocator>)>>| {
        scopes.borrow().iter().rev().find(|(of, _)| *of == device).map(|(_, allocator)| Arc::clone(allocator))
    };
    SCOPES.try_with(find).ok().flatten() // returns `None` while the thread ends
}

/// Runs `f` with `allocator` in place of `device`'s allocator for this thread's storages, whose blocks are returned to
/// `allocator` even if they are dropped later or on another thread. The scope also ends if `f` panics.
pub(super) fn with_allocator<R>(device: Device, allocator: Arc<dyn Allocator>, f: impl FnOnce() -> R) -> R {
    let entered = SCOPES.try_with(|scopes| scopes.borrow_mut().push((device, allocator)));
    let _leave = entered.is_ok().then_some(OnDrop(|| {
        let _last = SCOPES.try_with(|scopes| scopes.borrow_mut().pop()); // the allocator is dropped after the borrow of the list ends
    }));
    f()
}

/// Returns the stream of new storages of this thread. Host memory has no stream, because work on the CPU is done when an operation returns.
pub(super) fn home_stream(device: Device) -> StreamId {
    if device == Device::Cpu { StreamId::DEFAULT } else { current_id(device) }
}
