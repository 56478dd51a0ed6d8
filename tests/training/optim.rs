//! Optimizers are compared with their definitions in f64. Also groups, states, schedules, clipping and loss scaling.

use std::sync::{Arc, Mutex};

use claystone::device::count_launches;
use claystone::nn::StateDict;
use claystone::optim::*;
use claystone::{DType, Device, Expr, Tensor, no_grad};

use crate::common::{each_device, f64s};

const START: [f64; 4] = [0.5, -1.0, 2.0, 0.25];
const SLOPE: [f64; 4] = [1.0, -0.5, 0.3, 2.0];

fn leaf(values: &[f64], dtype: DType, device: Device) -> Tensor {
    let host = Tensor::from_slice(values, values.len(), Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    host.to_device(device).unwrap().requires_grad_(true).unwrap()
}

/// Runs backward of `sum(slope * w²)`, whose gradient is `2 slope w`.
fn backward(w: &Tensor) {
    let slope = Tensor::from_slice(&SLOPE, 4, Device::Cpu).unwrap().to_dtype(w.dtype()).unwrap();
    let slope = slope.to_device(w.device()).unwrap();
    w.mul(w).unwrap().mul(&slope).unwrap().sum((), false).unwrap().backward().unwrap();
}

/// Compares ten steps on every device with `reference`, which maps a weight, its gradient, three numbers of state (initially 0) and the
/// number of the step to the new weight.
fn assert_matches_reference<R: Rule + Clone>(rule: R, reference: impl Fn(f64, f64, &mut [f64; 3], i32) -> f64) {
    each_device(|device| {
        let mut w = leaf(&START, DType::F32, device);
        let mut optimizer = Fused::new(vec![&mut w], rule.clone()).unwrap();
        let (mut want, mut state) = (START, [[0.0; 3]; 4]);
        for t in 1..=10 {
            optimizer.zero_grad();
            backward(&w);
            let (_, launches) = count_launches(|| optimizer.step().unwrap());
            assert_eq!(launches, 1, "{} on {device}", R::NAME);
            for i in 0..4 {
                want[i] = reference(want[i], 2.0 * SLOPE[i] * want[i], &mut state[i], t);
            }
        }
        for (got, want) in f64s(&w).iter().zip(want) {
            assert!((got - want).abs() < 2e-5, "{}: {got} instead of {want} on {device}", R::NAME);
        }
    });
}

#[test]
fn sgd_follows_its_definition() {
    let plain = SgdConfig { lr: 0.1, weight_decay: 0.05, ..Default::default() };
    assert_matches_reference(plain, |w, g, _, _| w - 0.1 * (g + 0.05 * w));
    let heavy = SgdConfig { momentum: 0.8, dampening: 0.3, ..plain };
    assert_matches_reference(heavy, |w, g, s, t| {
        let g = g + 0.05 * w;
        s[0] = if t == 1 { g } else { 0.8 * s[0] + 0.7 * g };
        w - 0.1 * s[0]
    });
    let light = SgdConfig { lr: 0.1, momentum: 0.8, ..Default::default() };
    assert_matches_reference(light, |w, g, s, _| {
        s[0] = 0.8 * s[0] + g;
        w - 0.1 * s[0]
    });
    let nesterov = SgdConfig { momentum: 0.8, nesterov: true, ..plain };
    assert_matches_reference(nesterov, |w, g, s, _| {
        let g = g + 0.05 * w;
        s[0] = 0.8 * s[0] + g;
        w - 0.1 * (g + 0.8 * s[0])
    });
}

#[test]
fn adam_and_adamw_follow_their_definitions() {
    let moments = |g: f64, s: &mut [f64; 3], t: i32, amsgrad: bool| {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = 0.999 * s[1] + 0.001 * g * g;
        s[2] = s[2].max(s[1]);
        let v = if amsgrad { s[2] } else { s[1] };
        (s[0] / (1.0 - 0.9f64.powi(t))) / ((v / (1.0 - 0.999f64.powi(t))).sqrt() + 1e-8)
    };
    for amsgrad in [false, true] {
        let adam = AdamConfig { lr: 0.05, weight_decay: 0.1, amsgrad, ..Default::default() };
        assert_matches_reference(adam, |w, g, s, t| w - 0.05 * moments(g + 0.1 * w, s, t, amsgrad));
        let adamw = AdamWConfig { lr: 0.05, weight_decay: 0.1, amsgrad, ..Default::default() };
        assert_matches_reference(adamw, |w, g, s, t| w * (1.0 - 0.05 * 0.1) - 0.05 * moments(g, s, t, amsgrad));
    }
}

#[test]
fn adagrad_follows_its_definition() {
    let rule = AdagradConfig { lr: 0.1, lr_decay: 0.2, weight_decay: 0.05, ..Default::default() };
    assert_matches_reference(rule, |w, g, s, t| {
        let g = g + 0.05 * w;
        s[0] += g * g;
        w - 0.1 / (1.0 + f64::from(t - 1) * 0.2) * g / (s[0].sqrt() + 1e-10)
    });
    // The accumulated squares must start at the configured value.
    let mut w = leaf(&[1.0], DType::F64, Device::Cpu);
    let rule = AdagradConfig { lr: 0.1, initial_accumulator_value: 3.0, ..Default::default() };
    let mut adagrad = Adagrad::new(vec![&mut w], rule).unwrap();
    w.sum((), false).unwrap().backward().unwrap();
    adagrad.step().unwrap();
    assert!((w.to_vec::<f64>().unwrap()[0] - 0.95).abs() < 1e-9);
}

#[test]
fn rmsprop_follows_its_definition() {
    for (centered, momentum) in [(false, 0.0), (true, 0.0), (false, 0.7), (true, 0.7)] {
        let rule = RmsPropConfig { lr: 0.01, alpha: 0.9, momentum, centered, weight_decay: 0.05, ..Default::default() };
        assert_matches_reference(rule, |w, g, s, _| {
            let g = g + 0.05 * w;
            s[0] = 0.9 * s[0] + 0.1 * g * g;
            s[1] = 0.9 * s[1] + 0.1 * g;
            let spread = if centered { s[0] - s[1] * s[1] } else { s[0] };
            s[2] = momentum * s[2] + g / (spread.sqrt() + 1e-8);
            w - 0.01 * s[2]
        });
    }
}

#[test]
fn lion_follows_its_definition() {
    assert_matches_reference(LionConfig { lr: 0.01, weight_decay: 0.1, ..Default::default() }, |w, g, s, _| {
        let c = 0.9 * s[0] + 0.1 * g;
        s[0] = 0.99 * s[0] + 0.01 * g;
        w * (1.0 - 0.01 * 0.1) - 0.01 * if c == 0.0 { 0.0 } else { c.signum() }
    });
}

/// The weights, the state of each weight, and the number of updates.
type ExpectedState = ([f64; 4], [[f64; 3]; 4], i32);

/// Optimizers cache the launch of a step. Changes between steps must take effect nevertheless: learning rates, scales, missing
/// gradients, and weights and state written from outside. After a parameter missed a step, a step takes `apart` launches.
fn assert_changes_take_effect<R: Rule + Clone>(
    rule: R,
    apart: u64,
    reference: impl Fn(f64, f64, &mut [f64; 3], i32, f64) -> f64,
) {
    each_device(|device| {
        let mut parameters: Vec<Tensor> = (0..3).map(|_| leaf(&START, DType::F32, device)).collect();
        let mut optimizer = Fused::new(parameters.iter_mut().collect(), rule.clone()).unwrap();
        let mut want = [(START, [[0.0; 3]; 4], 0); 3];
        let step = |optimizer: &mut Fused<R>, want: &mut [ExpectedState; 3], lr, factor, missing| {
            optimizer.zero_grad();
            optimizer.set_learning_rates(&[lr]).unwrap();
            for (i, (w, state, t)) in want.iter_mut().enumerate().filter(|(i, _)| Some(*i) != missing) {
                backward(&parameters[i]);
                *t += 1;
                for j in 0..4 {
                    w[j] = reference(w[j], factor * 2.0 * SLOPE[j] * w[j], &mut state[j], *t, lr);
                }
            }
            let (_, launches) = count_launches(|| optimizer.step_scaled(factor).unwrap());
            for (p, (w, ..)) in parameters.iter().zip(want) {
                for (got, want) in f64s(p).iter().zip(w) {
                    assert!((got - *want).abs() < 2e-5, "{}: {got} instead of {want} on {device}", R::NAME);
                }
            }
            launches
        };
        assert_eq!(step(&mut optimizer, &mut want, 0.1, 1.0, None), 1);
        assert_eq!(step(&mut optimizer, &mut want, 0.1, 1.0, None), 1);
        let state = optimizer.state_dict().unwrap();
        let state: StateDict = state.into_iter().map(|(n, t)| (n, t.try_clone().unwrap())).collect();
        let weights: Vec<Tensor> = parameters.iter().map(|p| p.detach().try_clone().unwrap()).collect();
        let kept = want;
        assert_eq!(step(&mut optimizer, &mut want, 0.05, 1.0, None), 1);
        assert_eq!(step(&mut optimizer, &mut want, 0.05, 0.5, None), 1);
        assert_eq!(step(&mut optimizer, &mut want, 0.05, 1.0, Some(1)), 2);
        assert_eq!(step(&mut optimizer, &mut want, 0.02, 1.0, None), apart);
        assert_eq!(step(&mut optimizer, &mut want, 0.03, 1.0, None), apart);
        no_grad(|| parameters.iter().zip(&weights).for_each(|(p, w)| _ = p.copy_(w).unwrap()));
        optimizer.load_state_dict(&state).unwrap();
        want = kept;
        assert_eq!(optimizer.learning_rate(), 0.1);
        assert_eq!(step(&mut optimizer, &mut want, 0.04, 1.0, None), 1);
    });
}

#[test]
fn changes_between_steps_take_effect() {
    let sgd = SgdConfig { momentum: 0.8, dampening: 0.3, weight_decay: 0.05, ..Default::default() };
    assert_changes_take_effect(sgd, 1, |w, g, s, t, lr| {
        let g = g + 0.05 * w;
        s[0] = if t == 1 { g } else { 0.8 * s[0] + 0.7 * g };
        w - lr * s[0]
    });
    let adamw = AdamWConfig { weight_decay: 0.1, ..Default::default() };
    assert_changes_take_effect(adamw, 3, |w, g, s, t, lr| {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = 0.999 * s[1] + 0.001 * g * g;
        let root = (s[1] / (1.0 - 0.999f64.powi(t))).sqrt() + 1e-8;
        w * (1.0 - lr * 0.1) - lr * s[0] / (1.0 - 0.9f64.powi(t)) / root
    });
}

/// A user-defined rule whose weight decay can be changed from outside.
#[derive(Clone)]
struct Decaying {
    lr: f64,
    decay: Arc<Mutex<f64>>,
}

impl Rule for Decaying {
    const NAME: &'static str = "Decaying";

    fn numbers(&self, _step: i32) -> Vec<f64> {
        vec![self.lr, *self.decay.lock().unwrap()]
    }

    fn update(&self, w: &Expr, g: &Expr, _state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        (w - &s[0] * (g + &s[1] * w), vec![])
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

#[test]
fn rules_are_asked_for_their_numbers_at_every_step() {
    each_device(|device| {
        let (mut w, decay) = (leaf(&START, DType::F32, device), Arc::new(Mutex::new(0.0)));
        let mut optimizer = Fused::new(vec![&mut w], Decaying { lr: 0.1, decay: decay.clone() }).unwrap();
        backward_of_ones(&w);
        let mut want = START;
        for of in [0.0, 0.0, 0.5, 0.25] {
            *decay.lock().unwrap() = of;
            optimizer.step().unwrap();
            want.iter_mut().for_each(|w| *w -= 0.1 * (1.0 + of * *w));
            assert!(f64s(&w).iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-5), "{w} on {device}");
        }
    });
}

#[test]
fn groups_have_hyperparameters_of_their_own() {
    each_device(|device| {
        let (mut a, mut b) = (leaf(&START, DType::F32, device), leaf(&START, DType::BF16, device));
        let fast = SgdConfig { lr: 0.1, ..Default::default() };
        let slow = SgdConfig { lr: 0.01, ..Default::default() };
        let mut sgd = Sgd::new(vec![&mut a], fast).unwrap().with_group(vec![&mut b], slow).unwrap();
        assert_eq!(sgd.parameters().len(), 2);
        backward(&a);
        backward(&b);
        let (_, launches) = count_launches(|| sgd.step().unwrap());
        assert_eq!(launches, 2, "one a group on {device}");
        for i in 0..4 {
            let want = |lr: f64| START[i] - lr * 2.0 * SLOPE[i] * START[i];
            assert!((f64s(&a)[i] - want(0.1)).abs() < 1e-6);
            assert!((f64s(&b)[i] - want(0.01)).abs() < 1e-2);
        }
        sgd.set_learning_rates(&[0.2, 0.02]).unwrap();
        assert_eq!(sgd.learning_rates(), [0.2, 0.02]);
        assert!(sgd.set_learning_rates(&[0.2]).is_err());
        sgd.set_learning_rate(0.3);
        assert_eq!(sgd.rules().map(|r| r.lr).collect::<Vec<_>>(), [0.3, 0.3]);
        assert!(sgd.with_group(vec![&mut a], fast).is_err(), "a parameter twice");
    });
}

#[test]
fn hyperparameters_out_of_range_are_errors() {
    let mut w = leaf(&START, DType::F32, Device::Cpu);
    let refused = |text: &str, made: claystone::Result<()>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    let sgd = SgdConfig { nesterov: true, momentum: 0.9, dampening: 0.1, ..Default::default() };
    refused("nesterov", Sgd::new(vec![&mut w], sgd).map(|_| ()));
    refused("Adam: beta2", Adam::new(vec![&mut w], AdamConfig { beta2: 1.0, ..Default::default() }).map(|_| ()));
    refused("lr is -1", Lion::new(vec![&mut w], LionConfig { lr: -1.0, ..Default::default() }).map(|_| ()));
    refused("alpha", RmsProp::new(vec![&mut w], RmsPropConfig { alpha: 1.5, ..Default::default() }).map(|_| ()));
    refused("eps", Adagrad::new(vec![&mut w], AdagradConfig { eps: -1.0, ..Default::default() }).map(|_| ()));
}

/// Training from a saved and loaded state must give the same bits as without saving, in half precision too.
#[test]
fn saved_states_continue_with_the_same_bits() {
    each_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            let config = AdamWConfig { lr: 0.05, amsgrad: true, ..Default::default() };
            let run = |w: &Tensor, adamw: &mut AdamW| {
                for _ in 0..3 {
                    adamw.zero_grad();
                    backward(w);
                    adamw.step().unwrap();
                }
            };
            let mut w = leaf(&START, dtype, device);
            let mut adamw = AdamW::new(vec![&mut w], config).unwrap();
            run(&w, &mut adamw);
            adamw.set_learning_rate(0.03);
            let kept = adamw.state_dict().unwrap();
            let mut names = vec!["state.0.exp_avg", "state.0.exp_avg_sq", "state.0.max_exp_avg_sq"];
            names.extend((dtype == DType::BF16).then_some("state.0.master"));
            names.extend(["state.0.step", "param_groups.0.lr"]);
            assert_eq!(kept.names().collect::<Vec<_>>(), names);
            let saved: StateDict = kept.into_iter().map(|(n, t)| (n, t.try_clone().unwrap())).collect();
            let weights = w.detach().try_clone().unwrap();
            run(&w, &mut adamw);

            let mut again = leaf(&[0.0; 4], dtype, device);
            let mut other = AdamW::new(vec![&mut again], config).unwrap();
            no_grad(|| again.copy_(&weights).map(|_| ())).unwrap();
            other.load_state_dict(&saved).unwrap();
            assert_eq!(other.learning_rate(), 0.03);
            run(&again, &mut other);
            assert_eq!(f64s(&again), f64s(&w), "{dtype} on {device}");

            // Loading an incomplete state must be an error and change nothing.
            let fewer: StateDict = saved.into_iter().filter(|(n, _)| n != "state.0.exp_avg").collect();
            let message = other.load_state_dict(&fewer).unwrap_err().to_string();
            assert!(message.contains("state.0.exp_avg"), "{message}");
            assert_eq!(f64s(&again), f64s(&w));
        }
    });
}

/// The expected learning rates are computed from the definitions of PyTorch's schedulers.
#[test]
fn schedules_follow_their_definitions() {
    let rates = |s: &dyn Schedule, steps: &[usize]| steps.iter().map(|&t| s.learning_rate(0.5, t)).collect::<Vec<_>>();
    let close = |got: Vec<f64>, want: &[f64]| {
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?} instead of {want:?}");
    };
    close(rates(&StepLr { step_size: 3, gamma: 0.1 }, &[0, 2, 3, 6]), &[0.5, 0.5, 0.05, 0.005]);
    let milestones = MultiStepLr { milestones: vec![2, 4], gamma: 0.5 };
    close(rates(&milestones, &[0, 1, 2, 3, 4, 9]), &[0.5, 0.5, 0.25, 0.25, 0.125, 0.125]);
    close(rates(&ExponentialLr { gamma: 0.9 }, &[0, 1, 2]), &[0.5, 0.45, 0.405]);
    close(rates(&CosineAnnealingLr { t_max: 4, eta_min: 0.1 }, &[0, 2, 4]), &[0.5, 0.3, 0.1]);
    close(rates(&LinearLr::default(), &[0, 5, 50]), &[0.5 / 3.0, 0.5, 0.5]);
    close(rates(&LinearLr { start_factor: 0.2, end_factor: 1.0, total_iters: 4 }, &[1, 2]), &[0.2, 0.3]);
    close(rates(&LambdaLr(|t| 1.0 / (1.0 + t as f64)), &[0, 1, 3]), &[0.5, 0.25, 0.125]);
    close(rates(&|base: f64, t: usize| base - t as f64, &[0, 2]), &[0.5, -1.5]);
    // The rate must peak at step 2 of ten, because pct_start * total_steps - 1 = 2.
    let cycle = OneCycleLr::new(1.0, 10);
    let down = |part: f64| 4e-6 + (1.0 - 4e-6) * (1.0 + (std::f64::consts::PI * part).cos()) / 2.0;
    close(rates(&cycle, &[0, 1, 2, 5, 9, 20]), &[0.04, 0.52, 1.0, down(3.0 / 7.0), 4e-6, 4e-6]);
    let both = SequentialLr::new(LinearLr { start_factor: 0.5, end_factor: 1.0, total_iters: 2 })
        .then(2, StepLr { step_size: 1, gamma: 0.5 });
    close(rates(&both, &[0, 1, 2, 3]), &[0.25, 0.375, 0.5, 0.25]);
}

#[test]
fn schedulers_set_every_group_and_can_be_saved() {
    let (mut a, mut b) = (leaf(&START, DType::F32, Device::Cpu), leaf(&START, DType::F32, Device::Cpu));
    let config = |lr| SgdConfig { lr, ..Default::default() };
    let mut sgd = Sgd::new(vec![&mut a], config(1.0)).unwrap().with_group(vec![&mut b], config(0.1)).unwrap();
    let mut scheduler =
        Scheduler::new(&mut sgd, LinearLr { start_factor: 0.5, end_factor: 1.0, total_iters: 2 }).unwrap();
    assert_eq!(sgd.learning_rates(), [0.5, 0.05]);
    scheduler.step(&mut sgd).unwrap();
    assert_eq!(sgd.learning_rates(), [0.75, 0.75 * 0.1]);
    let mut other = Scheduler::new(&mut sgd, LinearLr { start_factor: 0.5, end_factor: 1.0, total_iters: 2 }).unwrap();
    other.load_state_dict(&scheduler.state_dict().unwrap()).unwrap();
    assert_eq!(other.last_step(), 1);
    other.step(&mut sgd).unwrap();
    assert_eq!(sgd.learning_rates(), [1.0, 0.1]);
}

#[test]
fn gradient_norms_are_clipped_over_all_parameters() {
    each_device(|device| {
        for rehomed in [false, true] {
            let (mut a, mut b) = (leaf(&[3.0, -4.0], DType::F32, device), leaf(&[12.0], DType::F32, device));
            let _sgd = rehomed.then(|| Sgd::new(vec![&mut a, &mut b], SgdConfig::default()).unwrap());
            let unused = leaf(&[1.0], DType::F32, device);
            let set = || {
                a.zero_grad();
                b.zero_grad();
                let both = a.mul(&a).unwrap().sum((), false).unwrap().add(&b.mul(&b).unwrap().sum((), false).unwrap());
                both.unwrap().backward().unwrap(); // the gradients are [6, -8] and [24], whose total norm is 26
            };
            let grads = || [f64s(&a.grad().unwrap())[0], f64s(&a.grad().unwrap())[1], f64s(&b.grad().unwrap())[0]];
            let near = |got: [f64; 3], want: [f64; 3]| {
                assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-4), "{got:?} instead of {want:?}");
            };
            for (p, norm) in
                [(2.0, 26.0), (f64::INFINITY, 24.0), (1.0, 38.0), (3.0, (216.0f64 + 512.0 + 13824.0).cbrt())]
            {
                set();
                let (total, launches) = count_launches(|| clip_grad_norm_([&a, &b, &unused], norm / 2.0, p).unwrap());
                assert!(!rehomed || launches <= 6, "{launches} launches on {device}");
                assert!((f64s(&total).sum() - norm).abs() < 1e-3);
                near(grads(), [3.0, -4.0, 12.0]);
                clip_grad_norm_([&a, &b], 100.0, p).unwrap();
                near(grads(), [3.0, -4.0, 12.0]);
            }
            set();
            let (_, launches) = count_launches(|| clip_grad_value_([&a, &b], 7.0).unwrap());
            assert!(!rehomed || launches == 1, "{launches} launches on {device}");
            near(grads(), [6.0, -7.0, 7.0]);
            assert_eq!(f64s(&clip_grad_norm_([&unused], 1.0, 2.0).unwrap()).sum(), 0.0);
            assert!(clip_grad_norm_([&a], -1.0, 2.0).is_err() && clip_grad_norm_([&a], 1.0, 0.0).is_err());
        }
    });
}

/// Backward on two half batches, without zeroing in between, must give the gradients of the whole batch.
#[test]
fn gradients_accumulate_over_passes() {
    each_device(|device| {
        let data = Tensor::arange(0, 32, 1, device).unwrap().reshape([8, 4]).unwrap().mul_scalar(0.01).unwrap();
        let train = |parts: usize| {
            let mut w = leaf(&START, DType::F32, device);
            let mut adamw = AdamW::new(vec![&mut w], AdamWConfig::default()).unwrap();
            for _ in 0..3 {
                adamw.zero_grad();
                for part in data.chunk(parts, 0).unwrap() {
                    let loss = part.mul(&w).unwrap().tanh().unwrap().sum((), false).unwrap();
                    loss.div_scalar(8.0).unwrap().backward().unwrap();
                }
                adamw.step().unwrap();
            }
            f64s(&w)
        };
        let (whole, halves) = (train(1), train(2));
        assert!(whole.iter().zip(&halves).all(|(a, b)| (a - b).abs() < 1e-6), "{whole} and {halves} on {device}");
    });
}

/// A gradient of 2^-26 underflows in f16 unless the loss is scaled. A step with an overflow must be skipped.
#[test]
fn scaled_losses_neither_underflow_nor_overflow() {
    each_device(|device| {
        let mut w = leaf(&[1.0, 1.0], DType::F16, device);
        let lr = 2f64.powi(20);
        let mut sgd = Sgd::new(vec![&mut w], SgdConfig { lr, ..Default::default() }).unwrap();
        let config = GradScalerConfig { init_scale: 65536.0, growth_interval: 2, ..Default::default() };
        let mut scaler = GradScaler::new(config).unwrap();
        let loss = |w: &Tensor| {
            let wide = w.to_dtype(DType::F32).unwrap();
            wide.mul_scalar(2f64.powi(-26)).unwrap().sum((), false).unwrap()
        };
        loss(&w).backward().unwrap();
        assert_eq!(f64s(&w.grad().unwrap()).sum(), 0.0, "it underflows without a scaler");
        for scale in [65536.0, 65536.0, 131072.0] {
            assert_eq!(scaler.get_scale(), scale);
            sgd.zero_grad();
            scaler.scale(&loss(&w)).unwrap().backward().unwrap();
            assert!(scaler.step(&mut sgd).unwrap());
            scaler.update();
        }
        let before = f64s(&w);
        assert_eq!(before.iter().copied().collect::<Vec<_>>(), [1.0 - 3.0 / 64.0; 2], "divided in f32 on {device}");
        sgd.zero_grad();
        scaler.scale(&w.to_dtype(DType::F32).unwrap().sum((), false).unwrap()).unwrap().backward().unwrap();
        let scale = scaler.get_scale();
        assert!(!scaler.step(&mut sgd).unwrap(), "131072 is infinite in f16");
        scaler.update();
        assert_eq!(scaler.get_scale(), scale / 2.0);
        assert_eq!(f64s(&w), before, "the step was skipped on {device}");
        sgd.zero_grad();
        backward_of_ones(&w);
        scaler.unscale_(&sgd).unwrap();
        assert!(scaler.unscale_(&sgd).is_err(), "twice");
    });
}

/// With a weight decay of 0, infinite weights must not be multiplied by 0, which would give NaN (as in PyTorch).
#[test]
fn infinite_weights_stay_infinite_without_decay() {
    fn without<R: Rule + Clone>(rule: R) {
        each_device(|device| {
            let mut w = leaf(&[f64::INFINITY, 1.0], DType::F32, device);
            let mut optimizer = Fused::new(vec![&mut w], rule.clone()).unwrap();
            backward_of_ones(&w);
            optimizer.step().unwrap();
            let after = f64s(&w);
            assert!(after[0] == f64::INFINITY && after[1] < 1.0, "{}: {after:?} on {device}", R::NAME);
        });
    }
    without(SgdConfig { lr: 0.1, momentum: 0.5, ..Default::default() });
    without(AdamConfig::default());
    without(AdamWConfig { weight_decay: 0.0, ..Default::default() });
    without(RmsPropConfig::default());
    without(AdagradConfig::default());
    without(LionConfig::default());
}

fn backward_of_ones(w: &Tensor) {
    w.sum((), false).unwrap().backward().unwrap();
}
