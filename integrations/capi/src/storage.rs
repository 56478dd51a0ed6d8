//! Storages: contiguous bytes on a device.

use std::ffi::c_void;

use claystone::storage::Storage;
use claystone::{DType, Tensor};

use crate::device::{device, number};
use crate::pointers::{borrow, handle, output, release, retain, use_count};
use crate::status::{ClaystoneStatus, guard};
use crate::stream::ClaystoneStream;

/// A handle on contiguous bytes on one device. The bytes return to the device's allocator when the last handle and the last tensor on the
/// storage are released.
pub struct ClaystoneStorage(pub(crate) Storage);

/// Allocates a storage of `nbytes` bytes with the device's allocator, on the thread's current stream. Its contents are unspecified. The
/// caller owns the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_new(
    device_number: i32,
    nbytes: usize,
    storage: *mut *mut ClaystoneStorage,
) -> ClaystoneStatus {
    guard("claystone_storage_new", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let storage = unsafe { output(storage, "storage")? };
        let bytes = Tensor::empty(nbytes, (DType::U8, device(device_number)?))?;
        storage.write(handle(ClaystoneStorage(bytes.storage().clone())));
        Ok(())
    })
}

/// Allocates a storage of `nbytes` bytes of host memory on the CPU device, and writes its address to `data`. The memory is pinned for
/// fast transfers to and from the given device. The caller may read and write these bytes while the storage lives, except while a call
/// or copy uses them. Ordinary memory is used for the CPU device and if no pinned memory is left. Freed bytes are cached and reused
/// once the enqueued copies from and to them are complete. The contents are unspecified. The caller owns the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_new_pinned(
    device_number: i32,
    nbytes: usize,
    storage: *mut *mut ClaystoneStorage,
    data: *mut *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_storage_new_pinned", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let (storage, data) = unsafe { (output(storage, "storage")?, output(data, "data")?) };
        let (made, start) = Storage::pinned_host_memory(device(device_number)?, nbytes)?;
        storage.write(handle(ClaystoneStorage(made)));
        data.write(start.as_ptr().cast());
        Ok(())
    })
}

/// Increments the handle's reference count; the handle must be released once more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_retain(storage: *const ClaystoneStorage) -> ClaystoneStatus {
    guard("claystone_storage_retain", || {
        // SAFETY: the caller promises an unreleased handle.
        unsafe { retain(storage, "storage") }
    })
}

/// Decrements the handle's reference count; null is ignored. Releasing a handle more often than it was returned and retained is
/// undefined behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_release(storage: *mut ClaystoneStorage) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_storage_release", storage) }
}

/// The handle's reference count: how often it must still be released. Tensors on the storage do not count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_use_count(
    storage: *const ClaystoneStorage,
    count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_storage_use_count", || {
        // SAFETY: the caller promises an unreleased handle, and a pointer that is valid for writing.
        let (uses, count) = unsafe { (use_count(storage, "storage")?, output(count, "count")?) };
        count.write(uses);
        Ok(())
    })
}

/// The size in bytes, as requested.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_nbytes(
    storage: *const ClaystoneStorage,
    nbytes: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_storage_nbytes", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (storage, nbytes) = unsafe { (borrow(storage, "storage")?, output(nbytes, "nbytes")?) };
        nbytes.write(storage.0.nbytes());
        Ok(())
    })
}

/// The number of the device that holds the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_device(
    storage: *const ClaystoneStorage,
    device_number: *mut i32,
) -> ClaystoneStatus {
    guard("claystone_storage_device", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (storage, device_number) =
            unsafe { (borrow(storage, "storage")?, output(device_number, "device_number")?) };
        device_number.write(number(storage.0.device()));
        Ok(())
    })
}

/// Gets whether two handles refer to the same storage. Handles returned by different calls may be different pointers to one storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_is_same(
    storage: *const ClaystoneStorage,
    other: *const ClaystoneStorage,
    same: *mut bool,
) -> ClaystoneStatus {
    guard("claystone_storage_is_same", || {
        // SAFETY: the caller promises live handles, and a pointer that is valid for writing.
        let (storage, other, same) =
            unsafe { (borrow(storage, "storage")?, borrow(other, "other")?, output(same, "same")?) };
        same.write(storage.0.ptr_eq(&other.0));
        Ok(())
    })
}

/// Declares that `stream`, which is not the stream the storage was allocated on, uses the bytes. After the release they are not reused
/// until the work submitted to `stream` before the release is complete. PyTorch's `record_stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_record_stream(
    storage: *const ClaystoneStorage,
    stream: *const ClaystoneStream,
) -> ClaystoneStatus {
    guard("claystone_storage_record_stream", || {
        // SAFETY: the caller promises live handles.
        let (storage, stream) = unsafe { (borrow(storage, "storage")?, borrow(stream, "stream")?) };
        Ok(storage.0.record_stream(&stream.0)?)
    })
}
