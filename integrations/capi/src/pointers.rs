//! Conversions of C pointers to references after a check for null: handles, arrays, strings and destinations of results.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use crate::status::{Fault, guard};

fn null_error(what: &str) -> Fault {
    Fault::Argument(format!("{what} is null"))
}

/// Dereferences a handle or a pointer to a struct.
///
/// # Safety
/// `pointer` is null, or valid for reading while the result is used.
pub(crate) unsafe fn borrow<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Fault> {
    // SAFETY: the caller upholds this function's contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| null_error(what))
}

/// Makes a slice of an array, which may be null if `count` is 0.
///
/// # Safety
/// `pointer` is null, or valid for reading `count` entries while the result is used.
pub(crate) unsafe fn array<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], Fault> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(null_error(what)),
        _ if count > isize::MAX as usize / size_of::<T>() => {
            Err(Fault::Argument(format!("{what} has too many entries")))
        }
        // SAFETY: the caller promises valid entries; the pointer is not null, and the slice is at most isize::MAX bytes long.
        _ => Ok(unsafe { slice::from_raw_parts(pointer, count) }),
    }
}

/// Makes a slice of an array for results, which is only written. The array may be null if `count` is 0.
///
/// # Safety
/// `pointer` is null, or valid for writing `count` entries while the result is used, and nothing else accesses them meanwhile.
pub(crate) unsafe fn outputs<'a, T>(
    pointer: *mut T,
    count: usize,
    what: &str,
) -> Result<&'a mut [MaybeUninit<T>], Fault> {
    match (pointer.is_null(), count) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(null_error(what)),
        _ if count > isize::MAX as usize / size_of::<T>() => {
            Err(Fault::Argument(format!("{what} has too many entries")))
        }
        // SAFETY: the caller promises valid entries; the pointer is not null, the slice is at most isize::MAX bytes long, and
        // `MaybeUninit` entries may hold any bytes.
        _ => Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), count) }),
    }
}

/// Makes a slice of host memory to write bytes to.
///
/// # Safety
/// As for [`outputs`]. The bytes count as initialised, like all memory that C passes.
pub(crate) unsafe fn bytes<'a>(pointer: *mut u8, count: usize, what: &str) -> Result<&'a mut [u8], Fault> {
    // SAFETY: the caller upholds this function's contract.
    let outputs = unsafe { outputs(pointer, count, what)? };
    // SAFETY: the slice covers the same entries as `outputs`, and the caller promises that they count as initialised.
    Ok(unsafe { slice::from_raw_parts_mut(outputs.as_mut_ptr().cast(), count) })
}

/// Returns the destination of an optional result, or `None` for a null pointer.
///
/// # Safety
/// As for [`outputs`], with one entry.
pub(crate) unsafe fn optional<'a, T>(pointer: *mut T) -> Option<&'a mut MaybeUninit<T>> {
    // SAFETY: the caller promises a valid pointer; a `MaybeUninit` may hold any bytes.
    unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() }
}

/// Returns the destination of one result; a null pointer is an error.
///
/// # Safety
/// As for [`outputs`], with one entry.
pub(crate) unsafe fn output<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut MaybeUninit<T>, Fault> {
    // SAFETY: the caller upholds this function's contract.
    unsafe { optional(pointer) }.ok_or_else(|| null_error(what))
}

/// Borrows a C string as UTF-8.
///
/// # Safety
/// `pointer` is null, or a string that ends with a zero byte and lives while the result is used.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Fault> {
    if pointer.is_null() {
        return Err(null_error(what));
    }
    // SAFETY: the caller upholds this function's contract.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Fault::Argument(format!("{what} is not UTF-8")))
}

/// Makes a handle on a value; the matching release function frees it.
pub(crate) fn handle<T>(value: T) -> *mut T {
    Arc::into_raw(Arc::new(value)).cast_mut()
}

/// Increments a handle's reference count.
///
/// # Safety
/// `pointer` is null, or a [`handle`] that was not released.
pub(crate) unsafe fn retain<T>(pointer: *const T, what: &str) -> Result<(), Fault> {
    if pointer.is_null() {
        return Err(null_error(what));
    }
    // SAFETY: the caller promises an unreleased handle, which `Arc::into_raw` made.
    unsafe { Arc::increment_strong_count(pointer) };
    Ok(())
}

/// Returns a handle's reference count.
///
/// # Safety
/// As for [`retain`].
pub(crate) unsafe fn use_count<T>(pointer: *const T, what: &str) -> Result<usize, Fault> {
    // SAFETY: `retain` adds a reference first, so dropping the `Arc` does not take the caller's.
    let value = unsafe {
        retain(pointer, what)?;
        Arc::from_raw(pointer)
    };
    Ok(Arc::strong_count(&value) - 1)
}

/// Decrements a handle's reference count; null is ignored.
///
/// # Safety
/// `pointer` is null, or a [`handle`] that was not released and is not used after this call.
pub(crate) unsafe fn release<T>(name: &str, pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: the caller upholds this function's contract.
        let value = unsafe { Arc::from_raw(pointer) };
        _ = guard(name, || {
            drop(value);
            Ok(())
        });
    }
}
