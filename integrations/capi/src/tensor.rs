//! Tensors: views of storages, and copies between them and the host.

use std::ffi::c_void;

use claystone::{DType, Tensor};

use crate::device::number;
use crate::pointers::{array, borrow, bytes, handle, optional, output, outputs, release};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::storage::ClaystoneStorage;

/// The element types. The numbers never change.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneDtype {
    /// 32-bit IEEE float.
    F32 = 0,
    /// 16-bit IEEE float.
    F16 = 1,
    /// The upper 16 bits of an F32.
    Bf16 = 2,
    /// 64-bit IEEE float.
    F64 = 3,
    /// 64-bit signed integer.
    I64 = 4,
    /// 32-bit signed integer.
    I32 = 5,
    /// 8-bit unsigned integer.
    U8 = 6,
    /// 32-bit unsigned integer.
    U32 = 7,
    /// One byte, 0 or 1.
    Bool = 8,
    /// 8-bit signed integer.
    I8 = 9,
    /// 16-bit signed integer.
    I16 = 10,
}

/// Pairs each dtype of the C API with claystone's dtype.
const DTYPES: [(ClaystoneDtype, DType); 11] = [
    (ClaystoneDtype::F32, DType::F32),
    (ClaystoneDtype::F16, DType::F16),
    (ClaystoneDtype::Bf16, DType::BF16),
    (ClaystoneDtype::F64, DType::F64),
    (ClaystoneDtype::I64, DType::I64),
    (ClaystoneDtype::I32, DType::I32),
    (ClaystoneDtype::U8, DType::U8),
    (ClaystoneDtype::U32, DType::U32),
    (ClaystoneDtype::Bool, DType::Bool),
    (ClaystoneDtype::I8, DType::I8),
    (ClaystoneDtype::I16, DType::I16),
];

/// Converts a dtype number of the C API.
pub(crate) fn dtype(given: i64) -> Result<DType, Fault> {
    let found = DTYPES.iter().find(|(number, _)| *number as i64 == given);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| Fault::Argument(format!("{given} is no ClaystoneDtype")))
}

/// A handle on a tensor: elements of a storage, addressed by shape, strides and offset.
pub struct ClaystoneTensor(pub(crate) Tensor);

/// The properties of a tensor, except its sizes and strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ClaystoneTensorInfo {
    /// The device number.
    pub device: i32,
    /// A ClaystoneDtype.
    pub dtype: i32,
    /// The number of dimensions.
    pub rank: usize,
    /// The number of elements.
    pub numel: usize,
    /// The offset of the first element in the storage, in elements.
    pub offset: usize,
    /// The size of the storage in bytes, as requested.
    pub storage_nbytes: usize,
}

/// Makes a tensor over a storage from `rank` sizes, `rank` strides and an offset, all in elements. Strides may be zero or negative if all
/// elements are inside the storage. The storage's size must be a multiple of the element size; to view one storage with several
/// dtypes, make its size a multiple of 16 bytes. Each byte of a bool tensor must be 0 or 1. The caller owns the handle; the tensor
/// keeps the storage alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_new(
    storage: *const ClaystoneStorage,
    dtype_number: i32,
    sizes: *const i64,
    strides: *const i64,
    rank: usize,
    offset: i64,
    tensor: *mut *mut ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_tensor_new", || {
        // SAFETY: the caller promises a live handle, arrays of `rank` entries, and a pointer that is valid for writing.
        let (storage, sizes, strides, tensor) = unsafe {
            let (sizes, strides) = (array(sizes, rank, "sizes")?, array(strides, rank, "strides")?);
            (borrow(storage, "storage")?, sizes, strides, output(tensor, "tensor")?)
        };
        let negative = |what: &str, n: i64| Fault::Argument(format!("{what} {n} is negative"));
        let size = |&n: &i64| usize::try_from(n).map_err(|_| negative("the size", n));
        let shape = sizes.iter().map(size).collect::<Result<Vec<usize>, Fault>>()?;
        let strides: Vec<isize> = strides.iter().map(|&s| s as isize).collect();
        let offset = usize::try_from(offset).map_err(|_| negative("the offset", offset))?;
        let dtype = dtype(dtype_number.into())?;
        let made = Tensor::from_storage_strided(storage.0.clone(), &shape[..], &strides, offset, dtype)?;
        tensor.write(handle(ClaystoneTensor(made)));
        Ok(())
    })
}

/// Releases a handle on a tensor; null is ignored. Releasing a handle twice is undefined behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_release(tensor: *mut ClaystoneTensor) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_tensor_release", tensor) }
}

/// Gets the properties, sizes and strides of a tensor. Each of the last three pointers may be null. `sizes` and `strides` have room for
/// `capacity` entries; a larger rank is an error, but `info` is still written and contains the rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_info(
    tensor: *const ClaystoneTensor,
    capacity: usize,
    info: *mut ClaystoneTensorInfo,
    sizes: *mut i64,
    strides: *mut i64,
) -> ClaystoneStatus {
    guard("claystone_tensor_info", || {
        // SAFETY: the caller promises a live handle, and pointers that are null or valid for writing.
        let (tensor, info, sizes, strides) = unsafe {
            let given = |output: *mut i64| (!output.is_null()).then(|| outputs(output, capacity, "")).transpose();
            (&borrow(tensor, "tensor")?.0, optional(info), given(sizes)?, given(strides)?)
        };
        let dtype = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype());
        let (dtype, _) = dtype.ok_or_else(|| Fault::Argument(format!("{} has no ClaystoneDtype", tensor.dtype())))?;
        let (rank, numel, offset) = (tensor.rank(), tensor.numel(), tensor.offset());
        let device = number(tensor.device());
        let (dtype, storage_nbytes) = (*dtype as i32, tensor.storage().nbytes());
        info.map(|output| output.write(ClaystoneTensorInfo { device, dtype, rank, numel, offset, storage_nbytes }));
        if rank > capacity && (sizes.is_some() || strides.is_some()) {
            return Err(Fault::Argument(format!("the tensor has {rank} dimensions, and there is room for {capacity}")));
        }
        let all_sizes = tensor.shape().dims().iter().map(|&n| n as i64);
        let all_strides = tensor.strides().iter().map(|&n| n as i64);
        sizes.into_iter().flatten().zip(all_sizes).for_each(|(output, n)| _ = output.write(n));
        strides.into_iter().flatten().zip(all_strides).for_each(|(output, n)| _ = output.write(n));
        Ok(())
    })
}

/// Gets whether two tensors share a storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_shares_storage(
    tensor: *const ClaystoneTensor,
    other: *const ClaystoneTensor,
    shares: *mut bool,
) -> ClaystoneStatus {
    guard("claystone_tensor_shares_storage", || {
        // SAFETY: the caller promises live handles, and a pointer that is valid for writing.
        let (tensor, other, shares) =
            unsafe { (borrow(tensor, "tensor")?, borrow(other, "other")?, output(shares, "shares")?) };
        shares.write(tensor.0.shares_storage(&other.0));
        Ok(())
    })
}

/// Gets a handle on the storage of a tensor. The caller owns the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_storage(
    tensor: *const ClaystoneTensor,
    storage: *mut *mut ClaystoneStorage,
) -> ClaystoneStatus {
    guard("claystone_tensor_storage", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (tensor, storage) = unsafe { (borrow(tensor, "tensor")?, output(storage, "storage")?) };
        storage.write(handle(ClaystoneStorage(tensor.0.storage().clone())));
        Ok(())
    })
}

/// Copies `source` into a tensor of any strides, dtype and device, broadcast to its shape and converted to its dtype, like PyTorch's
/// `copy_`. Copies between devices, including the CPU device, wait until the copy is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_copy(
    tensor: *const ClaystoneTensor,
    source: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_tensor_copy", || {
        // SAFETY: the caller promises live handles.
        let (to, from) = unsafe { (&borrow(tensor, "tensor")?.0, &borrow(source, "source")?.0) };
        copy(to, from, Tensor::copy_)
    })
}

/// Like `claystone_tensor_copy`, but returns once the copy is enqueued on the thread's current stream, like PyTorch's
/// `non_blocking=True`. That requires one tensor on a device, the other in memory pinned for that device
/// (`claystone_storage_new_pinned`), and both contiguous with the same shape and dtype; other copies wait. Do not access the pinned
/// bytes before waiting for the stream or for an event recorded on it; the handles may be released at once. The next wait on the
/// stream reports a failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_copy_non_blocking(
    tensor: *const ClaystoneTensor,
    source: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_tensor_copy_non_blocking", || {
        // SAFETY: the caller promises live handles.
        let (to, from) = unsafe { (&borrow(tensor, "tensor")?.0, &borrow(source, "source")?.0) };
        copy(to, from, Tensor::copy_non_blocking_)
    })
}

/// The signature of `Tensor::copy_` and `Tensor::copy_non_blocking_`.
type Copy = for<'a> fn(&'a Tensor, &Tensor) -> claystone::Result<&'a Tensor>;

/// Copies with `copy`. A source on another device is first converted to the dtype of `to` and moved, unless both tensors are
/// contiguous with the same shape and dtype.
fn copy(to: &Tensor, from: &Tensor, copy: Copy) -> Result<(), Fault> {
    let plain = |t: &Tensor| (t.dtype(), t.shape().dims().to_vec(), t.is_contiguous());
    if to.device() == from.device() || plain(to) == plain(from) && to.is_contiguous() {
        copy(to, from)?;
    } else {
        copy(to, &from.to(to.dtype(), to.device())?)?;
    }
    Ok(())
}

/// Sets the elements of a tensor, in row-major order, from `data`; `nbytes` must be exactly their size in bytes. `data` may be reused
/// after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_write(
    tensor: *const ClaystoneTensor,
    data: *const c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_write", || {
        // SAFETY: the caller promises a live handle, and `nbytes` bytes that are valid for reading.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, array(data.cast::<u8>(), nbytes, "data")?) };
        tensor.0.write_bytes_(data)?;
        Ok(())
    })
}

/// Like `claystone_tensor_write`, but copies `data` and returns once the write is enqueued on the thread's current stream, without
/// waiting for earlier work of the stream. Writes of more than 16 MiB, and writes to a non-contiguous tensor, wait. The next wait on
/// the stream reports a failure of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_write_non_blocking(
    tensor: *const ClaystoneTensor,
    data: *const c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_write_non_blocking", || {
        // SAFETY: the caller promises a live handle, and `nbytes` bytes that are valid for reading.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, array(data.cast::<u8>(), nbytes, "data")?) };
        tensor.0.write_bytes_non_blocking_(data)?;
        Ok(())
    })
}

/// Copies the elements of a tensor, in row-major order, to `data`; `nbytes` must be exactly their size in bytes. Waits for the device.
/// If the call fails, the contents of `data` are unspecified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_read(
    tensor: *const ClaystoneTensor,
    data: *mut c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_read", || {
        // SAFETY: the caller promises a live handle, and `nbytes` bytes that are valid for writing.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, bytes(data.cast(), nbytes, "data")?) };
        Ok(tensor.0.read_bytes(data)?)
    })
}
