//! Matrix products on every device: shapes, strides, dtypes, special values, gradients.

use claystone::autograd::gradcheck;
use claystone::device::count_launches;
use claystone::ops::Expr;
use claystone::{DType, Device, Error, Result, Tensor};
use half::{bf16, f16};
use ndarray::ArrayD;

use crate::common;
use crate::common::{each_device, f64s, reference, scaled};

/// Returns small integers, whose sums are exact in every dtype that accumulates in f32.
fn whole_numbers(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * i + 3 * i) % 7) as f32 - 3.0).collect();
    Tensor::from_vec(values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

/// Returns `value` rounded to `dtype`.
fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => value,
    }
}

#[track_caller]
fn check_exact(a: &Tensor, b: &Tensor) {
    let out = a.matmul(b).unwrap();
    let want = reference(&f64s(a), &f64s(b)).mapv(|v| rounded(v, out.dtype()));
    assert_eq!(out.dtype(), a.dtype());
    let (sa, sb) = (a.strides(), b.strides());
    assert_eq!(f64s(&out), want, "{} ({sa:?}) x {} ({sb:?}) {}", a.shape(), b.shape(), a.dtype());
}

fn floats(device: Device) -> impl Iterator<Item = DType> {
    let fp64 = device == Device::Cpu || device.info().unwrap().fp64;
    [DType::F32, DType::F16, DType::BF16, DType::F64].into_iter().filter(move |&t| fp64 || t != DType::F64)
}

#[test]
fn products_of_every_orientation_at_the_edges_of_tiles() {
    let sizes = [
        (1, 1, 1),
        (1, 40, 33),
        (40, 1, 33),
        (5, 3, 7),
        (8, 32, 16),
        (7, 31, 15),
        (9, 33, 17),
        (6, 10, 2),
        (33, 65, 1),
        (31, 64, 70),
        (65, 129, 33),
    ];
    each_device(|device| {
        for dtype in floats(device).chain([DType::I64]) {
            let matrix = |rows, cols, turned| match turned {
                true => whole_numbers(&[cols, rows], dtype, device).t().unwrap(),
                false => whole_numbers(&[rows, cols], dtype, device),
            };
            for (m, n, k) in sizes {
                for (a_turned, b_turned) in [(false, false), (false, true), (true, false), (true, true)] {
                    check_exact(&matrix(m, k, a_turned), &matrix(k, n, b_turned));
                }
            }
        }
    });
}

#[test]
fn products_with_every_tile_size() {
    each_device(|device| {
        let depths = [DType::F32, DType::F16, DType::BF16].map(|dtype| (1100, 2824, 136, dtype));
        let sizes = [(140, 260, 50), (700, 900, 50), (1500, 1700, 50), (1100, 1500, 136)];
        for (m, n, depth, dtype) in sizes.map(|(m, n, k)| (m, n, k, DType::F32)).into_iter().chain(depths) {
            let (a, b) = (whole_numbers(&[m, depth], dtype, device), whole_numbers(&[depth, n], dtype, device));
            let out = f64s(&a.matmul(&b).unwrap());
            let turned = b.t().unwrap().matmul(&a.t().unwrap()).unwrap().t().unwrap();
            assert_eq!(out, f64s(&turned));
            let (a, b) = (f64s(&a), f64s(&b));
            let some = |n: usize| (0..n).step_by(37).chain([n - 1]);
            for (i, j) in some(m).flat_map(|i| some(n).map(move |j| (i, j))) {
                let want = (0..depth).map(|k| a[[i, k]] * b[[k, j]]).sum::<f64>();
                assert_eq!(out[[i, j]], rounded(want, dtype), "{m} x {n} x {depth} at {i}, {j}");
            }
        }
    });
}

/// Products that are deep enough for tensor cores (on devices that have them), at the edges of tiles: every orientation, with offsets and
/// row lengths of every alignment.
#[test]
fn products_of_large_depth() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (m, n, k) in [(32, 72, 128), (64, 64, 144), (65, 33, 131), (129, 40, 192)] {
                for turns in 0..4 {
                    for pad in [0, 1, 2, 8] {
                        let matrix = |rows, cols, turned: bool| {
                            let (rows, cols) = if turned { (cols, rows) } else { (rows, cols) };
                            let wide = whole_numbers(&[rows + 1, cols + pad], dtype, device);
                            let part = wide.narrow(0, 1, rows).unwrap().narrow(1, pad, cols).unwrap();
                            if turned { part.t().unwrap() } else { part }
                        };
                        if pad == 0 || turns == 1 || (m, turns) == (64, 2) {
                            check_exact(&matrix(m, k, turns & 1 > 0), &matrix(k, n, turns & 2 > 0));
                        }
                    }
                }
            }
            let (a, b) = (whole_numbers(&[2, 3, 40, 136], dtype, device), whole_numbers(&[3, 136, 48], dtype, device));
            check_exact(&a, &b);
            check_exact(&a.expand([2, 3, 40, 136]).unwrap(), &b.narrow(0, 1, 1).unwrap());
            check_exact(&a.flip(2).unwrap(), &b.flip(0).unwrap());
        }
    });
}

/// Products with few tiles and a large depth: with tensor cores, work-groups split the depth of a tile and add the partial sums in
/// a fixed order.
#[test]
fn products_of_few_tiles() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (m, n, k) in
                [(10, 72, 1030), (64, 40, 784), (8, 9, 2048), (65, 63, 1000), (33, 130, 530), (130, 20, 257)]
            {
                for (a_turned, b_turned) in [(false, true), (true, false)] {
                    let matrix = |rows, cols, turned| match turned {
                        true => whole_numbers(&[cols, rows], dtype, device).t().unwrap(),
                        false => whole_numbers(&[rows, cols], dtype, device),
                    };
                    check_exact(&matrix(m, k, a_turned), &matrix(k, n, b_turned));
                }
            }
        }
        let (a, b) = (scaled(64, 2000, 5, |_, _| 0), scaled(2000, 70, 6, |_, _| 0));
        let on = |t: &ArrayD<f32>| Tensor::from_ndarray_view(t, device).unwrap();
        let (a, b) = (on(&a), on(&b));
        let first = common::vec(&a.matmul(&b).unwrap());
        let same = |_| common::vec(&a.matmul(&b).unwrap()).iter().zip(&first).all(|(x, y)| x.to_bits() == y.to_bits());
        assert!((0..20).all(same), "on {device}");
        // A NaN affects only its row, and partial sums of one product are not added to the next product.
        let mut nan = vec![0f32; 64 * 2000];
        (nan[777], nan[5 * 2000 + 1999]) = (f32::NAN, f32::INFINITY);
        let nan = Tensor::from_slice(&nan, [64, 2000], device).unwrap();
        let got = f64s(&nan.matmul(&b).unwrap());
        let want = reference(&f64s(&nan), &f64s(&b));
        assert!(got.iter().zip(&want).all(|(g, w)| g == w || g.is_nan() && w.is_nan()), "on {device}");
        assert_eq!(common::vec(&a.matmul(&b).unwrap()), first);
    });
}

#[test]
fn products_of_views_of_any_strides() {
    each_device(|device| {
        let base = whole_numbers(&[40, 90], DType::F32, device);
        let part = |row, rows, col, cols| base.narrow(0, row, rows).unwrap().narrow(1, col, cols).unwrap();
        let views = [
            part(3, 20, 5, 36),
            part(3, 20, 5, 36).flip(0).unwrap(),
            part(0, 20, 50, 36).flip(1).unwrap().flip(0).unwrap(),
            base.slice(0, None, None, 2).unwrap().slice(1, 17, -1, 2).unwrap(),
            part(7, 1, 1, 36).expand([20, 36]).unwrap(),
            part(1, 20, 4, 1).expand([20, 36]).unwrap(),
            part(9, 1, 9, 1).expand([20, 36]).unwrap(),
        ];
        for a in &views {
            for b in &views {
                check_exact(a, &b.t().unwrap());
                check_exact(&a.t().unwrap(), b);
            }
        }
    });
}

#[test]
fn batch_dims_broadcast() {
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[3, 4, 5], &[3, 5, 6]),
        (&[3, 4, 5], &[5, 6]),
        (&[4, 5], &[3, 5, 6]),
        (&[2, 1, 4, 5], &[3, 5, 6]),
        (&[1, 3, 4, 5], &[2, 1, 5, 6]),
        (&[7, 1, 5], &[5, 6]),
        (&[2, 3, 4, 5], &[5, 1]),
        (&[3, 1, 1, 2, 2], &[1, 2, 3, 2, 2]),
        (&[1, 4, 5], &[1, 5, 6]),
    ];
    each_device(|device| {
        for (a, b) in shapes {
            let (a, b) = (whole_numbers(a, DType::F32, device), whole_numbers(b, DType::F32, device));
            check_exact(&a, &b);
            // Products of the same shapes, with the batch dims innermost in memory.
            let inside_out = |t: &Tensor| {
                let dims: Vec<isize> = (0..t.rank() as isize).rev().collect();
                t.permute(&dims).unwrap().contiguous().unwrap().permute(&dims).unwrap()
            };
            check_exact(&inside_out(&a), &inside_out(&b));
            check_exact(&a, &inside_out(&b));
        }
    });
}

#[test]
fn vectors_act_as_rows_and_columns() {
    each_device(|device| {
        let (u, v) =
            (whole_numbers(&[5], DType::F32, device), whole_numbers(&[5], DType::F32, device).flip(0).unwrap());
        let m = whole_numbers(&[2, 5, 5], DType::F32, device);
        let row = |t: &Tensor| t.unsqueeze(0).unwrap();
        let column = |t: &Tensor| t.unsqueeze(1).unwrap();
        let check = |got: Tensor, want: Tensor, shape: &[usize]| {
            assert_eq!(got.shape().dims(), shape);
            assert_eq!(got.to_vec::<f32>().unwrap(), want.to_vec::<f32>().unwrap());
        };
        check(u.matmul(&v).unwrap(), row(&u).matmul(&column(&v)).unwrap(), &[]);
        check(m.matmul(&v).unwrap(), m.matmul(&column(&v)).unwrap(), &[2, 5]);
        check(u.matmul(&m).unwrap(), row(&u).matmul(&m).unwrap(), &[2, 5]);
    });
}

#[test]
fn products_of_empty_operands() {
    each_device(|device| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, device).unwrap();
        assert_eq!(zeros(&[3, 0]).matmul(&zeros(&[0, 2])).unwrap().to_vec::<f32>().unwrap(), [0.0; 6]);
        for (a, b, out) in [
            (&[0, 3][..], &[3, 2][..], &[0, 2][..]),
            (&[2, 3], &[3, 0], &[2, 0]),
            (&[0, 2, 3], &[3, 4], &[0, 2, 4]),
            (&[4, 2, 3], &[1, 3, 0], &[4, 2, 0]),
        ] {
            assert_eq!(zeros(a).matmul(&zeros(b)).unwrap().shape().dims(), out);
        }
        let bias = Tensor::arange(0, 2, 1, device).unwrap();
        let out = zeros(&[3, 0]).linear(&zeros(&[2, 0]), Some(&bias)).unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(zeros(&[0]).matmul(&zeros(&[0])).unwrap().item::<f32>().unwrap(), 0.0);
    });
}

#[test]
fn integer_products_wrap() {
    each_device(|device| {
        let a = Tensor::from_slice(&[200u8, 100, 3, 255], [2, 2], device).unwrap();
        assert_eq!(a.matmul(&a).unwrap().to_vec::<u8>().unwrap(), [108, 188, 85, 45]);
        let big = Tensor::from_slice(&[i64::MAX, 2, 1, 1], [2, 2], device).unwrap();
        assert_eq!(big.matmul(&big).unwrap().to_vec::<i64>().unwrap(), [3, 0, i64::MIN, 3]);
        let a = Tensor::from_slice(&[i32::MAX, 1], [1, 2], device).unwrap();
        assert_eq!(a.matmul(&a.t().unwrap()).unwrap().item::<i32>().unwrap(), 2);
    });
}

#[test]
fn nan_and_infinity_affect_only_their_row_and_column() {
    each_device(|device| {
        for (dtype, n) in floats(device).flat_map(|dtype| [(dtype, 37), (dtype, 136)]) {
            let mut values = vec![1f32; n * n];
            (values[3 * n + 5], values[20 * n + 30]) = (f32::NAN, f32::INFINITY);
            let a = Tensor::from_vec(values, [n, n], device).unwrap().to_dtype(dtype).unwrap();
            let ones = a.ones_like().unwrap();
            let right = f64s(&a.matmul(&ones).unwrap());
            let left = f64s(&ones.matmul(&a.t().unwrap()).unwrap());
            for i in 0..n {
                for j in 0..n {
                    for (value, line) in [(right[[i, j]], i), (left[[i, j]], j)] {
                        match line {
                            3 => assert!(value.is_nan()),
                            20 => assert_eq!(value, f64::INFINITY),
                            _ => assert_eq!(value, n as f64),
                        }
                    }
                }
            }
            // 0 x infinity is NaN, so a kernel must not skip zeros.
            let nan = f64s(&a.zeros_like().unwrap().matmul(&a).unwrap());
            assert!(nan[[0, 5]].is_nan() && nan[[0, 30]].is_nan() && nan[[0, 0]] == 0.0);
        }
    });
}

#[test]
fn long_sums_stay_precise() {
    each_device(|device| {
        let a = Tensor::linspace(-1.0, 1.0, 9 * 1000, device).unwrap().reshape([9, 1000]).unwrap().sin().unwrap();
        let b = a.reshape([1000, 9]).unwrap().cos().unwrap();
        for b in [b.shallow_clone(), b.t().unwrap().contiguous().unwrap().t().unwrap()] {
            let want = reference(&f64s(&a), &f64s(&b));
            let got = f64s(&a.matmul(&b).unwrap());
            // The tolerance is relative to a sum of 1000 terms with magnitudes below 1.
            assert!((got - want).iter().all(|d| d.abs() < 1e-6 * 1000.0));
        }
    });
}

#[test]
fn products_take_one_launch_each() {
    each_device(|device| {
        let (x, w) = (whole_numbers(&[4, 8, 6], DType::F16, device), whole_numbers(&[10, 6], DType::F16, device));
        let b = whole_numbers(&[10], DType::F16, device);
        let launches = |f: &dyn Fn() -> Result<Tensor>| count_launches(|| f().unwrap()).1;
        assert_eq!(launches(&|| x.matmul(&w.t()?)), 1);
        assert_eq!(launches(&|| x.linear(&w, Some(&b))), 1);
        assert_eq!(launches(&|| x.narrow(0, 0, 0)?.linear(&w, Some(&b))), 0);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, w) = (whole_numbers(&[64, 136], dtype, device), whole_numbers(&[72, 136], dtype, device));
            let bias = whole_numbers(&[72], dtype, device);
            let (y, launches) = count_launches(|| x.linear_map(&w, Some(&bias), |z| z.relu()).unwrap());
            assert_eq!(launches, 1);
            let sum = reference(&f64s(&x), &f64s(&w).t().to_owned()) + f64s(&bias);
            assert_eq!(f64s(&y), sum.mapv(|v| rounded(v.max(0.0), dtype)));
        }
        let x = x.requires_grad_(true).unwrap();
        let (w, b) = (w.requires_grad_(true).unwrap(), b.requires_grad_(true).unwrap());
        let y = x.linear(&w, Some(&b)).unwrap();
        let grad = y.ones_like().unwrap();
        assert_eq!(count_launches(|| y.backward_with(&grad).unwrap()).1, 3);
    });
}

#[test]
fn linear_matches_product_plus_bias() {
    each_device(|device| {
        for dtype in floats(device) {
            let (w, b) = (whole_numbers(&[10, 6], dtype, device), whole_numbers(&[10], dtype, device));
            for shape in [&[6][..], &[3, 6], &[2, 5, 6]] {
                let x = whole_numbers(shape, dtype, device);
                let product = x.matmul(&w.t().unwrap()).unwrap();
                assert_eq!(f64s(&x.linear(&w, None).unwrap()), f64s(&product));
                assert_eq!(f64s(&x.linear(&w, Some(&b)).unwrap()), f64s(&product.add(&b).unwrap()));
            }
        }
    });
}

#[test]
fn linear_map_applies_a_formula_in_the_same_launch() {
    each_device(|device| {
        for dtype in floats(device) {
            let (x, w, b) = (
                whole_numbers(&[5, 6], dtype, device),
                whole_numbers(&[40, 6], dtype, device),
                whole_numbers(&[40], dtype, device),
            );
            let plain = x.linear(&w, Some(&b)).unwrap();
            let got = x.linear_map(&w, Some(&b), |z| z.relu() * 0.5).unwrap();
            assert_eq!(f64s(&got), f64s(&plain).mapv(|v| v.max(0.0) * 0.5));
            // Recording for autograd writes a second result in the same launch. Backward then takes two launches.
            let w = w.requires_grad_(true).unwrap();
            let (tracked, launches) = count_launches(|| x.linear_map(&w, Some(&b), |z| z.relu() * 0.5).unwrap());
            assert_eq!((f64s(&tracked), launches), (f64s(&got), 1));
            let grad = whole_numbers(&[5, 40], dtype, device);
            assert_eq!(count_launches(|| tracked.backward_with(&grad).unwrap()).1, 2);
            let masked = f64s(&grad) * f64s(&plain).mapv(|v| if v > 0.0 { 0.5 } else { 0.0 });
            let want = reference(&masked.t().to_owned(), &f64s(&x)).mapv(|v| rounded(v, dtype));
            assert_eq!(f64s(&w.grad().unwrap()), want);
            // The derivative of relu alone is computed from the result, so no second result is needed.
            w.zero_grad();
            let tracked = x.linear_map(&w, Some(&b), |z| z.relu()).unwrap();
            assert_eq!(f64s(&tracked), f64s(&plain).mapv(|v| v.max(0.0)));
            tracked.backward_with(&grad).unwrap();
            let masked = f64s(&grad) * f64s(&plain).mapv(|v| if v > 0.0 { 1.0 } else { 0.0 });
            let want = reference(&masked.t().to_owned(), &f64s(&x)).mapv(|v| rounded(v, dtype));
            assert_eq!(f64s(&w.grad().unwrap()), want);
        }
        let (x, w) = (whole_numbers(&[5, 6], DType::F32, device), whole_numbers(&[4, 6], DType::F32, device));
        for f in [Expr::input(1), Expr::scalar(0), Expr::uniform(0)] {
            assert!(matches!(x.linear_map(&w, None, |z| z + &f), Err(Error::Invalid { .. })));
        }
    });
}

#[test]
fn products_have_gradients() {
    each_device(|device| {
        if !floats(device).any(|t| t == DType::F64) {
            return;
        }
        let leaf =
            |shape: &[usize]| Tensor::map(&[&whole_numbers(shape, DType::F64, device)], |x| &x[0] * 0.3).unwrap();
        let weighted = |t: Tensor| -> Result<Tensor> { t.mul(&t)?.sum((), false) };
        for (a, b) in [
            (&[3, 4][..], &[4, 2][..]),
            (&[4], &[4]),
            (&[4], &[4, 2]),
            (&[3, 4], &[4]),
            (&[2, 3, 4], &[4, 2]),
            (&[2, 3, 4], &[4]),
            (&[3, 4], &[2, 4, 2]),
            (&[4], &[2, 4, 2]),
            (&[2, 1, 3, 4], &[3, 4, 2]),
            (&[1, 3, 4], &[2, 4, 2]),
        ] {
            gradcheck(|x| weighted(x[0].matmul(&x[1])?), &[leaf(a), leaf(b)], 1e-6).unwrap();
        }
        let turned = |shape: &[usize]| leaf(shape).transpose(0, -1).unwrap();
        gradcheck(|x| weighted(x[0].matmul(&x[1])?), &[turned(&[4, 3, 2]), turned(&[2, 4])], 1e-6).unwrap();
        for x in [&[4][..], &[3, 4], &[2, 3, 4]] {
            let inputs = [leaf(x), leaf(&[5, 4]), leaf(&[5])];
            gradcheck(|x| weighted(x[0].linear(&x[1], Some(&x[2]))?), &inputs, 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].linear(&x[1], None)?), &inputs[..2], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].linear_map(&x[1], Some(&x[2]), |z| z.tanh())?), &inputs, 1e-6).unwrap();
        }
        // The product of a tensor with its own transpose.
        gradcheck(|x| weighted(x[0].matmul(&x[0].t()?)?), &[leaf(&[3, 4])], 1e-6).unwrap();
    });
}

#[test]
fn only_requested_gradients_are_computed() {
    each_device(|device| {
        let x = whole_numbers(&[3, 4], DType::F32, device);
        let w = whole_numbers(&[2, 4], DType::F32, device).requires_grad_(true).unwrap();
        let y = x.linear(&w, None).unwrap();
        let grad = y.ones_like().unwrap();
        assert_eq!(count_launches(|| y.backward_with(&grad).unwrap()).1, 1);
        assert_eq!(f64s(&w.grad().unwrap()), reference(&f64s(&grad.t().unwrap()), &f64s(&x)));
        assert!(x.grad().is_none());
        // `w` may change, because only the gradient of `x` would read it and `x` requires none. `x` must not change.
        let y = x.matmul(&w.t().unwrap()).unwrap();
        claystone::no_grad(|| w.fill_(0)).unwrap();
        y.sum((), false).unwrap().backward().unwrap();
        let y = x.matmul(&w.t().unwrap()).unwrap();
        x.fill_(0).unwrap();
        assert!(matches!(y.sum((), false).unwrap().backward(), Err(Error::Autograd { .. })));
    });
}

#[test]
fn mismatched_shapes_are_errors() {
    each_device(|device| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, device).unwrap();
        for (a, b) in [(&[2, 3][..], &[2, 3][..]), (&[2, 2, 3], &[3, 3, 2]), (&[], &[3]), (&[3], &[]), (&[2], &[3])] {
            let e = zeros(a).matmul(&zeros(b)).unwrap_err();
            assert!(matches!(e, Error::ShapeMismatch { op: "matmul", .. }), "{e}");
        }
        let half = zeros(&[3, 3]).to_dtype(DType::F16).unwrap();
        assert!(matches!(zeros(&[3, 3]).matmul(&half), Err(Error::DTypeMismatch { .. })));
        let wrong: [(&[usize], &[usize], &[usize]); 4] =
            [(&[2, 3], &[4, 2], &[4]), (&[2, 3], &[4, 3], &[3]), (&[2, 3], &[3], &[1]), (&[], &[4, 3], &[4])];
        for (x, w, b) in wrong {
            let e = zeros(x).linear(&zeros(w), Some(&zeros(b))).unwrap_err();
            assert!(matches!(e, Error::ShapeMismatch { op: "linear", .. }), "{e}");
        }
        if device != Device::Cpu {
            let host = Tensor::zeros(&[3, 3], Device::Cpu).unwrap();
            assert!(matches!(zeros(&[3, 3]).matmul(&host), Err(Error::DeviceMismatch { .. })));
        }
    });
}
