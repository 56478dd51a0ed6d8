//! Optimizers whose parameters are shared with other optimizers, state dicts or tied layers, and conversions of the model.

use claystone::device::count_launches;
use claystone::nn::{Linear, Module, Sequential};
use claystone::optim::*;
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common::{each_device, f64s, vec};

fn leaf(value: f32, n: usize, device: Device) -> Tensor {
    Tensor::full(n, value, device).unwrap().requires_grad_(true).unwrap()
}

/// Runs a backward pass that gives gradients of 1.
fn backward(parameters: &[&Tensor]) {
    parameters.iter().for_each(|p| p.sum((), false).unwrap().backward().unwrap());
}

fn sgd(lr: f64) -> SgdConfig {
    SgdConfig { lr, ..Default::default() }
}

fn momentum(lr: f64) -> SgdConfig {
    SgdConfig { momentum: 0.5, ..sgd(lr) }
}

#[test]
fn optimizers_may_share_parameters() {
    each_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            let of = |n| leaf(8.0, n, device).detach().to_dtype(dtype).unwrap().requires_grad_(true).unwrap();
            let (mut a, mut b, mut c) = (of(3), of(5), of(2));
            let mut first = Sgd::new(vec![&mut a, &mut b], sgd(1.0)).unwrap();
            let mut second = Sgd::new(vec![&mut a, &mut b], momentum(0.5)).unwrap();
            // The third optimizer has some of the parameters in another order, and one more parameter.
            let mut third = Sgd::new(vec![&mut c, &mut b], sgd(0.25)).unwrap();
            backward(&[&a, &b, &c]);
            let (_, launches) = count_launches(|| first.step().unwrap());
            assert_eq!(launches, 1, "of the first on {device}");
            assert_eq!((f64s(&a)[0], f64s(&b)[4], f64s(&c)[1]), (7.0, 7.0, 8.0), "after the first on {device}");
            let (_, launches) = count_launches(|| second.step().unwrap());
            // For half precision, the second optimizer first copies the other optimizers' changes to its f32 master weights, in more launches.
            assert!(launches == 1 || dtype == DType::BF16, "{launches} of the second on {device}");
            assert_eq!((f64s(&a)[0], f64s(&b)[4], f64s(&c)[1]), (6.5, 6.5, 8.0), "after the second on {device}");
            third.step().unwrap();
            assert_eq!((f64s(&a)[0], f64s(&b)[4], f64s(&c)[1]), (6.5, 6.25, 7.75), "after the third on {device}");
            first.zero_grad();
            assert!(a.grad().is_none() && b.grad().is_none() && c.grad().is_some());
            backward(&[&a, &b]);
            drop(first);
            second.step().unwrap(); // the velocity is 1.5 in this step
            assert_eq!((f64s(&a)[0], f64s(&b)[4]), (5.75, 5.5), "without the first on {device}");
        }
    });
}

/// A second optimizer of the same model uses the same gradient buffers, and must still need only one launch.
#[test]
fn groups_may_share_parameters_with_other_optimizers() {
    each_device(|device| {
        let (mut a, mut b, mut c) = (leaf(1.0, 4, device), leaf(1.0, 4, device), leaf(1.0, 4, device));
        let mut first = Sgd::new(vec![&mut a, &mut b], sgd(0.5)).unwrap();
        let mut second = Sgd::new(vec![&mut c], sgd(0.5)).unwrap().with_group(vec![&mut a, &mut b], sgd(0.25)).unwrap();
        assert!(first.parameters()[1].shares_storage(&b) && second.parameters()[2].shares_storage(&b));
        backward(&[&a, &b, &c]);
        first.step().unwrap();
        let (_, launches) = count_launches(|| second.step().unwrap());
        assert_eq!((vec(&a), vec(&b), vec(&c), launches), (vec![0.25; 4], vec![0.25; 4], vec![0.5; 4], 2));
    });
}

#[test]
fn earlier_state_dicts_show_later_steps() {
    each_device(|device| {
        let mut net = Linear::new(3, 2, device).unwrap();
        let state = net.state_dict();
        let before = state.get("weight").unwrap().try_clone().unwrap();
        let other = net.parameters()[1].detach();
        let mut optimizer = AdamW::new(net.parameters_mut(), AdamWConfig { lr: 0.5, ..Default::default() }).unwrap();
        let later = net.state_dict();
        let x = Tensor::ones(&[1, 3], device).unwrap();
        net.forward(&x).unwrap().sum((), false).unwrap().backward().unwrap();
        optimizer.step().unwrap();
        assert_ne!(f64s(&before), f64s(net.parameters()[0]), "a step was made");
        for state in [&state, &later] {
            assert_eq!(f64s(state.get("weight").unwrap()), f64s(net.parameters()[0]), "on {device}");
            assert_eq!(f64s(state.get("bias").unwrap()), f64s(&other), "on {device}");
        }
        // Loading must write into the tensors that all handles share.
        let mut saved = later;
        saved.insert("weight", before.shallow_clone());
        net.load_state_dict(&saved, true).unwrap();
        assert_eq!(f64s(state.get("weight").unwrap()), f64s(&before));
    });
}

/// The parameter is a transposed view of another tensor's memory, and must stay a view.
#[test]
fn parameters_that_are_views_stay_views() {
    each_device(|device| {
        let all = Tensor::arange(0, 6, 1, (DType::F32, device)).unwrap().reshape([2, 3]).unwrap();
        let mut w = all.t().unwrap().requires_grad_(true).unwrap();
        let mut v = leaf(1.0, 2, device);
        let mut optimizer = Sgd::new(vec![&mut w, &mut v], momentum(1.0)).unwrap();
        let slope = Tensor::from_slice(&[0f32, 1.0, 2.0, 3.0, 4.0, 5.0], [3, 2], device).unwrap();
        let loss = w.mul(&slope).unwrap().sum((), false).unwrap().add(&v.sum((), false).unwrap()).unwrap();
        loss.backward().unwrap();
        optimizer.step().unwrap();
        assert_eq!((vec(&all), vec(&v)), (vec![0.0, -1.0, -2.0, 2.0, 1.0, 0.0], vec![0.0; 2]), "on {device}");
    });
}

struct Tied {
    inner: Linear,
    outer: Tensor,
}

impl Module for Tied {
    claystone::parts!(inner, outer);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.forward(x)?.linear(&self.outer, None)
    }
}

#[test]
fn optimizers_keep_tied_parameters_tied() {
    each_device(|device| {
        let inner = Linear::new(3, 3, device).unwrap();
        let outer = inner.parameters()[0].shallow_clone();
        let mut net = Tied { inner, outer };
        assert_eq!((net.parameters().len(), net.parameters_mut().len(), net.state_dict().len()), (2, 2, 3));
        let mut optimizer = Sgd::new(net.parameters_mut(), sgd(0.1)).unwrap();
        let x = Tensor::ones(&[2, 3], device).unwrap();
        for dtype in [None, Some(DType::BF16)] {
            dtype.into_iter().for_each(|dtype| net.to_dtype(dtype).unwrap());
            let before = f64s(&net.outer);
            optimizer.zero_grad();
            net.forward(&x.to_dtype(net.outer.dtype()).unwrap()).unwrap().sum((), false).unwrap().backward().unwrap();
            optimizer.step().unwrap();
            assert!(net.outer.shares_storage(net.parameters()[0]), "{dtype:?} on {device}");
            assert_ne!(f64s(&net.outer), before, "{dtype:?} on {device}");
        }
    });
}

/// After a conversion to another dtype or device, training must continue with the same moments and gradients, in one launch per step.
#[test]
fn optimizers_follow_converted_models() {
    each_device(|device| {
        for (dtype, home) in
            [(DType::F32, device), (DType::F32, Device::Cpu), (DType::BF16, device), (DType::F16, Device::Cpu)]
        {
            let made =
                || Sequential::new().push(Linear::new(2, 2, device).unwrap()).push(Linear::new(2, 1, device).unwrap());
            let (mut net, mut same) = (made(), made());
            same.load_state_dict(&net.state_dict(), true).unwrap();
            let config = AdamWConfig { lr: 0.01, ..Default::default() };
            let mut adamw = AdamW::new(net.parameters_mut(), config).unwrap();
            let mut right = AdamW::new(same.parameters_mut(), config).unwrap();
            let x = Tensor::from_slice(&[1f32, -2.0, 0.5, 3.0], [2, 2], device).unwrap();
            let pass = |net: &Sequential| {
                let like = net.parameters()[0];
                let x = x.to(like.dtype(), like.device()).unwrap();
                net.forward(&x).unwrap().square().unwrap().sum((), false).unwrap().backward().unwrap();
            };
            for _ in 0..3 {
                pass(&net);
                pass(&same);
                adamw.step().unwrap();
                right.step().unwrap();
            }
            net.to_dtype(dtype).unwrap();
            net.to_device(home).unwrap();
            assert!(net.parameters().iter().all(|p| p.dtype() == dtype && p.device() == home && p.grad().is_some()));
            adamw.zero_grad();
            right.zero_grad();
            assert!(net.parameters().iter().all(|p| p.grad().is_none()), "forgotten through the optimiser");
            for _ in 0..3 {
                pass(&net);
                pass(&same);
                adamw.step().unwrap();
                let (_, launches) = count_launches(|| adamw.step().unwrap());
                assert_eq!(launches, 1, "{dtype} on {home} from {device}");
                right.step().unwrap();
                right.step().unwrap();
            }
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 0.03 };
            for (got, want) in net.parameters().iter().zip(same.parameters()) {
                let close = f64s(got).iter().zip(&f64s(want)).all(|(g, w)| (g - w).abs() < tolerance);
                assert!(close, "{dtype} on {home} from {device}: {got} instead of {want}");
            }
            assert!(adamw.parameters().iter().all(|p| p.dtype() == dtype && p.device() == home));
        }
    });
}

/// If only half of a group was converted to another dtype, a step must be an error and change nothing.
#[test]
fn steps_of_partly_converted_groups_are_errors() {
    let (mut a, mut b) = (Linear::new(2, 2, Device::Cpu).unwrap(), Linear::new(2, 2, Device::Cpu).unwrap());
    let all = |a: &mut Linear, b: &mut Linear| {
        Sgd::new(a.parameters_mut().into_iter().chain(b.parameters_mut()).collect(), sgd(0.5)).unwrap()
    };
    let mut optimizer = all(&mut a, &mut b);
    b.to_dtype(DType::BF16).unwrap();
    backward(&a.parameters());
    backward(&b.parameters());
    let before = (f64s(a.parameters()[0]), f64s(b.parameters()[0]));
    let message = optimizer.step().unwrap_err().to_string();
    assert!(message.contains("converted") && message.contains("group"), "{message}");
    assert_eq!((f64s(a.parameters()[0]), f64s(b.parameters()[0])), before);
    a.to_dtype(DType::BF16).unwrap();
    optimizer.step().unwrap();
    assert_ne!(f64s(a.parameters()[0]), before.0);
    assert_ne!(f64s(b.parameters()[0]), before.1);
    let mut w = leaf(1.0, 2, Device::Cpu);
    let mut tied = w.shallow_clone();
    assert!(matches!(Sgd::new(vec![&mut w, &mut tied], sgd(0.5)).map(drop), Err(Error::Invalid { .. })), "twice");
}
