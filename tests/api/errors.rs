//! Bad input gives one clear error from a method, and every other tensor still holds its values.

use std::sync::atomic::{AtomicUsize, Ordering};

use claystone::autograd::checkpoint;
use claystone::nn::{Conv2d, MultiheadAttention};
use claystone::ops::{self, Backend, Expr, Implementation, register};
use claystone::optim::{Sgd, SgdConfig};
use claystone::{ConvOptions, CrossEntropy, DType, Device, Error, MaxPoolOptions, Result, Tensor};

use crate::common::{alone, each_device, iota};

/// Runs `bad`, expects its error to mention all of `words`, and checks that a bystander is unharmed.
#[track_caller]
fn refused<T>(device: Device, words: &[&str], bad: impl FnOnce() -> Result<T>) -> Error {
    let bystander = iota(&[5, 7], device);
    let error = bad().err().expect("an error");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "'{message}' does not mention '{word}'");
    }
    assert!(message.lines().next().unwrap().len() < 500, "{message}");
    let values = bystander.to_vec::<f32>().unwrap();
    assert!(values.iter().enumerate().all(|(i, &x)| x == i as f32), "a bystander lost its values on {device}");
    let sum = bystander.add(&bystander).unwrap().sum((), false).unwrap().item::<f32>().unwrap();
    assert_eq!(sum, 35.0 * 34.0, "{device} no longer computes");
    error
}

#[test]
fn shapes_that_do_not_go_together() {
    each_device(|d| {
        let (a, b) = (iota(&[2, 3], d), iota(&[4], d));
        refused(d, &["add", "[2, 3]", "[4]"], || a.add(&b));
        refused(d, &["add", "[2, 3]"], || a.narrow(0, 0, 1)?.add_(&a).map(|_| ()));
        refused(d, &["matmul", "[2, 3]"], || a.matmul(&a));
        refused(d, &["matmul", "[2, 3] and [4] "], || a.matmul(&b));
        refused(d, &["reshape", "[2, 3]"], || a.reshape([4, 2]));
        refused(d, &["mse_loss"], || a.mse_loss(&b));
    });
}

#[test]
fn dimensions_and_indices_out_of_range() {
    each_device(|d| {
        let a = iota(&[2, 3], d);
        refused(d, &["transpose", "dimension 2", "-2..2"], || a.transpose(0, 2));
        refused(d, &["sum", "dimension -3"], || a.sum(-3, false));
        refused(d, &["narrow"], || a.narrow(1, 2, 2));
        refused(d, &["softmax", "dimension 5"], || a.softmax(5));
        let index = Tensor::from_slice(&[0i64, 2], 2, d).unwrap();
        refused(d, &["index 2", "size 2"], || a.index_select(0, &index)?.to_vec::<f32>());
        let negative = Tensor::from_slice(&[-1i64, 0], 2, d).unwrap();
        refused(d, &["index -1", "size 2"], || a.index_select(0, &negative)?.to_vec::<f32>());
        let labels = Tensor::from_slice(&[0i64, 3], 2, d).unwrap();
        refused(d, &["3"], || a.cross_entropy(&labels)?.item::<f32>());
    });
}

#[test]
fn dtypes_that_differ_or_do_not_fit() {
    each_device(|d| {
        let (a, b) = (iota(&[3], d), Tensor::ones(&[3], (DType::F16, d)).unwrap());
        let e = refused(d, &["matmul", "f32", "f16", "to_dtype"], || a.matmul(&b));
        assert!(matches!(e, Error::DTypeMismatch { lhs: DType::F32, rhs: DType::F16, .. }));
        refused(d, &["f32", "f64"], || a.to_vec::<f64>());
        let ints = Tensor::ones(&[3], (DType::I64, d)).unwrap();
        refused(d, &["requires_grad_", "i64"], || ints.detach().requires_grad_(true));
        refused(d, &["add", "i64", "f32"], || ints.add_(&a).map(|_| ()));
        refused(d, &["mul_scalar", "i64", "f32"], || ints.mul_scalar_(0.5).map(|_| ()));
        refused(d, &["add_scalar", "bool", "i64"], || ints.eq_scalar(1)?.add_scalar_(1).map(|_| ()));
        refused(d, &["bitwise_and", "f32"], || a.bitwise_and(&ints));
        refused(d, &["masked_fill", "0.5", "i64"], || ints.masked_fill(&ints, 0.5));
        refused(d, &["mean", "i64"], || ints.mean((), false));
        refused(d, &["cross_entropy", "dtype f32", "labels"], || iota(&[2, 3], d).cross_entropy(&iota(&[2], d)));
        refused(d, &["nll_loss", "dtype f32"], || iota(&[2, 3], d).nll_loss(&iota(&[2], d), CrossEntropy::default()));
        refused(d, &["exp", "i64"], || ints.exp_().map(|_| ()));
        refused(d, &["rand", "i32"], || Tensor::rand(&[2], (DType::I32, d)));
    });
}

#[test]
fn devices_that_are_not_there_or_differ() {
    let missing = Device::OpenCL(77);
    for e in [Tensor::zeros(&[2], missing).err(), Tensor::rand(&[2], missing).err(), missing.info().err()] {
        assert!(matches!(e, Some(Error::NoDevice { .. })), "{e:?}");
    }
    each_device(|d| {
        if d == Device::Cpu {
            return;
        }
        let (a, b) = (iota(&[3], d), iota(&[3], Device::Cpu));
        refused(d, &["add", "cpu", &d.to_string(), "to_device"], || a.add(&b));
        refused(d, &["matmul", "cpu"], || iota(&[3, 3], d).matmul(&iota(&[3, 3], Device::Cpu)));
        let turned = iota(&[2, 3], Device::Cpu).t().unwrap();
        refused(d, &["copy_", "cpu"], || iota(&[3, 2], d).copy_(&turned).map(|_| ()));
    });
}

#[test]
fn more_memory_than_the_device_has() {
    each_device(|d| {
        for shape in [vec![1usize << 46], vec![usize::MAX, usize::MAX], vec![1 << 31, 1 << 31]] {
            let words = ["out of memory", &d.to_string()];
            let e = refused(d, &words, || Tensor::zeros(shape.clone(), d));
            assert!(matches!(e, Error::OutOfMemory { .. }), "{e:?}");
            // Sizes that no offset could be computed from are no view either.
            let words = if shape[0] == usize::MAX { &["expand"][..] } else { &words };
            refused(d, words, || iota(&[1], d).expand(shape.clone())?.try_clone());
        }
    });
}

#[test]
fn integer_division_by_zero() {
    each_device(|d| {
        for dtype in [DType::I64, DType::I32, DType::U8, DType::U32] {
            let a = Tensor::full(&[100], 7, (dtype, d)).unwrap();
            let b = Tensor::ones(&[100], (dtype, d)).unwrap();
            b.narrow(0, 63, 1).unwrap().fill_(0).unwrap();
            refused(d, &["division by zero"], || a.div_trunc(&b)?.to_dtype(DType::I64)?.to_vec::<i64>());
            refused(d, &["division by zero"], || a.fmod(&b)?.to_dtype(DType::I64)?.to_vec::<i64>());
            refused(d, &["division by zero"], || a.div_trunc_scalar(0)?.to_dtype(DType::I64)?.to_vec::<i64>());
            assert_eq!(a.div_trunc_scalar(2).unwrap().to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap(), [3; 100]);
        }
        let a = iota(&[2], d);
        assert_eq!(a.div_scalar(0).unwrap().to_vec::<f32>().unwrap()[1], f32::INFINITY, "floats divide by zero");
    });
}

#[test]
fn in_place_into_elements_that_are_one() {
    each_device(|d| {
        let a = iota(&[1, 3], d);
        refused(d, &["strides", "clone"], || a.expand([4, 3])?.fill_(1).map(|_| ()));
    });
}

#[test]
fn overlapping_in_place_operands_behave_as_if_read_first() {
    each_device(|d| {
        let a = iota(&[6], d);
        a.narrow(0, 1, 5).unwrap().copy_(&a.narrow(0, 0, 5).unwrap()).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        let m = iota(&[3, 3], d);
        m.add_(&m.t().unwrap()).unwrap();
        assert_eq!(m.to_vec::<f32>().unwrap(), [0.0, 4.0, 8.0, 4.0, 8.0, 12.0, 8.0, 12.0, 16.0]);
        let f = iota(&[4], d);
        f.copy_(&f.flip(0).unwrap()).unwrap();
        assert_eq!(f.to_vec::<f32>().unwrap(), [3.0, 2.0, 1.0, 0.0]);
    });
}

#[test]
fn expressions_that_make_no_sense() {
    use claystone::ops::Expr;
    each_device(|d| {
        let a = iota(&[3], d);
        refused(d, &["map", "closure"], || Tensor::map(&[&a], |_| Expr::input(3)));
        refused(d, &["map"], || Tensor::map(&[], |_| Expr::constant(1.0)));
        refused(d, &["map_into", "2 formulas"], || Tensor::map_into(&[&a], &[], &[&a], |e, _| vec![e[0].clone(); 2]));
    });
}

#[test]
fn sizes_beyond_all_bounds() {
    let m = isize::MAX as usize;
    each_device(|d| {
        let (one, none) = (Tensor::ones(1, d).unwrap(), Tensor::zeros(0, d).unwrap());
        // A size of 0 hides the others from the product.
        refused(d, &["memory"], || Tensor::zeros(&[0, m, 4], d));
        refused(d, &["memory"], || Tensor::empty(&[m, 0, 4], d));
        refused(d, &["reshape"], || none.reshape([0, m, 4]));
        refused(d, &["shape [0, "], || Tensor::from_vec(Vec::<f32>::new(), &[0, m, 4], d));
        refused(d, &["expand"], || one.expand([m, 3]));
        let wide = one.expand(m).unwrap();
        refused(d, &["memory"], || wide.to_vec::<f32>());
        refused(d, &["memory"], || wide.add(&wide));
        refused(d, &["memory"], || Tensor::randperm(m, d));
        refused(d, &["memory"], || Tensor::randperm(usize::MAX, d));
    });
}

#[test]
fn formulas_that_read_what_is_not_there() {
    each_device(|d| {
        let x = iota(&[2, 2], d);
        refused(d, &["map"], || Tensor::map(&[&x], |_| Expr::input(usize::MAX)));
        refused(d, &["map"], || Tensor::map(&[&x], |e| &e[0] + Expr::scalar(usize::MAX)));
        // Of integers a formula of floats would be cut short, or not compile.
        let n = x.to_dtype(DType::I64).unwrap();
        refused(d, &["linear_map", "i64"], || n.linear_map(&n, None, |z| z * 0.5));
        assert_eq!(n.linear_map(&n, None, |z| z * 2.0).unwrap().to_vec::<i64>().unwrap(), [2, 6, 6, 26]);
    });
}

#[test]
fn sequences_and_parameters_that_make_no_sense() {
    each_device(|d| {
        refused(d, &["arange", "-0.5"], || Tensor::arange(0, -0.5, 1, d));
        let mut w = Tensor::ones(2, d).unwrap().requires_grad_(true).unwrap();
        let mut tied = w.shallow_clone();
        refused(d, &["Sgd", "twice"], || Sgd::new(vec![&mut w, &mut tied], SgdConfig::default()));
    });
}

#[test]
fn views_and_layers_beyond_all_bounds() {
    let m = isize::MAX as usize;
    each_device(|d| {
        let one = Tensor::ones(1, d).unwrap();
        // Bytes of so many elements overflow.
        refused(d, &["memory"], || one.expand(1usize << 62)?.pin_memory(d));
        refused(d, &["as_strided"], || one.as_strided([0, 3], &[isize::MIN, 1], 0));
        refused(d, &["as_strided"], || one.as_strided([0], &[1], 99));
        assert_eq!(one.as_strided([0, 3], &[7, 1], 1).unwrap().sum((), false).unwrap().item::<f32>().unwrap(), 0.0);
        refused(d, &["memory"], || Conv2d::new(1, 1, [m, 4], ConvOptions::default(), d).map(drop));
        refused(d, &["memory"], || MultiheadAttention::new(m, 1, d).map(drop));
        // A list of so many tensors, and of so many rows.
        refused(d, &["tensor_split"], || one.tensor_split(1 << 60, 0));
        refused(d, &["room"], || Tensor::tril_indices(1 << 60, 2, 0, d));
        assert_eq!(Tensor::tril_indices(1 << 60, 2, 2 - (1 << 60), d).unwrap().numel(), 2 * 3);
        assert_eq!(Tensor::triu_indices(1 << 60, 2, 0, d).unwrap().to_vec::<i64>().unwrap(), [0, 0, 1, 0, 1, 1]);
        assert_eq!(one.diff(usize::MAX, 0).unwrap().numel(), 0);
    });
}

#[test]
fn windows_of_nothing_but_padding() {
    each_device(|d| {
        // Of two elements, four apart, one lies before and one behind an image of one.
        let x = Tensor::ones([1, 1, 1], d).unwrap();
        let options = MaxPoolOptions { padding: [2, 0].into(), dilation: [4, 1], ..MaxPoolOptions::default() };
        refused(d, &["max_pool2d", "padding"], || x.max_pool2d([2, 1], options));
        let wide = Tensor::ones([1, 3, 1], d).unwrap();
        assert_eq!(wide.max_pool2d([2, 1], options).unwrap().shape().dims(), [1, 2, 1]);
        let far = ConvOptions { stride: [1 << 62, 1], padding: (1 << 62).into(), ..ConvOptions::default() };
        refused(d, &["conv2d", "padding"], || x.conv2d(&Tensor::ones([1, 1, 1, 1], d)?, None, far));
    });
}

/// In a process of its own: others use the operation that it replaces.
#[test]
fn code_of_the_users_that_gives_something_else() {
    if !alone("errors::code_of_the_users_that_gives_something_else") {
        return;
    }
    each_device(|d| {
        let x = iota(&[2, 3], d).requires_grad_(true).unwrap();
        // A gradient of another dtype would be read as if it were the input's.
        let halves = Implementation::new(|x, _| Ok(vec![x[0].exp()?]))
            .with_backward(|_, _, grad| Ok(vec![Some(grad.to_dtype(DType::F16)?)]));
        let _kept = register("gradient_of_halves", d.into(), halves).unwrap();
        let call = || ops::call("gradient_of_halves", &[&x], &[])?[0].sum((), false)?.backward();
        refused(d, &["gradient_of_halves", "dtype"], call);
        // What is made of a replaced operation does not trust its shape.
        let short = Implementation::new(|x, _| Ok(vec![Tensor::ones(1, x[0])?]));
        let _short = register("sub", d.into(), short).unwrap();
        refused(d, &["[1]"], || x.std(1, 1, false));

        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let f = |x: &[Tensor]| match CALLS.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => x[0].mul_scalar(2),
            _ => x[0].mul_scalar(2)?.narrow(0, 0, 1),
        };
        let words = ["checkpoint", "[2, 3]", "[1, 3]"];
        refused(d, &words, || checkpoint(f, &[&x])?.sum((), false)?.backward());
    });
}

#[test]
fn a_registration_may_be_held_by_another() {
    let same = |x: &[&Tensor]| Ok(vec![x[0].shallow_clone()]);
    let inner = register("held", Backend::Cpu, Implementation::new(move |x, _| same(x))).unwrap();
    let holder = Implementation::new(move |x, _| {
        let _inner = &inner;
        same(x)
    });
    let outer = register("holder", Backend::Cpu, holder).unwrap();
    let x = iota(&[2], Device::Cpu);
    assert!(ops::call("held", &[&x], &[]).is_ok() && ops::call("holder", &[&x], &[]).is_ok());
    drop(outer);
    assert!(ops::call("held", &[&x], &[]).is_err() && ops::call("holder", &[&x], &[]).is_err());
}

/// What an operation in place had written before it failed counts as a change.
#[test]
fn a_failed_change_is_a_change() {
    each_device(|d| {
        let index = Tensor::from_slice(&[1i64, 0], 2, d).unwrap();
        let y = iota(&[2, 3], d).requires_grad_(true).unwrap().index_select(0, &index).unwrap();
        let divided = index.div_trunc_scalar_(0).map(|_| ()).and_then(|()| d.synchronize());
        assert!(matches!(divided, Err(Error::DivisionByZero { .. })), "{divided:?}");
        refused(d, &["index_select", "changed in place"], || y.sum((), false)?.backward());
    });
}
