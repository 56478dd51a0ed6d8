//! Interpolation to other image sizes.

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::device::count_launches;
use claystone::ops::Argument;
use claystone::{DType, Device, Error, Interpolation, Tensor};
use ndarray::{ArrayD, Axis, IxDyn, concatenate};

use crate::common::{each_device, f64s, values, vec};
use crate::harness::{Case, case};

/// Resizes dim `d` of `x` to `to` elements. `parts` returns the source indices and weights for an index of the result.
fn along(x: &ArrayD<f64>, d: usize, to: usize, parts: impl Fn(usize) -> Vec<(usize, f64)>) -> ArrayD<f64> {
    let slice = |o: usize| {
        let mut sum = ArrayD::zeros(x.index_axis(Axis(d), 0).raw_dim());
        parts(o).into_iter().for_each(|(at, share)| sum = &sum + &x.index_axis(Axis(d), at).mapv(|x| share * x));
        sum.insert_axis(Axis(d))
    };
    let slices: Vec<ArrayD<f64>> = (0..to).map(slice).collect();
    concatenate(Axis(d), &slices.iter().map(|s| s.view()).collect::<Vec<_>>()).unwrap()
}

fn resized(x: &ArrayD<f64>, sizes: &[usize], mode: &str, align: bool) -> ArrayD<f64> {
    sizes.iter().enumerate().fold(x.clone(), |x, (i, &to)| {
        let from = x.shape()[2 + i];
        along(&x, 2 + i, to, |o| {
            let (o, from_, to_) = (o as f64, from as f64, to as f64);
            match mode {
                "nearest" => vec![((o * from_ / to_ + 1e-9).floor() as usize, 1.0)],
                "nearest-exact" => vec![(((o + 0.5) * from_ / to_ + 1e-9).floor() as usize, 1.0)],
                _ => {
                    let place = match align {
                        true if to > 1 => o * (from_ - 1.0) / (to_ - 1.0),
                        true => 0.0,
                        false => ((o + 0.5) * from_ / to_ - 0.5).clamp(0.0, from_ - 1.0),
                    };
                    let low = (place.floor() as usize).min(from - 1);
                    vec![(low, 1.0 - (place - low as f64)), ((low + 1).min(from - 1), place - low as f64)]
                }
            }
        })
    })
}

const MODES: [(&str, bool); 4] = [("nearest", false), ("nearest-exact", false), ("linear", false), ("linear", true)];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, sizes) in [
        (&[2, 3, 5][..], &[8][..]),
        (&[1, 2, 4, 3], &[7, 5]),
        (&[2, 1, 5, 6], &[3, 2]),
        (&[1, 1, 1, 4], &[3, 1]),
        (&[1, 1, 2, 3, 2], &[3, 3, 4]),
        (&[0, 2, 3, 3], &[6, 6]),
        (&[2, 2, 7], &[7]),
        (&[1, 2, 13], &[5]),
        (&[1, 3, 1], &[11]),
        (&[1, 1, 17], &[1]),
        (&[2, 1, 3, 5], &[3, 5]),
        (&[1, 2, 7, 2], &[2, 11]),
        (&[1, 1, 1, 1], &[2, 1]),
        (&[1, 1, 2, 13], &[1, 4]),
        (&[2, 1, 5, 3, 4], &[2, 3, 7]),
        (&[1, 2, 2, 1, 5], &[5, 2, 1]),
        (&[1, 1, 2, 2, 3, 2], &[3, 1, 2, 5]),
    ] {
        for (mode, align) in MODES {
            let made = case("interpolate").input(shape).arg(sizes).arg(mode).arg(align).tolerance(4.0);
            cases.push(made.with_reference(move |x| vec![resized(&x[0], sizes, mode, align)]));
        }
    }
    for (n, c, h, w, r) in [(2, 3, 2, 3, 2), (1, 1, 3, 2, 3), (0, 2, 2, 2, 2), (2, 2, 1, 4, 1)] {
        let shuffled = move |x: &ArrayD<f64>| {
            ArrayD::from_shape_fn(IxDyn(&[n, c, h * r, w * r]), |i| {
                x[[i[0], (i[1] * r + i[2] % r) * r + i[3] % r, i[2] / r, i[3] / r]]
            })
        };
        let back = move |x: &ArrayD<f64>| {
            ArrayD::from_shape_fn(IxDyn(&[n, c * r * r, h, w]), |i| {
                x[[i[0], i[1] / (r * r), i[2] * r + i[1] / r % r, i[3] * r + i[1] % r]]
            })
        };
        let made = case("pixel_shuffle").input(&[n, c * r * r, h, w]).arg(r);
        cases.push(made.with_reference(move |x| vec![shuffled(&x[0])]));
        let made = case("pixel_unshuffle").input(&[n, c, h * r, w * r]).arg(r);
        cases.push(made.with_reference(move |x| vec![back(&x[0])]));
    }
    cases
}

#[test]
fn sizes_match_pytorch() {
    each_device(|device| {
        let x = Tensor::arange(0, 3, 1, device).unwrap().reshape([1, 1, 3]).unwrap();
        let of = |to: usize, mode| vec(&x.interpolate(&[to], mode).unwrap());
        assert_eq!(of(5, Interpolation::Nearest), [0., 0., 1., 1., 2.]);
        assert_eq!(of(5, Interpolation::NearestExact), [0., 0., 1., 2., 2.]);
        assert_eq!(of(5, Interpolation::Linear { align_corners: true }), [0., 0.5, 1., 1.5, 2.]);
        assert_eq!(of(1, Interpolation::Linear { align_corners: false }), [1.0]);
    });
}

const ALL: [Interpolation; 4] = [
    Interpolation::Nearest,
    Interpolation::NearestExact,
    Interpolation::Linear { align_corners: false },
    Interpolation::Linear { align_corners: true },
];

/// Returns a tensor of pseudo-random numbers, rounded to `dtype`.
fn pseudo_random(shape: &[usize], dtype: DType) -> Tensor {
    let value = |i: usize| ((i as f64 + 1.0) * 0.618_033_988_749_895).fract() - 0.5;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_vec(values, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Images that are split between several threads: sections of large planes, several small planes, a row, strided tensors, every
/// float dtype.
#[test]
fn large_images_match_the_definition() {
    for (shape, sizes) in [
        (&[1, 2, 150, 140][..], &[301, 211][..]),
        (&[3, 50, 7, 9], &[15, 20]),
        (&[2, 1, 301, 211], &[97, 60]),
        (&[1, 3, 30011], &[50021]),
        (&[2, 3, 5, 31, 40], &[9, 45, 41]),
    ] {
        for ((mode, align), how) in MODES.into_iter().zip(ALL) {
            let right = |x: &Tensor| resized(&f64s(x), sizes, mode, align);
            for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-6), (DType::F16, 5e-4), (DType::BF16, 3e-3)] {
                let flat = pseudo_random(shape, dtype);
                let turned = pseudo_random(&shape.iter().rev().copied().collect::<Vec<_>>(), dtype);
                let turned = turned.permute(&(0..shape.len() as isize).rev().collect::<Vec<_>>()).unwrap();
                for x in [flat, turned] {
                    let made = f64s(&x.interpolate(sizes, how).unwrap());
                    let off = (&made - &right(&x)).iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    assert!(off <= tolerance, "{shape:?} {sizes:?} {how:?} {dtype}: {off}");
                }
            }
        }
    }
}

/// The gradient is the adjoint: `y · A x = x · Aᵀ y`. A plane has the same bits whether it is resized alone or with others, and
/// whichever thread computes it.
#[test]
fn gradients_of_large_images_are_adjoint() {
    for (shape, sizes) in [
        (&[3, 50, 7, 9][..], &[15, 20][..]),
        (&[1, 2, 150, 140], &[301, 211]),
        (&[2, 1, 301, 211], &[97, 60]),
        (&[1, 2, 5, 31, 40], &[9, 45, 41]),
        (&[1, 3, 30011], &[50021]),
    ] {
        for how in ALL {
            let x = pseudo_random(shape, DType::F32).requires_grad_(true).unwrap();
            let y = x.interpolate(sizes, how).unwrap();
            let given = pseudo_random(y.shape().dims(), DType::F32).flip(-1).unwrap();
            y.backward_with(&given).unwrap();
            let grad = x.grad().unwrap();
            let dot = |a: &Tensor, b: &Tensor| (&f64s(a) * &f64s(b)).sum();
            let (left, right) = (dot(&given, &y), dot(&x, &grad));
            assert!((left - right).abs() < 1e-8 * y.numel() as f64, "{shape:?} {sizes:?} {how:?}: {left} {right}");
            let last = shape[1] - 1;
            let one = x.detach().narrow(1, last, 1).unwrap().requires_grad_(true).unwrap();
            let made = one.interpolate(sizes, how).unwrap();
            assert!(made.equal(&y.narrow(1, last, 1).unwrap()).unwrap());
            made.backward_with(&given.narrow(1, last, 1).unwrap()).unwrap();
            assert!(one.grad().unwrap().equal(&grad.narrow(1, last, 1).unwrap()).unwrap());
        }
    }
}

/// Rows and columns are resized in one launch, and each further dim takes one launch; a gradient takes the same number of launches.
#[test]
fn interpolation_takes_few_launches() {
    each_device(|device| {
        for (shape, sizes, most) in
            [(&[2, 3, 5][..], &[8][..], 1), (&[2, 3, 5, 4], &[8, 3], 1), (&[2, 3, 5, 4, 3], &[8, 3, 5], 2)]
        {
            for how in ALL {
                let x = pseudo_random(shape, DType::F32).to_device(device).unwrap().requires_grad_(true).unwrap();
                let (y, launches) = count_launches(|| x.interpolate(sizes, how).unwrap());
                assert_eq!(launches, most, "{shape:?} on {device}");
                let ones = y.ones_like().unwrap();
                let options = GradOptions { grad_outputs: &[&ones], ..Default::default() };
                let (_, launches) = count_launches(|| grad_with_options(&[&y], &[&x], options).unwrap());
                assert_eq!(launches, most, "the gradient, {shape:?} on {device}");
            }
        }
    });
}

/// Images larger than the caches are written with non-temporal stores, which must give the same results as normal stores.
#[test]
fn images_larger_than_the_caches() {
    for how in ALL {
        let x = pseudo_random(&[1, 2, 1300, 1100], DType::F32);
        let (both, one) = (x.interpolate(&[2600, 1301], how).unwrap(), x.narrow(1, 1, 1).unwrap());
        assert!(one.interpolate(&[2600, 1301], how).unwrap().equal(&both.narrow(1, 1, 1).unwrap()).unwrap());
    }
}

/// Each result interpolates two elements, and the weight of the farther element is at most 1/2. NaN and infinity affect the results
/// that have them as an element, and a weight of 0 times infinity is NaN.
#[test]
fn non_finite_values_spread_by_weight() {
    let line = |x: &[f64], to: usize| -> Vec<f64> {
        let value = |o: usize| {
            let place = ((o as f64 + 0.5) * x.len() as f64 / to as f64 - 0.5).max(0.0);
            let (low, share) = (place as usize, place.fract());
            let (a, b) = (x[low], x[(low + 1).min(x.len() - 1)]);
            if share < 0.5 { a + share * (b - a) } else { b + (1.0 - share) * (a - b) }
        };
        (0..to).map(value).collect()
    };
    let from = [1.0, f64::INFINITY, 2.0, f64::NAN, 3.0, -4.0, f64::NEG_INFINITY];
    let how = Interpolation::Linear { align_corners: false };
    let check = |got: &Tensor, right: &[f64], tolerance: f64| {
        let got = values(&got.to_dtype(DType::F32).unwrap());
        let close = |g: f64, r: f64| g == r || (g.is_nan() && r.is_nan()) || (g - r).abs() <= tolerance;
        assert!(got.len() == right.len() && got.iter().zip(right).all(|(g, r)| close(*g, *r)), "{got:?} {right:?}");
    };
    each_device(|device| {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
            let x = Tensor::from_slice(&from, [1, 1, 7], Device::Cpu).unwrap().to(dtype, device).unwrap();
            for to in [3, 7, 14, 16] {
                check(&x.interpolate(&[to], how).unwrap(), &line(&from, to), tolerance);
            }
            let twice: Vec<f64> = from.iter().flat_map(|&x| [x, x]).collect();
            check(&x.interpolate(&[14], Interpolation::Nearest).unwrap(), &twice, 0.0);
        }
        let image = [[1.0, 2.0, 3.0, 4.0], [5.0, f64::INFINITY, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]];
        let wide = image.map(|row| line(&row, 8));
        let columns: Vec<Vec<f64>> = (0..8).map(|v| line(&wide.each_ref().map(|row| row[v]), 6)).collect();
        let right: Vec<f64> = (0..48).map(|i| columns[i % 8][i / 8]).collect();
        let x = Tensor::from_slice(&image.concat(), [1, 1, 3, 4], Device::Cpu).unwrap().to(DType::F32, device).unwrap();
        check(&x.interpolate(&[6, 8], how).unwrap(), &right, 1e-5);
    });
}

#[test]
fn invalid_sizes_are_errors() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, Device::Cpu).unwrap();
    let invalid = |made: claystone::Result<Tensor>| assert!(matches!(made, Err(Error::Invalid { .. })), "{made:?}");
    invalid(zeros(&[1, 1, 3]).interpolate(&[2, 2], Interpolation::Nearest));
    invalid(zeros(&[1, 1, 3]).interpolate(&[0], Interpolation::Nearest));
    invalid(zeros(&[1, 1, 0]).interpolate(&[2], Interpolation::Nearest));
    invalid(zeros(&[6, 2, 2]).pixel_shuffle(2));
    invalid(zeros(&[1, 3, 2]).pixel_unshuffle(2));
    invalid(zeros(&[4, 2]).pixel_shuffle(1));
    let mode = [Argument::from(&[2usize][..]), "cubic".into(), false.into()];
    assert!(claystone::ops::call("interpolate", &[&zeros(&[1, 1, 3])], &mode).is_err());
}
