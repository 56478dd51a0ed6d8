//! Storages: runs of bytes on a device.

use std::ffi::c_void;

use claystone::storage::Storage;
use claystone::{DType, Tensor};

use crate::device::{device, number};
use crate::pointers::{borrow, handle, output, release, retain, use_count};
use crate::status::{ClaystoneStatus, guard};
use crate::stream::ClaystoneStream;

/// A handle on a run of bytes on one device. The bytes go back to the device's allocator when the last handle and the last tensor
/// on them are released.
pub struct ClaystoneStorage(pub(crate) Storage);

/// Makes a storage of `nbytes` bytes by the device's allocator, on the thread's current stream. What it holds is unspecified. The
/// handle is the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_new(
    device_number: i32,
    nbytes: usize,
    storage: *mut *mut ClaystoneStorage,
) -> ClaystoneStatus {
    guard("claystone_storage_new", || {
        // SAFETY: good for writing, says the caller.
        let storage = unsafe { output(storage, "storage")? };
        let bytes = Tensor::empty(nbytes, (DType::U8, device(device_number)?))?;
        storage.write(handle(ClaystoneStorage(bytes.storage().clone())));
        Ok(())
    })
}

/// Makes a storage of `nbytes` bytes of the host's memory, on the CPU device, that a device transfers to and from at full speed, and says
/// where they are: the caller may read and write them there as long as the storage lives, but not while a call or a copy uses them.
/// For the CPU device, and where there is none left, it is ordinary memory. Bytes that were freed are kept for the next that are
/// asked for, once copies that were enqueued are done with them. What it holds is unspecified. The handle is the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_new_pinned(
    device_number: i32,
    nbytes: usize,
    storage: *mut *mut ClaystoneStorage,
    data: *mut *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_storage_new_pinned", || {
        // SAFETY: good for writing, says the caller.
        let (storage, data) = unsafe { (output(storage, "storage")?, output(data, "data")?) };
        let (made, start) = Storage::pinned_host_memory(device(device_number)?, nbytes)?;
        storage.write(handle(ClaystoneStorage(made)));
        data.write(start.as_ptr().cast());
        Ok(())
    })
}

/// Makes one more handle on a storage, which is the same pointer: it has to be released once more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_retain(storage: *const ClaystoneStorage) -> ClaystoneStatus {
    guard("claystone_storage_retain", || {
        // SAFETY: a handle that was not released, says the caller.
        unsafe { retain(storage, "storage") }
    })
}

/// Gives one handle on a storage back; null is none. To release a handle more often than it was given and retained is undefined
/// behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_release(storage: *mut ClaystoneStorage) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_storage_release", storage) }
}

/// How often the handle would have to be released. Tensors on the storage do not count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_use_count(
    storage: *const ClaystoneStorage,
    count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_storage_use_count", || {
        // SAFETY: a handle that was not released, and a pointer that is good for writing, says the caller.
        let (uses, count) = unsafe { (use_count(storage, "storage")?, output(count, "count")?) };
        count.write(uses);
        Ok(())
    })
}

/// The size in bytes, as asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_nbytes(
    storage: *const ClaystoneStorage,
    nbytes: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_storage_nbytes", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (storage, nbytes) = unsafe { (borrow(storage, "storage")?, output(nbytes, "nbytes")?) };
        nbytes.write(storage.0.nbytes());
        Ok(())
    })
}

/// The number of the device that the bytes are on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_device(
    storage: *const ClaystoneStorage,
    device_number: *mut i32,
) -> ClaystoneStatus {
    guard("claystone_storage_device", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (storage, device_number) =
            unsafe { (borrow(storage, "storage")?, output(device_number, "device_number")?) };
        device_number.write(number(storage.0.device()));
        Ok(())
    })
}

/// Whether two handles are on the same bytes. Handles that were given at different times may be different pointers on one storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_is_same(
    storage: *const ClaystoneStorage,
    other: *const ClaystoneStorage,
    same: *mut bool,
) -> ClaystoneStatus {
    guard("claystone_storage_is_same", || {
        // SAFETY: handles that live, and a pointer that is good for writing, says the caller.
        let (storage, other, same) =
            unsafe { (borrow(storage, "storage")?, borrow(other, "other")?, output(same, "same")?) };
        same.write(storage.0.ptr_eq(&other.0));
        Ok(())
    })
}

/// Announces that work on `stream`, not the one the storage was made on, uses its bytes: they are not given to others before what
/// was submitted to that stream until the release is done. PyTorch's `record_stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_storage_record_stream(
    storage: *const ClaystoneStorage,
    stream: *const ClaystoneStream,
) -> ClaystoneStatus {
    guard("claystone_storage_record_stream", || {
        // SAFETY: handles that live, says the caller.
        let (storage, stream) = unsafe { (borrow(storage, "storage")?, borrow(stream, "stream")?) };
        Ok(storage.0.record_stream(&stream.0)?)
    })
}
