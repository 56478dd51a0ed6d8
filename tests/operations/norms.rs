//! Normalisation, compared with its definition.

use claystone::device::{DeviceKind, count_launches};
use claystone::ops::{self, Argument};
use claystone::{BatchNormOptions, DType, Device, Tensor};
use ndarray::{ArrayD, Dimension, IxDyn};

use crate::common::{each_device, f64s, vec};
use crate::harness::{Case, case};

/// Normalises each element by its row's mean and the root of the row's variance (with `rms`, the mean square) plus eps. `row`
/// returns the row of an index.
fn normal(x: &ArrayD<f64>, eps: f64, rms: bool, row: impl Fn(&[usize]) -> usize) -> ArrayD<f64> {
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for (at, &v) in x.indexed_iter() {
        let r = row(at.slice());
        rows.resize(rows.len().max(r + 1), Vec::new());
        rows[r].push(v);
    }
    let statistics: Vec<(f64, f64)> = rows
        .iter()
        .map(|row| {
            let n = row.len() as f64;
            let mean = if rms { 0.0 } else { row.iter().sum::<f64>() / n };
            (mean, row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n)
        })
        .collect();
    ArrayD::from_shape_fn(x.raw_dim(), |at| {
        let (mean, var) = statistics[row(at.slice())];
        (x[&at] - mean) / (var + eps).sqrt()
    })
}

/// Applies the weight and bias in `rest`, which are optional; `own` returns the index of an element's weight.
fn affine(y: ArrayD<f64>, rest: &[ArrayD<f64>], own: impl Fn(&[usize]) -> Vec<usize>) -> Vec<ArrayD<f64>> {
    let out = ArrayD::from_shape_fn(y.raw_dim(), |at| {
        let own = IxDyn(&own(at.slice()));
        let weighted = rest.first().map_or(y[&at], |w| y[&at] * w[&own]);
        rest.get(1).map_or(weighted, |b| weighted + b[&own])
    });
    vec![out]
}

/// Returns the row-major position of the index `at` in `shape`; further dims of `at` are ignored.
fn position(at: &[usize], shape: &[usize]) -> usize {
    at.iter().zip(shape).fold(0, |p, (i, n)| p * n + i)
}

fn last(name: &str, shape: &[usize], dims: usize, eps: f64, given: usize) -> Case {
    let kept = shape.len() - dims;
    let normalised = shape[kept..].to_vec();
    let made = (0..given).fold(case(name).input(shape), |c, _| c.input(&normalised));
    let (made, outer) = (made.arg(&normalised[..]).arg(eps), shape[..kept].to_vec());
    let rms = name == "rms_norm";
    made.with_reference(move |x| {
        let y = normal(&x[0], eps, rms, |at| position(&at[..kept], &outer));
        affine(y, &x[1..], |at| at[kept..].to_vec())
    })
}

fn groups(shape: &[usize], groups: usize, given: usize) -> Case {
    let made = (0..given).fold(case("group_norm").input(shape), |c, _| c.input(&shape[1..2]));
    let each = shape[1] / groups;
    made.arg(groups).arg(1e-5).with_reference(move |x| {
        let y = normal(&x[0], 1e-5, false, |at| at[0] * groups + at[1] / each);
        affine(y, &x[1..], |at| vec![at[1]])
    })
}

fn instance(shape: &[usize], given: usize) -> Case {
    let made = (0..given).fold(case("instance_norm").input(shape), |c, _| c.input(&shape[1..2]));
    let channels = shape[1];
    made.arg(1e-5).with_reference(move |x| {
        let y = normal(&x[0], 1e-5, false, |at| at[0] * channels + at[1]);
        affine(y, &x[1..], |at| vec![at[1]])
    })
}

/// Returns a case of a norm with a bias but no weight.
fn biased(name: &str, shape: &[usize], arguments: &[Argument]) -> Case {
    let made = case(name).input(shape).none().input(&shape[1..2]);
    arguments.iter().fold(made, |c, a| c.arg(a.clone())).with_reference(|x| {
        let (all, channels) = (x[0].ndim() == 2, x[0].shape()[1]);
        let y = normal(&x[0], 1e-5, false, |at| if all { at[0] } else { at[0] * channels + at[1] });
        vec![ArrayD::from_shape_fn(y.raw_dim(), |at| y[&at] + x[1][[at[1]]])]
    })
}

fn training(shape: &[usize], given: usize) -> Case {
    let made = (0..given).fold(case("batch_norm").input(shape).none().none(), |c, _| c.input(&shape[1..2]));
    made.arg(true).arg(0.1).arg(1e-5).with_reference(move |x| {
        let y = normal(&x[0], 1e-5, false, |at| at[1]);
        affine(y, &x[1..], |at| vec![at[1]])
    })
}

fn evaluation(shape: &[usize], given: usize) -> Case {
    let made = case("batch_norm").input(shape).input(&shape[1..2]).input_in(&shape[1..2], 0.5..2.0);
    let made = (0..given).fold(made, |c, _| c.input(&shape[1..2]));
    made.arg(false).arg(0.1).arg(1e-5).with_reference(move |x| {
        let y = ArrayD::from_shape_fn(x[0].raw_dim(), |at| {
            let c = [at[1]];
            (x[0][&at] - x[1][c]) / (x[2][c] + 1e-5).sqrt()
        });
        affine(y, &x[3..], |at| vec![at[1]])
    })
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        biased("layer_norm", &[4, 7], &[7.into(), 1e-5.into()]),
        biased("group_norm", &[2, 3, 5], &[3.into(), 1e-5.into()]),
        biased("instance_norm", &[2, 3, 5], &[1e-5.into()]),
    ];
    for given in 0..3 {
        for (shape, dims) in [
            (&[4, 7][..], 1),
            (&[2, 3, 5], 2),
            (&[3, 1, 6], 1),
            (&[0, 5], 1),
            (&[2, 3, 64], 1),
            (&[3, 257], 1),
            (&[2, 1031], 1),
        ] {
            cases.push(last("layer_norm", shape, dims, 1e-5, given));
            if given < 2 {
                cases.push(last("rms_norm", shape, dims, 1e-3, given));
            }
        }
        cases.push(groups(&[2, 6, 3, 2], 2, given));
        cases.push(groups(&[2, 4, 5], 1, given));
        cases.push(groups(&[3, 6, 7], 6, given));
        cases.push(groups(&[0, 4, 3], 2, given));
        cases.push(groups(&[2, 8, 9, 13], 4, given));
        cases.push(instance(&[2, 3, 4, 5], given));
        cases.push(instance(&[2, 0, 4], given));
        cases.push(training(&[3, 2, 4], given));
        cases.push(training(&[2, 3, 3, 4], given));
        cases.push(training(&[5, 1, 67], given));
        cases.push(training(&[2, 0, 3], given));
        cases.push(evaluation(&[3, 2, 4], given));
        cases.push(evaluation(&[4, 5], given));
        cases.push(evaluation(&[0, 3, 2], given));
        cases.push(evaluation(&[2, 3, 4, 5], given));
        cases.push(training(&[2, 2, 19], given));
    }
    for (shape, p, dim) in [(&[3, 4][..], 2.0, 1), (&[3, 4, 2], 1.0, -2isize), (&[2, 5], 3.0, -1), (&[0, 4], 2.0, 1)] {
        let axis = if dim < 0 { shape.len() - dim.unsigned_abs() } else { dim as usize };
        let made = case("normalize").input_in(shape, 0.3..2.0).arg(p).arg(dim).arg(1e-12);
        cases.push(made.with_reference(move |x| {
            let norms = x[0].map_axis(ndarray::Axis(axis), |lane| {
                lane.iter().map(|v| v.abs().powf(p)).sum::<f64>().powf(1.0 / p)
            });
            vec![&x[0] / &norms.insert_axis(ndarray::Axis(axis))]
        }));
    }
    cases
}

/// The running statistics move by a tenth of the difference towards the batch's mean and unbiased variance; nothing else changes.
#[test]
fn running_statistics_are_updated_from_the_batch() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F16] {
            let options = (dtype, device);
            let x = Tensor::arange(0, 24, 1, options).unwrap().reshape([3, 2, 4]).unwrap();
            let (mean, var) = (Tensor::ones(2, options).unwrap(), Tensor::ones(2, options).unwrap());
            let run = |training: bool| {
                let (running_mean, running_var) = (Some(&mean), Some(&var));
                let options = BatchNormOptions { running_mean, running_var, training, ..BatchNormOptions::default() };
                x.batch_norm(options).unwrap()
            };
            run(false);
            assert_eq!(f64s(&mean).sum() + f64s(&var).sum(), 4.0);
            let (_, launches) = count_launches(|| run(true));
            let gpu = device != Device::Cpu && device.info().unwrap().kind != DeviceKind::Cpu;
            assert!(!gpu || launches == 2, "{launches} launches on {device}");
            let values = f64s(&x);
            for c in 0..2 {
                let channel: Vec<f64> = values.index_axis(ndarray::Axis(1), c).iter().copied().collect();
                let m = channel.iter().sum::<f64>() / 12.0;
                let v = channel.iter().map(|x| (x - m).powi(2)).sum::<f64>() / 11.0;
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 4e-3 };
                for (got, want) in [(f64s(&mean)[c], 0.9 + 0.1 * m), (f64s(&var)[c], 0.9 + 0.1 * v)] {
                    assert!((got - want).abs() <= tolerance * want, "{got} instead of {want} in {dtype} on {device}");
                }
            }
        }
    });
}

/// 16-bit inputs with f32 parameters are normalised in f32 and rounded once; each gradient has its tensor's dtype.
#[test]
fn sixteen_bit_inputs_support_f32_parameters() {
    type Norm = fn(&Tensor, [&Tensor; 4]) -> claystone::Result<Tensor>;
    fn batch_norm(x: &Tensor, numbers: [&Tensor; 4], training: bool) -> claystone::Result<Tensor> {
        let [weight, bias, running_mean, running_var] = numbers.map(Some);
        let given = BatchNormOptions { running_mean, running_var, weight, bias, training, ..Default::default() };
        x.transpose(1, 2)?.batch_norm(given)
    }
    let norms: [Norm; 4] = [
        |x, [weight, bias, ..]| x.layer_norm(&[5], Some(weight), Some(bias), 1e-5),
        |x, [weight, bias, ..]| x.transpose(1, 2)?.group_norm(5, Some(weight), Some(bias), 1e-5),
        |x, numbers| batch_norm(x, numbers, true),
        |x, numbers| batch_norm(x, numbers, false),
    ];
    each_device(|device| {
        for dtype in [DType::F16, DType::BF16] {
            for (i, norm) in norms.iter().enumerate() {
                let numbers = |first: i64| {
                    let numbers = Tensor::arange(first, first + 5, 1, device).unwrap().mul_scalar(0.3).unwrap();
                    numbers.requires_grad_(first < 3).unwrap()
                };
                let x = Tensor::arange(0, 40, 1, device).unwrap().sin().unwrap().reshape([2, 4, 5]).unwrap();
                let run = |x: Tensor| {
                    let x = x.requires_grad_(true).unwrap();
                    let given = [numbers(1), numbers(2), numbers(3), numbers(4)];
                    let y = norm(&x, given.each_ref()).unwrap();
                    y.sin().unwrap().sum((), false).unwrap().backward().unwrap();
                    let grads = [&x, &given[0], &given[1]].map(|t| t.grad().unwrap());
                    assert!(grads[0].dtype() == x.dtype() && grads[1].dtype() == DType::F32);
                    [y].into_iter().chain(grads).chain(given.into_iter().skip(2)).collect::<Vec<_>>()
                };
                let half = x.to_dtype(dtype).unwrap();
                let (got, want) = (run(half.shallow_clone()), run(half.to_dtype(DType::F32).unwrap()));
                assert_eq!(got[0].dtype(), dtype);
                // The statistics are equal within f32 rounding; the other results differ by the rounding to 16 bits.
                let tolerance = if dtype == DType::F16 { 2e-3 } else { 2e-2 };
                for (k, (got, want)) in got.iter().zip(&want).enumerate() {
                    let tolerance = if k >= 4 { 1e-6 } else { tolerance };
                    let most = f64s(want).iter().fold(1.0, |m: f64, v| m.max(v.abs()));
                    let near = (f64s(got) - f64s(want)).iter().all(|d| d.abs() <= tolerance * most);
                    assert!(near, "norm {i}, value {k} in {dtype} on {device}");
                }
            }
        }
    });
}

/// A mean that is large relative to the deviations does not reduce the precision of the variance.
#[test]
fn variances_stay_precise_for_large_means() {
    each_device(|device| {
        let x = Tensor::from_slice(&[10000.0f32, 10001.0, 10002.0, 10003.0], [1, 4], device).unwrap();
        let y = x.layer_norm(&[4], None, None, 0.0).unwrap().to_vec::<f32>().unwrap();
        let want = [-1.3416408, -0.4472136, 0.4472136, 1.3416408];
        assert!(y.iter().zip(want).all(|(y, w): (&f32, f32)| (y - w).abs() < 1e-4), "{y:?} on {device}");
    });
}

/// Calls by name take tensors in PyTorch's order: the running statistics (which are updated) before the weight and bias.
#[test]
fn batch_norm_by_name_takes_the_running_statistics_first() {
    each_device(|device| {
        let x = Tensor::from_slice(&[1f32, 10.0, 3.0, 30.0], [2, 2], device).unwrap();
        let of = |values: [f32; 2]| Tensor::from_slice(&values, 2, device).unwrap();
        let (weight, bias) = (of([2.0, 3.0]), of([0.5, -0.5]));
        for given in [3, 4, 5] {
            let (mean, var) = (of([100.0, 200.0]), of([7.0, 9.0]));
            let all = [&x, &mean, &var, &weight, &bias];
            let y = ops::call("batch_norm", &all[..given], &[true.into(), 0.5.into(), 0.0.into()]).unwrap().remove(0);
            let right = match given {
                3 => [-1.0, -1.0, 1.0, 1.0],
                4 => [-2.0, -3.0, 2.0, 3.0],
                _ => [-1.5, -3.5, 2.5, 2.5],
            };
            assert!(vec(&y).iter().zip(right).all(|(y, r)| (y - r).abs() < 1e-5), "{given} tensors: {y}");
            assert_eq!((vec(&mean), vec(&var)), (vec![51.0, 110.0], vec![4.5, 104.5]), "{given} tensors on {device}");
        }
        let surplus = ops::call("batch_norm", &[&x; 6], &[true.into(), Argument::None, 0.0.into()]);
        assert!(surplus.unwrap_err().to_string().contains("at most 5 tensors"));
    });
}

#[test]
fn errors_of_norms_name_the_mismatch() {
    let x = Tensor::zeros(&[2, 6, 4], Device::Cpu).unwrap();
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    says("last dims", x.layer_norm(&[6], None, None, 1e-5));
    says("normalised shape", x.layer_norm(&[4], Some(&Tensor::ones(6, Device::Cpu).unwrap()), None, 1e-5));
    says("evenly", x.group_norm(4, None, None, 1e-5));
    says("each channel", x.group_norm(3, Some(&Tensor::ones(4, Device::Cpu).unwrap()), None, 1e-5));
    says("running", x.batch_norm(BatchNormOptions::default()));
    let one = Tensor::zeros(&[1, 6], Device::Cpu).unwrap();
    says("no variance", one.batch_norm(BatchNormOptions { training: true, ..BatchNormOptions::default() }));
}
