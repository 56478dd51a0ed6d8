//! The rounding errors of f32 matrix products for each precision setting.

use claystone::{DType, Precision, Tensor, autocast, autocast_dtype, with_precision};
use ndarray::{ArrayD, IxDyn};

use crate::common;
use crate::common::{each_device, f64s, reference, scaled};

/// Returns the root mean square and the maximum of the products' errors, relative to the sums of magnitudes `|a| |b|`.
fn errors(out: &ArrayD<f64>, a: &ArrayD<f64>, b: &ArrayD<f64>) -> [f64; 2] {
    let (want, size) = (reference(a, b), reference(&a.mapv(f64::abs), &b.mapv(f64::abs)));
    let all: Vec<f64> = (out - want).iter().zip(&size).map(|(e, s)| (e / s).abs()).collect();
    [(all.iter().map(|e| e * e).sum::<f64>() / all.len() as f64).sqrt(), all.into_iter().fold(0.0, f64::max)]
}

#[test]
fn products_have_f32_precision_by_default() {
    let hash = |i: usize, j: usize| ((i * 131 + j * 71) % 1009 * 37 % 41) as i32 - 20;
    type Scale<'a> = &'a dyn Fn(usize, usize) -> i32;
    let cases: [(&str, Scale<'_>, Scale<'_>); 5] = [
        ("random", &|_, _| 0, &|_, _| 0),
        ("rows and columns", &|i, _| i as i32 % 81 - 40, &|_, j| 40 - j as i32 % 81),
        ("along k", &|_, k| k as i32 % 61 - 30, &|k, _| 30 - k as i32 % 61),
        ("each element", &hash, &|i, j| hash(j, i + 7)),
        ("near the ends of the range", &|_, _| 120, &|_, _| -95),
    ];
    for (name, scale_a, scale_b) in cases {
        for (m, n, k) in [(72, 64, 64), (72, 64, 128), (40, 40, 1000)] {
            let (a, b) = (scaled(m, k, 1, scale_a), scaled(k, n, 2, scale_b));
            let plain = ArrayD::from_shape_fn(IxDyn(&[m, n]), |at| {
                (0..k).fold(0f32, |sum, l| a[[at[0], l]].mul_add(b[[l, at[1]]], sum)) as f64
            });
            let wide = |t: &ArrayD<f32>| t.mapv(f64::from);
            let limit = errors(&plain, &wide(&a), &wide(&b));
            each_device(|device| {
                let on = |t: &ArrayD<f32>| Tensor::from_ndarray_view(t, device).unwrap();
                let got = errors(&f64s(&on(&a).matmul(&on(&b)).unwrap()), &wide(&a), &wide(&b));
                assert!(
                    (0..2).all(|i| got[i] <= 2.0 * limit[i]),
                    "{name}, {k} deep on {device}: {got:?}, plain {limit:?}"
                );
            });
        }
    }
}

#[test]
fn lower_precision_can_be_requested() {
    if !common::in_own_process("precision::lower_precision_can_be_requested") {
        return;
    }
    assert_eq!(claystone::get_float32_matmul_precision(), "highest");
    let error = claystone::set_float32_matmul_precision("higher").unwrap_err().to_string();
    assert!(error.contains("higher") && error.contains("highest"), "{error}");
    let (a, b) = (scaled(64, 256, 3, |_, _| 0), scaled(256, 64, 4, |_, _| 0));
    let wide = |t: &ArrayD<f32>| t.mapv(f64::from);
    for precision in ["high", "medium", "highest"] {
        claystone::set_float32_matmul_precision(precision).unwrap();
        assert_eq!(claystone::get_float32_matmul_precision(), precision);
        each_device(|device| {
            let on = |t: &ArrayD<f32>| Tensor::from_ndarray_view(t, device).unwrap();
            let [_, most] = errors(&f64s(&on(&a).matmul(&on(&b)).unwrap()), &wide(&a), &wide(&b));
            let limit = match precision {
                "highest" => 1e-6,
                "high" => 3e-5,
                _ => 2e-3, // the relative rounding error of each operand is below 2⁻¹⁰
            };
            assert!(most < limit, "{precision} on {device}: {most}");
        });
    }
}

/// A precision scope applies to one thread. Products in the scope have at least the stated precision on every device.
#[test]
fn precision_setting_covers_products_and_autocast() {
    let (a, b) = (scaled(64, 256, 3, |_, _| 0), scaled(256, 64, 4, |_, _| 0));
    let wide = |t: &ArrayD<f32>| t.mapv(f64::from);
    let cases = [
        (Precision::Low, "high", Some(DType::BF16), DType::BF16, 1e-2),
        (Precision::Normal, "high", None, DType::F32, 3e-5),
        (Precision::High, "highest", None, DType::F32, 1e-6),
    ];
    for (precision, matmul, cast, dtype, most) in cases {
        // The innermost scope decides: outer scopes and finished inner scopes have no effect.
        let result = autocast(DType::F16, || {
            with_precision(precision, || {
                with_precision(Precision::High, || assert_eq!(autocast_dtype(), None));
                let panic = std::panic::catch_unwind(|| with_precision(Precision::Low, || panic!("on purpose")));
                assert!(panic.is_err());
                assert_eq!((claystone::get_float32_matmul_precision(), autocast_dtype()), (matmul, cast));
                let other = std::thread::spawn(autocast_dtype).join().unwrap();
                assert_eq!(other, None, "other threads are as they were");
                each_device(|device| {
                    let on = |t: &ArrayD<f32>| Tensor::from_ndarray_view(t, device).unwrap();
                    let (x, w) = (on(&a), on(&b).requires_grad_(true).unwrap());
                    let product = x.matmul(&w).unwrap();
                    assert_eq!(product.dtype(), dtype);
                    let [_, error] = errors(&f64s(&product.to_dtype(DType::F32).unwrap()), &wide(&a), &wide(&b));
                    assert!(error < most, "{precision:?} on {device}: {error}");
                    product.sum((), false).unwrap().backward().unwrap();
                    let grad = f64s(&w.grad().unwrap());
                    let right = reference(&wide(&a).t().to_owned().into_dyn(), &ArrayD::ones(IxDyn(&[64, 64])));
                    let close = |(got, want): (&f64, &f64)| (got - want).abs() < 300.0 * most;
                    assert!(grad.iter().zip(&right).all(close), "{precision:?} on {device}");
                });
            });
            autocast_dtype()
        });
        assert_eq!(result, Some(DType::F16));
    }
    assert_eq!(Precision::default(), Precision::High);
}
