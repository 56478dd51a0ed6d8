//! Host arrays from `to_host` and `into_host`: values, memory and fixed address.

use claystone::{DType, Device, Element, Error, HostArray, Result, Tensor, storage};
use half::{bf16, f16};

use crate::common::{devices, iota, serial_guard};

const MIB: usize = 1 << 20;

/// Returns the number of allocations from the CPU's allocator, and the number of allocations by that allocator from the system.
fn allocation_counts() -> (u64, u64) {
    let stats = Device::Cpu.memory_stats().unwrap();
    (stats.allocation.allocated, stats.num_device_alloc)
}

fn address<T: Element>(host: &HostArray<T>) -> usize {
    host.as_ptr().addr()
}

/// Returns the segment and the offset in bytes of the tensor's block.
fn block_position(t: &Tensor) -> (Option<u64>, usize) {
    (t.storage().allocation().segment(), t.storage().allocation().offset())
}

/// Checks that `to_host` and `into_host` give the values that `to_vec` gives, and that the array converts back to an equal tensor.
fn check_host_arrays<T: Element>(t: &Tensor) {
    let values = t.to_vec::<T>().unwrap();
    for host in [t.to_host::<T>().unwrap(), t.shallow_clone().into_host().unwrap()] {
        assert_eq!(host[..], values);
        assert_eq!(host.shape(), t.shape());
        assert_eq!(host.view(), t.to_ndarray::<T>().unwrap());
        assert_eq!(format!("{host:?}"), format!("{:?}", t.to_ndarray::<T>().unwrap()));
        let back = Tensor::from(host);
        assert!(back.device() == Device::Cpu && back.is_contiguous() && !back.shares_storage(t));
        assert_eq!((back.dtype(), back.shape(), back.to_vec::<T>().unwrap()), (t.dtype(), t.shape(), values.clone()));
    }
}

fn check_all_views<T: Element>(of: impl Fn(usize) -> T, device: Device) -> Result<()> {
    let shows = |t: Tensor| check_host_arrays::<T>(&t);
    for n in [0, 1, 2, 13, 127, 4099] {
        let values: Vec<T> = (0..n).map(&of).collect();
        let t = match Tensor::from_slice(&values, n, device) {
            Err(Error::UnsupportedDType { .. }) => return Ok(()),
            t => t?,
        };
        shows(t.flip(0)?);
        shows(t.narrow(0, n / 3, n - n / 3)?);
        shows(t.slice(0, 1, None, 3)?);
        shows(t.unsqueeze(1)?.expand([n, 3])?);
        shows(t);
    }
    let values: Vec<T> = (0..5 * 7 * 3).map(&of).collect();
    let t = Tensor::from_vec(values, [5, 7, 3], device)?;
    shows(t.permute(&[2, 0, 1])?);
    shows(t.narrow(1, 2, 4)?.flip(1)?);
    shows(t.select(0, -1)?); // a contiguous view with an offset
    shows(t.narrow(0, 2, 0)?);
    shows(t.select(0, 1)?.select(0, 1)?.select(0, 1)?); // a zero-dimensional view
    Ok(())
}

#[test]
fn host_arrays_equal_to_vec_for_every_dtype_and_view() -> Result<()> {
    let _guard = serial_guard();
    for device in devices() {
        check_all_views(|i| i as f32 / 3.0 - 7.0, device)?;
        check_all_views(|i| i as f64 / 3.0 - 7.0, device)?;
        check_all_views(|i| f16::from_f32(i as f32 - 7.0), device)?;
        check_all_views(|i| bf16::from_f32(i as f32 - 7.0), device)?;
        check_all_views(|i| i as i64 * 1_000_003 - 7, device)?;
        check_all_views(|i| i as i32 - 7, device)?;
        check_all_views(|i| i as u32, device)?;
        check_all_views(|i| i as u8, device)?;
        check_all_views(|i| i % 3 == 0, device)?;
    }
    Ok(())
}

#[test]
fn into_host_does_not_copy_the_last_handle() -> Result<()> {
    let _guard = serial_guard();
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let adopted = values.as_ptr().addr();
    let t = Tensor::from_vec(values, [10, 100], Device::Cpu)?;
    assert_eq!(address(&t.into_host::<f32>()?), adopted, "a vector's memory is shown where it is");
    let t = iota(&[10, 100], Device::Cpu);
    let before = allocation_counts();
    let mut host = t.narrow(0, 3, 5)?.into_host::<f32>()?;
    assert_eq!(allocation_counts().0, before.0 + 1, "others have handles: a copy");
    host.fill(-1.0);
    assert_eq!(t.to_vec::<f32>()?, (0..1000).map(|i| i as f32).collect::<Vec<_>>());
    let view = t.narrow(0, 3, 5)?;
    drop(t);
    let before = allocation_counts();
    let mut host = view.into_host::<f32>()?;
    assert_eq!((host[0], host[499]), (300.0, 799.0));
    host.view_mut()[[4, 99]] = 0.5;
    let at = address(&host);
    let t = host.into_tensor();
    assert_eq!(t.offset(), 300);
    t.add_scalar_(1.0)?;
    let host = t.into_host::<f32>()?;
    assert_eq!((address(&host), host[498], host[499]), (at, 799.0, 1.5));
    assert_eq!(allocation_counts(), before, "nothing was allocated");
    Ok(())
}

#[test]
fn into_host_copies_values_saved_for_backward() -> Result<()> {
    let _guard = serial_guard();
    let x = iota(&[7], Device::Cpu).requires_grad_(true)?;
    let y = x.exp()?; // the backward of exp reads its result, so `into_host` must copy
    let z = y.sum((), false)?;
    let want = y.to_vec::<f32>()?;
    let mut host = y.into_host::<f32>()?;
    host.fill(0.0);
    z.backward()?;
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, want);
    assert!(!host.into_tensor().requires_grad());
    // After the autograd node is dropped, only `y` refers to the result that the node saved.
    let y = x.exp()?;
    let before = allocation_counts();
    assert_eq!(y.into_host::<f32>()?[..], want);
    assert_eq!(allocation_counts(), before);
    Ok(())
}

#[test]
fn host_arrays_reuse_memory() -> Result<()> {
    let _guard = serial_guard();
    for device in devices() {
        let t = iota(&[16 * MIB / 4 + 3], device);
        (0..4).try_for_each(|_| t.to_host::<f32>().map(drop))?;
        let (before, held) = (allocation_counts(), Device::Cpu.memory_stats()?.allocated_bytes.current);
        for _ in 0..10 {
            let host = t.to_host::<f32>()?;
            assert!(host.iter().enumerate().all(|(i, &x)| x == i as f32));
        }
        let (after, left) = (allocation_counts(), Device::Cpu.memory_stats()?.allocated_bytes.current);
        assert_eq!((after.0 - before.0, after.1, left), (10, before.1, held), "{device}");
    }
    Ok(())
}

#[test]
fn compaction_does_not_move_host_arrays() -> Result<()> {
    let _guard = serial_guard();
    // Two segments hold 40 blocks of 300 KiB each. The host arrays are in one of these segments.
    let segments = (0..2).map(|_| Tensor::empty([12 * MIB / 4], Device::Cpu)).collect::<Result<Vec<_>>>()?;
    drop(segments);
    let n = 300 << 8;
    let make = |i: usize| Tensor::full([n], i as f32, Device::Cpu);
    let mut tensors: Vec<Option<Tensor>> = (0..80).map(|i| make(i).map(Some)).collect::<Result<_>>()?;
    (0..80).step_by(2).for_each(|i| tensors[i] = None); // leaves a gap before each remaining block
    let hosts: Vec<(usize, HostArray<f32>)> =
        [5, 9].into_iter().map(|i| Ok((i, tensors[i].take().expect("odd").into_host()?))).collect::<Result<_>>()?;
    let at: Vec<usize> = hosts.iter().map(|(_, host)| address(host)).collect();
    let places: Vec<_> = tensors.iter().flatten().map(block_position).collect();
    storage::allocator(Device::Cpu)?.compact(u64::MAX)?;
    assert_ne!(tensors.iter().flatten().map(block_position).collect::<Vec<_>>(), places, "others have moved");
    assert_eq!(hosts.iter().map(|(_, host)| address(host)).collect::<Vec<_>>(), at);
    assert!(hosts.iter().all(|(i, host)| host.len() == n && host.iter().all(|&x| x == *i as f32)));
    for (i, t) in tensors.iter().enumerate().filter_map(|(i, t)| Some((i, t.as_ref()?))) {
        assert!(t.to_host::<f32>()?.iter().all(|&x| x == i as f32), "{i}");
    }
    // A block of a host array that was converted back to a tensor can be moved again.
    let back: Vec<(usize, Tensor)> = hosts.into_iter().map(|(i, host)| (i, host.into_tensor())).collect();
    let places: Vec<_> = back.iter().map(|(_, t)| block_position(t)).collect();
    tensors.clear();
    storage::allocator(Device::Cpu)?.compact(u64::MAX)?;
    assert_ne!(back.iter().map(|(_, t)| block_position(t)).collect::<Vec<_>>(), places);
    for (i, t) in back {
        assert!(t.into_host::<f32>()?.iter().all(|&x| x == i as f32));
    }
    Ok(())
}

/// Other threads change host arrays while compaction moves the blocks around the arrays.
#[test]
fn host_arrays_can_move_to_other_threads() -> Result<()> {
    let _guard = serial_guard();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|k| {
                scope.spawn(move || -> Result<Tensor> {
                    let mut kept = Vec::new();
                    for round in 0..60 {
                        let t = Tensor::full([100_000 + 10_000 * k], k as f32, Device::Cpu)?;
                        let mut host = t.into_host::<f32>()?;
                        host.iter_mut().for_each(|x| *x += round as f32);
                        kept.push(host);
                        if kept.len() > 5 {
                            let host = kept.swap_remove(round % 5);
                            assert!(host.iter().all(|&x| x == host[0]));
                        }
                    }
                    Ok(kept.swap_remove(0).into_tensor())
                })
            })
            .collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            storage::allocator(Device::Cpu)?.compact(u64::MAX)?;
        }
        for worker in workers {
            let host = worker.join().unwrap()?.into_host::<f32>()?;
            assert!(host.iter().all(|&x| x == host[0]));
        }
        Ok(())
    })
}

#[test]
fn failed_conversions_change_nothing() -> Result<()> {
    let _guard = serial_guard();
    for device in devices() {
        let t = iota(&[4], device);
        let before = Device::Cpu.memory_stats()?.allocated_bytes.current;
        for error in [t.to_host::<i64>().err(), t.shallow_clone().into_host::<i64>().err()] {
            let Some(Error::DTypeMismatch { op, lhs, rhs }) = error else { panic!("{error:?}") };
            assert!(["to_host", "into_host"].contains(&op) && (lhs, rhs) == (DType::F32, DType::I64));
        }
        // A view with more elements than memory can hold.
        let huge = t.unsqueeze(1)?.expand([4, 1_i64 << 50])?;
        assert!(huge.to_host::<f32>().is_err() && huge.into_host::<f32>().is_err());
        assert_eq!(Device::Cpu.memory_stats()?.allocated_bytes.current, before);
        assert_eq!(t.into_host::<f32>()?[..], [0.0, 1.0, 2.0, 3.0]);
    }
    assert!(matches!(
        Tensor::ones(2, Device::Cpu)?.into_host::<u8>(),
        Err(Error::DTypeMismatch { op: "into_host", .. })
    ));
    Ok(())
}

#[test]
fn host_arrays_are_send_and_sync() {
    fn check<T: Send + Sync + Unpin + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    check::<HostArray<f32>>();
    check::<HostArray<bool>>();
}
