//! Invalid input returns one clear error, and all other tensors stay unchanged.

use std::sync::atomic::{AtomicUsize, Ordering};

use claystone::autograd::checkpoint;
use claystone::nn::{Conv2d, MultiheadAttention};
use claystone::ops::{self, Backend, Expr, Implementation, register};
use claystone::optim::{Sgd, SgdConfig};
use claystone::{ConvOptions, CrossEntropy, DType, Device, Error, MaxPoolOptions, Result, Tensor};

use crate::common::{each_device, in_own_process, iota};

/// Runs `bad`, expects an error whose message contains all of `words`, and checks that another tensor is unchanged.
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
fn mismatched_shapes() {
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
fn mismatched_and_unsupported_dtypes() {
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
        let bits = ints.eq_scalar(1).unwrap();
        refused(d, &["addr", "bool", "numbers"], || bits.addr(&bits, &bits, 1, 1));
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
fn missing_and_mismatched_devices() {
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
fn out_of_memory_leaves_tensors_intact() {
    each_device(|d| {
        for shape in [vec![1usize << 46], vec![usize::MAX, usize::MAX], vec![1 << 31, 1 << 31]] {
            let words = ["out of memory", &d.to_string()];
            let e = refused(d, &words, || Tensor::zeros(shape.clone(), d));
            assert!(matches!(e, Error::OutOfMemory { .. }), "{e:?}");
            // Sizes whose element offsets would overflow cannot be expanded to either.
            let words = if shape[0] == usize::MAX { &["expand"][..] } else { &words };
            refused(d, words, || iota(&[1], d).expand(shape.clone())?.try_clone());
        }
    });
}

#[test]
fn integer_division_by_zero() {
    each_device(|d| {
        for dtype in [DType::I64, DType::I32, DType::I16, DType::I8, DType::U8, DType::U32] {
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
fn in_place_writes_to_expanded_tensors() {
    each_device(|d| {
        let a = iota(&[1, 3], d);
        refused(d, &["strides", "clone"], || a.expand([4, 3])?.fill_(1).map(|_| ()));
    });
}

#[test]
fn overlapping_in_place_operands_are_read_before_the_write() {
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
fn invalid_expressions() {
    use claystone::ops::Expr;
    each_device(|d| {
        let a = iota(&[3], d);
        refused(d, &["map", "closure"], || Tensor::map(&[&a], |_| Expr::input(3)));
        refused(d, &["map"], || Tensor::map(&[], |_| Expr::constant(1.0)));
        refused(d, &["map_into", "2 formulas"], || Tensor::map_into(&[&a], &[], &[&a], |e, _| vec![e[0].clone(); 2]));
    });
}

#[test]
fn sizes_that_overflow() {
    let m = isize::MAX as usize;
    each_device(|d| {
        let (one, none) = (Tensor::ones(1, d).unwrap(), Tensor::zeros(0, d).unwrap());
        // A dim of size 0 makes the number of elements 0, but the error about the other, too large dims must remain.
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
fn formulas_with_missing_inputs() {
    each_device(|d| {
        let x = iota(&[2, 2], d);
        refused(d, &["map"], || Tensor::map(&[&x], |_| Expr::input(usize::MAX)));
        refused(d, &["map"], || Tensor::map(&[&x], |e| &e[0] + Expr::scalar(usize::MAX)));
        // On integers, a float formula is refused, because its constants would be truncated or it would not compile.
        let n = x.to_dtype(DType::I64).unwrap();
        refused(d, &["linear_map", "i64"], || n.linear_map(&n, None, |z| z * 0.5));
        assert_eq!(n.linear_map(&n, None, |z| z * 2.0).unwrap().to_vec::<i64>().unwrap(), [2, 6, 6, 26]);
    });
}

#[test]
fn invalid_sequences_and_parameters() {
    each_device(|d| {
        refused(d, &["arange", "-0.5"], || Tensor::arange(0, -0.5, 1, d));
        let mut w = Tensor::ones(2, d).unwrap().requires_grad_(true).unwrap();
        let mut tied = w.shallow_clone();
        refused(d, &["Sgd", "twice"], || Sgd::new(vec![&mut w, &mut tied], SgdConfig::default()));
    });
}

#[test]
fn views_and_layers_that_overflow() {
    let m = isize::MAX as usize;
    each_device(|d| {
        let one = Tensor::ones(1, d).unwrap();
        // The size in bytes overflows.
        refused(d, &["memory"], || one.expand(1usize << 62)?.pin_memory(d));
        refused(d, &["as_strided"], || one.as_strided([0, 3], &[isize::MIN, 1], 0));
        refused(d, &["as_strided"], || one.as_strided([0], &[1], 99));
        assert_eq!(one.as_strided([0, 3], &[7, 1], 1).unwrap().sum((), false).unwrap().item::<f32>().unwrap(), 0.0);
        refused(d, &["memory"], || Conv2d::new(1, 1, [m, 4], ConvOptions::default(), d).map(drop));
        refused(d, &["memory"], || MultiheadAttention::new(m, 1, d).map(drop));
        // Results that do not fit in memory: a list of 2^60 tensors, and index lists of 2^60 rows.
        refused(d, &["tensor_split"], || one.tensor_split(1 << 60, 0));
        refused(d, &["do not fit in memory"], || Tensor::tril_indices(1 << 60, 2, 0, d));
        assert_eq!(Tensor::tril_indices(1 << 60, 2, 2 - (1 << 60), d).unwrap().numel(), 2 * 3);
        assert_eq!(Tensor::triu_indices(1 << 60, 2, 0, d).unwrap().to_vec::<i64>().unwrap(), [0, 0, 1, 0, 1, 1]);
        assert_eq!(one.diff(usize::MAX, 0).unwrap().numel(), 0);
    });
}

#[test]
fn windows_that_contain_only_padding() {
    each_device(|d| {
        // Two taps with dilation 4 on an image of one element: one tap is in the padding before the image, the other in the padding
        // after it.
        let x = Tensor::ones([1, 1, 1], d).unwrap();
        let options = MaxPoolOptions { padding: [2, 0].into(), dilation: [4, 1], ..MaxPoolOptions::default() };
        refused(d, &["max_pool2d", "padding"], || x.max_pool2d([2, 1], options));
        let wide = Tensor::ones([1, 3, 1], d).unwrap();
        assert_eq!(wide.max_pool2d([2, 1], options).unwrap().shape().dims(), [1, 2, 1]);
        let far = ConvOptions { stride: [1 << 62, 1], padding: (1 << 62).into(), ..ConvOptions::default() };
        refused(d, &["conv2d", "padding"], || x.conv2d(&Tensor::ones([1, 1, 1, 1], d)?, None, far));
    });
}

/// Runs in its own process, because the test replaces an operation that other tests use.
#[test]
fn invalid_results_of_user_code() {
    if !in_own_process("errors::invalid_results_of_user_code") {
        return;
    }
    each_device(|d| {
        let x = iota(&[2, 3], d).requires_grad_(true).unwrap();
        // A gradient in another dtype is refused. Without the check, its bytes would be read as the input's dtype.
        let halves = Implementation::new(|x, _| Ok(vec![x[0].exp()?]))
            .with_backward(|_, _, grad| Ok(vec![Some(grad.to_dtype(DType::F16)?)]));
        let _kept = register("gradient_of_halves", d.into(), halves).unwrap();
        let call = || ops::call("gradient_of_halves", &[&x], &[])?[0].sum((), false)?.backward();
        refused(d, &["gradient_of_halves", "dtype"], call);
        // Operations that are composed of others check the shape that a replaced operation returns.
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
fn registrations_can_own_other_registrations() {
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

/// If an in-place operation fails halfway, its tensor counts as changed, because some elements may already be written.
#[test]
fn failed_in_place_operations_count_as_changes() {
    each_device(|d| {
        let index = Tensor::from_slice(&[1i64, 0], 2, d).unwrap();
        let y = iota(&[2, 3], d).requires_grad_(true).unwrap().index_select(0, &index).unwrap();
        let divided = index.div_trunc_scalar_(0).map(|_| ()).and_then(|()| d.synchronize());
        assert!(matches!(divided, Err(Error::DivisionByZero { .. })), "{divided:?}");
        refused(d, &["index_select", "changed in place"], || y.sum((), false)?.backward());
    });
}
