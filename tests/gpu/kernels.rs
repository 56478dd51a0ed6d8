//! Tests the GPU kernels in every dtype, at sizes around the edges of vectors and tiles, with offsets and strides. Without a GPU,
//! an OpenCL CPU device runs the kernels: each test restarts itself with `CLAYSTONE_KERNELS=gpu`. The CPU devices' own elementwise
//! kernels are tested as well.

use claystone::device::count_launches;
use claystone::{DType, Device, Interpolation, Tensor};

use crate::common::gpus::{assert_same, gpus, gpus_and_processors, is_gpu, thinned_cases, upload};
use crate::common::values;

/// Sizes around the sizes of vectors (2 to 16 elements) and around work-groups of 256.
const SIZES: [usize; 19] = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 1023, 4099];

/// Returns whole numbers, not negative for unsigned dtypes, and including NaN and infinity for floats.
fn numbers(n: usize, seed: usize, dtype: DType) -> Vec<f64> {
    let least = if matches!(dtype, DType::U8 | DType::U32) { 0 } else { -8 };
    (0..n)
        .map(|i| match ((i * 7 + seed) * 31 % 61, dtype) {
            (x, DType::Bool) => (x % 2) as f64,
            (5, t) if t.is_float() => f64::NAN,
            (6, t) if t.is_float() => f64::NEG_INFINITY,
            (x, _) => (x % 17) as f64 + f64::from(least),
        })
        .collect()
}

/// Returns the sum of two elements, rounded or wrapped to the dtype.
fn added(a: f64, b: f64, dtype: DType) -> f64 {
    match dtype {
        DType::U8 => ((a + b) as i64 as u8).into(),
        DType::U32 => ((a + b) as i64 as u32).into(),
        DType::Bool => f64::from(a + b != 0.0),
        _ => a + b,
    }
}

#[test]
fn additions_are_exact_in_every_dtype_size_and_offset() {
    for device in gpus_and_processors("kernels::additions_are_exact_in_every_dtype_size_and_offset") {
        for dtype in DType::ALL {
            let most = SIZES[SIZES.len() - 1] + 4;
            let (xs, ys) = (numbers(most, 0, dtype), numbers(most, 3, dtype));
            let (x, y) = (upload(&xs, &[most], dtype, device), upload(&ys, &[most], dtype, device));
            for n in SIZES {
                for (at, to) in [(0, 0), (1, 1), (0, 1), (2, 4), (4, 0)] {
                    let what = format!("{n} of {dtype} at {at} and {to}");
                    let (a, b) = (x.narrow(0, at, n).unwrap(), y.narrow(0, to, n).unwrap());
                    let want: Vec<f64> = (0..n).map(|i| added(xs[at + i], ys[to + i], dtype)).collect();
                    assert_same(&values(&a.add(&b).unwrap()), &want, 0.0, &what);
                    // The result is a view; the elements before and after it must not change.
                    let out = upload(&vec![1.0; most], &[most], dtype, device);
                    out.narrow(0, to, n).unwrap().copy_(&a.add(&b).unwrap()).unwrap();
                    out.narrow(0, to, n).unwrap().add_(&b).unwrap();
                    let mut all = vec![1.0; most];
                    (0..n).for_each(|i| all[to + i] = added(want[i], ys[to + i], dtype));
                    assert_same(&values(&out), &all, 0.0, &what);
                }
            }
        }
    }
}

#[test]
fn conversions_between_all_dtypes_match_the_cpu() {
    for device in gpus("kernels::conversions_between_all_dtypes_match_the_cpu") {
        for from in DType::ALL {
            let xs = numbers(37, 1, from);
            let x = upload(&xs, &[37], from, device);
            let host = x.to_device(Device::Cpu).unwrap();
            for to in DType::ALL {
                // Other tests compare the conversions of the CPU device with Rust's `as`.
                let want = values(&host.to_dtype(to).unwrap());
                assert_same(&values(&x.to_dtype(to).unwrap()), &want, 0.0, &format!("{from} to {to}"));
            }
        }
    }
}

#[test]
fn broadcast_rows_columns_and_scalars_are_exact() {
    for device in gpus_and_processors("kernels::broadcast_rows_columns_and_scalars_are_exact") {
        for (rows, columns) in [(1, 8), (3, 1), (3, 3), (5, 4), (7, 8), (2, 33), (9, 64), (3, 257)] {
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::I64, DType::U8] {
                let n = rows * columns;
                let (xs, rs) = (numbers(n, 0, dtype), numbers(n.max(rows), 5, dtype));
                let x = upload(&xs, &[rows, columns], dtype, device);
                let r = upload(&rs, &[rs.len()], dtype, device);
                let what = format!("{rows} x {columns} of {dtype}");
                let row = x.add(&r.narrow(0, 0, columns).unwrap()).unwrap();
                let want: Vec<f64> = (0..n).map(|i| added(xs[i], rs[i % columns], dtype)).collect();
                assert_same(&values(&row), &want, 0.0, &what);
                let column = x.add(&r.narrow(0, 0, rows).unwrap().reshape([rows, 1]).unwrap()).unwrap();
                let want: Vec<f64> = (0..n).map(|i| added(xs[i], rs[i / columns], dtype)).collect();
                assert_same(&values(&column), &want, 0.0, &what);
                let scalar = x.add(&r.narrow(0, n - 1, 1).unwrap()).unwrap();
                let want: Vec<f64> = (0..n).map(|i| added(xs[i], rs[n - 1], dtype)).collect();
                assert_same(&values(&scalar), &want, 0.0, &what);
                // Adds a view of the rows in reverse order to the rows.
                let back = x.flip(0).unwrap().add(&x).unwrap();
                let at = |i: usize| xs[(rows - 1 - i / columns) * columns + i % columns];
                let want: Vec<f64> = (0..n).map(|i| added(at(i), xs[i], dtype)).collect();
                assert_same(&values(&back), &want, 0.0, &what);
            }
        }
    }
}

#[test]
fn transposes_through_tiles_are_exact() {
    for device in gpus_and_processors("kernels::transposes_through_tiles_are_exact") {
        for dtype in [DType::U8, DType::F16, DType::F32, DType::F64] {
            for (rows, columns) in [
                (1, 9),
                (7, 8),
                (8, 8),
                (9, 31),
                (15, 17),
                (16, 16),
                (31, 32),
                (33, 32),
                (63, 64),
                (64, 64),
                (65, 66),
                (129, 70),
                (8, 200),
                (9, 600),
                (16, 300),
                (643, 701), // large enough that GPUs with many compute units use the largest tiles
            ] {
                let n = rows * columns;
                if n > 100_000 && !is_gpu(device) {
                    continue;
                }
                let (xs, bs) = (numbers(3 * n + 1, 0, dtype), numbers(3 * n, 9, dtype));
                let all = upload(&xs, &[3 * n + 1], dtype, device);
                let what = format!("{rows} x {columns} of {dtype}");
                for at in [0, 1] {
                    let x = all.narrow(0, at, 3 * n).unwrap().reshape([3, rows, columns]).unwrap();
                    let turned = x.transpose(1, 2).unwrap();
                    let source = |i: usize| at + i / n * n + i % rows * columns + i % n / rows;
                    let want: Vec<f64> = (0..3 * n).map(|i| xs[source(i)]).collect();
                    assert_same(&values(&turned.contiguous().unwrap()), &want, 0.0, &what);
                    // Further operands that are not transposed: one is broadcast along rows, and one is a broadcast scalar.
                    let b = upload(&bs, &[3, columns, rows], dtype, device);
                    let row = b.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
                    let one = row.narrow(2, 0, 1).unwrap();
                    let sum = Tensor::map(&[&turned, &b, &row, &one], |e| &e[0] + &e[1] + (&e[2] + &e[3])).unwrap();
                    let want: Vec<f64> = (0..3 * n)
                        .map(|i| {
                            let pair = added(xs[source(i)], bs[i], DType::F64);
                            added(pair, added(bs[i % rows], bs[0], DType::F64), dtype)
                        })
                        .collect();
                    assert_same(&values(&sum), &want, 0.0, &what);
                    // Copies a row-major and a transposed tensor into a transposed view.
                    let out = upload(&vec![1.0; 3 * n], &[3, rows, columns], dtype, device);
                    out.transpose(1, 2).unwrap().copy_(&b).unwrap();
                    let back = |i: usize| bs[i / n * n + i % columns * rows + i % n / columns];
                    let want: Vec<f64> = (0..3 * n).map(back).collect();
                    assert_same(&values(&out), &want, 0.0, &what);
                    out.transpose(1, 2).unwrap().copy_(&turned).unwrap();
                    assert_same(&values(&out), &xs[at..at + 3 * n], 0.0, &what);
                    // The result has another dtype, and its three dimensions are permuted.
                    let cube = x.permute(&[2, 0, 1]).unwrap();
                    let source = |i: usize| at + i / rows % 3 * n + i % rows * columns + i / (3 * rows);
                    let want: Vec<f64> = (0..3 * n).map(|i| f64::from(xs[source(i)] > 0.0)).collect();
                    assert_same(&values(&cube.gt_scalar(0.0).unwrap()), &want, 0.0, &what);
                }
            }
        }
    }
}

/// Returns finite whole numbers.
fn finite_numbers(n: usize, seed: usize, dtype: DType) -> Vec<f64> {
    numbers(n, seed, dtype).into_iter().map(|x| if x.is_finite() { x } else { 1.0 }).collect()
}

#[test]
fn reductions_of_rows_and_tensors_match_formulas() {
    for device in gpus("kernels::reductions_of_rows_and_tensors_match_formulas") {
        use DType::*;
        for dtype in thinned_cases(&[F32, F64, BF16, F16, I64, I32, I16, I8, U8, U32, Bool], 3, device) {
            let shapes =
                [(5, 7), (1, 1), (3, 2), (300, 8), (3, 9), (2, 1023), (3, 64), (2, 31), (1, 70_001), (2, 1024)];
            for (rows, n) in thinned_cases(&shapes, 5, device) {
                let all = rows * n + 1;
                let xs = finite_numbers(all, 2, dtype);
                let t = upload(&xs, &[all], dtype, device);
                for at in [0, 1] {
                    let what = format!("{rows} x {n} of {dtype} at {at}");
                    let x = t.narrow(0, at, rows * n).unwrap().reshape([rows, n]).unwrap();
                    let row = |r: usize| &xs[at + r * n..at + (r + 1) * n];
                    let each = |f: &dyn Fn(&[f64]) -> f64| (0..rows).map(|r| f(row(r))).collect::<Vec<_>>();
                    let sum = |v: &[f64]| v.iter().sum::<f64>();
                    let loose = if dtype.size() == 2 && dtype.is_float() { 1e-2 } else { 1e-6 };
                    assert_same(&values(&x.sum(1, false).unwrap()), &each(&sum), loose, &what);
                    let total = sum(&xs[at..at + rows * n]);
                    assert_same(&values(&x.sum((), false).unwrap()), &[total], loose, &what);
                    let largest = |v: &[f64]| v.iter().copied().fold(f64::MIN, f64::max);
                    assert_same(&values(&x.max(1, false).unwrap()), &each(&largest), 0.0, &what);
                    let count = |v: &[f64]| v.iter().filter(|x| **x != 0.0).count() as f64;
                    assert_same(&values(&x.count_nonzero(1, false).unwrap()), &each(&count), 0.0, &what);
                    let columns: Vec<f64> = (0..n).map(|c| (0..rows).map(|r| row(r)[c]).sum()).collect();
                    assert_same(&values(&x.sum(0, false).unwrap()), &columns, loose, &what);
                }
            }
        }
        // The maximum is NaN wherever the NaN is.
        for place in [0, 3, 4, 1000, 4095, 4096] {
            let mut xs = vec![1.0; 4097];
            xs[place] = f64::NAN;
            let x = upload(&xs, &[4097], DType::F32, device);
            assert!(x.max((), false).unwrap().item::<f32>().unwrap().is_nan(), "at {place}");
        }
    }
}

#[test]
fn softmax_of_short_and_long_rows_matches_formulas() {
    for device in gpus("kernels::softmax_of_short_and_long_rows_matches_formulas") {
        for dtype in thinned_cases(&[DType::F32, DType::F64, DType::F16], 2, device) {
            let lengths = [1, 2, 3, 4, 8, 9, 31, 33, 64, 129, 1000, 1024, 16_640, 4099, 16_384];
            for n in thinned_cases(&lengths, 3, device) {
                for (rows, at) in [(3, 0), (2, 1)] {
                    let what = format!("{rows} x {n} of {dtype} at {at}");
                    let xs: Vec<f64> = (0..rows * n + at).map(|i| ((i * 7) % 23) as f64 / 8.0 - 1.0).collect();
                    let gs: Vec<f64> = (0..rows * n + at).map(|i| ((i * 5) % 19) as f64 / 4.0 - 2.0).collect();
                    let view = |t: &Tensor| t.narrow(0, at, rows * n).unwrap().reshape([rows, n]).unwrap();
                    let x = view(&upload(&xs, &[xs.len()], dtype, device)).requires_grad_(true).unwrap();
                    let g = view(&upload(&gs, &[gs.len()], dtype, device));
                    let eps = match dtype {
                        DType::BF16 => 2e-2,
                        DType::F16 => 3e-3,
                        DType::F32 => 1e-5,
                        _ => 1e-12,
                    };
                    let (mut soft, mut log, mut whole, mut d_soft, mut d_log) =
                        (vec![], vec![], vec![], vec![], vec![]);
                    for r in 0..rows {
                        let (row, grad) = (&xs[at + r * n..][..n], &gs[at + r * n..][..n]);
                        let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                        let p: Vec<f64> = row.iter().map(|x| (x - lse).exp()).collect();
                        let dot: f64 = p.iter().zip(grad).map(|(p, g)| p * g).sum();
                        let total: f64 = grad.iter().sum();
                        whole.push(lse);
                        log.extend(row.iter().map(|x| x - lse));
                        d_soft.extend(p.iter().zip(grad).map(|(p, g)| p * (g - dot)));
                        d_log.extend(p.iter().zip(grad).map(|(p, g)| g - p * total));
                        soft.extend(p);
                    }
                    assert_same(&values(&x.detach().logsumexp(1, false).unwrap()), &whole, eps, &what);
                    let gradient = |y: Tensor| {
                        y.mul(&g).unwrap().sum((), false).unwrap().backward().unwrap();
                        let gradient = values(&x.grad().unwrap());
                        x.zero_grad();
                        gradient
                    };
                    let y = x.softmax(1).unwrap();
                    assert_same(&values(&y.detach()), &soft, eps, &what);
                    assert_same(&gradient(y), &d_soft, 4.0 * eps, &what);
                    let y = x.log_softmax(1).unwrap();
                    assert_same(&values(&y.detach()), &log, eps, &what);
                    assert_same(&gradient(y), &d_log, 8.0 * eps, &what);
                }
            }
        }
    }
}

/// Interpolation of rows whose length is or is not a multiple of a vector, and of views. Nearest modes match the CPU's results
/// exactly.
#[test]
fn interpolation_matches_the_cpu() {
    let linear = |align_corners| Interpolation::Linear { align_corners };
    let modes = [Interpolation::Nearest, Interpolation::NearestExact, linear(false), linear(true)];
    for device in gpus("kernels::interpolation_matches_the_cpu") {
        for (dtype, ulp) in [(DType::F32, 1.2e-7), (DType::F16, 9.8e-4), (DType::BF16, 7.8e-3)] {
            let x = Tensor::rand([2, 3, 9, 14], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            for (sizes, how) in
                [[18, 24], [18, 28], [5, 8], [9, 13], [40, 16]].into_iter().flat_map(|s| modes.map(|m| (s, m)))
            {
                for view in [|x: &Tensor| x.narrow(3, 1, 12).unwrap(), |x: &Tensor| x.transpose(2, 3).unwrap()] {
                    let want = view(&x).interpolate(&sizes, how).unwrap();
                    let got = view(&x.to_device(device).unwrap()).interpolate(&sizes, how).unwrap();
                    // The linear weights need a division, for which OpenCL allows GPUs an error of 2.5 ulp.
                    let exact = !is_gpu(device) || matches!(how, Interpolation::Nearest | Interpolation::NearestExact);
                    let tolerance = if exact { 0.0 } else { 4.0 * ulp };
                    assert_same(&values(&got), &values(&want), tolerance, &format!("{sizes:?} {how:?} of {dtype}"));
                }
            }
        }
    }
}

/// Shapes in which vectors cross the ends of rows, matrices and tensors, for every element size. Each call takes one launch.
#[test]
fn tril_and_triu_match_the_cpu() {
    for device in gpus("kernels::tril_and_triu_match_the_cpu") {
        for dtype in [DType::F32, DType::F16, DType::U8, DType::I64] {
            for (shape, at) in
                [([1, 1, 1], 0), ([3, 5, 3], 1), ([2, 7, 31], 0), ([2, 16, 32], 16), ([3, 65, 5], 3), ([1, 2, 700], 4)]
            {
                let n: usize = shape.iter().product();
                let all: Vec<f64> = (0..n + at).map(|i| (1 + i % 250) as f64).collect();
                let x =
                    |device| upload(&all, &[n + at], dtype, device).narrow(0, at, n).unwrap().reshape(shape).unwrap();
                let (on_host, on_device) = (x(Device::Cpu), x(device));
                for k in [-600, -3, -1, 0, 2, 4, 600, isize::MIN, isize::MAX] {
                    let what = format!("{k} of {shape:?} {dtype}");
                    let (lower, launches) = count_launches(|| on_device.tril(k).unwrap());
                    assert_eq!(launches, 1, "{what}");
                    assert_same(&values(&lower), &values(&on_host.tril(k).unwrap()), 0.0, &what);
                    assert_same(&values(&on_device.triu(k).unwrap()), &values(&on_host.triu(k).unwrap()), 0.0, &what);
                }
            }
        }
    }
}

/// Adjacent elements take their random words from one block of the generator. The bits equal the CPU's, also at the ends of vectors
/// and in views.
#[test]
fn random_numbers_match_the_cpu() {
    for device in gpus("kernels::random_numbers_match_the_cpu") {
        for dtype in DType::ALL.into_iter().filter(|t| t.is_float() && *t != DType::F64) {
            for (n, at) in SIZES.into_iter().flat_map(|n| [(n, 0), (n, 3), (n, 8)]) {
                let drawn = |device| {
                    claystone::manual_seed(7);
                    let out = Tensor::zeros([n + at], (dtype, device)).unwrap();
                    let part = out.narrow(0, at, n).unwrap();
                    part.normal_(0.0, 1.0).unwrap();
                    [out.to_dtype(DType::F32).unwrap(), Tensor::rand([n], (dtype, device)).unwrap()].map(|t| values(&t))
                };
                assert_eq!(drawn(device), drawn(Device::Cpu), "{n} of {dtype} at {at}");
            }
        }
    }
}
