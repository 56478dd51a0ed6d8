//! Running out of memory on real devices: the allocation says so and nothing else suffers, what is given back can be had
//! at the first call, and what is scattered moves together while everybody works.
//!
//! Discrete GPUs are filled to the brim. Other devices share the machine's memory, of which they get a little here.
//! Limits and allocators are the whole process's, so every test has a process of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use claystone::device::DeviceKind;
use claystone::storage::{self, CachingAllocator};
use claystone::{DType, Device, Error, Tensor};

use crate::common::{alone, devices, each_device, vec};

const MIB: usize = 1 << 20;

/// The bytes that may be had on a device.
fn capacity(device: Device) -> usize {
    let info = device.info().unwrap();
    if info.kind == DeviceKind::DiscreteGpu {
        return info.memory as usize;
    }
    device.set_memory_limit(192 * MIB as u64).unwrap();
    192 * MIB
}

/// A tensor of so many bytes, all of this value. Only the allocation may fail.
fn bytes(n: usize, value: usize, device: Device) -> claystone::Result<Tensor> {
    let t = Tensor::empty([n], (DType::U8, device))?;
    t.fill_(value as i64).expect("the memory is there once it was given");
    Ok(t)
}

/// Checks a [`bytes`] at both ends and in the middle.
#[track_caller]
fn assert_bytes(t: &Tensor, value: usize) {
    let n = t.numel();
    for at in [0, n / 2, n - 1000] {
        let part = t.narrow(0, at, 1000).unwrap().to_vec::<u8>().expect("reading takes no memory");
        assert_eq!(part, [value as u8; 1000], "at {at} of {n} on {}", t.device());
    }
}

#[test]
fn too_much_is_refused_by_the_allocation_and_harms_nobody() {
    if !alone("oversubscribe::too_much_is_refused_by_the_allocation_and_harms_nobody") {
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

            // Everything alive computes and can be read, and the device is well.
            for t in &held {
                t.add_scalar_(1).unwrap();
            }
            device.synchronize().unwrap();
            held.iter().enumerate().for_each(|(i, t)| assert_bytes(t, i + 1));
            for t in &held {
                t.add_scalar_(-1).unwrap();
            }
            assert_eq!(vec(&witness), [7.0; 1000]);

            // Half of it given back can be had again, at the first call each.
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
            // For the next round.
            held.iter().enumerate().for_each(|(i, t)| _ = t.fill_(i as i64).unwrap());
        }
    });
}

/// Values that tell the tensor and the place in it.
fn pattern(n: usize, seed: usize) -> Vec<i32> {
    (0..n).map(|i| (i * 7 + seed * 1_000_003) as i32).collect()
}

fn place(t: &Tensor) -> (Option<u64>, usize) {
    (t.storage().allocation().segment(), t.storage().allocation().offset())
}

/// Blocks cut from one segment, every second one given back; then a request larger than any hole and than what may
/// still be reserved.
#[test]
fn scattered_memory_moves_together() {
    if !alone("oversubscribe::scattered_memory_moves_together") {
        return;
    }
    each_device(|device| {
        // Segments as PyTorch makes them, since those are cut up.
        let config = "segments:pytorch,memory_limit_mb:192".parse().unwrap();
        let caching = CachingAllocator::new(storage::driver(device).unwrap(), config).unwrap();
        storage::set_allocator(device, Arc::new(caching)).unwrap();
        drop(Tensor::empty([180 * MIB], (DType::U8, device)).unwrap());

        let n = 6 * MIB / 4;
        let make = |seed| Tensor::from_slice(&pattern(n, seed), [n / 64, 64], device).unwrap();
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
        let before: Vec<_> = kept.iter().map(|(_, _, t)| place(t)).collect();

        let large = Tensor::empty([24 * MIB], (DType::U8, device)).unwrap();
        large.fill_(1).unwrap();
        let moved = kept.iter().zip(&before).filter(|((_, _, t), before)| place(t) != **before).count();
        assert!(moved > 0, "nothing had to move on {device}");
        if let Some(told) = told {
            assert_eq!(exported.storage().export_cl().unwrap(), told, "what was handed out stays");
            assert_eq!(place(exported), before[7]);
        }
        for (seed, view, t) in &kept {
            assert!(
                t.flatten(0, -1).unwrap().to_vec::<i32>().unwrap() == pattern(n, *seed),
                "tensor {seed} on {device}"
            );
            view.add_scalar_(1).unwrap();
        }
        for (seed, view, t) in &kept {
            let want: Vec<i32> = pattern(n, *seed).into_iter().map(|x| x.wrapping_add(1)).collect();
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

/// Threads launch, read and write while another moves everything that it can, over and over.
#[test]
fn work_goes_on_while_memory_moves() {
    if !alone("oversubscribe::work_goes_on_while_memory_moves") {
        return;
    }
    for device in devices() {
        let (stop, moved) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (stop, moved) = (&stop, &moved);
                scope.spawn(move || worker(device, thread, stop, moved));
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

/// Keeps tensors of known values, changes them in place, copies them and replaces some by others, until told to stop.
fn worker(device: Device, thread: usize, stop: &AtomicBool, moved: &AtomicUsize) {
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
            let at = place(&t);
            held.push((t, value, at));
        }
        let i = next(held.len());
        let (t, value, at) = &mut held[i];
        let now = place(t);
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
fn a_device_that_is_given_up_is_lost_and_the_others_are_not() {
    if !alone("oversubscribe::a_device_that_is_given_up_is_lost_and_the_others_are_not") {
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
