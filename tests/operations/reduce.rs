//! Reductions over any dims, compared with plain loops in f64.

use claystone::{DType, Device, Error, Tensor, autograd::gradcheck, device::count_launches};
use half::{bf16, f16};
use ndarray::{ArrayD, Axis, IxDyn};

use crate::common::each_device;

/// Returns small integers, whose sums are exact in every dtype except f16 and bf16.
fn numbers(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let signed = !matches!(dtype, DType::U8 | DType::U32 | DType::Bool);
    let values: Vec<i64> = (0..n as i64).map(|i| i * 7919 % 11 - if signed { 5 } else { 0 }).collect();
    Tensor::from_slice(&values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

fn array(t: &Tensor) -> ArrayD<f64> {
    let values = t.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
    ArrayD::from_shape_vec(IxDyn(t.shape().dims()), values).unwrap()
}

/// Returns, for each result, the elements that are reduced, in row-major order.
fn groups(t: &Tensor, dims: &[usize]) -> Vec<Vec<f64>> {
    let a = array(t);
    let kept: Vec<usize> = (0..t.rank()).filter(|d| !dims.contains(d)).collect();
    let order: Vec<usize> = kept.iter().copied().chain((0..t.rank()).filter(|d| dims.contains(d))).collect();
    let outs: usize = kept.iter().map(|&d| t.shape().dims()[d]).product();
    let n: usize = dims.iter().map(|&d| t.shape().dims()[d]).product();
    let all: Vec<f64> = a.permuted_axes(order).iter().copied().collect();
    (0..outs).map(|o| all[o * n..(o + 1) * n].to_vec()).collect()
}

fn position(group: &[f64], better: fn(f64, f64) -> bool) -> f64 {
    let mut best = 0;
    for (i, &v) in group.iter().enumerate().skip(1) {
        let b = group[best];
        if !b.is_nan() && (v.is_nan() || better(v, b)) {
            best = i;
        }
    }
    best as f64
}

fn greatest(group: &[f64]) -> f64 {
    group[position(group, |a, b| a > b) as usize]
}

fn least(group: &[f64]) -> f64 {
    group[position(group, |a, b| a < b) as usize]
}

#[track_caller]
fn close(got: &Tensor, want: &[f64], tolerance: f64, what: &str) {
    let got_values = array(got);
    assert_eq!(got.numel(), want.len(), "{what}");
    for (i, (g, w)) in got_values.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * w.abs().max(1.0);
        assert!(same, "{what}, result {i}: {g} instead of {w}");
    }
}

/// Compares every reduction of `t` over `dims` with its definition.
#[track_caller]
fn check(t: &Tensor, dims: &[usize], what: &str) {
    let what = &format!("{what} {:?} strides {:?} over {dims:?} {} {}", t.shape(), t.strides(), t.dtype(), t.device());
    let of: Vec<isize> = dims.iter().map(|&d| d as isize).collect();
    let of = &of[..];
    let g = groups(t, dims);
    let eps = match t.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
        DType::F32 => 2e-6,
        _ => 1e-12,
    };
    let map = |f: &dyn Fn(&[f64]) -> f64| -> Vec<f64> { g.iter().map(|g| f(g)).collect() };
    close(&t.sum(of, false).unwrap(), &map(&|g| g.iter().sum()), eps, &format!("sum {what}"));
    if t.dtype().is_float() {
        let mean = map(&|g| g.iter().sum::<f64>() / g.len() as f64);
        close(&t.mean(of, true).unwrap(), &mean, eps, &format!("mean {what}"));
    }
    close(&t.max(of, false).unwrap(), &map(&greatest), 0.0, &format!("max {what}"));
    close(&t.min(of, false).unwrap(), &map(&least), 0.0, &format!("min {what}"));
    let arg = t.argmax(of, false).unwrap();
    assert_eq!(arg.dtype(), DType::I64);
    close(&arg, &map(&|g| position(g, |a, b| a > b)), 0.0, &format!("argmax {what}"));
    close(&t.argmin(of, false).unwrap(), &map(&|g| position(g, |a, b| a < b)), 0.0, &format!("argmin {what}"));
    let truth = |b: bool| f64::from(u8::from(b));
    let any = t.any(of, false).unwrap();
    assert_eq!(any.dtype(), DType::Bool);
    close(&any, &map(&|g| truth(g.iter().any(|v| *v != 0.0))), 0.0, &format!("any {what}"));
    close(&t.all(of, false).unwrap(), &map(&|g| truth(g.iter().all(|v| *v != 0.0))), 0.0, &format!("all {what}"));
    let count = map(&|g| g.iter().filter(|v| **v != 0.0).count() as f64);
    close(&t.count_nonzero(of, false).unwrap(), &count, 0.0, &format!("count {what}"));
}

#[test]
fn every_reduction_supports_every_dtype() {
    each_device(|device| {
        for dtype in DType::ALL {
            for (shape, dims) in [(&[37][..], &[0][..]), (&[3, 40], &[1]), (&[40, 19], &[0])] {
                check(&numbers(shape, dtype, device), dims, "plain");
            }
        }
        check(&numbers(&[4, 5, 18], DType::F64, device), &[0, 2], "inner and outer");
    });
}

#[test]
fn reductions_of_sizes_around_block_edges() {
    each_device(|device| {
        for n in [1, 2, 15, 16, 17, 31, 33, 127, 129, 255, 256, 257, 511, 513, 1025] {
            check(&numbers(&[n], DType::F32, device), &[0], "vector");
            check(&numbers(&[3, n], DType::F32, device), &[1], "rows");
            check(&numbers(&[n, 3], DType::F32, device), &[0], "columns");
            check(&numbers(&[3, n], DType::F32, device), &[0], "short columns");
        }
        check(&numbers(&[], DType::F32, device), &[], "scalar");
        check(&numbers(&[2, 3], DType::F32, device), &[], "nothing reduced");
        check(&numbers(&[1, 1, 1], DType::I32, device), &[0, 2], "ones");
    });
}

#[test]
fn large_reductions_use_two_stages() {
    each_device(|device| {
        for (shape, dims) in
            [(&[200_003][..], &[0][..]), (&[2, 100_003], &[1]), (&[70_001, 3], &[0]), (&[20_011, 19], &[0])]
        {
            check(&numbers(shape, DType::F32, device), dims, "long");
            let t = numbers(shape, DType::I64, device);
            assert_eq!(t.sum((), false).unwrap().item::<i64>().unwrap() as f64, array(&t).sum());
        }
    });
}

/// CPUs reduce 16 short contiguous rows at a time. The number of rows is not a multiple of 16.
#[test]
fn reductions_of_many_short_rows() {
    each_device(|device| {
        for (n, dtype) in [(2, DType::F32), (3, DType::F32), (4, DType::F32), (4, DType::F16), (3, DType::U8)] {
            check(&numbers(&[16_391, n], dtype, device), &[1], "short rows");
        }
        let rows = 16_391;
        let mut values = vec![1.0f32; 2 * rows];
        values[2..8].copy_from_slice(&[3e30, 4e30, f32::NAN, 1.0, f32::INFINITY, 3e-23]);
        values[2 * rows - 2..].copy_from_slice(&[-3e-23, 4e-23]);
        let t = Tensor::from_vec(values, [rows, 2], device).unwrap();
        let norms: Vec<f64> = groups(&t, &[1]).iter().map(|g| g[0].hypot(g[1])).collect();
        let got = array(&t.norm(1, false).unwrap());
        for (i, (got, want)) in got.iter().zip(&norms).enumerate() {
            let same = got == want || got.is_nan() && i == 2 || (got - want).abs() <= 1e-6 * want;
            assert!(same, "norm of row {i} on {device}: {got} instead of {want}");
        }
    });
}

#[test]
fn reductions_support_any_strides() {
    each_device(|device| {
        let base = numbers(&[6, 20, 34], DType::F32, device);
        let row = numbers(&[34], DType::F32, device);
        let views = [
            base.transpose(0, 2).unwrap(),
            base.permute(&[1, 2, 0]).unwrap(),
            base.narrow(2, 3, 17).unwrap(),
            base.narrow(1, 5, 1).unwrap().narrow(0, 1, 4).unwrap(),
            row.expand([6, 20, 34]).unwrap(),
            row.unsqueeze(1).unwrap().unsqueeze(1).unwrap().expand([34, 5, 4]).unwrap(),
        ];
        for view in &views {
            for dims in [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]] {
                check(view, dims, "view");
            }
        }
        let deep = numbers(&[2, 3, 2, 3, 2, 3, 2], DType::F32, device).permute(&[6, 1, 4, 3, 2, 5, 0]).unwrap();
        check(&deep, &[0, 2, 5], "seven dims");
    });
}

#[test]
fn reductions_handle_nan_and_infinities() {
    each_device(|device| {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            for n in [4, 40, 300] {
                let mut values = vec![-1.0; n];
                for special in [[nan, inf], [inf, -inf], [-inf, -inf], [inf, nan], [nan, nan]] {
                    values[n / 2] = special[0];
                    values[n - 1] = special[1];
                    let t = Tensor::from_slice(&values, n, device).unwrap().to_dtype(dtype).unwrap();
                    check(&t, &[0], "special");
                    check(
                        &t.unsqueeze(1).unwrap().expand([n, 20]).unwrap().contiguous().unwrap(),
                        &[0],
                        "special columns",
                    );
                }
                let all = Tensor::full(n, -inf, (dtype, device)).unwrap();
                check(&all, &[0], "all -inf");
            }
        }
    });
}

#[test]
fn reductions_of_empty_dims() {
    each_device(|device| {
        let t = Tensor::zeros([0, 3], device).unwrap();
        assert_eq!(t.sum(0, false).unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
        assert_eq!(t.prod((), false).unwrap().item::<f32>().unwrap(), 1.0);
        assert!(t.mean((), false).unwrap().item::<f32>().unwrap().is_nan());
        assert_eq!(t.any(0, false).unwrap().to_vec::<bool>().unwrap(), [false; 3]);
        assert_eq!(t.all(0, false).unwrap().to_vec::<bool>().unwrap(), [true; 3]);
        assert_eq!(t.sum(1, true).unwrap().shape().dims(), [0, 1]);
        assert_eq!(t.max(1, false).unwrap().shape().dims(), [0]);
        for error in [t.max(0, false), t.min((), false), t.argmax(0, false), t.argmin((), true)] {
            assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
        }
        assert_eq!(vec![0u8; 0], Tensor::zeros([0], (DType::U8, device)).unwrap().to_vec::<u8>().unwrap());
    });
}

#[test]
fn products_and_sums_have_the_right_dtypes() {
    each_device(|device| {
        let t = Tensor::from_slice(&[1i32, 2, 3, 4, -5, 6], [2, 3], device).unwrap();
        let prod = t.prod(1, false).unwrap();
        assert_eq!(prod.to_vec::<i64>().unwrap(), [6, -120]);
        let f = Tensor::from_slice(&[1.5f32; 20], [2, 10], device).unwrap();
        close(&f.prod(1, false).unwrap(), &[1.5f64.powi(10); 2], 1e-6, "prod");
        let huge = Tensor::from_slice(&[i64::MAX, 1], 2, device).unwrap();
        assert_eq!(huge.sum((), false).unwrap().item::<i64>().unwrap(), i64::MIN);
        let big = Tensor::from_slice(&[i64::MAX, i64::MAX - 1], 2, device).unwrap();
        assert_eq!(big.max((), false).unwrap().item::<i64>().unwrap(), i64::MAX);
        assert_eq!(big.argmin((), false).unwrap().item::<i64>().unwrap(), 1);
        let bytes = Tensor::from_slice(&[200u8; 1000], 1000, device).unwrap();
        assert_eq!(bytes.sum((), false).unwrap().item::<i64>().unwrap(), 200_000);
        assert_eq!(bytes.max((), false).unwrap().item::<u8>().unwrap(), 200);
    });
}

#[test]
fn sixteen_bit_floats_accumulate_in_f32() {
    each_device(|device| {
        let ones = Tensor::ones([2, 40_000], (DType::F16, device)).unwrap();
        assert_eq!(ones.sum(1, false).unwrap().to_vec::<f16>().unwrap(), [f16::from_f32(40_000.0); 2]);
        let ones = Tensor::ones([40_000, 17], (DType::BF16, device)).unwrap();
        assert_eq!(ones.sum(0, false).unwrap().to_vec::<bf16>().unwrap()[16], bf16::from_f32(40_000.0));
        assert_eq!(ones.mean((), false).unwrap().item::<bf16>().unwrap(), bf16::ONE);
    });
}

#[test]
fn sums_of_ten_million_are_precise_and_deterministic() {
    let values: Vec<f32> = (0..10_000_000u64).map(|i| (i * 2_654_435_761 % 1000) as f32 / 1000.0 + 0.1).collect();
    let exact: f64 = values.iter().map(|v| f64::from(*v)).sum();
    each_device(|device| {
        let t = Tensor::from_slice(&values, values.len(), device).unwrap();
        let sum = t.sum((), false).unwrap().item::<f32>().unwrap();
        assert!((f64::from(sum) / exact - 1.0).abs() < 1e-6, "{sum} instead of {exact} on {device}");
        assert_eq!(sum, t.sum((), false).unwrap().item::<f32>().unwrap());
        let columns = t.reshape([1_000_000, 10]).unwrap().sum(0, false).unwrap().to_vec::<f32>().unwrap();
        let total: f64 = columns.iter().map(|c| f64::from(*c)).sum();
        assert!((total / exact - 1.0).abs() < 1e-6, "{total} instead of {exact} on {device}");
    });
}

#[test]
fn reductions_take_few_launches() {
    each_device(|device| {
        for (shape, dim) in [([64, 128], 0), ([4096, 128], 0), ([4096, 10], 0), ([4096, 1000], 0), ([1000, 64], 1)] {
            let t = Tensor::ones(shape, device).unwrap();
            let (sum, launches) = count_launches(|| t.sum(dim, false).unwrap());
            assert_eq!(launches, 1, "{shape:?} over {dim} on {device}");
            assert_eq!(sum.to_vec::<f32>().unwrap()[1], shape[dim as usize] as f32);
        }
        let t = Tensor::ones([4_000_000], device).unwrap();
        assert!(count_launches(|| t.sum((), false).unwrap()).1 <= 2);
        let x = Tensor::ones([8, 8], device).unwrap().requires_grad_(true).unwrap();
        let loss = x.sum((), false).unwrap();
        assert!(count_launches(|| loss.backward().unwrap()).1 <= 2, "ones, and the leaf's own copy");
    });
}

#[test]
fn bad_dims_are_errors() {
    let t = Tensor::zeros([2, 3], Device::Cpu).unwrap();
    assert!(matches!(t.sum(2, false), Err(Error::DimOutOfRange { op: "sum", dim: 2, rank: 2 })));
    assert!(matches!(t.max([0, -3], false), Err(Error::DimOutOfRange { .. })));
    assert!(matches!(t.mean([1, -1], false), Err(Error::Invalid { op: "mean", .. })));
    let ints = t.to_dtype(DType::I64).unwrap();
    assert!(matches!(ints.mean((), false), Err(Error::UnsupportedDType { .. })));
    assert!(matches!(ints.norm((), false), Err(Error::UnsupportedDType { .. })));
    assert_eq!(t.sum(&[0isize, 1][..], true).unwrap().shape().dims(), [1, 1]);
}

#[test]
fn variance_deviation_and_norm_match_their_definitions() {
    each_device(|device| {
        let t = numbers(&[5, 12], DType::F32, device).transpose(0, 1).unwrap();
        for dims in [&[0][..], &[0, 1]] {
            let of: Vec<isize> = dims.iter().map(|&d| d as isize).collect();
            for correction in [0, 1] {
                let var: Vec<f64> = (groups(&t, dims).iter())
                    .map(|g| {
                        let mean = g.iter().sum::<f64>() / g.len() as f64;
                        g.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (g.len() - correction) as f64
                    })
                    .collect();
                close(&t.var(&of[..], correction, false).unwrap(), &var, 1e-5, "var");
                let std: Vec<f64> = var.iter().map(|v| v.sqrt()).collect();
                close(&t.std(&of[..], correction, true).unwrap(), &std, 1e-5, "std");
            }
            let norm: Vec<f64> = groups(&t, dims).iter().map(|g| g.iter().map(|v| v * v).sum::<f64>().sqrt()).collect();
            close(&t.norm(&of[..], false).unwrap(), &norm, 1e-5, "norm");
        }
    });
}

/// Returns distinct elements, none of which is zero.
fn distinct(shape: &[usize], device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| ((i * 7 % n) as f64 + 0.5) / n as f64 * 3.0 - 1.4).collect();
    Tensor::from_slice(&values, shape, device).unwrap()
}

#[test]
fn reductions_have_gradients() {
    each_device(|device| {
        let x = distinct(&[3, 4, 5], device);
        let weight = |t: Tensor| -> claystone::Result<Tensor> {
            let w = distinct(t.shape().dims(), device);
            t.mul(&w)?.sum((), false)
        };
        for dims in [&[0][..], &[1], &[-1], &[0, 2], &[0, 1, 2]] {
            for keepdim in [false, true] {
                gradcheck(|x| weight(x[0].sum(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
                gradcheck(|x| weight(x[0].mean(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
                gradcheck(|x| weight(x[0].max(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
                gradcheck(|x| weight(x[0].min(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
                gradcheck(|x| weight(x[0].prod(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
                gradcheck(|x| weight(x[0].var(dims, 1, keepdim)?), &[x.shallow_clone()], 1e-5).unwrap();
                gradcheck(|x| weight(x[0].norm(dims, keepdim)?), &[x.shallow_clone()], 1e-6).unwrap();
            }
        }
        gradcheck(|x| x[0].transpose(0, 2)?.mean((), false), &[x], 1e-6).unwrap();
        let zeros = Tensor::from_slice(&[0.0f64, 2.0, 3.0, 0.0, 5.0, 0.0], [2, 3], device).unwrap();
        gradcheck(|x| x[0].prod(1, false)?.sum((), false), &[zeros], 1e-6).unwrap();
    });
}

#[test]
fn ties_share_the_gradient_and_zero_norms_have_none() {
    each_device(|device| {
        let x = Tensor::from_slice(&[1f32, 3.0, 3.0, 2.0], 4, device).unwrap().requires_grad_(true).unwrap();
        x.max((), false).unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), [0.0, 0.5, 0.5, 0.0]);
        let zero = Tensor::zeros([3], device).unwrap().requires_grad_(true).unwrap();
        zero.norm((), false).unwrap().backward().unwrap();
        assert_eq!(zero.grad().unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
    });
}

#[test]
fn gradients_of_broadcast_operands_are_summed() {
    each_device(|device| {
        let a = distinct(&[3, 1, 5], device);
        let b = distinct(&[4, 1], device);
        gradcheck(|x| x[0].mul(&x[1])?.sum((), false), &[a, b], 1e-6).unwrap();
    });
}

#[test]
fn axes_match_ndarray() {
    let t = numbers(&[4, 6, 5], DType::F64, Device::Cpu);
    let want = array(&t).sum_axis(Axis(1));
    assert_eq!(t.sum(1, false).unwrap().to_ndarray::<f64>().unwrap(), want);
}

#[test]
fn squares_of_sixteen_bit_floats_do_not_overflow() {
    each_device(|d| {
        let x = Tensor::from_slice(&[-300f32, 300.0], 2, d).unwrap().requires_grad_(true).unwrap();
        let half = x.to_dtype(DType::F16).unwrap();
        let value = |t: Tensor| t.to_dtype(DType::F32).unwrap().item::<f32>().unwrap();
        assert_eq!(value(half.std((), 0, false).unwrap()), 300.0);
        assert_eq!(value(half.norm((), false).unwrap()), 424.25);
        half.norm((), false).unwrap().backward().unwrap();
        let grad = x.grad().unwrap().to_vec::<f32>().unwrap();
        assert!((grad[0] + 0.5f32.sqrt()).abs() < 1e-3 && (grad[1] - 0.5f32.sqrt()).abs() < 1e-3, "{grad:?}");
    });
}
