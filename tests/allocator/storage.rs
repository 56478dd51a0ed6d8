//! Device memory from the user's view: storages exist as long as their tensors, as statistics show.

use std::thread;

use claystone::device::DeviceKind;
use claystone::storage::DeviceStats;
use claystone::{DType, Device, Error, Stream, Tensor, with_stream};

use crate::common::serial_guard;

const MIB: usize = 1 << 20;

/// Returns a device's statistics after checking their invariants.
fn stats(device: Device) -> DeviceStats {
    let s = device.memory_stats().unwrap();
    assert!(s.requested_bytes.current <= s.allocated_bytes.current);
    assert!(s.allocated_bytes.current <= s.active_bytes.current);
    assert!(s.active_bytes.current <= s.reserved_bytes.current);
    for (sum, small, large) in [
        (s.allocation, s.small_pool.allocation, s.large_pool.allocation),
        (s.reserved_bytes, s.small_pool.reserved_bytes, s.large_pool.reserved_bytes),
    ] {
        assert_eq!(sum.current, small.current + large.current);
    }
    s
}

fn allocated(device: Device) -> u64 {
    stats(device).allocated_bytes.current
}

#[test]
fn memory_is_freed_with_the_last_view() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        let before = stats(device);
        let base = Tensor::full([30, 40], 2.0, device)?;
        let s = stats(device);
        assert_eq!(s.allocated_bytes.current - before.allocated_bytes.current, 5120, "4800 bytes are 5120 in blocks");
        assert_eq!(s.requested_bytes.current - before.requested_bytes.current, 4800);
        let view = base.transpose(0, 1)?;
        assert!(view.storage().ptr_eq(base.storage()) && view.shares_storage(&base));
        assert_eq!(stats(device).allocation.current, s.allocation.current, "a view allocates nothing");
        drop(base);
        assert_eq!(view.to_vec::<f32>()?, [2.0; 1200], "{device}");
        assert_eq!(allocated(device), s.allocated_bytes.current, "the view keeps the storage");
        drop(view);
        assert_eq!(stats(device).allocation.current, before.allocation.current, "{device}");
        assert_eq!(allocated(device), before.allocated_bytes.current, "{device}");
    }
    Ok(())
}

#[test]
fn the_steady_state_makes_no_driver_allocations() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        let step = || -> claystone::Result<()> {
            let a = Tensor::ones([300, 301], device)?;
            let b = Tensor::zeros([2000, 700], (DType::F16, device))?;
            assert_eq!(a.clone().to_vec::<f32>()?, vec![1.0; 300 * 301]);
            assert_eq!(b.clone().numel(), 1_400_000);
            Ok(())
        };
        (0..8).try_for_each(|_| step())?; // fills the allocator's cache
        let before = stats(device);
        (0..10).try_for_each(|_| step())?;
        let after = stats(device);
        assert_eq!((after.num_device_alloc, after.num_device_free), (before.num_device_alloc, before.num_device_free));
        assert!(after.allocation.allocated >= before.allocation.allocated + 40, "{device}");
    }
    Ok(())
}

/// Allocates tensors until an error. Checks that the error is OutOfMemory, that other tensors are intact, and that freed memory can
/// be allocated again.
fn exhaust(device: Device, piece: usize, most: usize) -> claystone::Result<()> {
    let witness = Tensor::full([1000], 7.0, device)?;
    let before = stats(device);
    let mut held = Vec::new();
    let error = loop {
        match Tensor::full([piece], 1_i64, (DType::U8, device)) {
            Ok(t) => held.push(t),
            Err(e) => break e,
        }
        assert!(held.len() <= most, "{device} gave {} times {piece} bytes", held.len());
    };
    let Error::OutOfMemory { device: on, requested, ref detail } = error else { panic!("{error}") };
    assert_eq!((on, requested), (device, piece));
    let s = stats(device);
    assert_eq!(s.num_ooms, before.num_ooms + 1);
    assert!(detail.contains(&s.allocated_bytes.current.to_string()), "{detail}");
    assert_eq!(witness.to_vec::<f32>()?, [7.0; 1000]);
    assert!(!held.is_empty());
    held.pop();
    let again = Tensor::full([piece], 3_i64, (DType::U8, device))?;
    device.synchronize()?;
    drop((again, held));
    assert_eq!(allocated(device), before.allocated_bytes.current, "{device}");
    device.empty_cache()
}

#[test]
fn out_of_memory_is_a_recoverable_error() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        device.empty_cache()?;
        let memory = device.info()?.memory;
        if memory == 0 {
            continue; // without a known memory size, a fraction of it is undefined
        }
        device.set_memory_fraction((200 * MIB) as f64 / memory as f64)?;
        let result = exhaust(device, 24 * MIB, 10);
        device.set_memory_fraction(1.0)?;
        result?;
        // On a discrete GPU, allocates until the driver refuses more memory.
        if device.info()?.kind == DeviceKind::DiscreteGpu {
            exhaust(device, memory as usize / 16, 16)?;
        }
        assert!(matches!(device.set_memory_fraction(-1.0), Err(Error::Invalid { .. })));
        assert!(matches!(device.set_memory_fraction(f64::NAN), Err(Error::Invalid { .. })));
    }
    Ok(())
}

#[test]
fn impossible_sizes_are_errors() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        let before = stats(device);
        for n in [1_usize << 45, 1 << 58, usize::MAX / 8] {
            assert!(Tensor::empty([n], device).is_err(), "{device}: {n}");
        }
        assert_eq!(allocated(device), before.allocated_bytes.current);
        assert_eq!(
            stats(device).num_device_free,
            before.num_device_free,
            "the cache is kept: it could not have helped"
        );
    }
    Ok(())
}

#[test]
fn empty_tensors_take_no_memory() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        let before = stats(device);
        let t = Tensor::zeros([3, 0, 2], device)?;
        assert_eq!((t.storage().nbytes(), t.to_vec::<f32>()?.len()), (0, 0));
        assert_eq!(t.storage().allocation().segment(), None);
        assert_eq!(stats(device), before);
    }
    Ok(())
}

/// Two streams alternate and wait for each other. They reuse each other's freed memory, and the host does not wait.
#[test]
fn streams_share_memory_without_host_waits() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        let streams = [Stream::new(device)?, Stream::new(device)?];
        let step = |round: usize| -> claystone::Result<Tensor> {
            let (here, there) = (&streams[round % 2], &streams[(round + 1) % 2]);
            let x = with_stream(here, || Tensor::full([MIB], round as i64 % 100, (DType::U8, device)))?;
            there.wait_stream(here)?;
            let sum = with_stream(there, || x.to_dtype(DType::I64)?.sum((), false))?;
            x.record_stream(there)?;
            Ok(sum)
        };
        device.empty_cache()?;
        let before = stats(device);
        let sums = (0..32).map(step).collect::<claystone::Result<Vec<_>>>()?;
        let after = stats(device);
        assert_eq!(after.num_sync_all_streams, before.num_sync_all_streams, "{device}");
        // One round uses 9 MiB. With separate memory for each stream, 18 MiB would be needed; without reuse, 288 MiB.
        let grown = after.reserved_bytes.current - before.reserved_bytes.current;
        assert!(grown <= 60 * MIB as u64, "{grown} bytes on {device}");
        device.synchronize()?;
        for (round, sum) in sums.iter().enumerate() {
            assert_eq!(sum.to_vec::<i64>()?, [(round * MIB) as i64], "{device}");
        }
        drop(sums);
    }
    Ok(())
}

#[test]
fn emptied_caches_hold_only_live_segments() -> claystone::Result<()> {
    let _guard = serial_guard();
    for device in Device::all() {
        device.empty_cache()?;
        let before = stats(device);
        drop(Tensor::ones([7 * MIB], device)?);
        assert_eq!(stats(device).reserved_bytes.current - before.reserved_bytes.current, 28 * MIB as u64);
        device.reset_peak_stats()?;
        device.empty_cache()?;
        let s = stats(device);
        assert_eq!(s.reserved_bytes.current, before.reserved_bytes.current);
        assert_eq!(s.reserved_bytes.peak - s.reserved_bytes.current, 28 * MIB as u64, "the peak since the reset");
        device.reset_peak_stats()?;
        device.reset_accumulated_stats()?;
        let s = stats(device);
        assert_eq!(s.reserved_bytes.peak, s.reserved_bytes.current);
        assert_eq!((s.num_device_alloc, s.allocation.allocated, s.allocation.freed), (0, 0, 0));
        assert!(s.to_string().contains("reserved bytes"));
    }
    Ok(())
}

#[test]
fn threads_share_a_device_without_leaks() {
    let _guard = serial_guard();
    let devices = Device::all();
    let before: Vec<u64> = devices.iter().map(|&d| allocated(d)).collect();
    thread::scope(|scope| {
        for t in 0..8 {
            let devices = &devices;
            scope.spawn(move || {
                for round in 0..30 {
                    let (here, there) = (devices[(t + round) % devices.len()], devices[t % devices.len()]);
                    let n = 1 + (t * 7919 + round * 6367) % 40_000;
                    let value = (t * 100 + round) as f32;
                    let a = Tensor::full([n], f64::from(value), here).unwrap();
                    let b = a.clone();
                    drop(a);
                    let c = b.to_device(there).unwrap();
                    drop(b);
                    assert!(c.to_vec::<f32>().unwrap().iter().all(|&x| x == value), "{here} -> {there}");
                }
            });
        }
    });
    let after: Vec<u64> = devices.iter().map(|&d| allocated(d)).collect();
    assert_eq!(after, before);
}
