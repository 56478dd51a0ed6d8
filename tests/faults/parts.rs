//! In-place operations that consist of several commands. After a failure their targets must be unchanged, unless the error is
//! [`Error::Partial`].

use claystone::nn::{BatchNorm1d, Module, init};
use claystone::ops::ScatterReduce;
use claystone::optim::{AdamW, AdamWConfig, GradScaler, GradScalerConfig, Optimizer};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::stand_in::{Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);

/// The tensors to which an operation writes, and the operation.
type Case = (Vec<Tensor>, Box<dyn FnMut() -> Result<()>>);

fn ramp(n: usize) -> Tensor {
    Tensor::arange(1, n as i64 + 1, 1, DEVICE).unwrap()
}

fn scatter_reduce(reduce: ScatterReduce, include_self: bool) -> Case {
    let t = ramp(8);
    let (index, source) = (Tensor::arange(0, 8, 1, (DType::I64, DEVICE)).unwrap(), ramp(8));
    let target = t.shallow_clone();
    (vec![target], Box::new(move || t.scatter_reduce_(0, &index, &source, reduce, include_self).map(drop)))
}

fn mean() -> Case {
    scatter_reduce(ScatterReduce::Mean, true)
}

fn product_without_self() -> Case {
    scatter_reduce(ScatterReduce::Prod, false)
}

/// Returns a case that runs backward with two leaves that already have gradients.
fn backward() -> Case {
    let leaves = [3, 5].map(|n| ramp(n).requires_grad_(true).unwrap());
    let [a, b] = &leaves;
    let loss = || a.square()?.sum((), false)?.mul(&b.square()?.sum((), false)?);
    loss().unwrap().backward().unwrap();
    let (gradients, again) = (leaves.iter().filter_map(Tensor::grad).collect(), loss().unwrap());
    (gradients, Box::new(move || again.backward()))
}

fn batch_norm() -> Case {
    let (norm, x) = (BatchNorm1d::new(3, DEVICE).unwrap(), ramp(12).reshape([4, 3]).unwrap());
    let buffers = norm.named_buffers("").into_iter().map(|(_, t)| t.shallow_clone()).collect();
    (buffers, Box::new(move || norm.forward(&x).map(drop)))
}

fn trunc_normal() -> Case {
    let t = ramp(100);
    (vec![t.shallow_clone()], Box::new(move || init::trunc_normal_(&t, 0.0, 1.0, -1.0, 1.0)))
}

fn load_state() -> Case {
    let made = || {
        let mut w = ramp(4).requires_grad_(true).unwrap();
        let mut adam = AdamW::new(vec![&mut w], AdamWConfig::default()).unwrap();
        w.square().unwrap().sum((), false).unwrap().backward().unwrap();
        adam.step().unwrap();
        (w, adam)
    };
    let ((w, mut adam), (_, other)) = (made(), made());
    w.square().unwrap().sum((), false).unwrap().backward().unwrap();
    adam.step().unwrap();
    let (state, before) = (other.state_dict().unwrap(), adam.state_dict().unwrap());
    let tensors = before.iter().filter(|(_, t)| t.device() == DEVICE).map(|(_, t)| t.shallow_clone()).collect();
    (tensors, Box::new(move || adam.load_state_dict(&state)))
}

/// The operation's name in errors, and a function that creates the case.
type NamedCase = (&'static str, fn() -> Case);

const CASES: [NamedCase; 6] = [
    ("scatter_reduce_", mean),
    ("scatter_reduce_", product_without_self),
    ("backward", backward),
    ("BatchNorm::forward", batch_norm),
    ("trunc_normal_", trunc_normal),
    ("load_state_dict", load_state),
];

#[test]
fn failed_in_place_operations_change_nothing_or_are_partial_errors() {
    let Some(faults) =
        Faults::install("parts::failed_in_place_operations_change_nothing_or_are_partial_errors", Kind::Real)
    else {
        return;
    };
    let values = |tensors: &[Tensor]| -> Vec<Vec<f64>> {
        tensors.iter().map(|t| t.to_dtype(DType::F64).unwrap().to_vec().unwrap()).collect()
    };
    for (name, case) in CASES {
        let (_, mut warm) = case();
        warm().unwrap(); // compiles the kernels
        let (mut partial, mut whole) = (0, 0);
        for nth in 1.. {
            let (targets, mut operation) = case();
            let before = values(&targets);
            let known = faults.injected("any");
            faults.fail("any", nth, 1, -36);
            let result = operation();
            faults.clear();
            match result {
                Ok(()) if faults.injected("any") == known => break,
                Ok(()) => {}
                Err(Error::Partial { op, .. }) => {
                    assert_eq!(op, name);
                    partial += 1;
                }
                Err(error) => {
                    assert!(matches!(error, Error::OpenCl { .. }), "{name}, call {nth}: {error}");
                    assert_eq!(values(&targets), before, "{name}, call {nth}: {error}");
                    whole += 1;
                }
            }
        }
        assert!(partial > 0 && whole > 0, "{name}: {partial} in part, {whole} not at all");
    }
}

/// If a scaled step is repeated after a failure, gradients must not be divided by the scale a second time.
#[test]
fn failed_scaled_steps_can_be_repeated() {
    let Some(faults) = Faults::install("parts::failed_scaled_steps_can_be_repeated", Kind::Real) else { return };
    let mut w = Tensor::ones(&[4], DEVICE).unwrap().requires_grad_(true).unwrap();
    let mut sgd = claystone::optim::Sgd::new(vec![&mut w], Default::default()).unwrap();
    sgd.set_learning_rate(0.25);
    let mut scaler = GradScaler::new(GradScalerConfig { init_scale: 8.0, ..Default::default() }).unwrap();
    scaler.scale(&w.sum((), false).unwrap()).unwrap().backward().unwrap();
    scaler.unscale_(&sgd).unwrap();
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -36);
    let error = scaler.step(&mut sgd).unwrap_err();
    assert!(matches!(error, Error::OpenCl { .. }), "{error}");
    assert!(scaler.step(&mut sgd).unwrap());
    assert_eq!(w.to_vec::<f32>().unwrap(), [0.75; 4]);
}
