//! `with_host`, which passes a tensor's elements to a closure without copying them.

use std::sync::mpsc;
use std::thread;

use claystone::{DType, Device, Error, HostArray, Tensor};

use crate::common::{each_device, in_own_process, iota};

#[test]
fn closures_read_cpu_memory_in_place() {
    // Runs in its own process, because statistics belong to the whole process.
    if !in_own_process("with_host::closures_read_cpu_memory_in_place") {
        return;
    }
    let x = iota(&[4, 6], Device::Cpu);
    let place = x.with_host(|all: &[f32]| all.as_ptr().addr()).unwrap();
    let rows = x.narrow(0, 1, 2).unwrap();
    let before = Device::Cpu.memory_stats().unwrap().allocation.allocated;
    let seen = rows.with_host(|all: &[f32]| (all.as_ptr().addr() - place, all.to_vec())).unwrap();
    assert_eq!(seen, (24, (6..18).map(|i| i as f32).collect()));
    assert_eq!(Device::Cpu.memory_stats().unwrap().allocation.allocated, before, "nothing is allocated");
    each_device(|device| {
        let x = iota(&[4, 6], device);
        let columns = x.t().unwrap().slice(0, None, None, -2).unwrap();
        let (values, own) = columns.with_host(|all: &[f32]| (all.to_vec(), all.as_ptr().addr())).unwrap();
        assert_eq!(values, columns.to_vec::<f32>().unwrap());
        assert_ne!(own, place, "a copy");
        assert_eq!(x.with_host(|all: &[f32]| all.iter().sum::<f32>()).unwrap(), 276.0);
        assert_eq!(x.narrow(0, 0, 0).unwrap().with_host(|all: &[f32]| all.len()).unwrap(), 0);
        assert_eq!(
            Tensor::ones(3, (DType::Bool, device)).unwrap().with_host(|all: &[bool]| all.to_vec()).unwrap(),
            [true; 3]
        );
        assert!(matches!(x.with_host(|_: &[i32]| ()), Err(Error::DTypeMismatch { .. })));
    });
    // Memory that a vector or another user-defined owner allocated.
    for x in [
        Tensor::from_vec(vec![1.0f32, 2.0], 2, Device::Cpu).unwrap(),
        Tensor::from_host_memory(vec![1.0f32, 2.0].into_boxed_slice(), 2, Device::Cpu).unwrap(),
        Tensor::from_slice(&[1.0f32, 2.0], 2, Device::Cpu).unwrap().pin_memory(Device::best()).unwrap(),
    ] {
        assert_eq!(x.with_host(|all: &[f32]| (all[1], x.zero_().is_err())).unwrap(), (2.0, true));
        assert_eq!(x.zero_().unwrap().to_vec::<f32>().unwrap(), [0.0; 2]);
    }
}

#[test]
fn writes_fail_while_a_closure_reads() {
    let x = Tensor::full([64, 64], 3.0, Device::Cpu).unwrap();
    let other = x.shallow_clone();
    let view = x.narrow(0, 1, 2).unwrap();
    x.with_host(|all: &[f32]| {
        // While the closure reads, this thread cannot write to the tensor, through any handle or method.
        let one = Tensor::ones((), Device::Cpu).unwrap();
        let refused = [
            view.fill_(1.0).map(drop),
            other.zero_().map(drop),
            other.mul_scalar_(2).map(drop),
            other.add_(&one).map(drop),
            other.copy_(&one).map(drop),
            other.copy_(&Tensor::zeros([64, 64], Device::best()).unwrap()).map(drop),
            other.uniform_(0.0, 1.0).map(drop),
            view.write_bytes_(&[0; 512]).map(drop),
            other.index_fill_(0, &Tensor::zeros(1, (DType::I64, Device::Cpu)).unwrap(), 1.0).map(drop),
            other.t().unwrap().copy_(&other).map(drop),
        ];
        for (i, result) in refused.into_iter().enumerate() {
            let error = result.expect_err(&format!("write {i}")).to_string();
            assert!(error.contains("with_host"), "{error}");
        }
        // While the closure reads, a write by another thread fails at once instead of waiting.
        thread::scope(|s| assert!(s.spawn(|| other.zero_().is_err()).join().unwrap()));
        // Reads are allowed while the closure reads: by operations, by a nested closure, and by converting another handle to a host
        // array, which copies.
        assert_eq!(other.sum((), false).unwrap().item::<f32>().unwrap(), 3.0 * 4096.0);
        assert_eq!(other.with_host(|again: &[f32]| again.as_ptr()).unwrap(), all.as_ptr());
        assert!(view.fill_(1.0).is_err(), "the outer closure still reads");
        let copy: HostArray<f32> = other.shallow_clone().into_host().unwrap();
        assert_ne!(copy.as_ptr(), all.as_ptr());
        assert!(all.iter().all(|&v| v == 3.0));
    })
    .unwrap();
    assert_eq!(other.zero_().unwrap().to_vec::<f32>().unwrap(), [0.0; 4096]);
    // The access ends also if the closure panics.
    let panicked = std::panic::catch_unwind(|| x.with_host(|_: &[f32]| panic!("in the closure")));
    assert!(panicked.is_err() && x.fill_(1.0).is_ok());
}

/// Two closures read the same memory at once, and the first ends earlier. Meanwhile compaction moves all other blocks.
#[test]
fn memory_read_by_closures_is_not_moved() {
    if !in_own_process("with_host::memory_read_by_closures_is_not_moved") {
        return;
    }
    drop(Tensor::zeros(1 << 18, Device::Cpu).unwrap()); // creates a segment that the following tensors use
    let all: Vec<Tensor> = (0..24).map(|i| Tensor::full(10_000, i as f64, Device::Cpu).unwrap()).collect();
    let mut held: Vec<Option<Tensor>> = all.into_iter().map(Some).collect();
    held.iter_mut().step_by(2).for_each(|t| *t = None);
    let x = held[13].take().unwrap();
    let (begun, first) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let intact = |all: &[f32]| assert!(all.iter().all(|&v| v == 13.0));
    thread::scope(|s| {
        let x = &x;
        let reader = s.spawn(move || {
            let read = |all: &[f32]| {
                begun.send(()).unwrap();
                ended.recv().unwrap();
                intact(all);
            };
            x.with_host(read).unwrap();
        });
        first.recv().unwrap();
        let place = x.with_host(|all: &[f32]| all.as_ptr().addr()).unwrap();
        Device::Cpu.compact().unwrap();
        assert_eq!(x.with_host(|all: &[f32]| all.as_ptr().addr()).unwrap(), place);
        assert!(x.zero_().is_err(), "the other thread still reads");
        x.with_host(|all: &[f32]| {
            end.send(()).unwrap();
            reader.join().unwrap();
            Device::Cpu.compact().unwrap();
            intact(all);
            assert!(x.zero_().is_err() && all.as_ptr().addr() == place);
        })
        .unwrap();
    });
    Device::Cpu.compact().unwrap();
    x.with_host(intact).unwrap();
    x.zero_().unwrap();
}

#[test]
fn host_arrays_are_slices() {
    each_device(|device| {
        let mut host = iota(&[2, 3], device).to_host::<f32>().unwrap();
        host.as_mut_slice()[0] = 7.0;
        assert_eq!(host.as_slice(), [7.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    });
}
