//! Tensors: views of storages, and copies between them and the host.

use std::ffi::c_void;

use claystone::{DType, Tensor};

use crate::device::number;
use crate::pointers::{array, borrow, bytes, handle, optional, output, outputs, release};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::storage::ClaystoneStorage;

/// The element types. The numbers stay what they are.
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
}

/// Every dtype of the API with claystone's.
const DTYPES: [(ClaystoneDtype, DType); 9] = [
    (ClaystoneDtype::F32, DType::F32),
    (ClaystoneDtype::F16, DType::F16),
    (ClaystoneDtype::Bf16, DType::BF16),
    (ClaystoneDtype::F64, DType::F64),
    (ClaystoneDtype::I64, DType::I64),
    (ClaystoneDtype::I32, DType::I32),
    (ClaystoneDtype::U8, DType::U8),
    (ClaystoneDtype::U32, DType::U32),
    (ClaystoneDtype::Bool, DType::Bool),
];

/// The dtype of this number.
pub(crate) fn dtype(given: i64) -> Result<DType, Fault> {
    let found = DTYPES.iter().find(|(number, _)| *number as i64 == given);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| Fault::Argument(format!("{given} is no ClaystoneDtype")))
}

/// A handle on a tensor: elements of a storage by shape, strides and offset.
pub struct ClaystoneTensor(pub(crate) Tensor);

/// What a tensor is, but for its sizes and strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ClaystoneTensorInfo {
    /// The number of the device.
    pub device: i32,
    /// A ClaystoneDtype.
    pub dtype: i32,
    /// How many dimensions.
    pub rank: usize,
    /// How many elements.
    pub numel: usize,
    /// Elements of the storage before the first one.
    pub offset: usize,
    /// The size of the storage in bytes, as asked for.
    pub storage_nbytes: usize,
}

/// Makes a tensor over a storage: `rank` sizes, as many strides, and an offset, all in elements. Strides may be zero or negative, as
/// long as all elements lie in the storage, which has to be a whole number of elements: one that is to have several dtypes is best
/// made of a multiple of 16 bytes. Of bools each byte has to be 0 or 1. The handle is the caller's; the tensor keeps the storage.
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
        // SAFETY: a handle that lives, arrays of `rank` entries, and a pointer that is good for writing, says the caller.
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

/// Gives a handle on a tensor back; null is none. To release one twice is undefined behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_release(tensor: *mut ClaystoneTensor) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_tensor_release", tensor) }
}

/// What a tensor is, its sizes and its strides. Any of the last pointers may be null. `sizes` and `strides` have room for `capacity`
/// entries; where the rank is larger it is an error, and `info` says the rank all the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_info(
    tensor: *const ClaystoneTensor,
    capacity: usize,
    info: *mut ClaystoneTensorInfo,
    sizes: *mut i64,
    strides: *mut i64,
) -> ClaystoneStatus {
    guard("claystone_tensor_info", || {
        // SAFETY: a handle that lives, and pointers that are null or good for writing, says the caller.
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

/// Whether two tensors are on the same storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_shares_storage(
    tensor: *const ClaystoneTensor,
    other: *const ClaystoneTensor,
    shares: *mut bool,
) -> ClaystoneStatus {
    guard("claystone_tensor_shares_storage", || {
        // SAFETY: handles that live, and a pointer that is good for writing, says the caller.
        let (tensor, other, shares) =
            unsafe { (borrow(tensor, "tensor")?, borrow(other, "other")?, output(shares, "shares")?) };
        shares.write(tensor.0.shares_storage(&other.0));
        Ok(())
    })
}

/// A handle on the storage of a tensor, which is the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_storage(
    tensor: *const ClaystoneTensor,
    storage: *mut *mut ClaystoneStorage,
) -> ClaystoneStatus {
    guard("claystone_tensor_storage", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (tensor, storage) = unsafe { (borrow(tensor, "tensor")?, output(storage, "storage")?) };
        storage.write(handle(ClaystoneStorage(tensor.0.storage().clone())));
        Ok(())
    })
}

/// Copies the elements of `source` into a tensor of any strides, dtype and device: broadcast to its shape and converted to its dtype.
/// PyTorch's `copy_`. Between devices it waits, and so does a copy from or to the CPU device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_copy(
    tensor: *const ClaystoneTensor,
    source: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_tensor_copy", || {
        // SAFETY: handles that live, says the caller.
        let (to, from) = unsafe { (&borrow(tensor, "tensor")?.0, &borrow(source, "source")?.0) };
        copy(to, from, Tensor::copy_)
    })
}

/// `claystone_tensor_copy` that returns when it is enqueued on the thread's current stream, where one tensor is on a device, the other
/// in memory pinned for it (`claystone_storage_new_pinned`), and both are contiguous and of one shape and dtype: PyTorch's
/// `non_blocking=True`. Others wait as before. The program may touch the pinned bytes when the stream, or an event recorded on it, was
/// waited for; the handles may be released at once. A failure is told by the stream's next wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_copy_non_blocking(
    tensor: *const ClaystoneTensor,
    source: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_tensor_copy_non_blocking", || {
        // SAFETY: handles that live, says the caller.
        let (to, from) = unsafe { (&borrow(tensor, "tensor")?.0, &borrow(source, "source")?.0) };
        copy(to, from, Tensor::copy_non_blocking_)
    })
}

/// How a tensor is copied into another.
type Copy = for<'a> fn(&'a Tensor, &Tensor) -> claystone::Result<&'a Tensor>;

/// Copies by `copy`, from another device in the dtype and order of `to`.
fn copy(to: &Tensor, from: &Tensor, copy: Copy) -> Result<(), Fault> {
    let plain = |t: &Tensor| (t.dtype(), t.shape().dims().to_vec(), t.is_contiguous());
    if to.device() == from.device() || plain(to) == plain(from) && to.is_contiguous() {
        copy(to, from)?;
    } else {
        copy(to, &from.to(to.dtype(), to.device())?)?;
    }
    Ok(())
}

/// Sets the elements of a tensor, in row-major order, to those at `data`: `nbytes` bytes, which have to be just theirs. The host's
/// memory may be reused when it returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_write(
    tensor: *const ClaystoneTensor,
    data: *const c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_write", || {
        // SAFETY: a handle that lives, and `nbytes` bytes that are good for reading, says the caller.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, array(data.cast::<u8>(), nbytes, "data")?) };
        tensor.0.write_bytes_(data)?;
        Ok(())
    })
}

/// `claystone_tensor_write` that returns when it is enqueued on the thread's current stream, with a copy of the bytes: it does not wait
/// for what the stream has to do before. For more than 16 MiB, and into a tensor that is not contiguous, it waits. A failure of
/// the device is told by the stream's next wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_write_non_blocking(
    tensor: *const ClaystoneTensor,
    data: *const c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_write_non_blocking", || {
        // SAFETY: a handle that lives, and `nbytes` bytes that are good for reading, says the caller.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, array(data.cast::<u8>(), nbytes, "data")?) };
        tensor.0.write_bytes_non_blocking_(data)?;
        Ok(())
    })
}

/// Copies the elements of a tensor, in row-major order, to `data`: `nbytes` bytes, which have to be just theirs. Waits for the device.
/// Where it fails, the bytes at `data` are unspecified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_tensor_read(
    tensor: *const ClaystoneTensor,
    data: *mut c_void,
    nbytes: usize,
) -> ClaystoneStatus {
    guard("claystone_tensor_read", || {
        // SAFETY: a handle that lives, and `nbytes` bytes that are good for writing, says the caller.
        let (tensor, data) = unsafe { (borrow(tensor, "tensor")?, bytes(data.cast(), nbytes, "data")?) };
        Ok(tensor.0.read_bytes(data)?)
    })
}
