//! Means, variances and norms of numbers whose squares overflow or underflow the dtype, and of numbers far from 0.

use claystone::{BatchNormOptions, DType, Device, LossReduction, MemoryFormat, Tensor};

use crate::common::{each_device, values};
use crate::rounding::rounded;

/// Calls `f` on every device with each dtype, with scales whose squares overflow or underflow, and with a tolerance.
fn each_scale(f: impl Fn(Device, DType, f64, f64)) {
    each_device(|device| {
        for (dtype, scales, within) in [
            (DType::F32, [1e30, 1.0, 1e-30], 2e-6),
            (DType::BF16, [1e30, 1.0, 1e-30], 2e-2),
            (DType::F16, [1e4, 1.0, 1e-3], 4e-3),
            (DType::F64, [1e200, 1.0, 1e-200], 1e-13),
        ] {
            if dtype == DType::F64 && !device.info().unwrap().fp64 {
                continue;
            }
            for scale in scales {
                println!("{dtype} times {scale:e}");
                f(device, dtype, scale, within);
            }
        }
    });
}

/// Returns rows of numbers from 1 to 5 times the scale, rounded to the dtype.
fn rows(count: usize, n: usize, dtype: DType, scale: f64) -> Vec<f64> {
    (0..count * n).map(|i| rounded(((i * 7919 % 257) as f64 / 64.0 + 1.0) * scale, dtype)).collect()
}

/// Returns the elements as a contiguous tensor, as columns of a larger tensor, and as a view with reversed memory order.
fn views(x: &[f64], count: usize, n: usize, dtype: DType, device: Device) -> [Tensor; 3] {
    let plain = Tensor::from_slice(x, [count, n], Device::Cpu).unwrap();
    let on = |t: Tensor| t.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let room = Tensor::zeros(&[n, count + 3], (dtype, device)).unwrap();
    let columns = room.narrow(1, 1, count).unwrap().transpose(0, 1).unwrap();
    columns.copy_(&on(plain.shallow_clone())).unwrap();
    let reversed = on(plain.flip(&[1]).unwrap()).flip(&[1]).unwrap();
    [on(plain), columns, reversed]
}

#[track_caller]
fn close(got: &Tensor, want: &[f64], within: f64, of: &str) {
    let dtype = got.dtype();
    let (got, size) = (values(got), want.iter().fold(0f64, |size, w| size.max(w.abs())));
    assert_eq!(got.len(), want.len(), "{of}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let want = rounded(want, dtype);
        let good = if want.is_finite() { (got - want).abs() <= within * size } else { got == want };
        assert!(good, "{of}: {i} is {got:e}, not {want:e}");
    }
}

/// Returns the mean and the root of the sum of squared deviations of a row.
fn moments(row: &[f64]) -> (f64, f64) {
    let mean = row.iter().map(|x| x / row.len() as f64).sum::<f64>();
    // The deviations are scaled first, because their squares overflow in f64 too.
    let size = row.iter().fold(0f64, |size, x| size.max(x.abs()));
    (mean, row.iter().map(|x| ((x - mean) / size).powi(2)).sum::<f64>().sqrt() * size)
}

#[test]
fn variances_and_norms_do_not_overflow() {
    each_scale(|device, dtype, scale, within| {
        for (count, n) in [(3, 2), (2, 5), (20, 33), (3, 1000), (1, 70_001)] {
            let x = rows(count, n, dtype, scale);
            let of_rows = |f: &dyn Fn(&[f64]) -> f64| x.chunks(n).map(f).collect::<Vec<f64>>();
            let freedom = (n as f64 - 1.0).sqrt();
            let std = of_rows(&|row| moments(row).1 / freedom);
            let mean = of_rows(&|row| moments(row).0);
            let norm = of_rows(&|row| row.iter().map(|x| (x / scale).powi(2)).sum::<f64>().sqrt() * scale);
            for (which, x) in views(&x, count, n, dtype, device).iter().enumerate() {
                let of = |name: &str| format!("{name} of {count} x {n}, view {which}");
                let [got_std, got_mean] = <[Tensor; 2]>::from(x.std_mean(1, 1, false).unwrap());
                close(&got_std, &std, within, &of("std"));
                close(&got_mean, &mean, within, &of("mean"));
                let var: Vec<f64> = std.iter().map(|std| std * std).collect();
                close(&x.var(1, 1, false).unwrap(), &var, 2.0 * within, &of("var"));
                close(&x.norm(1, false).unwrap(), &norm, within, &of("norm"));
                let cube = x.vector_norm(3.0, 1, false).unwrap();
                let cubes = of_rows(&|row| row.iter().map(|x| (x / scale).powi(3)).sum::<f64>().cbrt() * scale);
                close(&cube, &cubes, 10.0 * within, &of("norm of order 3"));

                // The gradients also match the definitions.
                let leaf = x.detach().requires_grad_(true).unwrap();
                leaf.std(1, 1, false).unwrap().sum((), false).unwrap().backward().unwrap();
                let rows = (0..count).flat_map(|r| (0..n).map(move |i| (r, i)));
                let elements = values(&x.contiguous().unwrap());
                let at = |(r, i): (usize, usize)| elements[r * n + i];
                let grad: Vec<f64> = rows.clone().map(|e| (at(e) - mean[e.0]) / std[e.0] / (n as f64 - 1.0)).collect();
                close(&leaf.grad().unwrap(), &grad, 2.0 * within, &of("gradient of std"));
                let leaf = x.detach().requires_grad_(true).unwrap();
                leaf.norm(1, false).unwrap().sum((), false).unwrap().backward().unwrap();
                let grad: Vec<f64> = rows.map(|e| at(e) / norm[e.0]).collect();
                close(&leaf.grad().unwrap(), &grad, 2.0 * within, &of("gradient of norm"));
            }
        }
    });
}

#[test]
fn means_of_the_largest_numbers_are_finite() {
    each_device(|device| {
        let x = Tensor::from_slice(&[3e38f32, 3.2e38, 3.4e38], 3, device).unwrap();
        close(&x.mean((), false).unwrap(), &[3.2e38], 1e-6, "mean");
        close(&x.std((), 0, false).unwrap(), &[0.163_299_316e38], 1e-5, "std");
        let many = Tensor::full(100_000, 3e38, (DType::F32, device)).unwrap();
        close(&many.mean((), false).unwrap(), &[3e38], 1e-6, "mean of many");
        // As in PyTorch, the norm of elements that include NaN or infinity is NaN or infinity.
        for (odd, norm) in [(f32::NAN, f32::NAN), (f32::INFINITY, f32::INFINITY)] {
            let x = Tensor::from_slice(&[1e30, odd, 2.0], 3, device).unwrap();
            let is = |t: Tensor, want: f32| {
                let got = t.item::<f32>().unwrap();
                assert!(got == want || got.is_nan() && want.is_nan(), "{got} of {odd}");
            };
            is(x.norm((), false).unwrap(), norm);
            is(x.mean((), false).unwrap(), norm);
            is(x.std((), 0, false).unwrap(), f32::NAN);
            assert!(
                x.layer_norm(&[3], None, None, 1e-5)
                    .unwrap()
                    .isnan()
                    .unwrap()
                    .all((), false)
                    .unwrap()
                    .item::<bool>()
                    .unwrap()
            );
        }
        for n in [3, 100_000] {
            let none = Tensor::zeros(n, (DType::F32, device)).unwrap();
            assert_eq!(none.norm((), false).unwrap().item::<f32>().unwrap(), 0.0);
            assert_eq!(none.std((), 0, false).unwrap().item::<f32>().unwrap(), 0.0);
        }
    });
}

/// Applies a norm to `[N, C, L]`, which may be a view.
type Norm = fn(&Tensor, f64) -> Tensor;
/// Returns the row of an element, given its sample, its channel and the number of channels.
type RowOf = fn(usize, usize, usize) -> usize;

/// The norms, each with the function that assigns elements to rows.
const NORMS: [(&str, Norm, RowOf); 6] = [
    ("layer_norm", |x, eps| x.layer_norm(&x.shape().dims()[2..], None, None, eps).unwrap(), |n, c, cs| n * cs + c),
    ("rms_norm", |x, eps| x.rms_norm(&x.shape().dims()[2..], None, Some(eps)).unwrap(), |n, c, cs| n * cs + c),
    ("group_norm", |x, eps| x.group_norm(2, None, None, eps).unwrap(), |n, c, cs| n * 2 + c / (cs / 2)),
    ("instance_norm", |x, eps| x.instance_norm(None, None, eps).unwrap(), |n, c, cs| n * cs + c),
    ("batch_norm", batch_norm, |_, c, _| c),
    (
        "batch_norm, channels last",
        |x, eps| {
            let [n, c, l] = *x.shape().dims() else { unreachable!() };
            let four = x.reshape([n, c, l, 1]).unwrap().to_memory_format(MemoryFormat::ChannelsLast).unwrap();
            batch_norm(&four, eps).reshape([n, c, l]).unwrap()
        },
        |_, c, _| c,
    ),
];

fn batch_norm(x: &Tensor, eps: f64) -> Tensor {
    x.batch_norm(BatchNormOptions { training: true, eps, ..Default::default() }).unwrap()
}

/// Returns the results and the input gradients of a norm in f64, for output gradients `g`.
fn normalized(x: &[f64], g: &[f64], eps: f64, rms: bool, row: impl Fn(usize) -> usize) -> [Vec<f64>; 2] {
    let mut of_rows = vec![Vec::new(); (0..x.len()).map(&row).max().unwrap() + 1];
    (0..x.len()).for_each(|i| of_rows[row(i)].push(i));
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    for which in of_rows {
        let (n, elements) = (which.len() as f64, which.iter().map(|&i| x[i]).collect::<Vec<f64>>());
        let mean = if rms { 0.0 } else { moments(&elements).0 };
        let size = elements.iter().fold(0f64, |size, x| size.max(x.abs()));
        let var = elements.iter().map(|x| ((x - mean) / size).powi(2)).sum::<f64>() / n;
        let root = (var + eps / size / size).sqrt() * size;
        which.iter().for_each(|&i| y[i] = (x[i] - mean) / root);
        let over = |f: &dyn Fn(usize) -> f64| which.iter().map(|&i| f(i)).sum::<f64>() / n;
        let (less, share) = (if rms { 0.0 } else { over(&|i| g[i]) }, over(&|i| g[i] * y[i]));
        which.iter().for_each(|&i| dx[i] = (g[i] - less - y[i] * share) / root);
    }
    [y, dx]
}

/// For each norm and layout, computes results and gradients for `[n, c, l]` on the device and in f64, and calls `f` with both.
fn compare(
    x: &[f64],
    [n, c, l]: [usize; 3],
    eps: f64,
    dtype: DType,
    device: Device,
    f: impl Fn(&str, [&Tensor; 2], [Vec<f64>; 2]),
) {
    let g: Vec<f64> = (0..x.len()).map(|i| rounded((i * 31 % 17) as f64 / 8.0 - 1.0, dtype)).collect();
    let grads = Tensor::from_slice(&g, [n, c, l], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    for (name, norm, row) in NORMS {
        let want = normalized(x, &g, eps, name == "rms_norm", |i| row(i / l / c, i / l % c, c));
        for (which, view) in views(x, n * c, l, dtype, device).into_iter().enumerate() {
            let leaf = view.detach().requires_grad_(true).unwrap();
            let y = norm(&leaf.reshape([n, c, l]).unwrap(), eps);
            y.mul(&grads.to_device(device).unwrap()).unwrap().sum((), false).unwrap().backward().unwrap();
            let name = format!("{name} of [{n}, {c}, {l}], view {which} on {device}");
            f(&name, [&y.detach(), &leaf.grad().unwrap()], want.clone());
        }
    }
}

#[test]
fn norms_do_not_overflow() {
    each_scale(|device, dtype, scale, within| {
        for shape in [[2, 4, 3], [1, 2, 600], [3, 4, 65], [1, 2, 40_000]] {
            if shape[2] > 600 && scale == 1.0 {
                continue;
            }
            let x = rows(shape[0] * shape[1], shape[2], dtype, scale);
            let eps = if scale < 1.0 { 0.0 } else { 1e-5 };
            compare(&x, shape, eps, dtype, device, |name, [y, dx], [want, gradient]| {
                // The tolerance is larger, because in 16 bits the gradient is rounded when it is summed over the many elements of a
                // channel.
                close(y, &want, 4.0 * within, name);
                close(dx, &gradient, 8.0 * within, &format!("gradient of {name}"));
            });
        }
    });
}

/// Returns the largest absolute difference.
fn error(got: &Tensor, want: &[f64]) -> f64 {
    values(got).iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
}

#[test]
fn norms_far_from_zero_stay_precise() {
    each_device(|device| {
        for (mean, n) in [(1000.0, 1024), (10_000.0, 1000), (10_000.0, 65_536)] {
            let x: Vec<f64> = (0..4 * n).map(|i| f64::from((mean + (i % 16) as f64 * 1e-3) as f32)).collect();
            let (_, root) = moments(&x[..n]);
            let std = root / (n as f64).sqrt();
            // The limit is half a unit in the last place of the mean, which is the error of PyTorch 2.x with its f32 means.
            let ulp = f64::from(f32::EPSILON) * 2f64.powf(f64::log2(mean).floor());
            let limit = 0.5 * ulp / std;
            println!("limit {limit:.4}");
            compare(&x, [1, 4, n], 1e-5, DType::F32, device, |name, [y, dx], [want, gradient]| {
                let rms = name.starts_with("rms");
                let off = error(y, &want);
                assert!(off <= if rms { 1e-6 } else { 1.02 * limit }, "{name}: {off}, {limit}");
                let size = gradient.iter().fold(0f64, |size, g| size.max(g.abs()));
                let off = error(dx, &gradient) / size;
                assert!(off <= if rms { 1e-3 } else { 2.0 * limit + 1e-5 }, "gradient of {name}: {off}, {limit}");
            });
        }
    });
}

#[test]
fn distances_do_not_overflow() {
    each_scale(|device, dtype, scale, within| {
        let (n, k) = (30, 7);
        let (a, b) = (rows(n, k, dtype, scale), rows(n + 1, k, dtype, scale)[k..].to_vec());
        let row = |t: &[f64], i: usize| t[i * k..][..k].iter().map(|x| x / scale).collect::<Vec<f64>>();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let cos = |i: usize| {
            let (x, y) = (row(&a, i), row(&b, i));
            dot(&x, &y) / (dot(&x, &x) * dot(&y, &y)).sqrt()
        };
        let far = |i: usize, j: usize| {
            let apart: Vec<f64> = row(&a, i).iter().zip(row(&b, j)).map(|(x, y)| x - y).collect();
            dot(&apart, &apart).sqrt() * scale
        };
        let cosines: Vec<f64> = (0..n).map(cos).collect();
        for (x, y) in views(&a, n, k, dtype, device).iter().zip(&views(&b, n, k, dtype, device)) {
            let eps = scale * 1e-9;
            close(&x.cosine_similarity(y, 1, eps).unwrap(), &cosines, 4.0 * within, "cosine_similarity");
            let normal: Vec<f64> = (0..n)
                .flat_map(|i| row(&a, i).iter().map(|v| v / dot(&row(&a, i), &row(&a, i)).sqrt()).collect::<Vec<_>>())
                .collect();
            close(&x.normalize(2.0, 1, eps).unwrap(), &normal, 4.0 * within, "normalize");
            let pairs: Vec<f64> = (0..n).map(|i| far(i, i)).collect();
            close(&x.pairwise_distance(y, 2.0, 0.0, false).unwrap(), &pairs, 4.0 * within, "pairwise_distance");
            for m in [3, n] {
                // With many points, distances use a matrix product, which loses digits if points nearly coincide.
                let within = if m < 26 { 4.0 * within } else { within.sqrt() };
                let (x, y) = (x.narrow(0, 0, m).unwrap(), y.narrow(0, 0, m).unwrap());
                let all: Vec<f64> = (0..m * m).map(|i| far(i / m, i % m)).collect();
                close(&x.cdist(&y, 2.0).unwrap(), &all, within, &format!("cdist of {m}"));
            }
            if scale >= 1.0 {
                let ones = Tensor::ones(n, (dtype, device)).unwrap();
                let losses = x.cosine_embedding_loss(y, &ones, 0.0, LossReduction::None).unwrap();
                let want: Vec<f64> = cosines.iter().map(|cos| 1.0 - cos).collect();
                let off = error(&losses, &want);
                assert!(off <= 8.0 * within, "cosine_embedding_loss is off by {off}");
            }
            let leaf = x.detach().requires_grad_(true).unwrap();
            leaf.cosine_similarity(y, 1, eps).unwrap().sum((), false).unwrap().backward().unwrap();
            let gradient: Vec<f64> = (0..n)
                .flat_map(|i| {
                    let (x, y) = (row(&a, i), row(&b, i));
                    let (xx, yy, cos) = (dot(&x, &x), dot(&y, &y), cosines[i]);
                    (0..k).map(|e| (y[e] / (xx * yy).sqrt() - cos * x[e] / xx) / scale).collect::<Vec<_>>()
                })
                .collect();
            close(&leaf.grad().unwrap(), &gradient, 40.0 * within, "gradient of cosine_similarity");
        }
    });
}
