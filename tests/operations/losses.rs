//! Losses, compared with their definitions.

use std::f64::consts::PI;

use claystone::{CrossEntropy, DType, Device, Error, LossReduction, Tensor};
use ndarray::{ArrayD, Axis, Dimension, IxDyn};

use crate::common::{each_device, f64s};
use crate::harness::{Case, case};

const REDUCTIONS: [&str; 4] = ["mean", "sum", "none", "batchmean"];

fn scalar(x: f64) -> ArrayD<f64> {
    ArrayD::from_elem(IxDyn(&[]), x)
}

fn reduced(x: ArrayD<f64>, how: &str) -> Vec<ArrayD<f64>> {
    vec![match how {
        "mean" => scalar(x.sum() / x.len() as f64),
        "sum" => scalar(x.sum()),
        "batchmean" => scalar(x.sum() / *x.shape().first().unwrap_or(&1) as f64),
        _ => x,
    }]
}

/// Applies `f` to the corresponding elements of all tensors, which are broadcast to the first tensor's shape.
fn each(x: &[ArrayD<f64>], f: impl Fn(&[f64]) -> f64) -> ArrayD<f64> {
    let all: Vec<_> = x.iter().map(|t| t.broadcast(x[0].raw_dim()).unwrap()).collect();
    ArrayD::from_shape_fn(x[0].raw_dim(), |at| f(&all.iter().map(|t| t[&at]).collect::<Vec<_>>()))
}

type Pointwise = fn(&[f64]) -> f64;

/// The arguments of a loss besides the tensors and the reduction.
#[derive(Clone, Copy)]
enum More {
    Nothing,
    Number(f64),
    /// A bool argument after the reduction.
    Switch(bool),
    Poisson(bool, bool, f64),
    Gaussian(bool),
    /// No further argument; the optional third tensor is omitted.
    NoThird,
}

fn pointwise(name: &'static str, ranges: &[(f64, f64)], more: More, f: Pointwise) -> Vec<Case> {
    let mut cases = Vec::new();
    for (how, shape) in [("mean", &[3, 5][..]), ("sum", &[7]), ("none", &[2, 3]), ("mean", &[0, 3]), ("none", &[0]), ("mean", &[]), ("batchmean", &[4, 3]), ("batchmean", &[])] {
        let next = |c: Case, (k, &(a, b)): (usize, &(f64, f64))| {
            let c = if k == 2 && matches!(more, More::NoThird) { c.none() } else { c };
            c.input_in(shape, a..b)
        };
        let made = ranges.iter().enumerate().fold(case(name), next);
        let made = match more {
            More::Nothing | More::NoThird => made.arg(how),
            More::Number(x) => made.arg(x).arg(how),
            More::Switch(on) => made.arg(how).arg(on),
            More::Poisson(log, full, eps) => made.arg(log).arg(full).arg(eps).arg(how),
            More::Gaussian(full) => made.arg(full).arg(1e-6).arg(how),
        };
        cases.push(made.tolerance(4.0).with_reference(move |x| reduced(each(x, f), how)));
    }
    cases
}

/// Returns `max(0, x)`.
fn hinge(x: f64) -> f64 {
    x.max(0.0)
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn log_softmax(x: &ArrayD<f64>, dim: usize) -> ArrayD<f64> {
    let mut out = x.clone();
    for mut lane in out.lanes_mut(Axis(dim)) {
        let most = lane.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = lane.iter().map(|v| (v - most).exp()).sum();
        lane.mapv_inplace(|v| v - most - sum.ln());
    }
    out
}

/// Returns the losses of log-probabilities and labels. A mean divides by the sum of the labels' weights.
fn with_labels(log: &ArrayD<f64>, labels: &ArrayD<f64>, weight: Option<&ArrayD<f64>>, smooth: f64, ignore: i64, how: &str) -> ArrayD<f64> {
    let dim = usize::from(log.ndim() > 1);
    let classes = log.shape()[dim];
    let weight = |c: usize| weight.map_or(1.0, |w| w[[c]]);
    let mut total = 0.0;
    let losses = ArrayD::from_shape_fn(labels.raw_dim(), |at| {
        let label = labels[&at] as i64;
        if label == ignore {
            return 0.0;
        }
        total += weight(label as usize);
        let log_of = |c: usize| {
            let mut place = at.slice().to_vec();
            place.insert(dim, c);
            log[IxDyn(&place)]
        };
        let even: f64 = (0..classes).map(|c| weight(c) * log_of(c)).sum();
        -(1.0 - smooth) * weight(label as usize) * log_of(label as usize) - smooth / classes as f64 * even
    });
    match how {
        "mean" => scalar(losses.sum() / total),
        "sum" => scalar(losses.sum()),
        "batchmean" => scalar(losses.sum() / *losses.shape().first().unwrap_or(&1) as f64),
        _ => losses,
    }
}

fn labels(logits: &[usize]) -> Vec<usize> {
    let dim = usize::from(logits.len() > 1);
    logits.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n).collect()
}

fn classes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, shape) in [&[4, 5][..], &[5], &[2, 3, 4], &[2, 3, 2, 2], &[0, 3], &[2, 3, 0], &[33, 17]].into_iter().enumerate() {
        let (n, under) = (shape[usize::from(shape.len() > 1)], labels(shape));
        for (weighted, smooth) in [(false, 0.0), (true, 0.0), (false, 0.1), (true, 0.3)] {
            let one = (i + usize::from(weighted)) % REDUCTIONS.len();
            let how = REDUCTIONS[one];
            for &how in if shape.len() == 2 { &REDUCTIONS[..] } else { &REDUCTIONS[one..one + 1] } {
                let given = |name: &str| {
                    let made = case(name).input(shape).index(&under, n).tolerance(4.0);
                    // The mean of an empty tensor is NaN, so its gradient is not checked.
                    let made = if shape.contains(&0) { made.no_gradient() } else { made };
                    if weighted { made.input_in(&[n], 0.5..1.5) } else { made }
                };
                // The label 1 is ignored.
                let made = given("cross_entropy").arg(how).arg(1).arg(smooth);
                cases.push(made.with_reference(move |x| {
                    let log = log_softmax(&x[0], usize::from(x[0].ndim() > 1));
                    vec![with_labels(&log, &x[1], x.get(2), smooth, 1, how)]
                }));
                if smooth == 0.0 {
                    let made = given("nll_loss").arg(how).arg(-100);
                    cases.push(made.with_reference(move |x| vec![with_labels(&x[0], &x[1], x.get(2), 0.0, -100, how)]));
                }
            }
            // The targets are class probabilities instead of labels.
            let made = case("cross_entropy").input(shape).input_in(shape, 0.0..1.0).tolerance(4.0);
            let made = if shape.contains(&0) { made.no_gradient() } else { made };
            let made = if weighted { made.input_in(&[n], 0.5..1.5) } else { made };
            cases.push(made.arg(how).arg(-100).arg(smooth).with_reference(move |x| {
                let dim = usize::from(x[0].ndim() > 1);
                let (log, classes) = (log_softmax(&x[0], dim), x[0].shape()[dim] as f64);
                let losses = ArrayD::from_shape_fn(log.raw_dim(), |at| {
                    let weight = x.get(2).map_or(1.0, |w| w[[at[dim]]]);
                    -log[&at] * ((1.0 - smooth) * x[1][&at] + smooth / classes) * weight
                });
                reduced(losses.sum_axis(Axis(dim)), how)
            }));
        }
    }
    cases
}

/// Returns the p-norm of each row of `a - b + eps`.
fn distance(a: &ArrayD<f64>, b: &ArrayD<f64>, p: f64) -> ArrayD<f64> {
    let d = (a - b).mapv(|v| (v + 1e-6).abs().powf(p));
    d.sum_axis(Axis(a.ndim() - 1)).mapv(|v| v.powf(1.0 / p))
}

fn vectors() -> Vec<Case> {
    let mut cases = Vec::new();
    for (how, shape) in [("mean", &[3, 4][..]), ("none", &[2, 5]), ("sum", &[6]), ("mean", &[0, 4])] {
        let rows = &shape[..shape.len() - 1];
        for target in [1.0, -1.0] {
            let made = case("cosine_embedding_loss").input(shape).input(shape).input_in(rows, target..target);
            cases.push(made.tolerance(4.0).arg(-0.6).arg(how).with_reference(move |x| {
                let dot = |a: &ArrayD<f64>, b: &ArrayD<f64>| (a * b).sum_axis(Axis(a.ndim() - 1));
                let norms = (dot(&x[0], &x[0]) + 1e-12) * (dot(&x[1], &x[1]) + 1e-12);
                let cos = dot(&x[0], &x[1]) / norms.mapv(f64::sqrt);
                let losses = each(&[cos, x[2].clone()], |v| match v[1] {
                    1.0 => 1.0 - v[0],
                    -1.0 => hinge(v[0] + 0.6),
                    _ => 0.0,
                });
                reduced(losses, how)
            }));
        }
        for (p, swap) in [(2.0, false), (1.0, true)] {
            let made = case("triplet_margin_loss").input(shape).input(shape).input(shape).tolerance(4.0);
            cases.push(made.arg(1.0).arg(p).arg(swap).arg(how).with_reference(move |x| {
                let (near, mut far) = (distance(&x[0], &x[1], p), distance(&x[0], &x[2], p));
                if swap {
                    far.zip_mut_with(&distance(&x[1], &x[2], p), |a, &b| *a = a.min(b));
                }
                reduced((near - far).mapv(|v| hinge(v + 1.0)), how)
            }));
        }
    }
    cases
}

pub fn cases() -> Vec<Case> {
    let (any, part) = ((-2.0, 2.0), (0.1, 0.9));
    let mut cases = [
        pointwise("mse_loss", &[any, any], More::Nothing, |x| (x[0] - x[1]).powi(2)),
        pointwise("l1_loss", &[any, any], More::Nothing, |x| (x[0] - x[1]).abs()),
        pointwise("smooth_l1_loss", &[any, any], More::Number(0.8), |x| {
            let d = (x[0] - x[1]).abs();
            if d < 0.8 { d * d / 1.6 } else { d - 0.4 }
        }),
        pointwise("smooth_l1_loss", &[any, any], More::Number(0.0), |x| (x[0] - x[1]).abs()),
        pointwise("huber_loss", &[any, any], More::Number(0.8), |x| {
            let d = (x[0] - x[1]).abs();
            if d <= 0.8 { d * d / 2.0 } else { 0.8 * (d - 0.4) }
        }),
        pointwise("binary_cross_entropy", &[part, (0.0, 1.0)], More::Nothing, |x| {
            -(x[1] * x[0].ln() + (1.0 - x[1]) * (1.0 - x[0]).ln())
        }),
        pointwise("binary_cross_entropy", &[part, (0.0, 1.0), any], More::Nothing, |x| {
            -(x[1] * x[0].ln() + (1.0 - x[1]) * (1.0 - x[0]).ln()) * x[2]
        }),
        pointwise("binary_cross_entropy_with_logits", &[any, (0.0, 1.0)], More::Nothing, |x| {
            softplus(x[0]) - x[1] * x[0]
        }),
        pointwise("binary_cross_entropy_with_logits", &[any, (0.0, 1.0), any], More::Nothing, |x| {
            (softplus(x[0]) - x[1] * x[0]) * x[2]
        }),
        pointwise("binary_cross_entropy_with_logits", &[any, (0.0, 1.0), (0.5, 2.0)], More::NoThird, |x| {
            (1.0 - x[1]) * softplus(x[0]) + x[2] * x[1] * softplus(-x[0])
        }),
        pointwise("binary_cross_entropy_with_logits", &[any, (0.0, 1.0), any, (0.5, 2.0)], More::Nothing, |x| {
            ((1.0 - x[1]) * softplus(x[0]) + x[3] * x[1] * softplus(-x[0])) * x[2]
        }),
        pointwise("kl_div", &[any, part], More::Switch(false), |x| x[1] * (x[1].ln() - x[0])),
        pointwise("kl_div", &[any, any], More::Switch(true), |x| x[1].exp() * (x[1] - x[0])),
        pointwise("poisson_nll_loss", &[any, (0.0, 4.0)], More::Poisson(true, false, 1e-8), |x| x[0].exp() - x[1] * x[0]),
        pointwise("poisson_nll_loss", &[(0.5, 3.0), (1.1, 4.0)], More::Poisson(false, true, 0.01), |x| {
            x[0] - x[1] * (x[0] + 0.01).ln() + x[1] * x[1].ln() - x[1] + 0.5 * (2.0 * PI * x[1]).ln()
        }),
        pointwise("gaussian_nll_loss", &[any, any, (0.5, 2.0)], More::Gaussian(false), |x| {
            0.5 * (x[2].ln() + (x[0] - x[1]).powi(2) / x[2])
        }),
        pointwise("gaussian_nll_loss", &[any, any, (0.5, 2.0)], More::Gaussian(true), |x| {
            0.5 * (x[2].ln() + (x[0] - x[1]).powi(2) / x[2] + (2.0 * PI).ln())
        }),
        pointwise("soft_margin_loss", &[any, any], More::Nothing, |x| softplus(-x[0] * x[1])),
        pointwise("margin_ranking_loss", &[any, any, any], More::Number(0.3), |x| hinge(0.3 - x[2] * (x[0] - x[1]))),
    ]
    .concat_all();
    for target in [1.0, -1.0] {
        for (how, shape) in [("mean", &[3][..]), ("none", &[1, 2]), ("sum", &[0])] {
            let made = case("hinge_embedding_loss").input(shape).input_in(shape, target..target);
            cases.push(made.arg(0.7).arg(how).with_reference(move |x| {
                let losses = each(x, |v| if v[1] == 1.0 { v[0] } else if v[1] == -1.0 { hinge(0.7 - v[0]) } else { hinge(0.7 - v[0]) + v[0] });
                reduced(losses, how)
            }));
        }
    }
    cases.extend(classes());
    cases.extend(vectors());
    cases
}

trait ConcatAll {
    fn concat_all(self) -> Vec<Case>;
}

impl<const N: usize> ConcatAll for [Vec<Case>; N] {
    fn concat_all(self) -> Vec<Case> {
        self.into_iter().flatten().collect()
    }
}

/// Probabilities of exactly 0 or 1 have a loss of at most 100, and PyTorch's gradients.
#[test]
fn saturated_probabilities_have_finite_losses_and_gradients() {
    each_device(|device| {
        let x = Tensor::from_slice(&[0f32, 1.0, 0.0, 1.0], 4, device).unwrap().requires_grad_(true).unwrap();
        let t = Tensor::from_slice(&[1f32, 0.0, 0.0, 1.0], 4, device).unwrap();
        let loss = x.binary_cross_entropy(&t, None, LossReduction::None).unwrap();
        assert_eq!(loss.to_vec::<f32>().unwrap(), [100.0, 100.0, 0.0, 0.0], "on {device}");
        loss.sum((), false).unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), [-1e12, 1e12, 0.0, 0.0], "on {device}");
        let x = Tensor::from_slice(&[200f32, -200.0], 2, device).unwrap();
        let t = Tensor::from_slice(&[0f32, 1.0], 2, device).unwrap();
        let loss = x.binary_cross_entropy_with_logits(&t, None, None, LossReduction::None).unwrap();
        assert_eq!(loss.to_vec::<f32>().unwrap(), [200.0, 200.0], "on {device}");
        // A target of 0 contributes nothing to the divergence.
        let loss = x.kl_div(&Tensor::zeros(2, device).unwrap(), LossReduction::Sum, false).unwrap();
        assert_eq!(loss.item::<f32>().unwrap(), 0.0);
    });
}

#[test]
fn ignored_and_out_of_range_labels() {
    each_device(|device| {
        let x = Tensor::arange(0, 6, 1, device).unwrap().mul_scalar(-1).unwrap().reshape([2, 3]).unwrap();
        let mut x = x.to_dtype(DType::F32).unwrap().detach();
        x = x.requires_grad_(true).unwrap();
        let weight = Tensor::from_slice(&[1f32, 2.0, 3.0], 3, device).unwrap();
        let weighted = CrossEntropy { weight: Some(&weight), label_smoothing: 0.1, ..CrossEntropy::default() };
        let ignored = Tensor::from_slice(&[-100i64, -100], 2, device).unwrap();
        for options in [CrossEntropy::default(), weighted] {
            let loss = x.cross_entropy_with(&ignored, options).unwrap();
            assert!(loss.item::<f32>().unwrap().is_nan(), "of none");
            loss.backward().unwrap();
            assert_eq!(f64s(&x.grad().unwrap()).sum(), 0.0, "{options:?} on {device}");
            x.zero_grad();
            let sum = CrossEntropy { reduction: LossReduction::Sum, ..options };
            assert_eq!(x.cross_entropy_with(&ignored, sum).unwrap().item::<f32>().unwrap(), 0.0);
            let wrong = Tensor::from_slice(&[0i64, 3], 2, device).unwrap();
            let read = x.cross_entropy_with(&wrong, options).and_then(|loss| loss.item::<f32>());
            assert!(matches!(read, Err(Error::IndexOutOfRange { index: 3, size: 3, .. })), "{read:?} on {device}");
        }
        let half = x.to_dtype(DType::F16).unwrap();
        let labels = Tensor::from_slice(&[0u8, 255], 2, device).unwrap();
        let options = CrossEntropy { ignore_index: 255, label_smoothing: 0.1, ..CrossEntropy::default() };
        let (got, want) = (half.cross_entropy_with(&labels, options).unwrap(), x.cross_entropy_with(&labels, options).unwrap());
        assert!((f64s(&got).sum() - f64s(&want).sum()).abs() < 2e-3);
    });
}

#[test]
fn errors_of_losses_name_the_mismatch() {
    let (x, y) = (Tensor::zeros(&[2, 3], Device::Cpu).unwrap(), Tensor::zeros(&[3, 2], Device::Cpu).unwrap());
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    let mean = LossReduction::Mean;
    says("mse_loss: shapes", x.mse_loss(&y));
    says("smooth_l1_loss: beta", x.smooth_l1_loss(&x, -1.0, mean));
    says("huber_loss: delta", x.huber_loss(&x, 0.0, mean));
    says("kl_div: dtypes", x.kl_div(&x.to_dtype(DType::F64).unwrap(), mean, false));
    says("floats", x.to_dtype(DType::I64).unwrap().mse_loss(&x.to_dtype(DType::I64).unwrap()));
    says("[N, D]", x.cosine_embedding_loss(&x, &x, 0.0, mean));
    let labels = Tensor::zeros(2, (DType::I64, Device::Cpu)).unwrap();
    let smoothed = CrossEntropy { label_smoothing: 1.5, ..CrossEntropy::default() };
    says("label_smoothing", x.cross_entropy_with(&labels, smoothed));
    let weight = Tensor::ones(2, Device::Cpu).unwrap();
    says("weight for each class", x.nll_loss(&labels, CrossEntropy { weight: Some(&weight), ..CrossEntropy::default() }));
    says("without C", y.cross_entropy(&labels));
    says("shape of the logits", x.cross_entropy(&y));
}
