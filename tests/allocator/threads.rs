//! Many threads on one or several devices: correct values, no deadlocks, no leaks.

use claystone::{Device, Tensor, nn::Linear, nn::Module};

use crate::common::{devices, in_own_process, serial_guard};

/// Creates, computes, views, clones, converts, trains and drops tensors. The values depend on `seed`, which differs between
/// threads.
fn work(device: Device, seed: usize) {
    let shared = Tensor::zeros(&[8], device).unwrap();
    for round in 0..12 {
        let (rows, columns) = (1 + (seed * 7 + round * 5) % 40, 1 + (seed * 3 + round * 11) % 60);
        let values: Vec<f32> = (0..rows * columns).map(|i| ((i * (seed + 1) + round) % 97) as f32).collect();
        let a = Tensor::from_slice(&values, [rows, columns], device).unwrap();
        let b = a.t().unwrap().try_clone().unwrap();
        drop(a.add_scalar(1).unwrap());
        let c = b.t().unwrap().mul_scalar(2).unwrap().add(&a).unwrap();
        let want: Vec<f32> = values.iter().map(|x| 3.0 * x).collect();
        assert_eq!(c.to_vec::<f32>().unwrap(), want, "round {round} of thread {seed} on {device}");
        let total: f32 = want.iter().sum();
        let sum = c.sum((), false).unwrap().item::<f32>().unwrap();
        assert!((sum - total).abs() <= 1e-5 * total.abs(), "{sum} instead of {total} on {device}");
        let layer = Linear::new(columns, 3, device).unwrap();
        layer.forward(&a).unwrap().sum((), false).unwrap().backward().unwrap();
        let bias = layer.bias().unwrap().grad().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(bias, [rows as f32; 3]);
        shared.narrow(0, (round % 8) as isize as usize, 1).unwrap().add_scalar_(1).unwrap();
    }
    assert_eq!(shared.sum((), false).unwrap().item::<f32>().unwrap(), 12.0);
}

#[test]
fn eight_threads_compute_correct_values() {
    if !in_own_process("threads::eight_threads_compute_correct_values") {
        return;
    }
    let all = devices();
    for groups in all.iter().map(|d| vec![*d]).chain([all.clone()]) {
        // One tensor on each device that all threads read and write through separate views.
        let common: Vec<Tensor> = groups.iter().map(|d| Tensor::zeros(&[8, 1000], *d).unwrap()).collect();
        std::thread::scope(|scope| {
            for t in 0..8 {
                let (device, common) = (groups[t % groups.len()], &common[t % groups.len()]);
                scope.spawn(move || {
                    let mine = common.narrow(0, t, 1).unwrap();
                    for _ in 0..20 {
                        mine.add_scalar_(1).unwrap();
                    }
                    work(device, t);
                    assert_eq!(mine.to_vec::<f32>().unwrap(), vec![20.0; 1000]);
                });
            }
        });
        drop(common);
        for device in groups {
            device.synchronize().unwrap();
            let stats = device.memory_stats().unwrap();
            assert_eq!(stats.allocated_bytes.current, 0, "left on {device}");
            assert_eq!(stats.allocation.current, 0);
        }
    }
}

#[test]
fn tensors_can_move_between_threads() {
    let _guard = serial_guard();
    for device in devices() {
        let t = Tensor::arange(0, 100, 1, device).unwrap();
        let u = std::thread::spawn(move || t.add_scalar(1).unwrap()).join().unwrap();
        assert_eq!(u.sum((), false).unwrap().item::<f32>().unwrap(), 5050.0);
    }
}
