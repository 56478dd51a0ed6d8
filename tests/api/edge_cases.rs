//! Edge cases of formulas: signed zeros, lower bounds above upper bounds, constant rows, scalars. The expected values are
//! PyTorch's.

use claystone::autograd::{GradOptions, grad, grad_with_options};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Error, LossReduction, Result, Tensor, no_grad};

use crate::common::{each_device, vec};

fn tensor(values: &[f32], device: Device) -> Tensor {
    Tensor::from_slice(values, values.len(), device).unwrap()
}

#[test]
fn atan2_at_signed_zeros() {
    use std::f32::consts::{FRAC_PI_2, PI};
    each_device(|d| {
        let (y, x) = (tensor(&[1.0, -1.0, 1.0, 0.0, 0.0], d), tensor(&[-0.0, -0.0, 0.0, 0.0, -2.0], d));
        let angles = vec(&y.atan2(&x).unwrap());
        for (got, right) in angles.iter().zip([FRAC_PI_2, -FRAC_PI_2, FRAC_PI_2, 0.0, PI]) {
            assert!((got - right).abs() < 1e-6, "{angles:?}");
        }
        let inf = f32::INFINITY;
        let (y, x) = (tensor(&[-0.0, -0.0, 0.0, inf, -inf, inf], d), tensor(&[-2.0, -0.0, -0.0, inf, -inf, -inf], d));
        let angles = vec(&y.atan2(&x).unwrap());
        for (got, right) in angles.iter().zip([-PI, -PI, PI, PI / 4.0, -0.75 * PI, 0.75 * PI]) {
            assert!((got - right).abs() < 1e-6, "{angles:?}");
        }
        let origin = tensor(&[0.0], d).requires_grad_(true).unwrap();
        origin.atan2(&tensor(&[0.0], d)).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&origin.grad().unwrap()), [0.0]);
    });
}

#[test]
fn hypot_and_threshold_of_nan() {
    each_device(|d| {
        let (a, b) = (tensor(&[f32::NEG_INFINITY, f32::NAN, 3.0], d), tensor(&[f32::NAN, 1.0, -4.0], d));
        let sides = vec(&a.hypot(&b).unwrap());
        assert!(sides[0] == f32::INFINITY && sides[1].is_nan() && sides[2] == 5.0, "{sides:?}");
        let shrunk = vec(&tensor(&[f32::NAN, 0.25, -1.0], d).softshrink(0.5).unwrap());
        assert!(shrunk[0].is_nan() && shrunk[1..] == [0.0, -0.5], "{shrunk:?}");
    });
}

#[test]
fn hardswish_gradients_at_infinity() {
    each_device(|d| {
        let x = tensor(&[f32::NEG_INFINITY, -3.5, 0.0, 3.5, f32::INFINITY], d).requires_grad_(true).unwrap();
        x.hardswish().unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), [0.0, 0.0, 0.5, 1.0, 1.0]);
    });
}

#[test]
fn xlogy_has_a_gradient_at_zero() {
    each_device(|d| {
        let x = Tensor::zeros(3, d).unwrap().requires_grad_(true).unwrap();
        let y = tensor(&[2.0, 0.5, 0.0], d);
        for (of, right) in
            [(x.xlogy(&y), [2f32.ln(), 0.5f32.ln(), 0.0]), (x.xlog1py(&y), [3f32.ln(), 1.5f32.ln(), 0.0])]
        {
            let slopes = vec(&grad(&[&of.unwrap().sum((), false).unwrap()], &[&x]).unwrap()[0]);
            assert!(slopes.iter().zip(right).all(|(g, r)| (g - r).abs() < 1e-6), "{slopes:?}");
        }
    });
}

/// If these functions were computed from |x|, they would have no second derivative at 0, although the functions themselves have
/// one.
#[test]
fn smooth_functions_have_second_derivatives_at_zero() {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [(&str, Function, f32, f32); 9] = [
        ("smooth_l1_loss", |x| x.smooth_l1_loss(&x.full_like(2)?, 0.5, LossReduction::Sum), 2.0, 2.0),
        ("huber_loss", |x| x.huber_loss(&x.full_like(2)?, 0.5, LossReduction::Sum), 2.0, 1.0),
        ("sinc", |x| x.sinc(), 0.0, -std::f32::consts::PI.powi(2) / 3.0),
        ("logsigmoid", |x| x.logsigmoid(), 0.0, -0.25),
        ("logaddexp", |x| x.logaddexp(&x.full_like(2)?), 2.0, 0.25),
        ("logaddexp2", |x| x.logaddexp2(&x.full_like(2)?), 2.0, 0.25 * std::f32::consts::LN_2),
        ("i0", |x| x.i0(), 0.0, 0.5),
        ("erfinv", |x| x.erfinv(), 0.0, 0.0),
        (
            "binary_cross_entropy_with_logits",
            |x| x.binary_cross_entropy_with_logits(&x.ones_like()?, None, None, LossReduction::Sum),
            0.0,
            0.25,
        ),
    ];
    each_device(|d| {
        for (name, function, at, right) in functions {
            let x = tensor(&[at], d).requires_grad_(true).unwrap();
            let options = GradOptions { create_graph: true, ..Default::default() };
            let y = function(&x).unwrap().sum((), false).unwrap();
            let slope = grad_with_options(&[&y], &[&x], options).unwrap().remove(0).unwrap();
            let second = vec(&grad(&[&slope.sum((), false).unwrap()], &[&x]).unwrap()[0]);
            assert!((second[0] - right).abs() < 1e-6, "{name}: {second:?} on {d}, not {right}");
        }
    });
}

#[test]
fn crossed_clamp_bounds_give_the_upper_bound() {
    each_device(|d| {
        assert_eq!(vec(&tensor(&[0.0, 3.0, 7.0], d).clamp(5.0, 1.0).unwrap()), [1.0, 1.0, 1.0]);
        let bounded = vec(&tensor(&[f32::NAN, -9.0, 2.0, 9.0], d).clamp(-1.0, 3.0).unwrap());
        assert!(bounded[0].is_nan() && bounded[1..] == [-1.0, 2.0, 3.0], "{bounded:?}");
    });
}

#[test]
fn logarithms_and_hyperbolic_functions_at_their_limits() {
    each_device(|d| {
        let logs = vec(&tensor(&[8.0, 0.25, 0.0, f32::INFINITY, -1.0], d).log2().unwrap());
        assert!(logs[..4] == [3.0, -2.0, f32::NEG_INFINITY, f32::INFINITY] && logs[4].is_nan(), "{logs:?}");
        let tens = vec(&tensor(&[1000.0, 1.0, 0.0], d).log10().unwrap());
        assert!((tens[0] - 3.0).abs() < 1e-6 && tens[1..] == [0.0, f32::NEG_INFINITY], "{tens:?}");
        // exp(89) overflows f32, but exp(89) / 2 does not, so the implementation must not compute exp(89) first.
        for (got, right) in [
            (tensor(&[89.0, -89.0, 30.0], d).sinh(), [89f64.sinh(), -89f64.sinh(), 30f64.sinh()]),
            (tensor(&[89.0, -89.0, 30.0], d).cosh(), [89f64.cosh(), 89f64.cosh(), 30f64.cosh()]),
        ] {
            for (got, right) in vec(&got.unwrap()).into_iter().zip(right) {
                assert!((f64::from(got) / right - 1.0).abs() < 2e-5, "{got} is not {right}");
            }
        }
        let products = vec(&tensor(&[0.0, 0.0], d).xlogy(&tensor(&[f32::NAN, 0.0], d)).unwrap());
        assert!(products[0].is_nan() && products[1] == 0.0, "{products:?}");
    });
}

#[test]
fn constant_rows_have_a_zero_std_gradient() {
    each_device(|d| {
        let x = Tensor::from_slice(&[2f32, 2.0, 2.0, 1.0, 2.0, 6.0], [2, 3], d).unwrap().requires_grad_(true).unwrap();
        let std = x.std(1, 1, false).unwrap();
        assert!((vec(&std)[1] - 7f32.sqrt()).abs() < 1e-6 && vec(&std)[0] == 0.0);
        std.sum((), false).unwrap().backward().unwrap();
        let gradient = vec(&x.grad().unwrap());
        // The expected gradient is (x - mean) / (2 std).
        let right = [0.0, 0.0, 0.0, -2.0, -1.0, 3.0].map(|dev| dev / (2.0 * 7f32.sqrt()));
        assert!(gradient.iter().zip(right).all(|(g, r)| (g - r).abs() < 1e-6), "{gradient:?}");
    });
}

#[test]
fn scalars_can_be_reduced_over_dim_zero() {
    each_device(|d| {
        let x = Tensor::full((), 3.0, d).unwrap();
        assert_eq!(x.sum(-1, false).unwrap().item::<f32>().unwrap(), 3.0);
        assert_eq!(x.max(0, true).unwrap().shape().dims(), [0usize; 0]);
        let error = x.sum(1, false).unwrap_err();
        assert_eq!(error.to_string(), "sum: dimension 1 is out of range: the tensor is a scalar");
    });
}

#[test]
fn integer_inputs_are_converted_for_float_outputs() {
    each_device(|d| {
        let bytes = Tensor::from_slice(&[0u8, 51, 255], 3, d).unwrap();
        let out = Tensor::zeros(3, d).unwrap();
        Tensor::map_into(&[&bytes], &[(1.0 / 255.0).into()], &[&out], |e, s| vec![&e[0] * &s[0]]).unwrap();
        assert!(vec(&out).iter().zip([0.0, 0.2, 1.0]).all(|(a, b)| (a - b).abs() < 1e-6), "{out}");
        Tensor::map_into(&[&bytes], &[], &[&out], |e, _| vec![&e[0] / 255.0]).unwrap();
        assert!((vec(&out)[1] - 0.2).abs() < 1e-6, "{out}");
        let whole = Tensor::zeros(3, (DType::U8, d)).unwrap();
        let refused = Tensor::map_into(&[&bytes], &[0.5.into()], &[&whole], |e, s| vec![&e[0] * &s[0]]);
        assert!(matches!(refused, Err(Error::Invalid { op: "map_into", .. })), "{refused:?}");
    });
}

#[test]
fn errors_name_the_called_method() {
    each_device(|d| {
        let whole = Tensor::zeros([2, 3], (DType::I64, d)).unwrap();
        let (a, table) = (Tensor::zeros([2, 3], d).unwrap(), Tensor::zeros([4, 2], d).unwrap());
        let cases: [(&str, Result<Tensor>); 6] = [
            ("var", whole.var((), 1, false)),
            ("std", whole.std((), 1, false)),
            ("stack", Tensor::stack(&[&a], 7)),
            ("mse_loss", whole.mse_loss(&whole)),
            ("linear_map", a.linear_map(&table, None, |x| x.clone())),
            ("embedding", Tensor::zeros((), d).unwrap().embedding(&whole)),
        ];
        for (name, result) in cases {
            let text = result.unwrap_err().to_string();
            assert!(text.starts_with(&format!("{name}: ")), "{text}");
        }
    });
}

/// If 16-bit parameters are changed between steps, the optimizer's f32 copies do not overwrite the change.
#[test]
fn parameters_can_be_changed_between_steps() {
    each_device(|d| {
        let made = || Tensor::full(4, 2.0, (DType::BF16, d)).unwrap().requires_grad_(true).unwrap();
        let (mut a, mut b) = (made(), made());
        let optimizers: [(&Tensor, Box<dyn Optimizer>); 2] = {
            let sgd = Sgd::new(vec![&mut a], SgdConfig { lr: 0.5, ..Default::default() }).unwrap();
            let config = AdamWConfig { lr: 0.5, weight_decay: 0.0, ..Default::default() };
            let adamw = AdamW::new(vec![&mut b], config).unwrap();
            [(&a, Box::new(sgd)), (&b, Box::new(adamw))]
        };
        for (w, mut optimizer) in optimizers {
            let mut step = || {
                optimizer.zero_grad();
                w.sum((), false).unwrap().backward().unwrap();
                optimizer.step().unwrap();
            };
            step();
            no_grad(|| w.fill_(8.0)).unwrap();
            step();
            let after = w.to_dtype(DType::F32).unwrap();
            assert!(vec(&after).iter().all(|x| (x - 7.5).abs() < 0.05), "{after}");
        }
    });
}

/// AdamW counts the steps of each parameter separately, so a parameter's first update has step number 1 even if other parameters
/// were updated before.
#[test]
fn adamw_counts_the_steps_of_each_parameter() {
    each_device(|d| {
        let made = || Tensor::zeros(2, d).unwrap().requires_grad_(true).unwrap();
        let (mut early, mut late) = (made(), made());
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.0, ..Default::default() };
        let mut adamw = AdamW::new(vec![&mut early, &mut late], config).unwrap();
        for step in 0..50 {
            adamw.zero_grad();
            let loss = early.sum((), false).unwrap();
            let loss = if step == 49 { loss.add(&late.sum((), false).unwrap()).unwrap() } else { loss };
            loss.backward().unwrap();
            adamw.step().unwrap();
        }
        // With a constant gradient, each AdamW step moves a parameter by the learning rate.
        assert!(vec(&early).iter().all(|x| (x + 5.0).abs() < 1e-3), "{early}");
        assert!(vec(&late).iter().all(|x| (x + 0.1).abs() < 1e-5), "{late}");
    });
}
