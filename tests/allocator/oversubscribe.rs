//! Exhausted memory on real devices: the allocation fails without other effects, freed memory can be allocated at once, and
//! compaction moves scattered blocks while other threads work.
//!
//! The tests fill discrete GPUs completely. Other devices share the machine's memory and get a small memory limit. Limits and
//! allocators belong to the whole process, so every test runs in its own process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use claystone::device::DeviceKind;
use claystone::storage::{self, CachingAllocator};
use claystone::{DType, Device, Error, Tensor};

use crate::common::{devices, each_device, in_own_process, vec};

const MIB: usize = 1 << 20;

/// Returns how many bytes can be allocated on a device.
fn capacity(device: Device) -> usize {
    let info = device.info().unwrap();
    if info.kind == DeviceKind::DiscreteGpu {
        return info.memory as usize;
    }
    device.set_memory_limit(192 * MIB as u64).unwrap();
    192 * MIB
}

/// Returns a tensor of `n` bytes, all equal to `value`. The allocation may fail; other errors panic.
fn bytes(n: usize, value: usize, device: Device) -> claystone::Result<Tensor> {
    let t = Tensor::empty([n], (DType::U8, device))?;
    t.fill_(value as i64).expect("the memory is there once it was given");
    Ok(t)
}

/// Checks the first, the middle and the last element of a tensor made by [`bytes`].
#[track_caller]
fn assert_bytes(t: &Tensor, value: usize) {
    let n = t.numel();
    for at in [0, n / 2, n - 1000] {
        let part = t.narrow(0, at, 1000).unwrap().to_vec::<u8>().expect("reading takes no memory");
        assert_eq!(part, [value as u8; 1000], "at {at} of {n} on {}", t.device());
    }
}

#[test]
fn exhausted_memory_fails_only_the_allocation() {
    if !in_own_process("oversubscribe::exhausted_memory_fails_only_the_allocation") {
        return;
    }
    each_device(|device| {
        let piece = capacity(device) / 16;
        let witness = Tensor::full([1000], 7.0, device).unwrap();
        let mut held: Vec<Tensor> = Vec::new();
        for round in 0..3 {
            let before = device.memory_stats().unwrap().num_ooms;
            let error = loop {
                match bytes(piece, held.len(), device) {
                    Ok(t) => held.push(t),
                    Err(error) => break error,
                }
                assert!(held.len() <= 16, "more than there is on {device}");
            };
            let is_ours =
                matches!(error, Error::OutOfMemory { device: d, requested, .. } if (d, requested) == (device, piece));
            assert!(is_ours, "{error}");
            assert!(held.len() >= 13, "{} of 16 parts before {error}", held.len());
            assert_eq!(device.memory_stats().unwrap().num_ooms, before + 1);

            // Despite the failed allocation, all live tensors can be used and read, and the device works.
            for t in &held {
                t.add_scalar_(1).unwrap();
            }
            device.synchronize().unwrap();
            held.iter().enumerate().for_each(|(i, t)| assert_bytes(t, i + 1));
            for t in &held {
                t.add_scalar_(-1).unwrap();
            }
            assert_eq!(vec(&witness), [7.0; 1000]);

            // After half of the tensors are dropped, each new allocation succeeds without a retry.
            let most = held.len();
            let mut keep = (round..).map(|i| i % 2 == 0);
            held.retain(|_| keep.next().unwrap());
            let values: Vec<u8> = held.iter().map(|t| t.narrow(0, 5, 1).unwrap().to_vec::<u8>().unwrap()[0]).collect();
            let again: Vec<Tensor> = (held.len()..most).map(|i| bytes(piece, 100 + i, device).unwrap()).collect();
            let ooms = device.memory_stats().unwrap().num_ooms;
            assert_eq!(ooms, before + 1, "each came at the first call");
            device.synchronize().unwrap();
            again.iter().zip(held.len()..).for_each(|(t, i)| assert_bytes(t, 100 + i));
            held.iter().zip(values).for_each(|(t, value)| assert_bytes(t, value.into()));
            drop(again);
            // Restores the values that the next round expects.
            held.iter().enumerate().for_each(|(i, t)| _ = t.fill_(i as i64).unwrap());
        }
    });
}

/// Returns numbers that identify the tensor (`seed`) and the position in the tensor.
fn test_values(n: usize, seed: usize) -> Vec<i32> {
    (0..n).map(|i| (i * 7 + seed * 1_000_003) as i32).collect()
}

fn block_position(t: &Tensor) -> (Option<u64>, usize) {
    (t.storage().allocation().segment(), t.storage().allocation().offset())
}

/// Divides one segment into blocks, frees every second block, and requests more than any gap and more than the rest of the limit.
/// The request succeeds only if compaction joins the gaps.
#[test]
fn scattered_blocks_are_compacted() {
    if !in_own_process("oversubscribe::scattered_blocks_are_compacted") {
        return;
    }
    each_device(|device| {
        // In the PyTorch configuration, segments are divided into blocks.
        let config = "segments:pytorch,memory_limit_mb:192".parse().unwrap();
        let caching = CachingAllocator::new(storage::driver(device).unwrap(), config).unwrap();
        storage::set_allocator(device, Arc::new(caching)).unwrap();
        drop(Tensor::empty([180 * MIB], (DType::U8, device)).unwrap());

        let n = 6 * MIB / 4;
        let make = |seed| Tensor::from_slice(&test_values(n, seed), [n / 64, 64], device).unwrap();
        let all: Vec<Tensor> = (0..30).map(make).collect();
        let mut kept: Vec<(usize, Tensor, Tensor)> = Vec::new();
        for (seed, t) in all.into_iter().enumerate() {
            if seed % 2 == 0 {
                kept.push((seed, t.t().unwrap(), t));
            }
        }
        let exported = &kept[7].2;
        let told = exported.storage().export_cl().ok();
        assert_eq!(told.is_some(), device != Device::Cpu);
        let before: Vec<_> = kept.iter().map(|(_, _, t)| block_position(t)).collect();

        let large = Tensor::empty([24 * MIB], (DType::U8, device)).unwrap();
        large.fill_(1).unwrap();
        let moved = kept.iter().zip(&before).filter(|((_, _, t), before)| block_position(t) != **before).count();
        assert!(moved > 0, "nothing had to move on {device}");
        if let Some(told) = told {
            assert_eq!(exported.storage().export_cl().unwrap(), told, "what was handed out stays");
            assert_eq!(block_position(exported), before[7]);
        }
        for (seed, view, t) in &kept {
            assert!(
                t.flatten(0, -1).unwrap().to_vec::<i32>().unwrap() == test_values(n, *seed),
                "tensor {seed} on {device}"
            );
            view.add_scalar_(1).unwrap();
        }
        for (seed, view, t) in &kept {
            let want: Vec<i32> = test_values(n, *seed).into_iter().map(|x| x.wrapping_add(1)).collect();
            assert!(t.flatten(0, -1).unwrap().to_vec::<i32>().unwrap() == want, "tensor {seed} on {device}");
            let corner = view.narrow(0, 63, 1).unwrap().narrow(1, n / 64 - 1, 1).unwrap();
            assert_eq!(corner.to_vec::<i32>().unwrap(), want[n - 1..], "a view of tensor {seed} on {device}");
        }
        assert_bytes(&large, 1);
        drop((large, kept));
        device.empty_cache().unwrap();
        assert_eq!(device.memory_stats().unwrap().reserved_bytes.current, 0, "on {device}");
    });
}

/// Threads launch kernels, read and write while another thread repeatedly compacts all memory.
#[test]
fn work_continues_during_compaction() {
    if !in_own_process("oversubscribe::work_continues_during_compaction") {
        return;
    }
    for device in devices() {
        let (stop, moved) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (stop, moved) = (&stop, &moved);
                scope.spawn(move || run_worker(device, thread, stop, moved));
            }
            let started = Instant::now();
            let allocator = storage::allocator(device).unwrap();
            while started.elapsed() < Duration::from_secs(8)
                && (started.elapsed() < Duration::from_secs(1) || moved.load(Relaxed) < 20)
            {
                if let Err(error) = allocator.compact(u64::MAX) {
                    stop.store(true, Relaxed);
                    panic!("{error} on {device}");
                }
            }
            stop.store(true, Relaxed);
        });
        assert!(moved.load(Relaxed) > 0, "nothing moved on {device}");
    }
}

/// Keeps tensors with known values; changes, copies and replaces the tensors until `stop` is set.
fn run_worker(device: Device, thread: usize, stop: &AtomicBool, moved: &AtomicUsize) {
    let mut random = 12345 + thread;
    let mut next = move |n: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    let mut held: Vec<(Tensor, f32, (Option<u64>, usize))> = Vec::new();
    while !stop.load(Relaxed) {
        if held.len() < 8 {
            let (n, value) = (1000 + next(600_000), next(1000) as f32);
            let t = Tensor::full([n], f64::from(value), device).unwrap();
            let at = block_position(&t);
            held.push((t, value, at));
        }
        let i = next(held.len());
        let (t, value, at) = &mut held[i];
        let now = block_position(t);
        if now != *at {
            moved.fetch_add(1, Relaxed);
            *at = now;
        }
        match next(5) {
            0 => {
                let y = t.mul_scalar(2).unwrap();
                y.add_(&*t).unwrap();
                assert!(vec(&y).iter().all(|&x| x == 3.0 * *value), "a new tensor on {device}");
            }
            1 => {
                t.add_scalar_(1).unwrap();
                *value += 1.0;
            }
            2 => assert!(vec(t).iter().all(|&x| x == *value), "reading on {device}"),
            3 => {
                let row = t.narrow(0, 100, 800).unwrap();
                assert_eq!(row.sum((), false).unwrap().item::<f32>().unwrap(), 800.0 * *value, "a view on {device}");
            }
            _ => drop(held.swap_remove(i)),
        }
    }
    for (t, value, _) in &held {
        assert!(vec(t).iter().all(|x| x == value), "at the end on {device}");
    }
}

#[test]
fn lost_devices_do_not_affect_others() {
    if !in_own_process("oversubscribe::lost_devices_do_not_affect_others") {
        return;
    }
    for device in devices().into_iter().filter(|d| *d != Device::Cpu) {
        let t = Tensor::full([1000], 2.0, device).unwrap();
        storage::driver(device).unwrap().give_up("a block was lost on purpose");
        assert!(!device.is_available());
        for result in [t.to_vec::<f32>().map(drop), t.add_scalar(1).map(drop), device.synchronize()] {
            assert!(
                matches!(&result, Err(Error::DeviceLost { cause, .. }) if cause.contains("on purpose")),
                "{result:?}"
            );
        }
    }
    assert_eq!(vec(&Tensor::full([3], 2.0, Device::Cpu).unwrap()), [2.0; 3]);
}
