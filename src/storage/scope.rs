//! What a thread has in force: allocators instead of the device's own, for a while, and its current stream.

use std::cell::RefCell;
use std::sync::Arc;

use super::allocator::Allocator;
use crate::Device;
use crate::device::{StreamId, stream};

thread_local! {
    static SCOPES: RefCell<Vec<(Device, Arc<dyn Allocator>)>> = const { RefCell::new(Vec::new()) };
}

/// The innermost allocator in force on this thread for the device. A few ns where there is none: every allocation asks.
pub(super) fn allocator(device: Device) -> Option<Arc<dyn Allocator>> {
    let find = |scopes: &RefCell<Vec<(Device, Arc<dyn Allocator>)>>| {
        scopes.borrow().iter().rev().find(|(of, _)| *of == device).map(|(_, allocator)| Arc::clone(allocator))
    };
    SCOPES.try_with(find).ok().flatten() // a thread that is ending has none
}

/// Runs `f` with this thread's storages on `device` made by `allocator`. They go back to it, whenever and from wherever.
/// Afterwards, also after a panic, it is as before.
pub(super) fn with_allocator<R>(device: Device, allocator: Arc<dyn Allocator>, f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            // Dropped when the list is no longer borrowed.
            let _last = SCOPES.try_with(|scopes| scopes.borrow_mut().pop());
        }
    }
    let entered = SCOPES.try_with(|scopes| scopes.borrow_mut().push((device, allocator)));
    let _leave = entered.is_ok().then_some(Leave);
    f()
}

/// The stream that storages made by this thread now belong to. Host memory belongs to none: work on the CPU is done when
/// the call returns.
pub(super) fn home_stream(device: Device) -> StreamId {
    if device == Device::Cpu { StreamId::DEFAULT } else { stream::current_id(device) }
}
