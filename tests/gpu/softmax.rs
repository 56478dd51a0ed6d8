//! Tests GPU kernels for softmax, log-softmax and logsumexp of rows too long for registers against formulas in f64. Sizes are
//! around the edges of registers, blocks and slices; views have offsets and strides. Without a GPU, an OpenCL CPU device runs these
//! kernels: each test restarts itself with `CLAYSTONE_KERNELS=gpu`.

use claystone::device::count_launches;
use claystone::{DType, Device, Tensor};

use crate::common::gpus::{assert_same, gpus, upload};
use crate::common::values;

fn numbers(n: usize, of: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 7919 + i / of) % of) as f64 / 32.0 - 3.0).collect()
}

/// Returns the expected softmax, log-softmax and logsumexp of each row.
fn reference_results(rows: &[f64], n: usize) -> [Vec<f64>; 3] {
    let sums: Vec<f64> = rows.chunks(n).map(|row| row.iter().map(|x| x.exp()).sum::<f64>().ln()).collect();
    let logs: Vec<f64> = rows.iter().enumerate().map(|(i, x)| x - sums[i / n]).collect();
    [logs.iter().map(|x| x.exp()).collect(), logs, sums]
}

/// Returns the tolerance of `assert_same` for results of about 1.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        DType::F32 => 1e-5,
        _ => 1e-12,
    }
}

/// Checks all three functions and their gradients along the last dimension of the view `x`, whose elements are `xs`.
fn check(x: &Tensor, xs: &[f64], n: usize, what: &str) {
    let eps = tolerance(x.dtype());
    // Softmax results are multiplied by n, so that the compared numbers are about 1.
    let times = |v: &[f64]| v.iter().map(|v| v * n as f64).collect::<Vec<_>>();
    let [soft, logs, sums] = reference_results(xs, n);
    let got = x.softmax(-1).unwrap();
    // In f16, softmax results are subnormal, too imprecise to compare.
    if x.dtype() != DType::F16 {
        assert_same(&times(&values(&got)), &times(&soft), 4.0 * eps, &format!("softmax of {what}"));
    }
    assert_same(&values(&x.log_softmax(-1).unwrap()), &logs, eps, &format!("log_softmax of {what}"));
    assert_same(&values(&x.logsumexp(&[-1], false).unwrap()), &sums, eps, &format!("logsumexp of {what}"));
    if x.dtype().size() < 4 {
        return;
    }
    // The output gradients differ between elements.
    let gs = numbers(xs.len(), 53);
    let g = upload(&gs, x.shape().dims(), x.dtype(), x.device());
    let grad = |f: &dyn Fn(&Tensor) -> Tensor| {
        let leaf = x.detach().requires_grad_(true).unwrap();
        f(&leaf).backward_with(&g).unwrap();
        values(&leaf.grad().unwrap())
    };
    let row = |i: usize| i / n * n..(i / n + 1) * n;
    let dots: Vec<f64> = (0..xs.len()).step_by(n).map(|i| row(i).map(|k| soft[k] * gs[k]).sum::<f64>()).collect();
    let want: Vec<f64> = (0..xs.len()).map(|i| (gs[i] - dots[i / n]) * soft[i]).collect();
    assert_same(
        &times(&grad(&|x| x.softmax(-1).unwrap())),
        &times(&want),
        8.0 * eps,
        &format!("softmax's gradient of {what}"),
    );
    let totals: Vec<f64> = gs.chunks(n).map(|row| row.iter().sum()).collect();
    let want: Vec<f64> = (0..xs.len()).map(|i| gs[i] - soft[i] * totals[i / n]).collect();
    assert_same(&grad(&|x| x.log_softmax(-1).unwrap()), &want, 8.0 * eps, &format!("log_softmax's gradient of {what}"));
}

#[test]
fn long_rows_match_formulas() {
    for device in gpus("softmax::long_rows_match_formulas") {
        for (rows, n) in
            [(1, 32_768), (1, 32_769), (3, 32_772), (2, 36_863), (1, 36_864), (1, 36_865), (2, 50_257), (1, 300_007)]
        {
            for at in if n > 100_000 { 0..1 } else { 0..2 } {
                let xs = numbers(rows * n + at, 241);
                let x = upload(&xs, &[xs.len()], DType::F32, device).narrow(0, at, rows * n).unwrap();
                check(&x.reshape([rows, n]).unwrap(), &xs[at..], n, &format!("{rows} x {n} at {at}"));
            }
        }
        for dtype in [DType::F16, DType::BF16, DType::F64] {
            let (rows, n) = (2, 40_008);
            let xs = values(&upload(&numbers(rows * n, 241), &[rows * n], dtype, Device::Cpu));
            check(&upload(&xs, &[rows, n], dtype, device), &xs, n, &format!("{rows} x {n} of {dtype}"));
        }
        // A view of every second element with reversed rows.
        let n = 33_000;
        let xs = numbers(4 * n, 241);
        let x = upload(&xs, &[2, n, 2], DType::F32, device).select(2, 1).unwrap().flip(0).unwrap();
        let view: Vec<f64> = (0..2 * n).map(|i| xs[(1 - i / n) * 2 * n + i % n * 2 + 1]).collect();
        check(&x, &view, n, "every second element");
    }
}

/// Rows too long for registers take two launches, however many rows there are; shorter rows take one.
#[test]
fn long_rows_take_two_launches() {
    for device in gpus("softmax::long_rows_take_two_launches") {
        for (rows, n, want) in [(2, 1000, 1), (2, 40_000, 2), (40, 33_000, 2)] {
            let x = Tensor::zeros(&[rows, n], device).unwrap();
            let (y, launches) = count_launches(|| x.softmax(-1).unwrap());
            assert_eq!(launches, want, "{rows} x {n}");
            assert_same(&values(&y.narrow(1, n - 3, 3).unwrap()), &vec![1.0 / n as f64; 3 * rows], 1e-9, "of equals");
        }
    }
}

/// Puts infinities and NaN into the first, a middle and the last slice of a row.
#[test]
fn infinities_and_nan_in_long_rows_are_handled() {
    for device in gpus("softmax::infinities_and_nan_in_long_rows_are_handled") {
        let n = 40_000;
        for at in [0, 20_001, n - 1] {
            let mut x = vec![f32::NEG_INFINITY; 5 * n];
            x[at] = 2.0; // the only finite element of the first row
            x[n..4 * n].fill(0.5);
            x[n + at] = f32::NAN;
            x[2 * n + at] = f32::INFINITY;
            x[3 * n + at] = f32::INFINITY;
            x[3 * n + n / 3] = f32::NAN;
            let x = Tensor::from_slice(&x, [5, n], device).unwrap();
            let sums = values(&x.logsumexp(&[-1], false).unwrap());
            let (inf, nan) = (f64::INFINITY, f64::NAN);
            assert_same(&sums, &[2.0, nan, inf, nan, -inf], 0.0, &format!("logsumexp with {at}"));
            let soft = values(&x.softmax(-1).unwrap());
            let alone: Vec<f64> = (0..n).map(|i| f64::from(i == at)).collect();
            assert_same(&soft[..n], &alone, 0.0, "softmax of one");
            assert!(soft[n..].iter().all(|v| v.is_nan()), "softmax with {at}");
            let logs = values(&x.log_softmax(-1).unwrap());
            assert!(logs[at] == 0.0 && logs[..n].iter().filter(|v| **v == -inf).count() == n - 1, "log_softmax of one");
            assert!(logs[n..].iter().all(|v| v.is_nan()), "log_softmax with {at}");
        }
    }
}
