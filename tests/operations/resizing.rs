//! Images of other sizes.

use claystone::ops::Argument;
use claystone::{Device, Error, Interpolation, Tensor};
use ndarray::{ArrayD, Axis, IxDyn, concatenate};

use crate::common::{each_device, vec};
use crate::harness::{Case, case};

/// Dim `d` of `x` with `to` elements, each a sum of elements of `x` by `parts`: for a place in the result, places and shares.
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

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, sizes) in [
        (&[2, 3, 5][..], &[8][..]),
        (&[1, 2, 4, 3], &[7, 5]),
        (&[2, 1, 5, 6], &[3, 2]),
        (&[1, 1, 1, 4], &[3, 1]),
        (&[1, 1, 2, 3, 2], &[3, 3, 4]),
        (&[0, 2, 3, 3], &[6, 6]),
    ] {
        for (mode, align) in [("nearest", false), ("nearest-exact", false), ("linear", false), ("linear", true)] {
            let made = case("interpolate").input(shape).arg(sizes).arg(mode).arg(align).tolerance(4.0);
            cases.push(made.gives(move |x| vec![resized(&x[0], sizes, mode, align)]));
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
        cases.push(made.gives(move |x| vec![shuffled(&x[0])]));
        let made = case("pixel_unshuffle").input(&[n, c, h * r, w * r]).arg(r);
        cases.push(made.gives(move |x| vec![back(&x[0])]));
    }
    cases
}

#[test]
fn sizes_are_pytorchs() {
    each_device(|device| {
        let x = Tensor::arange(0, 3, 1, device).unwrap().reshape([1, 1, 3]).unwrap();
        let of = |to: usize, mode| vec(&x.interpolate(&[to], mode).unwrap());
        assert_eq!(of(5, Interpolation::Nearest), [0., 0., 1., 1., 2.]);
        assert_eq!(of(5, Interpolation::NearestExact), [0., 0., 1., 2., 2.]);
        assert_eq!(of(5, Interpolation::Linear { align_corners: true }), [0., 0.5, 1., 1.5, 2.]);
        assert_eq!(of(1, Interpolation::Linear { align_corners: false }), [1.0]);
    });
}

#[test]
fn what_has_no_size_is_refused() {
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
