//! Tests GPU kernels for norms, variances and cross-entropy against formulas in f64. The kernels keep rows in registers or split
//! rows into slices, and sizes are around the limits of both. Views have offsets and strides. Without a GPU, an OpenCL CPU device
//! runs the GPU kernels: each test restarts itself with `CLAYSTONE_KERNELS=gpu`. The CPU devices' own kernels are tested as well.

use claystone::device;
use claystone::{BatchNormOptions, CrossEntropy, DType, Device, Error, LossReduction, Tensor};

use crate::common::gpus::{assert_same, fenced_gpus, gpus, gpus_and_processors, thinned_cases, upload};
use crate::common::values;

/// Returns the mean and the biased variance.
fn moments(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    (mean, x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / x.len() as f64)
}

/// Returns numbers around `centre`, and gradients. Both repeat after many elements.
pub fn pseudo_random(n: usize, centre: f64) -> (Vec<f64>, Vec<f64>) {
    let part = |i: usize, of: usize, by: f64| ((i * 7919 + i / of) % of) as f64 / by;
    ((0..n).map(|i| part(i, 241, 64.0) + centre).collect(), (0..n).map(|i| part(i, 37, 16.0) - 1.0).collect())
}

/// Returns the expected norm of the rows, and the gradients of input, weight and bias. The weight of an element is `w[of(row,
/// element)]`.
pub fn reference_norm(
    rows: &[Vec<f64>],
    grads: &[Vec<f64>],
    [w, b]: [&[f64]; 2],
    of: impl Fn(usize, usize) -> usize,
    (eps, rms): (f64, bool),
) -> ([Vec<Vec<f64>>; 2], [Vec<f64>; 2]) {
    let (mut ys, mut dxs, mut dw, mut db) = (vec![], vec![], vec![0.0; w.len()], vec![0.0; b.len()]);
    for (r, (x, g)) in rows.iter().zip(grads).enumerate() {
        let n = x.len() as f64;
        let (mean, var) = if rms { (0.0, x.iter().map(|x| x * x).sum::<f64>() / n) } else { moments(x) };
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) / (var + eps).sqrt()).collect();
        let weighted: Vec<f64> = g.iter().enumerate().map(|(e, g)| g * w[of(r, e)]).collect();
        let sum = if rms { 0.0 } else { weighted.iter().sum::<f64>() / n };
        let product = weighted.iter().zip(&normal).map(|(g, z)| g * z).sum::<f64>() / n;
        ys.push(normal.iter().enumerate().map(|(e, z)| z * w[of(r, e)] + b[of(r, e)]).collect());
        dxs.push(weighted.iter().zip(&normal).map(|(g, z)| (g - sum - z * product) / (var + eps).sqrt()).collect());
        for (e, (g, z)) in g.iter().zip(&normal).enumerate() {
            dw[of(r, e)] += g * z;
            db[of(r, e)] += g;
        }
    }
    ([ys, dxs], [dw, db])
}

pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 4e-3,
        DType::F32 => 3e-5,
        _ => 1e-11,
    }
}

/// Runs `norm` and its backward with the output gradient `g`, and compares the result and the three gradients with `want`.
pub fn assert_norm(
    [x, w, b, g]: [&Tensor; 4],
    want: [&[f64]; 4],
    eps: f64,
    what: &str,
    norm: impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor,
) {
    let leaf = |t: &Tensor| t.detach().requires_grad_(true).unwrap();
    let leaves = [x, w, b].map(leaf);
    let y = norm(&leaves[0], &leaves[1], &leaves[2]);
    assert_same(&values(&y.detach()), want[0], eps, &format!("{what}: results"));
    y.backward_with(g).unwrap();
    for ((leaf, want), name) in leaves.iter().zip(&want[1..]).zip(["inputs", "factors", "shifts"]) {
        // A norm without a bias has no gradient for the bias.
        if let Some(gradient) = leaf.grad() {
            let scale = want.iter().fold(1.0, |m: f64, w| m.max(w.abs()));
            assert_same(&values(&gradient), want, 4.0 * eps * scale, &format!("{what}: gradient of {name}"));
        }
    }
}

#[test]
fn norms_of_rows_match_formulas() {
    for device in gpus_and_processors("rows::norms_of_rows_match_formulas") {
        for dtype in thinned_cases(&[DType::F32, DType::F64, DType::F16], 2, device) {
            let lengths = [2, 3, 4, 8, 33, 64, 100, 768, 1000, 4096, 4099, 16_384, 16_388, 32_771, 70_000];
            for n in thinned_cases(&lengths, 4, device) {
                for (rows, at) in [(5, 0), (3, 1)] {
                    let what = format!("{rows} x {n} of {dtype} at {at}");
                    let ((xs, gs), (ws, bs)) = (pseudo_random(rows * n + at, 3.0), pseudo_random(n, 0.5));
                    let up = |v: &[f64]| upload(v, &[v.len()], dtype, device);
                    let view = |t: Tensor| t.narrow(0, at, rows * n).unwrap().reshape([rows, n]).unwrap();
                    let (x, g, w, b) = (view(up(&xs)), view(up(&gs)), up(&ws), up(&bs));
                    let cut = |v: &[f64]| v[at..].chunks(n).map(<[f64]>::to_vec).collect::<Vec<_>>();
                    for rms in [false, true] {
                        let none = vec![0.0; n];
                        let shifts = if rms { &none } else { &bs };
                        let ([ys, dxs], [dw, db]) =
                            reference_norm(&cut(&xs), &cut(&gs), [&ws, shifts], |_, e| e, (1e-5, rms));
                        let want = [&ys.concat()[..], &dxs.concat(), &dw, &db];
                        assert_norm([&x, &w, &b, &g], want, tolerance(dtype), &what, |x, w, b| match rms {
                            true => x.rms_norm(&[n], Some(w), Some(1e-5)).unwrap(),
                            false => x.layer_norm(&[n], Some(w), Some(b), 1e-5).unwrap(),
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn norms_of_channels_match_formulas() {
    for device in gpus_and_processors("rows::norms_of_channels_match_formulas") {
        for dtype in thinned_cases(&[DType::F32, DType::F64, DType::F16], 2, device) {
            let shapes = [[2, 4, 1], [2, 4, 3], [3, 4, 64], [5, 6, 500], [4, 2, 12_544], [3, 2, 20_001], [600, 2, 196]];
            for [n, c, l] in thinned_cases(&shapes, 2, device) {
                let ((xs, gs), (ws, bs)) = (pseudo_random(n * c * l, 3.0), pseudo_random(c, 0.5));
                let up = |v: &[f64], shape: &[usize]| upload(v, shape, dtype, device);
                // Tests the contiguous layout and a layout whose innermost dimension in memory is the batch.
                let turned = |v: &[f64]| {
                    let t = up(v, &[n, c, l]).permute(&[1, 2, 0]).unwrap().contiguous().unwrap();
                    t.permute(&[2, 0, 1]).unwrap()
                };
                for (x, g) in [(up(&xs, &[n, c, l]), up(&gs, &[n, c, l])), (turned(&xs), turned(&gs))] {
                    let (w, b) = (up(&ws, &[c]), up(&bs, &[c]));
                    let what = format!("[{n}, {c}, {l}] of {dtype}, strides {:?}", x.strides());
                    // Converts between numbers in batch-major order and one row for each channel.
                    let channels = |v: &[f64]| -> Vec<Vec<f64>> {
                        (0..c).map(|k| (0..n * l).map(|i| v[(i / l * c + k) * l + i % l]).collect()).collect()
                    };
                    let back = |rows: &[Vec<f64>]| -> Vec<f64> {
                        (0..n * c * l).map(|i| rows[i / l % c][i / (c * l) * l + i % l]).collect()
                    };
                    let ([ys, dxs], [dw, db]) =
                        reference_norm(&channels(&xs), &channels(&gs), [&ws, &bs], |r, _| r, (1e-5, false));
                    let want = [&back(&ys)[..], &back(&dxs), &dw, &db];
                    assert_norm(
                        [&x, &w, &b, &g],
                        want,
                        tolerance(dtype),
                        &format!("batch norm of {what}"),
                        |x, w, b| {
                            let options = BatchNormOptions {
                                weight: Some(w),
                                bias: Some(b),
                                training: true,
                                ..Default::default()
                            };
                            x.batch_norm(options).unwrap()
                        },
                    );
                    let cut = |v: &[f64]| v.chunks(c / 2 * l).map(<[f64]>::to_vec).collect::<Vec<_>>();
                    let of = |r: usize, e: usize| r % 2 * (c / 2) + e / l;
                    let ([ys, dxs], [dw, db]) = reference_norm(&cut(&xs), &cut(&gs), [&ws, &bs], of, (1e-5, false));
                    let want = [&ys.concat()[..], &dxs.concat(), &dw, &db];
                    assert_norm(
                        [&x, &w, &b, &g],
                        want,
                        tolerance(dtype),
                        &format!("group norm of {what}"),
                        |x, w, b| x.group_norm(2, Some(w), Some(b), 1e-5).unwrap(),
                    );
                }
            }
        }
    }
}

#[test]
fn variances_match_formulas() {
    for device in gpus("rows::variances_match_formulas") {
        for dtype in thinned_cases(&[DType::F32, DType::F64, DType::F16], 2, device) {
            for [a, b, c] in
                thinned_cases(&[[3, 5, 7], [2, 3, 64], [3, 1, 4099], [2, 2, 40_000], [1, 1, 300_000]], 2, device)
            {
                // Numbers far from 0 would lose precision in sums of squares. f16 cannot represent such numbers precisely enough,
                // so its numbers are near 1.
                let (xs, _) = pseudo_random(a * b * c, if dtype == DType::F16 { 1.0 } else { 1000.0 });
                let x = upload(&xs, &[a, b, c], dtype, device);
                let mut seen = 0;
                for (dims, of) in [(&[2isize][..], c), (&[1, 2], b * c), (&[0, 1, 2], a * b * c)] {
                    let vars: Vec<f64> = xs.chunks(of).map(|x| moments(x).1 * of as f64 / (of - 1) as f64).collect();
                    let roots: Vec<f64> = vars.iter().map(|v| v.sqrt()).collect();
                    let what = format!("[{a}, {b}, {c}] of {dtype} over {dims:?}");
                    let (var, launches) = device::count_launches(|| x.var(dims, 1, false).unwrap());
                    assert!(launches == if of > 32_768 { 2 } else { 1 }, "{launches} launches for {what}");
                    assert_same(&values(&var), &vars, tolerance(dtype), &what);
                    assert_same(&values(&x.std(dims, 1, true).unwrap()), &roots, tolerance(dtype), &what);
                    seen += vars.len();
                }
                assert!(seen > 0);
                let turned = x.transpose(0, 1).unwrap().narrow(0, 0, b.div_ceil(2)).unwrap();
                let want: Vec<f64> =
                    (0..b.div_ceil(2) * a).map(|i| moments(&xs[(i % a * b + i / a) * c..][..c]).1).collect();
                assert_same(&values(&turned.var([2], 0, false).unwrap()), &want, tolerance(dtype), "transposed");
            }
        }
    }
}

/// Checks the losses with all reductions, and the gradient, for rows that start at element `at`. One label of five is ignored.
fn check_cross_entropy(device: Device, dtype: DType, [rows, n]: [usize; 2], at: usize) {
    let what = format!("{rows} x {n} of {dtype} at {at}");
    let (xs, _) = pseudo_random(rows * n + at, -2.0);
    let x = upload(&xs, &[xs.len()], dtype, device).narrow(0, at, rows * n).unwrap();
    let x = x.reshape([rows, n]).unwrap().requires_grad_(true).unwrap();
    let labels: Vec<i64> = (0..rows).map(|r| if r % 5 == 3 { -100 } else { (r * 31 % n) as i64 }).collect();
    let kept = labels.iter().filter(|l| **l >= 0).count() as f64;
    let (mut losses, mut grads) = (vec![], vec![]);
    for (x, &label) in xs[at..].chunks(n).zip(&labels) {
        let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
        let on = f64::from(label >= 0);
        losses.push(if label >= 0 { lse - x[label as usize] } else { 0.0 });
        let p = |(i, x): (usize, &f64)| ((x - lse).exp() - f64::from(i as i64 == label)) * on / kept;
        grads.extend(x.iter().enumerate().map(p));
    }
    let labels = Tensor::from_slice(&labels, rows, device).unwrap();
    let eps = tolerance(dtype);
    let mean = [losses.iter().sum::<f64>() / kept];
    assert_same(&values(&x.detach().cross_entropy(&labels).unwrap()), &mean, eps, &what);
    let one = |reduction| CrossEntropy { reduction, ..CrossEntropy::default() };
    let each = x.detach().cross_entropy_with(&labels, one(LossReduction::None)).unwrap();
    assert_same(&values(&each), &losses, eps, &what);
    let sum = x.detach().cross_entropy_with(&labels, one(LossReduction::Sum)).unwrap();
    assert_same(&values(&sum), &[mean[0] * kept], eps, &what);
    let loss = x.cross_entropy(&labels).unwrap();
    assert_same(&values(&loss.detach()), &mean, eps, &what);
    loss.backward().unwrap();
    assert_same(&values(&x.grad().unwrap()), &grads, eps, &what);
}

#[test]
fn cross_entropy_matches_formulas() {
    for device in gpus_and_processors("rows::cross_entropy_matches_formulas") {
        for dtype in thinned_cases(&[DType::F32, DType::F64, DType::F16], 2, device) {
            let shapes =
                [[1, 1], [64, 10], [7, 33], [300, 10], [1000, 12], [9, 1000], [5, 4096], [3, 8195], [2, 40_000]];
            for [rows, n] in thinned_cases(&shapes, 3, device) {
                for at in [0, 1] {
                    check_cross_entropy(device, dtype, [rows, n], at);
                }
            }
        }
        // Checks short and long rows with infinities and NaN. A class whose logit is -inf is masked, which is valid.
        for n in [10, 9001] {
            let mut x = vec![1f32; 4 * n];
            x[..n - 1].fill(f32::NEG_INFINITY);
            x[n + 2] = f32::INFINITY;
            x[2 * n + 1] = f32::NAN;
            x[3 * n..].fill(f32::NEG_INFINITY);
            let x = Tensor::from_slice(&x, [4, n], device).unwrap();
            let labels = Tensor::from_slice(&[n as i64 - 1, 0, 0, 0], 4, device).unwrap();
            let options = CrossEntropy { reduction: LossReduction::None, ..CrossEntropy::default() };
            let losses = values(&x.cross_entropy_with(&labels, options).unwrap());
            assert!(losses[0] == 0.0 && losses[1..].iter().all(|l| l.is_nan()), "{losses:?} of {n}");
            let beyond = Tensor::from_slice(&[n as i64, 0, 0, 0], 4, device).unwrap();
            let told = x.cross_entropy(&beyond).and_then(|loss| loss.item::<f32>());
            assert!(matches!(told, Err(Error::IndexOutOfRange { index, size, .. }) if index == n as i64 && size == n));
        }
    }
}

/// Checks rows that several work-groups process in slices. Lengths: the longest row that a single work-group processes, one element
/// more, the edges of slices, and a row with more slices than one block combines.
fn cross_entropy_in_slices(device: Device) {
    // A row of up to 8192 elements is processed by one work-group and not split.
    let (lengths, uncut) = ([8192, 8193, 12_288, 40_003, 1_048_579], 8192);
    for (i, n) in lengths.into_iter().enumerate() {
        let long = n > 100_000;
        for at in if long { 0..1 } else { 0..2 } {
            check_cross_entropy(device, DType::F32, [if long { 1 } else { 3 }, n], at);
        }
        let x = Tensor::zeros(&[3, n], device).unwrap();
        let labels = Tensor::from_slice(&[0i64, n as i64 - 1, i as i64], 3, device).unwrap();
        let (loss, launches) = device::count_launches(|| x.cross_entropy(&labels).unwrap());
        assert_same(&values(&loss), &[(n as f64).ln()], 1e-5, "of equals");
        // For split rows, GPUs without a fence use one more launch to combine the partial results.
        assert!(if n == uncut { launches <= 2 } else { (2..=3).contains(&launches) }, "{launches} launches for {n}");
    }
    check_cross_entropy(device, DType::F16, [2, 50_257], 1);
    check_cross_entropy(device, DType::F64, [1, 33_000], 0);
    // Puts infinities and NaN into the first, a middle and the last slice.
    let n = 30_000;
    for at in [0, 15_000, n - 1] {
        let mut x = vec![f32::NEG_INFINITY; 3 * n];
        x[at] = 2.0;
        x[n..2 * n].fill(0.5);
        x[n + at] = f32::NAN;
        x[2 * n + at] = f32::INFINITY;
        let x = Tensor::from_slice(&x, [3, n], device).unwrap();
        let labels = Tensor::from_slice(&[at as i64, 7, 9], 3, device).unwrap();
        let options = CrossEntropy { reduction: LossReduction::None, ..CrossEntropy::default() };
        let losses = values(&x.cross_entropy_with(&labels, options).unwrap());
        assert!(losses[0] == 0.0 && losses[1..].iter().all(|l| l.is_nan()), "{losses:?} with {at}");
    }
    let beyond = Tensor::from_slice(&[n as i64, 0], 2, device).unwrap();
    let x = Tensor::zeros(&[2, n], device).unwrap().requires_grad_(true).unwrap();
    let told = x.cross_entropy(&beyond).and_then(|loss| loss.item::<f32>());
    assert!(matches!(told, Err(Error::IndexOutOfRange { index, size, .. }) if index == n as i64 && size == n));
}

#[test]
fn cross_entropy_of_long_rows_matches_formulas() {
    gpus("rows::cross_entropy_of_long_rows_matches_formulas").into_iter().for_each(cross_entropy_in_slices);
}

#[test]
fn cross_entropy_combined_by_the_last_group_matches_formulas() {
    fenced_gpus("rows::cross_entropy_combined_by_the_last_group_matches_formulas")
        .into_iter()
        .for_each(cross_entropy_in_slices);
}
