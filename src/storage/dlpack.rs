//! Exchange of host memory with other libraries through DLPack.

use std::ptr::{self, NonNull};
use std::slice;

use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed, ManagedTensorBase, versioned};

use super::allocation::{HostBytes, Storage};
use super::driver::host::HostMemory;
use crate::device::read;
use crate::{DType, Device, Error, Result};

/// The DLPack type that corresponds to each dtype.
const DTYPES: [(DType, DLDataType); 11] = [
    (DType::F32, DLDataType::F32),
    (DType::F16, DLDataType::F16),
    (DType::BF16, DLDataType::BF16),
    (DType::F64, DLDataType::F64),
    (DType::I64, DLDataType::I64),
    (DType::I32, DLDataType::I32),
    (DType::I16, DLDataType::I16),
    (DType::I8, DLDataType::I8),
    (DType::U8, DLDataType::U8),
    (DType::U32, DLDataType::U32),
    (DType::Bool, DLDataType::BOOL),
];

impl Storage {
    /// Exports elements of a storage on the CPU device. From now on the storage never moves, and it is kept alive until
    /// the consumer releases the tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another device, and [`Error::DeviceLost`] if a transfer may still be using the bytes.
    pub(crate) fn to_dlpack(
        &self,
        dtype: DType,
        (shape, strides): (&[usize], &[isize]),
        offset: usize,
    ) -> Result<versioned::Dlpack> {
        let fail = |reason: String| Err(Error::invalid("to_dlpack", reason));
        if self.device() != Device::Cpu {
            return fail(format!("the tensor is on {}: call to_device(Device::Cpu) first", self.device()));
        }
        let Some((_, described)) = DTYPES.into_iter().find(|(known, _)| *known == dtype) else {
            return fail(format!("DLPack has no {dtype}"));
        };
        self.allocation().check_memory()?;
        self.check_not_simulated("to_dlpack")?;
        self.allocation().export_present()?;
        let _locked = self.allocation().host_lock().map(read);
        if let Some(pinned) = self.allocation().pinned() {
            pinned.wait_and_check(true)?;
        }
        let data = match shape.contains(&0) {
            true => ptr::null_mut(),
            // SAFETY: a tensor's first element is in its storage.
            false => unsafe { self.allocation().host_range().0.add(offset * dtype.size()) }.as_ptr().cast(),
        };
        let made = Dynamic::new(shape, strides).initialize(Box::new(self.clone()));
        let mut made = made.map_err(|e| Error::invalid("to_dlpack", e.to_string()))?;
        made.set_data(data).set_device(DLDevice::CPU).set_dtype(described);
        // SAFETY: the storage, which the tensor owns, keeps the elements in place. The shape and the strides are copied
        // from a tensor in the storage. Consumers may write to the storage, as views may.
        Ok(unsafe { made.finish() })
    }
}

/// A tensor of another library in host memory, which [`Tensor::from_dlpack`](crate::Tensor::from_dlpack) turns into a
/// tensor.
///
/// ```
/// use claystone::storage::DlpackMemory;
/// use claystone::{Device, Tensor};
/// let x = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?.t()?;
/// // SAFETY: nobody uses x while y is used.
/// let y = Tensor::from_dlpack(unsafe { DlpackMemory::new(x.to_dlpack()?)? });
/// assert_eq!((y.shape().dims(), y.to_vec::<f32>()?), (&[3, 2][..], x.to_vec::<f32>()?));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct DlpackMemory {
    pub(crate) storage: Storage,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    /// Offset of the first element in the storage, in elements.
    pub(crate) offset: usize,
}

impl DlpackMemory {
    /// Takes over a tensor of another library; its owner is notified when the last handle on the memory is dropped.
    /// Nothing is copied, unless the tensor is read-only: tensors of this crate can always be written to.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor
    /// - is not in host memory,
    /// - has an element type that [`DType`] does not have,
    /// - has a misaligned first element,
    /// - has elements that may overlap, except those repeated by broadcasting, or
    /// - violates the DLPack specification.
    ///
    /// # Safety
    /// The tensor follows the DLPack specification. Until its owner is notified, all bytes from the first element to
    /// the last, including the bytes between elements, exist and are initialised. The bytes are writable unless the
    /// tensor is marked as read-only, a mark that DLPack has only since version 1.0. The elements are valid values of
    /// their type (bools are 0 or 1).
    ///
    /// Until then no other code writes to these bytes while this crate uses them, or uses them while this crate writes
    /// to them. This includes other tensors of this crate over the same bytes, such as the tensor that
    /// [`Tensor::to_dlpack`](crate::Tensor::to_dlpack) was called on. No operation may read one of these tensors and
    /// write to another.
    pub unsafe fn new<M: ManagedTensorBase + 'static>(dlpack: Managed<M>) -> Result<DlpackMemory> {
        let invalid = |reason: String| Error::invalid("from_dlpack", reason);
        let tensor = dlpack.validate().map_err(|e| invalid(e.to_string()))?;
        let device = tensor.device().device_type;
        if device != DLDeviceType::CPU {
            let reason = format!("the tensor is on DLPack's device type {}: copy it to the CPU first", device.0);
            return Err(invalid(reason));
        }
        let described = tensor.dtype();
        let Some((dtype, _)) = DTYPES.into_iter().find(|(_, known)| known.matches(described)) else {
            let (code, bits, lanes) = (described.code.0, described.bits, described.lanes);
            return Err(invalid(format!("no dtype is of code {code} with {bits} bits and {lanes} lanes")));
        };
        let strides = tensor.strides_or_compact().map_err(|e| invalid(e.to_string()))?;
        let strides: Vec<isize> = strides.iter().map(|&stride| stride as isize).collect();
        let shape: Vec<usize> = tensor.shape().iter().map(|&size| size as usize).collect();
        if shape.contains(&0) {
            let storage = Storage::alloc(Device::Cpu, 0)?;
            return Ok(DlpackMemory { storage, dtype, strides: vec![0; shape.len()], shape, offset: 0 });
        }
        let (before, count) = memory_extent(&shape, &strides).map_err(invalid)?;
        let size = dtype.size();
        let too_large = || invalid("the elements span more bytes than there are addresses".into());
        let bytes = count.checked_mul(size).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(too_large)?;
        let at = usize::try_from(tensor.byte_offset()).ok().ok_or_else(too_large)?;
        let base = NonNull::new(tensor.data_ptr().cast_mut().cast::<u8>());
        let base = base.ok_or_else(|| invalid("the data pointer is null".into()))?;
        // The address is inside the tensor's memory, as the caller promises.
        let start = base.as_ptr().wrapping_add(at).wrapping_sub(before * size);
        let Some(start) = NonNull::new(start).filter(|start| start.addr().get().is_multiple_of(size)) else {
            return Err(invalid(format!("the elements begin at {start:p}, which is misaligned for {dtype}")));
        };
        let storage = match dlpack.flags().contains(DlpackFlags::READ_ONLY) {
            true => {
                let copy = Storage::alloc(Device::Cpu, bytes)?;
                // SAFETY: the caller promises that the bytes from the first element to the last exist and do not change.
                copy.write(0, unsafe { slice::from_raw_parts(start.as_ptr(), bytes) })?;
                copy
            }
            false => {
                // SAFETY: the caller promises initialised bytes that no other code uses until the owner is notified.
                let memory = unsafe { HostMemory::owned_by(start, bytes, Box::new(dlpack), false) };
                Storage::from_host_bytes(bytes, HostBytes::Owned(memory))
            }
        };
        Ok(DlpackMemory { storage, dtype, shape, strides, offset: before })
    }
}

/// Returns how many elements precede a non-empty tensor's first element in memory, and the length of the tensor's memory in
/// elements, gaps included.
///
/// # Errors
/// The reason as text, if elements may overlap or the length does not fit an `isize`.
fn memory_extent(shape: &[usize], strides: &[isize]) -> Result<(usize, usize), String> {
    let mut dims: Vec<(usize, isize)> = shape.iter().copied().zip(strides.iter().copied()).collect();
    dims.retain(|&(size, stride)| size > 1 && stride != 0);
    dims.sort_unstable_by_key(|&(_, stride)| stride.unsigned_abs());
    let (mut before, mut count) = (0usize, 1usize);
    for (size, stride) in dims {
        // Each stride must step over all elements of the dimensions with smaller strides.
        if stride.unsigned_abs() < count {
            return Err(format!("elements of strides {strides:?} may overlap: copy the tensor first"));
        }
        let reach = (size - 1).checked_mul(stride.unsigned_abs());
        let end = reach.and_then(|reach| count.checked_add(reach)).filter(|&end| isize::try_from(end).is_ok());
        let (Some(reach), Some(end)) = (reach, end) else {
            return Err(format!("elements of strides {strides:?} span more bytes than there are addresses"));
        };
        (before, count) = (before + if stride < 0 { reach } else { 0 }, end);
    }
    Ok((before, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_cover_the_elements() {
        for (shape, strides, want) in [
            (&[][..], &[][..], Some((0, 1))),
            (&[2, 3], &[3, 1], Some((0, 6))),
            (&[2, 3], &[1, 2], Some((0, 6))),
            (&[2, 3], &[-3, 1], Some((3, 6))),
            (&[2, 3], &[-10, -2], Some((14, 15))),
            (&[4, 3], &[0, 2], Some((0, 5))),
            (&[1, 3], &[7, 1], Some((0, 3))),
            (&[2, 3], &[2, 1], None),
            (&[2, 2], &[1, 1], None),
            (&[3], &[isize::MAX], None),
            (&[2, 3], &[isize::MIN, isize::MAX], None),
        ] {
            assert_eq!(memory_extent(shape, strides).ok(), want, "{shape:?} {strides:?}");
        }
    }
}
