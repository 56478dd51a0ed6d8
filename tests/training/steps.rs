//! Training steps: numbers of launches, memory in the steady state, agreement between devices, and definitions of optimizers.

use claystone::device::count_launches;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::storage::DeviceStats;
use claystone::{DType, Device, Result, Tensor, manual_seed};

use crate::common::{devices, each_device, in_own_process};

fn mlp(options: (DType, Device)) -> Sequential {
    Sequential::new()
        .push(Linear::new(64, 128, options).unwrap().with_activation(Activation::Relu))
        .push(Linear::new(128, 10, options).unwrap())
}

/// Returns a batch that has the same bits on every device.
fn batch(options: (DType, Device)) -> (Tensor, Tensor) {
    let x = Tensor::rand(&[32, 64], (DType::F32, options.1)).unwrap().to_dtype(options.0).unwrap();
    let y = Tensor::randint(0, 10, &[32], (DType::I64, options.1)).unwrap();
    (x, y)
}

fn assert_launches<R>(most: u64, what: &str, f: impl FnOnce() -> R) -> R {
    let (result, launches) = count_launches(f);
    assert!(launches <= most, "{what}: {launches} launches, at most {most}");
    result
}

fn step(net: &Sequential, optimizer: &mut dyn Optimizer, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    optimizer.zero_grad();
    let loss = net.forward(x)?.cross_entropy(y)?;
    loss.backward()?;
    optimizer.step()?;
    Ok(loss)
}

#[test]
fn a_step_of_a_two_layer_mlp_takes_at_most_11_launches_and_no_new_memory() {
    if !in_own_process("steps::a_step_of_a_two_layer_mlp_takes_at_most_11_launches_and_no_new_memory") {
        return;
    }
    each_device(|device| {
        manual_seed(1);
        let mut net = mlp((DType::F32, device));
        let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.1, ..Default::default() }).unwrap();
        let (x, y) = batch((DType::F32, device));
        for _ in 0..2 {
            step(&net, &mut sgd, &x, &y).unwrap();
        }
        // The allocator may need a few steps until its cache has all blocks that a step needs.
        let quiet = (0..20).any(|_| {
            let before = device.memory_stats().unwrap().num_device_alloc;
            for _ in 0..3 {
                assert_launches(11, "a training step", || step(&net, &mut sgd, &x, &y).unwrap());
            }
            device.memory_stats().unwrap().num_device_alloc == before
        });
        assert!(quiet, "steady steps call the driver for memory on {device}");
    });
}

/// In the steady state, training must allocate no driver memory, and the reserved memory must exceed the used memory only slightly.
#[test]
fn steady_training_reserves_little_more_than_it_uses() {
    if !in_own_process("steps::steady_training_reserves_little_more_than_it_uses") {
        return;
    }
    each_device(|device| {
        for adamw in [false, true] {
            manual_seed(1);
            let mut net = mlp((DType::F32, device));
            let mut optimizer: Box<dyn Optimizer> = match adamw {
                true => Box::new(AdamW::new(net.parameters_mut(), AdamWConfig::default()).unwrap()),
                false => Box::new(Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.1, ..Default::default() }).unwrap()),
            };
            let mut train = |steps: usize| {
                for _ in 0..steps {
                    let (x, y) = batch((DType::F32, device));
                    step(&net, &mut *optimizer, &x, &y).unwrap().item::<f32>().unwrap();
                }
                device.memory_stats().unwrap()
            };
            let (before, after) = (train(5), train(50));
            let calls = |s: &DeviceStats| (s.num_device_alloc, s.num_device_free);
            let (reserved, peak) = (after.reserved_bytes.current, after.allocated_bytes.peak);
            println!("{device}: {reserved} bytes reserved, {peak} allocated at most");
            assert_eq!(calls(&after), calls(&before), "the driver was asked for memory on {device}");
            assert!(reserved as f64 <= 1.10 * peak as f64, "{reserved} bytes reserved for {peak} on {device}");
        }
    });
}

#[test]
fn optimizer_steps_are_one_launch() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, y) = batch((dtype, device));
            let mut net = mlp((dtype, device));
            let mut adamw = AdamW::new(net.parameters_mut(), AdamWConfig::default()).unwrap();
            net.forward(&x).unwrap().cross_entropy(&y).unwrap().backward().unwrap();
            let (_, launches) = count_launches(|| adamw.step().unwrap());
            assert_eq!(launches, 1, "{dtype} on {device}");
        }
    });
}

fn losses(device: Device, adamw: bool) -> Vec<f64> {
    manual_seed(42);
    let mut net = mlp((DType::F32, device));
    let mut optimizer: Box<dyn Optimizer> = if adamw {
        Box::new(AdamW::new(net.parameters_mut(), AdamWConfig::default()).unwrap())
    } else {
        let config = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-4, nesterov: true, ..Default::default() };
        Box::new(Sgd::new(net.parameters_mut(), config).unwrap())
    };
    (0..20)
        .map(|_| {
            let (x, y) = batch((DType::F32, device));
            step(&net, &mut *optimizer, &x, &y).unwrap().item::<f32>().unwrap().into()
        })
        .collect()
}

#[test]
fn the_first_20_losses_agree_between_devices() {
    if !in_own_process("steps::the_first_20_losses_agree_between_devices") {
        return;
    }
    for adamw in [false, true] {
        let want = losses(Device::Cpu, adamw);
        for device in devices() {
            let got = losses(device, adamw);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                assert!((g - w).abs() <= 1e-4 * w.abs(), "step {i} on {device}: {g} instead of {w}");
            }
        }
    }
}

#[test]
fn sgd_follows_its_definition() {
    each_device(|device| {
        let start = [0.5f64, -1.0, 2.0];
        let config = SgdConfig { lr: 0.1, momentum: 0.8, weight_decay: 0.05, nesterov: true, ..Default::default() };
        let mut w = Tensor::from_slice(&start.map(|x| x as f32), 3, device).unwrap().requires_grad_(true).unwrap();
        let mut sgd = Sgd::new(vec![&mut w], config).unwrap();
        let (mut want, mut velocity) = (start, [0.0f64; 3]);
        for _ in 0..5 {
            sgd.zero_grad();
            w.mul(&w).unwrap().sum((), false).unwrap().backward().unwrap();
            sgd.step().unwrap();
            for (w, v) in want.iter_mut().zip(&mut velocity) {
                let grad = 2.0 * *w + config.weight_decay * *w;
                *v = config.momentum * *v + grad;
                *w -= config.lr * (grad + config.momentum * *v);
            }
        }
        for (got, want) in w.to_vec::<f32>().unwrap().iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} instead of {want} on {device}");
        }
    });
}

#[test]
fn adamw_follows_its_definition() {
    each_device(|device| {
        let start = [0.5f64, -1.0, 2.0];
        let c = AdamWConfig { lr: 0.05, weight_decay: 0.1, ..Default::default() };
        let mut w = Tensor::from_slice(&start.map(|x| x as f32), 3, device).unwrap().requires_grad_(true).unwrap();
        let mut adamw = AdamW::new(vec![&mut w], c).unwrap();
        let (mut want, mut m, mut v) = (start, [0.0f64; 3], [0.0f64; 3]);
        for t in 1..=5 {
            adamw.zero_grad();
            w.mul(&w).unwrap().sum((), false).unwrap().backward().unwrap();
            adamw.step().unwrap();
            for i in 0..3 {
                let grad = 2.0 * want[i];
                m[i] = c.beta1 * m[i] + (1.0 - c.beta1) * grad;
                v[i] = c.beta2 * v[i] + (1.0 - c.beta2) * grad * grad;
                let (mean, variance) = (m[i] / (1.0 - c.beta1.powi(t)), v[i] / (1.0 - c.beta2.powi(t)));
                want[i] = want[i] * (1.0 - c.lr * c.weight_decay) - c.lr * mean / (variance.sqrt() + c.eps);
            }
        }
        for (got, want) in w.to_vec::<f32>().unwrap().iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} instead of {want} on {device}");
        }
    });
}

#[test]
fn parameters_without_a_gradient_do_not_change() {
    each_device(|device| {
        let leaf = |x: f32| Tensor::full(&[4], x, device).unwrap().requires_grad_(true).unwrap();
        let (mut a, mut b, mut c) = (leaf(1.0), leaf(2.0), leaf(3.0));
        let mut sgd = Sgd::new(vec![&mut a, &mut b, &mut c], SgdConfig { lr: 0.5, ..Default::default() }).unwrap();
        a.mul(&c).unwrap().sum((), false).unwrap().backward().unwrap();
        sgd.step().unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), [-0.5; 4]);
        assert_eq!(b.to_vec::<f32>().unwrap(), [2.0; 4]);
        assert_eq!(c.to_vec::<f32>().unwrap(), [2.5; 4]);
    });
}

#[test]
fn gradients_accumulate_until_zeroed_and_shared_parameters_add_up() {
    each_device(|device| {
        let mut w = Tensor::full(&[3], 2.0, device).unwrap().requires_grad_(true).unwrap();
        let sgd = Sgd::new(vec![&mut w], SgdConfig::default()).unwrap();
        let grad = || w.grad().unwrap().to_vec::<f32>().unwrap();
        let square = || w.mul(&w).unwrap().sum((), false).unwrap();
        square().backward().unwrap();
        assert_eq!(grad(), [4.0; 3], "both factors are the same leaf");
        square().backward().unwrap();
        assert_eq!(grad(), [8.0; 3]);
        sgd.zero_grad();
        assert!(w.grad().is_none());
        // The same leaf is used three times, at different depths of the graph.
        let y = w.exp().unwrap().mul(&w).unwrap().add(&w).unwrap();
        y.sum((), false).unwrap().backward().unwrap();
        let want = 2f32.exp() * 3.0 + 1.0;
        assert!(grad().iter().all(|g| (g - want).abs() < 1e-4 * want));
    });
}

#[test]
fn long_chains_neither_recurse_nor_leak() {
    // With 20,000 nodes, recursion in backward or in drop would overflow a test thread's stack.
    let x = Tensor::ones(&[2], Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let chain = || (0..20_000).try_fold(x.shallow_clone(), |y, _| y.add_scalar(0.0001)).unwrap();
    chain().sum((), false).unwrap().backward().unwrap();
    assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), [1.0; 2]);
    drop(chain());
}

#[test]
fn backward_errors_name_the_cause() {
    let message = |e: Result<()>| e.unwrap_err().to_string();
    let x = Tensor::ones(&[2], Device::Cpu).unwrap().requires_grad_(true).unwrap();
    assert!(message(x.exp().unwrap().backward()).contains("one element"));
    assert!(message(Tensor::ones(&[1], Device::Cpu).unwrap().backward()).contains("requires_grad_"));
    let y = x.exp().unwrap().sum((), false).unwrap();
    y.backward().unwrap();
    assert!(message(y.backward()).contains("consumed"));
    // A saved tensor is changed in place, so backward must fail.
    let a = Tensor::ones(&[2], Device::Cpu).unwrap();
    let y = x.mul(&a).unwrap().sum((), false).unwrap();
    a.add_scalar_(1).unwrap();
    assert!(message(y.backward()).contains("changed in place"));
    // Changing a leaf that requires a gradient in place must be an error.
    assert!(x.add_scalar_(1).map(|_| ()).unwrap_err().to_string().contains("no_grad"));
    let view = x.narrow(0, 0, 1).unwrap();
    assert!(view.fill_(0).map(|_| ()).unwrap_err().to_string().contains("no_grad"));
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.0; 2]);
}

/// Only one backward at a time may write into an optimizer's gradient buffer. Two threads must still get correct gradients.
#[test]
fn threads_can_accumulate_the_same_gradients() {
    each_device(|d| {
        let mut w = Tensor::ones(20_000, d).unwrap().requires_grad_(true).unwrap();
        let _sgd = Sgd::new(vec![&mut w], SgdConfig::default()).unwrap();
        for round in 0..20 {
            w.zero_grad();
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                for factor in [1.0, 2.0] {
                    let (w, both) = (&w, &both);
                    scope.spawn(move || {
                        let loss = w.mul_scalar(factor).unwrap().sum((), false).unwrap();
                        both.wait();
                        loss.backward().unwrap();
                    });
                }
            });
            let grad = w.grad().unwrap().to_vec::<f32>().unwrap();
            assert!(grad.iter().all(|g| *g == 3.0), "round {round} on {d}");
        }
    });
}
