//! Recurrent layers, compared with loops in f64.

use std::collections::HashMap;

use claystone::autograd::gradcheck;
use claystone::nn::{Gru, Lstm, Module, Rnn, RnnOptions};
use claystone::{DType, Device, Error, Tensor, manual_seed};
use ndarray::{Array3, ArrayD, Axis, Ix3, s};

use crate::common::{each_device, f64s};

pub const INPUT: usize = 3;
pub const HIDDEN: usize = 4;
const STEPS: usize = 5;
const BATCH: usize = 2;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the next hidden and cell state. `x` and `z` are the gates' products with input and hidden state, `gates * HIDDEN` numbers each.
fn next(kind: &str, x: &[f64], z: &[f64], h: &[f64], c: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let sum = |gate: usize, i: usize| x[gate * HIDDEN + i] + z[gate * HIDDEN + i];
    let each = |f: &dyn Fn(usize) -> f64| (0..HIDDEN).map(f).collect::<Vec<f64>>();
    match kind {
        "tanh" => (each(&|i| sum(0, i).tanh()), c.to_vec()),
        "relu" => (each(&|i| sum(0, i).max(0.0)), c.to_vec()),
        "lstm" => {
            let c = each(&|i| sigmoid(sum(1, i)) * c[i] + sigmoid(sum(0, i)) * sum(2, i).tanh());
            (each(&|i| sigmoid(sum(3, i)) * c[i].tanh()), c)
        }
        _ => {
            let new = |i: usize| (x[2 * HIDDEN + i] + sigmoid(sum(0, i)) * z[2 * HIDDEN + i]).tanh();
            (each(&|i| (1.0 - sigmoid(sum(1, i))) * new(i) + sigmoid(sum(1, i)) * h[i]), c.to_vec())
        }
    }
}

/// Returns the expected outputs `[L, N, directions * H]`, with zeros after the end of each sequence, and the last hidden and cell states
/// `[layers * directions, N, H]`.
pub fn reference(
    kind: &str,
    layer: &dyn Module,
    options: RnnOptions,
    x: &Array3<f64>,
    lengths: &[usize],
    start: &[Array3<f64>; 2],
) -> [Array3<f64>; 3] {
    let (steps, output) = (x.shape()[0], start[0].shape()[2]);
    let parameters: HashMap<String, ArrayD<f64>> =
        layer.named_parameters("").into_iter().map(|(name, t)| (name, f64s(t))).collect();
    let directions = if options.bidirectional { 2 } else { 1 };
    let mut last = start.clone();
    let mut below = x.clone();
    for l in 0..options.num_layers {
        let mut above = Array3::zeros((steps, lengths.len(), directions * output));
        for (d, suffix) in ["", "_reverse"].iter().enumerate().take(directions) {
            let of = |name: &str| parameters.get(&format!("{name}_l{l}{suffix}"));
            let affine = |name: &str, bias: &str, v: &[f64]| -> Vec<f64> {
                let rows = of(name).unwrap();
                let dot = |row: usize| (0..v.len()).map(|k| rows[[row, k]] * v[k]).sum::<f64>();
                (0..rows.shape()[0]).map(|row| dot(row) + of(bias).map_or(0.0, |b| b[[row]])).collect()
            };
            for (n, &length) in lengths.iter().enumerate() {
                let slot = l * directions + d;
                let mut h = start[0].slice(s![slot, n, ..]).to_vec();
                let mut c = start[1].slice(s![slot, n, ..]).to_vec();
                for t in 0..length {
                    let t = if d == 0 { t } else { length - 1 - t };
                    let x = affine("weight_ih", "bias_ih", &below.slice(s![t, n, ..]).to_vec());
                    let z = affine("weight_hh", "bias_hh", &h);
                    (h, c) = next(kind, &x, &z, &h, &c);
                    if output != HIDDEN {
                        h = affine("weight_hr", "", &h);
                    }
                    (0..output).for_each(|i| above[[t, n, d * output + i]] = h[i]);
                }
                (0..output).for_each(|i| last[0][[slot, n, i]] = h[i]);
                (0..HIDDEN).for_each(|i| last[1][[slot, n, i]] = c[i]);
            }
        }
        below = above;
    }
    let [h, c] = last;
    [below, h, c]
}

pub fn near(what: &str, got: &Tensor, right: &Array3<f64>) {
    assert_eq!(got.shape().dims(), right.shape(), "{what}");
    let worst =
        (f64s(got).into_dimensionality::<Ix3>().unwrap() - right).mapv(f64::abs).fold(0.0, |a: f64, &b| a.max(b));
    assert!(worst < 1e-5, "{what}: off by {worst}");
}

#[test]
fn recurrent_layers_match_formulas() {
    let plain = RnnOptions::default();
    let deep = RnnOptions { num_layers: 2, bidirectional: true, batch_first: true, ..plain };
    each_device(|device| {
        manual_seed(3);
        for options in [plain, RnnOptions { bias: false, ..plain }, deep] {
            let slots = options.num_layers * if options.bidirectional { 2 } else { 1 };
            let x = Tensor::randn(&[STEPS, BATCH, INPUT], device).unwrap();
            let state = || Tensor::randn(&[slots, BATCH, HIDDEN], device).unwrap();
            let (h, c) = (state(), state());
            let plain = |t: &Tensor| f64s(t).into_dimensionality::<Ix3>().unwrap();
            let turned = |t: &Tensor| if options.batch_first { t.transpose(0, 1).unwrap() } else { t.shallow_clone() };
            let zeros = Array3::zeros((slots, BATCH, HIDDEN));
            let given = [plain(&h), plain(&c)];
            let input = turned(&x);

            let tanh = Rnn::new(INPUT, HIDDEN, options, device).unwrap();
            let [y, last, _] = reference("tanh", &tanh, options, &plain(&x), &[STEPS; BATCH], &given);
            let (out, state) = tanh.run(&input, Some(&h)).unwrap();
            near("tanh", &turned(&out), &y);
            near("tanh's state", &state, &last);
            let relu = tanh.with_relu();
            let [y, ..] =
                reference("relu", &relu, options, &plain(&x), &[STEPS; BATCH], &[zeros.clone(), zeros.clone()]);
            near("relu", &turned(&relu.forward(&input).unwrap()), &y);

            let lstm = Lstm::new(INPUT, HIDDEN, options, device).unwrap();
            let [y, last, cell] = reference("lstm", &lstm, options, &plain(&x), &[STEPS; BATCH], &given);
            let (out, state) = lstm.run(&input, Some(&(h.shallow_clone(), c.shallow_clone()))).unwrap();
            near("lstm", &turned(&out), &y);
            near("lstm's hidden state", &state.0, &last);
            near("lstm's cell state", &state.1, &cell);

            let gru = Gru::new(INPUT, HIDDEN, options, device).unwrap();
            let [y, last, _] = reference("gru", &gru, options, &plain(&x), &[STEPS; BATCH], &given);
            let (out, state) = gru.run(&input, Some(&h)).unwrap();
            near("gru", &turned(&out), &y);
            near("gru's state", &state, &last);
            // The input is a single sequence without a batch dimension.
            let one = x.select(1, 1).unwrap();
            let (out, state) = gru.run(&one, Some(&h.select(1, 1).unwrap())).unwrap();
            near("one sequence", &out.unsqueeze(1).unwrap(), &y.select(Axis(1), &[1]));
            assert_eq!(state.shape().dims(), [slots, HIDDEN]);
        }
    });
}

#[test]
fn names_match_pytorch_and_all_parameters_have_gradients() {
    let options = RnnOptions { num_layers: 2, bidirectional: true, ..RnnOptions::default() };
    let lstm = Lstm::new(2, 3, options, (DType::F64, Device::Cpu)).unwrap();
    let names: Vec<String> = lstm.named_parameters("rnn").into_iter().map(|(name, _)| name).collect();
    let kinds = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"];
    let of = |end: &'static str| kinds.iter().map(move |kind| format!("rnn.{kind}_{end}"));
    let right: Vec<String> = ["l0", "l0_reverse", "l1", "l1_reverse"].into_iter().flat_map(of).collect();
    assert_eq!(names, right);
    let x = Tensor::randn(&[3, 2, 2], (DType::F64, Device::Cpu)).unwrap();
    gradcheck(|x| lstm.forward(&x[0])?.square()?.sum((), false), &[x.shallow_clone()], 1e-6).unwrap();
    lstm.forward(&x).unwrap().square().unwrap().sum((), false).unwrap().backward().unwrap();
    assert!(
        lstm.parameters().iter().all(|p| p.grad().is_some_and(|g| g
            .abs()
            .unwrap()
            .sum((), false)
            .unwrap()
            .item::<f64>()
            .unwrap()
            > 0.0))
    );
    let shapes: Vec<_> = lstm.parameters().iter().map(|p| p.shape().dims().to_vec()).collect();
    assert_eq!((&shapes[0][..], &shapes[8][..], &shapes[9][..]), (&[12, 2][..], &[12, 6][..], &[12, 3][..]));
    let again = Lstm::new(2, 3, options, (DType::F64, Device::Cpu)).unwrap();
    again.load_state_dict(&lstm.state_dict(), true).unwrap();
    assert!(again.forward(&x).unwrap().equal(&lstm.forward(&x).unwrap()).unwrap());
}

#[test]
fn recurrent_layers_can_be_built_from_existing_parameters() {
    let deep = RnnOptions { num_layers: 2, bidirectional: true, ..RnnOptions::default() };
    let x = Tensor::randn(&[STEPS, BATCH, INPUT], Device::Cpu).unwrap();
    let of = |layer: &dyn Module| layer.parameters().iter().map(|t| t.shallow_clone()).collect::<Vec<_>>();
    let same = |layer: &dyn Module, again: &dyn Module| {
        assert!(layer.forward(&x).unwrap().equal(&again.forward(&x).unwrap()).unwrap());
        again.forward(&x).unwrap().sum((), false).unwrap().backward().unwrap();
        assert!(layer.parameters().iter().all(|t| t.grad().is_some()), "it is the same tensors");
    };
    for options in [RnnOptions::default(), RnnOptions { bias: false, ..deep }, RnnOptions { proj_size: 2, ..deep }] {
        let lstm = Lstm::new(INPUT, HIDDEN, options, Device::Cpu).unwrap();
        same(&lstm, &Lstm::from_parameters(of(&lstm), options).unwrap());
    }
    let (gru, rnn) =
        (Gru::new(INPUT, HIDDEN, deep, Device::Cpu).unwrap(), Rnn::new(INPUT, HIDDEN, deep, Device::Cpu).unwrap());
    same(&gru, &Gru::from_parameters(of(&gru), deep).unwrap());
    same(&rnn, &Rnn::from_parameters(of(&rnn), deep).unwrap());

    let few = Gru::from_parameters(of(&gru)[..15].iter().map(Tensor::shallow_clone).collect(), deep);
    assert!(matches!(few, Err(Error::Invalid { op: "Gru::from_parameters", .. })));
    let none = Gru::from_parameters(Vec::new(), RnnOptions { num_layers: 0, ..deep });
    assert!(matches!(none, Err(Error::Invalid { .. })));
    for i in 0..16 {
        for wrong in [Tensor::ones(&[7, 5], Device::Cpu).unwrap(), Tensor::ones((), Device::Cpu).unwrap()] {
            let mut parameters = of(&gru);
            parameters[i] = wrong;
            let made = Gru::from_parameters(parameters, deep);
            assert!(matches!(made, Err(Error::ShapeMismatch { .. } | Error::Invalid { .. })), "parameter {i}");
        }
    }
}

#[test]
fn dropout_between_layers_applies_only_in_training() {
    let options = RnnOptions { num_layers: 2, dropout: 1.0, ..RnnOptions::default() };
    let gru = Gru::new(2, 3, options, Device::Cpu).unwrap();
    let (x, y) = (Tensor::ones(&[4, 1, 2], Device::Cpu).unwrap(), Tensor::zeros(&[4, 1, 2], Device::Cpu).unwrap());
    let same = || gru.forward(&x).unwrap().equal(&gru.forward(&y).unwrap()).unwrap();
    assert!(same(), "nothing of the input arrives");
    gru.eval();
    assert!(!same());
}

#[test]
fn mismatched_inputs_are_errors() {
    let gru = Gru::new(2, 3, RnnOptions::default(), Device::Cpu).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, Device::Cpu).unwrap();
    assert!(matches!(gru.forward(&zeros(&[4, 1, 3])), Err(Error::Invalid { .. })));
    assert!(matches!(gru.forward(&zeros(&[0, 1, 2])), Err(Error::Invalid { .. })));
    assert!(matches!(gru.forward(&zeros(&[2])), Err(Error::Invalid { .. })));
    let wrong = gru.run(&zeros(&[4, 1, 2]), Some(&zeros(&[1, 2, 3])));
    assert!(matches!(wrong, Err(Error::ShapeMismatch { op: "Gru::run", .. })));
    assert!(Gru::new(2, 0, RnnOptions::default(), Device::Cpu).is_err());
    assert!(Lstm::new(2, 3, RnnOptions { dropout: 1.5, ..RnnOptions::default() }, Device::Cpu).is_err());
    for hidden in [usize::MAX / 2, usize::MAX] {
        assert!(Lstm::new(2, hidden, RnnOptions::default(), Device::Cpu).is_err(), "more than can be counted");
    }
}
