//! Optimizer steps on tensors with state kept by the caller, compared with the optimizer objects.

use claystone::device::count_launches;
use claystone::ops;
use claystone::optim::*;
use claystone::{DType, Device, Tensor, no_grad};
use claystone_capi::steps::*;

/// Calls `f` with every device.
fn each_device(f: impl Fn(Device)) {
    for device in Device::all() {
        println!("on {device}"); // shown when the test fails
        f(device);
    }
}

/// Returns the elements as f64.
fn values(t: &Tensor) -> Vec<f64> {
    t.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Lengths of three parameters, two of them equal.
const SIZES: [usize; 3] = [5, 3, 5];

struct Tensors(Vec<Tensor>);

impl Tensors {
    fn new(dtype: DType, device: Device, value: impl Fn(usize, usize) -> f64) -> Tensors {
        let one = |k: usize| {
            let values: Vec<f64> = (0..SIZES[k]).map(|i| value(k, i)).collect();
            let host = Tensor::from_slice(&values, SIZES[k], Device::Cpu).unwrap();
            host.to_dtype(dtype).unwrap().to_device(device).unwrap()
        };
        Tensors((0..3).map(one).collect())
    }

    fn zeros(dtype: DType, device: Device) -> Tensors {
        Tensors::new(dtype, device, |_, _| 0.0)
    }

    fn refs(&self) -> Vec<&Tensor> {
        self.0.iter().collect()
    }

    fn values(&self) -> Vec<f64> {
        self.0.iter().flat_map(values).collect()
    }
}

fn start(k: usize, i: usize) -> f64 {
    0.5 + 0.25 * i as f64 - 0.75 * k as f64
}

fn slope(step: usize, k: usize, i: usize) -> f64 {
    (1.0 + step as f64 * 0.3 - 0.4 * i as f64) * if k == 1 { -1.0 } else { 0.5 }
}

fn number(value: f64, device: Device, dtype: DType) -> Tensor {
    Tensor::full((), value, (dtype, device)).unwrap()
}

/// Returns the parameters after five steps of an optimizer object, with the gradient multiplied by `sign`.
fn optimizer_results<R: Rule>(rule: R, dtype: DType, device: Device, sign: f64) -> Vec<f64> {
    let parameters = Tensors::new(dtype, device, start);
    let mut leaves: Vec<Tensor> = parameters.0.into_iter().map(|p| p.requires_grad_(true).unwrap()).collect();
    let mut optimizer = Fused::new(leaves.iter_mut().collect(), rule).unwrap();
    for step in 0..5 {
        let gradients = Tensors::new(dtype, device, |k, i| sign * slope(step, k, i));
        leaves.iter().zip(gradients.0).for_each(|(p, g)| p.set_grad(g).unwrap());
        optimizer.step().unwrap();
    }
    Tensors(leaves).values()
}

fn assert_close(got: &[f64], want: &[f64], within: f64) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= within;
    assert!(got.len() == want.len() && got.iter().zip(want).all(near), "{got:?} instead of {want:?}");
}

#[test]
fn functional_adam_matches_the_optimizer() {
    each_device(|device| {
        for (dtype, within) in [(DType::F32, 2e-6), (DType::F64, 1e-12)] {
            if dtype == DType::F64 && Tensor::zeros(1, (DType::F64, device)).is_err() {
                continue;
            }
            for (decoupled, amsgrad, maximize) in [(true, false, false), (false, true, false), (true, true, true)] {
                let adam = AdamConfig { lr: 0.1, weight_decay: 0.2, amsgrad, ..Default::default() };
                let AdamConfig { lr, beta1, beta2, eps, weight_decay, .. } = adam;
                let adamw = AdamWConfig { lr, beta1, beta2, eps, weight_decay, amsgrad };
                let sign = if maximize { -1.0 } else { 1.0 };
                let want = match decoupled {
                    true => optimizer_results(adamw, dtype, device, sign),
                    false => optimizer_results(adam, dtype, device, sign),
                };
                for (lr, scale) in
                    [(None, None), (Some(number(0.1, device, dtype)), Some(number(8.0, device, DType::F32)))]
                {
                    let parameters = Tensors::new(dtype, device, start);
                    let [m, v, greatest] = [(); 3].map(|()| Tensors::zeros(dtype, device));
                    let steps: Vec<Tensor> = (0..3).map(|_| number(0.0, device, DType::F32)).collect();
                    let of_steps: Vec<&Tensor> = steps.iter().collect();
                    let mut launched = 0;
                    for step in 0..6 {
                        // The gradients of the fourth step overflow, so the step must change nothing.
                        let overflow = step == 3;
                        let found = number(f64::from(overflow), device, DType::F32);
                        let factor = if scale.is_some() { 8.0 } else { 1.0 };
                        let at = step - usize::from(step > 3);
                        let gradients = Tensors::new(dtype, device, |k, i| {
                            if overflow { f64::INFINITY } else { factor * slope(at, k, i) }
                        });
                        let before = parameters.values();
                        ops::foreach_into("add_scalar", &[&of_steps], &[1.0.into()], &of_steps).unwrap();
                        let tensors = FusedStep {
                            parameters: &parameters.refs(),
                            gradients: &gradients.refs(),
                            lr: lr.as_ref(),
                            grad_scale: scale.as_ref(),
                            found_inf: Some(&found),
                            maximize,
                        };
                        let (m, v, greatest) = (m.refs(), v.refs(), greatest.refs());
                        let (exp_avgs, exp_avg_sqs, max_exp_avg_sqs) = (&m[..], &v[..], &greatest[..]);
                        let state = FusedAdamState { exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps: &of_steps };
                        let config = AdamWConfig { lr: if lr.is_some() { 9.0 } else { 0.1 }, ..adamw };
                        let AdamWConfig { lr, .. } = config;
                        let run = || match decoupled {
                            true => fused_adamw_(&tensors, &state, &config),
                            false => fused_adam_(&tensors, &state, &AdamConfig { lr, ..adam }),
                        };
                        let (done, launches) = count_launches(run);
                        done.unwrap();
                        launched = launches;
                        if overflow {
                            assert_eq!(parameters.values(), before);
                            ops::foreach_into("add_scalar", &[&of_steps], &[(-1.0).into()], &of_steps).unwrap();
                        } else {
                            assert_close(
                                &gradients.values(),
                                &Tensors::new(dtype, device, |k, i| slope(at, k, i)).values(),
                                within,
                            );
                        }
                    }
                    assert_close(&parameters.values(), &want, within);
                    // One launch computes all scalars, and one launch updates each shape. For f64, the step counts are first
                    // converted.
                    assert_eq!(launched, if dtype == DType::F64 { 6 } else { 3 }, "{device}");
                }
            }
        }
    });
}

#[test]
fn functional_sgd_matches_the_optimizer() {
    each_device(|device| {
        let plain = SgdConfig { lr: 0.1, weight_decay: 0.2, ..Default::default() };
        let heavy = SgdConfig { momentum: 0.9, dampening: 0.3, ..plain };
        let light = SgdConfig { momentum: 0.9, nesterov: true, ..plain };
        for (config, maximize) in [(plain, false), (heavy, true), (light, false)] {
            let want = optimizer_results(config, DType::F32, device, if maximize { -1.0 } else { 1.0 });
            for lr in [None, Some(number(0.1, device, DType::F32))] {
                let parameters = Tensors::new(DType::F32, device, start);
                let buffers = Tensors::new(DType::F32, device, |_, _| f64::NAN); // as in uninitialized memory
                for step in 0..5 {
                    let gradients = Tensors::new(DType::F32, device, |k, i| slope(step, k, i));
                    let tensors = FusedStep {
                        parameters: &parameters.refs(),
                        gradients: &gradients.refs(),
                        lr: lr.as_ref(),
                        maximize,
                        ..Default::default()
                    };
                    let config = SgdConfig { lr: if lr.is_some() { 9.0 } else { 0.1 }, ..config };
                    let run = || fused_sgd_(&tensors, &buffers.refs(), step == 0, &config);
                    let (done, launches) = count_launches(run);
                    done.unwrap();
                    assert_eq!(launches, 2, "one a shape on {device}");
                }
                assert_close(&parameters.values(), &want, 2e-6);
            }
        }
    });
}

#[test]
fn functional_adagrad_matches_the_optimizer() {
    each_device(|device| {
        let plain = AdagradConfig { lr: 0.1, ..Default::default() };
        let falling = AdagradConfig { lr_decay: 0.2, weight_decay: 0.2, initial_accumulator_value: 0.5, ..plain };
        for (config, maximize) in [(plain, false), (falling, true)] {
            let want = optimizer_results(config, DType::F32, device, if maximize { -1.0 } else { 1.0 });
            for lr in [None, Some(number(0.1, device, DType::F32))] {
                let parameters = Tensors::new(DType::F32, device, start);
                let sums = Tensors::new(DType::F32, device, |_, _| config.initial_accumulator_value);
                for step in 0..5 {
                    let gradients = Tensors::new(DType::F32, device, |k, i| slope(step, k, i));
                    let count = number(step as f64 + 1.0, device, DType::F32);
                    let tensors = FusedStep {
                        parameters: &parameters.refs(),
                        gradients: &gradients.refs(),
                        lr: lr.as_ref(),
                        maximize,
                        ..Default::default()
                    };
                    let config = AdagradConfig { lr: if lr.is_some() { 9.0 } else { 0.1 }, ..config };
                    let run = || fused_adagrad_(&tensors, &sums.refs(), &[&count; 3], &config);
                    let (done, launches) = count_launches(run);
                    done.unwrap();
                    assert_eq!(launches, 3, "the numbers of all, and one a shape on {device}");
                }
                assert_close(&parameters.values(), &want, 2e-6);
            }
        }
    });
}

#[test]
fn overflows_are_detected() {
    each_device(|device| {
        let inverse = number(0.25, device, DType::F32);
        for (broken, found) in [(None, 0.0), (Some(f64::NAN), 1.0), (Some(f64::NEG_INFINITY), 1.0)] {
            let value = |k: usize, i: usize| broken.filter(|_| (k, i) == (1, 2)).unwrap_or(8.0);
            let (gradients, flag) = (Tensors::new(DType::F32, device, value), number(0.0, device, DType::F32));
            let (done, launches) = count_launches(|| unscale_(&gradients.refs(), &flag, &inverse));
            done.unwrap();
            assert_eq!(launches, 9, "two for the greatest of each, one to look at these, one a shape on {device}");
            assert_eq!((flag.item::<f32>().unwrap(), gradients.values()[0]), (found, 2.0));
        }
    });
}

#[test]
fn lists_of_different_lengths_are_errors() {
    let x = Tensor::ones(3, Device::Cpu).unwrap();
    let step = FusedStep { parameters: &[&x], ..Default::default() };
    let error = no_grad(|| fused_sgd_(&step, &[], true, &SgdConfig::default())).unwrap_err();
    assert!(error.to_string().contains("must have 1 tensors"), "{error}");
}
