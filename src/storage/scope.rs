//! Values that hold while a closure runs on a thread, such as an allocator in place of a device's own; and the thread's current stream.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::thread::LocalKey;

use super::allocator::Allocator;
use crate::Device;
use crate::device::stream_id::current_id;
use crate::device::{OnDrop, StreamId};

/// The values of a thread's nested [`with_innermost`] calls, as a list that starts at the innermost call.
pub(super) struct ScopeList<T>(Cell<*const Scope<T>>);

/// A value and the enclosing one, in the frame of a [`with_innermost`] call or owned by an [`Entered`].
struct Scope<T> {
    value: T,
    outer: Cell<*const Scope<T>>,
}

impl<T> ScopeList<T> {
    pub(super) const fn new() -> ScopeList<T> {
        ScopeList(Cell::new(ptr::null()))
    }
}

/// Runs `f` with `value` as the innermost value of this thread's list. The scope also ends if `f` panics.
pub(super) fn with_innermost<T, R>(list: &'static LocalKey<ScopeList<T>>, value: T, f: impl FnOnce() -> R) -> R {
    let scope = Scope { value, outer: Cell::new(list.with(|list| list.0.get())) };
    list.with(|list| list.0.set(&raw const scope));
    let _leave = OnDrop(|| list.with(|list| list.0.set(scope.outer.get())));
    f()
}

/// A value in this thread's list until it is dropped, in any order with other values. The pointer keeps the value on its thread.
pub(super) struct Entered<T: 'static>(&'static LocalKey<ScopeList<T>>, *mut Scope<T>);

/// Makes `value` the innermost value of this thread's list, for callers that cannot pass a closure.
pub(super) fn enter<T>(list: &'static LocalKey<ScopeList<T>>, value: T) -> Entered<T> {
    let scope = Box::into_raw(Box::new(Scope { value, outer: Cell::new(list.with(|list| list.0.get())) }));
    list.with(|list| list.0.set(scope));
    Entered(list, scope)
}

impl<T> Drop for Entered<T> {
    fn drop(&mut self) {
        self.0.with(|list| {
            let mut link = &list.0;
            // A scope that is not in the list was entered inside a `with_innermost` call that has returned.
            // SAFETY: every scope in the list is alive: `with_innermost` and this drop remove theirs first.
            while let Some(next) = unsafe { link.get().as_ref() } {
                if std::ptr::eq(next, self.1) {
                    return link.set(next.outer.get());
                }
                link = &next.outer;
            }
        });
        // SAFETY: `enter` made the scope from a box, only this drop frees it, and no reference to the scope is left.
        drop(unsafe { Box::from_raw(self.1) });
    }
}

/// Returns the first result of `find` that is not `None`, for the values of this thread's list from the innermost on. Takes only a
/// few ns if the list is empty, because every allocation calls this function.
#[inline]
pub(super) fn find_innermost<T, R>(list: &'static LocalKey<ScopeList<T>>, find: impl Fn(&T) -> Option<R>) -> Option<R> {
    let mut next = list.with(|list| list.0.get());
    // SAFETY: a scope in the list belongs to a call of `with_innermost` or an `Entered` of this thread, which removes the scope before
    // it ends. `find` gets no reference that lives longer than the call of this function.
    while let Some(scope) = unsafe { next.as_ref() } {
        match find(&scope.value) {
            None => next = scope.outer.get(),
            found => return found,
        }
    }
    None
}

/// Returns the allocator that replaces a device's own, if any.
type AllocatorOf = dyn Fn(Device) -> Option<Arc<dyn Allocator>>;

thread_local! {
    /// The allocators in scope on this thread.
    static ALLOCATORS: ScopeList<Box<AllocatorOf>> = const { ScopeList::new() };
}

/// Returns the innermost allocator in scope on this thread for the device.
#[inline]
pub(super) fn allocator(device: Device) -> Option<Arc<dyn Allocator>> {
    find_innermost(&ALLOCATORS, |allocator_of| allocator_of(device))
}

/// Runs `f` with `allocator` in place of `device`'s allocator for this thread's storages, whose blocks are returned to
/// `allocator` even if they are dropped later or on another thread.
pub(super) fn with_allocator<R>(device: Device, allocator: Arc<dyn Allocator>, f: impl FnOnce() -> R) -> R {
    with_allocators(Box::new(move |of| (of == device).then(|| Arc::clone(&allocator))), f)
}

/// Like [`with_allocator`], for all devices for which `allocator_of` returns an allocator.
pub(super) fn with_allocators<R>(allocator_of: Box<AllocatorOf>, f: impl FnOnce() -> R) -> R {
    with_innermost(&ALLOCATORS, allocator_of, f)
}

/// Returns the stream of new storages of this thread. Host memory has no stream, because work on the CPU is done when an operation returns.
pub(super) fn home_stream(device: Device) -> StreamId {
    if device == Device::Cpu { StreamId::DEFAULT } else { current_id(device) }
}
