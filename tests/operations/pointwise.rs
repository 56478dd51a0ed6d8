//! Elementwise operations that are not defined by a table row, and the behaviour of table rows for special values and dtypes.

use claystone::ops;
use claystone::{DType, Device, Error, Tensor, autocast, get_default_dtype, set_default_dtype};
use ndarray::{ArrayD, Axis, IxDyn, Slice};

use crate::common::{in_own_process, each_device, f64s, vec};
use crate::harness::{Case, case};

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [&[][..], &[0, 3], &[5, 7]] {
        for name in ["bitwise_not", "bitwise_not_"] {
            cases.push(case(name).input(shape).integers().with_reference(|x| vec![x[0].mapv(|x| -1.0 - x)]));
        }
        let same = |x: &[ArrayD<f64>]| x[0] == x[1];
        let verdict = |says: bool| vec![ArrayD::from_elem(IxDyn(&[]), f64::from(says))];
        for twice in [false, true] {
            // With `twice`, both operands are equal constants, because two generated operands always differ.
            let start = |name: &str| {
                let one = ArrayD::from_elem(IxDyn(shape), 1.0);
                let made = if twice { case(name).fixed(one.clone(), DType::F32) } else { case(name).input(shape) };
                if twice { made.fixed(one, DType::F32) } else { made.input(shape) }
            };
            cases.push(start("equal").with_reference(move |x| verdict(same(x))));
            cases.push(start("allclose").arg(0.0).arg(0.0).arg(false).with_reference(move |x| verdict(same(x))));
        }
        cases.push(case("positive").input(shape).with_reference(|x| vec![x[0].clone()]));
        let tenths = |x: &[ArrayD<f64>]| vec![x[0].mapv(|x| (x * 10.0).round_ties_even() / 10.0)];
        // The tolerance allows ties of tenths to be rounded either way.
        cases.push(case("round_decimals").input(shape).arg(1).tolerance(4.0).with_reference(tenths));
    }
    // PReLU with one weight for all elements or one weight per channel, also if the last dim has as many elements as there are
    // channels.
    for (shape, weights) in [
        (&[2, 3, 3][..], &[3][..]),
        (&[2, 3, 3], &[1]),
        (&[3, 3], &[3]),
        (&[2, 3, 4, 5], &[3]),
        (&[2, 1, 3], &[1]),
        (&[4], &[1]),
        (&[4], &[]),
        (&[], &[1]),
        (&[0, 3], &[3]),
        (&[2, 0, 3], &[0]),
    ] {
        cases.push(case("prelu").input(shape).input(weights).with_reference(|x| {
            let (of, only) = (&x[1], x[1].first().copied());
            let slope = |at: &IxDyn| if of.len() == 1 { only.unwrap_or_default() } else { of[[at[1]]] };
            let value = |at: IxDyn| if x[0][&at] > 0.0 { x[0][&at] } else { slope(&at) * x[0][&at] };
            vec![ArrayD::from_shape_fn(x[0].raw_dim(), value)]
        }));
    }
    for n in [6, 2, 0] {
        cases.push(case("glu").input(&[3, n]).arg(-1).with_reference(move |x| {
            let half = |a: usize, b: usize| x[0].slice_axis(Axis(1), Slice::from(a..b)).to_owned();
            vec![half(0, n / 2) / half(n / 2, n).mapv(|g| 1.0 + (-g).exp())]
        }));
    }
    cases
}

#[test]
fn errors_of_prelu_name_valid_weights() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, Device::Cpu).unwrap();
    for (x, weight) in [(&[2, 3, 4][..], &[4][..]), (&[2, 3, 4], &[3, 1]), (&[3], &[3]), (&[2, 3], &[1, 1]), (&[], &[0])] {
        let message = zeros(x).prelu(&zeros(weight)).unwrap_err().to_string();
        assert!(message.contains("one for each channel"), "{x:?} {weight:?}: {message}");
    }
    let halves = zeros(&[3]).to_dtype(DType::F16).unwrap();
    assert!(matches!(zeros(&[2, 3]).prelu(&halves), Err(Error::DTypeMismatch { .. })));
    let mixed = autocast(DType::BF16, || zeros(&[2, 3]).prelu(&halves)).unwrap();
    assert_eq!(mixed.dtype(), DType::BF16);
}

#[test]
fn type_promotion_matches_pytorch() {
    each_device(|d| {
        let of = |x: f64, shape: &[usize], dtype: DType| Tensor::full(shape, x, (dtype, d)).unwrap();
        let value = |t: &Tensor| (t.dtype(), f64s(t).iter().copied().next().unwrap());
        let (half, brain, whole) = (of(1.5, &[3], DType::F16), of(2.0, &[3], DType::BF16), of(3.0, &[3], DType::I64));
        assert_eq!(value(&half.add(&brain).unwrap()), (DType::F32, 3.5));
        assert_eq!(value(&whole.mul(&half).unwrap()), (DType::F16, 4.5));
        assert_eq!(value(&whole.sub(&of(1.0, &[3], DType::I32)).unwrap()), (DType::I64, 2.0));
        assert_eq!(value(&of(200.0, &[1], DType::U8).add(&of(100.0, &[1], DType::U8)).unwrap()), (DType::U8, 44.0));
        assert_eq!(value(&of(1.0, &[1], DType::Bool).add(&whole).unwrap()), (DType::I64, 4.0));
        assert_eq!(value(&half.mul(&of(2.0, &[], DType::F32)).unwrap()), (DType::F16, 3.0));
        assert_eq!(value(&whole.mul(&of(0.5, &[], DType::F32)).unwrap()), (DType::F32, 1.5));
        assert_eq!(value(&whole.mul_scalar(0.5).unwrap()), (DType::F32, 1.5));
        assert_eq!(value(&whole.add_scalar(2).unwrap()), (DType::I64, 5.0));
        assert_eq!(value(&whole.div_scalar(2).unwrap()), (DType::F32, 1.5));
        assert_eq!(value(&whole.gt_scalar(2.5).unwrap()), (DType::Bool, 1.0));
        assert_eq!(value(&whole.le(&of(2.5, &[], DType::F32)).unwrap()), (DType::Bool, 0.0));
        assert_eq!(value(&whole.clamp(0.5, 2.5).unwrap()), (DType::F32, 2.5));
        let target = of(1.0, &[3], DType::F16);
        target.add_(&of(0.5, &[3], DType::F32)).unwrap().mul_(&whole).unwrap();
        assert_eq!(value(&target), (DType::F16, 4.5));
        assert!(matches!(whole.add_(&half), Err(Error::Invalid { .. })));
        if d.info().unwrap().fp64 {
            assert_eq!(value(&half.mul(&of(2.0, &[], DType::F64)).unwrap()), (DType::F16, 3.0));
            assert_eq!(value(&half.mul(&of(2.0, &[3], DType::F64)).unwrap()), (DType::F64, 3.0));
        }
        // The gradient of each operand has the dtype of that operand.
        let (a, b) = (half.requires_grad_(true).unwrap(), brain.requires_grad_(true).unwrap());
        a.mul(&b).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(value(&a.grad().unwrap()), (DType::F16, 2.0));
        assert_eq!(value(&b.grad().unwrap()), (DType::BF16, 1.5));
    });
}

/// Powers with exponents that PyTorch computes as products or roots, and powers with other exponents.
#[test]
fn small_powers_are_products_and_roots() {
    let positive = [0.25f32, 1.0, 1.5, 9.0, 1e-3, 700.0, 2.0];
    let signed = [-0.25f32, 1.5, -3.0, 7.0, -1e3, 0.1, -1.0];
    let close = |got: f64, right: f64| (got - right).abs() <= 1e-6 * right.abs();
    each_device(|d| {
        for exponent in [2.0f64, 0.5, -0.5, -1.0, 3.0, -2.0, 1.5, 4.0] {
            let given = if exponent.fract() == 0.0 { signed } else { positive };
            let x = Tensor::from_slice(&given, 7, d).unwrap().requires_grad_(true).unwrap();
            let y = x.pow_scalar(exponent).unwrap();
            y.sum((), false).unwrap().backward().unwrap();
            let (y, slope) = (f64s(&y), f64s(&x.grad().unwrap()));
            let in_place = f64s(x.detach().pow_scalar_(exponent).unwrap());
            for (i, x) in given.into_iter().map(f64::from).enumerate() {
                assert!(close(y[i], x.powf(exponent)) && close(in_place[i], y[i]), "{x} to {exponent} on {d}: {}", y[i]);
                assert!(close(slope[i], exponent * x.powf(exponent - 1.0)), "slope of {x} to {exponent}: {}", slope[i]);
            }
        }
        let whole = Tensor::from_slice(&[3i64, -5, 1 << 40], 3, d).unwrap();
        let square = whole.pow_scalar(2).unwrap();
        assert_eq!(square.to_vec::<i64>().unwrap(), [9, 25, 0]);
        assert_eq!(whole.pow_scalar(3).unwrap().to_vec::<i64>().unwrap(), [27, -125, 0]);
        // The power equals the product in every bit, also for NaN and infinities.
        let given = [0.1f32, -1.7, 3.3e12, -0.0, f32::NAN, f32::NEG_INFINITY, 1e13];
        let cube = Tensor::from_slice(&given, 7, d).unwrap().pow_scalar(3).unwrap().to_vec::<f32>().unwrap();
        for (x, got) in given.into_iter().zip(cube) {
            assert!(got.to_bits() == (x * x * x).to_bits() || got.is_nan() && x.is_nan(), "the cube of {x} on {d}: {got}");
        }
        assert_eq!(whole.pow_scalar(2.0).unwrap().dtype(), DType::F32);
        let root = whole.narrow(0, 0, 1).unwrap().pow_scalar(0.5).unwrap();
        assert!(root.dtype() == DType::F32 && close(f64s(&root)[[0]], 3f64.sqrt()));
    });
}

#[test]
fn default_dtype_can_be_changed() {
    if !in_own_process("pointwise::default_dtype_can_be_changed") {
        return;
    }
    assert_eq!(get_default_dtype(), DType::F32);
    set_default_dtype(DType::BF16).unwrap();
    assert!(set_default_dtype(DType::I64).is_err());
    each_device(|d| {
        let whole = Tensor::ones(2, (DType::I64, d)).unwrap();
        assert_eq!(Tensor::zeros(2, d).unwrap().dtype(), DType::BF16);
        assert_eq!(whole.exp().unwrap().dtype(), DType::BF16);
        assert_eq!(whole.mul_scalar(0.5).unwrap().dtype(), DType::BF16);
    });
}

#[test]
fn special_values_match_pytorch() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let same = |name: &str, got: &Tensor, right: &[f32]| {
        let got = got.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
        let equal = |(a, b): (&f32, &f32)| a == b && a.is_sign_negative() == b.is_sign_negative() || a.is_nan() && b.is_nan();
        assert!(got.len() == right.len() && got.iter().zip(right).all(equal), "{name}: {got:?} instead of {right:?}");
    };
    each_device(|d| {
        let of = |x: &[f32]| Tensor::from_slice(x, x.len(), d).unwrap();
        let x = of(&[nan, inf, -inf, 0.0, -0.0, -1.0]);
        same("nan_to_num", &x.nan_to_num(7.0, 8.0, -8.0).unwrap(), &[7.0, 8.0, -8.0, 0.0, -0.0, -1.0]);
        same("isposinf", &x.isposinf().unwrap(), &[0., 1., 0., 0., 0., 0.]);
        same("isneginf", &x.isneginf().unwrap(), &[0., 0., 1., 0., 0., 0.]);
        same("signbit", &x.narrow(0, 1, 5).unwrap().signbit().unwrap(), &[0., 1., 0., 1., 1.]);
        same("fmax", &x.fmax(&of(&[2.0, nan, nan, -0.0, 1.0, -2.0])).unwrap(), &[2.0, inf, -inf, 0.0, 1.0, -1.0]);
        same("fmin", &x.fmin(&of(&[2.0, nan, nan, 1.0, 1.0, -2.0])).unwrap(), &[2.0, inf, -inf, 0.0, -0.0, -2.0]);
        same("copysign", &of(&[1.0, -2.0, 0.0, inf]).copysign(&of(&[-0.0, 3.0, -1.0, -1.0])).unwrap(), &[-1., 2., -0., -inf]);
        same("heaviside", &x.heaviside(&of(&[9.0])).unwrap(), &[0.0, 1.0, 0.0, 9.0, 9.0, 0.0]);
        same("sinc", &of(&[0.0, inf]).sinc().unwrap(), &[1.0, nan]);
        same("erfinv", &of(&[1.0, -1.0, 1.5, 0.0, nan]).erfinv().unwrap(), &[inf, -inf, nan, 0.0, nan]);
        same("erfc", &of(&[inf, -inf, 0.0, nan]).erfc().unwrap(), &[0.0, 2.0, 1.0, nan]);
        same("lgamma", &of(&[0.0, -1.0, inf, nan]).lgamma().unwrap(), &[inf, inf, inf, nan]);
        same("digamma", &of(&[-1.0, inf, nan]).digamma().unwrap(), &[nan, inf, nan]);
        same("entr", &of(&[0.0, -1.0, 1.0, nan]).entr().unwrap(), &[0.0, -inf, -0.0, nan]);
        same("xlogy", &of(&[0.0, 0.0, 2.0]).xlogy(&of(&[0.0, nan, 1.0])).unwrap(), &[0.0, nan, 0.0]);
        same("logit", &of(&[0.0, 1.0, 2.0]).logit().unwrap(), &[-inf, inf, nan]);
        same("logaddexp2", &of(&[-inf, inf]).logaddexp2(&of(&[-inf, 1.0])).unwrap(), &[-inf, inf]);
        let (a, b) = (of(&[1.0, nan, inf, inf, 1.0]), of(&[1.0001, nan, inf, -inf, inf]));
        same("isclose", &a.isclose(&b, 1e-3, 0.0, false).unwrap(), &[1., 0., 1., 0., 0.]);
        assert!(!a.allclose(&a, 0.0, 0.0, false).unwrap() && a.allclose(&a, 0.0, 0.0, true).unwrap());
        assert!(b.narrow(0, 2, 3).unwrap().equal(&b.narrow(0, 2, 3).unwrap()).unwrap() && !a.equal(&a).unwrap());
        assert!(!of(&[1.0]).equal(&of(&[1.0, 1.0])).unwrap());
    });
}

/// Arguments around 20, where another series is used, and large arguments.
#[test]
fn bessel_functions_of_large_arguments() {
    each_device(|d| {
        let (dtype, tolerance) = if d.info().unwrap().fp64 { (DType::F64, 1e-13) } else { (DType::F32, 2e-6) };
        let points = [0.0, 1e-3, 12.5, 19.75, 20.0, 20.25, 25.0, 60.0, -60.0, -20.5, -3.0];
        let x = Tensor::from_slice(&points, points.len(), d).unwrap().to_dtype(dtype).unwrap();
        for (order, got) in [(0, x.i0().unwrap()), (1, x.i1().unwrap())] {
            for (x, got) in f64s(&x).iter().zip(&f64s(&got)) {
                let series = (1..200).rev().fold(1.0, |sum, k| 1.0 + sum * x * x / f64::from(4 * k * (k + order)));
                let right = if order == 0 { series } else { x / 2.0 * series };
                assert!((got - right).abs() <= tolerance * right.abs(), "order {order} at {x} on {d}: {got}, not {right}");
            }
        }
        let odd = Tensor::from_slice(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY], 3, d).unwrap();
        assert!(vec(&odd.i0().unwrap())[0].is_nan() && vec(&odd.i1().unwrap())[0].is_nan());
        assert!(vec(&odd.angle().unwrap())[0].is_nan() && vec(&odd.angle().unwrap())[2] == std::f32::consts::PI);
    });
}

#[test]
fn aliases_are_the_same_operation() {
    let aliases: Vec<_> = ops::operations().iter().filter(|op| op.row().is_some_and(|r| r.name != op.name)).collect();
    let aliases: Vec<_> = aliases.into_iter().filter(|op| op.kind != ops::Kind::InPlace).collect();
    assert!(aliases.iter().any(|op| op.name == "absolute") && aliases.len() >= 20);
    let x = Tensor::from_slice(&[1.25f32, 0.5, 2.0], 3, Device::Cpu).unwrap();
    assert_eq!(vec(&x.neg().unwrap().absolute().unwrap()), vec(&x));
    assert_eq!(vec(&x.true_divide(&x).unwrap()), [1.0; 3]);
    for op in aliases {
        let row = op.row().unwrap();
        let inputs: Vec<&Tensor> = (0..row.arity).map(|_| &x).collect();
        let same = |name: &str| f64s(&ops::call(name, &inputs, &[]).unwrap()[0]).mapv(f64::to_bits);
        assert_eq!(same(op.name), same(row.name), "{}", op.name);
        assert!(!op.is_replaceable() && op.torch == op.name);
    }
}

/// i8 and i16 compute as i64 and wrap when stored; floats saturate; sums and products of matrices are exact or wrap.
#[test]
fn small_signed_integers_compute_as_in_pytorch() {
    each_device(|d| {
        let bytes = |x: &[i8]| Tensor::from_slice(x, x.len(), d).unwrap();
        let words = |x: &[i16]| Tensor::from_slice(x, x.len(), d).unwrap();
        let (a, b) = (bytes(&[100, -128, 7, -7]), bytes(&[100, -1, -2, 2]));
        let of = |t: Tensor| t.to_vec::<i8>().unwrap();
        assert_eq!(of(a.add(&b).unwrap()), [-56, 127, 5, -5]);
        assert_eq!(of(a.mul(&b).unwrap()), [16, -128, -14, -14]);
        assert_eq!(of(a.div_trunc(&b).unwrap()), [1, -128, -3, -3]);
        assert_eq!(of(a.floor_divide(&b).unwrap()), [1, -128, -4, -4]);
        assert_eq!(of(a.abs().unwrap()), [100, -128, 7, 7]);
        assert_eq!(of(a.neg().unwrap()), [-100, -128, -7, 7]);
        assert_eq!(of(a.bitwise_not().unwrap()), [-101, 127, -8, 6]);
        assert_eq!(of(a.bitwise_right_shift(&bytes(&[1, 1, 9, 9])).unwrap()), [50, -64, 0, -1]);
        assert_eq!(a.div(&b).unwrap().dtype(), DType::F32);
        let sum = a.sum((), false).unwrap();
        assert_eq!((sum.dtype(), sum.item::<i64>().unwrap()), (DType::I64, -28));
        let mixed = a.add(&Tensor::from_slice(&[200u8; 4], 4, d).unwrap()).unwrap();
        assert_eq!((mixed.dtype(), mixed.to_vec::<i16>().unwrap()), (DType::I16, vec![300, 72, 207, 193]));
        assert_eq!(words(&[32_767, -32_768]).add_scalar(1).unwrap().to_vec::<i16>().unwrap(), [-32_768, -32_767]);
        assert_eq!(words(&[300]).to_dtype(DType::I8).unwrap().to_vec::<i8>().unwrap(), [44]);
        let floats = Tensor::from_slice(&[1e9f32, -1e9, -1.9, f32::NAN], 4, d).unwrap();
        assert_eq!(of(floats.to_dtype(DType::I8).unwrap()), [127, -128, -1, 0]);
        assert_eq!(floats.to_dtype(DType::I16).unwrap().to_vec::<i16>().unwrap(), [32_767, -32_768, -1, 0]);
        let square = a.reshape([2, 2]).unwrap();
        assert_eq!(of(square.matmul(&square).unwrap().reshape(4).unwrap()), [-112, -128, -117, -79]);
        let square = words(&[300, -128, 7, -7]).reshape([2, 2]).unwrap();
        assert_eq!(square.matmul(&square).unwrap().reshape(4).unwrap().to_vec::<i16>().unwrap(), [23_568, 28_032, 2_051, -847]);
    });
}

#[test]
fn bit_operations_support_every_integer_dtype() {
    each_device(|d| {
        let of = |x: &[i64], dtype: DType| Tensor::from_slice(x, x.len(), d).unwrap().to_dtype(dtype).unwrap();
        let got = |t: &Tensor| t.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap();
        let shifted = of(&[1, 1, -1, 3], DType::I32).bitwise_left_shift(&of(&[31, 40, 1, -1], DType::I32)).unwrap();
        assert_eq!(got(&shifted), [i64::from(i32::MIN), 0, -2, 0]);
        let shifted = of(&[-8, -8, 200, 7], DType::I64).bitwise_right_shift(&of(&[1, 99, 3, -1], DType::I64)).unwrap();
        assert_eq!(got(&shifted), [-4, -1, 25, 0]);
        assert_eq!(got(&of(&[0, 255, 5], DType::U8).bitwise_not().unwrap()), [255, 0, 250]);
        let (yes, no) = (of(&[1, 1, 0], DType::Bool), of(&[1, 0, 0], DType::Bool));
        assert_eq!((got(&yes.bitwise_xor(&no).unwrap()), got(&no.bitwise_not().unwrap())), (vec![0, 1, 0], vec![0, 1, 1]));
        assert_eq!(yes.bitwise_and(&no).unwrap().dtype(), DType::Bool);
        assert_eq!(got(&of(&[12, -18, 0], DType::I32).gcd(&of(&[18, 12, 0], DType::I64)).unwrap()), [6, 6, 0]);
        assert_eq!(got(&of(&[4, -6, 0], DType::I64).lcm(&of(&[6, 4, 5], DType::I64)).unwrap()), [12, 12, 0]);
        assert_eq!(got(&of(&[7, -7], DType::I64).div_trunc(&of(&[2, 2], DType::I64)).unwrap()), [3, -3]);
        assert_eq!(got(&of(&[7, -7], DType::I64).floor_divide_scalar(2).unwrap()), [3, -4]);
        assert!(matches!(yes.bitwise_and(&Tensor::ones(3, d).unwrap()), Err(Error::UnsupportedDType { .. })));
        let flags = of(&[0, 3, 5], DType::I64);
        flags.eq_scalar_(3).unwrap();
        assert_eq!((got(&flags), flags.dtype()), (vec![0, 1, 0], DType::I64));
    });
}

#[test]
fn assignment_operators_work_in_place() {
    let mut x = Tensor::arange(0, 3, 1, Device::Cpu).unwrap();
    let seen = x.shallow_clone();
    x += 1.0;
    x *= &Tensor::full(3, 2.0, Device::Cpu).unwrap();
    x -= 2i64;
    x /= Tensor::full((), 4.0, Device::Cpu).unwrap();
    assert_eq!(vec(&seen), [0.0, 0.5, 1.0]);
}
