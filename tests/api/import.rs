//! Imports memory that other code allocated as tensors.

use std::ptr::NonNull;
use std::sync::Arc;

use claystone::storage::{self, Storage};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common::{devices, in_own_process, vec};

fn error_message(result: Result<Storage>) -> String {
    match result {
        Err(Error::Invalid { .. }) => result.unwrap_err().to_string(),
        other => panic!("{other:?}"),
    }
}

/// Imports `bytes` bytes of a tensor, starting at byte `from`, as if they were a buffer of other code.
fn import(x: &Tensor, from: usize, bytes: usize) -> Result<Storage> {
    let (buffer, offset) = x.storage().export_cl()?;
    // SAFETY: x lives while the test uses the imported storage, on the same stream.
    unsafe { Storage::import_cl(x.device(), buffer, offset + from, bytes) }
}

#[test]
fn imported_buffers_are_shared_and_not_counted() {
    if !in_own_process("import::imported_buffers_are_shared_and_not_counted") {
        return; // other tests would change the allocator's statistics
    }
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        let x = Tensor::arange(0, 1000, 1, device).unwrap().to_dtype(DType::F32).unwrap();
        let before = storage::allocator(device).unwrap().stats().allocated_bytes.current;
        let storage = import(&x, 64, 400).unwrap();
        assert_eq!((storage.nbytes(), storage.device()), (400, device));
        let y = Tensor::from_storage(storage, [10, 10], DType::F32).unwrap();
        assert_eq!(storage::allocator(device).unwrap().stats().allocated_bytes.current, before);
        assert_eq!(vec(&y), (16..116).map(|i| i as f32).collect::<Vec<_>>(), "{device}");
        // Changes to one tensor are visible in the other; views, strides and copies work as usual.
        y.t().unwrap().narrow(0, 3, 1).unwrap().fill_(-1.0).unwrap();
        assert_eq!(vec(&x)[16..28], [16.0, 17.0, 18.0, -1.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0, 27.0]);
        let copy = y.t().unwrap().clone();
        let (_, profile) = claystone::profiler::profile(|| drop(y)).unwrap();
        assert!(profile.memory().iter().all(|sample| sample.device != device), "neither when it goes");
        assert_eq!(vec(&copy)[..2], [16.0, 26.0]);
        assert_eq!(vec(&x)[999], 999.0);
    }
}

#[test]
fn invalid_imports_are_errors() {
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        let x = Tensor::zeros(8, device).unwrap();
        let (buffer, offset) = x.storage().export_cl().unwrap();
        assert!(error_message(import(&x, 4, 8)).contains("begin at a multiple of 16"));
        assert!(error_message(import(&x, 0, usize::MAX)).contains("leave room for the last"));
        assert!(error_message(import(&x, 0, 1 << 60)).contains("leave room"));
        assert_eq!(import(&x, 0, 0).unwrap().nbytes(), 0);
        // SAFETY: the handle is null, which the call refuses.
        let none = unsafe { Storage::import_cl(device, std::ptr::null_mut(), 0, 16) };
        assert!(error_message(none).contains("null"));
        // SAFETY: the buffer is valid, and the call refuses the CPU device.
        let wrong = unsafe { Storage::import_cl(Device::Cpu, buffer, offset, 16) };
        assert!(error_message(wrong).contains("from_host_memory"));
        let contexts: Vec<_> = devices().into_iter().filter_map(|device| device.cl_context().ok()).collect();
        assert!(!contexts.is_empty() && contexts.iter().all(|context| !context.is_null()));
        for other in devices().into_iter().filter(|&other| other != Device::Cpu && other != device) {
            // SAFETY: the buffer is valid, but belongs to another context, which the call refuses.
            let wrong = unsafe { Storage::import_cl(other, buffer, offset, 16) };
            assert!(error_message(wrong).contains("of another context"));
        }
        assert_eq!(vec(&x), [0.0; 8]);
    }
    assert!(Device::Cpu.cl_context().is_err());
}

/// An owner of floats. The `Arc`'s count shows whether the owner was dropped.
struct Owner(Vec<f32>, #[expect(dead_code, reason = "counted")] Arc<()>);

#[test]
fn host_memory_is_used_in_place_and_released() {
    let alive = Arc::new(());
    let mut owner = Owner((0..35).map(|i| i as f32).collect(), Arc::clone(&alive));
    let start = NonNull::new(owner.0.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the vector has 140 bytes, and nothing else uses it.
    let storage = unsafe { Storage::from_host_memory(start, 140, owner).unwrap() };
    let x = Tensor::from_storage(storage.clone(), [5, 7], DType::F32).unwrap();
    let part = x.narrow(1, 2, 3).unwrap().t().unwrap();
    assert_eq!(vec(&part)[..5], [2.0, 9.0, 16.0, 23.0, 30.0]);
    part.mul_scalar_(10.0).unwrap();
    assert_eq!(vec(&x)[..7], [0.0, 1.0, 20.0, 30.0, 40.0, 5.0, 6.0]);
    assert_eq!(x.matmul(&x.t().unwrap()).unwrap().shape().dims(), [5, 5]);
    for device in devices() {
        assert_eq!(vec(&x.to_device(device).unwrap()), vec(&x));
    }
    drop((x, storage));
    assert_eq!(Arc::strong_count(&alive), 2, "a view keeps it");
    drop(part);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn addresses_and_sizes_of_host_memory_are_checked() {
    let mut bytes = vec![0u64; 4];
    let start = NonNull::new(bytes.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the call refuses the misaligned address.
    let odd = unsafe { Storage::from_host_memory(start.add(4), 8, ()) };
    assert!(error_message(odd).contains("not a multiple of 8"));
    // SAFETY: the vector has 32 bytes.
    let storage = unsafe { Storage::from_host_memory(start, 32, bytes).unwrap() };
    let few = Tensor::from_storage(storage.clone(), 9, DType::F32).unwrap_err().to_string();
    assert!(few.contains("36 bytes") && few.contains("has 32"), "{few}");
    assert_eq!(Tensor::from_storage(storage.clone(), 8, DType::F32).unwrap().shape().numel(), 8);
    let refused = |storage: &Storage, dtype| Tensor::from_storage(storage.clone(), 1, dtype).unwrap_err().to_string();
    assert!(refused(&storage, DType::Bool).contains("not every byte is a bool"));
    for device in devices() {
        let ten = Tensor::from_slice(&[1u8; 10], 10, device).unwrap();
        assert!(refused(ten.storage(), DType::F32).contains("10 bytes are not a whole number of f32"), "{device}");
        assert_eq!(Tensor::from_storage(ten.storage().clone(), 4, DType::F16).unwrap().shape().numel(), 4);
    }
}

#[test]
fn storages_support_any_strides_within_bounds() {
    for device in devices() {
        let x = Tensor::arange(0, 6, 1, device).unwrap();
        let view = |shape: &[usize], strides: &[isize], offset, dtype| {
            Tensor::from_storage_strided(x.storage().clone(), shape, strides, offset, dtype)
        };
        let columns = view(&[3, 2], &[-1, 3], 2, DType::F32).unwrap();
        assert_eq!(vec(&columns), [2.0, 5.0, 1.0, 4.0, 0.0, 3.0]);
        columns.mul_scalar_(10).unwrap();
        assert_eq!(vec(&x), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(vec(&view(&[4], &[0], 5, DType::F32).unwrap()), [50.0; 4]);
        let flags = view(&[24], &[1], 0, DType::Bool).unwrap();
        assert!(flags.to_vec::<bool>().unwrap_err().to_string().contains("no valid bool"));
        flags.fill_(true).unwrap();
        assert_eq!(flags.to_vec::<bool>().unwrap(), [true; 24]);
        for (shape, strides, offset, part) in [
            (&[7usize][..], &[1isize][..], 0, "a storage of 6"),
            (&[2], &[-1], 0, "reach elements -1 to 0"),
            (&[2, 2], &[1], 0, "has 2 dimensions, and 1 strides are given"),
            (&[usize::MAX, 2], &[0, 0], 0, "from_storage_strided"),
            (&[2], &[isize::MIN], 5, "a storage of 6"),
        ] {
            let message = view(shape, strides, offset, DType::F32).unwrap_err().to_string();
            assert!(message.starts_with("from_storage_strided") && message.contains(part), "{message}");
        }
        // 21 bytes are not a multiple of the size of f32, so the storage is refused, also through a view of 20 bytes.
        let bytes = Tensor::zeros(21, (DType::U8, device)).unwrap();
        let floats = Tensor::from_storage_strided(bytes.storage().clone(), 5, &[1], 0, DType::F32);
        for refused in [floats, bytes.narrow(0, 0, 20).unwrap().view_dtype(DType::F32)] {
            assert!(refused.unwrap_err().to_string().contains("21 bytes are not a whole number of f32"));
        }
        // A new tensor on the leaf's storage does not require a gradient, like any tensor made from a storage.
        let leaf = x.requires_grad_(true).unwrap();
        let other = Tensor::from_storage_strided(leaf.storage().clone(), 2, &[1], 0, DType::F32).unwrap();
        assert!(!other.requires_grad());
    }
}
