//! Operations that create tensors, compared with loops. Random numbers are checked by their statistics.

use claystone::ops::Argument;
use claystone::{DType, Device, Error, Generator, Result, Tensor, manual_seed, with_generator};
use ndarray::{ArrayD, Axis, arr1};

use crate::common::{each_device, f64s, vec};
use crate::harness::{Case, TESTED_DEVICE, case};
use crate::views::built;

/// Returns a case of an operation that creates a tensor with the tested dtype on the tested device.
fn made(name: &str, arguments: &[Argument]) -> Case {
    let case = arguments.iter().fold(case(name), |case, a| case.arg(a.clone()));
    case.arg(DType::F32).arg(TESTED_DEVICE)
}

fn sizes(shape: &[usize]) -> Argument {
    shape.into()
}

fn constants() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [&[][..], &[0, 3], &[2, 3]] {
        let of = |value: f64| {
            let shape = shape.to_vec();
            move |_: &[ArrayD<f64>]| vec![built(&shape, |_| value)]
        };
        cases.push(made("zeros", &[sizes(shape)]).with_reference(of(0.0)));
        cases.push(made("ones", &[sizes(shape)]).with_reference(of(1.0)));
        cases.push(made("full", &[sizes(shape), 1.into()]).with_reference(of(1.0)));
        cases.push(case("zeros_like").input(shape).with_reference(of(0.0)));
        cases.push(case("ones_like").input(shape).with_reference(of(1.0)));
        cases.push(case("full_like").input(shape).arg(1).with_reference(of(1.0)));
        // The contents of an empty tensor are unspecified, so `empty` is only compared for shapes without elements.
        if shape.contains(&0) {
            cases.push(made("empty", &[sizes(shape)]).with_reference(of(0.0)));
            cases.push(case("empty_like").input(shape).with_reference(of(0.0)));
        }
    }
    for n in [0, 1, 4] {
        cases.push(made("eye", &[n.into()]).with_reference(move |_| vec![built(&[n, n], |i| f64::from(i[0] == i[1]))]));
    }
    for [n, m] in [[2, 3], [3, 2], [0, 2], [1, 1]] {
        let identity = move |_: &[ArrayD<f64>]| vec![built(&[n, m], |i| f64::from(i[0] == i[1]))];
        cases.push(made("eye", &[sizes(&[n, m])]).with_reference(identity));
    }
    cases
}

fn sequences() -> Vec<Case> {
    let mut cases = Vec::new();
    let whole = |a: i64, b: i64, s: i64| made("arange", &[a.into(), b.into(), s.into()]);
    cases.push(whole(2, 9, 3).with_reference(|_| vec![arr1(&[2.0, 5.0, 8.0]).into_dyn()]));
    cases.push(whole(9, 2, -3).with_reference(|_| vec![arr1(&[9.0, 6.0, 3.0]).into_dyn()]));
    cases.push(whole(4, 4, 1).with_reference(|_| vec![built(&[0], |_| 0.0)]));
    cases.push(made("arange", &[0.5.into(), 2.0.into(), 0.5.into()]).floats().with_reference(|_| vec![arr1(&[0.5, 1.0, 1.5]).into_dyn()]));
    let steps = |n: usize| made("linspace", &[1.0.into(), 9.0.into(), n.into()]);
    cases.push(steps(5).with_reference(|_| vec![arr1(&[1.0, 3.0, 5.0, 7.0, 9.0]).into_dyn()]));
    cases.push(steps(1).with_reference(|_| vec![arr1(&[1.0]).into_dyn()]));
    cases.push(steps(0).with_reference(|_| vec![built(&[0], |_| 0.0)]));
    let powers = |n: usize| made("logspace", &[0.0.into(), 3.0.into(), n.into(), 2.0.into()]);
    cases.push(powers(4).with_reference(|_| vec![arr1(&[1.0, 2.0, 4.0, 8.0]).into_dyn()]));
    for (rows, columns, offset) in [(3, 4, 0), (3, 2, -1), (2, 5, 2), (0, 3, 0), (3, 0, 0), (2, 2, -9), (2, 2, 9)] {
        let kept = move |lower: bool| {
            let all = (0..rows).flat_map(move |r| (0..columns).map(move |c| (r, c)));
            let kept: Vec<_> = all.filter(|(r, c): &(i64, i64)| if lower { c - r <= offset } else { c - r >= offset }).collect();
            vec![built(&[2, kept.len()], |i| [kept[i[1]].0, kept[i[1]].1][i[0]] as f64)]
        };
        let of = |name: &str| case(name).arg(rows).arg(columns).arg(offset).arg(TESTED_DEVICE);
        cases.push(of("tril_indices").with_reference(move |_| kept(true)));
        cases.push(of("triu_indices").with_reference(move |_| kept(false)));
    }
    cases
}

pub fn cases() -> Vec<Case> {
    [constants(), sequences(), draws()].into_iter().flatten().collect()
}

/// Returns cases of random operations whose arguments allow only one result.
fn draws() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [[2, 3], [0, 3]] {
        let of = move |value: f64| move |_: &[ArrayD<f64>]| vec![built(&shape, |_| value)];
        cases.push(made("randint", &[1.into(), 2.into(), sizes(&shape)]).with_reference(of(1.0)));
        cases.push(case("randint_like").input(&shape).arg(1).arg(2).with_reference(of(1.0)));
        cases.push(case("uniform_").input(&shape).arg(1.5).arg(1.5).with_reference(of(1.5)));
        cases.push(case("normal_").input(&shape).arg(-1.0).arg(0.0).with_reference(of(-1.0)));
        cases.push(case("exponential_").input(&shape).arg(f64::INFINITY).with_reference(of(0.0)));
        cases.push(case("bernoulli_").input(&shape).arg(1.0).with_reference(of(1.0)));
        cases.push(case("bernoulli").input_in(&shape, 1.0..2.0).with_reference(of(1.0)));
        cases.push(case("normal").input(&shape).input_in(&shape, 0.0..1e-30).with_reference(|x| vec![x[0].clone()]));
        for name in ["dropout", "dropout2d"] {
            let whole: Vec<usize> = shape.iter().copied().chain([2]).collect();
            cases.push(case(name).input(&whole).arg(0.0).with_reference(|x| vec![x[0].clone()]));
            cases.push(case(name).input(&whole).arg(1.0).with_reference(|x| vec![x[0].mapv(|_| 0.0)]));
        }
    }
    let empty = || vec![built(&[0, 3], |_| 0.0)];
    for name in ["rand", "randn"] {
        cases.push(made(name, &[sizes(&[0, 3])]).with_reference(move |_| empty()));
    }
    for name in ["rand_like", "randn_like"] {
        cases.push(case(name).input(&[0, 3]).with_reference(move |_| empty()));
    }
    cases.push(case("randperm").arg(1).arg(TESTED_DEVICE).with_reference(|_| vec![built(&[1], |_| 0.0)]));
    for replacement in [true, false] {
        let only = case("multinomial").input_in(&[3, 1], 0.5..1.0).arg(1).arg(replacement);
        cases.push(only.with_reference(|_| vec![built(&[3, 1], |_| 0.0)]));
        let none = case("multinomial").input(&[0, 2]).arg(2).arg(replacement);
        cases.push(none.with_reference(|_| vec![built(&[0, 2], |_| 0.0)]));
    }
    cases
}

/// Returns the mean and the variance of the elements.
fn moments(t: &Tensor) -> (f64, f64) {
    let x = f64s(t);
    let mean = x.mean().unwrap();
    (mean, x.mapv(|x| (x - mean).powi(2)).mean().unwrap())
}

#[test]
fn distributions_have_the_right_mean_and_variance() {
    each_device(|d| {
        manual_seed(3);
        let x = Tensor::empty([200, 200], d).unwrap();
        let near = |name: &str, t: &Tensor, mean: f64, variance: f64| {
            let (m, v) = moments(t);
            let tolerance = 5.0 * (variance / 40_000.0).sqrt();
            assert!((m - mean).abs() < tolerance, "{name} on {d}: mean {m}");
            assert!((v - variance).abs() < 0.08 * variance, "{name} on {d}: variance {v}");
        };
        near("uniform_", x.uniform_(-1.0, 3.0).unwrap(), 1.0, 16.0 / 12.0);
        assert!(vec(&x).iter().all(|x| (-1.0..3.0).contains(x)));
        near("normal_", x.t().unwrap().normal_(2.0, 0.5).unwrap(), 2.0, 0.25);
        near("exponential_", x.exponential_(2.0).unwrap(), 0.5, 0.25);
        assert!(vec(&x).iter().all(|x| x.is_finite() && *x >= 0.0));
        near("bernoulli_", x.bernoulli_(0.3).unwrap(), 0.3, 0.21);
        near("bernoulli", &x.full_like(0.3).unwrap().bernoulli().unwrap(), 0.3, 0.21);
        near("normal", &Tensor::normal(&x.full_like(-1).unwrap(), &Tensor::full((), 3, d).unwrap()).unwrap(), -1.0, 9.0);
        near("randn_like", &x.randn_like().unwrap(), 0.0, 1.0);
        near("rand_like", &x.rand_like().unwrap(), 0.5, 1.0 / 12.0);
    });
}

#[test]
fn multinomial_draws_by_weight() {
    each_device(|d| {
        manual_seed(5);
        let weights = Tensor::from_slice(&[1f32, 0.0, 3.0, 4.0, 0.0, 2.0, 0.0, 2.0], [2, 4], d).unwrap();
        let drawn = weights.multinomial(20_000, true).unwrap();
        for (row, right) in drawn.to_ndarray::<i64>().unwrap().outer_iter().zip([[1.0, 0.0, 3.0, 4.0], [0.0, 4.0, 0.0, 4.0]]) {
            for (k, weight) in right.iter().enumerate() {
                let share = row.iter().filter(|&&i| i == k as i64).count() as f64 / 20_000.0;
                assert!((share - weight / 8.0).abs() < 0.02, "{k} on {d}: {share}");
                assert!(*weight > 0.0 || share == 0.0, "{k} has no weight");
            }
        }
        let pairs = weights.expand([2, 4]).unwrap().multinomial(2, false).unwrap().to_ndarray::<i64>().unwrap();
        assert!(pairs.outer_iter().all(|pair| pair[0] != pair[1]));
        let mut second = pairs.index_axis(Axis(0), 1).iter().copied().collect::<Vec<_>>();
        second.sort_unstable();
        assert_eq!(second, [1, 3], "only these have weight");
        // In draws without replacement, the first index of two is still distributed in proportion to the weights.
        let many = weights.narrow(0, 0, 1).unwrap().expand([5000, 4]).unwrap();
        let firsts = many.multinomial(2, false).unwrap().to_ndarray::<i64>().unwrap();
        let share = firsts.index_axis(Axis(1), 0).iter().filter(|&&i| i == 3).count() as f64 / 5000.0;
        assert!((share - 0.5).abs() < 0.04, "{share}");
        assert!(weights.multinomial(5, false).is_err());
        let refused = weights.to_dtype(DType::I64).unwrap().multinomial(1, true);
        assert!(matches!(refused, Err(Error::UnsupportedDType { .. })));
    });
}

#[test]
fn generators_agree_on_every_device_and_do_not_affect_the_default() {
    let draw = |d: Device| -> Result<Vec<f32>> {
        let generator = Generator::new(11);
        with_generator(&generator, || {
            let inner = with_generator(&Generator::new(12), || Tensor::rand(3, d))?;
            let all = [Tensor::randn(5, d)?, Tensor::rand(4, d)?, inner, Tensor::zeros(6, d)?.normal_(1.0, 2.0)?.shallow_clone()];
            Tensor::cat(&all, 0)?.to_vec()
        })
    };
    let right = draw(Device::Cpu).unwrap();
    each_device(|d| assert_eq!(draw(d).unwrap(), right));

    let generator = Generator::new(1);
    let state = generator.state();
    let next = || with_generator(&generator, || vec(&Tensor::rand(4, Device::Cpu).unwrap()));
    let (first, second) = (next(), next());
    assert_ne!(first, second);
    generator.set_state(state);
    assert_eq!((next(), next()), (first, second));
    assert_ne!(Generator::current().state().key, 12);
}

#[test]
fn invalid_distribution_parameters_are_errors() {
    let x = Tensor::zeros(3, Device::Cpu).unwrap();
    let invalid = |r: Result<&Tensor>| assert!(matches!(r, Err(Error::Invalid { .. })), "{r:?}");
    invalid(x.uniform_(1.0, 0.0));
    invalid(x.uniform_(0.0, f64::INFINITY));
    invalid(x.normal_(0.0, -1.0));
    invalid(x.exponential_(0.0));
    invalid(x.exponential_(f64::NAN));
    invalid(x.bernoulli_(1.5));
    let whole = Tensor::zeros(3, (DType::I64, Device::Cpu)).unwrap();
    assert!(matches!(whole.normal_(0.0, 1.0), Err(Error::UnsupportedDType { .. })));
    assert!(whole.bernoulli_(0.5).is_ok());
    assert!(matches!(Tensor::meshgrid::<Tensor>(&[]), Err(Error::Invalid { .. })));
}
