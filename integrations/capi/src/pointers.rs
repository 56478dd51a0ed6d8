//! What C's pointers are, once they are checked for null: handles, arrays, texts and where results go.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use crate::status::{Fault, guard};

fn null(what: &str) -> Fault {
    Fault::Argument(format!("{what} is null"))
}

/// What a handle or a pointer to a struct points to.
///
/// # Safety
/// It is null, or good for reading as long as the result is used.
pub(crate) unsafe fn borrow<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Fault> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// An array. Of no entries it may be null.
///
/// # Safety
/// It is null, or good for reading `count` entries as long as the result is used.
pub(crate) unsafe fn array<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], Fault> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(null(what)),
        _ if count > isize::MAX as usize / size_of::<T>() => {
            Err(Fault::Argument(format!("{what} has too many entries")))
        }
        // SAFETY: the caller's promise; it is not null, and not longer than an array can be.
        _ => Ok(unsafe { slice::from_raw_parts(pointer, count) }),
    }
}

/// An array to write results to, of which nothing is read. Of no entries it may be null.
///
/// # Safety
/// It is null, or good for writing `count` entries as long as the result is used, and nobody else uses it meanwhile.
pub(crate) unsafe fn outputs<'a, T>(
    pointer: *mut T,
    count: usize,
    what: &str,
) -> Result<&'a mut [MaybeUninit<T>], Fault> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(null(what)),
        _ if count > isize::MAX as usize / size_of::<T>() => {
            Err(Fault::Argument(format!("{what} has too many entries")))
        }
        // SAFETY: the caller's promise; it is not null, not longer than an array can be, and its entries may be of any bytes.
        _ => Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), count) }),
    }
}

/// Memory of the host that is written to.
///
/// # Safety
/// As [`outputs`]. The bytes count as initialised, as all that comes over the border does.
pub(crate) unsafe fn bytes<'a>(pointer: *mut u8, count: usize, what: &str) -> Result<&'a mut [u8], Fault> {
    // SAFETY: the caller's promise.
    let outputs = unsafe { outputs(pointer, count, what)? };
    // SAFETY: the same entries, which count as initialised, says the caller.
    Ok(unsafe { slice::from_raw_parts_mut(outputs.as_mut_ptr().cast(), count) })
}

/// Where one result goes, if anywhere.
///
/// # Safety
/// As [`outputs`], for one entry.
pub(crate) unsafe fn optional<'a, T>(pointer: *mut T) -> Option<&'a mut MaybeUninit<T>> {
    // SAFETY: the caller's promise; what is there may be any bytes.
    unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() }
}

/// Where one result goes.
///
/// # Safety
/// As [`outputs`], for one entry.
pub(crate) unsafe fn output<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut MaybeUninit<T>, Fault> {
    // SAFETY: the caller's promise.
    unsafe { optional(pointer) }.ok_or_else(|| null(what))
}

/// A text.
///
/// # Safety
/// It is null, or ends with a zero byte and stays as long as the result is used.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Fault> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Fault::Argument(format!("{what} is no UTF-8")))
}

/// A handle on a value, which its release function takes back.
pub(crate) fn handle<T>(value: T) -> *mut T {
    Arc::into_raw(Arc::new(value)).cast_mut()
}

/// Makes one more handle on the same value.
///
/// # Safety
/// It is null, or a [`handle`] that was not released.
pub(crate) unsafe fn retain<T>(pointer: *const T, what: &str) -> Result<(), Fault> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise, which includes that it is of an `Arc`.
    unsafe { Arc::increment_strong_count(pointer) };
    Ok(())
}

/// How many handles there are on the value.
///
/// # Safety
/// As [`retain`].
pub(crate) unsafe fn use_count<T>(pointer: *const T, what: &str) -> Result<usize, Fault> {
    // SAFETY: retained first, so that one handle is this one's to give back.
    let value = unsafe {
        retain(pointer, what)?;
        Arc::from_raw(pointer)
    };
    Ok(Arc::strong_count(&value) - 1)
}

/// Gives a handle back. Null is none.
///
/// # Safety
/// It is null, or a [`handle`] that was not released, and nobody uses this one any more.
pub(crate) unsafe fn release<T>(name: &str, pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: the caller's promise.
        let value = unsafe { Arc::from_raw(pointer) };
        _ = guard(name, || {
            drop(value);
            Ok(())
        });
    }
}
