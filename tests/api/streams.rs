//! Streams: waits order work, events complete, scopes of the current stream nest, and errors are reported across streams.
//!
//! Freed memory is reused only after all streams have finished using it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use claystone::device::{StreamId, set_stream};
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Error, Stream, Tensor, storage, with_stream};

use crate::common;
use crate::common::{devices, each_device, in_own_process, iota, vec};
use crate::stand_in::{Faults, Kind};

#[test]
fn waits_order_two_streams() {
    each_device(|d| {
        let (a, b) = (Stream::new(d).unwrap(), Stream::new(d).unwrap());
        let main = Stream::current(d).unwrap();
        let x = iota(&[10_000], d);
        a.wait_stream(&main).unwrap();
        let mut kept = vec![x.shallow_clone()];
        let mut last = x;
        for _ in 0..10 {
            let doubled = with_stream(&a, || last.mul_scalar(2)).unwrap();
            b.wait_stream(&a).unwrap();
            last = with_stream(&b, || doubled.add_scalar(-1)).unwrap();
            a.wait_event(&b.record_event().unwrap()).unwrap();
            kept.extend([doubled, last.shallow_clone()]);
        }
        main.wait_stream(&b).unwrap();
        let want: Vec<f32> = (0..10_000).map(|i| ((i << 10) - 1023) as f32).collect();
        assert_eq!(vec(&last), want);
        d.synchronize().unwrap();
    });
}

#[test]
fn events_and_streams_report_completion() {
    each_device(|d| {
        let stream = Stream::new(d).unwrap();
        let before = stream.record_event().unwrap();
        let x = Tensor::zeros(&[100_000], d).unwrap();
        stream.wait_stream(&Stream::current(d).unwrap()).unwrap();
        with_stream(&stream, || (0..30).for_each(|_| _ = x.add_scalar_(1).unwrap()));
        let event = stream.record_event().unwrap();
        event.clone().synchronize().unwrap();
        assert!(event.is_done().unwrap() && before.is_done().unwrap(), "in order");
        assert_eq!(vec(&x), [30.0; 100_000]);
        stream.synchronize().unwrap();
        assert!(stream.is_idle().unwrap());
    });
}

#[test]
fn timed_events_measure_elapsed_time() {
    each_device(|d| {
        let (main, side) = (Stream::current(d).unwrap(), Stream::new(d).unwrap());
        let x = Tensor::zeros(&[100_000], d).unwrap();
        let began = Instant::now();
        let start = main.record_timed_event().unwrap();
        (0..30).for_each(|_| _ = x.add_scalar_(1).unwrap());
        let middle = main.record_timed_event().unwrap();
        side.wait_event(&middle).unwrap();
        let end = side.record_timed_event().unwrap();
        let whole = start.elapsed_time(&end).unwrap();
        let wall = began.elapsed().as_secs_f64() * 1e3;
        let (first, rest) = (start.elapsed_time(&middle).unwrap(), middle.elapsed_time(&end).unwrap());
        assert!(0.0 < first && first <= whole && rest >= 0.0 && whole < wall, "{d}: {first} {rest} {whole} {wall}");
        assert!((first + rest - whole).abs() < 1e-9 * wall.max(1.0) && end.elapsed_time(&start).unwrap() == -whole);
        assert!(start.is_done().unwrap() && end.is_done().unwrap());
        let untimed = main.record_event().unwrap();
        let message = start.elapsed_time(&untimed).unwrap_err().to_string();
        assert!(message.contains("record_timed_event"), "{message}");
    });
    let on = |d| Stream::default_stream(d).unwrap().record_timed_event().unwrap();
    let all = Device::all();
    if let [first, .., last] = &all[..] {
        let message = on(*first).elapsed_time(&on(*last)).unwrap_err().to_string();
        assert!(message.contains("clocks differ"), "{message}");
    }
}

#[test]
fn current_stream_nests_and_survives_panics() {
    each_device(|d| {
        let (a, b) = (Stream::new(d).unwrap(), Stream::new(d).unwrap());
        let current = || Stream::current(d).unwrap();
        let default = Stream::default_stream(d).unwrap();
        assert_eq!((current(), default.id(), default.device()), (default.clone(), StreamId::DEFAULT, d));
        assert!(a != b && a != default && a.id().index() > 0);
        let result = with_stream(&a, || {
            assert_eq!(current(), a);
            with_stream(&b, || assert_eq!(current(), b));
            with_stream(&default, || assert_eq!(current(), default));
            with_stream(&a, || assert_eq!(current(), a));
            let panicked = catch_unwind(AssertUnwindSafe(|| with_stream(&b, || panic!("on purpose"))));
            assert!(panicked.is_err());
            assert_eq!(current(), a);
            std::thread::scope(|s| s.spawn(|| assert_eq!(current(), default)).join().unwrap());
            17
        });
        assert_eq!((result, current()), (17, default));
    });
}

#[test]
fn each_device_has_its_own_current_stream() {
    let streams: Vec<Stream> = common::devices().into_iter().map(|d| Stream::new(d).unwrap()).collect();
    for stream in &streams {
        with_stream(stream, || {
            for other in &streams {
                let current = Stream::current(other.device()).unwrap();
                assert_eq!(current == *other, stream == other, "{stream:?} and {other:?}");
                // If the other stream belongs to another device, the host waits for it.
                other.wait_stream(stream).unwrap();
            }
        });
    }
}

#[test]
fn missing_devices_have_no_streams() {
    let missing = Device::OpenCL(77);
    for result in [Stream::new(missing), Stream::default_stream(missing), Stream::current(missing)] {
        assert!(matches!(result, Err(Error::NoDevice { .. })), "{result:?}");
    }
}

#[test]
fn number_of_streams_is_bounded_and_dropped_streams_are_reused() {
    let mut held = Vec::new();
    let error = loop {
        match Stream::new(Device::Cpu) {
            Ok(stream) => held.push(stream),
            Err(error) => break error.to_string(),
        }
        assert!(held.len() <= 1024);
    };
    assert!(error.contains("1024"), "{error}");
    let last = held.pop().unwrap().id();
    assert_eq!(Stream::new(Device::Cpu).unwrap().id(), last, "the latest to come back is the first to go");
}

#[test]
fn many_threads_can_use_their_own_streams() {
    each_device(|d| {
        std::thread::scope(|scope| {
            for t in 0..8usize {
                scope.spawn(move || {
                    let stream = Stream::new(d).unwrap();
                    with_stream(&stream, || {
                        let x = iota(&[3000 + t], d);
                        let mut all = vec![x.add_scalar(t as i64).unwrap()];
                        for _ in 0..10 {
                            all.push(all.last().unwrap().add(&x).unwrap());
                        }
                        let want: Vec<f32> = (0..3000 + t).map(|i| (11 * i + t) as f32).collect();
                        assert_eq!(vec(all.last().unwrap()), want, "thread {t} on {d}");
                        stream.synchronize().unwrap();
                    });
                });
            }
        });
    });
}

#[test]
fn kernel_errors_are_reported_by_the_next_wait_on_any_stream() {
    each_device(|d| {
        if d == Device::Cpu {
            return; // on the CPU, the operation itself returns the error
        }
        let side = Stream::new(d).unwrap();
        let bad = Tensor::from_slice(&[1i64, 9], 2, d).unwrap();
        let x = iota(&[4, 3], d);
        let y = with_stream(&side, || x.index_select(0, &bad)).unwrap();
        let main = Stream::current(d).unwrap();
        main.wait_stream(&side).unwrap();
        // When the allocator waits for the device, the error is kept for the user's next wait.
        claystone::storage::driver(d).unwrap().synchronize().unwrap();
        let told = y.to_vec::<f32>();
        assert!(matches!(told, Err(Error::IndexOutOfRange { index: 9, size: 4, .. })), "{told:?}");
        assert_eq!(vec(&x).len(), 12, "told once");

        let z = with_stream(&side, || x.index_select(0, &bad)).unwrap();
        assert!(matches!(side.synchronize(), Err(Error::IndexOutOfRange { index: 9, .. })));
        d.synchronize().unwrap();
        drop(z);
    });
}

#[test]
fn recorded_memory_is_not_reused_too_early() {
    each_device(|d| {
        let (a, b) = (Stream::new(d).unwrap(), Stream::new(d).unwrap());
        let n = 300_000;
        let slow = with_stream(&b, || Tensor::zeros(&[n], d)).unwrap();
        let mut results = Vec::new();
        for round in 0..20i64 {
            let x = with_stream(&a, || Tensor::full(&[n], round, d)).unwrap();
            b.wait_stream(&a).unwrap();
            let y = with_stream(&b, || {
                (0..5).for_each(|_| _ = slow.add_scalar_(1).unwrap());
                x.add_scalar(1).unwrap()
            });
            x.record_stream(&b).unwrap();
            x.record_stream(&a).unwrap(); // `a` is already the stream of x, so nothing changes
            drop(x);
            let z = with_stream(&a, || Tensor::full(&[n], -1, d)).unwrap(); // if x's memory were free already, z would get it and overwrite it
            results.push((round, y, z));
        }
        let main = Stream::current(d).unwrap();
        main.wait_stream(&a).unwrap();
        main.wait_stream(&b).unwrap();
        for (round, y, z) in &results {
            let first = (round + 1) as f32;
            assert!(vec(y).iter().all(|&v| v == first), "round {round} on {d}");
            assert!(vec(z).iter().all(|&v| v == -1.0), "round {round} on {d}");
        }
        assert_eq!(vec(&slow), vec![100.0; n]);
        for (_, y, z) in &results {
            y.record_stream(&main).unwrap();
            z.record_stream(&main).unwrap();
        }
    });
}

#[test]
fn recording_streams_of_other_devices_is_an_error() {
    let devices = common::devices();
    for &here in &devices {
        for &there in &devices {
            let recorded = iota(&[3], here).record_stream(&Stream::new(there).unwrap());
            match recorded {
                Ok(()) => assert_eq!(here, there),
                Err(error) => {
                    assert!(matches!(error, Error::DeviceMismatch { lhs, rhs, .. } if (lhs, rhs) == (here, there)))
                }
            }
        }
        let nothing = Tensor::zeros(&[0], here).unwrap();
        nothing.record_stream(&Stream::default_stream(here).unwrap()).unwrap();
    }
}

#[test]
fn memory_can_be_exported_only_on_opencl() {
    each_device(|d| {
        let x = iota(&[1000], d);
        match x.storage().export_cl() {
            Ok((mem, offset)) => {
                assert!(d != Device::Cpu && !mem.is_null() && offset % 512 == 0);
                assert_eq!(x.storage().export_cl().unwrap(), (mem, offset), "it stays");
                assert_eq!(x.narrow(0, 10, 5).unwrap().storage().export_cl().unwrap(), (mem, offset), "views share it");
            }
            Err(error) => assert!(d == Device::Cpu && matches!(error, Error::Invalid { .. }), "{error}"),
        }
        assert!(matches!(Tensor::zeros(&[0], d).unwrap().storage().export_cl(), Err(Error::Invalid { .. })));
        assert_eq!(vec(&x)[999], 999.0);
    });
}

/// Stream ids are unique only within a device. An id of another device's stream has no work to wait for.
#[test]
fn streams_of_another_device_have_no_pending_work() {
    let foreign: Vec<Stream> = (0..200).map(|_| Stream::new(Device::Cpu).unwrap()).collect();
    let id = foreign.last().unwrap().id();
    for device in devices().into_iter().filter(|&d| d != Device::Cpu) {
        let allocator = storage::allocator(device).unwrap();
        let block = allocator.allocate(64 << 20, id).unwrap();
        allocator.deallocate(block);
        let block = allocator.allocate(64 << 20, StreamId::DEFAULT).unwrap();
        allocator.record_stream(&block, id);
        allocator.deallocate(block);
        assert_eq!(vec(&Tensor::ones(16 << 20, device).unwrap())[0], 1.0);
    }
}

/// If the driver cannot report a stream's progress, freed memory is not reused, because the stream may still be writing to it.
#[test]
fn memory_is_not_reused_if_stream_markers_fail() {
    let Some(faults) = Faults::install("streams::memory_is_not_reused_if_stream_markers_fail", Kind::Real) else {
        return;
    };
    let (device, n) = (Device::OpenCL(0), 1_000_000);
    let (side, main) = (Stream::new(device).unwrap(), Stream::current(device).unwrap());
    for markers in [0, 1, 2, 5] {
        let x = Tensor::zeros(&[n], device).unwrap();
        with_stream(&side, || Tensor::full(&[n], 7, device).unwrap().add_scalar_(1).map(drop)).unwrap(); // compiles the kernels
        side.wait_stream(&main).unwrap();
        device.synchronize().unwrap();
        faults.delay("clEnqueueNDRangeKernel", 300_000);
        with_stream(&side, || x.add_scalar_(1).map(drop)).unwrap();
        x.record_stream(&side).unwrap();
        faults.clear();
        if markers > 0 {
            faults.fail("clEnqueueMarkerWithWaitList", 1, markers, -6);
        }
        drop(x);
        let y: Vec<Tensor> = (0..3).filter_map(|_| Tensor::full(&[n], 7, device).ok()).collect();
        faults.clear();
        device.synchronize().unwrap();
        assert!(!y.is_empty());
        for y in &y {
            let changed = vec(y).into_iter().filter(|&v| v != 7.0).count();
            assert_eq!(changed, 0, "{markers} markers failed");
        }
    }
}

/// Trains eight networks alternately on `streams` streams with a new allocator. Returns the peak of reserved bytes.
fn train(device: Device, streams: usize, config: &str) -> u64 {
    let allocator = storage::build_allocator(storage::driver(device).unwrap(), config.parse().unwrap()).unwrap();
    storage::set_allocator(device, allocator).unwrap();
    let streams: Vec<Stream> = (0..streams).map(|_| Stream::new(device).unwrap()).collect();
    let mut networks: Vec<(Sequential, Sgd)> = (0..8)
        .map(|_| {
            let relu = |a, b| Linear::new(a, b, device).unwrap().with_activation(Activation::Relu);
            let mut network = Sequential::new().push(relu(64, 256)).push(relu(256, 192));
            network = network.push(Linear::new(192, 10, device).unwrap());
            let sgd = Sgd::new(network.parameters_mut(), SgdConfig { lr: 0.05, ..Default::default() }).unwrap();
            (network, sgd)
        })
        .collect();
    device.synchronize().unwrap();
    for step in 0..25 {
        for (i, (network, sgd)) in networks.iter_mut().enumerate() {
            let batch = 64 + (step * 97 + i * 131) % 1000;
            with_stream(&streams[i % streams.len()], || {
                let x = Tensor::rand(&[batch, 64], device).unwrap();
                let labels = Tensor::zeros(&[batch], (DType::I64, device)).unwrap();
                sgd.zero_grad();
                network.forward(&x).unwrap().cross_entropy(&labels).unwrap().backward().unwrap();
                sgd.step().unwrap();
            });
        }
    }
    device.synchronize().unwrap();
    device.memory_stats().unwrap().reserved_bytes.peak
}

#[test]
fn several_streams_need_little_more_memory() {
    if !in_own_process("streams::several_streams_need_little_more_memory") {
        return;
    }
    each_device(|device| {
        let one = train(device, 1, "");
        for (streams, most) in [(2, 1.25), (4, 1.5), (8, 1.5)] {
            let several = train(device, streams, "");
            println!("{device}: {several} bytes on {streams} streams, {one} on one");
            assert!(several as f64 <= most * one as f64, "{several} bytes on {streams} streams, {one} on one");
        }
        // Freed memory is returned to the driver after the configured decay time.
        train(device, 4, "decay_ms:20");
        let reserved = || device.memory_stats().unwrap().reserved_bytes.current;
        for _ in 0..500 {
            if reserved() > 2 << 20 {
                std::thread::sleep(std::time::Duration::from_millis(5));
                (0..64).for_each(|_| drop(Tensor::empty(&[1 << 16], device).unwrap()));
            }
        }
        assert!(reserved() <= 2 << 20, "{} bytes are still reserved", reserved());
    });
}

#[test]
fn set_streams_stay_current_until_their_scope_ends() {
    each_device(|d| {
        let [a, b, c] = std::array::from_fn(|_| Stream::new(d).unwrap());
        let current = || Stream::current(d).unwrap();
        let main = current();
        set_stream(&a);
        with_stream(&b, || {
            assert_eq!(current(), b);
            set_stream(&c);
            assert_eq!(current(), c);
        });
        assert_eq!(current(), a, "what was set in a scope ended with it");
        let elsewhere = Stream::new(Device::Cpu).unwrap();
        with_stream(&elsewhere, || set_stream(&b));
        assert_eq!(current(), if d == Device::Cpu { a } else { b }, "a scope of another device does not matter");
        let others = std::thread::scope(|scope| scope.spawn(current).join().unwrap());
        assert_eq!(others, Stream::default_stream(d).unwrap());
        let x = Tensor::ones(1000, d).unwrap().mul_scalar(3).unwrap(); // runs on the stream that `set_stream` selected
        set_stream(&main);
        assert_eq!(current(), main);
        d.synchronize().unwrap();
        assert_eq!(vec(&x), [3.0; 1000]);
    });
}
