//! Leaves that optimizers move to other memory or replace, and formulas that are launched repeatedly.

use claystone::device::count_launches;
use claystone::ops::MapInto;
use claystone::{DType, Device, Error, Tensor, no_grad};

use crate::common::{each_device, vec};

fn leaf(device: Device) -> Tensor {
    Tensor::full(2, 3.0, device).unwrap().requires_grad_(true).unwrap()
}

#[test]
fn moved_leaves_stay_the_same_leaf() {
    each_device(|device| {
        let w = leaf(device);
        let (data, grads) = (Tensor::zeros(4, device).unwrap(), Tensor::zeros(4, device).unwrap());
        let moved = w.with_data(data.narrow(0, 2, 2).unwrap()).unwrap();
        moved.set_grad_slot(grads.narrow(0, 1, 2).unwrap()).unwrap();
        assert_eq!(w.leaf_id(), moved.leaf_id());
        assert!(w.grad_slot().unwrap().shares_storage(&grads));
        no_grad(|| moved.fill_(5.0).map(|_| ())).unwrap();
        moved.mul_scalar(7).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&data), [0.0, 0.0, 5.0, 5.0]);
        assert_eq!(vec(&grads), [0.0, 7.0, 7.0, 0.0]);
        assert!(w.grad().unwrap().shares_storage(&grads));
        assert_eq!(vec(&w), [3.0, 3.0], "other handles keep their memory");
    });
}

/// The gradient `grads` is passed to `v` unchanged, but its memory is also the slot for the gradient of `w`, which must not
/// overwrite it.
#[test]
fn gradients_in_a_slot_are_not_overwritten() {
    each_device(|device| {
        let (w, v, grads) = (leaf(device), leaf(device), Tensor::full(2, 4.0, device).unwrap());
        w.set_grad_slot(grads.shallow_clone()).unwrap();
        let half = w.to_dtype(DType::F16).unwrap().mul_scalar(2).unwrap();
        let y = half.to_dtype(DType::F32).unwrap().add(&v).unwrap();
        y.backward_with(&grads).unwrap();
        assert_eq!((vec(&v.grad().unwrap()), vec(&w.grad().unwrap())), (vec![4.0; 2], vec![8.0; 2]), "{device}");
    });
}

#[test]
fn moved_leaves_keep_shape_dtype_and_device() {
    each_device(|device| {
        let w = leaf(device);
        let zeros = |n: usize, dtype| Tensor::zeros(n, (dtype, device)).unwrap();
        assert!(matches!(w.with_data(zeros(3, DType::F32)), Err(Error::ShapeMismatch { op: "with_data", .. })));
        assert!(matches!(w.with_data(zeros(2, DType::F16)), Err(Error::DTypeMismatch { op: "with_data", .. })));
        let result = w.exp().unwrap();
        assert!(matches!(result.with_data(zeros(2, DType::F32)), Err(Error::Autograd { op: "with_data", .. })));
        let op = w.detach().set_grad_slot(zeros(2, DType::F32));
        assert!(matches!(op, Err(Error::Autograd { op: "set_grad_slot", .. })));
        let column = Tensor::zeros([2, 2], device).unwrap().select(1, 0).unwrap();
        assert!(matches!(w.set_grad_slot(column), Err(Error::Invalid { op: "set_grad_slot", .. })));
        let successor = w.succeeded_by(zeros(3, DType::F32), None, None);
        assert!(matches!(successor, Err(Error::ShapeMismatch { op: "succeeded_by", .. })));
        let successor = w.succeeded_by(zeros(2, DType::I64), None, None);
        assert!(matches!(successor, Err(Error::UnsupportedDType { op: "succeeded_by", .. })));
        assert!(w.successor().is_none() && w.grad_slot().is_none(), "what fails changes nothing");
    });
}

#[test]
fn successors_of_successors_refer_to_the_first_leaf() {
    each_device(|device| {
        let w = leaf(device);
        let half = w.succeeded_by(w.detach().to_dtype(DType::F16).unwrap(), None, None).unwrap();
        let grad = Tensor::full(2, 4.0, device).unwrap();
        let last = half.succeeded_by(half.detach().to_dtype(DType::F32).unwrap(), Some(grad), None).unwrap();
        assert_eq!(w.successor().unwrap().leaf_id(), last.leaf_id());
        assert_eq!(vec(&w.grad().unwrap()), [4.0, 4.0]);
        last.mul_scalar(2).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&w.grad().unwrap()), [6.0, 6.0]);
        assert!(last.successor().is_none());
    });
}

#[test]
fn repeated_formulas_take_one_launch_each() {
    each_device(|device| {
        let x = Tensor::ones(3, device).unwrap();
        let handles = || vec![x.shallow_clone()];
        let scale = MapInto::new("scale", handles(), 1, handles(), |e, s| vec![&e[0] * &s[0]]).unwrap();
        for factor in [2, 5] {
            let (launched, launches) = count_launches(|| scale.launch(&[factor.into()]));
            launched.unwrap();
            assert_eq!(launches, 1);
        }
        assert_eq!(vec(&x), [10.0; 3]);
        assert!(matches!(scale.launch(&[]), Err(Error::Invalid { op: "scale", .. })));
        assert!(MapInto::new("none", handles(), 0, handles(), |_, _| vec![]).is_err());

        let w = leaf(device);
        let tracked = || vec![w.shallow_clone()];
        let made = no_grad(|| MapInto::new("double", tracked(), 0, tracked(), |e, _| vec![&e[0] + &e[0]])).unwrap();
        assert!(matches!(made.launch(&[]), Err(Error::Autograd { op: "double", .. })));
        no_grad(|| made.launch(&[])).unwrap();
        assert_eq!(vec(&w), [6.0, 6.0]);

        let i = Tensor::full(2, 4, (DType::I32, device)).unwrap();
        let whole = || vec![i.shallow_clone()];
        let product = MapInto::new("whole", whole(), 1, whole(), |e, s| vec![&e[0] * &s[0]]).unwrap();
        assert!(matches!(product.launch(&[0.5.into()]), Err(Error::Invalid { op: "whole", .. })));
        product.launch(&[3.into()]).unwrap();
        assert_eq!(i.to_vec::<i32>().unwrap(), [12, 12]);
    });
}
