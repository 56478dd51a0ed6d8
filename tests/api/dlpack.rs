//! DLPack export and import. Exported tensors are checked by reading through their raw pointers, and by ndarray's import.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use claystone::storage::DlpackMemory;
use claystone::{DType, Device, Element, Error, Result, Tensor};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, ManagedTensorBase, TryFromDlpack, allocation, versioned};
use half::{bf16, f16};
use ndarray::{Array, ArrayD, ArrayViewD, Axis, IxDyn, Slice};

use crate::common::{devices, vec};

/// Reads the elements in row-major order from the addresses that the DLPack tensor's pointer, shape and strides give.
fn read_elements<T: Copy>(exported: &versioned::Dlpack) -> Vec<T> {
    // SAFETY: nothing changes the DLPack tensor meanwhile.
    let described = unsafe { exported.tensor() };
    let checked = exported.validate_export().unwrap();
    let (shape, strides) = (checked.shape(), checked.strides().unwrap_or_default());
    let count: i64 = shape.iter().product();
    let mut values = Vec::new();
    for i in 0..count {
        let (mut rest, mut at) = (i, 0);
        for d in (0..shape.len()).rev() {
            at += rest % shape[d] * strides[d];
            rest /= shape[d];
        }
        let first = described.data.cast::<u8>().wrapping_add(described.byte_offset as usize).cast::<T>();
        // SAFETY: the tensor owns an element at each of its indices.
        values.push(unsafe { first.wrapping_offset(at as isize).read() });
    }
    values
}

/// Imports a tensor. The callers guarantee that nothing else uses its memory at the same time.
fn import<M: ManagedTensorBase + 'static>(dlpack: dlpark::Managed<M>) -> Result<Tensor> {
    // SAFETY: nothing else uses the memory, and the DLPack tensor's fields are valid.
    unsafe { DlpackMemory::new(dlpack) }.map(Tensor::from_dlpack)
}

fn views(x: &Tensor) -> Vec<(&'static str, Tensor)> {
    let reversed = Array::from_shape_fn((4, 5), |(i, j)| (i * 5 + j) as f32);
    let reversed = reversed.slice_move(ndarray::s![..;-1, ..;-2]);
    vec![
        ("whole", x.shallow_clone()),
        ("transposed", x.t().unwrap()),
        ("inside", x.narrow(0, 1, 2).unwrap().narrow(1, 2, 3).unwrap()),
        ("every second", x.slice(1, 1, 6, 2).unwrap()),
        ("a row", x.i((2, ..)).unwrap()),
        ("one", x.i((2, 3)).unwrap()),
        ("broadcast", x.i((1, ..)).unwrap().unsqueeze(0).unwrap().expand([3, 6]).unwrap()),
        ("empty", x.narrow(1, 2, 0).unwrap()),
        ("backwards", Tensor::from_ndarray(reversed, Device::Cpu).unwrap()),
    ]
}

#[test]
fn strides_and_offsets_survive_a_round_trip() {
    let x = Tensor::arange(0, 24, 1, Device::Cpu).unwrap().reshape([4, 6]).unwrap();
    for (name, view) in views(&x) {
        let want = view.to_ndarray::<f32>().unwrap();
        let exported = view.to_dlpack().unwrap();
        assert_eq!(read_elements::<f32>(&exported), want.iter().copied().collect::<Vec<_>>(), "{name}");
        assert!(exported.flags().is_empty());
        // SAFETY: nothing writes to the memory.
        let read = unsafe { ArrayViewD::<f32>::try_from_dlpack(&exported, ()) };
        assert!(read.is_err() || read.is_ok_and(|read| read == want), "{name}: as ndarray sees it, where it can");
        let back = import(exported).unwrap();
        assert_eq!((back.to_ndarray::<f32>().unwrap(), back.dtype(), back.device()), (want, DType::F32, Device::Cpu));
        let dims = view.shape().dims().to_vec();
        assert_eq!((back.shape().dims(), back.rank()), (&dims[..], dims.len()));
        if view.numel() > 0 {
            assert_eq!(back.strides(), view.strides(), "{name}");
        }
        // The imported tensor can be used in further operations.
        let both = [&view, &back].map(|t| vec(&t.mul_scalar(3).unwrap().sum((), false).unwrap()));
        assert_eq!(both[0], both[1], "{name}");
    }
}

#[test]
fn every_dtype_survives_a_round_trip() {
    fn check<T: Element + PartialEq>(values: [T; 6], described: DLDataType) {
        let x = Tensor::from_slice(&values, [2, 3], Device::Cpu).unwrap().t().unwrap();
        let exported = x.to_dlpack().unwrap();
        assert_eq!(exported.validate().unwrap().dtype(), described);
        let want = [0, 3, 1, 4, 2, 5].map(|i| values[i]);
        assert!(read_elements::<T>(&exported) == want, "{described:?}");
        let back = import(exported).unwrap();
        assert!(back.dtype() == T::DTYPE && back.to_vec::<T>().unwrap() == want, "{described:?}");
    }
    check([1.5f32, -2.0, 0.0, f32::MAX, 4.0, 5.0], DLDataType::F32);
    check([1.5f64, -2.0, 0.0, f64::MAX, 4.0, 5.0], DLDataType::F64);
    check([1.5, -2.0, 0.0, 3.0, 4.0, 5.0].map(f16::from_f32), DLDataType::F16);
    check([1.5, -2.0, 0.0, 3.0, 4.0, 5.0].map(bf16::from_f32), DLDataType::BF16);
    check([1i64, -2, i64::MIN, i64::MAX, 4, 5], DLDataType::I64);
    check([1i32, -2, i32::MIN, i32::MAX, 4, 5], DLDataType::I32);
    check([1u32, 2, 0, u32::MAX, 4, 5], DLDataType::U32);
    check([1u8, 2, 0, 255, 4, 5], DLDataType::U8);
    check([1i16, -2, i16::MIN, i16::MAX, 4, 5], DLDataType::I16);
    check([1i8, -2, i8::MIN, i8::MAX, 4, 5], DLDataType::I8);
    check([true, false, false, true, true, false], DLDataType::BOOL);
}

#[test]
fn ndarrays_are_imported_without_a_copy() {
    let whole: ArrayD<i32> = Array::from_shape_fn(IxDyn(&[3, 4, 5]), |i| (i[0] * 20 + i[1] * 5 + i[2]) as i32);
    let mut odd = whole.clone();
    odd.invert_axis(Axis(1));
    odd.swap_axes(0, 2);
    odd.slice_axis_inplace(Axis(0), Slice::new(0, None, 2));
    for array in [whole, odd, ArrayD::from_elem(IxDyn(&[]), 7), ArrayD::zeros(IxDyn(&[2, 0, 3]))] {
        let want = array.clone();
        let made: allocation::dynamic::Initialized<DLManagedTensorVersioned> = Box::new(array).try_into().unwrap();
        // SAFETY: the fields are those of the array.
        let (managed, first) = unsafe {
            let managed = made.finish();
            let first = managed.tensor().data;
            (managed, first)
        };
        let x = import(managed).unwrap();
        assert_eq!(x.to_ndarray::<i32>().unwrap(), want);
        let exported = x.to_dlpack().unwrap();
        // SAFETY: nothing changes the DLPack tensor meanwhile.
        assert_eq!(unsafe { exported.tensor() }.data, first, "the same memory");
        // A tensor can also take ownership of an array without DLPack.
        let moved = want.clone();
        let place = moved.as_ptr();
        let y = Tensor::from_ndarray(moved, Device::Cpu).unwrap();
        assert_eq!(y.to_ndarray::<i32>().unwrap(), want);
        if want.is_standard_layout() && !want.is_empty() {
            let host = y.into_host::<i32>().unwrap();
            assert_eq!((host.as_ptr(), host.view()), (place, want.view()), "and its view is ndarray's again");
        }
    }
}

/// Owns floats, and counts how often it is dropped.
struct CountsDrops(Vec<f32>, Arc<AtomicUsize>);

impl AsMut<[f32]> for CountsDrops {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for CountsDrops {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

#[test]
fn exporter_and_importer_share_and_keep_the_memory() {
    for import_last in [false, true] {
        let dropped = Arc::new(AtomicUsize::new(0));
        let x = Tensor::from_host_memory(CountsDrops(vec![1.0; 12], dropped.clone()), [3, 4], Device::Cpu).unwrap();
        let y = import(x.t().unwrap().to_dlpack().unwrap()).unwrap();
        y.i((0, ..)).unwrap().fill_(5.0).unwrap(); // y is x transposed, so this fills the first column of x
        assert_eq!(vec(&x)[..5], [5.0, 1.0, 1.0, 1.0, 5.0]);
        x.mul_scalar_(2).unwrap();
        assert_eq!(vec(&y)[..4], [10.0, 10.0, 10.0, 2.0]);
        let (first, second) = if import_last { (x, y) } else { (y, x) };
        drop(first);
        assert_eq!(dropped.load(SeqCst), 0, "the other one is left");
        assert_eq!(vec(&second.sum((), false).unwrap()), [48.0]);
        std::thread::spawn(|| drop(second)).join().unwrap(); // dropping on another thread is allowed
        assert_eq!(dropped.load(SeqCst), 1);
    }
    // The exported tensor alone keeps the memory alive, and compaction does not move the memory.
    let x = Tensor::arange(0, 1000, 1, Device::Cpu).unwrap();
    let exported = x.narrow(0, 10, 5).unwrap().to_dlpack().unwrap();
    drop(x);
    Device::Cpu.empty_cache().unwrap();
    let _others: Vec<Tensor> = (0..50).map(|_| Tensor::full(1000, -1.0, Device::Cpu).unwrap()).collect();
    assert_eq!(read_elements::<f32>(&exported), [10.0, 11.0, 12.0, 13.0, 14.0]);
    assert_eq!(vec(&import(exported).unwrap().add_scalar_(1).unwrap().shallow_clone())[0], 11.0);
}

/// Returns a DLPack tensor of six floats in a vector, after `change` has modified its fields.
fn described<M: ManagedTensorBase>(
    (shape, strides): (&[i64], &[i64]),
    change: impl FnOnce(&mut allocation::dynamic::Initialized<M>),
) -> dlpark::Managed<M> {
    let values = Box::new(vec![0.0f64, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let data = values.as_ptr().cast_mut().cast();
    let mut made = Dynamic::new(shape, strides).initialize_as::<M>(values).unwrap();
    made.set_data(data).set_device(DLDevice::CPU).set_dtype(DLDataType::F64);
    change(&mut made);
    // SAFETY: if the fields are invalid, the import is refused before the memory is read.
    unsafe { made.finish() }
}

#[test]
fn invalid_descriptions_are_errors() {
    type Made = allocation::dynamic::Initialized<DLManagedTensorVersioned>;
    let refused = |layout: (&[i64], &[i64]), change: &dyn Fn(&mut Made), word: &str| {
        let error = import(described::<DLManagedTensorVersioned>(layout, change)).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(word), "{word}: {error}");
    };
    let fine: (&[i64], &[i64]) = (&[2, 3], &[3, 1]);
    let other = DLDevice { device_type: dlpark::ffi::DLDeviceType(2), device_id: 0 };
    refused(fine, &|made| _ = made.set_device(other), "copy it to the CPU first");
    refused(fine, &|made| _ = made.set_dtype(DLDataType::U16), "no dtype is of code 1 with 16 bits");
    refused(fine, &|made| _ = made.set_dtype(DLDataType::new(DLDataTypeCode::FLOAT, 32, 4)), "4 lanes");
    refused(fine, &|made| _ = made.set_data(std::ptr::null_mut()), "null");
    refused(fine, &|made| _ = made.set_byte_offset(4), "misaligned");
    refused((&[2, 3], &[1, 1]), &|_| {}, "overlap");
    refused((&[2, -3], &[3, 1]), &|_| {}, "negative");
    refused((&[3, 2], &[i64::MAX, i64::MAX]), &|_| {}, "span more bytes");
    // Byte offsets, negative strides and the unversioned DLPack struct are accepted.
    let layout: (&[i64], &[i64]) = (&[2, 2], &[-2, 1]);
    let x = import(described::<DLManagedTensorVersioned>(layout, |made| _ = made.set_byte_offset(24))).unwrap();
    assert_eq!(x.to_vec::<f64>().unwrap(), [3.0, 4.0, 1.0, 2.0]);
    let x = import(described::<DLManagedTensor>(fine, |_| {})).unwrap();
    assert_eq!(x.t().unwrap().to_vec::<f64>().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    // Read-only memory is copied, so that the tensor can be changed.
    let read_only =
        described::<DLManagedTensorVersioned>(fine, |made| _ = made.set_flags(DlpackFlags::READ_ONLY).unwrap());
    // SAFETY: nothing changes the DLPack tensor meanwhile.
    let place = unsafe { read_only.tensor() }.data;
    let x = import(read_only).unwrap();
    x.add_scalar_(1).unwrap();
    assert_eq!(x.to_vec::<f64>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let exported = x.to_dlpack().unwrap();
    // SAFETY: nothing changes the DLPack tensor meanwhile.
    assert_ne!(unsafe { exported.tensor() }.data, place);
}

#[test]
fn unsupported_exports_are_errors() {
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        let x = Tensor::ones(3, device).unwrap();
        let error = x.to_dlpack().err().unwrap();
        assert!(
            matches!(error, Error::Invalid { .. }) && error.to_string().contains("to_device(Device::Cpu)"),
            "{error}"
        );
        let exported = x.to_device(Device::Cpu).unwrap().to_dlpack().unwrap();
        assert_eq!(read_elements::<f32>(&exported), [1.0; 3]);
    }
    let w = Tensor::ones(3, Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let error = w.to_dlpack().err().unwrap();
    assert!(error.to_string().contains("detach"), "{error}");
    assert_eq!(read_elements::<f32>(&w.detach().to_dlpack().unwrap()), [1.0; 3]);
}
